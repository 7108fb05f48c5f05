"""Series of `/metrics` live as long as what they measure."""

import numpy as np
import pytest

import hps
from tests.servers.running_service import document_of, model_of, running_service, samples

ROWS, DIM, TABLES, MODELS = 50, 4, ("a", "b", "c"), 180


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


def _look_up(service, name):
    tables = {table: [1, 2, 3, -1] for table in TABLES}
    assert service.client.post(f"/v1/models/{name}/lookup", json={"tables": tables}).status_code == 200


def _undeploy(service, name):
    assert service.client.post(f"/v1/models/{name}/undeploy").status_code == 200


def _changes(service, model, change, outcome):
    return samples(service).get(("hps_model_changes_total", change, model, outcome), 0)


def test_models_that_were_undeployed_leave_no_series(service, files):
    def round_of(name):
        assert _deploy(service, name, files) == 200
        _look_up(service, name)
        _undeploy(service, name)

    _look_up(service, "stays")
    round_of("first")  # the routes have their series
    before = _lines(service)
    for number in range(MODELS):
        round_of(f"model-{number}")
    assert _lines(service) <= before + 5
    assert _changes(service, "", "undeploy", "done") == MODELS + 1
    assert samples(service)["hps_lookup_keys_total", "stays", "a"] == 4


def test_failed_deployments_of_invented_names_share_one_series(service, tmp_path):
    assert _deploy(service, "first", tmp_path / "nothing") == 400
    before = _lines(service)
    for number in range(40):
        assert _deploy(service, f"invented-{number}", tmp_path / "nothing") == 400
    assert _lines(service) <= before + 5
    assert _changes(service, "", "deploy", "failed") == 41


def test_a_model_that_is_deployed_again_counts_from_zero(service, files):
    for _ in range(3):
        assert _deploy(service, "m", files) == 200
        assert samples(service)["hps_lookup_keys_total", "m", "a"] == 0
        _look_up(service, "m")
        assert samples(service)["hps_lookup_keys_total", "m", "a"] == 4
        assert _deploy(service, "m", files) == 200  # the same version goes on counting
        assert samples(service)["hps_lookup_keys_total", "m", "a"] == 4
        _undeploy(service, "m")
        assert ("hps_lookup_keys_total", "m", "a") not in samples(service)
