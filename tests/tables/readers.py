"""Threads that read and check while a test writes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np


@contextmanager
def reading(read: Callable[[np.random.Generator], int], threads: int = 3) -> Iterator[None]:
    """Call `read` again and again in each of some threads while the block runs, and until it has checked something there.

    Args:
        read: reads, checks what it got, and returns how many vectors it checked. Its generator is the thread's own.
        threads: how many threads read.

    Raises:
        Exception: the first that `read` raised, once the block has ended.
    """
    done = threading.Event()

    def read_on(seed: int) -> None:
        random, checked = np.random.default_rng(seed), 0
        while not done.is_set() or not checked:
            checked += read(random)

    with ThreadPoolExecutor(threads) as pool:
        readers = [pool.submit(read_on, seed) for seed in range(threads)]
        try:
            yield
        finally:
            done.set()
        for reader in readers:
            reader.result(60)
