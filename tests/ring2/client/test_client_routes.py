"""`route="keys"` over three services: right, of one version, and alive while one of them is killed or deploys."""

import asyncio
import json
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import hps
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

DIMS = {"item": 4, "user": 8}
ROWS = 2000
ADMIN = "admin-token"


def vectors_of(name: str, keys: Any, version: int) -> np.ndarray:
    keys = np.asarray(keys)
    vectors = np.repeat(keys[:, None], DIMS[name], 1).astype(np.float32)
    vectors[:, -1] = version
    vectors[(keys < 0) | (keys >= ROWS)] = 0
    return vectors


@pytest.fixture
def servers(tmp_path: Path):
    """Three services with disks of their own, one repository and two versions, of which the first serves."""
    entry = model_of("m", [f"{name}.model" for name in DIMS], DIMS, hit_rate_threshold=1.1, max_batch_size=5000)
    entry["version_policy"] = {"specific": {"versions": [1]}}
    for version in (1, 2):
        for name in DIMS:
            keys = np.arange(ROWS)
            place = tmp_path / "models" / "m" / str(version) / f"{name}.model"
            hps.write_sparse_model(place, (keys, vectors_of(name, keys, version)))
    (tmp_path / "models" / "m" / "model.json").write_text(json.dumps(entry))
    with ExitStack() as stack:
        found = []
        for nth in range(3):
            directory = tmp_path / f"server-{nth}"
            directory.mkdir()
            document = document_of(model_repository=str(tmp_path / "models"), service={"admin_token": ADMIN, "drain_s": 0})
            found.append(stack.enter_context(ServedProcess(document, directory)))
        yield found


def addresses_of(servers: list[ServedProcess]) -> list[str]:
    return [one.url for one in servers]


def test_it_looks_up_as_one_server_does(servers: list[ServedProcess]) -> None:
    rng = np.random.default_rng(1)
    with hps.connect(addresses_of(servers), route="keys", token=ADMIN) as routed, hps.connect(servers[0].url) as one:
        for size in (0, 1, 2, 500, 3000):
            keys = {name: rng.integers(-5, ROWS + 5, size) for name in DIMS}
            got, masks = routed.lookup_tables(keys, "m", return_found=True)
            wanted, wanted_masks = one.lookup_tables(keys, "m", return_found=True)
            assert list(got) == list(wanted)
            for name in DIMS:
                np.testing.assert_array_equal(got[name], wanted[name])
                np.testing.assert_array_equal(masks[name], wanted_masks[name])
            out = np.full((size, DIMS["item"]), np.nan, np.float32)
            assert routed.lookup(keys["item"], "m", "item", out=out) is out
            np.testing.assert_array_equal(out, wanted["item"])
            narrow = {"item": torch.empty(size, DIMS["item"], dtype=torch.bfloat16), "user": np.empty((size, 8), np.float16)}
            routed.lookup_tables(keys, "m", out=narrow)
            assert narrow["item"].equal(torch.from_numpy(wanted["item"]).bfloat16())
            np.testing.assert_array_equal(narrow["user"], wanted["user"].astype(np.float16))
        assert routed.lookup(np.array([2**64 - 1], np.uint64), "m", "item").shape == (1, 4)
        pooled = routed.lookup_pooled({"item": hps.Bags([1, 2, 3], [0, 2, 3])}, "m")
        assert pooled["item"].shape == (2, 4)
        for wrong, error in ((("m", "nobody"), hps.UnknownTableError), (("nobody", "item"), hps.UnknownModelError)):
            with pytest.raises(error):
                routed.lookup(np.arange(100), *wrong)
        with pytest.raises(hps.InvalidInputError, match="got a client that routes keys"):
            routed.shared_memory(4096)

    async def twin() -> None:
        async with hps.connect_async(addresses_of(servers), route="keys") as client:
            keys = rng.integers(0, ROWS, 1000)
            for _ in range(3):
                several = await asyncio.gather(*(client.lookup(keys, "m", name) for name in DIMS))
                for name, got in zip(DIMS, several, strict=True):
                    np.testing.assert_array_equal(got, vectors_of(name, keys, 1))

    asyncio.run(twin())


def test_each_server_is_asked_for_its_own_keys(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys") as client:
        for _ in range(4):
            client.lookup(np.arange(ROWS), "m", "item")
    asked = []
    for one in servers:
        metrics = httpx.get(f"{one.url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text
        (line,) = [line for line in metrics.splitlines() if line.startswith('hps_lookup_keys_total{model="m",table="item"')]
        asked.append(float(line.rpartition(" ")[2]))
    assert sum(asked) == 4 * ROWS
    assert max(asked) < 0.4 * sum(asked)


def test_one_connection_of_each_server_is_enough_for_many_threads(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys", connections=1) as client:
        wrong: list[Any] = []

        def ask() -> None:
            for first in range(0, 1000, 50):
                got = client.lookup(np.arange(first, first + 100), "m", "item")
                if (got != vectors_of("item", np.arange(first, first + 100), 1)).any():
                    wrong.append(got)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        assert not any(one.is_alive() for one in threads)
        assert not wrong


class Load:
    """Threads that look up all the time, and keep the versions and errors that they saw."""

    def __init__(self, client: hps.Client, count: int = 4) -> None:
        self._client, self._stopping = client, threading.Event()
        self.lookups, self.versions, self.problems = 0, set[float](), list[Any]()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._stopping.is_set():
            keys = {name: rng.integers(0, ROWS, 300) for name in DIMS}
            try:
                got = self._client.lookup_tables(keys, "m")
            except hps.HPSError as error:
                self.problems.append(error)
                continue
            versions = set(np.concatenate([one[:, -1] for one in got.values()]).tolist())
            right = all((one[:, :-1] == keys[name][:, None]).all() for name, one in got.items())
            if len(versions) != 1 or not right:
                self.problems.append(versions)
            self.versions |= versions
            self.lookups += 1

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for one in self._threads:
            one.join(60)


def more(load: Load) -> None:
    """Wait for lookups that began after this call."""
    before = load.lookups
    for _ in range(3000):
        if load.lookups > before + 20:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"no lookups: {load.problems[:3]}")


def test_a_server_that_is_killed_and_comes_back_fails_no_lookup(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys") as client, Load(client) as load:
        for one in servers[:2]:
            more(load)
            one.stop(signal.SIGKILL)
            more(load)
            one.start()
            more(load)
    assert load.problems == []
    assert load.versions == {1.0}


def test_versions_that_are_deployed_one_server_after_the_other_are_never_mixed(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys") as client, Load(client) as load:
        for version in ("2", "1", "2"):
            for one in servers:
                more(load)
                with hps.connect(one.url, token=ADMIN, timeout_s=60) as direct:
                    direct.ask("/v1/models/m/deploy", "POST", {"version": version})
            more(load)
    assert load.problems == []
    assert load.versions == {1.0, 2.0}


@pytest.mark.parametrize(
    ("addresses", "route", "problem"),
    [(["http://a:1"], "rows", "got route 'rows'"), (["http://a:1", "http://a:1"], "keys", "expected each once")],
)
def test_a_route_needs_servers_that_it_can_tell_apart(addresses: list[str], route: str, problem: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=problem):
        hps.connect(addresses, route=route)
