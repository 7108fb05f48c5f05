"""Fronts that are broken into, and processes that die under load, again and again."""

import os
import signal
import threading

import httpx
import numpy as np

from hps.regions import layout
from hps.testing.waiting import wait_until
from tests.ring2.serve.test_frontends import KEYS, load, running, service, stopped
from tests.servers.front_service import ROWS

__all__ = ["running", "service"]


def test_a_front_that_writes_garbage_harms_only_itself(service):
    """Its rings, epochs, figures and slots: the other front's clients get their answers, and /metrics goes on."""
    connections, region, ended = service.connections(4), service.region(0), threading.Event()
    pid = service.all_processes()[0]

    def scribble():
        random = np.random.default_rng(5)
        edges = np.array([0, -1, 1, 3, 64, 256, 1 << 20, 1 << 40, 1 << 62, -(1 << 63), layout.SLAB, region.size], np.int64)
        figures = [b'{"http": 3}', b"[" * 1000, b'{"http": {"counts": {"x": "y"}}, "inference": {}}', b"{}", b'{"http": {}}']
        while not ended.is_set():
            at = layout.SLAB // 8 + 512 * int(random.integers(0, 40))
            region.words[at : at + 512] = random.choice(edges, 512)
            region.words[layout.SUBMISSIONS // 8 : layout.COMPLETIONS // 8] = layout.SLAB + 64 * random.integers(-2, 500, 2048)
            region[layout.SUBMITTED] += int(random.integers(-2, 60))
            for word in random.choice([layout.FRONTEND_SLEEPS, layout.ENGINE_SLEEPS, layout.COMPLETED, layout.TAKEN], 2):
                region[int(word)] = int(random.choice(edges))
            if random.random() < 0.1:
                region[layout.FRONTEND_EPOCH] = int(random.choice(edges))
            text = figures[int(random.integers(len(figures)))]
            start = layout.FIGURES + layout.TEXT_AT
            region.view[start : start + len(text)] = text
            region[layout.FIGURES + layout.TEXT_BYTES] = len(text)
            region[layout.FIGURES] = 2 * int(random.integers(1, 1000))

    with stopped(pid):  # the front itself does nothing meanwhile, so that all that is written stays
        thread = threading.Thread(target=scribble, daemon=True)
        thread.start()
        try:
            for nth in range(150):
                for connection in connections[1]:
                    assert connection.look_up([nth, 2 * nth, ROWS - 1]) == 200
                if nth % 10 == 0:
                    connections[1][0].request("GET", "/metrics")
                    status, _, body = connections[1][0].take_answer()
                    assert status == 200, body
        finally:
            ended.set()
            thread.join()
        os.kill(pid, signal.SIGKILL)
    service.wait_replaced(0, pid)
    for connection in service.connections(2)[0]:
        wait_until(lambda one=connection: one.look_up(KEYS) == 200, "the new front answers")


def test_counters_never_go_backwards_while_fronts_die(service):
    with load(service):
        seen = [service.answered()]
        for number in (0, 1):
            pid = service.kill(number)
            wait_until(lambda: seen.append(answered_or_last(service, seen)) or len(seen) > 40, "figures were read")
            service.wait_replaced(number, pid)
            seen.append(service.answered())
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] > 0


def answered_or_last(service, seen):
    try:
        return service.answered()
    except httpx.TransportError:  # the connection was the killed front's
        return seen[-1]
