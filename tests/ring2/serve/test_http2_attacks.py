"""What no client of gRPC sends: broken and hostile HTTP/2. A healthy client is answered afterwards, and beside it."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from hps.testing.waiting import wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.fronted_service import FrontedService, vectors_of
from tests.servers.http2_peer import KINDS, PREFACE, Peer, call_headers, frame, message, settings

DATA, HEADERS, _, RESET, _, _, PING, _, WINDOW, CONTINUATION = KINDS
KEYS = np.arange(100)
ODD = frame(HEADERS, 4, 1, call_headers())
"""Begins stream 1."""


def request_of(keys: np.ndarray = KEYS) -> bytes:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[keys.astype("<i8").tobytes()])
    request.inputs.add(name="t0", datatype="INT64", shape=[keys.size])
    return message(request.SerializeToString())


def reset(stream: int) -> bytes:
    return frame(RESET, 0, stream, struct.pack(">I", 8))


def check(response: pb.ModelInferResponse) -> None:
    got = np.frombuffer(response.raw_output_contents[0], "<f4").reshape(-1, 32)
    np.testing.assert_array_equal(got, vectors_of(0, KEYS))


def check_answer(data: bytes) -> None:
    assert int.from_bytes(data[1:5], "big") == len(data) - 5
    check(pb.ModelInferResponse.FromString(data[5:]))


def infer(channel: grpc.Channel) -> pb.ModelInferResponse:
    return pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest.FromString(request_of()[5:]))


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
        infer(channel)
        yield
        check(infer(channel))
    wait_until(lambda: service.figure("hps_http_held_bytes") <= held, "no memory is held")
    assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n",
        PREFACE[:10],
        PREFACE + settings() + frame(HEADERS, 4, 1, 11 * b"\xff"),
        PREFACE + settings() + frame(HEADERS, 4, 2, call_headers()),
        PREFACE + settings() + frame(DATA, 1, 1, request_of()),
        PREFACE + settings() + ODD + frame(DATA, 1, 1, request_of()) + frame(DATA, 0, 1, b"x"),
        PREFACE + settings() + frame(DATA, 0, 1, bytes(1 << 14)) * 30,
        PREFACE + settings() + b"".join(frame(HEADERS, 4, n, call_headers()) + reset(n) for n in range(1, 4000, 2)),
        PREFACE + settings() * 5000,
        PREFACE + settings() + frame(PING, 0, 0, bytes(8)) * 5000,
        PREFACE + settings() + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 5000,
    ],
    ids=[
        *("HTTP/1", "a part of the preface", "no HPACK", "an even stream", "data without headers", "data after the end"),
        *("more than the window", "streams that are reset", "settings", "pings", "headers without an end"),
    ],
)
def test_a_broken_connection_harms_no_other(service: FrontedService, sent: bytes) -> None:
    with Peer(service.port, b"") as peer, suppress(ConnectionError, TimeoutError):
        peer.send(sent)  # the fixture looks up beside it
        with grpc.insecure_channel(service.grpc) as channel:
            check(infer(channel))


def test_a_message_that_does_not_arrive_is_refused(service: FrontedService) -> None:
    with Peer(service.port) as peer:
        peer.send(ODD, frame(DATA, 0, 1, request_of()[:50]))
        found, _ = peer.answer(1)
        assert (found["grpc-status"], "request_timeout_s" in found["grpc-message"]) == ("4", True)
        peer.send(frame(HEADERS, 4, 3, call_headers()), frame(DATA, 1, 3, request_of()))  # the connection is good
        check_answer(peer.answer(3)[1])


def test_connections_whose_answers_are_not_read_are_given_up(service: FrontedService) -> None:
    with Peer(service.port, PREFACE + settings(window=0)) as peer:
        before = service.figure("hps_http_aborted_connections_total")
        peer.send(ODD, frame(DATA, 1, 1, request_of()))
        while peer.next(*KINDS) is not None:
            pass
        wait_until(lambda: service.figure("hps_http_aborted_connections_total") > before, "it is counted")


def test_a_stream_of_answers_that_is_not_read_waits(service: FrontedService) -> None:
    request = message(b"\x22\x1einference.GRPCInferenceService")  # 36 bytes, for an answer of some kilobytes
    front = service.children()[1]
    before = resident_bytes(front)
    with Peer(service.port, PREFACE + settings(window=0)) as peer:
        peer.send(frame(HEADERS, 4, 1, call_headers("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")))
        peer.send(*[frame(DATA, 0, 1, 440 * request)] * 60, frame(DATA, 1, 1))
        with grpc.insecure_channel(service.grpc) as channel:
            for _ in range(20):  # it has had turns to read on
                infer(channel)
        assert resident_bytes(front) - before < 20 << 20
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 200_000)))
        got = b""
        while len(got) < 65_000:
            got += peer.next(DATA).payload
        size = int.from_bytes(got[1:5], "big")
        assert got[size + 5 : 2 * size + 10] == got[: size + 5]
        peer.send(reset(1))


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def test_a_stream_that_ends_by_an_error_forgets_the_lookup_under_way(service: FrontedService) -> None:
    with Peer(service.port) as peer, service.paused_engine():
        peer.send(frame(HEADERS, 4, 1, call_headers("/inference.GRPCInferenceService/ModelStreamInfer")))
        peer.send(frame(DATA, 0, 1, request_of()), reset(1))


def test_the_server_itself_ends_calls_at_their_deadlines(service: FrontedService) -> None:
    with Peer(service.port) as peer, service.paused_engine():
        peer.send(frame(HEADERS, 4, 1, call_headers(grpc_timeout="100m")), frame(DATA, 1, 1, request_of()))
        assert peer.answer(1)[0]["grpc-status"] == "4"
