"""The examples of Ray Serve on a cluster of this machine: right vectors while shares are added and replicas killed."""

import json
import secrets
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.ground.shares import share_indices
from hps.testing.waiting import wait_until
from tests.servers.child_processes import run_alone
from tests.servers.load import Load
from tests.servers.running_service import document_of, model_of

ROWS = 5000
DIMS = {"item": 4, "user": 8}
WAIT_S = 120.0
REQUESTS, AT_ONCE = 10_000, 20

pytestmark = pytest.mark.ray


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in DIMS:
        hps.write_sparse_model(tmp_path / f"{name}.model", (np.arange(ROWS), vectors_of(name, np.arange(ROWS))))
    entry = model_of(
        "m", [str(tmp_path / f"{name}.model") for name in DIMS], DIMS, hit_rate_threshold=1.1, max_batch_size=2 * ROWS
    )
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document_of(entry)))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    return path


def vectors_of(name: str, keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] * 10.0 + np.arange(DIMS[name])).astype(np.float32)


@contextmanager
def cluster() -> Iterator[Any]:
    """Start a cluster; it ends with the process at the latest."""
    import ray
    from ray import serve

    # In a directory with a short name: it has sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(
            num_cpus=16,  # as Ray counts them: replicas want one each
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
        )
        try:
            yield serve
        finally:
            ray.shutdown()


def load(handle: Any) -> Load:
    """Threads that look up."""

    def look_up(rng: np.random.Generator) -> list[object]:
        keys = {name: rng.integers(0, ROWS, 200) for name in DIMS}
        found = handle.lookup.remote("m", keys).result(timeout_s=WAIT_S)
        return [name for name, of_table in keys.items() if not np.array_equal(found[name], vectors_of(name, of_table))]

    return Load(look_up, 2)


def look_up_in_replicas(configuration: str) -> None:
    from examples.ray_serve import simple

    with cluster() as serve:
        handle = serve.run(simple.app({"configuration": configuration}))
        with load(handle) as asking:
            asking.more(10)
        assert asking.problems == []
        body = json.dumps({"model": "m", "tables": {"item": [7, 3]}}).encode()
        with urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000/", body), timeout=WAIT_S) as answer:
            assert json.load(answer) == {"item": vectors_of("item", np.array([7, 3])).tolist()}


def look_up_in_shares(configuration: str) -> None:
    import ray

    from examples.ray_serve import sharded

    every = np.arange(-50, ROWS + 50)

    with cluster() as serve, hps.HPS(configuration) as one:
        handle = sharded.start(configuration, 2, 1, WAIT_S)

        def kill(*names: str) -> None:
            for actor in ray.util.list_named_actors(all_namespaces=True):
                if any(f"::{name}#" in actor["name"] for name in names):
                    ray.kill(ray.get_actor(actor["name"], actor["namespace"]))

        def asked(name: str) -> int:
            return serve.get_app_handle(name).keys.remote().result(timeout_s=WAIT_S)

        def compare(requests: int) -> None:
            rng = np.random.default_rng(5)
            for _ in range(0, requests, AT_ONCE):
                sent = [{name: rng.integers(-50, ROWS + 50, 20) for name in DIMS} for _ in range(AT_ONCE)]
                answers = [handle.lookup.remote("m", keys) for keys in sent]
                for keys, answer in zip(sent, answers, strict=True):
                    found, expected = answer.result(timeout_s=WAIT_S), one.lookup_tables(keys, "m")
                    for name in DIMS:
                        np.testing.assert_array_equal(found[name], expected[name])

        compare(AT_ONCE)
        with load(handle) as asking:
            asking.more(10)
            handle = sharded.start(configuration, 3, 2, WAIT_S)
            asking.more(10)
        assert asking.problems == []
        names = sharded.names_of(3, 2)
        assert set(serve.status().applications) == {*names, "lookups"}

        before = np.array([asked(name) for name in names]).reshape(3, 2).sum(1)
        found = handle.lookup.remote("m", {"item": every, "user": every[:0]}).result(timeout_s=WAIT_S)
        np.testing.assert_array_equal(found["item"], one.lookup(every, "m", "item"))
        assert found["user"].shape == (0, DIMS["user"])
        grown = np.array([asked(name) for name in names]).reshape(3, 2).sum(1) - before
        assert grown.tolist() == np.bincount(share_indices(every, 3)).tolist()
        compare(REQUESTS)

        with load(handle) as asking:  # a killed replica costs a retry
            asking.more(10)
            kill(names[0])
            asking.more(50)
        assert asking.problems == []

        kill(names[2], names[3])  # both replicas of share 1
        own = {share: every[share_indices(every, 3) == share] for share in range(3)}
        for share in (0, 2):
            found = handle.lookup.remote("m", {"item": own[share]}).result(timeout_s=WAIT_S)
            np.testing.assert_array_equal(found["item"], one.lookup(own[share], "m", "item"))

        def answers() -> bool:
            try:
                found = handle.lookup.remote("m", {"item": own[1]}).result(timeout_s=WAIT_S)
            except hps.MissingShareError:
                return False
            np.testing.assert_array_equal(found["item"], one.lookup(own[1], "m", "item"))
            return True

        wait_until(answers, "Serve has started the replicas again")


def test_replicas_look_up_alike(configuration: Path) -> None:
    run_alone(look_up_in_replicas, str(configuration))


def test_shares_answer_as_one_server_while_they_grow_and_replicas_are_killed(configuration: Path) -> None:
    run_alone(look_up_in_shares, str(configuration), timeout_s=1200)
