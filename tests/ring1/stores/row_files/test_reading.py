"""Reading a row file whose pages are not all there: each is asked for before it is read."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import CapacityError, DatabaseCorruptError, DatabaseError, DatabaseTimeoutError
from hps.ground.shares import SHARE_SEED
from hps.stores.row_files import changed_rows, residency
from hps.stores.row_files.changed_rows import ChangedRows
from hps.stores.row_files.cold_reads import ColdReads
from hps.stores.row_files.layout import PAGE_BYTES
from hps.stores.row_files.presence import PageCache, Presence, advise_random
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import sorted_run, write_row_file

WIDTH = 3
rng = np.random.default_rng(7)


def write(path: Path, rows: int, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    keys = rng.choice(np.arange(-4 * rows, 4 * rows), rows, replace=False).astype(np.int64)
    vectors = rng.random((rows, width), np.float32)
    write_row_file(path, "t", width, [sorted_run(keys, vectors)])
    return keys, vectors


class Arriving(Presence):
    """Copies the required pages of a complete file into one that has nothing but its head."""

    def __init__(self, source: Path, target: Path) -> None:
        self.doubtful = True
        self.required: set[int] = set()
        self._content = source.read_bytes()
        self._file = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, len(self._content))
        self._copy(0)

    def _copy(self, page: int) -> None:
        os.pwrite(self._file, self._content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES], page * PAGE_BYTES)

    def require(self, pages):
        assert (np.diff(pages) > 0).all()
        new = set(pages.tolist()) - self.required
        for page in new:
            self._copy(page)
        self.required |= new
        return len(new)

    def doubt(self) -> None: ...


class Lost(Arriving):
    def require(self, pages):
        raise DatabaseTimeoutError("no page arrives")


def arriving(tmp_path: Path, kind: type[Arriving] = Arriving) -> RowFile:
    return RowFile(tmp_path / "partial", kind(tmp_path / "whole", tmp_path / "partial"))


def fetch(file: RowFile, keys: np.ndarray, *, verify: bool = False) -> tuple[np.ndarray, np.ndarray]:
    out, found = np.full((keys.size, file.head.width), 9, np.float32), np.zeros(keys.size, np.bool_)
    assert file.fetch(keys, out, found, verify=verify) == found.sum()
    return out, found


@pytest.mark.parametrize("width", [1, 3, 700, 1500])
@pytest.mark.parametrize("verify", [False, True])
def test_a_lookup_asks_for_every_page_that_it_reads(tmp_path, width, verify):
    keys, vectors = write(tmp_path / "whole", 3000 if width < 10 else 60, width)
    absent = np.setdiff1d(np.arange(-20_000, 20_000), keys)
    for picked in (keys[:40], keys[40:55]):
        file = arriving(tmp_path)
        out, found = fetch(file, np.concatenate((picked, absent)), verify=verify)
        assert found[: picked.size].all()
        assert not found[picked.size :].any()
        assert np.array_equal(out[: picked.size], vectors[np.isin(keys, picked)])
        (tmp_path / "partial").unlink()


def test_a_lookup_asks_for_few_other_pages(tmp_path):
    keys, _ = write(tmp_path / "whole", 20_000)
    file = arriving(tmp_path)
    fetch(file, keys[:1])
    assert len(file.presence.required) <= 3


def test_a_lookup_asks_for_nothing_that_was_found_before(tmp_path):
    keys, _ = write(tmp_path / "whole", 1000)
    file = arriving(tmp_path)
    out, found = np.full((9, WIDTH), 5, np.float32), np.ones(9, np.bool_)
    assert file.fetch(keys[:9], out, found) == 0
    assert (out == 5).all()
    assert not file.presence.required


def test_a_bucket_may_be_larger_than_a_page(tmp_path):
    """Keys may be chosen so that their hashes are close."""
    target = np.uint64(1) << np.uint64(40)
    keys = np.array([key_with(int(target) + i) for i in range(20_000)], np.int64)
    vectors = rng.random((keys.size, 1), np.float32)
    write_row_file(tmp_path / "whole", "t", 1, [sorted_run(keys, vectors)])
    file = arriving(tmp_path)
    out, found = fetch(file, keys[::3000].copy())
    assert found.all()
    assert np.array_equal(out, vectors[::3000])


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17])
def test_a_bucket_of_any_size_has_its_records_and_no_others(tmp_path, rows):
    """Fingerprints are compared by eights; with one bucket they end where the file has its sums."""
    hashes = [(i << 20) + (i % 3) for i in range(rows)]  # a third of them with each fingerprint, all in the first bucket
    absent = [hashed + (1 << 19) for hashed in hashes] + [(1 << 63) + i for i in range(256)]
    keys, others = (np.array([key_with(hashed) for hashed in some], np.int64) for some in (hashes, absent))
    vectors = rng.random((rows, WIDTH), np.float32)
    write_row_file(tmp_path / "whole", "t", WIDTH, [sorted_run(keys, vectors)])
    out, found = fetch(RowFile(tmp_path / "whole"), np.concatenate((keys, others)))
    assert found.tolist() == rows * [True] + others.size * [False]
    assert np.array_equal(out[:rows], vectors)


def key_with(hashed: int) -> int:
    """Return the key with a hash of shares, which orders a file."""
    return unmixed(hashed) ^ int(SHARE_SEED)


def unmixed(hashed: int) -> int:
    """Return the key that is mixed to a hash."""
    mask = (1 << 64) - 1

    def rotated(x: int, bits: int) -> int:
        return ((x >> bits) | (x << (64 - bits))) & mask

    def unrotated(x: int, a: int, b: int) -> int:
        y = x
        for _ in range(6):  # the 64th power of the map is the identity, so its 63rd is the inverse
            y = y ^ rotated(y, a) ^ rotated(y, b)
            a, b = 2 * a % 64, 2 * b % 64
        return y

    x = hashed ^ (hashed >> 28) ^ (hashed >> 56)
    x = unrotated(x * pow(0x9FB21C651E98DF25, -1, 1 << 64) & mask, 24, 49)
    x = unrotated(x * pow(0xA24BAED4963EE407, -1, 1 << 64) & mask, 25, 50)
    return x - (1 << 64) if x >> 63 else x


@pytest.mark.parametrize("hashed", [0, 1, 2**40 + 7, 2**64 - 1])
def test_a_key_can_be_made_for_a_hash(hashed):
    run = sorted_run(np.array([key_with(hashed)], np.int64), np.zeros((1, 1), np.float32))
    assert run.hashes is not None
    assert int(run.hashes[0]) == hashed


def test_walks_wait_for_what_they_read(tmp_path):
    keys, vectors = write(tmp_path / "whole", 5000)
    file = arriving(tmp_path)
    walked = [np.concatenate(parts) for parts in zip(*file.chunks(700), strict=True)]
    order, theirs = np.argsort(keys), np.argsort(walked[0])
    assert np.array_equal(walked[0][theirs], keys[order])
    assert np.array_equal(walked[1][theirs], vectors[order])
    arriving(tmp_path).verify()


def test_pages_that_do_not_arrive_fail_the_lookup(tmp_path):
    keys, _ = write(tmp_path / "whole", 100)
    file = arriving(tmp_path, Lost)
    for call in (lambda: fetch(file, keys), lambda: file.contains(keys), lambda: next(file.chunks(10)), file.verify):
        with pytest.raises(DatabaseTimeoutError):
            call()


@pytest.mark.parametrize("doubtful", [False, True])
def test_each_damaged_page_is_found_when_it_is_read(tmp_path, doubtful):
    """Also one of the index, which would hide a key, or lead outside of the file."""
    keys, vectors = write(tmp_path / "rows", 4000)
    content = (tmp_path / "rows").read_bytes()
    head = RowFile(tmp_path / "rows").head
    for at in range(head.records_at, head.sums_at, PAGE_BYTES):
        broken = tmp_path / f"rows{at}"
        broken.write_bytes(content[: at + 1] + bytes([content[at + 1] ^ 0xFF]) + content[at + 2 :])
        broken.chmod(0o444)
        file = RowFile(broken)
        file.presence.doubtful = doubtful
        with pytest.raises(DatabaseCorruptError, match="damaged"):
            fetch(file, keys, verify=True)
        fetch(file, keys)  # answers something, and lives
        broken.unlink()
    out, found = fetch(RowFile(tmp_path / "rows"), keys, verify=True)
    assert found.all()
    assert np.array_equal(out, vectors)


# -- the page cache ---------------------------------------------------------------------------------------------------


def test_a_file_in_doubt_answers_alike_and_leaves_the_doubt(tmp_path):
    keys, vectors = write(tmp_path / "rows", 3000)
    file = RowFile(tmp_path / "rows")
    file.presence.doubt()
    for _ in range(9):
        out, found = fetch(file, keys)
        assert found.all()
        assert np.array_equal(out, vectors)
        assert np.array_equal(file.contains(keys), found)
    assert not file.presence.doubtful


def sparse(path: Path, pages: int) -> np.ndarray:
    """Map a file of holes, none of whose pages is in memory."""
    path.write_bytes(b"")
    os.truncate(path, pages * PAGE_BYTES)
    mapped = np.memmap(path, np.uint8, "r")
    advise_random(mapped)
    return np.asarray(mapped)


def test_missing_pages_are_counted(tmp_path):
    mapped = sparse(tmp_path / "holes", 64)
    presence = PageCache(mapped, owned=True)
    presence.doubt()
    pages = np.arange(0, 64, 2)
    assert presence.require(pages) == pages.size
    assert mapped[:: 2 * PAGE_BYTES].sum() == 0
    assert presence.require(pages) == 0


def test_a_quiet_file_leaves_the_doubt_and_a_missing_page_renews_it(tmp_path):
    mapped = sparse(tmp_path / "holes", 64)
    assert mapped[: 32 * PAGE_BYTES : PAGE_BYTES].sum() == 0
    presence = PageCache(mapped, owned=True)
    presence.doubt()
    for _ in range(15):
        presence.require(np.arange(32))
    assert presence.doubtful
    presence.require(np.arange(32, 64))
    for _ in range(15):
        presence.require(np.arange(32))
    assert presence.doubtful
    presence.require(np.arange(32))
    assert not presence.doubtful


def test_the_pages_of_others_files_are_asked_for_without_knowing(tmp_path):
    presence = PageCache(sparse(tmp_path / "holes", 64), owned=False)
    presence.doubt()
    for _ in range(16):
        assert presence.doubtful
        assert presence.require(np.arange(10)) == 10
    assert not presence.doubtful


def test_a_lookup_counts_what_it_read_from_the_disk(tmp_path):
    """Pages that nobody has read are missing; the page cache may hold some of a file that was just written."""
    keys, vectors = write(tmp_path / "rows", 3000)
    counted = ColdReads()
    file = RowFile(tmp_path / "rows", cold_reads=counted)
    file.presence = Missing()
    out, found = fetch(file, keys)
    assert found.all()
    assert np.array_equal(out, vectors)
    pages, depth, seconds = counted.counts()
    assert pages == file.presence.required
    assert depth.total_s == pages
    assert depth.count == seconds.count > 0


class Missing(Presence):
    """Claims that each required page was missing."""

    def __init__(self) -> None:
        self.doubtful = True
        self.required = 0

    def require(self, pages):
        self.required += pages.size
        return pages.size

    def doubt(self) -> None: ...


# -- rows that were changed online ------------------------------------------------------------------------------------


def test_changed_rows_are_a_dict_of_the_last_rows():
    changes, expected = ChangedRows(WIDTH), {}
    for round_ in range(40):
        keys = rng.integers(-300, 300, 50)
        rows, present = rng.random((50, WIDTH), np.float32), rng.random(50) < 0.8
        if round_ % 7 == 3:
            changes.add(keys)
            expected |= dict.fromkeys(keys.tolist())
        else:
            changes.add(keys, rows, present)
            for key, row, there in zip(keys.tolist(), rows, present, strict=True):
                expected[key] = row if there else None
        every = np.arange(-400, 400)
        found, there = changes.known(every)
        assert np.array_equal(changes.contains(every), np.isin(every, list(expected)))
        assert len(changes) == len(expected)
        for key, row, known in zip(every.tolist(), found, there, strict=True):
            held = expected.get(key)
            assert known == (held is not None)
            assert not known or np.array_equal(row, held)


def test_changed_rows_beyond_the_memory_are_elsewhere():
    changes = ChangedRows(WIDTH, most_bytes=4 * WIDTH * 100)
    keys, rows = np.arange(100), rng.random((100, WIDTH), np.float32)
    for _ in range(5):  # replaced rows leave room
        changes.add(keys, rows)
        assert changes.known(keys)[1].all()
    changes.add(np.arange(95, 101), rng.random((6, WIDTH), np.float32))
    assert np.array_equal(np.flatnonzero(changes.known(np.arange(101))[1]), np.arange(95))
    assert changes.contains(np.arange(101)).all()


def test_a_view_shows_whole_rows_while_the_set_grows():
    changes = ChangedRows(1)
    changes.add(np.arange(10), np.zeros((10, 1), np.float32))
    view = changes.view
    for i in range(1, 4):
        changes.add(np.arange(5000), np.full((5000, 1), i, np.float32))
    assert view.rows[view.places[view.places >= 0], 0].view(np.float32).max() == 0


def test_a_view_keeps_its_rows_while_replaced_ones_make_room():
    changes, keys, one = ChangedRows(1), np.arange(10), np.array([10])
    for version in (7, 0):
        changes.add(keys, (keys + version).astype(np.float32)[:, None])
    views = [changes.view]
    while len(views) < 3:
        changes.add(one, np.ones((1, 1), np.float32))
        if changes.view is not views[-1]:
            views.append(changes.view)
    for view in views:
        rows, there = np.zeros((10, 1), np.uint32), np.zeros(10, np.bool_)
        changed_rows._read(keys, *view[1:4], rows, there)
        assert there.all()
        assert np.array_equal(rows.view(np.float32)[:, 0], keys)


@pytest.mark.parametrize("hashed", [0, 1])
def test_the_key_with_hash_0_is_a_key_like_any_other(hashed):
    changes, key = ChangedRows(1), np.array([unmixed(hashed)], np.int64)
    changes.add(np.setdiff1d(np.arange(5000), key))
    assert not changes.contains(key)[0]
    changes.add(key, np.full((1, 1), 7, np.float32))
    changes.add(np.arange(5000, 20_000))
    assert changes.contains(key)[0]
    assert changes.known(key)[0][0, 0] == 7


def test_a_lookup_takes_changed_rows_from_memory_and_leaves_others(tmp_path):
    keys, vectors = write(tmp_path / "rows", 3000)
    file, changes = RowFile(tmp_path / "rows"), ChangedRows(WIDTH)
    changes.add(keys[:500], vectors[:500] + 1)
    changes.add(keys[500:600])
    for doubtful in (False, True):
        file.presence.doubtful = doubtful
        out, found = np.zeros_like(vectors), np.zeros(keys.size, np.bool_)
        out[:9], found[:9] = 5, True
        left = np.zeros(keys.size, np.bool_)
        assert file.fetch(keys, out, found, changes=changes.view, left=left) == 2891
        assert np.array_equal(np.flatnonzero(left), np.arange(500, 600))
        assert np.array_equal(found, ~left)
        assert (out[:9] == 5).all()
        assert np.array_equal(out[9:500], vectors[9:500] + 1)
        assert np.array_equal(out[600:], vectors[600:])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_held_file_is_locked_until_it_is_released(tmp_path):
    keys, vectors = write(tmp_path / "rows", 3000)
    file = RowFile(tmp_path / "rows")
    reports: list[tuple[int, int]] = []
    before = locked_bytes()
    try:
        file.hold(required=True, progress=lambda done, total: reports.append((done, total)))
    except CapacityError as error:
        assert "ulimit -l" in str(error)  # noqa: PT017 - a machine with a low limit proves the refusal
        return
    size = file.head.size_bytes
    assert reports == [(size, size)]
    assert file.held_bytes == size
    assert file.resident_share() in (1.0, None)
    assert locked_bytes() - before == -(-size // PAGE_BYTES) * PAGE_BYTES
    assert np.array_equal(fetch(file, keys)[0], vectors)
    file.release()
    file.release()
    assert locked_bytes() == before
    assert file.held_bytes == 0


def locked_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck"))
    return 1024 * int(line.split()[1])


def test_a_file_that_the_system_does_not_lock_to_its_end_is_left_unlocked(tmp_path, monkeypatch):
    write(tmp_path / "rows", 3000)
    mapped, calls = RowFile(tmp_path / "rows").content, []

    def lock(address, size):
        calls.append(("lock", address.value - mapped.ctypes.data, size.value))
        return len(calls) > 2

    def unlock(address, size):
        calls.append(("unlock", address.value - mapped.ctypes.data, size.value))

    library = SimpleNamespace(mlock=lock, munlock=unlock, madvise=lambda *_: 1)  # a kernel that populates no mapping
    monkeypatch.setattr(residency, "_library", library)
    monkeypatch.setattr(residency, "_LOCKED_BYTES", 4 * PAGE_BYTES)
    with pytest.raises(DatabaseError, match="the system refuses"):
        residency.LockedFile(tmp_path / "rows", [mapped])
    part = 4 * PAGE_BYTES
    assert calls == [*(("lock", i * part, part) for i in range(3)), *(("unlock", i * part, part) for i in (1, 0))]


@pytest.mark.parametrize("name", ["available_memory", "lockable_bytes"])
def test_a_file_that_memory_cannot_hold_is_refused_with_the_cure(tmp_path, monkeypatch, caplog, name):
    write(tmp_path / "rows", 300)
    file = RowFile(tmp_path / "rows")
    little = {"available_memory": (4096, "in this test"), "lockable_bytes": 4096}[name]
    monkeypatch.setattr(residency, name, lambda: little)
    with pytest.raises(CapacityError, match=r"holding the row file .*(container|ulimit)"):
        file.hold(required=True)
    file.hold(required=False)
    assert "without being locked" in caplog.text
    assert file.held_bytes == 0


def test_the_limit_of_locked_memory_counts_what_is_locked(tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmLck:\t      12 kB\nCapEff:\t0000000000000000\n")
    monkeypatch.setattr("resource.getrlimit", lambda which: (64 << 10, 64 << 10))
    assert residency.lockable_bytes(status) == 52 << 10
    status.write_text("VmLck:\t      12 kB\nCapEff:\t0000000000004000\n")
    assert residency.lockable_bytes(status) > 1 << 60
