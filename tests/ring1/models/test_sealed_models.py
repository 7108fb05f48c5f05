"""Sealed versions: row files written from sparse files and deltas, read by every database, and taken without a copy."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.errors import ModelFileError
from hps.ground.progress import size_text
from hps.ground.rows import decode, encode
from hps.models.deltas import DeltaModel, TableSource, open_table_files
from hps.models.differences import rows_of as file_rows
from hps.models.files import SparseModel
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.repository import list_versions, table_sources, version_files
from hps.models.sealed import SealedModel, find_sealed_model, open_sealed_model
from hps.models.sealing import seal_version
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model, write_version
from hps.stores.base import LoadRecord, LogPosition, Partition, RowChanges
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.row_files import adoption
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.layout import RowFacts
from hps.stores.row_files.writer import sorted_run, write_row_file
from hps.types import TableSpec
from tests.ring1.tools.cli.test_cli import run
from tests.tables.table_loads import DIM, FILES, KEYS, NEW_KEY, TABLE, TAG, VECTORS, content, write_files

SOURCES = ModelSources()


def rows_in(model: SparseModel | SealedModel | DeltaModel) -> dict[int, bytes]:
    """All rows of a table's files, by key."""
    found: dict[int, bytes] = {}
    for keys, vectors in file_rows(model):
        found |= content(keys, vectors)
    return found


def opened(source: str | TableSource) -> SparseModel | SealedModel | DeltaModel:
    return open_table_files(source, DIM, sources=SOURCES)


def held(database: RowFilesDatabase | HashMapDatabase) -> dict[int, bytes]:
    """All rows of a database."""
    found: dict[int, bytes] = {}
    for keys, vectors in database.scan(TAG, 100):
        found |= content(keys, vectors)
    return found


def sources_of(model: Path, version: str) -> TableSource:
    """The source of the only table of a version."""

    def find(number: str):
        place = model / number
        return version_files(number, str(place), ["item"], SOURCES) if place.exists() else None

    return table_sources(version, find)[0]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_files(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a complete version, 1, and a delta of it, 2."""
    model = tmp_path / "shop"
    write_version(model / "1", {"item": (KEYS, VECTORS)})
    changed = np.append(KEYS[:1], NEW_KEY)
    rows = np.full((2, DIM), 77, np.float32)
    write_version(
        model / "2", {"item": (changed, rows)}, delta_of="1", deleted={"item": KEYS[1:2]}, updates={"item": {"0": "9"}}
    )
    return model


AFTER = {key: row for key, row in FILES.items() if key != KEYS[1]} | content(
    np.append(KEYS[:1], NEW_KEY), np.full((2, DIM), 77, np.float32)
)
"""The rows of version 2 of `model`."""


@pytest.fixture
def database(tmp_path: Path) -> RowFilesDatabase:
    database = RowFilesDatabase(tmp_path / "database")
    yield database
    database.close()


def load(database: RowFilesDatabase | HashMapDatabase, source: str | TableSource, table: TableSpec = TABLE, **targets):
    return TableLoad(table, source, LoadTargets(load=(database,), sources=SOURCES, **targets)).run()


def rows_path(database: RowFilesDatabase, tag: str = TAG) -> Path:
    return database.path / "tables" / f"{tag}.rows"


# -- sealing -----------------------------------------------------------------------------------------------------------


def test_a_sealed_table_has_the_rows_of_its_sparse_files(source: str) -> None:
    [table] = seal_version(source)
    sealed = opened(source)
    assert isinstance(sealed, SealedModel)
    assert rows_in(sealed) == FILES
    assert (table.rows, table.dim, table.row_dtype) == (len(FILES), DIM, "float32")
    assert sealed.head.content == table.content
    assert (sealed.head.nonfinite_rows, sealed.head.least_key, sealed.head.greatest_key) == (0, KEYS.min(), KEYS.max())


def test_the_last_row_of_a_key_and_rows_that_are_not_finite_are_sealed(tmp_path: Path) -> None:
    keys = np.append(KEYS, KEYS[:3])
    vectors = np.concatenate([VECTORS, np.full((3, DIM), np.nan, np.float32)])
    write_sparse_model(tmp_path / "item", (keys, vectors))
    seal_version(tmp_path / "item")
    sealed = opened(str(tmp_path / "item"))
    assert isinstance(sealed, SealedModel)
    assert sealed.head.nonfinite_rows == 3
    assert rows_in(sealed) == content(keys, vectors)


@pytest.mark.parametrize("row_dtype", ["float16", "bfloat16", "int8"])
def test_rows_in_fewer_bits_are_those_that_a_tier_would_store(source: str, row_dtype: str) -> None:
    seal_version(source, row_dtype=row_dtype)
    sealed = opened(source)
    assert isinstance(sealed, SealedModel)
    assert sealed.head.row_dtype == row_dtype
    expected = decode(encode("", VECTORS, row_dtype), DIM, row_dtype)
    assert rows_in(sealed) == content(KEYS, expected)
    [again] = seal_version(source)  # from the sparse files, not from rounded rows
    assert again.row_dtype == "float32"
    assert rows_in(opened(source)) == FILES


def test_a_seal_spills_runs_when_memory_is_short(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.sealing._RUN_BYTES", 100 * (8 + 4 * DIM))
    monkeypatch.setattr("hps.models.sealing._LEAST_MEMORY", 1)
    monkeypatch.setattr("hps.models.sealing.available_memory", lambda: (900 * (8 + 4 * DIM), ""))
    seal_version(source)
    assert rows_in(opened(source)) == FILES
    assert sorted(os.listdir(source)) == ["emb_vector", "key", "rows"]


def test_a_delta_is_sealed_with_its_base(model: Path) -> None:
    seal_version(model / "2")
    sealed = opened(sources_of(model, "2"))
    assert isinstance(sealed, SealedModel)
    assert rows_in(sealed) == AFTER


def test_a_replaced_delta_needs_no_base_and_keeps_its_position(model: Path) -> None:
    seal_version(model / "2", replace=True)
    assert os.listdir(model / "2" / "item") == ["rows"]
    os.rename(model / "1", model / "gone")
    found = sources_of(model, "2")
    assert found.base is None
    assert found.log_start == {"0": "9"}
    assert rows_in(opened(found)) == AFTER


def test_a_delta_of_a_sealed_version_is_merged_with_its_file(model: Path) -> None:
    seal_version(model / "1", replace=True)
    merged = opened(sources_of(model, "2"))
    assert isinstance(merged, DeltaModel)
    assert isinstance(merged.base, SealedModel)
    assert rows_in(merged) == AFTER


def test_a_version_lists_its_row_files_with_size_and_checksum(model: Path) -> None:
    before = json.loads((model / "1" / "version.json").read_text())
    [table] = seal_version(model / "1")
    manifest = json.loads((model / "1" / "version.json").read_text())
    assert manifest["written_at_us"] == before["written_at_us"]
    files = manifest["files"]
    assert files["item/rows"]["size_bytes"] == table.size_bytes
    assert len(files["item/rows"]["crc32"]) == 8
    assert list(list_versions(str(model), SOURCES)) == ["1", "2"]


def test_the_format_is_that_of_the_model(model: Path) -> None:
    (model / "model.json").write_text(json.dumps({"sparse_files": ["item"], "row_dtype": ["int8"]}))
    [table] = seal_version(model / "1")
    assert table.row_dtype == "int8"


def test_a_file_beside_other_sparse_files_is_ignored(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seal_version(source)
    vectors = VECTORS + 1
    write_sparse_model(tmp_path / "new", (KEYS, vectors))
    for name in ("key", "emb_vector"):
        os.replace(tmp_path / "new" / name, f"{source}/{name}")
    assert rows_in(opened(source)) == content(KEYS, vectors)
    assert "was not made from the sparse files" in caplog.text


# -- bad input ---------------------------------------------------------------------------------------------------------


def damage(path: Path, at: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def parts_of(path: str) -> dict[str, int]:
    head = open_sealed_model(*SOURCES.locate(path), DIM).head
    return {
        "head": 100,
        "records": head.records_at + 5000,
        "starts": head.starts_at + 8,
        "fingerprints": head.fingerprints_at + 3,
        "sums": head.sums_at + 1,
    }


@pytest.mark.parametrize("part", ["head", "records", "sums"])
def test_a_flipped_bit_in_rows_is_never_read(source: str, part: str) -> None:
    seal_version(source, replace=True)
    damage(Path(source) / "rows", parts_of(source)[part])
    with pytest.raises(ModelFileError, match=r"damaged|contradict"):
        rows_in(opened(source))


@pytest.mark.parametrize("part", ["head", "records", "starts", "fingerprints", "sums"])
def test_a_flipped_bit_is_found_by_a_copy(source: str, database: RowFilesDatabase, part: str) -> None:
    seal_version(source, replace=True)
    at = parts_of(source)[part]
    damage(Path(source) / "rows", at)
    (Path(source) / "rows").chmod(0o666)  # so it is not linked
    with pytest.raises(ModelFileError):
        load(database, source)
    assert not rows_path(database).exists()
    assert [path for path in os.listdir(database.path / "tables") if "building" in path] == []


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
def test_a_file_of_another_size_is_refused(source: str, change: int) -> None:
    seal_version(source, replace=True)
    path = Path(source) / "rows"
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(ModelFileError, match="bytes, expected"):
        opened(source)


def test_a_file_of_another_width_or_format_is_refused(source: str) -> None:
    seal_version(source, replace=True)
    with pytest.raises(ModelFileError, match="elements, expected 8"):
        open_table_files(source, 8, sources=SOURCES)
    (Path(source) / "rows").chmod(0o644)
    (Path(source) / "rows").write_bytes(b"x" * 5000)
    with pytest.raises(ModelFileError, match="not a row file"):
        opened(source)


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(source: str) -> None:
    seal_version(source, replace=True)
    model = opened(source)
    os.utime(Path(source) / "rows", ns=(0, 1))
    with pytest.raises(ModelFileError, match="changed"):
        rows_in(model)


def test_what_errors_say_writes_a_file_again(source: str) -> None:
    seal_version(source)
    path = Path(source) / "rows"
    path.chmod(0o644)
    os.truncate(path, 5000)
    with pytest.raises(ModelFileError, match="hps seal"):
        opened(source)
    result = run("seal", source, code=0)
    assert result.stdout == f"{path}: 1,000 rows of 4 float32, {size_text(path.stat().st_size)}\n"
    assert rows_in(opened(source)) == FILES


def test_the_command_seals_what_it_imports(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", emb_a=VECTORS, emb_b=VECTORS + 1)
    run("import", tmp_path / "m.npz", tmp_path / "shop", "--tables", "emb_*", "--row-dtype", "float16", "--seal", code=0)
    sealed = [opened(str(path.parent)) for path in (tmp_path / "shop").rglob("rows")]
    assert [isinstance(model, SealedModel) and model.head.row_dtype for model in sealed] == ["float16", "float16"]


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_database_links_the_file_and_keeps_it(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, replace=True)
    report = load(database, source)
    assert report.complete
    assert held(database) == FILES
    assert os.path.samefile(Path(source) / "rows", rows_path(database))
    os.unlink(Path(source) / "rows")
    assert held(database) == FILES
    record = database.load_record(TAG)
    assert record is not None
    assert record.complete
    assert record.fingerprint == report.fingerprint


def test_a_file_that_others_may_write_to_is_copied(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, replace=True)
    (Path(source) / "rows").chmod(0o666)
    load(database, source)
    assert held(database) == FILES
    assert not os.path.samefile(Path(source) / "rows", rows_path(database))


def test_a_file_of_another_user_is_copied_also_between_file_systems(
    source: str, database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    seal_version(source, replace=True)
    file, stat = opened(source).source, os.stat
    assert not database.copies(file)
    others = SimpleNamespace(st_uid=os.geteuid() + 1, st_mode=0o100444, st_dev=stat(source).st_dev)
    monkeypatch.setattr(
        adoption, "os", SimpleNamespace(**vars(os) | {"stat": lambda path: others if path == file.path else stat(path)})
    )
    assert database.copies(file)
    adoption.os.copy_file_range = refuse
    load(database, source)
    assert held(database) == FILES
    assert not os.path.samefile(Path(source) / "rows", rows_path(database))


@pytest.mark.parametrize("change", ["cut", "replaced", "another table's"])
def test_a_copy_of_what_is_not_the_file_that_was_opened_is_refused(
    source: str, database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = Path(source) / "rows"
    seal_version(source, replace=True)
    if change == "another table's":
        write_row_file(path, "other", DIM, [sorted_run(KEYS, VECTORS)], facts=RowFacts("float32", DIM))
    path.chmod(0o666)
    file, copy = opened(source).source, adoption._copy

    def copy_after_change(*given: Any) -> None:
        if change == "cut":
            os.truncate(path, 5000)
        elif change == "replaced":
            os.utime(path, ns=(0, 1))
        copy(*given)

    monkeypatch.setattr(adoption, "_copy", copy_after_change)
    database.open_table(TAG, DIM)
    with pytest.raises(ModelFileError):
        database.adopt(TAG, file, LoadRecord("files", KEYS.size, KEYS.size))
    assert os.listdir(database.path / "tables") == [f"{TAG}.json"]


def test_a_copy_of_the_files_elsewhere_is_the_same_model(source: str, database: RowFilesDatabase, tmp_path: Path) -> None:
    seal_version(source, replace=True)
    load(database, source)
    database.insert(TAG, NEW_KEY, np.full((1, DIM), 5, np.float32))
    os.rename(source, tmp_path / "moved")
    report = load(database, str(tmp_path / "moved"))
    assert report.loads[0].rows == 0
    assert report.differs
    assert held(database) == FILES | content(NEW_KEY, np.full((1, DIM), 5, np.float32))


def test_the_table_survives_a_restart_and_online_writes(source: str, tmp_path: Path) -> None:
    seal_version(source, replace=True)
    database = RowFilesDatabase(tmp_path / "database")
    load(database, source)
    database.insert(TAG, NEW_KEY, np.full((1, DIM), 5, np.float32))
    database.delete(TAG, KEYS[:1])
    expected = {key: row for key, row in FILES.items() if key != KEYS[0]} | content(NEW_KEY, np.full((1, DIM), 5, np.float32))
    database.close()
    database = RowFilesDatabase(tmp_path / "database")
    database.open_table(TAG, DIM)
    assert held(database) == expected
    database.seal(TAG)
    assert held(database) == expected
    assert rows_in(opened(source)) == FILES
    database.close()


def test_another_version_replaces_the_file(source: str, database: RowFilesDatabase, tmp_path: Path) -> None:
    seal_version(source, replace=True)
    load(database, source)
    database.insert(TAG, NEW_KEY, np.full((1, DIM), 5, np.float32))
    write_sparse_model(tmp_path / "other" / "item", (KEYS[:10], VECTORS[:10] + 1))
    seal_version(tmp_path / "other" / "item")
    load(database, str(tmp_path / "other" / "item"))
    assert held(database) == content(KEYS[:10], VECTORS[:10] + 1)


def test_rows_of_unknown_origin_stay_beside_the_file(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, replace=True)
    database.open_table(TAG, DIM)
    database.insert(TAG, np.append(NEW_KEY, KEYS[:1]), np.full((2, DIM), 5, np.float32))
    load(database, source)
    assert held(database) == FILES | content(NEW_KEY, np.full((1, DIM), 5, np.float32))


def test_the_same_file_keeps_the_place_in_a_log_and_another_forgets_it(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, replace=True)
    record = LoadRecord("files", KEYS.size, KEYS.size)
    row, position = np.full((1, DIM), 5, np.float32), {Partition("updates", 0): LogPosition("17", 40)}
    database.open_table(TAG, DIM)
    for sequence, known in ((7, {}), (3, position)):  # the first adoption makes rows that are older than any change
        database.follow_log(TAG)
        assert database.apply(TAG, RowChanges(NEW_KEY, row, np.array([sequence])), position).all()
        assert database.adopt(TAG, opened(source).source, record) == "linked"
        assert database.follow_log(TAG) == known
        assert database.load_record(TAG).modified == bool(known)
        assert held(database) == FILES | content(NEW_KEY, row)


def test_rows_of_another_format_are_loaded(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, row_dtype="float16")
    load(database, source)
    assert held(database) == content(KEYS, VECTORS.astype(np.float16).astype(np.float32))


def test_too_many_rows_that_are_not_finite_are_refused(tmp_path: Path, database: RowFilesDatabase) -> None:
    vectors = VECTORS.copy()
    vectors[7] = np.inf
    write_sparse_model(tmp_path / "item", (KEYS, vectors))
    seal_version(tmp_path / "item")
    with pytest.raises(ModelFileError, match=f"the first that of key {KEYS[7]}"):
        load(database, str(tmp_path / "item"))
    assert load(database, str(tmp_path / "item"), max_nonfinite_rows=1).nonfinite_rows == 1
    assert held(database) == content(KEYS, vectors)


def test_keys_beyond_32_bits_are_refused_by_the_head(source: str, database: RowFilesDatabase) -> None:
    seal_version(source, replace=True)
    with pytest.raises(ModelFileError, match="supportlonglong"):
        load(database, source, int32_keys=True)


def test_a_hash_map_is_loaded_from_the_file(source: str) -> None:
    seal_version(source, replace=True)
    database = HashMapDatabase()
    load(database, source)
    assert held(database) == FILES
    database.close()


def test_without_a_manifest_sparse_files_alone_are_read(source: str) -> None:
    assert find_sealed_model(source, DIM, sources=SOURCES, checks={}) is None
    assert isinstance(opened(source), SparseModel)
