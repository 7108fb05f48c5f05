"""A front on this event loop, with an owner that the test plays: connections stay in step, and slots have one user."""

import asyncio
import json
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from hps.regions import layout
from hps.regions.layout import FAILED, RETIRED
from hps.service.fronts import exchange
from hps.testing.waiting import wait_until, wait_until_async
from tests.fakes.clock import Clock
from tests.servers.front_service import DIM, ROWS, vectors_of
from tests.servers.on_loop import beside
from tests.servers.played_front import LARGE, SETTINGS, SLAB_BYTES, json_request, playing, request

WHOLE = 800  # keys whose request takes the whole slab


async def fill(scene, owner, count=8):
    """Take slots, all by default, by requests that the owner keeps; return these jobs, and their clients."""
    clients = [await scene.connect() for _ in range(count)]
    for nth, one in enumerate(clients):
        one.send(*request(range(nth, nth + LARGE)))
    jobs = [await owner.job() for _ in clients]
    return jobs, clients


@beside(playing)
async def test_a_lookup_is_posted_and_answered(scene, front, owner, /):
    client = await scene.connect()
    for keys in ([1, 2, 3], [], [ROWS - 1]):
        client.send(*request(keys))
        job = await owner.job()
        assert owner.keys(job).tolist() == keys
        owner.complete(job)
        await client.checked(keys)
    client.send(json_request([4, 5]))
    owner.complete(await owner.job())
    assert json.loads((await client.answer())[2]) == {"tables": {"item": vectors_of([4, 5]).tolist()}}
    assert front.exchange.slots.used == 0


@pytest.mark.parametrize("arrived", [0, 40, 8 * WHOLE])
@pytest.mark.parametrize("again", [False, True])  # a connection remembers how its last request began
@beside(playing, slot_wait_s=0.05)
async def test_keys_of_a_request_that_finds_no_slot_are_not_read_as_the_next_request(scene, front, owner, /, arrived, again):
    """Keys may spell a request: a client that is refused must not have it answered."""
    evil = (b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n" * 120)[: 8 * WHOLE]
    keys = np.frombuffer(evil, np.int64)
    client = await scene.connect()
    if again:
        client.send(*request(range(WHOLE)))
        owner.complete(await owner.job())
        await client.checked(range(WHOLE))
    jobs, clients = await fill(scene, owner, 1)
    head, body = request(keys)
    text = len(body) - 8 * WHOLE
    client.send(head, body[: text + arrived])
    status, headers, _ = await client.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    client.send(body[text + arrived :])
    for job, one in zip(jobs, clients, strict=True):
        owner.complete(job)
        await one.checked(owner.keys(job))
    for wanted in (range(7, 7 + WHOLE), [7]):
        client.send(*request(wanted))
        owner.complete(await owner.job())
        await client.checked(wanted)
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_requests_wait_for_slots_and_get_them_in_their_order(scene, front, owner, /):
    jobs, clients = await fill(scene, owner)
    waiting = [await scene.connect() for _ in range(6)]
    for nth, one in enumerate(waiting):
        keys = list(range(nth, nth + LARGE))
        one.send(*request(keys) if nth % 2 else [json_request(keys)])
        await wait_until_async(lambda nth=nth: len(front.exchange._waiting) == nth + 1)
    for nth in range(len(waiting)):
        owner.complete(jobs[nth])
        await clients[nth].checked(owner.keys(jobs[nth]))
        job = await owner.job()
        assert owner.keys(job).tolist() == list(range(nth, nth + LARGE))
        jobs.append(job)
    for job in jobs[6:]:
        owner.complete(job)
    for one in waiting:
        assert await one.status() == 200
    assert front.exchange.slots.used == 0


@beside(playing, slot_wait_s=0.1)
async def test_a_request_that_waits_in_vain_does_not_keep_its_place_for_ever(scene, front, owner, /):
    """Each slot that becomes free is too small for the first; those behind it must be served or refused, too."""
    jobs, clients = await fill(scene, owner)
    large = await scene.connect()
    large.send(*request(range(400)))  # half of the slab
    await wait_until_async(lambda: len(front.exchange._waiting) == 1)
    statuses, dues = asyncio.ensure_future(large.status()), set()
    while not statuses.done():  # others come and go all the time
        dues |= {lookup.slot_due for lookup, _ in front.exchange._waiting}
        job, client = jobs.pop(0), clients.pop(0)
        owner.complete(job)
        await client.checked(owner.keys(job))
        client.send(*request(range(LARGE)))
        clients.append(client)
        jobs.append(await owner.job())
    assert await statuses == 503
    assert len(dues) == 1


@beside(playing)
async def test_a_request_that_no_slot_holds_is_refused_and_the_next_is_answered(scene, front, owner, /):
    owner.publish(m=owner.deploy(), wide=owner.deploy("wide", [SLAB_BYTES]))
    client = await scene.connect()
    client.send(*request([5], model="wide"), *request([1, 2]), *request([6], model="wide"), *request([3]))
    assert await client.status() == 413
    owner.complete(await owner.job())
    await client.checked([1, 2])
    assert await client.status() == 413
    owner.complete(await owner.job())
    await client.checked([3])


@beside(playing)
async def test_the_rest_of_a_large_request_that_no_slot_holds_is_not_read_as_another(scene, front, owner, /):
    client = await scene.connect()
    client.send(*request(range(2000)), *request([1, 2]))
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert await client.reader.read() == b""
    assert owner.board.next_job() is None


@pytest.mark.parametrize("reset", [True, False])
@beside(playing)
async def test_a_client_that_leaves_does_not_free_the_slot_that_the_owner_has(scene, front, owner, /, reset):
    client = await scene.connect()
    client.send(*request(range(LARGE)))
    job = await owner.job()
    if reset:
        client.reset()
        await wait_until_async(lambda: not front.connections.order)
    else:
        (connection,) = front.connections.order
        client.writer.close()
        await wait_until_async(lambda: connection._eof, "the front has noticed")
    assert front.exchange.slots.used == 8192
    owner.complete(job)
    await wait_until_async(lambda: front.exchange.slots.used == 0 and not front.connections.order)


@beside(playing)
async def test_a_buffer_that_is_full_behind_a_request_is_read_on_after_it(scene, front, owner, /):
    """What is pipelined fills the buffer while the owner is asked: nothing more is read until there is room again."""
    for _ in range(10):
        client = await scene.connect()
        client.send(*[json_request([nth]) for nth in range(3)], json_request([3], spaces=500_000))
        for nth in range(4):
            job = await owner.job()
            if nth == 0:
                (connection,) = front.connections.order
                await wait_until_async(lambda connection=connection: connection._reading_paused)
            assert owner.keys(job).tolist() == [nth]
            owner.complete(job)
            assert await client.status() == 200
        client.writer.close()
        await wait_until_async(lambda: not front.connections.order)


@pytest.mark.parametrize("again", [False, True])
@beside(playing)
async def test_bodies_that_come_slowly_take_no_more_than_half_of_the_slots(scene, front, owner, /, again):
    clients = [await scene.connect() for _ in range(12)]
    if again:  # what follows begins like the request before it
        for client in clients:
            client.send(*request(range(LARGE)))
            owner.complete(await owner.job())
            await client.checked(range(LARGE))
    bodies = []
    for nth, client in enumerate(clients):
        head, body = request(range(nth, nth + LARGE))
        client.send(head, body[:-8])
        bodies.append(body)
        await wait_until_async(lambda nth=nth: front.exchange.slots.used == 8192 * min(nth + 1, 5))
        await wait_until_async(lambda nth=nth: sum(bool(one._fill) for one in front.connections.order) == nth + 1)
    late = await scene.connect()
    late.send(*request([3, 4]))
    owner.complete(await owner.job())
    await late.checked([3, 4])
    for nth, (client, body) in enumerate(zip(clients, bodies, strict=True)):
        client.send(body[-8:])
        owner.complete(await owner.job())
        await client.checked(range(nth, nth + LARGE))
    assert front.exchange.slots.used == front.memory.held == 0


@beside(playing)
async def test_a_client_that_leaves_with_half_of_its_keys_frees_its_slot(scene, front, owner, /):
    client = await scene.connect()
    head, body = request(range(LARGE))
    client.send(head, body[:-8])
    await wait_until_async(lambda: front.exchange.slots.used == 8192)
    client.writer.close()
    await wait_until_async(lambda: front.exchange.slots.used == 0)
    assert owner.board.next_job() is None


@pytest.mark.parametrize("as_json", [True, False])
@beside(playing)
async def test_a_client_that_leaves_before_it_has_read_its_answer_frees_slot_and_memory(scene, front, owner, /, as_json):
    for _ in range(2):
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", scene.port))
            await wait_until_async(lambda: front.connections.order, "the connection is accepted")
            (connection,) = front.connections.order
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            raw.sendall(json_request(list(range(WHOLE))) if as_json else b"".join(request(range(WHOLE))))
            owner.complete(await owner.job())
            await wait_until_async(lambda: connection._stalled, "the client does not read")  # noqa: B023
            assert front.exchange.slots.used > 0
            assert (front.memory.held > 0) is as_json
        await wait_until_async(lambda: not front.connections.order, "the connection has ended")
        assert front.exchange.slots.used == front.memory.held == 0


@pytest.mark.parametrize(
    ("head", "part", "rest", "held"),
    [
        (b"Content-Length: 1000", b" " * 400, b" " * 600, 1000),
        (b"Transfer-Encoding: chunked", b"190\r\n" + b" " * 400, b"\r\n0\r\n\r\n", 400),
    ],
)
@beside(playing)
async def test_a_body_is_held_until_its_request_ends(scene, front, owner, /, head, part, rest, held):
    """By an answer, or by a client that leaves; each counts once, however often it is tried."""
    client = await scene.connect()
    for _ in range(2):
        client.send(b"POST /v1/models/m/lookup HTTP/1.1\r\n" + head + b"\r\n\r\n" + part)
        await wait_until_async(lambda: front.memory.held == held, "a part is held")
        client.send(rest)
        assert await client.status() == 400
        assert front.memory.held == 0
        head_and_body = json_request([*range(LARGE)])
        client.send(head_and_body)
        job = await owner.job()
        assert front.memory.held > len(head_and_body.partition(b"\r\n\r\n")[2]) + 4 * DIM * LARGE, "its answer, too"
        owner.complete(job)
        assert await client.status() == 200
        assert front.memory.held == 0
    client.send(b"POST /v1/models/m/lookup HTTP/1.1\r\n" + head + b"\r\n\r\n" + part)
    await wait_until_async(lambda: front.memory.held == held, "a part is held")
    client.writer.close()
    await wait_until_async(lambda: not front.connections.order, "the connection has ended")
    assert front.memory.held == 0


@beside(playing, slot_wait_s=0.05)
async def test_so_many_lookups_are_under_way_and_one_more_when_one_has_ended(scene, front, owner, /, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_PENDING", 4)
    jobs, clients = await fill(scene, owner, 4)
    refused = await scene.connect()
    refused.send(json_request([1]))
    status, _, body = await refused.answer()
    assert (status, json.loads(body)["error"].partition(",")[0]) == (503, "4 lookups are under way")
    for one in jobs:
        owner.complete(one)
    for one, job in zip(clients, jobs, strict=True):
        await one.checked(owner.keys(job))
    await fill(scene, owner, 4)


@beside(playing)
async def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_its_slot(scene, front, owner, /):
    jobs, clients = await fill(scene, owner)
    later = [await scene.connect() for _ in range(2)]
    for nth, size in enumerate((400, 3)):
        later[nth].send(*request(range(size)))
        await wait_until_async(lambda nth=nth: len(front.exchange._waiting) == nth + 1, "it waits")
    for one, client in zip(jobs, clients, strict=True):
        owner.complete(one)
        await client.checked(owner.keys(one))
    sizes = []
    for client in later:
        job = await owner.job()
        sizes.append(owner.keys(job).size)
        owner.complete(job)
        await client.checked(range(sizes[-1]))
    assert sizes == [400, 3]


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
@beside(playing)
async def test_a_client_that_leaves_ends_what_the_owners_application_does_for_it(scene, front, owner, /, part):
    writers, closed = [], []

    async def serve(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(part)
        closed.append(await reader.read())

    server = await asyncio.start_unix_server(serve, scene.shared.path)
    try:
        for count in (1, 2):
            client = await scene.connect()
            client.send(b"GET /v1/models HTTP/1.1\r\n\r\n")
            await client.reader.readexactly(len(part))
            (connection,) = front.connections.order
            await wait_until_async(lambda: connection._upstream, "the application is asked")  # noqa: B023
            client.reset()
            await wait_until_async(lambda count=count: closed == [b""] * count, "its connection is closed")
    finally:
        server.close()
        for one in writers:
            one.transport.abort()


@beside(playing)
async def test_counts_of_versions_that_are_gone_are_forgotten_but_not_while_an_owner_starts(scene, front, owner, /):
    for _ in range(2):
        known = set(front.published.counts)
        owner.publish(blocked="the service is starting")
        await wait_until_async(lambda: front.published.blocked, "nothing is answered")
        assert set(front.published.counts) == known
        owner.publish(m=owner.deploy())
        await wait_until_async(lambda: not front.published.blocked, "another deployment answers")
        assert len(front.published.counts) == 1


@beside(playing)
async def test_a_lookup_that_takes_too_long_is_refused_and_its_slot_comes_back_later(scene, front, owner, /):
    deployed = owner.deploy()
    owner.publish(settings={"request_timeout_s": 0.1}, m=deployed)
    await wait_until_async(lambda: front.settings.request_timeout_s == 0.1)
    client = await scene.connect()
    client.send(*request(range(LARGE)))
    job = await owner.job()
    assert await client.status() == 504
    assert front.exchange.slots.used == 8192
    owner.publish(m=deployed)
    await wait_until_async(lambda: front.settings.request_timeout_s > 1)
    client.send(*request([5]))
    other = await owner.job()
    assert other.slot != job.slot
    owner.complete(other)
    await client.checked([5])
    owner.complete(job)
    await wait_until_async(lambda: front.exchange.slots.used == 0)


@beside(playing)
async def test_an_error_of_the_owner_reaches_the_client(scene, front, owner, /):
    client = await scene.connect()
    client.send(*request([1]))
    aside = json.dumps({"status": 503, "message": "no database", "reason": ""}).encode()
    owner.complete(await owner.job(), FAILED, aside)
    status, headers, body = await client.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"] == "no database"
    client.send(*request([2]))
    owner.complete(await owner.job(), layout.MALFORMED)
    assert await client.status() == 500
    assert front.exchange.slots.used == 0


@pytest.mark.parametrize("as_json", [True, False])
@beside(playing)
async def test_a_retired_lookup_is_posted_again_for_the_version_that_took_over(scene, front, owner, /, as_json):
    client = await scene.connect()
    client.send(json_request([8, 9]) if as_json else b"".join(request([8, 9])))
    job = await owner.job()
    other = owner.deploy()
    owner.publish(m=other)
    owner.complete(job, RETIRED)
    job = await owner.job()
    assert job.header[0] == other[0]
    assert owner.keys(job).tolist() == [8, 9]
    owner.complete(job)
    assert await client.status() == 200
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_a_lookup_is_not_retired_for_ever(scene, front, owner, /, monkeypatch):
    clock = Clock(1000.0)
    times = SimpleNamespace(monotonic=clock, perf_counter=clock, perf_counter_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(exchange, "time", times)
    client = await scene.connect()
    client.send(*request([8]))
    dues = set()
    for _ in range(5):
        job = await owner.job()
        dues |= {lookup.due for lookup in front.exchange.pending.values()}
        owner.complete(job, RETIRED)
    last = await owner.job()
    clock.now += SETTINGS["request_timeout_s"] + 1
    owner.complete(last, RETIRED)
    assert await client.status() in (503, 504)
    assert len(dues) == 1
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slot is free")
    assert owner.board.next_job() is None


# -- deaths -------------------------------------------------------------------------------------------------------------------


@beside(playing)
async def test_a_front_takes_no_slot_before_the_answers_of_the_one_before_it_are_written(scene, front, owner, /):
    """They would land in the keys of its first requests."""
    client = await scene.connect()
    client.send(*request(range(LARGE)))
    job = await owner.job()
    await front.stop(0)
    front.close()
    scene.fronts.remove(front)
    second = await scene.start_front()
    client = await scene.connect()
    for _ in range(2):
        client.send(*request([1]))
        status, headers, _ = await client.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert second.exchange.slots.used == 0
    owner.complete(job)
    await scene.connected(second)
    client.send(*request([1]))
    owner.complete(await owner.job())
    await client.checked([1])


@beside(playing)
async def test_slots_of_clients_that_left_come_back_when_the_owner_has_died(scene, front, owner, /):
    for first in (1000, 2000):
        client = await scene.connect()
        client.send(*request(range(LARGE)))
        await scene.owner.job()
        client.reset()
        await wait_until_async(lambda: not front.connections.order, "the client has gone")
        assert front.exchange.slots.used == 8192
        later = scene.another_owner(first)
        later.publish(m=later.deploy())
        later.start()
        await wait_until_async(lambda: front.exchange.slots.used == 0, "its slot is free")
        assert later.board.next_job() is None
        assert not front.exchange.pending


@pytest.mark.parametrize("arrived", [0, 8, 8 * LARGE])
@beside(playing)
async def test_connections_stay_open_while_there_is_no_owner(scene, front, owner, /, arrived):
    client = await scene.connect()
    later = scene.another_owner(1000)
    await wait_until_async(lambda: not front.exchange._connected)
    head, body = request(range(LARGE))
    text = len(body) - 8 * LARGE
    client.send(head, body[: text + arrived])
    status, headers, _ = await client.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    assert headers["connection"] is None
    client.send(body[text + arrived :])
    later.publish(m=later.deploy())
    later.start()
    await scene.connected(front)
    client.send(*request([6]))
    later.complete(await later.job())
    await client.checked([6])


@beside(playing)
async def test_what_a_dead_owner_did_not_answer_is_looked_up_in_the_same_model_of_the_next_one(scene, front, owner, /):
    """The next owner gives other numbers to its deployments. Keys, bags and JSON alike reach it again."""
    clients = [await scene.connect() for _ in range(3)]
    clients[0].send(*request([1, 2]))
    clients[1].send(json_request([3]))
    clients[2].send(*request([4]))
    for _ in clients:
        job = await owner.job()
        if owner.keys(job).tolist() == [4]:
            owner.complete(job)
    await clients[2].checked([4])
    later = scene.another_owner(1000)
    other, mine = later.deploy("other"), later.deploy()
    later.publish(other=other, m=mine)
    later.start()
    for _ in range(2):
        job = await later.job()
        assert job.header[0] == mine[0]
        later.complete(job)
    await clients[0].checked([1, 2])
    assert await clients[1].status() == 200
    assert front.exchange.slots.used == 0


@beside(playing)
async def test_a_front_that_did_not_notice_the_death_of_an_owner_begins_anew(scene, front, owner, /):
    """As one that was stopped meanwhile: nothing of its old ring is answered again."""
    client = await scene.connect()
    for nth in range(20):
        client.send(*request([nth]))
        owner.complete(await owner.job())
        await client.checked([nth])
    later = scene.another_owner(1000)  # no turn of the event loop from here
    later.publish(m=later.deploy())
    later.start()
    wait_until(lambda: front.exchange.region[layout.OWNER_SLEEPS], "the owner has looked, and sleeps")
    assert later.board.next_job() is None
    assert front.exchange.region[layout.OWNER_EPOCH] == 0
    await wait_until_async(lambda: front.exchange.region[layout.OWNER_EPOCH] != 0 and front.exchange._connected)
    client.send(*request([99]))
    job = await later.job()
    assert later.keys(job).tolist() == [99]
    later.complete(job)
    await client.checked([99])
    assert later.board.next_job() is None
