"""Checks of RocksDB's write-ahead logs for missing acknowledged rows, and for records that hang RocksDB.

**Acknowledged rows are there, or the opening is refused.** RocksDB treats a damaged, cut or missing log as the end of the log:
it opens, and later rows are absent. So after each sync we store how far the logs reached before it, with their checksums (the
"seal", 2 % of an insert of 1,000 rows), and compare at the next opening. Bytes behind the seal were not acknowledged, unless a
power cut took the seal's last seconds, so RocksDB keeps those that it can read. This distinguishes a torn end from damage.

**A missing log** was either written to files and deleted by RocksDB, or lost. The MANIFEST names the oldest log still needed.

**Without a seal** (written by HugeCTR or an earlier hps), an incomplete last record is a torn end; all else is damage.

**A record that hangs RocksDB.** If RocksDB 9.8.4 meets the header of a recycled record in a log that does not begin with one,
it reads that header forever, with the interpreter lock held. So none may be where RocksDB looks.
"""

import contextlib
import itertools
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hps.errors import DatabaseCorruptError, DatabaseError

SEAL = "hps-log.json"
RESTORE = "Restore the directory from a backup, or remove it and load the models again"
_BLOCK_BYTES = 1 << 15  # of RocksDB's logs; a record header stands at the start of each
_HEADER = struct.Struct("<IHB")  # checksum, bytes that follow, type
_RECYCLED = frozenset({5, 6, 7, 8, 11})  # types of records in recycled logs, which neither HugeCTR nor hps uses
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4  # types of a record, and of the parts of one that is in several blocks
_BEGINNINGS = frozenset({_FULL, _FIRST})  # followed by a sequence number
_CONTINUATIONS = frozenset({_MIDDLE, _LAST})
_READ_BYTES = 1 << 20


class LogEnd(NamedTuple):
    """The length of a log, and the checksum of its content."""

    number: int
    size_bytes: int
    crc32: int


class LogSeal:
    """Follows the logs of a database that this process writes to, and stores the seal. *Thread-safe.*

    Call `reached` before a sync and `seal` with its result after it.

    Raises:
        OSError: the directory cannot be read or written; the next call may succeed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # held while the page cache is read and written, never during a sync
        self._closed_logs: tuple[LogEnd, ...] = ()
        self._end = LogEnd(-1, 0, 0)
        self._log = -1
        self._changed_ns = 0
        self._sealed: tuple[LogEnd, ...] = ()
        self._seal = os.open(path / SEAL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._seal_bytes = os.fstat(self._seal).st_size
        self._write(self.reached())

    def reached(self) -> tuple[LogEnd, ...]:
        """Return the lengths of the logs, oldest first. Reads only what was added since the last call."""
        with self._lock:
            before = self._end
            self._read_on()
            # A new log changes the directory's time, but the clock of that time ticks slowly. So an end that has not moved
            # since the last call is a reason to list the directory, too.
            changed_ns = os.stat(self._path).st_mtime_ns
            if changed_ns != self._changed_ns or self._end == before:
                self._find_newer_logs()
                self._changed_ns = changed_ns
            return (*self._closed_logs, self._end)

    @property
    def closed_logs(self) -> int:
        """Number of closed log files at the last call of `reached`."""
        return len(self._closed_logs)

    def seal(self, reached: tuple[LogEnd, ...]) -> None:
        """Store how far the logs reached before a successful sync."""
        with self._lock:
            if reached[-1] > self._sealed[-1]:
                self._write(reached)

    def close(self) -> None:
        """Remove logs that RocksDB deleted when it closed from the seal, and release the files."""
        with contextlib.suppress(OSError):  # an older seal is true, too
            present = logs_in(self._path)
            self._write(tuple(end for end in self._sealed if end.number in present))
        for file in (self._seal, self._log):
            if file >= 0:
                os.close(file)

    def _read_on(self) -> None:
        if self._log < 0:
            return
        number, size, crc = self._end
        length = os.fstat(self._log).st_size
        while size < length:
            data = os.pread(self._log, min(_READ_BYTES, length - size), size)
            size, crc = size + len(data), zlib.crc32(data, crc)
        self._end = LogEnd(number, size, crc)

    def _find_newer_logs(self) -> None:
        names = logs_in(self._path)
        self._closed_logs = tuple(end for end in self._closed_logs if end.number in names)
        for number in sorted(number for number in names if number > self._end.number):
            try:
                log = os.open(self._path / names[number], os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # its rows are in files, and it was deleted
                continue
            self._read_on()  # to its end, since RocksDB no longer writes to it
            if self._log >= 0:
                self._closed_logs += (self._end,)
                os.close(self._log)
            self._log, self._end = log, LogEnd(number, 0, 0)
            self._read_on()

    def _write(self, ends: tuple[LogEnd, ...]) -> None:
        body = json.dumps([end for end in ends if end.size_bytes])
        text = f'{{"crc32": {zlib.crc32(body.encode())}, "logs": {body}}}\n'.encode()
        # Not synced: a power cut leaves an older seal, which is true as well, or a half-written one, which fails its own
        # checksum and counts as none.
        os.pwrite(self._seal, text, 0)
        if len(text) < self._seal_bytes:
            os.ftruncate(self._seal, len(text))
        self._seal_bytes = len(text)
        self._sealed = ends


class CheckedLogs(NamedTuple):
    """The state of a closed database's logs.

    Attributes:
        sealed: whether there is a seal, so that the bytes behind it may be torn.
        damages: damage by name of the log; empty if all acknowledged rows are there.
        ends: sizes, by name, of logs with a record that would hang RocksDB behind this point.
    """

    sealed: bool
    damages: dict[str, str]
    ends: dict[str, int]


def logs_in(path: Path) -> dict[int, str]:
    """List the names of the logs in a directory, by number."""
    return {int(name[:-4]): name for name in os.listdir(path) if name.endswith(".log") and name[:-4].isdecimal()}


def check_logs(path: Path, oldest_needed: Callable[[], int]) -> CheckedLogs:
    """Compare the logs with their seal, and search for records that hang RocksDB. Nothing is changed.

    Args:
        path: the directory of a database that this process does not have open.
        oldest_needed: called if a sealed log is missing; the number of the oldest log that the MANIFEST still needs.

    Raises:
        DatabaseError: a log cannot be read.
    """
    damages, ends, missing = {}, {}, []
    try:
        seal, names = _read_seal(path), logs_in(path)
        for number, size, crc in seal or ():
            name = names.get(number, f"{number:06}.log")
            try:
                got = checksum_of(path / name, size)
            except FileNotFoundError:  # perhaps just deleted by a process that writes here
                missing.append(name)
                continue
            if got != (size, crc):
                damages[name] = (
                    f"its first {size} bytes had checksum {crc:#010x}, and now {got[0]} bytes with {got[1]:#010x} are there"
                )
        sizes = {number: size for number, size, _ in seal or ()}
        for number, name in names.items():
            intact = 0 if name in damages else sizes.get(number, 0)
            hangs = _hanging_record(path / name, intact // _BLOCK_BYTES * _BLOCK_BYTES)
            if hangs is not None:
                ends[name] = hangs
                if seal is None:
                    damages[name] = f"a record at {hangs} is damaged"
    except OSError as error:
        raise unreadable(path, error) from error
    if missing:
        oldest = oldest_needed()
        damages |= {name: "it is missing, and was not yet written to files" for name in missing if int(name[:-4]) >= oldest}
    return CheckedLogs(seal is not None, damages, ends)


def check_manifest(path: Path) -> None:
    """Refuse a MANIFEST, which has the format of a log, that would hang RocksDB."""
    try:
        name = (path / "CURRENT").read_text().strip()
        hangs = _hanging_record(path / name, 0)
    except (OSError, ValueError):  # missing, or not a file name: RocksDB reports it
        return
    if hangs is not None:
        raise damaged(path, name, f"a record at {hangs} is damaged")


def record_after(log: Path, sequence: int) -> int:
    """Find the offset of the first record that is later than `sequence` or lacks a part; else return the size."""
    data, at, first_part = log.read_bytes(), 0, None
    while at + _HEADER.size + 8 <= len(data):
        rest = _BLOCK_BYTES - at % _BLOCK_BYTES
        if rest < _HEADER.size:  # zeros up to the next block
            at += rest
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        body = at + _HEADER.size
        later = kind in _BEGINNINGS and int.from_bytes(data[body : body + 8], "little") > sequence
        if later or kind not in (_BEGINNINGS if first_part is None else _CONTINUATIONS):
            break
        first_part = at if kind == _FIRST else first_part if kind == _MIDDLE else None
        at = body + length
    return at if first_part is None else first_part


def damaged(path: Path, name: str, damage: str) -> DatabaseCorruptError:
    return DatabaseCorruptError(
        f"opening the database {path}: {path / name} is damaged: {damage}. Acknowledged rows would be missing unnoticed. "
        f"`hps check-database {path}` lists what is readable. {RESTORE}"
    )


def unreadable(path: Path, error: OSError) -> DatabaseError:
    return DatabaseError(f"opening the database {path}: {error}; this process must be able to read it")


def _read_seal(path: Path) -> list[LogEnd] | None:
    try:
        data = (path / SEAL).read_bytes()
    except FileNotFoundError:
        return None
    try:
        seal = json.loads(data)
        if zlib.crc32(json.dumps(seal["logs"]).encode()) != seal["crc32"]:
            return None
        return [LogEnd(*end) for end in seal["logs"]]
    except (ValueError, TypeError, KeyError):  # a power cut left half of it
        return None


def checksum_of(file_path: Path, size: int) -> tuple[int, int]:
    """Return the number of the first `size` bytes that a file has, and their CRC-32."""
    done = crc = 0
    with open(file_path, "rb") as file:
        while data := file.read(min(_READ_BYTES, size - done)):
            done, crc = done + len(data), zlib.crc32(data, crc)
    return done, crc


def _hanging_record(log: Path, start: int) -> int | None:
    """Find the first header that would hang RocksDB, from the block at `start` on; None if there is none."""
    with open(log, "rb") as file:
        file.seek(start)
        for at in itertools.count(start, _BLOCK_BYTES):
            block = file.read(_BLOCK_BYTES)
            if not block:
                return None
            place = 0
            while place + _HEADER.size <= len(block):
                _, length, kind = _HEADER.unpack_from(block, place)
                if kind in _RECYCLED:
                    return at + place
                if not length and not kind:
                    break
                place += _HEADER.size + length  # a wrong length leads past the end of the block, and the next one follows
    return None
