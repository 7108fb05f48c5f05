"""Tensors of ONNX files that are elsewhere: refused wherever ONNX allows them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.networks.base import NetworkTensor
from hps.networks.onnx_messages import refuse_external_data

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper  # noqa: E402 - after onnx is known to be there

from hps.networks.onnx_runtime import OnnxNetwork  # noqa: E402

X, Y = helper.make_tensor_value_info("x", 1, ["n", 4]), helper.make_tensor_value_info("y", 1, None)
IDENTITY = helper.make_node("Identity", ["w"], ["y"])


def tensor(*, place: str = "secret", location: int = TensorProto.EXTERNAL) -> Any:
    found = TensorProto(name="w", data_type=1, dims=[4, 4], data_location=location)
    if place:
        for key, value in (("location", place), ("offset", "0"), ("length", "64")):
            found.external_data.add(key=key, value=value)
    else:
        found.raw_data = bytes(64)
    return found


def graph(held: Any) -> Any:
    return helper.make_graph([helper.make_node("Identity", ["x"], ["z"]), IDENTITY], "g", [X], [Y], [held])


def model(of: Any, **more: Any) -> Any:
    return helper.make_model(of, opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("f", 1)], ir_version=8, **more)


def of_nodes(*nodes: Any) -> Any:
    return helper.make_graph([*nodes], "g", [X], [Y])


def sparse() -> Any:
    return helper.make_sparse_tensor(tensor(), helper.make_tensor("i", 7, [1], [0]), [4, 4])


def branch() -> Any:
    return helper.make_graph([IDENTITY], "b", [], [Y], [tensor()])


def training() -> Any:
    found = model(graph(tensor(place="", location=0)))
    found.training_info.add().algorithm.CopyFrom(graph(tensor()))
    return found


def function() -> Any:
    inner = helper.make_function("f", "F", [], ["y"], [helper.make_node("Constant", [], ["y"], value=tensor())], [])
    return model(of_nodes(helper.make_node("F", [], ["y"], domain="f")), functions=[inner])


FORMS = {
    "an initializer": lambda: model(graph(tensor())),
    "a location alone": lambda: model(graph(tensor(place="", location=1))),
    "a path alone": lambda: model(graph(tensor(location=0))),
    "a sparse initializer": lambda: model(helper.make_graph([IDENTITY], "g", [X], [Y], sparse_initializer=[sparse()])),
    "an attribute": lambda: model(of_nodes(helper.make_node("Constant", [], ["y"], value=tensor()))),
    "a list of attributes": lambda: model(of_nodes(helper.make_node("Constant", [], ["y"], values=[tensor()]))),
    "a sparse attribute": lambda: model(of_nodes(helper.make_node("Constant", [], ["y"], sparse_value=sparse()))),
    "a branch": lambda: model(of_nodes(helper.make_node("If", ["c"], ["y"], then_branch=branch(), else_branch=branch()))),
    "a list of graphs": lambda: model(of_nodes(helper.make_node("Some", ["c"], ["y"], graphs=[branch()]))),
    "a function": function,
    "training": training,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_in_another_file_is_refused_wherever_it_is_named(form: str) -> None:
    with pytest.raises(hps.ModelFileError, match=r"opening the network f\.onnx: got tensor 'w' in another file"):
        OnnxNetwork.open("f.onnx", FORMS[form]().SerializeToString(), [NetworkTensor("x", "float32", (-1, 4))], ("y",), None)


def test_onnx_runtime_would_read_files_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    np.arange(16, dtype=np.float32).tofile(tmp_path / "secret")
    session = onnxruntime.InferenceSession(FORMS["an initializer"]().SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": np.ones((1, 4), np.float32)})[0].ravel(), np.arange(16))


def test_tensors_in_the_file_are_taken() -> None:
    content = model(graph(tensor(place="", location=0))).SerializeToString()
    network = OnnxNetwork.open("f.onnx", content, [NetworkTensor("x", "float32", (-1, 4))], ("y",), None)
    assert network.run({"x": np.ones((1, 4), np.float32)})["y"].shape == (4, 4)


@pytest.mark.parametrize("content", [b"\x08", b"\x3a\xff\x01", b"\x3b\x00", b"\x3a" + b"\xff" * 11, b"\x00\x00\x00\x00ORTM"])
def test_what_is_no_onnx_is_refused(content: bytes) -> None:
    with pytest.raises(hps.ModelFileError, match=r"opening the network f\.onnx: it cannot be read as ONNX: "):
        refuse_external_data("f.onnx", content)


def test_long_numbers_do_not_hide_where_a_tensor_is() -> None:
    """A reader that keeps 32 bits of a number takes 2^32 + 1 for 1."""
    location = b"\x70" + b"\x81\x80\x80\x80\x10"
    held = b"\x2a" + bytes([len(location)]) + location
    with pytest.raises(hps.ModelFileError, match="in another file"):
        refuse_external_data("f.onnx", b"\x3a" + bytes([len(held)]) + held)


@pytest.mark.parametrize("at", [b"\x3a", b"\x2a"], ids=["the graph", "the tensor"])
def test_long_numbers_of_fields_are_refused(at: bytes) -> None:
    """protobuf keeps 32 bits of a field's number too: ONNX Runtime finds the field of the lower ones."""
    long = bytes([at[0] | 0x80]) + b"\x80\x80\x80\x10"
    held = tensor().SerializeToString()
    field = (long if at == b"\x2a" else b"\x2a") + bytes([len(held)]) + held
    content = (long if at == b"\x3a" else b"\x3a") + bytes([len(field)]) + field
    with pytest.raises(hps.ModelFileError, match="cannot be read as ONNX"):
        refuse_external_data("f.onnx", content)
