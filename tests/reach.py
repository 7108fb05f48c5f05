"""Says which files of tests a change can reach, by what they import.

    python -m tests.reach BASE ring2     prints those of ring 2 that the changes since a commit can reach, one a line

A test reaches a module of the product that it imports, also within a function or in the text of a program that it runs, and
all that this one imports; `python -m hps` is an import of the command line. Of other files it reaches those whose folder or
name it mentions. Changes that decide how everything runs, and files that nothing mentions, reach every test.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import ROOT

_PACKAGES = ("hps", "hps_torch", "tests")
_MODULE = re.compile(r"(?:hps|hps_torch|tests)(?:\.\w+)+")
_IMPORT = re.compile(r"\b(?:from|import) ((?:hps|hps_torch|tests)(?:\.\w+)*)")
_FIXTURES = {"children": "tests.servers.child_processes", "gcs_server": "tests.servers.gcs_server"}
"""Fixtures of tests/conftest.py that come from elsewhere."""
_STARTERS = ("tests.servers.child_processes", "tests.servers.fork_server")
"""They start what others ask for."""


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of the packages by the names of their modules."""
    found = {}
    for package in _PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def _homes() -> dict[str, str]:
    """Return the modules of the public names of `hps`, which are imported on first use."""
    tree = ast.parse((ROOT / "hps" / "__init__.py").read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hps.")]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def imported(source: str) -> Iterator[str]:
    """Yield the names of modules, or of what is in them, that a source imports in some way."""
    for node in ast.walk(ast.parse(source)):
        yield from _commands(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            if node.module == "hps":
                yield from (_homes()[alias.name] for alias in node.names if alias.name in _homes())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _IMPORT.findall(node.value)
            yield from (_MODULE.findall(node.value) if " " not in node.value else ())
            yield from (_homes()[name] for name in re.findall(r"\bhps\.(\w+)", node.value) if name in _homes())
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hps":
            yield from [_homes()[node.attr]] if node.attr in _homes() else []


def _commands(node: ast.AST) -> Iterator[str]:
    """Yield the modules of commands that a list or a call names: [python, "-m", "hps", "load"], children.hps("load")."""
    words = getattr(node, "elts", None) or getattr(node, "args", None)
    if not isinstance(words, list):
        return
    texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "hps":
        command = texts[0] if texts else None
    elif "-m" in texts and texts[texts.index("-m") + 1 :][:1] == ["hps"]:
        command = (*texts[texts.index("-m") + 2 :], None)[0]
    else:
        return
    end = f".{command}".replace("-", "_")
    yield next((name for name in modules() if name.startswith("hps.tools.cli.") and name.endswith(end)), "hps.__main__")


@functools.cache
def _direct(module: str) -> frozenset[str]:
    path = modules()[module]
    if path == ROOT / "hps" / "__init__.py":  # its names are imported on first use, by whoever names them
        return frozenset()
    found = set()
    for name in imported(path.read_text("utf-8")):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        while name:  # a package is imported before what is in it
            found.add(name)
            name = name.rpartition(".")[0]
    if module in _STARTERS:
        found = {name for name in found if name.startswith("tests.")}
    if module.startswith("tests."):
        parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
        found.update(f"{parent}.conftest" for parent in parents if f"{parent}.conftest" in modules())
        # What the conftest of all offers counts where it is asked for.
        found.discard("tests.conftest")
        source = path.read_text("utf-8")
        found.update(server for fixture, server in _FIXTURES.items() if re.search(rf"\b{fixture}\b", source))
    return frozenset(found)


@functools.cache
def reached(module: str) -> frozenset[str]:
    """Return the modules that one imports, and those that they import."""
    found, left = {module}, [module]
    while left:
        new = _direct(left.pop()) - found
        found |= new
        left += new
    return frozenset(found)


def files_that_reach(changed: Iterable[str], tests: Iterable[str]) -> list[str] | None:
    """Return those of some files of tests that changes of files can reach; None where that cannot be told.

    Args:
        changed: paths of files that were changed, added or removed, from the root.
        tests: paths of files of tests, from the root.
    """
    names = {path.relative_to(ROOT).as_posix(): name for name, path in modules().items()}
    words: set[str] = set()
    targets: set[str] = set()
    for path in changed:
        if path in names:
            targets.add(names[path])
        elif path.endswith((".py", ".cu", ".cuh")) or ("/" not in path and not path.endswith(".md")) or path.startswith(".ci/"):
            return None  # removed code, kernels, and what says how to build and run all
        else:
            words |= {path.split("/")[0], path.rsplit("/")[-1]}
    if {"tests.conftest", "tests.ledger"} & targets:
        return None
    found = []
    for test in tests:
        mine = reached(names[test])
        texts = (modules()[name].read_text("utf-8") for name in mine if name.startswith("tests."))
        if mine & targets or (words and any(f'"{word}' in text for text in texts for word in words)):
            found.append(test)
    return found


def main(base: str, ring: str) -> int:
    folders = [ring, "docs"] if ring == "ring2" else [ring]  # as in the Makefile
    paths = (path for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    tests = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    changes = subprocess.run(["git", "diff", "--name-only", base], cwd=ROOT, capture_output=True, text=True, check=False)
    found = files_that_reach(changes.stdout.split(), tests) if changes.returncode == 0 else None
    sys.stdout.write("\n".join(tests if found is None else found) + "\n")
    if found is None:
        sys.stderr.write(f"tests.reach: it cannot be told what the changes since {base} reach: all of {ring}\n")
    elif left := sorted(set(tests) - set(found)):
        sys.stderr.write(f"tests.reach: of {ring} not reached by the changes since {base}, and left out: {' '.join(left)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
