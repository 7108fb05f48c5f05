"""What decoding int8 rows gives, against FBGEMM, for as many rows as a large table has; and longer properties."""

import numpy as np

from tests.ring1.ground.test_rows_properties import _alike


def test_ten_million_int8_rows_decode_as_fbgemm_does() -> None:
    random = np.random.default_rng(5)
    for _ in range(100):
        _alike((random.standard_normal((100_000, 16), np.float32) * 10.0 ** random.integers(-2, 4, (100_000, 1))).astype("f4"))
