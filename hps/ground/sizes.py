"""Expressions of named sizes, such as `2*length + 1`, and conditions on them, such as `length % 4 == 0`.

They come with a model, so they are data: integers, names, + - * // %, parentheses, `min` and `max`, and in a condition one
comparison. The syntax tree is checked before it is compiled, so that no other Python can be executed.
"""

import ast
from collections.abc import Mapping
from types import CodeType
from typing import Final

from hps.ground.memory.bounded_cache import BoundedCache

MOST_CHARACTERS: Final = 1000
_FUNCTIONS: Final = {"min": min, "max": max}
_GLOBALS: Final = {"__builtins__": {}, **_FUNCTIONS}
_MOST: Final = 1 << 62
_ALLOWED: Final = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod),
    *(ast.Constant, ast.Name, ast.Load, ast.Call),
)
_COMPARISONS: Final = (ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class SizeExpression:
    """An integer that follows from named sizes. *Immutable.*

    Raises:
        ValueError: the text is something else, which the message names.
    """

    __slots__ = ("_code", "names", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._code, self.names = _compiled(text, False)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Return its value; -1 if it divides by zero."""
        try:
            return int(eval(self._code, _GLOBALS, dict(sizes)))
        except ZeroDivisionError:
            return -1

    def solve(self, name: str, value: int, sizes: Mapping[str, int]) -> int | None:
        """Return the size that gives a value, if the expression is linear in it and the other sizes are known."""
        start, step = (self.value({**sizes, name: size}) for size in (1, 2))
        step -= start
        if not step or (value - start) % step:
            return None
        size = (value - start) // step + 1
        return size if size >= 0 and self.value({**sizes, name: size}) == value else None

    def __str__(self) -> str:
        return self.text


class SizeCondition:
    """A condition on named sizes. *Immutable.* Raises errors as `SizeExpression`."""

    __slots__ = ("_code", "names", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._code, self.names = _compiled(text, True)

    def is_met(self, sizes: Mapping[str, int]) -> bool:
        """Return True if the sizes fulfil it; False if it divides by zero."""
        try:
            return bool(eval(self._code, _GLOBALS, dict(sizes)))
        except ZeroDivisionError:
            return False

    def __str__(self) -> str:
        return self.text


def is_size_name(text: str) -> bool:
    """Return whether a size may have this name."""
    return text.isascii() and text.isidentifier() and len(text) <= 120 and text not in _FUNCTIONS and _is_name(text)


def _is_name(text: str) -> bool:
    try:
        return isinstance(ast.parse(text, mode="eval").body, ast.Name)  # a keyword is not
    except SyntaxError:
        return False


def _compile(text: str, condition: bool) -> tuple[CodeType, tuple[str, ...]]:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, expected at most {MOST_CHARACTERS}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("it cannot be read") from error
    if condition and not isinstance(tree.body, ast.Compare):
        raise ValueError("it compares nothing")
    compared = tree.body if condition else None
    names: dict[str, None] = {}
    functions = set()
    for node in ast.walk(tree):
        if wrong := _refused(node, compared):
            raise ValueError(f"it has {wrong}")
        if isinstance(node, ast.Call):
            functions.add(node.func)
        elif isinstance(node, ast.Name) and node not in functions:
            names[node.id] = None
    if bad := [name for name in names if not is_size_name(name)]:
        raise ValueError(f"it has the name {bad[0][:40]!r}, expected letters, digits and _")
    try:
        return compile(tree, "<sizes>", "eval"), tuple(names)
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply") from error


_compiled = BoundedCache(_compile, most_bytes=4 << 20)  # all inputs of a network have the same few sizes


def _refused(node: ast.AST, compared: ast.AST | None) -> str:
    """Describe what is not allowed in a node; empty if it is allowed."""
    if isinstance(node, _COMPARISONS):
        return "" if compared is not None and (node is compared or not isinstance(node, ast.Compare)) else "a comparison"
    if not isinstance(node, _ALLOWED):
        return f"{type(node).__name__}, expected integers, names, + - * // %, min and max"
    if isinstance(node, ast.Constant) and (type(node.value) is not int or node.value > _MOST):
        return f"{str(node.value)[:40]!r}, expected integers below 2**62"
    if isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if not is_known or len(node.args) < 2 or node.keywords:
            return "a call, expected min or max of two sizes or more"
    return ""
