"""Loads, stores and fences of the hash map's kernels, as numba intrinsics over addresses.

numba has arrays and no memory model; LLVM has both. These functions emit the LLVM instructions of a sequence lock (Boehm,
"Can seqlocks get along with programming language memory models?", 2012): the 64-bit bucket header and the row numbers are
atomic, and keys and vectors, which a writer may be changing, are read by *volatile* vector loads. A plain load that races
is `undef` to LLVM; a volatile one is what the hardware gives, and the header check that follows tells whether to use it.
Every address is a uint64 and has the alignment that its function names. numba's cache does not see a change in this file:
after one, remove `__pycache__`.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _untyped_cgutils
from numba.extending import intrinsic as _typed_intrinsic

cgutils: Any = _untyped_cgutils

_I1, _I4, _I8, _I32, _I64 = (ir.IntType(width) for width in (1, 4, 8, 32, 64))
_LINE = ir.VectorType(_I64, 8)
_HALF_LINE = ir.VectorType(_I64, 4)
REGISTER_LINES = 8
"""Most 64-byte lines of a vector that `copy_if_unchanged` holds in registers (AVX-512 and SVE hosts have as many)."""


def intrinsic(define: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function for kernels of one that emits LLVM's; numba's own type wants the typing context of every caller."""
    untyped: Any = _typed_intrinsic
    made: Callable[..., Any] = untyped(define)
    return made


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc]
    """`load volatile`, which llvmlite's builder lacks."""

    def descr(self, buf: list[str]) -> None:
        (pointer,) = self.operands
        buf.append(f"load volatile {self.type}, {pointer.type} {pointer.get_reference()}, align {self.align}\n")


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load_volatile(builder: Any, address: Any, kind: Any, align: int) -> Any:
    load = _VolatileLoad(builder.block, _pointer(builder, address, kind), typ=kind)
    load.align = align
    builder._insert(load)
    return load


def _offset(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _I64(offset))


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any alignment, and no fault if the address is not mapped."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0], _I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0" if pointer.type.is_opaque else "llvm.prefetch.p0i8"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [pointer, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), emit


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Load 64 bits, 8-byte aligned; later loads stay after it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0], _I64), "acquire", 8, typ=_I64)

    return types.uint64(types.uint64), emit


@intrinsic
def load_relaxed(typing: Any, address: Any) -> Any:
    """Load 64 bits, 8-byte aligned, at once but in no order."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0], _I64), "monotonic", 8, typ=_I64)

    return types.uint64(types.uint64), emit


@intrinsic
def load_relaxed_u32(typing: Any, address: Any) -> Any:
    """Load 32 bits, 4-byte aligned, at once but in no order, widened to 64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load_atomic(_pointer(builder, arguments[0], _I32), "monotonic", 4, typ=_I32), _I64)

    return types.uint64(types.uint64), emit


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Store 64 bits, 8-byte aligned; earlier loads and stores stay before it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), emit


@intrinsic
def store_relaxed(typing: Any, address: Any, value: Any) -> Any:
    """Store 64 bits, 8-byte aligned, at once but in no order."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], _I64), "monotonic", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), emit


@intrinsic
def store_relaxed_u32(typing: Any, address: Any, value: Any) -> Any:
    """Store the lower 32 bits, 4-byte aligned, at once but in no order."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(builder.trunc(arguments[1], _I32), _pointer(builder, arguments[0], _I32), "monotonic", 4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), emit


@intrinsic
def fence_acquire(typing: Any) -> Any:
    """Keep loads before this before loads and stores after it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def fence_release(typing: Any) -> Any:
    """Keep loads and stores before this before stores after it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """The position of the lowest set bit; `bits` is not 0."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], _I1(1))

    return types.uint64(types.uint64), emit


@intrinsic
def match_keys(typing: Any, bucket: Any, key: Any) -> Any:
    """Compare the ten keys of the bucket at a 128-byte aligned address with `key`: bit e tells of entry e.

    Both cache lines are loaded whole, so lane 0 is the header and lane 11 two row numbers; their bits are dropped.
    """

    def equal_lanes(builder: Any, address: Any, kind: Any, key: Any) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(undefined, key, _I32(0))
        everywhere = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
        equal = builder.icmp_unsigned(
            "==", _load_volatile(builder, address, kind, 32), builder.shuffle_vector(first, undefined, everywhere)
        )
        return builder.zext(builder.bitcast(equal, ir.IntType(kind.count)), _I64)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bucket, key = arguments
        lower = builder.lshr(equal_lanes(builder, bucket, _LINE, key), _I64(1))
        upper = builder.and_(equal_lanes(builder, _offset(builder, bucket, 64), _HALF_LINE, key), _I64(7))
        return builder.or_(lower, builder.shl(upper, _I64(7)))

    return types.uint64(types.uint64, types.int64), emit


@intrinsic
def copy_if_unchanged(typing: Any, target: Any, source: Any, lines: Any, address: Any, expected: Any) -> Any:
    """Copy `lines` x 64 bytes, 1 to `REGISTER_LINES`, if the 64 bits at `address` are as expected after the loads.

    The bytes wait in registers for the check, so a vector that changed meanwhile never reaches the target. Source and
    target are 4-byte aligned, `address` 8-byte. Returns whether it copied.
    """

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

    return types.boolean(types.uint64, types.uint64, types.uint64, types.uint64, types.uint64), emit


def _copy_of(kind: Any) -> Any:
    @intrinsic
    def copy(typing: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = _load_volatile(builder, arguments[1], kind, 4)
            builder.store(value, _pointer(builder, arguments[0], kind), align=4)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), emit

    return copy


copy_64_bytes = _copy_of(_LINE)
copy_16_bytes = _copy_of(ir.VectorType(_I64, 2))
copy_4_bytes = _copy_of(_I32)
