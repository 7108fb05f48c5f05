"""Keeps messages that cannot be applied, so that `hps updates replay` can republish them once the cause is fixed.

In a directory they are JSON lines, one object per message:

    {"when": "2026-03-01T12:00:00.000000+00:00", "reason": "width", "detail": "...", "model": "shop", "table": "item",
     "topic": "hps_et.shop.item", "partition": 0, "position": "17", "time_us": 1772366400000000, "sequence": 1772366400000000,
     "key": "", "value": "SFBTMQ..."}

`key` and `value` are base64. Files are named `<microseconds since 1970>.<random>.jsonl`; a large one is followed by another.
In the topic `hps_dead.<model>.<table>`, a message is the same object without `value`, a line feed, and the original value.
"""

import json
import logging
import os
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Self

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import HPSError, UpdateFormatError, UpdateLogError
from hps.ground.log_limits import LineLimit
from hps.ground.registry import implementation
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import Metrics
from hps.types import split_tag
from hps.updates.base import DEAD_LETTER_PREFIX, Message, Partition, UpdateLog, UpdateLogWriter
from hps.updates.framing import HIGHEST_SEQUENCE

_log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 60.0

_TOPIC = "topic"
_QUEUED_BYTES = 64 << 20  # queued for the disk; a single message may be larger
_QUEUED = 4096
_FILES = 8  # the bound is divided among this many files; the oldest is dropped to make room
_PIECE = 3 << 20  # base64 characters; a multiple of 3
_TIMEOUT_S = 10.0  # for the log that takes dead letters
_FIELDS: dict[str, type] = dict.fromkeys(("topic", "position", "key", "reason", "detail", "model", "table", "when"), str)
_FIELDS |= dict.fromkeys(("partition", "time_us", "sequence"), int)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be applied. *Immutable.*

    Attributes:
        reason, detail: reason and text of the `UpdateFormatError`.
        model, table: the table it was meant for; empty if the topic does not say.
        sequence: place in the order of changes, from the message or assigned by the replica; 0 if unknown.
        when: time at which it was stored, ISO 8601.
    """

    message: Message
    reason: str
    detail: str
    model: str
    table: str
    sequence: int
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))

    def header(self) -> dict[str, Any]:
        message = self.message
        return {
            **{"when": self.when, "reason": self.reason, "detail": self.detail, "model": self.model, "table": self.table},
            **{"topic": message.partition.topic, "partition": message.partition.number, "position": message.position},
            **{"time_us": min(message.time_us, HIGHEST_SEQUENCE), "sequence": self.sequence},
            **{"key": b64encode(message.key).decode()},
        }

    @classmethod
    def read(cls, text: bytes, value: bytes | None = None) -> Self:
        """Read a written object.

        Args:
            value: value of the message; by default it is in the object.

        Raises:
            UpdateFormatError: it is not a dead letter.
        """
        try:
            content = json.loads(text)
            for name, kind in _FIELDS.items():
                if type(content[name]) is not kind or (kind is int and not 0 <= content[name] <= HIGHEST_SEQUENCE):
                    raise ValueError(f"{name}: got {str(content[name])[:40]}")
            raw = b64decode(content["value"], validate=True) if value is None else value
            partition = Partition(content["topic"], content["partition"])
            message = Message(partition, content["position"], content["time_us"], b64decode(content["key"], validate=True), raw)
            return cls(message, *(content[name] for name in ("reason", "detail", "model", "table", "sequence", "when")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UpdateFormatError(
                "dead_letter", f"reading a dead letter: got {text[:60]!r} ({error!r}), expected a complete JSON object"
            ) from error


class DeadLetters:
    """Stores messages that cannot be applied, without ever blocking the feed. *Thread-safe.*

    A thread writes them. Losses (a full or slow disk, an unreachable log) are counted and logged.

    Args:
        directory: a directory for them alone; empty: none.
        most_bytes: bound on all files in the directory; the oldest are removed to keep it.
        connect: makes the writer of a topic at the first message; then the directory is not used.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        directory: str,
        most_bytes: int,
        metrics: Metrics,
        connect: Callable[[], UpdateLogWriter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._most_bytes, self._connect = directory, most_bytes, connect
        self._queue = WorkQueue("dead-letters", _QUEUED, 1, metrics)
        self._writer: UpdateLogWriter | None = None
        self._partitions: dict[str, int] = {}  # number of partitions by topic
        self._path = ""
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self.lost = 0
        """Number of messages that could not be stored, or were removed to keep the bound."""
        self._cause = ""  # cause of the last loss
        self._unlogged: Counter[str] = Counter()
        self._lines = LineLimit(1, LOG_INTERVAL_S, clock)

    @classmethod
    def from_config(cls, settings: UpdateSourceConfig, persistent_path: str, metrics: Metrics) -> Self:
        """Make the store of a server.

        Args:
            settings: `dead_letters` is a directory, `topic`, or empty.
            persistent_path: path of the persistent database, beside which the default directory lies; empty if there is none.
        """
        if (place := place_of(settings, persistent_path)) != _TOPIC:
            return cls(place, settings.dead_letter_bytes, metrics)
        connect = implementation("update_log_writer", settings.type).from_config
        return cls("", settings.dead_letter_bytes, metrics, lambda: connect(settings))

    @property
    def place(self) -> str:
        """Where they are stored, `topic` or a directory; empty if nowhere."""
        return f"topics {DEAD_LETTER_PREFIX}*" if self._connect else self._directory

    def add(self, message: Message, reason: str, detail: str, sequence: int) -> None:
        """Queue a message. Does not block and raises nothing."""
        model, _, table = split_tag(message.partition.topic) or ("", "", "")
        letter = DeadLetter(message, reason, detail, model, table, sequence)
        size = len(message.value)
        # The feed must never wait for a disk. So the queue is bounded by bytes, too, and what does not fit is lost and counted.
        if self.place:
            with self._lock:
                fits = not self._queued_bytes or self._queued_bytes + size <= _QUEUED_BYTES
                self._queued_bytes += size if fits else 0
            if not fits or not self._queue.submit(lambda: self._store(letter)):
                with self._lock:
                    self._queued_bytes -= size if fits else 0
                self._lose(1, "they arrive faster than they can be written")
        self._report(reason, f"{message.partition} at {message.position}: {detail}")

    def flush(self, timeout_s: float) -> bool:
        """Wait until every added message is stored or lost."""
        done = self._queue.drain(timeout_s)
        return done and (self._writer is None or self._writer.flush(timeout_s) == 0)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queued messages, for at most `timeout_s`. May be called twice."""
        self._queue.close(timeout_s)
        if self._writer is not None:
            self._writer.flush(timeout_s)
            self._writer.close()
        self._report("", "")

    def _store(self, letter: DeadLetter) -> None:
        try:
            if self._connect:
                self._send(letter)
            else:
                self._write(letter)
        except (OSError, HPSError) as error:
            self._lose(1, str(error))
        finally:
            with self._lock:
                self._queued_bytes -= len(letter.message.value)

    def _send(self, letter: DeadLetter) -> None:
        if self._writer is None and self._connect:
            self._writer = self._connect()
        if self._writer is None:
            return
        topic = f"{DEAD_LETTER_PREFIX}{letter.model}.{letter.table}"
        if topic not in self._partitions:
            self._partitions[topic] = self._writer.partitions(topic, _TIMEOUT_S, create=1)
        header = json.dumps(letter.header()).encode()
        partition = Partition(topic, letter.message.partition.number % self._partitions[topic])
        self._writer.send(partition, b"\n".join((header, letter.message.value)), sent=self._sent)

    def _sent(self, result: str | Exception) -> None:
        if isinstance(result, Exception):
            self._lose(1, str(result))

    def _write(self, letter: DeadLetter) -> None:
        head = json.dumps(letter.header()).encode()[:-1] + b', "value": "'
        size = len(head) + (len(letter.message.value) + 2) // 3 * 4 + 3
        if size > self._most_bytes:
            self._lose(1, f"a message takes {size} bytes, more than dead_letter_bytes = {self._most_bytes}")
            return
        os.makedirs(self._directory, exist_ok=True)
        self._make_room(size)
        with open(self._path, "ab") as file:
            start = file.tell()
            try:
                file.write(head)
                value = memoryview(letter.message.value)
                for low in range(0, len(value), _PIECE):
                    file.write(b64encode(value[low : low + _PIECE]))
                file.write(b'"}\n')
                file.flush()
            except OSError:
                with suppress(OSError):  # remove the partial line
                    os.truncate(self._path, start)
                raise

    def _make_room(self, size: int) -> None:
        """Choose a file with room for `size` bytes, and remove the oldest files beyond the bound."""
        sizes = {path: path.stat().st_size for path in _files(self._directory)}
        present = sizes.get(Path(self._path), 0)
        if not self._path or (present and present + size > self._most_bytes // _FILES):
            self._path = f"{self._directory}/{time.time_ns() // 1000}.{secrets.token_hex(3)}.jsonl"
        total = sum(sizes.values())
        for path, length in sizes.items():
            if total + size <= self._most_bytes:
                break
            with path.open("rb") as file:
                count = sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
            path.unlink()
            total -= length
            self._lose(count, f"{self._directory} has reached dead_letter_bytes = {self._most_bytes}; the oldest were removed")

    def _lose(self, count: int, cause: str) -> None:
        with self._lock:
            self.lost += count
            self._cause = cause

    def _report(self, reason: str, detail: str) -> None:
        """Log losses since the last line, at most once a minute; on close, the rest."""
        with self._lock:
            if reason:
                self._unlogged[reason] += 1
            if not self._unlogged or (reason and not self._lines.take()):
                return
            counts, self._unlogged = self._unlogged, Counter()
            lost, cause = self.lost, self._cause
        counted = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        stored = f"stored in {self.place}" if self.place else "not stored: set update_source.dead_letters"
        missing = f"; {lost} in total could not be stored: {cause}" if lost else ""
        last = f"; the last is {detail}" if detail else ""
        _log.warning("messages of updates cannot be applied (%s)%s; %s%s", counted, last, stored, missing)


def place_of(settings: UpdateSourceConfig, persistent_path: str) -> str:
    """Return where dead letters go, `topic` or a directory; empty if nowhere. Arguments as for `from_config`."""
    default = f"{persistent_path.rstrip('/')}.dead-letters" if persistent_path else ""
    return settings.dead_letters or default


def read_directory(directory: str) -> Iterator[DeadLetter | UpdateFormatError]:
    """Yield the dead letters of a directory, oldest first, and the errors of unreadable lines."""
    for path in _files(directory):
        with suppress(FileNotFoundError), path.open("rb") as file:  # a server has removed its oldest files
            for line in file:
                try:
                    yield DeadLetter.read(line)
                except UpdateFormatError as error:
                    yield error


def read_topics(log: UpdateLog, topics: list[str], timeout_s: float) -> Iterator[DeadLetter | UpdateFormatError]:
    """Yield the dead letters that are in topics now, in the order of each partition.

    Messages that servers add meanwhile are left for the next call: they may be results of the replay.

    Args:
        log: not yet followed.
        topics: topics to read, as far as they exist.
        timeout_s: longest silence while more messages may come.

    Raises:
        UpdateLogError: the log was silent for that long, and it is not known to be exhausted.
    """
    log.follow(topics, {}, "earliest")
    deadline = time.monotonic() + timeout_s
    read: Counter[Partition] = Counter()
    ends: dict[Partition, int] = {}  # messages in each partition when its first ones were read
    while True:
        messages = log.poll(0.1, _QUEUED_BYTES)
        behind, polled = log.behind(), Counter(message.partition for message in messages)
        for partition, count in behind.items():
            if count is not None and not read[partition]:
                ends[partition] = max(count + polled[partition], ends.get(partition, 0))
        for message in messages:
            read[message.partition] += 1
            if read[message.partition] <= ends.get(message.partition, read[message.partition]):
                yield _in_topic(message)
        if all(map(log.lacks, topics)):
            raise UpdateLogError(f"reading dead letters: {log.problem}")
        found = all(log.lacks(topic) or any(partition.topic == topic for partition in behind) for topic in topics)
        if found and all(count == 0 or (at in ends and read[at] >= ends[at]) for at, count in behind.items()):
            return
        if messages:
            deadline = time.monotonic() + timeout_s
        elif time.monotonic() >= deadline:
            problem = log.problem or "no reason is known"
            raise UpdateLogError(f"reading dead letters: no message for {timeout_s:g} s: {problem}")


def _in_topic(message: Message) -> DeadLetter | UpdateFormatError:
    header = BytesIO(message.value).readline()
    try:
        letter = DeadLetter.read(header, message.value[len(header) :])
    except UpdateFormatError as error:
        return error
    # A program with the right to write this topic must not publish to the table of another one.
    if message.partition.topic != f"{DEAD_LETTER_PREFIX}{letter.model}.{letter.table}":
        text = f"reading a dead letter in {message.partition}: got one of {letter.model}.{letter.table}"
        return UpdateFormatError("table", f"{text}, expected one of the topic's table")
    return letter


def _files(directory: str) -> list[Path]:
    """List the files, oldest first: their names begin with the time."""
    return sorted(Path(directory).glob("*.jsonl"))
