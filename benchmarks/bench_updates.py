"""Online updates from Kafka and from Redis Streams: how soon they are visible, how many a replica takes, lookups beside them.

*visible*: one process publishes 100,000 rows of 32 floats a second, in messages of 500, each when it is due. One row of each is
that of a marker key. The replica's process looks the marker keys up, all at once, a thousand times a second. What counts is the
time from the moment a message is due to the end of the first lookup that shows it, so up to a millisecond is the measurement's
own. Of a marker that a later one had replaced before it was seen, the time is that of the later one.

*sustained*: a replica starts in front of a log of 2 M rows and reads it into RocksDB and an embedding cache that holds half the
keys. Each row is compared afterwards.

*lookups*: as in `bench_writes`: 256 keys, 250 times a second, over HTTP. *idle*: nobody publishes. *elsewhere*: the same rows
go to a topic that nobody reads, which costs the publisher's and the broker's processor time alone. *beside*: the replica
applies them. The cases take turns, and each quantile is the median of those of the rounds.

Broker, publisher, replica and reader share the machine.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

import hps
from benchmarks.bench_writes import add_rows, read
from benchmarks.harness import Report, scratch
from benchmarks.served import document, hps_serve, model
from hps.configuration.tiers import UpdateSourceConfig
from hps.ground.registry import implementation
from hps.types import FloatArray, IndexArray, KeyArray
from hps.updates.base import TOPIC_PREFIX, Partition, UpdateLogWriter
from hps.updates.framing import encode
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.tables.hugectr_messages import encode_hugectr

_DIM, _PARTITIONS, MESSAGE_ROWS, ROWS_PER_S = 32, 4, 500, 100_000
_MARKERS = 64  # 64 messages of 5 ms: none is replaced before it is seen unless it takes 320 ms
TOPIC, _ELSEWHERE = f"{TOPIC_PREFIX}m.t0", f"{TOPIC_PREFIX}m.nobody"
_KEPT = 2000  # messages of a stream, 40 s
_FRAMES = ("HPS1", "HCTR")
PATIENCE_S = 120.0
_LOGS = ("kafka", "redis_stream")


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes little of everything."""
    report.about |= {"dim": _DIM, "partitions": _PARTITIONS, "tiers": "embedding_cache/rocks_db"}
    for kind in _LOGS:
        for frame, rows in ((_FRAMES[0], 500), (_FRAMES[0], 5000), (_FRAMES[1], 500)):
            for most in (16_384, 65_536) if (frame, rows) == (_FRAMES[0], 500) else (65_536,):
                sustained(report, kind, frame, rows, most, total=100_000 if quick else 2_000_000)
        visible(report, kind, rounds=1 if quick else 5, seconds=2.0 if quick else 5.0)
        lookups(report, kind, rounds=1 if quick else 7, seconds=2.0 if quick else 3.0)


def visible(report: Report, kind: str, *, rounds: int, seconds: float) -> None:
    """Add a row of the times from publishing a row to seeing it in a lookup."""
    with scene(kind, 100_000) as (source, document), processes(2) as pool:
        directory = Path(document["models"][0]["sparse_files"][0]).parent
        watching = pool.submit(watch, document, directory)
        while not (directory / "up").exists() and not watching.done():
            time.sleep(0.1)
        due = []
        for _ in range(rounds):
            due.append(pool.submit(publish, source, TOPIC, seconds, 100_000, sum(map(len, due))).result(PATIENCE_S))
            time.sleep(1.0)
        (directory / "stop").touch()
        each = _times_to_visible(np.concatenate(due), watching.result(PATIENCE_S))
        times = np.split(each, np.cumsum([len(part) for part in due])[:-1])
    figures = {f"p{name}_ms": 1e3 * _median(times, share) for name, share in (("50", 0.5), ("99", 0.99), ("999", 0.999))}
    figures |= {"messages": each.size, "rounds": rounds}
    report.add({"work": "visible", "log": kind, "rows_per_s": ROWS_PER_S, "message_rows": MESSAGE_ROWS}, figures)


def sustained(report: Report, kind: str, frame: str, message_rows: int, max_batch: int, *, total: int) -> None:
    """Add a row of how many rows a second a replica reads from a full log."""
    rows = min(1_000_000, total)
    with scene(kind, rows, max_batch_size=max_batch) as (source, document), processes(2) as pool:
        newest = pool.submit(fill, source, frame, message_rows, rows, total).result(PATIENCE_S)
        rate = pool.submit(catch_up, document, newest, total).result(PATIENCE_S)
    axes: dict[str, Any] = {"work": "sustained", "log": kind, "frame": frame, "message_rows": message_rows}
    axes |= {"max_batch_size": max_batch}
    report.add(axes, {"rows_per_s": rate, "rows": total})


def lookups(report: Report, kind: str, *, rounds: int, seconds: float) -> None:
    """Add rows of the times of lookups, idle and beside updates."""
    with scene(kind, 100_000) as (source, document), processes(2) as pool:
        directory = Path(document["models"][0]["sparse_files"][0]).parent
        cases = {"idle": "", "elsewhere": _ELSEWHERE, "beside": TOPIC}
        samples: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
        configuration = {name: value for name, value in document.items() if name != "rows"}
        with hps_serve(configuration, directory) as service:
            for number in range(rounds):
                for case, topic in cases.items():
                    publishing = pool.submit(publish, source, topic, seconds + 1.5, 100_000, 0) if topic else None
                    samples[case].append(
                        pool.submit(read, directory, service.port, seconds, report.seed + number).result(PATIENCE_S)
                    )
                    if publishing:
                        publishing.result(PATIENCE_S)
        add_rows(report, {"work": "lookups", "log": kind, "updates_per_s": ROWS_PER_S}, samples)


# -- in processes of their own ----------------------------------------------------------------------------------------


def publish(source: dict[str, Any], topic: str, seconds: float, rows: int, before: int) -> npt.NDArray[np.float64]:
    """Publish rows at a fixed rate. Returns when each message was due, by `perf_counter`.

    Args:
        before: messages that were published before.
    """
    with _writer(source) as writer:
        rng, count = np.random.default_rng(before), int(seconds * ROWS_PER_S / MESSAGE_ROWS)
        nothing, first = (
            encode(np.empty(0, np.int64), np.empty((0, _DIM), np.float32), sequence=1),
            time.time_ns() // 1000 - before,
        )
        for partition in range(_PARTITIONS):
            writer.send(Partition(topic, partition), nothing)
        _flush(writer)  # it is connected
        due = time.perf_counter() + 0.2 + np.arange(count) * MESSAGE_ROWS / ROWS_PER_S
        for number, moment in enumerate(due, before):
            partition = number % _PARTITIONS
            keys = _draw(rng, rows, partition, MESSAGE_ROWS - 1)
            keys = np.append(keys, rows + number % _MARKERS)
            vectors = _vectors(keys, number + 1)
            if (early_s := moment - time.perf_counter()) > 0:
                time.sleep(early_s)
            writer.send(Partition(topic, partition), encode(keys, vectors, sequence=first + number))
            if number % _KEPT == 0 and source["type"] == "redis_stream":
                _trim(source, topic)
        _flush(writer)
        return due


def watch(document: dict[str, Any], directory: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Look marker keys up until told to stop. Returns what each lookup saw that was new: numbers of messages, and when."""
    rows = document["rows"]
    markers = np.arange(rows, rows + _MARKERS)
    with hps.HPS({name: value for name, value in document.items() if name != "rows"}) as replica:
        newest, numbers, times = replica.lookup(markers, "m", 0)[:, 1], [], []
        (directory / "up").touch()
        due = time.perf_counter()
        while not (directory / "stop").exists():
            vectors = replica.lookup(markers, "m", 0)
            now = time.perf_counter()
            for number in vectors[vectors[:, 1] > newest, 1]:
                numbers.append(int(number))
                times.append(now)
            if (vectors[:, 1] < newest).any():
                raise AssertionError("a lookup got an older vector than one before it")
            newest = vectors[:, 1]
            due = max(due + 1e-3, now)
            time.sleep(max(0.0, due - time.perf_counter()))
        _check(keys := np.arange(rows, dtype=np.int64)[:10_000], replica.lookup(keys, "m", 0))
    return np.array(numbers), np.array(times)


def fill(source: dict[str, Any], frame: str, message_rows: int, rows: int, total: int) -> IndexArray:  # (rows,)
    """Publish changes of random keys as fast as it goes. Returns the number of the last message of each key."""
    newest = np.zeros(rows, np.int64)
    rng, first = np.random.default_rng(2), time.time_ns() // 1000
    with _writer(source) as writer:
        for number in range(total // message_rows):
            partition = Partition(TOPIC, number % _PARTITIONS)
            keys = _draw(rng, rows, partition.number, message_rows)
            newest[keys] = number + 1
            vectors = _vectors(keys, number + 1)
            value = encode(keys, vectors, sequence=first + number) if frame == "HPS1" else encode_hugectr(keys, vectors)
            writer.send(partition, value)
        _flush(writer)
    return newest


def catch_up(document: dict[str, Any], newest: IndexArray, total: int) -> float:
    """Start a replica in front of a log; rows a second from its first ones until it has them all, which are then compared."""
    with hps.HPS({name: value for name, value in document.items() if name != "rows"}) as replica:
        samples: list[tuple[float, int]] = []
        deadline = time.perf_counter() + PATIENCE_S
        while True:
            (status,) = replica.updates()
            samples.append((time.perf_counter(), status.rows))
            if status.rows >= total:
                break
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{status}")
            time.sleep(0.005)
        started = next(number for number, (_, rows) in enumerate(samples) if rows)
        (start, before), (end, after) = samples[started], samples[-1]
        for part in np.array_split(np.arange(newest.size), 100):
            vectors = replica.lookup(part, "m", 0)
            _check(part, vectors)
            if not (vectors[:, 1] == newest[part]).all():
                raise AssertionError("a row is not that of the last change")
        return (after - before) / (end - start)


# -- what they share --------------------------------------------------------------------------------------------------


@contextmanager
def scene(kind: str, rows: int, **settings: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A log with its topics, and the configuration of a replica, with its files; `settings` are of its `update_source`."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch("updates"))
        source: dict[str, Any]
        if kind == "kafka":
            broker = stack.enter_context(KafkaBroker(directory / "broker"))
            source = {"type": "kafka_message_queue", "brokers": broker.address, "config": broker.config, **settings}
        else:
            streams = stack.enter_context(RedisServer(directory / "redis"))
            source = {"type": "redis_stream", "address": streams.address, **settings}
        with _writer(source) as writer:
            for topic in (TOPIC, _ELSEWHERE):
                writer.partitions(topic, 60, create=_PARTITIONS)
        keys = np.arange(rows + _MARKERS)
        hps.write_sparse_model(directory / "item.model", (keys, _vectors(keys, 0)))
        np.save(directory / "acknowledged.npy", np.zeros(rows, np.int32))
        configuration = document(
            model([directory / "item.model"], [_DIM], max_batch_size=10_000, gpucacheper=0.5),
            device="auto",
            volatile_db={"type": "disabled"},
            persistent_db={"type": "rocks_db", "path": str(directory / "rocksdb")},
            update_source=source,
        )
        yield source, {**configuration, "rows": rows}


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield pool


@contextmanager
def _writer(source: dict[str, Any]) -> Iterator[UpdateLogWriter]:
    writer: UpdateLogWriter = implementation("update_log_writer", source["type"]).from_config(UpdateSourceConfig(**source))
    try:
        yield writer
    finally:
        writer.close()


def _flush(writer: UpdateLogWriter) -> None:
    if under_way := writer.flush(PATIENCE_S):
        raise TimeoutError(f"{under_way} messages are not in the log after {PATIENCE_S} s")


def _trim(source: dict[str, Any], topic: str) -> None:
    """Let Redis forget what every replica has read long ago."""
    host, _, port = source["address"].partition(":")
    with redis.Redis(host, int(port)) as client:
        for partition in range(_PARTITIONS):
            client.xtrim(f"{{{topic}}}/{partition}", maxlen=_KEPT, approximate=True)


def _draw(rng: np.random.Generator, rows: int, partition: int, count: int) -> KeyArray:
    """Distinct keys of a partition, which has every `_PARTITIONS`-th one."""
    return rng.choice(rows // _PARTITIONS, count, replace=False, shuffle=False) * _PARTITIONS + partition


def _vectors(keys: KeyArray, number: int) -> FloatArray:
    """Vectors that say which key and message they are of."""
    vectors = np.full((keys.size, _DIM), number, np.float32)
    vectors[:, 0] = keys
    return vectors


def _check(keys: KeyArray, vectors: FloatArray) -> None:
    if not ((vectors[:, 0] == keys).all() and (vectors[:, 1:] == vectors[:, 1:2]).all()):
        raise AssertionError("a lookup got a vector that is torn or another key's")


def _times_to_visible(
    due: npt.NDArray[np.float64], seen: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """How long each message took until a lookup showed it, or a later one of the same marker."""
    numbers, times = seen
    visible = np.full(due.size, np.nan)
    visible[numbers - 1] = times
    for number in range(due.size - _MARKERS - 1, -1, -1):
        if np.isnan(visible[number]):
            visible[number] = visible[number + _MARKERS]
    if np.isnan(visible).any():
        raise AssertionError(f"{np.isnan(visible).sum()} messages were never seen")
    return visible - due


def _median(times: list[npt.NDArray[np.float64]], share: float) -> float:
    return float(np.median([np.quantile(part, share) for part in times]))
