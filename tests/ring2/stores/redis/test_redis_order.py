"""Processes that share a Redis, each with its own RocksDB: nobody sees what is older than a write that it was told is done."""

import threading
from contextlib import ExitStack, closing

import numpy as np
import pytest

import hps
from hps.stores.redis.layout import KeyPartition
from hps.testing.databases import distinct_keys, vectors_of
from hps.testing.waiting import PATIENCE_S
from tests.servers.redis_proxy import Proxy
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.redis
DIM, PARTITIONS = 8, 4
KEYS = distinct_keys(300)
KEY = KEYS[:1]
OTHERS = KEYS[1:]
TAG = "hps_et.shop.item"


@pytest.fixture
def process(server, client, tmp_path):
    """Start processes by name: each has a RocksDB of its own, which it finds again when it is started anew."""
    with ExitStack() as running:

        def start(name, *, port=server.port, files="item", **volatile):
            source = tmp_path / f"{files}.model"
            if not source.exists():
                hps.write_sparse_model(source, (KEYS, vectors_of(KEYS, DIM)))
            document = document_of(
                model_of("shop", [source], {"item": DIM}, gpucache=False), persistent=tmp_path / f"rocksdb-{name}"
            )
            document["volatile_db"] = {
                "type": "redis_cluster",
                "address": f"127.0.0.1:{port}",
                "num_partitions": PARTITIONS,
                "cache_missed_embeddings": True,
                **volatile,
            }
            return running.enter_context(closing(hps.HPS(document)))

        yield start


def insert(one, version, keys=KEY):
    one.insert(keys, vectors_of(keys, DIM, version), "shop", "item")


def expect(one, version, keys=KEY, times=3):
    """Look a key up, a few times, because a promotion may change what is found next."""
    for _ in range(times):
        np.testing.assert_array_equal(one.lookup(keys, "shop", "item"), vectors_of(keys, DIM, version))
        assert one.drain(PATIENCE_S)


def evict(client, keys=KEY):
    for i in range(PARTITIONS):
        client.hdel(KeyPartition(TAG, i).values, *(key.tobytes() for key in keys))


def in_redis(client, key):
    return next((row for i in range(PARTITIONS) if (row := client.hget(KeyPartition(TAG, i).values, key.tobytes()))), None)


@pytest.mark.parametrize("lose", [evict, lambda client: client.flushall()], ids=["evict", "flush"])
def test_what_another_process_promotes_is_never_older(process, client, lose):
    writer, reader = process("writer"), process("reader")
    insert(writer, 1)
    evict(client, KEYS)
    expect(writer, 1)
    assert in_redis(client, KEY[0]) == vectors_of(KEY, DIM, 1).tobytes()  # the only writer promotes
    lose(client)
    expect(reader, 0)  # it has its own RocksDB, and was never told
    expect(writer, 1)
    expect(reader, 1 if in_redis(client, KEY[0]) else 0)
    expect(writer, 1)


@pytest.mark.parametrize("what", ["promotion", "write", "write before another's"])
def test_what_comes_late_changes_nothing(process, client, server, what):
    """It reaches Redis after the client gave up, and after a later write of the same or of another process was done."""
    late = threading.Event()
    with Proxy(server.port) as link, pytest.MonkeyPatch.context() as patch:
        writer = process("writer", port=link.address.rpartition(":")[2])
        other = writer if what == "promotion" else process("other")  # where it writes, nobody promotes
        for one in (other, writer):
            insert(one, 1, OTHERS[:1])
        evict(client)
        patch.setattr(writer.model("shop").chain.databases[0]._nodes, "timeout_s", 0.2)
        link.hold_if = (lambda data: what != "promotion" or b"EVAL" in data or b"HSET" in data, late)
        if what == "promotion":
            expect(writer, 0, times=1)
        else:
            insert(writer, 2)
        link.hold_if = None
        last = other if what == "write before another's" else writer
        insert(last, 3)
        if last is writer:
            expect(writer, 3)  # and Redis is used again
            insert(writer, 3)
        if what == "promotion":
            evict(client)
        before = link.delivered
        late.set()
        link.wait_delivered(before)
        expect(last, 3)


def test_a_full_redis_takes_no_promotion_and_keeps_its_rows(process, client):
    one = process("one")
    evict(client)
    client.config_set("maxmemory", "1")
    expect(one, 0, KEYS)
    client.config_set("maxmemory", "0")
    assert in_redis(client, KEY[0]) is None
    assert all(in_redis(client, key) for key in OTHERS)


@pytest.mark.parametrize("keep", [False, True])
def test_a_restarted_process_does_not_trust_what_its_failed_write_left(process, client, keep):
    writer = process("writer")
    insert(writer, 1)
    client.config_set("maxmemory", "1")  # Redis refuses
    insert(writer, 2)  # it is in RocksDB alone
    writer.close()
    client.config_set("maxmemory", "0")
    expect(process("writer", initialize_after_startup=not keep), 2)


def test_a_restarted_process_uses_what_it_left(process, client):
    writer, other = process("writer"), process("other")
    insert(writer, 1)
    insert(other, 2, OTHERS[:1])
    writer.close()
    again = process("writer", initialize_after_startup=False)
    assert in_redis(client, OTHERS[5])
    expect(again, 2, OTHERS[:1])  # what the other wrote is still there
    expect(again, 1)


def test_another_model_is_never_answered_from(process, client, tmp_path):
    """A process that serves the older model sees that Redis now holds another one."""
    old = process("old")
    fresh = vectors_of(KEYS[:200], DIM, 7)
    hps.write_sparse_model(tmp_path / "new.model", (KEYS[:200], fresh))
    new = process("new", files="new")
    expect(old, 0, KEYS)
    expect(new, 7, KEYS[:200])
    expect(old, 0, KEYS)
    insert(old, 1)
    insert(new, 8)
    expect(old, 1)
    expect(new, 8)
