"""One side of `python -m benchmarks compare`: `compare_cases.py CASE SHARED OWN DEVICE`, which serves one case of a checkout.

The checkout is that of PYTHONPATH; only its public API is used, since it may be much older than this file. A case that is ready
prints a line of JSON with the figures of its start. It then answers each line, a number of seconds, by the figures of a
measurement. All figures are times, in the unit that ends their name. Answers are checked before anything is timed.

SHARED holds the model files, which both sides read; OWN is this side's alone. DEVICE is `cpu` or `cuda`.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import numpy as np
import served  # from this file's directory: `benchmarks` is the other checkout's

import hps

_Measure = Callable[[float], dict[str, float]]
_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM-DCNv2
_ALPHA, _ROTATION, _PATIENCE_S = 1.05, 16, 120.0


class Side:
    """Where a case runs: its directories and its device."""

    def __init__(self, shared: Path, own: Path, device: str) -> None:
        self.shared, self.own, self.device = shared, own, device
        self.start: dict[str, float] = {}

    def table(self, rows: int, dim: int) -> str:
        """Model files of a table whose keys are 0 to `rows` - 1; written once for both sides."""
        place = self.shared / f"table-{rows}-{dim}"
        if not place.exists():
            made = Path(f"{place}.{os.getpid()}")
            made.mkdir(parents=True)
            np.arange(rows, dtype=np.int64).tofile(made / "key")
            with (made / "emb_vector").open("wb") as file:
                for start in range(0, rows, 1 << 16):
                    vectors_of(np.arange(start, min(rows, start + (1 << 16))), dim).tofile(file)
            try:
                made.rename(place)
            except OSError:  # the other side was faster
                shutil.rmtree(made)
        return str(place)

    def model(self, rows: int, dims: Sequence[int], name: str = "m", **settings: Any) -> dict[str, Any]:
        """The entry of a model of tables that have so many rows each."""
        return served.model([self.table(rows, dim) for dim in dims], dims, name, **{"max_batch_size": 1 << 17, **settings})

    def document(self, *models: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """A configuration for this side's device."""
        return served.document(*models, **{"device": self.device, **settings})

    @contextmanager
    def started(self, *models: dict[str, Any], **settings: Any) -> Iterator[Any]:
        """A parameter server, whose start is timed."""
        started = time.perf_counter()
        with hps.HPS(self.document(*models, **settings)) as server:
            self.start = {"start_s": time.perf_counter() - started}
            yield server


def vectors_of(keys: Any, dim: int) -> Any:
    """The (n, dim) float32 vectors of keys."""
    return (((keys[:, None] * 2654435761 + np.arange(dim) * 40503) >> 7) & 0xFFFFFF).astype(np.float32)


def power_law(rng: np.random.Generator, rows: int, count: int) -> Any:
    """Draw keys by popularity, by the generator of NVE's and HugeCTR's benchmarks."""
    g = 1 - _ALPHA
    ranks = ((rng.random(count) * (float(rows) ** g - 1) + 1) ** (1 / g)).astype(np.int64)
    return np.minimum(ranks - 1, rows - 1) * 0x9E3779B1 % rows


def check(found: Any, keys: Any, dim: int) -> None:
    """Fail unless these are the vectors of the keys."""
    found = np.asarray(found.cpu() if hasattr(found, "cpu") else found).reshape(keys.size, dim)
    if not np.array_equal(found, vectors_of(keys, dim)):
        raise SystemExit("a lookup gave wrong vectors; nothing is measured")


def call_us(call: Callable[[int], Any], seconds: float) -> float:
    """Microseconds of a call: the lower quartile of as many as the time allows, since disturbances only add to a time."""
    taken, started, i = [], time.perf_counter(), 0
    while (start := time.perf_counter()) < started + seconds or len(taken) < 3:
        call(i)
        if start >= started + seconds / 10:
            taken.append(time.perf_counter() - start)
        i += 1
    return 1e6 * float(np.quantile(taken, 0.25))


def timed_s(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measures(**calls: Callable[[int], Any]) -> _Measure:
    """Share the seconds of a measurement among calls, whose figures are named after them."""
    return lambda seconds: {f"{name}_us": call_us(call, seconds / len(calls)) for name, call in calls.items()}


# -- on a CPU ---------------------------------------------------------------------------------------------------------


@contextmanager
def in_process(side: Side) -> Iterator[_Measure]:
    """Lookups from Python of keys that the embedding cache has, and by popularity where it has a tenth of the rows."""
    rows, dim, rng = 200_000, 32, np.random.default_rng(1)
    few = side.model(rows, [dim], name="few", gpucacheper=0.1, cache_refresh_percentage_per_iteration=0.0)
    many = side.model(20_000, [16] * 26, name="many", embedding_cache_type="static")
    with side.started(side.model(rows, [dim], embedding_cache_type="static"), few, many) as server:
        sets = [rng.integers(0, rows, 1000) for _ in range(_ROTATION)]
        popular = [power_law(rng, rows, 10_000) for _ in range(_ROTATION)]
        tables = [{f"t{t}": rng.integers(0, 20_000, 1000) for t in range(26)} for _ in range(4)]
        bags = [{"t0": hps.Bags(rng.integers(0, rows, (1024, 20)))} for _ in range(4)]
        out = np.empty((1000, dim), np.float32)
        for keys in sets:
            check(server.lookup(keys, "m", 0), keys, dim)
        for keys in popular:
            check(server.lookup(keys, "few", 0), keys, dim)
        yield measures(
            lookup_1000=lambda i: server.lookup(sets[i % _ROTATION], "m", 0),
            fromdlpack_1000=lambda i: server.lookup_fromdlpack(sets[i % _ROTATION], out, "m", 0),
            tables_26x1000=lambda i: server.lookup_tables(tables[i % 4], "many"),
            pooled_1024x20=lambda i: server.lookup_pooled(bags[i % 4], "m"),
            popular_10k_tenth_cached=lambda i: server.lookup(popular[i % _ROTATION], "few", 0),
        )


def _database(side: Side, rows: int, looked_up: int, inserted: int, **settings: Any) -> Iterator[_Measure]:
    """Lookups and inserts of one database, without an embedding cache."""
    dim, rng = 32, np.random.default_rng(1)
    with side.started(side.model(rows, [dim], gpucache=False), **settings) as server:
        sets = [rng.integers(0, rows, looked_up) for _ in range(4)]
        changes = [(keys, vectors_of(keys, dim)) for keys in (rng.permutation(rows)[:inserted] for _ in range(4))]
        for keys in sets:
            check(server.lookup(keys, "m", 0), keys, dim)
        yield measures(
            **{
                f"lookup_{looked_up}": lambda i: server.lookup(sets[i % 4], "m", 0),
                f"insert_{inserted}": lambda i: server.insert(*changes[i % 4], "m", 0),
            }
        )


@contextmanager
def hash_map(side: Side) -> Iterator[_Measure]:
    """The hash map alone."""
    yield from _database(side, 1_000_000, 100_000, 20_000)


@contextmanager
def rocks_db(side: Side) -> Iterator[_Measure]:
    """RocksDB alone."""
    persistent = {"type": "rocks_db", "path": str(side.own / "rocksdb")}
    yield from _database(side, 1_000_000, 10_000, 5_000, volatile_db={"type": "disabled"}, persistent_db=persistent)


@contextmanager
def redis(side: Side) -> Iterator[_Measure]:
    """One Redis server alone."""
    with _redis(side) as address:
        volatile = {"type": "redis_cluster", "address": address}
        yield from _database(side, 200_000, 10_000, 10_000, volatile_db=volatile)


@contextmanager
def http(side: Side) -> Iterator[_Measure]:
    """`hps serve` with 1,000 keys a request from four connections, in three forms."""
    rows, dim, count = 100_000, 32, 1000
    rng = np.random.default_rng(1)
    keys = [rng.integers(0, rows, count) for _ in range(8)]
    path = side.own / "ps.json"
    path.write_text(json.dumps(side.document(side.model(rows, [dim], max_batch_size=count, embedding_cache_type="static"))))
    port, started = served.free_port(), time.perf_counter()
    with served.serving(("hps", "serve", path, "--port", port), port, side.own / "log") as service:
        side.start = {"start_s": time.perf_counter() - started}
        client = _Client(service)
        tensors = [{"name": "t0", "shape": [count], "datatype": "INT64", "data": part.tolist()} for part in keys]
        forms = {
            "binary": [served.binary_post("/v2/models/m/infer", {"t0": part}) for part in keys],
            "json": [served.json_post("/v2/models/m/infer", {"inputs": [tensor]}) for tensor in tensors],
            "curl": [served.json_post("/v1/models/m/lookup", {"tables": {"t0": part.tolist()}}) for part in keys],
        }
        for form, requests in forms.items():
            for request, part in zip(requests, keys, strict=True):
                _, _, body = client.exchange(request).partition(b"\r\n\r\n")
                if form == "binary":
                    vectors: Any = served.float_tail(memoryview(body), count * dim)
                else:
                    answer = json.loads(body)
                    vectors = answer["outputs"][0]["data"] if form == "json" else answer["tables"]["t0"]
                check(np.array(vectors, np.float32), part, dim)

        def measure(seconds: float) -> dict[str, float]:
            figures = {}
            for form, requests in forms.items():
                wall_us, processor_us = client.load(requests, seconds / len(forms))
                figures |= {f"{form}_us": wall_us, f"{form}_server_cpu_us": processor_us}
            return figures

        yield measure


class _Client:
    """A closed loop of four connections of one thread."""

    def __init__(self, service: served.Running) -> None:
        self._address, self._service = ("127.0.0.1", service.port), service

    def exchange(self, request: bytes) -> bytes:
        with socket.create_connection(self._address, 30) as connection:
            connection.sendall(request)
            return self._answer(connection)

    def load(self, requests: list[bytes], seconds: float) -> tuple[float, float]:
        """Return the wall time and the server's processor time of a request, in microseconds."""
        with ExitStack() as stack, DefaultSelector() as selector:
            for i in range(4):
                connection = stack.enter_context(socket.create_connection(self._address, 30))
                selector.register(connection, EVENT_READ)
                connection.sendall(requests[i])
            started, before, answered = time.perf_counter(), self._service.processor_s(), 0
            while time.perf_counter() < started + seconds:
                for key, _ in selector.select(5):
                    connection = key.fileobj  # type: ignore[assignment]
                    self._answer(connection)
                    answered += 1
                    connection.sendall(requests[answered % len(requests)])
            wall_s, processor_s = time.perf_counter() - started, self._service.processor_s() - before
            for key in list(selector.get_map().values()):
                self._answer(key.fileobj)  # type: ignore[arg-type]
            return 1e6 * wall_s / max(1, answered), 1e6 * processor_s / max(1, answered)

    @staticmethod
    def _answer(connection: socket.socket) -> bytes:
        got = connection.recv(1 << 18)
        while (end := got.find(b"\r\n\r\n")) < 0:
            got += _more(connection, 1 << 18)
        if not got.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request failed: {got[:500]!r}")
        found = re.search(rb"(?<!-)\bcontent-length: *(\d+)", got[:end], re.IGNORECASE)
        if found is None:
            raise SystemExit(f"an answer has no length: {got[:500]!r}")
        parts, missing = [got], int(found[1]) - (len(got) - end - 4)
        while missing > 0:
            parts.append(_more(connection, 1 << 18))
            missing -= len(parts[-1])
        return b"".join(parts)


def _more(connection: socket.socket, count: int) -> bytes:
    if not (got := connection.recv(count)):
        raise SystemExit("a connection ended in the middle of an answer")
    return got


@contextmanager
def updates(side: Side) -> Iterator[_Measure]:
    """Rows published to a Redis stream, and a replica that starts in front of them; RocksDB and a cache of half the rows."""
    rows, dim, total, rng = 100_000, 32, 400_000, np.random.default_rng(1)
    with _redis(side) as address:
        source = {"type": "redis_stream", "address": address}
        model = side.model(rows, [dim], gpucacheper=0.5, max_batch_size=rows)

        def replica(name: str) -> dict[str, Any]:
            persistent = {"type": "rocks_db", "path": str(side.own / name)}
            return side.document(model, volatile_db={"type": "disabled"}, persistent_db=persistent, update_source=source)

        def publish(publisher: Any) -> None:
            for _ in range(total // rows):
                keys = rng.permutation(rows)
                publisher.insert(keys, vectors_of(keys, dim))
            publisher.flush()

        config = side.own / "ps.json"
        config.write_text(json.dumps(replica("rocksdb")))
        with hps.open_publisher(str(config), "m", "t0", create_partitions=4) as publisher:
            side.start = {"publish_s": timed_s(lambda: publish(publisher))}

        def measure(_seconds: float) -> dict[str, float]:
            place = f"rocksdb-{time.monotonic_ns()}"
            with hps.HPS(replica(place)) as server:
                samples: list[tuple[float, int]] = []
                while not samples or samples[-1][1] < total:
                    samples.append((time.perf_counter(), server.updates()[0].rows))
                    if samples[-1][0] > samples[0][0] + _PATIENCE_S:
                        raise SystemExit(f"the replica does not catch up: {server.updates()}")
                    time.sleep(0.002)
                keys = rng.integers(0, rows, 1000)
                check(server.lookup(keys, "m", 0), keys, dim)
            shutil.rmtree(side.own / place, ignore_errors=True)
            start, before = next(sample for sample in samples if sample[1])
            end, after = samples[-1]
            return {"catch_up_us_per_1000_rows": 1e9 * (end - start) / max(1, after - before)}

        yield measure


@contextmanager
def sources(side: Side) -> Iterator[_Measure]:
    """A start that loads 128 MB of wide rows into the hash map, and writing them, for each place of HPS_COMPARE_SOURCES."""
    rows, dim, rng = 65_536, 512, np.random.default_rng(1)
    side.table(rows, dim)
    keys, vectors = np.arange(rows), vectors_of(np.arange(rows), dim)
    places = {"local": str(side.own), **json.loads(os.environ.get("HPS_COMPARE_SOURCES", "{}"))}
    for place in places.values():
        hps.write_sparse_model(f"{place}/{side.own.name}/first", (keys, vectors), overwrite=True)

    def read(path: str) -> None:
        with hps.HPS(side.document(side.model(rows, [dim], gpucache=False) | {"sparse_files": [path]})) as server:
            requested = rng.integers(0, rows, 100)
            check(server.lookup(requested, "m", 0), requested, dim)

    def measure(_seconds: float) -> dict[str, float]:
        figures = {}
        for name, place in places.items():
            figures[f"load_{name}_s"] = timed_s(lambda place=place: read(f"{place}/{side.own.name}/first"))
            target = f"{place}/{side.own.name}/written"  # replaced each time
            figures[f"write_{name}_s"] = timed_s(
                lambda target=target: hps.write_sparse_model(target, (keys, vectors), overwrite=True)
            )
        return figures

    yield measure


@contextmanager
def _redis(side: Side) -> Iterator[str]:
    """A Redis server of this side's own."""
    port = served.free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(side.own)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


# -- on a GPU, with torch's tensors; DEVICE `cpu` runs the same with tensors in host memory, to see that it works ----------


class _Torch:
    """torch with its tensors on the side's device."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.on_gpu = torch, device == "cuda"
        self.device = torch.device(device)

    def keys(self, keys: Any) -> Any:
        return self.torch.from_numpy(keys).to(self.device)

    def empty(self, *shape: int) -> Any:
        return self.torch.empty(*shape, device=self.device)

    def sync(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def waited(self, call: Callable[[int], Any]) -> Callable[[int], Any]:
        """The call until the device is done."""
        return lambda i: (call(i), self.sync())

    def graph(self, forward: Callable[[], Any]) -> Any:
        """A CUDA graph of a call that does not wait; None on a CPU."""
        if not self.on_gpu:
            return None
        side = self.torch.cuda.Stream()
        with self.torch.cuda.stream(side):
            for _ in range(3):
                forward()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            forward()
        return graph

    def device_us(self, replay: Callable[[], Any], seconds: float) -> float:
        """Device time of one replay, the median of runs of 20."""
        cuda, taken = self.torch.cuda, []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 4:
            start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            for _ in range(20):
                replay()
            stop.record()
            stop.synchronize()
            taken.append(start.elapsed_time(stop) * 1e3 / 20)
        return float(np.median(taken[1:]))

    def measure(self, calls: dict[str, Callable[[int], Any]], graphs: dict[str, Any]) -> _Measure:
        """Wall times of calls, and device times of graphs."""
        graphs = {name: graph for name, graph in graphs.items() if graph is not None}
        share = len(calls) + len(graphs)

        def measure(seconds: float) -> dict[str, float]:
            self._wake()
            figures = {f"{name}_us": call_us(self.waited(call), seconds / share) for name, call in calls.items()}
            for name, graph in graphs.items():
                figures[f"{name}_device_us"] = self.device_us(graph.replay, seconds / share)
            return figures

        return measure

    def _wake(self) -> None:
        """Keep the GPU busy for a moment: an idle one has low clocks."""
        if self.on_gpu:
            square, end = self.torch.ones(4096, 4096, device=self.device), time.perf_counter() + 0.1
            while time.perf_counter() < end:
                self.torch.mm(square, square)
                self.torch.cuda.synchronize()


@contextmanager
def gpu_query(side: Side) -> Iterator[_Measure]:
    """Lookups of resident keys: small ones from Python, 26 tables, and large ones in CUDA graphs."""
    on, rng = _Torch(side.device), np.random.default_rng(1)
    rows = 1 << (20 if on.on_gpu else 14)
    whole = {"embedding_cache_type": "static", "max_batch_size": rows}
    many = side.model(20_000, [16] * 26, name="many", **whole)
    with side.started(side.model(rows, [32, 128], **whole), many) as server:
        sets = [rng.integers(0, rows, 4096) for _ in range(_ROTATION)]
        small, out = [on.keys(keys) for keys in sets], on.empty(4096, 32)
        for keys, tensor in zip(sets, small, strict=True):
            server.lookup_fromdlpack(tensor, out, "m", 0)
            on.sync()
            check(out, keys, 32)
        counts, runs = [1024] * 26, [on.keys(rng.integers(0, 20_000, 26 * 1024)) for _ in range(4)]
        concatenated = on.empty(26 * 1024 * 16)
        graphs: dict[str, Any] = {}
        with ExitStack() as stack:
            for dim, table in ((32, 0), (128, 1)):
                for n in (1 << 16, rows) if on.on_gpu else ():
                    keys = rng.integers(0, rows, n)
                    answers, requested = on.empty(n, dim), on.keys(keys)
                    graph = stack.enter_context(server.capture(requested, answers, "m", table))
                    answers.fill_(float("nan"))
                    graph.replay()
                    on.sync()
                    check(answers, keys, dim)
                    graphs[f"captured_{n}x{dim}"] = graph
            yield on.measure(
                {
                    "fromdlpack_4096x32": lambda i: server.lookup_fromdlpack(small[i % _ROTATION], out, "m", 0),
                    "concatenated_26x1024x16": lambda i: server.lookup_concatenated(runs[i % 4], counts, concatenated, "many"),
                },
                graphs,
            )


@contextmanager
def gpu_misses(side: Side) -> Iterator[_Measure]:
    """Keys that all miss, by the link and by a copy; keys by popularity, and few keys, of which a tenth does."""
    on, rng = _Torch(side.device), np.random.default_rng(1)
    rows = 1 << (21 if on.on_gpu else 15)
    large, dim, paths = (1 << 18 if on.on_gpu else 1 << 13), 128, ("link", "copy") if on.on_gpu else ("copy",)
    cold = {"cache_refresh_percentage_per_iteration": 0.0, "max_batch_size": 1 << 18}
    models = [side.model(rows, [dim], name=path, miss_path=path, gpucacheper=0.01, **cold) for path in paths]
    mixed = side.model(rows, [dim], name="mixed", miss_path=paths[0], gpucacheper=0.1, **cold)
    narrow = side.model(rows, [32], name="narrow", miss_path=paths[0], gpucacheper=0.1, **cold)
    with side.started(*models, mixed, narrow) as server:
        order = rng.permutation(rows)
        calls: dict[str, Callable[[int], Any]] = {}
        for n in (large // 8, large):
            sets = [on.keys(order[(i * n) % (rows - n) :][:n].copy()) for i in range(min(32, rows // n - 1))]
            out = on.empty(n, dim)
            for path in paths:

                def missing(i: int, path: str = path, sets: list[Any] = sets, out: Any = out) -> None:
                    server.lookup_fromdlpack(sets[i % len(sets)], out, path, 0)

                for i, keys in enumerate(sets[:3]):
                    missing(i)
                    on.sync()
                    check(out, np.asarray(keys.cpu()), dim)
                calls[f"{path}_{n}x{dim}"] = missing
        for name, width in (("mixed", dim), ("narrow", 32)):
            popular, answers = [on.keys(power_law(rng, rows, large)) for _ in range(64)], on.empty(large, width)

            def by_popularity(i: int, name: str = name, popular: list[Any] = popular, answers: Any = answers) -> None:
                server.lookup_fromdlpack(popular[i % 64], answers, name, 0)

            for i in range(192):
                by_popularity(i)
            on.sync()
            check(answers, np.asarray(popular[191 % 64].cpu()), width)
            calls[f"popular_{large}x{width}_tenth_cached"] = by_popularity
        hot, few, answers = order[: rows // 64], min(4096, rows // 64), on.empty(min(4096, rows // 64), 32)
        cold = order[rows // 64 :][: (rows - rows // 64) // (few // 10) * (few // 10)].reshape(-1, few // 10)
        hits = [on.keys(rng.choice(hot, few)) for _ in range(_ROTATION)]
        some = [on.keys(rng.permutation(np.concatenate([rng.choice(hot, few - part.size), part]))) for part in cold]
        requested = on.keys(rng.choice(hot, few))
        for _ in range(20):
            server.lookup_fromdlpack(on.keys(hot), on.empty(hot.size, 32), "narrow", 0)
        with ExitStack() as stack:
            graph = stack.enter_context(server.capture(requested, answers, "narrow", 0)) if on.on_gpu else None
            for name, sets in (("resident", hits), ("tenth_missing", some)):

                def small(i: int, sets: list[Any] = sets) -> None:
                    server.lookup_fromdlpack(sets[i % len(sets)], answers, "narrow", 0)

                def captured(i: int, sets: list[Any] = sets) -> None:
                    requested.copy_(sets[i % len(sets)])
                    graph.replay()  # type: ignore[union-attr]

                for way, call in {"": small, **({"captured_": captured} if graph else {})}.items():
                    call(1)
                    on.sync()
                    check(answers, np.asarray(sets[1].cpu()), 32)
                    calls[f"{way}{few}x32_{name}"] = call
            yield on.measure(calls, {})


@contextmanager
def gpu_pooled(side: Side) -> Iterator[_Measure]:
    """Sums of bags of resident keys of 26 tables, and the layer of them, from Python and in CUDA graphs."""
    from hps.torch import BagTable, EmbeddingBagCollection, LookupLayer

    on, rng = _Torch(side.device), np.random.default_rng(1)
    rows, batch, count = 1 << (16 if on.on_gpu else 10), 4096 if on.on_gpu else 64, len(_HOTNESS)
    tables: dict[int, dict[str, Any]] = {}
    settings = {"embedding_cache_type": "static", "maxnum_catfeature_query_per_table_per_sample": list(_HOTNESS)}
    models = [side.model(rows, [dim] * count, name=f"d{dim}", max_batch_size=batch, **settings) for dim in (32, 128)]
    with side.started(*models) as server, on.torch.no_grad():
        keys = [rng.integers(0, rows, (batch, hot)) for hot in _HOTNESS]
        on_device = [on.keys(each) for each in keys]
        calls: dict[str, Callable[[int], Any]] = {}
        graphs: dict[str, Any] = {}
        for dim in (32, 128):
            tables[dim] = {f"t{t}": hps.Bags(each) for t, each in enumerate(on_device)}
            out = on.empty(batch, dim * count)

            def pooled(i: int = 0, dim: int = dim, out: Any = out, wait: bool = True) -> Any:
                return server.lookup_pooled(tables[dim], f"d{dim}", 0, out=out, wait=wait)

            pooled()
            on.sync()
            found = np.asarray(out.cpu()).reshape(batch, count, dim)
            for t, each in enumerate(keys):
                exact = vectors_of(each.reshape(-1), dim).astype(np.float64).reshape(batch, -1, dim).sum(1)
                np.testing.assert_allclose(found[:, t], exact, rtol=1e-5)
            calls[f"pooled_dim{dim}"] = pooled
            graphs[f"pooled_dim{dim}"] = on.graph(lambda pooled=pooled: pooled(wait=False))
        bag_tables = [BagTable(f"t{t}", [f"f{t}"], 32) for t in range(count)]
        features = {f"f{t}": each for t, each in enumerate(on_device)}
        layer = EmbeddingBagCollection(server, "d32", bag_tables)
        lookup, requested = LookupLayer(server, "d32", 2, 32), on_device[2].reshape(-1)
        check(lookup(requested), keys[2].reshape(-1), 32)
        layer(features)
        calls |= {"layer_of_bags_dim32": lambda _i: layer(features), "lookup_layer_dim32": lambda _i: lookup(requested)}
        if on.on_gpu:
            unwaited = EmbeddingBagCollection(server, "d32", bag_tables, wait=False)
            graphs["layer_of_bags_dim32"] = on.graph(lambda: unwaited(features))
        yield on.measure(calls, graphs)
        for graph in filter(None, graphs.values()):
            graph.reset()


CPU_CASES = (in_process, hash_map, rocks_db, redis, http, updates, sources)
GPU_CASES = (gpu_query, gpu_misses, gpu_pooled)
CASES = {case.__name__: case for case in (*CPU_CASES, *GPU_CASES)}


def main() -> None:
    """Serve one case until standard input ends."""
    name, shared, own, device = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    checkout = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()
    if Path(hps.__file__).resolve().parents[1] != checkout:
        raise SystemExit(f"hps is that of {Path(hps.__file__).parents[1]}, expected that of {checkout}")
    side = Side(Path(shared), Path(own), device)
    with CASES[name](side) as measure:
        measure(0.2)
        print(json.dumps(side.start), file=answers)
        for line in sys.stdin:
            print(json.dumps(measure(float(line))), file=answers)


if __name__ == "__main__":
    main()
