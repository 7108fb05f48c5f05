"""Measures lookups by gRPC beside the same over HTTP, from one service in one run; the generator checks vectors.

    python -m benchmarks.bench_grpc --device cpu --keys 1000 --connections 1,16 --fronts 1,2

The generator speaks both protocols from raw sockets, in processes of its own, so that it takes as little as it can of the
machine. Both get the same keys; the two are measured in turn, and the medians of all turns are compared. `cpu_us` is the CPU
time of the fronts for a request, which says more where the machine has other work. Element c of key k is the float32 with the
bits k << 5 | c.
"""

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.bench_fronts import DIM, Service, configuration, write_model
from benchmarks.harness import Report, add

POOL = 32
PATH = b"/inference.GRPCInferenceService/ModelInfer"


def vectors_of(keys: np.ndarray) -> np.ndarray:
    return keys.astype(np.uint32)[:, None] << 5 | np.arange(DIM, dtype=np.uint32)


class HTTPClient:
    """A connection with at most one request."""

    def __init__(self, port: int, pool: list[np.ndarray]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.room = bytearray(1 << 20)
        self.have = self.want = 0
        self.requests = []
        for keys in pool:
            tensor = {
                "name": "t0",
                "shape": [keys.size],
                "datatype": "INT64",
                "parameters": {"binary_data_size": 8 * keys.size},
            }
            text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            sizes = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (
                len(text),
                len(text) + 8 * keys.size,
            )
            self.requests.append(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n" + sizes + text + keys.tobytes())

    def ask(self, place: int) -> None:
        self.have = self.want = 0
        self.socket.sendall(self.requests[place])

    def read(self) -> bool:
        self.have += self.socket.recv_into(memoryview(self.room)[self.have :])
        if not self.want and (end := self.room.find(b"\r\n\r\n", 0, self.have)) >= 0:
            head = bytes(self.room[:end]).lower()
            self.want = end + 4 + int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
        return 0 < self.want <= self.have

    def tensor(self, size: int) -> bytes:
        return bytes(self.room[self.have - size : self.have])


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


class GRPCClient:
    """A connection with at most one call. Frames have at most 16,384 bytes, as clients of gRPC ask for."""

    HEADERS = (
        b"\x83\x86"
        + header(b":authority", b"h")
        + header(b":path", PATH)
        + header(b"content-type", b"application/grpc")
        + header(b"te", b"trailers")
    )

    def __init__(self, port: int, pool: list[np.ndarray]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        windows = frame(4, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) + frame(8, 0, 0, struct.pack(">I", 2**31 - 1 - 65535))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + windows)
        self.room = bytearray(1 << 20)
        self.have = self.at = self.taken = 0
        self.stream = -1
        self.requests: list[list[bytes]] = []
        for keys in pool:
            request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[keys.tobytes()])
            request.inputs.add(name="t0", datatype="INT64", shape=[keys.size])
            message = request.SerializeToString()
            message = b"\0" + len(message).to_bytes(4, "big") + message
            self.requests.append([message[at : at + 16384] for at in range(0, len(message), 16384)])

    def ask(self, place: int) -> None:
        self.have = self.at = 0
        self.stream += 2
        pieces = self.requests[place]
        out = [frame(1, 4, self.stream, self.HEADERS)]
        out += [frame(0, piece is pieces[-1], self.stream, piece) for piece in pieces]
        if self.taken > 1 << 28:
            out.append(frame(8, 0, 0, struct.pack(">I", self.taken)))
            self.taken = 0
        self.socket.sendall(b"".join(out))

    def read(self) -> bool:
        self.have += self.socket.recv_into(memoryview(self.room)[self.have :])
        done = False
        while self.have - self.at >= 9:
            word, flags, _ = struct.unpack_from(">IBI", self.room, self.at)
            if self.have - self.at < 9 + (word >> 8):
                break
            if word & 255 == 0:
                self.taken += word >> 8
            elif word & 255 in (3, 7):
                raise SystemExit("the server ended a call")
            elif word & 255 == 4 and not flags & 1:
                self.socket.sendall(frame(4, 1, 0, b""))
            elif word & 255 == 6 and not flags & 1:
                self.socket.sendall(frame(6, 1, 0, bytes(self.room[self.at + 9 : self.at + 17])))
            done |= word & 255 in (0, 1) and bool(flags & 1)
            self.at += 9 + (word >> 8)
        return done

    def tensor(self, size: int) -> bytes:
        data, at = bytearray(), 0
        while at < self.have:
            word, _, _ = struct.unpack_from(">IBI", self.room, at)
            if word & 255 == 0:
                data += self.room[at + 9 : at + 9 + (word >> 8)]
            at += 9 + (word >> 8)
        return bytes(data[-size:])


def generate(
    kind: str, port: int, connections: int, keys: int, rows: int, seconds: float, check: int, seed: int
) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    pool = [random.integers(0, rows, keys) for _ in range(POOL)]
    wanted = [vectors_of(one).tobytes() for one in pool]
    clients = [(HTTPClient if kind == "http" else GRPCClient)(port, pool) for _ in range(connections)]
    state = {id(client): [nth % POOL, 0.0] for nth, client in enumerate(clients)}
    latencies, done, wrong, checked = [], 0, 0, 0
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            state[id(client)][1] = time.perf_counter()
            client.ask(int(state[id(client)][0]))
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            for key, _ in selector.select(0.1):
                client, (place, since) = key.data, state[id(key.data)]
                if client.read():
                    latencies.append(time.perf_counter() - since)
                    done += 1
                    if done % check == 0:
                        checked += 1
                        wrong += client.tensor(len(wanted[int(place)])) != wanted[int(place)]
                    state[id(client)] = [(place + 1) % POOL, time.perf_counter()]
                    client.ask(int(place + 1) % POOL)
        seconds += now - end
    return {"requests": done, "seconds": seconds, "latencies": latencies, "wrong": wrong, "checked": checked}


def cpu_s(parent: int) -> float:
    """CPU time of all fronts of a service, which are the children of its first process after the owner."""
    fronts = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[1:]
    ticks = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13] for one in fronts]
    return sum(int(tick) for one in ticks for tick in one) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, port: int, connections: int, parent: int, arguments: argparse.Namespace) -> dict[str, Any]:
    processes = min(arguments.processes, connections)
    shares = [connections // processes + (nth < connections % processes) for nth in range(processes)]
    common = (arguments.keys, arguments.rows, arguments.seconds, arguments.check)
    before = cpu_s(parent)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.starmap(generate, [(kind, port, share, *common, nth) for nth, share in enumerate(shares)])
    latencies = np.sort(np.concatenate([one["latencies"] for one in found]))
    if sum(one["wrong"] for one in found) or not latencies.size:
        raise SystemExit(f"{kind}: wrong vectors, or none")
    return {
        "requests_per_s": sum(one["requests"] / one["seconds"] for one in found),
        "p50_us": float(latencies[latencies.size // 2]) * 1e6,
        "p99_us": float(latencies[latencies.size * 99 // 100]) * 1e6,
        "cpu_us": (cpu_s(parent) - before) * 1e6 / latencies.size,
        "checked": sum(one["checked"] for one in found),
    }


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure, and the sum of checked answers."""
    medians = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
    return {**medians, "checked": sum(row["checked"] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--fronts", default="1,2")
    parser.add_argument("--processes", type=int, default=1, help="of the generator")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--check", type=int, default=10, help="every how many answers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--port", type=int, default=8220, help="of HTTP; gRPC has the next")
    arguments = parser.parse_args()
    given = {"cache_type": "", "cached": 1.0, "rocks_db": "", "rocks_db_alone": False, "workspaces": 3}
    settings = {name: getattr(arguments, name) for name in ("device", "seconds", "turns", "processes", "check")}
    report = Report("grpc", about={**settings, "load_average_before": os.getloadavg()[0]})
    with tempfile.TemporaryDirectory() as scratch:
        files = write_model(Path(scratch), 1, arguments.rows)
        config = Path(scratch) / "ps.json"
        document = configuration(files, argparse.Namespace(**vars(arguments), **given), arguments.keys)
        config.write_text(json.dumps(document))
        here = str(Path(__file__).resolve().parents[1])
        for fronts in map(int, arguments.fronts.split(",")):
            more = ("--grpc-port", str(arguments.port + 1))
            service = Service(here, config, fronts, arguments.port, Path(scratch) / "log", *more)
            try:
                for connections in map(int, arguments.connections.split(",")):
                    found: dict[str, list[dict[str, Any]]] = {"http": [], "grpc": []}
                    for _ in range(arguments.turns):
                        for nth, (kind, rows) in enumerate(found.items()):
                            rows.append(measure(kind, arguments.port + nth, connections, service.process.pid, arguments))
                    medians = {kind: median_of(rows) for kind, rows in found.items()}
                    for kind, figures in medians.items():
                        ratio = figures["requests_per_s"] / medians["http"]["requests_per_s"]
                        axes = {
                            "protocol": kind,
                            "fronts": fronts,
                            "connections": connections,
                            "batch": arguments.keys,
                            "dim": DIM,
                        }
                        add(report, axes, {**figures, "ratio_to_http": ratio})
            finally:
                service.stop()
    report.write()


if __name__ == "__main__":
    main()
