"""Bad clients of the soak: each attack is bounded in bytes and time, and has the statuses that it may get.

python -m tests.nightly.soak.bad_clients DIRECTORY ACTOR PORT PORT COUNT [ATTACK...]
"""

import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import numpy as np

from tests.nightly.soak.clients import LIVE
from tests.nightly.soak.ledger import PROCESSES, Ledger

LOOKUP, INFER = "/v1/models/steady/lookup", "/v2/models/steady/infer"
_TIMEOUT_S, _THINK_S, _STALL_S = 20.0, 1.5, 4.0
_BOMB_BYTES = 256 << 20
_BUSY = {None, 503, 504}  # None: closed without an answer
_WHOLE = b'{"tables": {"item": [1, 2, 3]}}'
_Attack = Callable[[int, np.random.Generator], int | None]

ATTACKS: dict[str, tuple[_Attack, set[int | None]]] = {}
"""Every attack by its name, with the statuses that are right for it, beside `_BUSY`."""


def _attack(*statuses: int | None) -> Callable[[_Attack], _Attack]:
    def add(attack: _Attack) -> _Attack:
        ATTACKS[attack.__name__] = attack, {*statuses, *_BUSY}
        return attack

    return add


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)


def _head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def _request(path: str, body: bytes, *lines: str) -> bytes:
    return _head(path, f"Content-Length: {len(body)}", *lines) + body


def _status(connection: socket.socket) -> int | None:
    """The status of the next answer; None where the connection ends before there is one."""
    received = b""
    with suppress(ConnectionError):
        while b"\r\n" not in received:
            chunk = connection.recv(65536)
            if not chunk:
                return None
            received += chunk
        return int(received.split(None, 2)[1])
    return None


def _exchange(port: int, request: bytes, *, end: bool = False) -> int | None:
    with _connect(port) as connection:
        with suppress(ConnectionError):  # refused before it was read: an answer may be there
            connection.sendall(request)
            if end:
                connection.shutdown(socket.SHUT_WR)
        return _status(connection)


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = b" " * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(_BOMB_BYTES >> 20)), packer.flush()])


@_attack(400, 413)
def gzip_bomb(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _request(LOOKUP, _bomb(), "Content-Encoding: gzip"))


@cache
def _packed_floats() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return packer.compress(b'{"tables": {"item": [%s1.5]}}' % (b"1.5," * 900_000)) + packer.flush()


@_attack(400, 413)
def packed_floats(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _request(LOOKUP, _packed_floats(), "Content-Encoding: gzip"))


@_attack(400)
def trailing_gzip(port: int, _: np.random.Generator) -> int | None:
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(_WHOLE) + packer.flush()
    return _exchange(port, _request(LOOKUP, packed + b"more", "Content-Encoding: gzip"))


@_attack(400, 413)
def deep_json(port: int, rng: np.random.Generator) -> int | None:
    depth = int(rng.integers(1000, 1_000_000))
    return _exchange(port, _request((LOOKUP, INFER)[rng.integers(2)], b'{"tables":' * (depth // 10) + b"[" * depth))


@_attack(400, 404, 413)
def wide_json(port: int, rng: np.random.Generator) -> int | None:
    body = b'{"tables": {%s}}' % b",".join(b'"t%d": [1]' % number for number in range(100_000))
    return _exchange(port, _request((LOOKUP, INFER)[rng.integers(2)], body))


@_attack(400, 413)
def many_keys(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _request(LOOKUP, b'{"tables": {"item": [%s]}}' % b",".join([b"12345"] * 500_000)))


@_attack(413)
def large_body(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _head(LOOKUP, "Content-Length: 1000000000000") + b" " * 100_000)


@_attack(400)
def odd_numbers(port: int, rng: np.random.Generator) -> int | None:
    keys = (b"9223372036854775808", b"1e400", b"NaN", b"1.5", b'"1"', b"true", b"-0.0", b"[1]", b"null")
    return _exchange(port, _request(LOOKUP, b'{"tables": {"item": [%s]}}' % keys[rng.integers(len(keys))]))


@_attack(400, 404)
def wrong_tensors(port: int, rng: np.random.Generator) -> int | None:
    parts = (
        b'"name": "item", "datatype": "FP32", "shape": [1], "data": [1.0]',
        b'"name": "item", "datatype": "INT64", "shape": [2], "data": [1]',
        b'"name": "item", "datatype": "INT64", "shape": [-1], "data": [1]',
        b'"name": "item", "datatype": "INT64", "shape": [1, 1000000000000], "data": [1]',
        b'"name": "item", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 1000000}',
        b'"name": "none", "datatype": "INT64", "shape": [1], "data": [1]',
        b'"name": "KEYS", "datatype": "INT64", "shape": [1], "data": [1]',
    )
    return _exchange(port, _request(INFER, b'{"inputs": [{%s}]}' % parts[rng.integers(len(parts))]))


@_attack(400)
def trailing_bytes(port: int, rng: np.random.Generator) -> int | None:
    if rng.integers(2):
        return _exchange(port, _request(LOOKUP, _WHOLE + b"{}"))
    head = b'{"inputs": [{"name":"item","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}}]}'
    body = head + np.int64(1).tobytes() + b"more"
    return _exchange(port, _request(INFER, body, f"Inference-Header-Content-Length: {len(head)}"))


@_attack(400, 408)
def truncated_body(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _head(LOOKUP, f"Content-Length: {len(_WHOLE) + 100}") + _WHOLE, end=True)


@_attack(404)
def unknown_names(port: int, rng: np.random.Generator) -> int | None:
    if rng.integers(2):
        return _exchange(port, _request(f"/v1/models/nobody-{rng.integers(1 << 40)}/lookup", _WHOLE))
    return _exchange(port, _request(LOOKUP, b'{"tables": {"nobody": [1]}}'))


@_attack(400, 404, 405, 501)
def odd_methods(port: int, rng: np.random.Generator) -> int | None:
    methods = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW")
    return _exchange(port, _head(LOOKUP, method=methods[rng.integers(len(methods))]))


@_attack(400, 431)
def endless_head(port: int, _: np.random.Generator) -> int | None:
    return _exchange(port, _head(LOOKUP)[:-2] + b"X: y\r\n" * 200_000)


@_attack(200, 400, 413, 431)
def trailers(port: int, rng: np.random.Generator) -> int | None:
    chunked = _head(LOOKUP, "Transfer-Encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(_WHOLE), _WHOLE)
    return _exchange(port, chunked + b"X: y\r\n" * (3, 200_000)[rng.integers(2)] + b"\r\n")


@_attack(200, 400)
def h2c_upgrade(port: int, rng: np.random.Generator) -> int | None:
    if rng.integers(2):
        return _exchange(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    return _exchange(port, _request(LOOKUP, _WHOLE, *upgrade))


@_attack()
def half_a_request(port: int, rng: np.random.Generator) -> int | None:
    request = _request(LOOKUP, _WHOLE)
    with _connect(port) as connection:
        connection.sendall(request[: rng.integers(1, len(request))])
        time.sleep(rng.random() * 2)


@_attack()
def gone_before_the_answer(port: int, _: np.random.Generator) -> int | None:
    with _connect(port) as connection:
        connection.sendall(_request(LOOKUP, _WHOLE) * 20)


@_attack(408)
def slow_writer(port: int, _: np.random.Generator) -> int | None:
    with _connect(port) as connection, suppress(ConnectionError):
        connection.sendall(_head(LOOKUP, "Content-Length: 1000000"))
        end = time.monotonic() + _STALL_S
        while time.monotonic() < end:
            connection.sendall(b" " * 1000)
            time.sleep(0.1)


@_attack()
def slow_reader(port: int, rng: np.random.Generator) -> int | None:
    keys = b",".join(b"%d" % key for key in rng.integers(0, 20_000, 3000))
    # The kernel drops what does not fit such a buffer, and sends it again later and later.
    with _connect(port) as connection, suppress(ConnectionError, TimeoutError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"tables": {"item": [%s]}}' % keys
        connection.sendall(_request(LOOKUP, body) * 4 + _request(LOOKUP, body, "Connection: close"))  # refusals are read soon
        end = time.monotonic() + _STALL_S
        while time.monotonic() < end:
            connection.recv(100)
            time.sleep(0.1)


@_attack()
def never_reads(port: int, _: np.random.Generator) -> int | None:
    with _connect(port) as connection, suppress(ConnectionError, TimeoutError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)
        for _ in range(2000):
            connection.sendall(LIVE.replace(b"Connection: close\r\n", b""))
        time.sleep(_STALL_S)


@_attack()
def idle_connections(port: int, _: np.random.Generator) -> int | None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(_connect(port))
        time.sleep(_STALL_S / 2)


def _run(ledger: Ledger, ports: list[int], names: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    while not ledger.stopped:
        process = int(rng.integers(len(ports)))
        generation = int(ledger.generation[process])
        if generation % 2:
            name = names[rng.integers(len(names))]
            attack, right = ATTACKS[name]
            began = time.monotonic()
            try:
                status = attack(ports[process], rng)
            except OSError as error:
                if int(ledger.generation[process]) == generation and not isinstance(error, ConnectionError):
                    ledger.violation("no answer", process=PROCESSES[process], attack=name, error=repr(error)[:200])
            else:
                ledger.count(attacks=1)
                seconds = round(time.monotonic() - began, 3)
                ledger.note(attack=name, process=PROCESSES[process], status=status, seconds=seconds)
                if status not in right:
                    ledger.violation("attack", process=PROCESSES[process], attack=name, status=status)
        time.sleep(rng.random() * 2 * _THINK_S)


def main(directory: Path, actor: int, ports: list[int], count: int, names: list[str]) -> None:
    """Run bad clients until the soak ends."""
    os.nice(10)
    ledger = Ledger(directory, actor, "bad clients")
    threads = [
        threading.Thread(target=_run, args=(ledger, ports, names or list(ATTACKS), 1000 * actor + place))
        for place in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:5]], int(sys.argv[5]), sys.argv[6:])
