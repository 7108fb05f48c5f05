"""What happens to Kafka's clients when the cluster misbehaves: librdkafka's own brokers, which do."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import hps.updates.kafka
from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import ConfigError, ForkedProcessError, UpdateLogError
from hps.testing.update_logs import polled, values, written
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.updates.base import Partition
from hps.updates.kafka import KafkaLog, KafkaWriter
from tests.servers.kafka_mock import FETCH, PRODUCE, KafkaMock

TOPIC = "hps_et.shop.items"
FIRST = Partition(TOPIC, 0)


def settings(address: str, **changes: Any) -> UpdateSourceConfig:
    document = {"type": "kafka", "brokers": address, "metadata_refresh_interval_ms": 100, **changes}
    return UpdateSourceConfig.model_validate(document)


@pytest.fixture
def cluster() -> Iterator[KafkaMock]:
    with KafkaMock() as cluster:
        cluster.create(TOPIC, 2)
        yield cluster


@pytest.fixture
def opened() -> Iterator[Callable[..., KafkaLog]]:
    """Open readers; they are closed after the test."""
    with ExitStack() as stack:

        def open_one(address: str, after: Any = (), begin: str = "earliest", **changes: Any) -> KafkaLog:
            log = stack.enter_context(closing(KafkaLog.from_config(settings(address, **changes), "hps.volatile")))
            log.follow([TOPIC], dict(after), begin)
            return log

        yield open_one


@pytest.fixture
def writer(cluster: KafkaMock) -> Iterator[KafkaWriter]:
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        yield writer


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


def lost(log: KafkaLog) -> dict[Partition, str]:
    """What is reported as lost, once anything is."""
    found: dict[Partition, str] = {}
    wait_until(lambda: bool(log.poll(0.01, 1) or found.update(log.lost()) or found))
    return found


def test_a_message_that_the_broker_refuses_is_told_and_the_next_is_sent(cluster, writer):
    cluster.fail(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE)
    answers: list[Any] = []
    writer.send(FIRST, b"a", sent=answers.append)
    assert writer.flush(20) == 0
    assert isinstance(answers[0], UpdateLogError)
    assert "too large" in str(answers[0])
    assert written(writer, FIRST, b"b") == ["0"]


def test_an_answer_that_raises_takes_no_other_with_it(cluster, writer):
    answers: list[Any] = []

    def fail(_: object) -> None:
        raise RuntimeError("as it should")

    for sent in (fail, answers.append, fail, answers.append):
        writer.send(FIRST, b"x", sent=sent)
    wait_until(lambda: answers == ["1", "3"])


def test_a_send_waits_for_room_and_then_gives_up(cluster, monkeypatch):
    tries: list[bytes] = []

    class Sender(Producer):
        def produce(self, *args: Any, **options: Any) -> None:
            tries.append(args[1])
            super().produce(*args, **options)

    monkeypatch.setattr(hps.updates.kafka, "Producer", Sender)
    monkeypatch.setattr(hps.updates.kafka, "_SEND_S", 0.3)
    config = settings(cluster.address, config={"queue.buffering.max.messages": 10})
    with closing(KafkaWriter.from_config(config)) as writer:
        for number in range(100):
            writer.send(FIRST, b"%d" % number)
        assert writer.flush(20) == 0
        cluster.down()
        for _ in range(10):
            writer.send(FIRST, b"x")
        with pytest.raises(UpdateLogError, match="no room"):
            writer.send(FIRST, b"late")
        assert tries.count(b"late") <= 0.3 / hps.updates.kafka._FULL_S + 3, "it pauses between its tries"


def test_a_topic_that_is_made_anew_is_read_from_its_start(cluster, opened):
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(0, 10))
        cluster.lead(TOPIC, 0, 2)  # librdkafka takes the new topic's leader, whose epoch is 0, for outdated
        log = opened(cluster.address)
        written(writer, FIRST, b"10")
        assert values(polled(log, 11)) == numbers(0, 11)
    cluster.delete(TOPIC)
    wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == f"topic {TOPIC} does not exist")
    assert log.behind() == {Partition(TOPIC, 0): None, Partition(TOPIC, 1): None}
    cluster.create(TOPIC, 3)
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(100, 140))
        written(writer, Partition(TOPIC, 2), b"added")
    assert sorted(values(polled(log, 41))) == sorted([*numbers(100, 140), b"added"])
    found = lost(log)
    assert list(found) == [FIRST]
    assert "recreated after message 10 had been read; reading continues with message 0" in found[FIRST]
    wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == "")


def test_positions_that_are_not_there_are_noticed_in_either_direction(cluster, writer, opened):
    other = Partition(TOPIC, 1)
    written(writer, FIRST, *numbers(0, 10))
    written(writer, other, b"a", b"b")
    cluster.remove_until(TOPIC, 0, 4)
    log = opened(cluster.address, {FIRST: "3", other: "77"})
    assert sorted(values(polled(log, 7))) == [*numbers(5, 10), b"a", b"b"]
    found = lost(log)
    assert "messages 4 to 4" in found[FIRST]
    assert "message 77 was read and is no longer there, the last is 1;" in found[other]


def test_messages_that_go_while_they_are_waited_for_are_noticed(cluster, writer, opened):
    written(writer, FIRST, *numbers(0, 3))
    log = opened(cluster.address)
    polled(log, 3)
    log.pause([FIRST])
    written(writer, FIRST, *numbers(3, 20))
    cluster.remove_until(TOPIC, 0, 9)
    log.resume([FIRST])
    assert values(polled(log, 10)) == numbers(10, 20)
    assert "messages 3 to 9" in lost(log)[FIRST]


def test_a_paused_topic_that_is_made_anew_stays_paused(cluster, opened):
    log, other = opened(cluster.address), Partition(TOPIC, 1)
    wait_until(lambda: log.poll(0.01, 1) == [] and set(log.behind()) == {FIRST, other})
    log.pause([FIRST])
    cluster.delete(TOPIC)
    wait_until(lambda: log.problem == f"topic {TOPIC} does not exist")
    cluster.create(TOPIC, 2)
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(0, 3))
        wait_until(lambda: log.behind() == {FIRST: 3, other: 0})
        written(writer, other, b"marked")
    assert values(polled(log, 1)) == [b"marked"], "nothing that is paused came before it"
    log.resume([FIRST])
    assert values(polled(log, 3)) == numbers(0, 3)


def test_brokers_that_answer_and_send_no_message_are_told(cluster, writer, opened, monkeypatch):
    monkeypatch.setattr(hps.updates.kafka, "_SILENT_S", 0.0)
    log = opened(cluster.address, config={"fetch.error.backoff.ms": 20})
    written(writer, FIRST, b"a")
    polled(log, 1)
    for value in (b"b", b"c"):
        cluster.fail(FETCH, *[KafkaError.REQUEST_TIMED_OUT] * 100_000)  # librdkafka asks again and says nothing
        written(writer, FIRST, value, value)
        log.pause([FIRST])
        wait_until(lambda: log.behind()[FIRST] == 2)
        assert [log.poll(0.01, 1) for _ in range(3)] == [[]] * 3
        assert "send none" not in log.problem, "it was told to wait"
        log.resume([FIRST])
        said = f"{FIRST}: 2 messages are unread, but the brokers send none"
        wait_until(lambda said=said: log.poll(0.01, 1) == [] and said in log.problem and said in log.problem_of(TOPIC))
        cluster.work(FETCH)
        assert values(polled(log, 2)) == [value, value]
        wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == "")


def test_members_of_a_group_of_the_same_name_do_not_disturb(cluster, writer, opened):
    log = opened(cluster.address)
    written(writer, FIRST, b"a")
    polled(log, 1)
    member = Consumer({"bootstrap.servers": cluster.address, "group.id": "hps.volatile", "log_level": 2})
    with closing(member):
        member.subscribe([TOPIC])
        wait_until(lambda: member.poll(0.1) is None and bool(member.assignment()))
        written(writer, FIRST, *numbers(0, 20))
        log.commit({FIRST: "0"})
        assert values(polled(log, 20)) == numbers(0, 20)
        wait_until(lambda: log.poll(0.01, 1) == [] and "committing positions failed" in log.problem)
        written(writer, FIRST, b"z")
        assert values(polled(log, 1)) == [b"z"]


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.REQUEST_TIMED_OUT]
)
def test_a_topic_that_the_brokers_refuse_keeps_no_other_from_being_read(cluster, writer, code):
    others = [f"{TOPIC}.{name}" for name in ("before", "after")]
    for topic in others:
        cluster.create(topic, 1)
    cluster.refuse(TOPIC, code)
    with closing(KafkaLog.from_config(settings(cluster.address), "hps.volatile")) as log:
        log.follow([others[0], TOPIC, others[1]], {}, "earliest")
        for topic in others:
            written(writer, Partition(topic, 0), b"a")
        assert values(polled(log, 2)) == [b"a", b"a"]
        wait_until(lambda: log.poll(0.01, 1) == [] and TOPIC in log.problem_of(TOPIC))
        assert [log.problem_of(topic) for topic in others] == ["", ""]
        assert not log.lacks(TOPIC)
        cluster.refuse(TOPIC, 0)
        written(writer, FIRST, b"b")
        assert values(polled(log, 1)) == [b"b"]
        wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == "")


def test_a_cluster_that_goes_and_comes_is_read_on_and_told_of_once_a_minute(cluster, writer, opened, caplog):
    log = opened(cluster.address)
    written(writer, FIRST, b"a")
    polled(log, 1)
    for value in (b"b", b"c"):
        cluster.down()
        wait_until(lambda: log.poll(0.01, 1) == [] and log.problem != "" and set(log.behind().values()) == {None})
        cluster.up()
        written(writer, FIRST, value)
        assert values(polled(log, 1)) == [value]
        wait_until(lambda: log.poll(0.01, 1) == [] and log.problem == "")
    assert len([record for record in caplog.records if record.name == "hps.updates.kafka"]) == 1


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"no.such.setting": 1}, "no.such.setting"),
        ({"security.protocol": "magic"}, "security.protocol"),
        *(
            ({name: True}, f"{name}: cannot be set")
            for name in ("enable.auto.commit", "auto.offset.reset", "enable.partition.eof")
        ),
        ({"enable.idempotence": False}, "enable.idempotence: cannot be set"),
    ],
)
def test_settings_that_librdkafka_or_the_reader_cannot_have_are_refused(config, complaint):
    for kind in (lambda one: KafkaLog.from_config(one, "g"), KafkaWriter.from_config):
        with pytest.raises(ConfigError, match=complaint):
            kind(settings("127.0.0.1:1", config=config))


def test_settings_of_librdkafka_win(cluster, opened):
    with closing(KafkaWriter.from_config(settings(cluster.address, config={"message.max.bytes": 2000}))) as writer:
        with pytest.raises(UpdateLogError, match="too large"):
            writer.send(FIRST, bytes(3000))
        written(writer, FIRST, b"x")
    log = opened("127.0.0.1:1", config={"bootstrap.servers": cluster.address})
    assert values(polled(log, 1)) == [b"x"]


def test_a_forked_child_is_refused_and_ends(cluster, writer, opened):
    log = opened(cluster.address)
    written(writer, FIRST, b"a")
    polled(log, 1)
    child = os.fork()
    if child == 0:
        refused = 0
        calls = lambda: log.poll(0.1, 1), lambda: log.commit({}), lambda: writer.send(FIRST, b"x"), lambda: writer.flush(1)
        for call in calls:
            try:
                call()
            except ForkedProcessError:
                refused += 1
        log.close()
        writer.close()
        os._exit(0 if refused == 4 else 1)
    wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child or False)
    written(writer, FIRST, b"b")
    assert values(polled(log, 1)) == [b"b"]


def test_opening_and_closing_leaves_no_thread_and_no_descriptor(cluster):
    def open_and_close() -> tuple[int, int]:
        with closing(KafkaLog.from_config(settings(cluster.address), "g")) as log:
            log.follow([TOPIC], {}, "earliest")
            wait_until(lambda: log.poll(0.01, 1) == [] and len(log.behind()) == 2)
        with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
            written(writer, FIRST, b"x")
            writer.last(FIRST, 20)
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    before = [open_and_close() for _ in range(2)][-1]
    wait_until(lambda: all(now <= then for now, then in zip(open_and_close(), before, strict=True)))


# -- what a reader makes of the ends that it asks for, whatever happens before it gets the answer ---------------------------


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
def log(cluster: KafkaMock, opened: Callable[..., KafkaLog], answered: object) -> KafkaLog:
    """A reader that knows its partitions."""
    log = opened(cluster.address, metadata_refresh_interval_ms=50)
    wait_until(lambda: len(log.behind()) == 2)
    return log


def make_anew(cluster: KafkaMock, count: int, time_us: int = 0) -> None:
    cluster.delete(TOPIC)
    cluster.create(TOPIC, 2)
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(0, count), time_us=time_us)


def test_a_message_is_as_old_as_the_question_whose_answer_lacked_it(cluster, writer, log, answered):
    by: list[float] = []
    answered.append(lambda: (written(writer, FIRST, b"x"), by.append(time.monotonic())))
    wait_until(lambda: log.behind()[FIRST] == 1)
    since = log.unread_since()[FIRST]
    assert since is not None
    assert since < by[0]


def test_a_fetch_tells_how_much_is_behind_before_the_next_survey(cluster, writer, log, answered):
    asking, go_on = threading.Event(), threading.Event()
    answered.append(lambda: (asking.set(), go_on.wait(PATIENCE_S)))
    assert asking.wait(PATIENCE_S)
    log.pause([FIRST])
    written(writer, FIRST, *numbers(0, 10))
    log.resume([FIRST])
    read = log.poll(60, 1)
    assert log.behind()[FIRST] == 10 - len(read)
    go_on.set()


def test_messages_of_a_topic_that_was_made_anew_are_as_old_as_they_say(cluster, log, answered):
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(0, 10))
    polled(log, 10)
    for count in (5, 3):
        hour_ago = time.time() - 3600
        answered.append(lambda count=count, hour_ago=hour_ago: make_anew(cluster, count, int(hour_ago * 1e6)))
        messages = polled(log, count)
        assert values(messages) == numbers(0, count)
        long_ago = time.monotonic() - 3500
        assert all(message.arrived is not None and message.arrived < long_ago for message in messages)
        wait_until(lambda: log.poll(0.01, 1) == [] and log.behind()[FIRST] == 0)


def test_commits_that_were_never_answered_do_not_count_once_topics_were_made_anew(cluster, answered, opened, monkeypatch):
    answers = False

    class Reader(Consumer):
        def commit(self, *args: Any, **options: Any) -> Any:
            return super().commit(*args, **options) if answers else None

    monkeypatch.setattr(hps.updates.kafka, "Consumer", Reader)
    with closing(KafkaWriter.from_config(settings(cluster.address))) as writer:
        written(writer, FIRST, *numbers(0, 3))
    log = opened(cluster.address, metadata_refresh_interval_ms=50)
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
