"""Writes the Python packages of the images and of the build, with versions and hashes: `make locks`.

`requirements-cpu.txt` has those of every image, `requirements-cuda12.txt` and `-cuda13.txt` what these have beside it, and
`requirements-build.txt` what builds the wheel. They are wheels for Linux, amd64 and arm64, for the Python of deploy/Dockerfile.
Versions stay where pyproject.toml allows it; `make locks ARGS=--upgrade` takes the newest. Needs uv, and the network.

`--check` reads pyproject.toml and the files alone, and fails if the first has changed since the others were written.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
EXTRAS = ("hdfs", "gcs", "kafka", "grpc")  # of every image
PYTHON = "3.12"
LINUX = "sys_platform == 'linux'"
BASE = "cpu"


def sets(root: Path = ROOT) -> dict[str, list[str]]:
    """Return what pyproject.toml asks for in each file."""
    document = tomllib.loads((root / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    common = document["project"]["dependencies"] + [extra for name in EXTRAS for extra in extras[name]]
    return {
        "build": [*document["build-system"]["requires"], "build>=1.2"],
        BASE: common,
        "cuda12": common + extras["cuda12"],
        "cuda13": common + extras["cuda13"],
    }


def path_of(name: str) -> Path:
    return DEPLOY / f"requirements-{name}.txt"


def head(requirements: list[str]) -> str:
    """Return the first lines of a file: what it is, and the hash of what was asked for."""
    digest = hashlib.sha256(json.dumps([PYTHON, sorted(requirements)]).encode()).hexdigest()
    return f"# Written by deploy/lock.py (make locks). Asked for: sha256:{digest}\n"


def packages(text: str) -> dict[str, str]:
    """Return the entries of a file of requirements by name and version: each with its marker and hashes."""
    return {pin.partition(" ")[0]: pin for pin in re.findall(r"^[a-z0-9].*\n(?: +--hash=.*\n)+", text, re.MULTILINE)}


def resolve(requirements: list[str], known: str, options: list[str]) -> str:
    """Have uv choose versions for Linux, of those that are known where it may."""
    with tempfile.TemporaryDirectory() as folder:
        project = f'[project]\nname = "lock"\nversion = "0"\ndependencies = {json.dumps(requirements)}\n'
        Path(folder, "pyproject.toml").write_text(project + f'[tool.uv]\nenvironments = ["{LINUX}"]\n')
        target = Path(folder, "requirements.txt")
        target.write_text(known)
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--output-file", target.name, *options]
        command += ["--universal", "--python-version", PYTHON, "--only-binary", ":all:", "--generate-hashes"]
        command += ["--no-annotate", "--no-header", "--quiet"]
        subprocess.run(command, check=True, timeout=600, cwd=folder)
        return target.read_text().replace(f" ; {LINUX} ", " ")


def write(options: list[str]) -> None:
    common: dict[str, str] = {}
    for name, requirements in sets().items():
        known = [path.read_text() for path in dict.fromkeys((path_of(BASE), path_of(name))) if path.exists()]
        # Whatever is newer with `--upgrade`, images must not differ in what they share.
        pins = [line.partition(";")[0] for line in common] if name.startswith("cuda") else []
        found = packages(resolve(requirements + pins, "" if "--upgrade" in options else "".join(known), options))
        if name == BASE:
            common = found
        own = {key: entry for key, entry in found.items() if name in ("build", BASE) or key not in common}
        path_of(name).write_text(head(requirements) + "".join(own.values()))


def stale(root: Path = ROOT) -> list[str]:
    """Return the names of the files that pyproject.toml has changed for."""
    return [
        path_of(name).name
        for name, requirements in sets(root).items()
        if not path_of(name).exists() or not path_of(name).read_text().startswith(head(requirements))
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if files := stale():
            sys.exit(f"pyproject.toml has changed since these were written: {', '.join(files)}; run make locks")
    else:
        write(sys.argv[1:])
