"""What each test takes: processor time, its own and that of the processes it starts, in `tests/durations.json`.

`--ledger` writes the file, by file of tests; rules in `ring1/repo/test_suite.py` read it, so that no test run depends on how
fast its machine is. Long files are begun first.
"""

import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
_TICKS = os.sysconf("SC_CLK_TCK")


def children_cpu_s(pid: int | None = None) -> float:
    """Return the processor time of all processes that a process has started, ended ones that it waited for among them."""
    total = sum(os.times()[2:4]) if pid is None else 0.0
    for children in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                with suppress(OSError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total += sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime, cstime of proc(5)
                    total += children_cpu_s(child)
    return total


class Ledger:
    """Takes the time of each phase of each test; a worker of a parallel run sends it along with the phase's report."""

    def __init__(self, write: bool) -> None:
        self._write = write
        self._own, self._children = time.process_time(), children_cpu_s()
        self.taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        own, children = time.process_time(), children_cpu_s()
        report.user_properties.append(("cpu_s", (own - self._own, max(0.0, children - self._children))))
        self._own, self._children = own, children
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        own, children = dict(report.user_properties).pop("cpu_s", (0.0, 0.0))
        self.taken[report.nodeid][0] += own
        self.taken[report.nodeid][1] += children

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        Path(os.environ.get("LEDGER_OUT", "/tmp/ledger.json")).write_text(json.dumps(self.taken))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Ledger(False), "ledger")
