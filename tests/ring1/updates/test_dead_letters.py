"""Messages that cannot be applied are kept whole, within bounds, and never stop who brings them."""

import json
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import UpdateFormatError, UpdateLogError
from hps.statistics.metrics import Metrics
from hps.testing.waiting import PATIENCE_S
from hps.updates.base import Message, Partition
from hps.updates.dead_letters import LOG_INTERVAL_S, DeadLetter, DeadLetters, read_directory, read_topics
from tests.fakes.clock import Clock
from tests.fakes.memory_log import MemoryBroker, MemoryLog, MemoryLogWriter
from tests.servers.child_processes import run_alone

PARTITION = Partition("hps_et.shop.item", 3)


def message(value: bytes, position: int = 17) -> Message:
    return Message(PARTITION, str(position), 99, b"k\xff", value)


def make(directory: Path | str, most_bytes: int = 1 << 30, **options) -> DeadLetters:
    return DeadLetters(str(directory), most_bytes, Metrics(), **options)


def add(letters: DeadLetters, *values: bytes) -> None:
    """Add messages one after the other, each once the one before is kept or lost."""
    for value in values:
        letters.add(message(value), "size", "short", 1)
        assert letters.flush(PATIENCE_S)


def kept_in(directory: Path | str) -> list[Any]:
    return list(read_directory(str(directory)))


@pytest.mark.parametrize("size", [0, 1, 2, 3, (3 << 20) + 1])
@pytest.mark.parametrize("where", ["directory", "topic"])
def test_a_message_is_kept_whole(tmp_path: Path, size: int, where: str) -> None:
    value, broker = np.random.default_rng(1).bytes(size), MemoryBroker()
    letters = make(tmp_path / "a" / "b", connect=(lambda: MemoryLogWriter(broker)) if where == "topic" else None)
    letters.add(message(value), "width", "got 3, expected 4", 12)
    add(letters, b"next")
    for _ in range(2):
        letters.close()
    assert not [thread for thread in threading.enumerate() if "dead-letters" in thread.name]
    topic = ["hps_dead.shop.item"]
    kept = list(read_topics(MemoryLog(broker), topic, 0.0)) if where == "topic" else kept_in(tmp_path / "a" / "b")
    assert [one.message for one in kept] == [message(value), message(b"next")]
    first = kept[0]
    found = (first.reason, first.detail, first.model, first.table, first.sequence, first.when[:2])
    assert found == ("width", "got 3, expected 4", "shop", "item", 12, "20")
    assert letters.lost == 0


def test_files_are_bounded_and_the_oldest_are_removed(tmp_path: Path, caplog) -> None:
    letters = make(tmp_path, 100_000, clock=Clock())
    for number in range(500):
        letters.add(message(bytes(1000), number), "size", "short", number)
        assert letters.flush(PATIENCE_S)
        held = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert held <= 100_000
        assert held >= 80_000 or number < 100  # no more is removed than a file of eight
    letters.add(message(bytes(100_000), 500), "size", "larger than all", 500)
    letters.close()
    kept = [int(one.message.position) for one in kept_in(tmp_path)]
    assert kept == list(range(500 - len(kept), 500))
    assert len(kept) > 40
    assert letters.lost == 501 - len(kept)
    assert f"{letters.lost} in total could not be stored" in caplog.text


def test_files_of_an_earlier_process_count(tmp_path: Path) -> None:
    (tmp_path / "0000000000000001.aaaaaa.jsonl").write_bytes(b"x\n" * 5000)
    letters = make(tmp_path, 10_000)
    add(letters, b"new")
    letters.close()
    assert ([one.message.value for one in kept_in(tmp_path)], letters.lost) == ([b"new"], 5000)


def test_it_is_logged_at_most_once_a_minute_with_counts(tmp_path: Path, caplog) -> None:
    clock, text = Clock(), "messages of updates cannot be applied"
    letters = make(tmp_path, clock=clock)
    for reason in ("size", "size", "magic"):
        letters.add(message(b""), reason, "what is wrong", 0)
    assert [record.message for record in caplog.records] == [
        f"{text} (1 x size); the last is hps_et.shop.item/3 at 17: what is wrong; stored in {tmp_path}"
    ]
    clock.now += LOG_INTERVAL_S
    letters.add(message(b""), "magic", "again", 0)
    assert f"{text} (2 x magic, 1 x size); the last is" in caplog.records[-1].message
    letters.add(message(b""), "width", "again", 0)
    assert len(caplog.records) == 2
    letters.close()
    assert f"{text} (1 x width); stored in" in caplog.records[-1].message


def test_a_disk_that_cannot_take_it_loses_the_message_alone(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("no directory")
    clock = Clock()
    letters = make(tmp_path / "file" / "below", clock=clock)
    add(letters, b"a")
    assert letters.lost == 1
    clock.now += LOG_INTERVAL_S
    letters.add(message(b"b"), "size", "short", 1)
    letters.close()
    assert "1 in total could not be stored: " in caplog.text
    assert "Not a directory" in caplog.text


def check_half_a_line(directory: str) -> None:
    letters = make(directory)
    add(letters, b"whole")
    (path,) = Path(directory).iterdir()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100_000, hard))  # Python ignores SIGXFSZ: EFBIG
    add(letters, bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path.read_bytes(), letters.lost) == (before, 1)
    letters.close()


def test_half_a_line_is_not_left_behind(tmp_path: Path) -> None:
    run_alone(check_half_a_line, str(tmp_path))


def test_room_for_waiting_messages_is_given_back_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.updates.dead_letters._QUEUED_BYTES", 10)
    broker, steps, begun = MemoryBroker(), threading.Semaphore(0), threading.Semaphore(0)

    class Writer(MemoryLogWriter):
        def send(self, partition: Partition, value: bytes, **more: Any) -> None:
            begun.release()
            assert steps.acquire(timeout=PATIENCE_S)
            super().send(partition, value, **more)

    letters = make("", connect=lambda: Writer(broker))
    lost = 0
    for _ in range(3):
        for sizes in ((100,), (4, 6)):  # larger than the room, alone; then what fits exactly
            for size in sizes:
                letters.add(message(bytes(size)), "size", "short", 1)
            letters.add(message(b"x"), "size", "no room", 1)
            lost += 1
            assert letters.lost == lost
            steps.release(len(sizes))
            assert all(begun.acquire(timeout=PATIENCE_S) for _ in sizes)
            assert letters.flush(PATIENCE_S)
    assert [len(one.value.partition(b"\n")[2]) for one in broker.messages("hps_dead.shop.item")] == [100, 4, 6] * 3
    letters.close()


def test_a_full_queue_keeps_no_room_and_a_flush_waits_for_the_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.updates.dead_letters._QUEUED_BYTES", 10)
    monkeypatch.setattr("hps.updates.dead_letters._QUEUED", 1)
    begun, go_on, broker, waiting = threading.Event(), threading.Event(), MemoryBroker(), [2]

    class Writer(MemoryLogWriter):
        def flush(self, timeout_s: float) -> int:
            return waiting[0]

    def connect() -> MemoryLogWriter:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return Writer(broker)

    letters = make("", connect=connect)
    letters.add(message(bytes(2)), "size", "being written", 1)
    assert begun.wait(PATIENCE_S)
    for _ in range(3):
        letters.add(message(bytes(2)), "size", "one is queued, the others find no place", 1)
    go_on.set()
    assert not letters.flush(PATIENCE_S)
    waiting[0] = 0
    assert letters.flush(PATIENCE_S)
    add(letters, bytes(4), bytes(6), bytes(10))  # all of the room
    assert letters.lost == 2
    letters.close()


@pytest.mark.parametrize(("spare", "kept", "lost"), [(0, 1, 2), (-1, 0, 3)])
def test_a_letter_may_be_as_large_as_the_bound(tmp_path: Path, spare: int, kept: int, lost: int) -> None:
    first = make(tmp_path / "first")
    add(first, bytes(1000))
    first.close()
    (size,) = (path.stat().st_size for path in (tmp_path / "first").iterdir())
    letters = make(tmp_path / "second", size + spare)
    add(letters, *[bytes(1000)] * 3)
    letters.close()
    assert (len(kept_in(tmp_path / "second")) if kept else 0, letters.lost) == (kept, lost)


def test_each_topic_has_as_many_partitions_as_it_was_made_with() -> None:
    broker = MemoryBroker()
    broker.create("hps_dead.shop.a", 3)
    letters = make("", connect=lambda: MemoryLogWriter(broker))
    for table in ("a", "b", "c"):
        for number in (0, 1, 5):
            letters.add(Message(Partition(f"hps_et.shop.{table}", number), "1", 9, b"", b""), "size", "short", 1)
    assert letters.flush(PATIENCE_S)
    letters.close()
    where = {table: [one.partition.number for one in broker.messages(f"hps_dead.shop.{table}")] for table in "abc"}
    assert where == {"a": [0, 1, 2], "b": [0, 0, 0], "c": [0, 0, 0]}
    assert letters.lost == 0


def test_a_log_that_refuses_or_is_away_loses_the_message_alone(caplog) -> None:
    broker = MemoryBroker()
    letters = make("", connect=lambda: MemoryLogWriter(broker))
    broker.away = True
    add(letters, b"a")
    broker.away, broker.refuse = False, lambda partition, value: value.endswith(b"b")
    add(letters, b"b", b"c")
    assert ([one.value[-1:] for one in broker.messages("hps_dead.shop.item")], letters.lost) == ([b"c"], 2)
    letters.close()
    assert "2 in total could not be stored: publishing to hps_dead.shop.item/0: refused" in caplog.text


def test_topics_that_cannot_be_read_are_no_empty_ones() -> None:
    broker, name = MemoryBroker(), "hps_dead.shop.item"
    for broker.away, complaint in ((True, "away"), (False, f"there is no topic {name}")):
        with pytest.raises(UpdateLogError, match=complaint):
            list(read_topics(MemoryLog(broker), [name], 0.0))
    broker.create(name)
    assert list(read_topics(MemoryLog(broker), [name, "hps_dead.shop.user"], 0.0)) == []


def test_without_a_place_they_are_counted_and_logged_alone(caplog) -> None:
    letters = make("")
    letters.add(message(b"a"), "size", "short", 1)
    letters.close()
    assert letters.lost == 0
    assert "not stored: set update_source.dead_letters" in caplog.text


GOOD = DeadLetter(message(b"value"), "width", "detail", "shop", "item", 5)
HUGE = 1 << 62
NUMBERS = ("partition", "time_us", "sequence")


@pytest.mark.parametrize("field", [*NUMBERS, "topic", "position", "model", "table", "reason", "when", "key"])
def test_a_field_that_is_none_makes_no_dead_letter(field: str) -> None:
    content = {**GOOD.header(), "value": "AAAA"}
    assert DeadLetter.read(json.dumps(content).encode()).message.value == bytes(3)
    wrong: Any = ("1", -1, 1.0, True, None, HUGE + 1, [1]) if field in NUMBERS else (1, None, ["a"])
    refused = [content | {field: value} for value in wrong]
    refused += [content | {"key": "no base64"}, content | {"value": 5}, content | {"value": "no base64"}]
    del content[field]
    for one in (*refused, content):
        with pytest.raises(UpdateFormatError, match="reading a dead letter"):
            DeadLetter.read(json.dumps(one).encode())


LINES = [b"5", b"[]", b"null", b"{}", b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b'{"partition": ' + b"1" * 5000 + b"}"]


def test_lines_of_anything_are_reported_beside_dead_letters(tmp_path: Path) -> None:
    for number in (0, HUGE):
        letter = DeadLetter(Message(PARTITION, "1", number + number, b"", b""), "width", "", "shop", "item", number)
        again = DeadLetter.read(json.dumps(letter.header()).encode(), b"")
        assert (again.message.time_us, again.sequence) == (min(2 * number, HUGE), number), "a time beyond is cut"
    whole = json.dumps({**GOOD.header(), "value": "AAAA"}).encode()
    (tmp_path / "1.jsonl").write_bytes(b"\n".join([LINES[0], whole, *LINES[1:], whole[:-9]]))
    first, good, *others = kept_in(tmp_path)
    assert good.message.value == bytes(3)
    assert len(others) == len(LINES)
    for refused in (first, *others):
        assert isinstance(refused, UpdateFormatError)
        assert (refused.reason, len(str(refused)) < 1000) == ("dead_letter", True)


def test_a_file_that_a_server_removes_meanwhile_is_left_out(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**GOOD.header(), "value": "", "position": name}) + "\n")
    reading = read_directory(str(tmp_path))
    first = next(reading)
    (tmp_path / "2.jsonl").unlink()
    assert [one.message.position for one in (first, *reading)] == ["1", "3"]


def test_a_topic_holds_dead_letters_of_its_own_table_alone() -> None:
    broker = MemoryBroker()
    for topic in ("hps_dead.shop.item", "hps_dead.shop.user", "hps_dead.other.item"):
        broker.create(topic)
        broker.append(Partition(topic, 0), json.dumps(GOOD.header()).encode() + b"\nvalue")
    topics = ["hps_dead.shop.user", "hps_dead.shop.item", "hps_dead.other.item", "hps_dead.shop.missing"]
    found = list(read_topics(MemoryLog(broker), topics, 600.0))
    assert [one.message for one in found if isinstance(one, DeadLetter)] == [message(b"value")]
    assert [one.reason for one in found if isinstance(one, UpdateFormatError)] == ["table", "table"]


@pytest.mark.parametrize("partitions", [1, 3])
def test_dead_letters_that_come_of_a_replay_are_left_for_the_next(partitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not repaired yet answers each message of a replay with another dead letter."""
    broker = MemoryBroker()
    broker.create("hps_dead.shop.item", partitions)
    text = json.dumps(GOOD.header()).encode() + b"\nvalue"
    for number in (0, 1, 1, 2, 2, 2):
        broker.append(Partition("hps_dead.shop.item", number % partitions), text)
    for count in (6, 12):
        read, log, sizes = 0, MemoryLog(broker), iter([1] if partitions == 1 else [])
        poll = log.poll
        monkeypatch.setattr(log, "poll", lambda wait_s, size, poll=poll, sizes=sizes: poll(wait_s, next(sizes, size)))
        for _ in read_topics(log, ["hps_dead.shop.item"], 0.0):
            read += 1
            assert read <= count
            broker.append(Partition("hps_dead.shop.item", read % partitions), text)
        assert read == count
