"""Calls in this process during a canary whose version has other tables: no answer is of the wrong table, and none is lost."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.tensors.bags import Bags
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.ring2.versions.test_checks_in_process import engine as engine  # fixture
from tests.servers.running_service import document_of, model_of

KEYS = np.arange(50, dtype=np.int64)


def vectors(number: float, dim: int) -> np.ndarray:
    return np.full((KEYS.size, dim), number, np.float32)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "repository" / "ranker"
    home.mkdir(parents=True)
    say(home, {"user": 4, "item": 4})
    hps.write_version(home / "1", {"user": (KEYS, vectors(1, 4)), "item": (KEYS, vectors(2, 4))})
    return home


def say(home: Path, tables: dict[str, int]) -> None:
    (home / "model.json").write_text(json.dumps(model_of("ranker", [*tables], tables, checks=False)))


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[hps.HPS]:
    with hps.HPS(document_of(persistent=tmp_path / "rocksdb", model_repository=str(home.parent))) as server:
        yield server


def try_out(server: hps.HPS, home: Path, tables: dict[str, int], **asked: Any) -> None:
    """Begin a rollout of a version with these tables, in this order: user has threes, item has fours."""
    say(home, tables)
    numbers = {"user": 3, "item": 4}
    hps.write_version(home / "2", {name: (KEYS, vectors(numbers[name], dim)) for name, dim in tables.items()})
    server.catalog.scan()
    server.deploy("ranker", **asked)


def instead(server: hps.HPS, patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call this before every lookup of the new version, which it may fail or delay."""
    deployed = server.live.deployed("ranker", "2")
    assert deployed is not None
    [broken] = {*deployed.sessions.values()}
    real = type(broken).run

    def run(session: Any, *arguments: Any, **options: Any) -> None:
        if session is broken:
            call()
        real(session, *arguments, **options)

    patch.setattr(type(broken), "run", run)


def fails() -> None:
    raise hps.DatabaseError("in this test")


def errors(server: hps.HPS) -> tuple[int, int]:
    status = server.rollout("ranker")
    assert status is not None
    return status.counts.new.errors, status.counts.old.errors


def test_what_the_new_version_fails_is_answered_from_the_same_table_of_the_serving_one(
    server: hps.HPS, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_out(server, home, {"item": 4, "user": 4}, canary=1.0)
    instead(server, monkeypatch, fails)
    out = np.empty((1, 4), np.float32)
    with server.routed("somebody"):
        assert server.lookup([7], "ranker", "user")[0, 0] == 1
        found = server.lookup_tables({"user": [7], "item": [8]}, "ranker")
        assert (found["user"][0, 0], found["item"][0, 0]) == (1, 2)
        server.lookup_fromdlpack(np.array([7]), out, "ranker", "user")
        assert out[0, 0] == 1
        server.lookup_concatenated(np.array([7]), [1, 0], out, "ranker")  # by the order of the serving version's tables
        assert out[0, 0] == 1
        assert server.lookup_pooled({"user": Bags(np.array([[7, 8]]))}, "ranker")["user"][0, 0] == 2
    assert errors(server) == (5, 0)


def test_what_fits_the_serving_version_alone_is_answered_by_it(server: hps.HPS, home: Path) -> None:
    try_out(server, home, {"user": 8, "item": 4}, canary=1.0)
    out = np.empty((2, 4), np.float32)
    with server.routed("somebody"):
        server.lookup_fromdlpack(np.array([7, 8]), out, "ranker", "user")
        assert out.tolist() == vectors(1, 4)[:2].tolist()
        assert server.lookup([7], "ranker", "user").tolist() == [[3.0] * 8]
        with pytest.raises(hps.UnknownTableError):
            server.lookup([7], "ranker", "nothing")
    assert errors(server) == (1, 0), "the caller was wrong the last time"


@pytest.mark.parametrize("asked", [{"shadow": 1.0}, {"canary": 1.0}], ids=["shadow", "canary"])
def test_tables_in_another_order_are_not_compared(server: hps.HPS, home: Path, asked: dict[str, float]) -> None:
    try_out(server, home, {"item": 4, "user": 4}, **asked)
    with server.routed("somebody"):
        assert server.lookup([7], "ranker", "user")[0, 0] == (1 if "shadow" in asked else 3)
    assert server._routed._queue is None


@pytest.mark.parametrize(("error", "counted"), [(hps.DatabaseError, 1), (hps.NotReadyError, 0)])
def test_a_comparison_that_fails_is_an_error_of_the_shadow_unless_it_was_retired(
    server: hps.HPS, home: Path, monkeypatch: pytest.MonkeyPatch, error: type[hps.HPSError], counted: int
) -> None:
    try_out(server, home, {"user": 4, "item": 4}, shadow=1.0)

    def raises() -> None:
        raise error("in this test")

    instead(server, monkeypatch, raises)
    with server.routed("somebody"):
        assert server.lookup([7], "ranker", "user")[0, 0] == 1
    wait_until(lambda: compared_of(server).failed == 1, "it is counted")
    assert errors(server) == (counted, 0)


def test_a_compared_canary_answers_once_and_gives_its_memory_back(server: hps.HPS, home: Path) -> None:
    try_out(server, home, {"user": 4, "item": 4}, canary=1.0, options={"compare": True, "queue_bytes": 24})
    for number in range(1, 4):  # 8 bytes of keys and 16 of vectors each, which is all that may wait
        with server.routed("somebody"):
            assert server.lookup([7], "ranker", "user")[0, 0] == 3
        wait_until(lambda number=number: compared_of(server).requests == number, "it is compared")  # type: ignore[misc]
        wait_until(lambda: server._routed._bytes == 0, "its memory is given back")
    status = server.rollout("ranker")
    assert status is not None
    assert (status.counts.new.answered, status.counts.old.answered, compared_of(server).dropped) == (3, 0, 0)


def test_what_waits_to_be_compared_is_bounded_and_nothing_is_copied_for_what_is_dropped(server: hps.HPS, home: Path) -> None:
    try_out(server, home, {"user": 4, "item": 4}, shadow=1.0)
    [rollout] = server.rollouts.active.values()
    config = rollout.record.plan.config.model_copy(update={"queue_bytes": 100})
    plan = rollout.record.plan.model_copy(update={"config": config})
    rollout.record = rollout.record.model_copy(update={"plan": plan})
    with server.routed("somebody"):
        server.lookup(np.arange(50), "ranker", "user")
    assert (rollout.counts.compared.dropped, server._routed._bytes) == (1, 0)
    with server.routed("somebody"):
        server.lookup([7], "ranker", "user")
    wait_until(lambda: rollout.counts.compared.requests == 1, "a small one is compared")
    assert rollout.counts.compared.different == 1


def test_a_call_for_nobody_is_the_serving_versions(server: hps.HPS, home: Path) -> None:
    try_out(server, home, {"user": 4, "item": 4}, canary=1.0)
    assert server.lookup([7], "ranker", "user")[0, 0] == 1
    with server.routed(""):
        assert server.lookup([7], "ranker", "user")[0, 0] == 1
    with server.routed("somebody"):
        assert server.lookup([7], "ranker", "user")[0, 0] == 3


def test_a_later_call_that_fails_is_no_error_of_the_new_version(
    server: hps.HPS, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_out(server, home, {"user": 4, "item": 4}, canary=1.0)

    with server.routed("somebody"):
        assert server.lookup([7], "ranker", "user")[0, 0] == 3
        monkeypatch.setattr(type(server.model("ranker")), "prefetch", lambda *_: fails())
        with pytest.raises(hps.DatabaseError):
            server.prefetch([7], "ranker", "user")
    assert errors(server) == (0, 0)


def test_what_the_caller_does_with_its_arrays_meanwhile_is_not_compared(
    server: hps.HPS, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_out(server, home, {"user": 4, "item": 4}, shadow=1.0)
    goes_on = threading.Event()
    instead(server, monkeypatch, lambda: goes_on.wait(PATIENCE_S))
    keys = np.array([7])
    with server.routed("somebody"):
        found = server.lookup(keys, "ranker", "user")
    found[:], keys[:] = 3, 1000
    goes_on.set()
    [rollout] = server.rollouts.active.values()
    wait_until(lambda: rollout.counts.compared.requests == 1, "it is compared")
    assert (rollout.counts.compared.different, rollout.counts.compared.difference) == (1, 2.0)


def test_what_the_caller_does_with_the_inputs_of_scores_meanwhile_is_not_compared(
    tmp_path: Path, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "repository" / "ranker"
    said = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
    for version in (1, 2):
        rows = np.arange(10, dtype=np.float32)[:, None] * version
        hps.write_version(home / str(version), {"item": (KEYS[:10], rows)}, network=(said, b'{"factor": 1.0}'))
        (home / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": 1}, checks=False)))
    with hps.HPS(document_of(persistent=tmp_path / "db", model_repository=str(home.parent))) as server:
        server.deploy("ranker", "1")
        server.deploy("ranker", "2", shadow=1.0)
        goes_on = threading.Event()
        instead(server, monkeypatch, lambda: goes_on.wait(PATIENCE_S))
        item = np.array([5])
        with server.routed("somebody"):
            found = server.score("ranker", {"item": item})["score"]
        assert found.tolist() == [5.0]
        found[:], item[:] = 10.0, 9
        goes_on.set()
        wait_until(lambda: compared_of(server).requests == 1, "it is compared")
        assert compared_of(server).largest == 5.0


@pytest.mark.parametrize("asked", [{"canary": 1.0}, {"shadow": 1.0}])
@pytest.mark.parametrize("fails", [True, False])
def test_a_compared_score_is_of_the_keys_that_either_versions_transform_makes(
    tmp_path: Path, engine: None, asked: dict[str, float], fails: bool
) -> None:
    home = tmp_path / "repository" / "ranker"
    said = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
    rows = np.arange(10, dtype=np.float32)[:, None]

    def write(version: int, function: str) -> None:
        made = {"function": f"tests.fakes.transforms:{function}", "inputs": {"text": "bytes"}, "outputs": ["item"]}
        hps.write_version(home / str(version), {"item": (KEYS[:10], rows)}, network=(said, b'{"factor": 1.0}'))
        entry = model_of("ranker", ["item"], {"item": 1}, checks=False, transform=made)
        (home / "model.json").write_text(json.dumps(entry))

    write(1, "first")
    document = document_of(persistent=tmp_path / "db", model_repository=str(home.parent), model_source={"trust": True})
    with hps.HPS(document) as server:
        write(2, "second")
        server.catalog.scan()
        server.deploy("ranker", options={"compare": True}, **asked)
        text = "5x" if fails else "57"
        with server.routed("somebody"):
            for _ in range(2):
                answered = server.score("ranker", {"text": [text]})
                assert answered["score"].tolist() == [5.0 if fails or "shadow" in asked else 7.0]
        if fails and "canary" in asked:
            assert compared_of(server).requests == 0
            return
        wait_until(lambda: compared_of(server).requests + compared_of(server).failed == 2, "both are compared")
        assert compared_of(server).failed == (2 if fails else 0)
        assert compared_of(server).largest == (0.0 if fails else 2.0)
        assert errors(server) == (2 if fails else 0, 0)


def compared_of(server: hps.HPS) -> Any:
    status = server.rollout("ranker")
    assert status is not None
    return status.counts.compared
