"""Calls of gRPC in a frontend whose engine the test plays: whatever ends them, their slots and memory come back."""

import asyncio
import struct
import time
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import numpy as np
import pytest
from hpack import Decoder
from tritonclient.grpc import service_pb2 as pb

from hps.serve.frontend import grpc_server
from hps.serve.frontend.grpc_server import GrpcServer
from hps.serve.frontend.supervisor import bind
from hps.testing.waiting import wait_until_async
from tests.servers.front_service import DIM, vectors_of
from tests.servers.http2_peer import DATA, HEADERS, PREFACE, RESET, Frame, call_headers, frame, message, settings
from tests.servers.on_loop import beside
from tests.servers.played_front import LARGE, playing

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
WATCH = "/grpc.health.v1.Health/Watch"
CODE = grpc.StatusCode


def body_of(keys):
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[np.asarray(keys, "<i8").tobytes()])
    request.inputs.add(name="item", datatype="INT64", shape=[len(keys)])
    return request.SerializeToString()


def check(data, keys=range(LARGE)):
    found = pb.ModelInferResponse.FromString(data).raw_output_contents[0]
    assert np.array_equal(np.frombuffer(found, np.float32).reshape(-1, DIM), vectors_of(keys))


def is_clean(front):
    return front.exchange.slots.used == front.memory.used == 0 and not front.grpc._calls and not front.grpc._unknown


@asynccontextmanager
async def serving(directory):
    """A frontend that serves gRPC, its engine, a channel to it, and its port."""
    async with playing(directory) as (_, front, engine):
        with bind("127.0.0.1", 0, shared=True) as place:
            port = place.getsockname()[1]
            front.grpc = GrpcServer(front, place.getsockname())
            await front.grpc.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield front, engine, channel, port
            await wait_until_async(lambda: is_clean(front), "nothing is held")


class RawCaller:
    """A client that sends frames of HTTP/2."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, port, **values):
        self = cls(*await asyncio.open_connection("127.0.0.1", port))
        self.send(PREFACE + settings(**values))
        try:
            yield self
        finally:
            self.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    def send(self, *frames):
        self._writer.write(b"".join(frames))

    def close(self):
        self._writer.transport.abort()

    async def next_of(self, *kinds):
        while True:
            word, flags, number = struct.unpack(">IBI", await self._reader.readexactly(9))
            found = Frame(word & 255, flags, number, await self._reader.readexactly(word >> 8))
            if found.kind in kinds:
                return found


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


@beside(serving)
async def test_calls_are_answered_and_leave_nothing(front, engine, channel, port, /):
    infer = channel.unary_unary(INFER)
    for keys in (range(LARGE), range(7, 7 + LARGE), [3]):
        call = infer(body_of(keys))
        engine.complete(await engine.job())
        check(await call, keys)
    await wait_until_async(lambda: is_clean(front), "nothing is held")


@pytest.mark.parametrize(("how", "status"), [("cancelled", "499"), ("deadline", "504")])
@beside(serving)
async def test_the_slot_of_a_call_that_is_given_up_is_free_once_the_engine_has_answered(
    front, engine, channel, port, /, how, status
):
    # At a deadline, grpc's own client resets the stream, too, and the server counts what comes first.
    headers = call_headers(**({"grpc_timeout": "500m"} if how == "deadline" else {}))
    for _ in range(2):
        async with RawCaller.connected(port) as caller:
            caller.send(frame(HEADERS, 4, 1, headers), frame(DATA, 1, 1, message(body_of(range(LARGE)))))
            job = await engine.job()
            if how == "cancelled":
                caller.send(frame(RESET, 0, 1, struct.pack(">I", 8)))
            else:
                trailers = Decoder().decode((await caller.next_of(HEADERS)).payload)
                assert dict(trailers)["grpc-status"] == "4"
            await wait_until_async(lambda: front.memory.used == 0, "the message is forgotten")
            (lookup,) = front.exchange.pending.values()
            assert (lookup.requester, front.exchange.slots.used) == (None, 8192)
            engine.complete(job)
            await wait_until_async(lambda: is_clean(front), "its slot is free")
    assert front.metrics.figures()["counts"] == {f"{status} {INFER}": 2}


@beside(serving)
async def test_a_frontend_is_ready_to_no_client_before_its_engine_answers_lookups(front, engine, channel, port, /, monkeypatch):
    """Whatever the engine's application says."""

    def yes(client, *_, **__):
        client.relay(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        client.finish_relay()

    monkeypatch.setattr(front.engine, "forward", yes)
    service, model = "/inference.GRPCInferenceService/", pb.ModelReadyRequest(name="m").SerializeToString()
    calls = [(f"{service}ServerReady", b""), (f"{service}ModelReady", model), ("/grpc.health.v1.Health/Check", b"")]
    answers = lambda: asyncio.gather(*(channel.unary_unary(path)(request) for path, request in calls))  # noqa: E731
    assert await answers() == [b"\x08\x01"] * 3  # field 1 is the answer of each
    await wait_until_async(lambda: front.exchange._check < 0, "no answer of a check is under way")
    front.exchange._answers = False
    assert await answers() == [b"", b"", b"\x08\x02"]


@beside(serving)
async def test_calls_that_are_refused_are_counted_where_no_lookup_begins(front, engine, channel, port, /):
    for _ in range(2):
        assert await code_of(channel.unary_unary("/none")(b"")) is CODE.UNIMPLEMENTED
        assert await code_of(channel.unary_unary(INFER)(b"\xff")) is CODE.INVALID_ARGUMENT
    assert front.metrics.figures()["counts"] == {f"400 {INFER}": 2, "405 unknown": 2}


@beside(serving)
async def test_metadata_of_which_one_alone_may_be_is_refused_where_there_are_two(front, engine, channel, port, /):
    call = channel.unary_unary(INFER)(body_of([1]), metadata=(("authorization", "a"), ("authorization", "b")))
    assert await code_of(call) is CODE.INVALID_ARGUMENT
    assert "got the header 'authorization' twice, expected it once" in await call.details()


@beside(serving)
async def test_binary_metadata_is_not_forwarded_to_the_engine(front, engine, channel, port, /, monkeypatch):
    sent = []

    async def fetch_answer(request):
        sent.append(request)
        return 200, b"{}"

    monkeypatch.setattr(front.engine, "fetch_answer", fetch_answer)
    metadata = (("x-more-bin", b"\r\n\r\nGET / HTTP/1.1\r\n"), ("x-plain", "y"))
    await channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")(b"", metadata=metadata)
    [request] = sent
    assert b"x-plain: y\r\n" in request
    assert b"x-more-bin" not in request


@pytest.mark.parametrize("how", ["reset", "connection", "too late"])
@beside(serving)
async def test_an_answer_that_is_not_read_is_held_until_its_client_leaves(front, engine, channel, port, /, how):
    for _ in range(2):
        async with RawCaller.connected(port, window=0) as caller:
            caller.send(frame(HEADERS, 4, 1, call_headers()), frame(DATA, 1, 1, message(body_of(range(LARGE)))))
            engine.complete(await engine.job())
            await caller.next_of(HEADERS)
            await wait_until_async(lambda: front.exchange.slots.used == 0, "its slot is free")
            assert front.memory.used > 4 * DIM * LARGE
            if how == "reset":
                caller.send(frame(RESET, 0, 1, struct.pack(">I", 8)))
            elif how == "connection":
                caller.close()
            else:
                before = front.refusals.aborted["answer"]
                front.grpc.poll(time.monotonic() + 1e6)
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await caller.next_of(RESET)
                assert front.refusals.aborted["answer"] == before + 1
            await wait_until_async(lambda: is_clean(front), "nothing is held")


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("how", ["reset", "connection", "too late"])
@beside(serving)
async def test_a_message_that_never_ends_is_forgotten_with_its_call(front, engine, channel, port, /, how, path):
    for _ in range(2):
        async with RawCaller.connected(port) as caller:
            caller.send(frame(HEADERS, 4, 1, call_headers(path)), frame(DATA, 0, 1, message(body_of([1]))[:9]))
            await wait_until_async(lambda: any(call.waits for call in front.grpc._calls), "the call waits for its message")
            if how == "reset":
                caller.send(frame(RESET, 0, 1, struct.pack(">I", 8)))
            elif how == "connection":
                caller.close()
            else:
                limit = front.settings.keep_alive_s if path == STREAM else front.settings.request_timeout_s
                front.grpc.poll(time.monotonic() + limit - 1)
                assert [call.ends_with for call in front.grpc._calls] == [None]
                front.grpc.poll(time.monotonic() + limit)
                headers = Decoder().decode((await caller.next_of(HEADERS)).payload)
                assert dict(headers)["grpc-status"] == "4"
            await wait_until_async(lambda: is_clean(front), "nothing is held")


@beside(serving)
async def test_a_stream_holds_no_message_that_is_answered(front, engine, channel, port, /):
    stream = channel.stream_stream(STREAM)()
    held = set()
    for keys in ([1], range(LARGE), [2]):
        await stream.write(body_of(keys))
        engine.complete(await engine.job())
        check(pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.SerializeToString(), keys)
        await wait_until_async(lambda: all(call.waits for call in front.grpc._calls), "it waits for the next message")
        held.add(front.memory.used)
    assert len(held) == 1
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


@beside(serving)
async def test_a_connection_without_a_token_watches_with_few_calls(front, engine, channel, port, /):
    few = grpc_server._MOST_UNKNOWN
    watch = channel.unary_stream(WATCH)
    calls = [watch(b"") for _ in range(few)]
    for call in calls:
        assert await call.read() in (b"\x08\x01", b"\x08\x02")
    assert front.engine_health.watchers == few
    for _ in range(3):
        assert await code_of(watch(b"").read()) is CODE.RESOURCE_EXHAUSTED
    calls[0].cancel()
    await wait_until_async(lambda: front.engine_health.watchers == few - 1, "one has ended")
    calls[0] = watch(b"")
    await calls[0].read()
    for call in calls:
        call.cancel()
    await wait_until_async(lambda: not front.engine_health.watchers, "all have ended")


@beside(serving)
async def test_calls_count_by_their_metadata_until_they_end(front, engine, channel, port, /):
    infer = channel.unary_unary(INFER)
    calls = [infer(body_of([1]), metadata=(("x-more", "y" * 10_000),)) for _ in range(3)]
    jobs = [await engine.job() for _ in calls]
    assert front.memory.used > 3 * 10_000
    front.memory.limit_to(front.memory.used)
    assert await code_of(infer(body_of([1]))) is CODE.UNAVAILABLE
    for job in jobs:
        engine.complete(job)
    await asyncio.gather(*calls)


@beside(serving)
async def test_a_stop_ends_calls_that_wait_for_their_clients_and_answers_the_others(front, engine, channel, port, /):
    watch, stream = channel.unary_stream(WATCH)(b""), channel.stream_stream(STREAM)()
    await watch.read()
    await wait_until_async(lambda: len([call for call in front.grpc._calls if call.waits]) == 2, "both wait")
    call = channel.unary_unary(INFER)(body_of([5]))
    job = await engine.job()
    stopping = asyncio.create_task(front.grpc.stop(30))
    assert [await code_of(waiting.read()) for waiting in (watch, stream)] == [CODE.UNAVAILABLE] * 2
    engine.complete(job)
    check(await call, [5])
    await stopping
