"""Sizes and guards in programs of `torch.export`: text that PyTorch evaluates as Python. Anything but arithmetic is refused.

Symbol('s52', positive=True, integer=True)          a size as sympy writes it; older releases write s0 + 1
L['a'].size()[0] == L['b'].size()[0]                a guard: a condition on the inputs under which the program is right
"""

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_MOST_CHARACTERS: Final = 10_000
_MOST_POWER: Final = 64  # an integer to any power takes any memory; so does a power of powers, or a text times an integer
_MOST_PRECISION: Final = 1000
_SYMBOL: Final = re.compile(r"[a-z]{1,4}[0-9]{1,6}")
_NUMBER: Final = re.compile(r"-?[0-9.]{1,40}(e[+-]?[0-9]{1,3})?")
_CONSTANTS: Final = {"true", "false", "oo", "int_oo", "inf", "nan"}
_POWERS: Final = {"Pow", "PowByNatural", "FloatPow", "LShift"}
_OF_SYMPY: Final = {
    *(
        "Add",
        "Mul",
        "Mod",
        "Max",
        "Min",
        "Abs",
        "floor",
        "ceiling",
        "Integer",
        "Rational",
        "Half",
        "One",
        "Zero",
        "NegativeOne",
    ),
    *("Eq", "Ne", "Ge", "Gt", "Le", "Lt", "Equality", "Unequality", "GreaterThan", "StrictGreaterThan", "LessThan"),
    *("StrictLessThan", "And", "Or", "Not", "Piecewise", "ExprCondPair"),
    *_POWERS,
}
_OF_TORCH: Final = {  # torch.utils._sympy.functions
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "RShift"),
    *("FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt"),
    *("RoundDecimal", "ToFloat", "Identity"),
}
_OF_MATH: Final = {"floor", "ceil", "trunc", "sqrt", "log2", "isnan"}
_BUILTINS: Final = {"max": max, "min": min, "abs": abs, "int": int, "float": float, "round": round}
_OF_TENSORS: Final = {"size", "stride", "storage_offset"}
_BINARY: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_UNARY: Final = (ast.USub, ast.UAdd, ast.Not)
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

Path = tuple[Any, ...]
"""Where an input of a program is: the name of a parameter, then keys of dicts and places in lists."""


def checked_size(text: str) -> str:
    """Return a size as Python's own parser reads it, so that sympy's cannot read another one.

    Raises:
        ValueError: it is not arithmetic on symbols and numbers.
    """
    tree = _parsed(text)
    _check_size(tree.body, text)
    return ast.unparse(tree)


def _check_size(node: ast.expr, text: str) -> None:
    match node:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(symbol))], options) if _SYMBOL.fullmatch(symbol):
            below = [option.value for option in options]  # what sympy assumes of it
        case ast.Call(ast.Name("Float"), [ast.Constant(str(number))], options) if _NUMBER.fullmatch(number):
            precisions = [option.value.value for option in options if isinstance(option.value, ast.Constant)]
            if len(precisions) < len(options) or not all(
                isinstance(precision, int) and 0 <= precision <= _MOST_PRECISION for precision in precisions
            ):
                raise ValueError(f"got {text[:200]!r}, expected floats of at most {_MOST_PRECISION} bits")
            return
        case ast.Call(ast.Name("Piecewise"), [*pairs], []):
            below = [part for pair in pairs for part in (pair.elts if isinstance(pair, ast.Tuple) else [pair])]
        case ast.Call(ast.Name(name), [*below], []) if name in _OF_SYMPY or name in _OF_TORCH:
            pass
        case ast.Name(name) if _SYMBOL.fullmatch(name) or name in _CONSTANTS:
            return
        case _:
            below = _arithmetic(node, text)
    for operand in below:
        _check_size(operand, text)


def compiled_guards(texts: Sequence[str], places: Mapping[Path, int]) -> Callable[[Sequence[Any]], str]:
    """Compile all guards of a program in one function; PyTorch's own way takes time of guards times inputs.

    Args:
        places: by path, the place of each input among the program's tensors.

    Returns:
        A function of the tensors in order that returns the first guard that they violate; empty if none.

    Raises:
        ValueError: one is not arithmetic on sizes, or names no input.
    """
    checks = [ast.unparse(_of_places(_parsed(text).body, text, places)) for text in texts]
    holding = eval(
        f"lambda given: ({''.join(f'{check}, ' for check in checks)})", {"__builtins__": {}, "math": math, **_BUILTINS}
    )

    def first_failed(given: Sequence[Any]) -> str:
        return next((text for text, holds in zip(texts, holding(given), strict=True) if not holds), "")

    return first_failed


def _of_places(node: ast.expr, text: str, places: Mapping[Path, int], *, sequences: bool = False) -> ast.expr:
    """Return a guard with `given[place]` for each input.

    Args:
        sequences: whether the node may be a text or all sizes of a tensor: what Python would repeat where it is multiplied.
    """
    match node:
        case ast.Subscript() if (path := _path(node)) is not None:
            if path not in places:
                raise ValueError(f"got guard {text[:200]!r}, expected conditions on inputs: it has none at {list(path)}")
            return ast.Subscript(ast.Name("given", ast.Load()), ast.Constant(places[path]), ast.Load())
        case ast.Subscript(value, ast.Constant(int())) if isinstance(value, ast.Call):
            return ast.Subscript(_of_places(value, text, places, sequences=True), node.slice, ast.Load())
        case ast.Call(ast.Attribute(ast.Subscript() as tensor, name), [], []) if name in _OF_TENSORS:
            if name != "storage_offset" and not sequences:
                raise ValueError(f"got guard {text[:200]!r}, expected conditions on sizes: {name}() needs an index")
            return ast.Call(ast.Attribute(_of_places(tensor, text, places), name, ast.Load()), [], [])
        case ast.Call(ast.Name("float"), [ast.Constant(str(number))], []) if number in ("inf", "-inf", "nan"):
            return node
        case ast.Call(ast.Attribute(ast.Name("math"), name) | ast.Name(name) as called, [*below], []) if name in (
            _OF_MATH if isinstance(called, ast.Attribute) else _BUILTINS
        ):
            return ast.Call(called, [_of_places(operand, text, places) for operand in below], [])
        case ast.Attribute(ast.Name("math"), "inf"):
            return node
        case ast.Constant(str()) if sequences:
            return node
        case ast.IfExp(test, then, other):
            return ast.IfExp(*(_of_places(operand, text, places) for operand in (test, then, other)))
    compared = isinstance(node, ast.Compare)
    below = [_of_places(operand, text, places, sequences=compared) for operand in _arithmetic(node, text)]
    match node:
        case ast.BinOp(op=op):
            return ast.BinOp(below[0], op, below[1])
        case ast.UnaryOp(op=op):
            return ast.UnaryOp(op, below[0])
        case ast.BoolOp(op=op):
            return ast.BoolOp(op, below)
        case ast.Compare(ops=ops):
            return ast.Compare(below[0], ops, below[1:])
    return node


def _path(node: ast.expr) -> Path | None:
    """Return the path of `L['a'][0]`; None if the text is something else."""
    found: list[Any] = []
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        found.append(node.slice.value)
        node = node.value
    return (*reversed(found),) if isinstance(node, ast.Name) and node.id == "L" else None


def _arithmetic(node: ast.expr, text: str) -> list[ast.expr]:
    """Return the operands of arithmetic, a comparison or a number."""
    match node:
        case ast.Constant(bool() | int() | float()):
            return []
        case ast.BinOp(left, op, right) if isinstance(op, _BINARY):
            return [left, right]
        case ast.UnaryOp(op, operand) if isinstance(op, _UNARY):
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left, ops, others) if all(isinstance(op, _COMPARISONS) for op in ops):
            return [left, *others]
    raise ValueError(f"got {text[:200]!r}, expected arithmetic on sizes: it has {ast.unparse(node)[:80]!r}")


def _refuse_powers(tree: ast.AST, text: str) -> None:
    """Check that the exponents of powers, multiplied along powers of powers, are numbers and small."""
    stack: list[tuple[ast.AST, int]] = [(tree, 1)]
    while stack:
        node, power = stack.pop()
        match node:
            case ast.BinOp(_, ast.Pow(), exponent):
                power *= _exponent(exponent, text)
            case ast.Call(ast.Name(name), [_, exponent, *_]) if name in _POWERS:
                power *= _exponent(exponent, text)
        if power > _MOST_POWER:
            raise ValueError(f"got {text[:200]!r}, expected powers of at most {_MOST_POWER}")
        stack += [(child, power) for child in ast.iter_child_nodes(node)]


def _exponent(node: ast.expr, text: str) -> int:
    found = ast.unparse(node)
    number = re.fullmatch(r"(?:Integer\()?(-?[0-9]{1,9})\)?", found)
    if number is None:
        raise ValueError(f"got {text[:200]!r}, expected powers of at most {_MOST_POWER}: it has {found[:80]!r}")
    return max(abs(int(number[1])), 1)


def _parsed(text: str) -> ast.Expression:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"got {len(text)} characters, expected at most {_MOST_CHARACTERS}: {text[:80]!r}...")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"got {text[:200]!r}, expected arithmetic on sizes") from error
    _refuse_powers(tree, text)
    return tree
