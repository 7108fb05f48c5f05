"""The behaviour that every log of online updates shares; the tests of each kind subclass it."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import UpdateLogError
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.updates.base import Message, Partition, UpdateLog, UpdateLogWriter

Opened = Callable[..., Any]
"""Type of the fixture `opened`."""


def known(moment: float | None) -> float:
    """Require that the log knows a moment."""
    assert moment is not None
    return moment


def polled(log: UpdateLog, count: int, most_bytes: int = 1 << 20) -> list[Message]:
    """Poll the next `count` messages."""
    messages: list[Message] = []

    def enough() -> bool:
        messages.extend(log.poll(0.2, most_bytes))
        return len(messages) >= count

    wait_until(enough, f"{count} messages came")
    assert len(messages) == count
    return messages


def values(messages: Sequence[Message]) -> list[bytes]:
    return [message.value for message in messages]


def written(writer: UpdateLogWriter, partition: Partition, *contents: bytes, time_us: int = 0) -> list[str]:
    """Append messages; return their positions after a flush."""
    answers: list[str | Exception] = []
    for content in contents:
        writer.send(partition, content, time_us=time_us, sent=answers.append)
    assert writer.flush(PATIENCE_S) == 0
    assert not [answer for answer in answers if isinstance(answer, Exception)], answers
    assert len(answers) == len(contents)
    return [str(answer) for answer in answers]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class UpdateLogContract:
    """Subclass it with the classes, the fixture `server`, and access to the log without the code under test.

    `server` is a log that runs at a test's start. `stop()` makes it unreachable, `start()` brings it back: with all that was in
    it, unless `keeps` is False.
    """

    log_class: ClassVar[type[UpdateLog]]
    writer_class: ClassVar[type[UpdateLogWriter]]
    keeps: ClassVar[bool] = True

    def settings(self, server: Any) -> dict[str, Any]:
        """Return `update_source` without the keys that the tests set."""
        raise NotImplementedError

    def add_partitions(self, server: Any, topic: str, count: int) -> None:
        """Raise the number of a topic's partitions to `count`."""
        raise NotImplementedError

    def committed(self, server: Any, group: str, partition: Partition) -> str | None:
        """Return the position of the last message that a group has committed."""
        raise NotImplementedError

    def remove_until(self, server: Any, partition: Partition, position: str) -> None:
        """Remove all messages up to this position, this one included, as retention does."""
        raise NotImplementedError

    @pytest.fixture
    def topic(self, request: pytest.FixtureRequest) -> str:
        return f"hps_et.shop.t{abs(hash((request.node.name, time.monotonic_ns()))):x}"

    @pytest.fixture
    def opened(self, server: Any) -> Iterator[Opened]:
        """Open readers (`opened(group="...")`) and, with `writer=True`, writers; they are closed after the test."""
        with ExitStack() as stack:

            def open_client(*, writer: bool = False, group: str = "hps.test", **changes: Any) -> Any:
                config = UpdateSourceConfig.model_validate(
                    {"metadata_refresh_interval_ms": 200, **self.settings(server), **changes}
                )
                client = self.writer_class.from_config(config) if writer else self.log_class.from_config(config, group)
                return stack.enter_context(closing(client))

            yield open_client

    @pytest.fixture
    def writer(self, opened: Opened) -> UpdateLogWriter:
        writer: UpdateLogWriter = opened(writer=True)
        return writer

    def reader(
        self, opened: Opened, topics: Sequence[str], after: Any = (), begin: str = "earliest", **changes: Any
    ) -> UpdateLog:
        log: UpdateLog = opened(**changes)
        log.follow(topics, dict(after), begin)
        return log

    # --- what is written is read

    def test_messages_are_read_as_they_were_written(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        assert writer.partitions(topic, PATIENCE_S, create=2) == 2
        contents = [b"", b"x", bytes(range(256)), b"\r\n$-1\r\n", os.urandom(5_000_000)]
        positions = written(writer, Partition(topic, 1), *contents, time_us=1_700_000_000_123_000)
        messages = polled(self.reader(opened, [topic]), len(contents))
        assert values(messages) == contents
        assert [message.position for message in messages] == positions
        assert {message.partition for message in messages} == {Partition(topic, 1)}
        assert {message.time_us for message in messages} == {1_700_000_000_123_000}
        assert {message.key for message in messages} == {b""}

    def test_a_message_without_a_time_has_that_of_its_writing(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        before = time.time_ns() // 1000
        written(writer, Partition(topic, 0), b"x")
        after = time.time_ns() // 1000
        (message,) = polled(self.reader(opened, [topic]), 1)
        assert before - 1000 <= message.time_us <= after

    def test_each_partition_is_read_in_its_order_and_all_of_them(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=3)
        writer.partitions(topic + "b", PATIENCE_S, create=1)
        partitions = [*(Partition(topic, number) for number in range(3)), Partition(topic + "b", 0)]
        log = self.reader(opened, [topic, topic + "b"])
        for number in range(400):
            writer.send(partitions[number % 4], b"%d" % number)
        messages = polled(log, 400)
        for index, partition in enumerate(partitions):
            expected = [b"%d" % number for number in range(index, 400, 4)]
            assert values([message for message in messages if message.partition == partition]) == expected
        assert log.lost() == {}

    def test_messages_that_come_while_a_poll_waits_end_it(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        log = self.reader(opened, [topic])
        written(writer, Partition(topic, 0), b"first")
        polled(log, 1)
        with ThreadPoolExecutor(1) as pool:
            for content in (b"x", b"y"):
                polling = pool.submit(log.poll, 2 * PATIENCE_S, 1 << 20)
                written(writer, Partition(topic, 0), content)
                assert values(polling.result(PATIENCE_S)) == [content]
        assert log.poll(0.01, 1 << 20) == []

    def test_a_poll_takes_no_more_once_it_has_enough_bytes(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, Partition(topic, 0), *[bytes(1000)] * 10)
        log = self.reader(opened, [topic])
        wait_until(lambda: log.behind() == {Partition(topic, 0): 10})
        sizes: list[int] = []
        while sum(sizes) < 10:
            sizes.append(len(log.poll(PATIENCE_S, 2000)))
            assert log.delivered == sum(sizes)
        assert max(sizes) <= 2
        assert values(polled(self.reader(opened, [topic]), 10, most_bytes=1)) == [bytes(1000)] * 10

    # --- where reading begins

    def test_reading_resumes_exactly_after_a_position(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        first, second = Partition(topic, 0), Partition(topic, 1)
        positions = written(writer, first, *(b"%d" % number for number in range(10)))
        written(writer, second, b"a", b"b")
        for done in (0, 4, 8):
            messages = polled(self.reader(opened, [topic], {first: positions[done]}), 9 - done + 2)
            assert values([message for message in messages if message.partition == first]) == [
                b"%d" % number for number in range(done + 1, 10)
            ]
            assert values([message for message in messages if message.partition == second]) == [b"a", b"b"]
        log = self.reader(opened, [topic], {first: positions[9]})
        assert values(polled(log, 2)) == [b"a", b"b"]
        written(writer, first, b"10")
        assert values(polled(log, 1)) == [b"10"]

    def test_a_position_of_another_log_is_before_all(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        partition = Partition(topic, 0)
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, partition, b"one", b"two")
        other = "-1" if self.log_class.kind == "redis_stream" else "1700000000000-0"
        log = self.reader(opened, [topic], {partition: other}, "latest")
        log.commit({partition: other})
        assert values(polled(log, 2)) == [b"one", b"two"]
        written(writer, partition, b"three")
        assert values(polled(log, 1)) == [b"three"]

    def test_latest_begins_with_what_is_written_afterwards(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        partition = Partition(topic, 0)
        positions = written(writer, partition, b"old", b"older")
        log = self.reader(opened, [topic], begin="latest")
        wait_until(lambda: log.behind() == {partition: 0})
        positions_at_start = log.begun()
        assert (set(positions_at_start), log.begun()) == ({partition}, {})
        written(writer, partition, b"new")
        assert values(polled(log, 1)) == [b"new"]
        restarted = self.reader(opened, [topic], positions_at_start, begin="latest")  # as if nothing had been polled
        assert (values(polled(restarted, 1)), restarted.begun()) == ([b"new"], {})
        resumed = self.reader(opened, [topic], {partition: positions[0]}, begin="latest")
        assert values(polled(resumed, 2)) == [b"older", b"new"]

    @pytest.mark.parametrize("begin", ["earliest", "latest"])
    def test_all_is_read_of_partitions_and_topics_that_come_later(
        self, opened: Opened, writer: UpdateLogWriter, topic: str, server: Any, begin: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, Partition(topic, 0), b"old")
        log = self.reader(opened, [topic, topic + "b"], begin=begin)
        if begin == "earliest":
            polled(log, 1)
        wait_until(lambda: log.behind() == {Partition(topic, 0): 0})
        self.add_partitions(server, topic, 3)
        writer.partitions(topic + "b", PATIENCE_S, create=2)
        other: UpdateLogWriter = opened(writer=True)
        assert other.partitions(topic, PATIENCE_S) == 3
        written(other, Partition(topic, 2), b"a")
        written(other, Partition(topic + "b", 1), b"b")
        assert sorted(values(polled(log, 2))) == [b"a", b"b"]
        everything = {Partition(topic, number): 0 for number in range(3)} | {
            Partition(topic + "b", number): 0 for number in range(2)
        }
        wait_until(lambda: log.behind() == everything)

    # --- pause, behind, commit

    def test_paused_partitions_are_silent_and_resume_where_they_stopped(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        first, second = Partition(topic, 0), Partition(topic, 1)
        log = self.reader(opened, [topic])
        written(writer, first, *(b"%d" % number for number in range(100)))
        read = values(log.poll(PATIENCE_S, 1))
        log.pause([first])
        written(writer, first, b"100")
        written(writer, second, b"other")
        assert values(polled(log, 1)) == [b"other"]
        wait_until(lambda: log.behind()[first] == 101 - len(read), "what is paused is behind")
        written(writer, second, b"later")
        assert values(polled(log, 1)) == [b"later"], "nothing of the paused partition came before it"
        log.resume([first])
        assert read + values(polled(log, 101 - len(read))) == [b"%d" % number for number in range(101)]

    def test_what_is_paused_again_and_again_is_neither_lost_nor_repeated_nor_forgotten(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=4)
        *partitions, marked = (Partition(topic, number) for number in range(4))
        log = self.reader(opened, [topic], read_ahead_bytes=1 << 20, max_message_bytes=100_000)
        contents = [b"%d" % number + bytes(50_000) for number in range(60)]
        for number, content in enumerate(contents):
            writer.send(partitions[number % 3], content)
        assert writer.flush(PATIENCE_S) == 0
        read: dict[Partition, list[bytes]] = {partition: [] for partition in partitions}

        def read_messages(count: int, most_bytes: int) -> None:
            for message in polled(log, count, most_bytes):
                read[message.partition].append(message.value)

        def are_behind(unread: dict[Partition, int]) -> bool:
            return log.behind() == unread

        read_messages(2, 1)
        for turn in range(8):
            log.pause(partitions)
            log.pause(partitions[1:])
            unread = {partition: 20 - len(read[partition]) for partition in partitions} | {marked: 0}
            wait_until(partial(are_behind, unread), f"{unread} are behind")
            written(writer, marked, b"%d" % turn)
            assert values(polled(log, 1, 1)) == [b"%d" % turn], "nothing that is paused came before it"
            log.resume(partitions[:2])
            log.resume(partitions[1:])
            read_messages(5, 1)
        read_messages(60 - 42, 1)
        assert read == {partition: contents[number::3] for number, partition in enumerate(partitions)}
        wait_until(lambda: set(log.behind().values()) == {0}, "nothing is behind")

    def test_what_is_not_polled_is_behind(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        first, second = Partition(topic, 0), Partition(topic, 1)
        positions = written(writer, first, *[b"x"] * 10)
        log = self.reader(opened, [topic])
        wait_until(lambda: log.behind() == {first: 10, second: 0})
        log.poll(PATIENCE_S, 1)
        wait_until(lambda: log.behind() == {first: 9, second: 0})
        polled(log, 9)
        wait_until(lambda: log.behind() == {first: 0, second: 0})
        resumed = self.reader(opened, [topic], {first: positions[9]})
        wait_until(lambda: resumed.behind() == {first: 0, second: 0})
        resumed = self.reader(opened, [topic], {first: positions[4]})
        wait_until(lambda: (resumed.behind().get(first) or 0) > 0)
        polled(resumed, 5)
        wait_until(lambda: resumed.behind() == {first: 0, second: 0})

    def test_what_comes_while_nobody_polls_is_behind(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        partition, other = Partition(topic, 0), Partition(topic, 1)
        log = self.reader(opened, [topic], metadata_refresh_interval_ms=60_000)

        def was_checked_after(moment: float) -> bool:
            return known(log.unread_since()[other]) > moment

        for round_ in range(3):
            written(writer, partition, *[b"x"] * (round_ + 1))
            polled(log, round_ + 1)
            written(writer, partition, *[b"y"] * 5)
            done = time.monotonic()
            wait_until(lambda: log.behind() == {partition: 5, other: 0})
            wait_until(partial(was_checked_after, done))  # polls continue
            assert known(log.unread_since()[partition]) <= done
            polled(log, 5)
            wait_until(lambda: log.behind() == {partition: 0, other: 0})

    def test_messages_are_as_old_as_the_log_tells_whatever_they_claim(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=3)
        log = self.reader(opened, [topic])
        partitions = [Partition(topic, number) for number in range(3)]

        def was_checked_after(moment: float) -> bool:
            return all(known(at) > moment for at in log.unread_since().values())

        wait_until(lambda: (since := log.unread_since()) and None not in since.values() and len(log.behind()) == 3)
        for hours in (1, -1, 0):
            start = time.monotonic()
            wait_until(partial(was_checked_after, start))  # polls continue
            log.pause(partitions)
            claimed = time.time_ns() // 1000 + hours * 3_600_000_000
            for partition in partitions:
                written(writer, partition, b"x", b"y", b"z", time_us=claimed)
            done = time.monotonic()
            wait_until(lambda: set(log.behind().values()) == {3})
            unread = dict(log.unread_since())
            log.resume(partitions)
            messages = polled(log, 9)
            for message in messages:
                assert start < known(unread[message.partition]) <= done
                assert start < known(message.arrived) <= done
            wait_until(lambda: set(log.behind().values()) == {0})

    def test_a_backlog_is_no_younger_than_the_reader(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        partition = Partition(topic, 0)
        for hours in (1, 0):
            written(writer, partition, b"x", time_us=time.time_ns() // 1000 + hours * 3_600_000_000)
        done = time.monotonic()
        log = self.reader(opened, [topic])
        wait_until(lambda: log.behind() == {partition: 2})
        assert (log.unread_since()[partition] or 0.0) <= done
        assert all((message.arrived or 0.0) <= done + 0.1 for message in polled(log, 2))  # claims are in ms, by another clock
        wait_until(lambda: (log.unread_since()[partition] or 0.0) > done)  # nothing is

    def test_committed_positions_stand_in_the_log_and_change_nothing_that_is_read(
        self, opened: Opened, writer: UpdateLogWriter, topic: str, server: Any
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        partition = Partition(topic, 1)
        positions = written(writer, partition, *[b"x"] * 5)
        log = self.reader(opened, [topic], group="hps.volatile.here")
        polled(log, 5)
        for _ in range(20):
            for position in positions[1:3]:
                log.commit({partition: position})

        def is_committed(position: str) -> bool:
            return log.poll(0.01, 1) == [] and self.committed(server, "hps.volatile.here", partition) == position

        for position in (positions[0], positions[3]):
            log.commit({partition: position})
            wait_until(partial(is_committed, position))
        assert len(polled(self.reader(opened, [topic], group="hps.volatile.here"), 5)) == 5

    # --- what goes wrong

    def test_messages_that_are_gone_are_reported_once_and_reading_goes_on(
        self, opened: Opened, writer: UpdateLogWriter, topic: str, server: Any
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        first, second = Partition(topic, 0), Partition(topic, 1)
        positions = written(writer, first, *(b"%d" % number for number in range(10)))
        others = written(writer, second, b"a", b"b")
        self.remove_until(server, first, positions[6])
        log = self.reader(opened, [topic], {first: positions[3], second: others[0]})
        assert sorted(values(polled(log, 4))) == [b"7", b"8", b"9", b"b"]
        lost: dict[Partition, str] = {}
        wait_until(lambda: bool(lost.update(log.lost()) or lost))
        assert list(lost) == [first]
        assert lost[first]
        written(writer, first, b"10")
        assert values(polled(log, 1)) == [b"10"]
        wait_until(lambda: log.behind() == {first: 0, second: 0}, "it has looked at the partitions again")
        assert log.lost() == {}
        log = self.reader(opened, [topic], {first: positions[7], second: others[1]})
        assert values(polled(log, 3)) == [b"8", b"9", b"10"]
        assert log.lost() == {}

    def test_a_log_that_is_away_at_the_start_is_waited_for(self, opened: Opened, server: Any, topic: str) -> None:
        server.stop()
        log = self.reader(opened, [topic])
        assert log.poll(0.2, 1 << 20) == []
        wait_until(lambda: log.problem != "")
        assert log.behind() == {}
        writer: UpdateLogWriter = opened(writer=True)
        with pytest.raises(UpdateLogError):
            writer.partitions(topic, 0.5)
        with pytest.raises(UpdateLogError):
            writer.last(Partition(topic, 0), 0.5)
        server.start()
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, Partition(topic, 0), b"x")
        assert values(polled(log, 1)) == [b"x"]
        wait_until(lambda: log.problem == "")

    def test_a_topic_that_does_not_exist_is_named_and_the_others_are_read(
        self, opened: Opened, writer: UpdateLogWriter, topic: str
    ) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, Partition(topic, 0), b"x")
        missing = f"{topic}.missing"
        log = self.reader(opened, [missing, topic])
        assert values(polled(log, 1)) == [b"x"]
        wait_until(lambda: log.poll(0.01, 1) == [] and log.lacks(missing))
        assert missing in log.problem_of(missing)
        assert (log.lacks(topic), log.problem_of(topic)) == (False, "")
        assert log.behind() == {Partition(topic, 0): 0}
        writer.partitions(missing, PATIENCE_S, create=1)
        written(writer, Partition(missing, 0), b"y")
        assert values(polled(log, 1)) == [b"y"]
        wait_until(lambda: log.poll(0.01, 1) == [] and (log.lacks(missing), log.problem) == (False, ""))

    def test_a_restart_loses_and_repeats_nothing(
        self, opened: Opened, server: Any, writer: UpdateLogWriter, topic: str
    ) -> None:
        if not self.keeps:
            pytest.skip("this log keeps nothing over a restart")
        writer.partitions(topic, PATIENCE_S, create=1)
        partition = Partition(topic, 0)
        log = self.reader(opened, [topic])
        written(writer, partition, *(b"%d" % number for number in range(10)))
        read = polled(log, 10)
        server.stop()
        wait_until(lambda: log.problem != "")
        answers: list[str | Exception] = []
        for number in range(10, 20):
            writer.send(partition, b"%d" % number, sent=answers.append)
        assert writer.flush(0.2) == 10
        assert log.poll(0.2, 1 << 20) == []
        server.start()
        read += polled(log, 10)
        assert values(read) == [b"%d" % number for number in range(20)]
        assert writer.flush(PATIENCE_S) == 0
        assert answers == [message.position for message in read[10:]]
        wait_until(lambda: log.problem == "" and log.behind() == {partition: 0})
        assert log.lost() == {}

    def test_after_a_flush_everybody_has_heard_in_order(self, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        written(writer, Partition(topic, 0), b"to connect")
        started, resume = threading.Event(), threading.Event()
        received: list[Any] = []

        def receive(answer: str | Exception) -> None:
            if not started.is_set():
                started.set()
                assert resume.wait(PATIENCE_S)  # with a notification from another thread, later answers would overtake this one
            received.append(answer)

        def flushed() -> tuple[int, int]:
            return writer.flush(PATIENCE_S), len(received)

        with ThreadPoolExecutor(1) as pool:
            for _ in range(5):
                writer.send(Partition(topic, 0), b"x", sent=receive)
            flushing = pool.submit(flushed)
            assert started.wait(PATIENCE_S)
            with pytest.raises(TimeoutError):
                flushing.result(0.05)
            resume.set()
            assert flushing.result(PATIENCE_S) == (0, 5)
        assert len(received) == len(set(received)) == 5
        assert received == sorted(received, key=lambda position: [int(part) for part in position.split("-")])

    def test_a_reader_that_nobody_polls_uses_bounded_memory(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=4)
        partitions = [Partition(topic, number) for number in range(4)]
        for number in range(128):
            writer.send(partitions[number % 4], b"%d" % number + bytes(1 << 20))
        assert writer.flush(PATIENCE_S) == 0
        writer.close()
        before = resident_bytes()
        log = self.reader(opened, [topic], read_ahead_bytes=8 << 20, max_message_bytes=2 << 20)
        wait_until(lambda: sum(count or 0 for count in log.behind().values()) == 128, "all are behind")
        sizes = deque([0], maxlen=30)

        def has_settled() -> bool:
            sizes.append(resident_bytes())
            return len(sizes) == sizes.maxlen and max(sizes) - min(sizes) < 1 << 20

        wait_until(has_settled, "no more is read ahead")
        assert max(sizes) - before < 64 << 20
        read = []
        for _ in range(128):
            (message,) = polled(log, 1, 1)
            read.append(int(message.value.rstrip(b"\0")))
            assert resident_bytes() - before < 64 << 20
        for index in range(4):
            assert [number for number in read if number % 4 == index] == list(range(index, 128, 4))

    def test_nothing_is_done_after_close(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        log = self.reader(opened, [topic])
        log.poll(0.1, 1)
        before = set(threading.enumerate())
        for close in (log.close, writer.close):
            close()
            close()
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("hps")]
        assert log.poll(0.01, 1) == []
        with pytest.raises(UpdateLogError):
            writer.send(Partition(topic, 0), b"x")

    def test_closing_ends_while_the_log_is_away(self, opened: Opened, server: Any, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=1)
        log = self.reader(opened, [topic])
        written(writer, Partition(topic, 0), b"x")
        (message,) = polled(log, 1)
        server.stop()
        log.commit({message.partition: message.position})
        answers: list[str | Exception] = []
        writer.send(Partition(topic, 0), b"x", sent=answers.append)
        with ThreadPoolExecutor(1) as pool:
            for close in (log.close, writer.close):
                pool.submit(close).result(PATIENCE_S)
        assert all(isinstance(answer, UpdateLogError) for answer in answers)

    # --- the writer

    def test_a_topic_is_made_once_and_counted(self, writer: UpdateLogWriter, topic: str) -> None:
        with pytest.raises(UpdateLogError, match=topic):
            writer.partitions(topic, 2)
        assert writer.partitions(topic, PATIENCE_S, create=3) == 3
        assert writer.partitions(topic, PATIENCE_S, create=5) == 3
        assert writer.partitions(topic, PATIENCE_S) == 3

    def test_the_last_message_is_found(self, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)
        assert writer.last(Partition(topic, 0), PATIENCE_S) is None
        positions = written(writer, Partition(topic, 0), b"a", b"b", time_us=1_700_000_000_123_000)
        assert writer.last(Partition(topic, 0), PATIENCE_S) == Message(
            Partition(topic, 0), positions[1], 1_700_000_000_123_000, b"", b"b"
        )
        assert writer.last(Partition(topic, 1), PATIENCE_S) is None

    def test_a_message_that_is_too_large_is_refused_and_the_next_is_not(self, opened: Opened, topic: str) -> None:
        writer: UpdateLogWriter = opened(writer=True, max_message_bytes=1_000_000)
        writer.partitions(topic, PATIENCE_S, create=1)
        with pytest.raises(UpdateLogError, match="max_message_bytes"):
            writer.send(Partition(topic, 0), bytes(1_000_001))
        written(writer, Partition(topic, 0), bytes(1_000_000), b"x")
        assert len(polled(self.reader(opened, [topic]), 2)) == 2

    def test_many_threads_send_each_in_its_order(self, opened: Opened, writer: UpdateLogWriter, topic: str) -> None:
        writer.partitions(topic, PATIENCE_S, create=2)

        def send(name: int) -> None:
            for number in range(100):
                writer.send(Partition(topic, name % 2), b"%d %d" % (name, number))

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert writer.flush(PATIENCE_S) == 0
        read = values(polled(self.reader(opened, [topic]), 400))
        for name in range(4):
            expected = [b"%d %d" % (name, number) for number in range(100)]
            assert [value for value in read if value.split()[0] == b"%d" % name] == expected
