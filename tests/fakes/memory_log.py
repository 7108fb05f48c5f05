"""An update log in the memory of the process, which can be away, slow, lose messages and refuse them.

Several readers and writers share a `MemoryBroker`. Those that are made by `from_config` share the one that is called as the
first of the configured `brokers`. Positions are the decimal numbers of messages, as Kafka's.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hps.errors import UpdateLogError
from hps.updates.base import Message, Partition, UpdateLog, UpdateLogWriter


class MemoryBroker:
    """Topics, by name. *Thread-safe.*

    Attributes:
        away: nothing can be reached: readers get nothing, writers fail after their timeout.
        delay_s: how long every poll with messages and every send takes at least.
        refuse: tells whether a message is refused when it is sent, by partition and value.
        most_bytes: the largest message that is taken.
        committed: positions by group and partition.
        clock: dates what is appended.
    """

    by_name: "defaultdict[str, MemoryBroker]"

    def __init__(self) -> None:
        self.away = False
        self.delay_s = 0.0
        self.refuse: Callable[[Partition, bytes], bool] = lambda partition, value: False
        self.most_bytes = 1 << 30
        self.committed: dict[str, dict[Partition, str]] = defaultdict(dict)
        self.clock: Callable[[], float] = time.monotonic
        self.changed = threading.Condition()
        self._messages: dict[Partition, list[Message | None]] = {}
        self._topics: dict[str, int] = {}

    def create(self, topic: str, partitions: int = 1) -> None:
        """Make a topic, or add partitions to it."""
        with self.changed:
            for number in range(self._topics.get(topic, 0), partitions):
                self._messages[Partition(topic, number)] = []
            self._topics[topic] = max(partitions, self._topics.get(topic, 0))
            self.changed.notify_all()

    def drop(self, topic: str) -> None:
        """Remove a topic with its messages."""
        with self.changed:
            for number in range(self._topics.pop(topic)):
                del self._messages[Partition(topic, number)]

    def append(self, partition: Partition, value: bytes, time_us: int = 0, key: bytes = b"") -> str:
        """Add a message, whatever it is; returns its position."""
        with self.changed:
            held = self._messages[partition]
            held.append(Message(partition, str(len(held)), time_us or time.time_ns() // 1000, key, value, self.clock()))
            self.changed.notify_all()
            return str(len(held) - 1)

    def lose(self, partition: Partition, count: int) -> None:
        """Forget the first `count` messages, as retention does."""
        with self.changed:
            self._messages[partition][:count] = [None] * count

    def messages(self, topic: str) -> list[Message]:
        """All that are there, by partition."""
        with self.changed:
            parts = [self._messages[Partition(topic, number)] for number in range(self._topics.get(topic, 0))]
            return [message for part in parts for message in part if message is not None]

    def part(self, partition: Partition) -> list[Message | None] | None:
        return self._messages.get(partition)

    def partitions(self, topic: str) -> int:
        return self._topics.get(topic, 0)


MemoryBroker.by_name = defaultdict(MemoryBroker)


class MemoryLog(UpdateLog):
    """Reads a `MemoryBroker`."""

    kind = "memory"

    def __init__(self, broker: MemoryBroker, group: str = "") -> None:
        self._broker, self._group = broker, group
        self._next: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._lost: dict[Partition, str] = {}
        self._begun: dict[Partition, str] = {}
        self._looked: float | None = None  # when the broker was last there
        self._topics: Sequence[str] = ()
        self._after: Mapping[Partition, str] = {}
        self._begin = "earliest"  # of partitions that are found; after the first contact everything of new ones is wanted
        self._problem = ""
        self.closed = False

    @classmethod
    def from_config(cls, config: Any, group: str) -> Self:
        return cls(MemoryBroker.by_name[config.brokers.split(",")[0]], group)

    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        self._topics, self._after, self._begin = topics, after, begin
        with self._broker.changed:
            self._find()

    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        with self._broker.changed:
            self._broker.changed.wait_for(self._ready, timeout_s)
            taken = self._take(most_bytes) if self._ready() else []
        if taken and self._broker.delay_s:
            time.sleep(self._broker.delay_s)
        return taken

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._paused.difference_update(partitions)

    def behind(self) -> dict[Partition, int | None]:
        with self._broker.changed:
            if self._broker.away:
                return dict.fromkeys(self._next)
            return {one: max(0, len(self._broker.part(one) or ()) - at) for one, at in self._next.items()}

    def unread_since(self) -> dict[Partition, float | None]:
        with self._broker.changed:
            if not self._broker.away:
                self._looked = self._broker.clock()
            unread = {one: (self._broker.part(one) or [])[at:] for one, at in self._next.items()}
            return {one: next((m.arrived for m in messages if m), self._looked) for one, messages in unread.items()}

    def commit(self, positions: Mapping[Partition, str]) -> None:
        if not self._broker.away:
            self._broker.committed[self._group].update(positions)

    @property
    def problem(self) -> str:
        return self._problem

    def problem_of(self, topic: str) -> str:
        return f"there is no topic {topic}" if self.lacks(topic) else self._problem if self._broker.away else ""

    def lacks(self, topic: str) -> bool:
        return not self._broker.away and not self._broker.partitions(topic)

    def lost(self) -> dict[Partition, str]:
        lost, self._lost = self._lost, {}
        return lost

    def begun(self) -> dict[Partition, str]:
        begun, self._begun = self._begun, {}
        return begun

    def close(self) -> None:
        self.closed = True

    def _find(self) -> None:
        """Take up partitions that were not known."""
        self._problem = "the broker is away" if self._broker.away else ""
        if self._broker.away:
            return
        for topic in self._topics:
            if not self._broker.partitions(topic):
                self._problem = f"there is no topic {topic}"
            for number in range(self._broker.partitions(topic)):
                partition = Partition(topic, number)
                if partition in self._next:
                    continue
                after = self._after.get(partition)
                latest = len(self._broker.part(partition) or ()) if self._begin == "latest" else 0
                self._next[partition] = latest if after is None else int(after) + 1
                if after is None:
                    self._begun[partition] = str(latest - 1)
        self._begin = "earliest"

    def _ready(self) -> bool:
        self._find()
        if self.closed or self._broker.away:
            return False
        for partition, at in self._next.items():
            held = self._broker.part(partition)
            if held is None:
                self._problem = f"there is no topic {partition.topic}"
            elif at > len(held):
                self._lost[partition] = f"messages end before {at}: the topic was made anew"
                self._next[partition] = 0
            elif at < len(held) and held[at] is None:
                first = next((i for i, message in enumerate(held) if message is not None), len(held))
                self._lost[partition] = f"messages {at} to {first - 1} are gone"
                self._next[partition] = first
        return any(self._next[one] < len(self._broker.part(one) or ()) for one in self._next.keys() - self._paused)

    def _take(self, most_bytes: int) -> list[Message]:
        taken, size = [], 0
        for partition in sorted(self._next.keys() - self._paused):
            for message in (self._broker.part(partition) or [])[self._next[partition] :]:
                if size >= most_bytes or message is None:
                    break
                taken.append(message)
                self.delivered += 1
                size += len(message.value)
                self._next[partition] += 1
        return taken


class MemoryLogWriter(UpdateLogWriter):
    """Writes to a `MemoryBroker`."""

    kind = "memory"

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.closed = False

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(MemoryBroker.by_name[config.brokers.split(",")[0]])

    def partitions(self, topic: str, timeout_s: float, create: int = 0) -> int:
        self._reach()
        if create and not self._broker.partitions(topic):
            self._broker.create(topic, create)
        if not (count := self._broker.partitions(topic)):
            raise UpdateLogError(f"publishing to {topic}: there is no such topic; create it, or say --create-partitions")
        return count

    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        self._reach()
        held = self._broker.part(partition)
        return held[-1] if held else None

    def send(
        self, partition: Partition, value: bytes, *, time_us: int = 0, sent: Callable[[str | Exception], None] | None = None
    ) -> None:
        if len(value) > self._broker.most_bytes:
            raise UpdateLogError(
                f"publishing to {partition}: got {len(value)} bytes, expected at most {self._broker.most_bytes}"
            )
        self._reach()
        if self._broker.delay_s:
            time.sleep(self._broker.delay_s)
        refused = self._broker.refuse(partition, value)
        result = UpdateLogError(f"publishing to {partition}: refused") if refused else self._append(partition, value, time_us)
        if sent is not None:
            sent(result)

    def flush(self, timeout_s: float) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def _append(self, partition: Partition, value: bytes, time_us: int) -> str:
        return self._broker.append(partition, value, time_us)

    def _reach(self) -> None:
        if self._broker.away:
            raise UpdateLogError("reaching the broker: it is away; start it")
