"""A cluster of Kafka that misbehaves in several ways at a time."""

import threading

from confluent_kafka import KafkaError

from hps.testing.update_logs import polled, values
from hps.testing.waiting import wait_until
from tests.ring1.updates.test_kafka_faults import FIRST, TOPIC, numbers
from tests.ring1.updates.test_kafka_faults import cluster as cluster  # fixtures
from tests.ring1.updates.test_kafka_faults import opened as opened
from tests.ring1.updates.test_kafka_faults import writer as writer
from tests.servers.kafka_mock import FETCH, METADATA, PRODUCE


def test_messages_come_once_and_in_order_while_leaders_change_and_connections_break(cluster, writer, opened):
    log = opened(cluster.address)
    read: list[bytes] = []
    done = threading.Event()

    def harm() -> None:
        for turn in range(4):
            cluster.lead(TOPIC, 0, turn % 3 + 1)
            cluster.fail(PRODUCE, KafkaError._TRANSPORT, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.REQUEST_TIMED_OUT)
            cluster.fail(FETCH, KafkaError._TRANSPORT, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.FENCED_LEADER_EPOCH)
            cluster.fail(METADATA, KafkaError._TRANSPORT)
            done.wait(0.3)

    harming = threading.Thread(target=harm)
    harming.start()
    for start in range(0, 1000, 50):
        for value in numbers(start, start + 50):
            writer.send(FIRST, value)
        read += values(log.poll(0.05, 1 << 20))
    harming.join()
    assert writer.flush(60) == 0
    read += values(polled(log, 1000 - len(read)))
    assert read == numbers(0, 1000)
    assert log.lost() == {}
    wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == "")
