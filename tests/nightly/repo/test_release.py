"""What is released is built alike anywhere, and serves when it is installed."""

import os
import shlex
import shutil
import sys
import tarfile
import venv
from pathlib import Path

import numpy as np

from deploy import release
from tests import ROOT
from tests.ring2.repo.test_release import COMMANDS, run

EPOCH = "1700000000"


def copy_of_the_repository(place: Path) -> Path:
    """Copy what git would check out, with the time of now."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "benchmarks", "site", "dist", "data"
    )
    return Path(shutil.copytree(ROOT, place, ignore=ignored, copy_function=shutil.copyfile, symlinks=True))


def built(tree: Path, *options: str) -> dict[str, bytes]:
    (command,) = [line for line in COMMANDS if "-m build" in line]
    run(sys.executable, *shlex.split(command)[1:], *options, cwd=tree, env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH})
    return {path.name: path.read_bytes() for path in (tree / "dist").iterdir()}


def test_what_is_released_is_built_alike_anywhere_and_serves(tmp_path):
    first, second = (built(copy_of_the_repository(tmp_path / name)) for name in ("one", "the other"))
    assert first.keys() == second.keys()
    assert len(first) == 2
    assert first == second

    # The image builds its wheel from the files that it may copy, and not from the sdist.
    image = tmp_path / "image"
    for name in (line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        copying = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copying(tmp_path / "one" / name, image / name)
    (wheel,) = [name for name in first if name.endswith(".whl")]
    assert built(image, "--wheel") == {wheel: first[wheel]}

    (sdist,) = [name for name in first if name.endswith(".tar.gz")]
    with tarfile.open(tmp_path / "one" / "dist" / sdist) as archive:
        assert {one.mtime for one in archive} == {int(EPOCH)}

    # What it needs is what the tests run with; hps itself is the wheel's.
    installed = tmp_path / "installed"
    venv.create(installed, symlinks=True)
    (packages,) = installed.glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        installed / "bin" / "python",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    )
    run(*pip, tmp_path / "one" / "dist" / wheel)
    program = installed / "bin" / "hps"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert run(program, "--version", env=environment, cwd=tmp_path) == f"hps {release.version_of(ROOT)}\n"
    where = run(installed / "bin" / "python", "-c", "import hps; print(hps.__file__)", env=environment, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    run(sys.executable, ROOT / "deploy" / "release.py", "serve", program, env=environment, cwd=tmp_path)
