"""Reading ranges of row files from other servers: who is asked, what they may answer, and how long one that fails is left."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from hps.configuration.tiers import PeersConfig
from hps.errors import RemoteError
from hps.models import peers as module
from hps.models.peers import SERVER_ID_HEADER, Address, Peers, server_id
from hps.testing.waiting import PATIENCE_S, wait_until

CONTENT = bytes(range(256)) * 64
NAME = "0123456789abcdef0123456789abcdef"


def right(request: str) -> bytes:
    """The range, as a server of this release answers it."""
    found = re.search(r"range: bytes=(\d+)-(\d+)", request)
    assert found
    return ranged(int(found[1]), int(found[2]) + 1)


def ranged(start: int, stop: int, size: int = len(CONTENT), body: bytes | None = None) -> bytes:
    body = CONTENT[start:stop] if body is None else body
    lines = ["HTTP/1.1 206 Partial", f"content-range: bytes {start}-{stop - 1}/{size}", f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def refusal(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} No", *headers, "content-length: 2", "", "{}"]).encode()


class PlayedPeer:
    """A server that answers what the test says, over any number of connections, one after another."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self.answer = answer
        self.requests: list[str] = []
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection, suppress(OSError):
                while request := connection.recv(4096).decode():
                    self.requests.append(request)
                    if not (answer := self.answer(request)):
                        break
                    connection.sendall(answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def play() -> Iterator[Callable[..., PlayedPeer]]:
    played: list[PlayedPeer] = []

    def start(answer: Callable[[str], bytes] = right) -> PlayedPeer:
        played.append(PlayedPeer(answer))
        return played[-1]

    yield start
    for peer in played:
        peer.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []
    monkeypatch.setattr(module, "_FIRST_RESOLVE_S", PATIENCE_S)

    def open_peers(*urls: str, resolve: Callable[[str, int], list[Address]] | None = None, **settings: object) -> Peers:
        config = PeersConfig.model_validate({"urls": urls, "least_bytes": 0, "timeout_s": PATIENCE_S, **settings})
        made.append(Peers(config, clock=clock, resolve=resolve))
        return made[-1]

    yield open_peers
    for peers in made:
        for peer in peers._peers.values():
            peer.close()


def read(peers: Peers, start: int = 100, stop: int = 5000, size: int = len(CONTENT)) -> tuple[str, int, bytes]:
    buffer = bytearray(stop - start)
    peer, failures = peers.read(NAME, size, start, memoryview(buffer))
    return peer, failures, bytes(buffer)


def test_a_range_comes_from_a_peer(play: Callable[..., PlayedPeer], opened: Callable[..., Peers]) -> None:
    peer = play()
    peers = opened(peer.url + "/", token="t0ken")
    for _ in range(3):
        assert read(peers) == (peer.url, 0, CONTENT[100:5000])
    assert peer.connections == 1
    lines = peer.requests[0].split("\r\n")
    assert lines[0] == f"GET /v1/row-files/{NAME} HTTP/1.1"
    assert {"range: bytes=100-4999", f"{SERVER_ID_HEADER}: {server_id()}", "authorization: Bearer t0ken"} <= {*lines}


@pytest.mark.parametrize(
    ("answer", "left_s"),
    [
        (lambda request: ranged(100, 4999), 15),  # short
        (lambda request: ranged(100, 5000, size=len(CONTENT) + 1), 15),  # another file
        (lambda request: ranged(0, 4900), 15),
        (lambda request: ranged(100, 5000, body=CONTENT[:50]), 15),
        (lambda request: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 15),
        (lambda request: b"SSH-2.0-server\r\n\r\n", 15),
        (lambda request: b"", 15),
        (lambda request: refusal(401), 60),
        (lambda request: refusal(403), 60),
        (lambda request: refusal(500), 15),
    ],
)
def test_a_peer_that_fails_is_left_for_a_while(
    play: Callable[..., PlayedPeer],
    opened: Callable[..., Peers],
    clock: Clock,
    answer: Callable[[str], bytes],
    left_s: float,
) -> None:
    peer = play(answer)
    peers = opened(peer.url)
    assert read(peers)[:2] == ("", 1)
    asked = len(peer.requests)
    clock.now += left_s - 0.1
    assert read(peers)[:2] == ("", 0)
    assert len(peer.requests) == asked
    peer.answer = right
    clock.now += 0.2
    assert read(peers) == (peer.url, 0, CONTENT[100:5000])


@pytest.mark.parametrize(
    ("answer", "left_s"),
    [
        (refusal(404), 5),
        (refusal(503), 1),
        (refusal(503, "retry-after: 7"), 7),
        (refusal(429, "retry-after: 999"), 30),
    ],
)
def test_a_peer_without_the_range_has_not_failed(
    play: Callable[..., PlayedPeer], opened: Callable[..., Peers], clock: Clock, answer: bytes, left_s: float
) -> None:
    peer = play(lambda request: answer)
    peers = opened(peer.url)
    assert read(peers)[:2] == ("", 0)
    peer.answer = right
    clock.now += left_s - 0.1
    assert read(peers)[0] == ""
    clock.now += 0.2
    assert read(peers)[0] == peer.url
    assert peer.connections == 1  # the answer was read, so its connection is used again


def test_another_peer_is_asked_for_what_one_lacks(play: Callable[..., PlayedPeer], opened: Callable[..., Peers]) -> None:
    lacking, having = play(lambda request: refusal(404)), play()
    peers = opened(lacking.url, having.url)
    for _ in range(4):
        assert read(peers) == (having.url, 0, CONTENT[100:5000])
    assert len(lacking.requests) <= 1


def test_a_server_does_not_ask_itself(play: Callable[..., PlayedPeer], opened: Callable[..., Peers], clock: Clock) -> None:
    itself = play(lambda request: refusal(421))
    peers = opened(itself.url)
    assert read(peers)[:2] == ("", 0)
    clock.now += 1e6
    assert read(peers)[:2] == ("", 0)
    assert len(itself.requests) == 1


def test_wrong_bytes_are_left_for_longer(play: Callable[..., PlayedPeer], opened: Callable[..., Peers], clock: Clock) -> None:
    peer = play()
    peers = opened(peer.url)
    peers.report_damage(read(peers)[0], NAME)
    clock.now += 299
    assert read(peers)[0] == ""
    clock.now += 2
    assert read(peers)[0] == peer.url


def test_a_closed_connection_is_opened_again(play: Callable[..., PlayedPeer], opened: Callable[..., Peers]) -> None:
    peer = play()
    peers = opened(peer.url)
    assert read(peers)[0] == peer.url
    [known] = peers._peers.values()
    known.idle[0].shutdown(socket.SHUT_RDWR)
    assert read(peers) == (peer.url, 0, CONTENT[100:5000])
    assert peer.connections == 2


def test_a_name_stands_for_all_of_its_addresses(
    play: Callable[..., PlayedPeer], opened: Callable[..., Peers], clock: Clock
) -> None:
    one, two = play(), play(lambda request: refusal(404))
    ports = [int(two.url.rpartition(":")[2])]
    asked: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[Address]:
        asked.append((host, port))
        if not ports:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, ("127.0.0.1", port)) for port in ports]

    peers = opened("http://fleet.shop.svc:8000", resolve=resolve)
    assert read(peers)[0] == ""
    ports[:] = [int(peer.url.rpartition(":")[2]) for peer in (one, two)]
    clock.now += 31
    wait_until(lambda: read(peers)[0] == one.url)
    assert one.requests[0].split("\r\n")[1] == "host: fleet.shop.svc:8000"
    ports.clear()
    clock.now += 31
    wait_until(lambda: read(peers)[0] == one.url and len(asked) == 3 and not peers._resolving.locked())
    assert read(peers)[0] == one.url  # those that are known stay
    assert asked == [("fleet.shop.svc", 8000)] * 3


def test_small_files_and_files_without_a_fingerprint_come_from_the_store(
    play: Callable[..., PlayedPeer], opened: Callable[..., Peers]
) -> None:
    peer = play()
    peers = opened(peer.url, least_bytes=len(CONTENT) + 1)
    assert read(peers)[:2] == ("", 0)
    assert opened(peer.url).read("", len(CONTENT), 0, memoryview(bytearray(10))) == ("", 0)
    assert opened().read(NAME, len(CONTENT), 0, memoryview(bytearray(10))) == ("", 0)
    assert not peer.requests


def test_a_peer_that_trickles_is_left_at_its_deadline(opened: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of an answer arrives in time, but not all of them."""
    near, far = socket.socketpair()
    clock = Clock()

    class Trickle:
        connection = near

        def recv_into(self, buffer: memoryview) -> int:
            clock.now += 1
            return 1

        def settimeout(self, seconds: float) -> None:
            assert seconds <= 2

    with near, far:
        exchange = module._Exchange(Trickle(), clock, clock.now + 2)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            exchange.receive_into(memoryview(bytearray(100)))


def test_a_peer_that_closes_in_the_middle_fails() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(ranged(0, 5000)[:-7])
        far.shutdown(socket.SHUT_WR)
        exchange = module._Exchange(near, Clock(), Clock.now + 20)
        assert exchange.receive_head().status == 206
        with pytest.raises(RemoteError, match=r"closed the connection after 4,993 of 5,000 bytes"):
            exchange.receive_into(memoryview(bytearray(5000)))


def test_a_peer_that_is_gone_fails_once(opened: Callable[..., Peers]) -> None:
    with socket.socket() as gone:  # which keeps its port from others
        gone.bind(("127.0.0.1", 0))
        peers = opened(f"http://127.0.0.1:{gone.getsockname()[1]}")
        assert read(peers)[:2] == ("", 1)
        assert read(peers)[:2] == ("", 0)
