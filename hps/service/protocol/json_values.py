"""JSON out of requests: objects, and integers, strict about what is an integer."""

from typing import Any

import numpy as np
import orjson

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.types import KeyArray

_KINDS = {bool: "a boolean", float: "a float", str: "a string", list: "a list", dict: "an object", type(None): "null"}


def parse_object(text: bytes | memoryview) -> dict[str, Any]:
    """Parse JSON whose value must be an object.

    Raises:
        InvalidInputError: it is not.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"reading the request: it is not JSON: {error}") from None
    if type(value) is not dict:
        raise InvalidInputError(f"reading the request: got {kind_of(value)}, wanted a JSON object")
    return value


def int64_array(values: Any, what: str) -> KeyArray:
    """Turn a JSON list into int64. Nothing is rounded, truncated or parsed: a float, bool or string is an error.

    Args:
        values: a list, as the JSON parser made it.
        what: names it in errors.

    Raises:
        InvalidDtypeError: it is not a list, or an element is not an integer of 64 bits.
    """
    if type(values) is not list:
        raise InvalidDtypeError(f"{what}: got {kind_of(values)}, wanted a list of integers")
    # numpy would take true, 1.5 and "1" for an integer
    if not {int}.issuperset(map(type, values)):
        place, value = next((i, value) for i, value in enumerate(values) if type(value) is not int)
        raise InvalidDtypeError(f"{what}: got {kind_of(value)} at position {place}, wanted integers of 64 bits")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        place, value = next((i, value) for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise InvalidDtypeError(f"{what}: got {value} at position {place}, wanted signed integers of 64 bits") from None


def kind_of(value: Any) -> str:
    """What an error calls a JSON value: its kind, with the value where that is short."""
    kind = _KINDS.get(type(value), "an integer")
    return f"{kind} ({value!r})" if isinstance(value, int | float) and not isinstance(value, bool) else kind
