"""The server's half of HTTP/2, frame by frame: windows, tables of headers, and what is given back when a side leaves."""

import struct
from collections.abc import Callable
from typing import Any

import pytest

from hps.ground.memory.bounded_cache import size_of
from hps.serve.frontend.http2 import CALM, COMPRESSION_ERROR, HTTP2Connection, Stream, literal
from tests.servers.http2_peer import KINDS, PREFACE, Frame, call_headers, frame, settings

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = KINDS
MIB = 1 << 20
PART = bytes(1 << 14)
"""The data of the largest frame that is accepted."""
HEAD, DONE = literal(b"a", b"b"), literal(b"grpc-status", b"0")


class Request:
    """What a stream is for; it notes what it is told."""

    def __init__(self, stream: Stream, headers: dict[bytes, bytes]) -> None:
        self.stream, self.headers = stream, headers
        self.received = 0
        self.told: list[str] = []
        for word in ("end", "sent", "lost", "closed"):
            setattr(self, word, lambda word=word: self.told.append(word))

    def data(self, data: memoryview) -> None:
        self.received += len(data)

    def look(self, now: float, request_s: float) -> None: ...


class Desk:
    """The front, its event loop and the transport of one connection.

    Attributes:
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
        self.call_soon, self.call_later = self._soon.append, lambda seconds, call: self._later.append(call)
        self.close, self.get_write_buffer_size = lambda: setattr(self, "state", "closed"), lambda: self.unread
        self.opened = self.closed = self.set_write_buffer_limits = self.get_extra_info = lambda *_: None
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

    def ask(self, number: int, block: bytes | None = None, flags: int = 5) -> Request:
        """Send the headers of a call; by default that is all of it."""
        self.receive(frame(HEADERS, flags, number, call_headers() if block is None else block))
        return self.requests[number]

    def answer(self, number: int, *pieces: Any) -> Request:
        self.connection.send(self.requests[number].stream, HEAD, pieces, DONE)
        return self.requests[number]

    def widen(self, stream: int, size: int) -> None:
        self.receive(frame(WINDOW, 0, stream, struct.pack(">I", size)))

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

    def numbers(self, kind: int) -> list[tuple[int, int]]:
        """Stream and number of each frame of windows, or of resets."""
        return [(one.stream, int.from_bytes(one.payload, "big")) for one in self.sent(kind)]

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

    def pass_time(self) -> None:
        calls, self._later = self._later, []
        for one in calls:
            one()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_connections_window_is_granted_once_for_what_has_arrived(desk: Desk) -> None:
    """A client that is granted more than it has sent must drop the connection: its window overflows."""
    desk.ask(1, flags=4)
    for _ in range(2):
        desk.receive(*[frame(DATA, 0, 1, PART)] * (16 * MIB // len(PART)))
        assert desk.numbers(WINDOW) == []
        desk.receive(frame(DATA, 0, 1, b"x"))
        assert desk.numbers(WINDOW) == [(0, 16 * MIB + 1)]
    assert desk.requests[1].received == 2 * (16 * MIB + 1)


@pytest.mark.parametrize("ends", ["reset", "answer"])
def test_data_of_a_stream_that_has_ended_counts_for_the_connection(desk: Desk, ends: str) -> None:
    """Otherwise the connection's window shrinks with each call that is given up."""
    request = desk.ask(1, flags=4)
    if ends == "reset":
        desk.receive(frame(RESET, 0, 1, bytes(4)))
    else:
        desk.answer(1)
    desk.receive(*[frame(DATA, 8, 1, b"\x00" + PART[1:])] * (16 * MIB // len(PART)))
    desk.receive(frame(DATA, 8, 1, b"\x03xyz" + bytes(3)))  # padding is paid for, too
    assert (desk.numbers(WINDOW), request.received) == ([(0, 16 * MIB + 7)], 0)


def test_a_streams_window_is_granted_again_after_half_of_it_and_not_after_its_end(desk: Desk) -> None:
    request = desk.ask(1, flags=4)
    for _ in range(2):
        for _ in range(MIB // 2 // len(PART)):
            desk.receive(frame(DATA, 0, 1, PART))
            desk.connection.grant(request.stream)
        assert desk.numbers(WINDOW) == []
        desk.receive(frame(DATA, 8, 1, b"\x02x" + bytes(2)))
        desk.connection.grant(request.stream)
        assert desk.numbers(WINDOW) == [(1, MIB // 2 + 4)]
    desk.receive(*[frame(DATA, 0, 1, PART)] * 40, frame(DATA, 1, 1))
    desk.connection.grant(request.stream)
    assert (desk.numbers(WINDOW), request.told) == ([], ["end"])


def test_so_many_streams_are_open_at_once_and_one_more_when_one_has_ended(desk: Desk) -> None:
    opening = lambda *numbers: desk.receive(*(frame(HEADERS, 5, one, call_headers()) for one in numbers))  # noqa: E731
    opening(*range(1, 2 * 256 + 2, 2))
    assert desk.numbers(RESET) == [(513, 7)]
    desk.answer(9)
    opening(515, 517)
    assert desk.numbers(RESET) == [(517, 7)]


@pytest.mark.parametrize("answers", [0, 3])
def test_so_many_streams_may_be_reset_and_one_more_for_each_answer(desk: Desk, answers: int) -> None:
    for number in range(1, 2 * answers, 2):
        desk.ask(number)
        desk.answer(number)
    first, last = 2 * answers + 1, 4 * answers + 2 * 256 + 1
    pairs = [frame(HEADERS, 4, one, call_headers()) + frame(RESET, 0, one, bytes(4)) for one in range(first, last + 1, 2)]
    desk.receive(*pairs[:-1])
    assert desk.sent(GOAWAY) == []
    desk.receive(pairs[-1])
    assert desk.code() == CALM


def test_what_a_client_that_does_not_read_makes_us_say_is_bounded(desk: Desk) -> None:
    ping = frame(PING, 0, 0, bytes(8))
    for _ in range(2):
        desk.connection.pause_writing()
        desk.receive(1024 * ping)
        assert desk.state == "open"
        desk.connection.resume_writing()
        assert len(desk.sent(PING)) == 1024
    desk.connection.pause_writing()
    desk.receive(1025 * ping)
    assert desk.state == "aborted"


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
    "no HPACK": (frame(HEADERS, 4, 1, 11 * b"\xff"), 9),
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


def test_a_connection_begins_with_the_preface() -> None:
    for first in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", PREFACE.replace(b"SM", b"SN"), PREFACE[:-1] + b"x"):
        desk = Desk(first)
        assert (desk.state, desk.code()) == ("closed", 1)


def test_frames_may_come_in_any_pieces(desk: Desk) -> None:
    block = call_headers()
    sent = frame(HEADERS, 8 | 32, 1, b"\x03" + bytes(5) + block[:7] + bytes(3))
    sent += b"".join(frame(CONTINUATION, 4 * (at == len(block) - 1), 1, block[at : at + 1]) for at in range(7, len(block)))
    sent += frame(PRIORITY, 0, 1, bytes(5)) + frame(77, 0, 0, b"unknown") + frame(DATA, 8, 1, b"\x02x" + bytes(2))
    sent += frame(DATA, 0, 1) + frame(HEADERS, 4 | 1, 1, b"\x00\x01x\x01y")  # trailers
    for at in range(len(sent)):
        desk.receive(sent[at : at + 1])
    request = desk.requests[1]
    assert (request.headers[b"te"], request.received, request.told) == (b"trailers", 1, ["end"])
    assert desk.state == "open"


def indexed(number: int) -> bytes:
    """A block that only refers to an entry of the client's table, 62 being the newest."""
    return bytes([0x80 | number])


def added(value: bytes) -> bytes:
    """A block that puts `:path` with this value into the table."""
    return b"\x44" + bytes([len(value)]) + value


def paths(desk: Desk, *blocks: bytes) -> list[str]:
    """The paths of calls with these headers, each of which is answered."""
    numbers = [max(desk.requests, default=-1) + 2 * nth for nth in range(1, len(blocks) + 1)]
    for number, block in zip(numbers, blocks, strict=True):
        desk.ask(number, block)
        desk.answer(number)
    return [desk.requests[number].headers[b":path"].decode() for number in numbers]


A, B, TABLE_40, TABLE_4096 = added(b"/a"), added(b"/b"), b"\x3f\x09" + indexed(4), b"\x3f\xe1\x1f" + indexed(4)


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([A, indexed(62), indexed(62), B, indexed(62), indexed(63), indexed(62)], "a a a b b a b"),
        ([A, A, B, indexed(63), indexed(64), indexed(63)], "a a b a a a"),
        ([TABLE_4096, TABLE_40, TABLE_4096, A, B, indexed(63)], "- - - a b a"),  # of so many bytes
    ],
)
def test_blocks_that_change_the_table_change_it_each_time(desk: Desk, blocks: list[bytes], found: str) -> None:
    """A call would get the path and the token of another: those that are known are forgotten, or decoded again."""
    for _ in range(3):
        assert [path.removeprefix("/") or "-" for path in paths(desk, *blocks)] == found.split()


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


def test_headers_that_repeat_are_decoded_once_and_only_so_many_are_kept(desk: Desk) -> None:
    before = desk.connection.kept_bytes
    for _ in range(2):
        assert paths(desk, *(b"\x04\x03/%02d" % nth for nth in range(66))) == [f"/{nth:02}" for nth in range(66)]
    same = [desk.requests[number].headers is desk.requests[number + 132].headers for number in (1, 131)]
    assert same == [True, False]
    assert size_of(desk.connection._known) <= desk.connection.kept_bytes - before <= 1 << 14


@pytest.mark.parametrize(
    "blocks",
    [
        [literal(b"x", b"%04d" % nth + b"y" * 14_000) for nth in range(64)],
        [literal(b"x%d" % nth, b"y" * 900) for nth in range(64)],
        [b"".join(literal(b"%c%c" % (97 + nth // 26, 97 + nth % 26), b"") for nth in range(100))],
    ],
    ids=["long", "many", "small"],
)
def test_headers_that_never_repeat_leave_little(desk: Desk, blocks: list[bytes]) -> None:
    for block in blocks:
        desk.ask(2 * len(desk.requests) + 1, block)
        desk.answer(2 * len(desk.requests) - 1)
        desk.sent()
    assert size_of(desk.connection._known) <= 1 << 14


def test_a_connection_without_a_call_keeps_nothing_after_a_second(desk: Desk) -> None:
    desk.ask(1)
    desk.answer(1)
    assert desk.connection.kept_bytes > 1 << 16
    now = desk.connection._idle_since
    desk.connection.look(now + 1, 30, 30, 75)
    assert desk.connection.kept_bytes > 1 << 16
    desk.connection.look(now + 1.1, 30, 30, 75)
    assert desk.connection.kept_bytes == 0
    desk.ask(3)  # and it answers as before
    desk.answer(3)
    assert desk.requests[3].told == ["end", "closed"]


def test_a_part_of_a_frame_stays_until_the_rest_arrives(desk: Desk) -> None:
    whole = frame(HEADERS, 5, 1, call_headers())
    desk.receive(whole[:5])
    desk.connection.look(desk.connection._idle_since + 2, 30, 30, 75)
    assert desk.connection.kept_bytes == 1 << 16
    desk.receive(whole[5:])
    assert desk.requests[1].told == ["end"]


def test_an_answer_keeps_within_the_windows_of_its_stream_and_of_the_connection(desk: Desk) -> None:
    for number in (1, 3):
        desk.ask(number)
        desk.answer(number, bytes(60_000))
    assert desk.data(1) == 60_000
    for stream, size, sent in (
        (3, 1000, 0),
        (0, 1, 1),
        (0, 70_000, 60_000 - 65_535 + 60_000 - 1),
    ):
        desk.widen(stream, size)  # what the connection allows is used up first
        assert desk.data(3) == sent
    assert [desk.requests[number].told for number in (1, 3)] == [["end", "closed"]] * 2


def test_a_window_that_new_settings_make_negative_is_paid_back_first(desk: Desk) -> None:
    desk.receive(settings(window=100))
    desk.ask(1)
    request = desk.answer(1, bytes(300))
    assert desk.data() == 100
    desk.receive(settings(window=40))
    desk.widen(1, 60)
    assert desk.data() == 0
    desk.widen(1, 1)
    assert desk.data() == 1
    desk.receive(settings(window=60))
    assert (desk.data(), request.told) == (20, ["end"])


def test_a_window_has_at_most_31_bits(desk: Desk) -> None:
    most = 2**31 - 1 - 65_535
    for number in (1, 3):
        desk.ask(number)
        desk.widen(number, most + (number == 3))
    assert desk.numbers(RESET) == [(3, 3)]
    desk.widen(0, most + 1)
    assert desk.code() == 3


def test_frames_of_an_answer_are_as_large_as_the_client_says(desk: Desk) -> None:
    desk.receive(settings(frame=20_000))
    desk.ask(1)
    desk.answer(1, bytes(7), memoryview(bytes(30_000)), b"", bytes(10_000))
    assert [len(one.payload) for one in desk.sent(DATA)] == [20_000, 20_000, 7]


def test_large_answers_take_turns(desk: Desk) -> None:
    desk.receive(settings(window=0))
    desk.widen(0, 8 * MIB)
    for number in (1, 3):
        desk.ask(number)
        desk.answer(number, bytes(MIB))
    desk.receive(settings(window=MIB))
    share = (1 << 17) // len(PART)
    assert [one.stream for one in desk.sent(DATA)] == ([1] * share + [3] * share) * 8


def test_memory_of_an_answer_is_needed_until_the_client_has_read_it(desk: Desk) -> None:
    for number in (1, 3):
        desk.ask(number)
        desk.stalls = True
        request = desk.answer(number, bytes(100))
        assert request.told == ["end"]
        desk.connection.resume_writing()
        assert request.told == ["end", "closed"]


@pytest.mark.parametrize("when", ["begun", "answered in part", "given up while stalled", "answered while stalled"])
def test_a_client_that_goes_leaves_nothing(desk: Desk, when: str) -> None:
    request, other = desk.ask(1), desk.ask(3, flags=4)
    if when.startswith("answered"):
        desk.stalls = when == "answered while stalled"
        desk.answer(1, bytes(100 if desk.stalls else 100_000))
    elif when == "given up while stalled":
        desk.connection.pause_writing()
        desk.receive(frame(RESET, 0, 1, bytes(4)))
        assert request.told == ["end", "lost"]
    desk.sent()
    for _ in range(2):
        desk.connection.connection_lost(None)
    assert request.told == ["end", *([] if when == "answered while stalled" else ["lost"]), "closed"]
    assert other.told == ["lost", "closed"]
    assert (len(request.stream._out), desk.connection.waiting) == (0, False)
    desk.connection.look(1e12, 1, 1, 1)  # and nothing is said to it
    assert desk.sent(GOAWAY, DATA) == []


def test_a_stream_that_is_reset_is_told_once_and_its_answer_forgotten(desk: Desk) -> None:
    desk.ask(1)
    request = desk.answer(1, bytes(100_000))
    assert desk.data() == 65_535
    desk.receive(*[frame(RESET, 0, 1, bytes(4))] * 2)
    desk.connection.send(request.stream, b"", [bytes(10)], DONE)
    desk.widen(0, 100_000)
    assert (desk.data(), [one for one in request.told if one != "sent"]) == (0, ["end", "lost", "closed"])


@pytest.mark.parametrize(("first", "limit_s"), [("nothing", 5), ("a call", 60), ("a call and half of another", 5)])
def test_an_idle_connection_is_closed_after_its_time(desk: Desk, first: str, limit_s: int) -> None:
    connection = desk.connection
    if first != "nothing":
        desk.ask(1)
        connection.look(1e12, 5, 5, 60)  # a call that is under way keeps it open
        desk.answer(1)
    if first.endswith("another"):
        desk.receive(frame(HEADERS, 5, 3, call_headers())[:12])
    limit = connection._idle_since + limit_s
    connection.look(limit, 5, 5, 60)
    assert desk.state == "open"
    connection.look(limit + 1, 5, 5, 60)
    assert (desk.state, desk.code()) == ("closed", 0)


def test_an_answer_without_progress_is_given_up_and_one_with_progress_is_not(desk: Desk) -> None:
    desk.ask(1)
    desk.widen(0, 10 * MIB)
    request = desk.answer(1, bytes(MIB))
    for now in (10.0, 20.0, 30.0):
        desk.connection.look(now, 5, 5, 60)
        desk.widen(1, 200_000)
    for now in (40.0, 45.0, 45.1):
        assert desk.aborts == []
        desk.connection.look(now, 5, 5, 60)
    assert (len(desk.aborts), desk.numbers(RESET)) == (1, [(1, 8)])
    assert request.told == ["end", "lost", "closed"]


def test_a_connection_whose_client_reads_nothing_is_aborted(desk: Desk) -> None:
    desk.ask(1)
    desk.connection.pause_writing()
    less = MIB - MIB // 8
    for now, desk.unread in ((10.0, MIB), (14.0, MIB), (15.0, less), (20.0, less), (20.1, less)):
        assert desk.state == "open"
        desk.connection.look(now, 5, 5, 60)
    assert (desk.state, len(desk.aborts)) == ("aborted", 1)


def test_answers_that_nobody_reads_are_given_up_when_others_need_their_memory(desk: Desk) -> None:
    for number in (1, 3):
        desk.ask(number)
        desk.answer(number, bytes(MIB))
    desk.connection.look(10.0, 5, 600, 60)
    desk.widen(0, 200_000)
    desk.widen(3, 200_000)
    desk.connection.look(12.0, 5, 600, 60)
    assert desk.connection.unread_since == 12.0, "the other makes progress"
    desk.connection.end_unread(10.0)
    assert (desk.aborts, desk.state) == ([], "open")
    desk.connection.end_unread(11.0)
    assert [desk.requests[number].told[-1] for number in (1, 3)] == ["closed", "end"]
    assert (len(desk.aborts), desk.numbers(RESET)) == (1, [(1, 8)])
    desk.connection.pause_writing()
    desk.unread = MIB
    desk.connection.look(20.0, 5, 600, 60)
    desk.connection.end_unread(20.0)
    assert (desk.connection.unread_since, desk.state) == (20.0, "open")
    desk.connection.end_unread(20.1)
    assert desk.state == "aborted"


def test_a_client_is_told_once_to_leave_and_its_calls_are_answered(desk: Desk) -> None:
    for number, leave, last in ((1, desk.connection.leave, 2**31 - 1), (3, desk.connection.close_if_quiet, 3)):
        desk.ask(number)
        for _ in range(2):
            leave()
        assert [int.from_bytes(one.payload[:4], "big") for one in desk.sent(GOAWAY)] == [last]
    desk.receive(frame(HEADERS, 5, 5, call_headers()))
    assert desk.numbers(RESET) == [(5, 7)]
    for number in (1, 3):
        assert desk.state == "open"
        assert desk.answer(number).told == ["end", "closed"]
        desk.sent()
        desk.pass_time()
    assert desk.state == "closed"


def test_a_client_that_leaves_gets_its_answers(desk: Desk) -> None:
    desk.ask(1)
    desk.receive(frame(GOAWAY, 0, 0, bytes(8)))
    desk.pass_time()
    assert desk.state == "open"
    desk.answer(1, bytes(100))
    assert desk.data() == 100
    desk.pass_time()
    assert desk.state == "closed"
