"""`hps.connect` beside a raw socket, urllib3, httpx and tritonclient; sockets beside shared memory.

One service with one front, and one caller, which waits for each answer. All clients are measured in turn, round after round,
with the same keys, and their vectors are compared with the model's before. `p50_us` and `cpu_us`, the caller's own processor
time for a call, are those of the best tenth of the rounds, since the machine may do other things; `p99_us` is the median of the
rounds. `relative` is `p50_us` divided by that of `hps.connect` in the same run.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton
import urllib3
from tritonclient.utils import shared_memory as regions

import hps
from benchmarks.harness import Report, require, scratch
from benchmarks.served import SERVICE, document, head, hps_serve, model

_ROWS, _DIM, _KEYS = 100_000, 32, 1_000
_PATH = "/v2/models/m/infer"
Tables = dict[str, np.ndarray]
Times = tuple[list[float], float]
Ask = Callable[[Tables], Tables]


def _vectors(table: int, keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] + 1000.0 * table + np.arange(_DIM) / 64).astype(np.float32)


def _body(tables: Tables) -> tuple[bytes, bytes]:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [keys.size], "parameters": {"binary_data_size": keys.nbytes}}
        for name, keys in tables.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return text, text + b"".join(keys.tobytes() for keys in tables.values())


def _read(body: bytes | memoryview, text_bytes: int) -> Tables:
    answer = json.loads(bytes(body[:text_bytes]))
    found, at = {}, text_bytes
    for output in answer["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(body, np.float32, size // 4, at).reshape(output["shape"])
        at += size
    return found


@contextmanager
def _raw(url: str) -> Iterator[Ask]:
    """The limit: a request that is made each time, an answer whose sizes are known from the first one."""
    host, port = url.removeprefix("http://").split(":")
    known: dict[int, tuple[int, int]] = {}  # by number of tables: size of an answer, and where its vectors begin
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def learn(tables: int) -> None:
            while b"\r\n\r\n" not in (peeked := connection.recv(1 << 16, socket.MSG_PEEK)):
                pass
            lines, _, _ = peeked.partition(b"\r\n\r\n")
            sizes = {line.split(b":")[0].lower(): int(line.split(b":")[1]) for line in lines.split(b"\r\n") if b"ength" in line}
            start = len(lines) + 4
            known[tables] = start + sizes[b"content-length"], start + sizes[b"inference-header-content-length"]

        def ask(tables: Tables) -> Tables:
            text, body = _body(tables)
            connection.sendall(head(_PATH, len(body), len(text)) + body)
            if len(tables) not in known:
                learn(len(tables))
            size, start = known[len(tables)]
            buffer = np.empty(size, np.uint8)
            view, have = memoryview(buffer), 0
            while have < size:
                have += connection.recv_into(view[have:])
            return dict(zip(tables, np.frombuffer(view[start:], np.float32).reshape(len(tables), _KEYS, _DIM), strict=True))

        yield ask


@contextmanager
def _hps(url: str) -> Iterator[Ask]:
    with hps.connect(url) as client:
        yield lambda tables: client.lookup_tables(tables, "m")


@contextmanager
def _hps_out(url: str) -> Iterator[Ask]:
    out = {f"t{table}": np.empty((_KEYS, _DIM), np.float32) for table in range(26)}
    with hps.connect(url) as client:
        yield lambda tables: client.lookup_tables(tables, "m", out=out)


@contextmanager
def _hps_shared(url: str) -> Iterator[Ask]:
    with hps.connect(url) as client:
        memory = client.shared_memory(26 * _KEYS * (8 + 4 * _DIM) + 4096)
        keys = {f"t{table}": memory.empty(_KEYS, np.int64) for table in range(26)}
        out = {f"t{table}": memory.empty((_KEYS, _DIM), np.float32) for table in range(26)}

        def ask(tables: Tables) -> Tables:
            for name, given in tables.items():
                keys[name][:] = given
            return client.lookup_tables({name: keys[name] for name in tables}, "m", out=out)

        yield ask
        client.release(memory)


@contextmanager
def _hps_asyncio(url: str) -> Iterator[Ask]:
    with asyncio.Runner() as runner:
        client = hps.connect_async(url)
        yield _InLoop(runner.get_loop(), client)
        runner.run(client.close())


class _InLoop:
    """Asks on an event loop, which is not left during a round."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: hps.AsyncClient) -> None:
        self._loop, self._client = loop, client

    def __call__(self, tables: Tables) -> Any:
        return self._loop.run_until_complete(self._client.lookup_tables(tables, "m"))

    def times(self, requests: list[Tables]) -> Times:
        return self._loop.run_until_complete(self._times(requests))

    async def _times(self, requests: list[Tables]) -> Times:
        seconds, began_cpu = [], time.process_time()
        for request in requests:
            began = time.perf_counter()
            await self._client.lookup_tables(request, "m")
            seconds.append(time.perf_counter() - began)
        return seconds, time.process_time() - began_cpu


@contextmanager
def _urllib3(url: str) -> Iterator[Ask]:
    with urllib3.PoolManager() as pool:

        def ask(tables: Tables) -> Tables:
            text, body = _body(tables)
            answer = pool.request("POST", url + _PATH, body=body, headers={"Inference-Header-Content-Length": str(len(text))})
            return _read(answer.data, int(answer.headers["Inference-Header-Content-Length"]))

        yield ask


@contextmanager
def _httpx(url: str) -> Iterator[Ask]:
    with httpx.Client(base_url=url) as client:

        def ask(tables: Tables) -> Tables:
            text, body = _body(tables)
            answer = client.post(_PATH, content=body, headers={"Inference-Header-Content-Length": str(len(text))})
            return _read(answer.content, int(answer.headers["Inference-Header-Content-Length"]))

        yield ask


@contextmanager
def _triton(url: str) -> Iterator[Ask]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:

        def ask(tables: Tables) -> Tables:
            inputs = []
            for name, keys in tables.items():
                inputs.append(triton.InferInput(name, list(keys.shape), "INT64"))
                inputs[-1].set_data_from_numpy(keys)
            answer = client.infer("m", inputs)
            return {name: answer.as_numpy(name) for name in tables}

        yield ask


@contextmanager
def _triton_shared(url: str) -> Iterator[Ask]:
    key_bytes, vector_bytes = 8 * _KEYS, 4 * _KEYS * _DIM
    keys = regions.create_shared_memory_region("bench-keys", "/hps-bench-keys", 26 * key_bytes)
    vectors = regions.create_shared_memory_region("bench-vectors", "/hps-bench-vectors", 26 * vector_bytes)
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        client.register_system_shared_memory("bench-keys", "/hps-bench-keys", 26 * key_bytes)
        client.register_system_shared_memory("bench-vectors", "/hps-bench-vectors", 26 * vector_bytes)

        def ask(tables: Tables) -> Tables:
            regions.set_shared_memory_region(keys, list(tables.values()))
            inputs, outputs = [], []
            for nth, name in enumerate(tables):
                inputs.append(triton.InferInput(name, [_KEYS], "INT64"))
                inputs[-1].set_shared_memory("bench-keys", key_bytes, nth * key_bytes)
                outputs.append(triton.InferRequestedOutput(name))
                outputs[-1].set_shared_memory("bench-vectors", vector_bytes, nth * vector_bytes)
            client.infer("m", inputs, outputs=outputs)
            return {
                name: regions.get_contents_as_numpy(vectors, np.float32, [_KEYS, _DIM], nth * vector_bytes)
                for nth, name in enumerate(tables)
            }

        yield ask
        client.unregister_system_shared_memory()
    regions.destroy_shared_memory_region(keys)
    regions.destroy_shared_memory_region(vectors)


_CLIENTS = {
    "hps": _hps,
    "raw socket": _raw,
    "hps, out=": _hps_out,
    "hps, shared memory": _hps_shared,
    "hps, asyncio": _hps_asyncio,
    "urllib3": _urllib3,
    "httpx": _httpx,
    "tritonclient": _triton,
    "tritonclient, shared memory": _triton_shared,
}


def run(report: Report, quick: bool) -> None:
    """Measure all clients; `quick` takes few calls."""
    rounds, calls = (1, 20) if quick else (40, 50)
    rng = np.random.default_rng(report.seed)
    report.about |= {"rounds": rounds, "calls": calls, "fronts": 1}
    with scratch("client") as directory, ExitStack() as stack:
        files = [directory / f"t{table}.model" for table in range(26)]
        for table, file in enumerate(files):
            hps.write_sparse_model(file, (np.arange(_ROWS), _vectors(table, np.arange(_ROWS))))
        settings = {**SERVICE, "shared_memory_bytes": 1 << 28}
        configuration = document(model(files, [_DIM] * 26), service=settings)
        service = stack.enter_context(hps_serve(configuration, directory, fronts=1))
        asks = {kind: stack.enter_context(make(f"http://127.0.0.1:{service.port}")) for kind, make in _CLIENTS.items()}
        for tables in (1, 26):
            requests = [{f"t{table}": rng.integers(0, _ROWS, _KEYS) for table in range(tables)} for _ in range(8)]
            for kind, ask in asks.items():
                for request in requests:
                    found = ask(request)
                    for nth, keys in enumerate(request.values()):
                        require(np.array_equal(found[f"t{nth}"], _vectors(nth, keys)), kind)
                    del found
            turns = [{kind: _round(ask, requests, calls) for kind, ask in asks.items()} for _ in range(rounds)]
            taken = {kind: np.array([turn[kind] for turn in turns]) for kind in asks}
            best = {kind: np.quantile(found, 0.1, axis=0) for kind, found in taken.items()}
            for kind, (p50, _, cpu) in best.items():
                p99 = float(np.median(taken[kind][:, 1]))
                figures = {"p50_us": 1e6 * p50, "p99_us": 1e6 * p99, "cpu_us": 1e6 * cpu, "relative": p50 / best["hps"][0]}
                axes = {"client": kind, "tables": tables, "keys": _KEYS, "dim": _DIM}
                report.add(axes, {name: float(value) for name, value in figures.items()})


def _round(ask: Ask, requests: list[Tables], calls: int) -> tuple[float, float, float]:
    """Return median and 99th percentile of the times, and the processor time of a call."""
    for request in requests:
        ask(request)
    requested = [requests[nth % len(requests)] for nth in range(calls)]
    seconds, cpu = ask.times(requested) if isinstance(ask, _InLoop) else _times(ask, requested)
    return float(np.median(seconds)), float(np.quantile(seconds, 0.99)), cpu / calls


def _times(ask: Ask, requests: list[Tables]) -> Times:
    seconds, began_cpu = [], time.process_time()
    for request in requests:
        began = time.perf_counter()
        ask(request)
        seconds.append(time.perf_counter() - began)
    return seconds, time.process_time() - began_cpu
