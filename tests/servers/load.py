"""Threads that ask all the time, and keep what was wrong."""

import threading
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np

from hps.testing.waiting import PATIENCE_S, wait_until


class Load:
    """Repeats some work on threads within a `with` statement.

    Args:
        work: does it once, and returns, or raises, what is wrong.

    Attributes:
        done: how often nothing was raised.
        problems: of all threads.
    """

    def __init__(self, work: Callable[[np.random.Generator], Iterable[object]], count: int = 4) -> None:
        self.done, self.problems = 0, list[object]()
        self._work, self._stopping = work, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(np.random.default_rng(seed),)) for seed in range(count)]

    def _run(self, rng: np.random.Generator) -> None:
        while not self._stopping.is_set():
            try:
                self.problems += self._work(rng)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is kept
                self.problems.append(error)
            else:
                self.done += 1

    def more(self, count: int = 20) -> None:
        """Wait for some that began after this call."""
        before = self.done
        wait_until(lambda: self.done > before + count or self.problems, "they go on")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), f"{PATIENCE_S:g} s passed before they had ended"
