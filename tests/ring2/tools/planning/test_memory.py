"""Memory that is planned of large tables and of Redis, against what is then used."""

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.ground.registry import implementation
from tests.servers.redis_server import RedisServer


@pytest.mark.redis
@pytest.mark.parametrize(("dim", "rows"), [(1, 300_000), (16, 100_000), (128, 50_000)])
def test_planned_memory_of_redis_is_then_used(tmp_path, dim, rows):
    server = RedisServer(tmp_path)
    server.start()
    redis_database = implementation("database", "redis_cluster")
    try:
        if server.client().info("server").get("server_name") == "valkey":
            pytest.skip("plans are for Redis' hashes and jemalloc; those of Valkey are smaller")
        config = VolatileDbConfig(type="redis_cluster", address=server.address, num_partitions=2)
        need = sum(one.size_bytes for one in redis_database.room_for(config, [("hps_et.m.t", dim, rows)]))
        database = redis_database.from_config(config)
        database.open_table("hps_et.m.t", dim)
        database.insert("hps_et.m.t", np.arange(10, dtype=np.int64), np.ones((10, dim), np.float32))
        before = server.client().info("memory")["used_memory"]
        keys = np.random.default_rng(1).integers(0, 1 << 60, rows)
        for start in range(0, rows, 50_000):
            part = keys[start : start + 50_000]
            database.insert("hps_et.m.t", part, np.ones((part.size, dim), np.float32))
        assert need == pytest.approx(server.client().info("memory")["used_memory"] - before, rel=0.05)
        database.close()
    finally:
        server.kill()
