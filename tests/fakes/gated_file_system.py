"""A file system whose reads wait or fail when a test says so: `gate://<name>/absolute/path`."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hps.errors import HPSError
from hps.filesystems.base import FileStatus
from hps.filesystems.local import LocalFileSystem
from hps.ground.registry import IMPLEMENTATIONS

WAIT_S = 60


class Gate:
    """What happens to reads of `emb_vector` under one name.

    Attributes:
        hold_from: reads at or beyond this byte wait until `release` is set; None for no waiting.
        entered: set once a read waits.
        errors: raised, first to last, the next times that `key` is looked for.
        looks: how often `key` was looked for.
        bytes_read: by name of the file.
    """

    def __init__(self) -> None:
        self.hold_from: int | None = None
        self.entered, self.release = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self.looks = 0
        self.bytes_read: Counter[str] = Counter()


GATES: dict[str, Gate] = {}
_COUNTING = threading.Lock()


class GatedFileSystem(LocalFileSystem):
    """Local files behind gates, which do not count as local."""

    is_local = False

    def exists(self, path: str) -> bool:
        return super().exists(_split(path)[1])

    def status(self, path: str) -> FileStatus:
        gate, place = _split(path)
        if place.endswith("/key"):
            gate.looks += 1
            if gate.errors:
                raise gate.errors.pop(0)
        return super().status(place)

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        gate, place = _split(path)
        if place.endswith("/emb_vector") and gate.hold_from is not None and offset >= gate.hold_from:
            gate.entered.set()
            if not gate.release.wait(WAIT_S):
                raise HPSError(f"reading {path}: the test did not open the gate within {WAIT_S} s")
        super().read_into(place, offset, buffer, version)
        with _COUNTING:
            gate.bytes_read[place.rpartition("/")[2]] += len(buffer)

    def directories(self, path: str) -> list[str]:
        return super().directories(_split(path)[1])

    def list(self, path: str) -> list[str]:
        return super().list(_split(path)[1])


@contextmanager
def gates(*names: str) -> Iterator[list[Gate]]:
    """Register the file system and make gates; the end opens them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPLEMENTATIONS["filesystem"], "gate", (f"{__name__}:GatedFileSystem", "nothing"))
        GATES.update({name: Gate() for name in names})
        try:
            yield [GATES[name] for name in names]
        finally:
            for name in names:
                GATES.pop(name).release.set()


def _split(path: str) -> tuple[Gate, str]:
    name, slash, rest = path.removeprefix("gate://").partition("/")
    return GATES[name], slash + rest
