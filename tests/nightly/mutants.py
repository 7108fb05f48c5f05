"""Show that the tests notice bugs: put one bug after the other into a copy of the tree and run the tests that name it.

    python -m tests.nightly.mutants                      all of them; or: make mutants
    python -m tests.nightly.mutants redis hash-map       those whose names contain one of the words
    python -m tests.nightly.mutants --sample 20          that many of them, others on each day
    python -m tests.nightly.mutants --check              only see that each one still has its place in the code

`mutants.toml` holds the bugs (mutants), each of which breaks a rule of safety that a tired colleague could break:

    bug     what would go wrong for a user
    tests   what must fail, few and quick: files by the end of their path, with or without `::test_...`
    old     whole lines that stand exactly once in hps/, hps_torch/ and cuda/, at any indentation, in any file
    new     what takes their place

A mutant that survives shows that a test is missing: write that test. One whose `old` is found nowhere, or twice, is stale:
write it anew, so that it is the same bug in the new code, or remove it where that bug can no longer be made.

The exit code is 0 where all die, none is stale, and the tests pass without any mutant.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.servers.child_processes import own_signals

TABLE = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 200
BASELINE_TIMEOUT_S = 900  # of the tests of many mutants together
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """A bug and its place in the tree. *Immutable.*"""

    name: str
    bug: str
    tests: tuple[str, ...]
    """For pytest, relative to the root."""
    path: Path
    """The file that it changes, relative to the root."""
    source: str
    """That file with the bug."""


class Copy:
    """A copy of the tree, whose kernels are cached within it. *One per thread.*"""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():  # else: deleted and not committed
                _copy(ROOT / name, directory / name)

    def run(self, mutant: Mutant) -> tuple[str, str]:
        """Run a mutant's tests with the bug in place; returns how that ended and what to say of it."""
        (self._root / mutant.path).write_text(mutant.source, encoding="utf-8")
        try:
            return self.test(mutant.tests, "-x")
        finally:
            _copy(ROOT / mutant.path, self._root / mutant.path)

    def test(self, tests: tuple[str, ...], *options: str, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
        """Run tests; returns how that ended and what to say of it."""
        # The first path is this copy's, ahead of the one that an editable installation names. Kernels that a mutant changes
        # are compiled into a directory of their own, which is named by their sources, inside of the copy.
        environment = {**os.environ, "PYTHONPATH": str(self._root), "HPS_REQUIRE": os.environ.get("HPS_REQUIRE", "redis,s3")}
        environment.pop("NUMBA_CACHE_DIR", None)
        with tempfile.TemporaryDirectory(prefix="hps-mutant-") as temporary, tempfile.TemporaryFile("w+") as output:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", f"{temporary}/t"]
            run = subprocess.Popen(
                [*command, *options, *tests],
                cwd=self._root,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=own_signals,
            )
            try:
                run.wait(timeout_s)
                hung = False
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)  # what the tests start dies with them: see tests/servers
                run.wait()
            output.seek(0)
            lines = output.read().splitlines()
        if hung:
            return KILLED, f"the tests did not end within {timeout_s:g} s"
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
        if run.returncode == 0:
            return SURVIVED, lines[-1]
        if run.returncode == 1 and failed:
            return KILLED, " ".join(failed)
        if run.returncode < 0:
            return KILLED, f"by signal {-run.returncode}"
        return BROKEN, "\n".join(lines[-15:])


def find_mutants() -> tuple[list[Mutant], list[str]]:
    """Find the place of each mutant in the tree; returns the mutants, and what is wrong with those that are stale."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for folder in ("hps", "hps_torch", "cuda")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu", ".cuh")
    }
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    mutants, stale = [], []
    for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]:
        old = entry["old"].rstrip("\n").split("\n")
        lines = re.compile(r"^( *)" + r"\n(?:\1)?".join(map(re.escape, old)) + "$", re.MULTILINE)
        places = [(path, match) for path, source in sources.items() for match in lines.finditer(source)]
        named = [test.partition("::") for test in entry["tests"]]
        files = [[test for test in tests if test.endswith(f"/{file}")] for file, _, _ in named]
        if len(places) != 1:
            found = [f"{path.relative_to(ROOT)}:{sources[path].count(chr(10), 0, m.start()) + 1}" for path, m in places]
            stale.append(f"{entry['name']}: got its old lines {len(places)} times {found}, expected once")
        elif wrong := [file for (file, _, _), those in zip(named, files, strict=True) if len(those) != 1]:
            stale.append(f"{entry['name']}: {wrong} name no file or several in tests/")
        else:
            path, match = places[0]
            new = textwrap.indent(entry["new"].rstrip("\n"), match[1])
            source = sources[path][: match.start()] + new + sources[path][match.end() :]
            nodes = tuple(those[0] + colons + node for (_, colons, node), those in zip(named, files, strict=True))
            mutants.append(Mutant(entry["name"], entry["bug"], nodes, path.relative_to(ROOT), source))
    return mutants, stale


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its times, by which Python and numba know that what they made of it is still good."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def main() -> int:
    """Run the mutants; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at a time")
    parser.add_argument("--sample", type=int, help="run that many of them, others on each day")
    parser.add_argument("--check", action="store_true", help="only see that each one has its place in the code")
    options = parser.parse_args()
    mutants, stale = find_mutants()
    for line in stale:
        print(f"STALE {line}")
    if options.check or stale:
        print(f"{len(mutants)} mutants have their place, {len(stale)} are stale")
        return int(bool(stale))
    mutants = [mutant for mutant in mutants if not options.words or any(word in mutant.name for word in options.words)]
    if not mutants:
        print(f"no mutant is called {' or '.join(options.words)}")
        return 2
    if options.sample:
        random.Random(int(time.time() // 86_400)).shuffle(mutants)
        del mutants[options.sample :]
    with tempfile.TemporaryDirectory(prefix="hps-mutants-") as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(Copy(Path(directory) / str(job)))
        if not _baseline(mutants, copies, options.jobs):
            return 1
        return _run(mutants, copies, options.jobs)


def _baseline(mutants: list[Mutant], copies: "SimpleQueue[Copy]", jobs: int) -> bool:
    """Run all named tests without a mutant, so that it is the mutant that a failure shows."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    tests = [test for test in tests if not any(test.startswith(f"{other}::") for other in tests)]

    def run(share: tuple[str, ...]) -> tuple[str, str]:
        copy = copies.get()
        try:
            return copy.test(share, timeout_s=BASELINE_TIMEOUT_S)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as threads:
        ended = list(threads.map(run, [tuple(tests[job::jobs]) for job in range(jobs) if tests[job::jobs]]))
    for state, said in ended:
        print(f"without a mutant: {'the tests pass' if state == SURVIVED else 'THE TESTS FAIL'}: {said}", flush=True)
    return all(state == SURVIVED for state, _ in ended)


def _run(mutants: list[Mutant], copies: "SimpleQueue[Copy]", jobs: int) -> int:
    """Run each mutant in some copy, print what came of it, and return the exit code."""
    printing = threading.Lock()

    def run(mutant: Mutant) -> str:
        copy = copies.get()
        began = time.monotonic()
        try:
            state, said = copy.run(mutant)
        finally:
            copies.put(copy)
        with printing:
            print(f"{state:9} {mutant.name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
        return state

    with ThreadPoolExecutor(jobs) as threads:
        states = dict(zip(mutants, threads.map(run, mutants), strict=True))
    for mutant, state in states.items():
        if state != KILLED:
            print(f"{state}: {mutant.name}: {mutant.bug}")
    killed = sum(state == KILLED for state in states.values())
    print(f"{killed} of {len(mutants)} killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
