"""The clients of `bench_http_devices`: each a closed loop on one connection, with fresh keys in every request."""

import socket
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SCRATCH = memoryview(bytearray(1 << 20))
_HEAD_BYTES = 1 << 16  # of an answer that are kept, to be checked
_POOL_KEYS = 1 << 22


@dataclass(frozen=True)
class Load:
    """What clients ask. *Immutable.*

    Attributes:
        model: its name.
        vectors: a .npy file with the vector of every key.
        keys: of a request.
        output: what is sent back: `OUTPUT0`, the vectors, or `FOUND0`, the found-mask.
        ranges: the ranges that keys are drawn from: the share of the keys, the first key and the one after the last.
        device: the device that is to answer; None for any.
    """

    model: str
    vectors: Path
    keys: int
    output: str
    ranges: tuple[tuple[float, int, int], ...]
    device: int | None = None


def drive(load: Load, port: int, seed: int, place: int, start_at_s: float, seconds: float) -> tuple[bool, list[float]]:
    """Send requests, and check a vector of each answer, until `seconds` after `start_at_s` on the clock of `time.time`.

    Args:
        place: of this client among the others, which draw their keys with the same seed.

    Returns:
        Whether it sent the first one in time, and the seconds that each request took that was answered in these seconds.
    """
    pool = _pool(load.ranges, seed)
    rng = np.random.default_rng(seed + place)
    vectors = np.load(load.vectors, mmap_mode="r")
    text = _text(load)
    lines = f"Content-Length: {len(text) + 8 * load.keys + 4}\r\nInference-Header-Content-Length: {len(text)}"
    head = f"POST /v2/models/{load.model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n\r\n".encode() + text
    count = np.int32(load.keys).tobytes()
    times: list[float] = []
    end_s = start_at_s + seconds
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        in_time = time.time() < start_at_s
        while time.time() < end_s:
            place = int(rng.integers(0, pool.size - load.keys))
            keys = pool[place : place + load.keys]
            started = time.time()
            if load.keys < 1 << 14:
                connection.sendall(b"".join([head, keys.tobytes(), count]))
            else:
                for part in (head, memoryview(keys).cast("B"), count):
                    connection.sendall(part)
            answer = _receive(connection)
            answered = time.time()
            if load.output == "OUTPUT0":
                right = np.array_equal(np.frombuffer(answer, np.float32, vectors.shape[1]), vectors[keys[0]])
            else:
                right = all(answer[:1000])
            if not right:
                raise AssertionError(f"{load.model} answers {load.output} wrongly")
            if start_at_s < answered < end_s:
                times.append(answered - started)
    return in_time, times


@lru_cache(4)
def _pool(ranges: tuple[tuple[float, int, int], ...], seed: int) -> npt.NDArray[np.int64]:
    """Keys, of which every request takes a stretch."""
    rng = np.random.default_rng(seed)
    pool = np.concatenate([rng.integers(first, last, int(_POOL_KEYS * share)) for share, first, last in ranges])
    rng.shuffle(pool)
    return pool


def _text(load: Load) -> bytes:
    keys = f'"name":"KEYS","shape":[1,{load.keys}],"datatype":"INT64","parameters":{{"binary_data_size":{8 * load.keys}}}'
    counts = '"name":"NUMKEYS","shape":[1,1],"datatype":"INT32","parameters":{"binary_data_size":4}'
    output = f'"name":"{load.output}","parameters":{{"binary_data":true}}'
    parameters = "" if load.device is None else f'"parameters":{{"DeviceID":{load.device}}},'
    return f'{{{parameters}"inputs":[{{{keys}}},{{{counts}}}],"outputs":[{{{output}}}]}}'.encode()


def _receive(connection: socket.socket) -> bytes:
    """Read an answer; returns the first bytes of its binary part, and drops the rest."""
    kept = bytearray()
    have, expected, start = 0, -1, 0
    while have != expected:
        count = connection.recv_into(_SCRATCH)
        if not count:
            raise ConnectionError("the server closed a connection")
        have += count
        if len(kept) < _HEAD_BYTES:
            kept += _SCRATCH[: min(count, _HEAD_BYTES - len(kept))]
        if expected < 0 and b"\r\n\r\n" in kept:
            lines = bytes(kept).partition(b"\r\n\r\n")[0].split(b"\r\n")
            if not lines[0].startswith(b"HTTP/1.1 200"):
                raise RuntimeError(kept[:1000].decode(errors="replace"))
            values: dict[bytes, Any] = dict(line.lower().split(b": ", 1) for line in lines[1:])
            body = sum(map(len, lines)) + 2 * len(lines) + 2
            expected = body + int(values[b"content-length"])
            start = body + int(values[b"inference-header-content-length"])
    return bytes(kept[start:])
