"""Advice works: commands and settings that messages name exist, and a test follows each command that an error gives."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer.main

from hps.tools.cli.app import app
from tests import ROOT

COMMAND = re.compile(r"`(hps [a-z][^`]*)`")
SECTIONS = ("persistent_db", "volatile_db", "service", "update_source", "model_source")
SETTING = re.compile(rf"(?<![\w.\[])(models\[(?:\w*|\{{\}})\]|{'|'.join(SECTIONS)})\.([a-z]\w+)")
OTHERS = {"json", "py", "backend"}  # files; HugeCTR's name of a type in its Python structs
REFERENCE = json.loads((ROOT / "configs" / "reference.json").read_text())


FOLLOWED = {
    "hps check-database": "tests/ring2/stores/rocks_db/test_rocks_db_logs.py::test_the_cure_of_a_damaged_log_saves",
    "hps deploy": "tests/ring2/versions/test_fleet.py::test_the_service_and_the_commands_change_and_compare_a_fleet",
    "hps deploy --accept": "tests/ring2/versions/test_version_checks.py::test_a_bad_version_is_held_and_seen_and_a_good_one_or",
    "hps deploy --accept --canary": "tests/ring2/versions/test_canary.py::test_the_commands_begin_change_and_end_a_canary",
    "hps deploy --canary": "tests/ring2/versions/test_canary.py::test_the_commands_begin_change_and_end_a_canary",
    "hps deploy --fleet --version": "tests/ring2/versions/test_fleet.py::test_the_service_and_the_commands_change_and_compare",
    "hps deploy --force": "tests/ring2/models/test_redis_force.py::test_a_table_that_a_server_uses_is_not_emptied_and_loaded",
    "hps import": "tests/ring2/models/test_import.py::test_the_command_lists_and_imports",
    "hps import --format": "tests/ring1/models/test_model_files.py::test_keys_of_4_bytes_are_recognised",
    "hps load": "tests/ring1/models/test_table_load.py::test_the_command_line_loads_again_when_forced",
    "hps load --force": "tests/ring1/models/test_table_load.py::test_what_errors_say_loads_a_table_again",
    "hps models": "tests/ring2/versions/test_fleet.py::test_the_service_and_the_commands_change_and_compare_a_fleet",
    "hps promote": "tests/ring2/versions/test_canary.py::test_the_commands_begin_change_and_end_a_canary",
    "hps rollback": "tests/ring2/versions/test_canary.py::test_the_commands_begin_change_and_end_a_canary",
    "hps record": "tests/ring2/versions/test_version_checks.py::test_recorded_requests_are_written_by_the_command_for_the",
    "hps seal": "tests/ring1/models/test_sealed_models.py::test_what_errors_say_writes_a_file_again",
    "hps unpin": "tests/ring2/versions/test_fleet.py::test_the_service_and_the_commands_change_and_compare_a_fleet",
}
"""The test, by the beginning of its name, that does what an error says; commands without what they are about."""


def text_of(node: ast.expr) -> str | None:
    """A string as it is written, with {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
    return None


def strings_in(tree: ast.AST) -> Iterator[str]:
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in inside and (text := text_of(node)) is not None:
            yield text


@cache
def modules() -> dict[str, ast.Module]:
    """The modules that name a command or a setting."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "hps").rglob("*.py")}
    return {path: ast.parse(source) for path, source in sources.items() if "`hps " in source or SETTING.search(source)}


def said_in_errors() -> set[str]:
    """Commands in what is raised or returned, and in constants of modules, which errors are made of."""
    found: set[str] = set()
    for tree in modules().values():
        constants = [one for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign) and not is_example(one)]
        for node in (*constants, *(one for one in ast.walk(tree) if isinstance(one, ast.Raise | ast.Return))):
            found |= {command for text in strings_in(node) for command in COMMAND.findall(text)}
    return found


def is_example(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and "EXAMPLE" in target.id for target in targets)


def problems_of(command: str) -> str:
    """What is wrong with a command; empty if it and its options exist."""
    words = shlex.split(command.replace("{}", "X"))[1:]
    place: Any = typer.main.get_command(app)
    while words and hasattr(place, "commands") and words[0] in place.commands:
        place = place.commands[words.pop(0)]
    if hasattr(place, "commands") and words and not words[0].startswith("-"):
        return f"there is no command {words[0]}"
    words = [word for word in words if not re.fullmatch(r"-\d+", word)]  # keys
    options = {name for param in place.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    return ", ".join(f"there is no option {word}" for word in words if word.startswith("-") and word not in options)


def test_commands_that_the_product_names_exist_with_their_options() -> None:
    named = {
        part.strip()
        for tree in modules().values()
        for text in strings_in(tree)
        for command in COMMAND.findall(text)
        for part in re.split(r" && | \| ", command)
        if part.startswith("hps ")
    }
    assert len(named) > 30
    assert {command: problems for command in sorted(named) if (problems := problems_of(command))} == {}


def test_settings_that_the_product_names_exist() -> None:
    sections = {
        name: set(REFERENCE[name]) for name in ("persistent_db", "volatile_db", "service", "update_source", "model_source")
    }
    sections["models"] = set(REFERENCE["models"][0])
    unknown: dict[str, str] = {}
    for path, tree in modules().items():
        for text in strings_in(tree):
            for section, key in SETTING.findall(text):
                if key not in sections[section.partition("[")[0]] and key not in OTHERS:
                    unknown[f"{section}.{key}"] = path
    assert unknown == {}


def test_what_errors_say_is_followed_by_a_test() -> None:
    said = {" ".join([*re.findall(r"^hps [a-z-]+", one), *sorted(re.findall(r"--[a-z-]+", one))]) for one in said_in_errors()}
    assert sorted(said) == sorted(FOLLOWED), "name the test that follows the advice in FOLLOWED"
    for place in FOLLOWED.values():
        path, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), place
