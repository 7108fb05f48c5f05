"""The server's half of HTTP/2, frame by frame: windows, tables of headers, and what is given back when a side leaves."""

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from hps.service.fronts.http2 import CALM, COMPRESSION_ERROR, HTTP2Connection, Stream, literal
from tests.servers.http2_peer import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RESET,
    SETTINGS,
    WINDOW,
    Frame,
    call_headers,
    frame,
    settings,
)

MIB = 1 << 20
PART = bytes(1 << 14)
"""The data of the largest frame that is accepted."""
HEAD, DONE = literal(b"a", b"b"), literal(b"grpc-status", b"0")


class Request:
    """What a stream is for; it does what the test says, and notes what it is told."""

    def __init__(self, stream: Stream, headers: dict[bytes, bytes]) -> None:
        self.stream, self.headers = stream, headers
        self.received = 0
        self.told: list[str] = []

    def data(self, data: memoryview) -> None:
        self.received += len(data)

    def end(self) -> None:
        self.told.append("end")

    def sent(self) -> None:
        self.told.append("sent")

    def lost(self) -> None:
        self.told.append("lost")

    def closed(self) -> None:
        self.told.append("closed")

    def look(self, now: float, request_s: float) -> None:
        self.looked = now


class Desk:
    """The front, its event loop and the transport of one connection.

    Attributes:
        written: frames that have left.
        stalls: whether the client stops to read with the next write.
    """

    grpc_tls = None
    leaving = False

    def __init__(self, first: bytes = PREFACE + settings()) -> None:
        self.loop = self.refusals = self
        self.requests: dict[int, Request] = {}
        self.aborts: list[str] = []
        self.state = "open"
        self.stalls = False
        self.unread = 0
        self._written, self._soon, self._later = bytearray(), list[Callable[[], None]](), list[Callable[[], None]]()
        self.connection = HTTP2Connection(self, self.begin)  # type: ignore[arg-type]
        self.connection.connection_made(self)  # type: ignore[arg-type]
        self.sent()
        self.receive(first)

    def begin(self, connection: HTTP2Connection, stream: Stream, headers: dict[bytes, bytes]) -> Any:
        self.requests[stream.id] = Request(stream, headers)
        return self.requests[stream.id]

    # -- the client's side

    def receive(self, *frames: bytes) -> None:
        """Bring bytes of the client, as a socket does."""
        data = b"".join(frames)
        while data and self.state == "open":
            room = self.connection.get_buffer(-1)
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    def ask(self, number: int, block: bytes | None = None, flags: int = 4) -> Request:
        """Begin a stream."""
        self.receive(frame(HEADERS, flags, number, call_headers() if block is None else block))
        return self.requests[number]

    def sent(self, *kinds: int) -> list[Frame]:
        """Take the frames that were sent since the last call, of some kinds."""
        while self._soon:
            self._soon.pop(0)()
        found, at = [], 0
        while at < len(self._written):
            word, flags, number = struct.unpack_from(">IBI", self._written, at)
            end = at + 9 + (word >> 8)
            found.append(Frame(word & 255, flags, number, bytes(self._written[at + 9 : end])))
            at = end
        self._written.clear()
        return [one for one in found if one.kind in kinds]

    def data(self, number: int = 1) -> int:
        """Bytes of a stream that were sent since the last call."""
        return sum(len(one.payload) for one in self.sent(DATA) if one.stream == number)

    def windows(self) -> list[tuple[int, int]]:
        return [(one.stream, int.from_bytes(one.payload, "big")) for one in self.sent(WINDOW)]

    def code(self) -> int:
        """With which error the connection was ended."""
        (goodbye,) = self.sent(GOAWAY)
        return int.from_bytes(goodbye.payload[4:8], "big")

    # -- transport, event loop, front

    def writelines(self, pieces: list[bytes]) -> None:
        self._written += b"".join(pieces)
        if self.stalls:
            self.stalls = False
            self.connection.pause_writing()

    def abort(self, *what: str) -> None:
        if what:
            self.aborts.append(what[0])
        else:
            self.state = "aborted"

    def close(self) -> None:
        self.state = "closed"

    def closed(self, connection: object) -> None:
        self.aborts.append("gone")

    def opened(self, connection: object) -> None: ...

    def set_write_buffer_limits(self, size: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._later.append(call)

    def pass_time(self) -> None:
        calls, self._later = self._later, []
        for one in calls:
            one()


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- what clients may send ----------------------------------------------------------------------------------------------


def test_the_connections_window_is_granted_once_for_what_has_arrived(desk: Desk) -> None:
    """A client that is granted more than it has sent must drop the connection: its window overflows."""
    desk.ask(1)
    for _ in range(2):
        for _ in range(16 * MIB // len(PART)):
            desk.receive(frame(DATA, 0, 1, PART))
        assert desk.windows() == []
        desk.receive(frame(DATA, 0, 1, b"x"))
        assert desk.windows() == [(0, 16 * MIB + 1)]
    assert desk.requests[1].received == 2 * (16 * MIB + 1)


@pytest.mark.parametrize("ends", ["reset", "answer"])
def test_data_of_a_stream_that_has_ended_counts_for_the_connection(desk: Desk, ends: str) -> None:
    """Otherwise the connection's window shrinks with each call that is given up."""
    request = desk.ask(1)
    if ends == "reset":
        desk.receive(frame(RESET, 0, 1, bytes(4)))
    else:
        desk.connection.send(request.stream, HEAD, (), DONE)
    for _ in range(16 * MIB // len(PART)):
        desk.receive(frame(DATA, 8, 1, b"\x00" + PART[1:]))
    desk.receive(frame(DATA, 8, 1, b"\x03xyz" + bytes(3)))  # padding is paid for, too
    assert desk.windows() == [(0, 16 * MIB + 7)]
    assert request.received == 0


def test_a_streams_window_is_granted_again_after_half_of_it_and_not_after_its_end(desk: Desk) -> None:
    request = desk.ask(1)
    for _ in range(2):
        for _ in range(MIB // 2 // len(PART)):
            desk.receive(frame(DATA, 0, 1, PART))
            desk.connection.grant(request.stream)
        assert desk.windows() == []
        desk.receive(frame(DATA, 8, 1, b"\x02x" + bytes(2)))
        desk.connection.grant(request.stream)
        assert desk.windows() == [(1, MIB // 2 + 4)]
    desk.receive(*[frame(DATA, 0, 1, PART)] * 40, frame(DATA, 1, 1))
    desk.connection.grant(request.stream)
    assert desk.windows() == []
    assert request.told == ["end"]


def test_so_many_streams_are_open_at_once_and_one_more_when_one_has_ended(desk: Desk) -> None:
    block = call_headers()
    for number in range(1, 2 * 256, 2):
        desk.receive(frame(HEADERS, 5, number, block))
    assert desk.sent(RESET) == []
    desk.receive(frame(HEADERS, 5, 513, block))
    assert [(one.stream, one.payload[-1]) for one in desk.sent(RESET)] == [(513, 7)]
    desk.connection.send(desk.requests[9].stream, HEAD, (), DONE)
    desk.receive(frame(HEADERS, 5, 515, block), frame(HEADERS, 5, 517, block))
    assert [one.stream for one in desk.sent(RESET)] == [517]


@pytest.mark.parametrize("answers", [0, 3])
def test_so_many_streams_may_be_reset_and_one_more_for_each_answer(desk: Desk, answers: int) -> None:
    block, number = call_headers(), 1
    for number in range(1, 2 * answers, 2):
        desk.receive(frame(HEADERS, 5, number, block))
        desk.connection.send(desk.requests[number].stream, HEAD, (), DONE)
    for number in range(2 * answers + 1, 2 * answers + 1 + 2 * (256 + answers), 2):
        desk.receive(frame(HEADERS, 4, number, block), frame(RESET, 0, number, bytes(4)))
    assert desk.sent(GOAWAY) == []
    desk.receive(frame(HEADERS, 4, number + 2, block), frame(RESET, 0, number + 2, bytes(4)))
    assert desk.code() == CALM


def test_what_a_client_that_does_not_read_makes_us_say_is_bounded(desk: Desk) -> None:
    for _ in range(2):
        desk.connection.pause_writing()
        desk.receive(*[frame(PING, 0, 0, bytes(8))] * 1024)
        assert desk.state == "open"
        desk.connection.resume_writing()
        assert len(desk.sent(PING)) == 1024
    desk.connection.pause_writing()
    with suppress(AttributeError):
        desk.receive(*[frame(PING, 0, 0, bytes(8))] * 1025)
    assert desk.state == "aborted"


# -- what is no HTTP/2 --------------------------------------------------------------------------------------------------

ODD = frame(HEADERS, 4, 1, call_headers())
"""Begins stream 1."""
BROKEN = {
    "a frame of 16,385 bytes": (frame(DATA, 0, 1, bytes(16_385)), 6),
    "data of no stream": (frame(DATA, 0, 0, b"x"), 1),
    "data of a stream that is not open": (frame(DATA, 0, 1, b"x"), 1),
    "an even stream": (frame(HEADERS, 4, 2, call_headers()), 1),
    "a stream again": (ODD + frame(DATA, 1, 1) + frame(HEADERS, 4, 3, call_headers()) + ODD, 1),
    "another frame within headers": (frame(HEADERS, 0, 1, call_headers()) + frame(PING, 0, 0, bytes(8)), 1),
    "a continuation of nothing": (frame(CONTINUATION, 4, 1), 1),
    "a continuation of another stream": (frame(HEADERS, 0, 1) + frame(CONTINUATION, 4, 3), 1),
    "headers without end": (frame(HEADERS, 0, 1) + 3 * frame(CONTINUATION, 0, 1, bytes(9000)), 11),
    "no HPACK": (frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), 9),
    "headers that inflate": (frame(HEADERS, 4, 1, b"\x40\x01a\x7f\xe9\x1e" + b"b" * 4000 + 40 * b"\xbe"), 9),
    "a header of two lines": (frame(HEADERS, 4, 1, call_headers(x="a\r\nauthorization: b")), 1),
    "a header with capitals": (frame(HEADERS, 4, 1, b"\x00\x01A\x01b"), 1),
    "an empty window": (frame(WINDOW, 0, 0, bytes(4)), 3),
    "a window of five bytes": (frame(WINDOW, 0, 0, bytes(5)), 6),
    "half a setting": (frame(SETTINGS, 0, 0, bytes(5)), 6),
    "too large a window by settings": (settings(window=2**31), 3),
    "too small frames": (settings(frame=16_383), 1),
    "too large frames": (settings(frame=1 << 24), 1),
    "a ping of seven bytes": (frame(PING, 0, 0, bytes(7)), 6),
    "a reset of a stream that is not open": (frame(RESET, 0, 1, bytes(4)), 1),
    "a push": (frame(PUSH, 4, 1, bytes(8)), 1),
    "more padding than there is": (ODD + frame(DATA, 8, 1, b"\x03ab"), 1),
    "headers within a stream": (ODD + ODD, 1),
    "data after the end": (ODD + frame(DATA, 1, 1, b"x") + frame(DATA, 0, 1, b"x"), 5),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_frames_end_the_connection(desk: Desk, name: str) -> None:
    data, code = BROKEN[name]
    desk.receive(data)
    assert (desk.state, desk.code()) == ("closed", code)


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSN\r\n\r\n", PREFACE[:-1] + b"x"]
)
def test_a_connection_begins_with_the_preface(first: bytes) -> None:
    desk = Desk(first)
    assert (desk.state, desk.code()) == ("closed", 1)


def test_frames_may_come_in_any_pieces(desk: Desk) -> None:
    block = call_headers()
    sent = frame(HEADERS, 8 | 32, 1, b"\x03" + bytes(5) + block[:7] + bytes(3))
    sent += b"".join(frame(CONTINUATION, 4 * (at == len(block) - 1), 1, block[at : at + 1]) for at in range(7, len(block)))
    sent += (
        frame(PRIORITY, 0, 1, bytes(5))
        + frame(77, 0, 0, b"unknown")
        + frame(DATA, 8, 1, b"\x02x" + bytes(2))
        + frame(DATA, 0, 1)
    )
    sent += frame(HEADERS, 4 | 1, 1, b"\x00\x01x\x01y")  # trailers
    for at in range(len(sent)):
        desk.receive(sent[at : at + 1])
    request = desk.requests[1]
    assert (request.headers[b"te"], request.received, request.told) == (b"trailers", 1, ["end"])
    assert desk.state == "open"


# -- headers ------------------------------------------------------------------------------------------------------------


def indexed(number: int) -> bytes:
    """A block that only refers to an entry of the client's table, 62 being the newest."""
    return bytes([0x80 | number])


def added(value: bytes) -> bytes:
    """A block that puts `:path` with this value into the table."""
    return b"\x44" + bytes([len(value)]) + value


def paths(desk: Desk, *blocks: bytes) -> list[str]:
    """The paths of calls with these headers, each of which is answered."""
    found = []
    for block in blocks:
        request = desk.ask(max(desk.requests, default=-1) + 2, block, 5)
        desk.connection.send(request.stream, HEAD, (), DONE)
        found.append(request.headers[b":path"].decode())
    return found


def test_known_blocks_of_headers_are_forgotten_when_the_table_that_they_refer_to_changes(desk: Desk) -> None:
    """A call would get the path and the token of another."""
    for _ in range(3):
        assert paths(desk, added(b"/a"), indexed(62), indexed(62)) == ["/a"] * 3
        assert paths(desk, added(b"/b"), indexed(62), indexed(63), indexed(62)) == ["/b", "/b", "/a", "/b"]


def test_a_block_that_changes_the_table_changes_it_each_time(desk: Desk) -> None:
    for _ in range(2):
        assert paths(desk, added(b"/a"), added(b"/a"), added(b"/b")) == ["/a", "/a", "/b"]
        assert paths(desk, indexed(63), indexed(64), indexed(63)) == ["/a"] * 3


def test_a_full_table_changes_without_becoming_longer(desk: Desk) -> None:
    """Each entry of these takes 47 bytes of 4,096."""
    values = [b"/path-%04d" % nth for nth in range(4096 // 47 + 20)]
    for nth, value in enumerate(values):
        assert paths(desk, added(value), indexed(62), indexed(62)) == [value.decode()] * 3
        if nth:
            assert paths(desk, indexed(63)) == [values[nth - 1].decode()]


def test_a_table_that_the_client_empties_knows_nothing_more(desk: Desk) -> None:
    assert paths(desk, added(b"/a"), indexed(62)) == ["/a"] * 2
    assert paths(desk, b"\x20" + b"\x3f\xe1\x1f" + added(b"/b"), indexed(62)) == ["/b"] * 2  # of 0, then of 4,096 bytes
    desk.receive(frame(HEADERS, 5, 2 * len(desk.requests) + 1, indexed(63)))
    assert desk.code() == COMPRESSION_ERROR


def test_a_block_that_changes_the_size_of_the_table_changes_it_each_time(desk: Desk) -> None:
    """The client's next entries would not be where it says."""
    small, large = b"\x3f\x09" + indexed(4), b"\x3f\xe1\x1f" + indexed(4)  # of 40 and of 4,096 bytes
    assert paths(desk, large, small, large) == ["/"] * 3
    assert paths(desk, added(b"/a"), added(b"/b"), indexed(63)) == ["/a", "/b", "/a"]


def test_headers_that_repeat_are_decoded_once_and_only_so_many_are_kept(desk: Desk) -> None:
    blocks = [b"\x04" + bytes([3]) + b"/%02d" % nth for nth in range(66)]
    for _ in range(2):
        assert paths(desk, *blocks) == [f"/{nth:02}" for nth in range(66)]
    numbers = [len(blocks) * 2 + 1, len(blocks) * 2 + 131]
    found = [desk.requests[one].headers for one in numbers]
    assert len(desk.connection._known) == 64
    assert found[0] is desk.requests[1].headers
    assert found[1] is not desk.requests[131].headers


# -- what is sent -------------------------------------------------------------------------------------------------------


def test_an_answer_keeps_within_the_windows_of_its_stream_and_of_the_connection(desk: Desk) -> None:
    for number in (1, 3):
        desk.ask(number, flags=5)
        desk.connection.send(desk.requests[number].stream, HEAD, [bytes(60_000)], DONE)
    assert desk.data(1) == 60_000
    desk.receive(frame(WINDOW, 0, 3, struct.pack(">I", 1000)))
    assert desk.data(3) == 0  # the connection's is used up
    desk.receive(frame(WINDOW, 0, 0, struct.pack(">I", 1)))
    assert desk.data(3) == 1
    desk.receive(frame(WINDOW, 0, 0, struct.pack(">I", 70_000)))
    assert desk.data(3) == 60_000 - 65_535 + 60_000 - 1
    assert [desk.requests[number].told for number in (1, 3)] == [["end", "closed"]] * 2


def test_a_window_that_new_settings_make_negative_is_paid_back_first(desk: Desk) -> None:
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)))
    request = desk.ask(1, flags=5)
    desk.connection.send(request.stream, HEAD, [bytes(300)], DONE)
    assert desk.data() == 100
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 40)))
    desk.receive(frame(WINDOW, 0, 1, struct.pack(">I", 60)))
    assert desk.data() == 0
    desk.receive(frame(WINDOW, 0, 1, struct.pack(">I", 1)))
    assert desk.data() == 1
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 60)))
    assert desk.data() == 20
    assert request.told == ["end"]


@pytest.mark.parametrize(
    ("first", "more", "code"), [(1, 2**31 - 1 - 65_535, None), (1, 2**31 - 65_535, 3), (0, 2**31 - 65_535, 3)]
)
def test_a_window_has_at_most_31_bits(desk: Desk, first: int, more: int, code: int | None) -> None:
    desk.ask(1)
    desk.receive(frame(WINDOW, 0, first, struct.pack(">I", more)))
    found = [one.payload[-1] for one in desk.sent(RESET)] if first else [desk.code()]
    assert found == ([] if code is None else [code])


def test_frames_of_an_answer_are_as_large_as_the_client_says(desk: Desk) -> None:
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 20_000)))
    desk.ask(1, flags=5)
    pieces = [bytes(7), memoryview(bytes(30_000)), b"", bytes(10_000)]
    desk.connection.send(desk.requests[1].stream, HEAD, pieces, DONE)
    assert [len(one.payload) for one in desk.sent(DATA)] == [20_000, 20_000, 7]


def test_large_answers_take_turns(desk: Desk) -> None:
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)), frame(WINDOW, 0, 0, struct.pack(">I", 8 * MIB)))
    for number in (1, 3):
        desk.connection.send(desk.ask(number, flags=5).stream, HEAD, [bytes(MIB)], DONE)
    desk.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, MIB)))
    share = (1 << 17) // len(PART)
    assert [one.stream for one in desk.sent(DATA)] == ([1] * share + [3] * share) * 8


# -- those who leave ----------------------------------------------------------------------------------------------------


def test_memory_of_an_answer_is_needed_until_the_client_has_read_it(desk: Desk) -> None:
    for number in (1, 3):
        request = desk.ask(number, flags=5)
        desk.stalls = True
        desk.connection.send(request.stream, HEAD, [bytes(100)], DONE)
        assert request.told == ["end"]
        desk.connection.resume_writing()
        assert request.told == ["end", "closed"]


@pytest.mark.parametrize("when", ["begun", "answered in part", "given up while stalled", "answered while stalled"])
def test_a_client_that_goes_leaves_nothing(desk: Desk, when: str) -> None:
    request, other = desk.ask(1, flags=5), desk.ask(3)
    if when == "answered in part":
        desk.connection.send(request.stream, HEAD, [bytes(100_000)], DONE)
    elif when == "answered while stalled":
        desk.stalls = True
        desk.connection.send(request.stream, HEAD, [bytes(100)], DONE)
    elif when == "given up while stalled":
        desk.connection.pause_writing()
        desk.receive(frame(RESET, 0, 1, bytes(4)))
        assert request.told == ["end", "lost"]
    desk.sent()
    for _ in range(2):
        desk.connection.connection_lost(None)
    lost = [] if when == "answered while stalled" else ["lost"]
    assert request.told == ["end", *lost, "closed"]
    assert other.told == ["lost", "closed"]
    assert (request.stream._out, desk.connection.waiting) == (type(request.stream._out)(), False)
    desk.connection.look(1e12, 1, 1, 1)  # and nothing is said to it
    assert desk.sent(GOAWAY, DATA) == []


def test_a_stream_that_is_reset_is_told_once_and_its_answer_forgotten(desk: Desk) -> None:
    request = desk.ask(1, flags=5)
    desk.connection.send(request.stream, HEAD, [bytes(100_000)], DONE)
    assert desk.data() == 65_535
    desk.receive(frame(RESET, 0, 1, bytes(4)), frame(RESET, 0, 1, bytes(4)))
    desk.connection.send(request.stream, b"", [bytes(10)], DONE)
    desk.receive(frame(WINDOW, 0, 0, struct.pack(">I", 100_000)))
    assert desk.data() == 0
    assert [one for one in request.told if one != "sent"] == ["end", "lost", "closed"]


@pytest.mark.parametrize("completed", [False, True])
def test_an_idle_connection_is_closed_after_its_time(desk: Desk, completed: bool) -> None:
    connection = desk.connection
    if completed:
        request = desk.ask(1, flags=5)
        connection.look(1e12, 5, 5, 60)  # a call that is under way keeps it open
        connection.send(request.stream, HEAD, (), DONE)
    limit = connection._idle_since + (60 if completed else 5)
    connection.look(limit, 5, 5, 60)
    assert desk.state == "open"
    connection.look(limit + 1, 5, 5, 60)
    assert (desk.state, desk.code()) == ("closed", 0)


def test_an_answer_without_progress_is_given_up_and_one_with_progress_is_not(desk: Desk) -> None:
    request = desk.ask(1, flags=5)
    desk.receive(frame(WINDOW, 0, 0, struct.pack(">I", 10 * MIB)))
    desk.connection.send(request.stream, HEAD, [bytes(MIB)], DONE)
    for now in (10.0, 20.0, 30.0):
        desk.connection.look(now, 5, 5, 60)
        desk.receive(frame(WINDOW, 0, 1, struct.pack(">I", 200_000)))
    desk.connection.look(40.0, 5, 5, 60)
    desk.connection.look(45.0, 5, 5, 60)
    assert desk.aborts == []
    desk.connection.look(45.1, 5, 5, 60)
    assert len(desk.aborts) == 1
    assert [(one.stream, one.payload[-1]) for one in desk.sent(RESET)] == [(1, 8)]
    assert request.told == ["end", "lost", "closed"]


def test_a_connection_whose_client_reads_nothing_is_aborted(desk: Desk) -> None:
    desk.ask(1, flags=5)
    desk.connection.pause_writing()
    desk.unread = MIB
    for now, unread in ((10.0, MIB), (14.0, MIB), (15.0, MIB - MIB // 8), (20.0, MIB - MIB // 8), (20.1, MIB - MIB // 8)):
        assert desk.state == "open"
        desk.unread = unread
        desk.connection.look(now, 5, 5, 60)
    assert (desk.state, len(desk.aborts)) == ("aborted", 1)


def test_a_client_is_told_once_to_leave_and_its_calls_are_answered(desk: Desk) -> None:
    request = desk.ask(1, flags=5)
    for _ in range(2):
        desk.connection.leave()
    assert [one.payload[:4] for one in desk.sent(GOAWAY)] == [b"\x7f\xff\xff\xff"]
    later = desk.ask(3, flags=5)
    for _ in range(2):
        desk.connection.close_if_quiet()
    assert [one.payload[:4] for one in desk.sent(GOAWAY)] == [bytes([0, 0, 0, 3])]
    desk.receive(frame(HEADERS, 5, 5, call_headers()))
    assert [one.stream for one in desk.sent(RESET)] == [5]
    for one in (request, later):
        assert desk.state == "open"
        desk.connection.send(one.stream, HEAD, (), DONE)
        desk.sent()
        desk.pass_time()
    assert desk.state == "closed"
    assert request.told == later.told == ["end", "closed"]
