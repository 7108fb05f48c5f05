"""Loads that empty a Redis first, and the processes that use its rows."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hps
from hps.stores.redis.database import RedisDatabase
from hps.tools.cli.app import app
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of
from tests.tables.table_loads import DIM, FILES, KEYS, content, held, update, write_files

pytestmark = pytest.mark.redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def test_a_table_that_a_server_uses_is_not_emptied_and_loaded_again_once_nobody_uses_it(
    redis: RedisServer, tmp_path: Path
) -> None:
    configuration = document_of(model_of("shop", [write_files(tmp_path)], {"item": DIM}))
    configuration["volatile_db"] = {"type": "redis", "address": redis.address, "num_partitions": 4}
    (path := tmp_path / "ps.json").write_text(json.dumps(configuration))
    with hps.HPS(configuration) as server:
        updated = update(server.model("shop").chain.databases[0])
        result = CliRunner().invoke(app, ["load", str(path), "--force"])
        assert result.exit_code == 1
        assert "other processes use its rows" in " ".join(result.output.split())
        for keys in (KEYS[2:500], KEYS[500:]):
            assert content(keys, server.lookup(keys, "shop", "item")).items() <= updated.items()
    result = CliRunner().invoke(app, ["load", str(path), "--force"])
    assert "loaded 1,000 rows" in " ".join(result.output.split())
    with closing(RedisDatabase(redis.address, num_partitions=4)) as database:
        assert held(database) == FILES
