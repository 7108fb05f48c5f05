"""Atomic loads, stores and fences for numba kernels, on raw addresses.

numba offers none. Each function here is one LLVM instruction, so that both the compiler and the processor (x86-64 and
arm64 alike) keep the order that `numpy_sets.py` argues from. An address is an int64: `np.int64(array.ctypes.data)` plus
bytes; it must be a multiple of the width. Whoever passes an address keeps the array alive. Values are int64 whatever the
width in memory, because numba turns a mixture of int64 and uint64 into float64; narrow loads are zero-extended.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_intrinsic: Any = intrinsic  # numba's own type says that an intrinsic cannot be called
_BYTES = ir.IntType(8).as_pointer()


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _load(bits: int, ordering: str) -> Any:
    def load(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer(builder, arguments[0], bits)
            value = builder.load_atomic(pointer, ordering, align=bits // 8, typ=ir.IntType(bits))
            return value if bits == 64 else builder.zext(value, _I64)

        return types.int64(types.int64), generate

    return intrinsic(load)


def _store(bits: int, ordering: str) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            stored = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store_atomic(stored, _pointer(builder, arguments[0], bits), ordering, align=bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(store)


def _compare_and_swap(bits: int, ordering: str) -> Any:
    def compare_and_swap(typing_context: Any, address: Any, expected: Any, desired: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            width = ir.IntType(bits)
            old, new = builder.trunc(arguments[1], width), builder.trunc(arguments[2], width)
            pair = builder.cmpxchg(_pointer(builder, arguments[0], bits), old, new, ordering, "monotonic")
            return builder.extract_value(pair, 1)

        return types.boolean(types.int64, types.int64, types.int64), generate

    return intrinsic(compare_and_swap)


def _fence(ordering: str) -> Any:
    def fence(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(fence)


def _fetch_add(typing_context: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0], 64), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _I64])
        to, origin = builder.inttoptr(arguments[0], _BYTES), builder.inttoptr(arguments[1], _BYTES)
        builder.call(memcpy, [to, origin, arguments[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _prefetch(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, i32, i32, i32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        read, keep, data = i32(0), i32(3), i32(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], _BYTES), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _match_line(typing_context: Any, line: Any, key: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, marks = _snapshot(builder, arguments[0], 64), _snapshot(builder, arguments[0], 8)
        wanted = ir.Constant(words.type, ir.Undefined)
        for lane in range(16):
            wanted = builder.insert_element(wanted, arguments[1], ir.IntType(32)(lane))
        equal = builder.icmp_unsigned("==", words, wanted)
        marked = builder.icmp_unsigned("!=", marks, ir.Constant(marks.type, [0] * 16))
        mask = builder.bitcast(builder.and_(equal, marked), ir.IntType(16))
        return builder.zext(builder.lshr(mask, ir.IntType(16)(2)), _I64)

    return types.int64(types.int64, types.int64), generate


def _snapshot(builder: Any, address: Any, bits: int) -> Any:
    """Load 16 lanes that may be written meanwhile: any value then, but (frozen) the same one for all its uses."""
    lanes = ir.VectorType(ir.IntType(bits), 16)
    loaded = builder.load(builder.inttoptr(address, lanes.as_pointer()), typ=lanes)
    loaded.align = bits // 8
    frozen = ir.instructions.Instruction(builder.block, lanes, "freeze", [loaded])
    builder._insert(frozen)
    return frozen


def _trailing_zeros(typing_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), generate


Loader: TypeAlias = Callable[[int], int]
Storer: TypeAlias = Callable[[int, int], None]
Swapper: TypeAlias = Callable[[int, int, int], bool]

load_u8: Loader = _load(8, "monotonic")
load_u16: Loader = _load(16, "monotonic")
load_u16_acquire: Loader = _load(16, "acquire")
load_i64: Loader = _load(64, "monotonic")
load_i64_acquire: Loader = _load(64, "acquire")
store_u8: Storer = _store(8, "monotonic")
store_u16_release: Storer = _store(16, "release")
store_i64: Storer = _store(64, "monotonic")
compare_and_swap_u8: Swapper = _compare_and_swap(8, "monotonic")
compare_and_swap_u16: Swapper = _compare_and_swap(16, "acquire")
fence_acquire: Callable[[], None] = _fence("acquire")
fence_release: Callable[[], None] = _fence("release")
fetch_add: Callable[[int, int], int] = _intrinsic(_fetch_add)
"""Add to an int64 and return what it was; acquires and releases."""
copy_bytes: Callable[[int, int, int], None] = _intrinsic(_copy_bytes)
"""`memcpy(target, source, size)`: plain, so bytes that another thread writes meanwhile come out as anything."""
prefetch: Callable[[int], None] = _intrinsic(_prefetch)
match_line: Callable[[int, int], int] = _intrinsic(_match_line)
"""Bit j is set where byte 2 + j of a 128-byte line is not 0 and its int64 word 2 + j equals the key, j in 0..13."""
trailing_zeros: Callable[[int], int] = _intrinsic(_trailing_zeros)
"""Position of the lowest set bit; the value must not be 0."""
yield_processor: Any = types.ExternalFunction("sched_yield", types.int32())
