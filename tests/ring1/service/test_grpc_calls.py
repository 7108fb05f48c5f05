"""Calls of gRPC in a front whose owner the test plays: whatever ends them, their slots and memory come back."""

import asyncio
import struct

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from hps.service.fronts.grpc_calls import grpc_connection
from hps.service.server import listen
from hps.testing.waiting import wait_until_async
from tests.servers.front_service import DIM, vectors_of
from tests.servers.http2_peer import DATA, HEADERS, PREFACE, RESET, Frame, call_headers, frame, message, settings
from tests.servers.played_front import LARGE
from tests.servers.played_front import play as play  # a fixture


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

    def call(self, keys=range(LARGE), part=None, **headers):
        """Begin a call, and send its message or a part of it."""
        self.number += 2
        sent = body_of(keys)
        end = frame(DATA, 1, self.number, sent) if part is None else frame(DATA, 0, self.number, sent[:part])
        self.writer.write(frame(HEADERS, 4, self.number, call_headers(**headers)) + end)

    def reset(self):
        self.writer.write(frame(RESET, 0, self.number, struct.pack(">I", 8)))

    async def next(self):
        word, flags, number = struct.unpack(">IBI", await self.reader.readexactly(9))
        return Frame(word & 255, flags, number, await self.reader.readexactly(word >> 8))

    async def checked(self, keys=range(LARGE)):
        data = b""
        while not ((one := await self.next()).stream == self.number and one.flags & 1 and one.kind == HEADERS):
            data += one.payload if one.kind == DATA else b""
        found = pb.ModelInferResponse.FromString(data[5:]).raw_output_contents[0]
        assert np.array_equal(np.frombuffer(found, np.float32).reshape(-1, DIM), vectors_of(keys))


def is_clean(front):
    return front.exchange.slots.used == front.memory.held == 0


def test_calls_of_one_connection_are_answered_and_leave_nothing(play):
    async def script(scene, front, owner):
        caller = await Caller.connected(scene, front)
        for keys in (range(LARGE), range(7, 7 + LARGE), [3]):  # the second begins as the first one did
            caller.call(keys)
            owner.complete(await owner.job())
            await caller.checked(keys)
            assert is_clean(front)

    play(script)


@pytest.mark.parametrize("how", ["reset", "connection", "deadline"])
def test_the_slot_of_a_call_that_is_given_up_is_free_once_the_owner_has_answered(play, how):
    async def script(scene, front, owner):
        for _ in range(2):
            caller = await Caller.connected(scene, front)
            caller.call(**({"grpc_timeout": "20m"} if how == "deadline" else {}))
            job = await owner.job()
            if how == "reset":
                caller.reset()
            elif how == "connection":
                caller.writer.transport.abort()
            await wait_until_async(lambda: front.memory.held == 0, "the message is forgotten")
            (lookup,) = front.exchange.pending.values()
            assert (lookup.requester, front.exchange.slots.used) == (None, 8192)
            owner.complete(job)
            await wait_until_async(lambda: is_clean(front), "its slot is free")

    play(script)


@pytest.mark.parametrize("how", ["reset", "connection"])
def test_the_slot_of_an_answer_that_is_not_read_is_free_when_its_client_leaves(play, how):
    async def script(scene, front, owner):
        for _ in range(2):
            caller = await Caller.connected(scene, front, window=0)
            caller.call()
            owner.complete(await owner.job())
            while (await caller.next()).kind != HEADERS:
                pass
            assert front.exchange.slots.used == 8192
            if how == "reset":
                caller.reset()
            else:
                caller.writer.transport.abort()
            await wait_until_async(lambda: is_clean(front), "its slot is free")

    play(script)


@pytest.mark.parametrize("part", [3, 5, 100])
@pytest.mark.parametrize("how", ["reset", "connection"])
def test_a_message_that_never_ends_is_forgotten_with_its_call(play, part, how):
    async def script(scene, front, owner):
        for _ in range(2):
            caller = await Caller.connected(scene, front)
            caller.call(part=part)
            held = len(body_of(range(LARGE))) - 5 if part >= 5 else 0
            streams = lambda: [one for connection in front.connections.order for one in connection._streams]  # noqa: E731
            await wait_until_async(lambda: streams() and front.memory.held == held, "a part has arrived")  # noqa: B023
            if how == "reset":
                caller.reset()
            else:
                caller.writer.transport.abort()
            await wait_until_async(lambda: not streams(), "the call has ended")  # noqa: B023
            assert is_clean(front)

    play(script)


def test_a_stream_holds_no_message_that_is_answered(play):
    async def script(scene, front, owner):
        caller = await Caller.connected(scene, front)
        path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        caller.number += 2
        caller.writer.write(frame(HEADERS, 4, caller.number, call_headers(path)))
        for _ in range(3):
            caller.writer.write(frame(DATA, 0, caller.number, message(b"\x3a\0")))  # list_services
            while (await caller.next()).kind != DATA:
                pass
            assert front.memory.held == 0

    play(script)
