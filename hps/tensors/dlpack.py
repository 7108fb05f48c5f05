"""Adopts tensors of other frameworks through DLPack (https://dmlc.github.io/dlpack), without copying them."""

from typing import Any, NoReturn

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.dlpack_structs import CAPSULE, MAX_VERSION, read_capsule, read_object
from hps.tensors.tensor_view import BOOL, COMPLEX, CPU, CUDA, CUDA_MANAGED, FLOAT, INT, UINT, TensorView
from hps.types import FloatArray, KeyArray

__all__ = ["TensorView", "adopt", "as_keys", "as_output", "check_keys", "check_output"]

_NUMPY_CODES = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}


def adopt(tensor: Any, stream: int | None = None, what: str = "tensor") -> TensorView:
    """Read where a tensor is. Nothing is copied, and a bare capsule stays usable by its owner.

    Args:
        tensor: an object with `__dlpack__` (NumPy, torch, CuPy, JAX), or a capsule of DLPack, with or without version.
        stream: the CUDA stream that will use the tensor, as DLPack numbers it. A producer of CUDA memory is asked to order
            its own work before, unless it tells `producer_stream`: ordering is then left to the caller. A bare capsule says
            nothing of streams.
        what: names the tensor in errors.

    Raises:
        InvalidInputError: it is no tensor, cannot be exported, or its capsule was consumed by someone else.
    """
    if isinstance(tensor, np.ndarray):
        return _of_numpy(tensor, what)
    if type(tensor) is CAPSULE:
        return read_capsule(tensor, what)
    return read_object(tensor, what) or read_capsule(_exported(tensor, stream, what), what)


def as_keys(keys: Any, what: str = "keys") -> KeyArray:
    """Adopt keys in host memory: an int64 tensor of any shape.

    Args:
        keys: as for `adopt`.
        what: names the keys in errors.

    Returns:
        (n,) int64, aligned: over the same memory where the keys are int64, else (int32) a widened copy. Read only.

    Raises:
        InvalidDtypeError: the elements are neither int64 nor int32.
        InvalidInputError: they are not C-contiguous or not in host memory; and as `adopt`.
    """
    array = _array(keys)
    if array is not None and array.dtype == np.int64 and array.flags.c_contiguous and array.flags.aligned:
        flat: KeyArray = array if array.ndim == 1 else array.reshape(-1)
        return flat
    view = adopt(keys, None, what)
    check_keys(view, what)
    _check_host(view, what)
    given = view.reshaped((view.size,))
    return given if view.bits == 64 and given.flags.aligned else given.astype(np.int64)


def as_output(out: Any, rows: int, dim: int, what: str = "output") -> FloatArray:  # (rows, dim)
    """Adopt an output in host memory: a float32 tensor of any shape with room for rows x dim elements.

    Args:
        out: as for `adopt`.
        what: names the output in errors.

    Returns:
        (rows, dim) float32 over its first elements, for writing.

    Raises:
        InvalidDtypeError: the elements are not float32.
        InvalidInputError: it is read-only, too small, not C-contiguous or not in host memory; and as `adopt`.
    """
    array = _array(out)
    if array is not None and array.dtype == np.float32 and array.size >= rows * dim:
        flags = array.flags
        if flags.c_contiguous and flags.writeable and flags.aligned:
            fits: FloatArray = array if array.shape == (rows, dim) else array.reshape(-1)[: rows * dim].reshape(rows, dim)
            return fits
    view = adopt(out, None, what)
    check_output(view, rows, dim, what)
    _check_host(view, what)
    return view.reshaped((rows, dim))


def _array(tensor: Any) -> np.ndarray | None:
    """A tensor in host memory as NumPy reads it, the fastest way; None where it takes `adopt` to read it or to say why not."""
    if type(tensor) is np.ndarray:
        return tensor
    if type(tensor) is CAPSULE:
        return None
    try:
        return np.from_dlpack(tensor)
    except (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None


def check_keys(view: TensorView, what: str = "keys") -> None:
    """Check that a tensor on any device can be keys: int64 or int32 (`view.bits` tells), C-contiguous.

    Raises:
        InvalidDtypeError, InvalidInputError: it cannot.
    """
    if view.code != INT or view.bits not in (32, 64) or view.lanes != 1:
        hint = "; view the same bits as int64" if (view.code, view.bits) == (UINT, 64) else "; convert them"
        raise InvalidDtypeError(f"adopting {what}: got {view.dtype_name}, wanted int64 (or int32, which is widened){hint}")
    if not view.contiguous:
        _fail_layout(view, what)


def check_output(view: TensorView, rows: int, dim: int, what: str = "output") -> None:
    """Check that a tensor on any device can take rows x dim float32 elements.

    Raises:
        InvalidDtypeError, InvalidInputError: it cannot.
    """
    if (view.code, view.bits, view.lanes) != (FLOAT, 32, 1):
        raise InvalidDtypeError(f"adopting {what}: got {view.dtype_name}, wanted float32; allocate it as float32")
    if not view.contiguous:
        _fail_layout(view, what)
    if view.read_only:
        raise InvalidInputError(f"adopting {what}: got a read-only tensor, wanted a writable one; pass a copy")
    if view.size < rows * dim:
        raise InvalidInputError(
            f"adopting {what}: got shape {view.shape} with {view.size} elements, wanted at least {rows * dim} for {rows} "
            f"vectors of {dim}; allocate it larger"
        )
    if view.pointer % 4:
        raise InvalidInputError(f"adopting {what}: got memory that is not aligned to float32; pass a tensor of its own")


def _check_host(view: TensorView, what: str) -> None:
    if not view.on_host:
        raise InvalidInputError(f"adopting {what}: got a tensor on {view.device_name}, wanted host memory; copy it to the CPU")


def _fail_layout(view: TensorView, what: str) -> NoReturn:
    raise InvalidInputError(
        f"adopting {what}: got shape {view.shape} with strides {view.strides}, wanted a C-contiguous tensor; make it contiguous"
    )


def _of_numpy(array: np.ndarray, what: str) -> TensorView:
    code = _NUMPY_CODES.get(array.dtype.kind)
    if code is None or not array.dtype.isnative:
        raise InvalidDtypeError(f"adopting {what}: got dtype {array.dtype.str}, wanted numbers in native byte order")
    strides: tuple[int, ...] | None = None
    if not array.flags.c_contiguous:
        if any(stride % array.itemsize for stride in array.strides):
            raise InvalidInputError(f"adopting {what}: got byte strides {array.strides} that are no multiple of an element")
        strides = tuple([stride // array.itemsize for stride in array.strides])
    dtype = (code, 8 * array.itemsize, 1)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, (CPU, 0), not array.flags.writeable, array)


def _exported(tensor: Any, stream: int | None, what: str) -> Any:
    """The capsule that a tensor's producer makes."""
    try:
        export = tensor.__dlpack__
    except AttributeError:
        raise InvalidInputError(
            f"adopting {what}: got {type(tensor).__name__}, wanted a tensor that speaks DLPack (NumPy, torch, CuPy, JAX) or a "
            "capsule of one"
        ) from None
    arguments: dict[str, Any] = {}
    try:
        if stream is not None and int(tensor.__dlpack_device__()[0]) in (CUDA, CUDA_MANAGED):
            arguments["stream"] = stream
        try:
            capsule = export(**arguments, max_version=MAX_VERSION)
        except TypeError:  # a producer older than DLPack 1.0
            capsule = export(**arguments)
    except (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"adopting {what}: its {type(tensor).__name__} cannot be exported: {error}") from error
    if type(capsule) is not CAPSULE:
        raise InvalidInputError(
            f"adopting {what}: {type(tensor).__name__}.__dlpack__ gave {type(capsule).__name__}, no capsule"
        )
    return capsule
