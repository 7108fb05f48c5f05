"""Counts the kernels that this process compiles."""

import threading
from typing import Final


class Compilations:
    """Number and duration of kernel compilations, by compiler. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, float]] = {}

    def add(self, compiler: str, kernels: int, seconds: float) -> None:
        with self._lock:
            count, total = self._done.get(compiler, (0, 0.0))
            self._done[compiler] = count + kernels, total + seconds

    def all(self) -> dict[str, tuple[int, float]]:
        """Return the number of kernels and their seconds, by compiler."""
        with self._lock:
            return dict(self._done)


COMPILATIONS: Final = Compilations()
"""Counts of this process, whose servers share the kernels."""
