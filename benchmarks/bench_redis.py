"""Redis: vectors fetched and loaded, against redis-py and against what the server and the socket allow.

The limit ("socket") sends the very bytes of our requests, prepared before, and throws the replies away, with the same
chunks and about as many outstanding. The peer is redis-py with hiredis on the same hashes: a pipeline of HMGET a partition,
brought to one array; HSET with a mapping for loading. All contestants take turns, call by call, each time in another order
and on other keys of the same set.

Axes: what is done, servers (1, or the masters of a cluster), dim, batch, hit rate. A server is limited by its one thread;
client and servers share the processor with each other here.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import redis
from redis.cluster import ClusterNode, RedisCluster

from benchmarks.harness import Report, require, scratch
from hps.stores.base import LoadRecord
from hps.stores.redis.codec import group_by_partition
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import KeyPartition, RedisLayout
from hps.stores.redis.nodes import parse_addresses
from hps.stores.redis.requests import Buffer, FetchRows, Request, StoreRows
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray
from tests.servers.redis_server import RedisClusterServers, RedisServer

_TAG = "hps_et.bench.table"
_PARTITIONS = 16
_CHUNK = 4096
_WINDOW = 2 << 20
_LOAD_ROWS = 65_536
Contestant = Callable[[int], object]


def run(report: Report, quick: bool) -> None:
    """Measure fetching and loading; every answer is checked first."""
    rounds = 3 if quick else 21
    with scratch("redis") as directory:
        with RedisServer(directory / "server") as server:
            report.about["redis"] = server.client().info("server")["redis_version"]
            report.about["partitions"] = _PARTITIONS
            for dim in (32,) if quick else (16, 32, 128):
                rows = (20_000 if quick else 200_000) * 32 // max(32, dim)
                _measure(report, server.address, [server], dim, rows, rounds)
        with RedisClusterServers(directory / "cluster") as cluster:
            _measure(report, cluster.address, cluster.masters, 32, 20_000 if quick else 200_000, rounds)


def _measure(report: Report, address: str, servers: list[RedisServer], dim: int, rows: int, rounds: int) -> None:
    rng = np.random.default_rng(report.seed)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)))
    vectors = rng.random((keys.size, dim), dtype=np.float32)
    with (
        closing(RedisDatabase(address, num_partitions=_PARTITIONS)) as database,
        closing(_Peer(parse_addresses(address)[0], len(servers) > 1, dim)) as peer,
        closing(_RawSocket(servers[0], dim)) as raw,
    ):
        database.open_table(_TAG, dim)
        table = _Table(report, database, peer, raw, {"servers": len(servers), "dim": dim}, keys, vectors)
        table.load(max(3, rounds // 3))
        batches = (1_000, 10_000, 100_000) if dim == 32 else (10_000,)
        for batch in (size for size in batches if size <= keys.size):
            for hit_rate in (1.0, 0.9, 0.0) if (dim, batch) == (32, 10_000) else (1.0,):
                table.fetch(batch, hit_rate, rounds)
        database.drop_table(_TAG)


@dataclass
class _Table:
    """One table, and the contestants that fetch it and load it. The raw socket takes part where there is one server."""

    report: Report
    database: RedisDatabase
    peer: "_Peer"
    raw: "_RawSocket"
    axes: dict[str, int]
    keys: KeyArray
    vectors: FloatArray

    def fetch(self, batch: int, hit_rate: float, rounds: int) -> None:
        rng = np.random.default_rng(self.report.seed + batch)
        picks = [rng.choice(self.keys.size, batch) for _ in range(rounds)]
        absent = [rng.random(batch) >= hit_rate for _ in range(rounds)]
        requested = [np.where(absent[i], ~self.keys[picks[i]] ^ 1 << 40, self.keys[picks[i]]) for i in range(rounds)]
        out, found = np.empty((batch, self.vectors.shape[1]), np.float32), np.empty(batch, np.bool_)

        def ours(i: int) -> None:
            found[:] = False
            self.database.fetch(_TAG, requested[i], out, found)

        ours(0)
        require((found == ~absent[0]).all() and (out[found] == self.vectors[picks[0]][found]).all())
        answer, mask = self.peer.fetch(requested[0])
        require((mask == found).all() and (answer[mask] == out[mask]).all(), "an answer of redis-py")
        contestants: dict[str, Contestant] = {"ours": ours, "redis_py": lambda i: self.peer.fetch(requested[i])}
        if self.axes["servers"] == 1:
            requests = [self.raw.fetch_requests(requested[i], absent[i]) for i in range(rounds)]
            contestants["socket"] = lambda i: self.raw.exchange(requests[i])
        figures = _take_turns(contestants, rounds, batch, "keys")
        self.report.add({"work": "fetch", **self.axes, "batch": batch, "hit_rate": hit_rate}, figures)

    def load(self, rounds: int) -> None:
        """Load the table; then let every contestant insert some rows into an empty one, and load it again."""
        rows = self.keys.size
        for start in range(0, rows, _LOAD_ROWS):
            chunk = slice(start, min(start + _LOAD_ROWS, rows))
            self.database.load_chunk(_TAG, self.keys[chunk], self.vectors[chunk], LoadRecord("bench", chunk.stop, rows))
        out, found = np.empty_like(self.vectors), np.zeros(rows, np.bool_)
        self.database.fetch(_TAG, self.keys, out, found)
        require(found.all() and (out == self.vectors).all(), "a row that was loaded")
        keys, vectors = self.keys[:_LOAD_ROWS], self.vectors[:_LOAD_ROWS]
        contestants: dict[str, Contestant] = {
            "ours": lambda _: self.database.insert(_TAG, keys, vectors),
            "redis_py": lambda _: self.peer.insert(keys, vectors),
        }
        if self.axes["servers"] == 1:
            requests = self.raw.insert_requests(keys, vectors)
            contestants["socket"] = lambda _: self.raw.exchange(requests)

        def empty() -> None:
            self.database.drop_table(_TAG)
            self.database.open_table(_TAG, vectors.shape[1])
            time.sleep(0.05)  # Redis frees what was dropped in the background

        figures = _take_turns(contestants, rounds, keys.size, "vectors", before=empty)
        self.report.add({"work": "load", **self.axes, "batch": keys.size}, figures)
        for start in range(0, rows, _LOAD_ROWS):
            self.database.insert(_TAG, self.keys[start : start + _LOAD_ROWS], self.vectors[start : start + _LOAD_ROWS])


def _take_turns(
    contestants: dict[str, Contestant], rounds: int, count: int, unit: str, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(-1, rounds):  # one turn untimed
        for turn in range(len(names)):
            place = (i + turn) % len(names)
            # Other keys than the last contestant's, whose rows the server now has in its caches.
            keys = (i + place * rounds // len(names)) % rounds
            before()
            start = time.perf_counter()
            contestants[names[place]](keys)
            if i >= 0:
                seconds[names[place]].append(time.perf_counter() - start)
    figures = {f"{name}_{unit}_per_s": count / float(np.median(times)) for name, times in seconds.items()}
    figures["ours_p99_s"] = float(np.quantile(seconds["ours"], 0.99))
    for name in contestants:
        if name != "ours":
            ratios = np.array(seconds[name]) / np.array(seconds["ours"])
            figures[f"ours_to_{name}"] = float(np.median(ratios))
    return figures


class _RawSocket:
    """Sends the bytes of prepared requests, about as far ahead as a database does, and counts the bytes that come back."""

    def __init__(self, server: RedisServer, dim: int) -> None:
        self._layout = RedisLayout.of(_TAG, dim, _PARTITIONS)
        self._socket = socket.create_connection(("127.0.0.1", server.port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(1 << 20))

    def fetch_requests(self, keys: KeyArray, absent: BoolArray) -> list[tuple[bytes, int]]:
        """Requests, each with the size of its reply."""
        header, width = self._layout.header, 4 * self._layout.dim
        out, found = np.empty((keys.size, width), np.uint8), np.empty(keys.size, np.bool_)
        requests = []
        for partition, piece in self._pieces(keys):
            request = FetchRows(partition.slot, partition.values, keys, piece, header, out, found)
            misses = int(absent[piece].sum())
            reply = len(b"*%d\r\n" % piece.size) + 5 * misses + (header.size + width + 2) * (piece.size - misses)
            requests.append((_bytes_of(request), reply))
        return requests

    def insert_requests(self, keys: KeyArray, vectors: FloatArray) -> list[tuple[bytes, int]]:
        """Requests, each with the size of its reply, into an empty table."""
        rows = vectors.view(np.uint8)
        return [
            (
                _bytes_of(StoreRows(partition.slot, partition.values, keys, piece, self._layout.header, rows)),
                len(b":%d\r\n" % piece.size),
            )
            for partition, piece in self._pieces(keys)
        ]

    def exchange(self, requests: list[tuple[bytes, int]]) -> None:
        owed = 0
        for data, reply in requests:
            self._socket.sendall(data)
            owed += reply
            while owed > _WINDOW:
                owed -= self._socket.recv_into(self._buffer)
        while owed:
            owed -= self._socket.recv_into(self._buffer)

    def _pieces(self, keys: KeyArray) -> Iterator[tuple[KeyPartition, IndexArray]]:
        for partition, places in zip(self._layout.partitions, _places(keys), strict=True):
            for start in range(0, places.size, _CHUNK):
                yield partition, places[start : start + _CHUNK]

    def close(self) -> None:
        self._socket.close()


def _places(keys: KeyArray) -> list[IndexArray]:
    """The positions of the keys of each partition."""
    order, offsets = np.empty(keys.size, np.int64), np.empty(_PARTITIONS + 1, np.int64)
    group_by_partition(keys, np.zeros(keys.size, np.bool_), np.uint64(_PARTITIONS), order, offsets)
    return np.split(order, offsets[1:-1])


def _bytes_of(request: Request) -> bytes:
    buffer = Buffer(request.size)
    return bytes(buffer.view[: request.write(buffer, 0)])


class _Peer:
    """The same work with redis-py and hiredis, as fast as its interface allows."""

    def __init__(self, seed: tuple[str, int], clustered: bool, dim: int) -> None:
        self._dim = dim
        self._layout = RedisLayout.of(_TAG, dim, _PARTITIONS)
        if clustered:
            self._client = RedisCluster(startup_nodes=[ClusterNode(*seed)], protocol=2)
        else:
            self._client = redis.Redis(*seed, protocol=2)

    def fetch(self, keys: KeyArray) -> tuple[FloatArray, np.ndarray]:
        places = _places(keys)
        pipeline = (
            self._client.pipeline(transaction=False) if isinstance(self._client, redis.Redis) else self._client.pipeline()
        )
        for partition, place in zip(self._layout.partitions, places, strict=True):
            raw = keys[place].tobytes()
            pipeline.execute_command("HMGET", partition.values, *(raw[i : i + 8] for i in range(0, len(raw), 8)))
        out = np.zeros((keys.size, self._dim), np.float32)
        found = np.zeros(keys.size, np.bool_)
        zeros = bytes(4 * self._dim)
        for place, values in zip(places, pipeline.execute(), strict=True):
            there = np.fromiter((value is not None for value in values), np.bool_, len(values))
            if not there.all():
                values = [value or zeros for value in values]
            out[place] = np.frombuffer(b"".join(values), np.float32).reshape(-1, self._dim)
            found[place] = there
        return out, found

    def insert(self, keys: KeyArray, vectors: FloatArray) -> None:
        width = 4 * self._dim
        for partition, place in zip(self._layout.partitions, _places(keys), strict=True):
            fields, values = keys[place].tobytes(), vectors[place].tobytes()
            mapping = {fields[8 * i : 8 * i + 8]: values[width * i : width * (i + 1)] for i in range(place.size)}
            self._client.hset(partition.values, mapping=mapping)

    def close(self) -> None:
        self._client.close()
