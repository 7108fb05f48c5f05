"""Publishing through real logs: what a reader gets is what was published, and a second publisher goes on above the first."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.registry import implementation
from hps.statistics.metrics import Metrics
from hps.testing.waiting import wait_until
from hps.updates.base import Message, Partition
from hps.updates.dead_letters import DeadLetters, read_topics
from hps.updates.framing import decode
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM, TOPIC = 4, "hps_et.shop.item"
KEYS = np.arange(20_000, dtype=np.int64) - 7
VECTORS = np.random.default_rng(3).random((KEYS.size, DIM), np.float32)


@pytest.fixture(params=[pytest.param("kafka", marks=pytest.mark.kafka), pytest.param("redis", marks=pytest.mark.redis)])
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    content = document_of(model_of("shop", [tmp_path / "item"], {"item": DIM}))
    if request.param == "kafka":
        with KafkaBroker(tmp_path) as broker:
            source = {"type": "kafka_message_queue", "brokers": broker.address, "config": broker.config}
            yield content | {"update_source": source}
    else:
        with RedisServer(tmp_path) as server:
            yield content | {"update_source": {"type": "redis_stream", "address": server.address}}


def read(document: dict[str, Any], until: dict[str, str], after: dict[Partition, str] | None = None) -> list[Message]:
    """The messages up to these positions."""
    settings = load_configuration(document).update_source
    log = implementation("update_log", settings.type).from_config(settings, "test")
    messages: list[Message] = []

    def all_are_read() -> bool:
        messages.extend(log.poll(0.1, 1 << 20))
        return {str(one.partition): one.position for one in messages} == until

    try:
        log.follow([TOPIC], after or {}, "earliest")
        wait_until(all_are_read, f"messages up to {until} are read")
    finally:
        log.close()
    return messages


def test_what_is_published_is_read(document: dict[str, Any]) -> None:
    with hps.open_publisher(document, "shop", "item", create_partitions=3, message_bytes=8192) as publisher:
        publisher.insert(KEYS, VECTORS)
        first = publisher.flush()
    with hps.open_publisher(document, "shop", "item", message_bytes=8192) as publisher:
        publisher.insert(KEYS[:100], VECTORS[100:200])
        publisher.delete(KEYS[100:150])
        second = publisher.flush()
    messages = read(document, second)
    assert sorted(first) == sorted(second) == [f"{TOPIC}/{number}" for number in range(3)]
    assert second == {str(one.partition): one.position for one in messages}  # the last of each
    rows: dict[int, bytes] = {}
    sequences: dict[Partition, int] = {}
    for message in messages:
        changes = decode(message.value, DIM)
        assert changes.sequence > sequences.get(message.partition, 0)
        sequences[message.partition] = changes.sequence
        rows |= dict(zip(changes.keys.tolist(), map(bytes, changes.vectors), strict=True))
        for key in changes.deleted_keys.tolist():
            del rows[key]
    expected = dict(zip(KEYS.tolist(), map(bytes, VECTORS), strict=True))
    expected |= dict(zip(KEYS[:100].tolist(), map(bytes, VECTORS[100:200]), strict=True))
    assert rows == {key: row for key, row in expected.items() if key not in set(KEYS[100:150].tolist())}
    after = {Partition(TOPIC, int(name[-1])): position for name, position in first.items()}
    later = [decode(one.value, DIM) for one in read(document, second, after)]
    assert sum(one.keys.size for one in later) == 100
    assert sum(one.deleted_keys.size for one in later) == 50


def test_dead_letters_lie_in_a_topic(document: dict[str, Any]) -> None:
    document["update_source"]["dead_letters"] = "topic"
    settings = load_configuration(document).update_source
    letters = DeadLetters.from_config(settings, "", Metrics())
    aside = [Message(Partition(TOPIC, 0), str(number), 5, b"", bytes([10, number]) * 1000) for number in range(5)]
    for message in aside:
        letters.add(message, "magic", "junk", 3)
    assert letters.flush(30.0)
    letters.close()
    assert letters.lost == 0
    log = implementation("update_log", settings.type).from_config(settings, "test")
    try:
        found = list(read_topics(log, ["hps_dead.shop.item"], 5.0))
    finally:
        log.close()
    assert [one.message for one in found] == aside
