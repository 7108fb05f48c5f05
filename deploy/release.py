"""What a release checks before it publishes: `python deploy/release.py check v1.2.3`, `python deploy/release.py serve bin/hps`.

`check` compares the version that a tag names with every file that names one, and with the changelog. `serve` starts an
installed service, asks for vectors and stops it. Needs nothing but Python.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.request
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S, ANSWER_S, STOP_S = 120, 30, 60
NAMED = {  # where the version stands, by file
    "hps/ground/version.py": r'__version__ = "(.+)"',
    "deploy/Dockerfile": r'org\.opencontainers\.image\.version="(.+)"',
    "deploy/docker-compose.yml": r"\$\{HPS_VERSION:-(.+?)\}",
    "deploy/.env.example": r"HPS_VERSION=(\S+)",
    "deploy/helm/hps/Chart.yaml": r"^(?:appVersion|version): (.+)$",
    "deploy/kserve/runtime.yaml": r"image: hps-server:([^-\s]+)",
}


def disagreements(root: Path = ROOT) -> Iterator[str]:
    """Yield the places that name another version than pyproject.toml does."""
    version = version_of(root)
    for name, pattern in NAMED.items():
        found = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if not found or set(found) != {version}:
            yield f"{name}: got {', '.join(found) or 'no version'}, expected {version}, as in pyproject.toml"


def version_of(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def check(tag: str, root: Path = ROOT) -> list[str]:
    """Return why this tree cannot be released as a tag."""
    problems = list(disagreements(root))
    if tag != f"v{version_of(root)}":
        problems.append(f"the tag: got {tag}, expected v{version_of(root)}")
    heading = rf"^## \[{re.escape(tag.removeprefix('v'))}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        problems.append(f"CHANGELOG.md: expected a heading `## [{tag.removeprefix('v')}] - YYYY-MM-DD`")
    return problems


def serve(program: Path) -> None:
    """Start a service with an installed `hps`, compare what it answers with the model's file, and stop it.

    Raises:
        RuntimeError: it answered something else.
    """
    program = program.absolute()
    with tempfile.TemporaryDirectory() as folder:
        model = ["create-model", "user.model", "--rows", "1000", "--dim", "4", "--seed", "1"]
        subprocess.run([program, *model], cwd=folder, check=True, timeout=START_S, stdout=subprocess.DEVNULL)
        Path(folder, "ps.json").write_text(json.dumps(document()))
        command = [program, "serve", "ps.json", "--port", "0"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as service:
            patience = threading.Timer(START_S, service.kill)
            patience.start()
            try:
                answer = ask(address(service.stderr or []))
            finally:
                patience.cancel()
                service.terminate()
                service.communicate(timeout=STOP_S)
        rows = Path(folder, "user.model", "emb_vector").read_bytes()
        expected = array("f", rows[16:48])  # of keys 1 and 2
        if array("f", answer[0] + answer[1]) != expected:
            raise RuntimeError(f"serving keys 1 and 2: got {answer}, expected {expected.tolist()}")


def document() -> dict[str, object]:
    model = {
        "model": "sample",
        "sparse_files": ["user.model"],
        "embedding_table_names": ["user"],
        "embedding_vecsize_per_table": [4],
        "maxnum_catfeature_query_per_table_per_sample": [10],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": 10,
        "gpucacheper": 1.0,
    }
    databases = {"persistent_db": {"type": "row_files", "path": "rows"}}
    return {"supportlonglong": True, "device": "cpu", "models": [model], **databases}


def address(log: Iterable[str]) -> str:
    """Return the address that a service writes to its log once it is ready."""
    lines = []
    for line in log:
        lines.append(line)
        if found := re.search(r"ready; try: curl -s (\S+)", line):
            return found[1]
    raise RuntimeError(f"serving: the service ended before it was ready\n{''.join(lines)}")


def ask(url: str) -> list[list[float]]:
    request = urllib.request.Request(
        url, json.dumps({"tables": {"user": [1, 2]}}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: list[list[float]] = json.load(answer)["tables"]["user"]
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", tag]:
            if problems := check(tag):
                sys.exit("\n".join(problems))
        case ["serve", program]:
            serve(Path(program))
        case _:
            sys.exit(__doc__)
