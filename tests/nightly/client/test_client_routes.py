"""`route="keys"` under load, while servers are killed and deploy: no lookup fails, and none mixes versions."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hps
from tests.ring2.client.test_client_routes import ADMIN, DIMS, ROWS, addresses_of, three_servers
from tests.servers.load import Load
from tests.servers.served_process import ServedProcess


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServedProcess]]:
    yield from three_servers(tmp_path)


@pytest.fixture
def client(servers: list[ServedProcess]) -> Iterator[hps.Client]:
    with hps.connect(addresses_of(servers), route="keys") as client:
        yield client


def load(client: hps.Client, seen: set[float]) -> Load:
    """Threads that look up, and note the versions that they see."""

    def look_up(rng: np.random.Generator) -> list[object]:
        keys = {name: rng.integers(0, ROWS, 300) for name in DIMS}
        got = client.lookup_tables(keys, "m")
        versions = set(np.concatenate([one[:, -1] for one in got.values()]).tolist())
        seen.update(versions)
        right = all((one[:, :-1] == keys[name][:, None]).all() for name, one in got.items())
        return [] if len(versions) == 1 and right else [versions]

    return Load(look_up)


def test_a_server_that_is_killed_and_comes_back_fails_no_lookup(servers: list[ServedProcess], client: hps.Client) -> None:
    with load(client, seen := set()) as asking:
        for server in servers[:2]:
            asking.more()
            server.stop(signal.SIGKILL)
            asking.more()
            server.start()
            asking.more()
    assert asking.problems == []
    assert seen == {1.0}


def test_versions_that_are_deployed_one_server_after_the_other_are_never_mixed(
    servers: list[ServedProcess], client: hps.Client
) -> None:
    with load(client, seen := set()) as asking:
        for version in ("2", "1", "2"):
            for server in servers:
                asking.more()
                with hps.connect(server.url, token=ADMIN, timeout_s=60) as direct:
                    direct.ask("/v1/models/m/deploy", "POST", {"version": version})
            asking.more()
    assert asking.problems == []
    assert seen == {1.0, 2.0}
