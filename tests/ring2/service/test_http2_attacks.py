"""What no client of gRPC sends: broken and hostile HTTP/2. A healthy client is answered afterwards, and beside it."""

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from hps.testing.waiting import wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.fronted_service import FrontedService, vectors_of
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
    Peer,
    call_headers,
    frame,
    message,
    settings,
)

KEYS = np.arange(100)
ODD = frame(HEADERS, 4, 1, call_headers())
"""Begins stream 1."""


def request_of(keys: np.ndarray) -> bytes:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[keys.astype("<i8").tobytes()])
    request.inputs.add(name="t0", datatype="INT64", shape=[keys.size])
    return message(request.SerializeToString())


def check_answer(data: bytes, keys: np.ndarray) -> None:
    assert int.from_bytes(data[1:5], "big") == len(data) - 5
    response = pb.ModelInferResponse.FromString(data[5:])
    got = np.frombuffer(response.raw_output_contents[0], "<f4").reshape(-1, 32)
    np.testing.assert_array_equal(got, vectors_of(0, keys))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedService]:
    children = ChildProcesses()
    place = tmp_path_factory.mktemp("attacks")
    try:
        more = {"request_timeout_s": 1.5, "answer_timeout_s": 1.5, "keep_alive_s": 30, "max_connections": 64}
        yield FrontedService(children, place, **more)
    finally:
        children.end()


@pytest.fixture(autouse=True)
def healthy(service: FrontedService) -> Iterator[None]:
    held = service.figure("hps_http_held_bytes")
    with grpc.insecure_channel(service.grpc) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest.FromString(request_of(KEYS)[5:])
        stub.ModelInfer(request)
        yield
        got = np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], "<f4").reshape(-1, 32)
        np.testing.assert_array_equal(got, vectors_of(0, KEYS))
    wait_until(lambda: service.figure("hps_http_held_bytes") <= held, "no memory is held")
    assert "Traceback" not in service.log.read_text()


BROKEN = {
    "a frame of 16,385 bytes": (frame(DATA, 0, 1, bytes(16_385)), 6),
    "data of no stream": (frame(DATA, 0, 0, b"x"), 1),
    "data of a stream that is not open": (frame(DATA, 0, 1, b"x"), 1),
    "an even stream": (frame(HEADERS, 4, 2, call_headers()), 1),
    "another frame within headers": (frame(HEADERS, 0, 1, call_headers()) + frame(PING, 0, 0, bytes(8)), 1),
    "a continuation of nothing": (frame(CONTINUATION, 4, 1), 1),
    "a continuation of another stream": (frame(HEADERS, 0, 1) + frame(CONTINUATION, 4, 3), 1),
    "headers without end": (frame(HEADERS, 0, 1) + 3 * frame(CONTINUATION, 0, 1, bytes(9000)), 11),
    "no HPACK": (frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), 9),
    "headers that inflate": (frame(HEADERS, 4, 1, b"\x40\x01a\x7f\xe9\x1e" + b"b" * 4000 + 40 * b"\xbe"), 9),
    "a header of two lines": (frame(HEADERS, 4, 1, call_headers(x="a\r\nauthorization: b")), 1),
    "a header with capitals": (frame(HEADERS, 4, 1, b"\x00\x01A\x01b"), 1),
    "an empty window": (frame(WINDOW, 0, 0, bytes(4)), 3),
    "too large a window": (frame(WINDOW, 0, 0, struct.pack(">I", 2**31 - 1)), 3),
    "a window of five bytes": (frame(WINDOW, 0, 0, bytes(5)), 6),
    "half a setting": (frame(SETTINGS, 0, 0, bytes(5)), 6),
    "too large a window by settings": (settings(window=2**31), 3),
    "too small frames": (settings(frame=100), 1),
    "a ping of seven bytes": (frame(PING, 0, 0, bytes(7)), 6),
    "a reset of a stream that is not open": (frame(RESET, 0, 1, bytes(4)), 1),
    "a push": (frame(PUSH, 4, 1, bytes(8)), 1),
    "more padding than there is": (ODD + frame(DATA, 8, 1, b"\x05ab"), 1),
    "headers within a stream": (ODD + ODD, 1),
    "data after the end": (ODD + frame(DATA, 1, 1, request_of(KEYS)) + frame(DATA, 0, 1, b"x"), 5),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_frames_end_the_connection(service: FrontedService, name: str) -> None:
    data, code = BROKEN[name]
    with Peer(service.port) as peer:
        peer.send(data)
        goodbye = peer.next(GOAWAY)
        assert goodbye is not None
        assert int.from_bytes(goodbye.payload[4:8], "big") == code
        assert peer.next() is None


def test_http1_is_told_to_go(service: FrontedService) -> None:
    with Peer(service.port, b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n") as peer:
        assert peer.next(GOAWAY) is not None
        assert peer.next() is None


def test_random_bytes_harm_nothing(service: FrontedService) -> None:
    random = np.random.default_rng(5)
    for nth in range(20):
        noise = random.bytes(random.integers(1, 3000))
        if nth % 2:  # frames with right lengths
            kinds = random.integers(0, 12, 30)
            noise = b"".join(
                frame(int(kind), int(random.integers(256)), int(random.integers(5)), random.bytes(random.integers(20)))
                for kind in kinds
            )
        with Peer(service.port, PREFACE + settings() + noise):
            pass


def test_frames_may_come_in_any_pieces(service: FrontedService) -> None:
    body, block = request_of(KEYS), call_headers()
    with Peer(service.port) as peer:
        peer.send(frame(HEADERS, 8 | 32, 1, b"\x03" + bytes(5) + block[:7] + bytes(3)))
        peer.send(*(frame(CONTINUATION, 4 * (at == len(block) - 1), 1, block[at : at + 1]) for at in range(7, len(block))))
        peer.send(frame(PRIORITY, 0, 1, bytes(5)), frame(77, 0, 0, b"unknown"))
        for byte in range(len(body)):
            peer.send(frame(DATA, 8, 1, b"\x02" + body[byte : byte + 1] + bytes(2)))
        peer.send(frame(DATA, 0, 1), frame(HEADERS, 4 | 1, 1, b"\x00\x01x\x01y"))  # trailers
        found, data = peer.answer(1)
    assert found["grpc-status"] == "0"
    check_answer(data, KEYS)


def test_answers_keep_within_windows(service: FrontedService) -> None:
    with Peer(service.port, PREFACE + settings(window=10)) as peer:
        peer.send(ODD, frame(DATA, 1, 1, request_of(KEYS)))
        peer.send(frame(HEADERS, 4, 3, call_headers()), frame(DATA, 1, 3, request_of(KEYS[:1])))
        got = {1: b"", 3: b""}
        ended = set()
        window, allowed = {1: 10, 3: 10}, 65_535
        frames = peer.frames()
        while len(ended) < 2:
            one = next(frames)
            if one.kind == DATA:
                got[one.stream] += one.payload
                window[one.stream] -= len(one.payload)
                allowed -= len(one.payload)
                assert window[one.stream] >= 0
                assert allowed >= 0
                if not window[one.stream]:
                    window[one.stream] = 777
                    peer.send(frame(WINDOW, 0, one.stream, struct.pack(">I", 777)))
            if one.kind in (DATA, HEADERS) and one.flags & 1:
                ended.add(one.stream)
    check_answer(got[1], KEYS)
    check_answer(got[3], KEYS[:1])


def test_settings_change_open_windows_by_the_difference(service: FrontedService) -> None:
    """A window is what is left of it: after 10 bytes that were sent, one of 25 leaves 15 more, and one of 5 takes 20 away."""
    with Peer(service.port, PREFACE + settings(window=10)) as peer:
        peer.send(ODD, frame(DATA, 1, 1, request_of(KEYS)))
        data = peer.next(DATA).payload
        assert len(data) == 10
        peer.send(settings(window=25))
        data += peer.next(DATA).payload
        assert len(data) == 25
        peer.send(settings(window=5), frame(WINDOW, 0, 1, struct.pack(">I", 20)))  # back to nothing
        peer.send(frame(PING, 0, 0, b"in order"))
        assert peer.next(PING).flags & 1  # it has read all that
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 7)))
        data += peer.next(DATA).payload
        assert len(data) == 32
        peer.send(settings(window=100_000, frame=50_000))
        _, more = peer.answer(1)
    check_answer(data + more, KEYS)


def test_streams_beyond_the_limit_are_refused(service: FrontedService) -> None:
    with Peer(service.port, PREFACE + settings(window=0)) as peer:  # no answer ends
        for number in range(1, 601, 2):
            peer.send(frame(HEADERS, 4, number, call_headers()), frame(DATA, 1, number, request_of(KEYS)))
        refused = [peer.next(RESET) for _ in range(300 - 256)]
        assert {int.from_bytes(one.payload, "big") for one in refused} == {7}
        assert [one.stream for one in refused] == [*range(513, 601, 2)]


def test_streams_that_are_reset_again_and_again_end_the_connection(service: FrontedService) -> None:
    resets = [frame(HEADERS, 4, n, call_headers()) + frame(RESET, 0, n, bytes(4)) for n in range(1, 601, 2)]
    with Peer(service.port) as peer:
        peer.send(*resets)
        goodbye = peer.next(GOAWAY)
        assert goodbye is None or int.from_bytes(goodbye.payload[4:8], "big") == 11  # it may be lost: TCP is reset
        assert peer.next() is None


def test_pings_of_a_client_that_does_not_read_end_the_connection(service: FrontedService) -> None:
    pings = 300_000 * frame(PING, 0, 0, bytes(8))
    with Peer(service.port) as peer, pytest.raises(OSError):
        peer.send(pings)


def test_a_message_that_does_not_arrive_is_refused(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        peer.send(ODD, frame(DATA, 0, 1, request_of(KEYS)[:50]))
        found, _ = peer.answer(1)
        assert found["grpc-status"] == "4"
        assert "request_timeout_s" in found["grpc-message"]
        peer.send(frame(HEADERS, 4, 3, call_headers()), frame(DATA, 1, 3, request_of(KEYS)))  # the connection is good
        found, data = peer.answer(3)
        assert found["grpc-status"] == "0"
        check_answer(data, KEYS)


@pytest.mark.parametrize("first", [b"", PREFACE[:10], PREFACE + settings() + ODD[:12]])
def test_connections_without_a_request_are_closed(service: FrontedService, first: bytes) -> None:
    with Peer(service.port, first) as peer:
        assert peer.next() is None


def test_answers_that_are_not_read_are_given_up(service: FrontedService) -> None:
    with Peer(service.port, PREFACE + settings(window=0)) as peer:
        peer.send(ODD, frame(DATA, 1, 1, request_of(KEYS)))
        given_up = peer.next(RESET)
        assert int.from_bytes(given_up.payload, "big") == 8
    with Peer(service.port, PREFACE + settings(window=2**31 - 1) + frame(WINDOW, 0, 0, struct.pack(">I", 2**30))) as peer:
        before = service.figure("hps_http_aborted_connections_total")
        for number in range(1, 401, 2):  # more than the kernel's buffers hold
            peer.send(frame(HEADERS, 4, number, call_headers()), frame(DATA, 1, number, request_of(np.arange(1000))))
        wait_until(lambda: service.figure("hps_http_aborted_connections_total") > before, "the connection is given up")
        peer.socket.setblocking(True)
        assert peer.next() is None


def test_unread_answers_are_given_up_when_others_need_their_memory(tmp_path: Path) -> None:
    """The memory for keys and vectors holds 64 of these lookups; twice as many clients come, and none of them reads."""
    children = ChildProcesses()
    limits = {"answer_timeout_s": 600, "max_held_bytes": 32 << 20, "max_body_bytes": 1 << 20}
    try:
        small = FrontedService(children, tmp_path, **limits)
        slots = (16 << 20) // (1 << 18)
        keys = np.arange(1000)
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(small.port, PREFACE + settings(window=0))) for _ in range(2 * slots // 8)]
            for peer in peers:
                for number in range(1, 17, 2):
                    peer.send(frame(HEADERS, 4, number, call_headers()), frame(DATA, 1, number, request_of(keys)))
            given_up = peers[0].next(RESET)
            assert int.from_bytes(given_up.payload, "big") == 8
            with grpc.insecure_channel(small.grpc) as channel:
                stub = pb_grpc.GRPCInferenceServiceStub(channel)

                def answered() -> bool:
                    try:
                        answer = stub.ModelInfer(pb.ModelInferRequest.FromString(request_of(keys)[5:]))
                    except grpc.RpcError as error:  # the others may have their turn of a second first
                        if error.code() != grpc.StatusCode.UNAVAILABLE:
                            raise
                        return False
                    got = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(-1, 32)
                    np.testing.assert_array_equal(got, vectors_of(0, keys))
                    return True

                for _ in range(20):
                    wait_until(answered, "a lookup is answered")
        wait_until(lambda: small.figure("hps_http_aborted_connections_total") >= slots // 2, "the unread answers are counted")
    finally:
        children.end()


def test_a_stream_of_answers_that_is_not_read_waits(service: FrontedService) -> None:
    reflect = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    request = message(b"\x22\x1einference.GRPCInferenceService")  # 36 bytes, for an answer of some kilobytes
    front = service.children()[1]
    before = resident_bytes(front)
    with Peer(service.port, PREFACE + settings(window=0)) as peer:
        peer.send(frame(HEADERS, 4, 1, call_headers(reflect)))
        for _ in range(60):
            peer.send(frame(DATA, 0, 1, 440 * request))
        peer.send(frame(DATA, 1, 1))
        with grpc.insecure_channel(service.grpc) as channel:
            for _ in range(20):  # it has had turns to read on
                pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest.FromString(request_of(KEYS)[5:]))
        assert resident_bytes(front) - before < 20 << 20
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 200_000)))
        got = b""
        while len(got) < 65_000:
            got += peer.next(DATA).payload
        size = int.from_bytes(got[1:5], "big")
        assert got[size + 5 : 2 * size + 10] == got[: size + 5]
        peer.send(frame(RESET, 0, 1, struct.pack(">I", 8)))


def test_a_stream_that_ends_by_an_error_forgets_the_lookup_under_way(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        with service.paused_owner():
            stream = call_headers("/inference.GRPCInferenceService/ModelStreamInfer")
            peer.send(frame(HEADERS, 4, 1, stream), frame(DATA, 0, 1, request_of(KEYS)))
            peer.send(frame(DATA, 0, 1, b"\1" + request_of(KEYS)[1:]))  # compressed, by nothing
            found, _ = peer.answer(1)
        assert found["grpc-status"] == "12"


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def test_the_server_itself_ends_calls_at_their_deadlines(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        with service.paused_owner():
            peer.send(frame(HEADERS, 4, 1, call_headers(grpc_timeout="100m")), frame(DATA, 1, 1, request_of(KEYS)))
            found, _ = peer.answer(1)
        assert (found["grpc-status"], "deadline" in found["grpc-message"]) == ("4", True)
        peer.send(frame(HEADERS, 4, 3, call_headers(grpc_timeout="soon")))
        found, _ = peer.answer(3)
        assert found["grpc-status"] == "3"


def test_other_content_types_are_no_calls(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        peer.send(frame(HEADERS, 5, 1, call_headers(content_type="application/json")))
        assert peer.answer(1)[0][":status"] == "415"


def test_a_client_that_leaves_gets_its_answers(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        peer.send(ODD, frame(DATA, 1, 1, request_of(KEYS)), frame(GOAWAY, 0, 0, bytes(8)))
        check_answer(peer.answer(1)[1], KEYS)
        assert peer.next() is None


def test_many_connections_leave_room_for_others(service: FrontedService) -> None:
    peers = [Peer(service.port) for _ in range(200)]
    with grpc.insecure_channel(service.grpc) as channel:
        request = pb.ModelInferRequest.FromString(request_of(KEYS)[5:])
        assert (
            pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, wait_for_ready=True, timeout=20).raw_output_contents
        )
    for peer in peers:
        peer.socket.close()
