"""`docs/observability.md` and `/metrics` say the same, and so does Triton's statistics extension."""

import re

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import hps
from hps.statistics.tracing import STAGES
from hps.testing.waiting import wait_until
from tests import ROOT
from tests.servers.running_service import document_of, model_of, running_service, samples

PAGE = ROOT / "docs" / "observability.md"
_ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram|untyped) \|(.*?)\| .+ \| .+ \|$", re.MULTILINE)
ROWS, DIM = 100, 4


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("service")
    hps.write_sparse_model(tmp_path / "t", (np.arange(100), np.zeros((100, 4), np.float32)))
    model = model_of("m", [tmp_path / "t"], {"item": 4}, gpucacheper=0.5, hit_rate_threshold=1.1)
    more = {"update_source": {"type": "kafka", "brokers": "127.0.0.1:1"}, "service": {"triton_metrics": True}}
    with running_service(document_of(model, persistent=tmp_path / "rocks", **more)) as service:
        service.client.post("/v1/models/m/lookup", json={"tables": {"item": [1, 1000]}})
        samples(service)  # what a device and a disk must be asked for is asked
        wait_until(lambda: ("hps_device_memory_bytes", "cpu") in samples(service), "it is known")
        yield service


def test_the_page_has_every_metric_with_its_type_and_labels_and_no_other(service):
    page = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in _ROW.findall(PAGE.read_text())}
    exposed, labelled = {}, {}
    text = service.client.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" if f"{family.name}_total" in kinds else family.name
        if name.endswith("_created"):
            continue
        exposed[name] = kinds[name]
        for sample in family.samples:
            labelled[name] = set(sample.labels) - {"le"}
    assert {name: kind for name, (kind, _) in page.items()} == exposed
    assert {name: page[name][1] for name in labelled} == labelled
    assert len(labelled) > 50
    assert all(f"| `{stage}` |" in PAGE.read_text() for stage in STAGES)


def test_tritons_names_say_what_its_statistics_say_where_wanted(service):
    service.client.post("/v1/models/m/lookup", json={"tables": {"nothing": [1]}})
    [stats] = service.client.get("/v2/models/m/stats").json()["model_stats"]
    values = samples(service)
    times = stats["inference_stats"]

    def value(name):
        return values[f"nv_inference_{name}", "m", "1"]

    assert (value("request_success"), value("request_failure")) == (times["success"]["count"], times["fail"]["count"])
    assert value("count") == value("exec_count") == stats["inference_count"] > 0
    assert value("request_failure") > 0
    for name in ("queue", "compute_input", "compute_infer", "compute_output", "request"):
        assert value(f"{name}_duration_us") == times["success" if name == "request" else name]["ns"] // 1000
    lifecycle = service.app.lifecycle
    wanted = lifecycle.configuration
    assert not type(wanted.service)().triton_metrics
    lifecycle.configuration = wanted.model_copy(update={"service": wanted.service.model_copy(update={"triton_metrics": False})})
    assert "nv_inference" not in service.client.get("/metrics").text
    lifecycle.configuration = wanted


def test_fronts_the_loop_of_the_owner_and_default_vectors_are_counted(service):
    before = samples(service)
    service.client.post("/v1/models/m/lookup", json={"tables": {"item": [-5] * 1000}})  # no tier has it
    after = samples(service)
    for name in ("hps_lookup_keys_total", "hps_default_keys_total"):
        assert after[name, "m", "item"] - before[name, "m", "item"] == 1000, "as often as it is sent"
    assert after["hps_owner_batches_total",] > before["hps_owner_batches_total",]
    assert after["hps_owner_handed_over_total",] == before["hps_owner_handed_over_total",] + 1
    assert after["hps_owner_malformed_total",] == 0
    assert after["hps_front_cpu_seconds_total", "0"] > 0
    assert after["hps_http_connections", "0"] >= 1
