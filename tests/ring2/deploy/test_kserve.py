"""KServe: the runtime agrees with the service that it starts, and KServe's own client gets answers."""

import json
import os
import subprocess

import numpy as np
import pytest
import yaml

from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from tests import ROOT
from tests.servers.fronted_service import DIMS, FrontedService, vectors_of
from tests.servers.running_service import model_of, running_service

FILES = ROOT / "deploy" / "kserve"
PYTHON = os.environ.get("HPS_KSERVE_PYTHON")
_TIMEOUT_S = 120


@pytest.fixture
def runtime():
    settings, runtime = yaml.safe_load_all((FILES / "runtime.yaml").read_text())
    assert runtime["kind"] == "ServingRuntime"
    (container,) = runtime["spec"]["containers"]
    return json.loads(settings["data"]["ps.json"]), runtime["spec"], container


def test_the_runtime_serves_the_format_of_the_inference_service(runtime):
    document, spec, container = runtime
    predictor = yaml.safe_load((FILES / "inference-service.yaml").read_text())["spec"]["predictor"]
    service = predictor["model"]
    assert service["modelFormat"]["name"] in {one["name"] for one in spec["supportedModelFormats"] if one["autoSelect"]}
    assert service["protocolVersion"] in spec["protocolVersions"]
    settings = load_configuration(document).service
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert predictor["terminationGracePeriodSeconds"] >= settings.drain_s + 30
    assert all(container[probe]["httpGet"]["port"] == settings.port for probe in ("readinessProbe", "livenessProbe"))
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


@pytest.mark.helm
def test_the_objects_are_valid():
    from tests.servers.custom_kinds import validate

    objects = [one for file in sorted(FILES.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    assert {object_["kind"] for object_ in objects} == {"ConfigMap", "ServingRuntime", "InferenceService"}
    for object_ in objects:
        validate(object_)


def test_a_model_that_kserve_has_copied_is_served_by_its_name(runtime, tmp_path):
    document, _, container = runtime
    assert document["model_repository"] == "/mnt/models"
    keys = np.arange(100)
    for version in ("1", "2"):
        write_sparse_model(tmp_path / "ranking" / version / "item.model", (keys, sample_vectors(keys, 4, int(version))))
    (tmp_path / "ranking" / "model.json").write_text(json.dumps(model_of("ranking", ["item.model"], {"item": 4})))
    del document["service"]["grpc_port"]
    with running_service(document | {"device": "cpu", "model_repository": str(tmp_path)}) as service:
        for probe in ("readinessProbe", "livenessProbe"):
            assert service.client.get(container[probe]["httpGet"]["path"]).status_code == 200
        inputs = [{"name": "item", "datatype": "INT64", "shape": [2], "data": [1, 99]}]
        answer = service.client.post("/v2/models/ranking/infer", json={"inputs": inputs}).json()
    assert answer["model_version"] == "2"
    found = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 4)
    np.testing.assert_array_equal(found, sample_vectors(np.array([1, 99]), 4, 2))


@pytest.mark.skipif(PYTHON is None, reason="HPS_KSERVE_PYTHON names no interpreter that has the package kserve")
def test_the_client_of_kserve_gets_answers_over_rest_and_grpc(children, tmp_path):
    service = FrontedService(children, tmp_path / "service")
    table, dim = next(iter(DIMS.items()))
    command = [PYTHON, str(ROOT / "examples" / "kserve" / "client.py"), service.url, service.grpc, "m", table, str(dim)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    answers = [np.array(json.loads(line), np.float32) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    for answer in answers:
        np.testing.assert_array_equal(answer, vectors_of(0, np.arange(10)))
