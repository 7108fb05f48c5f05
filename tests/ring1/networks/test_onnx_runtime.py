"""Networks in ONNX files: inputs are checked by name, dtype and shape before the first request."""

import re
from typing import Any

import numpy as np
import pytest

import hps
from hps.networks.base import NetworkTensor
from hps.testing.networks import A, B, NetworkContract

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402 - after onnx is known to be there

from hps.networks.onnx_runtime import OnnxNetwork  # noqa: E402


def model(kind: int = TensorProto.FLOAT, width: Any = 4) -> bytes:
    """Answers `sum` and `product` of `a` and `b`."""
    of = lambda names: [helper.make_tensor_value_info(name, kind, ["samples", width]) for name in names]  # noqa: E731
    given, found = of("ab"), of(("sum", "product"))
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Mul", ["a", "b"], ["product"])]
    made = helper.make_model(helper.make_graph(nodes, "g", given, found), opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    content: bytes = made.SerializeToString()
    return content


def opened(content: bytes, *inputs: NetworkTensor, outputs: tuple[str, ...] = ("sum",)) -> OnnxNetwork:
    return OnnxNetwork.open("dense.onnx", content, inputs or (A, B), outputs, None)


class TestOnnxNetwork(NetworkContract):
    network_class = OnnxNetwork

    def content(self) -> bytes:
        return model()


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (-1, 8)), ("float32", (-1,)), ("int64", (-1, 4))])
def test_an_input_of_another_dtype_or_width_is_named_with_got_and_expected(dtype: str, shape: tuple[int, ...]) -> None:
    message = f"got {dtype} {[*shape]} for input 'b' (dense.inputs), expected float32 [-1, 4]"
    with pytest.raises(hps.ModelFileError, match=re.escape(f"opening the network dense.onnx: {message}")):
        opened(model(), A, NetworkTensor("b", dtype, shape))


def test_features_may_be_of_other_dtypes() -> None:
    for kind, dtype in ((TensorProto.FLOAT16, "float16"), (TensorProto.INT64, "int64"), (TensorProto.INT32, "int32")):
        network = opened(model(kind), *(NetworkTensor(name, dtype, (-1, 4)) for name in "ab"))
        assert network.run({name: np.ones((2, 4), dtype) for name in "ab"})["sum"].dtype == dtype
    with pytest.raises(hps.ModelFileError, match=re.escape("expected float64 [-1, 4]")):
        opened(model(TensorProto.DOUBLE))
    opened(model(width="any"), A, B)  # a width that the network leaves free fits


@pytest.mark.parametrize("dtype", ["float64", "int16", "int8", "uint8", "bool"])
def test_keys_are_computed_of_any_dtype(dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    given = helper.make_tensor_value_info("x", kind, ["samples", "n"])
    found = helper.make_tensor_value_info("keys", TensorProto.INT64, ["samples", "n"])
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["keys"], to=TensorProto.INT64)], "g", [given], [found])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    network = opened(made.SerializeToString(), NetworkTensor("x", dtype, (-1, -1)), outputs=("keys",))
    values = np.arange(6).reshape(2, 3).astype(dtype)
    np.testing.assert_array_equal(network.run({"x": values})["keys"], values.astype(np.int64), strict=True)


def test_a_lookup_of_computed_keys_may_have_vectors_of_any_shape() -> None:
    assert opened(model(), A, NetworkTensor("b", "float32", None)).run({name: np.ones((2, 4), np.float32) for name in "ab"})
    with pytest.raises(hps.ModelFileError, match=re.escape("got float64 of any shape for input 'b'")):
        opened(model(), A, NetworkTensor("b", "float64", None))


def test_threads_are_those_of_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    session = OnnxNetwork.open.__globals__["onnxruntime"].InferenceSession

    def open_session(content: bytes, options: Any, **more: Any) -> Any:
        asked.append(options.intra_op_num_threads)
        return session(content, options, **more)

    monkeypatch.setattr("onnxruntime.InferenceSession", open_session)
    for value in ("1", "3,2", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        opened(model())
    assert asked == [1, 3, 0, 0]
