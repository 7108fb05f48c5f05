"""A version of model `m` without tables."""

import threading
from types import SimpleNamespace
from typing import cast

import hps
from hps.versions.deployment import Deployment
from tests.servers.running_service import document_of, model_of

ENTRY = hps.load_configuration(document_of(model_of("m", ["nowhere"], {"t": 4}))).models[0]


class FakeDeployment:
    """A version whose last lookup ends when it is released."""

    def __init__(self, version: str) -> None:
        self.version, self.config, self.chain = version, ENTRY, SimpleNamespace(databases=["some"])
        self.held, self.checks = False, None
        self.released = threading.Event()
        self.released.set()

    def close(self, tables: str) -> bool:
        return self.released.is_set()


def fake(version: str) -> Deployment:
    return cast(Deployment, FakeDeployment(version))
