"""HugeCTR's keys and bytes (4.2 and later), fixed here: what it wrote is read, what we write it can read."""

import struct

import numpy as np
import pytest
from redis.crc import key_slot

from hps.errors import DatabaseCorruptError, DatabaseError, TableWidthError, UnknownTableError
from hps.stores.redis.layout import RedisLayout, partition_number, tag_of
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S

TAG = "hps_et.shop.item"
P0, P1, P2, P3 = (f"hps_et{{hps_et.shop.item/p{i}}}v".encode() for i in range(4))

# Key: its hash of four, its field, its vector of 1.0 and 2.0 times the key. The hashes were worked out apart from the code.
ROWS = {
    0: (P0, "0000000000000000", "0000000000000000"),
    1: (P3, "0100000000000000", "0000803f00000040"),
    -1: (P0, "ffffffffffffffff", "000080bf000000c0"),
    42: (P1, "2a00000000000000", "000028420000a842"),
    2**62: (P2, "0000000000000040", "0000805e0000005f"),
}


@pytest.fixture
def table(opened):
    """A database with the table open."""
    database = opened()
    database.open_table(TAG, 2)
    return database


def rows():
    keys = np.array(list(ROWS), np.int64)
    return keys, np.stack([keys.astype(np.float32), 2 * keys.astype(np.float32)], 1)


def test_keys_of_a_partition_share_a_slot_by_the_whole_tag_in_the_braces():
    partition = RedisLayout.of(TAG, 2, 8).partitions[7]
    assert (partition.values, partition.uses) == (b"hps_et{hps_et.shop.item/p7}v", b"hps_et{hps_et.shop.item/p7}t")
    assert {key_slot(key) for key in (partition.values, partition.uses, partition.mark)} == {key_slot(b"hps_et.shop.item/p7")}


def test_keys_of_other_programs_belong_to_no_table():
    assert tag_of(P0) == tag_of(b"hps_et{hps_et.shop.item}m") == TAG
    assert partition_number(P3) == 3
    assert partition_number(b"hps_et{hps_et.shop.item}m") == -1
    for key in (b"hps_et.shop.item/p0/v", b"hps_et{a/b/p0}v", b"hps_et{a/p0}x", b"x" + P0, b"hps_et{hps_et.shop.item}l"):
        assert tag_of(key) is None


@pytest.mark.redis
def test_what_is_written_has_these_bytes(table, client):
    table.insert(TAG, *rows())
    written = {}
    for name in (P0, P1, P2, P3):
        for field, value in client.hgetall(name).items():
            written[int.from_bytes(field, "little", signed=True)] = (name, field.hex(), value.hex())
    assert written == ROWS
    assert client.exists(*(name[:-1] + b"t" for name in (P0, P1, P2, P3))) == 0  # evict_random notes no uses


@pytest.mark.redis
def test_what_hugectr_wrote_is_read(opened, client):
    for name, field, value in ROWS.values():
        client.hset(name, bytes.fromhex(field), bytes.fromhex(value))
    database = opened()
    assert database.tags() == [TAG]
    database.open_table(TAG, 2)
    keys, vectors = rows()
    out, found = fetched(database, TAG, keys, 2)
    assert found.all()
    np.testing.assert_array_equal(out, vectors)
    assert database.size(TAG) == len(ROWS)


@pytest.mark.redis
def test_uses_are_noted_as_hugectr_notes_them(opened, client):
    def uses():
        found = {field: value for i in range(4) for field, value in client.hgetall(f"hps_et{{{TAG}/p{i}}}t").items()}
        return {int.from_bytes(field, "little", signed=True): value for field, value in found.items()}

    keys, vectors = rows()
    for policy in ("evict_oldest", "evict_least_used"):
        client.flushall()
        database = opened(overflow_policy=policy)
        database.open_table(TAG, 2)
        before = client.time()[0]
        database.insert(TAG, keys, vectors)
        after = client.time()[0]
        assert uses().keys() == ROWS.keys()
        if policy == "evict_oldest":
            assert all(before <= struct.unpack("<q", value)[0] <= after for value in uses().values())
            for i in range(4):
                for field in client.hkeys(f"hps_et{{{TAG}/p{i}}}t"):
                    client.hset(f"hps_et{{{TAG}/p{i}}}t", field, bytes(8))
        database.fetch(TAG, keys, np.empty((keys.size, 2), np.float32), keys != 0)  # another tier found the others
        assert database.drain(PATIENCE_S)
        if policy == "evict_oldest":
            assert [key for key, value in uses().items() if value != bytes(8)] == [0]
        else:
            assert uses() == {key: b"2" if key == 0 else b"1" for key in ROWS}
        database.delete(TAG, keys)
        assert not client.keys("*}t")


@pytest.mark.redis
def test_a_table_that_was_written_otherwise_is_refused(opened, client):
    for name, error, reason in (
        (P1, TableWidthError, r"(?s)(?=.*hps_et.shop.item)(?=.*\b8 bytes)(?=.*\b12 bytes)"),
        (b"hps_et{hps_et.shop.item/p5}v", DatabaseError, r"num_partitions 4, expected 6"),
    ):
        client.flushall()
        client.hset(name, bytes(8), bytes(12))
        with pytest.raises(error, match=reason):
            opened().open_table(TAG, 2)
        assert client.keys("*m") == []
    client.flushall()
    opened().open_table(TAG, 2)
    with pytest.raises(DatabaseError, match=r"num_partitions 8, expected 4"):
        opened(num_partitions=8).open_table(TAG, 2)
    opened(num_partitions=8).drop_table(TAG)
    opened(num_partitions=8).open_table(TAG, 2)


@pytest.mark.redis
def test_one_vector_of_another_width_fails_by_its_key(table, client):
    keys = distinct_keys(100)
    table.insert(TAG, keys, vectors_of(keys, 2))
    holder = next(name for name in (P0, P1, P2, P3) if client.hexists(name, keys[:1].tobytes()))
    for size, error in ((16, TableWidthError), (5, DatabaseCorruptError)):
        client.hset(holder, keys[:1].tobytes(), bytes(size))
        with pytest.raises(error, match=rf"key {keys[0]} .*{size} bytes.*{TAG}"):
            fetched(table, TAG, keys, 2)
        with pytest.raises(TableWidthError, match=rf"key {keys[0]} .*{size} bytes"):
            list(table.scan(TAG, 1000))
    assert fetched(table, TAG, keys[1:], 2)[1].all()


@pytest.mark.redis
def test_what_another_program_wrote_there_is_an_error(table, client):
    client.hset(P2, b"1234", bytes(8))
    with pytest.raises(DatabaseCorruptError, match="32-bit keys"):
        list(table.scan(TAG, 10))
    client.set(P3, b"a string")
    with pytest.raises(DatabaseError, match=r"WRONGTYPE.*another program"):
        fetched(table, TAG, np.array([1], np.int64), 2)


@pytest.mark.redis
def test_lost_rows_are_not_absent(table, client):
    keys = distinct_keys(1000)
    table.insert(TAG, keys, vectors_of(keys, 2))
    assert not fetched(table, TAG, ~keys, 2)[1].any()
    client.delete(P1, P1[:-1] + b"m")  # as when one node of a cluster comes back empty
    for read in (lambda: fetched(table, TAG, keys, 2), lambda: list(table.scan(TAG, 100))):
        with pytest.raises(UnknownTableError, match=r"table hps_et\.shop\.item was lost after it was opened"):
            read()
    there = np.concatenate([np.frombuffer(b"".join(client.hkeys(name)), np.int64) for name in (P0, P2, P3)])
    out, found = fetched(table, TAG, there, 2)  # the other partitions still answer
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(there, 2))
    table.open_table(TAG, 2)
    assert fetched(table, TAG, keys, 2)[1].sum() == there.size


@pytest.mark.redis
def test_a_table_that_another_process_made_with_another_width_is_to_be_opened_again(table, opened):
    other = opened()
    other.drop_table(TAG)
    other.open_table(TAG, 3)
    with pytest.raises(UnknownTableError, match="open it again"):
        fetched(table, TAG, distinct_keys(100), 2)


@pytest.mark.redis
def test_dropping_leaves_other_programs_and_other_tables_alone(opened, client):
    others = {b"hps_et{hps_et.shop.item2/p0}v", b"hps_et{hps_et.shop.item}x", b"other", b"hps_et.shop.item/p0/v"}
    for name in others:
        client.hset(name, b"12345678", b"1234")
    database = opened()
    database.open_table(TAG, 2)
    database.drop_table(TAG)
    assert set(client.keys("*")) == others
    for name in (P0, P3):  # HugeCTR's, never opened here
        client.hset(name, bytes(8), bytes(8))
    database.drop_table(TAG)
    assert set(client.keys("*")) == others
