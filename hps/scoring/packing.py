"""Requests for scores in memory that others share: how they are described, and how batches of them are gathered.

A description is JSON: `{"inputs": [[name, dtype, shape, offset], ...], "outputs": [...], "timeout_us": n}`, offsets from the request. It
is the same for all requests that look alike, so it is read once; then a batch costs one copy of each input of each request, made by one
call without the interpreter lock.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, types, void

from hps.errors import InvalidInputError
from hps.ground.numba_kernels import compile_kernels, kernel
from hps.scoring.features import Feature, ScoreRequest, read_request
from hps.types import IndexArray

_KINDS: Final = frozenset({"<f4", "<f2", "<f8", "<i8", "<i4", "|b1"})
_MOST_RANK: Final = 8
_ALIGNED: Final = 64
_I64: Any = types.int64
_memcpy: Any = types.ExternalFunction("memcpy", _I64(_I64, _I64, _I64))
_WORDS: Any = int64[::1]


@kernel(void, _WORDS, _WORDS, _WORDS)
def gather(sources: IndexArray, sizes: IndexArray, targets: IndexArray) -> None:
    """Copy `sizes` bytes from each address of `sources` to that of `targets`."""
    for place in range(sources.size):
        if sizes[place] > 0:
            _memcpy(targets[place], sources[place], sizes[place])


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a description. *Immutable.* `at` is its offset from the request, `size` its bytes."""

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    at: int
    size: int

    def array(self, memory: Any, start: int) -> npt.NDArray[Any]:
        """Return the tensor of the request that begins at `start` of a memory."""
        return np.ndarray(self.shape, self.dtype, memory, start + self.at)


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """What requests that look alike have in common. *Immutable.*

    Attributes:
        end: bytes that such a request takes at least.
        samples: number of samples; 0: only the values say it.
        keys: by place of the feature, number of keys.
        columns: of each feature but the request index, its dtype and the shape of a row.
        offsets, rows: of the same, where the values are and how many rows; None unless `gather` can read them: it cannot read bags of
            any size.
    """

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    timeout_us: int
    end: int
    samples: int
    keys: tuple[int, ...]
    columns: tuple[tuple["np.dtype[Any]", tuple[int, ...]], ...]
    offsets: IndexArray | None
    rows: IndexArray | None


def describe(inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]], timeout_us: int) -> bytes:
    """Write a description; an entry is name, dtype, shape and offset."""
    return json.dumps({"inputs": inputs, "outputs": outputs, "timeout_us": timeout_us}, separators=(",", ":")).encode()


def read_description(text: bytes, features: Sequence[Feature], max_samples: int, model: str) -> Description:
    """Read a description of requests for a network, which may come from anybody.

    Raises:
        InvalidInputError: it is none, or other inputs than the network's. TooManyKeysError: too many keys or samples.
    """
    try:
        found = json.loads(text)
        inputs, outputs = (tuple(_described(*one) for one in found[what]) for what in ("inputs", "outputs"))
        timeout_us = int(found["timeout_us"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidInputError(f"reading a request for scores: its description is wrong: {error!r}") from error
    end = max(one.at + one.size for one in (*inputs, *outputs)) if inputs or outputs else 0
    by_name = {one.name: one for one in inputs}
    if any(one.name not in by_name for one in features if not one.index) or len(by_name) != len(features) - sum(
        one.index for one in features
    ):
        return Description(
            inputs, outputs, timeout_us, end, 0, (), (), None, None
        )  # whose values say what is wrong, or are bags
    blank = {name: np.broadcast_to(np.zeros((), one.dtype), one.shape) for name, one in by_name.items()}
    request = read_request(features, blank, max_samples, model)
    asked = [(one, by_name[one.name], given) for one, given in zip(features, request.given, strict=True) if not one.index]
    return Description(
        inputs,
        outputs,
        timeout_us,
        end,
        request.samples,
        request.keys,
        tuple((tensor.dtype, tensor.shape[1:] if one.is_lookup else one.shape) for one, tensor, _ in asked),
        np.array([tensor.at for _, tensor, _ in asked], np.int64),
        np.array([given.rows for *_, given in asked], np.int64),
    )


def _described(name: str, dtype: str, shape: list[int], at: int) -> Described:
    if type(name) is not str or dtype not in _KINDS or type(at) is not int or at < 0 or not 0 < len(shape) <= _MOST_RANK:
        raise ValueError(name)
    if not all(type(width) is int and 0 <= width <= 1 << 40 for width in shape):
        raise ValueError(shape)
    kind = np.dtype(dtype)
    return Described(name, kind, tuple(shape), at, prod(shape) * kind.itemsize)


@dataclass(slots=True, eq=False)
class PackedRequest:
    """A request for scores in shared memory. *One request*: its values may change until a batch has gathered them.

    Attributes:
        memory: that it is in.
        start: where in the memory it begins.
        address: of its begin.
    """

    description: Description
    memory: Any
    start: int
    address: int

    @property
    def samples(self) -> int:
        return self.description.samples

    @property
    def keys(self) -> Sequence[int]:
        """Number of keys, by place of the feature."""
        return self.description.keys

    def unpacked(self, features: Sequence[Feature], max_samples: int, model: str) -> ScoreRequest:
        """Copy its values, and check them.

        Raises:
            InvalidInputError, TooManyKeysError: as of `read_request`.
        """
        arrays = {one.name: one.array(self.memory, self.start).copy() for one in self.description.inputs}
        return read_request(features, arrays, max_samples, model)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The inputs of a batch in one piece of memory. *Immutable*; the next batch overwrites it.

    Attributes:
        values: by place of the feature; keys are (rows, hotness), or (rows,) for one key each.
        starts: where they are in the memory, in bytes.
        rows: by place of the feature, the rows of each request.
    """

    memory: npt.NDArray[np.uint8]
    values: dict[int, npt.NDArray[Any]]
    starts: dict[int, int]
    rows: dict[int, IndexArray]


class Gathering:
    """Where the inputs of batches go: one piece of memory, which grows. *One thread at a time.*

    Args:
        allocate: makes memory of so many bytes, as uint8.
    """

    def __init__(self, features: Sequence[Feature], allocate: Callable[[int], npt.NDArray[np.uint8]]) -> None:
        self._features = features
        self._places = [place for place, one in enumerate(features) if not one.index]
        self._allocate = allocate
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        compile_kernels(gather)

    def gather(self, requests: Sequence[PackedRequest]) -> Gathered | None:
        """Gather the inputs of requests; None if they differ in more than the number of their samples."""
        first = requests[0].description
        if first.offsets is None or any(
            one.description is not first and not _alike(one.description, first) for one in requests
        ):
            return None
        offsets = np.stack([one.description.offsets for one in requests])  # type: ignore[misc]  # all have some
        rows = np.stack([one.description.rows for one in requests])  # type: ignore[misc]
        widths = np.array([prod(shape) * dtype.itemsize for dtype, shape in first.columns], np.int64)
        sizes = rows * widths
        totals = sizes.sum(axis=0)
        starts = np.zeros(len(widths) + 1, np.int64)
        np.cumsum(-(-totals // _ALIGNED) * _ALIGNED, out=starts[1:])
        if self._memory.size < starts[-1]:
            self._memory = self._allocate(2 * int(starts[-1]))
        before = np.zeros_like(sizes)
        np.cumsum(sizes[:-1], axis=0, out=before[1:])
        sources = offsets + np.array([one.address for one in requests], np.int64)[:, None]
        targets = before + (starts[:-1] + self._memory.ctypes.data)
        gather(sources.reshape(-1), sizes.reshape(-1), targets.reshape(-1))
        counts, begins = rows.sum(axis=0).tolist(), starts.tolist()
        values, places = {}, {}
        for number, place in enumerate(self._places):
            dtype, shape = first.columns[number]
            values[place] = np.ndarray((counts[number], *shape), dtype, self._memory, begins[number])
            places[place] = begins[number]
        by_place = {place: rows[:, number] for number, place in enumerate(self._places)}
        return Gathered(self._memory[: begins[-1]], values, places, by_place)


def _alike(one: Description, other: Description) -> bool:
    """Whether requests can be gathered together."""
    return one.offsets is not None and one.columns == other.columns
