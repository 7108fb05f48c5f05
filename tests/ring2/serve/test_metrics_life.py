"""Series of `/metrics` live as long as what they measure, are those of `docs/metrics.json`, and delay no request.

`python -m tests.ring2.serve.test_metrics_life` writes that file anew; the site makes the page of metrics from it.
"""

import json
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import hps
from hps.statistics.tracing import STAGES
from hps.testing.waiting import PATIENCE_S, wait_until
from tests import ROOT
from tests.servers.running_service import document_of, model_of, running_service, samples

ROWS, DIM, TABLES, MODELS = 50, 4, ("a", "b", "c"), 15


@pytest.fixture
def files(tmp_path):
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    return tmp_path / "t"


@pytest.fixture
def service(files):
    with running_service(document_of(_model("stays", files), service={"triton_metrics": True})) as service:
        yield service


def _model(name, source):
    return model_of(name, [source] * len(TABLES), dict.fromkeys(TABLES, DIM), gpucacheper=0.5)


def _lines(service):
    service.client.get("/metrics")  # whose route then has its series
    return service.client.get("/metrics").text.count("\n")


def _deploy(service, name, source):
    return service.client.post(f"/v1/models/{name}/deploy", json={"config": _model(name, source)}).status_code


def _answer(service, name):
    tables = {table: [1, 2, 3, -1] for table in TABLES}
    return service.client.post(f"/v1/models/{name}/lookup", json={"tables": tables}).status_code


def _look_up(service, name):
    assert _answer(service, name) == 200


def test_models_that_are_gone_and_invented_names_leave_no_series(service, files, tmp_path):
    def changes(change, outcome):
        return samples(service)["hps_model_changes_total", change, "", outcome]

    def round_of(name):
        assert _deploy(service, name, files) == 200
        _look_up(service, name)
        assert service.client.post(f"/v1/models/{name}/undeploy").status_code == 200
        assert _deploy(service, f"invented-{name}", tmp_path / "nothing") == 400

    _look_up(service, "stays")
    round_of("first")  # the routes have their series
    before = _lines(service)
    for number in range(MODELS):
        round_of(f"model-{number}")
    assert _lines(service) <= before + 5
    assert changes("undeploy", "done") == changes("deploy", "failed") == MODELS + 1
    assert samples(service)["hps_lookup_keys_total", "stays", "a"] == 4


def test_a_model_that_is_deployed_again_counts_from_zero(service, files):
    def counted():
        return samples(service).get(("hps_lookup_keys_total", "m", "a"))

    for _ in range(3):
        assert _deploy(service, "m", files) == 200
        assert counted() == 0
        _look_up(service, "m")
        assert _deploy(service, "m", files) == 200
        assert counted() == 4, "the same version goes on counting"
        assert service.client.post("/v1/models/m/undeploy").status_code == 200
        assert counted() is None


def test_tables_that_no_version_has_any_more_leave_no_series(service, files):
    before = None
    for version in range(1, 5):
        dims = {"a": DIM, f"only-{version}": DIM}
        entry = model_of("m", [files] * 2, dims, gpucacheper=0.5, version=str(version), keep_versions=0)
        assert service.client.post("/v1/models/m/deploy", json={"config": entry}).status_code == 200
        tables = {"a": [1, 2], f"only-{version}": [1]}
        service.client.post("/v1/models/m/lookup", json={"tables": tables}).raise_for_status()
        wait_until(lambda: len(service.app.lifecycle.server.live.versions("m")) == 1, "the version before is gone")
        found = {key[2]: value for key, value in samples(service).items() if key[:2] == ("hps_lookup_keys_total", "m")}
        assert found == {"a": 2 * version, f"only-{version}": 1}, "it goes on counting"
        assert before in (None, _lines(service))
        before = _lines(service)


@contextmanager
def held(service):
    """Figures of a server that are not there until `released` is set; `begun` once they are asked for, `rounds` times."""
    held = SimpleNamespace(begun=threading.Event(), released=threading.Event(), rounds=0)
    collector = service.app.lifecycle.server.statistics
    statistics = collector.statistics

    def wait():
        held.rounds += 1
        held.begun.set()
        assert held.released.wait(PATIENCE_S)
        return statistics()

    collector.statistics = wait
    try:
        yield held
    finally:
        held.released.set()
        collector.statistics = statistics


@pytest.mark.parametrize("path", ["/metrics", "/v1/stats"])
def test_who_asks_while_figures_are_written_gets_the_same_text_and_no_lookup_waits(service, path):
    with ThreadPoolExecutor(4) as pool:
        with held(service) as figures:
            asked = [pool.submit(httpx.get, service.url + path, timeout=PATIENCE_S)]
            assert figures.begun.wait(PATIENCE_S)
            asked += [pool.submit(httpx.get, service.url + path, timeout=PATIENCE_S) for _ in range(3)]
            wait_until(lambda: service.passed_on == 4, "all have asked")
            _look_up(service, "stays")
            assert not any(one.done() for one in asked)
        texts = {one.result().content for one in asked}
    assert len(texts) == figures.rounds == 1
    assert service.client.get("/metrics").content not in texts


def test_figures_that_are_never_written_are_given_up_and_do_not_pile_up(files):
    document = document_of(_model("stays", files), service={"request_timeout_s": 0.3})
    before = set(threading.enumerate())  # those of services of other tests may be there still
    with running_service(document) as service:
        with held(service) as figures:
            for path in ("/metrics", "/metrics", "/v1/stats", "/metrics"):
                assert service.client.get(path).status_code == 504
            wait_until(lambda: _answer(service, "stays") == 200, "a lookup is answered")  # on a busy machine too late, too
            assert figures.rounds == 1
            assert len([one for one in threading.enumerate() if one.name.startswith("hps-text") and one not in before]) == 1
        for path in ("/metrics", "/v1/stats"):
            wait_until(lambda path=path: service.client.get(path).status_code == 200, "it is written again")


# -- the page of docs/ -------------------------------------------------------------------------------------------------


PAGE = ROOT / "docs" / "observability.md"
PUBLISHED = ROOT / "docs" / "metrics.json"


@contextmanager
def metered_service(directory):
    hps.write_sparse_model(directory / "t", (np.arange(100), np.zeros((100, 4), np.float32)))
    model = model_of("m", [directory / "t"], {"item": 4}, gpucacheper=0.5, hit_rate_threshold=1.1)
    more = {"update_source": {"type": "kafka", "brokers": "127.0.0.1:1"}, "service": {"triton_metrics": True}}
    with running_service(document_of(model, persistent=directory / "rocks", **more)) as service:
        service.client.post("/v1/models/m/lookup", json={"tables": {"item": [1, 1000]}})
        samples(service)  # what a device and a disk must be asked for is asked
        wait_until(lambda: ("hps_device_memory_bytes", "cpu") in samples(service), "it is known")
        yield service


@pytest.fixture(scope="module")
def metered(tmp_path_factory):
    with metered_service(tmp_path_factory.mktemp("service")) as service:
        yield service


def described(service):
    """Return name, kind, help and labels of each metric; labels that have no sample here are those published."""
    published = {metric["name"]: metric["labels"] for metric in json.loads(PUBLISHED.read_text())}
    text = service.client.get("/metrics").text
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    metrics = []
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" if f"{family.name}_total" in kinds else family.name
        if not name.endswith("_created"):
            labels = sorted(set(family.samples[-1].labels) - {"le"}) if family.samples else published.get(name, [])
            metrics.append({"name": name, "kind": kinds[name], "labels": labels, "help": helps[name]})
    return sorted(metrics, key=lambda metric: metric["name"])


def test_the_published_metrics_are_those_of_the_service_and_all_on_the_page(metered):
    metrics = described(metered)
    assert metrics == json.loads(PUBLISHED.read_text()), f"metrics changed; if that is meant: python -m {__name__}"
    page = PAGE.read_text()
    named = set(re.findall(r"\b(?:hps|nv|process)_\w+[a-z]\b", page)) - {"hps_lookup_seconds_bucket"}
    assert named == {metric["name"] for metric in metrics}
    assert all(f"| `{stage}` |" in page for stage in STAGES)


def test_tritons_names_say_what_its_statistics_say_where_wanted(metered):
    metered.client.post("/v1/models/m/lookup", json={"tables": {"nothing": [1]}})
    [stats] = metered.client.get("/v2/models/m/stats").json()["model_stats"]
    values = samples(metered)
    times = stats["inference_stats"]

    def value(name):
        return values[f"nv_inference_{name}", "m", "1"]

    assert (value("request_success"), value("request_failure")) == (times["success"]["count"], times["fail"]["count"])
    assert value("count") == value("exec_count") == stats["inference_count"] > 0
    assert value("request_failure") > 0
    for name in ("queue", "compute_input", "compute_infer", "compute_output", "request"):
        assert value(f"{name}_duration_us") == times["success" if name == "request" else name]["ns"] // 1000
    lifecycle = metered.app.lifecycle
    wanted = lifecycle.configuration
    assert not type(wanted.service)().triton_metrics
    lifecycle.configuration = wanted.model_copy(update={"service": wanted.service.model_copy(update={"triton_metrics": False})})
    assert "nv_inference" not in metered.client.get("/metrics").text
    lifecycle.configuration = wanted


def test_fronts_the_loop_of_the_engine_and_default_vectors_are_counted(metered):
    before = samples(metered)
    metered.client.post("/v1/models/m/lookup", json={"tables": {"item": [-5] * 1000}})  # no tier has it
    after = samples(metered)
    for name in ("hps_lookup_keys_total", "hps_default_keys_total"):
        assert after[name, "m", "item"] - before[name, "m", "item"] == 1000, "as often as it is sent"
    assert after["hps_owner_batches_total",] > before["hps_owner_batches_total",]
    assert after["hps_owner_handed_over_total",] == before["hps_owner_handed_over_total",] + 1
    assert after["hps_owner_malformed_total",] == 0
    assert after["hps_front_cpu_seconds_total", "0"] > 0
    assert after["hps_http_connections", "0"] >= 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, metered_service(Path(place)) as running:
        PUBLISHED.write_text("[\n" + ",\n".join(json.dumps(metric) for metric in described(running)) + "\n]\n")
