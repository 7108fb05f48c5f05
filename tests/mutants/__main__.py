"""Show that the tests notice bugs: put one bug after the other into a copy of the tree and run the tests that name it.

    python -m tests.mutants                      all of them; or: make mutants
    python -m tests.mutants redis hash_map       those whose names contain one of the words
    python -m tests.mutants --jobs 4             four copies at a time

Each `*.patch` beside this file is one bug (a mutant) that a tired colleague could write. It opens with two lines:

    # kills: tests/unit/lookup/test_database_chain.py tests/...::test_...      what must fail, few and quick
    # bug: what would go wrong for a user

Then comes a unified diff against the root of the repository. To add one, change the code, write `git diff`, add the two lines
and undo the change. A mutant that survives shows that a test is missing: write that test. A patch that no longer applies is
stale: make it anew, so that it is the same bug in the new code, or remove it where that bug can no longer be made.

The exit code is 0 where at least 95 % die, none is stale, and the tests pass without any mutant.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.servers.child_processes import own_signals

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent
NEEDED_SHARE = 0.95
TIMEOUT_S = 200
KILLED, SURVIVED, STALE, BROKEN = "killed", "SURVIVED", "STALE", "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """One patch. *Immutable.*"""

    name: str
    patch: Path
    tests: tuple[str, ...]
    bug: str
    changed: tuple[str, ...]
    """The files that it changes, relative to the root."""

    @classmethod
    def read(cls, patch: Path) -> "Mutant":
        """Read a patch and its two lines; ValueError where one is missing."""
        lines = patch.read_text(encoding="utf-8").splitlines()
        said = {key: line[len(key) :].strip() for key in ("# kills:", "# bug:") for line in lines[:2] if line.startswith(key)}
        if len(said) != 2 or not all(said.values()):
            raise ValueError(f"{patch.name}: got {lines[:2]}, expected `# kills: tests` and `# bug: a sentence`")
        changed = tuple(line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/"))
        return cls(patch.stem, patch, tuple(said["# kills:"].split()), said["# bug:"], changed)


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
        """Run a mutant's tests with it applied; returns how that ended and what to say of it."""
        kept = self._root.with_suffix(".kept")
        for name in mutant.changed:
            if (self._root / name).is_file():
                _copy(self._root / name, kept / name)
        apply = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(mutant.patch)],
            cwd=self._root,
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(self._root.parent)},
        )
        if apply.returncode:
            return STALE, apply.stderr.strip()
        try:
            return self.test(mutant.tests, "-x")
        finally:
            for name in mutant.changed:
                _copy(kept / name, self._root / name)

    def test(self, tests: tuple[str, ...], *options: str) -> tuple[str, str]:
        """Run tests; returns how that ended and what to say of it."""
        # The first path is this copy's, ahead of the one that an editable installation names. Kernels that a mutant changes
        # are compiled into a directory of their own, which is named by their sources, inside of the copy.
        environment = {**os.environ, "PYTHONPATH": str(self._root), "HPS_REQUIRE": os.environ.get("HPS_REQUIRE", "redis,s3")}
        environment.pop("NUMBA_CACHE_DIR", None)
        with tempfile.TemporaryDirectory(prefix="hps-mutant-") as temporary, tempfile.TemporaryFile("w+") as output:
            run = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "--basetemp",
                    f"{temporary}/t",
                    *options,
                    *tests,
                ],
                cwd=self._root,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=own_signals,
            )
            try:
                run.wait(TIMEOUT_S)
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
            return KILLED, f"the tests did not end within {TIMEOUT_S} s"
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
        if run.returncode == 0:
            return SURVIVED, lines[-1]
        if run.returncode == 1 and failed:
            return KILLED, " ".join(failed)
        if run.returncode < 0:
            return KILLED, f"by signal {-run.returncode}"
        return BROKEN, "\n".join(lines[-15:])


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its times, by which Python and numba know that what they made of it is still good."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def main() -> int:
    """Run the mutants; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="copies at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    mutants = [Mutant.read(patch) for patch in sorted(PATCHES.glob("*.patch"))]
    mutants = [mutant for mutant in mutants if not options.words or any(word in mutant.name for word in options.words)]
    if not mutants:
        print(f"no mutant is called {' or '.join(options.words)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="hps-mutants-") as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(Copy(Path(directory) / str(job)))
        if not options.no_baseline and not _baseline(mutants, copies, options.jobs):
            return 1
        return _run(mutants, copies, options.jobs)


def _baseline(mutants: list[Mutant], copies: "SimpleQueue[Copy]", jobs: int) -> bool:
    """Run all named tests without a mutant, so that it is the mutant that a failure shows."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    tests = [test for test in tests if not any(test.startswith(f"{other}::") for other in tests)]

    def run(share: tuple[str, ...]) -> tuple[str, str]:
        copy = copies.get()
        try:
            return copy.test(share)
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
    killed = sum(state == KILLED for state in states.values())
    for mutant, state in states.items():
        if state != KILLED:
            print(f"{state}: {mutant.name}: {mutant.bug}")
    print(f"{killed} of {len(mutants)} killed")
    wrong = any(state in (STALE, BROKEN) for state in states.values())
    return int(wrong or killed < NEEDED_SHARE * len(mutants))


if __name__ == "__main__":
    sys.exit(main())
