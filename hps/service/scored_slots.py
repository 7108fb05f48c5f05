"""Slots of requests for scores, as the owner reads them: nothing that a front has written is believed."""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidInputError
from hps.regions.layout import Memory

_KINDS: Final = frozenset({"<f4", "<f2", "<f8", "<i8", "<i4", "|b1"})
_CACHED: Final = 1024
_MOST_RANK: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class OutputPlace:
    """Where an output goes. `place` is the memory of the slot."""

    name: str
    shape: tuple[int, ...]
    place: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Described:
    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    at: int
    size: int


def read_scored(memory: Memory, slot: int, start: int, size: int) -> tuple[int, dict[str, npt.NDArray[Any]], list[OutputPlace]]:
    """Read a request for scores from a slot; see `fronts/scores.py`.

    Args:
        start, size: of its description.

    Returns:
        The deadline; copies of its arrays, by name; and where its outputs go.

    Raises:
        InvalidInputError: the description is none.
    """
    if size < 8:
        raise InvalidInputError("reading a request for scores: it has no description")
    due = int.from_bytes(memory.view[start : start + 8], "little", signed=True)
    text = bytes(memory.view[start + 8 : start + size]).partition(b"\0")[0]
    inputs, outputs = _description(text)
    for one in (*inputs, *outputs):
        if slot + one.at + one.size > memory.size:
            raise InvalidInputError("reading a request for scores: an array does not fit")
    arrays = {
        one.name: np.ndarray(one.shape, one.dtype, memory.view, slot + one.at).copy()  # a front could change it meanwhile
        for one in inputs
    }
    places = [OutputPlace(one.name, one.shape, np.ndarray(one.shape, one.dtype, memory.view, slot + one.at)) for one in outputs]
    return max(due, 0), arrays, places


@lru_cache(_CACHED)
def _description(text: bytes) -> tuple[tuple[_Described, ...], tuple[_Described, ...]]:
    try:
        found = json.loads(text)
        inputs, outputs = (tuple(_described(*one) for one in found[what]) for what in ("inputs", "outputs"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"reading a request for scores: its description is wrong: {error!r}") from error
    return inputs, outputs


def _described(name: str, dtype: str, shape: list[int], at: int) -> _Described:
    if (
        type(name) is not str
        or dtype not in _KINDS
        or type(at) is not int
        or at < 0
        or at % 8
        or not 0 < len(shape) <= _MOST_RANK
    ):
        raise ValueError(name)
    if not all(type(width) is int and 0 <= width <= 1 << 40 for width in shape):
        raise ValueError(shape)
    kind = np.dtype(dtype)
    return _Described(name, kind, tuple(shape), at, prod(shape) * kind.itemsize)
