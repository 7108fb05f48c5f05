"""Redis dies, stalls, fills up or moves while threads look up all the time: no wrong vector, and it heals by itself."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.testing.waiting import wait_until
from tests.ring2.databases.redis.test_redis_faults import FAULTS, PRESENT, TAG, Tiers, hasty_database, paused, redis_database
from tests.servers.redis_server import NODE_TIMEOUT_MS, RedisClusterServers, RedisServer, server_program, valkey_program

pytestmark = pytest.mark.redis


class Traffic:
    """Four threads that look keys up and judge every answer.

    Attributes:
        lookups: how many were answered.
        failures: errors that lookups raised.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.lookups, self.failures = tiers, 0, []
        self._lock, self._done = threading.Lock(), threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(4) as pool:
            threads = [pool.submit(self._run, seed) for seed in range(4)]
            try:
                self.wait_for(20)
                yield
            finally:
                self._done.set()
            for thread in threads:
                thread.result()

    def wait_for(self, lookups: int) -> None:
        """Let that many more lookups be answered."""
        wanted = self.lookups + lookups
        wait_until(lambda: self.lookups >= wanted, f"{lookups} more lookups are answered")

    def wait_for_redis(self) -> None:
        """Wait until Redis answers, and not only the database below."""
        for _ in range(3):
            wanted = self.tiers.redis_hits() + 500
            wait_until(lambda: self.tiers.redis_hits() > wanted, "Redis answers")  # noqa: B023

    def _run(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self._done.is_set():
            failure = None
            try:
                self.tiers.look_up(random)
            except DatabaseError as error:
                failure = error
            with self._lock:
                self.lookups += failure is None
                self.failures += [failure] * (failure is not None)
            self._done.wait(0.02 if failure else 0.002)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_lookup_fails_while_a_fault_comes_again_and_again(tmp_path: Path, fault):
    database = hasty_database if fault is paused else redis_database
    with RedisServer(tmp_path / "redis") as server, closing(Tiers(server.address, tmp_path, database, promote=True)) as tiers:
        traffic = Traffic(tiers)
        with traffic.running():
            for _ in range(5):
                with contextmanager(fault)(server, tiers):
                    traffic.wait_for(50)
                traffic.wait_for_redis()
        assert traffic.failures == []


@pytest.mark.parametrize("program", ["redis", pytest.param("valkey", marks=pytest.mark.valkey)])
@pytest.mark.parametrize("below", [True, False])
def test_a_replica_takes_over_and_the_first_master_again_once_it_is_back(tmp_path: Path, program: str, below: bool):
    chosen = valkey_program() if program == "valkey" else server_program()
    with (
        RedisClusterServers(tmp_path / "cluster", 3, replicas=True, program=chosen) as cluster,
        closing(Tiers(cluster.address, tmp_path if below else None)) as tiers,
    ):
        first, second, traffic = cluster.masters[0], cluster.servers[3], Traffic(tiers)
        with traffic.running():
            for old, new in ((first, second), (second, first)):
                cluster.wait_for_replica(new, of=old)
                old.kill()
                cluster.fail_silent_nodes(after_ms=1000)
                wait_until(lambda new=new: cluster.is_master(new), "the replica has taken over")
                cluster.fail_silent_nodes(after_ms=NODE_TIMEOUT_MS)
                cluster.wait_whole()
                traffic.wait_for_redis()
                assert tiers.redis.size(TAG) == PRESENT
                fresh = len(traffic.failures)
                traffic.wait_for(50)
                assert len(traffic.failures) == fresh  # it is healed for good
                old.start()
                cluster.wait_for_replica(old, of=new)
                cluster.wait_whole()
        assert bool(traffic.failures) != below
