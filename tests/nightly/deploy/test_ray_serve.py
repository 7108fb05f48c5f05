"""The examples of Ray Serve on a cluster of this machine: right vectors while shards are added and killed."""

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
from hps.client.routing import server_indices
from hps.testing.waiting import wait_until
from tests.servers.child_processes import run_alone
from tests.servers.load import Load
from tests.servers.running_service import document_of, model_of

ROWS = 5000
DIMS = {"item": 4, "user": 8}
WAIT_S = 120.0

pytestmark = pytest.mark.ray


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in DIMS:
        hps.write_sparse_model(tmp_path / f"{name}.model", (np.arange(ROWS), vectors_of(name, np.arange(ROWS))))
    entry = model_of("m", [str(tmp_path / f"{name}.model") for name in DIMS], DIMS, hit_rate_threshold=1.1, max_batch_size=ROWS)
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


def look_up_in_shards(configuration: str) -> None:
    import ray

    from examples.ray_serve import sharded

    names = ["shard-0", "shard-1", "shard-2"]
    every = np.arange(ROWS)
    with cluster() as serve:
        handle = sharded.start(configuration, 2)

        def asked(name: str) -> int:
            return serve.get_app_handle(name).keys.remote().result(timeout_s=WAIT_S)

        def grown(count: int) -> list[int]:
            before = [asked(name) for name in names[:count]]
            found = handle.lookup.remote("m", {"item": every, "user": every[:0]}).result(timeout_s=WAIT_S)
            np.testing.assert_array_equal(found["item"], vectors_of("item", every))
            assert found["user"].shape == (0, DIMS["user"])
            return [asked(name) - of_name for name, of_name in zip(names, before, strict=False)]

        assert grown(2) == np.bincount(server_indices(every, names[:2])).tolist()
        with load(handle) as asking:
            asking.more(10)
            before = asked("shard-0")
            handle = sharded.start(configuration, 3)
            asking.more(10)
            wait_until(lambda: asked("shard-2"), "the new shard is asked")
            assert asked("shard-0") > before  # it was not restarted
        assert asking.problems == []
        assert grown(3) == np.bincount(server_indices(every, names)).tolist()

        with load(handle) as asking:
            for _ in range(2):
                asking.more(10)
                before = asked("shard-1")
                (replica,) = [
                    actor for actor in ray.util.list_named_actors(all_namespaces=True) if "::shard-1#" in actor["name"]
                ]
                ray.kill(ray.get_actor(replica["name"], replica["namespace"]))
                asking.more(10)
                wait_until(lambda most=before: 0 < asked("shard-1") < most, "a new replica is asked")
        assert asking.problems == []
        shares = np.bincount(server_indices(every, names)).tolist()
        wait_until(lambda: grown(3) == shares, "each replica of `lookups` has found out by itself")


def test_replicas_look_up_alike(configuration: Path) -> None:
    run_alone(look_up_in_replicas, str(configuration))


def test_shards_can_be_added_and_killed_while_they_are_asked(configuration: Path) -> None:
    run_alone(look_up_in_shards, str(configuration))
