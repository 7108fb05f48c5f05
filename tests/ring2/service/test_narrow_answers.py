"""Vectors in 16 bits over HTTP and gRPC, of tables whose rows are in fewer bits, too: those of float32, rounded once."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import hps
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

DIMS = {"user": 5, "item": 32, "word": 7}
ROWS = 300
INFER = "/v2/models/m/infer"
MIXED = dict(zip(DIMS, ("FP16", "BF16", "FP32"), strict=True))
KEYS = {"user": np.array([0, 299, 10**12, 7, 7]), "item": np.arange(280, 320), "word": np.array([3])}


def vectors_of(name: str) -> np.ndarray:
    return np.random.default_rng(DIMS[name]).normal(size=(ROWS, DIMS[name])).astype(np.float32)


@pytest.fixture(scope="module", params=[0, 2])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    place = tmp_path_factory.mktemp("narrow")
    for name in DIMS:
        hps.write_sparse_model(place / name, (np.arange(ROWS), vectors_of(name)))
    defaults = {"default_value_for_each_table": [0.1, 1e6, -0.3], "hit_rate_threshold": 1.1, "gpucacheper": 0.3}
    most = {"maxnum_catfeature_query_per_table_per_sample": [10] * 3, "row_dtype": ["int8", "int8", "float32"]}
    document = document_of(model_of("m", [place / name for name in DIMS], DIMS, **defaults, **most))
    with ServedProcess(document, place, request.param, "--grpc-port", 0) as served:
        yield served


def narrowed(vectors: np.ndarray, datatype: str) -> np.ndarray:
    """The bits that an output of this datatype has."""
    if datatype == "FP32":
        return vectors.view(np.uint32)
    if datatype == "FP16":
        with np.errstate(over="ignore"):
            return vectors.astype(np.float16).view(np.uint16)
    bits = vectors.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bits_of(data: bytes, datatype: str) -> np.ndarray:
    return np.frombuffer(data, np.uint32 if datatype == "FP32" else np.uint16)


def request_of(keys: dict[str, np.ndarray], datatypes: dict[str, str], **parameters: Any) -> tuple[dict[str, str], bytes]:
    inputs, outputs = [], []
    for name, array in keys.items():
        size = {"binary_data_size": array.nbytes}
        inputs.append({"name": name, "datatype": "INT64", "shape": [array.size], "parameters": size})
        outputs.append({"name": name, "parameters": {"binary_data": True, "datatype": datatypes[name]}})
        outputs.append({"name": f"{name}.found", "parameters": {"binary_data": True}})
    text = orjson.dumps({"inputs": inputs, "outputs": outputs, "parameters": parameters})
    head = {"Inference-Header-Content-Length": str(len(text))}
    return head, text + b"".join(array.tobytes() for array in keys.values())


def ask(connection: HTTPConnection, head: dict[str, str], body: bytes) -> tuple[int, dict[str, Any], dict[str, bytes]]:
    """Return the status, the JSON part, and the bytes of the outputs."""
    connection.request("POST", INFER, body, head)
    response = connection.getresponse()
    data = response.read()
    at = int(response.headers.get("inference-header-content-length", len(data)))
    document, found = json.loads(data[:at]), {}
    for output in document.get("outputs", []):
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = data[at : at + size]
        at += size
    assert at == len(data)
    return response.status, document, found


@pytest.fixture
def connection(service: ServedProcess) -> Iterator[HTTPConnection]:
    made = HTTPConnection("127.0.0.1", int(service.url.rpartition(":")[2]), timeout=30)
    made.connect()
    made.auto_open = 0  # one connection for the whole test
    yield made
    made.close()


@pytest.fixture
def float32(connection: HTTPConnection) -> dict[str, np.ndarray]:
    """The answer to `KEYS` in float32."""
    status, _, found = ask(connection, *request_of(KEYS, dict.fromkeys(DIMS, "FP32")))
    assert status == 200
    vectors = {name: np.frombuffer(found[name], np.float32).reshape(-1, dim) for name, dim in DIMS.items()}
    there = KEYS["item"] < ROWS
    assert np.allclose(vectors["item"][there], vectors_of("item")[KEYS["item"][there]], atol=0.02)  # rows are int8
    assert (vectors["item"][~there] == 1e6).all()
    return vectors


@pytest.mark.parametrize("report", [False, True])
def test_three_outputs_have_three_datatypes_also_after_refusals(
    connection: HTTPConnection, float32: dict[str, np.ndarray], report: bool
) -> None:
    wrong = request_of(KEYS, MIXED | {"item": "FP8"})
    for _ in range(3):
        status, document, _ = ask(connection, *wrong)
        assert status == 400
        assert "outputs[2]: got datatype 'FP8', expected FP32, FP16, BF16" in document["error"]
        status, document, found = ask(connection, *request_of(KEYS, MIXED, report=report))
        assert status == 200
        assert {one["name"]: one["datatype"] for one in document["outputs"] if one["datatype"] != "BOOL"} == MIXED
        for name, vectors in float32.items():
            assert (bits_of(found[name], MIXED[name]) == narrowed(vectors, MIXED[name]).reshape(-1)).all()
            assert (np.frombuffer(found[f"{name}.found"], np.bool_) == (KEYS[name] < ROWS)).all()


def test_no_keys_are_no_bytes_beside_other_outputs(connection: HTTPConnection, float32: dict[str, np.ndarray]) -> None:
    for empty in DIMS:
        keys = KEYS | {empty: np.arange(0)}
        status, document, found = ask(connection, *request_of(keys, MIXED))
        assert status == 200
        assert (found[empty], found[f"{empty}.found"]) == (b"", b"")
        assert [one["shape"] for one in document["outputs"] if one["name"] == empty] == [[0, DIMS[empty]]]
        for name in DIMS.keys() - {empty}:
            assert (bits_of(found[name], MIXED[name]) == narrowed(float32[name], MIXED[name]).reshape(-1)).all()
    status, _, found = ask(connection, *request_of(dict.fromkeys(DIMS, np.arange(0)), MIXED))
    assert (status, set(found.values())) == (200, {b""})


def test_answers_side_by_side_have_their_own_memory(service: ServedProcess) -> None:
    connections = [HTTPConnection("127.0.0.1", int(service.url.rpartition(":")[2]), timeout=30) for _ in range(16)]
    for turn in range(3):
        asked = [{"item": (np.arange(2000) * 7 + nth + turn) % ROWS} for nth in range(len(connections))]
        for connection, keys in zip(connections, asked, strict=True):
            head, body = request_of(keys, {"item": "FP32" if turn == 1 else "FP16"})
            connection.request("POST", INFER, body, head)
        for connection, keys in zip(connections, asked, strict=True):
            data = connection.getresponse().read()
            vectors = data[-keys["item"].size * (1 + DIMS["item"] * (4 if turn == 1 else 2)) : -keys["item"].size]
            got = np.frombuffer(vectors, np.float32 if turn == 1 else np.float16).reshape(-1, DIMS["item"])
            assert np.allclose(got, vectors_of("item")[keys["item"]], atol=0.02)
    for connection in connections:
        connection.close()


def test_json_has_fp16_as_numbers_and_refuses_bf16(service: ServedProcess, float32: dict[str, np.ndarray]) -> None:
    inputs = [{"name": "user", "datatype": "INT64", "shape": [5], "data": KEYS["user"].tolist()}]
    with httpx.Client(base_url=service.url) as client:
        for _ in range(2):
            refused = client.post(INFER, json={"inputs": inputs, "parameters": {"datatype": "BF16"}})
            assert refused.status_code == 400
            assert "'BF16' for 'user' as JSON" in refused.json()["error"]
            (output,) = client.post(INFER, json={"inputs": inputs, "parameters": {"datatype": "FP16"}}).json()["outputs"]
            assert output["datatype"] == "FP16"
            assert (np.float16(output["data"]) == float32["user"].astype(np.float16).reshape(-1)).all()
        metadata = client.get("/v2/models/m").json()
    assert metadata["outputs"][0]["datatype"] == "FP32"


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_tritons_clients_ask_for_16_bits_by_a_parameter_of_the_request(
    service: ServedProcess, float32: dict[str, np.ndarray], library: Any
) -> None:
    address = service.grpc if library is triton_grpc else service.url.removeprefix("http://")

    def tensors(**arrays: np.ndarray) -> list[Any]:
        found = [library.InferInput(name, list(array.shape), "INT64") for name, array in arrays.items()]
        for one, array in zip(found, arrays.values(), strict=True):
            one.set_data_from_numpy(array)
        return found

    bags = {"KEYS": np.array([1, 2, 3, 1, 2, 3, 1, 2, 3]), "OFFSETS": np.array([[0, 2, 3]] * 3)}
    with library.InferenceServerClient(address) as client:
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="got datatype 'FP64', expected FP32, FP16, BF16"):
                client.infer("m", tensors(item=KEYS["item"]), parameters={"datatype": "FP64"})
            sums = client.infer("m", tensors(**bags)).as_numpy("OUTPUT0")
            assert sums.shape == (2, sum(DIMS.values()))
            for datatype in ("FP16", "BF16"):
                found = client.infer("m", tensors(**KEYS), parameters={"datatype": datatype, "found": True})
                for name, vectors in float32.items():
                    assert (found.as_numpy(name).view(np.uint16) == narrowed(vectors, datatype)).all()
                    assert (found.as_numpy(f"{name}.found") == (KEYS[name] < ROWS)).all()
                pooled = client.infer("m", tensors(**bags), parameters={"datatype": datatype}).as_numpy("OUTPUT0")
                assert (pooled.view(np.uint16) == narrowed(sums, datatype)).all()


def test_stubs_ask_for_a_datatype_of_each_output(service: ServedProcess, float32: dict[str, np.ndarray]) -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[array.tobytes() for array in KEYS.values()])
    for name, array in KEYS.items():
        request.inputs.add(name=name, datatype="INT64", shape=[array.size])
        request.outputs.add(name=name).parameters["datatype"].string_param = MIXED[name]
        request.outputs.add(name=f"{name}.found")
    with triton_grpc.InferenceServerClient(service.grpc) as client:
        for _ in range(3):
            response = client._client_stub.ModelInfer(request)
            raw = dict(zip([one.name for one in response.outputs], response.raw_output_contents, strict=True))
            assert {one.name: one.datatype for one in response.outputs if one.datatype != "BOOL"} == MIXED
            for name, vectors in float32.items():
                assert (bits_of(raw[name], MIXED[name]) == narrowed(vectors, MIXED[name]).reshape(-1)).all()
                assert (np.frombuffer(raw[f"{name}.found"], np.bool_) == (KEYS[name] < ROWS)).all()
