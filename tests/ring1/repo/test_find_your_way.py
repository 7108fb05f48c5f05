"""Every answer of docs/find-your-way.md exists, and is the one definition of the tree that does what the question asks for."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "find-your-way.md").read_text()
ANSWERS = {
    question: (file, name) for question, file, name in re.findall(r"^\| (.+\?) \| `(\S+)` \| `(\S+)` \|$", PAGE, re.MULTILINE)
}
PROOFS = {  # what the source of the answer has, and no other definition
    "Where is the limit of a body's size checked?": ("settings.max_body_bytes", "MOST_OBJECT_BYTES", "row_target("),
    "Which code runs when a Kafka message arrives?": ("self._poll(", "self._accept(", "self._apply_all("),
    "Where do I add a counter to a tier?": ("hits: list[int] = field(", "misses: list[int] = field(", "defaults: int = 0"),
    "In which order does a lookup handle missing keys?": ("lookup.unique()", "self._queue_insertion(", "self._fetch_now("),
    "How does a GPU find a key in its cache?": ('extern "C" __global__', " query(const __grid_constant__ Query"),
    "Which HTTP status does an error get?": ("UnknownTableError: 404", "DeadlineError: 504"),
    "Where does a new version take over?": ("self.serving = {**self.serving, name: deployment}",),
    "What keeps an old vector from overwriting a newer one?": ("self.is_current(token)", "yield allowed"),
    "Where do I add a configuration key of a model?": ("sparse_files: ", "gpucacheper: ", "hit_rate_threshold: "),
    "What happens when the engine process dies?": ("os.waitstatus_to_exitcode(", "ENGINE_EPOCH] = 0"),
}


@cache
def sources() -> dict[str, str]:
    """Return the text of every module and kernel, by its path."""
    paths = [*sorted((ROOT / "hps").rglob("*.py")), *sorted((ROOT / "cuda").glob("*.cu"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def definitions(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions, classes and constants of a module, and those of its classes, by their qualified names."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                yield within + target.id, node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, f"{within}{node.name}.")


def holders(path: str, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield the smallest definitions of a file whose source has all parts."""
    text = sources()[path]
    if not all(part in text for part in parts):
        return
    if path.endswith(".cu"):
        yield path.removeprefix("cuda/").removesuffix(".cu")
        return
    lines = text.splitlines()
    found = [
        name
        for name, node in definitions(ast.parse(text))
        if all(part in "\n".join(lines[node.lineno - 1 : node.end_lineno]) for part in parts)
    ]
    yield from (name for name in found if not any(other.startswith(f"{name}.") for other in found))


def test_ten_questions_are_answered_and_proved() -> None:
    assert len(ANSWERS) == 10
    assert list(ANSWERS) == list(PROOFS)


@pytest.mark.parametrize("question", PROOFS)
def test_an_answer_is_the_only_definition_that_does_it(question: str) -> None:
    places = [(path, name) for path in sources() for name in holders(path, PROOFS[question])]
    assert places == [ANSWERS[question]]


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:hps|cuda|docs|configs)/\S+)`", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_name_of_the_next_steps_is_defined() -> None:
    code = "".join(sources().values())
    names = re.findall(r"`(?:\w+\.)?(\w+)`", PAGE[PAGE.index("The next step") :])
    assert names
    assert [name for name in names if not re.search(rf"(?:def|class) {name}\b|self\.{name} = ", code)] == []
