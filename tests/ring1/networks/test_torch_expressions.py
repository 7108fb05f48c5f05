"""Sizes and guards of programs: arithmetic is let through, anything else of Python is refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hps.networks.torch_expressions import checked_size, compiled_guards  # noqa: E402 - after torch is known to be there

CODE = [
    "__import__('os').system('true')",
    "().__class__",
    "s0.func",
    "open('x')",
    "exec",
    "[1 for a in s0]",
    "lambda: s0",
    "s0[0]",
    "os",
]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Symbol('s52', positive=True, integer=True)",
            "Add(Mul(Integer(-1), Symbol('s20')), Integer(6))",
            "s0 + 1",
            "2*s0 // 3",
        ),
        *(
            "Float('0.5', precision=53)",
            "Max(1, s0)",
            "FloorDiv(Symbol('u0', integer=True), Integer(2))",
            "Pow(s0, Integer(-1))",
        ),
        *("Eq(s0, 4)", "s0 >= 2", "true", "-int_oo", "Piecewise((1, s0 > 2), (0, True))"),
    ],
)
def test_arithmetic_on_symbols_is_let_through_as_it_was(text: str) -> None:
    assert checked_size(text).replace(" ", "") == text.replace(" ", "")
    assert checked_size(f" {text}  # remark") == checked_size(text)


@pytest.mark.parametrize(
    "text",
    [
        *CODE,
        *(
            "Symbol('x y')",
            "Symbol('s0', commutative=open('x'))",
            "Symbol(s0)",
            "Float('x')",
            "'s0'",
            "Integer('7')",
            "S('s0')",
        ),
        *(
            "sympify('s0')",
            "lambdify(s0)",
            "2**10**10",
            "Pow(2, 1000)",
            "Pow(2, s0)",
            "s0 ** s1",
            "",
            "s0;s1",
            "s0\ns1",
            "1" * 20000,
        ),
        *("((2**64)**64)**64", "Pow(Pow(2, 9), 8)", "Pow(2, 1000, 0)", "(1, 2) * 1000000000", "Max((1, 2), 3)"),
        *("Float('0.1', precision=1000000000)", "Float('0.1', precision=s0)"),
        *("(" * 900 + "s0" + ")" * 900, "s0 if s1 else s2", "sin(s0)", "s12345678"),
    ],
)
def test_anything_else_of_python_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"^got "):
        checked_size(text)


PLACES = {("a",): 0, ("given", "it's"): 1, ("given", 0): 2}


def tensors(*shapes: tuple[int, ...]) -> list[object]:
    return [torch.from_numpy(np.zeros(shape, np.float32)) for shape in shapes]


@pytest.mark.parametrize(
    ("guard", "holds", "fails"),
    [
        ("L['a'].size()[0] == L['given'][\"it's\"].size()[0]", (3, 3), (3, 4)),
        ("(L['a'].size()[0] + L['given'][0].size()[1]) % 4 == 0", (3, 3), (4, 3)),
        ("L['a'].size()[0] > 2 and not L['a'].stride()[0] == 7", (3, 3), (2, 3)),
        ("math.floor(L['a'].size()[0] / 2) <= max(1, 1)", (3, 3), (4, 4)),
        ("float('inf') > L['a'].size()[0] ** 2 and L['a'].size()[0] == 3", (3, 3), (2, 3)),
        ("L['a'].size() == L['given'][\"it's\"].size() and 'x' == 'x'", (3, 3), (3, 4)),
    ],
)
def test_guards_are_checked_on_the_tensors_in_their_order(guard: str, holds: tuple[int, int], fails: tuple[int, int]) -> None:
    first_failed = compiled_guards(["L['a'].storage_offset() == 0", guard], PLACES)
    for sizes, failed in ((holds, ""), (fails, guard), (holds, "")):
        assert first_failed(tensors((sizes[0], 2), (sizes[1], 2), (1, 1))) == failed


def test_no_guards_hold() -> None:
    assert compiled_guards([], {})(tensors()) == ""


@pytest.mark.parametrize(
    "guard",
    [*CODE, "L['b'].size()[0] == 1", "L['a'].numpy()", "L['a'].size", "math.__loader__", "L['a'].size(print(1))", "max.x"],
)
def test_anything_else_of_python_is_no_guard(guard: str) -> None:
    with pytest.raises(ValueError, match=r"^got "):
        compiled_guards(["L['a'].size()[0] == 1", guard], PLACES)


@pytest.mark.parametrize(
    "guard",
    [
        *("'a' * 10000000000 == 'b'", "'%10000000000d' % 1 == 'a'", "('a' or 1) * 10000000000 == 1", "max('a', 'b') * 9 == 1"),
        *("L['a'].size() * 10000000000 == 1", "max(L['a'].size(), L['a'].size()) * 9 == 1", "(1, 2) * 10000000000 == 1"),
        *("(((2**64)**64)**64)**64 > L['a'].size()[0]", "int('9') == 9"),
    ],
)
def test_guards_that_would_fill_the_memory_are_refused(guard: str) -> None:
    with pytest.raises(ValueError, match=r"^got "):
        compiled_guards([guard], PLACES)
