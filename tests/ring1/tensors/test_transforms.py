"""Texts as requests have them, their hashes, and what is refused of a function that transforms them."""

import json
import re
import struct
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hps
from hps import Strings
from hps.configuration.transforms import TransformConfig
from hps.tensors.strings import hash_texts
from hps.tensors.transforms import Transform
from tests import ROOT

TEXTS = [b"", b"a", b"foobar", "Grüße".encode(), b"\0x"]
FNV1A = 0xCBF29CE484222325
PUBLISHED = {b"": 0xCBF29CE484222325, b"a": 0xAF63DC4C8601EC8C, b"foobar": 0x85944171F73967E8}  # draft-eastlake-fnv, C


def made(function: str, trusted: bool = True, **more: Any) -> Transform:
    document = {"function": function, "inputs": {"city": "bytes"}, **more}
    return Transform(TransformConfig.model_validate(document), "m", trusted=trusted)


def test_hashes_are_the_published_ones() -> None:
    hashes = Strings.of(list(PUBLISHED)).fnv1a()
    np.testing.assert_array_equal(hashes.view(np.uint64), list(PUBLISHED.values()))


@given(st.lists(st.binary(max_size=20), max_size=20))
@settings(max_examples=30)
def test_a_binary_tensor_has_the_texts_that_were_written(texts: list[bytes]) -> None:
    written = Strings.of(texts)
    read = Strings.of_tensor(written.to_tensor(), (len(texts),), "reading")
    assert (read.to_list(), read.shape, len(read)) == (texts, (len(texts),), len(texts))
    np.testing.assert_array_equal(read.fnv1a(), written.fnv1a())


@pytest.mark.parametrize("values", [TEXTS[:4], [text.decode() for text in TEXTS[:4]], np.array(TEXTS[:4])])
def test_texts_are_str_or_bytes_of_any_shape(values: Any) -> None:
    read = Strings.of(np.reshape(np.asarray(values, object), (2, 2)))
    assert (read.to_list(), read.shape, read.fnv1a().shape) == (TEXTS[:4], (2, 2), (2, 2))


@pytest.mark.parametrize("values", [[1], ["a", b"a"], [None], [["a"], "b"], ["\ud800"]])
def test_values_of_another_kind_are_refused(values: Any) -> None:
    with pytest.raises(hps.InvalidDtypeError, match="reading texts: "):
        Strings.of(values)


@pytest.mark.parametrize(
    "tensor",
    [
        b"",
        struct.pack("<I", 9),
        struct.pack("<I", 4) + b"abcd",
        struct.pack("<II", 2, 0xFFFFFFFF) + b"ab",
        struct.pack("<II", 1, 0) + b"ab",
        struct.pack("<I", 5) + b"abcdefgh",
    ],
)
def test_a_damaged_tensor_of_texts_is_refused(tensor: bytes) -> None:
    with pytest.raises(hps.InvalidInputError, match="reading city: "):
        Strings.of_tensor(tensor, (2,), "reading city")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tests.fakes.nothing:f", "No module"),
        ("tests.fakes.transforms:g", "no attribute"),
        ("hps:__all__", "expected a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: str, reason: str) -> None:
    with pytest.raises(hps.ConfigError, match=reason):
        made(function)


def test_a_function_of_any_module_needs_trust_and_one_of_a_package_does_not() -> None:
    with pytest.raises(hps.ConfigError, match=r"model_source\.trust: true"):
        made("tests.fakes.transforms:cities", trusted=False)
    assert made("fnv1a", trusted=False).of_call({"city": ["a"]})["city"] == hash_texts({"city": Strings.of(["a"])})["city"]


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("refuse", hps.InvalidInputError, "no such city"),
        ("bug", hps.TransformError, "failing: KeyError: 'a bug'"),
        ("nothing", hps.TransformError, "returned NoneType, expected item, age"),
        ("objects", hps.TransformError, "returned 'item' of object"),
        ("more", hps.TransformError, "returned item, age, other, expected item, age"),
        ("number", hps.TransformError, r"returned 'age' of float64 \[\], expected 1 to 8 dimensions"),
        ("nine", hps.TransformError, r"returned 'age' of float64 \[1, 1, 1, 1, 1, 1, 1, 1, 1\]"),
    ],
)
def test_what_a_function_does_wrong_is_named(text: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        made("tests.fakes.transforms:failing", outputs=["item", "age"]).of_call({"city": [text]})


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"city": ["a"]}, "input 'days' is missing; expected city, days, or none of them"),
        ({"city": [1], "days": [1]}, "got int, expected str"),
        ({"city": ["a"], "days": ["b"]}, "expected int64"),
        ({"city": ["a"], "days": [2**70]}, "expected int64"),
        ({"city": ["a"], "days": np.array([1.5])}, "got float64, expected int64"),
        ({"city": ["a"], "days": hps.Bags(np.array([1]), np.array([0, 1]))}, "got bags, expected int64"),
        ({"city": [np.zeros((2, 3)), np.zeros((2, 4))], "days": [1]}, "expected nested sequences of str"),
        ({"city": ["a"], "days": [1], "item": [1]}, "got input 'item', which the transform makes of others"),
    ],
)
def test_inputs_of_a_call_that_are_wrong_are_named(inputs: Any, reason: str) -> None:
    transform = made("tests.fakes.transforms:cities", inputs={"city": "bytes", "days": "int64"}, outputs=["item", "age"])
    with pytest.raises(hps.InvalidInputError, match=reason):
        transform.of_call(inputs)
    keys = {"item": [7], "age": [1.0]}
    assert transform.of_call(keys) is keys, "a request with keys is left alone"


def test_numbers_that_do_not_fit_are_refused_and_not_cut() -> None:
    transform = made("tests.fakes.transforms:same", inputs={"small": "uint8", "days": "int32"})
    assert transform.of_call({"small": [255], "days": [3]})["small"].dtype == np.uint8
    for inputs in ({"small": [256], "days": [1]}, {"small": [1], "days": [2**40]}, {"small": [1], "days": np.array([2**40])}):
        with pytest.raises(hps.InvalidInputError):
            transform.of_call(inputs)


def test_any_array_of_eight_dimensions_becomes_one_piece_of_memory() -> None:
    transform = made("tests.fakes.transforms:same", inputs={"keys": "int64", "deep": "float32"})
    keys = np.arange(12).reshape(3, 4)
    found = transform({"keys": keys[:, 1], "deep": np.ones((1,) * 8, np.float32)})
    assert (found["keys"].tolist(), found["keys"].flags.c_contiguous, found["deep"].ndim) == ([1, 5, 9], True, 8)


def test_keys_in_the_byte_order_of_another_machine_are_the_same_keys() -> None:
    transform = made("tests.fakes.transforms:big_endian", outputs=["item"])
    [item] = transform({"city": Strings.of(["a"])}).values()
    assert (item.tolist(), item.dtype.byteorder) == ([7], "=")


def test_a_text_of_many_bytes_is_hashed_as_a_trainer_does() -> None:
    text = bytes(range(256)) * 40_000
    hashed = FNV1A
    for byte in text[:1000]:
        hashed = ((hashed ^ byte) * 0x100000001B3) % 2**64
    assert Strings.of([text[:1000]]).fnv1a().view(np.uint64)[0] == hashed
    written = Strings.of([b"", text, b"\xff\x00"])
    read = Strings.of_tensor(written.to_tensor(), (3,), "reading")
    np.testing.assert_array_equal(read.fnv1a(), written.fnv1a())


def test_the_example_of_the_page_makes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "transforms.md").read_text()
    code, entry = re.findall(r"^```(?:python|json)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    module = ModuleType("shop_features")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "shop_features", module)
    transform = Transform(TransformConfig.model_validate(json.loads(entry)), "shop", trusted=True)
    made = transform.of_call({"city": ["Ulm", "Ulm"], "day": [1, 2], "age": [3.0]})
    assert made["city"][0] == made["city"][1] == Strings.of(["Ulm"]).fnv1a()[0] % 1000
    assert (made["weekend"].tolist(), made["age"]) == ([0.0, 1.0], [3.0])
    with pytest.raises(hps.InvalidInputError, match="before 1970"):
        transform.of_call({"city": ["Ulm"], "day": [-1]})
