"""What every benchmark shares: timing, keys by popularity, the record of machine and versions, and the results file.

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
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
_HANG_S = 20  # beyond a part's limit: then nothing but the end of the process helps
ALPHA = 1.05  # exponent of popularity in most benchmarks
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM-DCNv2


@dataclass(frozen=True)
class Timing:
    """Seconds of the timed calls: median, 99th percentile, least."""

    p50_s: float
    p99_s: float
    min_s: float
    calls: int

    def as_dict(self) -> dict[str, float]:
        return {"p50_s": self.p50_s, "p99_s": self.p99_s, "min_s": self.min_s, "calls": self.calls}

    def as_us(self, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}p50_us": 1e6 * self.p50_s, f"{prefix}p99_us": 1e6 * self.p99_s}


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


def take_turns(
    ways: Mapping[str, Callable[[int], Any]],
    rounds: int,
    *,
    warmup: int = 2,
    wait: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Time several ways of the same work in turn, so that whatever disturbs the machine meets all of them.

    Args:
        wait: waits for the device, before a call is timed and as part of it.

    Returns:
        seconds of each round, (rounds,) float64, by way.
    """
    seconds = {name: np.empty(rounds) for name in ways}
    for i in range(-warmup, rounds):
        for name, way in ways.items():
            wait()
            start = clock()
            way(i)
            wait()
            if i >= 0:
                seconds[name][i] = clock() - start
    return seconds


def microseconds(seconds: Any, prefix: str = "") -> dict[str, float]:
    """Return median and 99th percentile of times as figures."""
    return {f"{prefix}{name}_us": 1e6 * float(np.quantile(seconds, share)) for name, share in (("p50", 0.5), ("p99", 0.99))}


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_bytes(kind: str = "VmRSS", process: str | int = "self") -> int:
    """Return what the kernel says of a process' memory: `VmRSS`, resident now, or `VmHWM`, its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def require(good: Any, what: str = "an answer") -> None:
    """Raise unless an answer is right, so that no figure of a wrong one is recorded."""
    if not good:
        raise RuntimeError(f"{what} is wrong: nothing is recorded")


def ranks_of(uniform: Any, rows: int, alpha: float = ALPHA) -> Any:
    """Map uniform numbers in [0, 1) to float ranks in [1, rows]: `hps.tools.profiling.workloads` for arrays of any library."""
    g = 1.0 - alpha
    return (uniform * (float(rows) ** g - 1.0) + 1.0) ** (1.0 / g)


def ideal_hit_rate(capacity: int, rows: int, alpha: float = ALPHA) -> float:
    """Return the hit rate of a cache that holds the most popular keys."""
    g = 1.0 - alpha
    return (float(min(capacity, rows)) ** g - 1.0) / (float(rows) ** g - 1.0)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Make a directory for the files of a benchmark, in $HPS_BENCH_DIR where that is set."""
    with tempfile.TemporaryDirectory(prefix=f"hps-bench-{name}-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        yield Path(directory)


def gpu_facts() -> dict[str, Any]:
    """Return what `Report.about` says of the first GPU."""
    import torch

    return {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "torch": torch.__version__}


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
        """Record one measurement: the named axes it was taken at, and its figures (units in their names).

        The row is printed at once: whatever happens later, it is not lost.
        """
        self.rows.append({"axes": axes, "figures": {name: _rounded(value) for name, value in figures.items()}})
        print(json.dumps(self.rows[-1]), flush=True)

    def part(self, name: str, limit_s: int, call: Callable[[], Any]) -> Any:
        """Run one part. A part that fails becomes a row with its error, and None is returned; the other parts go on.

        Parts may be nested: the inner one's limit counts meanwhile. A device that hangs ends the process, with a traceback.
        """

        def stop_late(_signal: int, _frame: Any) -> None:
            raise TimeoutError(f"not done after {limit_s} s")

        start = time.perf_counter()
        before = signal.signal(signal.SIGALRM, stop_late)
        left = signal.alarm(limit_s)
        faulthandler.dump_traceback_later(limit_s + _HANG_S, exit=True)
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - it becomes a row
            traceback.print_exc()
            self.add({"work": name}, {"error": f"{type(error).__name__}: {error}"[:500]})
            return None
        finally:
            seconds = time.perf_counter() - start
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, before)
            signal.alarm(max(1, left - int(seconds)) if left else 0)
            if left:
                faulthandler.dump_traceback_later(max(1, left - int(seconds)) + _HANG_S, exit=True)
            print(f"# {name}: {seconds:.1f} s", flush=True)

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
