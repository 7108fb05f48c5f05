"""A client of HTTP/2 that sends what it is told, frame by frame, whether or not it is right."""

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from hpack import Decoder, Encoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
KINDS = range(10)
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = KINDS


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    names = {"window": 4, "frame": 5}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", names[name], value) for name, value in values.items()))


def call_headers(path: str = "/inference.GRPCInferenceService/ModelInfer", **more: str) -> bytes:
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return Encoder().encode([(*header, True) for header in headers.items()], huffman=False)  # none changes the server's table


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


class Peer:
    """One connection. Use in a `with` statement."""

    def __init__(self, port: int, first: bytes = PREFACE + settings()) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._rest = b""
        self._decoder = Decoder()
        self.send(first)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def frames(self) -> Iterator[Frame]:
        """All frames until the server closes the connection."""
        while True:
            while len(self._rest) >= 9:
                word, flags, stream = struct.unpack_from(">IBI", self._rest)
                end = 9 + (word >> 8)
                if len(self._rest) < end:
                    break
                payload, self._rest = self._rest[9:end], self._rest[end:]
                yield Frame(word & 255, flags, stream, payload)
            try:
                more = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return
            if not more:
                return
            self._rest += more

    def next(self, *kinds: int, stream: int | None = None) -> Frame | None:
        """The next frame of one of these kinds; None if the connection is closed before."""
        for one in self.frames():
            if one.kind in kinds and stream in (None, one.stream):
                return one
        return None

    def headers(self, one: Frame) -> dict[str, str]:
        return dict(self._decoder.decode(one.payload))

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Headers and trailers of a stream, and its data; other streams are ignored."""
        found: dict[str, str] = {}
        data = b""
        for one in self.frames():
            if one.kind == HEADERS:
                headers = self.headers(one)
                if one.stream == stream:
                    found |= headers
            elif one.kind == DATA and one.stream == stream:
                data += one.payload
            elif one.kind == RESET and one.stream == stream:
                found["reset"] = str(int.from_bytes(one.payload, "big"))
                return found, data
            if one.stream == stream and one.flags & 1:
                return found, data
        raise AssertionError("the connection was closed")
