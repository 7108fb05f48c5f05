"""The judge of numbered updates, on whom the tests of visibility rely, names what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tables.numbered_updates import DEFAULT, NumberedRows

ROWS = NumberedRows(key_bits=12, dim=8)


@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
def test_the_judge_names_what_is_wrong(row_dtype: str) -> None:
    """Change 7 deletes, so after it a row may lack; change 9 has been acknowledged, and 12 has begun."""
    keys, floor, ceiling = np.full(8, 5), np.full(8, 9), np.full(8, 12)
    numbered = replace(ROWS, row_dtype=row_dtype)
    published = numbered.vectors(np.array([5, 5, 5, 6, 5, 5, 5, 5]), np.array([9, 12, 8, 10, 13, 7, 10, 10]))
    vectors = numbered.stored(published)
    vectors[6, 3], vectors[7] = vectors[0, 3], DEFAULT
    wrong = {what: np.flatnonzero(rows).tolist() for what, rows in numbered.judge(keys, vectors, floor, ceiling).items()}
    assert wrong == {"stale": [2, 5], "foreign": [3], "invented": [4], "deleted": [5], "mixture": [6], "lost": [7]}
    for first, last in ((7, 7), (5, 8), (9, 15), (15, 20)):
        assert not numbered.judge(keys[:1], vectors[7:], np.array([first]), np.array([last])), "it may have been deleted"
    if row_dtype == "int8":
        assert numbered.judge(keys[:3], published[:3], np.zeros(3, np.int64)).keys() == {"mixture"}, "no row stands for these"
