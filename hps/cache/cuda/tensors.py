"""Maps the tensors of a batch to device addresses: torch, CuPy and DLPack tensors directly, NumPy through mapped memory."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from itertools import accumulate
from operator import attrgetter, ge, mul, or_
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import kernels, repeats
from hps.cache.cuda.device import PinnedBuffer, stream_of
from hps.cache.cuda.repeats import Repeat
from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.array_checks import check_key_tensor, check_output_tensor
from hps.tensors.batch import Batch, Part, check_host_arrays
from hps.tensors.dlpack import (
    BOOL,
    CUDA,
    CUDA_MANAGED,
    FLOAT,
    NUMPY_CODES,
    TensorView,
    adopt,
    exchange_table,
)
from hps.types import IndexArray

UNKNOWN_STREAM = -1
"""The consumer's stream is unknown; its producer was ordered before the legacy default stream."""
LEGACY_STREAM = 1
"""The legacy default stream, in the numbering of DLPack and CUDA."""
_DTYPE_OF, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class HostParts(NamedTuple):
    """Mapped memory of a table whose output or mask is in host memory, to be copied there at the end of its lookup.

    Attributes:
        out: None: the output is on the device. The caller's own array, if the device writes it in place.
        found: None: the mask is on the device, or there is none.
    """

    out: np.ndarray | None
    found: np.ndarray | None


@dataclass(slots=True, eq=False)
class Placement:
    """Where a cache finds the tensors of a batch: the columns of the `Batch` as addresses. *One lookup at a time.*

    Addresses are on the device, or in mapped host memory.

    Attributes:
        tables, sizes: those of the batch.
        keys, outs: addresses of each table's, or of the tensors of all tables of a `joined` batch.
        founds: addresses of the masks, 0 for tables without; empty without any.
        starts: position of each table's first miss in the lookup's lists; made when keys are missing.
        on_host: tables with an output or a mask in host memory, by their position.
        out_format: of the outputs' elements, as kernels know it.
        kept: the batch is kept, so queries are packed once. `of_torch`, `of_cupy`: whose tensors it has.
    """

    tables: Sequence[int]
    sizes: Sequence[int]
    keys: Sequence[int]
    outs: Sequence[int]
    founds: Sequence[int] = ()
    on_host: Mapping[int, HostParts] = field(default_factory=dict)
    out_format: int = 0
    _: KW_ONLY
    joined: bool = False
    starts: Sequence[int] = ()
    kept: bool = False
    of_torch: bool = False
    of_cupy: bool = False

    def by_table(self, dims: Sequence[int]) -> "Placement":
        """Return the same with an address for each table, and with `starts`."""
        placed = self
        if self.joined:
            size = 2 if self.out_format else 4
            keys = [self.keys[0] + 8 * row for row in accumulate(self.sizes[:-1], initial=0)]
            outs = [self.outs[0] + size * at for at in accumulate(map(mul, self.sizes[:-1], dims), initial=0)]
            placed = Placement(self.tables, self.sizes, keys, outs, out_format=self.out_format)
        if not placed.starts:
            placed.starts = list(accumulate(self.sizes[:-1], initial=0))
        return placed


NOTHING = Placement((), (), (), ())


class TensorReader:
    """Finds the device addresses of a lookup's tensors. *One per thread.*

    torch's and CuPy's tensors are inspected directly, which takes 0.6 us for torch; DLPack takes ten times that, and for CuPy,
    which then orders its work itself, does not report the stream.

    Attributes:
        streams: producer and consumer streams of the tensors read since `start`, or UNKNOWN_STREAM.
        adopts: the type of tensors that compiled code reads: torch.Tensor, if it publishes the functions for that; else None's.
    """

    __slots__ = (
        "_device_id",
        "_exchange",
        "_float32",
        "_int32",
        "_int64",
        "_keep",
        "_narrow",
        "_shared_keys",
        "_shared_out",
        "_tensor",
        "_torch_stream",
        "_uses_cupy",
        "_uses_torch",
        "adopts",
        "streams",
    )

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._tensor: Any = None  # torch.Tensor and its dtypes, once torch has been imported
        self._int64: Any = None
        self._int32: Any = None
        self._float32: Any = None
        self._torch_stream: Callable[[], int]
        self.adopts: Any = type(None)
        self._exchange: IndexArray  # of the type that it adopts
        self._uses_torch = self._uses_cupy = False
        self._keep: list[Any] = []  # kept alive until the lookup has ended
        self._narrow: list[int] = []  # formats of the outputs of 16 bits
        self._shared_keys: tuple[Any, int] = (None, 0)  # tensor and address of the last parts
        self._shared_out: tuple[Any, int] = (None, 0)
        self.streams: set[int] = set()

    def start(self) -> None:
        """Drop the tensors of the last lookup."""
        self._uses_torch = self._uses_cupy = False
        self.streams = set()
        self._keep = []
        if self._narrow:
            self._narrow = []
        self._shared_keys = self._shared_out = (None, 0)
        if self._tensor is None and "torch" in sys.modules:
            torch = sys.modules["torch"]
            self._int64, self._int32, self._float32 = torch.int64, torch.int32, torch.float32
            if (table := exchange_table(torch.Tensor)) is not None:
                if table.borrow:
                    self.adopts = torch.Tensor
                self._exchange = repeats.exchange_words(table, CUDA, self._device_id)
                self._torch_stream = partial(repeats.work_stream, self._exchange)
            else:
                self._torch_stream = lambda: torch.cuda.current_stream(self._device_id).cuda_stream
            self._tensor = torch.Tensor

    def repeat_one(self, repeat: Repeat, batch: Batch, dim: int) -> int:
        """Write the addresses of a batch's one table, and return the stream; UNKNOWN_STREAM if `place` must find them."""
        [keys], [out], [n] = batch.keys, batch.outs, batch.sizes
        if batch.founds or batch.poolings or batch.joined:
            return UNKNOWN_STREAM
        if type(keys) is type(out) is self.adopts:
            if out.requires_grad:
                return UNKNOWN_STREAM
            stream: int = repeats.adopt(self._exchange, repeat.words, id(keys), id(out), n)
            return stream
        self.start()
        if not (plain := self._plain_pair(keys, out, n, n * dim)) or not repeat.point(*plain, n):
            return UNKNOWN_STREAM
        return self.streams.pop()

    def repeat_tables(self, repeat: Repeat, batch: Batch) -> int:
        """Write the addresses of the tensors of a batch of the `kind` that it adopts, likewise."""
        if any(map(_REQUIRES_GRAD, batch.outs)):
            return UNKNOWN_STREAM
        words = repeat.words, repeat.tables
        if batch.joined:
            stream: int = repeats.adopt_joined(self._exchange, *words, id(batch.keys[0]), id(batch.outs[0]))
        else:
            ids = np.array([*map(id, batch.keys), *map(id, batch.outs)], np.int64)
            stream = repeats.adopt_tables(self._exchange, *words, ids)
        return stream

    def stream_of(self, placed: Placement) -> int:
        """Return the current stream of the tensors of a kept batch; UNKNOWN_STREAM if they have several."""
        if not placed.of_torch:
            return int(cupy.cuda.get_current_stream(self._device_id).ptr)
        stream = self._torch_stream()
        if placed.of_cupy and stream != cupy.cuda.get_current_stream(self._device_id).ptr:
            return UNKNOWN_STREAM
        return stream

    def place(self, batch: Batch, dims: Sequence[int], doing: Sequence[str], host: PinnedBuffer) -> Placement:
        """Find the tensors of a batch of rows.

        Args:
            dims, doing: dimension and start of error messages, by table.
            host: mapped memory for keys and outputs in host memory.
        """
        if batch.joined:
            keys, _size = self.keys(batch.keys[0])
            out = self.output(batch.outs[0], sum(map(mul, batch.sizes, dims)), 1)
            out_format = self._narrow[0] if self._narrow else 0
            return Placement(batch.tables, batch.sizes, (keys,), (out,), out_format=out_format, joined=True)
        if batch.kind is not None and (placed_alike := self._place_alike(batch, dims)) is not None:
            return placed_alike
        placement: Placement | None = batch.placement
        if placement is not None:
            if placement.of_torch:
                self._use_torch()
            if placement.of_cupy:
                self._use_cupy()
            return placement
        keys_at: list[int] = []
        outs_at: list[int] = []
        founds_at: list[int] = []
        on_host, founds = {}, batch.founds
        for place, (table, n, keys, out) in enumerate(zip(batch.tables, batch.sizes, batch.keys, batch.outs)):  # noqa: B905
            found_at = 0
            if (founds and founds[place] is not None) or type(keys) is np.ndarray or type(out) is np.ndarray:
                key_at, out_at, found_at, parts = self._place_on_host(batch, place, dims[table], doing[table], host)
                if parts.out is not None or parts.found is not None:
                    on_host[place] = parts
            elif plain := self._plain_pair(keys, out, n, n * dims[table]):
                key_at, out_at = plain
            else:
                key_at = self._keys_of(keys, n)
                out_at = self.output(out, n, dims[table])
            keys_at.append(key_at)
            outs_at.append(out_at)
            founds_at.append(found_at)
        out_format = self._format_of_all(len(outs_at)) if self._narrow else 0
        masks = founds_at if any(founds_at) else ()
        placed = Placement(tuple(batch.tables), batch.sizes, keys_at, outs_at, masks, on_host, out_format)
        if batch.kept and not host.used and not self._keep:  # all are torch's and CuPy's own
            placed.kept, placed.of_torch, placed.of_cupy = True, self._uses_torch, self._uses_cupy
            batch.placement = placed
        return placed

    def _plain_pair(self, keys: Any, out: Any, n: int, elements: int) -> tuple[int, int] | None:
        """Return the addresses of keys and float32 output that are torch's or CuPy's, the fastest way; None for others."""
        device = self._device_id
        if type(keys) is type(out) is self._tensor:
            if (
                keys.dtype is self._int64
                and out.dtype is self._float32
                and keys.get_device() == device == out.get_device()
                and keys.is_contiguous()
                and out.is_contiguous()
                and not out.requires_grad
                and keys.numel() == n
                and out.numel() >= elements
            ):
                if not self._uses_torch:
                    self._use_torch()
                return keys.data_ptr(), out.data_ptr()
        elif (
            type(keys) is type(out) is cupy.ndarray
            and keys.dtype == _INT64
            and out.dtype == _FLOAT32
            and keys.data.device_id == device == out.data.device_id
            and not (key_at := keys.data.ptr) % 8
            and not (out_at := out.data.ptr) % 4
            and keys.flags.c_contiguous
            and out.flags.c_contiguous
            and keys.size == n
            and out.size >= elements
        ):
            if not self._uses_cupy:
                self._use_cupy()
            return key_at, out_at
        return None

    def _place_alike(self, batch: Batch, dims: Sequence[int]) -> Placement | None:
        """Find tensors of one kind column by column; None if the general path must check them."""
        device, keys, outs, count = self._device_id, batch.keys, batch.outs, len(batch.keys)
        tensors, needs = [*keys, *outs], map(mul, batch.sizes, [dims[table] for table in batch.tables])
        if batch.kind is self._tensor:
            tensor = self._tensor
            if (
                list(map(_DTYPE_OF, tensors)) != [self._int64] * count + [self._float32] * count
                or list(map(tensor.get_device, tensors)).count(device) < 2 * count
                or not all(map(tensor.is_contiguous, tensors))
                or not all(map(ge, map(tensor.numel, outs), needs))
                or any(map(_REQUIRES_GRAD, outs))
            ):
                return None
            addresses = list(map(tensor.data_ptr, tensors))
            self._use_torch()
        else:
            addresses = [
                memory.ptr
                for array in tensors
                if (memory := array.data).device_id == device and array.flags.c_contiguous and not memory.ptr % 4
            ]
            if (
                len(addresses) < 2 * count
                or list(map(_DTYPE_OF, tensors)) != [_INT64] * count + [_FLOAT32] * count
                or not all(map(ge, [out.size for out in outs], needs))
                or reduce(or_, addresses[:count]) & 7
            ):
                return None
            self._use_cupy()
        return Placement(batch.tables, batch.sizes, addresses[:count], addresses[count:])

    def _place_on_host(
        self, batch: Batch, place: int, dim: int, doing: str, host: PinnedBuffer
    ) -> tuple[int, int, int, HostParts]:
        """Find the tensors of a table of which some are in host memory; keys and outputs there go through `host`.

        Returns:
            Addresses of keys, output and mask (0 without one), and the parts to be copied at the end.
        """
        keys, out, n = batch.keys[place], batch.outs[place], batch.sizes[place]
        found = batch.founds[place] if batch.founds else None
        found_at, host_out, host_found = 0, None, None
        check_host_arrays(doing, batch, place, n, dim)
        if isinstance(keys, np.ndarray):
            keys_at, pinned = host.take(keys.nbytes)
            np.copyto(pinned.view(np.int64), keys)
        else:
            keys_at = self._keys_of(keys, n)
        if isinstance(out, np.ndarray):
            out_at, host_out = _pinned_address(out), out
            if not out_at:
                out_at, pinned = host.take(4 * n * dim)
                host_out = pinned.view(np.float32).reshape(n, dim)
        else:
            out_at = self.output(out, n, dim)
        if isinstance(found, np.ndarray):
            found_at, pinned = host.take(n)
            host_found = pinned.view(np.bool_)
        elif found is not None:
            found_at = self._mask(found, n)
        return keys_at, out_at, found_at, HostParts(host_out, host_found)

    def _keys_of(self, tensor: Any, n: int) -> int:
        """Return the address of n keys."""
        address, size = self.keys(tensor)
        if size != n and not isinstance(tensor, Part):
            raise InvalidInputError(f"adopting keys: got {size} keys, expected {n}")
        return address

    def keys(self, tensor: Any) -> tuple[int, int]:
        """Return address and number of keys: int64 (int32 is widened), C-contiguous, of any shape."""
        if isinstance(tensor, Part):
            return self._part_of_keys(tensor), tensor.total
        if (
            type(tensor) is self._tensor
            and tensor.dtype is self._int64
            and tensor.get_device() == self._device_id
            and tensor.is_contiguous()
        ):
            if not self._uses_torch:
                self._use_torch()
            return tensor.data_ptr(), tensor.numel()
        if (
            type(tensor) is cupy.ndarray
            and tensor.dtype == _INT64
            and (memory := tensor.data).device_id == self._device_id
            and not memory.ptr % 8
            and tensor.flags.c_contiguous
        ):
            if not self._uses_cupy:
                self._use_cupy()
            return memory.ptr, tensor.size
        view = self._view(tensor, "keys")
        check_key_tensor(view)
        if view.pointer % (view.bits // 8):
            raise InvalidInputError(
                f"adopting keys: got memory that is not aligned to {view.dtype_name}; pass a tensor of its own"
            )
        self._follow(view, "keys")
        return (view.pointer if view.bits == 64 else self._widened(view)), view.size

    def output(self, tensor: Any, rows: int, dim: int, *, narrow: bool = True) -> int:
        """Return the address of rows x dim elements to be written: float32 or, with `narrow`, 16 bits."""
        if isinstance(tensor, Part):
            return self._part_of_output(tensor, narrow=narrow)
        if (
            type(tensor) is self._tensor
            and tensor.dtype is self._float32
            and tensor.get_device() == self._device_id
            and tensor.is_contiguous()
            and tensor.numel() >= rows * dim
            and not tensor.requires_grad
        ):
            if not self._uses_torch:
                self._use_torch()
            pointer: int = tensor.data_ptr()
            return pointer
        if (
            type(tensor) is cupy.ndarray
            and tensor.dtype == _FLOAT32
            and (memory := tensor.data).device_id == self._device_id
            and not (pointer := memory.ptr) % 4
            and tensor.flags.c_contiguous
            and tensor.size >= rows * dim
        ):
            if not self._uses_cupy:
                self._use_cupy()
            return pointer
        view = self._view(tensor, "output")
        check_output_tensor(view, rows, dim, narrow=narrow)
        if view.bits == 16:
            self._narrow.append(kernels.FLOAT16 if view.code == FLOAT else kernels.BFLOAT16)
        self._follow(view, "output")
        return view.pointer

    def rows(self, tensor: Any, n: int, width: int) -> int:
        """Return the address of n rows of float32 or of stored ones, (n, width), to be read or written."""
        return self.output(tensor, n, width, narrow=False)

    def _format_of_all(self, outputs: int) -> int:
        """Return the format of all outputs of a lookup.

        Raises:
            InvalidDtypeError: they have several.
        """
        if len(self._narrow) != outputs or len(set(self._narrow)) != 1:
            raise InvalidDtypeError(
                "adopting outputs: got some of 16 bits beside others, expected one dtype of all: float32, float16 or bfloat16"
            )
        return self._narrow[0]

    def offsets(self, tensor: Any) -> tuple[int, int, int]:
        """Return address, bits and number of offsets: int64 or int32, C-contiguous."""
        if self._is_torch_here(tensor) and (tensor.dtype is self._int64 or tensor.dtype is self._int32):
            return tensor.data_ptr(), 8 * tensor.element_size(), tensor.numel()
        view = self._view(tensor, "offsets")
        check_key_tensor(view, "offsets")
        if view.pointer % (view.bits // 8):
            raise InvalidInputError("adopting offsets: got memory that is not aligned to them; pass a tensor of its own")
        self._follow(view, "offsets")
        return view.pointer, view.bits, view.size

    def weights(self, tensor: Any, n: int) -> int:
        """Return the address of n float32 weights, C-contiguous."""
        if self._is_torch_here(tensor) and tensor.dtype is self._float32 and tensor.numel() == n:
            pointer: int = tensor.data_ptr()
            return pointer
        view = self._view(tensor, "weights")
        if (view.code, view.bits, view.lanes) != (FLOAT, 32, 1):
            raise InvalidDtypeError(f"adopting weights: got {view.dtype_name}, expected float32")
        if not view.contiguous or view.size != n or view.pointer % 4:
            raise InvalidInputError(
                f"adopting weights: got shape {view.shape} with strides {view.strides}, expected {n} C-contiguous, aligned "
                "elements, as many as keys"
            )
        self._follow(view, "weights")
        return view.pointer

    def view(self, tensor: Any, label: str) -> TensorView:
        """Return an unchecked view of a tensor; for a part, of the tensor that it is part of."""
        return self._view(tensor.tensor if isinstance(tensor, Part) else tensor, label)

    def work_stream(self, tensor: Any) -> int | None:
        """Return the current stream of a tensor's framework; None for host memory, and if unknown."""
        self.start()
        if isinstance(tensor, Part):
            tensor = tensor.tensor
        if type(tensor) is self._tensor:
            return self._torch_stream()
        if type(tensor) is cupy.ndarray:
            return int(cupy.cuda.get_current_stream(self._device_id).ptr)
        return self._view(tensor, "keys").producer_stream

    def _mask(self, tensor: Any, size: int) -> int:
        """Return the address of `size` booleans, to be written."""
        if (
            type(tensor) is cupy.ndarray
            and tensor.dtype == np.bool_
            and (memory := tensor.data).device_id == self._device_id
            and tensor.flags.c_contiguous
            and tensor.size >= size
        ):
            if not self._uses_cupy:
                self._use_cupy()
            return int(memory.ptr)
        view = self._view(tensor, "found")
        if (view.code, view.bits, view.lanes) != (BOOL, 8, 1):
            raise InvalidDtypeError(f"adopting found: got {view.dtype_name}, expected bool")
        if not view.contiguous or view.read_only or view.size < size:
            raise InvalidInputError(
                f"adopting found: got shape {view.shape} with strides {view.strides}, expected a writable, C-contiguous tensor "
                f"of at least {size} elements"
            )
        self._follow(view, "found")
        return view.pointer

    def _part_of_keys(self, part: Part) -> int:
        tensor, address = self._shared_keys
        if tensor is not part.tensor:
            address, _size = self.keys(part.tensor)
            self._shared_keys = (part.tensor, address)
        return address + 8 * part.start

    def _part_of_output(self, part: Part, *, narrow: bool) -> int:
        tensor, address = self._shared_out
        if tensor is not part.tensor:
            rows, width = (part.total // part.width, part.width) if part.width else (part.total, 1)
            address = self.output(part.tensor, rows, width, narrow=narrow)
            self._shared_out = (part.tensor, address)
        elif self._narrow:
            self._narrow.append(self._narrow[-1])
        return address + (2 if self._narrow else 4) * part.start

    def _is_torch_here(self, tensor: Any) -> bool:
        """Return True for a contiguous torch tensor on this device, and record its stream."""
        is_here = type(tensor) is self._tensor and tensor.get_device() == self._device_id and tensor.is_contiguous()
        if is_here and not self._uses_torch:
            self._use_torch()
        return is_here

    def _use_torch(self) -> None:
        self._uses_torch = True
        self.streams.add(self._torch_stream())

    def _use_cupy(self) -> None:
        self._uses_cupy = True
        self.streams.add(cupy.cuda.get_current_stream(self._device_id).ptr)

    def _view(self, tensor: Any, label: str) -> TensorView:
        if isinstance(tensor, TensorView):
            return tensor
        if not isinstance(tensor, cupy.ndarray):
            return adopt(tensor, LEGACY_STREAM, label)
        dtype = (NUMPY_CODES.get(tensor.dtype.kind, -1), 8 * tensor.dtype.itemsize, 1)
        strides = None
        if not tensor.flags.c_contiguous:
            strides = tuple([stride // tensor.dtype.itemsize for stride in tensor.strides])
        view = TensorView(
            int(tensor.data.ptr), tensor.shape, strides, dtype, (CUDA, tensor.device.id), read_only=False, owner=tensor
        )
        view.producer_stream = int(cupy.cuda.get_current_stream(self._device_id).ptr)
        return view

    def _follow(self, view: TensorView, label: str) -> None:
        """Check that a tensor is on this device, keep it, and record its producer's stream."""
        if view.device_type != CUDA_MANAGED and (view.device_type, view.device_id) != (CUDA, self._device_id):
            raise InvalidInputError(
                f"adopting {label}: got a tensor on {view.device_name}, expected one on CUDA device {self._device_id} or an "
                "array of NumPy's"
            )
        self._keep.append(view)
        self.streams.add(UNKNOWN_STREAM if view.producer_stream is None else view.producer_stream)

    def _widened(self, view: TensorView) -> int:
        """Return the address of int32 keys widened to int64."""
        with stream_of(view.producer_stream or 0):
            memory = cupy.cuda.UnownedMemory(view.pointer, 4 * view.size, view, self._device_id)
            wide = cupy.ndarray((view.size,), np.int32, cupy.cuda.MemoryPointer(memory, 0)).astype(np.int64)
        self._keep.append(wide)
        return int(wide.data.ptr)


def _pinned_address(array: np.ndarray) -> int:
    """Return the device address of a NumPy array in memory pinned by CuPy (`cupyx.empty_pinned`); else 0.

    The attributes of the address alone are not enough: an array may start and end on pages that other arrays have pinned.
    """
    base: Any = array.base
    if base is None:
        return 0
    while type(base) is np.ndarray:
        base = base.base
    if type(base) is memoryview:
        base = base.obj
    if type(base) is not cupy.cuda.PinnedMemoryPointer:
        return 0
    return int(runtime.pointerGetAttributes(array.ctypes.data).devicePointer)
