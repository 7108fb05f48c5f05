"""`python -m benchmarks compare --against CHECKOUT`: this checkout beside another one, in turn, in one run.

Each case (`compare_cases.py`) is started once in each checkout. The two then measure for a moment in turn: other, this, this,
other, and so on, so that whatever disturbs the machine meets both. That is repeated with new processes, because the places of
memory differ from one process to the next. A ratio is other / this of two neighbouring measurements: 1.05 is 5 % faster than
the other checkout. The quartiles beside the median are the noise of the run; compare a checkout with itself to see it alone.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Report, revision

HERE = Path(__file__).parents[1]
_CASES = Path(__file__).with_name("compare_cases.py")
CPU_CASES = ("in_process", "hash_map", "rocks_db", "redis", "http", "updates", "sources")
GPU_CASES = ("gpu_query", "gpu_misses", "gpu_pooled")
_ANSWER_S = 240.0  # a case compiles kernels when it starts


class _Process:
    """One case of one checkout in a process of its own."""

    def __init__(self, checkout: Path, case: str, shared: Path, own: Path, device: str) -> None:
        own.mkdir()
        path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._log = (own / "stderr").open("w+")
        command = [sys.executable, str(_CASES), case, str(shared), str(own), device]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def answer(self) -> dict[str, float]:
        """Read the next line of figures."""
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], _ANSWER_S)[0] or not (line := stdout.readline()):
            self._log.seek(0)
            raise RuntimeError(self._log.read()[-1500:] or f"no answer within {_ANSWER_S:.0f} s")
        figures: dict[str, float] = json.loads(line)
        return figures

    def measure(self, seconds: float) -> dict[str, float]:
        """Let it measure for so long."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no standard input")
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


@contextmanager
def _object_stores(place: Path) -> Iterator[None]:
    """Start the object stores that this machine has; the cases find them in the environment."""
    from benchmarks.bench_sources import gcs, hdfs, s3

    before = dict(os.environ)
    with ExitStack() as stack:
        found = {}
        for name, start in (("s3", s3), ("gcs", gcs), ("hdfs", hdfs)):
            try:
                source = stack.enter_context(start(place))
            except Exception as error:  # noqa: BLE001 - a machine without it compares the others
                print(f"without {name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            found[name] = source.root
            if source.settings.s3_endpoint_url:
                os.environ["AWS_ENDPOINT_URL_S3"] = source.settings.s3_endpoint_url
            if source.settings.gcs_endpoint_url:
                os.environ["STORAGE_EMULATOR_HOST"] = source.settings.gcs_endpoint_url
        os.environ["HPS_COMPARE_SOURCES"] = json.dumps(found)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _compare(case: str, against: Path, shared: Path, device: str, starts: int, rounds: int, seconds: float, end: float) -> Any:
    """Measure one case. Returns by figure the pairs (other, this)."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for start in range(starts):
        if start and time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory(prefix="hps-compare-", dir=shared.parent) as directory, ExitStack() as stack:
            sides: list[_Process] = [None, None]  # type: ignore[list-item]
            started: list[dict[str, float]] = [{}, {}]
            for i in (0, 1) if start % 2 == 0 else (1, 0):
                sides[i] = _Process((against, HERE)[i], case, shared, Path(directory) / "ab"[i], device)
                stack.callback(sides[i].close)
                if device == "cpu":  # starts are timed; on a GPU both compile at once
                    started[i] = sides[i].answer()
            if device == "cuda":
                for side in sides:
                    side.answer()
            taken = [(started[0], started[1])]
            for number in range(rounds):
                if number > 2 and time.monotonic() > end:
                    break
                pair: list[dict[str, float]] = [{}, {}]
                for i in (0, 1) if number % 2 == 0 else (1, 0):
                    pair[i] = sides[i].measure(seconds)
                taken.append((pair[0], pair[1]))
        for other, mine in taken:
            for figure in other.keys() & mine.keys():
                pairs.setdefault(figure, []).append((other[figure], mine[figure]))
    return pairs


def main(arguments: list[str] | None = None) -> None:
    """Compare the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--gpu", action="store_true", help=f"the cases of a GPU ({', '.join(GPU_CASES)})")
    parser.add_argument("--cases", nargs="+", choices=(*CPU_CASES, *GPU_CASES), help="these alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with --gpu, else cpu")
    parser.add_argument("--starts", type=int, help="processes of each case (default: 3; with --gpu 2)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each process (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="after which nothing more is begun (default: none; with --gpu 7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the result (default: %(default)s)")
    options = parser.parse_args(arguments)
    against = options.against.resolve()
    device = options.device or ("cuda" if options.gpu else "cpu")
    minutes = options.minutes or (7.0 if options.gpu else 1e6)
    starts = options.starts or (2 if options.gpu else 3)
    report = Report("compare_gpu" if options.gpu else "compare")
    report.about = {"against": revision(against), "this": revision(HERE), "starts": starts, "rounds": options.rounds}
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="hps-compared-", dir=os.environ.get("HPS_BENCH_DIR")) as directory,
        ExitStack() as stack,
    ):
        shared = Path(directory) / "shared"
        shared.mkdir()
        cases = options.cases or (GPU_CASES if options.gpu else CPU_CASES)
        if "sources" in cases:
            stack.enter_context(_object_stores(Path(directory)))
        for number, case in enumerate(cases):
            left = 60 * minutes - (time.monotonic() - started)
            end = time.monotonic() + left / (len(cases) - number)
            try:
                pairs = _compare(case, against, shared, device, starts, options.rounds, options.seconds, end)
            except (RuntimeError, OSError, ValueError) as error:
                print(f"{case}: {error}", file=sys.stderr)
                report.add({"case": case}, {"error": str(error)[-500:]})
                continue
            for figure, taken in sorted(pairs.items()):
                ratios = [other / mine for other, mine in taken]
                low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
                before, after = (statistics.median(pair[i] for pair in taken) for i in (0, 1))
                figures = {"before": before, "after": after, "ratio": statistics.median(ratios), "low": low, "high": high}
                report.add({"case": case, "figure": figure}, figures | {"pairs": len(taken)})
                print(f"{case:12} {figure:36} {figures['ratio']:.3f}  ({low:.3f} to {high:.3f})", flush=True)
            report.write(options.out)
    report.show()
    print(report.write(options.out))
    sys.exit(any("error" in row["figures"] for row in report.rows))


if __name__ == "__main__":
    main()
