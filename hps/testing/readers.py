"""Threads that read and check while a test writes."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from hps.testing.waiting import PATIENCE_S


@contextmanager
def reading(read: Callable[[np.random.Generator], int], threads: int = 3) -> Iterator[list[int]]:
    """Call `read` repeatedly in several threads while the block runs, at least until each has checked something.

    Args:
        read: reads, checks what it got, and returns how many vectors it checked. Its generator is the thread's own.
        threads: how many threads read.

    Yields:
        How many vectors each thread has checked so far; of one that failed `sys.maxsize`, so that no block waits for it.

    Raises:
        Exception: the first that `read` raised, once the block has ended.
    """
    done, checked = threading.Event(), [0] * threads

    def read_on(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not done.is_set() or not checked[seed]:
                checked[seed] += read(random)
        except BaseException:
            checked[seed] = sys.maxsize
            raise

    with ThreadPoolExecutor(threads) as pool:
        readers = [pool.submit(read_on, seed) for seed in range(threads)]
        try:
            yield checked
        finally:
            done.set()
        for reader in readers:
            reader.result(PATIENCE_S)
