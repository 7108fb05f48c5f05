import re
import tomllib

import pytest

from hps.ground.registry import IMPLEMENTATIONS, install_hint
from tests import ROOT


def test_top_level_cuda_folder_is_no_package():
    # NVIDIA's namespace package `cuda`, which CuPy imports, must not be shadowed.
    assert not (ROOT / "cuda" / "__init__.py").exists()


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_HPS = re.compile(
    r"pip install [^\n`]{0,40}?(hps-server|hps_server\b(?!-))"
    r"|pip install ['\"]?(hps)\b(?![-\w])"
    r"|hps-server\["
    r"|pip install (?:-e )?'?\.\[([\w,]+)\]"
)
"""Advice to install hps from an index, where it is not, and with extras from a clone."""


def advice(text: str) -> tuple[list[str], set[str]]:
    found = list(OF_HPS.finditer(text))
    return [one[0] for one in found if one[3] is None], {extra for one in found for extra in (one[3] or "").split(",") if extra}


def test_nothing_tells_to_install_what_no_index_has() -> None:
    """Errors get their advice from one function; pages and errors name extras that exist."""
    rooms = ("hps", "hps_torch", "tests", "docs", "deploy", "examples", "benchmarks", ".ci")
    found = [*ROOT.glob("*"), *(path for room in rooms for path in (ROOT / room).rglob("*"))]
    read = [path for path in found if path.suffix in (".py", ".md", ".sh", ".yaml", ".yml")]
    for path in read:
        name = str(path.relative_to(ROOT))
        if not path.is_file() or name.startswith(("tests/ring1/repo/test_packaging.py", "CHANGELOG.md")):
            continue
        index, extras = advice(path.read_text())
        assert (name, index, extras - {*EXTRAS}) == (name, [], set())
        assert not (name.startswith("hps/") and extras), f"{name}: expected registry.install_hint"
    assert len(read) > 500


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'hps-server[torch]'", ["pip install 'hps-server"]),
        ("pip install hps-server", ["pip install hps-server"]),
        ("pip install 'hps[torch]'", ["pip install 'hps"]),
        ("pip install './hps[import,torch]'", []),
        ("wants hps-server[torch]", ["hps-server["]),
        ("pip install '.[torch,grpc]'", []),
    ],
)
def test_such_advice_is_found(text: str, found: list[str]) -> None:
    assert advice(text) == (found, {"torch", "grpc"} if "'.[" in text else set())


def test_hints_of_implementations_name_extras_that_exist() -> None:
    hints = {one.hint for kind in IMPLEMENTATIONS.values() for one in kind.values()}
    assert hints >= {install_hint(), install_hint("torch"), install_hint("hdfs")}
    for hint in hints - {install_hint()}:
        assert advice(hint)[1] <= {*EXTRAS}, hint
        assert advice(hint)[1], hint
