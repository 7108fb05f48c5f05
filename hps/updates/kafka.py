"""Online updates from Apache Kafka and compatible brokers, through librdkafka (confluent-kafka).

The reader assigns itself every partition of its topics at its own offsets and joins no group; the group only names its commits.
A thread, the *survey*, requests the ends of partitions every second and, less often, the topics' partitions and the starts of
those with trouble. A position is the offset of a message.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from hps.updates.base import Message, Partition, UpdateLogWriter, check_message_size, missing_topics
from hps.updates.partitions import PartitionedLog, PartitionState

_log = logging.getLogger(__name__)
_ANSWER_S: Final = 3.0  # timeout of a survey's request; a close waits for one
_SURVEY_RETRY_S: Final = 1.0  # while there is a problem
_SLICE_S: Final = 0.1  # of a poll: bounds its reaction to a survey or a close
_SILENT_S: Final = 10.0  # without a message although some are unread
_CLOSE_S: Final = 10.0
_SEND_S: Final = 30.0  # wait for room in the writer's queue
_FULL_S: Final = 0.002
_REPORTED_S: Final = 0.002
_MOST_COMMITS: Final = 8
_MOST_BYTES: Final = 2**31 - 1

_RESERVED: Final = {
    "enable.auto.commit": "positions are committed once they are applied",
    "auto.offset.reset": "lost messages must be detected; update_source.begin sets the start",
    "enable.partition.eof": "the reader needs the ends of partitions",
    "enable.idempotence": "no message may be written twice",
}


def _settings(config: Any, ours: Mapping[str, str | int | bool]) -> dict[str, Any]:
    if both := sorted(config.config.keys() & _RESERVED.keys()):
        raise ConfigError("update_source.config", [f"{key}: cannot be set, since {_RESERVED[key]}; remove it" for key in both])
    return {
        "bootstrap.servers": config.brokers,
        "topic.metadata.refresh.interval.ms": config.metadata_refresh_interval_ms,
        "receive.message.max.bytes": _MOST_BYTES,  # an oversized message must still be skipped
        "reconnect.backoff.max.ms": 2000,
        "log_level": 2,  # syslog level; `problem` reports the errors
        **({"sasl.password": config.password} if config.password else {}),
        **ours,
        **config.config,
    }


def _client(kind: Callable[[dict[str, Any]], Any], settings: dict[str, Any]) -> Any:
    try:
        return kind(settings)
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigError("update_source", [f"config: librdkafka refuses it: {reason}"]) from error


class _Offsets(NamedTuple):
    """Offsets of the messages of a partition: [low, high)."""

    low: int
    high: int


@dataclass(slots=True)
class _Survey:
    full: bool  # with the topics, else only the ends of known partitions
    requested: float = 0.0  # when the ends were requested, by `time.monotonic`
    received: float = 0.0  # when they were received
    topics: dict[str, tuple[str, list[int]]] = field(
        default_factory=dict
    )  # id, which differs for a recreated topic; partitions
    absent: dict[str, str] = field(default_factory=dict)  # reasons by topic that cannot be read
    unknown: set[str] = field(default_factory=set)  # absent topics that do not exist
    offsets: dict[Partition, _Offsets] = field(default_factory=dict)
    ends: dict[Partition, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _PartitionState(PartitionState):
    next: int  # offset of the next message to read
    end: int = -1  # the offset after its last message; -1: unknown
    assigned: bool = False
    refused: bool = False  # the broker reported that the offset does not exist
    silent_since: float | None = None  # since when unread messages have not arrived


class KafkaLog(PartitionedLog[_PartitionState]):
    """Reads topics of a Kafka cluster. *One thread*, unless the contract says otherwise."""

    kind = "kafka_message_queue"

    def __init__(self, settings: dict[str, Any], refresh_s: float) -> None:
        super().__init__(threading.Lock())  # also guards the consumer, which must not be closed during a call
        self._settings = settings | {"error_cb": self._on_error, "on_commit": self._on_commit}
        self._consumer = _client(Consumer, self._settings)
        self._admin = _client(AdminClient, {key: value for key, value in settings.items() if key != "group.id"})
        self._refresh_s = refresh_s
        uncommitted = settings.get("isolation.level") == "read_uncommitted"
        self._isolation = IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED
        self._topics: Sequence[str] = ()
        self._after: dict[Partition, str] = {}
        self._begin = "earliest"
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._ids: dict[str, str] = {}  # id by known topic; "" if it did not exist
        self._absent: dict[str, str] = {}
        self._unknown: set[str] = set()  # topics that do not exist
        self._unreachable = ""  # why the cluster does not answer; empty if it does
        self._emptied_at = 0.0  # when the last poll returned nothing
        self._commit_failed = ""
        self._commits: dict[Partition, str] = {}
        self._committing = 0  # commits under way
        self._lines = LineLimit()
        self._surveys: deque[_Survey | str] = deque(maxlen=1)
        self._survey_now = threading.Event()
        self._closed = self._disowned = False
        self._surveyor = new_thread("kafka-survey", self._run_surveys)
        close_at_exit(self, KafkaLog.close)
        disown_in_children(self)

    @classmethod
    def from_config(cls, config: Any, group: str) -> Self:
        # librdkafka fetches from each broker until the first limit is queued: four brokers may overshoot by their answers.
        queued, answer = config.read_ahead_bytes // 2, config.read_ahead_bytes // 8
        ours: dict[str, str | int | bool] = {
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
        return cls(_settings(config, ours), config.metadata_refresh_interval_ms / 1000)

    @classmethod
    def probe(cls, config: Any, topics: Sequence[str], timeout_s: float) -> list[CheckResult]:
        where, errors = "update_source.brokers", deque[KafkaError](maxlen=1)
        try:
            client = _client(AdminClient, _settings(config, {}) | {"error_cb": partial(_record_cause, errors)})
        except ConfigError as error:
            return [CheckResult("wrong", "update_source", problem) for problem in error.problems]
        try:
            cluster = client.list_topics(timeout=timeout_s)
        except KafkaException as error:
            client.poll(0)  # reports them
            causes = "; ".join(cause.str() for cause in (error.args[0], *errors))
            return [CheckResult("unreachable", where, f"{config.brokers}: {causes}; see that a broker runs there")]
        found = CheckResult("good", where, f"{config.brokers}: {len(cluster.brokers)} brokers answer")
        return [found, *missing_topics(topics, list(cluster.topics), where)]

    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        self._topics, self._after, self._begin = tuple(topics), dict(after), begin
        self._surveyor.start()

    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        messages: list[Message] = []
        size = 0
        with self.lock:
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
                elif (message := self._to_message(got)) is not None:
                    messages.append(message)
                    size += len(message.value)
                    if size >= most_bytes:
                        break
            for partition in {message.partition for message in messages}:
                reading = self.states[partition]
                reading.end = max(self._end_of_fetch(partition), reading.next, reading.end)
                reading.arrivals.observe((reading.end - 1,), time.monotonic())
        if messages:
            self._unreachable = ""
        return messages

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=True)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=False)

    def behind(self) -> dict[Partition, int | None]:
        known = not self._unreachable
        return {
            partition: max(state.end - state.next, 0) if known and state.end >= 0 else None
            for partition, state in list(self.states.items())
        }

    def commit(self, positions: Mapping[Partition, str]) -> None:
        with self.lock:
            if self._is_open():
                self._commits.update(positions)
                self._commit_next()

    def lacks(self, topic: str) -> bool:
        return not self._unreachable and topic in self._unknown

    def _problems(self, topic: str) -> Iterator[str]:
        if self._unreachable:
            yield self._unreachable
            return
        yield from (reason for absent, reason in list(self._absent.items()) if topic in ("", absent))
        states = [(partition, state) for partition, state in list(self.states.items()) if topic in ("", partition.topic)]
        yield from (f"{partition}: {state.trouble}" for partition, state in states if state.trouble)
        for partition, state in states:
            if state.silent_since is not None and self._emptied_at - state.silent_since > _SILENT_S:
                yield f"{partition}: {state.end - state.next} messages are unread, but the brokers send none"
        if self._commit_failed:
            yield self._commit_failed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._survey_now.set()
        if self._surveyor.is_alive():
            self._surveyor.join(_CLOSE_S)
        if self.lock.acquire(timeout=_CLOSE_S):
            # librdkafka waits 45 s for commits to an unreachable cluster. Positions were committed for operators only, so we
            # wait for an answer's time and leave the rest to a thread that does not keep the process alive.
            closer = new_thread("kafka-close", self._consumer.close, lasting=False)
            closer.start()
            closer.join(_ANSWER_S)
            self._admin = None  # ends its threads
            self.lock.release()

    def disown(self) -> None:
        """Leak the clients in a forked child: their threads did not survive, so closing could hang."""
        self._closed = self._disowned = True
        self.lock = threading.Lock()

    def _is_open(self) -> bool:
        if self._disowned:
            raise refusal(self, "a reader of Kafka")
        return not self._closed

    # --- messages, with the consumer in use ----------------------------------------------------------------------------------

    def _to_message(self, got: Any) -> Message | None:
        partition = self._partitions[got.topic(), got.partition()]
        reading = self.states[partition]
        self.delivered += got.value() is not None
        reading.next = got.offset() + 1
        reading.trouble, reading.silent_since = "", None
        message = _message(partition, got)
        message = replace(message, arrived=reading.arrivals.read((got.offset(),), moment_of(message.time_us)))
        return None if got.value() is None else message  # None: a tombstone of a compacted topic

    def _on_event(self, got: Any) -> None:
        error: KafkaError = got.error()
        reading = self.states.get(self._partitions.get((got.topic(), got.partition()), Partition("", -1)))
        if reading is None:
            self._on_error(error)
        elif error.code() == KafkaError._PARTITION_EOF:
            reading.next = reading.end = got.offset()
            reading.arrivals.skip((reading.next - 1,))
            reading.trouble = ""
        else:
            reading.trouble = error.str()
            reading.refused = error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
            self._survey_now.set()

    def _on_error(self, error: KafkaError) -> None:
        """Record an error of the cluster, called by librdkafka within `poll`. The next survey that succeeds clears it."""
        if not self._unreachable or error.code() != KafkaError._ALL_BROKERS_DOWN:  # else the cause is known already
            self._unreachable = error.str()
        self._log_problem()
        self._survey_now.set()

    def _end_of_fetch(self, partition: Partition) -> int:
        offsets = self._consumer.get_watermark_offsets(TopicPartition(partition.topic, partition.number), cached=True)
        return int(offsets[1])

    def _on_commit(self, error: KafkaError | None, offsets: Iterable[Any]) -> None:
        failed = error or next((offset.error for offset in offsets if offset.error), None)
        self._commit_failed = f"committing positions failed: {failed.str()}" if failed else ""
        self._committing -= 1
        self._commit_next()

    def _commit_next(self) -> None:
        if self._committing >= _MOST_COMMITS or not self._commits or self._closed:
            return
        offsets = [
            TopicPartition(partition.topic, partition.number, _offset(position) + 1)
            for partition, position in self._commits.items()
        ]
        self._commits = {}
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._commit_failed = f"committing positions failed: {error.args[0].str()}"
        else:
            self._committing += 1

    # --- results of the survey -----------------------------------------------------------------------------------------------

    def _act_on_survey(self) -> None:
        if not self._surveys or self._closed:
            return
        found = self._surveys.popleft()
        if isinstance(found, str):
            self._unreachable = self._unreachable or found
        elif not found.full:
            self._update_ends(found)
        else:
            self._unreachable = ""
            self._absent, self._unknown = found.absent, found.unknown
            recreated = False
            for partition, reading in self.states.items():
                if partition.topic in found.unknown:
                    self._unassign(partition, reading)
            for topic, (identity, numbers) in found.topics.items():
                before = self._ids.get(topic)
                partitions = [Partition(topic, number) for number in numbers]
                complete = all(partition in found.offsets for partition in partitions)
                for partition in found.offsets.keys() & set(partitions):
                    if not before or identity == before or partition not in self.states:
                        self._start_partition(
                            partition, found.offsets[partition], self._begin if before is None else "earliest"
                        )
                    elif complete and (read := self.states[partition]).next:
                        loss = f"the topic was recreated after message {read.next - 1} had been read"
                        self._record_loss(partition, read, loss, found.offsets[partition].low)
                if complete:
                    recreated |= bool(before) and before != identity
                    self._ids[topic] = identity
            for topic in found.unknown:
                self._ids.setdefault(topic, "")
            if recreated:
                self._reopen()
            self._update_ends(found)
        self._log_problem()

    def _update_ends(self, found: _Survey) -> None:
        for partition, end in found.ends.items():
            reading = self.states.get(partition)
            if reading is not None and reading.assigned and not reading.trouble:
                reading.end = max(reading.end, end)
                if end <= reading.next or reading.paused:
                    reading.silent_since = None
                elif reading.silent_since is None:
                    reading.silent_since = found.received
                reading.arrivals.observe((end - 1,), found.received, found.requested)
                reading.arrivals.skip((reading.next - 1,))

    def _start_partition(self, partition: Partition, offsets: _Offsets, begin: str) -> None:
        reading = self.states.get(partition)
        if reading is None:
            after = self._after.get(partition)
            wanted = _offset(after) + 1 if after is not None else offsets.high if begin == "latest" else offsets.low
            reading = self.states[partition] = _PartitionState(wanted)
            self._partitions[partition.topic, partition.number] = partition
            if after is None and begin == "latest":
                self.starts[partition] = str(wanted - 1)
        elif reading.assigned and not reading.trouble:
            return
        if reading.next < offsets.low:
            self._record_loss(
                partition, reading, f"messages {reading.next} to {offsets.low - 1} are no longer there", offsets.low
            )
        elif reading.next > offsets.high:
            # Neither end alone is proof of a loss: some brokers report too small an end to the survey, and a new leader does
            # in its first fetches. Starting over on a false alarm would apply the partition again from its start.
            if reading.refused or 0 <= self._end_of_fetch(partition) < reading.next:
                loss = f"message {reading.next - 1} was read and is no longer there, the last is {offsets.high - 1}"
                self._record_loss(partition, reading, loss, offsets.low)
            else:
                self._restart(partition, reading, f"waits for message {reading.next}; the last is {offsets.high - 1}")
                return
        self._restart(partition, reading, "")

    def _reopen(self) -> None:
        # librdkafka keeps the leader epochs of a topic by its name. A recreated topic restarts them at 0, so librdkafka takes
        # the answers of its leaders for stale ones and reads nothing. Only a new consumer forgets them.
        self._consumer.close()
        self._consumer = _client(Consumer, self._settings)
        for reading in self.states.values():
            reading.assigned, reading.end = False, -1
        self._committing = 0
        self._survey_now.set()

    def _record_loss(self, partition: Partition, reading: _PartitionState, loss: str, first: int) -> None:
        self.losses[partition] = f"{loss}; reading continues with message {first}"
        if first < reading.next:
            reading.arrivals = Arrivals()  # these offsets now belong to other messages
        reading.next = first

    def _restart(self, partition: Partition, reading: _PartitionState, trouble: str) -> None:
        self._unassign(partition, reading)
        place = TopicPartition(partition.topic, partition.number, reading.next)
        self._consumer.incremental_assign([place])
        if reading.paused:
            self._consumer.pause([place])
        reading.assigned, reading.refused, reading.trouble = True, False, trouble

    def _unassign(self, partition: Partition, reading: _PartitionState) -> None:
        if reading.assigned:
            self._consumer.incremental_unassign([TopicPartition(partition.topic, partition.number)])
        reading.assigned = False
        reading.end = -1

    def _set_paused(self, partitions: Sequence[Partition], *, paused: bool) -> None:
        with self.lock:
            if not self._is_open():
                return
            changed = [partition for partition in partitions if (read := self.states.get(partition)) and read.paused != paused]
            for partition in changed:
                self.states[partition].paused = paused
            places = [
                TopicPartition(partition.topic, partition.number) for partition in changed if self.states[partition].assigned
            ]
            if places:
                (self._consumer.pause if paused else self._consumer.resume)(places)
        self._survey_now.set()

    def _log_problem(self) -> None:
        problem = self.problem
        if problem and self._lines.take():
            _log.warning("Kafka: %s", problem)

    # --- the survey thread ---------------------------------------------------------------------------------------------------

    def _run_surveys(self) -> None:
        full_at = 0.0
        while not self._closed:
            self._survey_now.clear()
            now = time.monotonic()
            full = now >= full_at
            try:
                found: _Survey | str = self._survey(full)
            except KafkaException as error:
                found = f"{self._settings['bootstrap.servers']} does not answer: {error.args[0].str()}"
            if full or not self._surveys:  # ends must not replace a full survey that is not handled yet
                self._surveys.append(found)
            if self.lock.acquire(timeout=_SLICE_S / 2):  # else the running poll handles it
                try:
                    self._act_on_survey()
                finally:
                    self.lock.release()
            if self._survey_now.wait(min(_SURVEY_RETRY_S, self._refresh_s)):
                time.sleep(min(0.05, self._refresh_s))  # a fault often reports many partitions at once
            if self._survey_now.is_set() or self._is_incomplete(found):
                full_at = 0.0
            elif full:
                full_at = now + self._refresh_s

    def _is_incomplete(self, found: _Survey | str) -> bool:
        if isinstance(found, str) or found.absent or self._unreachable:
            return True
        readings = list(self.states.items())
        return any(read.trouble or not read.assigned or partition not in found.ends for partition, read in readings)

    def _survey(self, full: bool) -> _Survey:
        found = _Survey(full)
        if full:
            self._describe_topics(found)
        starts = set()
        for topic, (identity, numbers) in found.topics.items():
            same = self._ids.get(topic) == identity
            for partition in (Partition(topic, number) for number in numbers):
                read = self.states.get(partition)
                if not same or read is None or read.trouble or not read.assigned:
                    starts.add(partition)
        followed = {partition for partition in list(self.states) if partition.topic not in found.unknown}
        found.requested = time.monotonic()
        found.ends = self._offsets(starts | followed, OffsetSpec.latest())
        found.received = time.monotonic()
        lows = self._offsets(starts, OffsetSpec.earliest())
        found.offsets = {
            partition: _Offsets(lows[partition], found.ends[partition])
            for partition in starts
            if partition in lows and partition in found.ends
        }
        return found

    def _describe_topics(self, found: _Survey) -> None:
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
        requested = {TopicPartition(partition.topic, partition.number): which for partition in partitions}
        waiting = (
            self._admin.list_offsets(requested, isolation_level=self._isolation, request_timeout=_ANSWER_S) if requested else {}
        )
        known = {}
        for place, answer in waiting.items():
            with suppress(KafkaException):  # requested again by the next survey
                if (offset := answer.result().offset) >= 0:  # negative while leaders change
                    known[Partition(place.topic, place.partition)] = offset
        return known


class KafkaWriter(UpdateLogWriter):
    """Writes to topics of a Kafka cluster, each message once and in order. *Thread-safe.*"""

    kind = "kafka_message_queue"

    def __init__(self, settings: dict[str, Any], largest: int) -> None:
        self._errors: deque[KafkaError] = deque(maxlen=1)  # of connections: the requests themselves only time out
        self._settings = settings | {"error_cb": partial(_record_cause, self._errors)}
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
        ours: dict[str, str | int | bool] = {
            "linger.ms": 2,
            "message.max.bytes": largest + 1000,
            "queue.buffering.max.kbytes": max(2 * largest, 64 << 20) // 1024,
        }
        return cls(_settings(config, ours), config.max_message_bytes)

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
                    raise _failed(f"requesting the partitions of {topic}", error, self._errors) from error
                if not create:
                    message = f"requesting the partitions of {topic}: there is no such topic; create it first"
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

        check_message_size(partition, value, self._largest)
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
                    message = f"sending to {partition}: no room in the queue for {_SEND_S:g} s; see that the broker runs"
                    raise UpdateLogError(message) from error
                time.sleep(_FULL_S)
            except KafkaException as error:
                raise _failed(f"sending {len(value)} bytes to {partition}", error) from error

    def flush(self, timeout_s: float) -> int:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        while (waiting := len(self._producer)) and time.monotonic() < deadline:
            # librdkafka's own `flush` would call `sent` on this thread as well as on the reporter's, and so out of order.
            time.sleep(_REPORTED_S)
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
        """Let librdkafka call `sent` for messages that were delivered or have failed."""
        while not self._closed or len(self._producer):
            try:
                self._producer.poll(_SLICE_S)
            except Exception:  # noqa: BLE001 - other messages must be reported, too
                _log.exception("Kafka: the callback of a sent message failed")

    def _last(self, reader: Any, partition: Partition, deadline: float) -> Message | None:
        place = TopicPartition(partition.topic, partition.number)
        low, high = reader.get_watermark_offsets(place, timeout=max(deadline - time.monotonic(), 0.1))
        # Transaction markers and compacted messages take offsets, too, so the last message may lie far before the end. The
        # window grows until it holds one.
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
            back *= 4
        return None


def _offset(position: str) -> int:
    """Return the offset of a position; -1, before every message, for a position of another kind of log."""
    return int(position) if re.fullmatch("-?[0-9]{1,18}", position) else -1


def _message(partition: Partition, got: Any) -> Message:
    stamp = got.timestamp()[1]
    return Message(partition, str(got.offset()), max(stamp, 0) * 1000, got.key() or b"", got.value())


def _record_cause(errors: deque[KafkaError], error: KafkaError) -> None:
    if error.code() != KafkaError._ALL_BROKERS_DOWN or not errors:
        errors.append(error)


def _failed(doing: str, error: KafkaException | KafkaError, before: Iterable[KafkaError] = ()) -> UpdateLogError:
    cause: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
    return UpdateLogError(f"{doing} failed: {'; '.join(known.str() for known in (cause, *before))}")
