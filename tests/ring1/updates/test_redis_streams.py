"""Decisions about Redis streams: what a key says, which messages are lost, and what goes into a batch."""

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import UpdateLogError
from hps.updates import redis_streams
from hps.updates.base import Message, Partition
from hps.updates.redis_streams import (
    RedisStreamLog,
    RedisStreamWriter,
    _Facts,
    _key,
    _message,
    _order,
    _partition_count,
    _Reader,
    _Stream,
)
from tests.fakes.clock import Clock, Pauses

TOPIC = "hps_et.shop.item"
FIRST, SECOND, OTHER = Partition(TOPIC, 0), Partition(TOPIC, 1), Partition("hps_et.shop.user", 0)


@pytest.mark.parametrize(
    ("position", "order"),
    [
        ("0-0", (0, 0)),
        ("17", (17, 0)),
        ("1700000000000-5", (1_700_000_000_000, 5)),
        ("9" * 20 + "-" + "9" * 20, (10**20 - 1,) * 2),
        *((other, (0, 0)) for other in ("9" * 21, "-1", "5-", "5-1-1", "")),
    ],
)
def test_positions_have_an_order_and_those_of_other_logs_are_before_all(position: str, order: tuple[int, int]) -> None:
    assert _order(position) == order


@pytest.mark.parametrize(("answer", "count"), [(b"1", 1), (b"1024", 1024), (b"000007", 7)])
def test_a_key_says_how_many_partitions_a_topic_has(answer: bytes, count: int) -> None:
    assert _partition_count(TOPIC, answer) == count


@pytest.mark.parametrize("answer", [b"0", b"1025", b"-1", b"1.5", b"", b"0000007", "\u0661".encode(), b"\xff", None])
def test_a_count_that_is_none_is_an_error(answer: bytes | None) -> None:
    with pytest.raises(UpdateLogError, match="does not exist" if answer is None else "expected the number of its partitions"):
        _partition_count(TOPIC, answer)


@pytest.mark.parametrize(
    ("fields", "time_us", "value"),
    [
        ({b"value": b"x", b"time": b"17"}, 17, b"x"),
        ({b"value": b"x"}, 1_700_000_000_000_000, b"x"),
        ({b"time": b"9" * 18}, 10**18 - 1, b""),
        ({b"time": b"9" * 19}, 1_700_000_000_000_000, b""),
        ({b"time": b"-17"}, 1_700_000_000_000_000, b""),
        (None, 1_700_000_000_000_000, b""),
    ],
)
def test_an_entry_of_any_program_is_a_message(fields: Any, time_us: int, value: bytes) -> None:
    assert _message(FIRST, (b"1700000000000-5", fields)) == Message(FIRST, "1700000000000-5", time_us, b"", value)


# Redis: `length` entries from `first` to `last`, of `added` ever; the reader: `count` up to `read`, exactly or not.
ANEW, REMOVED = "the stream was recreated or cut", "were removed before they were read"


@pytest.mark.parametrize(
    ("read", "count", "exact", "facts", "lost", "after"),
    [
        # nothing read yet
        ("0-0", 0, False, _Facts(0, 0, "0-0", "", ""), "", (0, True)),
        ("0-0", 0, False, _Facts(5, 8, "1-8", "1-4", "1-8"), "", (3, True)),  # what was removed before is not lost
        ("0-0", 0, True, _Facts(5, 5, "1-5", "1-1", "1-5"), "", (0, True)),
        ("0-0", 0, True, _Facts(4, 5, "1-5", "1-2", "1-5"), f"1 messages after 0-0 {REMOVED}", (1, True)),
        # caught up
        ("1-5", 5, True, _Facts(5, 5, "1-5", "1-1", "1-5"), "", (5, True)),
        ("1-5", 3, False, _Facts(5, 5, "1-5", "1-1", "1-5"), "", (5, True)),
        ("1-5", 4, True, _Facts(4, 5, "1-5", "1-1", "1-5"), f"1 messages before 1-5 {REMOVED}", (5, True)),
        ("1-5", 5, True, _Facts(0, 5, "1-5", "", ""), "", (5, True)),  # all were read, and then removed
        # behind
        ("1-3", 3, True, _Facts(5, 5, "1-5", "1-1", "1-5"), "", (3, True)),
        ("1-3", 3, True, _Facts(2, 5, "1-5", "1-4", "1-5"), "", (3, True)),  # only what was read
        ("1-3", 3, True, _Facts(1, 5, "1-5", "1-5", "1-5"), f"1 messages after 1-3 {REMOVED}", (4, True)),
        ("1-3", 3, True, _Facts(0, 5, "1-5", "", ""), f"2 messages after 1-3 {REMOVED}", (5, True)),
        ("1-3", 0, False, _Facts(1, 5, "1-5", "1-5", "1-5"), f"{REMOVED}; the first is 1-5", (4, True)),
        ("1-3", 0, False, _Facts(0, 5, "1-5", "", ""), f"{REMOVED}; the first is to come", (5, True)),
        ("1-3", 0, False, _Facts(3, 5, "1-5", "1-3", "1-5"), "", (3, True)),  # the first that is there was read last
        # of a restart in mid-stream it is only estimated
        ("150-0", 0, False, _Facts(10, 20, "200-0", "100-0", "200-0"), "", (15, False)),
        ("101-0", 0, False, _Facts(10, 20, "200-0", "100-0", "200-0"), "", (11, False)),
        ("199-9", 0, False, _Facts(10, 20, "200-0", "100-0", "200-0"), "", (19, False)),
        ("100-5", 0, False, _Facts(10, 20, "100-9", "100-1", "100-9"), "", (19, False)),
        # made anew
        ("1-9", 9, True, _Facts(5, 5, "1-5", "1-1", "1-5"), ANEW, (0, True)),
        ("1-9", 9, False, _Facts(5, 7, "1-5", "1-1", "1-5"), ANEW, (2, True)),
        ("1-5", 9, True, _Facts(5, 8, "2-5", "2-1", "2-5"), ANEW, (3, True)),
    ],
)
def test_a_stream_is_compared_with_what_was_read_of_it(
    read: str, count: int, exact: bool, facts: _Facts, lost: str, after: tuple[int, bool]
) -> None:
    stream = _Stream(FIRST, _key(FIRST), read, read, count=count, exact=exact)
    found = stream.compare(facts)
    assert (lost in found, bool(lost), (stream.count, stream.exact)) == (True, bool(found), after)
    assert (stream.read, stream.added) == ("0-0" if lost == ANEW else read, facts.added)
    assert stream.compare(facts) == "", "each loss is told once"


def test_latest_begins_after_the_last_entry() -> None:
    stream = _Stream(FIRST, _key(FIRST), None, "0-0")
    assert stream.compare(_Facts(5, 8, "1-8", "1-4", "1-8")) == ""
    assert (stream.read, stream.polled, stream.count, stream.exact) == ("1-8", "1-8", 8, True)


@pytest.mark.parametrize(
    ("begin", "after", "answers", "begins"),
    [
        ("earliest", {}, [b"2"], ["0-0", "0-0"]),
        ("earliest", {FIRST: "1-5", SECOND: "-1"}, [b"2"], ["1-5", "0-0"]),  # one is a position of another log
        ("latest", {SECOND: "1-5"}, [b"2"], [None, "1-5"]),
        ("latest", {}, [b"1", b"2"], [None, "0-0"]),  # what is added later is read whole
        ("latest", {}, [None, b"1"], ["0-0"]),
        ("latest", {}, [b"many", b"1"], [None]),  # it may have been there all along
        ("latest", {}, [b"1", b"many", b"2"], [None, "0-0"]),
    ],
)
def test_latest_holds_for_partitions_that_were_there_at_the_start(
    begin: str, after: dict[Partition, str], answers: list[bytes | None], begins: list[str | None]
) -> None:
    log = log_of()
    log.begin, log.after = begin, after
    reader = _Reader(log, [TOPIC])
    for answer in answers:
        server: Any = SimpleNamespace(eval_ro=lambda script, keys, *topics, answer=answer: [answer])
        reader._find_partitions(server)
        assert (log.lacks(TOPIC), bool(log.problem_of(TOPIC))) == (answer is None, answer in (None, b"many"))
    assert [stream.read for stream in log.states.values()] == begins


def log_of(*partitions: Partition) -> RedisStreamLog:
    log = RedisStreamLog(UpdateSourceConfig(type="redis_stream"), "group")
    log.states = {partition: _Stream(partition, _key(partition), "0-0", "0-0", added=0) for partition in partitions}
    return log


def test_a_problem_is_that_of_its_topic_and_the_server_comes_first() -> None:
    log = log_of(FIRST, SECOND, OTHER)
    assert (log.problem, log.problem_of(TOPIC), log.behind()) == ("", "", {FIRST: 0, SECOND: 0, OTHER: 0})
    log.uncommitted = {FIRST: "not committed"}
    assert (log.problem, log.problem_of(TOPIC), log.problem_of(OTHER.topic)) == ("not committed", "not committed", "")
    log.states[SECOND].trouble = "no stream"
    assert (log.problem_of(TOPIC), log.behind()) == ("no stream; not committed", {FIRST: 0, SECOND: None, OTHER: 0})
    log.refused, log.absent = {TOPIC: "no count"}, {TOPIC}
    assert (log.problem_of(TOPIC), log.lacks(TOPIC), log.lacks(OTHER.topic)) == (
        "no count; no stream; not committed",
        True,
        False,
    )
    log.unreachable = {TOPIC: "away"}
    assert (log.problem, log.problem_of(TOPIC), log.problem_of(OTHER.topic)) == ("away", "away", "")
    assert (log.lacks(TOPIC), log.behind()) == (False, {FIRST: None, SECOND: None, OTHER: 0}), "nobody knows while it is away"


@pytest.mark.parametrize(
    ("position", "exact", "queued", "counted"),
    [("1-5", True, 0, 7), ("1-5", True, 2, 5), ("1-5", False, 0, None), ("1-4", True, 0, None)],
)
def test_a_commit_tells_how_many_were_read_if_known(position: str, exact: bool, queued: int, counted: int | None) -> None:
    log = log_of(FIRST)
    log.states[FIRST] = _Stream(FIRST, _key(FIRST), "1-9", "1-5", count=7, exact=exact, queued=queued)
    log.commit({FIRST: position, OTHER: "1-1"})
    assert log.commits == {FIRST: (position, counted), OTHER: ("1-1", None)}


# -- the writer -----------------------------------------------------------------------------------------------------------


class Server:
    """A Redis that appends batches, or refuses them."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int, list[bytes]]] = []  # key, number of the batch, values
        self.error: Exception | None = None

    def eval(self, script: str, keys: int, key: str, done: str, number: int, *words: Any) -> bytes:
        if self.error is not None:
            raise self.error
        self.batches.append((key, number, list(words[::2])))
        return b"1700000000000-7"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> RedisStreamWriter:
    """A writer whose thread the test runs step by step."""
    monkeypatch.setattr(RedisStreamWriter, "_run", lambda self: None)
    return RedisStreamWriter(UpdateSourceConfig(type="redis_stream", read_ahead_bytes=64 << 20, max_message_bytes=5 << 20))


def test_messages_of_a_partition_have_the_positions_that_follow_that_of_the_first(writer: RedisStreamWriter) -> None:
    server: Any = Server()
    for turn in range(2):
        answers: list[Any] = []
        for value in (b"a", b"b", b"c"):
            writer.send(FIRST, value, sent=answers.append)
        writer.send(SECOND, b"d", sent=answers.append)
        writer._form_batches()
        writer._append(server)
        assert answers == ["1700000000000-7", "1700000000000-8", "1700000000000-9", "1700000000000-7"]
        assert [(key, values) for key, _, values in server.batches[-2:]] == [
            (_key(FIRST), [b"a", b"b", b"c"]),
            (_key(SECOND), [b"d"]),
        ]
        assert (writer.flush(0.0), writer._bytes) == (0, 0), f"the room of turn {turn} is free again"
    assert [number for _, number, _ in server.batches] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(1024, 1, [1024]), (1025, 1, [1024, 1]), (4, 2 << 20, [3, 1]), (3, (2 << 20) + 1, [2, 1]), (2, 5 << 20, [1, 1])],
)
def test_one_bounded_batch_of_a_partition_is_on_its_way(
    writer: RedisStreamWriter, count: int, size: int, sizes: list[int]
) -> None:
    server: Any = Server()
    for _ in range(count):
        writer.send(FIRST, bytes(size))
    for done in range(1, len(sizes) + 1):
        writer._form_batches()
        writer._form_batches()
        assert len(writer._batches) == 1
        writer._append(server)
        assert [len(values) for _, _, values in server.batches] == sizes[:done]
    assert writer.flush(0.0) == 0


PASSING = [
    OutOfMemoryError("OOM"),
    *(ResponseError(f"{word} later") for word in ("MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN")),
]


@pytest.mark.parametrize("error", [*PASSING, ResponseError("NOPERM this user may not")])
def test_what_passes_is_sent_again_and_the_rest_is_told(writer: RedisStreamWriter, error: Exception) -> None:
    server: Any = Server()
    answers: list[Any] = []
    writer.send(FIRST, b"a", sent=answers.append)
    writer._form_batches()
    server.error = error
    if error in PASSING:
        for _ in range(2):
            with pytest.raises(type(error)):
                writer._append(server)
        assert (answers, writer.flush(0.0)) == ([], 1)
    else:
        writer._append(server)
        assert "see what the key holds and what the user may do" in str(answers.pop())
        writer.send(FIRST, b"a", sent=answers.append)
        writer._form_batches()
    server.error = None
    writer._append(server)
    assert (answers, writer.flush(0.0)) == (["1700000000000-7"], 0)
    assert server.batches == [(_key(FIRST), 1 if error in PASSING else 2, [b"a"])]


def test_a_message_may_be_as_large_as_the_bound(writer: RedisStreamWriter) -> None:
    writer.send(FIRST, bytes(5 << 20))
    with pytest.raises(UpdateLogError, match="max_message_bytes"):
        writer.send(FIRST, bytes((5 << 20) + 1))
    writer.close()
    with pytest.raises(UpdateLogError, match="the writer is closed"):
        writer.send(FIRST, b"")


def test_a_server_that_is_away_is_asked_again_after_a_pause_while_there_is_time(
    writer: RedisStreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left_s = Clock(50.0), list[float]()

    def refuse(config: UpdateSourceConfig, timeout_s: float) -> Any:
        left_s.append(timeout_s)
        clock.now += 0.01
        raise OSError("refused")

    monkeypatch.setattr(redis_streams, "time", SimpleNamespace(monotonic=clock, sleep=Pauses(9, clock).wait))
    monkeypatch.setattr(redis_streams, "_connect", refuse)
    with pytest.raises(UpdateLogError, match=f"reading the last message of {FIRST}: refused"):
        writer.last(FIRST, 0.25)
    assert left_s == pytest.approx([0.25, 0.14, 0.05])
