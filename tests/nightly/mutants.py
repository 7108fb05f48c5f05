"""Show that the tests notice bugs: put one after the other into a copy of the tree and run the tests that should fail.

    python -m tests.nightly.mutants --sample 60                    of the whole product; or: make mutants ARGS="--sample 60"
    python -m tests.nightly.mutants --room versions --sample 20    of hps/versions; or: make mutants ROOM=versions
    python -m tests.nightly.mutants --since HEAD~5                 of the lines that changed since a commit
    python -m tests.nightly.mutants --bugs                         those of bugs.toml, each of which breaks a promise

A drawn mutant changes one expression or drops a statement: a comparison, an operator, a condition, a number, a call. The tests
of its room in ring 1 run, and those that import its module, with `--ring2` also the room's in ring 2. A mutant that survives is
either the same program, or shows that a test is missing: write that test.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from hps.ground.kernels.machine_code import kernel_sources
from tests import ROOT
from tests.reach import imported, modules, reached
from tests.servers.child_processes import own_signals

BUGS = Path(__file__).with_name("bugs.toml")
TIMEOUT_S = 300
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
_SILENT = re.compile(r"^(_?log|logger|warnings|self\._log)\b|^_log")  # what only says something


class Mutant(NamedTuple):
    name: str
    bug: str
    path: Path
    source: str  # of the file, with the bug
    tests: list[str]  # paths from the root, or nodes of pytest


def _changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may stand in the place of a node; None where a statement is dropped."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield ast.Compare(node.left, [_SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SWAPS:
        changed = copy.copy(node)
        changed.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
        yield ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        yield from () if _SILENT.search(ast.unparse(node)) else [None]
    elif isinstance(node, (ast.AugAssign, ast.Delete, ast.Continue, ast.Break)):
        yield None


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a program that run: not annotations, decorators, nor messages of errors and logs."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases", "exc", "format_spec", "msg"):
            continue
        if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not (isinstance(node, ast.Expr) and _SILENT.search(ast.unparse(node))):
                yield node
                yield from _nodes(node)


def mutants_of(path: Path, lines: set[int] | None = None) -> Iterator[tuple[str, str]]:
    """Yield what each mutant of a file changes, and the file's source with it; in some lines only where they are given."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _nodes(ast.parse(source)):
        for changed in _changes(node):
            place = node.test if isinstance(node, (ast.If, ast.While, ast.IfExp)) else node
            if lines is not None and place.lineno not in lines:  # type: ignore[attr-defined]
                continue
            begin, end = (
                starts[line - 1] + column
                for line, column in (
                    (place.lineno, place.col_offset),  # type: ignore[attr-defined]
                    (place.end_lineno, place.end_col_offset),  # type: ignore[attr-defined]
                )
            )
            new = "pass" if changed is None else f"({ast.unparse(ast.fix_missing_locations(changed))})"
            old = " ".join(source[begin:end].decode().split())
            said = f"{path.relative_to(ROOT)}:{place.lineno}: {old[:90]} -> {new[:90]}"  # type: ignore[attr-defined]
            yield said, (source[:begin] + new.encode() + source[end:]).decode()


def tests_of(path: Path, *, ring2: bool) -> list[str]:
    """Return the files of tests of a module of the product: of its room, and of ring 1 those that import it themselves."""
    module = next(name for name, file in modules().items() if file == path)
    room = path.relative_to(ROOT).parts[1:-1]
    found = []
    for name, test in modules().items():
        parts = test.relative_to(ROOT).parts
        if not test.name.startswith("test_") or parts[1] not in ("ring1", "ring2"):
            continue
        ours = [reaching for reaching in reached(name) if reaching.startswith(("tests.", "hps.testing."))]
        direct = parts[1] == "ring1" and any(module in set(imported(modules()[our].read_text("utf-8"))) for our in ours)
        of_room = bool(room) and parts[2] == room[0] and module in reached(name) and (parts[1] == "ring1" or ring2)
        if direct or of_room:
            near = (path.stem not in test.stem, parts[2:3] != room[:1], parts[1])
            found.append((near, test.relative_to(ROOT).as_posix()))
    return [test for _, test in sorted(found)]


def _is_in(path: Path, node: str) -> bool:
    """Whether a file has a test or a class that a node begins with."""
    name = re.split(r"::|\[", node)[0]
    return not name or re.search(rf"\b(def|class) {name}\b|\b{name}\b.* = ", path.read_text("utf-8")) is not None


def named_bugs() -> tuple[list[Mutant], list[str]]:
    """Return the bugs of bugs.toml, and what is wrong with those that have no place in the tree."""
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    mutants, stale = [], []
    for entry in tomllib.loads(BUGS.read_text("utf-8"))["bug"]:
        path, named = ROOT / entry["file"], [test.partition("::") for test in entry["tests"]]
        source = path.read_text("utf-8") if path.exists() else ""
        files = [[test for test in tests if test.endswith(f"/{file}")] for file, _, _ in named]
        if (count := source.count(entry["find"])) != 1:
            stale.append(f"{entry['name']}: {entry['find']!r} stands {count} times in {entry['file']}, expected once")
        elif wrong := [file for (file, _, _), those in zip(named, files, strict=True) if len(those) != 1]:
            stale.append(f"{entry['name']}: {wrong} name no file or several in tests/")
        elif wrong := [node for (_, _, node), (test,) in zip(named, files, strict=True) if not _is_in(ROOT / test, node)]:
            stale.append(f"{entry['name']}: no test is called {wrong}")
        else:
            nodes = [those[0] + colons + node for (_, colons, node), those in zip(named, files, strict=True)]
            mutants.append(Mutant(entry["name"], entry["bug"], path, source.replace(entry["find"], entry["put"]), nodes))
    return mutants, stale


def drawn(rooms: list[str], since: str | None, count: int, seed: int, *, ring2: bool) -> list[Mutant]:
    """Draw mutants from rooms, or from lines that changed since a commit."""
    folders = [ROOT / "hps" / room for room in rooms] or [ROOT / "hps"]
    kernels = set(kernel_sources())  # each would be compiled anew; the contract of caches and bugs.toml have them
    files = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if path not in kernels and "testing" not in path.parts
    ]
    changed = changed_lines(since) if since else None
    found = [
        (path, said, source)
        for path in files
        for said, source in mutants_of(path, None if changed is None else changed.get(path, set()))
    ]
    random.Random(seed).shuffle(found)
    return [
        Mutant(f"{seed}/{number}", said, path, source, tests_of(path, ring2=ring2))
        for number, (path, said, source) in enumerate(found[:count])
    ]


def changed_lines(since: str) -> dict[Path, set[int]]:
    """Return the numbers of the lines that are new or changed since a commit, by file."""
    command = ["git", "diff", "-U0", since, "--", "hps"]
    found: dict[Path, set[int]] = {}
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(ROOT / line.removeprefix("+++ b/"), set())
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            lines.update(range(int(match[1]), int(match[1]) + int(match[2] or 1)))
    return found


class Copy:
    """A copy of the tree. *One per thread.*"""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        names = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "hps" / "__pycache__").glob("hps-kernels-*/*")]
        for name in filter(None, [*names.stdout.decode().split("\0"), *kernels]):
            if (ROOT / name).is_file():  # else: deleted and not committed
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)

    def run(self, mutant: Mutant) -> tuple[str, str]:
        """Run a mutant's tests with the bug in place; return how that ended and what to say of it."""
        path = self._root / mutant.path.relative_to(ROOT)
        path.write_text(mutant.source, encoding="utf-8")
        try:
            return self._test(mutant.tests) if mutant.tests else (SURVIVED, "no test imports the module")
        finally:
            shutil.copy2(mutant.path, path)

    def _test(self, tests: list[str]) -> tuple[str, str]:
        # The first path is this copy's, ahead of the one that an editable installation names.
        environment = {**os.environ, "PYTHONPATH": str(self._root)}
        with tempfile.TemporaryDirectory(prefix="hps-mutant-") as temporary, tempfile.TemporaryFile("w+") as output:
            run = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{temporary}/t", *tests],
                cwd=self._root,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=own_signals,
            )
            try:
                run.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return KILLED, f"the tests did not end within {TIMEOUT_S:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)  # what the tests start dies with them: see tests/servers
                run.wait()
            output.seek(0)
            lines = output.read().splitlines()
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if run.returncode == 0:
            return SURVIVED, lines[-1]
        if failed or run.returncode < 0:
            return KILLED, " ".join(failed) or f"by signal {-run.returncode}"
        return (KILLED if "hps/" in "".join(lines[-40:]) else BROKEN), "\n".join(lines[-5:])


def main() -> int:
    """Run the mutants; return the exit code: 0 if the named bugs were all noticed, or of the drawn mutants 80 %."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bugs", nargs="*", metavar="WORD", help="those of bugs.toml, or whose name contains one of the words")
    parser.add_argument("--check", action="store_true", help="only see that each of bugs.toml has its place")
    parser.add_argument("--room", action="append", default=[], help="a folder of hps/, again for more")
    parser.add_argument("--since", metavar="COMMIT", help="only in lines that changed since then")
    parser.add_argument("--sample", type=int, default=20, help="how many to draw")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86_400), help="draws others; by default each day")
    parser.add_argument("--ring2", action="store_true", help="run also the tests of the room in ring 2")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at a time")
    options = parser.parse_args()
    if options.check or options.bugs is not None:
        mutants, stale = named_bugs()
        print(*(f"STALE {line}" for line in stale), f"{len(mutants)} bugs have their place, {len(stale)} do not", sep="\n")
        if options.check or stale:
            return int(bool(stale))
        mutants = [mutant for mutant in mutants if not options.bugs or any(word in mutant.name for word in options.bugs)]
        needed = len(mutants)
    else:
        mutants = drawn(options.room, options.since, options.sample, options.seed, ring2=options.ring2)
        needed = -(-len(mutants) * 4 // 5)
    with tempfile.TemporaryDirectory(prefix="hps-mutants-") as directory, ThreadPoolExecutor(options.jobs) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(Copy(Path(directory) / str(job)))

        def run(mutant: Mutant) -> str:
            tree, began = copies.get(), time.monotonic()
            try:
                state, said = tree.run(mutant)
            finally:
                copies.put(tree)
            print(f"{state:9} {mutant.name} ({time.monotonic() - began:.0f} s) {mutant.bug}\n          {said}", flush=True)
            return state

        states = list(threads.map(run, mutants))
    print(f"{states.count(KILLED)} of {len(states)} were noticed, expected at least {needed}")
    return int(states.count(KILLED) < needed)


if __name__ == "__main__":
    sys.exit(main())
