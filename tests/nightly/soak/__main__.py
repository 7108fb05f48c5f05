"""`python -m tests.nightly.soak`: run a soak, print what it found, write `benchmarks/results/soak.json`."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, Report
from tests.nightly.soak.bad_clients import ATTACKS
from tests.nightly.soak.ledger import COUNTERS, PROCESSES
from tests.nightly.soak.stage import CHAOS, OF_FRONTS, Stage

WRONG = ("default", "torn", "foreign", "invented", "stale", "mask", "shape")
_TICK_S = 0.5
_LEAK_S, _LEAK_BYTES = 300, 16 << 20  # growth that is a leak, in a soak of at least that length


def _disturb(stage: Stage, kinds: list[str], every_s: float, end: float, rng: np.random.Generator) -> Counter[str]:
    """Do one thing after the other to the stage, each as often as the others, until the time is over and each was done."""
    done: Counter[str] = Counter()
    due = time.monotonic() + every_s
    turn: list[str] = []
    while (now := time.monotonic()) < end or len(done) < len(kinds):
        stage.watch()
        if kinds and now >= due:
            turn = turn or [str(kind) for kind in rng.permutation(kinds)]
            kind = turn.pop()
            print(f"{kind} ", end="", file=sys.stderr, flush=True)
            stage.ledger.note(event=kind)
            CHAOS[kind](stage, rng)
            done[kind] += 1
            due = time.monotonic() + every_s
        time.sleep(_TICK_S)
    return done


def _examine(stage: Stage) -> dict[str, dict[str, float]]:
    """What is only known in the end: memory, whether anything was done at all. Returns the figures of the probes."""
    ledger = stage.ledger
    for name, memory in stage.memory.items():
        if memory.budget_bytes and memory.peak_bytes > memory.budget_bytes:
            peak_mb, budget_mb = memory.peak_bytes / 1e6, memory.budget_bytes / 1e6
            ledger.violation("memory", process=name, peak_mb=peak_mb, budget_mb=budget_mb)
        if len(memory.own_bytes) * _TICK_S >= _LEAK_S and memory.growth_bytes > _LEAK_BYTES:
            ledger.violation("leak", process=name, growth_mb=memory.growth_bytes / 1e6)
    figures = {}
    taken = json.loads((stage.directory / "probes.json").read_text())
    for name in taken:
        seconds = np.array(taken[name] or [0.0])
        figures[name] = {
            "probes": len(taken[name]),
            "p50_ms": 1e3 * float(np.median(seconds)),
            "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
            "worst_ms": 1e3 * float(seconds.max()),
        }
    for process, name in enumerate(PROCESSES):
        if not ledger.total("answers", slice(process, process + 1)) or not ledger.acknowledged[process].any():
            ledger.violation("idle", process=name)
    clients = slice(len(PROCESSES), None)
    answers, refused = ledger.total("answers", clients), ledger.total("refused", clients)
    if answers < refused:
        ledger.violation("refusals", answers=answers, refused=refused)
    for path in sorted(stage.directory.glob("*.log")):
        if count := path.read_text(errors="replace").count("Traceback"):
            ledger.violation("traceback", log=path.name, count=count)
    return figures


def soak(arguments: argparse.Namespace, directory: Path, report: Report) -> list[dict[str, Any]]:
    """Run it. Returns the violations."""
    stage = Stage(
        directory,
        arguments.fronts,
        not arguments.no_eviction,
        {name: faults.split(",") for name, _, faults in (one.partition(":") for one in arguments.fault)},
    )
    try:
        stage.open()
        stage.start_clients(arguments.good, arguments.bad, arguments.attacks, arguments.health_limit_ms / 1e3)
        end = time.monotonic() + 60 * arguments.minutes
        done = _disturb(stage, arguments.chaos, arguments.every, end, np.random.default_rng(arguments.seed))
        stage.end_clients()
        stage.check_idle()
        stage.check_integrity()
        for process in range(len(PROCESSES)):
            stage.tell(process, "audit")
            stage.measure(process)
        stage.watch()
        health = _examine(stage)
    finally:
        stage.close()
    violations = stage.ledger.violations()
    kinds = Counter(violation["kind"] for violation in violations)
    clients = arguments.good + arguments.bad
    axes = {
        "work": "soak",
        "minutes": arguments.minutes,
        "fronts": arguments.fronts,
        "clients": clients,
        "bad_clients": arguments.bad,
    }
    totals = {name: stage.ledger.total(name) for name in COUNTERS}
    report.add(axes, {**totals, "wrong_vectors": sum(kinds[kind] for kind in WRONG)})
    for name, memory in stage.memory.items():
        mb: dict[str, float] = {"peak_mb": memory.peak_bytes / 1e6, "budget_mb": memory.budget_bytes / 1e6}
        if memory.own_bytes:
            mb |= {"growth_mb": memory.growth_bytes / 1e6}
        report.add({"work": "memory", "process": name}, mb)
    for name, figures in health.items():
        report.add({"work": "health", "process": name, "limit_ms": arguments.health_limit_ms}, figures)
    for kind, count in sorted(done.items()):
        report.add({"work": "chaos", "kind": kind}, {"times": count})
    for kind, count in sorted(kinds.items()):
        report.add({"work": "violation", "kind": kind}, {"times": count})
    return violations


def main() -> None:
    """Run a soak; the exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--good", type=int, default=40, help="clients that judge every answer (default: %(default)s)")
    parser.add_argument("--bad", type=int, default=24, help="clients that attack (default: %(default)s)")
    parser.add_argument(
        "--fronts", type=int, default=3, help="front processes of a server; 0: it is one process (default: %(default)s)"
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kinds of chaos (default: %(default)s)")
    parser.add_argument("--chaos", nargs="*", choices=CHAOS, help="these kinds alone")
    parser.add_argument("--no-eviction", action="store_true", help="let Redis hold every row")
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS), help="these attacks alone")
    parser.add_argument("--fault", nargs="*", default=[], help="PROCESS:FAULT,...: make faults on purpose; see server.py")
    parser.add_argument("--health-limit-ms", type=float, default=200.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="leave logs, databases and violations in this new directory")
    arguments = parser.parse_args()
    if arguments.fronts == 1 or not (arguments.fronts or {*OF_FRONTS}.isdisjoint(arguments.chaos or ())):
        parser.error(f"--fronts: got {arguments.fronts}; expected at least 2, or 0 without {', '.join(OF_FRONTS)}")
    if arguments.chaos is None:
        arguments.chaos = [kind for kind in CHAOS if arguments.fronts or kind not in OF_FRONTS]
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
    report = Report("soak", seed=arguments.seed)
    with nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory(prefix="hps-soak-") as directory:
        violations = soak(arguments, Path(directory), report)
    print(file=sys.stderr)
    for row in report.rows:
        print("  ".join(f"{name} {value}" for name, value in {**row["axes"], **row["figures"]}.items()))
    print(report.write(arguments.out))
    shown: Counter[str] = Counter()
    for violation in violations:
        shown[violation["kind"]] += 1
        if shown[violation["kind"]] <= 5:
            print(json.dumps(violation))
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
