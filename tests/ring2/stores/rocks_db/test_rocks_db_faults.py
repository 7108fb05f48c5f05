"""RocksDB's faults: locked, damaged, full, killed. Each ends in right vectors or in an error that names the cause."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile  # noqa: F401 - for the children
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress  # noqa: F401 - the last for the children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseLockedError, DatabaseTimeoutError
from hps.stores.base import LoadRecord
from hps.stores.rocks_db import directory  # noqa: F401 - for the children
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.engine import database_error
from hps.testing.databases import DIM, TAG, changes_of, distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import KeyArray
from tests import ROOT
from tests.tables.rocks_database import opened

ROWS = 6000
KEYS = distinct_keys(ROWS)
VECTORS = vectors_of(KEYS, DIM)
BLOCK = 1 << 15  # of a log


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed database: ROWS rows of TAG in several merged and unmerged files."""
    path = tmp_path_factory.mktemp("pristine") / "rocksdb"
    with opened(path) as database:
        for start in range(0, ROWS, 1000):
            rows = slice(start, start + 1000)
            database.load_chunk(TAG, KEYS[rows], VECTORS[rows], LoadRecord("x", start + 1000, ROWS))
            if start == 3000:
                database.finish_load(TAG)
    return path


def child(code: str, *arguments: str | Path, **options) -> subprocess.Popen:
    """Start a Python process that has the constants of this file at hand."""
    start = "import sys\nfrom tests.ring2.stores.rocks_db.test_rocks_db_faults import *\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", start, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **options)


def outcome_of(code: str, *arguments: str | Path, **options) -> str:
    with child(code, *arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=2 * PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return out


def test_a_directory_that_another_process_holds_is_refused_at_once_with_the_cure(path: Path):
    code = """
        database = RocksDatabase(sys.argv[1])
        print("open", flush=True)
        sys.stdin.read()
        database.close()
    """
    with child(code, path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(DatabaseLockedError, match=rf"(?s){path}.*Another process.*fuser.*another path.*read_only"):
            RocksDatabase(path)
        RocksDatabase(path, read_only=True).close()
        holder.communicate("")
    RocksDatabase(path).close()


def test_a_reader_that_waits_leaves_the_lock_to_thewriter_of_its_process(path: Path):
    code = """
        with opened(sys.argv[1]) as writer:
            reader = RocksDatabase(sys.argv[1], read_only=True, load_timeout_s=0)
            with suppress(DatabaseTimeoutError):
                reader.open_table("another", DIM)
            print("waited", flush=True)
            sys.stdin.read()
    """
    with child(code, path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "waited\n", holder.stderr.read()
        with pytest.raises(DatabaseLockedError):
            RocksDatabase(path)
        with pytest.raises(DatabaseTimeoutError, match=f"it does not exist, and process {holder.pid} writes there"):
            RocksDatabase(path, read_only=True, load_timeout_s=0).open_table("another", DIM)
        holder.communicate("")


# -- damaged -----------------------------------------------------------------------------------------------------------


def garble(data: bytes, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(data)), rng.choice([1, 8, 300])
    garbled = bytes(byte ^ rng.randrange(1, 256) for byte in data[start : start + size])
    return data[:start] + garbled + data[start + size :]


def zero_the_end(data: bytes, rng: random.Random) -> bytes:
    kept = rng.randrange(len(data))
    return data[:kept] + bytes(len(data) - kept)


def swap(data: bytes, rng: random.Random) -> bytes:
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    one, two = rng.sample(range(len(blocks) - 1), 2)
    blocks[one], blocks[two] = blocks[two], blocks[one]
    return b"".join(blocks)


def recycle(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(0, len(data), BLOCK) + 6
    return data[:at] + bytes([rng.choice([5, 6, 7, 8, 11])]) + data[at + 1 :]  # the type of a record


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, rng: b"",
    "garble": garble,
    "zero the end": zero_the_end,
    "swap": swap,
    "recycle": recycle,
}


def damage_file(file: Path, damage: str, rng: random.Random) -> None:
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(DAMAGES[damage](file.read_bytes(), rng))


def read_everything(path: Path, read_only: bool) -> None:
    """Fetch and scan all rows; passes when they are all right, raises what the database raises."""
    with opened(path, read_only=read_only) as database:
        record = database.load_record(TAG)
        out, found = fetched(database, TAG, KEYS, DIM)
        assert found.all()
        np.testing.assert_array_equal(out, VECTORS)
        scanned = np.concatenate([keys for keys, _ in database.scan(TAG, 1000)])
        np.testing.assert_array_equal(np.sort(scanned), np.sort(KEYS))
        assert record == LoadRecord("x", ROWS, ROWS)


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garble", "zero the end", "remove"])
def test_a_damaged_file_is_reported_and_never_answers_wrongly(pristine: Path, path: Path, pattern: str, damage: str):
    """Each time another way; what is read then is right, or the damage is reported."""
    reports, seeds = [], 1 if damage in ("empty", "remove") else 3
    read_only = (len(damage) + len(pattern)) % 2 == 0
    for seed in range(seeds):
        rng = random.Random(seed)
        shutil.copytree(pristine, path)
        damage_file(rng.choice(sorted(path.glob(pattern))), damage, rng)
        try:
            read_everything(path, read_only)
        except DatabaseCorruptError as error:
            reports.append(str(error))
        shutil.rmtree(path)
    assert len(reports) >= min(seeds, 2)  # bytes that nothing reads may change unnoticed, but not many of them
    assert all(str(path) in report and "backup" in report for report in reports)


def test_a_manifest_cut_at_any_point_is_reported(pristine: Path, path: Path):
    whole = next(pristine.glob("MANIFEST-*")).stat().st_size
    for size in [*range(0, whole, whole // 8), whole - 1]:
        shutil.copytree(pristine, path)
        os.truncate(next(path.glob("MANIFEST-*")), size)
        with pytest.raises(DatabaseCorruptError, match=r"MANIFEST-\d+ was cut short"):
            RocksDatabase(path)
        assert len(list(path.glob("*.sst"))) == len(list(pristine.glob("*.sst")))  # RocksDB would have deleted them
        shutil.rmtree(path)


def test_a_file_that_is_damaged_while_it_is_open_is_reported(pristine: Path, path: Path):
    shutil.copytree(pristine, path)
    with opened(path) as database:
        assert fetched(database, TAG, KEYS, DIM)[1].all()
        for file in path.glob("*.sst"):
            data = file.read_bytes()
            with open(file, "r+b") as handle:
                handle.write(bytes(byte ^ 0x55 for byte in data[: len(data) // 2]))
        found = np.zeros(ROWS, np.bool_)
        out = np.zeros((ROWS, DIM), np.float32)
        with pytest.raises(DatabaseCorruptError, match=rf"(?s)fetching from table {TAG} in {path}.*checksum"):
            database.fetch(TAG, KEYS, out, found)
        np.testing.assert_array_equal(out[found], VECTORS[found])
        with pytest.raises(DatabaseCorruptError, match="scanning"):
            list(database.scan(TAG, 100))
        with pytest.raises(DatabaseCorruptError, match="counting"):
            database.size(TAG)


def test_a_database_without_its_first_file_is_not_taken_for_a_new_one(pristine: Path, path: Path):
    shutil.copytree(pristine, path)
    (path / "CURRENT").unlink()
    before = sorted(path.iterdir())
    for read_only in (False, True):
        with pytest.raises(DatabaseCorruptError, match="CURRENT is missing"):
            RocksDatabase(path, read_only=read_only)
    assert sorted(path.iterdir()) == before


def test_a_damaged_or_foreign_seal_does_not_keep_a_whole_database_closed(pristine: Path, path: Path):
    for text in ("", "{", "[]", '{"manifest": "MANIFEST-999999", "size_bytes": 5, "crc32": 5}'):
        shutil.copytree(pristine, path)
        (path / "hps-manifest.json").write_text(text)
        read_everything(path, read_only=False)
        shutil.rmtree(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_is_a_file_is_refused(path: Path, read_only: bool):
    path.write_text("mine")
    for place in (path, path / "below"):
        with pytest.raises(DatabaseError, match=str(place)):
            RocksDatabase(place, read_only=read_only)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("message", "kind", "cure"),
    [
        ("IO error: While lock file: /x/LOCK: Resource temporarily unavailable", DatabaseLockedError, "read_only"),
        ("IO error: lock hold by current process, acquire time 1: /x/LOCK: No locks available", DatabaseLockedError, "fuser"),
        ("Corruption: block checksum mismatch: stored = 1", DatabaseCorruptError, "backup"),
        ("IO error: No such file or directory: While open a file for random read: /x/1.sst", DatabaseCorruptError, "backup"),
        ("IO error: No space left on device: While appending to file: /x/1.log", DatabaseError, "by itself"),
        ("IO error: While fsync: /x/1.log: File too large", DatabaseError, "Make room"),
        ("IO error: While open a file for appending: /x/1.log: Permission denied", DatabaseError, "may write"),
        ("IO error: While open a file: /x/1.log: Read-only file system", DatabaseError, "read_only"),
        ("IO error: While open a file for random read: /x/1.sst: Too many open files", DatabaseError, "ulimit"),
        ("Result incomplete: Write stall", DatabaseTimeoutError, "keep up"),
        ("Invalid argument: something new", DatabaseError, "something new"),
    ],
)
def test_every_message_of_the_engine_becomes_a_typed_error(message: str, kind: type[DatabaseError], cure: str):
    error = database_error(message, "doing this", Path("/x"))
    private = type(error).__module__ != "hps.errors"  # a stall, or a full disk
    assert (type(error).__base__ if private else type(error)) is kind
    assert str(error).startswith("doing this in /x: ")
    assert message.split(": ")[-1] in str(error)
    assert cure in str(error)


# -- full --------------------------------------------------------------------------------------------------------------


def insert_when_possible(database: RocksDatabase, keys: KeyArray) -> None:
    def inserted() -> bool:
        try:
            database.insert(TAG, keys, vectors_of(keys, DIM))
        except DatabaseError:
            return False
        return True

    wait_until(inserted, "there is room again")


@contextmanager
def mounted(mount: Path, *calls: tuple[Any, ...]) -> Iterator[Path]:
    """A new directory on which these calls of mount(2) have been made; skips where they are not allowed."""
    mount.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for source, kind, flags, data in calls:
            if libc.mount(source, bytes(mount), kind, flags, data):
                pytest.skip(f"cannot mount a file system: {os.strerror(ctypes.get_errno())}")
        yield mount
    finally:
        libc.umount2(bytes(mount), 2)


FULL = {
    "files may not grow": """
        def fill(path, most=1 << 20):
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

        def empty_again(path):
            fill(path, -1)
    """,
    "disk": """
        def fill(path, left=400_000):
            with open(path.parent / "filler", "wb") as filler:
                filler.write(bytes(shutil.disk_usage(path).free - left))

        def empty_again(path):
            (path.parent / "filler").unlink()
    """,
}


RESTARTS_WHEN_FULL = """
    def refused(work):
        try:
            work()
        except DatabaseError as error:
            print("refused", "Make room" in str(error))

    path, memory = map(Path, sys.argv[1:])
    directory._MEMORY = str(memory)
    tempfile.tempdir = str(path.parent)  # as full
    with opened(path) as database:
        database.load_chunk(TAG, KEYS, VECTORS, LoadRecord("x", ROWS, ROWS))
        database.open_table("gone", DIM)
        database.insert(TAG, KEYS[:100], VECTORS[:100])
        before = database.writer_token(TAG)
        if killed:
            shutil.copytree(path, path.parent / "killed")
        fill(path)
        wide = distinct_keys(60_000, seed=5)
        for step in range(0, 60_000, 1000):  # until it is full
            try:
                database.insert(TAG, wide[step : step + 1000], vectors_of(wide[step : step + 1000], DIM))
            except DatabaseError as error:
                print("refused", "Make room" in str(error))
                break
        refused(lambda: database.load_chunk(TAG, wide, vectors_of(wide, DIM), LoadRecord("y", 1, 1)))
        assert list((path / "hps-ingest").iterdir()) == []
        np.testing.assert_array_equal(fetched(database, TAG, KEYS, DIM)[0], VECTORS)
        assert database.load_record(TAG).rows_done == ROWS
        if killed:
            empty_again(path)
    if killed:  # its last rows are in the write-ahead log alone
        shutil.rmtree(path)
        (path.parent / "killed").rename(path)
    fill(path, 1000)
    for restart in range(3):
        with opened(path) as database:
            assert fetched(database, TAG, KEYS, DIM)[1].all()
            np.testing.assert_array_equal(fetched(database, TAG, KEYS, DIM)[0], VECTORS)
            assert database.load_record(TAG).complete
            assert database.follow_log(TAG) == {}
            assert sorted(database.tags()) == sorted([TAG, "gone"])
            for _ in range(2):
                refused(lambda: database.insert(TAG, KEYS, VECTORS + 1))
            refused(lambda: database.open_table("new", DIM))
            refused(lambda: database.drop_table("gone"))
            other = child("RocksDatabase(sys.argv[1])", path)
            assert "DatabaseLockedError" in other.communicate()[1]
            assert fetched(database, TAG, KEYS, DIM)[1].all()
            token = database.renew_writer_token(TAG)
            assert token not in (None, before) and database.writer_token(TAG) == token
            if restart == 2:
                empty_again(path)
                insert_when_possible(database, KEYS)
                database.open_table("new", DIM)
                assert database.writer_token(TAG) == token
            assert len(os.listdir(memory)) == (restart < 2)
        assert not os.listdir(memory)
    with opened(path) as database:
        assert database.writer_token(TAG) == token
        np.testing.assert_array_equal(fetched(database, TAG, KEYS, DIM)[0], VECTORS)
        assert sorted(database.tags()) == sorted([TAG, "gone", "new"])
"""


@pytest.mark.parametrize(("full", "killed"), [("files may not grow", False), ("files may not grow", True), ("disk", True)])
def test_every_restart_on_a_full_disk_serves_what_is_there_until_there_is_room(tmp_path: Path, full: str, killed: bool):
    disk = [(b"none", b"tmpfs", 0, b"size=12m")] if full == "disk" else []
    with mounted(tmp_path / "disk", *disk) as place:
        code = textwrap.dedent(FULL[full]) + f"killed = {killed}\n" + textwrap.dedent(RESTARTS_WHEN_FULL)
        (tmp_path / "memory").mkdir()
        said = outcome_of(code, place / "rocksdb", tmp_path / "memory")
    assert said.split("\n") == ["refused True"] * 14 + [""]


def test_a_first_start_on_a_full_disk_promises_nothing(tmp_path: Path):
    code = textwrap.dedent(FULL["files may not grow"]) + textwrap.dedent("""
        path = Path(sys.argv[1])
        fill(path, 1000)
        try:
            RocksDatabase(path)
        except DatabaseError as error:
            print("by itself" in str(error), "make room" in str(error))
    """)
    assert outcome_of(code, tmp_path / "rocksdb") == "False True\n"


def test_a_read_only_file_system_serves_read_only_and_refuses_writing(pristine: Path, tmp_path: Path):
    bind, remount, read_only = 4096, 32, 1
    calls = [(bytes(pristine), None, bind, None), (None, None, bind | remount | read_only, None)]
    with mounted(tmp_path / "disk", *calls) as disk:
        read_everything(disk, read_only=True)
        with pytest.raises(DatabaseError, match=rf"{disk}.*[Rr]ead-only"):
            RocksDatabase(disk)


@pytest.mark.parametrize("writes", [6, 7, 8, 9])  # a batch of changes is four of them
def test_an_update_that_is_killed_between_its_writes_loses_no_order_and_skips_no_message(path: Path, writes: int):
    code = """
        from hps.stores.base import LogPosition
        from hps.stores.rocks_db.engine import Engine

        write, left = Engine.write, int(sys.argv[2])

        def write_and_die(*arguments):
            global left
            write(*arguments)
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        with opened(sys.argv[1], max_batch_size=100) as database:
            database.insert(TAG, KEYS[:1], VECTORS[:1])  # which names the writer
            Engine.write = write_and_die
            for batch in range(1, 4):
                database.apply(TAG, changes_of(KEYS[:350], 10 * batch, version=batch), {"p": LogPosition(str(batch))})
    """
    with child(code, path, writes) as writer:
        assert writer.wait() == -signal.SIGKILL, writer.stderr.read()
    with opened(path) as database:
        counted = int(database.follow_log(TAG)["p"].position)
        out, found = fetched(database, TAG, KEYS[:350], DIM)
        assert found.all()
        newer, older = ((out == vectors_of(KEYS[:350], DIM, counted + more)).all(axis=1) for more in (1, 0))
        assert (newer ^ older).all(), "a batch that was counted is not there"
        assert np.count_nonzero(newer) == 100 * (writes % 4)
        ago = 10 * counted + np.where(newer, 9, -1)
        assert not database.apply(TAG, changes_of(KEYS[:350], ago.tolist(), version=9), {}).any()
        assert database.apply(TAG, changes_of(KEYS[:350], (ago + 1).tolist(), version=9), {}).all()
