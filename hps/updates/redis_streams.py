"""Online updates in Redis Streams, on a server or a cluster. Redis 7 or newer, or Valkey.

    hps_et.<model>.<table>        a string: the number of partitions of the topic, 1 to 1024
    {hps_et.<model>.<table>}/<n>  the stream of partition n, with the fields `value` and `time` (microseconds since 1970)

A publisher in another language needs only `SET hps_et.shop.items 1` and `XADD {hps_et.shop.items}/0 * value ...`. The braces
keep a topic in one slot of a cluster, because XREAD waits only for streams of one slot: a cluster spreads tables.

One thread per server, or per topic in a cluster, reads ahead with XREAD BLOCK. The number of messages per read is estimated
from the sizes of earlier ones, at first from the largest allowed, so that a reply fits the remaining room.

An id does not tell how many messages follow it. Redis counts the entries ever added to a stream, and the reader those it read.
Once it has caught up the two must agree; otherwise messages were lost.

Other programs may write any key. A wrong value in place of a count or a stream stops its own table only.
"""

import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import (
    ClusterError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import ConfigError, UpdateLogError
from hps.ground.threads.workers import new_thread
from hps.types import CheckResult
from hps.updates.arrivals import Arrivals
from hps.updates.base import Message, Partition, UpdateLogWriter, check_message_size, missing_topics
from hps.updates.partitions import PartitionedLog, PartitionState

_log = logging.getLogger(__name__)
_Client: TypeAlias = "Redis | RedisCluster"

_BEFORE_ALL: Final = "0-0"
_TIMEOUT_S: Final = 3.0  # without an answer from the server
_BLOCK_MS: Final = 100  # how long a resume or a commit may wait for a blocked read
_INSPECT_EVERY_S: Final = 1.0
_MOST_BACKOFF_S: Final = 2.0
_MESSAGE_BYTES: Final = 300  # memory of a message beyond its value
_MOST_PARTITIONS: Final = 1024  # of a topic: any program may write the count
_REPLY_MESSAGES: Final = 4096
_BATCH_MESSAGES: Final = 1024
_BATCH_BYTES: Final = 4 << 20
_GIVE_UP_S: Final = 300.0  # Kafka's message.timeout.ms
_FULL_S: Final = 60.0
_FAILURES: Final = (RedisError, RedisClusterException, OSError, UpdateLogError)
# Errors after which a writer retries.
_TRANSIENT: Final = (OutOfMemoryError, ReadOnlyError, ClusterError, TryAgainError)

# GET the counts of partitions: the first 40 bytes of each, or the error text for a key that is not a string.
_COUNT: Final = """
local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  answers[i] = value and string.sub(type(value) == 'table' and value.err or value, 1, 40)
end
return answers
"""

# The server's time and XINFO STREAM. The values of the first and last entries, each as large as a message, stay on the server.
# INFO has the time, too: TIME would need a right of its own. For a key that is no stream, its error.
_INSPECT: Final = """
local server = redis.call('INFO', 'server')
local answers = {string.match(server, 'server_time_usec:(%d+)')}
for i, key in ipairs(KEYS) do
  local facts = {length = 0, ['last-generated-id'] = '0-0', ['entries-added'] = 0}
  local reply = redis.call('EXISTS', key) == 1 and redis.pcall('XINFO', 'STREAM', key) or {}
  for j = 1, #reply, 2 do facts[reply[j]] = reply[j + 1] end
  local first, last = facts['first-entry'], facts['last-entry']
  local ids = {facts['last-generated-id'], first and first[1] or '', last and last[1] or ''}
  answers[i + 1] = {reply.err or '', facts.length, facts['entries-added'], unpack(ids)}
end
return answers
"""

# Append a batch atomically and store its number and first id. A batch whose number is stored already is only answered: it was
# resent after a lost reply, or delivered late by a broken connection.
_APPEND: Final = """
local done = redis.call('GET', KEYS[2])
if done then
  local batch, first = string.match(done, '(%S+) (%S+)')
  if tonumber(batch) >= tonumber(ARGV[1]) then return first end
end
local first = redis.call('XADD', KEYS[1], '*', 'value', ARGV[2], 'time', ARGV[3])
local ms, number = string.match(first, '(%d+)-(%d+)')
for i = 4, #ARGV, 2 do
  number = number + 1
  redis.call('XADD', KEYS[1], ms .. '-' .. string.format('%d', number), 'value', ARGV[i], 'time', ARGV[i + 1])
end
redis.call('SET', KEYS[2], ARGV[1] .. ' ' .. first, 'EX', 3600)
return first
"""


def _connect(config: UpdateSourceConfig, timeout_s: float) -> _Client:
    settings: dict[str, Any] = {
        "protocol": 2,
        "username": config.user_name if config.password and config.user_name != "default" else None,
        "password": config.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }
    if config.enable_tls:
        settings |= {
            "ssl": True,
            "ssl_ca_path" if Path(config.tls_ca_certificate).is_dir() else "ssl_ca_certs": config.tls_ca_certificate,
            "ssl_certfile": config.tls_client_certificate or None,
            "ssl_keyfile": config.tls_client_key or None,
        }
    addresses = []
    for part in re.split("[,;]", config.address):
        host, _, port = part.strip().rpartition(":") if re.search(r":\d+$", part.strip()) else (part.strip(), "", "6379")
        addresses.append((host.strip("[]"), int(port)))
    failures = []
    for host, port in addresses:
        server = Redis(host, port, retry=Retry(NoBackoff(), 0), **settings)
        try:
            if not server.info("cluster")["cluster_enabled"]:
                return server
            server.close()
            nodes = [ClusterNode(*address) for address in addresses]
            return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 0), **settings)
        except _FAILURES as error:
            server.close()
            failures.append(f"{host}:{port}: {error}")
    raise UpdateLogError(f"Redis streams: {'; '.join(failures)}; see that it runs there, and update_source")


def _checked(config: UpdateSourceConfig) -> UpdateSourceConfig:
    if config.tls_server_name_identification:
        raise ConfigError(
            "update_source.tls_server_name_identification",
            ["redis_stream checks certificates for the names in address; leave this empty"],
        )
    return config


def _key(partition: Partition) -> str:
    return f"{{{partition.topic}}}/{partition.number}"


def _partition_count(topic: str, answer: bytes | None) -> int:
    """Parse the number of partitions in an answer of `_COUNT`."""
    if answer is None:
        raise UpdateLogError(f"topic {topic} does not exist: no key of that name holds the number of its partitions")
    if not re.fullmatch(b"[0-9]{1,6}", answer) or not 1 <= int(answer) <= _MOST_PARTITIONS:
        raise UpdateLogError(
            f"the key {topic}: got {answer.decode(errors='replace')!r}, expected the number of its partitions, "
            f"1 to {_MOST_PARTITIONS}"
        )
    return int(answer)


def _order(position: str) -> tuple[int, int]:
    """Return the sort key of a position; a position of another kind of log sorts first."""
    if not re.fullmatch("[0-9]{1,20}(-[0-9]{1,20})?", position):
        return 0, 0
    ms, _, number = position.partition("-")
    return int(ms), int(number or 0)


def _message(partition: Partition, entry: tuple[bytes, dict[bytes, bytes]]) -> Message:
    position, fields = entry[0].decode(), entry[1] or {}
    made = fields.get(b"time", b"")
    time_us = int(made) if made.isdigit() and len(made) < 19 else _order(position)[0] * 1000
    return Message(partition, position, time_us, b"", fields.get(b"value", b""))


class _Facts(NamedTuple):
    """Redis' facts about a stream; `first` and `last` are ids of entries, empty for an empty stream."""

    length: int
    added: int
    generated: str
    first: str
    last: str


@dataclass(slots=True, eq=False)
class _Stream(PartitionState):
    """Reading state of a stream.

    `read` is the id of the last message read ahead (None until `latest` is resolved), `polled` that of the last one returned by
    `poll` or the start, with `queued` messages between. `count` estimates the entries ever added up to `read`; it is
    no estimate if `exact`. `added` is Redis' own count, None if unknown. The server's clock, which makes ids, is
    `ahead_s` ahead of `time.monotonic`; `arrivals` counts messages as read once they are polled.
    """

    partition: Partition
    key: str
    read: str | None
    polled: str
    queued: int = 0
    count: int = 0
    exact: bool = False
    added: int | None = None
    ahead_s: float = 0.0

    def compare(self, facts: _Facts) -> str:
        """Correct the count by Redis' facts; return a description of lost messages, if any.

        Redis does not number entries. So the count can be compared at three places only: before the first entry, at it, and
        after the last one. In between it is an estimate.
        """
        if self.read is None:
            self.read = self.polled = facts.generated
        at, removed = _order(self.read), facts.added - facts.length
        self.added = facts.added
        lost = ""
        if at > _order(facts.generated) or (self.exact and facts.added < self.count):
            lost = (
                f"the stream was recreated or cut: its last id is {facts.generated}, {self.read} was read; reading starts over"
            )
            self.read, self.count, self.exact, self.arrivals = _BEFORE_ALL, removed, True, Arrivals()
        elif not self.exact and at == (0, 0):
            self.count, self.exact = removed, True
        elif at < _order(facts.first or facts.generated):
            if self.exact and removed > self.count:
                lost = f"{removed - self.count} messages after {self.read} were removed before they were read"
            elif not self.exact:
                lost = f"messages after {self.read} were removed before they were read; the first is {facts.first or 'to come'}"
            if lost:
                self.count, self.exact = removed, True
        elif at >= _order(facts.last or _BEFORE_ALL):
            if self.exact and self.count < facts.added:
                lost = f"{facts.added - self.count} messages before {self.read} were removed before they were read"
            self.count, self.exact = facts.added, True
        elif facts.first == self.read:
            self.count, self.exact = removed + 1, True
        elif not self.exact:  # mid-stream: assume that messages arrived evenly
            start, now, end = (_order(position)[0] for position in (facts.first, self.read, facts.last))
            left = round(facts.length * (end - now) / max(1, end - start))
            self.count = facts.added - min(max(left, 1), facts.length - 1)
        return lost


class RedisStreamLog(PartitionedLog[_Stream]):
    """Reads streams. *One thread*, unless the contract says otherwise."""

    kind: ClassVar[str] = "redis_stream"

    def __init__(self, config: UpdateSourceConfig, group: str) -> None:
        self.changed = threading.Condition()
        super().__init__(self.changed)
        self.config = _checked(config)
        self.group = group
        self.closing = threading.Event()
        self.queue: deque[tuple[_Stream, Message]] = deque()
        self.queued_bytes = 0  # read ahead or requested
        self.unreachable: dict[str, str] = {}  # errors of the server by topic
        self.refused: dict[str, str] = {}  # errors in the value of the topic's own key
        self.absent: set[str] = set()  # topics that do not exist
        self.uncommitted: dict[Partition, str] = {}  # errors of the last commit
        self.commits: dict[Partition, tuple[str, int | None]] = {}
        self.after: dict[Partition, str] = {}
        self.begin = "earliest"
        self._threads: list[threading.Thread] = []

    @classmethod
    def from_config(cls, config: UpdateSourceConfig, group: str) -> Self:
        return cls(config, group)

    @classmethod
    def probe(cls, config: UpdateSourceConfig, topics: Sequence[str], timeout_s: float) -> list[CheckResult]:
        where = "update_source.address"
        try:
            with closing(_connect(_checked(config), timeout_s)) as server:
                there = [topic for topic in topics if server.exists(topic, _key(Partition(topic, 0)))]
        except ConfigError as error:
            return [CheckResult("wrong", error.source, problem) for problem in error.problems]
        except _FAILURES as error:
            wrong = re.search("NOAUTH|WRONGPASS|NOPERM|Authentication|no permissions|invalid username", str(error))
            return [CheckResult("wrong" if wrong else "unreachable", where, str(error))]
        return [CheckResult("good", where, f"{config.address}: Redis answers"), *missing_topics(topics, there, where)]

    def follow(self, topics: Sequence[str], after: Mapping[Partition, str], begin: str) -> None:
        self.after, self.begin = dict(after), begin
        self.read_on_thread(list(topics))

    def read_on_thread(self, topics: list[str]) -> None:
        """Start a thread that reads topics of one server or slot."""
        thread = new_thread(f"redis-stream-{topics[0]}", _Reader(self, topics).run)
        with self.changed:
            self._threads.append(thread)
        thread.start()

    def poll(self, timeout_s: float, most_bytes: int) -> list[Message]:
        messages: list[Message] = []
        size = 0
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.closing.is_set(), timeout_s)
            while self.queue and (not messages or size < most_bytes):
                stream, message = self.queue.popleft()
                self.delivered += 1  # before the state changes, which `unread_since` reads without the lock
                place = _order(message.position)
                messages.append(replace(message, arrived=stream.arrivals.read(place, place[0] / 1000 - stream.ahead_s)))
                stream.polled = message.position
                stream.queued -= 1
                size += len(message.value)
            self.queued_bytes -= size + _MESSAGE_BYTES * len(messages)
            self.changed.notify_all()
        return messages

    def pause(self, partitions: Sequence[Partition]) -> None:
        with self.changed:
            stopped = {self.states[partition] for partition in partitions if partition in self.states}
            kept: deque[tuple[_Stream, Message]] = deque()
            for stream, message in self.queue:
                if stream in stopped:
                    self.queued_bytes -= len(message.value) + _MESSAGE_BYTES
                else:
                    kept.append((stream, message))
            self.queue = kept
            # Messages that were read ahead are dropped and read again after `resume`: a paused table must not fill the
            # read-ahead that the others need.
            for stream in stopped:
                stream.paused = True
                if stream.queued:
                    stream.read, stream.count, stream.queued = stream.polled, stream.count - stream.queued, 0

    def resume(self, partitions: Sequence[Partition]) -> None:
        with self.changed:
            for partition in partitions:
                if partition in self.states:
                    self.states[partition].paused = False
            self.changed.notify_all()

    def behind(self) -> dict[Partition, int | None]:
        with self.changed:
            return {
                partition: None
                if stream.added is None or stream.trouble or partition.topic in self.unreachable
                else max(stream.added, stream.count) - stream.count + stream.queued
                for partition, stream in self.states.items()
            }

    def commit(self, positions: Mapping[Partition, str]) -> None:
        with self.changed:
            for partition, position in positions.items():
                stream = self.states.get(partition)
                counted = stream is not None and stream.exact and stream.polled == position
                self.commits[partition] = (position, stream.count - stream.queued if stream and counted else None)

    def lacks(self, topic: str) -> bool:
        with self.changed:
            return topic in self.absent and topic not in self.unreachable

    def _problems(self, topic: str) -> Iterator[str]:
        unreachable = [problem for away, problem in list(self.unreachable.items()) if topic in ("", away)]
        if unreachable:
            yield from unreachable
            return
        yield from (problem for refused, problem in list(self.refused.items()) if topic in ("", refused))
        for partition, stream in list(self.states.items()):
            if stream.trouble and topic in ("", partition.topic):
                yield stream.trouble
        yield from (problem for partition, problem in list(self.uncommitted.items()) if topic in ("", partition.topic))

    def close(self) -> None:
        with self.changed:
            self.closing.set()
            self.queue.clear()
            self.changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(3 * _TIMEOUT_S)

    def record_facts(self, answers: Sequence[tuple[_Stream, str, _Facts]], requested: float, server_time_us: int) -> None:
        with self.changed:
            for stream, error, facts in answers:
                stream.trouble = error and f"the key {stream.key}: {error}; expected a stream"
                if error:
                    continue
                if stream.read is None:
                    self.starts[stream.partition] = facts.generated
                if lost := stream.compare(facts):
                    self.losses[stream.partition] = lost
                stream.ahead_s = server_time_us / 1e6 - requested
                stream.arrivals.observe(_order(facts.generated), time.monotonic(), requested)
                if stream.added == stream.count and not stream.queued:
                    stream.arrivals.skip(_order(facts.generated))


class _Reader:
    """Reads topics of a log, all in one slot of a cluster, and commits. *One thread.*"""

    def __init__(self, log: RedisStreamLog, topics: list[str]) -> None:
        self._log = log
        self._topics = topics
        self._largest = log.config.max_message_bytes + _MESSAGE_BYTES  # expected
        self._known_topics: set[str] = set()  # topics looked for so far
        self._turn = 0
        self._empty_reads = 0  # consecutive empty reads

    def run(self) -> None:
        """Read until the log is closed, through all failures of the server."""
        failures = 0
        while not self._log.closing.is_set():
            started = time.monotonic()
            try:
                with closing(_connect(self._log.config, _TIMEOUT_S)) as client:
                    if isinstance(client, RedisCluster):
                        for topic in self._topics[1:]:
                            self._log.read_on_thread([topic])
                        del self._topics[1:]
                    self._serve(client)
            except Exception as error:  # noqa: BLE001 - reading continues, for all tables
                if not isinstance(error, _FAILURES) and not failures:
                    _log.exception("Redis streams: reading %s failed; retrying", ", ".join(self._topics))
                with self._log.changed:
                    self._log.unreachable |= dict.fromkeys(self._topics, f"{type(error).__name__}: {error}")
                failures = 0 if time.monotonic() - started > 2 * _TIMEOUT_S else failures + 1
                backoff_s = self._log.config.failure_backoff_ms / 1000 * 2 ** min(failures, 16)
                self._log.closing.wait(min(_MOST_BACKOFF_S, backoff_s))

    def _serve(self, client: _Client) -> None:
        refreshed_at = inspected_at = float("-inf")
        while not self._log.closing.is_set():
            now = time.monotonic()
            if now - refreshed_at >= self._log.config.metadata_refresh_interval_ms / 1000:
                self._find_partitions(client)
                refreshed_at, inspected_at = now, float("-inf")
            if now - inspected_at >= _INSPECT_EVERY_S:
                self._commit(client)
                self._inspect(client)
                inspected_at = now
            if not self._read(client):
                inspected_at = float("-inf")
        self._commit(client)

    def _find_partitions(self, client: _Client) -> None:
        answers = client.eval_ro(_COUNT, len(self._topics), *self._topics)
        for topic, answer in zip(self._topics, answers, strict=True):
            count, refused = 0, ""
            try:
                count = _partition_count(topic, answer)
            except UpdateLogError as error:  # of this table alone
                refused = str(error)
            with self._log.changed:
                self._log.refused.pop(topic, None)
                if refused:
                    self._log.refused[topic] = refused
                (self._log.absent.add if answer is None else self._log.absent.discard)(topic)
                for number in range(count):
                    partition = Partition(topic, number)
                    if partition not in self._log.states:
                        new = topic in self._known_topics or self._log.begin == "earliest"
                        read = self._log.after.get(partition, _BEFORE_ALL if new else None)
                        if read is not None and _order(read) == (0, 0):  # a position of another kind of log
                            read = _BEFORE_ALL
                        self._log.states[partition] = _Stream(partition, _key(partition), read, read or _BEFORE_ALL)
            if answer is None or not refused:  # else it may have partitions already, to which `latest` applies
                self._known_topics.add(topic)

    def _streams(self) -> list[_Stream]:
        with self._log.changed:
            return [stream for stream in self._log.states.values() if stream.partition.topic in self._topics]

    def _inspect(self, client: _Client) -> None:
        streams = self._streams()
        if streams:
            requested = time.monotonic()
            server_time_us, *answers = client.eval_ro(_INSPECT, len(streams), *(stream.key for stream in streams))
            inspected = [
                (stream, error.decode(), _Facts(length, added, *(id_.decode() for id_ in ids)))
                for stream, (error, length, added, *ids) in zip(streams, answers, strict=True)
            ]
            self._log.record_facts(inspected, requested, int(server_time_us))
        with self._log.changed:
            for topic in self._topics:
                self._log.unreachable.pop(topic, None)

    def _commit(self, client: _Client) -> None:
        """Move our group in the streams. No reader uses it, but `XINFO GROUPS` then shows the lag."""
        with self._log.changed:
            commits = {
                partition: self._log.commits.pop(partition)
                for partition in list(self._log.commits)
                if partition.topic in self._topics
            }
        for partition, (position, counted) in commits.items():
            key, failure = _key(partition), ""
            try:
                try:
                    client.xgroup_setid(key, self._log.group, position, entries_read=counted)
                except ResponseError as error:
                    if not str(error).startswith("NOGROUP"):
                        raise
                    client.xgroup_create(key, self._log.group, position, entries_read=counted)
            except ResponseError as error:
                failure = f"committing the position of {partition}: {error}"
            with self._log.changed:
                self._log.uncommitted.pop(partition, None)
                if failure:
                    self._log.uncommitted[partition] = failure

    def _read(self, client: _Client) -> bool:
        """Read ahead; return False if a key is no stream: `_inspect` then finds out which."""
        log, room = self._log, self._log.config.read_ahead_bytes
        with log.changed:
            streams = [
                stream for stream in self._streams() if not stream.paused and stream.read is not None and not stream.trouble
            ]
            # The size of a reply is unknown before all of it is in memory. So room is reserved by the largest recent message. A
            # single message may exceed the room, or a large one would never be read.
            if not streams or (log.queued_bytes and log.queued_bytes + self._largest > room):
                log.changed.wait(_BLOCK_MS / 1000)
                return True
            free = min(room - log.queued_bytes, max(room // 4, self._largest))
            wanted = max(1, min(len(streams), free // self._largest))
            # XREAD BLOCK returns as soon as one stream has messages. So all streams are read at once only after each was empty.
            block = wanted == len(streams) or self._empty_reads >= len(streams)
            wanted = len(streams) if block else wanted
            start = self._turn % len(streams)
            self._turn = start + wanted
            requested = {stream.key: stream for stream in (streams + streams)[start : start + wanted]}
            count = max(1, min(_REPLY_MESSAGES, free // self._largest) // wanted)
            reads = {key: str(stream.read) for key, stream in requested.items()}
            reserved = count * self._largest
            log.queued_bytes += reserved
        reply: Any = []
        try:
            reply = client.xread(reads, count, _BLOCK_MS if block else None)  # type: ignore[arg-type]
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return False
        finally:
            with log.changed:
                log.queued_bytes -= reserved
                self._queue_messages(requested, reads, reply)
        return True

    def _queue_messages(self, requested: dict[str, _Stream], reads: dict[str, str], reply: Any) -> None:
        log, largest = self._log, 0
        for key, entries in reply:
            stream = requested[key.decode()]
            messages = [_message(stream.partition, entry) for entry in entries]
            largest = max(largest, *(len(message.value) + _MESSAGE_BYTES for message in messages))
            if log.closing.is_set() or stream.paused or stream.read != reads[stream.key]:
                continue
            log.queue.extend((stream, message) for message in messages)
            if not stream.queued:
                first, last = _order(messages[0].position), _order(messages[-1].position)
                stream.arrivals.record_fetch(first, first[0] / 1000 - stream.ahead_s, last)
            log.queued_bytes += sum(len(message.value) + _MESSAGE_BYTES for message in messages)
            stream.read = messages[-1].position
            stream.count += len(messages)
            stream.queued += len(messages)
        if largest:
            self._largest = max(largest, self._largest * 3 // 4)
            log.changed.notify_all()
        self._empty_reads = 0 if largest else self._empty_reads + 1


class _Waiting(NamedTuple):
    value: bytes
    time_us: int
    sent: Callable[[str | Exception], None] | None


@dataclass(slots=True)
class _UnansweredBatch:
    """Messages of one partition that are sent together, and resent until Redis answers."""

    partition: Partition
    number: int
    messages: list[_Waiting]
    since: float = field(default_factory=time.monotonic)


class RedisStreamWriter(UpdateLogWriter):
    """Writes streams from one thread, one batch per partition at a time. *Thread-safe.*

    Several writers may share a stream. Redis acknowledges messages in memory: set `appendfsync always` if none may be lost when
    it dies.
    """

    kind: ClassVar[str] = "redis_stream"

    def __init__(self, config: UpdateSourceConfig) -> None:
        self._config = _checked(config)
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._waiting: dict[Partition, deque[_Waiting]] = {}
        self._batches: dict[Partition, _UnansweredBatch] = {}
        self._messages = 0  # in flight
        self._bytes = 0
        self._batch_count = 0
        self._closing = threading.Event()
        self._thread = new_thread("redis-stream-writer", self._run)
        self._thread.start()

    @classmethod
    def from_config(cls, config: UpdateSourceConfig) -> Self:
        return cls(config)

    def partitions(self, topic: str, timeout_s: float, create: int = 0) -> int:
        def count(client: _Client) -> Any:
            if create:
                client.set(topic, create, nx=True)
            return client.eval(_COUNT, 1, topic)

        if create > _MOST_PARTITIONS:
            raise UpdateLogError(f"creating {topic}: got {create} partitions, expected at most {_MOST_PARTITIONS}")
        (answer,) = self._request(f"requesting the partitions of {topic}", timeout_s, count)
        return _partition_count(topic, answer)

    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        entries = self._request(
            f"reading the last message of {partition}", timeout_s, lambda client: client.xrevrange(_key(partition), count=1)
        )
        return _message(partition, entries[0]) if entries else None

    def _request(self, doing: str, timeout_s: float, request: Callable[[_Client], Any]) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with closing(_connect(self._config, max(0.05, min(_TIMEOUT_S, deadline - time.monotonic())))) as client:
                    return request(client)
            except _FAILURES as error:
                if time.monotonic() + 0.1 > deadline:
                    raise UpdateLogError(f"{doing}: {error}") from error
                time.sleep(0.1)

    def send(
        self,
        partition: Partition,
        value: bytes,
        *,
        time_us: int = 0,
        sent: Callable[[str | Exception], None] | None = None,
    ) -> None:
        check_message_size(partition, value, self._config.max_message_bytes)
        size, most = len(value) + _MESSAGE_BYTES, self._config.read_ahead_bytes
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closing.is_set() or not self._messages or self._bytes + size <= most, _FULL_S
            )
            if not free or self._closing.is_set():
                reason = "the writer is closed" if free else f"Redis accepted nothing for {_FULL_S:.0f} s"
                raise UpdateLogError(f"sending to {partition}: {reason}")
            self._messages += 1
            self._bytes += size
            self._waiting.setdefault(partition, deque()).append(_Waiting(value, time_us or time.time_ns() // 1000, sent))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: not self._messages, timeout_s)
            return self._messages

    def close(self) -> None:
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(3 * _TIMEOUT_S)

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                self._form_batches()
                if self._batches:
                    with closing(_connect(self._config, _TIMEOUT_S)) as client:
                        while not self._closing.is_set():
                            self._append(client)
                            failures = 0
                            self._form_batches()
            except _FAILURES as error:
                for batch in list(self._batches.values()):
                    if time.monotonic() - batch.since > _GIVE_UP_S:
                        silent = f"no answer for {_GIVE_UP_S:.0f} s; Redis may have it nevertheless: {error}"
                        self._finish(batch, UpdateLogError(f"sending to {batch.partition}: {silent}"))
                failures += 1
                self._closing.wait(min(_MOST_BACKOFF_S, 0.05 * 2 ** min(failures, 16)))
        self._form_batches()
        while self._batches:
            for batch in list(self._batches.values()):
                self._finish(batch, UpdateLogError(f"sending to {batch.partition}: the writer was closed"))
            self._form_batches()

    def _form_batches(self) -> None:
        """Form a batch for each partition that has messages and none in flight; wait for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._batches or self._closing.is_set(), _BLOCK_MS / 1000)
            for partition in [waiting for waiting in self._waiting if waiting not in self._batches]:
                queue = self._waiting[partition]
                messages, size = [queue.popleft()], 0
                while queue and len(messages) < _BATCH_MESSAGES and size + len(queue[0].value) <= _BATCH_BYTES:
                    size += len(queue[0].value)
                    messages.append(queue.popleft())
                if not queue:
                    del self._waiting[partition]
                self._batch_count += 1
                self._batches[partition] = _UnansweredBatch(partition, self._batch_count, messages)

    def _append(self, client: _Client) -> None:
        for batch in list(self._batches.values()):
            key = _key(batch.partition)
            words = [word for message in batch.messages for word in (message.value, message.time_us)]
            try:
                first: bytes = client.eval(_APPEND, 2, key, f"{key}/{self._name}", batch.number, *words)
            except ResponseError as error:
                if isinstance(error, _TRANSIENT) or re.match("MISCONF|NOREPLICAS|BUSY|CLUSTERDOWN", str(error)):
                    raise
                self._finish(batch, UpdateLogError(f"{key}: {error}; see what the key holds and what the user may do"))
                continue
            self._finish(batch, first.decode())

    def _finish(self, batch: _UnansweredBatch, answer: str | UpdateLogError) -> None:
        if isinstance(answer, str):
            ms, number = _order(answer)
        for index, message in enumerate(batch.messages):
            if message.sent is not None:
                message.sent(f"{ms}-{number + index}" if isinstance(answer, str) else answer)
        with self._changed:
            del self._batches[batch.partition]
            self._messages -= len(batch.messages)
            self._bytes -= sum(len(message.value) + _MESSAGE_BYTES for message in batch.messages)
            self._changed.notify_all()
