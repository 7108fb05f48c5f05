"""The contract of a log of online updates: who trains publishes changes of rows there, and every replica reads all of them.

A *log* has one *topic* a table, `hps_et.<model>.<table>`, of one or more *partitions*. A partition is a sequence of messages,
each with a *position* in it. All changes of a key are in one partition, so that their order there is that of their making.

A reader says itself from where it reads: what it has applied is remembered with the rows (`Database.apply`), not in the log.
What is committed to the log is for people and their tools alone.

`UpdateLog` reads, `UpdateLogWriter` writes; each kind of log brings both. What is in a message is not theirs (framing.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from hps.findings import Finding

TOPIC_PREFIX: Final = "hps_et."
"""HugeCTR's: the topic of a table is this, the model, a dot and the table."""

DEAD_LETTER_PREFIX: Final = "hps_dead."
"""The same of the topic that takes messages which cannot be applied. HugeCTR's consumers do not subscribe to it."""


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A partition of a topic. *Immutable.*"""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it lies in the log. *Immutable.*

    Attributes:
        partition: where it lies.
        position: its place there, as the log writes it (an offset of Kafka, an id of a Redis stream).
        time_us: when it was published, in microseconds since 1970, by the clock of the publisher or the broker; 0 if unknown.
        key: Kafka's message key; empty where there is none.
        value: what it says.
    """

    partition: Partition
    position: str
    time_us: int
    key: bytes
    value: bytes


class UpdateLog(ABC):
    """Reads messages of some topics, in the order of each partition. *One thread*, but for `close` and what says otherwise.

    A log that cannot be reached is no error: `poll` returns nothing, goes on trying, and `problem` says what is wrong. No call
    blocks for longer than its timeout, and memory is bounded: what is read ahead and not yet polled is at most
    `update_source.read_ahead_bytes`, whatever the caller does.
    """

    kind: ClassVar[str]
    """The configuration value that selects this log, e.g. `kafka_message_queue`."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any, group: str) -> Self:
        """A reader as `config` (an `UpdateSourceConfig`) describes. Nothing is connected to yet, and nothing fails.

        Args:
            group: under which positions are committed.

        Raises:
            ConfigError: the settings contradict each other, or the client refuses them.
        """

    @classmethod
    def probe(cls, config: Any, topics: Sequence[str], timeout_s: float) -> list[Finding]:
        """Find out whether the log can be reached and has these topics. Nothing is written there.

        Returns:
            What was found; nothing where this kind of log cannot be asked.
        """
        return []

    @abstractmethod
    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        """Read these topics from now on, all their partitions, also those that are added later. Called once.

        A topic that does not exist is waited for.

        Args:
            topics: whose messages are wanted.
            after: the position of the last message that is not wanted any more, by partition.
            begin: where to begin in other partitions that are there now: `earliest` or `latest`; of partitions that are added
                later everything is wanted.
        """

    @abstractmethod
    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        """Messages that have come, at once if there are any, else after at most `timeout_s`.

        Args:
            most_bytes: no further message is taken once their values have so many bytes; one message may have more.
        """

    @abstractmethod
    def pause(self, partitions: Sequence[Partition]) -> None:
        """Fetch no more of these partitions; `poll` returns none of their messages until `resume`."""

    @abstractmethod
    def resume(self, partitions: Sequence[Partition]) -> None:
        """Fetch of these partitions again, from where it was stopped."""

    @abstractmethod
    def behind(self) -> dict[Partition, int | None]:
        """How many messages of each partition have not been polled yet; None where that is not known now. Does not block.

        A partition that was found belongs here, also one that is empty. *Any thread.*
        """

    @abstractmethod
    def commit(self, positions: Mapping[Partition, str]) -> None:
        """Tell the log, in the background, that all messages up to these positions are applied. Failures are `problem`s."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """What keeps messages from coming, for people; empty while nothing does. *Any thread.*"""

    @abstractmethod
    def lost(self) -> dict[Partition, str]:
        """Partitions of which messages that were wanted are gone (retention, a topic made anew), and what happened, for people.

        Reading goes on with the first message that is there. Each is reported once.
        """

    def begun(self) -> dict[Partition, str]:
        """Partitions that reading began at without a position being given, and behind which: to be given next time.

        Without it, what comes to a partition between two starts, before its first message is applied, would be skipped with
        `latest`. Each is reported once, at the latest with its first message. A log that cannot tell reports none.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop reading and release connections, within some seconds. Closing twice changes nothing."""


class UpdateLogWriter(ABC):
    """Writes messages. *Thread-safe.*"""

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Self:
        """A writer as `config` (an `UpdateSourceConfig`) describes.

        Raises:
            ConfigError: as `UpdateLog.from_config`.
        """

    @abstractmethod
    def partitions(self, topic: str, timeout_s: float, create: int = 0) -> int:
        """How many partitions a topic has; with `create` it is made with so many where it does not exist.

        Raises:
            UpdateLogError: the log cannot be reached in time, or there is no such topic.
        """

    @abstractmethod
    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        """The last message of a partition; None where it is empty.

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
        """Append a message; waits while too much is under way.

        Messages of one partition are appended in the order of the calls, none twice.

        Args:
            time_us: when it was made; 0: now.
            sent: is called, in some thread and in the order of a partition's messages, with its position once the log has it
                for good (empty where the log does not say it), or with what went wrong.

        Raises:
            UpdateLogError: it is too large for the log, or nothing was taken for a long time.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> int:
        """Wait for what is under way; how many messages still are after `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way and release connections."""


def missing_topics(topics: Sequence[str], there: Sequence[str], where: str) -> list[Finding]:
    """What a `probe` says of topics, given those that exist."""
    missing = [topic for topic in topics if topic not in there]
    if missing:
        return [Finding("warning", where, f"no topic {', '.join(missing)} yet; it is waited for, and made by who publishes")]
    return [Finding("good", where, f"{len(topics)} of {len(topics)} topics are there")]
