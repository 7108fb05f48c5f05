"""Lookups like an earlier one, without the interpreter: adopt the tensors, launch the kernel, wait. Imports no CuPy.

Most lookups differ from an earlier one only in their tensors, or only in what those contain. The arguments of their kernel are
packed once, as a `Repeat`, and those of the kernel that answers its misses, as a `RepeatedAnswer`. The rest takes two calls of
compiled code, and a quarter of the interpreter's time.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import int64, njit

from hps.cache.cuda import kernels, structs
from hps.ground.kernels.numba_atomics import (
    call_1,
    call_4,
    call_launch,
    load_acquire,
    load_relaxed,
    pause_processor,
    store_relaxed,
    store_relaxed_u32,
    yield_processor,
)
from hps.ground.kernels.numba_kernels import kernel
from hps.tensors.dlpack import FLOAT, INT, ExchangeTable
from hps.types import IndexArray

# Words of a type of tensors on a device: addresses of functions, the device as a DLTensor has it, and room for a DLTensor.
_BORROW, _WORK_STREAM, _CLEAR_ERROR, _ON, _TENSOR = range(5)
# Words of a workspace: addresses of the driver's functions, the context, addresses of the flags and of the number of the last
# repeat that has ended, the number of the last one launched, and room for a word.
(
    _LAUNCH,
    _WRITE,
    _QUERY,
    _CURRENT,
    _SET_CURRENT,
    _LAUNCH_EARLY,
    _RECORD,
    _CONTEXT,
    _FLAGS,
    _ENDED,
    _LAUNCHED,
    _WORD,
) = range(12)
DRIVER_FUNCTIONS: Final = (
    ("cuLaunchKernel",),
    ("cuStreamWriteValue64_v2", "cuStreamWriteValue64"),
    ("cuStreamQuery",),
    ("cuCtxGetCurrent",),
    ("cuCtxSetCurrent",),
    ("cuLaunchKernelEx",),
    ("cuEventRecord",),
)
"""By name, the preferred one first."""
_POLLS: Final = 2000  # about 0.1 ms: after that, and after each query of the driver, others may have the processor
_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY
# Words of a repeat: its kernel and arguments; of one table also the addresses of the arguments that differ, and limits.
_KERNEL, _BLOCKS, _PARAMETERS, _KEYS, _OUT, _N, _DIM, _MOST_KEYS = range(8)
# Words of the answer to its misses: kernel and arguments, how it is launched, and where that has the stream; addresses of the
# first output and of the number in the arguments, how many outputs are those of the query, and the event after it.
_ANSWER, _ANSWER_PARAMETERS, _CONFIG, _CONFIG_STREAM, _ANSWER_OUT, _ANSWER_NUMBER, _ANSWER_OUTS, _EVENT = range(8)

_DATA, _DEVICE, _KIND, _SHAPE, _STRIDES, _OFFSET = range(0, 48, 8)  # of a DLTensor; the kind follows the number of dimensions
_ADDRESSES, _COUNT = struct.Struct("=QQ"), struct.Struct("=I")  # of `structs.SEGMENT`
_ALIGNMENT: Final = 16
_INT64: Final = INT | 64 << 8 | 1 << 16
_FLOAT32: Final = FLOAT | 32 << 8 | 1 << 16
_SEGMENT: Final = structs.SEGMENT.size
_ANSWER_SEGMENT: Final = structs.ANSWER_SEGMENT.size
_NUMBER_AT: Final = structs.ANSWER_TAIL.at("number")
_LOW_HALF: Final = 0xFFFFFFFF
_KEYS_PER_WARP: Final = 8
_KEYS_PER_BLOCK: Final = kernels.QUERY_THREADS // 32 * _KEYS_PER_WARP
_THREADS: Final = kernels.QUERY_THREADS
MOST_KEYS: Final = (1 << 19) - 1
"""Of a repeat of one table; a warp of a larger lookup may take more keys."""

_WORDS, _ROWS = int64[::1], int64[:, ::1]


class Repeat:
    """The packed launch of lookups that differ only in their tensors, or only in what those contain. *One per thread.*

    Attributes:
        words: for the kernels below.
        tables: (tables, 2) int64: numbers of keys and elements of several tables, for `adopt_tables` and `adopt_joined`.
        arguments: what the words point to.
        answer: the launch that answers its misses, once packed.
    """

    __slots__ = ("answer", "arguments", "tables", "words")
    tables: IndexArray

    def __init__(self, handle: int, blocks: int, arguments: Any) -> None:
        self.arguments = arguments
        self.answer: RepeatedAnswer | None = None
        self.words: IndexArray = np.zeros(8, np.int64)
        self.words[:3] = handle, blocks, arguments.address

    def of_one_table(self, dim: int, most_keys: int) -> "Repeat":
        """Let `adopt` write keys, output and their number, in arguments packed as `structs.QUERY_OF_ONE`; return self."""
        at, offsets = self.arguments.struct_address, structs.QUERY_OF_ONE.offsets
        self.words[3:] = at + offsets["keys"], at + offsets["out"], at + offsets["n"], dim, min(most_keys, MOST_KEYS)
        return self

    def point(self, keys: int, out: int, n: int) -> bool:
        """Do what `adopt` does with the addresses of checked tensors; return False if it is not for them."""
        if not 0 < n <= self.words[_MOST_KEYS] or out % _ALIGNMENT:
            return False
        _ADDRESSES.pack_into(self.arguments.bytes, 0, keys, out)
        _COUNT.pack_into(self.arguments.bytes, structs.QUERY_OF_ONE.offsets["n"], n)
        self.words[_BLOCKS] = -(-n // _KEYS_PER_BLOCK)
        return True

    def of_tables(self, sizes: Sequence[int], dims: Sequence[int]) -> "Repeat":
        """Let `adopt_tables` and `adopt_joined` write keys and outputs, in arguments packed as `SEGMENT`s; return self."""
        at, offsets = self.arguments.struct_address, structs.SEGMENT.offsets
        self.words[3:5] = at + offsets["keys"], at + offsets["out"]
        self.tables = np.array([(n, n * dim) for n, dim in zip(sizes, dims, strict=True)], np.int64)
        return self


class RepeatedAnswer:
    """The packed launch that answers the misses of a `Repeat` from tables in host memory. *One per thread.*

    Args:
        handle, arguments, early: the kernel, packed arguments, and a `DependentLaunch` of its own, configured.
        outs: the number of outputs that it takes from its query's arguments.
        event: recorded after it, since it may still admit rows when its answers are there.

    Attributes:
        words: for `launch_and_wait`.
        of: what the arguments hold of the attached tables; another `of` needs another answer.
    """

    __slots__ = ("_kept", "of", "words")

    def __init__(self, handle: int, arguments: Any, early: Any, outs: int, event: int, of: object) -> None:
        self._kept = arguments, early
        self.of = of
        out_at = arguments.struct_address + structs.ANSWER_SEGMENT.offsets["out"]
        number_at = arguments.struct_address + len(arguments.bytes) - structs.ANSWER_TAIL.size + _NUMBER_AT
        words = (handle, arguments.address, early.config_at, early.stream_at, out_at, number_at, outs, event)
        self.words: IndexArray = np.array(words, np.int64)


LEFT: Final = 1 << 32
"""Of the flags of a repeat: keys are left that its answer could not read."""
UNANSWERED: Final[IndexArray] = np.zeros(8, np.int64)
"""The words of no answer."""


def exchange_words(table: ExchangeTable, device_type: int, device_id: int) -> IndexArray:
    """Return the words of a type of tensors on a device, for `adopt` and `work_stream`. *One per thread.*"""
    clear_error = ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value
    words = (table.borrow, table.work_stream, clear_error, device_type | device_id << 32, *[0] * 6)
    return np.array(words, np.int64)


def driver_words(functions: Sequence[int], context: int, flags: int, ended: int) -> IndexArray:
    """Return the words of a workspace, for `launch_and_wait`.

    Args:
        functions: addresses of DRIVER_FUNCTIONS.
        context: of the device.
        flags, ended: addresses in mapped memory, of the 8 bytes that kernels set and of a word that is 0.
    """
    return np.array((*functions, context, flags, ended, 0, 0), np.int64)


@njit(inline="always")
def _size(tensor: int) -> int:
    """Return the number of elements of a C-contiguous DLTensor; -1 for others."""
    shape, strides, size = load_relaxed(tensor + _SHAPE), load_relaxed(tensor + _STRIDES), 1
    for axis in range((load_relaxed(tensor + _KIND) & _LOW_HALF) - 1, -1, -1):
        extent = load_relaxed(shape + 8 * axis)
        if extent != 1 and strides != 0 and load_relaxed(strides + 8 * axis) != size:
            return -1
        size *= extent
    return size


@njit(inline="always")
def _address(tensor: int) -> int:
    return load_relaxed(tensor + _DATA) + load_relaxed(tensor + _OFFSET)


@njit(inline="always")
def _borrow(exchange: IndexArray, tensor: int, at: int, kind: int) -> bool:
    """Describe a tensor at an address; return whether it is of this kind and on the device."""
    if call_4(exchange[_BORROW], tensor, at, 0, 0) != 0:
        call_1(exchange[_CLEAR_ERROR], 0)
        return False
    return load_relaxed(at + _DEVICE) == exchange[_ON] and load_relaxed(at + _KIND) >> 32 == kind


@njit(inline="always")
def _stream(exchange: IndexArray, at: int) -> int:
    device = exchange[_ON]
    if call_4(exchange[_WORK_STREAM], device & _LOW_HALF, device >> 32, at, 0) != 0:
        call_1(exchange[_CLEAR_ERROR], 0)
        return -1
    return load_relaxed(at)


@kernel(int64, _WORDS, nogil=False)
def work_stream(exchange: IndexArray) -> int:
    """Return the current stream of a type of tensors on a device; -1 if unknown."""
    return _stream(exchange, exchange.ctypes.data + 8 * _TENSOR)


@kernel(int64, _WORDS, _WORDS, int64, int64, int64, nogil=False)
def adopt(exchange: IndexArray, repeat: IndexArray, keys: int, out: int, n: int) -> int:
    """Write the addresses of the tensors of a repeat of one table, and return their stream; -1 if it is not for such tensors.

    Args:
        keys, out: ids of objects of the type of `exchange`, which the caller holds.
        n: number of keys.
    """
    at = exchange.ctypes.data + 8 * _TENSOR
    if n == 0 or n > repeat[_MOST_KEYS] or not _borrow(exchange, keys, at, _INT64) or _size(at) != n:
        return -1
    keys_at = _address(at)
    if not _borrow(exchange, out, at, _FLOAT32) or _size(at) < n * repeat[_DIM]:
        return -1
    out_at = _address(at)
    stream = _stream(exchange, at)
    if stream < 0 or keys_at % 8 != 0 or out_at % _ALIGNMENT != 0:
        return -1
    store_relaxed(repeat[_KEYS], keys_at)
    store_relaxed(repeat[_OUT], out_at)
    store_relaxed_u32(repeat[_N], n)
    repeat[_BLOCKS] = (n + _KEYS_PER_BLOCK - 1) // _KEYS_PER_BLOCK
    return stream


@kernel(int64, _WORDS, _WORDS, _ROWS, _WORDS, nogil=False)
def adopt_tables(exchange: IndexArray, repeat: IndexArray, tables: IndexArray, ids: IndexArray) -> int:
    """Do what `adopt` does, for a repeat of several tables.

    Args:
        ids: of the keys of all tables, then of their outputs.
    """
    at = exchange.ctypes.data + 8 * _TENSOR
    count = tables.shape[0]
    for nth in range(count):
        if not _borrow(exchange, ids[nth], at, _INT64) or _size(at) != tables[nth, 0]:
            return -1
        keys_at = _address(at)
        if not _borrow(exchange, ids[count + nth], at, _FLOAT32) or _size(at) < tables[nth, 1]:
            return -1
        out_at = _address(at)
        if keys_at % 8 != 0 or out_at % _ALIGNMENT != 0:
            return -1
        store_relaxed(repeat[_KEYS] + _SEGMENT * nth, keys_at)
        store_relaxed(repeat[_OUT] + _SEGMENT * nth, out_at)
    return _stream(exchange, at)


@kernel(int64, _WORDS, _WORDS, _ROWS, int64, int64, nogil=False)
def adopt_joined(exchange: IndexArray, repeat: IndexArray, tables: IndexArray, keys: int, out: int) -> int:
    """Do what `adopt` does, for a repeat of several tables whose keys, and whose outputs, are one tensor."""
    at = exchange.ctypes.data + 8 * _TENSOR
    if not _borrow(exchange, keys, at, _INT64):
        return -1
    size, keys_at = _size(at), _address(at)
    if not _borrow(exchange, out, at, _FLOAT32):
        return -1
    room, out_at = _size(at), _address(at)
    if keys_at % 8 != 0 or out_at % _ALIGNMENT != 0:
        return -1
    n = elements = 0
    for nth in range(tables.shape[0]):
        store_relaxed(repeat[_KEYS] + _SEGMENT * nth, keys_at + 8 * n)
        store_relaxed(repeat[_OUT] + _SEGMENT * nth, out_at + 4 * elements)
        n += tables[nth, 0]
        elements += tables[nth, 1]
    return _stream(exchange, at) if size == n and room >= elements else -1


@kernel(int64, _WORDS, _WORDS, _WORDS, int64)
def launch_and_wait(driver: IndexArray, repeat: IndexArray, answer: IndexArray, stream: int) -> int:
    """Launch the kernel of a repeat and that which answers its misses, and wait for their stream.

    Args:
        answer: words of a `RepeatedAnswer`, or UNANSWERED.

    Returns:
        The flags that kernels set: 0 if no key was missing; below LEFT if the answer had all of them, and the flags are clear
        again; or a driver's error, negative.
    """
    at = driver.ctypes.data + 8 * _WORD
    error = call_1(driver[_CURRENT], at)
    before, context = load_relaxed(at), driver[_CONTEXT]
    if before != context:
        error |= call_1(driver[_SET_CURRENT], context)
    if error == 0:
        error = call_launch(driver[_LAUNCH], repeat[_KERNEL], repeat[_BLOCKS], _THREADS, stream, repeat[_PARAMETERS])
    driver[_LAUNCHED] += 1
    answers = answer[_ANSWER] != 0
    if error == 0 and answers:
        for nth in range(answer[_ANSWER_OUTS]):
            store_relaxed(answer[_ANSWER_OUT] + _ANSWER_SEGMENT * nth, load_relaxed(repeat[_OUT] + _SEGMENT * nth))
        store_relaxed(answer[_ANSWER_NUMBER], driver[_LAUNCHED])
        store_relaxed(answer[_CONFIG_STREAM], stream)
        error = call_4(driver[_LAUNCH_EARLY], answer[_CONFIG], answer[_ANSWER], answer[_ANSWER_PARAMETERS], 0)
        if error == 0:
            error = call_4(driver[_RECORD], answer[_EVENT], stream, 0, 0)
    if error == 0:
        # The write follows a fence after the kernel's writes, so the flags are final once it is seen. To poll it takes 0.8 us
        # less than the driver's wait. A kernel that fails leaves it unwritten, and a driver that cannot write it tells the end.
        # An answer writes the number itself, before its last admissions, for which a wait for the stream would wait, too.
        most = _POLLS
        if not answers and call_4(driver[_WRITE], stream, driver[_ENDED], driver[_LAUNCHED], 0) != 0:
            most = 0
        error = _NOT_READY
        while error == _NOT_READY:
            polls = most
            while polls > 0 and load_acquire(driver[_ENDED]) != driver[_LAUNCHED]:
                pause_processor()
                polls -= 1
            error = 0
            if polls == 0:
                yield_processor()
                error = call_1(driver[_QUERY], stream)
    if before != context:
        call_1(driver[_SET_CURRENT], before)
    if error != 0:
        return -error
    flags = load_relaxed(driver[_FLAGS])
    if answers and flags < LEFT:
        store_relaxed(driver[_FLAGS], 0)
    return flags
