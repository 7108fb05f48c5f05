"""The messages of gRPC are those of Triton's and grpcio's own modules, compiled from the sources beside them."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from hps.errors import InvalidInputError
from hps.serve.protocol.grpc_inference import read_infer_request, streamed, write_infer_answer
from hps.serve.protocol.grpc_messages import COMPILED, FILES, POOL

THEIRS = [pb.DESCRIPTOR, model_config_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
MESSAGES = [f"{file.package}.{one.name}" for file in FILES.values() for one in file.message_type]


def same_fields(mine: Any, theirs: Any) -> None:
    for field in mine.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), field.full_name
        assert (field.containing_oneof is None) == (other.containing_oneof is None), field.full_name
        if field.message_type is not None:
            same_fields(field.message_type, other.message_type)
        if field.enum_type is not None:
            for value in field.enum_type.values:
                assert other.enum_type.values_by_name[value.name].number == value.number


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_have_the_names_numbers_and_types_of_others(name: str) -> None:
    files, short = [file.message_types_by_name for file in THEIRS], name.rpartition(".")[2]
    (theirs,) = [types[short] for types in files if short in types]
    same_fields(POOL.FindMessageTypeByName(name), theirs)


def test_methods_have_the_types_of_tritons() -> None:
    def types(one: Any) -> tuple[Any, ...]:
        return one.input_type.full_name, one.output_type.full_name, one.client_streaming, one.server_streaming

    theirs = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for method in POOL.FindServiceByName("inference.GRPCInferenceService").methods:
        assert types(method) == types(theirs[method.name])


def test_the_compiled_file_is_that_of_the_sources(tmp_path: Path) -> None:
    protos = COMPILED.parent
    names = sorted(path.name for path in protos.glob("*.proto"))
    assert protoc.main(["", f"-I{protos}", f"--descriptor_set_out={tmp_path / 'compiled'}", *names]) == 0
    assert (tmp_path / "compiled").read_bytes() == COMPILED.read_bytes(), "call `make protos`"


parameters = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.fixed_dictionaries({"bool_param": st.booleans()}),
        st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
        st.fixed_dictionaries({"string_param": st.text(max_size=5)}),
    ),
    max_size=2,
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=300), parameters), min_size=1, max_size=4),
    st.text(max_size=5),
    parameters,
    st.randoms(),
)
def test_requests_are_read_as_protobuf_reads_them(
    tensors: list[tuple[str, bytes, dict[str, Any]]], text: str, options: dict[str, Any], random: Any
) -> None:
    request = pb.ModelInferRequest(model_name=text, model_version=text, id=text, parameters=options)
    for name, raw, more in tensors:
        request.inputs.add(name=name, datatype="INT64", shape=[len(raw)], parameters=more)
        request.raw_input_contents.append(raw)
    pieces = [pb.ModelInferRequest(model_name=text).SerializeToString()] if text else []
    for field, value in request.ListFields():
        pieces.append(pb.ModelInferRequest(**{field.name: value}).SerializeToString())
    random.shuffle(pieces)  # in any order, and with fields that nobody knows
    pieces.insert(random.randrange(len(pieces) + 1), random.choice([b"", b"\xa2\x06\x01x", b"\x48\x05"]))
    read = read_infer_request(b"".join(pieces))
    document = orjson.loads(read.text)
    assert (read.model_name, read.version, document.get("id", "")) == (text, text, text)
    assert read.binary == [*request.raw_input_contents]
    for tensor, (name, raw, more) in zip(document["inputs"], tensors, strict=True):
        wanted = {key: next(iter(value.values())) for key, value in more.items()} | {"binary_data_size": len(raw)}
        assert tensor == {"name": name, "datatype": "INT64", "shape": [len(raw)], "parameters": wanted}


@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused_as_protobuf_refuses_them(data: bytes) -> None:
    try:
        request = pb.ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001 - of a class that differs between implementations
        with pytest.raises(InvalidInputError):
            read_infer_request(data)
        return
    contents = any(input_.HasField("contents") for input_ in request.inputs)
    if len(request.raw_input_contents) in (0, len(request.inputs)) and not contents:
        read = read_infer_request(data)
        assert read.model_name == request.model_name
        assert [*map(bytes, read.binary)] == ([*request.raw_input_contents] or [b""] * len(request.inputs))


def test_answers_are_written_as_protobuf_writes_them() -> None:
    a = {"name": "a", "datatype": "FP32", "shape": [2, 100], "parameters": {"binary_data_size": 800}}
    b = {"name": "b", "datatype": "BOOL", "shape": [3], "parameters": {"binary_data_size": 3}}
    names = {"model_name": "m", "model_version": "2", "id": "x", "parameters": {"n": 3, "x": 0.5}}
    answer = write_infer_answer(orjson.dumps({**names, "outputs": [a, b]}) + b"  ")
    tensors = [np.arange(200, dtype=np.float32).tobytes(), b"\0\1\0"]
    data = answer.joined(memoryview(b"".join(tensors)))
    response = pb.ModelInferResponse.FromString(data)
    assert [*response.raw_output_contents] == tensors
    assert [(output.name, output.datatype, [*output.shape]) for output in response.outputs] == [
        ("a", "FP32", [2, 100]),
        ("b", "BOOL", [3]),
    ]
    found = response.parameters
    assert (response.id, response.model_version, found["n"].int64_param, found["x"].double_param) == ("x", "2", 3, 0.5)
    assert pb.ModelStreamInferResponse.FromString(streamed(data)).infer_response == response
