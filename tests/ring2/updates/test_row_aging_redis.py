"""Rows that age in Redis, as the authority and above RocksDB."""

import time
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.stores.base import RowChanges
from hps.testing.waiting import wait_until
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM, TTL_US = 4, 100_000_000
FILED, ONLINE, DIRECT = np.arange(100), np.arange(1000, 1100), np.arange(2000, 2010)


@pytest.mark.redis
@pytest.mark.parametrize("above", ["", "rocks_db"])
def test_rows_expire_by_the_time_they_were_written(tmp_path: Path, above: str) -> None:
    def rows(keys: np.ndarray) -> np.ndarray:
        return np.repeat(keys[:, None], DIM, 1).astype(np.float32)

    hps.write_sparse_model(tmp_path / "a", (FILED, rows(FILED)))
    with RedisServer(tmp_path / "redis") as redis:
        volatile = {"type": "redis_cluster", "address": redis.address}
        model = model_of("m", [tmp_path / "a"], {"a": DIM}, gpucacheper=2.0, row_ttl_s=TTL_US / 1e6)
        with hps.HPS(document_of(model, persistent=tmp_path / above if above else None, volatile_db=volatile)) as server:
            deployment = server.model("m")
            deployment.chain.follow_log(deployment.tables[0])
            written = time.time_ns() // 1000 - TTL_US + 1_000_000
            deployment.apply(0, RowChanges(ONLINE, rows(ONLINE), np.full(ONLINE.size, written)), {})
            server.insert(DIRECT, rows(DIRECT), "m", "a")

            def gone() -> bool:
                before = time.time_ns() // 1000
                found = server.lookup(ONLINE, "m", "a", return_found=True)[1]
                after = time.time_ns() // 1000
                assert found.all() or after >= written + TTL_US, "early"
                assert not found.any() or before <= written + TTL_US + 1_000_000, "too late"
                return not found.any()

            wait_until(gone, "they expire")
            for keys in (DIRECT, FILED):
                np.testing.assert_array_equal(server.lookup(keys, "m", "a"), rows(keys))
            tag = deployment.tables[0].tag
            assert all(database.size(tag) == FILED.size + DIRECT.size for database in deployment.chain.databases[-1:])
