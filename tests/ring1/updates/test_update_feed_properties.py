"""Whatever dies when, and however often a message comes, the tables end as if each had been applied once, in order."""

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import DatabaseError
from hps.statistics.metrics import Metrics
from hps.stores.base import RowChanges
from hps.updates.base import Message, Partition
from hps.updates.feed import TableTopic, UpdateFeed
from hps.updates.framing import encode
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.update_target import MemoryTarget
from tests.tables.hugectr_messages import encode_hugectr

TOPICS = ["hps_et.shop.item", "hps_et.shop.user"]
PARTITIONS = [Partition(topic, number) for topic in TOPICS for number in range(2)]

_RESTART, _CRASH, _FAIL = "restart", "crash", "fail"
MESSAGES = st.tuples(
    st.integers(0, len(PARTITIONS) - 1),
    st.sampled_from(["own", "own", "hugectr", "again", "late", "bad"]),
    st.lists(st.integers(0, 3), max_size=4),  # keys; of each partition its own
    st.lists(st.integers(0, 3), max_size=2),  # deleted ones
    st.integers(1, 40),  # by how much the sequence or the clock moves
)
STEPS = st.lists(st.one_of(MESSAGES, MESSAGES, st.sampled_from([_RESTART, _CRASH, _FAIL, "round"])), min_size=5, max_size=40)


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hps.updates.feed._clock", count(1.0).__next__)  # every pause is over when it is looked at
        yield


class _Killed(BaseException):
    """The process ends here."""


class Process:
    """A process that follows the log, whose threads the test runs step by step."""

    def __init__(self, broker: MemoryBroker, target: MemoryTarget, batch: int) -> None:
        rejects: Any = self
        config = UpdateSourceConfig(
            type="kafka_message_queue", max_batch_size=batch, max_commit_interval=3, failure_backoff_ms=0
        )
        tables = [TableTopic(index, topic[-4:], topic, 1, 8, {}) for index, topic in enumerate(TOPICS)]
        self.feed = UpdateFeed("shop", "1", tables, target, MemoryLog(broker), rejects, config, Metrics())
        self.feed._most_bytes = 100  # a message or two at a time
        self.feed._settings = config.model_copy(update={"poll_timeout_ms": 0})
        self.feed._start_following()

    def add(self, message: Message, reason: str, detail: str, sequence: int) -> None: ...


def follow_to_the_end(steps: list[Any], batch: int, seed: int) -> None:
    """Do these steps, and compare the tables with those of a feed that nothing ever happened to."""
    broker, target, rng = MemoryBroker(), MemoryTarget(), np.random.default_rng(seed)
    for topic in TOPICS:
        broker.create(topic, 2)
    expected: dict[int, dict[int, tuple[int, list[float] | None]]] = {0: {}, 1: {}}
    last, sent = dict.fromkeys(PARTITIONS, 0), {partition: [] for partition in PARTITIONS}
    process, now_us, value = Process(broker, target, batch), 1, 0.0

    def die(index: int, changes: RowChanges, error: BaseException) -> None:
        """Make some of the changes and fail. The positions are stored: a database has all, another tier only these."""
        some = rng.random(changes.keys.size) < rng.random()
        target.make(index, changes.at(some), target.given)
        target.before = lambda index, changes: None
        raise error

    def apply(partition: Partition, message: bytes, keys: list[int], vectors: Any, deleted: list[int], sequence: int) -> None:
        rows = expected[PARTITIONS.index(partition) // 2]
        for key, vector in [*zip(keys, vectors.tolist(), strict=True), *((key, None) for key in deleted)]:
            if key not in rows or rows[key][0] <= sequence:
                rows[key] = (sequence, vector)
        last[partition] = max(last[partition], sequence)
        sent[partition].append((message, keys, vectors, deleted, sequence))

    for step in steps:
        match step:
            case "round":
                process.feed._run_once()
            case "restart":
                process.feed._finish()
                process = Process(broker, target, batch)
            case "crash" | "fail":
                error = _Killed() if step == _CRASH else DatabaseError("down")
                target.before = lambda index, changes, error=error: die(index, changes, error)
                with contextlib.suppress(_Killed):
                    process.feed._run_once()
                target.before = lambda index, changes: None
                if step == _CRASH:
                    process = Process(broker, target, batch)
            case (place, kind, keys, deleted, moves):
                partition, value = PARTITIONS[place], value + 1
                keys, deleted = [8 * key + place for key in keys], [8 * key + place for key in deleted]
                vectors = np.full((len(keys), 1), value, np.float32)
                vectors += np.arange(len(keys), dtype=np.float32)[:, None] / 8
                now_us = max(1, now_us + moves - 10)  # a clock that also goes back
                sequence, arrays = last[partition] + moves, (np.array(keys, np.int64), vectors)
                if kind == "late" and sent[partition]:  # from a publisher that did not read the last sequence
                    kind, sequence = "own", max(1, last[partition] - moves)
                    if sequence in {one[-1] for one in sent[partition]}:
                        continue  # of two changes with one sequence none is the later one
                if kind == "again" and sent[partition]:
                    message, *rest = sent[partition][rng.integers(len(sent[partition]))]
                    if message[:4] == b"HPS1":
                        broker.append(partition, message, now_us)
                        apply(partition, message, *rest)
                elif kind == "bad":
                    broker.append(partition, b"nonsense", now_us)
                    last[partition] += 1
                elif kind == "hugectr":
                    if keys:
                        message = encode_hugectr(*arrays)
                        broker.append(partition, message, now_us)
                        apply(partition, message, keys, vectors, [], max(now_us, last[partition] + 1))
                else:
                    message = encode(*arrays, np.array(deleted, np.int64), sequence=sequence)
                    broker.append(partition, message, now_us)
                    apply(partition, message, keys, vectors, deleted, sequence)
    for _ in range(2 * len(steps) + 2):
        process.feed._run_once()
    assert {index: target.rows[index] for index in expected} == expected
    for index, topic in enumerate(TOPICS):
        ends = {str(one): str(len(broker.part(one) or ()) - 1) for one in PARTITIONS if one.topic == topic}
        assert {name: at.position for name, at in target.positions[index].items()} == ends
        assert {name: at.sequence for name, at in target.positions[index].items()} == {
            str(one): last[one] for one in PARTITIONS if one.topic == topic
        }


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(1, 5), st.integers(0, 2**32))
def test_tables_end_as_if_every_message_had_been_applied_once_in_order(steps: list[Any], batch: int, seed: int) -> None:
    follow_to_the_end(steps, batch, seed)
