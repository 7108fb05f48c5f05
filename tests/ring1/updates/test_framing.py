"""The framings of update messages: what is written is read again, and what is damaged is refused with its reason."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hps.errors import InvalidInputError, UpdateFormatError
from hps.updates.framing import HEADER_BYTES, HIGHEST_SEQUENCE, decode, encode, sequence_of
from tests.tables.hugectr_messages import encode_hugectr

DIM = 3
KEYS = np.array([5, -1, 2**63 - 1, -(2**63), 0], np.int64)
VECTORS = np.arange(15, dtype=np.float32).reshape(5, DIM) / 4  # exact in every dtype
GONE = np.array([7, 8], np.int64)
OURS = encode(KEYS, VECTORS, GONE, sequence=12, time_us=99, table="item")


def summed(message: bytes | bytearray) -> bytes:
    """The message with the checksum that it should have."""
    crc = zlib.crc32(message[8:], zlib.crc32(message[:4]))
    return bytes(message[:4]) + struct.pack("<I", crc) + bytes(message[8:])


def patched(at: int, content: bytes, message: bytes = OURS) -> bytes:
    return summed(message[:at] + content + message[at + len(content) :])


@pytest.mark.parametrize(
    ("dtype", "table", "rows", "gone"),
    [
        ("float32", "", 5, 0),
        ("float16", "item", 5, 2),
        ("bfloat16", "x" * 120, 0, 2),
        ("float32", "item", 0, 0),
        ("float16", "", 1, 1),
        ("bfloat16", "item", 5, 2),
    ],
)
def test_what_is_written_is_read_again(dtype, table: str, rows: int, gone: int) -> None:
    message = encode(KEYS[:rows], VECTORS[:rows], GONE[:gone], sequence=2**61, time_us=3, table=table, dtype=dtype)
    changes = decode(message, DIM, table="item" if table == "item" else "")
    expected = KEYS[:rows], VECTORS[:rows], GONE[:gone]
    for array, wanted, kind in zip(changes[:3], expected, (np.int64, np.float32, np.int64), strict=True):
        np.testing.assert_array_equal(array, wanted)
        assert array.dtype == kind
        assert array.flags.c_contiguous
        assert array.flags.aligned
    assert changes[3:] == (2**61, 3, table)


def test_the_layout_is_the_documented_one() -> None:
    header = struct.pack("<qqIIIBBH", 12, 99, 5, 2, DIM, 0, 4, 0)
    rest = header + b"item" + KEYS.tobytes() + GONE.tobytes() + VECTORS.tobytes()
    assert struct.pack("<4sI", b"HPS1", zlib.crc32(b"HPS1" + rest)) + rest == OURS


@pytest.mark.parametrize(("key_bytes", "kind"), [(4, "I"), (8, "q")])
def test_hugectr_messages_are_read_and_a_beacon_says_nothing(key_bytes: int, kind: str) -> None:
    keys = np.array([1, 0, 2**32 - 1], np.int64)
    rows = b"".join(struct.pack(f"<{kind}3f", key, *vector) for key, vector in zip(keys, VECTORS, strict=False))
    message = b"HCTR" + struct.pack("<I", 4 * DIM) + rows
    assert encode_hugectr(keys, VECTORS[:3], key_bytes) == message
    changes = decode(message, DIM, key_bytes, table="item")
    np.testing.assert_array_equal(changes.keys, keys)
    np.testing.assert_array_equal(changes.vectors, VECTORS[:3])
    assert changes.deleted_keys.size == 0
    assert changes[3:] == (0, 0, "")
    assert decode(b"HCTR" + struct.pack("<I", 128), DIM, key_bytes) is None


HUGECTR = encode_hugectr(KEYS, VECTORS)
NAN = struct.pack("<f", float("nan"))
INFINITE = struct.pack("<e", float("inf"))
HALVES = encode(KEYS, VECTORS, sequence=1, dtype="float16")
BRAINS = encode(KEYS, VECTORS, sequence=1, dtype="bfloat16")


def number(at: int, kind: str, *values: int) -> list[bytes]:
    """Our message with each of these numbers at this place."""
    return [patched(at, struct.pack(kind, value)) for value in values]


BAD = {
    "magic": [b"", b"HPS", b"HPS2" + OURS[4:], b"\x00\x00\x00\x00\x08junk"],
    "size": [
        b"HPS1",
        OURS[: HEADER_BYTES - 1],
        OURS[:-1],
        OURS + b"\x00",
        *number(24, "<I", 2**32 - 1),
        b"HCTR",
        HUGECTR[:-1],
        b"HCTR\x0c\x00\x00",
        encode_hugectr(KEYS[[0, 4]], VECTORS[:2], 4),
    ],
    "checksum": [OURS[:-1] + b"\x01", OURS[:4] + b"\x00\x00\x00\x00" + OURS[8:], OURS[:36] + b"\x09" + OURS[37:]],
    "dtype": [patched(36, b"\x03"), patched(38, b"\x01\x00")],
    "width": [encode(KEYS, np.zeros((5, 4), np.float32), sequence=1), encode_hugectr(KEYS, np.zeros((5, 4), np.float32))],
    "sequence": number(8, "<q", 0, -1, HIGHEST_SEQUENCE + 1) + number(16, "<q", -1, HIGHEST_SEQUENCE + 1),
    "table": [encode(KEYS, VECTORS, sequence=1, table="user"), patched(40, b"\xff\xfe\x00\x80")],
    "not_finite": [
        patched(len(OURS) - 4, NAN),
        patched(len(HALVES) - 2, INFINITE, HALVES),
        HUGECTR[:-4] + NAN,
        patched(len(BRAINS) - 2, b"\x80\x7f", BRAINS),
    ],
    "too_large": [encode(np.zeros(100, np.int64), np.zeros((100, DIM), np.float32), sequence=1)],
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_message_is_refused_with_its_reason(reason: str) -> None:
    for message in BAD[reason]:
        with pytest.raises(UpdateFormatError, match=r"reading a message of updates: got .*, expected ") as caught:
            decode(message, DIM, table="item", most_bytes=1000)
        assert caught.value.reason == reason, message


def test_the_last_values_that_are_allowed_are_taken() -> None:
    assert decode(OURS, DIM, most_bytes=len(OURS)) is not None
    with pytest.raises(UpdateFormatError, match="max_message_bytes"):
        decode(OURS, DIM, most_bytes=len(OURS) - 1)
    edges = np.array([0, 2**32 - 1])
    for sequence in (1, HIGHEST_SEQUENCE):
        message = encode(edges, VECTORS[:2], edges, sequence=sequence, time_us=HIGHEST_SEQUENCE, table="x" * 255)
        changes = decode(message, DIM, 4)
        assert changes is not None
        assert (changes.sequence, changes.time_us, changes.table) == (sequence, HIGHEST_SEQUENCE, "x" * 255)
        assert changes.keys.tolist() == changes.deleted_keys.tolist() == edges.tolist()
        assert sequence_of(message) == sequence
    for key in (-1, 2**32):
        for keys, deleted in (([5, key], [5]), ([5], [5, key])):
            message = encode(np.array(keys), VECTORS[: len(keys)], np.array(deleted), sequence=1)
            with pytest.raises(UpdateFormatError, match=r"keys in \[0, 2\^32\)"):
                decode(message, DIM, 4)
    deletion = encode(KEYS[:0], np.zeros((0, 77), np.float32), KEYS, sequence=1)
    assert decode(deletion, DIM) is not None  # without rows the width says nothing


FLOATS = (("float32", np.nan), ("bfloat16", np.inf), ("float16", 1e6), ("bfloat16", 3.4e38))


@pytest.mark.parametrize(
    ("keys", "vectors", "options", "says"),
    [
        *((KEYS, np.full_like(VECTORS, value), {"dtype": dtype}, f"not finite as {dtype}") for dtype, value in FLOATS),
        (KEYS, VECTORS[:4], {}, ""),
        (KEYS.astype(np.int32), VECTORS, {}, ""),
        (KEYS, VECTORS.astype(np.float64), {}, ""),
        *((KEYS, VECTORS, {"sequence": sequence}, "") for sequence in (0, HIGHEST_SEQUENCE + 1)),
        *((KEYS, VECTORS, {"time_us": time_us}, "") for time_us in (-1, HIGHEST_SEQUENCE + 1)),
        (KEYS, VECTORS, {"table": "x" * 256}, ""),
    ],
)
def test_what_would_be_refused_is_not_written(keys, vectors, options, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says or "encoding an update: got"):
        encode(keys, vectors, **{"sequence": 1, **options})


def test_keys_that_the_table_cannot_have_are_refused() -> None:
    for message, key_bytes, key, reason, says in (
        (OURS, 4, b"", "key", ""),
        (encode(KEYS[:0], VECTORS[:0], KEYS, sequence=1), 4, b"", "key", ""),
        (OURS, 8, b"5", "keyed", ""),
        (encode_hugectr(KEYS[[0, 4]], VECTORS[:2], 4), 8, b"", "size", "fits keys of 4 bytes: see supportlonglong"),
    ):
        with pytest.raises(UpdateFormatError, match=says or "got") as caught:
            decode(message, DIM, key_bytes, key=key)
        assert caught.value.reason == reason


@given(bits=st.integers(0, 2**32 - 1))
@example(0x3F808000)
@example(0x3F808001)
@example(0x3F818000)
@example(0x3F807FFF)
def test_bfloat16_is_the_upper_half_of_a_float32_rounded_to_the_nearest_even(bits: int) -> None:
    upper, lower = bits >> 16, bits & 0xFFFF
    rounded = upper + (lower > 0x8000 or (lower == 0x8000 and bool(upper & 1)))
    stored = np.array([[rounded << 16 & 0xFFFFFFFF]], np.uint32).view(np.float32)
    value = np.array([[bits]], np.uint32).view(np.float32)
    if not np.isfinite(value).all() or not np.isfinite(stored).all():
        return
    message = encode(KEYS[:1], value, sequence=1, dtype="bfloat16")
    assert message[-2:] == struct.pack("<H", rounded)
    assert decode(message, 1).vectors.tobytes() == stored.tobytes()


def read(message: bytes):
    try:
        changes = decode(message, DIM, table="item")
    except UpdateFormatError as error:
        return error.reason
    return changes and (*(array.tobytes() for array in changes[:3]), *changes[3:])


def damage(data: st.DataObject) -> None:
    """Damage a message, and see that it is refused."""
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    whole = encode(KEYS, VECTORS, GONE, sequence=12, time_us=99, table="item", dtype=dtype)
    message = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        message[at] = data.draw(st.integers(0, 255))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    change = data.draw(st.sampled_from(["none", "cut", "drop", "repeat"]))
    damaged = bytes({"none": message, "cut": message[:low], "drop": message[:low] + message[high:]}.get(change, message * 2))
    assert (damaged == whole) == (read(damaged) == read(whole))
    assert damaged == whole or isinstance(read(damaged), str)


@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_never_read_as_something_else(data: st.DataObject) -> None:
    damage(data)


@settings(max_examples=100)
@given(head=st.sampled_from([b"", b"HPS1", b"HCTR", b"HCTR\x0c\x00\x00\x00"]), tail=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(head: bytes, tail: bytes) -> None:
    read(head + tail)
    read(summed((head + tail).ljust(HEADER_BYTES, b"\x00")))


def test_the_sequence_is_read_of_whole_messages_alone() -> None:
    assert sequence_of(OURS) == 12
    for other in (HUGECTR, OURS[:-1], OURS[:20], b"", patched(8, struct.pack("<q", HIGHEST_SEQUENCE + 1))):
        assert sequence_of(other) == 0
