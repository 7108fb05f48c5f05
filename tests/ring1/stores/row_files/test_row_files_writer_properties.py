"""Row files against a dict: any keys, repeated and deleted ones, any width, several runs, more rows than fit in memory."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.errors import DatabaseError
from hps.stores.row_files import collector as collector_module
from hps.stores.row_files import writer
from hps.stores.row_files.collector import RowCollector
from hps.stores.row_files.layout import PAGE_BYTES
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import Run, sorted_run, write_row_file

KEYS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**63 - 1, -(2**63)]), st.integers(0, 20))
BATCHES = st.lists(st.tuples(st.lists(KEYS, max_size=40), st.booleans()), max_size=4)

Rows = dict[int, bytes]


def rows_of(keys: list[int], width: int, batch: int) -> np.ndarray:
    """Rows that differ by key, place and batch."""
    words = np.arange(len(keys) * width, dtype=np.uint32).reshape(len(keys), width) + np.uint32(batch << 20)
    return (words + np.array(keys, np.int64).astype(np.uint32)[:, None]).view(np.float32)


def gather(
    path: Path, width: int, batches: list[tuple[list[int], bool]], into: Rows, most_bytes: int | None = None
) -> list[Run]:
    collector = RowCollector(path, width, sum(len(keys) for keys, _ in batches), most_bytes)
    for number, (keys, deletes) in enumerate(batches):
        rows, ids = rows_of(keys, width, number + len(into)), np.array(keys, np.int64)
        collector.add(ids, rows, np.ones(ids.size, np.bool_) if deletes else None)
        for key, row in zip(keys, rows, strict=True):
            if deletes:
                into.pop(key, None)
            else:
                into[key] = row.tobytes()
    return collector.runs()


def check(file: RowFile, expected: Rows, width: int) -> None:
    assert file.head.rows == len(expected)
    file.verify()
    keys = np.array([*expected, 17, -17, 2**62], np.int64)
    out, found = np.zeros((keys.size, width), np.float32), np.zeros(keys.size, np.bool_)
    file.fetch(keys, out, found, verify=True)
    assert {int(key): row.tobytes() for key, row in zip(keys[found], out[found], strict=True)} == expected
    scanned = [(int(key), row.tobytes()) for some, rows in file.chunks(7) for key, row in zip(some, rows, strict=True)]
    assert dict(scanned) == expected
    assert len(scanned) == len(expected)


@settings(max_examples=15)
@given(st.integers(1, 40), BATCHES, BATCHES, st.booleans())
def test_a_file_and_its_successor_have_the_rows_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory, width: int, first: list, later: list, spills: bool
) -> None:
    path, expected = tmp_path_factory.mktemp("rows") / "t.rows", Rows()
    most = 20 * (4 * (2 + width) + 40) if spills else None
    write_row_file(path, "t", width, gather(path, width, first, expected, most))
    file = RowFile(path)
    check(file, expected, width)
    before = dict(expected)
    write_row_file(path, "t", width, [*gather(path, width, later, expected, most), Run(file.records)])
    check(RowFile(path), expected, width)
    check(file, before, width)  # what is mapped stays
    assert [entry.name for entry in path.parent.iterdir()] == ["t.rows"]


@pytest.mark.parametrize("width", [1, 3, 128, 2048])
def test_a_file_of_several_windows_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(writer, "_SLICE_BYTES", 64 << 10)
    count = max(300, 100_000 // (width + 2))
    keys = np.arange(count, dtype=np.int64) * 977 - 5000
    rows = rows_of(keys.tolist(), width, 0)
    collector = RowCollector(tmp_path / "t.rows", width, count)
    for start in range(0, count, 100):
        collector.add(keys[start : start + 100], rows[start : start + 100])
    head = write_row_file(tmp_path / "t.rows", "t", width, collector.runs(), source="files")
    assert (head.rows, head.source) == (count, "files")
    check(RowFile(tmp_path / "t.rows"), {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}, width)


def test_rows_beyond_the_memory_lie_in_files_without_names(tmp_path: Path) -> None:
    most = 100 * (4 * (2 + 4) + 40)
    collector = RowCollector(tmp_path / "t.rows", 4, 1000, most)
    keys = np.arange(1000, dtype=np.int64)
    collector.add(keys, rows_of(keys.tolist(), 4, 0))
    collector.add(keys[::2].copy(), rows_of(keys[::2].tolist(), 4, 1))
    runs = collector.runs()
    assert sum(run.order is None for run in runs) == 14  # of 1,500 rows
    assert not list(tmp_path.iterdir())
    write_row_file(tmp_path / "t.rows", "t", 4, runs)
    expected = {int(k): r.tobytes() for k, r in zip(keys, rows_of(keys.tolist(), 4, 0), strict=True)}
    expected |= {int(k): r.tobytes() for k, r in zip(keys[::2], rows_of(keys[::2].tolist(), 4, 1), strict=True)}
    check(RowFile(tmp_path / "t.rows"), expected, 4)


def test_deletions_among_more_rows_than_expected_stay_with_their_keys(tmp_path: Path) -> None:
    keys, shuffle = np.arange(1000, dtype=np.int64), np.random.default_rng(1)
    before, rows = rows_of(keys.tolist(), 4, 0), rows_of(keys.tolist(), 4, 1)
    write_row_file(tmp_path / "t.rows", "t", 4, [sorted_run(keys, before)])
    collector = RowCollector(tmp_path / "t.rows", 4, 30, 100 * (4 * (2 + 4) + 40))
    expected = {int(key): row.tobytes() for key, row in zip(keys, before, strict=True)}
    for count, deletes in ((250, True), (200, False)):
        some = shuffle.permutation(keys)[:count]
        deleted = shuffle.random(count) < 0.5 if deletes else np.zeros(count, np.bool_)
        collector.add(some, rows[some], deleted if deletes else None)
        for key, gone in zip(some.tolist(), deleted.tolist(), strict=True):
            expected[key] = rows[key].tobytes()
            if gone:
                del expected[key]
    runs = collector.runs()
    assert sum(run.rows for run in runs if run.order is not None) <= 100
    write_row_file(tmp_path / "t.rows", "t", 4, [*runs, Run(RowFile(tmp_path / "t.rows").records)])
    check(RowFile(tmp_path / "t.rows"), expected, 4)


def test_a_full_disk_refuses_rows_beyond_the_memory_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collector_module.os, "pwrite", full)
    collector = RowCollector(tmp_path / "t.rows", 4, 1000, 100 * (4 * (2 + 4) + 40))
    keys = np.arange(1000, dtype=np.int64)
    with pytest.raises(DatabaseError, match="No space left"):
        collector.add(keys, rows_of(keys.tolist(), 4, 0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["head", "records", "starts", "fingerprints", "sums"])
def test_a_flipped_bit_in_any_part_is_found_and_leads_nowhere(tmp_path: Path, part: str) -> None:
    path, width = tmp_path / "t.rows", 4
    expected: Rows = {}
    head = write_row_file(path, "t", width, gather(path, width, [(list(range(3000)), False)], expected))
    begin = {
        "head": 0,
        "records": head.records_at,
        "starts": head.starts_at,
        "fingerprints": head.fingerprints_at,
        "sums": head.sums_at,
    }[part]
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    for at, bit in ((40, 0), (103, 7), (3, 6)):
        damaged = content.copy()
        damaged[begin + at] ^= 1 << bit
        path.write_bytes(damaged)
        if part == "head":
            with pytest.raises(DatabaseError, match="opening the row file"):
                RowFile(path)
            continue
        file = RowFile(path)
        with pytest.raises(DatabaseError, match="damaged"):
            file.verify()
        keys = np.arange(-10, 3010, dtype=np.int64)
        out, found = np.zeros((keys.size, width), np.float32), np.zeros(keys.size, np.bool_)
        if part in ("starts", "fingerprints"):  # a row may be missed, but none is wrong, and nothing outside is read
            file.fetch(keys, out, found)
            rows = zip(keys[found], out[found], strict=True)
            assert all(expected[int(key)] == row.tobytes() for key, row in rows)
        else:
            with pytest.raises(DatabaseError, match="damaged"):
                file.fetch(keys, out, found, verify=True)


@pytest.mark.parametrize("change", ["cut", "grown", "writable", "foreign"])
def test_a_file_that_is_not_what_its_head_says_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "t.rows"
    write_row_file(path, "t", 4, gather(path, 4, [([1, 2, 3], False)], {}))
    path.chmod(0o644)
    content = path.read_bytes()
    if change == "writable":
        path.chmod(0o666)
    else:
        path.write_bytes({"cut": content[:-8], "grown": content + bytes(PAGE_BYTES), "foreign": bytes(len(content))}[change])
    with pytest.raises(DatabaseError):
        RowFile(path)
