"""Online updates from Apache Kafka and compatible brokers, through librdkafka (confluent-kafka).

The reader assigns itself every partition of its topics at its own offsets and joins no group; the group only names its commits,
so other members do not disturb it. A thread, the *survey*, asks the cluster every second for the ends of partitions and, less
often, for the topics' partitions and the starts of those that are not being read well.

A position is the offset of a message.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Self

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from hps.errors import ConfigError, UpdateLogError
from hps.ground.log_limits import LineLimit
from hps.ground.threads.lifetimes import close_at_exit, disown_in_children, refusal
from hps.ground.threads.workers import new_thread
from hps.types import CheckResult
from hps.updates.arrivals import Arrivals, moment_of
from hps.updates.base import Message, Partition, UpdateLog, UpdateLogWriter, missing_topics

_log = logging.getLogger(__name__)
_ANSWER_S: Final = 3.0  # timeout of a survey's request; a close waits for one
_LOOK_AGAIN_S: Final = 1.0  # while something is wrong
_SLICE_S: Final = 0.1  # of a poll: bounds its delay in acting on the survey or a close
_SILENT_S: Final = 10.0  # without one of the messages that wait
_CLOSE_S: Final = 10.0
_SEND_S: Final = 30.0  # wait for room in the writer's queue
_FULL_S: Final = 0.002
_REPORTED_S: Final = 0.002
_MOST_COMMITS: Final = 8
_MOST_BYTES: Final = 2**31 - 1

_OURS: Final = {
    "enable.auto.commit": "positions are committed once they are applied",
    "auto.offset.reset": "lost messages must be noticed; update_source.begin sets the start",
    "enable.partition.eof": "the reader needs the ends of partitions",
    "enable.idempotence": "no message may be written twice",
}


def _settings(config: Any, own: Mapping[str, str | int | bool]) -> dict[str, Any]:
    """Merge our settings with the user's, under librdkafka's names."""
    if both := sorted(config.config.keys() & _OURS.keys()):
        raise ConfigError("update_source.config", [f"{key}: cannot be set, since {_OURS[key]}; remove it" for key in both])
    return {
        "bootstrap.servers": config.brokers,
        "topic.metadata.refresh.interval.ms": config.metadata_refresh_interval_ms,
        "receive.message.max.bytes": _MOST_BYTES,  # an oversized message must still be skipped
        "reconnect.backoff.max.ms": 2000,
        "log_level": 2,  # syslog level; `problem` reports the errors
        **({"sasl.password": config.password} if config.password else {}),
        **own,
        **config.config,
    }


def _client(kind: Callable[[dict[str, Any]], Any], settings: dict[str, Any]) -> Any:
    try:
        return kind(settings)
    except (KafkaException, TypeError, ValueError) as error:
        what = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigError("update_source", [f"config: librdkafka refuses it: {what}"]) from error


class _Offsets(NamedTuple):
    """Offsets of the messages of a partition: [low, high)."""

    low: int
    high: int


@dataclass(slots=True)
class _Survey:
    whole: bool  # with the topics, else only the ends of known partitions
    asked: float = 0.0  # when it asked for the ends
    known: float = 0.0  # when it had them
    topics: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # id, new if made anew; partitions
    absent: dict[str, str] = field(default_factory=dict)  # reasons by topic that cannot be read
    unknown: set[str] = field(default_factory=set)  # absent topics that do not exist
    offsets: dict[Partition, _Offsets] = field(default_factory=dict)
    ends: dict[Partition, int] = field(default_factory=dict)


@dataclass(slots=True)
class _PartitionState:
    next: int
    end: int = -1  # the offset after its last message; -1: unknown
    assigned: bool = False
    paused: bool = False
    refused: bool = False  # the broker said that the offset does not exist
    trouble: str = ""  # cleared by the next message
    owed_since: float | None = None  # since when messages wait without one coming
    arrivals: Arrivals = field(default_factory=Arrivals)


class KafkaLog(UpdateLog):
    """Reads topics of a Kafka cluster. *One thread*, unless the contract says otherwise."""

    kind = "kafka_message_queue"

    def __init__(self, settings: dict[str, Any], refresh_s: float) -> None:
        self._settings = settings | {"error_cb": self._on_error, "on_commit": self._on_commit}
        self._consumer = _client(Consumer, self._settings)
        self._admin = _client(AdminClient, {key: value for key, value in settings.items() if key != "group.id"})
        self._refresh_s = refresh_s
        open_too = settings.get("isolation.level") == "read_uncommitted"  # messages of open transactions are read
        self._isolation = IsolationLevel.READ_UNCOMMITTED if open_too else IsolationLevel.READ_COMMITTED
        self._topics: Sequence[str] = ()
        self._after: dict[Partition, str] = {}
        self._begin = "earliest"
        self._readings: dict[Partition, _PartitionState] = {}
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._ids: dict[str, str] = {}  # id by known topic; "" if it did not exist then
        self._absent: dict[str, str] = {}
        self._unknown: set[str] = set()  # topics that do not exist
        self._away = ""  # why the cluster does not answer
        self._emptied_at = 0.0  # when nothing was left to poll
        self._commit_failed = ""
        self._commits: dict[Partition, str] = {}
        self._committing = 0  # commits under way
        self._lost: dict[Partition, str] = {}
        self._begun: dict[Partition, str] = {}
        self._lines = LineLimit()
        self._found: deque[_Survey | str] = deque(maxlen=1)
        self._look = threading.Event()
        self._using = threading.Lock()  # guards the consumer, which must not be closed during a call
        self._closed = self._disowned = False
        self._surveyor = new_thread("kafka-survey", self._keep_looking)
        close_at_exit(self, KafkaLog.close)
        disown_in_children(self)

    @classmethod
    def from_config(cls, config: Any, group: str) -> Self:
        # librdkafka fetches from each broker until the first limit is queued: four brokers may overshoot by their answers.
        queued, answer = config.read_ahead_bytes // 2, config.read_ahead_bytes // 8
        own: dict[str, str | int | bool] = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "allow.auto.create.topics": False,
            "check.crcs": True,
            "queued.max.messages.kbytes": min(max(queued // 1024, 1), 2_097_151),
            "queued.min.messages": 1_000_000,  # bounded by the bytes
            "fetch.max.bytes": min(max(answer, 65_536), _MOST_BYTES - 512),
            "message.max.bytes": 65_536,  # fetch.max.bytes must not be smaller
            "fetch.message.max.bytes": min(max(answer, 65_536), config.max_message_bytes, 1_000_000_000),
            "fetch.queue.backoff.ms": 10,
        }
        return cls(_settings(config, own), config.metadata_refresh_interval_ms / 1000)

    @classmethod
    def probe(cls, config: Any, topics: Sequence[str], timeout_s: float) -> list[CheckResult]:
        where, errors = "update_source.brokers", deque[KafkaError](maxlen=1)
        try:
            client = _client(AdminClient, _settings(config, {}) | {"error_cb": partial(_keep_cause, errors)})
        except ConfigError as error:
            return [CheckResult("wrong", "update_source", problem) for problem in error.problems]
        try:
            cluster = client.list_topics(timeout=timeout_s)
        except KafkaException as error:
            client.poll(0)  # reports them
            what = "; ".join(cause.str() for cause in (error.args[0], *errors))
            return [CheckResult("unreachable", where, f"{config.brokers}: {what}; see that a broker runs there")]
        found = CheckResult("good", where, f"{config.brokers}: {len(cluster.brokers)} brokers answer")
        return [found, *missing_topics(topics, list(cluster.topics), where)]

    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        self._topics, self._after, self._begin = tuple(topics), dict(after), begin
        self._surveyor.start()

    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        messages: list[Message] = []
        size = 0
        with self._using:
            while self._is_open():
                self._act_on_survey()
                wait = 0.0 if messages else min(deadline - time.monotonic(), _SLICE_S)
                got = self._consumer.poll(max(wait, 0.0))
                if got is None:
                    self._emptied_at = time.monotonic()
                    if messages or time.monotonic() >= deadline:
                        break
                elif got.error() is not None:
                    self._on_event(got)
                elif (message := self._taken(got)) is not None:
                    messages.append(message)
                    size += len(message.value)
                    if size >= most_bytes:
                        break
            for partition in {message.partition for message in messages}:
                reading = self._readings[partition]
                reading.end = max(self._end_of_fetch(partition), reading.next, reading.end)
                reading.arrivals.look((reading.end - 1,), time.monotonic())
        if messages:
            self._away = ""
        return messages

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=True)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=False)

    def behind(self) -> dict[Partition, int | None]:
        known = not self._away
        readings = list(self._readings.items())
        return {one: max(read.end - read.next, 0) if known and read.end >= 0 else None for one, read in readings}

    def unread_since(self) -> dict[Partition, float | None]:
        return {one: read.arrivals.unread_since() for one, read in list(self._readings.items())}

    def commit(self, positions: Mapping[Partition, str]) -> None:
        with self._using:
            if self._is_open():
                self._commits.update(positions)
                self._commit_next()

    @property
    def problem(self) -> str:
        return self._problem_of(self._topics)

    def problem_of(self, topic: str) -> str:
        return self._problem_of([topic])

    def lacks(self, topic: str) -> bool:
        return not self._away and topic in self._unknown

    def _problem_of(self, topics: Sequence[str]) -> str:
        if self._away:
            return self._away
        readings = [(one, read) for one, read in list(self._readings.items()) if one.topic in topics]
        parts = [reason for topic, reason in self._absent.items() if topic in topics]
        parts += [f"{one}: {read.trouble}" for one, read in readings if read.trouble]
        for one, read in readings:
            if read.owed_since is not None and self._emptied_at - read.owed_since > _SILENT_S:
                parts.append(f"{one}: {read.end - read.next} messages wait there, but the brokers send none")
        if self._commit_failed:
            parts.append(self._commit_failed)
        return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")

    def lost(self) -> dict[Partition, str]:
        with self._using:
            lost, self._lost = self._lost, {}
        return lost

    def begun(self) -> dict[Partition, str]:
        with self._using:
            begun, self._begun = self._begun, {}
        return begun

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._look.set()
        if self._surveyor.is_alive():
            self._surveyor.join(_CLOSE_S)
        if self._using.acquire(timeout=_CLOSE_S):
            # librdkafka waits 45 s for commits to an unreachable cluster.
            closer = new_thread("kafka-close", self._consumer.close, lasting=False)
            closer.start()
            closer.join(_ANSWER_S)
            self._admin = None  # ends its threads
            self._using.release()

    def disown(self) -> None:
        """Leak the clients in a forked child: their threads did not survive, so closing could hang."""
        self._closed = self._disowned = True
        self._using = threading.Lock()

    def _is_open(self) -> bool:
        if self._disowned:
            raise refusal(self, "a reader of Kafka")
        return not self._closed

    # --- messages, with the consumer in use ----------------------------------------------------------------------------------

    def _taken(self, got: Any) -> Message | None:
        partition = self._partitions[got.topic(), got.partition()]
        reading = self._readings[partition]
        self.delivered += got.value() is not None
        reading.next = got.offset() + 1
        reading.trouble, reading.owed_since = "", None
        message = _message(partition, got)
        message = replace(message, arrived=reading.arrivals.read((got.offset(),), moment_of(message.time_us)))
        return None if got.value() is None else message  # None: a tombstone of a compacted topic

    def _on_event(self, got: Any) -> None:
        error: KafkaError = got.error()
        reading = self._readings.get(self._partitions.get((got.topic(), got.partition()), Partition("", -1)))
        if reading is None:
            self._on_error(error)
        elif error.code() == KafkaError._PARTITION_EOF:
            reading.next = reading.end = got.offset()
            reading.arrivals.skip((reading.next - 1,))
            reading.trouble = ""
        else:
            reading.trouble = error.str()
            reading.refused = error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
            self._look.set()

    def _on_error(self, error: KafkaError) -> None:
        """Called within `poll`. The survey clears the error if the cluster answers after all."""
        if not self._away or error.code() != KafkaError._ALL_BROKERS_DOWN:  # else the cause is known already
            self._away = error.str()
        self._log_problem()
        self._look.set()

    def _end_of_fetch(self, partition: Partition) -> int:
        """Return the partition's end from the last fetch; negative if none."""
        seen = self._consumer.get_watermark_offsets(TopicPartition(partition.topic, partition.number), cached=True)
        return int(seen[1])

    def _on_commit(self, error: KafkaError | None, offsets: Iterable[Any]) -> None:
        failed = error or next((offset.error for offset in offsets if offset.error), None)
        self._commit_failed = f"committing positions failed: {failed.str()}" if failed else ""
        self._committing -= 1
        self._commit_next()

    def _commit_next(self) -> None:
        """Commit the newest positions, unless too many commits are in flight."""
        if self._committing >= _MOST_COMMITS or not self._commits or self._closed:
            return
        offsets = [TopicPartition(one.topic, one.number, _offset(position) + 1) for one, position in self._commits.items()]
        self._commits = {}
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._commit_failed = f"committing positions failed: {error.args[0].str()}"
        else:
            self._committing += 1

    # --- results of the survey -----------------------------------------------------------------------------------------------

    def _act_on_survey(self) -> None:
        if not self._found or self._closed:
            return
        found = self._found.popleft()
        if isinstance(found, str):
            self._away = self._away or found
        elif not found.whole:
            self._see_ends(found)
        else:
            self._away = ""
            self._absent, self._unknown = found.absent, found.unknown
            made_anew = False
            for partition, reading in self._readings.items():
                if partition.topic in found.unknown:
                    self._let_go(partition, reading)
            for topic, (identity, numbers) in found.topics.items():
                before = self._ids.get(topic)
                partitions = [Partition(topic, number) for number in numbers]
                complete = all(partition in found.offsets for partition in partitions)
                for partition in found.offsets.keys() & set(partitions):
                    if not before or identity == before or partition not in self._readings:
                        self._place(partition, found.offsets[partition], self._begin if before is None else "earliest")
                    elif complete and (read := self._readings[partition]).next:
                        what = f"the topic was made anew, after message {read.next - 1} had been read"
                        self._lose(partition, read, what, found.offsets[partition].low)
                if complete:
                    made_anew |= bool(before) and before != identity
                    self._ids[topic] = identity
            for topic in found.unknown:
                self._ids.setdefault(topic, "")
            if made_anew:
                self._reopen()
            self._see_ends(found)
        self._log_problem()

    def _see_ends(self, found: _Survey) -> None:
        for partition, end in found.ends.items():
            reading = self._readings.get(partition)
            if reading is not None and reading.assigned and not reading.trouble:
                reading.end = max(reading.end, end)
                if end <= reading.next or reading.paused:
                    reading.owed_since = None
                elif reading.owed_since is None:
                    reading.owed_since = found.known
                reading.arrivals.look((end - 1,), found.known, found.asked)
                reading.arrivals.skip((reading.next - 1,))

    def _place(self, partition: Partition, there: _Offsets, begin: str) -> None:
        """Start to read a partition, or restart it after a problem."""
        reading = self._readings.get(partition)
        if reading is None:
            after = self._after.get(partition)
            wanted = _offset(after) + 1 if after is not None else there.high if begin == "latest" else there.low
            reading = self._readings[partition] = _PartitionState(wanted)
            self._partitions[partition.topic, partition.number] = partition
            if after is None and begin == "latest":
                self._begun[partition] = str(wanted - 1)
        elif reading.assigned and not reading.trouble:
            return
        if reading.next < there.low:
            self._lose(partition, reading, f"messages {reading.next} to {there.low - 1} are no longer there", there.low)
        elif reading.next > there.high:
            # Trust neither end alone: some brokers report too small a one here, new leaders do in fetches.
            if reading.refused or 0 <= self._end_of_fetch(partition) < reading.next:
                what = f"message {reading.next - 1} was read and is no longer there, the last one is {there.high - 1}"
                self._lose(partition, reading, what, there.low)
            else:
                self._restart(partition, reading, f"waits for message {reading.next}; the last one is {there.high - 1}")
                return
        self._restart(partition, reading, "")

    def _reopen(self) -> None:
        """Reopen the consumer to drop leader epochs: a topic made anew restarts them at 0, stale to librdkafka."""
        self._consumer.close()
        self._consumer = _client(Consumer, self._settings)
        for reading in self._readings.values():
            reading.assigned, reading.end = False, -1
        self._committing = 0
        self._look.set()

    def _lose(self, partition: Partition, reading: _PartitionState, what: str, begin: int) -> None:
        self._lost[partition] = f"{what}; reading goes on with message {begin}"
        if begin < reading.next:
            reading.arrivals = Arrivals()  # others have these positions now
        reading.next = begin

    def _restart(self, partition: Partition, reading: _PartitionState, trouble: str) -> None:
        self._let_go(partition, reading)
        place = TopicPartition(partition.topic, partition.number, reading.next)
        self._consumer.incremental_assign([place])
        if reading.paused:
            self._consumer.pause([place])
        reading.assigned, reading.refused, reading.trouble = True, False, trouble

    def _let_go(self, partition: Partition, reading: _PartitionState) -> None:
        if reading.assigned:
            self._consumer.incremental_unassign([TopicPartition(partition.topic, partition.number)])
        reading.assigned = False
        reading.end = -1

    def _set_paused(self, partitions: Sequence[Partition], *, paused: bool) -> None:
        with self._using:
            if not self._is_open():
                return
            changed = [
                partition for partition in partitions if (read := self._readings.get(partition)) and read.paused != paused
            ]
            for partition in changed:
                self._readings[partition].paused = paused
            places = [
                TopicPartition(partition.topic, partition.number) for partition in changed if self._readings[partition].assigned
            ]
            if places:
                (self._consumer.pause if paused else self._consumer.resume)(places)
        self._look.set()

    def _log_problem(self) -> None:
        problem = self.problem
        if problem and self._lines.take():
            _log.warning("Kafka: %s", problem)

    # --- the survey thread ---------------------------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        whole_at = 0.0
        while not self._closed:
            self._look.clear()
            now = time.monotonic()
            whole = now >= whole_at
            try:
                found: _Survey | str = self._survey(whole)
            except KafkaException as error:
                found = f"{self._settings['bootstrap.servers']} does not answer: {error.args[0].str()}"
            if whole or not self._found:  # ends must not replace a survey that waits
                self._found.append(found)
            if self._using.acquire(timeout=_SLICE_S / 2):  # else a poll acts on it
                try:
                    self._act_on_survey()
                finally:
                    self._using.release()
            if self._look.wait(min(_LOOK_AGAIN_S, self._refresh_s)):
                time.sleep(min(0.05, self._refresh_s))  # one fault may show in many partitions
            if self._look.is_set() or self._needs_another_look(found):
                whole_at = 0.0
            elif whole:
                whole_at = now + self._refresh_s

    def _needs_another_look(self, found: _Survey | str) -> bool:
        if isinstance(found, str) or found.absent or self._away:
            return True
        readings = list(self._readings.items())
        return any(read.trouble or not read.assigned or one not in found.ends for one, read in readings)

    def _survey(self, whole: bool) -> _Survey:
        found = _Survey(whole)
        if whole:
            self._ask_for_topics(found)
        starts = set()
        for topic, (identity, numbers) in found.topics.items():
            same = self._ids.get(topic) == identity
            for partition in (Partition(topic, number) for number in numbers):
                read = self._readings.get(partition)
                if not same or read is None or read.trouble or not read.assigned:
                    starts.add(partition)
        followed = {partition for partition in list(self._readings) if partition.topic not in found.unknown}
        found.asked = time.monotonic()
        found.ends = self._offsets(starts | followed, OffsetSpec.latest())
        found.known = time.monotonic()
        lows = self._offsets(starts, OffsetSpec.earliest())
        found.offsets = {
            partition: _Offsets(lows[partition], found.ends[partition])
            for partition in starts
            if partition in lows and partition in found.ends
        }
        return found

    def _ask_for_topics(self, found: _Survey) -> None:
        waiting = self._admin.describe_topics(TopicCollection(list(self._topics)), request_timeout=_ANSWER_S)
        for topic, answer in waiting.items():
            try:
                described = answer.result()
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    found.unknown.add(topic)
                    found.absent[topic] = f"topic {topic} does not exist"
                elif code > 0:  # a broker's answer for this topic; librdkafka's own errors, of the cluster, are negative
                    found.absent[topic] = f"topic {topic}: {error.args[0].str()}"
                else:
                    raise
            else:
                found.topics[topic] = str(described.topic_id), [partition.id for partition in described.partitions]

    def _offsets(self, partitions: Collection[Partition], which: OffsetSpec) -> dict[Partition, int]:
        asked = {TopicPartition(partition.topic, partition.number): which for partition in partitions}
        waiting = self._admin.list_offsets(asked, isolation_level=self._isolation, request_timeout=_ANSWER_S) if asked else {}
        known = {}
        for place, answer in waiting.items():
            with suppress(KafkaException):  # asked again in the next survey
                if (offset := answer.result().offset) >= 0:  # negative while leaders change
                    known[Partition(place.topic, place.partition)] = offset
        return known


class KafkaWriter(UpdateLogWriter):
    """Writes to topics of a Kafka cluster, each message once and in order. *Thread-safe.*"""

    kind = "kafka_message_queue"

    def __init__(self, settings: dict[str, Any], largest: int) -> None:
        self._errors: deque[KafkaError] = deque(maxlen=1)  # of connections: requests only time out
        self._settings = settings | {"error_cb": partial(_keep_cause, self._errors)}
        self._largest = largest
        self._producer = _client(Producer, self._settings | {"enable.idempotence": True})
        self._admin = _client(AdminClient, self._settings)
        self._closed = self._disowned = False
        self._reporter = new_thread("kafka-reports", self._report)
        self._reporter.start()
        close_at_exit(self, KafkaWriter.close)
        disown_in_children(self)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        largest = min(config.max_message_bytes, 999_999_000)
        own: dict[str, str | int | bool] = {
            "linger.ms": 2,
            "message.max.bytes": largest + 1000,
            "queue.buffering.max.kbytes": max(2 * largest, 64 << 20) // 1024,
        }
        return cls(_settings(config, own), config.max_message_bytes)

    def partitions(self, topic: str, timeout_s: float, create: int = 0) -> int:
        deadline = time.monotonic() + timeout_s
        self._check_open()
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                (answer,) = self._admin.describe_topics(TopicCollection([topic]), request_timeout=left).values()
                return len(answer.result().partitions)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() >= deadline:
                    raise _failed(f"asking for the partitions of {topic}", error, self._errors) from error
                if not create:
                    message = f"asking for the partitions of {topic}: there is no such topic; create it first"
                    raise UpdateLogError(message) from error
            try:
                (made,) = self._admin.create_topics([NewTopic(topic, create)], request_timeout=left).values()
                made.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise _failed(f"creating {topic} with {create} partitions", error, self._errors) from error
                time.sleep(_SLICE_S)

    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        deadline = time.monotonic() + timeout_s
        self._check_open()
        reader = _client(
            Consumer, self._settings | {"group.id": "hps", "enable.auto.commit": False, "enable.partition.eof": True}
        )
        try:
            return self._last(reader, partition, deadline)
        except KafkaException as error:
            raise _failed(f"reading the last message of {partition}", error, self._errors) from error
        finally:
            reader.close()

    def send(
        self,
        partition: Partition,
        value: bytes,
        *,
        time_us: int = 0,
        sent: Callable[[str | Exception], None] | None = None,
    ) -> None:
        def delivered(error: KafkaError | None, message: Any) -> None:
            if sent is not None:  # may be unknown for a message that a broker stored before it was killed
                offset = "" if message.offset() is None else str(message.offset())
                sent(_failed(f"sending to {partition}", error) if error else offset)

        if len(value) > self._largest:
            message = f"sending to {partition}: got {len(value)} bytes, expected at most {self._largest} (max_message_bytes)"
            raise UpdateLogError(message)
        deadline = time.monotonic() + _SEND_S
        while True:
            self._check_open()
            try:
                self._producer.produce(
                    partition.topic, value, partition=partition.number, timestamp=time_us // 1000, on_delivery=delivered
                )
                return
            except BufferError as error:
                if time.monotonic() > deadline:
                    message = f"sending to {partition}: no room in the queue for {_SEND_S:g} s; is the broker there?"
                    raise UpdateLogError(message) from error
                time.sleep(_FULL_S)
            except KafkaException as error:
                raise _failed(f"sending {len(value)} bytes to {partition}", error) from error

    def flush(self, timeout_s: float) -> int:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        while (waiting := len(self._producer)) and time.monotonic() < deadline:
            time.sleep(_REPORTED_S)  # librdkafka's own flush would report on this thread as well: out of order
        return waiting

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._producer.purge()
        self._reporter.join(_CLOSE_S)
        self._producer = self._admin = None  # ends their threads

    def disown(self) -> None:
        """Leak the clients in a forked child: their threads did not survive, so closing could hang."""
        self._closed = self._disowned = True

    def _check_open(self) -> None:
        if self._disowned:
            raise refusal(self, "a writer of Kafka")
        if self._closed:
            raise UpdateLogError("using a writer of Kafka: it is closed; open another")

    def _report(self) -> None:
        """Let librdkafka call `sent` for messages that were delivered or given up."""
        while not self._closed or len(self._producer):
            try:
                self._producer.poll(_SLICE_S)
            except Exception:  # noqa: BLE001 - other messages must be reported, too
                _log.exception("Kafka: the callback of a sent message failed")

    def _last(self, reader: Any, partition: Partition, deadline: float) -> Message | None:
        place = TopicPartition(partition.topic, partition.number)
        low, high = reader.get_watermark_offsets(place, timeout=max(deadline - time.monotonic(), 0.1))
        back = 1
        while high > low:
            begin = max(high - back, low)
            last = None
            reader.assign([TopicPartition(partition.topic, partition.number, begin)])
            while True:
                got = reader.poll(max(deadline - time.monotonic(), 0.0))
                if got is None:
                    raise UpdateLogError(f"reading the last message of {partition}: no answer in time")
                if got.error() is None:
                    last = got
                elif got.error().code() == KafkaError._PARTITION_EOF:
                    break
                else:
                    raise KafkaException(got.error())
            if last is not None:
                return _message(partition, last)
            if begin == low:
                break
            back *= 4  # transaction markers and compacted messages take offsets, too
        return None


def _offset(position: str) -> int:
    """Return the offset of a position; -1, before all, for a position of another kind of log."""
    return int(position) if re.fullmatch("-?[0-9]{1,18}", position) else -1


def _message(partition: Partition, got: Any) -> Message:
    stamp = got.timestamp()[1]
    return Message(partition, str(got.offset()), max(stamp, 0) * 1000, got.key() or b"", got.value())


def _keep_cause(errors: deque[KafkaError], error: KafkaError) -> None:
    if error.code() != KafkaError._ALL_BROKERS_DOWN or not errors:
        errors.append(error)


def _failed(doing: str, error: KafkaException | KafkaError, before: Iterable[KafkaError] = ()) -> UpdateLogError:
    cause: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
    return UpdateLogError(f"{doing} failed: {'; '.join(one.str() for one in (cause, *before))}")
