"""`python -m benchmarks.compare BEFORE NAME...`: the same benchmarks of two checkouts, in turn, as ratios of one run.

BEFORE is the other checkout, whose `.venv` holds its own `hps`. Each round runs each benchmark in both, in the other order
than the round before: the first of two often runs faster, so take an even number of rounds. The best round of each figure
counts, since whatever disturbs a measurement slows it. `benchmarks/results/before_after.json` gets a row for each measurement
that both have: a ratio of 1.05 is 5 % faster than before. This checkout's own results are written, too.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Report

HERE = Path(__file__).parents[1]
_RATES = (
    "mkeys_per_s",
    "ours_keys_per_s",
    "ours_vectors_per_s",
    "requests_per_s",
    "vectors_per_s",
    "insert_m_per_s",
    "rows_per_s",
    "mb_per_s",
    "gb_per_s",
)
_TIMES = ("p50_us", "p50_s")


def _measure(checkout: Path, name: str, quick: bool, kept: Path | None) -> dict[str, tuple[float, bool]]:
    """Run one benchmark; by the axes of a row its first figure that is a rate or a time, and whether it is a rate."""
    python = checkout / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as out:
        command = [str(python if python.exists() else sys.executable), "-m", "benchmarks", name, "--out", out]
        subprocess.run(command + ["--quick"] * quick, cwd=checkout, check=True, stdout=subprocess.DEVNULL, timeout=3600)
        if kept:
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(out) / f"{name}.json", kept)
        rows: list[dict[str, Any]] = json.loads((Path(out) / f"{name}.json").read_text())["rows"]
    measured = {}
    for row in rows:
        figure = next((figure for figure in _RATES + _TIMES if figure in row["figures"]), None)
        if figure is not None:
            axes = {name: round(value, 2) if isinstance(value, float) else value for name, value in row["axes"].items()}
            axes.pop("resident", None)  # measured, and another in each run
            measured[json.dumps(axes)] = float(row["figures"][figure]), figure in _RATES
    return measured


def main() -> None:
    """Compare the named benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("names", nargs="+", metavar="NAME", help="benchmarks")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the result (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; the figures mean nothing")
    arguments = parser.parse_args()
    report = Report("before_after")
    revision = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=arguments.before,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    report.about = {"before": revision.stdout.strip(), "rounds": arguments.rounds}
    for name in arguments.names:
        best: list[dict[str, tuple[float, bool]]] = [{}, {}]
        for number in range(arguments.rounds):
            for mine, checkout in list(zip(best, (arguments.before, HERE), strict=True))[:: 1 if number % 2 else -1]:
                for axes, (figure, is_rate) in _measure(
                    checkout, name, arguments.quick, arguments.out if checkout is HERE else None
                ).items():
                    old = mine.get(axes, (figure, is_rate))[0]
                    mine[axes] = (max if is_rate else min)(old, figure), is_rate
        before, after = best
        for axes, (figure, is_rate) in after.items():
            if axes in before:
                old = before[axes][0]
                ratio = figure / old if is_rate else old / figure
                report.add({"benchmark": name, **json.loads(axes)}, {"before": old, "after": figure, "ratio": ratio})
    report.show()
    print(report.write(arguments.out))


if __name__ == "__main__":
    main()
