"""Loads that empty a Redis first, and the processes that use its rows."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hps
from hps.cli.app import app
from hps.databases.redis.database import RedisDatabase
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of
from tests.tables.table_loads import DIM, FILES, KEYS, ROWS, TABLE, TAG, content, held, load_table, update, write_files

pytestmark = pytest.mark.redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def test_force_loads_redis_again_once_no_other_process_uses_the_table(redis: RedisServer, tmp_path: Path) -> None:
    source = write_files(tmp_path)
    first, other = (RedisDatabase(redis.address, num_partitions=4) for _ in range(2))
    try:
        load_table(TABLE, source, [first])
        updated = update(first)
        assert load_table(TABLE, source, [other]).loads[0].rows == 0
        assert held(other) == updated
        assert not other.empty_table(TAG)
        assert held(first) == updated
        first.close()
        assert other.empty_table(TAG)
        assert load_table(TABLE, source, [other], force=True).loads[0].rows == ROWS
        assert held(other) == FILES
    finally:
        first.close()
        other.close()


def test_the_command_line_does_not_empty_a_table_that_a_server_uses(redis: RedisServer, tmp_path: Path) -> None:
    configuration = document_of(model_of("shop", [write_files(tmp_path)], {"item": DIM}))
    configuration["volatile_db"] = {"type": "redis", "address": redis.address, "num_partitions": 4}
    (path := tmp_path / "ps.json").write_text(json.dumps(configuration))
    with hps.HPS(configuration) as server:
        result = CliRunner().invoke(app, ["load", str(path), "--force"])
        assert result.exit_code == 1
        assert "other processes use its rows" in " ".join(result.output.split())
        for keys in (KEYS[:500], KEYS[500:]):
            assert content(keys, server.lookup(keys, "shop", "item")).items() <= FILES.items()
    result = CliRunner().invoke(app, ["load", str(path), "--force"])
    assert "loaded 1,000 rows" in " ".join(result.output.split())
