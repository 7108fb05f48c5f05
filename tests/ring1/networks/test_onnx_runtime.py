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


def model(kind: int = TensorProto.FLOAT, width: Any = 4, **node: Any) -> bytes:
    """Answers `sum` and `product` of `a` and `b`."""
    given = [helper.make_tensor_value_info(name, kind, ["samples", width]) for name in "ab"]
    found = [helper.make_tensor_value_info(name, kind, ["samples", width]) for name in ("sum", "product")]
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


def test_only_the_named_outputs_are_computed() -> None:
    network = opened(model(), outputs=("product",))
    assert [*network.run({"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)})] == ["product"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (A, NetworkTensor("b", "float32", (-1, 8))),
            "got float32 [-1, 8] for input 'b' (dense.inputs), expected float32 [-1, 4]",
        ),
        ((A, NetworkTensor("b", "float32", (-1,))), "got float32 [-1] for input 'b' (dense.inputs), expected float32 [-1, 4]"),
        ((A, NetworkTensor("b", "int64", (-1, 4))), "got int64 [-1, 4] for input 'b' (dense.inputs), expected float32 [-1, 4]"),
    ],
)
def test_an_input_of_another_dtype_or_width_is_named_with_got_and_expected(
    inputs: tuple[NetworkTensor, ...], message: str
) -> None:
    with pytest.raises(hps.ModelFileError, match=re.escape(f"opening the network dense.onnx: {message}")):
        opened(model(), *inputs)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(TensorProto.FLOAT16, "float16"), (TensorProto.INT64, "int64"), (TensorProto.INT32, "int32")],
)
def test_features_may_be_of_other_dtypes(kind: int, dtype: str) -> None:
    network = opened(model(kind), *(NetworkTensor(name, dtype, (-1, 4)) for name in "ab"))
    given = {name: np.ones((2, 4), dtype) for name in "ab"}
    assert network.run(given)["sum"].dtype == dtype


def test_a_dtype_that_requests_cannot_give_is_named() -> None:
    with pytest.raises(hps.ModelFileError, match=re.escape("expected tensor(double) [-1, 4]")):
        opened(model(TensorProto.DOUBLE))


def test_a_width_that_the_network_leaves_free_fits() -> None:
    opened(model(width="any"), A, B)


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
