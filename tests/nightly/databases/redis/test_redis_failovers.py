"""Redis behind sentinels, whose primaries are killed or cut off."""

import time
from contextlib import closing

import numpy as np
import pytest

from hps.databases.redis.database import RedisDatabase
from hps.testing.waiting import wait_until
from tests.ring2.databases.redis.test_redis_sentinel import (  # noqa: F401 - a fixture
    DIM,
    KEYS,
    TAG,
    fetched,
    trying,
    vectors_of,
    watched,
)

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
