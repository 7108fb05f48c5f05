"""A boolean has a name where it is passed: `deploy(name, force=True)`, not `deploy(name, None, True)`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hps

PACKAGE = Path(hps.__file__).parent
COMPILED = ("kernel(", "jit", "custom_op")  # numba and torch.library know no keyword-only parameters
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Walked once, while tests are collected: (path, node), of functions and classes, and of calls with True or False by position.
FUNCTIONS: list[tuple[str, Function]] = []
CLASSES: list[ast.ClassDef] = []
CALLS: list[tuple[str, ast.Call]] = []
for place in sorted(PACKAGE.rglob("*.py")):
    for node in ast.walk(ast.parse(place.read_bytes())):
        if isinstance(node, Function):
            FUNCTIONS.append((place.relative_to(PACKAGE).as_posix(), node))
        elif isinstance(node, ast.ClassDef):
            CLASSES.append(node)
        elif isinstance(node, ast.Call) and any(isinstance(arg, ast.Constant) and type(arg.value) is bool for arg in node.args):
            CALLS.append((place.relative_to(PACKAGE).as_posix(), node))


def is_bool(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def is_compiled(function: Function) -> bool:
    return any(word in ast.unparse(one) for one in function.decorator_list for word in COMPILED)


def booleans(function: Function) -> tuple[list[str], list[str]]:
    """The booleans of a function that a call may pass by position, and the others."""
    arguments = function.args
    by_position = [posonlyarg.arg for posonlyarg in [*arguments.posonlyargs, *arguments.args] if is_bool(posonlyarg.annotation)]
    return by_position, [kwonlyarg.arg for kwonlyarg in arguments.kwonlyargs if is_bool(kwonlyarg.annotation)]


def names_with_booleans() -> Iterator[str]:
    """The names of functions with a boolean, and of classes with a boolean field."""
    yield from (function.name for _, function in FUNCTIONS if any(booleans(function)))
    for one in CLASSES:
        made = [method for method in one.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"]
        fields = [field.annotation for field in one.body if isinstance(field, ast.AnnAssign)]
        if any(map(is_bool, fields)) or any(any(booleans(method)) for method in made):
            yield one.name


def called(call: ast.Call) -> str:
    """The name of what a call calls, also through `partial`."""
    function = call.func
    if isinstance(function, ast.Name) and function.id == "partial":
        function = call.args[0]
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def test_two_booleans_are_passed_by_name() -> None:
    found = []
    for path, function in FUNCTIONS:
        by_position, by_name = booleans(function)
        if by_position and len(by_position) + len(by_name) > 1 and not is_compiled(function):
            found.append((path, function.lineno, function.name, by_position))
    assert not found, "put `*,` before them"


def test_no_true_or_false_is_passed_by_position() -> None:
    names = {*names_with_booleans()} - {"get"}  # of dicts, mostly
    names -= {function.name for _, function in FUNCTIONS if is_compiled(function)}
    found = [(path, call.lineno, called(call)) for path, call in CALLS if called(call) in names]
    assert not found, "name the argument"
