"""What Kafka's clients tell of a real broker that refuses them, and what a process of its own does at its end."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer

from hps.errors import UpdateLogError
from hps.testing.update_logs import polled, values
from hps.testing.waiting import wait_until
from hps.updates.kafka import KafkaLog, KafkaWriter
from tests.ring1.updates.test_kafka_faults import FIRST, TOPIC, settings
from tests.ring1.updates.test_kafka_faults import cluster as cluster  # fixtures
from tests.ring1.updates.test_kafka_faults import opened as opened
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path) as broker:
        yield broker


def test_wrong_credentials_are_told(tmp_path, opened):
    broker = KafkaBroker(tmp_path)
    broker.arguments = ("--authentication",)
    with broker:
        secrets = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256"}
        secrets |= {"sasl.username": "nobody", "sasl.password": "wrong"}
        log = opened(broker.address, config=secrets)
        wait_until(lambda: log.poll(0.01, 1) == [] and "authentication" in log.problem.lower())
        assert "wrong" not in log.problem
        (found,) = KafkaLog.probe(settings(broker.address, config=secrets), [TOPIC], 3)
        assert (found.level, "authentication" in found.text.lower()) == ("unreachable", True)
        with closing(KafkaWriter.from_config(settings(broker.address, config=secrets))) as writer:
            for ask in (lambda: writer.partitions(TOPIC, 3), lambda: writer.last(FIRST, 3)):
                with pytest.raises(UpdateLogError, match=r"(?i)authentication") as told:
                    ask()
                assert "wrong" not in str(told.value)


def test_a_message_larger_than_all_bounds_does_not_stop_the_stream(broker, opened):
    producer = Producer(broker.client_settings(message_max_bytes=40_000_000))
    with closing(KafkaWriter.from_config(settings(broker.address))) as writer:
        writer.partitions(TOPIC, 20, create=1)
    for value in (b"a", bytes(30_000_000), b"b"):
        producer.produce(TOPIC, value, partition=0)
    assert producer.flush(30) == 0
    log = opened(broker.address, read_ahead_bytes=1 << 20, max_message_bytes=100_000, config=broker.config)
    assert [len(value) for value in values(polled(log, 3))] == [1, 30_000_000, 1]


def test_a_process_that_closes_nothing_ends(cluster):
    program = f"""
from hps.configuration.tiers import UpdateSourceConfig
from hps.updates.base import Partition
from hps.updates.kafka import KafkaLog, KafkaWriter
config = UpdateSourceConfig(type="kafka", brokers="{cluster.address}")
log, writer = KafkaLog.from_config(config, "g"), KafkaWriter.from_config(config)
log.follow(["{TOPIC}"], {{}}, "earliest")
writer.send(Partition("{TOPIC}", 0), b"x")
print(log.poll(20, 1)[0].value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'x'\n", "")
