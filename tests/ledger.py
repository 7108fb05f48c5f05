"""A plug-in of pytest that says what each room took, of processor time, and keeps it by file in `durations.json`.

The time is that of the tests and of the processes that they start. `--ledger` writes the file (`make durations`). Rules in
`ring1/repo/test_suite.py` read it, so that the budget of ring 1 does not depend on the machine on which the tests run;
`conftest.py`, which registers the plug-in, begins with the files that took longest.
"""

import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Taken:
    """Processor time of the tests of a file. `dearest_s` is that of its dearest test, with its share of set-up and clean-up."""

    tests: int = 0
    own_s: float = 0.0
    children_s: float = 0.0
    dearest: str = ""
    dearest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.own_s + self.children_s


def read_durations() -> dict[str, Taken]:
    """Return what each file of tests took when it was measured last, by its path in `tests/`."""
    return {file: Taken(**taken) for file, taken in json.loads(DURATIONS.read_text()).items()} if DURATIONS.exists() else {}


def children_cpu_s(pid: int | None = None) -> float:
    """Return the processor time of all that a process has started: of what runs, and of what has ended and was waited for."""
    total = sum(os.times()[2:4]) if pid is None else 0.0
    for children in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime and cstime of proc(5)
                total += children_cpu_s(child)
    return total


class Ledger:
    """Takes the time of each phase of each test; a worker of a parallel run sends it along with the phase's report."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._own, self._children = 0.0, 0.0
        self._taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by test: own, children

    def pytest_collection_finish(self) -> None:
        self._own, self._children = time.process_time(), children_cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report: Any = yield
        own, children = time.process_time(), children_cpu_s()
        # A child that died without being waited for takes its time with it.
        report.user_properties.append(("cpu_s", (own - self._own, max(0.0, children - self._children))))
        self._own, self._children = own, children
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken = self._taken[report.nodeid]
        for name, cpu_s in report.user_properties:
            if name == "cpu_s":
                taken[:] = (taken[0] + cpu_s[0], taken[1] + cpu_s[1])

    def _by_file(self) -> dict[str, Taken]:
        files: dict[str, Taken] = defaultdict(Taken)
        for test, (own, children) in self._taken.items():
            path, _, name = test.partition("::")
            file = files[path.removeprefix("tests/")]
            file.tests, file.own_s, file.children_s = file.tests + 1, file.own_s + own, file.children_s + children
            if own + children > file.dearest_s:
                file.dearest, file.dearest_s = name, own + children
        return files

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files, rooms = self._by_file(), defaultdict(Taken)
        for path, taken in files.items():
            room = rooms[os.path.dirname(path)]
            room.tests, room.own_s, room.children_s = (
                room.tests + taken.tests,
                room.own_s + taken.own_s,
                room.children_s + taken.children_s,
            )
        if len(self._taken) > 1:
            terminalreporter.section("processor seconds by room: of the tests, and of what they start")
            for name, room in sorted(rooms.items()):
                terminalreporter.write_line(f"{room.own_s:8.1f} {room.children_s:8.1f}  {name} ({room.tests} tests)")
            own, children = sum(room.own_s for room in rooms.values()), sum(room.children_s for room in rooms.values())
            terminalreporter.write_line(f"{own:8.1f} {children:8.1f}  in all")
        if self._write:
            write_durations({**read_durations(), **files})


def write_durations(files: dict[str, Taken]) -> None:
    """Write what each file took, one line a file; those that are gone are left out."""
    lines = []
    for path, taken in sorted(files.items()):
        if (DURATIONS.parent / path).exists():
            figures = {key: round(value, 2) if isinstance(value, float) else value for key, value in vars(taken).items()}
            lines.append(f"{json.dumps(path)}: {json.dumps(figures)}")
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
