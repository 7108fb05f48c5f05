"""What a reader of Kafka makes of the ends that it asks for, whatever happens before it gets the answer."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import hps.updates.kafka
from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import ConfigError
from hps.testing.update_logs import polled, values, written
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.updates.base import Partition
from hps.updates.kafka import KafkaLog, KafkaWriter
from tests.servers.kafka_mock import KafkaMock

TOPIC = "hps_et.shop.items"
FIRST = Partition(TOPIC, 0)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Calls to make, one at a time, when the brokers have told the ends of partitions and the reader does not know them yet."""
    calls: list[Callable[[], object]] = []

    class Admin(AdminClient):
        def list_offsets(self, *args: Any, **options: Any) -> Any:
            answers = super().list_offsets(*args, **options)
            wait(answers.values())
            if calls:
                calls.pop(0)()
            return answers

    monkeypatch.setattr(hps.updates.kafka, "AdminClient", Admin)
    return calls


@pytest.fixture
def cluster() -> Iterator[KafkaMock]:
    with KafkaMock() as cluster:
        cluster.create(TOPIC, 3)
        yield cluster


@pytest.fixture
def opened(cluster: KafkaMock) -> Iterator[Callable[[], KafkaLog]]:
    """Open readers whose partitions are known."""
    with ExitStack() as stack:

        def open_one() -> KafkaLog:
            log = stack.enter_context(closing(KafkaLog.from_config(settings(cluster), "hps.volatile")))
            log.follow([TOPIC], {}, "earliest")
            wait_until(lambda: len(log.behind()) == 3)
            return log

        yield open_one


def settings(cluster: KafkaMock) -> UpdateSourceConfig:
    document = {"type": "kafka", "brokers": cluster.address, "metadata_refresh_interval_ms": 50}
    return UpdateSourceConfig.model_validate(document)


def write(cluster: KafkaMock, count: int, time_us: int = 0) -> None:
    with closing(KafkaWriter.from_config(settings(cluster))) as writer:
        written(writer, FIRST, *(b"%d" % number for number in range(count)), time_us=time_us)


def make_anew(cluster: KafkaMock, count: int, time_us: int = 0) -> None:
    cluster.delete(TOPIC)
    cluster.create(TOPIC, 3)
    write(cluster, count, time_us)


def test_a_message_is_as_old_as_the_question_whose_answer_lacked_it(cluster, opened, answered):
    log, written_by = opened(), 0.0

    def write_one() -> None:
        nonlocal written_by
        write(cluster, 1)
        written_by = time.monotonic()

    answered.append(write_one)
    wait_until(lambda: log.behind()[FIRST] == 1)
    since = log.unread_since()[FIRST]
    assert since is not None
    assert since < written_by


def test_what_comes_to_a_paused_partition_is_behind_each_time(cluster, opened):
    log = opened()
    log.pause([FIRST])
    for behind in (3, 6):
        write(cluster, 3)
        wait_until(lambda behind=behind: log.behind()[FIRST] == behind)
    assert log.poll(0.0, 1) == []


def test_a_fetch_tells_how_much_is_behind_before_the_next_survey(cluster, opened, answered):
    log, asking, go_on = opened(), threading.Event(), threading.Event()
    answered.append(lambda: (asking.set(), go_on.wait(PATIENCE_S)))
    assert asking.wait(PATIENCE_S)
    log.pause([FIRST])
    write(cluster, 10)
    log.resume([FIRST])
    read = log.poll(60, 1)
    assert log.behind()[FIRST] == 10 - len(read)
    go_on.set()


def test_messages_of_a_topic_that_was_made_anew_are_as_old_as_they_say(cluster, opened, answered):
    write(cluster, 10)
    log = opened()
    for before, count in ((10, 5), (5, 3)):
        polled(log, before)
        hour_ago = time.time() - 3600
        answered.append(lambda count=count, hour_ago=hour_ago: make_anew(cluster, count, int(hour_ago * 1e6)))
        messages = polled(log, count)
        assert values(messages) == [b"%d" % number for number in range(count)]
        long_ago = time.monotonic() - 3500
        assert all(one.arrived is not None and one.arrived < long_ago for one in messages)
        wait_until(lambda: log.poll(0.01, 1) == [] and log.behind()[FIRST] == 0)
        write(cluster, 5)


def test_commits_that_were_never_answered_do_not_count_once_topics_were_made_anew(cluster, answered, opened, monkeypatch):
    answers = False

    class Reader(Consumer):
        def commit(self, *args: Any, **options: Any) -> Any:
            return super().commit(*args, **options) if answers else None

    monkeypatch.setattr(hps.updates.kafka, "Consumer", Reader)
    write(cluster, 3)
    log = opened()
    polled(log, 3)
    for _ in range(20):
        log.commit({FIRST: "2"})
    answered.append(lambda: make_anew(cluster, 2))
    polled(log, 2)
    answers = True
    log.commit({FIRST: "0"})
    with closing(Consumer({"bootstrap.servers": cluster.address, "group.id": "hps.volatile", "log_level": 2})) as reader:
        place = TopicPartition(TOPIC, 0)
        wait_until(lambda: log.poll(0.01, 1) == [] and reader.committed([place], timeout=20)[0].offset == 1)


def test_a_password_that_is_not_in_config_is_that_of_sasl(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "hps"}
    document = {"type": "kafka", "brokers": "127.0.0.1:1", "config": config}
    without = UpdateSourceConfig.model_validate(document)
    with pytest.raises(ConfigError, match="librdkafka refuses it"):
        KafkaLog.from_config(without, "hps.volatile")
    for more in ({"password": "s3cret"}, {"config": config | {"sasl.password": "s3cret"}}):
        settings = UpdateSourceConfig.model_validate(document | more)
        KafkaLog.from_config(settings, "hps.volatile").close()
        KafkaWriter.from_config(settings).close()
        assert "s3cret" not in repr(settings)
    given: list[str] = []

    class Recording(Producer):
        def __init__(self, settings: dict[str, Any]) -> None:
            given.append(settings["sasl.password"])
            super().__init__(settings)

    monkeypatch.setattr(hps.updates.kafka, "Producer", Recording)
    both = {"password": "below", "config": config | {"sasl.password": "above"}}
    KafkaWriter.from_config(UpdateSourceConfig.model_validate(document | both)).close()
    assert given == ["above"]
