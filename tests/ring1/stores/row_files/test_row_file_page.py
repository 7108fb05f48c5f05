"""docs/row-file-format.md describes the format completely: a reader written by that page alone reads our files."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.stores.row_files.writer import Run, sorted_run, write_row_file
from tests import ROOT

FORMAT = (ROOT / "docs" / "row-file-format.md").read_text()
SEED = int(re.findall(r"mix\(key \^ 0x([0-9A-F]{16})\)", FORMAT)[0], 16)
FIRST, SECOND = (int(number, 16) for number in re.findall(r"x \*= 0x([0-9A-F]{16})", FORMAT))
(PRIME,) = (int(number, 16) for number in re.findall(r"P = 0x([0-9A-F]{16})", FORMAT))
ROTATED = [int(bits) for bits in re.findall(r">>> (\d+)", FORMAT)]
(SHIFT,) = (int(bits) for bits in re.findall(r"x >> (\d+)", FORMAT))
LANES = [int(bits) for bits in re.findall(r"\* P, (\d+)\)", FORMAT)]
U64 = (1 << 64) - 1


def rotate_left(x: int, bits: int) -> int:
    return (x << bits | x >> 64 - bits) & U64


def mix(x: int) -> int:
    for (first, second), factor in zip((ROTATED[:2], ROTATED[2:]), (FIRST, SECOND), strict=True):
        x = (x ^ rotate_left(x, 64 - first) ^ rotate_left(x, 64 - second)) * factor & U64
    return x ^ x >> SHIFT


def hash_of(key: int) -> int:
    return mix(key & U64 ^ SEED)


def page_sum(page: bytes) -> int:
    lanes = [PRIME + i & U64 for i in range(4)]
    for i, word in enumerate(struct.unpack("<512Q", page)):
        lanes[i % 4] = rotate_left((lanes[i % 4] ^ word) * PRIME & U64, LANES[i % 4])
    a, b, c, d = lanes
    return mix(a ^ mix(b ^ mix(c ^ mix(d))))


def sum_of(content: bytes) -> int:
    total = len(content)
    for at in range(0, total, 4096):
        total = (total ^ page_sum(content[at : at + 4096].ljust(4096, b"\0"))) * PRIME + 1 & U64
    return total


def up(size: int) -> int:
    return -(-size // 4096) * 4096


class Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        assert content[:8] == b"HPSROWS\0"
        version, length = struct.unpack_from("<II", content, 8)
        assert version == 2
        assert content[16 + length : 4088].strip(b"\0") == b""
        assert struct.unpack_from("<Q", content, 4088)[0] == sum_of(content[:4088])
        self.head: dict[str, Any] = json.loads(content[16 : 16 + length])
        self.rows: int = self.head["rows"]
        self.buckets: int = self.head["buckets"]
        self.size: int = 8 + 4 * self.head["width"]
        self.starts = 4096 + up(self.rows * self.size)
        self.fingerprints = self.starts + up(4 * (self.buckets + 1))
        self.sums = self.fingerprints + up(self.rows)

    def damaged_pages(self) -> list[int]:
        pages = range(4096, self.sums, 4096)
        assert len(self.content) == self.sums + 8 * len(pages)
        sums = struct.unpack_from(f"<{len(pages)}Q", self.content, self.sums)
        assert sum_of(self.content[self.sums :]) == self.head["sums"]
        return [at for at, there in zip(pages, sums, strict=True) if page_sum(self.content[at : at + 4096]) != there]

    def start(self, bucket: int) -> int:
        stored: int = struct.unpack_from("<I", self.content, self.starts + 4 * bucket)[0]
        return stored

    def row(self, key: int) -> bytes | None:
        hashed = hash_of(key)
        bucket = (hashed >> 32) * self.buckets >> 32
        for number in range(self.start(bucket), self.start(bucket + 1)):
            at = 4096 + number * self.size
            fingerprint, there = self.content[self.fingerprints + number], struct.unpack_from("<q", self.content, at)[0]
            if (fingerprint, there) == (hashed & 255, key):
                return self.content[at + 8 : at + self.size]
        return None


def written(path: Path, keys: list[int], width: int, deleted: list[int] | None = None) -> tuple[Reader, dict[int, bytes]]:
    """Write a file, and return its reader and the rows that it has."""
    rows = np.random.default_rng(len(keys)).standard_normal((len(keys), width), np.float32)
    runs = [sorted_run(np.array(keys, np.int64), rows)]
    if deleted:
        gone = np.array(deleted, np.int64)
        nothing = np.zeros((gone.size, width), np.float32)
        runs.insert(0, Run(*sorted_run(gone, nothing, np.ones(gone.size, np.bool_))))
    write_row_file(path, "hps_et.shop.item", width, runs, source="files")
    expected = {key: row.tobytes() for key, row in zip(keys, rows, strict=True) if key not in (deleted or [])}
    return Reader(path.read_bytes()), expected


EXTREMES = [-(1 << 63), -1, 0, 1, (1 << 63) - 1]


@pytest.mark.parametrize(
    ("keys", "width", "deleted"),
    [
        ([], 4, None),
        ([7], 1, None),
        (EXTREMES, 3, None),
        ([*EXTREMES, *range(1000, 3000)], 5, [0, 1500, 99]),
        ([*range(40)], 1500, None),  # records longer than a page
    ],
)
def test_a_reader_by_the_page_reads_every_row(tmp_path: Path, keys: list[int], width: int, deleted: list[int] | None) -> None:
    reader, expected = written(tmp_path / "item.rows", keys, width, deleted)
    assert reader.rows == len(expected)
    assert {key: reader.row(key) for key in expected} == expected
    assert [reader.row(key) for key in (*(deleted or []), 1 << 40, -12)] == [None] * (len(deleted or []) + 2)
    assert reader.damaged_pages() == []


def test_the_order_is_that_of_the_hash(tmp_path: Path) -> None:
    reader, _ = written(tmp_path / "item.rows", [*range(-500, 500)], 2)
    keys = [struct.unpack_from("<q", reader.content, 4096 + number * reader.size)[0] for number in range(reader.rows)]
    assert keys == sorted(keys, key=hash_of)
    assert [reader.start(0), reader.start(reader.buckets)] == [0, reader.rows]


def test_a_flipped_bit_is_found_by_the_checksums_of_the_page(tmp_path: Path) -> None:
    reader, _ = written(tmp_path / "item.rows", [*range(3000)], 2)
    content = bytearray(reader.content)
    for at in (5000, reader.starts + 9, reader.fingerprints + 1):
        content[at] ^= 4
    assert Reader(bytes(content)).damaged_pages() == [4096, reader.starts, reader.fingerprints]


def test_every_member_of_the_head_is_on_the_page(tmp_path: Path) -> None:
    reader, _ = written(tmp_path / "item.rows", [1, 2], 2)
    assert set(reader.head) - set(re.findall(r"`(\w+)`", FORMAT)) == set()
    assert f"`{reader.head['hash']}`, {reader.head['page_bytes']}" in FORMAT
