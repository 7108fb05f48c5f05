"""Bad clients of the soak: each attack is bounded in bytes and time, and has the statuses that it may get.

python -m tests.nightly.soak.bad_clients DIRECTORY ACTOR PORT PORT COUNT [ATTACK...]
"""

import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.nightly.soak.clients import LIVE, run_all
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
def _packed(piece: bytes, times: int, first: bytes = b"", last: bytes = b"") -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    middle = (packer.compress(piece) for _ in range(times))
    return b"".join([packer.compress(first), *middle, packer.compress(last), packer.flush()])


def _packed_lookup(body: bytes) -> bytes:
    return _request(LOOKUP, body, "Content-Encoding: gzip")


def _items(keys: bytes) -> bytes:
    return _request(LOOKUP, b'{"tables": {"item": [%s]}}' % keys)


def _trailing(rng: np.random.Generator) -> bytes:
    if rng.integers(2):
        return _request(LOOKUP, _WHOLE + b"{}")
    head = b'{"inputs": [{"name":"item","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}}]}'
    return _request(INFER, head + np.int64(1).tobytes() + b"more", f"Inference-Header-Content-Length: {len(head)}")


def _deep(rng: np.random.Generator) -> bytes:
    depth = int(rng.integers(1000, 1_000_000))
    return _request(_any(rng, (LOOKUP, INFER)), b'{"tables":' * (depth // 10) + b"[" * depth)


def _unknown(rng: np.random.Generator) -> bytes:
    if rng.integers(2):
        return _request(f"/v1/models/nobody-{rng.integers(1 << 40)}/lookup", _WHOLE)
    return _request(LOOKUP, b'{"tables": {"nobody": [1]}}')


def _upgrade(rng: np.random.Generator) -> bytes:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) if rng.integers(2) else _request(LOOKUP, _WHOLE, *upgrade)


def _any(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[rng.integers(len(choices))]


_MANY = b'{"tables": {%s}}' % b",".join(b'"t%d": [1]' % number for number in range(100_000))
_ODD = (b"9223372036854775808", b"1e400", b"NaN", b"1.5", b'"1"', b"true", b"-0.0", b"[1]", b"null")
_TENSORS = (
    b'"name": "item", "datatype": "FP32", "shape": [1], "data": [1.0]',
    b'"name": "item", "datatype": "INT64", "shape": [2], "data": [1]',
    b'"name": "item", "datatype": "INT64", "shape": [-1], "data": [1]',
    b'"name": "item", "datatype": "INT64", "shape": [1, 1000000000000], "data": [1]',
    b'"name": "item", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 1000000}',
    b'"name": "none", "datatype": "INT64", "shape": [1], "data": [1]',
    b'"name": "KEYS", "datatype": "INT64", "shape": [1], "data": [1]',
)
_CHUNKED = _head(LOOKUP, "Transfer-Encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(_WHOLE), _WHOLE)
_METHODS = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW")
_REQUESTS: dict[str, tuple[set[int], Callable[[np.random.Generator], bytes]]] = {
    "gzip_bomb": ({400, 413}, lambda _: _packed_lookup(_packed(b" " * (1 << 20), _BOMB_BYTES >> 20))),
    "packed_floats": ({400, 413}, lambda _: _packed_lookup(_packed(b"1.5," * 1000, 900, b'{"tables": {"item": [', b"1.5]}}"))),
    "trailing_gzip": ({400}, lambda _: _packed_lookup(_packed(_WHOLE, 1) + b"more")),
    "deep_json": ({400, 413}, _deep),
    "wide_json": ({400, 404, 413}, lambda rng: _request(_any(rng, (LOOKUP, INFER)), _MANY)),
    "many_keys": ({400, 413}, lambda _: _items(b",".join([b"12345"] * 500_000))),
    "large_body": ({413}, lambda _: _head(LOOKUP, "Content-Length: 1000000000000") + b" " * 100_000),
    "odd_numbers": ({400}, lambda rng: _items(_any(rng, _ODD))),
    "wrong_tensors": ({400, 404}, lambda rng: _request(INFER, b'{"inputs": [{%s}]}' % _any(rng, _TENSORS))),
    "trailing_bytes": ({400}, _trailing),
    "truncated_body": ({400, 408}, lambda _: _head(LOOKUP, f"Content-Length: {len(_WHOLE) + 100}") + _WHOLE),
    "unknown_names": ({404}, _unknown),
    "odd_methods": ({400, 404, 405, 501}, lambda rng: _head(LOOKUP, method=_any(rng, _METHODS))),
    "endless_head": ({400, 431}, lambda _: _head(LOOKUP)[:-2] + b"X: y\r\n" * 200_000),
    "trailers": ({200, 400, 413, 431}, lambda rng: _CHUNKED + b"X: y\r\n" * _any(rng, (3, 200_000)) + b"\r\n"),
    "h2c_upgrade": ({200, 400}, _upgrade),
}
"""Attacks of one request each: the statuses that are right, and what is sent."""


def _sends(name: str) -> _Attack:
    return lambda port, rng: _exchange(port, _REQUESTS[name][1](rng), end=name == "truncated_body")


ATTACKS |= {name: (_sends(name), {*statuses, *_BUSY}) for name, (statuses, _) in _REQUESTS.items()}


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
    names = names or list(ATTACKS)
    run_all([partial(_run, ledger, ports, names, 1000 * actor + place) for place in range(count)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:5]], int(sys.argv[5]), sys.argv[6:])
