"""Redis is killed while threads look up all the time: no wrong vector, and its replica is used by itself."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.testing.waiting import wait_until
from tests.ring2.databases.redis.test_redis_faults import PRESENT, TAG, Tiers
from tests.servers.redis_server import NODE_TIMEOUT_MS, RedisClusterServers, server_program, valkey_program

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("program", ["redis", pytest.param("valkey", marks=pytest.mark.valkey)])
@pytest.mark.parametrize("below", [True, False])
def test_a_replica_takes_over_and_the_first_master_again_once_it_is_back(tmp_path: Path, program: str, below: bool):
    chosen = valkey_program() if program == "valkey" else server_program()
    done, failures = threading.Event(), []

    def look_up(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not done.wait(0.002):
            try:
                tiers.look_up(random)
            except DatabaseError as error:
                failures.append(error)

    def wait_for_redis() -> None:
        wanted = tiers.redis_hits() + 1500
        wait_until(lambda: tiers.redis_hits() > wanted, "Redis answers")

    with (
        RedisClusterServers(tmp_path / "cluster", 3, replicas=True, program=chosen) as cluster,
        closing(Tiers(cluster.address, tmp_path if below else None)) as tiers,
        ThreadPoolExecutor(4) as pool,
    ):
        first, second = cluster.masters[0], cluster.servers[3]
        threads = [pool.submit(look_up, seed) for seed in range(4)]
        try:
            for old, new in ((first, second), (second, first)):
                cluster.wait_for_replica(new, of=old)
                old.kill()
                cluster.fail_silent_nodes(after_ms=1000)
                wait_until(lambda new=new: cluster.is_master(new), "the replica has taken over")
                cluster.fail_silent_nodes(after_ms=NODE_TIMEOUT_MS)
                cluster.wait_whole()
                wait_for_redis()
                assert tiers.redis.size(TAG) == PRESENT
                fresh = len(failures)
                wait_for_redis()
                assert len(failures) == fresh  # it is healed for good
                old.start()
                cluster.wait_for_replica(old, of=new)
                cluster.wait_whole()
        finally:
            done.set()
        for thread in threads:
            thread.result()
        assert bool(failures) != below
