"""Adopts and checks callers' arrays: with a wrong one a kernel or an engine would access memory out of bounds.

Arrays and tensors are checked once a call, at the entry point. Every check raises `InvalidDtypeError` for a wrong dtype or a
non-array, and `InvalidInputError` for a wrong shape or place, an array that is not C-contiguous, and a read-only output. Only
int32 keys are copied, to widen them.
"""

import sys
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.dlpack import BFLOAT, CAPSULE, FLOAT, INT, UINT, TensorView, adopt
from hps.types import BoolArray, FloatArray, KeyArray

_INT64 = np.dtype(np.int64)
_FETCHED = (_INT64, np.dtype(np.float32), np.dtype(np.bool_))

# -- host arrays -------------------------------------------------------------------------------------------------------


def check_fetch(
    doing: str,
    keys: KeyArray,  # (n,)
    out: FloatArray,  # (n, dim)
    found: BoolArray,  # (n,)
    dim: int,
    *,
    aligned: bool = False,
) -> tuple[KeyArray, FloatArray, BoolArray]:
    """Check the arrays of a fetch; `doing`, such as `fetching from table t`, starts the message."""
    if _are_fetched(keys, out, found, dim):
        return keys, out, found
    keys = check_keys(doing, keys, aligned=aligned)
    out = check_array(doing, "out", out, np.float32, (keys.size, dim), writable=True, aligned=aligned)
    return keys, out, check_array(doing, "found", found, np.bool_, (keys.size,), writable=True)


def _are_fetched(keys: Any, out: Any, found: Any, dim: int) -> bool:
    """Return True if nothing is wrong with the arrays of a fetch, in a third of the time that naming it takes."""
    return (
        type(keys) is type(out) is type(found) is np.ndarray
        and (keys.dtype, out.dtype, found.dtype) == _FETCHED
        and keys.ndim == 1
        and out.shape == (keys.size, dim)
        and found.shape == keys.shape
        and (flags := keys.flags).c_contiguous
        and flags.aligned
        and out.flags.carray
        and found.flags.carray
    )


def check_rows(
    doing: str,
    keys: KeyArray,  # (n,)
    vectors: FloatArray,  # (n, dim)
    dim: int,
    *,
    aligned: bool = False,
) -> tuple[KeyArray, FloatArray]:
    keys = check_keys(doing, keys, aligned=aligned)
    return keys, check_array(doing, "vectors", vectors, np.float32, (keys.size, dim), aligned=aligned)


def check_keys(doing: str, keys: KeyArray, *, aligned: bool = False) -> KeyArray:
    """Check keys: one dimension of int64."""
    checked: KeyArray = check_array(doing, "keys", keys, np.int64, None, aligned=aligned)
    return checked


def check_positive(doing: str, name: str, value: int) -> None:
    """Refuse a number below 1 with `InvalidInputError`."""
    if value < 1:
        raise InvalidInputError(f"{doing}: got {name} {value}, expected at least 1")


def check_array(
    doing: str,
    name: str,
    array: Any,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...] | None,
    *,
    writable: bool = False,
    aligned: bool = False,
    rows_apart: bool = False,
) -> Any:
    """Return an array as a plain `ndarray`; kernels do not accept a subclass such as a memory-mapped file.

    Args:
        shape: None: one dimension of any length.
        aligned: numba kernels need aligned arrays and do not check.
        rows_apart: require C-contiguous rows rather than a C-contiguous array.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidDtypeError(f"{doing}: {name}: got {got}, expected a NumPy array of {np.dtype(dtype)}")
    if array.ndim != 1 if shape is None else array.shape != shape:
        raise InvalidInputError(f"{doing}: {name}: got shape {array.shape}, expected {shape or '(n,)'}")
    flags = array.flags
    if not (array[:1].flags if rows_apart else flags).c_contiguous:
        raise InvalidInputError(f"{doing}: {name}: got a strided array, expected a C-contiguous one; use np.ascontiguousarray")
    if aligned and not flags.aligned:
        raise InvalidInputError(f"{doing}: {name}: got an array that is not aligned, expected an aligned one; pass a copy")
    if writable and not flags.writeable:
        raise InvalidInputError(f"{doing}: {name}: got a read-only array, expected one to write to")
    return array if type(array) is np.ndarray else np.asarray(array)


# -- sequences --------------------------------------------------------------------------------------------------------


def as_host_keys(keys: Any) -> KeyArray:
    """Convert a sequence or array of integers to (n,) int64, C-contiguous, in host memory; copy only if necessary.

    uint64 is taken bit for bit, as HugeCTR's `lookup` does.

    Raises:
        InvalidDtypeError: they are not integers.
        InvalidInputError: they are not one-dimensional, or do not fit 64 bits.
    """
    if type(keys) is np.ndarray and keys.dtype == _INT64 and keys.ndim == 1 and keys.flags.c_contiguous:
        return keys
    array = as_host_array(keys, "keys", "a sequence of integers")
    if array.ndim != 1:
        raise InvalidInputError(f"reading keys: got shape {array.shape}, expected one dimension; flatten them")
    if array.size == 0 and array.dtype == np.float64:  # numpy's dtype of []
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidDtypeError(f"reading keys: got dtype {array.dtype}, expected int64 (or another integer type)")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64)
    return np.ascontiguousarray(array, np.int64)


def as_host_vectors(vectors: Any) -> FloatArray:
    """Convert an array or nested sequences of numbers to float32, C-contiguous, in host memory; copy only if necessary.

    Raises:
        InvalidDtypeError: they are not real numbers.
        InvalidInputError: they are ragged, or cannot be read as an array in host memory (bfloat16, tensors with gradients).
    """
    array = as_host_array(vectors, "vectors", "an (n, dim) array of float32 in host memory")
    if array.dtype.kind not in "fiu":
        raise InvalidDtypeError(f"reading vectors: got dtype {array.dtype}, expected float32 (or other real numbers)")
    return np.ascontiguousarray(array, np.float32)


def as_host_array(values: Any, label: str, expected: str) -> npt.NDArray[Any]:
    """Read an array or nested sequences as an array in host memory.

    Raises:
        InvalidInputError: they are ragged, or not in host memory.
    """
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(f"reading {label}: got {type(values).__name__} ({error}), expected {expected}") from error


# -- tensors -----------------------------------------------------------------------------------------------------------


def as_keys(keys: Any) -> KeyArray:
    """Adopt keys in host memory: an int64 tensor of any shape.

    Args:
        keys: as for `adopt`.

    Returns:
        (n,) int64, aligned: the same memory for int64 keys, else (int32) a widened copy. Read only.
    """
    array = keys if type(keys) is np.ndarray else _array(keys)
    if array is not None and array.dtype == np.int64 and array.flags.c_contiguous and array.flags.aligned:
        flat: KeyArray = array if array.ndim == 1 else array.reshape(-1)
        return flat
    return view_as_keys(adopt(keys, label="keys"))


def view_as_keys(view: TensorView) -> KeyArray:
    """Return an adopted tensor as keys; see `as_keys`."""
    check_key_tensor(view)
    _check_host(view, "keys")
    given = view.host_array((view.size,))
    return given if view.bits == 64 and given.flags.aligned else given.astype(np.int64)


def as_output(out: Any, rows: int, dim: int, *, narrow: bool = False) -> Any:  # (rows, dim)
    """Adopt an output in host memory: a float32 tensor of any shape with room for rows x dim elements.

    Args:
        out: as for `adopt`.
        narrow: it may be of 16 bits.

    Returns:
        (rows, dim) float32 over its first elements, writable; float16, or uint16 for the bits of bfloat16.
    """
    array = out if type(out) is np.ndarray else _array(out)
    if array is not None and array.dtype == np.float32 and array.size >= rows * dim:
        flags = array.flags
        if flags.c_contiguous and flags.writeable and flags.aligned:
            fits: FloatArray = array if array.shape == (rows, dim) else array.reshape(-1)[: rows * dim].reshape(rows, dim)
            return fits
    return view_as_output(adopt(out, label="output"), rows, dim, narrow=narrow)


def view_as_output(view: TensorView, rows: int, dim: int, *, narrow: bool = False) -> Any:  # (rows, dim)
    """Return an adopted tensor as an output; see `as_output`."""
    check_output_tensor(view, rows, dim, narrow=narrow)
    _check_host(view, "output")
    return view.host_array((rows, dim))


def _array(tensor: Any) -> np.ndarray | None:
    """Return a host tensor as NumPy reads it, the fastest way; None if only `adopt` can read or reject it."""
    if type(tensor) is CAPSULE:
        return None
    try:
        return np.from_dlpack(tensor)
    except (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None


def check_key_tensor(view: TensorView, label: str = "keys") -> None:
    """Check a tensor on any device as keys: int64 or int32 (see `view.bits`), C-contiguous."""
    if view.code != INT or view.bits not in (32, 64) or view.lanes != 1:
        hint = "; view the same bits as int64" if (view.code, view.bits) == (UINT, 64) else "; convert them"
        raise InvalidDtypeError(f"adopting {label}: got {view.dtype_name}, expected int64 (or int32, which is widened){hint}")
    if not view.contiguous:
        _fail_layout(view, label)


def check_output_tensor(view: TensorView, rows: int, dim: int, *, narrow: bool = False) -> None:
    """Check that a tensor on any device has room for rows x dim float32 elements, or with `narrow` float16 or bfloat16 ones."""
    narrows = narrow and (view.code, view.bits, view.lanes) in ((FLOAT, 16, 1), (BFLOAT, 16, 1))
    if not narrows and (view.code, view.bits, view.lanes) != (FLOAT, 32, 1):
        expected = "float32, float16 or bfloat16" if narrow else "float32"
        raise InvalidDtypeError(f"adopting output: got {view.dtype_name}, expected {expected}; allocate it as that")
    if not view.contiguous:
        _fail_layout(view, "output")
    if view.read_only:
        raise InvalidInputError("adopting output: got a read-only tensor, expected a writable one; pass a copy")
    if view.size < rows * dim:
        raise InvalidInputError(
            f"adopting output: got shape {view.shape} with {view.size} elements, expected at least {rows * dim} for {rows} "
            f"vectors of {dim}; allocate it larger"
        )
    if view.pointer % (view.bits // 8):
        raise InvalidInputError(
            f"adopting output: got memory that is not aligned to {view.dtype_name}; pass a tensor of its own"
        )


def _check_host(view: TensorView, label: str) -> None:
    if not view.on_host:
        raise InvalidInputError(
            f"adopting {label}: got a tensor on {view.device_name}, expected host memory; copy it to the CPU"
        )


def _fail_layout(view: TensorView, label: str) -> NoReturn:
    raise InvalidInputError(
        f"adopting {label}: got shape {view.shape} with strides {view.strides}, expected a C-contiguous tensor; make it "
        "contiguous"
    )


def size_on_device(tensor: Any) -> int:
    """Return the size of a tensor in CUDA memory that a CUDA cache reads itself; -1 for any other."""
    if type(tensor) is cupy_array():
        return int(tensor.size)
    return int(tensor.numel()) if getattr(tensor, "is_cuda", False) else -1


def cupy_array() -> Any:
    """Return the type of CuPy's arrays, which are always in CUDA memory; None until CuPy is imported."""
    return getattr(sys.modules.get("cupy"), "ndarray", None)


def adopt_keys(keys: Any, on_cuda: bool) -> tuple[Any, int]:
    """Adopt keys: (n,) int64 in host memory, or the tensor that a CUDA cache reads itself. Also return n."""
    if on_cuda and type(keys) is not np.ndarray:
        if (size := size_on_device(keys)) >= 0:
            return keys, size
        view = adopt(keys, label="keys")
        if not view.on_host:
            return view, view.size
        flat = view_as_keys(view)
    else:
        flat = as_keys(keys)
    return flat, flat.size


def adopt_output(out: Any, rows: int, dim: int, *, on_cuda: bool, narrow: bool = False) -> Any:
    """Adopt an output: (rows, dim) in host memory, see `as_output`, or the tensor that a CUDA cache writes itself."""
    if on_cuda and type(out) is not np.ndarray:
        if size_on_device(out) >= 0:
            return out
        view = adopt(out, label="output")
        return view_as_output(view, rows, dim, narrow=narrow) if view.on_host else view
    return as_output(out, rows, dim, narrow=narrow)
