"""A front on this event loop, with an owner that the test plays: connections stay in step, and slots have one user."""

import asyncio
import http.client
import io
import json
import os
import socket
import struct
import threading
from contextlib import asynccontextmanager
from dataclasses import asdict

import numpy as np
import pytest
import uvloop

from hps.cache.cpu.batches import NumpyBatches
from hps.configuration.load import load_configuration
from hps.regions import layout
from hps.regions.board import Board
from hps.regions.layout import ANSWERED, FAILED, RETIRED, SLAB, FrontDescriptors, Memory, shared_memory, write_text
from hps.service.fronts import exchange as exchange_module
from hps.service.fronts import front as front_module
from hps.service.fronts.front import Front
from hps.service.server import listen
from hps.types import TableSpec
from tests.fakes.region_front import WAIT_S
from tests.servers.front_service import DIM, ROWS, binary_request, binary_vectors, vectors_of
from tests.servers.running_service import document_of, model_of

SLAB_BYTES = 1 << 16  # sixteen slots of the smallest size
SETTINGS = {"request_timeout_s": WAIT_S}
LARGE = 100  # keys whose request takes 8 KB
WHOLE = 800  # keys whose request takes the whole slab


def configuration_of(settings):
    return load_configuration(document_of(model_of("m", ["nowhere"], {"item": DIM}), service=settings))


class Owner:
    """The owner, whose loop leaves every request to the test.

    Args:
        first: what serials count from.
    """

    def __init__(self, shared, first=0):
        self._memories = [Memory(one) for one in shared.regions]
        self._page = Memory(shared.page)
        for one in self._memories:
            one[layout.OWNER_EPOCH] = 0
        self._shared = shared
        self.jobs_event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.board = Board(self._memories, shared.events, shared.loop_events[0], self.jobs_event, 0, first)
        self._thread = None

    def deploy(self, name="m", dims=(DIM,)):
        tables = [TableSpec(name, "item", dim, 0.0, 10_000) for dim in dims]
        return self.board.add(tables, None), tables

    def publish(self, *, blocked="", settings=SETTINGS, **models):
        """Write the page: of each model its (serial, tables)."""
        configuration = configuration_of(settings)
        page = {
            "models": {
                name: {"1": {"tables": list(map(asdict, tables)), "keys_per_sample": 1, "serials": [[0, serial]], "lost": []}}
                for name, (serial, tables) in models.items()
            },
            "serving": dict.fromkeys(models, "1"),
            "reasons": {},
            "blocked": blocked,
            "settings": configuration.service.model_dump(mode="json"),
            "tokens": [],
            "shared_memory": {},
        }
        write_text(self._page, 0, page, self._page.size - layout.PAGE_TEXT)

    def start(self):
        driver = NumpyBatches(self.board)
        driver.prepare()
        self._thread = threading.Thread(target=driver.run, daemon=True)
        self._thread.start()

    def stop(self):
        """End as a process does, without a word to anybody."""
        if self._thread is not None:
            self.board.stop()
            self._thread.join(WAIT_S)
            self._thread = None

    def close(self):
        self.stop()
        os.close(self.jobs_event)

    async def job(self):
        """Take the next request."""
        async with asyncio.timeout(WAIT_S):
            while (job := self.board.next_job()) is None:
                await asyncio.sleep(0.001)
        return job

    def keys(self, job):
        _, n, at, _, _ = job.segments[0].tolist()
        return self._memories[job.place].bytes[at : at + 8 * n].view(np.int64).copy()

    def complete(self, job, status=ANSWERED, aside=b"", of=vectors_of):
        memory = self._memories[job.place]
        if status == ANSWERED:
            out_at = int(job.segments[0, 3])
            vectors = np.ascontiguousarray(of(self.keys(job)), np.float32)
            memory.bytes[out_at : out_at + vectors.nbytes] = vectors.view(np.uint8).reshape(-1)
        at = memory[job.slot + layout.ASIDE] + job.slot
        memory.view[at : at + len(aside)] = aside
        memory[job.slot + layout.ASIDE_USED] = len(aside)
        memory[job.slot + layout.STATUS] = status
        self.board.complete(job)


class Client:
    """A raw connection to the front."""

    def __init__(self, streams):
        self.reader, self.writer = streams

    def send(self, *pieces):
        self.writer.write(b"".join(pieces))

    async def answer(self):
        """Return the status, headers and body of the next answer."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            headers = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2]))
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))

    async def checked(self, keys):
        status, headers, body = await self.answer()
        assert status == 200, body
        assert np.array_equal(binary_vectors(headers, body), vectors_of(keys))

    async def status(self):
        return (await self.answer())[0]


def request(keys, *lines, model="m"):
    """The head and the body of a binary request."""
    headers, body = binary_request(keys)
    all_lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Content-Length: {len(body)}", *lines]
    all_lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*all_lines, "", ""]).encode(), body


def json_request(keys, spaces=0):
    body = json.dumps({"tables": {"item": keys}}).encode() + b" " * spaces
    return b"POST /v1/models/m/lookup HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class Scene:
    """A front with a small slab, its owner, and clients."""

    def __init__(self, directory):
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.shared = FrontDescriptors(
            (shared_memory("hps-test", SLAB + SLAB_BYTES),),
            (os.eventfd(0, flags),),
            shared_memory("hps-test-page", 1 << 20),
            (os.eventfd(0, flags),),
            str(directory / "owner.sock"),
            0,
        )
        self.configuration = configuration_of(SETTINGS)
        self.owners, self.clients, self.fronts = [Owner(self.shared)], [], []

    @property
    def owner(self):
        return self.owners[-1]

    def another_owner(self, first):
        """What the parent does when the owner has died, and what its successor does first."""
        self.owner.stop()
        Memory(self.shared.regions[0])[layout.OWNER_EPOCH] = 0
        os.eventfd_write(self.shared.events[0], 1)
        self.owners.append(Owner(self.shared, first))
        return self.owner

    async def start_front(self):
        front = Front(0, self.shared, self.configuration, spins=False, loopback=True)
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        await front.start(listener)
        self.fronts.append(front)
        return front

    async def connect(self):
        self.clients.append(Client(await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def connected(self, front):
        await until(lambda: front.exchange._connected)

    async def close(self):
        for one in self.clients:
            one.writer.close()
        for one in self.fronts:
            await one.stop(0)
            one.close()
        for one in self.owners:
            one.close()
        for descriptor in (*self.shared.regions, *self.shared.events, *self.shared.loop_events, self.shared.page):
            os.close(descriptor)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(directory):
    """A front that serves a model, and its owner."""
    scene = Scene(directory)
    try:
        scene.owner.publish(m=scene.owner.deploy())
        scene.owner.start()
        front = await scene.start_front()
        await scene.connected(front)
        yield scene, front, scene.owner
    finally:
        await scene.close()


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run a coroutine with a scene, in which time passes quickly."""
    monkeypatch.setattr(front_module, "_TICK_S", 0.02)

    def run(script, slot_wait_s=WAIT_S):
        monkeypatch.setattr(exchange_module, "_SLOT_WAIT_S", slot_wait_s)

        async def main():
            async with opened(tmp_path) as (scene, front, owner):
                await script(scene, front, owner)

        uvloop.run(main())

    return run


async def fill(scene, owner, count=8):
    """Take slots, all by default, by requests that the owner keeps; return these jobs, and their clients."""
    clients = [await scene.connect() for _ in range(count)]
    for nth, one in enumerate(clients):
        one.send(*request(range(nth, nth + LARGE)))
    jobs = [await owner.job() for _ in clients]
    return jobs, clients


def test_a_lookup_is_posted_and_answered(play):
    async def script(scene, front, owner):
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

    play(script)


@pytest.mark.parametrize("arrived", [0, 40, 8 * WHOLE])
@pytest.mark.parametrize("again", [False, True])  # a connection remembers how its last request began
def test_keys_of_a_request_that_finds_no_slot_are_not_read_as_the_next_request(play, arrived, again):
    """Keys may spell a request: a client that is refused must not have it answered."""
    evil = (b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n" * 120)[: 8 * WHOLE]
    keys = np.frombuffer(evil, np.int64)

    async def script(scene, front, owner):
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

    play(script, slot_wait_s=0.05)


def test_requests_wait_for_slots_and_get_them_in_their_order(play):
    async def script(scene, front, owner):
        jobs, clients = await fill(scene, owner)
        waiting = [await scene.connect() for _ in range(6)]
        for nth, one in enumerate(waiting):
            keys = list(range(nth, nth + LARGE))
            one.send(*request(keys) if nth % 2 else [json_request(keys)])
            await until(lambda nth=nth: len(front.exchange._waiting) == nth + 1)
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

    play(script)


def test_a_request_that_waits_in_vain_does_not_keep_its_place_for_ever(play):
    """Each slot that becomes free is too small for the first; those behind it must be served or refused, too."""

    async def script(scene, front, owner):
        jobs, clients = await fill(scene, owner)
        large = await scene.connect()
        large.send(*request(range(400)))  # half of the slab
        await until(lambda: len(front.exchange._waiting) == 1)
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

    play(script, slot_wait_s=0.1)


def test_a_request_that_no_slot_holds_is_refused_and_the_next_is_answered(play):
    async def script(scene, front, owner):
        owner.publish(m=owner.deploy(), wide=owner.deploy("wide", [SLAB_BYTES]))
        client = await scene.connect()
        client.send(*request([5], model="wide"), *request([1, 2]), *request([6], model="wide"), *request([3]))
        assert await client.status() == 413
        owner.complete(await owner.job())
        await client.checked([1, 2])
        assert await client.status() == 413
        owner.complete(await owner.job())
        await client.checked([3])

    play(script)


def test_the_rest_of_a_large_request_that_no_slot_holds_is_not_read_as_another(play):
    async def script(scene, front, owner):
        client = await scene.connect()
        client.send(*request(range(2000)), *request([1, 2]))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert await client.reader.read() == b""
        assert owner.board.next_job() is None

    play(script)


@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_leaves_does_not_free_the_slot_that_the_owner_has(play, reset):
    async def script(scene, front, owner):
        client = await scene.connect()
        client.send(*request(range(LARGE)))
        job = await owner.job()
        if reset:
            raw = client.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.writer.transport.abort()
            await until(lambda: not front.connections.order)
        else:
            client.writer.close()
            await asyncio.sleep(0.02)
        assert front.exchange.slots.used == 8192
        owner.complete(job)
        await until(lambda: front.exchange.slots.used == 0 and not front.connections.order)

    play(script)


def test_a_buffer_that_is_full_behind_a_request_is_read_on_after_it(play):
    """What is pipelined fills the buffer while the owner is asked: nothing more is read until there is room again."""

    async def script(scene, front, owner):
        for _ in range(10):
            client = await scene.connect()
            client.send(*[json_request([nth]) for nth in range(3)], json_request([3], spaces=500_000))
            for nth in range(4):
                job = await owner.job()
                if nth == 0:
                    (connection,) = front.connections.order
                    await until(lambda connection=connection: connection._reading_paused)
                assert owner.keys(job).tolist() == [nth]
                owner.complete(job)
                assert await client.status() == 200
            client.writer.close()
            await until(lambda: not front.connections.order)

    play(script)


@pytest.mark.parametrize("again", [False, True])
def test_bodies_that_come_slowly_take_no_more_than_half_of_the_slots(play, again):
    async def script(scene, front, owner):
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
            await until(lambda nth=nth: front.exchange.slots.used == 8192 * min(nth + 1, 5))
            await until(lambda nth=nth: sum(bool(one._fill) for one in front.connections.order) == nth + 1)
        late = await scene.connect()
        late.send(*request([3, 4]))
        owner.complete(await owner.job())
        await late.checked([3, 4])
        for nth, (client, body) in enumerate(zip(clients, bodies, strict=True)):
            client.send(body[-8:])
            owner.complete(await owner.job())
            await client.checked(range(nth, nth + LARGE))
        assert front.exchange.slots.used == front.memory.held == 0

    play(script)


def test_a_client_that_leaves_with_half_of_its_keys_frees_its_slot(play):
    async def script(scene, front, owner):
        client = await scene.connect()
        head, body = request(range(LARGE))
        client.send(head, body[:-8])
        await until(lambda: front.exchange.slots.used == 8192)
        client.writer.close()
        await until(lambda: front.exchange.slots.used == 0)
        assert owner.board.next_job() is None

    play(script)


def test_a_lookup_that_takes_too_long_is_refused_and_its_slot_comes_back_later(play):
    async def script(scene, front, owner):
        owner.publish(settings={"request_timeout_s": 0.1}, m=owner.deploy())
        await until(lambda: front.settings.request_timeout_s == 0.1)
        client = await scene.connect()
        client.send(*request(range(LARGE)))
        job = await owner.job()
        assert await client.status() == 504
        assert front.exchange.slots.used == 8192
        client.send(*request([5]))
        other = await owner.job()
        assert other.slot != job.slot
        owner.complete(other)
        await client.checked([5])
        owner.complete(job)
        await until(lambda: front.exchange.slots.used == 0)

    play(script)


def test_an_error_of_the_owner_reaches_the_client(play):
    async def script(scene, front, owner):
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

    play(script)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_retired_lookup_is_posted_again_for_the_version_that_took_over(play, as_json):
    async def script(scene, front, owner):
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

    play(script)


def test_a_lookup_is_not_retired_for_ever(play):
    async def script(scene, front, owner):
        owner.publish(settings={"request_timeout_s": 0.3}, m=owner.deploy())
        await until(lambda: front.settings.request_timeout_s == 0.3)
        client = await scene.connect()
        client.send(*request([8]))
        answer, dues = asyncio.ensure_future(client.status()), set()
        while not answer.done():
            dues |= {lookup.due for lookup in front.exchange.pending.values()}
            if (job := owner.board.next_job()) is not None:
                owner.complete(job, RETIRED)
            await asyncio.sleep(0.001)
        assert await answer in (503, 504)
        assert len(dues) == 1
        while (job := owner.board.next_job()) is not None:  # one may have been posted again just before
            owner.complete(job, RETIRED)
        await until(lambda: front.exchange.slots.used == 0)

    play(script)


# -- deaths -------------------------------------------------------------------------------------------------------------------


def test_a_front_takes_no_slot_before_the_answers_of_the_one_before_it_are_written(play):
    """They would land in the keys of its first requests."""

    async def script(scene, front, owner):
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

    play(script)


@pytest.mark.parametrize("arrived", [0, 8, 8 * LARGE])
def test_connections_stay_open_while_there_is_no_owner(play, arrived):
    async def script(scene, front, owner):
        client = await scene.connect()
        later = scene.another_owner(1000)
        await until(lambda: not front.exchange._connected)
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

    play(script)


def test_what_a_dead_owner_did_not_answer_is_looked_up_in_the_same_model_of_the_next_one(play):
    """The next owner gives other numbers to its deployments. Keys, bags and JSON alike reach it again."""

    async def script(scene, front, owner):
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

    play(script)


def test_a_front_that_did_not_notice_the_death_of_an_owner_begins_anew(play):
    """As one that was stopped meanwhile: nothing of its old ring is answered again."""

    async def script(scene, front, owner):
        client = await scene.connect()
        for nth in range(20):
            client.send(*request([nth]))
            owner.complete(await owner.job())
            await client.checked([nth])
        later = scene.another_owner(1000)  # no turn of the event loop from here
        later.publish(m=later.deploy())
        later.start()
        threading.Event().wait(0.05)
        assert later.board.next_job() is None
        assert front.exchange.region[layout.OWNER_EPOCH] == 0
        await until(lambda: front.exchange.region[layout.OWNER_EPOCH] != 0 and front.exchange._connected)
        client.send(*request([99]))
        job = await later.job()
        assert later.keys(job).tolist() == [99]
        later.complete(job)
        await client.checked([99])
        assert later.board.next_job() is None

    play(script)
