"""Replies of Redis that are taken after something else has changed: a pause, a resume, a failure, the server's clock."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import ResponseError

from hps.configuration.tiers import UpdateSourceConfig
from hps.updates.base import Message, Partition
from hps.updates.redis_streams import _BEFORE_ALL, RedisStreamLog, _Facts, _key, _Reader, _Stream
from tests.fakes.clock import Clock

pytestmark = pytest.mark.redis
TOPIC = "hps_et.shop.item"
PARTITIONS = [Partition(TOPIC, number) for number in range(3)]
FIRST = PARTITIONS[0]


class Streams:
    """Streams of a server, read by one reader whose replies can be held up.

    Attributes:
        meanwhile: is called while a reply is on its way.
    """

    def __init__(self, partitions: Sequence[Partition] = PARTITIONS, **settings: Any) -> None:
        self.entries: dict[str, list[bytes]] = {_key(partition): [] for partition in partitions}
        self.meanwhile: Callable[[], object] = lambda: None
        self.log = RedisStreamLog(UpdateSourceConfig(type="redis_stream", **settings), "group")
        self.log.states = {
            partition: _Stream(partition, _key(partition), _BEFORE_ALL, _BEFORE_ALL, exact=True) for partition in partitions
        }
        self.reader = _Reader(self.log, [TOPIC])

    def add(self, count: int, to: Partition = FIRST, size: int = 10) -> None:
        held = self.entries[_key(to)]
        held.extend(b"%d" % number + bytes(size) for number in range(len(held), len(held) + count))

    def xread(self, reads: dict[str, str], count: int, block: int | None) -> list[Any]:
        reply = []
        for key, after in reads.items():
            start = int(after.split("-")[1])
            held = self.entries[key][start : start + count]
            if held:
                reply.append((key.encode(), [(b"1-%d" % (start + n + 1), {b"value": v}) for n, v in enumerate(held)]))
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return reply

    def read(self) -> None:
        self.reader._read(self)  # type: ignore[arg-type]

    def take(self, partition: Partition, position: str) -> None:
        stream = self.log.states[partition]
        with self.log.changed:
            reply = [(stream.key.encode(), [(position.encode(), {})])]
            self.reader._queue_messages({stream.key: stream}, {stream.key: str(stream.read)}, reply)

    def look(self, server_time_us: int = 0) -> None:
        facts = []
        for partition in self.log.states:
            held = len(self.entries[_key(partition)])
            ids = ("1-1" if held else "", f"1-{held}" if held else "")
            facts.append((self.log.states[partition], "", _Facts(held, held, f"1-{held}" if held else "0-0", *ids)))
        self.log.record_facts(facts, time.monotonic(), server_time_us)

    def polled(self, most_bytes: int = 1 << 20) -> list[int]:
        return [int(message.value.rstrip(b"\0")) for message in self.messages(most_bytes)]

    def messages(self, most_bytes: int = 1 << 20) -> list[Message]:
        return self.log.poll(0.0, most_bytes)


def whole(streams: Streams, count: int) -> list[int]:
    """The next `count` messages, read and polled in turn."""
    found: list[int] = []
    for _ in range(3 * count):
        streams.read()
        found += streams.polled()
    assert len(found) == count
    return found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr("hps.updates.redis_streams.time.monotonic", clock)
    return clock


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("polled", [0, 1])
def test_a_reply_that_was_asked_for_before_a_pause_is_not_taken_after_it(resumed: bool, polled: int) -> None:
    streams = Streams([FIRST])
    streams.add(6)
    while polled and len(streams.log.queue) < 3:
        streams.read()  # a message a reply: large ones are expected
    assert streams.polled(polled) == [0][:polled]
    streams.meanwhile = lambda: (streams.log.pause([FIRST]), resumed and streams.log.resume([FIRST]))
    streams.read()
    if not resumed:
        assert streams.polled() == []
        streams.look()
        assert streams.log.behind()[FIRST] == 6 - polled
        streams.log.resume([FIRST])
    assert whole(streams, 6 - polled) == [0, 1, 2, 3, 4, 5][polled:]
    streams.look()
    assert streams.log.behind() == {FIRST: 0}


def test_what_is_paused_is_behind_and_what_was_read_ahead_gives_its_room_back() -> None:
    streams = Streams()
    for partition in PARTITIONS:
        streams.add(100, partition)
    for turn in range(3):
        for _ in range(6):
            streams.read()
        taken = streams.polled(1) + streams.polled(1)
        assert len(taken) == 2
        streams.log.pause(PARTITIONS)
        assert (streams.log.queued_bytes, len(streams.log.queue)) == (0, 0)
        streams.look()
        assert sum(count or 0 for count in streams.log.behind().values()) == 300 - 2 * (turn + 1)
        assert streams.polled() == []
        streams.log.resume(PARTITIONS)
    assert len(whole(streams, 294)) == 294


def test_room_that_a_failed_read_had_is_free_again() -> None:
    streams = Streams(read_ahead_bytes=1 << 20, max_message_bytes=100_000)
    streams.add(3)

    def fail() -> None:
        raise Broken("as it should")

    for _ in range(30):
        streams.meanwhile = fail
        with pytest.raises(Broken):
            streams.read()
        assert streams.log.queued_bytes == 0
    assert whole(streams, 3) == [0, 1, 2]


def test_streams_are_looked_at_now_and_then_and_at_once_if_one_is_none(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, done = Streams([FIRST]), list[str]()
    replies = iter(["", "", "later", "", "WRONGTYPE", "", "close"])

    def xread(*requested: object) -> list[Any]:
        done.append("read")
        if (reply := next(replies)) == "WRONGTYPE":
            raise ResponseError(reply)
        if reply == "later":
            now.now += 10.0
        if reply == "close":
            streams.log.closing.set()
        return []

    monkeypatch.setattr(streams.reader, "_find_partitions", lambda client: None)
    monkeypatch.setattr(streams.reader, "_inspect", lambda client: done.append("look"))
    client: Any = SimpleNamespace(xread=xread)
    streams.reader._serve(client)
    assert done == ["look", "read", "read", "read", "look", "read", "read", "look", "read", "read"]


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_ids_are_dated_by_the_clock_of_the_server(now: Clock, ahead_s: float) -> None:
    server = 1_700_000_000.0 + ahead_s
    streams = Streams()
    stream = streams.log.states[FIRST]
    backlog = f"{int((server - 40) * 1000)}-0"
    facts = _Facts(1, 1, backlog, backlog, backlog)
    streams.log.record_facts([(stream, "", facts)], now.now, int(server * 1e6))
    streams.take(FIRST, backlog)
    (message,) = streams.messages()
    assert message.arrived == pytest.approx(960.0, abs=0.01)
    for later, jump in ((1001.0, 0.0), (1002.0, 7200.0), (1003.0, -100.0)):  # of the server's clock
        now.now = later
        server += 1.0 + jump
        streams.log.record_facts([(stream, "", facts)], now.now, int(server * 1e6))
        added = f"{int((server + 0.5) * 1000)}-7"
        now.now += 0.75
        streams.take(FIRST, added)
        (message,) = streams.messages()
        assert message.arrived == pytest.approx(later + 0.5, abs=0.01)
        facts = _Facts(facts.length + 1, facts.added + 1, added, backlog, added)


def test_messages_that_wait_in_the_queue_stay_as_old_as_they_are_while_looks_go_on(now: Clock) -> None:
    streams = Streams()
    streams.look()
    now.now = 1010.0
    streams.add(3)
    while len(streams.log.queue) < 3:
        streams.read()
    for later in (1020.0, 1030.0, 1040.0):
        now.now = later
        streams.look()
        assert streams.log.unread_since()[FIRST] == pytest.approx(1000.001)  # by the id of the first
        assert streams.log.unread_since()[PARTITIONS[1]] == later
    streams.log.pause(PARTITIONS)
    assert streams.log.unread_since()[FIRST] == pytest.approx(1000.001)
    streams.log.resume(PARTITIONS)
    assert whole(streams, 3) == [0, 1, 2]
    assert streams.log.unread_since()[FIRST] == 1040.0


def test_messages_that_are_removed_while_they_wait_leave_no_lag(now: Clock) -> None:
    streams = Streams()
    stream = streams.log.states[FIRST]
    streams.log.pause(PARTITIONS)
    for later, facts in ((1000.0, _Facts(0, 0, "0-0", "", "")), (1001.0, _Facts(5, 5, "1-5", "1-1", "1-5"))):
        now.now = later
        streams.log.record_facts([(stream, "", facts)], later, 0)
    assert streams.log.unread_since()[FIRST] == 1000.0
    now.now = 5000.0
    streams.log.record_facts([(stream, "", _Facts(0, 5, "1-5", "", ""))], 5000.0, 0)
    assert "5 messages" in streams.log.lost()[FIRST]
    assert streams.log.behind()[FIRST] == 0
    assert streams.log.unread_since()[FIRST] == 5000.0
