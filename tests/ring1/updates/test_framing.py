"""The framings of update messages: what is written is read again, and what is damaged is refused with its reason."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("table", ["", "item", "x" * 120])
@pytest.mark.parametrize(("rows", "gone"), [(5, 0), (5, 2), (0, 2), (0, 0), (1, 1)])
def test_what_is_written_is_read_again(dtype, table: str, rows: int, gone: int) -> None:
    message = encode(KEYS[:rows], VECTORS[:rows], GONE[:gone], sequence=2**61, time_us=3, table=table, dtype=dtype)
    changes = decode(message, DIM, table="item" if table == "item" else "")
    np.testing.assert_array_equal(changes.keys, KEYS[:rows])
    np.testing.assert_array_equal(changes.vectors, VECTORS[:rows])
    np.testing.assert_array_equal(changes.deleted_keys, GONE[:gone])
    assert changes[3:] == (2**61, 3, table)
    for array, kind in zip(changes[:3], (np.int64, np.float32, np.int64), strict=True):
        assert array.dtype == kind
        assert array.flags.c_contiguous
        assert array.flags.aligned


def test_the_layout_is_the_documented_one() -> None:
    header = struct.pack("<qqIIIBBH", 12, 99, 5, 2, DIM, 0, 4, 0)
    rest = header + b"item" + KEYS.tobytes() + GONE.tobytes() + VECTORS.tobytes()
    assert struct.pack("<4sI", b"HPS1", zlib.crc32(b"HPS1" + rest)) + rest == OURS


@pytest.mark.parametrize("rows", [5, 6, 1000])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_row_costs_at_most_16_bytes_beside_its_vector(rows: int, deleted: bool) -> None:
    keys, vectors = np.arange(rows, dtype=np.int64), np.zeros((rows, 32), np.float32)
    none = slice(0 if deleted else rows)
    message = encode(keys[none], vectors[none], keys if deleted else None, sequence=1)
    assert len(message) - (0 if deleted else vectors.nbytes) <= 16 * rows


@pytest.mark.parametrize("key_bytes", [4, 8])
def test_hugectr_messages_are_read(key_bytes: int) -> None:
    keys = np.array([1, 0, 2**32 - 1], np.int64)
    kind = "I" if key_bytes == 4 else "q"
    rows = b"".join(struct.pack(f"<{kind}3f", key, *vector) for key, vector in zip(keys, VECTORS, strict=False))
    message = b"HCTR" + struct.pack("<I", 4 * DIM) + rows
    assert encode_hugectr(keys, VECTORS[:3], key_bytes) == message
    changes = decode(message, DIM, key_bytes, table="item")
    np.testing.assert_array_equal(changes.keys, keys)
    np.testing.assert_array_equal(changes.vectors, VECTORS[:3])
    assert changes.deleted_keys.size == 0
    assert changes[3:] == (0, 0, "")


def test_a_beacon_says_nothing() -> None:
    assert decode(b"HCTR" + struct.pack("<I", 128), DIM) is None


HUGECTR = encode_hugectr(KEYS, VECTORS)
NAN = struct.pack("<f", float("nan"))
INFINITE = struct.pack("<e", float("inf"))
HALVES = encode(KEYS, VECTORS, sequence=1, dtype="float16")
BRAINS = encode(KEYS, VECTORS, sequence=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("magic", b""),
        ("magic", b"HPS"),
        ("magic", b"HPS2" + OURS[4:]),
        ("magic", b"\x00\x00\x00\x00\x08junk"),
        ("size", b"HPS1"),
        ("size", OURS[: HEADER_BYTES - 1]),
        ("size", OURS[:-1]),
        ("size", OURS + b"\x00"),
        ("size", patched(24, struct.pack("<I", 2**32 - 1))),
        ("checksum", OURS[:-1] + b"\x01"),
        ("checksum", OURS[:4] + b"\x00\x00\x00\x00" + OURS[8:]),
        ("checksum", OURS[:36] + b"\x09" + OURS[37:]),
        ("dtype", patched(36, b"\x03")),
        ("dtype", patched(38, b"\x01\x00")),
        ("width", encode(KEYS, np.zeros((5, 4), np.float32), sequence=1)),
        ("sequence", patched(8, struct.pack("<q", 0))),
        ("sequence", patched(8, struct.pack("<q", -1))),
        ("sequence", patched(8, struct.pack("<q", HIGHEST_SEQUENCE + 1))),
        ("sequence", patched(16, struct.pack("<q", -1))),
        ("table", encode(KEYS, VECTORS, sequence=1, table="user")),
        ("table", patched(40, b"\xff\xfe\x00\x80")),
        ("not_finite", patched(len(OURS) - 4, NAN)),
        ("not_finite", patched(len(HALVES) - 2, INFINITE, HALVES)),
        ("not_finite", patched(len(BRAINS) - 2, b"\x80\x7f", BRAINS)),
        ("size", b"HCTR"),
        ("size", b"HCTR\x0c\x00\x00"),
        ("size", HUGECTR[:-1]),
        ("size", encode_hugectr(KEYS[[0, 4]], VECTORS[:2], 4)),
        ("width", encode_hugectr(KEYS, np.zeros((5, 4), np.float32))),
        ("not_finite", HUGECTR[:-4] + NAN),
        ("too_large", encode(np.zeros(100, np.int64), np.zeros((100, DIM), np.float32), sequence=1)),
    ],
)
def test_a_bad_message_is_refused_with_its_reason(reason: str, message: bytes) -> None:
    with pytest.raises(UpdateFormatError, match=r"reading a message of updates: got .*, expected ") as caught:
        decode(message, DIM, table="item", most_bytes=1000)
    assert caught.value.reason == reason


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
    with pytest.raises(UpdateFormatError, match="sequence"):
        decode(patched(16, struct.pack("<q", HIGHEST_SEQUENCE + 1)), DIM)
    with pytest.raises(InvalidInputError):
        encode(KEYS, VECTORS, sequence=1, time_us=HIGHEST_SEQUENCE + 1)


def test_keys_that_the_table_cannot_have_are_refused() -> None:
    with pytest.raises(UpdateFormatError) as caught:
        decode(OURS, DIM, 4)
    assert caught.value.reason == "key"
    with pytest.raises(UpdateFormatError) as caught:
        decode(encode(KEYS[:0], VECTORS[:0], KEYS, sequence=1), DIM, 4)
    assert caught.value.reason == "key"
    with pytest.raises(UpdateFormatError) as caught:
        decode(OURS, DIM, key=b"5")
    assert caught.value.reason == "keyed"


def test_keys_of_the_other_width_are_named() -> None:
    with pytest.raises(UpdateFormatError, match="fits keys of 4 bytes: see supportlonglong"):
        decode(encode_hugectr(KEYS[[0, 4]], VECTORS[:2], 4), DIM)


@pytest.mark.parametrize(
    ("vector", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (1e6, "float16"), (3.4e38, "bfloat16")]
)
def test_what_would_be_refused_is_not_written(vector: float, dtype) -> None:
    with pytest.raises(InvalidInputError, match=f"not finite as {dtype}"):
        encode(KEYS[:1], np.full((1, DIM), vector, np.float32), sequence=1, dtype=dtype)


@pytest.mark.parametrize(
    ("keys", "vectors", "options"),
    [
        (KEYS, VECTORS[:4], {}),
        (KEYS.astype(np.int32), VECTORS, {}),
        (KEYS, VECTORS.astype(np.float64), {}),
        (KEYS, VECTORS, {"sequence": 0}),
        (KEYS, VECTORS, {"sequence": HIGHEST_SEQUENCE + 1}),
        (KEYS, VECTORS, {"time_us": -1}),
        (KEYS, VECTORS, {"table": "x" * 256}),
    ],
)
def test_arguments_out_of_range_are_refused(keys, vectors, options) -> None:
    with pytest.raises(InvalidInputError, match="encoding an update: got"):
        encode(keys, vectors, **{"sequence": 1, **options})


@given(bits=st.integers(0, 2**16 - 1))
def test_bfloat16_is_the_upper_half_of_a_float32(bits: int) -> None:
    value = np.array([[bits << 16]], np.uint32).view(np.float32)
    if not np.isfinite(value).all():
        return
    message = encode(KEYS[:1], value, sequence=1, dtype="bfloat16")
    assert message[-2:] == struct.pack("<H", bits)
    assert decode(message, 1).vectors.tobytes() == value.tobytes()


@pytest.mark.parametrize(("low", "bits"), [(0x8000, 0x3F80), (0x8001, 0x3F81), (0x18000, 0x3F82), (0x7FFF, 0x3F80)])
def test_bfloat16_is_rounded_to_the_nearest_even(low: int, bits: int) -> None:
    value = np.array([[(0x3F80 << 16) + low]], np.uint32).view(np.float32)
    assert encode(KEYS[:1], value, sequence=1, dtype="bfloat16")[-2:] == struct.pack("<H", bits)


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
