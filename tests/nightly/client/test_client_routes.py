"""`route="keys"` under load, while servers are killed and deploy: no lookup fails, and none mixes versions."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.ring2.client.test_client_routes import ADMIN, DIMS, ROWS, addresses_of, three_servers
from tests.servers.served_process import ServedProcess


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServedProcess]]:
    yield from three_servers(tmp_path)


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
            one.join(PATIENCE_S)


def more(load: Load) -> None:
    """Wait for lookups that began after this call."""
    before = load.lookups
    wait_until(lambda: load.lookups > before + 20 or load.problems, "lookups are answered")


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
