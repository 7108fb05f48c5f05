"""Counts the kernels that this process compiles, and reports its progress."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final


class Compilations:
    """Number and duration of kernel compilations, by compiler. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, float]] = {}
        self._running = 0
        self._weight = self._compiled = 0.0  # of overlapping compilations, in all and so far

    @contextmanager
    def running(self, weight: float) -> Iterator[Callable[[float], None]]:
        """Compile kernels of this total weight, in any unit; the block gets a function that takes compiled weight."""
        with self._lock:
            self._running += 1
            self._weight += weight
        left = weight

        def advance(by: float) -> None:
            nonlocal left
            with self._lock:
                left -= by
                self._compiled += by

        try:
            yield advance
        finally:
            with self._lock:
                self._running -= 1
                self._compiled += left  # the unreported rest, also after an error
                if not self._running:
                    self._weight = self._compiled = 0.0

    @property
    def progress(self) -> str:
        """The progress, such as "compiling kernels, 42 %"; empty if nothing is being compiled."""
        with self._lock:
            return f"compiling kernels, {100 * self._compiled / self._weight:.0f} %" if self._weight else ""

    def add(self, compiler: str, kernels: int, seconds: float) -> None:
        with self._lock:
            count, total = self._done.get(compiler, (0, 0.0))
            self._done[compiler] = count + kernels, total + seconds

    def all(self) -> dict[str, tuple[int, float]]:
        """Return the number of kernels and their seconds, by compiler."""
        with self._lock:
            return dict(self._done)


COMPILATIONS: Final = Compilations()
"""Counts of this process."""
