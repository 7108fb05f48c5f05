"""Reading a row file whose pages are not all there: each is asked for before it is read."""

import os
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseTimeoutError
from hps.stores.row_files.layout import PAGE_BYTES, hash_keys
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
    keys = np.array([unmixed(int(target) + i) for i in range(20_000)], np.int64)
    vectors = rng.random((keys.size, 1), np.float32)
    write_row_file(tmp_path / "whole", "t", 1, [sorted_run(keys, vectors)])
    file = arriving(tmp_path)
    out, found = fetch(file, keys[::3000].copy())
    assert found.all()
    assert np.array_equal(out, vectors[::3000])


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
    hashes = np.empty(1, np.uint64)
    hash_keys(np.array([unmixed(hashed)], np.int64), hashes)
    assert int(hashes[0]) == hashed


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
    for call in (lambda: fetch(file, keys), lambda: file.numbers(keys), lambda: next(file.chunks(10)), file.verify):
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
        assert np.array_equal(file.numbers(keys) >= 0, found)
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
