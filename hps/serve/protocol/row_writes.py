"""Decodes online writes over HTTP: rows as JSON, for curl, or as binary tensors of the Open Inference Protocol.

JSON is `{"keys": [17, 42], "vectors": [[...], [...]]}`. Binary data have a JSON part with the inputs `KEYS` INT64 [n] or [1, n]
and `VECTORS` FP32 [n, dim], like an inference. Without vectors, the keys are deleted. The complete body is checked before
anything is written.
"""

from typing import Any

import numpy as np

from hps.errors import InvalidInputError, TooManyKeysError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.protocol.open_inference_header import CACHED_BYTES, InputTensor, read_inputs, reading_input, remembered_bytes
from hps.serve.protocol.request_checks import flattened, float32_array, int64_array, parse_object
from hps.types import FloatArray, KeyArray, TableSpec

MAX_JSON_BYTES = 8 << 20
"""Maximum length of a JSON body: parsing one blocks the interpreter. Bulk writes use binary tensors."""


def decode_rows(
    body: bytes | bytearray, header_length: int | None, table: TableSpec, max_rows: int
) -> tuple[KeyArray, FloatArray]:
    """Decode the rows of a write.

    Args:
        header_length: bytes of the JSON part; None if the body is only JSON.

    Returns:
        The keys (n,) int64 and vectors (n, dim) float32, aligned copies. Binary vectors may hold any float32.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is invalid; the message says where, and what was expected.
        TooManyKeysError: it has more than `max_rows`, or is too long for JSON.
    """
    if header_length is None:
        request = _json_object(body, {"keys", "vectors"})
        keys = int64_array(request["keys"], "reading 'keys'")
        _check_count(keys.size, max_rows)
        return keys, _json_vectors(request["vectors"], keys.size, table)
    inputs = _binary_inputs(body, header_length, ("KEYS", "VECTORS"))
    keys, tensor = _binary_keys(body, header_length, inputs["KEYS"], max_rows), inputs["VECTORS"]
    if tensor.shape != [keys.size, table.dim]:
        raise InvalidInputError(
            f"{reading_input('VECTORS')}: got shape {tensor.shape}, expected {[keys.size, table.dim]}: a row for each of KEYS, "
            f"{table.dim} floats in table {table.table_name!r}"
        )
    vectors = np.frombuffer(body, tensor.dtype, tensor.count, header_length + tensor.start).astype(np.float32)
    return keys, vectors.reshape(keys.size, table.dim)


def decode_keys(body: bytes | bytearray, header_length: int | None, max_rows: int) -> KeyArray:
    """Decode the keys of a deletion; as `decode_rows`."""
    if header_length is None:
        keys = int64_array(_json_object(body, {"keys"})["keys"], "reading 'keys'")
        _check_count(keys.size, max_rows)
        return keys
    return _binary_keys(body, header_length, _binary_inputs(body, header_length, ("KEYS",))["KEYS"], max_rows)


def check_finite(keys: KeyArray, vectors: FloatArray) -> None:
    """Raise InvalidInputError if a vector has NaN or an infinity."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise InvalidInputError(
            f"reading vectors: row {row} (key {keys[row]}) has NaN or an infinity, expected finite numbers (service.refuse_nan)"
        )


def _check_count(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise TooManyKeysError(
            f"reading the request: got {rows} rows, expected at most {max_rows} (service.max_rows_per_write); send fewer"
        )


def _json_object(body: bytes | bytearray, members: set[str]) -> dict[str, Any]:
    if len(body) > MAX_JSON_BYTES:
        raise TooManyKeysError(
            f"reading the request: got {len(body)} bytes of JSON, expected at most {MAX_JSON_BYTES}; send binary tensors"
        )
    request = parse_object(body)
    if request.keys() != members:
        expected = " and ".join(sorted(members))
        raise InvalidInputError(f"reading the request: got the members {str(sorted(request))[:200]}, expected {expected}")
    return request


def _json_vectors(values: Any, count: int, table: TableSpec) -> FloatArray:
    what, dim = "reading 'vectors'", table.dim
    flat, offsets = flattened(values, what, "one for each key")
    if len(values) != count or (np.diff(offsets) != dim).any():
        widths = sorted(set(map(len, values)))
        raise InvalidInputError(
            f"{what}: got {len(values)} vectors of {str(widths)[:80]} numbers, expected {count}, one for each key, of {dim} "
            f"numbers each, as table {table.table_name!r} has them"
        )
    return float32_array(flat, what, dim).reshape(count, dim)


def _read_header(text: bytes, names: tuple[str, ...]) -> tuple[dict[str, InputTensor], int]:
    """Read the inputs of a JSON part, which must be binary. Return them, and the bytes of binary data."""
    inputs, size = read_inputs(parse_object(text).get("inputs"), floats={"VECTORS"})
    if tuple(sorted(inputs)) != names:
        raise InvalidInputError(f"reading 'inputs': got {str(list(inputs))[:200]}, expected {' and '.join(names)}")
    for tensor in inputs.values():
        if tensor.start < 0:
            raise InvalidInputError(
                f"{reading_input(tensor.name)}: got 'data', expected binary data; JSON is {{\"keys\": ...}} without inputs"
            )
    return inputs, size


_cached_inputs = BoundedCache(_read_header, lambda read, text, names: remembered_bytes(text, len(read[0])))


def _binary_inputs(body: bytes | bytearray, header_length: int, names: tuple[str, ...]) -> dict[str, InputTensor]:
    text = bytes(body[:header_length])
    inputs, size = (_cached_inputs if header_length <= CACHED_BYTES else _read_header)(text, names)
    if (got := len(body) - header_length) != size:
        raise InvalidInputError(f"reading the request: got {got} bytes of binary data, expected {size}")
    return inputs


def _binary_keys(body: bytes | bytearray, header_length: int, tensor: InputTensor, max_rows: int) -> KeyArray:
    _check_count(tensor.count, max_rows)
    if tensor.dtype.itemsize != 8 or len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
        raise InvalidInputError(
            f"{reading_input('KEYS')}: got {tensor.dtype} of shape {tensor.shape}, expected INT64 of shape [n] or [1, n]"
        )
    return np.frombuffer(body, tensor.dtype, tensor.count, header_length + tensor.start).astype(np.int64)
