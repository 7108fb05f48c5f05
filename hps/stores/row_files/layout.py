"""The format of a row file, and the kernels that read and write its parts.

A row file holds the rows of one table at one moment, and never changes. All numbers are little-endian:

    head           4,096 bytes: `MAGIC`, then a JSON object (`FileHead`) padded with zeros, then the checksum of all before it
    records        (rows, 2 + width) uint32: a key (int64) and its row (`ground/rows.py`), in the order of the keys' hash
    starts         (buckets + 1,) uint32: the number of the first record of each bucket
    fingerprints   (rows,) uint8: the low byte of each key's hash
    sums           (pages,) uint64: the checksum of each page of 4,096 bytes, from the records to the end of the fingerprints

Each part begins at a multiple of 4,096 bytes. The hash is `share_hash` (`ground/hashing.py`), a bijection: so equal hashes are
equal keys, the order of a file is total, and a share of a table is a range of its records. Bucket `scale(hash, buckets)` has
the records from its start to the next one's, four on average. A lookup thus reads two starts, some fingerprints, which lie
together in two bytes a row, and one record, which is a key and its row side by side: nothing else is read, and no space is left
between records. Pages with fixed numbers of slots, the usual layout, waste a fifth of the file, and read three to five times as
many lines (benchmarks/bench_row_files.py).
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
from numba import int64, njit, types, uint8, uint32, uint64

from hps.ground.hashing import mix, scale, share_hash
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.shares import SHARE_SEED

MAGIC: Final = b"HPSROWS\0"
VERSION: Final = 2
PAGE_BYTES: Final = 4096
ROWS_A_BUCKET: Final = 4
"""Records of a bucket, on average. Two take another byte a row and save a fifth of the time; eight take more time."""
HASH: Final = f"rrxmrrxmsx_0(key ^ 0x{int(SHARE_SEED) % (1 << 64):X})"
"""Name of the hash of keys, for readers of other programs; `share_hash` computes it."""
MOST_ROWS: Final = (1 << 32) - 1
"""Starts are numbers of 32 bits."""

_MOST_SPARSE: Final = 8
_LOW: Final = np.uint64(0xFFFFFFFF)
_HEAD = struct.Struct("<8sII")
_SUM = struct.Struct("<Q")

_void: Any = types.void
_KEYS: Any = read_only(int64[::1])
_RECORDS, _STARTS, _FINGERPRINTS = read_only(uint32[:, ::1]), read_only(uint32[::1]), read_only(uint8[::1])
_SUMS = read_only(uint64[::1])


class RowFacts(NamedTuple):
    """What is known of the rows of a file beside their width."""

    row_dtype: str = "float32"  # how they are stored: `hps.types.ROW_DTYPES`
    dim: int = 0  # elements of a vector; 0 if unknown
    nonfinite_rows: int = -1  # at most so many rows have an infinity or NaN; -1 if unknown
    least_key: int = -(1 << 63)  # no key is smaller
    greatest_key: int = (1 << 63) - 1  # no key is greater


@dataclass(frozen=True, slots=True)
class FileHead:
    """What a row file says of itself, enough to read it without a configuration. *Immutable.*

    Attributes:
        tag: the table; empty for a file of a model version, which any table of its width may take.
        width: words of 4 bytes of a row.
        rows: number of records.
        buckets: number of buckets.
        source: identifies what the rows came from, e.g. the fingerprint of model files.
        sums: checksum of the part `sums`.
        content: fingerprint of records and index, 32 hexadecimal digits, the same wherever the file lies; empty if unknown.
        row_dtype, dim, nonfinite_rows, least_key, greatest_key: see `RowFacts`.
        share: `index/of` in a local copy that has the pages of this share alone (`ranges.py`), and holes elsewhere; else empty.
        hash, page_bytes: name of the hash, size of a page.
    """

    tag: str
    width: int
    rows: int
    buckets: int
    source: str
    sums: int
    content: str = ""
    row_dtype: str = "float32"
    dim: int = 0
    nonfinite_rows: int = -1
    least_key: int = -(1 << 63)
    greatest_key: int = (1 << 63) - 1
    share: str = ""
    hash: str = HASH
    page_bytes: int = PAGE_BYTES

    @property
    def facts(self) -> RowFacts:
        return RowFacts(self.row_dtype, self.dim, self.nonfinite_rows, self.least_key, self.greatest_key)

    @property
    def record_bytes(self) -> int:
        return 8 + 4 * self.width

    @property
    def records_at(self) -> int:
        return PAGE_BYTES

    @property
    def starts_at(self) -> int:
        return self.records_at + _padded(self.rows * self.record_bytes)

    @property
    def fingerprints_at(self) -> int:
        return self.starts_at + _padded(4 * (self.buckets + 1))

    @property
    def sums_at(self) -> int:
        return self.fingerprints_at + _padded(self.rows)

    @property
    def pages(self) -> int:
        return (self.sums_at - self.records_at) // PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.sums_at + 8 * self.pages

    def packed(self) -> bytes:
        """Encode the head, 4,096 bytes."""
        text = json.dumps(asdict(self)).encode()
        content = (_HEAD.pack(MAGIC, VERSION, len(text)) + text).ljust(PAGE_BYTES - _SUM.size, b"\0")
        if len(content) > PAGE_BYTES - _SUM.size:
            raise ValueError(f"its head has {len(content):,} bytes, expected at most {PAGE_BYTES - _SUM.size:,}")
        return content + _SUM.pack(checksum(np.frombuffer(content, np.uint8)))

    @classmethod
    def unpacked(cls, content: bytes) -> "FileHead":
        """Decode a head.

        Raises:
            ValueError: the bytes are not a head that this release reads; the text says why.
        """
        if len(content) != PAGE_BYTES or content[: len(MAGIC)] != MAGIC:
            raise ValueError("it is not a row file")
        _, version, length = _HEAD.unpack_from(content)
        if version != VERSION:
            raise ValueError(f"got version {version} of the format, expected {VERSION}: load or seal the table again")
        if _SUM.unpack(content[-_SUM.size :])[0] != checksum(np.frombuffer(content[: -_SUM.size], np.uint8)):
            raise ValueError("its head is damaged")
        read = json.loads(content[_HEAD.size : _HEAD.size + length])
        head = cls(**{field.name: read[field.name] for field in fields(cls) if field.name in read})  # later ones may say more
        if (head.hash, head.page_bytes) != (HASH, PAGE_BYTES):
            raise ValueError(f"got hash {head.hash}, pages of {head.page_bytes} bytes; expected {HASH}, {PAGE_BYTES}")
        if min(head.width, head.buckets) < 1 or not 0 <= head.rows <= MOST_ROWS:
            raise ValueError(f"got {head.rows} rows of {head.width} words in {head.buckets} buckets")
        return head


def content_fingerprint(head: FileHead, sums: np.ndarray) -> str:
    """Identify the content of a file by its geometry and the checksums of its pages, (pages,) uint64."""
    digest = hashlib.blake2b(
        json.dumps([head.width, head.rows, head.buckets, head.row_dtype, head.dim]).encode(), digest_size=16
    )
    digest.update(sums.data.cast("B") if sums.size else b"")
    return digest.hexdigest()


def buckets_for(rows: int, of: int = 1) -> int:
    """Return the number of buckets of a file with at most this many rows, all of one of `of` shares.

    Its rows lie in the buckets of that share. All buckets take a byte a row for each share, so from eight on they are fuller.
    """
    return max(1, min(rows * min(of, _MOST_SPARSE) // ROWS_A_BUCKET, 1 << 31))


def lowest_hash(bucket: int, buckets: int) -> int:
    """Return the lowest hash of a bucket; 2^64 for the one after the last."""
    return -(-(bucket << 32) // buckets) << 32


def _padded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


# -- reading -----------------------------------------------------------------------------------------------------------


@njit(inline="always")
def first_record(starts, bucket, rows):  # type: ignore[no-untyped-def]
    """Return the number of the first record of a bucket; never outside of the file, whatever a damaged page says."""
    return min(np.int64(starts[bucket]), np.int64(rows))


@njit(inline="always")
def _fingerprint(hashed):  # type: ignore[no-untyped-def]
    return np.uint8(hashed & np.uint64(255))


@njit(inline="always")
def fingerprint_of(key):  # type: ignore[no-untyped-def]
    return _fingerprint(share_hash(key))


@njit(inline="always")
def holds_key(records, row, key):  # type: ignore[no-untyped-def]
    word = np.uint64(key)
    return records[row, 0] == np.uint32(word & _LOW) and records[row, 1] == np.uint32(word >> np.uint64(32))


@njit(inline="always")
def _key_of(records, row):  # type: ignore[no-untyped-def]
    return np.int64(np.uint64(records[row, 0]) | (np.uint64(records[row, 1]) << np.uint64(32)))


@kernel(int64, _RECORDS, int64, int64, int64, int64[::1], uint32[:, ::1])
def split_records(records, start, stop, at, keys, out):  # type: ignore[no-untyped-def]
    """Copy keys and rows of records [start, stop) to `keys` and `out` from position `at` on; return the next position."""
    for row in range(start, stop):
        keys[at] = _key_of(records, row)
        for word in range(out.shape[1]):
            out[at, word] = records[row, 2 + word]
        at += 1
    return at


# -- checksums ---------------------------------------------------------------------------------------------------------

_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)
_LANES: Final = 4


@njit(inline="always")
def _rotated(value, bits):  # type: ignore[no-untyped-def]
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@njit(inline="always")
def sum_of(words, start, stop):  # type: ignore[no-untyped-def]
    """Return the checksum of words [start, stop), a multiple of four: four chains of multiply and rotate, then mixed."""
    a, b, c, d = _PRIME, _PRIME + np.uint64(1), _PRIME + np.uint64(2), _PRIME + np.uint64(3)
    for i in range(start, stop, _LANES):
        a = _rotated((a ^ words[i]) * _PRIME, 29)
        b = _rotated((b ^ words[i + 1]) * _PRIME, 31)
        c = _rotated((c ^ words[i + 2]) * _PRIME, 33)
        d = _rotated((d ^ words[i + 3]) * _PRIME, 37)
    return mix(np.int64(a ^ mix(np.int64(b ^ mix(np.int64(c ^ mix(np.int64(d))))))))


@kernel(_void, _SUMS, uint64[::1])
def sum_pages(words, sums):  # type: ignore[no-untyped-def]
    """Compute the checksum of each page of 512 words."""
    for page in range(sums.size):
        sums[page] = sum_of(words, 512 * page, 512 * page + 512)


@kernel(int64, _SUMS, _SUMS, int64, int64)
def damaged_page(words, sums, start, stop):  # type: ignore[no-untyped-def]
    """Return the first of pages [start, stop) whose checksum is wrong, or -1."""
    for page in range(start, stop):
        if sum_of(words, 512 * page, 512 * page + 512) != sums[page]:
            return page
    return -1


def checksum(content: np.ndarray) -> int:
    """Compute the checksum of bytes, (n,) uint8: of their whole pages and the rest, padded with zeros."""
    padded = np.zeros(_padded(max(1, content.size)), np.uint8)
    padded[: content.size] = content
    sums = np.empty(padded.size // PAGE_BYTES, np.uint64)
    sum_pages(padded.view(np.uint64), sums)
    total = content.size
    for value in sums.tolist():
        total = ((total ^ value) * int(_PRIME) + 1) & ((1 << 64) - 1)
    return total


# -- merging -----------------------------------------------------------------------------------------------------------


@kernel(int64, _RECORDS, uint64)
def rank_of(records, lowest):  # type: ignore[no-untyped-def]
    """Return the number of the first record whose hash is not below `lowest`."""
    low, high = 0, records.shape[0]
    while low < high:
        middle = (low + high) // 2
        if share_hash(_key_of(records, middle)) < lowest:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(_void, _RECORDS, int64, int64, uint64[::1], int64)
def hash_records(records, start, stop, hashes, at):  # type: ignore[no-untyped-def]
    """Write the hashes of records [start, stop) to `hashes` from position `at` on."""
    for row in range(start, stop):
        hashes[at + row - start] = share_hash(_key_of(records, row))


@kernel(int64, read_only(uint64[::1]), int64, int64, int64, int64, uint32[::1], uint8[::1])
def index_records(hashes, first, bucket, stop, buckets, starts, fingerprints):  # type: ignore[no-untyped-def]
    """Write the starts of buckets [bucket, stop) and the fingerprints of records with these hashes, ascending, from `first` on.

    Returns:
        The number of the next record.
    """
    for i in range(hashes.size):
        at = scale(hashes[i], buckets)
        while bucket <= at:
            starts[bucket] = np.uint32(first + i)
            bucket += 1
        fingerprints[first + i] = _fingerprint(hashes[i])
    while bucket < stop:
        starts[bucket] = np.uint32(first + hashes.size)
        bucket += 1
    return first + hashes.size
