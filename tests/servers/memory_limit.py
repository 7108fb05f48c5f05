"""A control group whose processes may use so much memory, as those of a container may; for where this process may make one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hps.testing.waiting import wait_until

_VERSIONS = (  # the directory of groups, and the files of the limit and of the largest use: cgroup v1, v2
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


class MemoryLimit(NamedTuple):
    """A control group.

    Attributes:
        peak: a file with the largest use so far, in bytes; the page cache counts.
    """

    place: Path
    peak: Path

    def inside(self, *command: object) -> list[str]:
        """Return a command whose process, and those that it starts, are in the group, on one processor."""
        processor = min(os.sched_getaffinity(0))
        script = f'echo $$ > {self.place}/cgroup.procs && exec taskset --cpu-list {processor} "$@"'
        return ["sh", "-c", script, "sh", *map(str, command)]

    @property
    def killed(self) -> int:
        """How many processes the out-of-memory killer has ended."""
        for name in ("memory.oom_control", "memory.events"):
            if (file := self.place / name).exists():
                return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0))
        return 0


@contextmanager
def memory_limit(size_bytes: int) -> Iterator[MemoryLimit]:
    """Make a control group, and skip the test where that is not possible. Its processes must have ended before."""
    reason = "no control groups of memory"
    for root, limit, peak in _VERSIONS:
        group = MemoryLimit(place := root / f"hps-test-{os.getpid()}", place / peak)
        try:
            place.mkdir()
            try:
                (place / limit).write_text(str(size_bytes))
            except OSError:
                place.rmdir()
                raise
        except OSError as error:
            reason = f"cannot limit memory: {error}"
            continue
        try:
            yield group
        finally:
            wait_until(lambda place=place: not (place / "cgroup.procs").read_text(), "its processes have ended")  # type: ignore[misc]
            place.rmdir()
        return
    pytest.skip(reason)
