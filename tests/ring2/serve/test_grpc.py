"""gRPC as clients use it: Triton's library, stubs, grpcio's health and reflection; every vector is checked."""

import json
import ssl
import sys
from collections.abc import Iterator

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc
from tritonclient.utils import InferenceServerException

from hps.ground.registry import install_hint
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.certificates import Authority, Pair
from tests.servers.child_processes import ChildProcesses
from tests.servers.fronted_service import DIMS, ROWS, FrontedService, vectors_of, write_tables
from tests.servers.running_service import document_of, model_of

SERVICE = "inference.GRPCInferenceService"
METHOD, METADATA = f"/{SERVICE}/ModelInfer", pb.ModelMetadataRequest(name="m")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedService]:
    children = ChildProcesses()
    place = tmp_path_factory.mktemp("grpc")
    try:
        yield FrontedService(children, place, max_body_bytes=1_000_000, max_keys_per_request=20_000, triton_metrics=True)
    finally:
        children.end()


@pytest.fixture
def channel(service: FrontedService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> pb_grpc.GRPCInferenceServiceStub:
    return pb_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def client(service: FrontedService) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(service.grpc) as client:
        yield client


def tensor(name: str, values: np.ndarray) -> object:
    found = triton.InferInput(name, list(values.shape), "INT64")
    found.set_data_from_numpy(values)
    return found


def request_of(keys: np.ndarray, name: str = "t0", **more: object) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[np.asarray(keys, "<i8").tobytes()], **more)
    request.inputs.add(name=name, datatype="INT64", shape=[len(keys)])
    return request


def first_vectors(response: pb.ModelInferResponse) -> np.ndarray:
    return np.frombuffer(response.raw_output_contents[0], "<f4").reshape(response.outputs[0].shape)


def code_of(call: object, *arguments: object, **more: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, **more)
    return raised.value.code(), raised.value.details()


class TestLookups:
    def test_calls_that_begin_alike_get_their_own_vectors_and_ids(self, stub: pb_grpc.GRPCInferenceServiceStub) -> None:
        random = np.random.default_rng(7)
        for nth in range(60):
            keys = random.integers(0, ROWS, 50)
            more = {"id": str(nth)} if nth % 20 == 10 else {}
            metadata = [("x-request-id", "mine")] if nth % 20 == 15 else []
            response, call = stub.ModelInfer.with_call(request_of(keys, **more), metadata=metadata)
            np.testing.assert_array_equal(first_vectors(response), vectors_of(0, keys))
            assert response.id == more.get("id", "")
            named = dict(call.trailing_metadata())["x-request-id"]
            assert named == "mine" if metadata else len(named) == 32
            if nth % 20 == 5:
                with pytest.raises(grpc.RpcError) as raised:
                    stub.ModelInfer(request_of(keys, "t9"), metadata=[("x-request-id", "mine")])
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND
                assert dict(raised.value.trailing_metadata())["x-request-id"] == "mine"

    def test_streams_are_answered_in_order(self, stub: pb_grpc.GRPCInferenceServiceStub) -> None:
        requests = [request_of(np.arange(n, 3 * n), id=str(n)) for n in range(1, 300)]
        requests[10].model_name = "none"
        answers = [*stub.ModelStreamInfer(iter(requests))]
        assert len(answers) == len(requests)
        assert "'none'" in answers[10].error_message
        for n, answer in enumerate(answers, 1):
            if n != 11:
                assert answer.infer_response.id == str(n)
                np.testing.assert_array_equal(first_vectors(answer.infer_response), vectors_of(0, np.arange(n, 3 * n)))


class TestControl:
    def test_triton_clients_ask_about_server_and_model(
        self, service: FrontedService, client: triton.InferenceServerClient
    ) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("m")
        assert client.is_model_ready("m", "1")
        assert client.get_server_metadata().name == "triton"
        metadata = client.get_model_metadata("m")
        assert [input_.name for input_ in metadata.inputs] == ["KEYS", "NUMKEYS", "OFFSETS", "WEIGHTS"]
        assert [*metadata.versions] == ["1"]
        config = client.get_model_config("m").config
        assert (config.name, config.backend) == ("m", "hps")
        assert config.input[0].data_type == 9  # TYPE_INT64
        assert [model.name for model in client.get_model_repository_index().models] == ["m"]
        assert not client.is_model_ready("none")
        for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
            with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model"):
                ask("none")
        with pytest.raises(InferenceServerException, match="explicit model load"):
            client.load_model("m")
        before = client.get_inference_statistics("m").model_stats[0].inference_count
        keys = np.arange(6).reshape(2, 3)
        for algorithm in ("gzip", "deflate"):
            options = {"request_id": "one", "parameters": {"report": True}, "compression_algorithm": algorithm}
            answer = client.infer(
                "m", [tensor("t0", keys), tensor("t1", keys[0])], outputs=[triton.InferRequestedOutput("t0")], **options
            )
            np.testing.assert_array_equal(answer.as_numpy("t0").reshape(*keys.shape, 32), vectors_of(0, keys))
            response = answer.get_response()
            assert (response.id, response.model_name, response.model_version) == ("one", "m", "1")
            assert response.parameters["t0.keys"].int64_param == 6
            assert [output.name for output in response.outputs] == ["t0"]
        wait_until(lambda: client.get_inference_statistics("m").model_stats[0].inference_count >= before + 2, "the counts")
        assert f'hps_http_requests_total{{route="{METHOD}",status="200"}}' in httpx.get(f"{service.url}/metrics").text

    def test_health_is_checked_and_watched(self, channel: grpc.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        assert code_of(health.Check, health_pb2.HealthCheckRequest(service="none"))[0] is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == 1
        watch.cancel()
        assert next(health.Watch(health_pb2.HealthCheckRequest(service="none"))).status == 3

    def test_reflection_describes_every_service(self, channel: grpc.Channel) -> None:
        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(reflected.get_services())
        file = reflected.FindFileContainingSymbol(f"{SERVICE}.ModelInfer")
        assert "ModelInferRequest" in [one.name for one in file.message_type]
        assert reflected.FindFileByName(file.name) == file
        with pytest.raises(KeyError):
            reflected.FindFileContainingSymbol("none.Of")


class TestErrors:
    def test_messages_that_are_wrong_have_their_codes(
        self, service: FrontedService, channel: grpc.Channel, stub: pb_grpc.GRPCInferenceServiceStub
    ) -> None:
        """What a message of gRPC alone can have wrong; what all wires refuse is in test_wires.py."""
        code = grpc.StatusCode
        short, more, both, shared = (request_of([1]) for _ in range(4))
        short.inputs[0].shape[0] = 2
        more.raw_input_contents.append(b"")
        both.inputs[0].contents.int64_contents.append(1)
        wrong = pb.ModelInferRequest(model_name="m")
        wrong.inputs.add(name="t0", datatype="INT64", shape=[1]).contents.int_contents.append(1)
        shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
        for request, wanted, text in (
            (request_of([1], model_version="7"), code.NOT_FOUND, "version"),
            (short, code.INVALID_ARGUMENT, "expected 16"),
            (more, code.INVALID_ARGUMENT, "raw_input_contents"),
            (both, code.INVALID_ARGUMENT, "one of them"),
            (wrong, code.INVALID_ARGUMENT, "int64_contents"),
            (pb.ModelInferRequest(model_name="m"), code.INVALID_ARGUMENT, "inputs"),
            (shared, code.INVALID_ARGUMENT, "shared memory"),
            (request_of(np.arange(200_000)), code.RESOURCE_EXHAUSTED, "larger than max"),
        ):
            got, details = code_of(stub.ModelInfer, request)
            assert (got, text in details) == (wanted, True), (got, details)
        for data in (b"\x0a", b"\x0a\x05m", b"\xff" * 40, b"\x3a\xff\xff\xff\xff\xff\xff", b"\x0a\x02\xff\xff"):
            assert code_of(channel.unary_unary(METHOD), data)[0] is code.INVALID_ARGUMENT
        for method in (f"/{SERVICE}/None", "/none"):
            assert code_of(channel.unary_unary(method), b"")[0] is code.UNIMPLEMENTED
        with grpc.insecure_channel(service.grpc, compression=grpc.Compression.Gzip) as gzipped:
            inflated = pb_grpc.GRPCInferenceServiceStub(gzipped).ModelInfer
            assert code_of(inflated, request_of(np.zeros(200_000)))[0] is code.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize("how", ["cancelled", "too late"])
    def test_calls_that_are_given_up_release_their_slots(
        self, service: FrontedService, stub: pb_grpc.GRPCInferenceServiceStub, how: str
    ) -> None:
        stub.ModelInfer(request_of([1]))
        before, held = service.posted(), service.figure("hps_http_held_bytes")  # by the request for it
        with service.paused_engine():
            timeout = 0.3 if how == "too late" else None
            calls = [stub.ModelInfer.future(request_of(np.arange(2000)), timeout=timeout) for _ in range(50)]
            if timeout:
                assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            else:
                wait_until(lambda: service.posted() >= before + 50, "all lookups have slots")
                for call in calls:
                    call.cancel()
        np.testing.assert_array_equal(first_vectors(stub.ModelInfer(request_of([4]))), vectors_of(0, [4]))
        wait_until(lambda: service.figure("hps_http_held_bytes") <= held, "the slots are free")


def test_tokens_are_asked_for_and_short_times_kept(children: ChildProcesses, tmp_path) -> None:
    service = FrontedService(children, tmp_path / "s", bearer_token="secret", request_timeout_s=5)
    with grpc.insecure_channel(service.grpc) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        for given in ((), [("authorization", "Bearer wrong")], [("authorization", "secret")]):
            stream = stub.ModelStreamInfer(iter([request_of([1])]), metadata=given)
            for ask in (
                lambda given=given: stub.ModelInfer(request_of([1]), metadata=given),
                lambda given=given: stub.ModelMetadata(METADATA, metadata=given),
                lambda stream=stream: next(stream),
            ):
                assert code_of(ask)[0] is grpc.StatusCode.UNAUTHENTICATED
            assert stub.ServerReady(pb.ServerReadyRequest(), metadata=given).ready
        given = [("authorization", "Bearer secret")]
        np.testing.assert_array_equal(first_vectors(stub.ModelInfer(request_of([3]), metadata=given)), vectors_of(0, [3]))
        with service.paused_engine():
            code, details = code_of(stub.ModelInfer, request_of([1]), metadata=given)
        assert (code, "request_timeout_s" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
    assert "secret" not in service.log.read_text()


def test_tls_and_tokens_with_rights_hold_for_grpc(children: ChildProcesses, tmp_path) -> None:
    authority = Authority(tmp_path)
    pair, ranker, other = authority.sign("server"), authority.sign("ranker"), authority.sign("other")
    entries = [
        {"name": "ranker", "rights": ["lookup"], "certificate": "ranker"},
        {"name": "limited", "rights": ["lookup"], "token": "t1", "requests_per_s": 0.01, "burst": 2},
        {"name": "figures", "rights": [], "token": "t2"},
    ]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": entries}))
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(ranker.certificate, ranker.key)
    paths = {"tls_certificate_path": pair.both, "tls_client_ca_path": authority.path, "tokens_path": tmp_path / "tokens.json"}
    service = FrontedService(children, tmp_path / "s", tls=context, **{name: str(path) for name, path in paths.items()})
    code = grpc.StatusCode

    def stub_of(one: Pair) -> pb_grpc.GRPCInferenceServiceStub:
        content = [path.read_bytes() for path in (authority.path, one.key, one.certificate)]
        channel = grpc.secure_channel(service.grpc, grpc.ssl_channel_credentials(*content))
        return pb_grpc.GRPCInferenceServiceStub(channel)

    stub = stub_of(ranker)
    calls = [(keys, stub.ModelInfer.future(request_of(keys))) for keys in np.arange(64_000).reshape(64, 1000) % ROWS]
    for keys, call in calls:
        np.testing.assert_array_equal(first_vectors(call.result()), vectors_of(0, keys))
    assert stub.ModelMetadata(METADATA).name == "m"
    assert code_of(stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="m"))[0] is code.PERMISSION_DENIED
    stub = stub_of(other)
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    figures, limited = ({"metadata": [("authorization", f"Bearer {token}")]} for token in ("t2", "t1"))
    assert code_of(stub.ModelMetadata, METADATA)[0] is code.PERMISSION_DENIED
    assert stub.ModelMetadata(METADATA, **figures).name == "m"
    for given in ({}, figures):
        assert code_of(stub.ModelInfer, request_of([1]), **given)[0] is code.PERMISSION_DENIED
    assert stub.ModelInfer(request_of([1]), **limited)
    answers = stub.ModelStreamInfer(iter([request_of([1])] * 2), **limited)
    assert ["requests_per_s" in answer.error_message for answer in answers] == [True, True]
    assert code_of(stub.ModelInfer, request_of([1]), **limited)[0] is code.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(service.grpc) as channel:
        assert code_of(pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer, request_of([1]))[0] is code.UNAVAILABLE
    service.stop()


def test_a_missing_package_is_named(children: ChildProcesses, tmp_path) -> None:
    (tmp_path / "ps.json").write_text(json.dumps(document_of(model_of("m", write_tables(tmp_path), DIMS))))
    code = "import sys; sys.modules['grpc'] = None; from hps.tools.cli.app import main; main()"
    arguments = ("serve", tmp_path / "ps.json", "--port", 0, "--grpc-port", 0)
    process = children.start(sys.executable, "-c", code, *arguments, real=True)  # a forked one has imported it
    _, text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode
    assert install_hint("grpc") in text
