"""A share is a range of a row file: which records it has at its ends, files with holes elsewhere, and tables of a share."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, InvalidInputError, ModelFileError
from hps.ground.shares import TableShare, share_indices, with_share
from hps.stores.base import LoadRecord, RowFileSource
from hps.stores.row_files import adoption, download
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.layout import PAGE_BYTES, FileHead, lowest_hash
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import sorted_run, write_row_file
from hps.testing.waiting import wait_until
from tests.fakes.populating_pinner import PopulatingPinner
from tests.ring1.stores.row_files.test_download import Elsewhere
from tests.ring1.stores.row_files.test_reading import key_with

DIM, ROWS, TAG = 16, 20_000, "hps_et.m.t"
KEYS = np.random.default_rng(1).permutation(np.arange(ROWS, dtype=np.int64)) * 7 - 3
ABSENT = np.arange(2000) * 7
SHARE = TableShare(1, 3)
SHARES = [SHARE, TableShare(0, 3), TableShare(2, 3), TableShare(5, 7)]


def vectors_of(keys: np.ndarray, version: int = 0) -> np.ndarray:
    return np.repeat((keys.astype(np.float32) + 10**6 * version)[:, None], DIM, axis=1)


def write(path: Path, keys: np.ndarray) -> Path:
    write_row_file(path, "", DIM, [sorted_run(keys, vectors_of(keys))])
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("file") / "rows", KEYS)


def source_of(path: Path) -> RowFileSource:
    def read(offset: int, buffer: memoryview) -> None:
        with open(path, "rb") as file:
            file.seek(offset)
            file.readinto(buffer)

    return RowFileSource(str(path), "1", path.stat().st_size, path, read)


def copied(whole: Path, target: Path, share: TableShare) -> Path:
    adoption.copy(source_of(whole), whole, target, lambda size: None, share=share)
    return target


def answers(file: RowFile, keys: np.ndarray, share: TableShare | None, *, verify: bool = False) -> None:
    """Check that a file answers those of its keys that the share owns, and nothing else."""
    asked = np.concatenate((keys, ABSENT))
    expected = np.isin(asked, keys) & (True if share is None else share.owns(asked))
    for doubtful in (False, True):
        file.presence.doubtful = doubtful
        out, found = np.full((asked.size, DIM), -1, np.float32), np.zeros(asked.size, np.bool_)
        assert file.fetch(asked, out, found, verify=verify) == expected.sum() == file.rows
        assert np.array_equal(found, expected)
        assert np.array_equal(out[found], vectors_of(asked[found]))
        assert (out[~found] == -1).all()
        assert np.array_equal(file.contains(asked), expected)
    walked = list(file.chunks(700)) or [(keys[:0], vectors_of(keys[:0]))]
    assert np.array_equal(np.sort(np.concatenate([part for part, _ in walked])), np.sort(asked[expected]))
    assert all(np.array_equal(rows, vectors_of(part)) for part, rows in walked)


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 40, 3000])
@pytest.mark.parametrize("of", [1, 2, 3, 7, 100, 65_536])
def test_the_ranges_of_all_shares_make_up_the_file(tmp_path: Path, rows: int, of: int) -> None:
    keys = KEYS[:rows]
    write(tmp_path / "rows", keys)
    held = set(share_indices(keys, of).tolist())
    tried = sorted({*range(min(of, 8)), *sorted(held)[:20], of // 2, of - 1})
    counts = 0
    for index in tried:
        share = TableShare(index, of)
        file = RowFile(tmp_path / "rows", share=share)
        owned = keys[share.owns(keys)]
        assert file.rows == owned.size
        assert np.array_equal(file.contains(keys), share.owns(keys))
        counts += file.rows
    assert counts == np.isin(share_indices(keys, of), tried).sum()


@pytest.mark.parametrize("of", [2, 3, 1000])
def test_keys_at_the_very_ends_belong_to_their_share(tmp_path: Path, of: int) -> None:
    bounds = [lowest_hash(index, of) for index in (1, of // 2, of - 1)]
    keys = np.unique([key_with(hashed + step) for hashed in bounds for step in (-2, -1, 0, 1)])
    others = np.setdiff1d(KEYS[:200], keys)  # few, so that buckets belong to several shares
    for kept in (keys, np.concatenate((keys, others))):
        write(tmp_path / "rows", kept)
        for index in {0, 1, of // 2, of - 1, max(0, of // 2 - 1), max(0, of - 2)}:
            share = TableShare(index, of)
            answers(RowFile(tmp_path / "rows", share=share), kept, share)


def test_a_bucket_of_two_shares_may_have_any_number_of_records(tmp_path: Path) -> None:
    bound = lowest_hash(1, 2)
    keys = np.array([key_with(bound + step) for step in range(-700, 500)])
    write(tmp_path / "rows", keys)
    for index, rows in ((0, 700), (1, 500)):
        share = TableShare(index, 2)
        copied(tmp_path / "rows", tmp_path / f"copy{index}", share)
        for name in ("rows", f"copy{index}"):
            file = RowFile(tmp_path / name, share=share)
            assert file.rows == rows
            answers(file, keys, share)


# -- files with holes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [*SHARES, TableShare(17, 65_536)], ids=str)
def test_a_copy_has_the_pages_of_the_share_alone(whole: Path, tmp_path: Path, share: TableShare) -> None:
    path = copied(whole, tmp_path / "copy", share)
    assert path.stat().st_size == whole.stat().st_size
    assert 512 * path.stat().st_blocks < whole.stat().st_size * (1 / share.of + 0.1)
    file = RowFile(path)
    assert (file.share, file.has_share, file.is_whole) == (share, True, False)
    assert file.head.content == FileHead.unpacked(whole.read_bytes()[:PAGE_BYTES]).content
    answers(file, KEYS, share)
    answers(file, KEYS, share, verify=True)
    file.verify()
    assert file.size_bytes < whole.stat().st_size * (1 / share.of + 0.1)


def test_a_part_of_a_share_may_be_read_and_another_share_has_nothing(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "copy", TableShare(1, 2))
    for share, expected in ((TableShare(3, 4), True), (TableShare(0, 2), False), (TableShare(1, 3), False)):
        file = RowFile(path, share=share)
        assert file.has_share is expected
        assert np.array_equal(file.contains(KEYS), share.owns(KEYS) & TableShare(1, 2).owns(KEYS))


def test_a_file_with_holes_is_no_source(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "copy", SHARE)
    with pytest.raises(ModelFileError, match="has the pages of share 1/3 alone"):
        adoption.checked_head(source_of(path), TAG, DIM)


def flip(path: Path, at: int) -> None:
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize("part", ["records", "starts", "fingerprints"])
@pytest.mark.parametrize("how", ["link", "copy"])
def test_a_flipped_bit_counts_in_the_range_alone(whole: Path, tmp_path: Path, part: str, how: str) -> None:
    mine, theirs = TableShare(0, 2), TableShare(1, 2)
    parts = {"records": 0, "starts": 1, "fingerprints": 2}
    for share in (mine, theirs):
        path = tmp_path / f"{share.index}"
        path.write_bytes(whole.read_bytes()) if how == "link" else copied(whole, path, mine)
        os.chmod(path, 0o644)
        head = FileHead.unpacked(whole.read_bytes()[:PAGE_BYTES])
        run = RowFile(whole, share=share).range.runs(head)[parts[part]]
        flip(path, run[0] + (run[1] - run[0]) // 2)
        file = RowFile(path, share=mine)
        if share == mine:
            with pytest.raises(DatabaseCorruptError, match="damaged"):
                file.verify()
            with pytest.raises(DatabaseCorruptError, match="damaged"):
                answers(file, KEYS, mine, verify=True)
        elif how == "link" or part == "records":
            answers(file, KEYS, mine, verify=True)


def test_a_damaged_end_of_a_range_is_no_smaller_range(whole: Path, tmp_path: Path) -> None:
    """The ends of a range are found by pages that are compared with their checksums."""
    (tmp_path / "rows").write_bytes(whole.read_bytes())
    head = FileHead.unpacked(whole.read_bytes()[:PAGE_BYTES])
    flip(tmp_path / "rows", head.starts_at + 4 * RowFile(whole, share=SHARE).range.buckets[0] + 1)
    with pytest.raises(DatabaseCorruptError, match="contradicts its checksum"):
        RowFile(tmp_path / "rows", share=SHARE)


# -- tables ------------------------------------------------------------------------------------------------------------


def record_of(share: TableShare | None, rows: int = ROWS) -> LoadRecord:
    return LoadRecord(with_share("print", share), rows, rows)


def opened(directory: Path) -> RowFilesDatabase:
    database = RowFilesDatabase(directory / "database", least_sealed_rows=1, seal_share=0)
    database.open_table(TAG, DIM)
    return database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RowFilesDatabase]:
    database = opened(tmp_path)
    yield database
    database.close()


def holds(database: RowFilesDatabase, expected: dict[int, float]) -> None:
    """Check that a table has these keys and the first elements of their rows, on every path."""
    keys = np.concatenate((KEYS, ABSENT, np.array([*expected], np.int64)))
    out, found = np.zeros((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(TAG, keys, out, found)
    assert dict(zip(keys[found].tolist(), out[found, -1].tolist(), strict=True)) == expected
    assert found.sum() == np.isin(keys, [*expected]).sum()
    assert database.size(TAG) == len(expected)
    walked = [pair for keys, rows in database.scan(TAG, 999) for pair in zip(keys.tolist(), rows[:, 0].tolist(), strict=True)]
    assert len(walked) == len(expected)
    assert dict(walked) == expected


def rows_of(share: TableShare) -> dict[int, float]:
    return {key: float(key) for key in KEYS[share.owns(KEYS)].tolist()}


def adopt(database: RowFilesDatabase, whole: Path, share: TableShare, how: str) -> Elsewhere:
    elsewhere = Elsewhere(whole.read_bytes())
    source = elsewhere.source() if how == "downloading" else source_of(whole)
    os.chmod(whole, 0o666 if how == "copied" else 0o644)
    assert database.adopt(TAG, source, record_of(share)) == how
    os.chmod(whole, 0o644)
    wait_until(lambda: not database.downloads())
    return elsewhere


@pytest.mark.parametrize("how", ["linked", "copied", "downloading"])
@pytest.mark.parametrize("share", [SHARE, TableShare(40_000, 65_536)], ids=str)
def test_a_table_has_its_share_through_writes_seals_and_restarts(
    whole: Path, tmp_path: Path, how: str, share: TableShare
) -> None:
    path = tmp_path / "source"
    path.write_bytes(whole.read_bytes())
    database = opened(tmp_path)
    adopt(database, path, share, how)
    expected = rows_of(share)
    holds(database, expected)
    new = np.setdiff1d(np.arange(300_000, 700_000), KEYS)
    new = new[share.owns(new)][:500]
    old = np.array([*expected][:40], np.int64)
    database.insert(TAG, new, vectors_of(new, 1))
    database.insert(TAG, old[:20], vectors_of(old[:20], 1))
    database.delete(TAG, old[20:])
    for key in old[20:].tolist():
        del expected[key]
    expected |= {key: float(np.float32(key) + 10**6) for key in (*new.tolist(), *old[:20].tolist())}
    holds(database, expected)
    database.close()
    database = opened(tmp_path)
    holds(database, expected)
    assert database.seal(TAG) == new.size + old.size
    holds(database, expected)
    assert database._tables[TAG]._state.file.is_whole  # devices may read it
    database.insert(TAG, new[:1], vectors_of(new[:1], 2))
    expected[int(new[0])] = float(np.float32(new[0]) + 2 * 10**6)
    database.close()
    report = RowFilesDatabase.inspect(tmp_path / "database")
    assert (report.damages, report.tables[0].rows) == ([], len(expected))
    database = opened(tmp_path)
    holds(database, expected)
    database.close()


def test_a_check_of_a_database_reads_the_range_alone(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(whole.read_bytes())
    database = opened(tmp_path)
    adopt(database, path, SHARE, "linked")
    database.close()
    inside, outside = (RowFile(whole, share=share).range.runs(RowFile(whole).head)[0] for share in (SHARE, TableShare(2, 3)))
    flip(path, outside[0] + 40_000)
    report = RowFilesDatabase.inspect(tmp_path / "database")
    assert (report.damages, report.tables[0].rows) == ([], len(rows_of(SHARE)))
    flip(path, inside[0] + 40_000)
    assert "contradicts its checksum" in RowFilesDatabase.inspect(tmp_path / "database").damages[0]


def test_a_sealed_share_has_short_buckets(whole: Path, tmp_path: Path, database: RowFilesDatabase) -> None:
    adopt(database, whole, TableShare(3, 8), "linked")
    key = np.array([*rows_of(TableShare(3, 8))][:1])
    database.insert(TAG, key, vectors_of(key, 1))
    assert database.seal(TAG) == 1
    file = database._tables[TAG]._state.file
    assert file is not None
    assert np.diff(file.starts).max() < 20


@pytest.mark.parametrize("how", ["linked", "copied", "downloading"])
def test_devices_do_not_read_a_file_with_other_shares(whole: Path, database: RowFilesDatabase, how: str) -> None:
    pinner = PopulatingPinner()
    table = database.host_table(TAG)
    table.pin(pinner)  # before there is a file
    database.open_table(f"{TAG}2", DIM)
    adopt(database, whole, SHARE, how)
    assert table.layout() is None
    source = Elsewhere(whole.read_bytes()).source() if how == "downloading" else source_of(whole)
    database.adopt(f"{TAG}2", source, record_of(SHARE))
    wait_until(lambda: not database.downloads())
    with pytest.raises(InvalidInputError, match="other shares"):
        database.host_table(f"{TAG}2").pin(pinner)
    database.insert(f"{TAG}2", np.array([*rows_of(SHARE)][:1]), np.zeros((1, DIM), np.float32))
    assert database.seal(f"{TAG}2") == 1
    database.host_table(f"{TAG}2").pin(pinner)
    assert database.host_table(f"{TAG}2").layout() is not None


def test_a_file_of_another_share_than_the_record_says_is_refused(whole: Path, tmp_path: Path) -> None:
    database = opened(tmp_path)
    adopt(database, whole, SHARE, "copied")
    database.close()
    rows = tmp_path / "database" / "tables" / f"{TAG}.rows"
    rows.unlink()
    copied(whole, rows, TableShare(2, 3))
    with pytest.raises(DatabaseCorruptError, match="has share 2/3, expected 1/3"):
        opened(tmp_path)
    assert "has share 2/3" in RowFilesDatabase.inspect(tmp_path / "database").damages[0]


def test_a_load_of_another_share_that_was_interrupted_is_repeated(whole: Path, tmp_path: Path) -> None:
    database = opened(tmp_path)
    adopt(database, whole, SHARE, "copied")
    database.close()
    other = TableShare(0, 2)
    database = opened(tmp_path)
    database._tables[TAG]._put(LoadRecord(with_share("print", other), 0, ROWS))
    database.close()
    database = opened(tmp_path)  # the file of the earlier share is still there
    assert not database._tables[TAG].has_adopted(RowFile(whole).head, record_of(other))
    adopt(database, whole, other, "linked")
    holds(database, rows_of(other))
    database.close()


# -- downloads ---------------------------------------------------------------------------------------------------------


def test_a_download_reads_the_range_alone(whole: Path, database: RowFilesDatabase) -> None:
    elsewhere = adopt(database, whole, SHARE, "downloading")
    head = FileHead.unpacked(elsewhere.content[:PAGE_BYTES])
    read = sum(size for at, size in elsewhere.ranges if at < head.sums_at)
    assert read < len(elsewhere.content) * 0.75  # by blocks of 64 KB
    path = database.path / "tables" / f"{TAG}.rows"
    assert path.stat().st_size == head.size_bytes
    assert 512 * path.stat().st_blocks < len(elsewhere.content) * 0.75
    before = len(elsewhere.ranges)
    holds(database, rows_of(SHARE))
    assert len(elsewhere.ranges) == before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_share_of_more_takes_what_is_here_from_the_table_of_the_share_before(
    whole: Path, database: RowFilesDatabase, damaged: bool
) -> None:
    adopt(database, whole, TableShare(1, 2), "downloading")
    database.open_table(f"{TAG}2", DIM)
    if damaged:
        before = database._tables[TAG]._state.file
        assert before is not None
        flip(before.path, before.range.runs(before.head)[0][0] + 100_000)
    elsewhere = Elsewhere(whole.read_bytes())
    assert database.adopt(f"{TAG}2", elsewhere.source(), record_of(TableShare(2, 3))) == "downloading"
    wait_until(lambda: not database.downloads())
    file = database._tables[f"{TAG}2"]._state.file
    assert file is not None
    file.verify()
    answers(file, KEYS, TableShare(2, 3))
    read = sum(size for at, size in elsewhere.ranges if at < file.head.sums_at)
    assert read < 4 * download.BLOCK_BYTES + 256 * 1024 * damaged


@pytest.mark.parametrize("later", [SHARE, TableShare(1, 2), TableShare(2, 4), TableShare(0, 3)], ids=str)
def test_a_download_that_was_ended_goes_on_for_this_share_or_another(whole: Path, tmp_path: Path, later: TableShare) -> None:
    database = opened(tmp_path)
    elsewhere = Elsewhere(whole.read_bytes())
    source, left = elsewhere.source(), iter(range(3))

    def end(offset: int, size: int) -> None:
        if size >= download.BLOCK_BYTES and next(left, None) is None:
            raise DatabaseCorruptError("it is killed here")

    elsewhere.before = end
    database.adopt(TAG, source, record_of(SHARE))
    table = database._tables[TAG]
    wait_until(lambda: table._download is not None and table._download._failed)
    there = table.download_progress()
    assert there is not None
    assert 0 < there[0] < there[1]
    database.close()
    elsewhere.before = lambda offset, size: None
    elsewhere.ranges.clear()
    database = opened(tmp_path)
    assert database.adopt(TAG, source, record_of(later)) == "downloading"
    running = database._tables[TAG]._download  # None if it has ended
    if later.index and running is not None:
        assert running.resumed_bytes > 0
    wait_until(lambda: not database.downloads())
    holds(database, rows_of(later))
    assert RowFile(database.path / "tables" / f"{TAG}.rows").share == later
    database.close()
