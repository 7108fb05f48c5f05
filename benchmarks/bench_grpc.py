"""Lookups by gRPC beside the same over HTTP, from one service in one run: requests a second, and processor time of a request.

One process loads either with the same keys, from raw sockets, so that it takes as little as it can of the machine; the two
are measured in turn, and the medians of all rounds are compared. `cpu_us` is the processor time of the service for a request,
which says more where the machine has other work. Every tenth answer is compared with the vectors.
"""

import multiprocessing
import os
import selectors
import socket
import statistics
import struct
import time
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.harness import Report, microseconds, require, scratch
from benchmarks.served import Running, address_of, binary_post, document, free_port, hps_serve, model
from hps.models.writer import write_sparse_model
from hps.tools.profiling.http_load import HttpLoad

_ROWS, _DIM, _POOL, _CHECKED = 100_000, 32, 32, 10
_PATH = b"/inference.GRPCInferenceService/ModelInfer"


def run(report: Report, quick: bool) -> None:
    """Measure 1,000 keys a request with one front and two; `quick` takes one short round."""
    rounds, seconds = (1, 0.5) if quick else (5, 2.0)
    report.about |= {"rounds": rounds, "seconds": seconds, "load_average_before": os.getloadavg()[0]}
    with scratch("grpc") as directory, multiprocessing.get_context("spawn").Pool(1) as client:
        write_sparse_model(directory / "t0.model", (np.arange(_ROWS), _vectors(np.arange(_ROWS))))
        configuration = document(model([directory / "t0.model"], [_DIM]))
        for fronts in (1, 2):
            grpc = free_port()
            with hps_serve(configuration, directory, "--grpc-port", grpc, fronts=fronts) as http:
                ports = {"http": http.port, "grpc": grpc}
                for keys, connections in ((1000, 1), (1000, 16), (100, 16)):
                    taken: dict[str, list[dict[str, float]]] = {protocol: [] for protocol in ports}
                    for turn in range(rounds):
                        for protocol, port in ports.items():
                            arguments = (protocol, port, connections, keys, seconds, turn)
                            taken[protocol].append(_measured(client, http, arguments))
                    medians = {
                        protocol: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
                        for protocol, rows in taken.items()
                    }
                    for protocol, figures in medians.items():
                        axes = {"protocol": protocol, "fronts": fronts, "connections": connections, "batch": keys, "dim": _DIM}
                        ratio = figures["requests_per_s"] / medians["http"]["requests_per_s"]
                        report.add(axes, {**figures, "ratio_to_http": ratio})


def _measured(client: Any, service: Running, arguments: tuple[Any, ...]) -> dict[str, float]:
    before = service.processor_s()
    seconds, latencies = client.apply(_load, arguments)
    cpu_us = 1e6 * (service.processor_s() - before) / len(latencies)
    return {"requests_per_s": len(latencies) / seconds, **microseconds(latencies), "cpu_us": cpu_us}


def _vectors(keys: np.ndarray) -> Any:
    """Element c of key k is the float32 with the bits k << 5 | c."""
    return (keys.astype(np.uint32)[:, None] << 5 | np.arange(_DIM, dtype=np.uint32)).view(np.float32)


def _load(protocol: str, port: int, connections: int, keys: int, seconds: float, seed: int) -> tuple[float, np.ndarray]:
    """Load one port; return the seconds that it took, and the seconds of each request."""
    random = np.random.default_rng(seed)
    pool = [random.integers(0, _ROWS, keys) for _ in range(_POOL)]
    wanted = [_vectors(part).tobytes() for part in pool]
    if protocol == "grpc":
        return _load_grpc(port, connections, pool, wanted, seconds)
    requests = [binary_post("/v2/models/m/infer", {"t0": part}) for part in pool]
    latencies: list[float] = []
    sent: dict[int, float] = {}

    def request(number: int) -> tuple[bytes]:
        sent[number] = time.perf_counter()
        return (requests[number % _POOL],)

    def check(number: int, _head: bytes, body: memoryview) -> str:
        latencies.append(time.perf_counter() - sent.pop(number))
        expected = wanted[number % _POOL]
        right = number % _CHECKED or body[len(body) - len(expected) :] == expected
        return "" if right else "wrong vectors"

    result = HttpLoad(address_of(port), connections, request, check).run(seconds)
    require(not result.failures and latencies, f"HTTP ({dict(result.failures)})")
    return seconds, np.array(latencies)


# -- the least of HTTP/2 that a client of gRPC needs ------------------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


class _Connection:
    """A connection with at most one call. Frames have at most 16,384 bytes, as clients of gRPC ask for."""

    _HEADERS = (
        b"\x83\x86"
        + _header(b":authority", b"h")
        + _header(b":path", _PATH)
        + _header(b"content-type", b"application/grpc")
        + _header(b"te", b"trailers")
    )

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        windows = _frame(4, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) + _frame(8, 0, 0, struct.pack(">I", 2**31 - 1 - 65535))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + windows)
        self._buffer = bytearray(1 << 20)
        self._have = self._at = self._taken = 0
        self._stream = -1
        self.number, self.sent = 0, 0.0

    def send(self, number: int, message: bytes) -> None:
        self._have = self._at = 0
        self._stream += 2
        self.number = number
        pieces = [message[at : at + 16384] for at in range(0, len(message), 16384)]
        frames = [_frame(1, 4, self._stream, self._HEADERS)]
        frames += [_frame(0, piece is pieces[-1], self._stream, piece) for piece in pieces]
        if self._taken > 1 << 28:
            frames.append(_frame(8, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0
        self.sent = time.perf_counter()
        self.socket.sendall(b"".join(frames))

    def read(self) -> bool:
        """Read what is there; return True once the answer is complete."""
        self._have += self.socket.recv_into(memoryview(self._buffer)[self._have :])
        done = False
        while self._have - self._at >= 9:
            word, flags, _ = struct.unpack_from(">IBI", self._buffer, self._at)
            if self._have - self._at < 9 + (word >> 8):
                break
            if word & 255 == 0:
                self._taken += word >> 8
            require(word & 255 not in (3, 7), "the end of a call")
            if word & 255 == 4 and not flags & 1:
                self.socket.sendall(_frame(4, 1, 0, b""))
            elif word & 255 == 6 and not flags & 1:
                self.socket.sendall(_frame(6, 1, 0, bytes(self._buffer[self._at + 9 : self._at + 17])))
            done |= word & 255 in (0, 1) and bool(flags & 1)
            self._at += 9 + (word >> 8)
        return done

    def tail(self, size: int) -> bytes:
        """Return the last bytes of the answer: its vectors."""
        data, at = bytearray(), 0
        while at < self._have:
            word, _, _ = struct.unpack_from(">IBI", self._buffer, at)
            if word & 255 == 0:
                data += self._buffer[at + 9 : at + 9 + (word >> 8)]
            at += 9 + (word >> 8)
        return bytes(data[-size:])


def _load_grpc(port: int, count: int, pool: list[np.ndarray], wanted: list[bytes], seconds: float) -> tuple[float, np.ndarray]:
    messages = []
    for keys in pool:
        request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[keys.tobytes()])
        request.inputs.add(name="t0", datatype="INT64", shape=[keys.size])
        message = request.SerializeToString()
        messages.append(b"\0" + len(message).to_bytes(4, "big") + message)
    latencies: list[float] = []
    with selectors.DefaultSelector() as selector:
        for number in range(count):
            connection = _Connection(port)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(number, messages[number % _POOL])
        number, start = count, time.perf_counter()
        while time.perf_counter() < start + seconds:
            for key, _ in selector.select(0.1):
                connection = key.data
                if connection.read():
                    latencies.append(time.perf_counter() - connection.sent)
                    expected = wanted[connection.number % _POOL]
                    require(number % _CHECKED or connection.tail(len(expected)) == expected)
                    connection.send(number, messages[number % _POOL])
                    number += 1
        took = time.perf_counter() - start
        for key in list(selector.get_map().values()):
            key.data.socket.close()
    require(latencies, "no answer")
    return took, np.array(latencies)
