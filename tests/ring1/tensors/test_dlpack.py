"""Adopting tensors of other frameworks: NumPy, torch, bare capsules, and what is none of these."""

import ctypes
import datetime
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors import dlpack
from hps.tensors.array_checks import as_keys, as_output, check_key_tensor, check_output_tensor, view_as_keys
from hps.tensors.dlpack import CPU, CUDA, FLOAT, INT, TensorView, adopt, mark_consumed


class Exports:
    """A producer that is neither NumPy nor torch: whatever `make` returns, by whatever arguments it takes."""

    def __init__(self, make: Any, device: tuple[int, int] = (CPU, 0)) -> None:
        self._make = make
        self._device = device
        self.asked: dict[str, Any] = {}

    def __dlpack__(self, **arguments: Any) -> Any:
        self.asked = arguments
        return self._make(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class OldExports:
    """A producer from before DLPack 1.0: takes no `max_version`."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self._array.__dlpack__()


def producers(array: np.ndarray) -> dict[str, Any]:
    """The same memory through every way that a tensor comes in."""
    tensor = torch.from_numpy(array)
    return {
        "numpy": array,
        "torch": tensor,
        "torch subclass": torch.nn.Parameter(tensor, requires_grad=False),
        "capsule": to_dlpack(tensor),
        "versioned capsule": array.__dlpack__(max_version=(1, 0)),
        "object": Exports(array.__dlpack__),
        "old object": OldExports(array),
    }


def frozen(array: np.ndarray) -> list[Any]:
    """The same memory, read-only, through the ways that can say so."""
    array.flags.writeable = False
    return [array, array.__dlpack__(max_version=(1, 0)), Exports(array.__dlpack__)]


Give = Callable[[np.ndarray], Any]


@pytest.fixture(params=list(producers(np.zeros(1))))
def give(request: pytest.FixtureRequest) -> Give:
    """Gives an array as one of the producers does."""
    return lambda array: producers(array)[request.param]


def refused(message: str | None, call: Callable[[], Any], error: type[Exception] = InvalidInputError) -> Exception:
    with pytest.raises(error, match=message) as caught:
        call()
    return caught.value


class TestAdopt:
    def test_every_producer_tells_the_same(self, give: Give):
        array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        view = adopt(give(array))
        assert (view.pointer, view.shape, view.size) == (array.ctypes.data, (2, 3, 4), 24)
        assert (view.code, view.bits, view.lanes, view.dtype_name) == (INT, 32, 1, "int32")
        assert (view.device_type, view.device_id, view.device_name) == (CPU, 0, "CPU device 0")
        assert (view.on_host, view.contiguous, view.read_only, view.producer_stream) == (True, True, False, None)
        seen = view.host_array((4, 6))
        assert seen.dtype == array.dtype
        seen[0, 2], array[1, 2, 3] = -5, -7  # writes are seen both ways
        np.testing.assert_array_equal(seen, array.reshape(4, 6))
        assert array[0, 0, 2] == -5
        base = np.arange(60, dtype=np.float32).reshape(6, 10)
        view = adopt(give(base[1::2, 3:9:2]))
        assert (view.pointer, view.strides, view.contiguous) == (base.ctypes.data + 13 * 4, (20, 2), False)

    def test_dtypes_have_the_names_that_people_write(self, give: Give):
        for dtype in ("int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool"):
            assert adopt(give(np.ones((3, 4), dtype))).dtype_name == dtype
        assert adopt(torch.ones(3, dtype=torch.bfloat16)).dtype_name == "bfloat16"

    def test_scalars_empty_and_thin_tensors_are_contiguous(self, give: Give):
        for shape in ((), (0,), (3, 0), (0, 3), (1,), (1, 1), (2, 1, 3)):
            array = np.ones(shape, np.int64)
            view = adopt(give(array))
            assert (view.contiguous, view.shape, view.size) == (True, shape, array.size)
            np.testing.assert_array_equal(as_keys(give(array)), array.reshape(-1))
        assert adopt(np.ones((5, 4), np.float32)[2:3]).contiguous
        assert adopt(torch.ones(5, 4)[2:3]).contiguous
        assert not adopt(np.ones((5, 4), np.float32)[:, 1:2]).contiguous

    def test_the_memory_lives_as_long_as_its_view_or_array(self, give: Give):
        array = np.arange(1000, dtype=np.int64)
        gone = weakref.finalize(array, lambda: None)
        view = adopt(give(array))
        seen = view_as_keys(view)
        del array, view
        gc.collect()
        np.testing.assert_array_equal(seen, np.arange(1000))
        assert gone.alive
        del seen
        gc.collect()
        assert not gone.alive

    def test_nothing_is_left_behind_by_adopting(self, give: Give):
        array = np.arange(10)
        tensor = give(array)
        adopt(tensor)
        before = sys.getrefcount(array), sys.getrefcount(tensor)
        for _ in range(100):
            as_keys(tensor)
        assert (sys.getrefcount(array), sys.getrefcount(tensor)) == before

    def test_read_only_keys_are_taken_in_place_and_stay_read_only(self):
        array = np.arange(5)
        for tensor in frozen(array):
            assert adopt(tensor).read_only
            keys = as_keys(tensor)
            assert (keys.flags.writeable, keys.ctypes.data) == (False, array.ctypes.data)

    def test_torch_is_read_without_a_capsule(self):
        tensor = torch.arange(6).reshape(2, 3)
        view = dlpack.read_object(tensor, "tensor")
        assert view is not None
        assert view.owner is tensor
        assert (view.pointer, view.shape, view.strides) == (tensor.data_ptr(), (2, 3), (3, 1))
        assert dlpack.read_object(Exports(None), "tensor") is None

    def test_a_producer_of_cuda_memory_is_told_the_stream(self):
        array = np.arange(3)
        on_gpu = Exports(lambda stream, max_version: array.__dlpack__(max_version=max_version), (CUDA, 0))
        on_host = Exports(array.__dlpack__)
        for one, asked in ((on_gpu, {"stream": 77, "max_version": (1, 0)}), (on_host, {"max_version": (1, 0)})):
            adopt(one, stream=77)
            assert one.asked == asked


class TestCapsules:
    def test_a_capsule_stays_usable_and_is_released_if_it_is_never_consumed(self):
        tensor = torch.arange(5)
        capsule = to_dlpack(tensor)
        for _ in range(3):
            np.testing.assert_array_equal(as_keys(capsule), np.arange(5))
        assert "dltensor" in repr(capsule)
        assert from_dlpack(capsule).data_ptr() == tensor.data_ptr()
        array = np.arange(5)
        capsule, gone = array.__dlpack__(), weakref.finalize(array, lambda: None)
        view = adopt(capsule)
        del array, capsule, view
        gc.collect()
        assert not gone.alive

    @pytest.mark.parametrize("version", [None, (1, 0)])
    def test_a_consumed_capsule_is_refused(self, version: tuple[int, int] | None):
        capsule = np.arange(5).__dlpack__(max_version=version)
        assert from_dlpack(capsule).shape == (5,)
        refused("adopting keys: got a capsule that was consumed already", lambda: as_keys(capsule))

    def test_a_capsule_marked_as_consumed_is_collected_in_silence(self, capfd: pytest.CaptureFixture[str]):
        capsule = np.arange(5).__dlpack__()
        mark_consumed(capsule)
        with pytest.raises(InvalidInputError, match="consumed already"):
            as_keys(capsule)
        del capsule
        gc.collect()
        assert capfd.readouterr().err == ""

    def test_an_empty_tensor_may_lie_anywhere(self):
        memory = np.zeros(17, np.uint8)
        keys = view_as_keys(TensorView(memory.ctypes.data + 1, (3, 0), None, (INT, 64, 1), (CPU, 0), False, memory))
        assert (keys.shape, keys.ctypes.data % 8) == ((0,), 0)

    def test_another_librarys_capsule_and_a_later_major_version_are_refused(self):
        refused(r"datetime\.datetime_CAPI", lambda: as_keys(datetime.datetime_CAPI))
        capsule = np.arange(5).__dlpack__(max_version=(1, 0))
        header = ctypes.c_uint32.from_address(_pointer(capsule, b"dltensor_versioned"))
        header.value = 2
        refused(r"DLPack 2\.0, expected 1\.x", lambda: adopt(capsule))
        header.value = 1

    @pytest.mark.parametrize(
        ("offset", "kind", "value"),
        [(16, ctypes.c_int32, -1), (16, ctypes.c_int32, 65), (24, ctypes.c_uint64, 0), (0, ctypes.c_uint64, 0)],
    )
    def test_a_damaged_description_is_refused(self, offset: int, kind: Any, value: int):
        capsule = np.arange(5).__dlpack__()
        field = kind.from_address(_pointer(capsule, b"dltensor") + offset)
        was, field.value = field.value, value
        refused("damaged", lambda: adopt(capsule))
        field.value = was

    def test_an_offset_that_a_description_gives_is_added(self):
        array = np.arange(5)
        capsule = array.__dlpack__()
        ctypes.c_uint64.from_address(_pointer(capsule, b"dltensor") + 40).value = 16
        assert adopt(capsule).pointer == array.ctypes.data + 16


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    address: int = get(capsule, name)
    return address


class TestNoTensors:
    @pytest.mark.parametrize("thing", [None, 5, [1, 2], "keys", object(), b"12345678", np.int64(3)])
    def test_what_does_not_speak_dlpack_is_refused_by_name(self, thing: object):
        refused(f"adopting keys: got {type(thing).__name__}, expected a tensor", lambda: as_keys(thing))

    @pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError, AttributeError])
    def test_an_export_that_fails_is_a_typed_error_with_its_cause(self, error: type[Exception]):
        def fail(**_: Any) -> None:
            raise error("not today")

        failed = refused("Exports cannot be exported: not today", lambda: adopt(Exports(fail)))
        assert isinstance(failed.__cause__, error)

    def test_what_is_no_plain_tensor_is_refused(self):
        refused("gave list, no capsule", lambda: adopt(Exports(lambda **_: [1])))
        refused("detach", lambda: as_output(torch.empty(4, 4, requires_grad=True), 4, 4))
        refused("strided", lambda: adopt(torch.eye(3).to_sparse()))


class TestKeys:
    def test_int64_of_any_shape_is_flattened_in_place_and_int32_is_widened(self, give: Give):
        array = np.arange(-12, 12).reshape(2, 3, 4)
        keys = as_keys(give(array))
        assert (keys.shape, keys.dtype, keys.ctypes.data) == ((24,), np.int64, array.ctypes.data)
        array = np.array([[-1, 2], [np.iinfo(np.int32).min, np.iinfo(np.int32).max]], np.int32)
        keys = as_keys(give(array))
        assert keys.dtype == np.int64
        np.testing.assert_array_equal(keys, array.reshape(-1))

    def test_other_dtypes_and_layouts_are_refused_by_name(self, give: Give):
        for dtype in ("int8", "int16", "uint8", "uint32", "uint64", "float32", "float64", "complex64", "bool"):
            cure = ".*view the same bits as int64" if dtype == "uint64" else ""
            keys = give(np.ones(3, dtype))
            refused(f"got {dtype}, expected int64{cure}", lambda keys=keys: as_keys(keys), InvalidDtypeError)
        for array in (np.arange(10)[::2], np.arange(12).reshape(3, 4).T):
            keys = give(array)
            refused(r"strides \(.*expected a C-contiguous tensor", lambda keys=keys: as_keys(keys))

    @pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(3, "M8[s]"), np.zeros(2, "i8,f4")])
    def test_arrays_of_no_numbers_foreign_byte_order_or_the_reverse_are_refused(self, array: np.ndarray):
        refused(None, lambda: as_keys(array), InvalidDtypeError)
        refused(">i8", lambda: as_keys(np.arange(3).astype(">i8")), InvalidDtypeError)
        refused("C-contiguous", lambda: as_keys(np.arange(10)[::-1]))

    def test_keys_that_are_not_aligned_are_copied(self):
        keys = as_keys(np.frombuffer(b"\0" + np.arange(5).tobytes(), np.int64, 5, 1))
        assert keys.flags.aligned
        np.testing.assert_array_equal(keys, np.arange(5))

    def test_keys_on_a_gpu_are_refused_here_and_pass_the_check_of_a_view(self):
        view = TensorView(4096, (3,), None, (INT, 64, 1), (CUDA, 1), False, None)
        check_key_tensor(view)
        refused("CUDA device 1", lambda: view_as_keys(view))
        capsule = np.arange(3).__dlpack__()
        device = ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8)
        device.value = CUDA
        refused("got a tensor on CUDA device 0, expected host memory", lambda: as_keys(capsule))
        device.value = CPU


class TestOutput:
    def test_rows_are_written_to_the_first_elements(self, give: Give):
        for shape in ((6, 4), (24,), (2, 3, 4), (25,), (7, 4)):
            array = np.zeros(shape, np.float32)
            out = as_output(give(array), 6, 4)
            assert out.shape == (6, 4)
            out[:] = np.arange(24).reshape(6, 4)
            np.testing.assert_array_equal(array.reshape(-1)[:24], np.arange(24))
            assert not array.reshape(-1)[24:].any()
        assert as_output(give(np.empty((0, 8), np.float32)), 0, 8).shape == (0, 8)

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            *[(np.zeros((6, 4), dtype), f"got {dtype}, expected float32") for dtype in ("float16", "float64", "complex64")],
            (np.zeros((5, 4), np.float32), r"\(5, 4\) with 20 elements, expected at least 24 for 6 vectors of 4"),
            (np.zeros(23, np.float32), r"\(23,\) with 23 elements, expected at least 24 for 6 vectors of 4"),
            (np.zeros((6, 8), np.float32)[:, ::2], "C-contiguous"),
        ],
    )
    def test_outputs_that_do_not_fit_are_refused(self, give: Give, array: np.ndarray, message: str):
        error = InvalidInputError if array.dtype == np.float32 else InvalidDtypeError
        refused(message, lambda: as_output(give(array), 6, 4), error)

    def test_outputs_that_are_read_only_or_not_aligned_are_refused_and_those_on_a_gpu_pass_the_check_of_a_view(self):
        for tensor in frozen(np.zeros((6, 4), np.float32)):
            refused("read-only", lambda tensor=tensor: as_output(tensor, 6, 4))
        refused("aligned", lambda: as_output(np.frombuffer(bytearray(97), np.float32, 24, 1), 6, 4))
        view = TensorView(4096, (6, 4), (4, 1), (FLOAT, 32, 1), (CUDA, 0), False, None)
        check_output_tensor(view, 6, 4)
        refused("at least 28", lambda: check_output_tensor(view, 7, 4))


def test_torch_publishes_functions_for_compiled_code_and_numpy_does_not():
    assert all(dlpack.exchange_table(torch.Tensor) or [0])
    assert dlpack.exchange_table(np.ndarray) is None
