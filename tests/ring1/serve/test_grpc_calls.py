"""Calls of gRPC in a front whose owner the test plays: whatever ends them, their slots and memory come back."""

import asyncio
import struct

import numpy as np
import pytest
from hpack import Decoder, Encoder
from tritonclient.grpc import service_pb2 as pb

from hps.serve.frontend.grpc_calls import _MESSAGE_BYTES, call_bytes, grpc_connection
from hps.serve.server import listen
from hps.testing.waiting import wait_until_async
from tests.servers.front_service import DIM, vectors_of
from tests.servers.http2_peer import DATA, HEADERS, PREFACE, RESET, Frame, call_headers, frame, message, settings
from tests.servers.on_loop import beside
from tests.servers.played_front import LARGE, playing


def body_of(keys):
    asked = pb.ModelInferRequest(model_name="m", raw_input_contents=[np.asarray(keys, "<i8").tobytes()])
    asked.inputs.add(name="item", datatype="INT64", shape=[len(keys)])
    return message(asked.SerializeToString())


class Caller:
    """A client of HTTP/2."""

    @classmethod
    async def connected(cls, scene, front, **values):
        listener = listen("127.0.0.1", 0)
        server = await front.loop.create_server(lambda: grpc_connection(front), sock=listener)
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(*listener.getsockname())
        server.close()
        self.writer.write(PREFACE + settings(**values))
        self.number = -1
        scene.clients.append(self)
        return self

    def call(self, keys=range(LARGE), part=None, piece=1 << 14, **headers):
        """Begin a call, and send its message in pieces, or a part of it."""
        self.number += 2
        sent = body_of(keys)[:part]
        pieces = [frame(DATA, 0, self.number, sent[at : at + piece]) for at in range(0, len(sent), piece)]
        end = [frame(DATA, 1, self.number)] if part is None else []
        self.writer.write(b"".join([frame(HEADERS, 4, self.number, call_headers(**headers)), *pieces, *end]))

    def leave(self, how):
        """Give the call up, or the connection."""
        if how == "reset":
            self.writer.write(frame(RESET, 0, self.number, struct.pack(">I", 8)))
        elif how == "connection":
            self.writer.transport.abort()

    async def next(self):
        word, flags, number = struct.unpack(">IBI", await self.reader.readexactly(9))
        return Frame(word & 255, flags, number, await self.reader.readexactly(word >> 8))

    async def next_of(self, kind):
        while (one := await self.next()).kind != kind:
            pass
        return one

    async def checked(self, keys=range(LARGE)):
        data = b""
        while not ((one := await self.next()).stream == self.number and one.flags & 1 and one.kind == HEADERS):
            data += one.payload if one.kind == DATA else b""
        found = pb.ModelInferResponse.FromString(data[5:]).raw_output_contents[0]
        assert np.array_equal(np.frombuffer(found, np.float32).reshape(-1, DIM), vectors_of(keys))


def is_clean(front):
    return front.exchange.slots.used == front.memory.held == 0


@beside(playing)
async def test_calls_of_one_connection_are_answered_and_leave_nothing(scene, front, owner, /, monkeypatch):
    caller = await Caller.connected(scene, front)
    for keys, piece in ((range(LARGE), 1 << 14), (range(7, 7 + LARGE), 1 << 14), ([3], 1), (range(LARGE), 1)):
        caller.call(keys, piece=piece)  # the second begins as the first one did
        owner.complete(await owner.job())
        await caller.checked(keys)
        assert is_clean(front)


@pytest.mark.parametrize("how", ["reset", "connection", "deadline"])
@beside(playing)
async def test_the_slot_of_a_call_that_is_given_up_is_free_once_the_owner_has_answered(scene, front, owner, /, how):
    for _ in range(2):
        caller = await Caller.connected(scene, front)
        caller.call(**({"grpc_timeout": "20m"} if how == "deadline" else {}))
        job = await owner.job()
        caller.leave(how)
        await wait_until_async(lambda: front.memory.held == 0, "the message is forgotten")
        (lookup,) = front.exchange.pending.values()
        assert (lookup.requester, front.exchange.slots.used) == (None, 8192)
        owner.complete(job)
        await wait_until_async(lambda: is_clean(front), "its slot is free")


@beside(playing)
async def test_a_front_is_ready_to_no_client_before_its_owner_answers_lookups(scene, front, owner, /, monkeypatch):
    """Whatever the owner's application says."""

    def yes(client, *_, **__):
        client.relay(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        client.relayed(True)

    monkeypatch.setattr(front.owner, "ask", yes)
    triton, health = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/Check"
    model = pb.ModelReadyRequest(name="m").SerializeToString()
    asked = [(f"{triton}ServerReady", b""), (f"{triton}ModelReady", model), (health, b"")]  # field 1 is the answer of each

    async def answers():
        found = []
        for path, request in asked:
            caller = await Caller.connected(scene, front)
            caller.number += 2
            caller.writer.write(frame(HEADERS, 4, caller.number, call_headers(path)))
            caller.writer.write(frame(DATA, 1, caller.number, message(request)))
            while (one := await caller.next()).kind != DATA or one.stream != caller.number:
                pass
            found.append(one.payload[5:])
        return found

    for first in (1000, 2000):
        await wait_until_async(lambda: front.exchange._answers, "the owner has answered")
        assert await answers() == [b"\x08\x01"] * 3
        owner = scene.another_owner(first)  # whose loop does not run yet
        owner.publish(m=owner.deploy())
        assert await answers() == [b"", b"", b"\x08\x02"]
        owner.start()


@beside(playing)
async def test_calls_that_are_refused_are_counted_where_no_lookup_begins(scene, front, owner, /):
    caller = await Caller.connected(scene, front)
    for _ in range(2):
        for headers in ({"grpc_timeout": "soon"}, {"path": "/none"}):
            caller.call([1], **headers)
            while (await caller.next()).kind != HEADERS:
                pass
    assert front.metrics.figures()["counts"] == {"400 /inference.GRPCInferenceService/ModelInfer": 2, "405 unknown": 2}


@beside(playing)
async def test_metadata_of_which_one_alone_may_be_is_refused_where_there_are_two(scene, front, owner, /):
    caller = await Caller.connected(scene, front)
    for name in ("authorization", ":path", "grpc-timeout"):
        for _ in range(2):
            caller.number += 2
            twice = Encoder().encode([(name, "1S", True), (name, "2S", True)], huffman=False)
            block = twice + call_headers() if name.startswith(":") else call_headers() + twice
            caller.writer.write(frame(HEADERS, 5, caller.number, block))
            while (one := await caller.next()).kind != HEADERS:
                pass
            assert b"grpc-status\x013" in one.payload  # INVALID_ARGUMENT
            assert f"got the header '{name}' twice, expected it once".encode() in one.payload
    caller.call([1])
    owner.complete(await owner.job())
    await caller.checked([1])


@pytest.mark.parametrize("how", ["reset", "connection"])
@beside(playing)
async def test_the_slot_of_an_answer_that_is_not_read_is_free_when_its_client_leaves(scene, front, owner, /, how):
    for _ in range(2):
        caller = await Caller.connected(scene, front, window=0)
        caller.call()
        owner.complete(await owner.job())
        while (await caller.next()).kind != HEADERS:
            pass
        assert front.exchange.slots.used == 8192
        caller.leave(how)
        await wait_until_async(lambda: is_clean(front), "its slot is free")


@pytest.mark.parametrize(("part", "how"), [(3, "reset"), (5, "connection"), (100, "reset"), (100, "connection")])
@beside(playing)
async def test_a_message_that_never_ends_is_forgotten_with_its_call(scene, front, owner, /, part, how):
    streams = lambda: [one for connection in front.connections.order for one in connection._streams.values()]  # noqa: E731
    size = len(body_of(range(LARGE))) - 5 + _MESSAGE_BYTES if part >= 5 else 0
    held = lambda: sum(call_bytes(one.request.head.headers) for one in streams()) + size  # noqa: E731
    for _ in range(2):
        caller = await Caller.connected(scene, front)
        caller.call(part=part)
        await wait_until_async(lambda: streams() and front.memory.held == held(), "a part has arrived")
        caller.leave(how)
        await wait_until_async(lambda: not streams(), "the call has ended")
        assert is_clean(front)


@beside(playing)
async def test_a_stream_holds_no_message_that_is_answered(scene, front, owner, /):
    caller = await Caller.connected(scene, front)
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    caller.number += 2
    caller.writer.write(frame(HEADERS, 4, caller.number, call_headers(path)))
    for _ in range(3):
        caller.writer.write(frame(DATA, 0, caller.number, message(b"\x3a\0")))  # list_services
        while (await caller.next()).kind != DATA:
            pass
        [connection] = front.connections.order
        [stream] = connection._streams.values()
        assert front.memory.held == call_bytes(stream.request.head.headers)


WATCH = "/grpc.health.v1.Health/Watch"


def status_of(one):
    return dict(Decoder().decode(one.payload)).get("grpc-status")


async def watched(caller):
    """Watch, and return how the call ended; None if it goes on."""
    caller.number += 2
    headers = call_headers(WATCH)
    caller.writer.write(frame(HEADERS, 4, caller.number, headers) + frame(DATA, 1, caller.number, message(b"")))
    while (one := await caller.next()).stream != caller.number:
        pass
    return status_of(one) if one.flags & 1 else None


@beside(playing)
async def test_a_connection_without_a_token_watches_with_few_calls(scene, front, owner, /):
    for _ in range(2):
        caller = await Caller.connected(scene, front)
        assert [await watched(caller) for _ in range(16)] == [None] * 16
        assert [await watched(caller) for _ in range(3)] == ["8"] * 3
        assert front.owner_health.watchers == 16
        caller.writer.write(frame(RESET, 0, 1, struct.pack(">I", 8)) + frame(RESET, 0, 3, struct.pack(">I", 8)))
        await wait_until_async(lambda: front.owner_health.watchers == 14, "two have ended")
        assert [await watched(caller) for _ in range(3)] == [None, None, "8"]
        caller.leave("connection")
        await wait_until_async(lambda: not front.owner_health.watchers, "all have ended")
    assert is_clean(front)


@beside(playing)
async def test_calls_count_by_their_headers_until_they_end(scene, front, owner, /):
    caller = await Caller.connected(scene, front)
    for size, nth in ((1, 1), (10_000, 2), (10_000, 3)):
        caller.call(part=7, x_more="y" * size)
        held = 4096 * nth + 10_000 * (nth - 1)
        await wait_until_async(lambda: front.memory.held > held, "the headers are there")  # noqa: B023
        assert front.memory.held < held + 12_000
    front.memory.limit_to(front.memory.held * 4 // 3 + 4096)
    caller.call(part=7)
    assert status_of(await caller.next_of(HEADERS)) == "14"
    caller.leave("connection")
    await wait_until_async(lambda: is_clean(front), "nothing is held")
