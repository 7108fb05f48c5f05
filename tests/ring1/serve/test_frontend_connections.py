"""A front on this event loop, with an engine that the test plays: connections stay in step, and slots have one user."""

import asyncio
import json
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import NotReadyError
from hps.regions import layout
from hps.regions.layout import FAILED, RETIRED
from hps.serve.frontend import exchange
from hps.serve.protocol.json_size import SMALL_JSON_BYTES
from hps.testing.waiting import wait_until, wait_until_async
from tests.fakes.clock import Clock
from tests.servers.front_service import DIM, ROWS, vectors_of
from tests.servers.on_loop import beside
from tests.servers.played_front import LARGE, SETTINGS, SLAB_BYTES, json_request, playing, request

WHOLE = 800  # keys whose request takes the whole slab
POST = b"POST /v1/models/m/lookup HTTP/1.1\r\n"


async def ask(scene, engine, keys=range(LARGE), client=None):
    """Send a request; return its client, and the job that the engine has now."""
    client = client or await scene.connect()
    client.send(*request(keys))
    return client, await engine.job()


async def finish(engine, client, job):
    engine.complete(job)
    await client.checked(engine.keys(job))


async def served(scene, engine, client, *requests):
    for keys in requests:
        _, job = await ask(scene, engine, keys, client)
        assert engine.keys(job).tolist() == [*keys]
        await finish(engine, client, job)


async def fill(scene, engine, count=8):
    """Take slots, all by default, by requests that the engine keeps; return these handed_over, and their clients."""
    clients = [await scene.connect() for _ in range(count)]
    for nth, one in enumerate(clients):
        one.send(*request(range(nth, nth + LARGE)))
    handed_over = [await engine.job() for _ in clients]
    return handed_over, clients


def clock_of(monkeypatch):
    """The clock by which lookups wait, which the test moves."""
    clock = Clock(1000.0)
    times = SimpleNamespace(monotonic=clock, perf_counter=clock, perf_counter_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(exchange, "time", times)
    return clock


async def refused(client):
    """The next answer says that the service is busy."""
    status, headers, _ = await client.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    return headers


async def clean(front, *, connections=None):
    """Wait until no slot and no memory is taken, and so many connections are left."""
    await wait_until_async(lambda: front.exchange.slots.used == front.memory.used == 0, "all is given back")
    assert front.exchange.check_integrity() == []
    if connections is not None:
        await wait_until_async(lambda: len(front.connections.order) == connections, "the connections have ended")


@beside(playing)
async def test_requests_that_begin_alike_have_the_ids_they_name_and_count_for_their_tokens(scene, front, engine, /):
    trace, client = "4bf92f3577b34da6a3ce929d0e0e4736", await scene.connect()
    given = {"X-Request-Id: a": "a", f"traceparent: 00-{trace}-00f067aa0ba902b7-01": trace, "Authorization: Bearer b": None}
    for line, named in given.items():
        if named is None:
            engine.publish(settings={**SETTINGS, "bearer_token": "b"}, m=engine.deploy())
        for _ in range(2):
            client.send(*request([1], line))
            engine.complete(await engine.job())
            assert named in (None, (await client.answer())[1]["x-request-id"])
    assert front.metrics.figures()["who"] == {"200 bearer token": 2}


@pytest.mark.parametrize("arrived", [0, 40, 8 * WHOLE])
@pytest.mark.parametrize("again", [False, True])  # a connection remembers how its last request began
@beside(playing, slot_wait_s=0.05)
async def test_keys_of_a_request_that_finds_no_slot_are_not_read_as_the_next_request(scene, front, engine, /, arrived, again):
    """Keys may spell a request: a client that is refused must not have it answered."""
    evil = (b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n" * 120)[: 8 * WHOLE]
    client = await scene.connect()
    if again:
        await served(scene, engine, client, range(WHOLE))
    (job,), (other,) = await fill(scene, engine, 1)
    head, body = request(np.frombuffer(evil, np.int64))
    cut = len(body) - 8 * WHOLE + arrived
    client.send(head, body[:cut])
    await refused(client)
    client.send(body[cut:])
    await finish(engine, other, job)
    await served(scene, engine, client, range(7, 7 + WHOLE), [7])
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_requests_wait_for_slots_and_get_them_in_their_order(scene, front, engine, /):
    """A small one does not overtake a large one that waits."""
    handed_over, clients = await fill(scene, engine)
    waiting = [(await scene.connect(), nth, size) for nth, size in enumerate((LARGE, LARGE, 400, 3, LARGE, 3))]
    for client, nth, size in waiting:
        client.send(*(request(range(nth, nth + size)) if nth % 2 else [json_request([*range(nth, nth + size)])]))
        await wait_until_async(lambda nth=nth: len(front.exchange._waiting) == nth + 1)
    for job, client in zip(handed_over, clients, strict=True):
        await finish(engine, client, job)
    for client, nth, size in waiting:
        job = await engine.job()
        assert engine.keys(job).tolist() == [*range(nth, nth + size)]
        engine.complete(job)
        assert await client.status() == 200
    assert front.exchange.slots.used == 0


@beside(playing, slot_wait_s=0.1)
async def test_a_request_that_waits_in_vain_does_not_keep_its_place_for_ever(scene, front, engine, /):
    """Each slot that becomes free is too small for the first; those behind it must be served or refused, too."""
    handed_over, clients = await fill(scene, engine)
    large = await scene.connect()
    large.send(*request(range(400)))  # half of the slab
    await wait_until_async(lambda: len(front.exchange._waiting) == 1)
    statuses, dues = asyncio.ensure_future(large.status()), set()
    while not statuses.done():  # others come and go all the time
        dues |= {lookup.slot_due for lookup, _ in front.exchange._waiting}
        client = clients.pop(0)
        await finish(engine, client, handed_over.pop(0))
        clients.append(client)
        handed_over.append((await ask(scene, engine, client=client))[1])
    assert await statuses == 503
    assert len(dues) == 1


@beside(playing)
async def test_a_request_that_no_slot_holds_is_refused_and_the_next_is_answered(scene, front, engine, /):
    engine.publish(m=engine.deploy(), wide=engine.deploy("wide", [SLAB_BYTES]))
    client = await scene.connect()
    client.send(*request([5], model="wide"), *request([1, 2]), *request([6], model="wide"), *request([3]))
    for keys in ([1, 2], [3]):
        assert await client.status() == 413
        engine.complete(await engine.job())
        await client.checked(keys)


@beside(playing)
async def test_the_rest_of_a_large_request_that_no_slot_holds_is_not_read_as_another(scene, front, engine, /):
    client = await scene.connect()
    client.send(*request(range(2000)), *request([1, 2]))
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert await client.reader.read() == b""
    assert engine.loop_state.next_request() is None


@pytest.mark.parametrize("reset", [True, False])
@beside(playing)
async def test_a_client_that_leaves_does_not_free_the_slot_that_the_engine_has(scene, front, engine, /, reset):
    client, job = await ask(scene, engine)
    if reset:
        client.reset()
        await wait_until_async(lambda: not front.connections.order)
    else:
        (connection,) = front.connections.order
        client.writer.close()
        await wait_until_async(lambda: connection._eof, "the front has noticed")
    assert front.exchange.slots.used == 8192
    engine.complete(job)
    await clean(front, connections=0)


@beside(playing)
async def test_a_buffer_that_is_full_behind_a_request_is_read_on_after_it(scene, front, engine, /):
    """What is pipelined fills the buffer while the engine is asked: nothing more is read until there is room again."""
    for _ in range(10):
        client = await scene.connect()
        client.send(*[json_request([nth]) for nth in range(3)], json_request([3], spaces=500_000))
        for nth in range(4):
            job = await engine.job()
            if nth == 0:
                (connection,) = front.connections.order
                await wait_until_async(lambda connection=connection: connection._reading_paused)
            assert engine.keys(job).tolist() == [nth]
            engine.complete(job)
            assert await client.status() == 200
        client.writer.close()
        await clean(front, connections=0)


@pytest.mark.parametrize("again", [False, True])
@beside(playing)
async def test_bodies_that_come_slowly_take_no_more_than_half_of_the_slots(scene, front, engine, /, again):
    clients = [await scene.connect() for _ in range(12)]
    if again:  # what follows begins like the request before it
        for client in clients:
            await served(scene, engine, client, range(LARGE))
    bodies = []
    for nth, client in enumerate(clients):
        head, body = request(range(nth, nth + LARGE))
        client.send(head, body[:-8])
        bodies.append(body)
        await wait_until_async(lambda nth=nth: front.exchange.slots.used == 8192 * min(nth + 1, 5))
        await wait_until_async(lambda nth=nth: sum(bool(one._fill) for one in front.connections.order) == nth + 1)
    await served(scene, engine, await scene.connect(), [3, 4])
    for nth, (client, body) in enumerate(zip(clients, bodies, strict=True)):
        client.send(body[-8:])
        engine.complete(await engine.job())
        await client.checked(range(nth, nth + LARGE))
    await clean(front)
    clients[0].send(head, body[:-8])
    await wait_until_async(lambda: front.exchange.slots.used == 8192)
    clients[0].writer.close()  # with half of its keys
    await clean(front)
    assert engine.loop_state.next_request() is None


@pytest.mark.parametrize("as_json", [True, False])
@beside(playing)
async def test_a_client_that_leaves_before_it_has_read_its_answer_frees_slot_and_memory(scene, front, engine, /, as_json):
    for _ in range(2):
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", scene.port))
            await wait_until_async(lambda: front.connections.order, "the connection is accepted")
            (connection,) = front.connections.order
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            raw.sendall(json_request([*range(WHOLE)]) if as_json else b"".join(request(range(WHOLE))))
            engine.complete(await engine.job())
            await wait_until_async(lambda: connection._stalled, "the client does not read")  # noqa: B023
            assert front.exchange.slots.used > 0
            assert (front.memory.used > 0) is as_json
        await clean(front, connections=0)


@pytest.mark.parametrize(
    ("head", "part", "rest", "held"),
    [
        (b"Content-Length: 1000", b" " * 400, b" " * 600, 1000),
        (b"Transfer-Encoding: chunked", b"190\r\n" + b" " * 400, b"\r\n0\r\n\r\n", 400),
    ],
)
@beside(playing)
async def test_a_body_is_held_until_its_request_ends(scene, front, engine, /, head, part, rest, held):
    """By an answer, or by a client that leaves; each counts once, however often it is tried."""

    async def begin():
        client.send(POST + head + b"\r\n\r\n" + part)
        await wait_until_async(lambda: front.memory.used == held, "a part is held")

    client = await scene.connect()
    for _ in range(2):
        await begin()
        client.send(rest)
        assert await client.status() == 400
        assert front.memory.used == 0
        whole = json_request([*range(LARGE)])
        client.send(whole)
        job = await engine.job()
        assert front.memory.used > len(whole.partition(b"\r\n\r\n")[2]) + 4 * DIM * LARGE, "its answer, too"
        engine.complete(job)
        assert await client.status() == 200
        assert front.memory.used == 0
    await begin()
    client.writer.close()
    await clean(front, connections=0)


@beside(playing, slot_wait_s=0.05)
async def test_so_many_lookups_are_under_way_and_one_more_when_one_has_ended(scene, front, engine, /, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_PENDING", 4)
    handed_over, clients = await fill(scene, engine, 4)
    late = await scene.connect()
    late.send(json_request([1]))
    status, _, body = await late.answer()
    assert (status, json.loads(body)["error"].partition(",")[0]) == (503, "4 lookups are under way")
    for client, job in zip(clients, handed_over, strict=True):
        await finish(engine, client, job)
    await fill(scene, engine, 4)


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
@beside(playing)
async def test_a_client_that_leaves_ends_what_the_engines_application_does_for_it(scene, front, engine, /, part):
    closed = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(part)
        closed.append(await reader.read())
        writer.transport.abort()

    async with await asyncio.start_unix_server(serve, scene.shared.path):
        for count in (1, 2):
            client = await scene.connect()
            client.send(b"GET /v1/models HTTP/1.1\r\n\r\n")
            await client.reader.readexactly(len(part))
            (connection,) = front.connections.order
            await wait_until_async(lambda: connection._upstream, "the application is asked")  # noqa: B023
            client.reset()
            await wait_until_async(lambda count=count: closed == [b""] * count, "its connection is closed")


@beside(playing)
async def test_only_the_head_of_a_relayed_answer_is_told_that_it_is_the_last(scene, front, engine, /, monkeypatch):
    """Its other pieces may have lines, too."""

    def ask(client, *_, **__):
        for piece in (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", b"a\r\n", b"b\r\n"):
            client.relay(piece)
        client.finish_relay()

    monkeypatch.setattr(front.engine, "forward", ask)
    for version, said in ((b"0", "close"), (b"1", None), (b"0\r\nConnection: keep-alive", "keep-alive")):
        client = await scene.connect()
        client.send(b"GET /v1/models HTTP/1.%b\r\n\r\n" % version)
        _, headers, body = await client.answer()
        assert (headers["connection"], body) == (said, b"a\r\nb\r\n")


@beside(playing)
async def test_clients_of_http_1_0_that_ask_for_it_keep_their_connection_and_are_told(scene, front, engine, /):
    """Whatever is answered: a lookup from its plan, again, by JSON, an error."""
    client = await scene.connect()
    planned = b"".join(request([1, 2])).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: Keep-Alive\r\n")
    as_json = json_request([3]).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: Keep-Alive\r\n")
    for sent in (planned, planned, as_json, planned):
        client.send(sent)
        engine.complete(await engine.job())
        status, headers, _ = await client.answer()
        assert (status, headers.get_all("connection")) == (200, ["keep-alive"])
    client.send(as_json.replace(b"POST", b"PUT", 1))
    status, headers, _ = await client.answer()
    assert (status, headers.get_all("connection")) == (405, ["keep-alive"])
    client.send(planned.replace(b"Connection: Keep-Alive\r\n", b""))
    engine.complete(await engine.job())
    status, headers, _ = await client.answer()
    assert (status, headers.get_all("connection"), await client.reader.read()) == (200, ["close"], b"")


@beside(playing)
async def test_counts_of_versions_that_are_gone_are_forgotten_but_not_while_an_engine_starts(scene, front, engine, /):
    for _ in range(2):
        known = set(front.published.counts)
        engine.publish(blocked="the service is starting")
        await wait_until_async(lambda: front.published.blocked, "nothing is answered")
        assert set(front.published.counts) == known
        engine.publish(m=engine.deploy())
        await wait_until_async(lambda: not front.published.blocked, "another deployment answers")
        assert len(front.published.counts) == 1


@beside(playing)
async def test_a_lookup_that_takes_too_long_is_refused_and_its_slot_comes_back_later(scene, front, engine, /, monkeypatch):
    clock = clock_of(monkeypatch)
    client, job = await ask(scene, engine)
    clock.now += SETTINGS["request_timeout_s"] + 1
    assert await client.status() == 504
    assert front.exchange.slots.used == 8192
    _, other = await ask(scene, engine, [5], client)
    assert other.slot != job.slot
    await finish(engine, client, other)
    engine.complete(job)
    await clean(front)


@beside(playing)
async def test_a_front_does_not_pass_the_question_on_before_its_engine_has_answered_it(scene, front, engine, /, monkeypatch):
    """The engine's application would say that it is ready."""

    def asked(client, *_, **__):
        client.relay(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        client.finish_relay()

    monkeypatch.setattr(front.engine, "forward", asked)
    client = await scene.connect()

    async def answer(path="/v2/health/ready"):
        client.send(b"GET %s HTTP/1.1\r\n\r\n" % path.encode())
        status, _, body = await client.answer()
        return status, json.loads(body)["error"] if body else ""

    paths = "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready"
    for first in (1000, 2000):
        await wait_until_async(lambda: front.exchange._answers, "the engine has answered")
        assert [await answer(path) for path in paths] == [(200, "")] * 3
        engine = scene.another_engine(first)  # whose loop does not run yet
        assert (await answer())[0] == 503
        engine.publish(m=engine.deploy())
        for path in paths:
            status, said = await answer(path)
            assert (status, "is being started again" in said) == (503, True)
        assert (await answer("/v1/models"))[0] == 200
        engine.publish(blocked="compiling kernels, 42 %")
        client.send(*request([1]))
        status, _, body = await client.answer()
        assert (status, "the parameter server is not ready: compiling kernels, 42 %" in json.loads(body)["error"]) == (
            503,
            True,
        )
        engine.publish(m=engine.deploy())
        engine.start()
    await wait_until_async(lambda: front.exchange._answers, "the engine has answered")
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_a_front_is_not_ready_while_its_engine_answers_nothing(scene, front, engine, /, monkeypatch):
    await wait_until_async(lambda: front.exchange._answers, "the engine has answered")
    clock = clock_of(monkeypatch)
    engine.stop()  # its loop alone: it hangs
    for _ in range(2):
        front.check_ready("/v2/health/ready")
        clock.now += SETTINGS["request_timeout_s"]
    front.check_ready("/v2/models/m")
    clock.now += 1
    with pytest.raises(
        NotReadyError, match=f"has not answered this frontend for {2 * SETTINGS['request_timeout_s'] + 1:.0f} s"
    ):
        front.check_ready("/v2/health/ready")


@beside(playing)
async def test_an_error_of_the_engine_reaches_the_client(scene, front, engine, /):
    client, job = await ask(scene, engine, [1])
    engine.complete(job, FAILED, json.dumps({"status": 503, "message": "no database", "reason": ""}).encode())
    status, headers, body = await client.answer()
    assert (status, headers["retry-after"], json.loads(body)["error"]) == (503, "1", "no database")
    for status, said in ((layout.MALFORMED, "the engine refused"), (FAILED, "internal error; the log")):
        _, job = await ask(scene, engine, [2], client)
        engine.complete(job, status)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"][: len(said)]) == (500, said)
    assert front.exchange.slots.used == 0


@pytest.mark.parametrize("as_json", [True, False])
@beside(playing)
async def test_a_retired_lookup_is_posted_again_for_the_version_that_took_over(scene, front, engine, /, as_json):
    client = await scene.connect()
    client.send(json_request([8, 9]) if as_json else b"".join(request([8, 9])))
    job = await engine.job()
    other = engine.deploy()
    engine.publish(m=other)
    engine.complete(job, RETIRED)
    job = await engine.job()
    assert (job.header[0], engine.keys(job).tolist()) == (other[0], [8, 9])
    engine.complete(job)
    assert await client.status() == 200
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_a_lookup_is_not_retired_for_ever(scene, front, engine, /, monkeypatch):
    clock = clock_of(monkeypatch)
    client, job = await ask(scene, engine, [8])
    dues = set()
    for _ in range(5):
        dues |= {lookup.due for lookup in front.exchange.pending.values()}
        engine.complete(job, RETIRED)
        job = await engine.job()
    clock.now += SETTINGS["request_timeout_s"] + 1
    engine.complete(job, RETIRED)
    assert await client.status() in (503, 504)
    assert len(dues) == 1
    await clean(front)
    assert engine.loop_state.next_request() is None


@beside(playing)
async def test_a_front_takes_no_slot_before_the_answers_of_the_one_before_it_are_written(scene, front, engine, /):
    """They would land in the keys of its first requests."""
    _, job = await ask(scene, engine)
    await front.stop(0)
    front.close()
    scene.fronts.remove(front)
    second = await scene.start_front()
    client = await scene.connect()
    for _ in range(2):
        client.send(*request([1]))
        await refused(client)
        assert second.exchange.slots.used == 0
    engine.complete(job)
    await scene.connected(second)
    await served(scene, engine, client, [1])


@beside(playing)
async def test_slots_of_clients_that_left_come_back_when_the_engine_has_died(scene, front, engine, /):
    for first in (1000, 2000):
        client, _ = await ask(scene, scene.engine)
        client.reset()
        await wait_until_async(lambda: not front.connections.order, "the client has gone")
        assert front.exchange.slots.used == 8192
        later = scene.another_engine(first)
        later.begin()
        await clean(front)
        assert later.loop_state.next_request() is None
        assert not front.exchange.pending


@pytest.mark.parametrize("arrived", [0, 8, 8 * LARGE])
@beside(playing)
async def test_connections_stay_open_while_there_is_no_engine(scene, front, engine, /, arrived):
    client = await scene.connect()
    later = scene.another_engine(1000)
    await wait_until_async(lambda: not front.exchange._connected)
    head, body = request(range(LARGE))
    cut = len(body) - 8 * LARGE + arrived
    client.send(head, body[:cut])
    assert (await refused(client))["connection"] is None
    client.send(body[cut:])
    later.begin()
    await scene.connected(front)
    await served(scene, later, client, [6])


@beside(playing)
async def test_what_a_dead_engine_did_not_answer_is_looked_up_in_the_same_model_of_the_next_one(scene, front, engine, /):
    """The next engine gives other numbers to its deployments. Keys and JSON alike reach it again."""
    keys, as_json, done = [await scene.connect() for _ in range(3)]
    keys.send(*request([1, 2]))
    await engine.job()
    as_json.send(json_request([3]))
    await engine.job()
    await served(scene, engine, done, [4])
    later = scene.another_engine(1000)
    other, mine = later.deploy("other"), later.deploy()
    later.publish(other=other, m=mine)
    later.start()
    for _ in range(2):
        job = await later.job()
        assert job.header[0] == mine[0]
        later.complete(job)
    await keys.checked([1, 2])
    assert json.loads((await as_json.answer())[2]) == {"tables": {"item": vectors_of([3]).tolist()}}
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_a_front_that_did_not_notice_the_death_of_an_engine_begins_anew(scene, front, engine, /):
    """As one that was stopped meanwhile: nothing of its old ring is answered again."""
    client = await scene.connect()
    await served(scene, engine, client, *([nth] for nth in range(20)), [], [ROWS - 1])
    later = scene.another_engine(1000)  # no turn of the event loop from here
    later.begin()
    wait_until(lambda: front.exchange.region[layout.ENGINE_SLEEPS], "the engine has looked, and sleeps")
    assert later.loop_state.next_request() is None
    assert front.exchange.region[layout.ENGINE_EPOCH] == 0
    await wait_until_async(lambda: front.exchange.region[layout.ENGINE_EPOCH] != 0 and front.exchange._connected)
    await served(scene, later, client, [99])
    assert later.loop_state.next_request() is None


@pytest.mark.parametrize(
    ("size", "line", "kept"), [(1 << 20, "", True), ((1 << 20) + 1, "", False), (9, "Expect: 100-continue\r\n", False)]
)
@beside(playing)
async def test_a_refused_body_is_skipped_up_to_a_mebibyte_unless_it_may_never_come(scene, front, engine, /, size, line, kept):
    client = await scene.connect()
    front.memory.used += front.memory.limit
    client.send(POST, f"{line}Content-Length: {size}\r\n\r\n".encode())
    if line:
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    headers = await refused(client)
    front.memory.used -= front.memory.limit
    assert headers["connection"] == (None if kept else "close")
    if kept:
        client.send(bytes(size))
        await served(scene, engine, client, [6])
    else:
        client.writer.write_eof()
        assert await client.reader.read() == b""


@beside(playing)
async def test_json_above_64_kib_is_refused_if_its_parsing_takes_too_much_memory(scene, front, engine, /):
    client = await scene.connect()
    front.memory.limit_to(1 << 19)
    for size, expected in ((SMALL_JSON_BYTES, 200), (SMALL_JSON_BYTES + 1, 413), (SMALL_JSON_BYTES, 200)):
        client.send(json_request([6], spaces=size - len(json.dumps({"tables": {"item": [6]}}))))
        if expected == 200:
            engine.complete(await engine.job())
        status, _, body = await client.answer()
        assert (status, b"parsing the request" in body) == (expected, expected != 200)
        assert front.memory.used == 0


# -- what a connection keeps ----------------------------------------------------------------------------------------------


def head_of(size, path="/v2/health/live"):
    line = b"GET %s HTTP/1.1\r\nx: " % path.encode()
    return line + b"y" * (size - len(line) - 4) + b"\r\n\r\n"


def connection_of(front):
    [connection] = front.connections.order
    return connection


@pytest.mark.parametrize(
    ("size", "held"), [(8000, 0), (8200, 3 * 8192), (32_700, 3 * 8192), (33_000, 65_536), (65_536, 65_536)]
)
@beside(playing)
async def test_room_for_a_head_is_held_until_its_answer(scene, front, engine, /, size, held):
    client = await scene.connect()
    for _ in range(2):
        head = head_of(size)
        client.send(head[:-1])
        await wait_until_async(lambda: front.connections.order and connection_of(front)._have == size - 1, "the head is there")
        assert front.memory.used == held
        client.send(head[-1:])
        assert await client.status() == 200
        assert (front.memory.used, len(connection_of(front)._buffer)) == (0, 8192)
    client.send(head_of(size)[:-1])
    await wait_until_async(lambda: connection_of(front)._have == size - 1, "the head is there")
    client.reset()
    await wait_until_async(lambda: not front.connections.order, "the connection is closed")
    assert front.memory.used == 0


@beside(playing)
async def test_a_large_head_is_refused_without_memory_and_spares_the_last_quarter(scene, front, engine, /):
    front.memory.limit_to(4 * 3 * 8192)
    for held, status in ((2 * 3 * 8192, 200), (2 * 3 * 8192 + 1, 503)):
        front.memory.used = held
        client = await scene.connect()
        client.send(head_of(20_000))
        assert await client.status() == status
        assert front.memory.used == held
    assert await client.reader.read() == b""  # nobody knows where the next request begins
    small = await scene.connect()
    small.send(head_of(1000))
    assert await small.status() == 200


@beside(playing)
async def test_requests_behind_one_that_is_under_way_get_no_more_room(scene, front, engine, /):
    client, job = await ask(scene, engine)
    requests = [request(range(LARGE + nth)) for nth in range(8)]
    client.send(*[piece for one in requests for piece in one], head_of(60_000))
    connection = connection_of(front)
    await wait_until_async(lambda: connection._reading_paused, "the buffer is full")
    assert (front.memory.used, len(connection._buffer)) == (0, 8192)
    await finish(engine, client, job)
    for nth in range(len(requests)):
        job = await engine.job()
        assert len(engine.keys(job)) == LARGE + nth
        await finish(engine, client, job)
    assert await client.status() == 200
    assert (front.memory.used, len(connection._buffer)) == (0, 8192)


@beside(playing)
async def test_an_idle_connection_keeps_nothing_of_its_requests(scene, front, engine, /):
    client = await scene.connect()
    await served(scene, engine, client, range(LARGE), range(7, 7 + LARGE))
    connection = connection_of(front)
    assert connection._last is not None
    assert (connection._raw, len(connection._buffer)) == (b"", 8192)
    connection.poll(connection._idle_since + 1, 30, 30, 75)
    assert connection._last is not None
    connection.poll(connection._idle_since + 1.1, 30, 30, 75)
    assert connection._last is None
    await served(scene, engine, client, range(LARGE))


@beside(playing)
async def test_a_long_head_is_not_kept_for_the_next_request(scene, front, engine, /):
    client = await scene.connect()
    head, body = request(range(LARGE), "x: " + "y" * 3000)
    client.send(head, body)
    await finish(engine, client, await engine.job())
    assert connection_of(front)._last is None


@beside(playing)
async def test_idle_connections_that_keep_more_than_half_of_the_budget_are_closed(scene, front, engine, /):
    clients = [await scene.connect() for _ in range(3)]
    await wait_until_async(lambda: len(front.connections.order) == 3, "they are connected")
    first, second, third = front.connections.order
    for one in (first, second, third):
        one.record_sizes(30_000, 30_000)
    assert first.kept_bytes == 70_000 + 40_000
    front.memory.limit_to(6 * 110_000)
    front._count_kept_by_tls()
    assert front.memory.kept == 3 * 110_000
    front.memory.limit_to(4 * 110_000)
    front._count_kept_by_tls()
    assert front.memory.kept == 2 * 110_000
    await wait_until_async(lambda: first not in front.connections.order, "the first is closed")
    assert [*front.connections.order] == [second, third]
    assert len(clients) == 3
