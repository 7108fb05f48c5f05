"""Rules of the tests themselves: what they may take, and that none of them depends on patience."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.ledger import read_durations
from tests.nightly.mutants import named_bugs

TESTS = ROOT / "tests"
RINGS = ("ring1", "ring2", "docs", "nightly", "gpu")
RING_1_BUDGET_S = 300
"""Processor seconds of all tests of ring 1. Two cores, less what collecting takes on each, leave 5 minutes by the clock."""
TEST_BUDGET_S = 1.0
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}


def files_of(*rings: str) -> list[Path]:
    return [path for ring in rings for path in sorted((TESTS / ring).rglob("*.py"))]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def patience(source: str) -> Iterator[int]:
    """Yield the lines of tests that sleep, or that assert how long something took."""
    if not re.search(r"sleep|monotonic|perf_counter|time(_ns)?\(", source):  # parsing all takes a second
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and name_of(node) == "sleep":
            if not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0):  # 0 lets others run
                yield node.lineno
        elif isinstance(node, ast.Assert):
            calls = [one for one in ast.walk(node.test) if isinstance(one, ast.Call)]
            if any(name_of(call) in CLOCKS for call in calls):
                yield node.lineno


def test_no_test_of_rings_1_and_2_sleeps_or_asserts_a_duration() -> None:
    contracts = [path for path in (ROOT / "hps" / "testing").glob("*.py") if path.name != "waiting.py"]
    files = [*files_of("ring1", "ring2", "docs"), *contracts]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in patience(path.read_text("utf-8"))]
    assert not found, f"wait for a condition with hps.testing.waiting.wait_until, or move the test to tests/nightly: {found}"


def test_every_test_is_in_a_ring() -> None:
    strays = [path for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] not in RINGS]
    assert not strays


def test_the_ledger_has_every_file_of_ring_1() -> None:
    tests = {path.relative_to(TESTS).as_posix() for path in files_of("ring1", "ring2", "docs") if path.name.startswith("test_")}
    known = set(read_durations())
    new = [f"tests/{path}" for path in sorted(tests - known) if path.startswith("ring1/")]
    assert not new, f"run: make durations ROOM='{' '.join(new[:8])}'"
    assert not known - tests, "these are gone; make durations leaves them out"


def test_ring_1_keeps_its_budget() -> None:
    taken = {path: file for path, file in read_durations().items() if path.startswith("ring1/")}
    dear = [f"{path}::{file.dearest} {file.dearest_s:g} s" for path, file in taken.items() if file.dearest_s > TEST_BUDGET_S]
    assert not dear, (
        f"expected at most {TEST_BUDGET_S:g} CPU-s a test in ring 1; make them smaller or move them to ring 2: {dear}"
    )
    total = sum(file.total_s for file in taken.values())
    assert total <= RING_1_BUDGET_S, f"ring 1 takes {total:.0f} CPU-s, expected at most {RING_1_BUDGET_S}"


def test_each_named_bug_has_its_place_and_its_tests() -> None:
    bugs, stale = named_bugs()
    assert bugs
    assert not stale
