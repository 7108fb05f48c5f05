"""The contract of a log of online updates: trainers publish changed rows, and every replica reads all of them.

A *log* has one *topic* per table, `hps_et.<model>.<table>`, of one or more *partitions*. A partition is a sequence of messages,
each with a *position* in it. All changes of a key go to one partition, which keeps them in order.

A reader chooses its own starting positions: the database stores with the rows how far they have been applied
(`OrderedWrites.apply`). Positions are committed to the log only for operators and their tools.

`UpdateLog` reads and `UpdateLogWriter` writes; each kind of log implements both. Neither looks inside a message (framing.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from hps.errors import UpdateLogError
from hps.stores.base import Partition as Partition  # part of this contract
from hps.types import CheckResult

TOPIC_PREFIX: Final = "hps_et."
"""Prefix of a table's topic, as in HugeCTR: prefix, model, dot, table."""

DEAD_LETTER_PREFIX: Final = "hps_dead."
"""Prefix of the topic for messages that cannot be applied. HugeCTR's consumers do not subscribe to it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message in the log. *Immutable.*

    Attributes:
        position: position in the partition, as the log writes it (a Kafka offset, a Redis stream id).
        time_us: publication time in microseconds since 1970, by the publisher's or broker's clock; 0 if unknown.
        key: Kafka's message key; empty by default.
        arrived: when it was appended, by `time.monotonic`, within what was observed (arrivals.py); None if unknown.
    """

    partition: Partition
    position: str
    time_us: int
    key: bytes
    value: bytes
    arrived: float | None = field(default=None, compare=False)


class UpdateLog(ABC):
    """Reads the messages of its topics, in order within each partition. *One thread*, unless a method says otherwise.

    An unreachable log is not an error: `poll` returns nothing and keeps trying, and `problem` says what is wrong. No call
    blocks for longer than its timeout. Messages read ahead take at most `update_source.read_ahead_bytes`.
    """

    kind: ClassVar[str]
    """The configuration value that selects this log, e.g. `kafka_message_queue`."""

    delivered: int = 0
    """Number of messages that `poll` has returned or is about to. *Thread-safe.*

    It rises before `behind` falls: read after `behind`, it shows whether messages are on their way to the caller of `poll`.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any, group: str) -> Self:
        """Build a reader from `config` (an `UpdateSourceConfig`). It does not connect yet.

        Args:
            group: consumer group for committed positions.

        Raises:
            ConfigError: the settings contradict each other, or the client rejects them.
        """

    @classmethod
    def probe(cls, config: Any, topics: Sequence[str], timeout_s: float) -> list[CheckResult]:
        """Check that the log can be reached and has these topics. Writes nothing.

        Returns:
            One result per check; empty if this kind of log cannot be probed.
        """
        return []

    @abstractmethod
    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        """Start to read all partitions of these topics, including those added later. Called once.

        A missing topic is followed as soon as it exists.

        Args:
            after: last position to skip, by partition.
            begin: `earliest` or `latest`, for existing partitions without a position; partitions added later are read from
                their start.
        """

    @abstractmethod
    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        """Return the messages that have arrived, waiting at most `timeout_s` for the first one.

        Args:
            most_bytes: stop once the values have this many bytes; a single message may be larger.
        """

    @abstractmethod
    def pause(self, partitions: Sequence[Partition]) -> None:
        """Stop fetching these partitions; `poll` returns none of their messages until `resume`."""

    @abstractmethod
    def resume(self, partitions: Sequence[Partition]) -> None:
        """Fetch these partitions again, from where they were paused."""

    @abstractmethod
    def behind(self) -> dict[Partition, int | None]:
        """Return the number of unread messages in each known partition; None if unknown now. Does not block. *Thread-safe.*

        Includes empty partitions.
        """

    @abstractmethod
    def unread_since(self) -> dict[Partition, float | None]:
        """Return a moment by `time.monotonic` before which no unread message of a partition was appended. *Thread-safe.*

        It does not depend on times that producers claim; None if unknown. While `behind` is unknown, there may be unread
        messages since then.
        """

    @abstractmethod
    def commit(self, positions: Mapping[Partition, str]) -> None:
        """Commit these positions to the log in the background. `problem` reports failures."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """Describe what keeps messages of any topic from arriving; empty if nothing does. *Thread-safe.*"""

    @abstractmethod
    def problem_of(self, topic: str) -> str:
        """Describe what keeps messages of one topic from arriving; empty if nothing does. *Thread-safe.*

        A wrong value that another program has written for one topic must not stop the others.
        """

    @abstractmethod
    def lacks(self, topic: str) -> bool:
        """Return whether the log has reported that the topic does not exist. *Thread-safe.*"""

    @abstractmethod
    def lost(self) -> dict[Partition, str]:
        """Return partitions that lost unread messages (retention, a recreated topic), with a description of the loss.

        Reading continues with the first message available. Each loss is reported once.
        """

    def begun(self) -> dict[Partition, str]:
        """Return the starting positions of partitions that were followed without one, to be passed to the next `follow`.

        Otherwise a restart with `latest` would skip messages that arrive before the first one of the partition is applied. Each
        partition is reported once, at the latest with its first message; logs that do not know report none.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop reading and release connections, within a few seconds. May be called twice. *Thread-safe.*"""


class UpdateLogWriter(ABC):
    """Appends messages to a log. *Thread-safe.*"""

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Self:
        """Build a writer from `config` (an `UpdateSourceConfig`).

        Raises:
            ConfigError: as for `UpdateLog.from_config`.
        """

    @abstractmethod
    def partitions(self, topic: str, timeout_s: float, create: int = 0) -> int:
        """Return the number of partitions of a topic; `create` makes a missing topic with that many.

        Raises:
            UpdateLogError: the log cannot be reached in time, or the topic does not exist.
        """

    @abstractmethod
    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        """Return the last message of a partition; None if it is empty.

        Raises:
            UpdateLogError: the log cannot be reached in time.
        """

    @abstractmethod
    def send(
        self,
        partition: Partition,
        value: bytes,
        *,
        time_us: int = 0,
        sent: Callable[[str | Exception], None] | None = None,
    ) -> None:
        """Append a message; blocks while too many are in flight.

        The messages of a partition are appended in the order of the calls, each once.

        Args:
            time_us: time of the change; 0: now.
            sent: called on any thread, in order within a partition, with the position of the stored message (empty if the log
                does not report it) or the error.

        Raises:
            UpdateLogError: the message is too large for the log, or the log has accepted nothing for a long time.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> int:
        """Wait for messages in flight; return how many remain after `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """Drop messages in flight and release connections."""


def missing_topics(topics: Sequence[str], there: Sequence[str], where: str) -> list[CheckResult]:
    """Turn missing topics into the results of `probe`."""
    missing = [topic for topic in topics if topic not in there]
    if missing:
        return [CheckResult("warning", where, f"no topic {', '.join(missing)} yet; it is followed once a publisher creates it")]
    return [CheckResult("good", where, f"{len(topics)} of {len(topics)} topics are there")]


def check_message_size(partition: Partition, value: bytes, most_bytes: int) -> None:
    """Refuse a message that readers would not accept.

    Raises:
        UpdateLogError: it is larger than `update_source.max_message_bytes`.
    """
    if len(value) > most_bytes:
        raise UpdateLogError(
            f"sending to {partition}: got {len(value)} bytes, expected at most {most_bytes} (update_source.max_message_bytes); "
            "send fewer rows in a message"
        )
