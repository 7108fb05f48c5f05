"""The HTTP interface as it was published: a change of it is seen in `docs/openapi.json`.

`python -m tests.ring2.serve.test_http_openapi` writes that file anew.
"""

import json

import numpy as np

import hps
from hps.configuration.load import load_configuration
from hps.serve.engine.app import Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.types import TableSpec
from tests import ROOT
from tests.fakes.fake_parameter_server import FakeParameterServer
from tests.servers.running_service import document_of, model_of, running_service

PUBLISHED = ROOT / "docs/openapi.json"


def described():
    fake = FakeParameterServer("m", [TableSpec("m", "item", 3, 0.0, 1000)])
    app = Application(Lifecycle(load_configuration(document_of(model_of("m", ["nowhere"], {"item": 3}))), fake))
    document = json.loads(json.dumps(app.openapi()))
    document["info"]["version"] = "any"
    return document


def test_the_openapi_document_is_the_published_one():
    assert described() == json.loads(PUBLISHED.read_text()), f"the interface changed; if that is meant: python -m {__name__}"


def test_every_route_that_is_described_is_served(tmp_path):
    hps.write_sparse_model(tmp_path / "item.model", (np.arange(2), np.zeros((2, 3), np.float32)))
    with running_service(document_of(model_of("m", [tmp_path / "item.model"], {"item": 3}))) as service:
        document = service.client.get("/openapi.json").json()
        for path, methods in document["paths"].items():
            for method in methods:
                response = service.client.request(
                    method, path.format(model="m", version="1", table="item", key=5, region="r", content="c")
                )
                refused = "model_control_mode" in response.text or "is not deployed" in response.text  # one route undeploys it
                assert response.status_code in (200, 400, 409) or refused, (method, path)
        references = set(json.dumps(document).split('"#/components/schemas/')[1:])
        assert {text.partition('"')[0] for text in references} <= set(document["components"]["schemas"])


if __name__ == "__main__":
    PUBLISHED.write_text(json.dumps(described(), indent=2) + "\n")
