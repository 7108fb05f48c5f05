"""Versions that say only what they change: they equal a version with all rows, and only the change is read."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.errors import CapacityError, DatabaseError, ModelFileChangedError, ModelFileError, ModelFileNotFoundError
from hps.ground.rows import encode
from hps.models.deltas import MOST_DELTAS, ResidentTable, fingerprints_of
from hps.models.files import HEAD_BYTES
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.loading.warm_up import DatabaseRows, warm_up
from hps.models.repository import VersionFiles, table_sources
from hps.models.sources import ModelSources
from hps.parameter_server import HPS
from hps.stores.base import Database, MergesRows, TableStats
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.layout import DENSE_ROWS
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.row_files.database import RowFilesDatabase
from hps.tensors.batch import Batch
from hps.types import FloatArray, KeyArray
from tests.fakes.gated_file_system import gates
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.servers.running_service import document_of, model_of
from tests.tables.deltas import NO_KEYS, Change, Versions, held_of, spec
from tests.tables.hash_map_inspection import inspect
from tests.tables.table_loads import DIM, KEYS, ROW_BYTES, ROWS, VECTORS, content, failing_at, nothing_to_do, rows_of, touch

pytestmark = pytest.mark.usefixtures("small_chunks")

BASE = (KEYS, VECTORS)
NEW = np.arange(10**13, 10**13 + 5, dtype=np.int64)
CHANGED = np.concatenate([KEYS[100:110], NEW])
DELETED = np.concatenate([KEYS[105:130], NEW[:1], np.array([10**14])])
"""Some of these are changed as well, one was never there."""
CHANGE = Change((CHANGED, rows_of(CHANGED.size, seed=7)[1]), DELETED)
LATER = Change((KEYS[120:125], rows_of(5, seed=8)[1]), np.concatenate([KEYS[100:102], NEW[1:2]]))


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """1 is whole, 2 and 3 are deltas."""
    made = Versions(tmp_path / "shop", BASE)
    assert [made.add(CHANGE), made.add(LATER)] == ["2", "3"]
    return made


@pytest.fixture(params=[RocksDatabase, RowFilesDatabase])
def persistent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The properties of test_deltas_properties.py have a database in memory."""
    with closing(request.param(tmp_path / "database")) as database:
        yield database


@pytest.mark.parametrize("loaded", [[], ["1"], ["1", "2"]])
def test_a_delta_equals_a_version_with_all_rows_wherever_its_base_comes_from(
    versions: Versions, persistent: Any, loaded: list[str]
) -> None:
    for one in (*loaded, "3"):
        volatile = MemoryDatabase()
        report = versions.load(one, [volatile, persistent])
        assert held_of(persistent, one) == held_of(volatile, one) == versions.expected(one)
        record = persistent.load_record(spec(one).tag)
        assert (record.complete, record.modified, record.fingerprint) == (True, False, report.fingerprint)
        assert nothing_to_do(versions.load(one, [persistent]))
    assert versions.expected("2")[int(KEYS[106])] == CHANGE.rows[1][6].tobytes()  # deleted and changed: it is there


@pytest.mark.parametrize("loaded", [[], ["1"]])
def test_a_delta_with_rows_that_are_not_finite_is_refused(
    versions: Versions, persistent: Any, loaded: list[str], tmp_path: Path
) -> None:
    keys, vectors = rows_of(3, seed=9)
    vectors[1, 0] = np.nan
    wrong = versions.add(Change((keys, vectors), NO_KEYS))
    for one in loaded:
        versions.load(one, [persistent])
    refused = pytest.raises(ModelFileError, match=rf"1 of \d+ rows have an infinity or NaN, the first that of key {keys[1]};")
    for targets in ([persistent], []):
        with refused:
            versions.load(wrong, targets)
    assert held_of(persistent, wrong) == {}


def modify(persistent: Any) -> None:
    persistent.insert(spec("1").tag, KEYS[:1], np.full((1, DIM), 9, np.float32))


def drop(persistent: Any) -> None:
    persistent.drop_table(spec("1").tag)


@pytest.mark.parametrize(("base", "row_dtype"), [("bfloat16", "float16"), ("int8", "float32")])
def test_a_delta_takes_no_rows_of_another_format_from_its_base(
    versions: Versions, persistent: Any, base: str, row_dtype: str
) -> None:
    """Rows of float16 are as wide as those of bfloat16, but mean other vectors. The next delta has a base of its format."""
    tables = {one: replace(spec(one), row_dtype=base if one == "1" else row_dtype) for one in ("1", "2", "3")}
    for one, table in tables.items():
        source = versions.source(one, lambda before: [ResidentTable(tables[before])])
        TableLoad(table, source, LoadTargets((persistent,), sources=versions.sources)).run()
        rows = {key: np.frombuffer(row, np.float32)[None] for key, row in versions.expected(one).items()}
        held = [content(*chunk) for chunk in persistent.scan(table.tag, ROWS + 5)]
        assert held == [{key: encode("testing", row, table.row_dtype).tobytes() for key, row in rows.items()}]


def test_the_checksum_of_a_table_is_the_same_whichever_way_it_was_loaded(versions: Versions) -> None:
    """By it, processes with databases of their own know that they may share a Redis."""
    records = []
    for loaded in ([], ["1"], ["1", "2"], ["2"]):
        database = PersistentMemoryDatabase()
        for one in (*loaded, "3"):
            versions.load(one, [database])
        records.append(database.records[spec("3").tag])
    assert len(set(records)) == 1
    assert len(records[0].checksum) == 16


@pytest.mark.parametrize("loaded", [[], ["1"]])
@pytest.mark.parametrize("above", [False, True])
def test_a_delta_of_a_dense_table_is_dense_unless_a_database_below_is_copied(
    tmp_path: Path, loaded: list[str], above: bool
) -> None:
    versions = Versions(tmp_path / "shop", (np.arange(ROWS), VECTORS))
    versions.add(Change((np.arange(ROWS - 5, ROWS + 20), rows_of(25, seed=7)[1]), np.array([3, 500])))
    with closing(HashMapDatabase()) as database:
        for one in (*loaded, "2"):
            versions.load(one, [database, *([PersistentMemoryDatabase()] if above else [])])
        assert held_of(database, "2") == versions.expected("2")
        inspect(database, spec("2").tag)
        assert database._tables[spec("2").tag]._buckets.layout[DENSE_ROWS] == (0 if above else ROWS + 20)


def test_the_rows_that_a_base_shares_do_not_cross_the_network_twice(versions: Versions, persistent: Any) -> None:
    with gates("counted") as (gate,):
        root = {"root": "gate://counted"}

        def read() -> dict[str, int]:
            found = {name: size for name, size in gate.bytes_read.items() if name != "version.json"}
            gate.bytes_read.clear()
            return found

        versions.load("1", [persistent], **root)
        assert read() == {"key": 8 * ROWS + HEAD_BYTES, "emb_vector": 4 * DIM * ROWS}
        report = versions.load("2", [MemoryDatabase(), persistent], **root)
        # 1.5 % of the rows; their keys are read twice, unless the database merges them with the base
        reads = 1 if isinstance(persistent, MergesRows) else 2
        changed = {"key": 8 * reads * CHANGED.size, "emb_vector": 4 * DIM * CHANGED.size, "deleted": 8 * DELETED.size}
        assert read() == changed
        assert warm_up(NumpyCache([spec("2")], [700]), 0, spec("2"), report.model, 1.0) == 700
        versions.load("2", [MemoryDatabase(), persistent], **root)  # as a restart does
        fingerprints_of([(versions.source("3", **root), DIM)], ModelSources())
        assert read() == {}
        versions.load("3", [persistent], **root)
        assert read()["emb_vector"] == 4 * DIM * LATER.rows[0].size


@pytest.mark.parametrize("spoilt", ["modified", "incomplete", "replaced", "dropped", "not at all"])
def test_a_base_that_is_not_what_its_files_say_is_read_from_them(versions: Versions, persistent: Any, spoilt: str) -> None:
    with gates("counted") as (gate,):
        versions.load("1", [persistent], root="gate://counted")
        if spoilt == "modified":
            modify(persistent)
        elif spoilt == "replaced":
            touch(f"{versions.place}/1/item")
        elif spoilt in ("dropped", "incomplete"):
            drop(persistent)
            if spoilt == "incomplete":
                persistent.open_table(spec("1").tag, DIM)
        gate.bytes_read.clear()
        versions.load("2", [persistent], root="gate://counted")
        assert gate.bytes_read["emb_vector"] == 4 * DIM * (CHANGED.size + ROWS * (spoilt != "not at all"))
    assert held_of(persistent, "2") == versions.expected("2")


@pytest.mark.parametrize("end", [modify, drop])
def test_a_base_that_is_modified_while_it_is_copied_does_not_count(
    versions: Versions, monkeypatch: pytest.MonkeyPatch, end: Callable[[Any], None]
) -> None:
    persistent = PersistentMemoryDatabase()
    versions.load("1", [persistent])
    scan = persistent.scan

    def scanning(tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        for i, rows in enumerate(scan(tag, chunk_rows)):
            if i == 3 and tag == spec("1").tag:
                end(persistent)
                monkeypatch.undo()
            yield rows[0] + 10**15 * (i > 3), rows[1]

    monkeypatch.setattr(persistent, "scan", scanning)
    versions.load("2", [persistent])
    assert held_of(persistent, "2") == versions.expected("2")


@pytest.mark.parametrize(
    ("answers", "same_files", "there", "copied"),
    [
        *(([True, True], True, True, True), ([False], True, True, False), ([True, False], True, True, False)),
        *(([True, True], False, True, False), ([True, True], True, False, False)),
    ],
)
def test_a_base_in_memory_is_copied_if_nothing_modified_it(
    versions: Versions, answers: list[bool], same_files: bool, there: bool, copied: bool
) -> None:
    database = HashMapDatabase()
    with gates("counted") as (gate,):
        loaded = versions.load("1", [database], root="gate://counted")
        fingerprint = loaded.fingerprint if same_files else "of other files"
        table = ResidentTable(spec("1"), database, fingerprint, lambda: answers.pop(0))
        if not there:
            drop(database)
        gate.bytes_read.clear()
        versions.load("2", [database], root="gate://counted", held=lambda version: [table] if version == "1" else [])
        assert (gate.bytes_read["emb_vector"] == 4 * DIM * CHANGED.size) == copied
    assert held_of(database, "2") == versions.expected("2")


class Bounded(MemoryDatabase):
    """A volatile database that says that it evicts from 300 rows on."""

    def stats(self, tag: str) -> TableStats:
        return TableStats(0, 0, -1, 300)


def test_a_share_of_a_delta_has_the_last_row_of_each_of_its_keys(tmp_path: Path) -> None:
    keys = KEYS.copy()
    keys[600:700] = keys[:100]
    versions = Versions(tmp_path / "shop", (keys, VECTORS))
    versions.add(CHANGE)
    for database, rate, rows in ((MemoryDatabase(), 0.5, round(0.5 * (ROWS + CHANGED.size))), (Bounded(), 1.0, 300)):
        report = versions.load("2", [database], initial_cache_rate=rate)
        assert held_of(database, "2").items() <= versions.expected("2").items()
        assert rows - 100 <= len(held_of(database, "2")) <= rows
        assert report.model.rows == ROWS + CHANGED.size  # the files, as no database has every row


@pytest.mark.parametrize(("make", "capacity"), [(PersistentMemoryDatabase, 140), (MemoryDatabase, 700), (None, 2000)])
def test_a_cache_is_warmed_with_the_rows_of_the_delta(
    versions: Versions, make: Callable[[], Database] | None, capacity: int
) -> None:
    report, expected = versions.load("3", [make()] if make else []), versions.expected("3")
    assert isinstance(report.model, DatabaseRows) == bool(make)
    assert len(expected) <= report.model.rows <= ROWS + CHANGED.size + LATER.rows[0].size
    assert not report.model.is_open_for_writing()
    cache = NumpyCache([spec("3")], [capacity])
    assert warm_up(cache, 0, spec("3"), report.model, 0.3) == min(cache.stats(0).capacity_rows, report.model.rows)
    keys = np.concatenate([KEYS, NEW])
    out, found = np.empty((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    cache.create_lookup().query(Batch.of(0, keys, out, found))
    assert found.sum() == cache.stats(0).resident_rows > 0.7 * min(capacity, len(expected))
    assert content(keys[found], out[found]).items() <= expected.items()


def test_a_changed_base_is_noticed_and_loaded_again(versions: Versions, persistent: Any) -> None:
    def fingerprint() -> tuple[str, ...]:
        return fingerprints_of([(versions.source("3"), DIM)], ModelSources())

    versions.load("3", [persistent])
    before = fingerprint()
    assert fingerprint() == before != fingerprints_of([(versions.source("2"), DIM)], ModelSources())
    for version, name in (("1", "key"), ("2", "emb_vector"), ("2", "deleted"), ("3", "key")):
        path = Path(versions.place) / version / "item" / name
        path.rename(path.with_suffix(".old"))
        path.write_bytes(path.with_suffix(".old").read_bytes())
        assert fingerprint() != before
        before = fingerprint()
        assert not nothing_to_do(versions.load("3", [persistent]))
        assert held_of(persistent, "3") == versions.expected("3")


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("name", ["key", "emb_vector"])
def test_a_copy_that_stalled_in_a_file_of_full_length_is_refused(
    versions: Versions, persistent: Any, name: str, version: str
) -> None:
    """As a copying tool that allocates a file before it fills it leaves it."""
    path = Path(versions.place) / version / "item" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-16] + bytes(16))
    refusal = rf"{path}: its content has CRC-32 \w+, expected the \w+ that version.json says"
    for databases in ([persistent], [MemoryDatabase()], [Bounded()], *([[]] if version == "1" else [])):
        with pytest.raises(ModelFileError, match=refusal):
            versions.load(version, databases)
    record = persistent.load_record(spec(version).tag)
    assert record is None or not record.complete
    path.write_bytes(whole)
    with path.open("r+b"), pytest.raises(ModelFileChangedError, match="open for writing"):
        versions.load("2", [persistent])
    versions.load("2", [persistent])
    assert held_of(persistent, "2") == versions.expected("2")


def test_deleted_keys_that_were_copied_in_part_are_refused(versions: Versions) -> None:
    path = Path(versions.place) / "2" / "item" / "deleted"
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-8], "got 208 bytes, expected the 216 that"),
        (whole[:-8] + bytes(8), "its content has CRC-32"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match=f"{path}: {message}"):
            versions.load("2", [MemoryDatabase()])
    path.unlink()
    with pytest.raises(ModelFileNotFoundError, match=f"{path}"):
        versions.load("2", [MemoryDatabase()])
    path.write_bytes(bytes(9))
    with pytest.raises(ModelFileError, match=f"{path}: got 9 bytes, expected 8 .an int64. for every key"):
        TableLoad(spec("2"), versions.source("2", checks={}), LoadTargets())


def test_a_delta_without_its_manifest_does_not_pass_for_a_whole_version(versions: Versions) -> None:
    (Path(versions.place) / "2" / "version.json").unlink()
    with pytest.raises(ModelFileError, match=r"2/item/deleted: got the changes of a version, expected a complete table"):
        versions.load("2", [MemoryDatabase()])


def test_a_base_that_is_nowhere_is_an_error_before_anything_is_changed(versions: Versions) -> None:
    database = PersistentMemoryDatabase()
    (Path(versions.place) / "1" / "item" / "key").unlink()
    with pytest.raises(ModelFileNotFoundError, match="1/item: key not found"):
        versions.load("3", [database])
    assert database.told == database.tags() == []


@pytest.mark.parametrize("base_held", [False, True])
def test_a_load_that_is_stopped_anywhere_starts_over(versions: Versions, base_held: bool) -> None:
    tag = spec("2").tag
    for stop in (0, 1, ROWS // 200, ROWS // 100 - 1):
        database, chunks = PersistentMemoryDatabase(load_bytes=100 * ROW_BYTES), iter(range(1000))
        if base_held:
            versions.load("1", [database])
        database.before_chunk = lambda row, chunks=chunks, stop=stop: failing_at(stop, DatabaseError("killed"))(next(chunks))
        with pytest.raises(DatabaseError, match="killed"):
            versions.load("2", [database])
        database.before_chunk = lambda row: None
        if database.load_record(tag):
            assert not database.records[tag].complete
            with pytest.raises(DatabaseError, match="of a load that was interrupted"):
                versions.load("2", [], keep=[database])
        versions.load("2", [database])
        assert held_of(database, "2") == versions.expected("2")


@pytest.mark.parametrize("rows", ["unmodified", "modified", "foreign"])
def test_a_database_that_is_kept_fills_the_volatile_one(versions: Versions, rows: str) -> None:
    kept, volatile = PersistentMemoryDatabase(), MemoryDatabase()
    if rows == "foreign":
        kept.open_table(spec("2").tag, DIM)
    else:
        versions.load("2", [kept])
    if rows != "unmodified":
        kept.insert(spec("2").tag, KEYS[:3], VECTORS[3:6])
    assert versions.load("2", [volatile], keep=[kept]).differs == (rows != "unmodified")
    assert held_of(volatile, "2") == held_of(kept, "2")


def test_keys_beyond_32_bits_are_found_in_the_delta_too(tmp_path: Path) -> None:
    keys = np.arange(ROWS, dtype=np.int64)
    versions = Versions(tmp_path / "shop", (keys, VECTORS))
    versions.add(Change((np.array([2**32]), VECTORS[:1]), NO_KEYS))
    versions.add(Change((NO_KEYS, VECTORS[:0]), NO_KEYS))
    database = PersistentMemoryDatabase()
    with pytest.raises(ModelFileError, match=f"row 0 has key {2**32}"):
        versions.load("3", [database], int32_keys=True)
    assert database.told == []


@pytest.mark.parametrize(
    ("delta_of", "message"),
    [
        ({"2": "9"}, "version 2 says delta_of 9, and there is no version 9"),
        ({"3": "2", "2": "3"}, f"more than {MOST_DELTAS} times or in a circle"),
        ({str(n + 1): str(n) for n in range(1, MOST_DELTAS + 2)}, f"more than {MOST_DELTAS} times"),
        ({"2": "two tables"}, "got 1 sparse_files, expected the 2 of version two tables"),
    ],
    ids=["gone", "circle", "too long", "other tables"],
)
def test_a_chain_that_leads_to_no_whole_version_is_an_error(delta_of: dict[str, str], message: str) -> None:
    known = {one: VersionFiles(one, (f"p{one}",), base) for one, base in delta_of.items()} | {"1": VersionFiles("1", ("p1",))}
    known["two tables"] = VersionFiles("two tables", ("x", "y"))
    with pytest.raises(ModelFileError, match=message):
        table_sources(max(delta_of, key=int), known.get)
    if str(MOST_DELTAS + 1) in known:  # one delta less is followed
        (source,) = table_sources(str(MOST_DELTAS + 1), known.get)
        assert [one.place for one in source.chain()] == [f"p{n}" for n in range(1, MOST_DELTAS + 2)]


def test_a_file_of_deleted_keys_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file takes no disk; nobody's process may be killed for its size."""
    Versions(tmp_path, BASE).add(LATER)
    (tmp_path / "2" / "version.json").write_text('{"delta_of": "1"}')
    os.truncate(tmp_path / "2" / "item" / "deleted", 1 << 43)
    with (
        HPS(document_of(model_of("m", ["item"], {"item": DIM}, version_path=str(tmp_path))), deploy_models=False) as server,
        pytest.raises(CapacityError, match=r"1099511627781 keys take [0-9,]+ bytes of memory, and [0-9,]+ are free"),
    ):
        server.deploy("m")
