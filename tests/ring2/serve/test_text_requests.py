"""String ids in requests over every wire: transformed by the model's function, then looked up and scored as any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import hps
from hps.serve.protocol.grpc_messages import message
from hps.testing.waiting import wait_until
from tests.fakes.transforms import RELEASED
from tests.ring2.versions.test_checks_in_process import DIM, FIRST, KEYS, SAID
from tests.ring2.versions.test_checks_in_process import engine as engine  # fixture
from tests.servers.running_service import RunningService, document_of, model_of, running_service

CITIES = ["a", "bb", "", "dddd"]
DAYS = [365, 730, 0, 365]
WANTED = FIRST[[len(city) for city in CITIES]]
BOTH = {"city": "bytes", "days": "int64"}
HASHED = {"function": "fnv1a", "inputs": {"word": "bytes"}}
WORDS = ["tea", "Kaffee ☕"]


def entry(function: str, **more: Any) -> dict[str, Any]:
    return {"function": f"tests.fakes.transforms:{function}", "inputs": BOTH, "outputs": ["item", "age"], **more}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, engine: None) -> Iterator[RunningService]:
    home = tmp_path_factory.mktemp("models")
    hps.write_version(home / "ranker" / "1", {"item": (KEYS, FIRST)}, network=(SAID, b'{"factor": 1.0}'))
    keys = hps.Strings.of(WORDS).fnv1a()
    hps.write_sparse_model(home / "word", (keys, FIRST[: len(WORDS)]))
    scored = {"version_path": str(home / "ranker"), "gpucache": False}
    models = [
        model_of("ranker", ["item"], {"item": DIM}, **scored, transform=entry("cities")),
        model_of(
            "slow", ["item"], {"item": DIM}, **scored, transform=entry("failing", timeout_s=0.3, inputs={"city": "bytes"})
        ),
        model_of("words", [home / "word"], {"word": DIM}, transform=HASHED),
    ]
    with running_service(document_of(*models, model_source={"trust": True}), grpc=True) as running:
        yield running


def tensor(name: str, values: Any, datatype: str) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}


def request(cities: Any = CITIES, days: Any = DAYS) -> dict[str, Any]:
    return {"id": "7", "inputs": [tensor("city", cities, "BYTES"), tensor("days", days, "INT64")]}


def scores_of(answer: Any) -> np.ndarray:
    found = answer.json()
    assert answer.status_code == 200, found
    [output] = found["outputs"]
    return np.array(output["data"], np.float32)


EXPECTED = WANTED.sum(axis=1) + np.array(DAYS, np.float32) / 365


def test_texts_as_json_are_scored(service: RunningService) -> None:
    answer = service.client.post("/v2/models/ranker/infer", json=request())
    np.testing.assert_allclose(scores_of(answer), EXPECTED, rtol=1e-4)
    assert answer.json()["id"] == "7"


def test_texts_as_binary_data_are_scored_with_other_inputs_beside_them(service: RunningService) -> None:
    import orjson

    texts, days = hps.Strings.of(CITIES).to_tensor(), np.array(DAYS, np.int64).tobytes()
    inputs = [
        {"name": "days", "datatype": "INT64", "shape": [4], "parameters": {"binary_data_size": len(days)}},
        {"name": "city", "datatype": "BYTES", "shape": [4], "parameters": {"binary_data_size": len(texts)}},
    ]
    head = orjson.dumps({"inputs": inputs})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = service.client.post("/v2/models/ranker/infer", content=head + days + texts, headers=headers)
    np.testing.assert_allclose(scores_of(answer), EXPECTED, rtol=1e-4)


@pytest.mark.parametrize("raw", [True, False])
def test_texts_over_grpc_are_scored(service: RunningService, raw: bool) -> None:
    sent = message("inference.ModelInferRequest")(model_name="ranker")
    texts = [city.encode() for city in CITIES]
    city = sent.inputs.add(name="city", datatype="BYTES", shape=[4])
    days = sent.inputs.add(name="days", datatype="INT64", shape=[4])
    if raw:
        sent.raw_input_contents.append(hps.Strings.of(texts).to_tensor())
        sent.raw_input_contents.append(np.array(DAYS, np.int64).tobytes())
    else:
        city.contents.bytes_contents.extend(texts)
        days.contents.int64_contents.extend(DAYS)
    with grpc.insecure_channel(service.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = message("inference.ModelInferResponse").FromString(call(sent.SerializeToString(), timeout=30))
    np.testing.assert_allclose(np.frombuffer(answer.raw_output_contents[0], np.float32), EXPECTED, rtol=1e-4)


def test_texts_in_process_are_scored_and_keys_pass(service: RunningService) -> None:
    server = service.app.lifecycle.server
    scored = server.score("ranker", {"city": CITIES, "days": DAYS})
    np.testing.assert_allclose(scored["score"], EXPECTED, rtol=1e-4)
    keys = {"item": [7 * len(city) for city in CITIES], "age": np.array(DAYS, np.float32) / 365}
    np.testing.assert_array_equal(server.score("ranker", keys)["score"], scored["score"])


def test_keys_of_a_model_with_a_transform_are_looked_up_as_ever(service: RunningService) -> None:
    sent = {"inputs": [tensor("item", [7, 14], "INT64"), tensor("age", [0.0, 0.0], "FP32")]}
    found = scores_of(service.client.post("/v2/models/ranker/infer", json=sent))
    np.testing.assert_allclose(found, FIRST[1:3].sum(axis=1), rtol=1e-4)


def test_hashed_texts_are_looked_up_without_code_and_without_a_network(service: RunningService) -> None:
    sent = {"inputs": [tensor("word", [WORDS[1], "unknown", WORDS[0]], "BYTES")]}
    found = scores_of(service.client.post("/v2/models/words/infer", json=sent)).reshape(3, DIM)
    np.testing.assert_array_equal(found, [FIRST[1], np.zeros(DIM), FIRST[0]])


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        ({"inputs": [tensor("city", CITIES, "BYTES")]}, 400, "input 'days' is missing"),
        (request(days=[1.5] * 4), 400, "expected 64-bit integers"),
        (request(cities=[1, 2, 3, 4]), 400, "expected a list of strings"),
        ({"inputs": [tensor("city", [1], "INT64"), tensor("days", [1], "INT64")]}, 400, "got datatype 'INT64', expected BYTES"),
        ({"inputs": [*request()["inputs"], tensor("item", [7], "INT64")]}, 400, "which the transform makes of others"),
        (request(days=[1]), 400, "samples of input 'age'"),
    ],
)
def test_requests_that_are_wrong_are_refused(service: RunningService, sent: Any, status: int, reason: str) -> None:
    answer = service.client.post("/v2/models/ranker/infer", json=sent)
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("city", "status", "reason"),
    [("refuse", 400, "no such city"), ("bug", 500, "KeyError: 'a bug'"), ("wait", 504, "within 0.3 s")],
)
def test_a_function_that_fails_or_hangs_costs_its_own_request_alone(
    service: RunningService, city: str, status: int, reason: str
) -> None:
    RELEASED.clear()
    sent = {"inputs": [tensor("city", [city], "BYTES")]}
    answer = service.client.post("/v2/models/slow/infer", json=sent)
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.text
    scores_of(service.client.post("/v2/models/ranker/infer", json=request()))
    RELEASED.set()
    wait_until(lambda: service.is_idle, "nothing is left of the request")


def test_metadata_has_the_inputs_of_the_transform(service: RunningService) -> None:
    for model, wanted in (("ranker", {"city": "BYTES", "days": "INT64"}), ("words", {"word": "BYTES"})):
        inputs = service.client.get(f"/v2/models/{model}").json()["inputs"]
        assert {known["name"]: known["datatype"] for known in inputs[: len(wanted)]} == wanted
        assert not {"item", "age"} & {known["name"] for known in inputs}
    configured = service.client.get("/v2/models/ranker/config").json()["input"]
    assert {known["name"]: known["data_type"] for known in configured} == {"city": "TYPE_STRING", "days": "TYPE_INT64"}


def test_a_model_that_names_code_is_refused_without_trust(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "item", (KEYS, FIRST))
    document = document_of(model_of("m", [tmp_path / "item"], {"item": DIM}, transform=entry("cities")))
    with pytest.raises(hps.ConfigError, match=r"model_source\.trust"):
        hps.HPS(document)
