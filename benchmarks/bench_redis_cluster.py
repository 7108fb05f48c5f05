"""A Redis Cluster of six (three masters, three replicas) beside one of two, and what happens while it changes.

- Lookups by keys a request from three masters and from one, in turn on other keys: lookups and keys a second, and keys for each
  second of processor time that the servers and the client took, which holds whatever else the processors do.
- Bytes of a row on one server, of Redis and of Valkey, beside what is planned.
- A master is killed, or hangs (SIGSTOP); its replica takes over, the first one returns as a replica and takes over again. The
  same when asked (CLUSTER FAILOVER). A thread looks 100 keys up every 2 ms and notes which calls failed or waited.
- A slot with one partition moves to another master and around, beside the same lookups: key by key, and in Valkey at once.

Every answer is compared with what was loaded.
"""

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness import Report
from hps.errors import DatabaseError
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import KeyPartition
from hps.stores.redis.room import partition_bytes
from hps.types import FloatArray, KeyArray
from tests.servers.redis_server import RedisClusterServers, RedisServer, server_program, valkey_program

_TAG, _DIM, _PARTITIONS = "hps_et.bench.table", 32, 12
_KEYS = 100  # of a lookup beside changes
_PAUSE_S = 0.002
_HEALED_S = 60.0
_REASONS = ("CLUSTERDOWN", "connecting failed", "the connection broke", "was silent", "the call was over", "READONLY")


def run(report: Report, quick: bool) -> None:
    """Measure lookups, memory and changes; every answer is checked."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hps-bench-redis-cluster-")))
        clusters = {
            masters: stack.enter_context(RedisClusterServers(directory / f"of-{masters}", masters, replicas=True))
            for masters in (1, 3)
        }
        six = clusters[3]
        with six.masters[0].client() as client:
            report.about["redis"] = client.info("server")["redis_version"]
        report.about |= {"partitions": _PARTITIONS, "dim": _DIM, "replicas_of_a_master": 1, "load_average": os.getloadavg()[0]}
        rng = np.random.default_rng(report.seed)
        rows = 20_000 if quick else 200_000
        keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)))
        loaded = _Loaded(keys, rng.random((keys.size, _DIM), dtype=np.float32))
        tables = {masters: stack.enter_context(loaded.in_redis(cluster)) for masters, cluster in clusters.items()}
        for batch in (100, 1_000, 10_000, 100_000):
            if batch <= keys.size:
                _lookups(report, loaded, clusters, tables, batch, 0.3 if quick else 4.0)
        _asked_for(report, loaded, six, tables[3])
        for node_timeout_s in (1,) if quick else (1, 5):
            _set_node_timeout(six, node_timeout_s)
            _losses(report, loaded, six, tables[3], node_timeout_s)
        _moved(report, loaded, six, tables[3], _PARTITIONS)
        with loaded.in_redis(six, partitions=1) as table:
            _moved(report, loaded, six, table, 1)
        if program := valkey_program():
            valkey = stack.enter_context(RedisClusterServers(directory / "valkey", program=program))
            with loaded.in_redis(valkey, partitions=1) as table:
                _moved(report, loaded, valkey, table, 1, atomically=True)
    for program in filter(None, (server_program(), valkey_program())):
        for dim in (32,) if quick else (16, 32, 64, 128):
            _memory(report, Path(program), dim, 6_000 if quick else 72_000)  # no table of a hash is growing


@dataclass
class _Loaded:
    """The rows of a table, in the order of their keys' draw."""

    keys: KeyArray
    vectors: FloatArray

    @contextmanager
    def in_redis(self, cluster: RedisClusterServers, partitions: int = _PARTITIONS) -> Iterator[RedisDatabase]:
        with closing(RedisDatabase(cluster.address, num_partitions=partitions)) as database:
            database.drop_table(_TAG)
            database.open_table(_TAG, _DIM)
            for start in range(0, self.keys.size, 65_536):
                database.insert(_TAG, self.keys[start : start + 65_536], self.vectors[start : start + 65_536])
            yield database

    def fetch(self, database: RedisDatabase, picks: np.ndarray) -> float:
        """Look rows up, and compare them; return how long the lookup took."""
        asked = self.keys[picks]
        out, found = np.empty((picks.size, _DIM), np.float32), np.zeros(picks.size, np.bool_)
        start = time.perf_counter()
        try:
            database.fetch(_TAG, asked, out, found)
            seconds = time.perf_counter() - start
            if not found.all():
                raise SystemExit("a row that was loaded is absent")
        finally:
            if not np.array_equal(out[found], self.vectors[picks][found]):
                raise SystemExit("a wrong vector")
        return seconds


def _processor_s(servers: list[RedisServer]) -> float:
    """Processor time that the servers have taken so far."""
    ticks = 0
    for server in servers:
        if server.process:
            stat = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _lookups(
    report: Report,
    loaded: _Loaded,
    clusters: dict[int, RedisClusterServers],
    tables: dict[int, RedisDatabase],
    batch: int,
    duration_s: float,
) -> None:
    rng = np.random.default_rng(report.seed + batch)
    seconds: dict[int, list[float]] = {masters: [] for masters in tables}
    of_client, before = dict.fromkeys(tables, 0.0), {one: _processor_s(clusters[one].masters) for one in tables}
    for table in tables.values():
        loaded.fetch(table, rng.integers(0, loaded.keys.size, batch))
    deadline = time.perf_counter() + duration_s
    while time.perf_counter() < deadline:
        for masters, table in tables.items():
            picks = rng.integers(0, loaded.keys.size, batch)
            start = time.thread_time()
            seconds[masters].append(loaded.fetch(table, picks))
            of_client[masters] += time.thread_time() - start
    for masters, times in seconds.items():
        p50_s, keys = float(np.median(times)), batch * len(times)
        of_servers = _processor_s(clusters[masters].masters) - before[masters]
        figures = {
            "lookups_per_s": 1 / p50_s,
            "keys_per_s": batch / p50_s,
            "p50_s": p50_s,
            "p99_s": float(np.quantile(times, 0.99)),
            "keys_per_server_processor_s": keys / of_servers if of_servers else None,
            "keys_per_client_processor_s": keys / of_client[masters],  # the comparison of the answers included
            "to_one_master": float(np.median(seconds[1])) / p50_s,
        }
        report.add({"work": "lookup", "masters": masters, "batch": batch}, figures)


@dataclass
class _Watch:
    """Lookups of one thread: when each began and ended, and why it failed.

    Attributes:
        calls: begin, end, and the reason or an empty text.
    """

    loaded: _Loaded
    table: RedisDatabase
    calls: list[tuple[float, float, str]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["_Watch"]:
        done, problems = threading.Event(), list[BaseException]()

        def look() -> None:
            rng = np.random.default_rng(1)
            try:
                while not done.is_set():
                    begin, reason = time.perf_counter(), ""
                    try:
                        self.loaded.fetch(self.table, rng.integers(0, self.loaded.keys.size, _KEYS))
                    except DatabaseError as error:
                        reason = next((one for one in _REASONS if one in str(error)), str(error))
                    self.calls.append((begin, time.perf_counter(), reason))
                    time.sleep(_PAUSE_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                problems.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            self.wait_for_answers(time.perf_counter())
            yield self
            self.wait_for_answers(time.perf_counter())
        finally:
            done.set()
            thread.join(_HEALED_S)
        if problems:
            raise problems[0]

    def wait_for_answers(self, since: float) -> None:
        """Wait for 100 answers in a row that began after that."""
        _wait_until(lambda: len(last := self.calls[-100:]) == 100 and last[0][0] > since and not any(one[2] for one in last))

    def figures(self, since: float) -> dict[str, object]:
        """What lookups met from then on."""
        calls = [one for one in self.calls if one[1] >= since]
        failed = [one for one in calls if one[2]]
        before = [end - begin for begin, end, _ in self.calls if end < since]
        return {
            "failing_s": failed[-1][1] - since if failed else 0.0,
            "slowest_s": max(end - begin for begin, end, _ in calls),
            "p50_before_s": float(np.median(before)),
            "failed_calls": len(failed),
            "reasons": dict(Counter(reason for _, _, reason in failed)),
        }


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + _HEALED_S
    while not condition():
        if time.perf_counter() > deadline:
            raise SystemExit("the cluster does not recover")
        time.sleep(0.005)


def _set_node_timeout(six: RedisClusterServers, timeout_s: int) -> None:
    for server in six.servers:
        with server.client() as client:
            client.config_set("cluster-node-timeout", 1000 * timeout_s)
    time.sleep(2 * timeout_s)  # in which masters vote for one replica of a master


def _losses(report: Report, loaded: _Loaded, six: RedisClusterServers, table: RedisDatabase, node_timeout_s: int) -> None:
    """Kill a master, then the one that replaced it; then let each hang."""
    first, second = six.masters[0], six.servers[3]
    for how, end, begin in (("killed", RedisServer.kill, RedisServer.start), ("hangs", RedisServer.pause, RedisServer.resume)):
        for nth, (old, new) in enumerate([(first, second), (second, first)], start=1):
            with _Watch(loaded, table).running() as watch:
                since = time.perf_counter()
                end(old)
                _wait_until(lambda: six.is_master(new))  # noqa: B023
                promoted_s = time.perf_counter() - since
                watch.wait_for_answers(time.perf_counter())
            figures = {"promoted_after_s": promoted_s, **watch.figures(since)}
            report.add({"work": f"master {how}", "node_timeout_s": node_timeout_s, "nth": nth}, figures)
            begin(old)
            _wait_until(lambda: not six.is_master(old))  # noqa: B023
            six.wait_for_replica(old, of=new)
            six.wait_whole()


def _asked_for(report: Report, loaded: _Loaded, six: RedisClusterServers, table: RedisDatabase) -> None:
    first, second = six.masters[0], six.servers[3]
    for nth, (old, new) in enumerate([(first, second), (second, first)], start=1):
        with _Watch(loaded, table).running() as watch:
            since = time.perf_counter()
            six.promote(new)
            promoted_s = time.perf_counter() - since
        report.add({"work": "CLUSTER FAILOVER", "nth": nth}, {"promoted_after_s": promoted_s, **watch.figures(since)})
        six.wait_for_replica(old, of=new)


def _redirections(cluster: RedisClusterServers) -> Counter[str]:
    counts: Counter[str] = Counter()
    for server in cluster.servers:
        with server.client() as client:
            for name, found in client.info("errorstats").items():
                counts[name.removeprefix("errorstat_")] += found["count"]
    return counts


def _moved(
    report: Report,
    loaded: _Loaded,
    cluster: RedisClusterServers,
    table: RedisDatabase,
    partitions: int,
    *,
    atomically: bool = False,
) -> None:
    slot = KeyPartition(_TAG, 0).slot
    for nth in range(1, len(cluster.masters) + 1):
        before = _redirections(cluster)
        with _Watch(loaded, table).running() as watch:
            since = time.perf_counter()
            if atomically:
                cluster.move_slot_atomically(slot)
            else:
                cluster.move_slot(slot)
            moved_s = time.perf_counter() - since
        after = _redirections(cluster)
        figures = {
            "moved_s": moved_s,
            **watch.figures(since),
            "moved_replies": after["MOVED"] - before["MOVED"],
            "ask_replies": after["ASK"] - before["ASK"],
        }
        how = "CLUSTER MIGRATESLOTS" if atomically else "MIGRATE"
        report.add({"work": "slot moved", "how": how, "rows": loaded.keys.size // partitions, "nth": nth}, figures)


def _memory(report: Report, program: Path, dim: int, rows: int) -> None:
    rng = np.random.default_rng(report.seed)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)))
    with (
        tempfile.TemporaryDirectory(prefix="hps-bench-redis-memory-") as directory,
        RedisServer(Path(directory), program=str(program)) as server,
        closing(RedisDatabase(server.address, num_partitions=_PARTITIONS)) as database,
        server.client() as client,
    ):
        database.open_table(_TAG, dim)
        database.insert(_TAG, keys[:100], np.ones((100, dim), np.float32))
        before = client.info("memory")["used_memory"]
        database.insert(_TAG, keys[100:], np.ones((keys.size - 100, dim), np.float32))
        facts = client.info()
        used = facts["used_memory"] - before
    figures = {
        "bytes_per_row": used / (keys.size - 100),
        "planned_bytes_per_row": _PARTITIONS * partition_bytes(dim, keys.size // _PARTITIONS) / keys.size,
        "version": facts.get("valkey_version", facts["redis_version"]),
        "allocator": facts["mem_allocator"],
    }
    report.add({"work": "memory", "program": facts.get("server_name", "redis"), "dim": dim, "rows": keys.size}, figures)
