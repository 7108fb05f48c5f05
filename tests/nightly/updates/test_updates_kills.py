"""Replicas are killed while they follow a log of updates, and the broker, too: in the end every tier has what a replay leaves.

HPS_UPDATE_KILLS=20 HPS_UPDATES=10000000 python -m pytest tests/nightly/updates/test_updates_kills.py -k "hash_map+rocks_db"
"""

import os
import random
import time
from pathlib import Path

import pytest

from hps.testing.waiting import PATIENCE_S
from tests.servers.child_processes import ChildProcesses
from tests.servers.kafka_broker import KafkaBrokerOnS3
from tests.servers.redis_server import RedisServer
from tests.tables.killed_replicas import SEED, Replica, Scene, rebalanced, run_on_streams

KILLS = int(os.environ.get("HPS_UPDATE_KILLS", "4"))  # of each replica
UPDATES = int(os.environ.get("HPS_UPDATES", "300000"))
TIERS = ("hash_map+rocks_db", "redis_cluster+rocks_db", "redis_cluster")
"""What stands below the embedding caches; the replicas share the Redis."""
_chance = random.Random(SEED)


def at_random(replica: Replica, round_s: float) -> None:
    time.sleep(_chance.uniform(0, round_s))


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.s3
@pytest.mark.parametrize(("tiers", "row_dtype"), [*((one, "float32") for one in TIERS), *((one, "int8") for one in TIERS[:2])])
def test_killed_replicas_have_on_every_tier_what_a_replay_of_the_topics_leaves(
    tiers: str, row_dtype: str, tmp_path: Path, children: ChildProcesses
) -> None:
    """The broker is killed, partitions are added, and the replicas' group is rebalanced with a stranger meanwhile."""
    share = 1 if "rocks_db" in tiers else 3
    kills, updates = max(1, KILLS // share), UPDATES // share
    with KafkaBrokerOnS3(tmp_path / "broker") as broker, RedisServer(tmp_path / "redis") as redis:
        source = {"type": "kafka_message_queue", "brokers": broker.address, "metadata_refresh_interval_ms": 500}
        source |= {"config": {"fetch.wait.max.ms": 2000}}  # what is not found by then is not in the answer
        scene = Scene(tmp_path, children, source, tiers, updates, row_dtype, redis=redis.address)
        topics = [publisher.topic for publisher in scene.publishers.values()]

        def disturb() -> None:
            broker.kill()
            broker.start()

        with rebalanced(broker, topics) as joined:
            assert scene.run(kills, updates, disturb, broker.add_partitions, at_random)
            assert joined.wait(PATIENCE_S)
            assert scene.verify(tmp_path) == {"cache", *tiers.split("+")}


@pytest.mark.redis
@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
def test_killed_replicas_have_on_every_tier_what_a_replay_of_the_streams_leaves(
    row_dtype: str, tmp_path: Path, children: ChildProcesses
) -> None:
    assert run_on_streams(tmp_path, children, max(1, KILLS // 3), UPDATES // 3, row_dtype, at_random)
