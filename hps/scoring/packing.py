"""Requests for scores in shared memory: how they are described, and how batches of them are gathered.

A description is JSON: `{"inputs": [[name, dtype, shape, offset], ...], "outputs": [...], "timeout_us": n}`, with offsets from
the first tensor. Requests of the same form share a description, which is parsed once. A batch then costs one copy of each input
of each request, in one call without the interpreter lock.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, types, void

from hps.configuration.networks import DTYPES
from hps.errors import InvalidInputError
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.scoring.features import InputValues, ScoreInputs, read_request
from hps.scoring.signature import Signature
from hps.types import IndexArray

_KINDS: Final = frozenset({np.dtype(name).str for name in DTYPES})
_MOST_RANK: Final = 8
_MOST_BYTES: Final = 1 << 40
_BLANK: Final = bytes(8)  # every value of an array without strides
_I64: Any = types.int64
_memcpy: Any = types.ExternalFunction("memcpy", _I64(_I64, _I64, _I64))
_WORDS: Any = int64[::1]


@kernel(void, read_only(_WORDS), read_only(_WORDS), read_only(_WORDS))
def gather(sources: IndexArray, sizes: IndexArray, targets: IndexArray) -> None:
    """Copy `sizes` bytes from each address of `sources` to that of `targets`."""
    for place in range(sources.size):
        if sizes[place] > 0:
            _memcpy(targets[place], sources[place], sizes[place])


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a description. *Immutable.* `at` is its offset from the first tensor, `size` its bytes."""

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    at: int
    size: int

    def array(self, memory: Any, start: int) -> npt.NDArray[Any]:
        """Return the tensor of the request whose tensors start at `start` of a memory."""
        return np.ndarray(self.shape, self.dtype, memory, start + self.at)


@dataclass(frozen=True, slots=True, eq=False)
class RequestLayout:
    """The layout of a request's inputs for `gather`, without the request index. *Immutable.*

    Attributes:
        columns: dtype, and shape of a row.
        sizes: elements of a row; of a lookup, keys.
        widths: bytes of a row.
        rows: number of rows.
    """

    columns: tuple[tuple["np.dtype[Any]", tuple[int, ...]], ...]
    sizes: tuple[int, ...]
    widths: IndexArray
    rows: IndexArray


def layout_of(given: Sequence[InputValues]) -> RequestLayout:
    columns = tuple([(part.values.dtype, part.values.shape[1:]) for part in given])
    sizes = tuple([prod(shape) for _, shape in columns])
    widths = np.array([size * dtype.itemsize for size, (dtype, _) in zip(sizes, columns, strict=True)], np.int64)
    return RequestLayout(columns, sizes, widths, np.array([part.rows for part in given], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """The common part of requests of the same form. *Immutable.*

    Attributes:
        end: bytes that its tensors take.
        samples: number of samples; 0 if it depends on values.
        keys, sizes, form: see `ScoreInputs`.
        layout: None if `gather` cannot read them: it cannot read bags of any size.
        offsets: of each feature but the request index, where its values are.
    """

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    timeout_us: int
    end: int
    samples: int
    keys: tuple[int, ...]
    layout: RequestLayout | None
    offsets: IndexArray = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Mapping[str, int] = field(default_factory=dict)
    form: tuple[int, ...] = ()


def describe(inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]], timeout_us: int) -> bytes:
    """Write a description; an entry is name, dtype, shape and offset."""
    return json.dumps({"inputs": inputs, "outputs": outputs, "timeout_us": timeout_us}, separators=(",", ":")).encode()


def read_description(text: bytes, signature: Signature, max_samples: int, model: str) -> Description:
    """Parse an untrusted description of requests for a network.

    Raises:
        InvalidInputError: it is none, or other inputs than the network's. TooManyKeysError: too many keys or samples.
    """
    try:
        found = json.loads(text)
        inputs, outputs = (tuple(_described(*entry) for entry in found[side]) for side in ("inputs", "outputs"))
        timeout_us = int(found["timeout_us"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidInputError(f"reading a request for scores: its description is wrong: {error!r}") from error
    end = max(input_.at + input_.size for input_ in (*inputs, *outputs)) if inputs or outputs else 0
    by_name, features = {input_.name: input_ for input_ in inputs}, signature.features
    if (
        signature.shifted
        or any(feature.name not in by_name for feature in features if not feature.index)
        or len(by_name) != len(features) - sum(feature.index for feature in features)
    ):
        # it has bags or offsets, or is wrong, which checking its values reports
        return Description(inputs, outputs, timeout_us, end, 0, (), None)
    blank = {
        name: np.ndarray(tensor.shape, tensor.dtype, _BLANK, 0, (0,) * len(tensor.shape)) for name, tensor in by_name.items()
    }
    request = read_request(signature, blank, max_samples, model)
    gathered = [(feature, given) for feature, given in zip(features, request.given, strict=True) if not feature.index]
    layout = layout_of([given for _, given in gathered])
    offsets = np.array([by_name[feature.name].at for feature, _ in gathered], np.int64)
    return Description(
        inputs, outputs, timeout_us, end, request.samples, request.keys, layout, offsets, request.sizes, request.form
    )


def _described(name: str, dtype: str, shape: list[int], at: int) -> Described:
    if type(name) is not str or dtype not in _KINDS or type(at) is not int or at < 0 or not 0 < len(shape) <= _MOST_RANK:
        raise ValueError(name)
    if not all(type(width) is int and 0 <= width <= 1 << 40 for width in shape):
        raise ValueError(shape)
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    if at + size > _MOST_BYTES:
        raise ValueError(at)
    return Described(name, kind, tuple(shape), at, size)


@dataclass(slots=True, eq=False)
class PackedRequest:
    """A request for scores in shared memory. *One request*: its values may change until a batch has gathered them.

    Attributes:
        memory: that it is in.
        start: offset of its first tensor in the memory.
        address: of its first tensor.
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
        """Number of keys of each lookup in `Signature.counted`."""
        return self.description.keys

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.description.sizes

    @property
    def form(self) -> tuple[int, ...]:
        return self.description.form

    def unpacked(self, signature: Signature, max_samples: int, model: str) -> ScoreInputs:
        """Copy its values, and check them.

        Raises:
            InvalidInputError, TooManyKeysError: see `read_request`.
        """
        arrays = {input_.name: input_.array(self.memory, self.start).copy() for input_ in self.description.inputs}
        return read_request(signature, arrays, max_samples, model)


def rows_of(requests: Sequence[PackedRequest | ScoreInputs]) -> tuple[RequestLayout, IndexArray] | None:
    """Compare the inputs of requests.

    Returns:
        The layout of the first, whose rows all requests have, and their numbers of rows, (requests, inputs), read only; None if
        they are not alike, or some have weights or bags of several sizes.
    """
    first = _layout_of(requests[0])
    if first is None:
        return None
    if all(type(request) is PackedRequest and request.description.layout is first for request in requests):
        return first, np.broadcast_to(first.rows, (len(requests), first.rows.size))
    layouts = [first, *map(_layout_of, requests[1:])]
    if any(layout is None or layout.columns != first.columns for layout in layouts):
        return None
    return first, np.array([layout.rows for layout in layouts if layout is not None])


def gather_into(
    requests: Sequence[PackedRequest | ScoreInputs],
    sizes: IndexArray,  # (requests, inputs)
    memory: npt.NDArray[np.uint8],
    starts: IndexArray,  # (inputs,)
    filled: IndexArray,  # (inputs,)
) -> None:
    """Gather the inputs of requests that are alike.

    Args:
        sizes: bytes of each input.
        memory: where they go.
        starts: by input, offset of its values in the memory.
        filled: by input, bytes to fill; its first values are repeated after the last.
    """
    before = np.zeros_like(sizes)
    np.cumsum(sizes[:-1], axis=0, out=before[1:])
    used, begin = before[-1] + sizes[-1], starts + memory.ctypes.data
    sources = np.array([*map(_addresses_of, requests), begin], np.int64)
    targets = np.concatenate([before + begin, [begin + used]])
    gather(sources.reshape(-1), np.concatenate([sizes, [filled - used]]).reshape(-1), targets.reshape(-1))


def _layout_of(request: PackedRequest | ScoreInputs) -> RequestLayout | None:
    if isinstance(request, PackedRequest):
        return request.description.layout
    return layout_of(request.given) if all(part.offsets is None and part.weights is None for part in request.given) else None


def _addresses_of(request: PackedRequest | ScoreInputs) -> Any:
    if isinstance(request, PackedRequest):
        return request.description.offsets + request.address
    return [part.values.ctypes.data for part in request.given]
