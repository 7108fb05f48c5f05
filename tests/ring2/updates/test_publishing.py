"""Publishing through real logs, as they are configured; what is published is shown in tests/ring1/updates/test_publisher.py."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.registry import implementation
from hps.statistics.metrics import Metrics
from hps.testing.update_logs import polled
from hps.updates.base import Message, Partition
from hps.updates.dead_letters import DeadLetters, read_topics
from hps.updates.framing import decode
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM, TOPIC = 4, "hps_et.shop.item"


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


def read(document: dict[str, Any], topic: str, count: int) -> list[Message]:
    settings = load_configuration(document).update_source
    with closing(implementation("update_log", settings.type).from_config(settings, "test")) as log:
        log.follow([topic], {}, "earliest")
        return polled(log, count)


def test_a_second_publisher_goes_on_above_the_first(document: dict[str, Any]) -> None:
    positions = []
    for key in (1, 2):
        with hps.open_publisher(document, "shop", "item", create_partitions=1) as publisher:
            publisher.insert(np.array([key]), np.full((1, DIM), key, np.float32))
            positions.append(publisher.flush()[f"{TOPIC}/0"])
    messages = read(document, TOPIC, 2)
    assert [one.position for one in messages] == positions
    first, second = (decode(one.value, DIM) for one in messages)
    assert (first.keys.tolist(), second.keys.tolist()) == ([1], [2])
    assert first.sequence < second.sequence


def test_dead_letters_lie_in_a_topic(document: dict[str, Any]) -> None:
    document["update_source"]["dead_letters"] = "topic"
    settings = load_configuration(document).update_source
    aside = [Message(Partition(TOPIC, 0), str(number), 5, b"", bytes([10, number]) * 1000) for number in range(5)]
    letters = DeadLetters.from_config(settings, "", Metrics())
    for message in aside:
        letters.add(message, "magic", "junk", 3)
    assert letters.flush(30.0)
    letters.close()
    assert letters.lost == 0
    with closing(implementation("update_log", settings.type).from_config(settings, "test")) as log:
        assert [one.message for one in read_topics(log, ["hps_dead.shop.item"], 5.0)] == aside
