"""A front on this event loop, with a small slab and an engine that the test plays."""

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

from hps.cache.cpu.batches import NumpyBatches
from hps.configuration.load import load_configuration
from hps.regions import layout
from hps.regions.layout import ANSWERED, SLAB, FrontendDescriptors, Memory, create_region, shared_memory, write_text
from hps.regions.loop_state import LoopState
from hps.serve.frontend import exchange as exchange_module
from hps.serve.frontend import frontend as front_module
from hps.serve.frontend.connection import Connection
from hps.serve.frontend.frontend import Frontend
from hps.serve.frontend.supervisor import bind
from hps.testing.waiting import PATIENCE_S, wait_until_async
from hps.types import TableSpec
from tests.servers.front_service import DIM, binary_request, binary_vectors, vectors_of
from tests.servers.running_service import document_of, model_of

SLAB_BYTES = 1 << 16  # sixteen slots of the smallest size
SETTINGS = {"request_timeout_s": PATIENCE_S, "access_log_per_s": 0}  # whose lines keep requests from beginning like the last
LARGE = 100
"""Keys whose request takes 8 KB."""


def configuration_of(settings):
    return load_configuration(document_of(model_of("m", ["nowhere"], {"item": DIM}), service=settings))


class Engine:
    """The engine, whose loop leaves every request to the test.

    Args:
        first: what deployment_ids count from.
    """

    def __init__(self, shared, first=0):
        self._memories = [Memory(region) for region in shared.regions]
        self._page = Memory(shared.snapshot)
        for memory in self._memories:
            memory[layout.ENGINE_EPOCH] = 0
        self._shared = shared
        self.handed_over_event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop_state = LoopState(self._memories, shared.events, shared.loop_events[0], self.handed_over_event, 0, first)
        self._thread = None

    def deploy(self, name="m", dims=(DIM,)):
        tables = [TableSpec(name, "item", dim, 0.0, 10_000) for dim in dims]
        return self.loop_state.add(tables, None), tables

    def publish(self, *, blocked="", settings=SETTINGS, rollouts=None, transforms=None, serving="1", **models):
        """Write the page: of each model its (deployment_id, tables), or those of several versions, of which 1 serves.

        Args:
            transforms: of the versions of model m, by number.
        """
        configuration = configuration_of(settings)
        page = {
            "models": {
                name: {
                    version: {
                        "tables": list(map(asdict, tables)),
                        "keys_per_sample": 1,
                        "deployment_ids": [[0, deployment_id]],
                        "lost": [],
                        "transform": (transforms or {}).get(version) if name == "m" else None,
                    }
                    for version, (deployment_id, tables) in (found if isinstance(found, dict) else {"1": found}).items()
                }
                for name, found in models.items()
            },
            "serving": {name: serving if name == "m" else "1" for name in models},
            "reasons": {},
            "rollouts": rollouts or {},
            "blocked": blocked,
            "settings": configuration.service.model_dump(mode="json"),
            "tokens": [],
            "shared_memory": {},
        }
        write_text(self._page, 0, page, self._page.size - layout.TEXT_AT)

    def start(self):
        driver = NumpyBatches(self.loop_state)
        driver.prepare()
        self._thread = threading.Thread(target=driver.run, daemon=True)
        self._thread.start()

    def begin(self):
        """Serve model `m`."""
        self.publish(m=self.deploy())
        self.start()

    def stop(self):
        """End as a process does, without a word to anybody."""
        if self._thread is not None:
            self.loop_state.stop()
            self._thread.join(PATIENCE_S)
            self._thread = None

    def close(self):
        self.stop()
        os.close(self.handed_over_event)

    async def job(self):
        """Take the next request."""
        return await wait_until_async(self.loop_state.next_request, "a request comes")

    def keys(self, job):
        _, n, at, _, _ = job.segments[0].tolist()
        return self._memories[job.place].bytes[at : at + 8 * n].view(np.int64).copy()

    def complete(self, job, status=ANSWERED, scratch=b"", of=vectors_of):
        memory = self._memories[job.place]
        if status == ANSWERED:
            out_at = int(job.segments[0, 3])
            vectors = np.ascontiguousarray(of(self.keys(job)), np.float32)
            memory.bytes[out_at : out_at + vectors.nbytes] = vectors.view(np.uint8).reshape(-1)
        at = memory[job.slot + layout.SCRATCH] + job.slot
        memory.view[at : at + len(scratch)] = scratch
        memory[job.slot + layout.SCRATCH_USED] = len(scratch)
        memory[job.slot + layout.STATUS] = status
        self.loop_state.complete(job)


class Client:
    """A raw connection to the front."""

    def __init__(self, streams):
        self.reader, self.writer = streams

    def send(self, *pieces):
        self.writer.write(b"".join(pieces))

    def reset(self):
        """Leave in a way that the front notices at once."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def answer(self):
        """Return the status, headers and body of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
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
    """A front with a small slab, its engine, and clients."""

    def __init__(self, directory):
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.shared = FrontendDescriptors(
            (create_region("hps-test", SLAB + SLAB_BYTES),),
            (os.eventfd(0, flags),),
            shared_memory("hps-test-page", 1 << 20),
            (os.eventfd(0, flags),),
            str(directory / "engine.sock"),
            0,
        )
        self.configuration = configuration_of(SETTINGS)
        self.engines, self.clients, self.fronts = [Engine(self.shared)], [], []

    @property
    def engine(self):
        return self.engines[-1]

    def another_engine(self, first):
        """What the parent does when the engine has died, and what its successor does first."""
        self.engine.stop()
        Memory(self.shared.regions[0])[layout.ENGINE_EPOCH] = 0
        os.eventfd_write(self.shared.events[0], 1)
        self.engines.append(Engine(self.shared, first))
        return self.engine

    async def start_front(self):
        front = Frontend(0, self.shared, self.configuration, connect=Connection, spins=False, loopback=True)
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        await front.start(listener)
        self.fronts.append(front)
        return front

    async def connect(self):
        self.clients.append(Client(await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def connected(self, front):
        await wait_until_async(lambda: front.exchange._connected, "the engine knows the front")

    async def close(self):
        for client in self.clients:
            client.writer.close()
        for front in self.fronts:
            await front.stop(0)
            front.close()
        for one in self.engines:
            one.close()
        for descriptor in (*self.shared.regions, *self.shared.events, *self.shared.loop_events, self.shared.snapshot):
            os.close(descriptor)


@asynccontextmanager
async def playing(directory, slot_wait_s=PATIENCE_S):
    """A front that serves a model, and its engine; time passes quickly."""
    scene = Scene(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_module, "_TICK_S", 0.02)
        patch.setattr(exchange_module, "_SLOT_WAIT_S", slot_wait_s)
        try:
            scene.engine.begin()
            front = await scene.start_front()
            await scene.connected(front)
            yield scene, front, scene.engine
        finally:
            await scene.close()
