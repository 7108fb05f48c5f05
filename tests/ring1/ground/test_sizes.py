"""Expressions of sizes: what they are worth, and that nothing else can be said with them."""

import pytest

from hps.ground.sizes import MOST_CHARACTERS, SizeCondition, SizeExpression, is_size_name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("length", 5),
        (" 2*length + 1 ", 11),
        ("length - samples", 2),
        ("-length + samples", -2),
        ("(length + 1) // samples", 2),
        ("-length // samples", -2),
        ("-length % samples", 1),
        ("min(length, samples, 9)", 3),
        ("max(length, samples)*2", 10),
        ("length // (samples - 3)", -1),
        ("7", 7),
    ],
)
def test_expressions_are_integers_of_sizes(text: str, value: int) -> None:
    assert SizeExpression(text).value({"length": 5, "samples": 3, "other": 1}) == value


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("length >= 2", [2, 3, 4, 5, 6]),
        ("length != 3", [0, 1, 2, 4, 5, 6]),
        ("length % 4 == 0", [0, 4]),
        ("1 < length <= 3", [2, 3]),
        ("max(length, 4) > min(length, 5)", [0, 1, 2, 3, 6]),
        ("6 // length >= 2", [1, 2, 3]),
    ],
)
def test_conditions_hold_for_some_sizes(text: str, held: list[int]) -> None:
    condition = SizeCondition(text)
    assert condition.names == ("length",)
    assert [length for length in range(7) if condition.is_met({"length": length})] == held


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a +",
            "a.b",
            "a[0]",
            "a(1)",
            "min(a)",
            "min(a, b=1)",
            "min(*a, 1)",
            "abs(a, b)",
            "min.x(a, b)",
            "a ** 9",
            "a / 2",
            "a << 2",
        ),
        *(
            "1.5",
            "True",
            "None",
            "'a'",
            "__import__('os')",
            "lambda: 1",
            "[a for a in b]",
            "a if b else c",
            "a and b",
            "not a",
            "~a",
        ),
        *(
            "a := 1",
            "(a, b)",
            "a; b",
            "min",
            "min + 1",
            "max(min, 1)",
            "ä",
            "9" * 30,
            "a < b",
            "a" * (MOST_CHARACTERS + 1),
            "(" * 400 + "a" + ")" * 400,
        ),
    ],
)
def test_nothing_else_can_be_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|it "):
        SizeExpression(text)
    with pytest.raises(ValueError, match=r"expected|it "):
        SizeCondition(f"{text} > 1" if text != "a < b" else "(a < b) + 1")


@pytest.mark.parametrize("text", ["a", "a + 1", "min(a, b)", "(a < b) < c", "a in b", "a is b", "a < (b == c)"])
def test_a_condition_is_one_comparison(text: str) -> None:
    with pytest.raises(ValueError, match="it "):
        SizeCondition(text)


def test_a_size_is_found_from_the_value_of_a_linear_expression() -> None:
    assert SizeExpression("2*length + samples").solve("length", 13, {"samples": 3}) == 5
    assert SizeExpression("2*length + samples").solve("length", 14, {"samples": 3}) is None
    assert SizeExpression("length + 1").solve("length", 1, {}) == 0
    assert SizeExpression("length + 1").solve("length", 0, {}) is None
    assert SizeExpression("length*length").solve("length", 49, {}) is None
    assert SizeExpression("length // 2").solve("length", 3, {}) is None


def test_names_of_sizes_are_those_that_expressions_can_have() -> None:
    names = ["a", "_a1", "samples", "a" * 120, "min", "if", "None", "1a", "a b", "", "ä", "a" * 121]
    assert [is_size_name(name) for name in names] == [True] * 4 + [False] * 8
