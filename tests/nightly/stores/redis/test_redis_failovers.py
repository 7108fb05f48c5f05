"""Redis behind sentinels or in a cluster, whose primaries are killed or cut off while others look up."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.stores.redis.database import RedisDatabase
from hps.testing.waiting import wait_until
from tests.ring2.stores.redis import test_redis_faults as faults
from tests.ring2.stores.redis.test_redis_sentinel import (  # noqa: F401 - a fixture
    DIM,
    KEYS,
    TAG,
    fetched,
    trying,
    vectors_of,
    watched,
)
from tests.servers.redis_server import NODE_TIMEOUT_MS, RedisClusterServers, server_program, valkey_program

pytestmark = pytest.mark.redis
# ruff: noqa: F811 - the fixture


def test_a_primary_that_was_cut_off_is_left_although_it_answers(watched):
    settings = {"sentinel_service": "shop", "num_partitions": 2}
    with (
        closing(RedisDatabase(watched.address, **settings)) as idle,
        closing(RedisDatabase(watched.address, **settings)) as busy,
    ):
        for one in (idle, busy):
            one.open_table(TAG, DIM)
        idle.insert(TAG, KEYS, vectors_of(1))
        np.testing.assert_array_equal(fetched(busy)[0], vectors_of(1))
        old, new = watched.servers
        old.pause()
        wait_until(lambda: watched.named() == {new.port})
        trying(lambda: busy.insert(TAG, KEYS, vectors_of(2)))
        old.resume()  # it has the older rows and open connections, and takes itself for the primary for some seconds
        assert old.client().info("replication")["role"] == "master"
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for one in (idle, busy):
                np.testing.assert_array_equal(trying(lambda one=one: fetched(one))[0], vectors_of(2))


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
        closing(faults.Tiers(cluster.address, tmp_path if below else None)) as tiers,
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
                assert tiers.redis.size(faults.TAG) == faults.PRESENT
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
