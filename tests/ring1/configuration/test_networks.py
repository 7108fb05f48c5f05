"""`models[].dense`: what is refused, and how it is said."""

from typing import Any

import pytest

import hps
from hps.configuration.load import load_configuration, load_dense
from tests.ring1.configuration.test_config_errors import assert_said
from tests.servers.running_service import model_of

MODEL = model_of("m", ["user", "item"], {"user": 8, "item": 4}, maxnum_catfeature_query_per_table_per_sample=[1, 50])
INPUTS = {"user": {"table": "user"}, "age": {}}
WIDTHS = "got a list, expected [-1, ...]: the samples, then at most seven widths of at least 1"
NAME = "expected 1 to 120 printable characters that do not end in .offsets or .weights"


def dense(**changes: Any) -> dict[str, Any]:
    return {"format": "pt2", "file": "dense.pt2", "inputs": INPUTS, "outputs": ["score"], **changes}


def problems(said: Any, **more: Any) -> list[str]:
    with pytest.raises(hps.ConfigError) as caught:
        load_configuration({"models": [{**MODEL, "dense": said, **more}]})
    return [one.removeprefix("models[0].dense") for one in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "pt3"}, '.format: got "pt3", expected one of: pt2, torchscript, onnx; did you mean pt2?'),
        ({"format": None}, ".format: got null, expected one of: pt2, torchscript, onnx"),
        ({"file": ""}, '.file: got "", expected a path or URI that is not empty and has no NUL character'),
        ({"inputs": {}}, ".inputs: got none, expected at least one input"),
        ({"inputs": ["user"]}, ".inputs: got a list, expected an object"),
        ({"inputs": {"at": {"request_index": True}}}, ".inputs: got no lookup and no feature, expected at least one"),
        ({"outputs": []}, ".outputs: got an empty list, expected at least one element"),
        ({"outputs": "score"}, '.outputs: got "score", expected a list; write ["score"]'),
        ({"outputs": ["a", "b", "a"]}, ".outputs: got an output twice, expected each name once"),
        ({"max_queue_delay_us": -1}, ".max_queue_delay_us: got -1, expected at least 0"),
        ({"max_queue_delay_us": 1_000_001}, ".max_queue_delay_us: got 1000001, expected at most 1000000"),
        ({"dynamic_batching": 1}, ".dynamic_batching: got 1, expected true or false; write true"),
        ({"queue_delay_us": 1}, ".queue_delay_us: unknown key; did you mean max_queue_delay_us?"),
        ({"inputs": {"a.offsets": {}}}, f'.inputs["a.offsets"]: got "a.offsets", {NAME}'),
        ({"inputs": {"": {}}}, f'.inputs[""]: got "", {NAME}'),
    ],
)
def test_a_network_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert problems(dense(**changes)) == [problem]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"tabel": "user"}, ".tabel: unknown key; did you mean table?"),
        ({"table": "user", "pooling": "min"}, '.pooling: got "min", expected one of: none, sum, mean, sqrtn, max'),
        ({"pooling": "sum"}, ".pooling: got sum without a table, expected none; name the table whose vectors are pooled"),
        ({"hotness": 2}, ".hotness: got hotness without a table, expected a shape"),
        ({"table": "item", "hotness": 0}, ".hotness: got 0, expected at least 1"),
        ({"table": "item", "max_norm": 1}, ".max_norm: it has no effect without pooling, expected sum, mean, sqrtn or max"),
        (
            {"table": "item", "padding_key": 0},
            ".padding_key: it has no effect without pooling, expected sum, mean, sqrtn or max",
        ),
        ({"table": "item", "pooling": "sum", "max_norm": 0}, ".max_norm: got 0, expected more than 0"),
        ({"table": "item", "pooling": "sum", "padding_key": 2**63}, f".padding_key: got {2**63}, expected at most {2**63 - 1}"),
        ({"dtype": "float64"}, '.dtype: got "float64", expected one of: ... int64, int32, bool; did you mean float16?'),
        ({"table": "user", "dtype": "int64"}, ".dtype: a lookup has the dtype and ... expected neither dtype nor shape"),
        ({"table": "user", "shape": [-1, 8]}, ".shape: a lookup has the dtype and ... expected neither dtype nor shape"),
        ({"shape": []}, f".shape: {WIDTHS.replace('a list', 'an empty list')}"),
        ({"shape": [3]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, 0]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, -1]}, f".shape: {WIDTHS}"),
        ({"shape": [-1] + 8 * [1]}, f".shape: {WIDTHS}"),
        ({"table": "user", "request_index": True}, ".request_index: it numbers ... expected no table and no per_request"),
        ({"per_request": True, "request_index": True}, ".request_index: it numbers the ... no table and no per_request"),
    ],
)
def test_an_input_is_refused_by_its_name(entry: dict[str, Any], problem: str) -> None:
    assert_said(problems(dense(inputs={**INPUTS, "x": entry})), f".inputs.x{problem}")


def test_lookups_are_of_the_models_tables() -> None:
    assert problems(dense(inputs={"x": {"table": "shop"}})) == [': input "x" is of table "shop", expected one of user, item']
    assert problems(dense(inputs={"x": {"table": "item", "hotness": 51}})) == [
        ': input "x" has 51 keys a sample, expected at most 50 (maxnum_catfeature_query_per_table_per_sample of table item)'
    ]
    load_configuration({"models": [{**MODEL, "dense": dense(inputs={"x": {"table": "item", "hotness": 50}})}]})


def test_the_greatest_values_are_allowed() -> None:
    inputs = {
        "x" * 120: {"table": "item", "pooling": "sqrtn", "hotness": 50, "max_norm": 1e-9, "padding_key": -(2**63)},
        "y": {"dtype": "bool", "shape": [-1] + 7 * [1], "per_request": True},
        "z": {"request_index": True},
    }
    model = {**MODEL, "dense": dense(inputs=inputs, max_queue_delay_us=1_000_000, outputs=["a", "b"])}
    found = load_configuration({"models": [model]}).models[0].dense
    assert found is not None
    assert found.inputs["y"].shape == (-1, *7 * [1])
    with pytest.raises(hps.ConfigError, match="1 to 120 printable"):
        load_dense(dense(inputs={"x" * 121: {}}))


def test_each_version_may_have_a_network_and_its_problems_have_its_place() -> None:
    versions = [{"version": "2", "sparse_files": ["user2", "item2"], "dense": dense(inputs={"x": {"tabel": "user"}})}]
    with pytest.raises(hps.ConfigError) as caught:
        load_configuration({"models": [{**MODEL, "dense": dense(), "versions": versions}]})
    assert caught.value.problems == ["models[0].versions[0].dense.inputs.x.tabel: unknown key; did you mean table?"]


def test_every_problem_is_in_one_report() -> None:
    assert len(problems(dense(format="pt3", inputs={"x": {"tabel": 1}, "y": {"shape": [3]}}, outputs=[]))) == 4


def test_what_is_said_beside_a_file_is_checked_alike() -> None:
    with pytest.raises(hps.ConfigError) as caught:
        load_dense({"format": "onnx", "fil": "a", "inputs": {"x": {"tabel": 1}}, "outputs": ["s"]})
    assert caught.value.problems == [
        "file: missing; it has no default",
        "inputs.x.tabel: unknown key; did you mean table?",
        "fil: unknown key; did you mean file?",
    ]
    said = load_dense(dense())
    assert load_dense(said) is said
