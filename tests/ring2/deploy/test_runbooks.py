"""docs/runbooks.md is followed, word by word: each fault is a real one, its alert fires, the commands find it and mend it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
from tests.ring1.versions.test_version_checks import FIRST, KEYS, SHUFFLED, retrained
from tests.servers.alert_rules import Timeline
from tests.servers.runbooks import Runbook, sections
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

ROWS, DIM = FIRST.shape
BEFORE, FAULT, AFTER = 120, 30, 100  # minutes
pytestmark = pytest.mark.promtool


class OnCall:
    """A served replica, the runbook of one fault, and the timeline that promtool judges. *For one test.*"""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.repository = directory / "models"
        self.data = directory / "data"

    def publish(self, version: int, vectors: np.ndarray) -> None:
        hps.write_version(self.repository / "ranking" / str(version), {"item": (KEYS, vectors)})

    def document(self, model: Any = (), **more: Any) -> dict[str, Any]:
        """A configuration of a polled repository with one version of one model, over RocksDB."""
        self.publish(1, FIRST)
        entry = model_of("ranking", ["item"], {"item": DIM}, gpucache=False) | dict(model)
        (self.repository / "ranking" / "model.json").write_text(hps_json(entry))
        service = {"model_control_mode": "poll", "repository_poll_s": 0.1, "drain_s": 0}
        document = document_of(persistent=self.data / "rocksdb", model_repository=str(self.repository), service=service)
        return document | more

    def serve(self, document: dict[str, Any]) -> None:
        self.service = self.stack.enter_context(ServedProcess(document, self.directory))
        self.client = self.stack.enter_context(httpx.Client(base_url=self.service.url, timeout=30))
        self.timeline = Timeline(self.directory, {"hps-1": self.client})

    def runbook(self, title: str, **variables: object) -> Runbook:
        known = {"HPS_URL": self.service.url, "MODEL": "ranking", "CONFIG": self.directory / "ps.json", "DATA": self.data}
        return Runbook(title, self.directory / "bin", **known, **variables)

    def look_up(self, vectors: np.ndarray = FIRST, keys: np.ndarray = KEYS[:50]) -> None:
        answer = self.client.post("/v1/models/ranking/lookup", json={"tables": {"item": keys.tolist()}})
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(np.array(answer.json()["tables"]["item"], np.float32), vectors[keys // 7])

    def states(self) -> dict[str, str]:
        """The state of each version."""
        [model] = self.client.get("/v1/models").json()["models"]
        return {version["version"]: version["state"] for version in model["versions"]}


def hps_json(value: object) -> str:
    import json

    return json.dumps(value)


@pytest.fixture
def on_call(tmp_path: Path) -> Iterator[OnCall]:
    with ExitStack() as stack:
        yield OnCall(tmp_path, stack)


def test_a_bad_version(on_call: OnCall) -> None:
    on_call.serve(on_call.document())
    book = on_call.runbook("A bad version")
    on_call.timeline.phase(BEFORE, on_call.look_up)

    def publish() -> None:
        on_call.publish(2, wrong := retrained())  # passes, and is wrong
        wait_until(lambda: on_call.states().get("2") == "serving", "version 2 serves")
        on_call.publish(3, SHUFFLED)
        wait_until(lambda: on_call.states().get("3") == "held", "version 3 is held")
        on_call.look_up(wrong)

    on_call.timeline.phase(FAULT, publish, ('HPSVersionHeld{instance="hps-1",model="ranking",version="3"}',))
    assert "version 3 is held: vectors of item: alignment" in book.follow("Find out")
    assert not book.is_over()
    book.follow("Mend, if a wrong version serves")
    on_call.look_up(FIRST)
    assert not book.is_over()
    book.follow("Mend, if a version is held")
    on_call.look_up(SHUFFLED)
    book.follow("Mend, once a good version is there")
    wait_until(book.is_over, "it is over")
    on_call.timeline.phase(AFTER, lambda: on_call.look_up(SHUFFLED))
    on_call.timeline.check()
    assert not book.left


def test_every_runbook_is_followed() -> None:
    source = Path(__file__).read_text()
    assert [title for title in sections() if f'runbook("{title}"' not in source] == []
