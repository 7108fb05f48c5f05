"""Writers and readers of the same rows over HTTP, on all paths at once."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

from tests.ring2.service.test_http_rows import PATHS, ROUTE, binary, model, tiers, vectors_of
from tests.servers.running_service import RunningService

__all__ = ["model", "tiers"]


def test_writers_and_readers_of_the_same_keys_see_whole_rows_in_order(tiers: RunningService) -> None:
    """Each writer counts up in a key of its own, all in one body with a key that all write."""
    rounds, writers, shared = 12, 3, 400
    stop, acknowledged, problems = threading.Event(), [0] * writers, []

    def write(writer: int) -> None:
        keys = np.array([300 + writer, shared])
        with httpx.Client(base_url=tiers.url, timeout=30) as client:
            for generation in range(1, rounds + 1):
                client.post(ROUTE, **binary(keys, vectors_of(keys, generation * 10 + writer))).raise_for_status()
                acknowledged[writer] = generation

    def read(path: Callable[..., np.ndarray]) -> None:
        keys = np.array([*range(300, 300 + writers), shared])
        while not stop.is_set():
            time.sleep(0.002)  # service, writers and readers share one interpreter
            least = list(acknowledged)
            found = path(tiers, keys)
            for writer, row in enumerate(found[:writers]):
                if row[1] != -1 and (row[1] % 10 != writer or row[1] // 10 < least[writer]):
                    problems.append((path.__name__, writer, row, least))
                if row[1] == -1 and least[writer]:
                    problems.append((path.__name__, writer, row, least))
            if any(set(row[::2]) != {key} or len(set(row[1::2])) != 1 for key, row in zip(keys, found, strict=True)):
                problems.append((path.__name__, "torn", found, least))

    with ThreadPoolExecutor(writers + len(PATHS)) as pool:
        reading = [pool.submit(read, path) for path in PATHS]
        try:
            for writing in [pool.submit(write, writer) for writer in range(writers)]:
                writing.result()
        finally:
            stop.set()
        for one in reading:
            one.result()
    assert not problems, problems[:3]
    last = {tuple(path(tiers, np.array([shared]))[0]) for path in PATHS}
    assert len(last) == 1, "all paths agree on who was last"
