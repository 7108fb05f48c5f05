"""Atomic and volatile access to memory that other threads change, for numba kernels, by address.

numba has arrays but no memory model; LLVM has both. Each function here emits one LLVM operation, or several that must not be
split, so that both the compiler and the processor (x86-64 and arm64) keep the order that a sequence lock relies on (H.-J.
Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012). Versions, headers and row numbers are
atomic. Keys and vectors, which a writer may be changing, are read by *volatile* loads: a plain load that races is `undef` to
LLVM, a volatile one gives what the hardware gives, and the check of the version that follows decides whether to use it.

An address is an int64 or a uint64, and values come in the type of the address whatever their width in memory (narrow loads are
zero-extended), because numba turns a mixture of int64 and uint64 into float64. An address must be a multiple of the width, or
of the function's stated alignment. The caller keeps the array alive.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as _typed_cgutils
from numba.extending import intrinsic as _typed_intrinsic

cgutils: Any = _typed_cgutils
_untyped_intrinsic: Any = _typed_intrinsic
intrinsic: Callable[[Callable[..., Any]], Any] = _untyped_intrinsic  # else callers need a typing context, too

_I1, _I8, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 32, 64))
_BYTES = _I8.as_pointer()
_LINE = ir.VectorType(_I64, 8)
REGISTER_LINES: Final = 8
"""Most 64-byte lines of a vector that `copy_if_unchanged` holds in registers (AVX-512 and SVE hosts have as many)."""


@njit(inline="always")
def address_of(array: Any) -> int:
    return int(np.int64(array.ctypes.data))


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc]
    """`load volatile`, which llvmlite's builder lacks."""

    def descr(self, buf: list[str]) -> None:
        (pointer,) = self.operands
        buf.append(f"load volatile {self.type}, {pointer.type} {pointer.get_reference()}, align {self.align}\n")


def _load_volatile(builder: Any, address: Any, kind: Any, align: int) -> Any:
    load = _VolatileLoad(builder.block, _pointer(builder, address, kind), typ=kind)
    load.align = align
    builder.block.instructions.append(load)
    builder.position_at_end(builder.block)
    return load


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _offset(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _I64(offset))


def _word(address: Any) -> Any:
    """Return the numba type of an address and of its values."""
    return types.uint64 if address == types.uint64 else types.int64


def _load(bits: int, ordering: str) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            loaded = builder.load_atomic(_pointer(builder, arguments[0], kind), ordering, bits // 8, typ=kind)
            return loaded if bits == 64 else builder.zext(loaded, _I64)

        word = _word(address)
        return word(word), emit

    return load


@intrinsic
def _load_unaligned(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = builder.load(_pointer(builder, arguments[0], _I64))
        loaded.align = 1
        return loaded

    word = _word(address)
    return word(word), emit


def _store(bits: int, ordering: str) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            stored = arguments[1] if bits == 64 else builder.trunc(arguments[1], kind)
            builder.store_atomic(stored, _pointer(builder, arguments[0], kind), ordering, bits // 8)
            return context.get_dummy_value()

        word = _word(address)
        return types.void(word, word), emit

    return store


def _compare_and_swap(bits: int, ordering: str) -> Any:
    @intrinsic
    def compare_and_swap(typing_context: Any, address: Any, expected: Any, desired: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            old, new = builder.trunc(arguments[1], kind), builder.trunc(arguments[2], kind)
            pair = builder.cmpxchg(_pointer(builder, arguments[0], kind), old, new, ordering, "monotonic")
            return builder.extract_value(pair, 1)

        word = _word(address)
        return types.boolean(word, word, word), emit

    return compare_and_swap


def _fence(ordering: str) -> Any:
    @intrinsic
    def fence(typing_context: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), emit

    return fence


@intrinsic
def _fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0], _I64), arguments[1], "acq_rel")

    word = _word(address)
    return word(word, word), emit


@intrinsic
def _exchange(typing_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, arguments[0], _I64), arguments[1], "seq_cst")

    word = _word(address)
    return word(word, word), emit


@intrinsic
def _pause(typing_context: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "x86" in builder.module.triple:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _words_at(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), emit


def _call(arguments: int) -> Any:
    """Return a call of a C function by its address: integers and pointers in, an int out. It can be cached."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = _pointer(builder, values[0], ir.FunctionType(_I32, [_I64] * arguments))
        return builder.sext(builder.call(function, values[1:]), _I64)

    if arguments == 1:

        @intrinsic
        def call(typing_context: Any, function: Any, a: Any) -> Any:
            return types.int64(types.int64, types.int64), emit
    else:

        @intrinsic
        def call(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            return types.int64(*[types.int64] * 5), emit

    return call


@intrinsic
def _call_launch(
    typing_context: Any, function: Any, kernel: Any, blocks: Any, threads: Any, stream: Any, parameters: Any
) -> Any:
    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at, kernel, blocks, threads, stream, parameters = values
        one, none = _I32(1), _I32(0)
        kind = ir.FunctionType(_I32, [_I64, *[_I32] * 7, *[_I64] * 3])
        grid, block = (builder.trunc(one_of, _I32) for one_of in (blocks, threads))
        arguments = [kernel, grid, one, one, block, one, one, none, stream, parameters, _I64(0)]
        return builder.sext(builder.call(_pointer(builder, at, kind), arguments), _I64)

    return types.int64(*[types.int64] * 6), emit


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        llvm_prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        read, keep, data = _I32(0), _I32(3), _I32(1)
        builder.call(llvm_prefetch, [_pointer(builder, arguments[0], _I8), read, keep, data])
        return context.get_dummy_value()

    return types.void(_word(address)), emit


@intrinsic
def _lowest_bit(typing_context: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], _I1(1))

    word = _word(bits)
    return word(word), emit


def _equal_words(lanes: int) -> Any:
    @intrinsic
    def equal_words(typing_context: Any, address: Any, key: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.VectorType(_I64, lanes)
            undefined = ir.Constant(kind, ir.Undefined)
            first = builder.insert_element(undefined, arguments[1], _I32(0))
            everywhere = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
            keys = builder.shuffle_vector(first, undefined, everywhere)
            equal = builder.icmp_unsigned("==", _load_volatile(builder, arguments[0], kind, 32), keys)
            return builder.zext(builder.bitcast(equal, ir.IntType(lanes)), _I64)

        word = _word(address)
        return word(word, types.int64), emit

    return equal_words


@intrinsic
def _nonzero_bytes(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_I8, 16)
        nonzero = builder.icmp_unsigned("!=", _load_volatile(builder, arguments[0], kind, 16), ir.Constant(kind, [0] * 16))
        return builder.zext(builder.bitcast(nonzero, ir.IntType(16)), _I64)

    word = _word(address)
    return word(word), emit


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _I64])
        to, origin, volatile = _pointer(builder, arguments[0], _I8), _pointer(builder, arguments[1], _I8), _I1(1)
        builder.call(memcpy, [to, origin, arguments[2], volatile])
        return context.get_dummy_value()

    word = _word(target)
    return types.void(word, word, word), emit


@intrinsic
def _copy_if_unchanged(typing_context: Any, target: Any, source: Any, lines: Any, address: Any, expected: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, lines, address, expected = arguments
        result = cgutils.alloca_once_value(builder, cgutils.false_bit)
        end = builder.append_basic_block("end")
        switch = builder.switch(lines, end)
        for count in range(1, REGISTER_LINES + 1):
            block = builder.append_basic_block(f"lines_{count}")
            switch.add_case(_I64(count), block)
            builder.position_at_end(block)
            held = [_load_volatile(builder, _offset(builder, source, 64 * line), _LINE, 4) for line in range(count)]
            builder.fence("acquire")
            current = builder.load_atomic(_pointer(builder, address, _I64), "monotonic", 8, typ=_I64)
            with builder.if_then(builder.icmp_unsigned("==", current, expected)):
                for line, value in enumerate(held):
                    builder.store(value, _pointer(builder, _offset(builder, target, 64 * line), _LINE), align=4)
                builder.store(cgutils.true_bit, result)
            builder.branch(end)
        builder.position_at_end(end)
        return builder.load(result)

    word = _word(address)
    return types.boolean(word, word, word, word, word), emit


def _copy_of(kind: Any) -> Any:
    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = _load_volatile(builder, arguments[1], kind, 4)
            builder.store(value, _pointer(builder, arguments[0], kind), align=4)
            return context.get_dummy_value()

        word = _word(target)
        return types.void(word, word), emit

    return copy


Loader: TypeAlias = Callable[[int], int]
Storer: TypeAlias = Callable[[int, Any], None]
Swapper: TypeAlias = Callable[[int, int, int], bool]

# Functions without a width in their name take 64 bits. "relaxed" has no order; after "acquire" come later loads and
# stores, before "release" come earlier ones.
load_relaxed: Loader = _load(64, "monotonic")
load_relaxed_u8: Loader = _load(8, "monotonic")
load_relaxed_u16: Loader = _load(16, "monotonic")
load_relaxed_u32: Loader = _load(32, "monotonic")
load_acquire: Loader = _load(64, "acquire")
load_acquire_u16: Loader = _load(16, "acquire")
load_unaligned: Loader = _load_unaligned
"""Load 64 bits at any address; plain, for memory that nobody changes."""
store_relaxed: Storer = _store(64, "monotonic")
store_relaxed_u8: Storer = _store(8, "monotonic")
store_relaxed_u32: Storer = _store(32, "monotonic")
store_release: Storer = _store(64, "release")
store_release_u16: Storer = _store(16, "release")
compare_and_swap_relaxed_u8: Swapper = _compare_and_swap(8, "monotonic")
compare_and_swap_acquire_u16: Swapper = _compare_and_swap(16, "acquire")
fetch_add: Callable[[int, int], int] = _fetch_add
"""Add to 64 bits and return the previous value; acquires and releases."""
exchange: Callable[[int, int], int] = _exchange
"""Store 64 bits and return the previous value. A full fence: what comes after it is not done before what comes before it."""
pause_processor: Callable[[], None] = _pause
"""Tell the processor that this thread spins."""
call_1: Callable[[int, int], int] = _call(1)
call_4: Callable[[int, int, int, int, int], int] = _call(4)
"""Call the C function at an address with that many integers or pointers; return its int."""
call_launch: Callable[[int, int, int, int, int, int], int] = _call_launch
"""Call `cuLaunchKernel`, which is at an address: `(function, kernel, blocks, threads, stream, parameters)`."""
pointer_to: Callable[[int], Any] = _words_at
"""The address as a pointer that `numba.carray` takes."""
fence_acquire: Callable[[], None] = _fence("acquire")
"""Keep loads before this before loads and stores after it."""
fence_release: Callable[[], None] = _fence("release")
"""Keep loads and stores before this before stores after it."""
prefetch: Callable[[int], None] = _prefetch
"""Prefetch the cache line at an address; any alignment, and no fault if the address is not mapped."""
lowest_bit: Callable[[int], int] = _lowest_bit
"""Position of the lowest set bit; the value must not be 0."""
equal_words_4: Callable[[int, int], int] = _equal_words(4)
equal_words_8: Callable[[int, int], int] = _equal_words(8)
equal_words_16: Callable[[int, int], int] = _equal_words(16)
"""Bit j is set if the j-th int64 at a 32-byte aligned address equals the key; volatile."""
nonzero_bytes_16: Callable[[int], int] = _nonzero_bytes
"""Bit j is set if the j-th byte at a 16-byte aligned address is not 0; volatile."""
copy_bytes: Callable[[int, int, int], None] = _copy_bytes
"""`memcpy(target, source, size)`, volatile: bytes that another thread writes meanwhile are copied old or new."""
copy_64_bytes: Storer = _copy_of(_LINE)
copy_16_bytes: Storer = _copy_of(ir.VectorType(_I64, 2))
copy_4_bytes: Storer = _copy_of(_I32)
"""Copy to a target from a source, both 4-byte aligned; the load is volatile."""
copy_if_unchanged: Callable[[int, int, int, int, int], bool] = _copy_if_unchanged
"""`(target, source, lines, address, expected)`: copy `lines` x 64 bytes, 1 to `REGISTER_LINES`, if the 64 bits at `address`
equal `expected` after the loads; return whether it copied. The bytes wait in registers for the check, so a vector that changed
meanwhile never reaches the target. Source and target are 4-byte aligned.
"""
yield_processor: Any = types.ExternalFunction("sched_yield", types.int32())
