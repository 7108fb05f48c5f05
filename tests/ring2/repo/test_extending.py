"""docs/extending.md, followed word for word: the package that it builds is installed and answers lookups."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ring1.repo.test_extending import FILES, PAGE

COMMANDS = re.findall(r"^    \$ (.*)\n((?:    (?!\$).*\n)*)", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the page; the package is installed in its folder `site`."""
    directory = tmp_path_factory.mktemp("package")
    assert list(FILES) == ["pyproject.toml", "hps_sorted_arrays.py", "ps.json", "test_sorted_arrays.py"]
    for name, text in FILES.items():
        (directory / name).write_text(text)
    (directory / "typo.json").write_text(FILES["ps.json"].replace("sorted_arrays", "sorted_array"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", "site")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "."], cwd=directory, check=True, timeout=120)
    (directory / "hps_sorted_arrays.py").unlink()  # what is imported is what was installed
    return directory


def run(package: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the repository, where `hps` and the package are installed and nothing of `tests` is."""
    program, *arguments = command.split()
    argv = [sys.executable, *arguments] if program == "python" else [sys.executable, "-m", program, *arguments]
    environment = os.environ | {"PYTHONPATH": str(package / "site"), "COLUMNS": "200"}
    return subprocess.run(argv, cwd=package, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_every_command_prints_what_the_page_says(package: Path) -> None:
    assert len(COMMANDS) == 4
    for command, printed in COMMANDS:
        done = run(package, command)
        assert done.returncode == (2 if "typo" in command else 0), done.stdout + done.stderr
        expected = re.sub(r"^    ", "", printed, flags=re.MULTILINE)
        if expected:
            assert expected == (done.stderr if "typo" in command else done.stdout)


def test_options_are_checked_by_the_package(package: Path) -> None:
    document = json.loads(FILES["ps.json"])
    document["volatile_db"]["options"] = {"max_rows": 0, "rows": 5}
    (package / "options.json").write_text(json.dumps(document))
    done = run(package, "hps lookup options.json shop item 1")
    assert done.returncode == 2
    assert "2 problems" in done.stderr
    assert "options.max_rows: got 0, expected a whole number, at least 1" in done.stderr
