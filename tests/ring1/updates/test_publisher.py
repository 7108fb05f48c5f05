"""What a publisher writes: every change once, in order, each key in one partition, later than all that lies there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.errors import ConfigError, InvalidInputError, UnknownTableError, UpdateLogError
from hps.ground.progress import NoProgress
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.updates.base import Partition
from hps.updates.framing import Changes, decode, encode
from hps.updates.publisher import Publisher, Republisher
from tests.fakes.clock import Clock
from tests.fakes.memory_log import MemoryBroker, MemoryLogWriter
from tests.servers.running_service import document_of, model_of
from tests.tables.hugectr_messages import encode_hugectr

TOPIC, DIM = "hps_et.shop.item", 4
ROWS = 5000
KEYS = np.random.default_rng(1).permutation(ROWS).astype(np.int64) - 1000
VECTORS = np.random.default_rng(2).random((ROWS, DIM), np.float32)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


def make(broker: MemoryBroker, partitions: int = 4, **options) -> Publisher:
    return Publisher(MemoryLogWriter(broker), TOPIC, create_partitions=partitions, **options)


def sent(broker: MemoryBroker) -> list[tuple[int, Any]]:
    """Partition and changes of each message that can be read."""
    return [
        (message.partition.number, decode(message.value, DIM)) for message in broker.messages(TOPIC) if message.value != b"junk"
    ]


def replayed(broker: MemoryBroker) -> dict[int, bytes]:
    """The rows after all messages, applied by sequence."""
    rows: dict[int, bytes] = {}
    for _, change in sorted(sent(broker), key=lambda one: one[1].sequence):
        rows |= rows_of(change.keys, change.vectors)
        for key in change.deleted_keys:
            rows.pop(int(key), None)
    return rows


def rows_of(keys: Any, vectors: Any) -> dict[int, bytes]:
    return dict(zip(keys.tolist(), map(bytes, vectors), strict=True))


def test_every_row_is_published_once_and_the_last_of_a_key_counts_and_progress_hears_of_each(broker: MemoryBroker) -> None:
    class Counting(NoProgress):
        rows = 0

        def advance(self, tag: str, rows: int) -> None:
            self.rows += rows

    progress = Counting()
    with make(broker, message_bytes=2000, progress=progress) as publisher:
        publisher.insert(KEYS, VECTORS)
        publisher.insert(np.repeat(KEYS[:300], 2), np.stack([VECTORS[1:301], VECTORS[2:302]], axis=1).reshape(600, DIM))
        publisher.delete(KEYS[-50:])
        publisher.insert(KEYS[-10:], VECTORS[:10])
    expected = rows_of(KEYS[:-50], VECTORS[:-50]) | rows_of(KEYS[:300], VECTORS[2:302]) | rows_of(KEYS[-10:], VECTORS[:10])
    assert replayed(broker) == expected
    assert publisher.rows == progress.rows == ROWS + 600 + 50 + 10
    assert max(len(message.value) for message in broker.messages(TOPIC)) <= 2000


def test_a_key_has_one_partition_and_partitions_are_ordered(broker: MemoryBroker) -> None:
    with make(broker, message_bytes=1000) as publisher:
        publisher.insert(KEYS, VECTORS)
        publisher.delete(KEYS)
    of_key: dict[int, set[int]] = {}
    sequences: dict[int, list[int]] = {}
    for number, changes in sent(broker):
        sequences.setdefault(number, []).append(changes.sequence)
        for key in (*changes.keys.tolist(), *changes.deleted_keys.tolist()):
            of_key.setdefault(key, set()).add(number)
    assert {len(numbers) for numbers in of_key.values()} == {1}
    assert len(sequences) == 4
    assert all(np.diff(sequence).min() > 0 for sequence in sequences.values())


def test_a_publisher_begins_above_all_that_lies_there_though_its_clock_was_put_back(broker: MemoryBroker) -> None:
    with make(broker, now_us=lambda: 1000) as publisher:
        publisher.insert(KEYS, VECTORS)
    broker.append(Partition(TOPIC, 2), b"junk", time_us=70_000)
    assert max(changes.sequence for _, changes in sent(broker)) == 1003  # 1000 for the first message, then one more for each
    with make(broker, now_us=lambda: 10, dtype="float16") as publisher:
        publisher.insert(KEYS[:1], np.full((1, DIM), 0.5, np.float32))
    (last,) = (changes for _, changes in sent(broker) if changes.sequence > 1003)
    assert (last.sequence, last.time_us, last.vectors.tolist()) == (70_001, 10, [[0.5] * DIM])
    assert min(len(message.value) for message in broker.messages(TOPIC) if message.value != b"junk") == 40 + 8 + 2 * DIM


@pytest.mark.parametrize("highest", [0, 1, 2])
def test_restarts_ascend_from_the_last_sequence_though_no_clock_says_so(broker: MemoryBroker, highest: int) -> None:
    """The third start, from the highest of three partitions, while the clock is far behind and the log knows no other time."""
    broker.create(TOPIC, 3)
    one = np.empty(0, np.int64)
    for number in range(3):
        value = encode(one, np.empty((0, DIM), np.float32), KEYS[:1], sequence=5000 if number == highest else 10 + number)
        broker.append(Partition(TOPIC, number), value, time_us=1)
    for start in range(3):
        with make(broker, 3, now_us=lambda: 1) as publisher:
            publisher.insert(KEYS[:1], VECTORS[:1])
            publisher.delete(KEYS[:1])
        latest = sorted(changes.sequence for _, changes in sent(broker))[-2:]
        assert latest == [5001 + 2 * start, 5002 + 2 * start]


def test_positions_are_those_of_the_last_message_of_each_partition(broker: MemoryBroker) -> None:
    broker.create(TOPIC, 4)
    broker.append(Partition(TOPIC, 1), encode_hugectr(KEYS[:1], VECTORS[:1]))
    assert make(broker).flush() == {f"{TOPIC}/1": "0"}
    with make(broker, message_bytes=1000) as publisher:
        publisher.insert(KEYS, VECTORS)
        positions = publisher.flush()
    assert positions == {str(message.partition): message.position for message in broker.messages(TOPIC)}
    assert len(positions) == 4


def test_the_rate_is_kept(broker: MemoryBroker) -> None:
    clock = Clock()
    pause: Any = {"clock": clock, "sleep": lambda seconds: setattr(clock, "now", clock.now + seconds)}
    with make(broker, rows_per_s=100.0, **pause) as publisher:
        publisher.insert(KEYS[:1000], VECTORS[:1000])
        assert 9.0 <= clock.now <= 10.0
        clock.now += 1000.0  # what was not used is not made up for
        publisher.insert(KEYS[:1000], VECTORS[:1000])
    assert 1017.0 <= clock.now <= 1020.0


def test_faults_of_the_log_are_raised(broker: MemoryBroker) -> None:
    with pytest.raises(UpdateLogError, match="no such topic"):
        make(broker, partitions=0)
    publisher = make(broker)
    broker.refuse = lambda partition, value: True
    publisher.insert(KEYS[:1], VECTORS[:1])
    with pytest.raises(UpdateLogError, match=f"publishing to {TOPIC}: a message was refused: "):
        publisher.flush()
    broker.refuse = lambda partition, value: False
    publisher.insert(KEYS, VECTORS)
    assert len(publisher.flush()) == 4
    broker.away = True
    with pytest.raises(UpdateLogError, match="away"):
        publisher.insert(KEYS, VECTORS)


@pytest.mark.parametrize(
    ("keys", "vectors"),
    [
        (KEYS, VECTORS[:-1]),
        (KEYS, VECTORS[:, :3]),
        (KEYS, VECTORS.astype(np.float64)),
        (KEYS.astype(np.int32), VECTORS),
        (KEYS, np.full_like(VECTORS, np.nan)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(broker: MemoryBroker, keys, vectors) -> None:
    with pytest.raises(InvalidInputError):
        make(broker, dim=DIM).insert(keys, vectors)
    assert broker.messages(TOPIC) == []


class SlowWriter(MemoryLogWriter):
    """Holds answers back until the test gives them."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.answers: list[Callable[[str | Exception], None]] = []
        self.flushed = 0

    def send(self, partition: Partition, value: bytes, *, time_us: int = 0, sent: Any = None) -> None:
        self.answers.append(sent)

    def flush(self, timeout_s: float) -> int:
        self.flushed += 1
        return len(self.answers)


def test_answers_that_come_late_are_each_heard_once(broker: MemoryBroker) -> None:
    broker.create(TOPIC, 1)
    writer = SlowWriter(broker)
    publisher = Publisher(writer, TOPIC, dim=DIM)
    for turn in range(3):
        for number in range(3):
            publisher.insert(KEYS[number : number + 1], VECTORS[number : number + 1])
        for left in (3, 2, 1):
            with pytest.raises(UpdateLogError, match=f"{left} messages are not confirmed"):
                publisher.flush()
            answer = writer.answers.pop(0)
            answer("" if left == 1 else f"{turn}{left}")  # some logs do not report every position
        assert publisher.flush() == {f"{TOPIC}/0": f"{turn}2"}


def test_the_first_refusal_of_several_is_raised_once_and_at_the_next_change(broker: MemoryBroker) -> None:
    broker.create(TOPIC, 1)
    writer = SlowWriter(broker)
    publisher = Publisher(writer, TOPIC, dim=DIM)
    for change in (lambda: publisher.insert(KEYS[:1], VECTORS[:1]), lambda: publisher.delete(KEYS[:1]), publisher.flush):
        for _ in range(3):
            publisher.insert(KEYS[:1], VECTORS[:1])
        for number in range(3):
            writer.answers.pop(0)(UpdateLogError(f"refusal {number}"))
        sent = len(writer.answers)
        with pytest.raises(UpdateLogError, match="refusal 0"):
            change()
        assert len(writer.answers) == sent
        assert publisher.flush() == {}


def test_a_block_that_fails_is_not_waited_for(broker: MemoryBroker) -> None:
    broker.create(TOPIC, 1)
    writer = SlowWriter(broker)

    def publish() -> None:
        with Publisher(writer, TOPIC, dim=DIM, owned=True) as publisher:
            publisher.insert(KEYS[:1], VECTORS[:1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish()
    assert (writer.flushed, writer.closed) == (0, True)


def test_changes_are_published_again_with_their_own_sequence(broker: MemoryBroker) -> None:
    broker.create(TOPIC, 4)
    publisher = Republisher(MemoryLogWriter(broker), TOPIC, now_us=lambda: 100, message_bytes=1040)
    publisher.insert(KEYS[:1], VECTORS[:1])
    publisher.republish(9, Changes(KEYS[:200], VECTORS[1:201], KEYS[300:601], 0, 5), 7)
    publisher.mark()
    publisher.flush()
    again = [(number, changes) for number, changes in sent(broker) if changes.sequence == 7]
    assert {(number, one.time_us) for number, one in again} == {(1, 5)}
    assert [one.keys.size for _, one in again if one.keys.size] == [41, 41, 41, 41, 36]  # in messages of 1000 bytes and fewer
    assert [one.deleted_keys.size for _, one in again if one.deleted_keys.size] == [125, 125, 51]
    assert np.concatenate([one.deleted_keys for _, one in again]).tolist() == KEYS[300:601].tolist()
    assert replayed(broker)[int(KEYS[0])] == VECTORS[0].tobytes()
    for number in range(4):  # who starts finds no old sequence at the end
        last = MemoryLogWriter(broker).last(Partition(TOPIC, number), 1.0)
        assert decode(last.value, DIM).sequence > 100


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    kinds = {**IMPLEMENTATIONS["update_log_writer"], "kafka_message_queue": BuiltIn("tests.fakes.memory_log:MemoryLogWriter")}
    monkeypatch.setitem(IMPLEMENTATIONS, "update_log_writer", kinds)
    content = document_of(model_of("shop", [tmp_path / "item"], {"item": DIM}))
    return {**content, "update_source": {"type": "kafka_message_queue", "brokers": f"{tmp_path.name.replace('_', '-')}:9092"}}


def test_a_publisher_is_opened_by_the_configuration(document: dict, tmp_path: Path) -> None:
    broker = MemoryBroker.by_name[document["update_source"]["brokers"]]
    (tmp_path / "ps.json").write_text(json.dumps(document))
    with hps.open_publisher(tmp_path / "ps.json", "shop", "item", create_partitions=3) as publisher:
        publisher.insert(KEYS, VECTORS)
    assert replayed(broker) == rows_of(KEYS, VECTORS)
    assert broker.partitions(TOPIC) == 3
    with hps.open_publisher(document, "other", "any", create_partitions=1) as publisher:  # of a repository
        publisher.insert(KEYS[:1], VECTORS[:1, :2])
    with pytest.raises(UnknownTableError, match="expected one of: item"):
        hps.open_publisher(document, "shop", "user")
    with pytest.raises(ConfigError, match="got null"):
        hps.open_publisher({**document, "update_source": {}}, "shop", "item")
