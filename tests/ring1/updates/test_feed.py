"""A feed applies what its log brings: everything, in order, whatever fails."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import DatabaseError, NotReadyError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.rows import row_kernels
from hps.statistics.metrics import Metrics
from hps.statistics.snapshot import UpdateStatus
from hps.stores.base import LogPosition, RowChanges
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.updates import feed as feed_module
from hps.updates.base import Message, Partition
from hps.updates.feed import TableTopic, UpdateFeed
from hps.updates.framing import encode
from tests.fakes.clock import Clock
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.update_target import MemoryTarget
from tests.tables.hugectr_messages import encode_hugectr

TOPIC, OTHER = "hps_et.shop.item", "hps_et.shop.user"
FIRST, SECOND, USERS = Partition(TOPIC, 0), Partition(TOPIC, 1), Partition(OTHER, 0)
LABELS = {"model": "shop", "table": "item"}
NOW_US = 1_800_000_000_000_000
DIM = 2


def upsert(sequence: int, *keys: int, value: float | None = None, time_us: int = NOW_US, **more: Any) -> bytes:
    vectors = np.full((len(keys), DIM), sequence if value is None else value, np.float32)
    return encode(np.array(keys, np.int64), vectors, sequence=sequence, time_us=time_us, **more)


def delete(sequence: int, *keys: int) -> bytes:
    return encode(np.empty(0, np.int64), np.empty((0, DIM), np.float32), np.array(keys, np.int64), sequence=sequence)


class Rejects:
    """Keeps dead letters."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, str, int]] = []

    def add(self, message: Message, reason: str, detail: str, sequence: int) -> None:
        assert detail
        self.kept.append((message.position, reason, sequence))


class World:
    """A broker with two tables' topics, a target, and feeds between them."""

    def __init__(self, partitions: int = 1) -> None:
        self.broker, self.target, self.rejects = MemoryBroker(), MemoryTarget(), Rejects()
        self.metrics = Metrics()
        self.row_dtype = "float32"  # of the first table
        self.start: dict[Partition, LogPosition] = {}
        self.log = MemoryLog(self.broker)
        self.broker.create(TOPIC, partitions)
        self.broker.create(OTHER)

    def feed(self, **settings: Any) -> UpdateFeed:
        tables = [TableTopic(0, "item", TOPIC, DIM, 8, self.start, self.row_dtype), TableTopic(1, "user", OTHER, DIM, 8, {})]
        config = UpdateSourceConfig(**{"type": "kafka_message_queue", "poll_timeout_ms": 5, "failure_backoff_ms": 1} | settings)
        self.log = MemoryLog(self.broker, "group")
        rejects: Any = self.rejects
        return UpdateFeed("shop", "1", tables, self.target, self.log, rejects, config, self.metrics)

    def begun(self, most_bytes: int = 1 << 20, **settings: Any) -> UpdateFeed:
        """A feed that the test runs round by round."""
        feed = self.feed(**settings)
        feed._start_following()
        feed._most_bytes = most_bytes
        return feed

    @contextmanager
    def running(self, **settings: Any) -> Iterator[UpdateFeed]:
        feed = self.feed(**settings)
        feed.start()
        try:
            yield feed
        finally:
            assert feed.stop()
            assert self.log.closed

    def send(self, *values: bytes, to: Partition = FIRST, **more: Any) -> None:
        for value in values:
            self.broker.append(to, value, **more)

    def rows(self, index: int = 0) -> dict[int, float | None]:
        return {key: None if vector is None else vector[0] for key, (_, vector) in self.target.rows[index].items()}

    def stored(self, index: int = 0) -> dict[str, str]:
        return {name: at.position for name, at in self.target.positions[index].items()}

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, LABELS | labels)

    def settled(self, **positions: str) -> bool:
        """Whether this is stored of the partitions of `item`, by number."""
        wanted = {f"{TOPIC}/{number[1:]}": position for number, position in positions.items()}
        return self.target.until(lambda: self.stored() == wanted)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("hps.updates.feed._now_us", lambda: NOW_US)
    return World()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the feeds that are made from now on."""
    clock = Clock(100.0)
    monkeypatch.setattr("hps.updates.feed._clock", clock)
    return clock


def status(feed: UpdateFeed, table: str = "item") -> UpdateStatus:
    return next(one for one in feed.status() if one.table == table)


def lag(feed: UpdateFeed, table: str = "item") -> tuple[float | None, int | None]:
    """Seconds and messages."""
    return status(feed, table).lag_s, status(feed, table).behind


def always(error: Exception) -> Callable[[int, RowChanges], None]:
    """What a target does before each change."""

    def fail(index: int, changes: RowChanges) -> None:
        raise error

    return fail


def test_changes_are_applied_with_the_position_before_them_and_the_last_is_stored_in_a_quiet_moment(world: World) -> None:
    world.send(upsert(10, 1, 2), upsert(11, 3))
    with world.running(max_batch_size=2) as feed:
        assert world.settled(_0="1")
        world.send(upsert(12, 1), delete(13, 2))
        assert world.settled(_0="3")
        world.send(upsert(14, 4), to=USERS)
        assert world.target.until(lambda: world.stored(1) == {f"{OTHER}/0": "0"})
        item, user = feed.status()
        assert (item.positions, item.behind, item.lag_s, item.rows, item.problem) == ({str(FIRST): "3"}, 0, 0.0, 5, "")
        assert (item.model, item.version, item.table, item.topic) == ("shop", "1", "item", TOPIC)
        assert (user.rows, user.connected) == (1, True)
    calls = [(sorted(keys), positions[FIRST]) for index, keys, positions in world.target.calls if index == 0]
    assert calls[:3] == [([1, 2], "-1"), ([3], "0"), ([], "1")]
    assert calls[-1] == ([], "3")
    assert world.rows() == {1: 12.0, 2: None, 3: 11.0}
    assert world.target.rows[0][2][0] == 13
    assert world.broker.committed["group"] == {FIRST: "3", USERS: "0"}
    assert world.sample("hps_update_rows_total", change="upsert") == 4
    assert world.sample("hps_update_rows_total", change="delete") == 1


def test_of_several_changes_of_a_key_in_a_batch_the_latest_remains(world: World) -> None:
    twice = encode(np.array([5, 5, 6, 7]), np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32), np.array([7]), sequence=30)
    world.send(upsert(20, 1, 2, 3), upsert(22, 1), upsert(21, 2), delete(19, 3), twice, upsert(30, 6, value=8.0))
    with world.running():
        assert world.settled(_0="5")
        assert world.rows() == {1: 22.0, 2: 21.0, 3: 20.0, 5: 2.0, 6: 8.0, 7: None}
        world.send(upsert(15, 1, 9))
        assert world.settled(_0="6")
        assert world.rows()[1] == 22.0
        wait_until(lambda: world.sample("hps_update_stale_rows_total") == 1)


def test_a_message_larger_than_a_batch_is_applied_in_pieces_before_its_position_counts(world: World) -> None:
    world.send(upsert(1, 0), upsert(2, *range(10)))
    with world.running(max_batch_size=4):
        assert world.settled(_0="1")
    sizes = [(len(keys), positions[FIRST]) for index, keys, positions in world.target.calls if keys]
    assert sorted(sizes) == [(3, "-1"), (3, "-1"), (4, "-1")]
    assert set(world.rows().values()) == {2.0}


def test_hugectr_frames_get_the_time_as_sequence_and_ascend_when_a_clock_jumps(world: World) -> None:
    frame = encode_hugectr(np.array([1]), np.ones((1, DIM), np.float32))
    world.target.positions[0] = {FIRST: LogPosition("", 50)}
    for time_us in (60, 40, 1 << 70):
        world.send(frame, time_us=time_us)
    world.send(upsert(70, 2), b"HCTR\x08\0\0\0", frame, time_us=80)
    seen: list[int] = []
    world.target.before = lambda index, changes: seen.extend(changes.sequences.tolist())
    with world.running(max_batch_size=1) as feed:
        assert world.settled(_0="5")
        assert status(feed).dead_letters == {}
    assert seen == [60, 61, 1 << 62, 70, (1 << 62) + 1]


@pytest.mark.parametrize(
    ("stored", "manifest", "begin", "wanted"),
    [
        ({FIRST: LogPosition("1", 3)}, {FIRST: LogPosition("0")}, "earliest", [3]),
        ({}, {FIRST: LogPosition("0")}, "earliest", [2, 3]),
        ({}, {Partition("hps_et.former.item", 0): LogPosition("1")}, "earliest", [1, 2, 3]),
        ({}, {}, "latest", []),
    ],
)
def test_a_table_begins_where_its_database_is_else_its_files_else_as_configured(
    world: World, stored: dict[Partition, LogPosition], manifest: dict[Partition, LogPosition], begin: str, wanted: list[int]
) -> None:
    world.send(*(upsert(n, n) for n in (1, 2, 3)))
    world.target.positions[0], world.start = stored, manifest
    with world.running(begin=begin):
        assert world.settled(_0="2")
        world.broker.create(TOPIC, 2)
        world.send(upsert(4, 4), to=SECOND)
        assert world.settled(_0="2", _1="0")
    assert sorted(world.rows()) == [*wanted, 4]


def test_what_comes_while_nobody_follows_is_not_skipped_by_latest(world: World) -> None:
    world.send(upsert(1, 1))
    with world.running(begin="latest"):
        assert world.settled(_0="0")
    world.send(upsert(2, 2))
    with world.running(begin="latest"):
        assert world.settled(_0="1")
    assert world.rows() == {2: 2.0}


def test_a_bad_message_is_put_aside_and_the_next_one_is_applied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = feed_module.decode

    def decode_with_a_bug(value: bytes, *args: Any, **more: Any) -> Any:
        if value == b"bug":
            raise ZeroDivisionError("oh")
        return decode(value, *args, **more)

    monkeypatch.setattr(feed_module, "decode", decode_with_a_bug)
    wide = encode(np.array([1]), np.ones((1, DIM + 1), np.float32), sequence=20)
    world.send(upsert(10, 1), wide, upsert(30, 1, table="user"), b"nonsense", b"bug", upsert(40, *range(40)))
    world.send(upsert(41, 2), key=b"key")
    world.send(upsert(50, 3))
    with world.running(max_message_bytes=200) as feed:
        assert world.settled(_0="7")
        reasons = {"width": 1, "table": 1, "magic": 1, "internal": 1, "too_large": 1, "keyed": 1}
        assert status(feed).dead_letters == reasons
        assert status(feed).problem == ""
    assert world.rows() == {1: 10.0, 3: 50.0}
    # a message that can be read keeps its place in the order, and any other has one behind what came before it
    assert world.rejects.kept == [
        ("1", "width", 20),
        ("2", "table", 30),
        ("3", "magic", 31),
        ("4", "internal", 32),
        ("5", "too_large", 40),
        ("6", "keyed", 41),
    ]
    assert all(world.sample("hps_update_dead_letters_total", reason=reason) == 1 for reason in reasons)
    assert world.sample("hps_update_bytes_total") == len(upsert(10, 1)) + len(upsert(50, 3))


@pytest.mark.parametrize(("row_dtype", "value"), [("int8", 1e8), ("float16", 1e5), ("bfloat16", 3.4e38)])
def test_a_message_with_a_row_that_does_not_fit_is_put_aside(world: World, row_dtype: str, value: float) -> None:
    world.row_dtype = row_dtype
    good, bad = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, value]], np.float32)
    keys = np.array([1, 2])
    compile_kernels(*row_kernels([row_dtype]))  # which may take longer than the feed is waited for
    for sequence, vectors in ((10, good), (20, bad), (30, good[::-1].copy()), (40, bad)):
        world.send(encode(keys, vectors, sequence=sequence))
    with world.running(max_batch_size=2) as feed:
        assert world.settled(_0="3")
        assert status(feed).dead_letters == {"row_dtype": 2}
        assert status(feed).problem == ""
    assert world.rejects.kept == [("1", "row_dtype", 20), ("3", "row_dtype", 40)]
    assert world.target.rows[0] == {1: (30, [3, 4]), 2: (30, [1, 2])}, "as they were sent: the target encodes them"


@pytest.mark.parametrize("error", [DatabaseError("the disk is full"), ZeroDivisionError("oh")])
def test_a_failed_batch_is_tried_again_while_other_tables_go_on(world: World, clock: Clock, error: Exception) -> None:
    def fail(index: int, changes: RowChanges) -> None:
        if index == 0:
            raise error

    feed, succeed = world.begun(), world.target.before
    world.target.before = fail
    world.send(upsert(1, 1))
    for turn in range(4):
        feed._run_once()
        clock.now += 10.0
        if turn == 0:
            world.send(*(upsert(n, n) for n in range(2, 50)))
            world.send(upsert(1, 7), upsert(1, 8), to=USERS)
    assert len(world.rows(1)) == 2
    assert (str(error) in status(feed).problem, status(feed, "user").problem, status(feed).behind) == (True, "", 49)
    assert world.log.behind()[FIRST] == 48  # nothing was polled meanwhile
    world.target.before = succeed
    for _ in range(3):
        feed._run_once()
    assert (world.rows(), status(feed).problem) == ({n: float(n) for n in range(1, 50)}, "")
    assert world.sample("hps_update_failures_total") == 4


def test_a_batch_that_fails_is_tried_less_and_less_often_until_a_success(world: World, clock: Clock) -> None:
    """Which ends the patience with a target that is out of service, too."""
    feed, succeed = world.begun(failure_backoff_ms=100), world.target.before
    table, retired = feed._tables[TOPIC], NotReadyError("retired")
    few, many = [0.1, 0.2, 0.4], [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    for turn, (error, pauses) in enumerate([(retired, few), (retired, few), (DatabaseError("down"), many)], start=1):
        world.target.before = always(error)
        world.send(upsert(turn, 1))
        for pause in pauses:
            feed._run_once()
            assert table.retry_at - clock.now == pytest.approx(pause)
            clock.now = table.retry_at
        world.target.before = succeed
        feed._run_once()
        assert world.rows() == {1: turn}
        clock.now += 40.0


def test_a_database_that_does_not_say_where_to_begin_is_asked_again(world: World) -> None:
    failures = iter([DatabaseError("down")] * 3)

    def fail(index: int, changes: RowChanges) -> None:
        for error in failures:
            raise error

    world.target.before = fail
    world.send(upsert(1, 1))
    with world.running():
        assert world.settled(_0="0")


def test_a_feed_whose_target_is_gone_for_long_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.updates.feed._REPLACEMENT_WAIT_S", 0.05)
    world.target.before = always(NotReadyError("retired"))
    with world.running() as feed:
        wait_until(lambda: not feed.alive)
        assert "out of service" in status(feed).problem
        assert not feed.wait_for_lag(1.0, 10.0, lambda late, left_s: False)


@pytest.mark.parametrize("moment", ["while the last one refuses", "before the next one refuses"])
def test_a_target_that_takes_over_late_gets_its_own_time(world: World, clock: Clock, moment: str) -> None:
    """The feed has waited for as long as it may; the time of the target that is there counts, not that of the one before."""
    feed, next_one = world.begun(), MemoryTarget()
    world.send(upsert(1, 1))

    def refuse(index: int, changes: RowChanges) -> None:
        if moment == "while the last one refuses" and clock.now > 120.0:
            assert feed.replace_target(next_one)
        raise NotReadyError("retired")

    world.target.before = refuse
    feed._run_once()
    clock.now += 30.5
    if moment == "before the next one refuses":
        next_one.before = refuse
        assert feed.replace_target(next_one)
        feed._run_once()
        next_one.before = lambda index, changes: None
        clock.now += 29.5
    else:
        feed._run_once()
    feed._run_once()
    assert next_one.rows[0].keys() == {1}


def test_a_feed_that_has_given_up_says_so_to_its_next_target(world: World, clock: Clock) -> None:
    feed, world.target.before = world.feed(), always(NotReadyError("retired"))
    for seconds in (0.0, 29.9):
        clock.now += seconds
        assert not feed._follow(feed._tables[TOPIC])
    clock.now += 0.1
    with pytest.raises(feed_module._Orphaned):
        feed._follow(feed._tables[TOPIC])
    assert not feed.replace_target(MemoryTarget())


def test_a_missing_topic_is_the_problem_of_its_table_alone(
    world: World, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.broker.drop(OTHER)
    feed = world.begun()
    for turn in range(3):  # it is said once
        clock.now += 2
        world.send(upsert(turn + 1, 1))
        feed._run_once()
    assert world.rows() == {1: 3.0}
    item, user = feed.status()
    assert (item.problem, item.connected, item.lag_s) == ("", True, 0.0)
    assert (user.problem, user.connected, user.lag_s) == (f"there is no topic {OTHER}", False, None)
    world.broker.create(OTHER)
    for _ in range(3):
        clock.now += 2
        feed._run_once()
        assert (status(feed, "user").problem, status(feed, "user").connected) == ("", True)
    said = [record.getMessage().partition("updates of model 'shop', user: ")[2] for record in caplog.records]
    assert [one for one in said if one] == [f"there is no topic {OTHER}", "they can be read again"]


def test_a_log_that_raises_is_polled_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, raised = MemoryLog.poll, threading.Event()

    def fail_once(log: MemoryLog, timeout_s: float, most_bytes: int) -> list[Message]:
        if not raised.is_set():
            raised.set()
            raise ZeroDivisionError("oh")
        return poll(log, timeout_s, most_bytes)

    monkeypatch.setattr(MemoryLog, "poll", fail_once)
    with world.running() as feed:
        wait_until(lambda: "oh" in status(feed).problem)
        world.send(upsert(1, 1))
        assert world.settled(_0="0")
        assert status(feed).problem == ""


def test_a_log_that_refuses_to_commit_is_followed_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(positions: Any) -> None:
        raise ValueError("no offset")

    with world.running():
        monkeypatch.setattr(world.log, "commit", refuse)
        world.send(upsert(10, 1))
        wait_until(lambda: "committing positions failed" in caplog.text)
        world.send(upsert(11, 1))
        wait_until(lambda: world.rows() == {1: 11})


def test_positions_are_committed_at_most_at_every_interval_of_messages_or_when_idle(world: World) -> None:
    committed: list[str] = []
    feed = world.begun(max_commit_interval=4)
    world.log.commit = lambda positions: committed.append(positions[FIRST])  # type: ignore[method-assign]
    for n in range(10):
        world.send(upsert(n + 1, n))
        feed._run_once()
    feed._run_once()
    feed._run_once()
    assert committed == ["3", "7", "9"]


def test_a_share_of_the_device_leaves_the_rest_of_the_time(world: World, clock: Clock) -> None:
    rests: list[float] = []
    feed = world.begun(device_share=0.25)
    world.target.before = lambda index, changes: setattr(clock, "now", clock.now + 2.0)
    feed._worker.stop.wait = lambda seconds=None: rests.append(seconds or 0.0) or False  # type: ignore[method-assign]
    world.send(upsert(1, 1))
    feed._run_once()
    assert rests == [6.0]


def test_lag_is_the_age_of_the_oldest_message_that_is_not_applied(world: World, clock: Clock) -> None:
    world.broker.clock = clock
    feed = world.feed()
    assert lag(feed) == (None, None)
    feed._start_following()
    assert lag(feed) == (0.0, 0)
    for second in (1, 2, 3):
        world.send(upsert(second, 1, time_us=NOW_US - 10**9))
        clock.now += 1.0
    assert (lag(feed), lag(feed, "user")[0]) == ((3.0, 3), 0.0)
    feed._most_bytes = 1
    for left in (2, 1, 0):
        feed._run_once()
        assert lag(feed) == (left, left)
    clock.now += 5.0
    assert lag(feed) == (0.0, 0)
    world.broker.away = True
    clock.now += 7.0
    assert (lag(feed), status(feed).connected) == ((7.0, None), True)
    feed._run_once()
    assert not status(feed).connected
    assert "away" in status(feed).problem


def test_a_message_that_is_polled_waits_until_it_is_applied(world: World, clock: Clock) -> None:
    world.broker.clock = clock
    feed = world.begun()
    world.target.before, succeed = always(DatabaseError("down")), world.target.before
    world.send(upsert(1, 1), upsert(2, 1))
    feed._run_once()
    clock.now += 4.0
    world.send(upsert(3, 1))
    clock.now += 2.0
    assert lag(feed) == (6.0, 3)
    feed._run_once()
    clock.now += 3.0
    assert lag(feed) == (9.0, 3)
    world.target.before = succeed
    feed._run_once()  # what was polled; the rest waits in the log, which was paused
    assert lag(feed) == (5.0, 1)
    feed._run_once()
    assert lag(feed) == (0.0, 0)


def test_messages_of_one_poll_wait_until_the_last_batch_of_them_is_applied(world: World, clock: Clock) -> None:
    world.broker.clock = clock
    feed = world.begun(max_batch_size=1)
    world.send(upsert(1, 1), upsert(2, 2), upsert(3, 3))
    clock.now += 5.0
    seen = []
    world.target.before = lambda index, changes: seen.append(lag(feed))
    feed._run_once()
    assert seen[:3] == [(5.0, 3), (5.0, 2), (5.0, 1)]
    assert lag(feed) == (0.0, 0)


def test_of_three_partitions_the_worst_counts_and_an_unknown_one_is_not_taken_for_none(world: World, clock: Clock) -> None:
    world.broker.clock = clock
    world.broker.create(TOPIC, 3)
    feed = world.begun()
    for number in (1, 0, 2):
        clock.now += 10.0
        world.send(upsert(1, 1), to=Partition(TOPIC, number))
    clock.now += 5.0
    assert lag(feed) == (25.0, 3)
    since = world.log.unread_since()
    world.log.unread_since = lambda: since | {SECOND: None}  # type: ignore[method-assign]
    assert lag(feed)[0] is None


def test_messages_on_their_way_from_the_log_count_as_unread(world: World) -> None:
    world.broker.delay_s = 0.2
    with world.running() as feed:
        wait_until(lambda: lag(feed)[1] == 0)
        for sequence in (1, 2):
            world.send(upsert(sequence, sequence))
            wait_until(lambda: lag(feed)[1] == 0)
            assert sequence in world.rows()


def test_a_time_of_the_future_hides_no_lag_and_is_counted(world: World, clock: Clock) -> None:
    world.broker.clock = clock
    feed = world.begun(most_bytes=1)
    world.send(upsert(1, 1, time_us=NOW_US + 3_600_000_000), *(upsert(n, 1, time_us=NOW_US) for n in range(2, 1501)))
    clock.now += 600.0
    feed._run_once()
    assert (lag(feed), status(feed).future_times) == ((600.0, 1499), 1)
    assert [feed.wait_for_lag(most, 0.0, lambda late, left_s: False) for most in (599.9, 600.0)] == [False, True]
    world.send(upsert(2000, 2, time_us=NOW_US + 1_000_000), upsert(2001, 2, time_us=NOW_US + 1_000_001))
    feed._most_bytes = 1 << 20
    feed._run_once()
    assert (lag(feed), status(feed).future_times) == ((0.0, 0), 2)
    assert world.sample("hps_update_future_times_total") == 2


def test_waiting_for_a_lag_ends_with_it_or_with_the_time_or_when_told(world: World) -> None:
    world.broker.away = True
    with world.running() as feed:
        assert not feed.wait_for_lag(1.0, 0.02, lambda late, left_s: False)
        assert not feed.wait_for_lag(1.0, 10.0, lambda late, left_s: True)
        world.broker.away = False
        assert feed.wait_for_lag(1.0, 10.0, lambda late, left_s: False)


def test_ages_are_counted_by_rows_and_a_clock_that_is_ahead_counts_as_no_age(world: World) -> None:
    world.send(upsert(1, 1, 2, time_us=NOW_US - 30_000), upsert(2, 3, time_us=NOW_US + 10**12))
    world.send(upsert(3, 4, time_us=NOW_US - 10**7))
    with world.running():
        assert world.settled(_0="2")
        expected = {"0.001": 1, "0.02": 1, "0.035": 3, "10": 4, "+Inf": 4}
        assert {le: world.sample("hps_update_visible_seconds_bucket", le=le) for le in expected} == expected
        assert world.sample("hps_update_visible_seconds_sum") == pytest.approx(10.06)
        assert world.sample("hps_update_lag_messages") == world.sample("hps_update_lag_seconds") == 0
        assert world.sample("hps_update_connected") == 1
    assert world.sample("hps_update_lag_seconds") is None  # it is stopped


def test_a_stop_ends_a_feed_that_fails_for_ever_and_leaves_no_thread(world: World) -> None:
    failed = threading.Event()

    def fail(index: int, changes: RowChanges) -> None:
        failed.set()
        raise DatabaseError("down")

    world.target.before = fail
    world.send(upsert(1, 1))
    with world.running(failure_backoff_ms=3_600_000) as feed:
        assert failed.wait(PATIENCE_S)
        assert {update.table for update in world.metrics.updates()} == {"item", "user"}
    assert (world.metrics.updates(), feed.alive, feed.stop()) == ([], False, True)
    assert not any(thread.name == "hps-updates-shop" for thread in threading.enumerate())


def test_a_forked_child_is_stopped(world: World) -> None:
    with world.running() as feed:
        if not (pid := os.fork()):
            with suppress(BaseException):
                os._exit(0 if feed.stop() and not feed.alive else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        world.send(upsert(1, 1))
        assert world.settled(_0="0")


def test_a_batch_ends_with_the_message_that_fills_it_and_the_others_follow(world: World) -> None:
    world.broker.create(TOPIC, 3)
    feed = world.begun(max_batch_size=2)
    for number in range(3):
        world.send(upsert(10 + number, 1 + number), upsert(20 + number, 4 + number), to=Partition(TOPIC, number))
    feed._run_once()
    assert [keys for _, keys, _ in world.target.calls] == [[1, 4], [2, 5], [3, 6]]
    feed._run_once()
    expected = {Partition(TOPIC, number): LogPosition("1", 20 + number) for number in range(3)}
    assert world.target.positions[0] == expected


def test_positions_without_rows_are_stored_at_the_interval(world: World) -> None:
    feed = world.begun(most_bytes=1, max_commit_interval=3)
    world.send(*[b"junk"] * 7)
    stored = []
    for _ in range(7):
        feed._run_once()
        stored.append(world.stored().get(str(FIRST)))
    assert stored == [None, None, None, "2", "2", "2", "5"]
    assert status(feed).dead_letters == {"magic": 7}


def test_partitions_that_are_added_to_failing_tables_pause_in_each_of_them(world: World, clock: Clock) -> None:
    feed = world.begun()
    world.target.before = always(DatabaseError("down"))
    for partition in (FIRST, USERS):
        world.send(upsert(1, 1), to=partition)
    feed._run_once()
    added = {Partition(topic, 1) for topic in (TOPIC, OTHER)}
    for partition in added:
        world.broker.create(partition.topic, 2)
        world.send(upsert(1, 2), to=partition)
    feed._run_once()
    assert world.log._paused == {FIRST, USERS, *added}


def test_a_replaced_target_is_tried_at_once_and_the_same_one_when_it_is_due(world: World, clock: Clock) -> None:
    feed = world.begun(failure_backoff_ms=300)
    world.target.before = always(DatabaseError("down"))
    world.send(upsert(1, 1))
    feed._run_once()
    table = feed._tables[TOPIC]
    for _ in range(2):
        assert feed._pause_s([table]) == pytest.approx(0.3)
        feed.replace_target(world.target)
    world.target = MemoryTarget()
    feed.replace_target(world.target)
    assert feed._pause_s([table]) == 0.0
    feed._run_once()
    assert world.rows() == {1: 1.0}


def test_the_end_stores_the_positions_of_every_table(world: World) -> None:
    feed = world.begun(most_bytes=100)
    world.send(upsert(1, 1), b"junk")
    world.send(b"junk", b"junk", to=USERS)
    feed._run_once()
    assert "1" not in [*world.stored(0).values(), *world.stored(1).values()]
    feed._finish()
    assert (world.stored(0), world.stored(1)) == ({str(FIRST): "1"}, {str(USERS): "1"})


def test_lost_messages_are_counted_and_shown_for_an_hour(world: World, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    feed = world.begun()
    for lost in range(1, 4):
        world.send(*(upsert(n, n) for n in (3 * lost - 2, 3 * lost - 1, 3 * lost)))
        world.broker.lose(FIRST, 3 * lost - 1)
        feed._run_once()
        clock.now += 3599.5
        assert "are gone" in status(feed).problem
        clock.now += 0.5
        assert status(feed).problem == ""
        assert world.sample("hps_update_gaps_total") == lost
    assert world.rows() == {3: 3.0, 6: 6.0, 9: 9.0}
    assert [record.levelname for record in caplog.records if "are gone" in record.message] == ["ERROR"] * 3
