"""Recorded keys: what a server was asked, sampled, for plans and replays.

A key is recorded whenever it is asked for, or never: its hash alone decides (SHARDS: Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST 2015). So a recording of one key in a hundred says what a cache of any size would have done.

**The file** is a run of blocks, and only ever appended to. A block is `HPSB`, the bytes and the CRC-32 of its body (uint32,
little endian), and the body, compressed by zlib: a line of JSON and arrays. The line of the first block of a recording is
`{"version": 1, "rate": ..., "hashed": ...}`; a later recording in the same file begins with another. All other blocks hold keys
of one table: `{"model", "table", "n", "asked", "seconds"}`, then n int64 keys, n int64 numbers of lookups. A process that is
killed leaves a damaged block at the end, which readers leave out and the next recording cuts off.
"""

import errno
import json
import logging
import math
import os
import secrets
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
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, njit, uint64
from prometheus_client import Counter

from hps.errors import InvalidInputError, ModelFileError
from hps.lifetimes import close_at_exit, disown_in_children
from hps.numba_kernels import compile_kernels, kernel, read_only
from hps.types import IndexArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

_MAGIC: Final = b"HPSB"
_HEAD: Final = struct.Struct("<4sII")  # magic, bytes of the body, its CRC-32
_VERSION: Final = 1
_WRITE_EVERY_S: Final = 0.25
_MOST_WAITING_KEYS: Final = 1 << 20
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio; no hash of sets and buckets is like it
_BLOCK: Final = 16
_NONE: KeyArray = np.empty(0, np.int64)
_WHOLE: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class KeyTrace:
    """The recorded keys of one table, in the order of their lookups. *Immutable.*

    Attributes:
        model, table: whose keys these are.
        keys: (n,) int64; a hash of each where `hashed`.
        lookups: (n,) int64, ascending: the number of the lookup that each key was in.
        rate: the share of all distinct keys that was recorded, in (0, 1]; whether a key is recorded depends on the key alone
            (SHARDS), so that every recorded key is there each time it was asked for.
        seconds: how long the recording took, from its first key on.
        hashed: whether `keys` are hashes of the ids.
        asked: how many keys the table was asked for in that time, recorded or not, duplicates included.
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
        """The same recording as if it had been made at a lower rate."""
        if rate >= self.rate:
            return self
        share = rate / self.rate if self.hashed else rate  # hashes of the recorded keys are spread anew
        kept = sample_hashes(self.keys) < np.uint64(min(int(share * _WHOLE), _WHOLE - 1))
        return KeyTrace(
            self.model, self.table, self.keys[kept], self.lookups[kept], rate, self.seconds, self.hashed, self.asked
        )


@njit(inline="always")
def _hash(key: np.int64) -> np.uint64:
    """Spread a key over 64 bits, of which the upper ones count: one multiplication, so that several are done at once."""
    x = np.uint64(key)
    return (x ^ (x >> np.uint64(32))) * _MULTIPLIER


@kernel(int64, read_only(int64[::1]), uint64, int64[::1])
def _sample(keys: KeyArray, threshold: np.uint64, out: KeyArray) -> int:
    """Write the keys that are to be recorded to `out`, which has as much room, and return their number."""
    taken, whole = 0, keys.size // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        some = 0
        for i in range(_BLOCK):
            some += int(_hash(keys[start + i]) <= threshold)
        if some:
            for i in range(_BLOCK):
                if _hash(keys[start + i]) <= threshold:
                    out[taken] = keys[start + i]
                    taken += 1
    for i in range(whole, keys.size):
        if _hash(keys[i]) <= threshold:
            out[taken] = keys[i]
            taken += 1
    return taken


@kernel(uint64[::1], read_only(int64[::1]))
def _hashes(keys: KeyArray) -> npt.NDArray[np.uint64]:
    found = np.empty(keys.size, np.uint64)
    for i in range(keys.size):
        found[i] = _hash(keys[i])
    return found


def sample_hashes(keys: KeyArray) -> npt.NDArray[np.uint64]:
    """The hash of each key that decides whether it is recorded: (n,) uint64; at rate R those below R x 2^64 are."""
    compile_kernels()
    found: npt.NDArray[np.uint64] = _hashes(np.ascontiguousarray(keys, np.int64))
    return found


def keyed_hashes(keys: KeyArray, secret: bytes) -> KeyArray:
    """Hash keys so that nobody gets back to them without the secret: SipHash-2-4 (Aumasson and Bernstein, 2012).

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


class _Scratch(threading.local):
    """Memory of each thread for the keys of a segment that are recorded."""

    def __init__(self) -> None:
        self.keys: KeyArray = np.empty(1024, np.int64)


class KeyRecorder:
    """Records a sample of the keys of lookups in a file. *Thread-safe.*

    A lookup pays for the hash of its keys. A thread writes four times a second. What it cannot write ends the recording, with
    one line in the log, and never a lookup. Keys in the memory of a device are not recorded: to look at them would make the
    lookup wait for the device.

    Args:
        path: of the file; an earlier recording in it is continued by another one.
        rate: the share of distinct keys to record, in (0, 1].
        max_bytes: the recording ends when the file is as large.
        hash_keys: store hashes of the keys under a secret that is never stored. Equal keys have equal hashes.
        outcomes: counts keys by `outcome`: recorded, dropped (the writer was too slow), unread (on a device), lost.

    Raises:
        InvalidInputError: the rate is out of range, or the file is something else than recordings.
        ModelFileError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rate: float = 0.01,
        max_bytes: int = 256 << 20,
        hash_keys: bool = False,
        outcomes: Counter | None = None,
    ) -> None:
        if not 0 < rate <= 1:
            raise InvalidInputError(f"recording keys to {path}: got a rate of {rate}, expected more than 0 and at most 1")
        compile_kernels()
        self.path = Path(path)
        self._outcomes = outcomes
        self._threshold = np.uint64(min(int(rate * _WHOLE), _WHOLE) - 1)
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(16) if hash_keys else None
        self._numbers = count()
        self._scratch = _Scratch()
        self._waiting: deque[tuple[int, TableSpec, int, KeyArray]] = deque()
        self._waiting_keys = 0
        self._dropped = self._unread = 0
        self._ended = False
        self._closed = threading.Event()
        self._closing = threading.Lock()
        try:
            self._file = _opened(self.path)
            self._write({"version": _VERSION, "rate": rate, "hashed": hash_keys})
        except OSError as error:
            raise ModelFileError(f"recording keys to {path}: {error}; it must be possible to write there") from error
        self._thread = threading.Thread(target=self._run, name="hps-key-trace", daemon=True)
        self._thread.start()
        close_at_exit(self, KeyRecorder.close)
        disown_in_children(self)

    def record(self, tables: Sequence[TableSpec], segments: Sequence[Any]) -> None:
        """Record a lookup: segments of these tables. It waits for nothing, and raises nothing."""
        if self._ended:
            return
        number = next(self._numbers)
        if self._waiting_keys > _MOST_WAITING_KEYS:
            self._dropped += sum(segment.n for segment in segments)
            return
        for segment in segments:
            keys, n = segment.keys, segment.n
            if type(keys) is not np.ndarray:
                self._unread += n
                continue
            scratch = self._room(n)
            try:
                taken = _sample(keys, self._threshold, scratch)
            except TypeError:  # what is not aligned
                taken = _sample(np.array(keys, np.int64), self._threshold, scratch)
            self._waiting_keys += taken + 8  # so many for the entry itself; threads may miscount a little
            self._waiting.append((number, tables[segment.table], n, scratch[:taken].copy() if taken else _NONE))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, and end the recording. Closing twice changes nothing."""
        self._ended = True
        self._closed.set()
        self._thread.join(timeout_s)
        if not self._closing.acquire(blocking=False):  # the disk does not answer, and the thread keeps the file
            return
        try:
            self._file.close()
        except OSError as error:
            _log.warning("closing the recording %s: %s", self.path, error)
        finally:
            self._closing.release()

    def disown(self) -> None:
        """In a forked child, where the thread is not: record nothing."""
        self._ended, self._closed = True, threading.Event()

    def __enter__(self) -> "KeyRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _room(self, n: int) -> KeyArray:
        """Memory of this thread for so many keys."""
        scratch: KeyArray = self._scratch.keys
        if scratch.size < n:
            scratch = self._scratch.keys = np.empty(1 << (n - 1).bit_length(), np.int64)
        return scratch

    def _run(self) -> None:
        started, ended = 0.0, False
        while not ended:
            ended = self._closed.wait(_WRITE_EVERY_S)
            if not started and self._waiting:  # models may have been loaded until now
                started = time.monotonic() - _WRITE_EVERY_S
            try:
                with self._closing:
                    self._write_waiting(time.monotonic() - started)
                    size_bytes = self._file.tell()
            except (OSError, ValueError) as error:  # a closed file is a ValueError
                _log.warning("recording keys to %s ended: %s; lookups go on", self.path, error)
                break
            if size_bytes >= self._max_bytes and not ended:
                _log.warning("recording keys to %s ended: it has %s bytes, which is enough", self.path, f"{size_bytes:,}")
                break
        self._ended = True
        self._waiting.clear()

    def _write_waiting(self, seconds: float) -> None:
        batches: dict[TableSpec, list[tuple[int, int, KeyArray]]] = {}
        for _ in range(len(self._waiting)):
            number, table, n, keys = self._waiting.popleft()
            batches.setdefault(table, []).append((number, n, keys))
        self._waiting_keys = 0
        for outcome, keys_count in (("dropped", self._dropped), ("unread", self._unread)):
            self._count(outcome, keys_count)
        self._dropped = self._unread = 0
        for table, batch in batches.items():
            keys = np.concatenate([one for _, _, one in batch])
            lookups = np.repeat(np.array([number for number, _, _ in batch], np.int64), [one.size for _, _, one in batch])
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
        body = zlib.compress(b"".join([line, *(one.astype("<i8").tobytes() for one in arrays)]), 1)
        block = _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body
        if self._file.write(block) < len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, outcome: str, keys: int) -> None:
        if self._outcomes is not None and keys:
            self._outcomes.labels(outcome).inc(keys)


def read_traces(path: str | os.PathLike[str]) -> list[KeyTrace]:
    """Read the recordings of a file: one trace for each table of each.

    Raises:
        ModelFileError: it is not one, or is damaged elsewhere than at its end.
    """
    traces: list[KeyTrace] = []
    recording: dict[str, Any] = {}
    parts: dict[tuple[str, str], list[tuple[dict[str, Any], KeyArray]]] = {}
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ModelFileError(f"reading recorded keys from {path}: {error}") from error
    for body, _ in _blocks(content, path):
        line, _, data = body.partition(b"\n")
        about = json.loads(line)
        if "version" in about:
            if about["version"] != _VERSION:
                raise ModelFileError(
                    f"reading recorded keys from {path}: got version {about['version']}, expected {_VERSION}; read it with the "
                    "release that wrote it"
                )
            traces += _traces(recording, parts)
            recording, parts = about, {}
        else:
            parts.setdefault((about["model"], about["table"]), []).append((about, np.frombuffer(data, "<i8").reshape(2, -1)))
    return [*traces, *_traces(recording, parts)]


def _traces(
    recording: dict[str, Any], parts: dict[tuple[str, str], list[tuple[dict[str, Any], KeyArray]]]
) -> Iterator[KeyTrace]:
    for (model, table), blocks in parts.items():
        keys, lookups = np.concatenate([rows for _, rows in blocks], axis=1)
        order = np.argsort(lookups, kind="stable")  # threads hand their lookups over in nearly this order
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


def _blocks(content: bytes, path: str | os.PathLike[str]) -> Iterator[tuple[bytes, int]]:
    """The bodies of the whole blocks, and where each ends.

    Raises:
        ModelFileError: it does not begin with a block, or one that is damaged is followed by others.
    """
    at = 0
    while at < len(content):
        head = content[at : at + _HEAD.size]
        magic, size, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        body = content[at + _HEAD.size : at + _HEAD.size + size]
        if magic != _MAGIC or len(body) < size or zlib.crc32(body) != crc:
            if at == 0 or content.find(_MAGIC, at + 1) >= 0:
                raise ModelFileError(f"reading recorded keys from {path}: got damage at byte {at}, expected a block of keys")
            return
        at += _HEAD.size + size
        yield zlib.decompress(body), at


def _opened(path: Path) -> FileIO:
    """Open a file for appending, without a damaged end."""
    if path.exists() and path.stat().st_size:
        ends = [end for _, end in _blocks(path.read_bytes(), path)]
        os.truncate(path, ends[-1])
    return open(path, "ab", buffering=0)


def distinct_share(trace: KeyTrace, most: int) -> float:
    """The highest rate at which a recording has at most so many distinct keys (SHARDS with a fixed size)."""
    hashes = np.sort(sample_hashes(np.unique(trace.keys)))
    if hashes.size <= most:
        return trace.rate
    share = math.ldexp(float(hashes[most]), -64)
    return share * trace.rate if trace.hashed else share
