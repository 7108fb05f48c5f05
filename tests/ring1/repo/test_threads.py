"""Every thread of the package is made in one place, which records its end."""

import ast
from pathlib import Path

import hps

PACKAGE = Path(hps.__file__).parent
HOME = PACKAGE / "ground" / "threads" / "workers.py"
MAKERS = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}


def makers_in(source: str) -> list[int]:
    """Return the lines that make a thread past the record, or derive a class from one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        named = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        lines += [one.lineno for one in named if (getattr(one, "attr", None) or getattr(one, "id", None)) in MAKERS]
    return sorted(lines)


def test_threads_are_made_where_their_end_is_recorded() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {path: makers_in(text) for path, text in sources.items() if any(maker in text for maker in MAKERS)}
    assert found.pop(HOME.relative_to(PACKAGE).as_posix())
    # The contracts are tests, whose threads end with them.
    assert {path: lines for path, lines in found.items() if lines and not path.startswith("testing/")} == {}
