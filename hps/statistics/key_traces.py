"""Recordings of requested keys: a sample of a server's lookups, for planning and replay.

A key is recorded either at every request or never, depending only on its hash (SHARDS: Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST 2015). A recording of one key in a hundred thus predicts the hit rate of a cache of any size.

**The file** is a sequence of blocks, and append-only. A block is `HPSB`, the size and the CRC-32 of its body (uint32, little
endian), and the body, compressed by zlib: a line of JSON and arrays. The line of a recording's first block is
`{"version": 1, "rate": ..., "hashed": ...}`; a later recording in the same file starts with another. All other blocks hold keys
of one table: `{"model", "table", "n", "asked", "seconds"}`, then n int64 keys, n int64 lookup numbers. A process that is killed
leaves a damaged block at the end, which readers skip and the next recording truncates.
"""

import errno
import io
import json
import logging
import math
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import count
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, njit, uint64

from hps.errors import InvalidInputError, ModelFileError
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.ground.threads.lifetimes import close_at_exit, disown_in_children
from hps.ground.threads.workers import PeriodicTask
from hps.statistics.prometheus import Values
from hps.types import IndexArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

TRACE_MAGIC: Final = b"HPSB"
"""The first bytes of a recording, and of each of its blocks."""

_HEAD: Final = struct.Struct("<4sII")  # magic, size of the body, its CRC-32
_VERSION: Final = 1
_WRITE_EVERY_S: Final = 0.25
_MOST_WAITING_KEYS: Final = 1 << 20
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio; unrelated to the hashes of sets and buckets
_BLOCK: Final = 16
_NONE: KeyArray = np.empty(0, np.int64)
_HASHES: Final = 1 << 64
_MOST_BLOCK_BYTES: Final = 1 << 28
_MOST_LINE_BYTES: Final = 1 << 16
_INFLATED_BYTES: Final = 64 << 20
# A recording inflates to at most this many times its size beyond `_INFLATED_BYTES`; recorded keys to some 4 times.
_INFLATED_RATIO: Final = 32


@dataclass(frozen=True, slots=True)
class KeyTrace:
    """The recorded keys of one table, in the order of their lookups. *Immutable.*

    Attributes:
        keys: (n,) int64; hashes of the ids if `hashed`.
        lookups: (n,) int64, ascending: the number of each key's lookup.
        rate: share of all distinct keys that is sampled, in (0, 1]. Every request of a sampled key is recorded (SHARDS).
        seconds: duration of the recording, from its first key on.
        asked: requested keys of the table in that time, recorded or not, including duplicates.
    """

    model: str
    table: str
    keys: KeyArray
    lookups: IndexArray
    rate: float
    seconds: float
    hashed: bool
    asked: int = 0

    def thinned(self, rate: float) -> "KeyTrace":
        """Return the recording that a lower rate would have produced."""
        if rate >= self.rate:
            return self
        share = rate / self.rate if self.hashed else rate  # the hashes of recorded keys are uniform again
        chosen = sample_hashes(self.keys) < np.uint64(min(int(share * _HASHES), _HASHES - 1))
        return KeyTrace(
            self.model, self.table, self.keys[chosen], self.lookups[chosen], rate, self.seconds, self.hashed, self.asked
        )


@njit(inline="always")
def _hash(key: np.int64) -> np.uint64:
    """Hash a key to 64 bits, with the entropy in the upper ones; a single multiplication, so that the loop vectorises."""
    x = np.uint64(key)
    return (x ^ (x >> np.uint64(32))) * _MULTIPLIER


@kernel(int64, read_only(int64[::1]), uint64, int64[::1])
def _sample(keys: KeyArray, threshold: np.uint64, out: KeyArray) -> int:
    sampled, end = 0, keys.size // _BLOCK * _BLOCK
    for start in range(0, end, _BLOCK):
        matches = 0
        for i in range(_BLOCK):
            matches += int(_hash(keys[start + i]) <= threshold)
        if matches:
            for i in range(_BLOCK):
                if _hash(keys[start + i]) <= threshold:
                    out[sampled] = keys[start + i]
                    sampled += 1
    for i in range(end, keys.size):
        if _hash(keys[i]) <= threshold:
            out[sampled] = keys[i]
            sampled += 1
    return sampled


@kernel(uint64[::1], read_only(int64[::1]))
def _hash_all(keys: KeyArray) -> npt.NDArray[np.uint64]:
    found = np.empty(keys.size, np.uint64)
    for i in range(keys.size):
        found[i] = _hash(keys[i])
    return found


def sample_hashes(keys: KeyArray) -> npt.NDArray[np.uint64]:
    """Return the hash of each key, (n,) uint64, that decides on its sampling: at rate R, hashes below R x 2^64 are sampled."""
    hashes: npt.NDArray[np.uint64] = _hash_all(np.ascontiguousarray(keys, np.int64))
    return hashes


def keyed_hashes(keys: KeyArray, secret: bytes) -> KeyArray:
    """Hash keys irreversibly without the secret: SipHash-2-4 (Aumasson and Bernstein, 2012).

    Args:
        keys: (n,) int64.
        secret: 16 bytes.
    """
    k0, k1 = (np.uint64(half) for half in struct.unpack("<QQ", secret))
    message = np.asarray(keys, np.int64).view(np.uint64)
    start = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [np.full(message.size, np.uint64(word) ^ key, np.uint64) for word, key in zip(start, (k0, k1, k0, k1), strict=True)]

    def rotated(x: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
        turned: npt.NDArray[np.uint64] = (x << np.uint64(by)) | (x >> np.uint64(64 - by))
        return turned

    def rounds(times: int) -> None:
        for _ in range(times):
            v[0] += v[1]
            v[2] += v[3]
            v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2] += v[1]
            v[0] += v[3]
            v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    for word in (message, np.uint64(8 << 56)):  # the last word holds the length
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= np.uint64(0xFF)
    rounds(4)
    hashed: KeyArray = (v[0] ^ v[1] ^ v[2] ^ v[3]).view(np.int64)
    return hashed


class KeyRecorder:
    """Records a sample of the keys of lookups in a file. *Thread-safe.*

    A lookup pays only for hashing its keys; a background thread writes four times a second. A write error ends the recording,
    with one log line, and affects no lookup. Keys in device memory are not recorded.

    Args:
        path: output file; appends to earlier recordings.
        rate: share of distinct keys to record, in (0, 1].
        max_bytes: file size at which the recording ends.
        hash_keys: store hashes of the keys, under a secret that is never stored. Equal keys have equal hashes.
        outcomes: counts keys by `outcome`: recorded, dropped (the writer was too slow), unread (on a device), lost.

    Raises:
        InvalidInputError: the rate is out of range, or the file is not a recording.
        ModelFileError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rate: float = 0.01,
        max_bytes: int = 256 << 20,
        hash_keys: bool = False,
        outcomes: Values | None = None,
    ) -> None:
        if not 0 < rate <= 1:
            raise InvalidInputError(f"recording keys to {path}: got a rate of {rate}, expected more than 0 and at most 1")
        compile_kernels(_sample)
        self.path = Path(path)
        self._outcomes = outcomes
        self._threshold = np.uint64(min(int(rate * _HASHES), _HASHES) - 1)
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(16) if hash_keys else None
        self._numbers = count()
        self._scratch = threading.local()  # has `keys`, the sampled ones of a segment
        self._waiting: deque[tuple[int, TableSpec, int, KeyArray]] = deque()
        self._waiting_keys = 0
        self._dropped = self._unread = 0
        self._started_at = 0.0  # time of the first key
        self._ended = False
        self._writing = threading.Lock()
        try:
            self._file = _opened(self.path)
            self._write({"version": _VERSION, "rate": rate, "hashed": hash_keys})
        except OSError as error:
            raise ModelFileError(f"recording keys to {path}: {error}; expected a writable file") from error
        # `PeriodicTask` keeps a bound method weakly, but a recording without references continues until it is closed.
        self._task = PeriodicTask("key-trace", lambda: self._write_waiting(), _WRITE_EVERY_S)
        close_at_exit(self, KeyRecorder.close)
        disown_in_children(self)

    def record(self, tables: Sequence[TableSpec], batch: Any) -> None:
        """Record the keys of a `Batch` of these tables. Never waits or raises."""
        if self._ended:
            return
        number = next(self._numbers)
        if self._waiting_keys > _MOST_WAITING_KEYS:
            self._dropped += sum(batch.sizes)
            return
        if batch.joined:  # in device memory: reading them would make the lookup wait for the device
            self._unread += sum(batch.sizes)
            return
        for table, n, keys in zip(batch.tables, batch.sizes, batch.keys, strict=True):
            if type(keys) is not np.ndarray:
                self._unread += n
                continue
            scratch = self._room(n)
            try:
                count = _sample(keys, self._threshold, scratch)
            except TypeError:  # unaligned keys
                count = _sample(np.array(keys, np.int64), self._threshold, scratch)
            self._waiting_keys += count + 8  # 8 for the entry itself; races may miscount slightly
            self._waiting.append((number, tables[table], n, scratch[:count].copy() if count else _NONE))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the waiting keys, and end the recording. Idempotent."""
        self._ended = True
        if not self._task.abandon(timeout_s) or not self._writing.acquire(blocking=False):
            return  # the disk does not answer; the thread keeps the file
        try:
            if not self._file.closed:
                self._write_keys()
            self._file.close()
        except OSError as error:
            _log.warning("closing the recording %s: %s", self.path, error)
        finally:
            self._writing.release()

    def disown(self) -> None:
        """In a forked child, which lacks the thread: stop recording."""
        self._ended = True
        self._waiting.clear()

    def __enter__(self) -> "KeyRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _room(self, n: int) -> KeyArray:
        scratch: KeyArray = getattr(self._scratch, "keys", _NONE)
        if scratch.size < n:
            scratch = self._scratch.keys = np.empty(max(1024, 1 << (n - 1).bit_length()), np.int64)
        return scratch

    def _write_waiting(self) -> None:
        """Write the waiting keys; end the recording on an error or at the maximum size."""
        try:
            with self._writing:
                self._write_keys()
                if self._file.tell() < self._max_bytes:
                    return
            why = f"the file has reached {self._max_bytes:,} bytes"
        except OSError as error:
            why = f"{error}; lookups continue"
        _log.warning("recording keys to %s ended: %s", self.path, why)
        self._ended = True
        self._waiting.clear()
        self._task.stop.set()

    def _write_keys(self) -> None:
        now = time.monotonic()
        if not self._started_at and self._waiting:  # earlier time may have gone into loading models
            self._started_at = now - _WRITE_EVERY_S
        seconds = now - self._started_at
        batches: dict[TableSpec, list[tuple[int, int, KeyArray]]] = {}
        for _ in range(len(self._waiting)):
            number, table, n, keys = self._waiting.popleft()
            batches.setdefault(table, []).append((number, n, keys))
        self._waiting_keys = 0
        for outcome, keys_count in (("dropped", self._dropped), ("unread", self._unread)):
            self._count(outcome, keys_count)
        self._dropped = self._unread = 0
        for table, batch in batches.items():
            keys = np.concatenate([part for _, _, part in batch])
            lookups = np.repeat(np.array([number for number, _, _ in batch], np.int64), [part.size for _, _, part in batch])
            asked = sum(n for _, n, _ in batch)
            about = {
                "model": table.model_name,
                "table": table.table_name,
                "n": int(keys.size),
                "asked": asked,
                "seconds": round(seconds, 3),
            }
            stored = keys if self._secret is None else keyed_hashes(keys, self._secret)
            try:
                self._write(about, stored, lookups)
            except OSError:
                self._count("lost", keys.size)
                raise
            self._count("recorded", keys.size)

    def _write(self, about: dict[str, Any], *arrays: np.ndarray) -> None:
        line = json.dumps(about).encode() + b"\n"
        body = zlib.compress(b"".join([line, *(array.astype("<i8").tobytes() for array in arrays)]), 1)
        block = _HEAD.pack(TRACE_MAGIC, len(body), zlib.crc32(body)) + body
        if self._file.write(block) < len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, outcome: str, keys: int) -> None:
        if self._outcomes is not None and keys:
            self._outcomes.labels(outcome).inc(keys)


def read_traces(path: str | os.PathLike[str], content: bytes | None = None) -> list[KeyTrace]:
    """Read the recordings of a file: one trace per table and recording.

    Args:
        content: of the file, if it was read; the path is then for errors alone.

    Raises:
        ModelFileError: the file is not a recording, or is damaged before its end.
    """
    traces: list[KeyTrace] = []
    recording: dict[str, Any] = {}
    parts: dict[tuple[str, str], list[tuple[dict[str, Any], KeyArray]]] = {}
    try:
        with _open_recording(Path(path)) if content is None else io.BytesIO(content) as file:
            for body, end in _blocks(file, path):
                line, _, data = body.partition(b"\n")
                about = _about(
                    line, len(data), not recording, f"reading recorded keys from {path}: the block before byte {end}"
                )
                if "version" in about:
                    traces += _traces(recording, parts)
                    recording, parts = about, {}
                else:
                    rows = np.frombuffer(data, "<i8").reshape(2, -1)
                    if rows[1].size and rows[1].min() < 0:
                        raise ModelFileError(
                            f"reading recorded keys from {path}: got a lookup number below 0 before byte {end}"
                        )
                    parts.setdefault((about["model"], about["table"]), []).append((about, rows))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"reading recorded keys from {path}: {error}") from error
    return [*traces, *_traces(recording, parts)]


def _about(line: bytes, data_bytes: int, first: bool, doing: str) -> dict[str, Any]:
    """Read the line of JSON of a block; refuse one that this release cannot have written."""
    try:
        about: Any = json.loads(line) if len(line) <= _MOST_LINE_BYTES else None
    except (ValueError, RecursionError):
        about = None
    if isinstance(about, dict) and "version" in about and about["version"] != _VERSION:
        raise ModelFileError(
            f"{doing}: got version {about['version']!r:.20}, expected {_VERSION}; read it with the release that wrote it"
        )
    try:
        if "version" in about:
            good = 0 < about["rate"] <= 1 and type(about["hashed"]) is bool and not data_bytes
        else:
            n, asked, seconds = about["n"], about["asked"], about["seconds"]
            good = not first and type(about["model"]) is type(about["table"]) is str and type(n) is type(asked) is int
            good = good and 0 <= n <= asked < 1 << 48 and data_bytes == 16 * n and 0 <= seconds < math.inf
    except (TypeError, KeyError):
        good = False
    if not good:
        raise ModelFileError(f"{doing} is not one of a recording: got {line[:60]!r} and {data_bytes} bytes")
    return dict(about)


def _traces(
    recording: dict[str, Any], parts: dict[tuple[str, str], list[tuple[dict[str, Any], KeyArray]]]
) -> Iterator[KeyTrace]:
    for (model, table), blocks in parts.items():
        keys, lookups = np.concatenate([rows for _, rows in blocks], axis=1)
        order = np.argsort(lookups, kind="stable")  # threads deliver lookups in nearly this order
        yield KeyTrace(
            model,
            table,
            keys[order],
            lookups[order],
            recording["rate"],
            blocks[-1][0]["seconds"],
            recording["hashed"],
            sum(about["asked"] for about, _ in blocks),
        )


def _open_recording(path: Path) -> IO[bytes]:
    """Open a file for reading. Pipes and devices have no end, and are refused."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file")
    return file


def _blocks(file: IO[bytes], path: str | os.PathLike[str]) -> Iterator[tuple[bytes, int]]:
    """Yield the body and end position of each complete block, one in memory at a time.

    Raises:
        ModelFileError: the file does not begin with a block, a damaged one is followed by others, or it inflates to far more
            than a recording does.
    """
    at, size_bytes = 0, file.seek(0, os.SEEK_END)
    file.seek(0)
    room = _INFLATED_BYTES + _INFLATED_RATIO * size_bytes
    while head := file.read(_HEAD.size):
        magic, size, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        body = file.read(min(size, size_bytes)) if magic == TRACE_MAGIC and size <= _MOST_BLOCK_BYTES else b""
        if not body or len(body) < size or zlib.crc32(body) != crc:
            if at == 0 or _magic_after(file, at):
                raise ModelFileError(f"reading recorded keys from {path}: got damage at byte {at}, expected a block of keys")
            return
        inflater = zlib.decompressobj()
        try:
            inflated = inflater.decompress(body, room + 1)
        except zlib.error as error:
            raise ModelFileError(f"reading recorded keys from {path}: the block at byte {at}: {error}") from error
        room -= len(inflated)
        if room < 0 or not inflater.eof:
            raise ModelFileError(
                f"reading recorded keys from {path}: the block at byte {at} inflates to more than recorded keys do"
            )
        at += _HEAD.size + size
        yield inflated, at


def _magic_after(file: IO[bytes], at: int) -> bool:
    """Return whether another block may start after the one at `at`."""
    file.seek(at + 1)
    before = b""
    while data := file.read(1 << 20):
        if TRACE_MAGIC in before + data:
            return True
        before = data[1 - len(TRACE_MAGIC) :]
    return False


def _opened(path: Path) -> FileIO:
    """Open a file for appending, without its damaged end."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, "it is a pipe, and opening it would wait for a reader")
    if path.exists() and path.stat().st_size:
        with _open_recording(path) as file:
            ends = [end for _, end in _blocks(file, path)]
        os.truncate(path, ends[-1])
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666), "ab", buffering=0)


def distinct_share(trace: KeyTrace, most: int) -> float:
    """Return the highest rate that leaves a recording at most this many distinct keys (fixed-size SHARDS)."""
    hashes = np.sort(sample_hashes(np.unique(trace.keys)))
    if hashes.size <= most:
        return trace.rate
    share = math.ldexp(float(hashes[most]), -64)
    return share * trace.rate if trace.hashed else share
