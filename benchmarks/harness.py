"""What every benchmark shares: timing, the record of machine and versions, and the results file.

A benchmark is `benchmarks/bench_<name>.py` with a function `run(report, quick)`. It checks the answers of what it times
before it adds a figure, names its axes, and measures its limit (a plain gather, a raw socket) or peer in the same run, so
that the figure to quote is a ratio.
"""

import faulthandler
import json
import os
import platform
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "numpy",
    "numba",
    "rocksdict",
    "redis",
    "fastapi",
    "uvicorn",
    "orjson",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
)


@dataclass(frozen=True)
class Timing:
    """Seconds of the timed calls: median, 99th percentile, least."""

    p50_s: float
    p99_s: float
    min_s: float
    calls: int

    def as_dict(self) -> dict[str, float]:
        return {"p50_s": self.p50_s, "p99_s": self.p99_s, "min_s": self.min_s, "calls": self.calls}


def time_calls(call: Callable[[int], Any], calls: int, warmup: int = 3) -> Timing:
    """Time `call(i)` for i in range(calls), after `warmup` untimed calls; rotate inputs by `i`."""
    for i in range(warmup):
        call(i)
    seconds = np.empty(calls)
    for i in range(calls):
        start = time.perf_counter()
        call(i)
        seconds[i] = time.perf_counter() - start
    return Timing(float(np.median(seconds)), float(np.quantile(seconds, 0.99)), float(seconds.min()), calls)


def revision(checkout: Path) -> str:
    """The commit of a checkout, `-dirty` after it if files were changed; "unknown" without git, or outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=10)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """The processor, memory, versions and commit that a result belongs to."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor()
    return {
        "processor": processor.partition(":")[2].strip() or processor,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": versions,
        "commit": revision(Path(__file__).parent),
    }


@dataclass
class Report:
    """Collects the rows of one benchmark and writes them as JSON.

    Attributes:
        name: of the benchmark, and of its results file.
        seed: of every random number in it.
        about: further facts of the run (the GPU, a server's version).
    """

    name: str
    seed: int = 1
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, axes: dict[str, Any], figures: dict[str, Any]) -> None:
        """Record one measurement: the named axes it was taken at, and its figures (units in their names)."""
        self.rows.append({"axes": axes, "figures": {name: _rounded(value) for name, value in figures.items()}})

    def write(self, directory: Path = RESULTS) -> Path:
        """Write `<directory>/<name>.json`, one row a line."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {
            "benchmark": self.name,
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": self.seed,
            "machine": machine(),
            "about": self.about,
        }
        head = json.dumps(content, indent=2)[: -len("\n}")]
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.rows)
        path.write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n')
        return path

    def show(self) -> None:
        """Print the rows as a table."""
        table = Table(title=self.name)
        columns = list(dict.fromkeys(name for row in self.rows for name in [*row["axes"], *row["figures"]]))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            cells = {**row["axes"], **row["figures"]}
            table.add_row(*(_cell(cells.get(column)) for column in columns))
        Console(width=200).print(table)


def _rounded(value: Any) -> Any:
    """Five significant digits: no measurement here is better than that."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_HANG_S = 20  # beyond a part's limit: then nothing but the end of the process helps


def add(report: Report, axes: dict[str, Any], figures: dict[str, Any]) -> None:
    """Record a row, and print it: whatever happens later, it is not lost."""
    report.add(axes, figures)
    print(json.dumps(report.rows[-1]), flush=True)


def part(report: Report, name: str, limit_s: int, call: Callable[[], Any]) -> Any:
    """Call one part; None where it failed, which is a row then. Parts may be nested: the inner one's limit counts meanwhile.

    A device that hangs ends the process, with a traceback.
    """

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done after {limit_s} s")

    start = time.perf_counter()
    before = signal.signal(signal.SIGALRM, late)
    left = signal.alarm(limit_s)
    faulthandler.dump_traceback_later(limit_s + _HANG_S, exit=True)
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it becomes a row
        traceback.print_exc()
        add(report, {"work": name}, {"error": f"{type(error).__name__}: {error}"[:500]})
        return None
    finally:
        seconds = time.perf_counter() - start
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
        signal.alarm(max(1, left - int(seconds)) if left else 0)
        if left:
            faulthandler.dump_traceback_later(max(1, left - int(seconds)) + _HANG_S, exit=True)
        print(f"# {name}: {seconds:.1f} s", flush=True)
