"""`models[].dense`: what is refused, and how it is said."""

import json
from copy import deepcopy
from typing import Any

import pytest

import hps
from hps.configuration.load import load_configuration, load_dense
from tests.ring1.configuration.test_config_errors import assert_said
from tests.servers.running_service import model_of

MODEL = model_of("m", ["user", "item"], {"user": 8, "item": 4}, maxnum_catfeature_query_per_table_per_sample=[1, 50])
INPUTS = {"user": {"table": "user"}, "age": {}}
WIDTHS = "got a list, expected [-1, ...]: the samples or a size by its name, then at most seven widths of at least 1, or sizes"
NAME = "expected 1 to 120 printable characters"
ENDS = "which is the name of bags of another input; rename it"


def dense(**changes: Any) -> dict[str, Any]:
    return {"format": "pt2", "file": "dense.pt2", "inputs": INPUTS, "outputs": ["score"], **changes}


def problems(said: Any, **more: Any) -> list[str]:
    with pytest.raises(hps.ConfigError) as caught:
        load_configuration({"models": [{**MODEL, "dense": said, **more}]})
    return [problem.removeprefix("models[0].dense") for problem in caught.value.problems]


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
        ({"outputs": ["a", "b", "a"]}, '.outputs: got "a" twice, expected each name once'),
        ({"max_queue_delay_us": -1}, ".max_queue_delay_us: got -1, expected at least 0"),
        ({"max_queue_delay_us": 1_000_001}, ".max_queue_delay_us: got 1000001, expected at most 1000000"),
        ({"dynamic_batching": 1}, ".dynamic_batching: got 1, expected true or false; write true"),
        ({"queue_delay_us": 1}, ".queue_delay_us: unknown key; did you mean max_queue_delay_us?"),
        ({"inputs": {**INPUTS, "user.offsets": {}}}, f'.inputs: got "user.offsets", {ENDS}'),
        ({"inputs": {**INPUTS, "x": {"shape": [3]}}}, ': input "x" has 3 samples, expected a shape [-1, ...]'),
        ({"inputs": {"": {}}}, f'.inputs[""]: got "", {NAME}'),
    ],
)
def test_a_network_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert problems(dense(**changes)) == [problem]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"tabel": "user"}, ".tabel: unknown key; did you mean table?"),
        ({"table": "user", "pooling": "top"}, '.pooling: got "top", expected one of: none, sum, mean, sqrtn, max'),
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
        ({"dtype": "float63"}, '.dtype: got "float63", expected one of: ... int8, uint8, bool; did you mean float64?'),
        ({"table": "user", "dtype": "int64"}, ".dtype: a lookup has the dtype and ... expected neither dtype nor shape"),
        ({"table": "user", "shape": [-1, 8]}, ".shape: a lookup has the dtype and ... expected neither dtype nor shape"),
        ({"shape": []}, f".shape: {WIDTHS.replace('a list', 'an empty list')}"),
        ({"shape": [-2]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, "n", 0]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, True]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, "a b"]}, '.shape: got "a b", expected the name of a size or an expression: it cannot be read'),
        ({"shape": ["n"], "per_request": True}, ".per_request: its first size ... and no offsets_of"),
        ({"table": "item", "offsets_of": "x"}, ".offsets_of: the offsets of a lookup ... expected no offsets_of"),
        ({"dtype": "int8", "offsets_of": "x"}, ".offsets_of: got offsets of int8, expected dtype int64 or int32"),
        ({"shape": [-1, 0]}, f".shape: {WIDTHS}"),
        ({"shape": [-1, -1]}, f".shape: {WIDTHS}"),
        ({"shape": [-1] + 8 * [1]}, f".shape: {WIDTHS}"),
        ({"table": "user", "request_index": True}, ".request_index: it numbers ... expected no table and no per_request"),
        ({"per_request": True, "request_index": True}, ".request_index: it numbers the ... no table and no per_request"),
    ],
)
def test_an_input_is_refused_by_its_name(entry: dict[str, Any], problem: str) -> None:
    assert_said(problems(dense(inputs={**INPUTS, "x": entry})), f".inputs.x{problem}")


PROGRAM = {"file": "keys.pt2", "inputs": ["hist"], "outputs": ["k"]}
CUT: dict[str, Any] = {
    "inputs": {
        "age": {"shape": [-1, 3]},
        "hist": {"dtype": "int64", "shape": [-1, "n"]},
        "tags": {"dtype": "int64", "shape": ["m"]},
        "ends": {"dtype": "int64", "shape": ["samples + 1"], "offsets_of": "tags"},
    },
    "sizes": {"n": 4, "m": 9},
    "guards": ["samples != 3", "n % 4 == 0", "m >= n"],
    "keys": [PROGRAM],
    "lookups": {
        "a": {"table": "item", "keys": {"output": "k"}},
        "b": {"table": "item", "pooling": "max", "keys": {"input": "tags"}, "offsets": {"input": "ends"}},
        "c": {"table": "user", "keys": {"input": "age", "column": 2}},
    },
    "network_inputs": ["b", "age", "a"],
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """Return the network of `CUT` with another value at a place such as `lookups.a.keys`; None: without it."""
    said: dict[str, Any] = deepcopy(CUT)
    *steps, last = place.split(".")
    part = said
    for step in steps:
        part = part[step]
    part[last] = value
    if value is None:
        del part[last]
    return said


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("inputs.age.shape", ["samples + 1"], '.lookups: keys of lookup "c" are column 2 ... with at least 3 columns'),
        ("inputs.ends.offsets_of", "hist", '.inputs: input "ends" has offsets of "hist", ... whose first size has a name'),
        ("inputs.ends.offsets_of", "x", '.inputs: input "ends" has offsets of "x", ... whose first size has a name'),
        ("inputs.hist.shape", [-1, "n + 1"], '.sizes: no input tells the size "n", ... alone in its shape'),
        ("sizes", None, '.sizes: got no value of "n"; write one with which the network runs'),
        ("sizes", {"n": 4}, '.sizes: got no value of "m"; write one with which the network runs'),
        ("sizes", {"n": 4, "m": 9, "k": 1}, '.sizes: got a value of "k", which no input has in its shape'),
        ("sizes", {"n": 4, "m": 9, "if": 1}, '.sizes.if: got "if", expected a name of ... samples, min and max'),
        ("sizes", {"n": 4, "m": 9, "samples": 1}, '.sizes.samples: got "samples", expected a name of ... samples, min and max'),
        ("guards", ["n >"], '.guards[0]: got "n >": it cannot be read; ... such as length >= 2'),
        ("guards", ["n > 1", "print(n) > 1"], '.guards[1]: got "print(n) > 1": it has a call, ... such as length >= 2'),
        ("guards", ["k > 1"], ".guards: got \"k > 1\": no input has a size 'k' (dense.sizes)"),
        ("guards", ["n > 4"], '.guards: got "n > 4", which the values of dense.sizes do not fulfil'),
        ("keys", [], '.lookups: keys of lookup "a" are output "k", expected outputs of dense.keys: it has none'),
        ("keys", [{"inputs": ["hist"], "outputs": ["k"]}], ".keys[0].file: missing; it has no default"),
        ("keys", [{**PROGRAM, "file": "dense.pt2"}], '.keys: entry 0 has file "dense.pt2", ... write its own'),
        ("keys", [{**PROGRAM, "inputs": ["hits"]}], '.keys: entry 0 reads "hits", ... age, hist, tags, ends'),
        ("keys", [{**PROGRAM, "outputs": ["age"]}], '.keys: entry 0 has output "age", which is the name of another; rename it'),
        ("keys", [{**PROGRAM, "outputs": ["k", "k"]}], '.keys[0].outputs: got "k" twice, expected each name once'),
        ("lookups.age", {"table": "item", "keys": {"input": "hist"}}, '.lookups: lookup "age" has the name ... rename it'),
        ("lookups.k", {"table": "item", "keys": {"input": "hist"}}, '.lookups: lookup "k" has the name ... rename it'),
        ("lookups.a.table", "shop", ': lookup "a" is of table "shop", expected one of user, item'),
        ("lookups.a.keys", {"input": "hits"}, '.lookups: keys of lookup "a" are input "hits", ... age, hist, tags, ends'),
        ("lookups.a.keys", {"input": "hist", "output": "k"}, ".lookups.a.keys: expected either ... keys program"),
        ("lookups.a.keys", {"output": "k", "column": 1}, ".lookups.a.keys: got a column ... of an input"),
        ("lookups.a.keys", {"input": "hist", "colum": 1}, ".lookups.a.keys.colum: unknown key; did you mean column?"),
        ("lookups.a.poling", "sum", ".lookups.a.poling: unknown key; did you mean pooling?"),
        ("lookups.a.offsets", {"input": "ends"}, ".lookups.a.offsets: it has no effect ... sqrtn or max"),
        ("lookups.b.offsets", {"input": "end"}, '.lookups: offsets of lookup "b" are input "end", ... age, hist, tags, ends'),
        ("lookups.c.include_last_offset", True, ".lookups.c.include_last_offset: got true without offsets, expected false"),
        ("lookups.c.keys.column", 3, '.lookups: keys of lookup "c" are column 3 ... with at least 4 columns'),
        ("network_inputs", ["a", "d"], '.network_inputs: got "d", expected inputs and lookups: age, hist, tags, ends, a, b, c'),
        ("network_inputs", ["a", "b", "a"], '.network_inputs: got "a" twice, expected each name once'),
        ("stale_copies", ["shop"], ': stale_copies has table "shop", expected some of user, item'),
    ],
)  # fmt: skip
def test_a_cut_network_is_refused_by_the_name_of_its_part(place: str, value: Any, problem: str) -> None:
    assert_said(problems(dense(**changed(place, value))), problem)


def test_a_cut_network_has_the_files_of_all_its_programs() -> None:
    said = load_dense(dense(**CUT))
    assert said.files == ("dense.pt2", "keys.pt2")
    assert load_dense(dense()).files == ("dense.pt2",)
    assert load_dense(json.loads(said.model_dump_json())) == said
    assert said.inputs["hist"].shape == (-1, "n")
    assert load_dense(dense(**changed("inputs.age.shape", [-1, "3"]))) == said


def test_a_network_without_samples_is_refused() -> None:
    inputs = {"at": {"request_index": True}, "tags": {"dtype": "int64", "shape": ["m"]}}
    assert problems(dense(inputs=inputs, sizes={"m": 9})) == [
        ".inputs: got no input whose shape has the samples, expected one with -1 or samples",
    ]


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
    assert len(problems(dense(format="pt3", inputs={"x": {"tabel": 1}, "y": {"shape": [0]}}, outputs=[]))) == 4


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
