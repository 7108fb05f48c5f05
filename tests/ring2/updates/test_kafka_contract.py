"""The contract of a log of updates, kept by Kafka's clients with a real broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from hps.testing.update_logs import UpdateLogContract
from hps.updates.base import Partition
from hps.updates.kafka import KafkaLog, KafkaWriter
from tests.servers.kafka_broker import KafkaBroker, KafkaBrokerOnS3
from tests.servers.s3_server import know_only_moto

pytestmark = [pytest.mark.kafka, pytest.mark.s3]


class TestKafka(UpdateLogContract):
    log_class = KafkaLog
    writer_class = KafkaWriter

    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[KafkaBroker]:
        know_only_moto(monkeypatch)
        lasting = any(word in request.node.name for word in ("restart", "later", "gone"))
        with KafkaBrokerOnS3(tmp_path) if lasting else KafkaBroker(tmp_path) as broker:
            yield broker

    def settings(self, server: KafkaBroker) -> dict[str, Any]:
        # A message a batch: see the broker's notes.
        config = server.config | {"batch.num.messages": 1}
        return {"type": "kafka_message_queue", "brokers": server.address, "config": config}

    def add_partitions(self, server: KafkaBrokerOnS3, topic: str, count: int) -> None:
        server.add_partitions(topic, count)

    def remove_until(self, server: KafkaBrokerOnS3, partition: Partition, position: str) -> None:
        server.remove_until(partition.topic, partition.number, int(position))

    def committed(self, server: KafkaBroker, group: str, partition: Partition) -> str | None:
        reader = Consumer(server.client_settings(group_id=group))
        try:
            (place,) = reader.committed([TopicPartition(partition.topic, partition.number)], timeout=20)
        finally:
            reader.close()
        return str(place.offset - 1) if place.offset >= 0 else None
