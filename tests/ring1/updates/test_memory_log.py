"""The fake log keeps the contract that the tests of its users rely on."""

import pytest

from hps.errors import UpdateLogError
from hps.updates.base import Partition
from tests.fakes.memory_log import MemoryBroker, MemoryLog, MemoryLogWriter

TOPIC = "hps_et.shop.item"
FIRST, SECOND = Partition(TOPIC, 0), Partition(TOPIC, 1)


def values(log: MemoryLog, most_bytes: int = 1 << 20) -> list[bytes]:
    return [message.value for message in log.poll(0.0, most_bytes)]


def test_a_reader_begins_where_it_is_told_and_finds_what_is_added() -> None:
    broker = MemoryBroker()
    log, late, writer = MemoryLog(broker), MemoryLog(broker), MemoryLogWriter(broker)
    log.follow([TOPIC], {FIRST: "0"}, "latest")
    assert values(log) == []
    assert TOPIC in log.problem
    assert writer.partitions(TOPIC, 1.0, create=1) == 1
    assert writer.last(FIRST, 1.0) is None
    for value in (b"a", b"b", b"c"):
        writer.send(FIRST, value)
    late.follow([TOPIC], {}, "latest")
    assert writer.last(FIRST, 1.0).value == b"c"
    assert values(log, 1) == [b"b"]
    assert log.behind() == {FIRST: 1}
    log.pause([FIRST])
    broker.create(TOPIC, 2)
    writer.send(SECOND, b"d")
    assert values(log) == values(late) == [b"d"]
    log.resume([FIRST])
    assert values(log) == [b"c"]
    assert log.problem == ""


def test_faults() -> None:
    broker = MemoryBroker()
    broker.create(TOPIC)
    log, writer = MemoryLog(broker, "g"), MemoryLogWriter(broker)
    log.follow([TOPIC], {}, "earliest")
    answers: list[object] = []
    for value in (b"a", b"b", b"c"):
        writer.send(FIRST, value, sent=answers.append)
    broker.refuse = lambda partition, value: value == b"no"
    writer.send(FIRST, b"no", sent=answers.append)
    assert answers[:3] == ["0", "1", "2"]
    assert isinstance(answers[3], UpdateLogError)
    broker.away = True
    assert values(log) == []
    assert "away" in log.problem
    assert log.behind() == {FIRST: None}
    with pytest.raises(UpdateLogError):
        writer.send(FIRST, b"d")
    broker.away = False
    broker.lose(FIRST, 2)
    assert values(log) == [b"c"]
    assert list(log.lost()) == [FIRST]
    assert log.lost() == {}
    log.commit({FIRST: "2"})
    assert broker.committed == {"g": {FIRST: "2"}}
    broker.drop(TOPIC)
    assert values(log) == []
    broker.create(TOPIC)
    writer.send(FIRST, b"anew")
    assert values(log) == [b"anew"]
    assert list(log.lost()) == [FIRST]
