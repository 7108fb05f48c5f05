"""Rows that age in Redis, as the authority and above RocksDB."""

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.errors import DatabaseError
from hps.models.manifest import VersionManifest
from hps.stores.base import RowChanges
from hps.testing.waiting import wait_until
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM, TTL_US = 4, 100_000_000
FILED, ONLINE, DIRECT = np.arange(100), np.arange(1000, 1100), np.arange(2000, 2010)


def rows_of(keys: np.ndarray) -> np.ndarray:
    return np.repeat(keys[:, None], DIM, 1).astype(np.float32)


@pytest.mark.redis
@pytest.mark.parametrize("above", ["", "rocks_db"])
def test_rows_expire_by_the_time_they_were_written(tmp_path: Path, above: str) -> None:
    hps.write_sparse_model(tmp_path / "a", (FILED, rows_of(FILED)))
    with RedisServer(tmp_path / "redis") as redis:
        volatile = {"type": "redis_cluster", "address": redis.address}
        model = model_of("m", [tmp_path / "a"], {"a": DIM}, gpucacheper=2.0, row_ttl_s=TTL_US / 1e6)
        with hps.HPS(document_of(model, persistent=tmp_path / above if above else None, volatile_db=volatile)) as server:
            deployment = server.model("m")
            deployment.chain.follow_log(deployment.tables[0])
            written = time.time_ns() // 1000 - TTL_US + 1_000_000
            deployment.apply(0, RowChanges(ONLINE, rows_of(ONLINE), np.full(ONLINE.size, written)), {})
            server.insert(DIRECT, rows_of(DIRECT), "m", "a")

            def gone() -> bool:
                before = time.time_ns() // 1000
                found = server.lookup(ONLINE, "m", "a", return_found=True)[1]
                after = time.time_ns() // 1000
                assert found.all() or after >= written + TTL_US, "early"
                assert not found.any() or before <= written + TTL_US + 1_000_000, "too late"
                return not found.any()

            wait_until(gone, "they expire")
            for keys in (DIRECT, FILED):
                np.testing.assert_array_equal(server.lookup(keys, "m", "a"), rows_of(keys))
            tag = deployment.tables[0].tag
            assert all(database.size(tag) == FILED.size + DIRECT.size for database in deployment.chain.databases[-1:])


@pytest.mark.redis
def test_a_row_that_another_process_wrote_directly_expires_also_when_that_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = time.time_ns() // 1000
    monkeypatch.setattr(time, "time_ns", lambda: now_us * 1000)
    hps.write_sparse_model(tmp_path / "a", (FILED, rows_of(FILED)))
    with RedisServer(tmp_path / "redis") as redis:
        model = model_of("m", [tmp_path / "a"], {"a": DIM}, gpucacheper=2.0, row_ttl_s=TTL_US / 1e6)
        document = document_of(model, volatile_db={"type": "redis_cluster", "address": redis.address})
        with hps.HPS(document) as server:
            sweeper = server.model("m").aging
            assert sweeper is not None
            sweeper.close()
            now_us += 5_000_000  # the other process's clock is ahead
            with hps.HPS(document) as other:
                other.insert(DIRECT, rows_of(DIRECT), "m", "a")
            now_us -= 5_000_000
            server.insert(ONLINE, rows_of(ONLINE), "m", "a")
            written = server.model("m").chain.last_changes(server.model("m").tables[0], np.concatenate([DIRECT, ONLINE]))
            for share in (0.4, 0.8):
                now_us = int(written.min()) + int(share * TTL_US)
                sweeper._round()
                np.testing.assert_array_equal(server.lookup(DIRECT, "m", "a"), rows_of(DIRECT))
            now_us = int(written.max()) + TTL_US + 1_000_000
            for keys in (DIRECT, ONLINE):
                assert not server.lookup(keys, "m", "a", return_found=True)[1].any()


@pytest.mark.redis
def test_rows_of_files_that_redis_lost_and_has_again_have_expired(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "a", (FILED, rows_of(FILED)))
    (tmp_path / "version.json").write_bytes(VersionManifest(written_at_us=time.time_ns() // 1000 - 2 * TTL_US).encoded())
    with RedisServer(tmp_path / "redis") as redis:
        model = model_of("m", [tmp_path / "a"], {"a": DIM}, gpucacheper=2.0, row_ttl_s=TTL_US / 1e6, row_ttl_files=True)
        with hps.HPS(document_of(model, volatile_db={"type": "redis_cluster", "address": redis.address})) as server:
            database = server.model("m").chain.databases[-1]
            assert not server.lookup(FILED, "m", "a", return_found=True)[1].any()
            with redis.client() as client:
                client.flushall()
            loaded = server.metrics.registry.get_sample_value("hps_expired_rows_total", {"model": "m", "table": "a"})

            def removed_again() -> bool:
                with suppress(DatabaseError):  # while the table is lost
                    assert not server.lookup(FILED, "m", "a", return_found=True)[1].any()
                name = "hps_expired_rows_total"
                return server.metrics.registry.get_sample_value(name, {"model": "m", "table": "a"}) == 2 * loaded

            wait_until(removed_again, "Redis has loaded the rows, and they were removed")
            assert database.size(server.model("m").tables[0].tag) == 0
