"""Bodies of online writes: good ones are decoded; each fault is an error that says what is wrong, before a row is written."""

import json
from typing import Any

import numpy as np
import pytest

from hps.errors import HPSError, InvalidDtypeError, InvalidInputError, TooManyKeysError
from hps.serve.protocol.row_writes import MAX_JSON_BYTES, check_finite, decode_keys, decode_rows
from hps.types import TableSpec
from tests.servers.binary_tensors import with_tensors

DIM, MOST = 8, 100
TABLE = TableSpec("shop", "item", DIM, 0.0, 1000)
KEYS = np.arange(3)
VECTORS = np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM)


def binary(keys: Any, vectors: Any = None, padding: str = "") -> tuple[bytes, int | None]:
    """A body with binary tensors, and the bytes of its JSON part."""
    arrays = {"KEYS": np.asarray(keys, np.int64)}
    arrays |= {} if vectors is None else {"VECTORS": np.asarray(vectors, np.float32)}
    return with_tensors(arrays, binary=True, padding=padding)


def as_json(content: Any) -> tuple[bytes, None]:
    return (content if isinstance(content, bytes) else json.dumps(content).encode()), None


def test_rows_are_decoded_into_aligned_copies() -> None:
    plain = as_json({"keys": KEYS.tolist(), "vectors": VECTORS.tolist()})
    bodies = [binary(KEYS, VECTORS, " " * spaces) for spaces in (0, 1, 2, 3, 3000)]  # binary data may begin anywhere
    for body in (plain, binary(KEYS[None], VECTORS), *bodies):
        keys, vectors = decode_rows(*body, TABLE, MOST)
        np.testing.assert_array_equal(keys, KEYS)
        np.testing.assert_array_equal(vectors, VECTORS)
        assert (keys.flags.aligned, vectors.flags.aligned) == (True, True)
    assert decode_rows(*binary(np.arange(MOST), np.zeros((MOST, DIM))), TABLE, MOST)[0].size == MOST


def test_keys_to_delete_are_decoded() -> None:
    for body in (as_json({"keys": KEYS.tolist()}), binary(KEYS)):
        np.testing.assert_array_equal(decode_keys(*body, 3), KEYS)
        with pytest.raises(TooManyKeysError, match="got 3 rows, expected at most 2"):
            decode_keys(*body, 2)


ROW = [0] * DIM
FAULTS: dict[str, tuple[type[HPSError], tuple[bytes, int | None], str]] = {
    "nothing": (InvalidInputError, as_json(b""), "not JSON"),
    "not an object": (InvalidInputError, as_json(b"[1]"), "expected a JSON object"),
    "no vectors": (InvalidInputError, as_json({"keys": [1]}), "expected keys and vectors"),
    "another member": (InvalidInputError, as_json({"keys": [], "vectors": [], "x": 1}), "expected keys and vectors"),
    "a member twice": (InvalidInputError, as_json(b'{"keys": [1], "keys": [2], "vectors": [[1]]}'), "given twice"),
    "keys as floats": (InvalidDtypeError, as_json({"keys": [1.0], "vectors": [ROW]}), "a float"),
    "keys beyond 64 bits": (InvalidInputError, as_json({"keys": [2**63], "vectors": [ROW]}), "64-bit"),
    "fewer vectors": (InvalidInputError, as_json({"keys": [1, 2], "vectors": [ROW]}), "got 1 vectors"),
    "one vector too narrow": (InvalidInputError, as_json({"keys": [1, 2], "vectors": [ROW, ROW[1:]]}), r"\[7, 8\]"),
    "a string": (InvalidDtypeError, as_json({"keys": [1, 2], "vectors": [ROW, [*ROW[1:], "1"]]}), "a string in row 1"),
    "a boolean": (InvalidDtypeError, as_json({"keys": [1], "vectors": [[True] * DIM]}), "a boolean in row 0"),
    "null": (InvalidDtypeError, as_json({"keys": [1], "vectors": [[None] * DIM]}), "null in row 0"),
    "NaN in JSON": (InvalidInputError, as_json(b'{"keys": [1], "vectors": [[NaN]]}'), "not JSON"),
    "more than float32": (InvalidInputError, as_json({"keys": [1, 2], "vectors": [ROW, [1e39] * DIM]}), "row 1 does not fit"),
    "vectors that are no list": (InvalidInputError, as_json({"keys": [1], "vectors": 5}), "list of lists"),
    "vectors that are no lists": (InvalidInputError, as_json({"keys": [1], "vectors": [5]}), "list of lists"),
    "too wide": (InvalidInputError, binary(KEYS, np.zeros((3, DIM + 1))), r"got shape \[3, 9\]"),
    "flat": (InvalidInputError, binary(KEYS, np.zeros(3 * DIM)), r"expected \[3, 8\]"),
    "more keys than vectors": (InvalidInputError, binary(KEYS, VECTORS[:2]), r"got shape \[2, 8\]"),
    "cut short": (InvalidInputError, (binary(KEYS, VECTORS)[0][:-1], binary(KEYS, VECTORS)[1]), "got 119"),
    "too many rows": (TooManyKeysError, binary(np.arange(MOST + 1), np.zeros((MOST + 1, DIM))), "expected at most 100"),
    "too much JSON": (TooManyKeysError, as_json(b"[" * (MAX_JSON_BYTES + 1)), "send binary tensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_says_what_is_wrong(fault: str) -> None:
    kind, body, text = FAULTS[fault]
    with pytest.raises(kind, match=text):
        decode_rows(*body, TABLE, MOST)


def test_the_first_row_that_is_not_finite_is_named() -> None:
    check_finite(KEYS + 5, VECTORS)
    for value, row in ((np.nan, 2), (-np.inf, 0), (np.inf, 1)):
        vectors = VECTORS.copy()
        vectors[row:, 3] = value
        with pytest.raises(InvalidInputError, match=rf"row {row} \(key {row + 5}\)"):
            check_finite(KEYS + 5, vectors)
