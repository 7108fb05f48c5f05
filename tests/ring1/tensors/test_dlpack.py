"""Adopting tensors of other frameworks: NumPy, torch, bare capsules, and what is none of these."""

import ctypes
import datetime
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.array_checks import as_keys, as_output, check_key_tensor, check_output_tensor, view_as_keys
from hps.tensors.dlpack import (
    CPU,
    CUDA,
    FLOAT,
    INT,
    TensorView,
    adopt,
    mark_consumed,
    read_object,
    work_stream_of,
)


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


WAYS = list(producers(np.zeros(1)))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestAdopt:
    def test_every_producer_tells_the_same(self, way: str):
        array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        view = adopt(producers(array)[way])
        assert view.pointer == array.ctypes.data
        assert view.shape == (2, 3, 4)
        assert (view.code, view.bits, view.lanes, view.dtype_name) == (INT, 32, 1, "int32")
        assert (view.device_type, view.device_id, view.device_name) == (CPU, 0, "CPU device 0")
        assert view.on_host
        assert view.contiguous
        assert not view.read_only
        assert view.producer_stream is None
        assert view.size == 24

    def test_dtypes_have_the_names_that_people_write(self, way: str):
        for dtype in ("int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool"):
            assert adopt(producers(np.ones((3, 4), dtype))[way]).dtype_name == dtype
        assert adopt(torch.ones(3, dtype=torch.bfloat16)).dtype_name == "bfloat16"

    def test_an_array_over_the_memory_sees_writes_both_ways(self, way: str):
        array = np.ones((3, 4), np.int32)
        seen = adopt(producers(array)[way]).host_array((4, 3))
        assert seen.dtype == array.dtype
        seen[1, 2] = 0
        array[2, 3] = 0
        np.testing.assert_array_equal(seen, array.reshape(4, 3))
        assert np.count_nonzero(array) == 10

    def test_strides_and_byte_offset_are_honoured(self, way: str):
        base = np.arange(60, dtype=np.float32).reshape(6, 10)
        view = adopt(producers(base[1::2, 3:9:2])[way])
        assert view.pointer == base.ctypes.data + 13 * 4
        assert view.strides == (20, 2)
        assert not view.contiguous

    def test_scalars_empty_and_thin_tensors_are_contiguous(self, way: str):
        for shape in ((), (0,), (3, 0), (0, 3), (1,), (1, 1), (2, 1, 3)):
            array = np.ones(shape, np.int64)
            view = adopt(producers(array)[way])
            assert view.contiguous
            assert (view.shape, view.size) == (shape, array.size)
            np.testing.assert_array_equal(as_keys(producers(array)[way]), array.reshape(-1))

    def test_strides_of_single_rows_do_not_matter(self):
        assert adopt(np.ones((5, 4), np.float32)[2:3]).contiguous
        assert adopt(torch.ones(5, 4)[2:3]).contiguous
        assert not adopt(np.ones((5, 4), np.float32)[:, 1:2]).contiguous

    def test_the_memory_lives_as_long_as_its_view_or_array(self, way: str):
        array = np.arange(1000, dtype=np.int64)
        gone = weakref.finalize(array, lambda: None)
        view = adopt(producers(array)[way])
        seen = view_as_keys(view)
        del array, view
        gc.collect()
        np.testing.assert_array_equal(seen, np.arange(1000))
        assert gone.alive
        del seen
        gc.collect()
        assert not gone.alive

    def test_nothing_is_left_behind_by_adopting(self, way: str):
        array = np.arange(10)
        tensor = producers(array)[way]
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
            assert not keys.flags.writeable
            assert keys.ctypes.data == array.ctypes.data

    def test_torch_is_read_without_a_capsule(self):
        tensor = torch.arange(6).reshape(2, 3)
        view = read_object(tensor, "tensor")
        assert view is not None
        assert view.owner is tensor
        assert (view.pointer, view.shape, view.strides) == (tensor.data_ptr(), (2, 3), (3, 1))
        assert read_object(Exports(None), "tensor") is None

    def test_a_producer_of_cuda_memory_is_told_the_stream(self):
        array = np.arange(3)
        on_gpu = Exports(lambda stream, max_version: array.__dlpack__(max_version=max_version), (CUDA, 0))
        adopt(on_gpu, stream=77)
        assert on_gpu.asked == {"stream": 77, "max_version": (1, 0)}
        on_host = Exports(array.__dlpack__)
        adopt(on_host, stream=77)
        assert on_host.asked == {"max_version": (1, 0)}


class TestCapsules:
    def test_a_capsule_stays_usable(self):
        tensor = torch.arange(5)
        capsule = to_dlpack(tensor)
        for _ in range(3):
            np.testing.assert_array_equal(as_keys(capsule), np.arange(5))
        assert "dltensor" in repr(capsule)
        again = from_dlpack(capsule)
        assert again.data_ptr() == tensor.data_ptr()

    def test_a_capsule_that_is_never_consumed_is_released(self):
        array = np.arange(5)
        capsule = array.__dlpack__()
        gone = weakref.finalize(array, lambda: None)
        view = adopt(capsule)
        del array, capsule, view
        gc.collect()
        assert not gone.alive

    @pytest.mark.parametrize("version", [None, (1, 0)])
    def test_a_consumed_capsule_is_refused(self, version: tuple[int, int] | None):
        capsule = np.arange(5).__dlpack__(max_version=version)
        kept = from_dlpack(capsule)
        assert kept.shape == (5,)
        with pytest.raises(InvalidInputError, match="adopting keys: got a capsule that was consumed already"):
            as_keys(capsule)

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
        pointer = memory.ctypes.data + 1
        keys = view_as_keys(TensorView(pointer, (3, 0), None, (INT, 64, 1), (CPU, 0), False, memory))
        assert keys.shape == (0,)
        assert keys.ctypes.data % 8 == 0

    def test_another_librarys_capsule_is_refused(self):
        with pytest.raises(InvalidInputError, match=r"datetime\.datetime_CAPI"):
            as_keys(datetime.datetime_CAPI)

    def test_a_later_major_version_is_refused(self):
        capsule = np.arange(5).__dlpack__(max_version=(1, 0))
        header = ctypes.c_uint32.from_address(_pointer(capsule, b"dltensor_versioned"))
        header.value = 2
        with pytest.raises(InvalidInputError, match=r"DLPack 2\.0, expected 1\.x"):
            adopt(capsule)
        header.value = 1

    @pytest.mark.parametrize(
        ("offset", "kind", "value"),
        [(16, ctypes.c_int32, -1), (16, ctypes.c_int32, 65), (24, ctypes.c_uint64, 0), (0, ctypes.c_uint64, 0)],
    )
    def test_a_damaged_description_is_refused(self, offset: int, kind: Any, value: int):
        capsule = np.arange(5).__dlpack__()
        field = kind.from_address(_pointer(capsule, b"dltensor") + offset)
        was, field.value = field.value, value
        with pytest.raises(InvalidInputError, match="damaged"):
            adopt(capsule)
        field.value = was

    def test_an_offset_that_a_description_gives_is_added(self):
        array = np.arange(5)
        capsule = array.__dlpack__()
        offset = ctypes.c_uint64.from_address(_pointer(capsule, b"dltensor") + 40)
        offset.value = 16
        assert adopt(capsule).pointer == array.ctypes.data + 16


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    address: int = get(capsule, name)
    return address


class TestNoTensors:
    @pytest.mark.parametrize("thing", [None, 5, [1, 2], "keys", object(), b"12345678", np.int64(3)])
    def test_what_does_not_speak_dlpack_is_refused_by_name(self, thing: object):
        with pytest.raises(InvalidInputError, match=f"adopting keys: got {type(thing).__name__}, expected a tensor"):
            as_keys(thing)

    def test_an_export_that_is_no_capsule_is_refused(self):
        with pytest.raises(InvalidInputError, match="gave list, no capsule"):
            adopt(Exports(lambda **_: [1]))

    @pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError, AttributeError])
    def test_an_export_that_fails_is_a_typed_error_with_its_cause(self, error: type[Exception]):
        def fail(**_: Any) -> None:
            raise error("not today")

        with pytest.raises(InvalidInputError, match="Exports cannot be exported: not today") as caught:
            adopt(Exports(fail))
        assert isinstance(caught.value.__cause__, error)

    def test_a_tensor_that_records_gradients_is_refused(self):
        with pytest.raises(InvalidInputError, match="detach"):
            as_output(torch.empty(4, 4, requires_grad=True), 4, 4)

    def test_a_sparse_tensor_is_refused(self):
        with pytest.raises(InvalidInputError, match="strided"):
            adopt(torch.eye(3).to_sparse())


class TestKeys:
    def test_int64_of_any_shape_is_flattened_in_place(self, way: str):
        array = np.arange(-12, 12).reshape(2, 3, 4)
        keys = as_keys(producers(array)[way])
        assert keys.shape == (24,)
        assert keys.dtype == np.int64
        assert keys.ctypes.data == array.ctypes.data

    def test_int32_is_widened(self, way: str):
        array = np.array([[-1, 2], [np.iinfo(np.int32).min, np.iinfo(np.int32).max]], np.int32)
        keys = as_keys(producers(array)[way])
        assert keys.dtype == np.int64
        np.testing.assert_array_equal(keys, array.reshape(-1))

    def test_other_dtypes_are_refused_by_name(self, way: str):
        for dtype in ("int8", "int16", "uint8", "uint32", "uint64", "float32", "float64", "complex64", "bool"):
            cure = ".*view the same bits as int64" if dtype == "uint64" else ""
            with pytest.raises(InvalidDtypeError, match=f"got {dtype}, expected int64{cure}"):
                as_keys(producers(np.ones(3, dtype))[way])

    def test_keys_that_are_not_contiguous_are_refused(self, way: str):
        for array in (np.arange(10)[::2], np.arange(12).reshape(3, 4).T):
            with pytest.raises(InvalidInputError, match=r"strides \(.*expected a C-contiguous tensor"):
                as_keys(producers(array)[way])

    def test_reversed_keys_and_foreign_byte_order_are_refused(self):
        with pytest.raises(InvalidInputError, match="C-contiguous"):
            as_keys(np.arange(10)[::-1])
        with pytest.raises(InvalidDtypeError, match=">i8"):
            as_keys(np.arange(3).astype(">i8"))

    @pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(3, "M8[s]"), np.zeros(2, "i8,f4")])
    def test_arrays_of_no_numbers_are_refused(self, array: np.ndarray):
        with pytest.raises(InvalidDtypeError):
            as_keys(array)

    def test_keys_that_are_not_aligned_are_copied(self):
        array = np.frombuffer(b"\0" + np.arange(5).tobytes(), np.int64, 5, 1)
        keys = as_keys(array)
        assert keys.flags.aligned
        np.testing.assert_array_equal(keys, np.arange(5))

    def test_keys_on_a_gpu_are_refused_here_and_pass_the_check_of_a_view(self):
        view = TensorView(4096, (3,), None, (INT, 64, 1), (CUDA, 1), False, None)
        check_key_tensor(view)
        with pytest.raises(InvalidInputError, match="CUDA device 1"):
            view_as_keys(view)
        capsule = np.arange(3).__dlpack__()
        device = ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8)
        device.value = CUDA
        with pytest.raises(InvalidInputError, match="got a tensor on CUDA device 0, expected host memory"):
            as_keys(capsule)
        device.value = CPU


class TestOutput:
    def test_rows_are_written_to_the_first_elements(self, way: str):
        for shape in ((6, 4), (24,), (2, 3, 4), (25,), (7, 4)):
            array = np.zeros(shape, np.float32)
            out = as_output(producers(array)[way], 6, 4)
            assert out.shape == (6, 4)
            out[:] = np.arange(24).reshape(6, 4)
            np.testing.assert_array_equal(array.reshape(-1)[:24], np.arange(24))
            assert not array.reshape(-1)[24:].any()

    def test_no_rows_need_no_room(self, way: str):
        assert as_output(producers(np.empty((0, 8), np.float32))[way], 0, 8).shape == (0, 8)

    def test_other_dtypes_are_refused_by_name(self, way: str):
        for dtype in ("float16", "float64", "int32", "complex64"):
            with pytest.raises(InvalidDtypeError, match=f"got {dtype}, expected float32"):
                as_output(producers(np.zeros((4, 4), dtype))[way], 4, 4)

    def test_too_small_an_output_is_refused_by_its_numbers(self, way: str):
        for shape, said in (((5, 4), r"\(5, 4\) with 20"), ((23,), r"\(23,\) with 23")):
            with pytest.raises(InvalidInputError, match=f"{said} elements, expected at least 24 for 6 vectors of 4"):
                as_output(producers(np.zeros(shape, np.float32))[way], 6, 4)

    def test_an_output_that_is_not_contiguous_is_refused(self, way: str):
        with pytest.raises(InvalidInputError, match="C-contiguous"):
            as_output(producers(np.zeros((6, 8), np.float32)[:, ::2])[way], 6, 4)

    def test_a_read_only_output_is_refused(self):
        for tensor in frozen(np.zeros((6, 4), np.float32)):
            with pytest.raises(InvalidInputError, match="read-only"):
                as_output(tensor, 6, 4)

    def test_an_output_that_is_not_aligned_is_refused(self):
        array = np.frombuffer(bytearray(97), np.float32, 24, 1)
        with pytest.raises(InvalidInputError, match="aligned"):
            as_output(array, 6, 4)

    def test_an_output_on_a_gpu_passes_the_check_of_a_view(self):
        view = TensorView(4096, (6, 4), (4, 1), (FLOAT, 32, 1), (CUDA, 0), False, None)
        check_output_tensor(view, 6, 4)
        with pytest.raises(InvalidInputError, match="at least 28"):
            check_output_tensor(view, 7, 4)


def test_torch_publishes_how_to_ask_for_its_stream_and_numpy_does_not():
    assert work_stream_of(torch.Tensor) is not None
    assert work_stream_of(np.ndarray) is None


@pytest.mark.gpu
def test_torch_tells_the_stream_that_the_thread_works_on():
    ask, stream = work_stream_of(torch.Tensor), torch.cuda.Stream()
    assert ask is not None
    with torch.cuda.stream(stream):
        assert ask(0) == stream.cuda_stream
    assert ask(0) == torch.cuda.current_stream(0).cuda_stream
