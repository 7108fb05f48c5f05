"""Online updates in Redis Streams, on a server or a cluster. Redis 7 or newer, or Valkey.

    hps_et.<model>.<table>        a string: the number of partitions of the topic, 1 to 1024
    {hps_et.<model>.<table>}/<n>  the stream of partition n, with the fields `value` and `time` (microseconds since 1970)

So `SET hps_et.shop.items 1` and `XADD {hps_et.shop.items}/0 * value ...` are all that a publisher in another language needs.
The braces keep a topic in one slot of a cluster, because XREAD waits only for streams of one slot: a cluster spreads tables.

One thread per server, or per topic in a cluster, reads ahead with XREAD BLOCK. The number of messages per read is estimated
from the sizes of earlier ones, at first from the largest allowed, so that a reply fits the remaining room.

An id does not tell how many messages follow it. Redis counts the entries ever added to a stream, and the reader those it read.
Once it has caught up the two must agree; otherwise messages were lost.

Others may write any key. What one holds in place of a count or a stream is the problem of its table; the others go on.
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
from hps.updates.base import Message, Partition, UpdateLog, UpdateLogWriter, missing_topics

_log = logging.getLogger(__name__)
_Client: TypeAlias = "Redis | RedisCluster"

_BEFORE_ALL: Final = "0-0"
_TIMEOUT_S: Final = 3.0  # without an answer from the server
_BLOCK_MS: Final = 100  # bounds how long a resume or a commit waits for a blocked read
_LOOK_S: Final = 1.0
_MOST_BACKOFF_S: Final = 2.0
_MESSAGE_BYTES: Final = 300  # memory of a message beyond its value
_MOST_PARTITIONS: Final = 1024  # of a topic: anybody may write the count
_REPLY_MESSAGES: Final = 4096
_BATCH_MESSAGES: Final = 1024
_BATCH_BYTES: Final = 4 << 20
_GIVE_UP_S: Final = 300.0  # Kafka's message.timeout.ms
_FULL_S: Final = 60.0
_AWAY: Final = (RedisError, RedisClusterException, OSError, UpdateLogError)
_PASSING: Final = (OutOfMemoryError, ReadOnlyError, ClusterError, TryAgainError)
"""Errors after which a writer tries again."""

_COUNT: Final = """
local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  answers[i] = value and string.sub(type(value) == 'table' and value.err or value, 1, 40)
end
return answers
"""
"""GET, with the start of a long value, and the error of a key that is no string in place of its value."""

_LOOK: Final = """
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
"""The server's time (TIME would need a right of its own), and XINFO STREAM without the first and last entries, each as large as
a message; and its error, of a key that is no stream.
"""

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
"""Append a batch atomically and store its number and first id. A batch that was appended before is only answered: one resent
after a lost reply, or delivered late by a broken connection.
"""


def _connect(config: UpdateSourceConfig, timeout_s: float) -> _Client:
    """Connect to the first address that answers."""
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
        except _AWAY as error:
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
    """Return the number of partitions that the key of a topic says; `answer` is of `_COUNT`.

    Raises:
        UpdateLogError: it says something else, or there is no such key.
    """
    if answer is None:
        raise UpdateLogError(f"topic {topic} does not exist: there is no key of that name with the number of its partitions")
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
class _Stream:
    """Reading state of a partition. *Guarded by the log's lock.*

    `read` is the id of the last message read ahead (None until `latest` is resolved), `polled` that of the last one returned by
    `poll` or the start, with `queued` messages between. `count` estimates the entries ever added up to `read`; it is
    no estimate if `exact`. `added` is Redis' own count, None until asked. `trouble` is Redis' reason for not reading it. The
    server's clock, which makes ids, is `ahead_s` ahead of `time.monotonic`; `arrivals` counts what was polled as read.
    """

    partition: Partition
    key: str
    read: str | None
    polled: str
    queued: int = 0
    count: int = 0
    exact: bool = False
    added: int | None = None
    paused: bool = False
    trouble: str = ""
    ahead_s: float = 0.0
    arrivals: Arrivals = field(default_factory=Arrivals)

    def compare(self, facts: _Facts) -> str:
        """Correct the count by Redis' facts; returns a description of lost messages, if any."""
        if self.read is None:
            self.read = self.polled = facts.generated
        at, removed = _order(self.read), facts.added - facts.length
        self.added = facts.added
        lost = ""
        if at > _order(facts.generated) or (self.exact and facts.added < self.count):
            lost = f"the stream was made anew or cut: its last id is {facts.generated}, {self.read} was read; reading it whole"
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


class RedisStreamLog(UpdateLog):
    """Reads streams. *One thread*, unless the contract says otherwise."""

    kind: ClassVar[str] = "redis_stream"

    def __init__(self, config: UpdateSourceConfig, group: str) -> None:
        self.config = _checked(config)
        self.group = group
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.streams: dict[Partition, _Stream] = {}
        self.queue: deque[tuple[_Stream, Message]] = deque()
        self.queued_bytes = 0  # read ahead or requested
        self.unreachable: dict[str, str] = {}  # errors of the server by topic
        self.refused: dict[str, str] = {}  # errors in what the topic's own key says
        self.absent: set[str] = set()  # topics that do not exist
        self.uncommitted: dict[Partition, str] = {}  # errors of the last commit
        self.commits: dict[Partition, tuple[str, int | None]] = {}
        self.after: dict[Partition, str] = {}
        self.begin = "earliest"
        self._lost: dict[Partition, str] = {}
        self._begun: dict[Partition, str] = {}
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
        except _AWAY as error:
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
                place = _order(message.position)
                messages.append(replace(message, arrived=stream.arrivals.read(place, place[0] / 1000 - stream.ahead_s)))
                stream.polled = message.position
                stream.queued -= 1
                self.delivered += 1
                size += len(message.value)
            self.queued_bytes -= size + _MESSAGE_BYTES * len(messages)
            self.changed.notify_all()
        return messages

    def pause(self, partitions: Sequence[Partition]) -> None:
        with self.changed:
            stopped = {self.streams[partition] for partition in partitions if partition in self.streams}
            kept: deque[tuple[_Stream, Message]] = deque()
            for stream, message in self.queue:
                if stream in stopped:
                    self.queued_bytes -= len(message.value) + _MESSAGE_BYTES
                else:
                    kept.append((stream, message))
            self.queue = kept
            for stream in stopped:
                stream.paused = True
                if stream.queued:
                    stream.read, stream.count, stream.queued = stream.polled, stream.count - stream.queued, 0

    def resume(self, partitions: Sequence[Partition]) -> None:
        with self.changed:
            for partition in partitions:
                if partition in self.streams:
                    self.streams[partition].paused = False
            self.changed.notify_all()

    def behind(self) -> dict[Partition, int | None]:
        with self.changed:
            return {
                partition: None
                if stream.added is None or stream.trouble or partition.topic in self.unreachable
                else max(stream.added, stream.count) - stream.count + stream.queued
                for partition, stream in self.streams.items()
            }

    def unread_since(self) -> dict[Partition, float | None]:
        with self.changed:
            return {partition: stream.arrivals.unread_since() for partition, stream in self.streams.items()}

    def commit(self, positions: Mapping[Partition, str]) -> None:
        with self.changed:
            for partition, position in positions.items():
                stream = self.streams.get(partition)
                counted = stream is not None and stream.exact and stream.polled == position
                self.commits[partition] = (position, stream.count - stream.queued if stream and counted else None)

    @property
    def problem(self) -> str:
        with self.changed:
            return next(self._problems(), "")

    def problem_of(self, topic: str) -> str:
        with self.changed:
            return next(self._problems(topic), "")

    def lacks(self, topic: str) -> bool:
        with self.changed:
            return topic in self.absent and topic not in self.unreachable

    def _problems(self, only: str = "") -> Iterator[str]:
        for kind in (self.unreachable, self.refused):
            yield from (problem for topic, problem in kind.items() if only in ("", topic))
        for stream in self.streams.values():
            if stream.trouble and only in ("", stream.partition.topic):
                yield stream.trouble
        yield from (problem for partition, problem in self.uncommitted.items() if only in ("", partition.topic))

    def lost(self) -> dict[Partition, str]:
        with self.changed:
            lost, self._lost = self._lost, {}
        return lost

    def begun(self) -> dict[Partition, str]:
        with self.changed:
            begun, self._begun = self._begun, {}
        return begun

    def close(self) -> None:
        with self.changed:
            self.closing.set()
            self.queue.clear()
            self.changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(3 * _TIMEOUT_S)

    def note(self, answers: Sequence[tuple[_Stream, str, _Facts]], asked: float, server_time_us: int) -> None:
        with self.changed:
            for stream, error, facts in answers:
                stream.trouble = error and f"the key {stream.key}: {error}; expected a stream"
                if error:
                    continue
                if stream.read is None:
                    self._begun[stream.partition] = facts.generated
                if lost := stream.compare(facts):
                    self._lost[stream.partition] = lost
                stream.ahead_s = server_time_us / 1e6 - asked
                stream.arrivals.look(_order(facts.generated), time.monotonic(), asked)
                if stream.added == stream.count and not stream.queued:
                    stream.arrivals.skip(_order(facts.generated))


class _Reader:
    """Reads topics of a log, all in one slot of a cluster, and commits. *One thread.*"""

    def __init__(self, log: RedisStreamLog, topics: list[str]) -> None:
        self._log = log
        self._topics = topics
        self._largest = log.config.max_message_bytes + _MESSAGE_BYTES  # expected
        self._met: set[str] = set()  # topics looked for so far
        self._turn = 0
        self._in_vain = 0  # consecutive empty reads

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
            except Exception as error:  # noqa: BLE001 - reading goes on, for all tables
                if not isinstance(error, _AWAY) and not failures:
                    _log.exception("Redis streams: reading %s failed; it is tried again", ", ".join(self._topics))
                with self._log.changed:
                    self._log.unreachable |= dict.fromkeys(self._topics, f"{type(error).__name__}: {error}")
                failures = 0 if time.monotonic() - started > 2 * _TIMEOUT_S else failures + 1
                backoff_s = self._log.config.failure_backoff_ms / 1000 * 2 ** min(failures, 16)
                self._log.closing.wait(min(_MOST_BACKOFF_S, backoff_s))

    def _serve(self, client: _Client) -> None:
        found_at = looked_at = float("-inf")
        while not self._log.closing.is_set():
            now = time.monotonic()
            if now - found_at >= self._log.config.metadata_refresh_interval_ms / 1000:
                self._find(client)
                found_at, looked_at = now, float("-inf")
            if now - looked_at >= _LOOK_S:
                self._commit(client)
                self._look(client)
                looked_at = now
            if not self._read(client):
                looked_at = float("-inf")
        self._commit(client)

    def _find(self, client: _Client) -> None:
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
                    if partition not in self._log.streams:
                        new = topic in self._met or self._log.begin == "earliest"
                        read = self._log.after.get(partition, _BEFORE_ALL if new else None)
                        if read is not None and _order(read) == (0, 0):  # perhaps of another kind of log
                            read = _BEFORE_ALL
                        self._log.streams[partition] = _Stream(partition, _key(partition), read, read or _BEFORE_ALL)
            if answer is None or not refused:  # else its partitions may be there, and `latest` applies to them
                self._met.add(topic)

    def _streams(self) -> list[_Stream]:
        with self._log.changed:
            return [stream for stream in self._log.streams.values() if stream.partition.topic in self._topics]

    def _look(self, client: _Client) -> None:
        streams = self._streams()
        if streams:
            asked = time.monotonic()
            server_time_us, *answers = client.eval_ro(_LOOK, len(streams), *(stream.key for stream in streams))
            looks = [
                (stream, error.decode(), _Facts(length, added, *(id_.decode() for id_ in ids)))
                for stream, (error, length, added, *ids) in zip(streams, answers, strict=True)
            ]
            self._log.note(looks, asked, int(server_time_us))
        with self._log.changed:
            for topic in self._topics:
                self._log.unreachable.pop(topic, None)

    def _commit(self, client: _Client) -> None:
        """Move our group in the streams. Nothing reads by it, but `XINFO GROUPS` then shows the lag."""
        with self._log.changed:
            commits = {one: where for one, where in self._log.commits.items() if one.topic in self._topics}
            for one in commits:
                del self._log.commits[one]
        for partition, (position, counted) in commits.items():
            key, said = _key(partition), ""
            try:
                try:
                    client.xgroup_setid(key, self._log.group, position, entries_read=counted)
                except ResponseError as error:
                    if not str(error).startswith("NOGROUP"):
                        raise
                    client.xgroup_create(key, self._log.group, position, entries_read=counted)
            except ResponseError as error:
                said = f"committing the position of {partition}: {error}"
            with self._log.changed:
                self._log.uncommitted.pop(partition, None)
                if said:
                    self._log.uncommitted[partition] = said

    def _read(self, client: _Client) -> bool:
        """Read ahead; False if a key turned out to be no stream: another look tells which."""
        log, room = self._log, self._log.config.read_ahead_bytes
        with log.changed:
            streams = [
                stream for stream in self._streams() if not stream.paused and stream.read is not None and not stream.trouble
            ]
            # A single message may exceed the remaining room.
            if not streams or (log.queued_bytes and log.queued_bytes + self._largest > room):
                log.changed.wait(_BLOCK_MS / 1000)
                return True
            free = min(room - log.queued_bytes, max(room // 4, self._largest))
            wanted = max(1, min(len(streams), free // self._largest))
            # A blocked read returns messages of one stream, so ask for all streams only after each alone was empty.
            block = wanted == len(streams) or self._in_vain >= len(streams)
            wanted = len(streams) if block else wanted
            start = self._turn % len(streams)
            self._turn = start + wanted
            asked = {stream.key: stream for stream in (streams + streams)[start : start + wanted]}
            count = max(1, min(_REPLY_MESSAGES, free // self._largest) // wanted)
            reads = {key: str(one.read) for key, one in asked.items()}
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
                self._take(asked, reads, reply)
        return True

    def _take(self, asked: dict[str, _Stream], reads: dict[str, str], reply: Any) -> None:
        log, largest = self._log, 0
        for key, entries in reply:
            stream = asked[key.decode()]
            messages = [_message(stream.partition, entry) for entry in entries]
            largest = max(largest, *(len(message.value) + _MESSAGE_BYTES for message in messages))
            if log.closing.is_set() or stream.paused or stream.read != reads[stream.key]:
                continue
            log.queue.extend((stream, message) for message in messages)
            if not stream.queued:
                first, last = _order(messages[0].position), _order(messages[-1].position)
                stream.arrivals.fetched(first, first[0] / 1000 - stream.ahead_s, last)
            log.queued_bytes += sum(len(message.value) + _MESSAGE_BYTES for message in messages)
            stream.read = messages[-1].position
            stream.count += len(messages)
            stream.queued += len(messages)
        if largest:
            self._largest = max(largest, self._largest * 3 // 4)
            log.changed.notify_all()
        self._in_vain = 0 if largest else self._in_vain + 1


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
        self._made = 0
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
        (answer,) = self._ask(f"looking for the topic {topic}", timeout_s, count)
        return _partition_count(topic, answer)

    def last(self, partition: Partition, timeout_s: float) -> Message | None:
        entries = self._ask(
            f"reading the last message of {partition}", timeout_s, lambda client: client.xrevrange(_key(partition), count=1)
        )
        return _message(partition, entries[0]) if entries else None

    def _ask(self, doing: str, timeout_s: float, ask: Callable[[_Client], Any]) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with closing(_connect(self._config, max(0.05, min(_TIMEOUT_S, deadline - time.monotonic())))) as client:
                    return ask(client)
            except _AWAY as error:
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
        if len(value) > self._config.max_message_bytes:
            raise UpdateLogError(
                f"sending to {partition}: got {len(value)} bytes, expected at most {self._config.max_message_bytes} "
                "(update_source.max_message_bytes); send fewer rows in a message"
            )
        size, most = len(value) + _MESSAGE_BYTES, self._config.read_ahead_bytes
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closing.is_set() or not self._messages or self._bytes + size <= most, _FULL_S
            )
            if not free or self._closing.is_set():
                what = "the writer is closed" if free else f"Redis took nothing for {_FULL_S:.0f} s"
                raise UpdateLogError(f"sending to {partition}: {what}")
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
                self._take_batches()
                if self._batches:
                    with closing(_connect(self._config, _TIMEOUT_S)) as client:
                        while not self._closing.is_set():
                            self._append(client)
                            failures = 0
                            self._take_batches()
            except _AWAY as error:
                for batch in list(self._batches.values()):
                    if time.monotonic() - batch.since > _GIVE_UP_S:
                        what = f"sending to {batch.partition}: no answer for {_GIVE_UP_S:.0f} s"
                        self._finish(batch, UpdateLogError(f"{what}, Redis may have it nevertheless: {error}"))
                failures += 1
                self._closing.wait(min(_MOST_BACKOFF_S, 0.05 * 2 ** min(failures, 16)))
        self._take_batches()
        while self._batches:
            for batch in list(self._batches.values()):
                self._finish(batch, UpdateLogError(f"sending to {batch.partition}: the writer was closed"))
            self._take_batches()

    def _take_batches(self) -> None:
        """Take a batch from each partition that has messages and none in flight; waits for one."""
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
                self._made += 1
                self._batches[partition] = _UnansweredBatch(partition, self._made, messages)

    def _append(self, client: _Client) -> None:
        for batch in list(self._batches.values()):
            key = _key(batch.partition)
            words = [word for message in batch.messages for word in (message.value, message.time_us)]
            try:
                first: bytes = client.eval(_APPEND, 2, key, f"{key}/{self._name}", batch.number, *words)
            except ResponseError as error:
                if isinstance(error, _PASSING) or re.match("MISCONF|NOREPLICAS|BUSY|CLUSTERDOWN", str(error)):
                    raise
                self._finish(batch, UpdateLogError(f"{key}: {error}; see what is there and what the user may do"))
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
