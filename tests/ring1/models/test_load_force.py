"""Loading again: files that are the same, online updates, checksums, `force`, and models that are deployed again."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.app import app
from hps.databases.base import LoadRecord
from hps.databases.hash_map.database import HashMapDatabase
from hps.databases.rocks_db.database import RocksDatabase
from hps.models.files import extended, open_sparse_model
from hps.models.table_load import LoadFeed
from hps.models.writer import write_sparse_model
from hps.types import FloatArray, KeyArray
from tests.fakes.gated_file_system import gates
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.servers.running_service import document_of, model_of
from tests.tables.sparse_models import chunks_of
from tests.tables.table_loads import (
    CHUNK_ROWS,
    DIM,
    FILES,
    KEYS,
    NEW_KEY,
    ROW_BYTES,
    ROWS,
    TABLE,
    TAG,
    VECTORS,
    content,
    failing_at,
    held,
    load_table,
    nothing_to_do,
    record_of,
    rows_of,
    touch,
    update,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def rocks(tmp_path: Path) -> Iterator[RocksDatabase]:
    database = RocksDatabase(tmp_path / "rocksdb", num_threads=2)
    yield database
    database.close()


@pytest.fixture
def hash_map() -> Iterator[HashMapDatabase]:
    database = HashMapDatabase()
    yield database
    database.close()


def test_files_that_were_only_touched_are_compared_once_and_not_loaded_again(
    source: str, rocks: RocksDatabase, hash_map: HashMapDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hps.models.table_load")
    load_table(TABLE, source, [rocks])
    before = record_of(rocks)
    touch(source)
    report = load_table(TABLE, source, [rocks])
    assert nothing_to_do(report)
    assert not report.differs
    assert record_of(rocks) == replace(before, fingerprint=open_sparse_model(source, DIM).fingerprint)
    assert record_of(rocks) != before
    assert nothing_to_do(load_table(TABLE, source, [rocks]))
    assert caplog.text.count("comparing them") == 1
    assert held(rocks) == FILES
    updated = update(rocks)
    touch(source)
    report = load_table(TABLE, source, [hash_map, rocks])
    assert report.differs
    assert report.loads[1].rows == 0
    assert record_of(rocks).modified
    assert held(rocks) == held(hash_map) == updated


def test_files_that_were_copied_are_not_loaded_again_and_the_record_names_the_copy(
    source: str, rocks: RocksDatabase, tmp_path: Path
) -> None:
    load_table(TABLE, source, [rocks])
    shutil.copytree(source, tmp_path / "copy")
    assert nothing_to_do(load_table(TABLE, str(tmp_path / "copy"), [rocks]))
    assert record_of(rocks).source == str(tmp_path / "copy")


def flip_a_bit(source: str, name: str, place: int) -> None:
    with open(f"{source}/{name}", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda source: flip_a_bit(source, "key", 8 * 500),
        lambda source: flip_a_bit(source, "emb_vector", 0),
        lambda source: flip_a_bit(source, "emb_vector", 4 * DIM * ROWS - 1),
        lambda source: write_sparse_model(source, (KEYS, VECTORS[::-1].copy()), overwrite=True),
    ],
    ids=["a bit of a key", "the first bit", "the last bit", "vectors that changed places"],
)
def test_the_least_change_is_another_version(source: str, rocks: RocksDatabase, change: Callable[[str], object]) -> None:
    load_table(TABLE, source, [rocks])
    update(rocks)
    change(source)
    assert load_table(TABLE, source, [rocks]).loads[0].rows == ROWS
    assert held(rocks) == content(*next(chunks_of(open_sparse_model(source, DIM), ROWS)))
    assert not record_of(rocks).modified


@pytest.mark.parametrize("unknown", [{"checksum": ""}, {"size_bytes": 0}])
def test_a_record_of_an_older_hps_is_not_compared(source: str, rocks: RocksDatabase, unknown: dict[str, Any]) -> None:
    load_table(TABLE, source, [rocks])
    old = replace(record_of(rocks), **unknown)
    rocks.load_chunk(TAG, KEYS[:0], VECTORS[:0], old)
    assert nothing_to_do(load_table(TABLE, source, [rocks]))  # its fingerprint still counts
    touch(source)
    assert load_table(TABLE, source, [rocks]).loads[0].rows == ROWS
    assert len(record_of(rocks).checksum) == 16
    assert held(rocks) == FILES


def test_files_of_another_machine_are_loaded_rather_than_compared(
    source: str, rocks: RocksDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hps.models.table_load")
    with gates("elsewhere"):
        load_table(TABLE, f"gate://elsewhere{source}", [rocks])
        touch(source)
        assert load_table(TABLE, f"gate://elsewhere{source}", [rocks]).loads[0].rows == ROWS
    assert "comparing" not in caplog.text


def test_a_half_loaded_table_is_never_taken_for_the_same_files(source: str, rocks: RocksDatabase) -> None:
    load_table(TABLE, source, [rocks])
    whole = record_of(rocks)
    rocks.drop_table(TAG)
    rocks.open_table(TAG, DIM)
    rocks.load_chunk(TAG, KEYS[:300], VECTORS[:300], replace(whole, rows_done=300))
    touch(source)
    assert load_table(TABLE, source, [rocks]).loads[0].rows == ROWS
    assert held(rocks) == FILES


def checksum_of(keys: KeyArray, vectors: FloatArray) -> str:
    return extended("", keys, vectors)


def test_a_checksum_does_not_depend_on_how_the_rows_were_cut() -> None:
    whole = checksum_of(KEYS, VECTORS)
    for cuts in ([500], [1, 2, 999], [64, 300, 301, 302]):
        checksum = ""
        for keys, vectors in zip(np.split(KEYS, cuts), np.split(VECTORS, cuts), strict=True):
            checksum = extended(checksum, keys, vectors)
        assert checksum == whole
    assert len({whole, checksum_of(KEYS[1:], VECTORS[1:]), checksum_of(KEYS, -VECTORS), checksum_of(-KEYS, VECTORS)}) == 4


@pytest.mark.parametrize("row", [1, 64, 256, 960])
def test_an_interrupted_load_has_the_checksum_of_an_uninterrupted_one(
    source: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = PersistentMemoryDatabase()
    database.before_chunk = failing_at(row, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_table(TABLE, source, [database])
    database.before_chunk = lambda row: None
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 37 * ROW_BYTES)  # goes on in chunks of another size
    load_table(TABLE, source, [MemoryDatabase(), database])
    assert record_of(database).checksum == checksum_of(KEYS, VECTORS)
    assert held(database) == FILES
    touch(source)
    assert nothing_to_do(load_table(TABLE, source, [database]))


@pytest.mark.parametrize("batch_rows", [0, 1, 64, 65, 200, 999, 1000])
def test_a_database_gets_batches_of_the_size_it_wants(source: str, batch_rows: int) -> None:
    database = PersistentMemoryDatabase(batch_rows * ROW_BYTES)
    load_table(TABLE, source, [database])
    first, *batches = database.chunks
    assert first == 0  # the record alone, before the first row
    chunks_a_batch = max(1, min(batch_rows, ROWS) // CHUNK_ROWS)
    if batch_rows >= ROWS:
        assert batches == [ROWS]
    else:
        assert set(batches[:-1]) == {chunks_a_batch * CHUNK_ROWS}
    assert sum(batches) == ROWS
    assert record_of(database) == LoadRecord(
        open_sparse_model(source, DIM).fingerprint,
        ROWS,
        ROWS,
        source=source,
        size_bytes=ROWS * ROW_BYTES,
        checksum=checksum_of(KEYS, VECTORS),
    )
    assert held(database) == FILES


@pytest.mark.parametrize(
    ("first", "last", "batch_rows"),
    [(0, 1000, 100), (0, 130, 0), (100, 130, 5000), (64, 65, 0), (999, 1000, 100), (300, 1000, 0)],
)
def test_a_feed_takes_the_rows_that_are_wanted_and_counts_no_others(first: int, last: int, batch_rows: int) -> None:
    database = PersistentMemoryDatabase(batch_rows * ROW_BYTES)
    database.open_table(TAG, DIM)
    feed = LoadFeed(database, TABLE, LoadRecord("f", first, ROWS), last)
    for start in range(0, ROWS, CHUNK_ROWS):
        keys, vectors = KEYS[start : start + CHUNK_ROWS].copy(), VECTORS[start : start + CHUNK_ROWS].copy()
        feed.add(start, keys, vectors, vectors)
        keys[:], vectors[:] = 0, 0  # the arrays are lent
    feed.end()
    assert held(database) == content(KEYS[first:last], VECTORS[first:last])
    assert (record_of(database).rows_done, record_of(database).rows_total) == (last, ROWS)


def test_what_was_gathered_and_not_loaded_is_not_counted(source: str) -> None:
    database = PersistentMemoryDatabase(300 * ROW_BYTES)
    database.before_chunk = failing_at(512, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_table(TABLE, source, [database])
    assert record_of(database).rows_done == 2 * 4 * CHUNK_ROWS
    assert held(database) == content(KEYS[: 8 * CHUNK_ROWS], VECTORS[: 8 * CHUNK_ROWS])


def test_online_updates_stay_without_force_and_go_with_it(source: str, rocks: RocksDatabase, hash_map: HashMapDatabase) -> None:
    rocks.open_table(TAG, DIM)
    rocks.insert(TAG, np.arange(10**15, 10**15 + 1), np.ones((1, DIM), np.float32))  # of unknown origin
    load_table(TABLE, source, [rocks], force=True)
    assert held(rocks) == FILES
    load_table(TABLE, source, [hash_map, rocks])
    updated = update(rocks)
    update(hash_map)
    assert nothing_to_do(load_table(TABLE, source, [rocks]))
    assert held(rocks) == updated
    report = load_table(TABLE, source, [hash_map, rocks], force=True)
    assert [load.rows for load in report.loads] == [ROWS, ROWS]
    assert not report.differs
    assert held(rocks) == held(hash_map) == FILES
    assert not record_of(rocks).modified
    assert nothing_to_do(load_table(TABLE, source, [rocks]))


def test_a_forced_load_that_is_interrupted_goes_on_and_keeps_no_update(source: str) -> None:
    database = PersistentMemoryDatabase()
    load_table(TABLE, source, [database])
    update(database)
    database.before_chunk = failing_at(256, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_table(TABLE, source, [database], force=True)
    database.before_chunk = lambda row: None
    assert load_table(TABLE, source, [database]).loads[0].first_row == 256
    assert held(database) == FILES


def test_force_leaves_a_database_to_keep_alone_and_fills_the_others_from_it(
    source: str, rocks: RocksDatabase, hash_map: HashMapDatabase
) -> None:
    load_table(TABLE, source, [rocks])
    updated = update(rocks)
    report = load_table(TABLE, source, [hash_map], keep=[rocks], force=True)
    assert report.differs
    assert held(rocks) == held(hash_map) == updated


def test_force_needs_usable_files_before_it_empties_anything(source: str, rocks: RocksDatabase) -> None:
    load_table(TABLE, source, [rocks])
    updated = update(rocks)
    (Path(source) / "emb_vector").write_bytes(b"short")
    with pytest.raises(hps.errors.ModelFileError):
        load_table(TABLE, source, [rocks], force=True)
    assert held(rocks) == updated


@pytest.fixture
def configuration(source: str, tmp_path: Path) -> dict[str, Any]:
    limits = {"maxnum_catfeature_query_per_table_per_sample": [10], "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
    model = model_of("shop", [source], {"item": DIM}, default_value_for_each_table=[0.5], **limits)
    return document_of(model, persistent=tmp_path / "served")


def served(server: hps.HPS, keys: KeyArray) -> dict[int, bytes | None]:
    vectors, found = server.lookup(keys, "shop", "item", return_found=True)
    return {int(key): row.tobytes() if there else None for key, row, there in zip(keys, vectors, found.tolist(), strict=True)}


ASKED = np.append(KEYS, NEW_KEY)


def test_a_server_serves_its_updates_again_until_it_is_forced(configuration: dict[str, Any]) -> None:
    with hps.HPS(configuration) as server:
        assert served(server, ASKED) == FILES | {int(NEW_KEY[0]): None}
        updated = dict.fromkeys(ASKED.tolist()) | update(server.model("shop").chain.databases[1])
    with hps.HPS(configuration) as server:
        assert served(server, ASKED) == updated
    with hps.HPS(configuration, force=True) as server:
        assert served(server, ASKED) == FILES | {int(NEW_KEY[0]): None}
    with hps.HPS(configuration) as server:
        assert served(server, ASKED) == FILES | {int(NEW_KEY[0]): None}


def test_a_model_that_is_deployed_again_with_fewer_rows_leaves_none_of_the_old(
    configuration: dict[str, Any], source: str
) -> None:
    configuration["persistent_db"] = {"type": "disabled"}
    with hps.HPS(configuration) as server:
        assert served(server, KEYS) == FILES
        config = server.config.models[0]
        server.undeploy("shop")
        fewer = rows_of(ROWS // 2, seed=2)
        write_sparse_model(source, fewer, overwrite=True)
        server.deploy(config)
        assert served(server, KEYS) == dict.fromkeys(KEYS.tolist()) | content(*fewer)


def test_the_command_line_loads_again_when_forced(configuration: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(configuration))
    updated: dict[int, bytes] = {}
    for arguments, said in (([], "loaded 1,000 rows"), ([], "nothing to do"), (["--force"], "loaded 1,000 rows")):
        result = CliRunner().invoke(app, ["load", str(path), *arguments])
        assert result.exit_code == 0, result.output
        assert said in result.stdout.replace("\n", " ")
        database = RocksDatabase(configuration["persistent_db"]["path"])
        database.open_table(TAG, DIM)
        assert held(database) == (FILES if said != "nothing to do" else updated)
        updated = update(database)
        database.close()
