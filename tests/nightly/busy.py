"""Runs rings 1 and 2 beside loops that keep every core busy, and what fails there ten times more.

    python -m tests.nightly.busy [argument of pytest ...]      by default tests/ring1 tests/ring2 tests/docs

Writes flaky.txt: the tests that failed and then passed at least once, with how often they passed. Exits with 0 if all passed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests import ROOT

AGAIN = 10


@contextmanager
def busy() -> Iterator[None]:
    """Keep every core busy, at a lower priority than the tests."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "import os\nos.nice(10)\nwhile os.getppid() != 1: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def failures(*arguments: str) -> list[str]:
    """Run pytest and return the tests that failed; the output is passed on."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        found = []
        for line in run.stdout or ():
            sys.stdout.write(line)
            if match := re.match(r"(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - |$)", line):
                found.append(match[1])
    if run.returncode not in (0, 1):
        sys.exit(run.returncode)
    return sorted(set(found))


def main(arguments: list[str]) -> int:
    parallel = ["--numprocesses", str((os.cpu_count() or 1) + 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    with busy():
        failed = failures(*parallel, *(arguments or ["tests/ring1", "tests/ring2", "tests/docs"]))
        passed = {test: sum(not failures(test) for _ in range(AGAIN)) for test in failed}
    (ROOT / "flaky.txt").write_text("".join(f"{count} of {AGAIN} {test}\n" for test, count in passed.items() if count))
    print(*(f"{test}: passed {count} of {AGAIN} times afterwards" for test, count in passed.items()), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
