"""Whatever a configuration holds, it is a `Configuration` or a `ConfigError` that names what is wrong."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.configuration.hugectr_structs import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from hps.configuration.load import Configuration, load_configuration
from hps.errors import ConfigError
from tests import ROOT

REFERENCE = json.loads((ROOT / "configs" / "reference.json").read_text())

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters())  # lone surrogates too
    | st.text("0123456789eE+-._ ")
    | st.sampled_from(["redis", "rocks", "static", "null", "true", "[", "(?P<", "a{99999999999}", "[[a]"])
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


PLACES = places(REFERENCE)
OBJECTS = [(), ("volatile_db",), ("persistent_db",), ("update_source",), ("service",), ("models", 0)]


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """The reference configuration with one to four keys dropped, replaced or added."""
    document = copy.deepcopy(REFERENCE)
    for _ in range(draw(st.integers(1, 4))):
        change = draw(st.sampled_from(["drop", "replace", "add", "repeat"]))
        path = draw(st.sampled_from(PLACES))
        try:
            parent = at(document, path[:-1])
            if change == "drop":
                del parent[path[-1]]
            elif change == "replace":
                parent[path[-1]] = draw(json_values)
            elif change == "add":
                at(document, draw(st.sampled_from(OBJECTS)))[draw(st.text(max_size=12))] = draw(json_values)
            elif isinstance(parent, list):
                parent.append(copy.deepcopy(parent[path[-1]]))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier change has removed the place
    return document


def outcome(source: Any) -> Configuration | ConfigError:
    try:
        return load_configuration(source)
    except ConfigError as error:
        return error


def check(source: Any) -> None:
    found = outcome(source)
    if isinstance(found, ConfigError):
        assert found.problems
        for problem in found.problems:
            place, separator, text = problem.partition(": ")
            assert place, problem
            assert separator, problem
            assert text, problem
            assert "\n" not in problem
        str(found).encode()  # it can be printed
    else:
        for model in found.models:
            assert len(model.tables) == len(model.sparse_files)
            assert all(0 < table.max_keys < 2**31 and table.dim > 0 for table in model.tables)
        assert load_configuration(found.model_dump()).model_dump() == found.model_dump()


@settings(max_examples=40)
@given(json_values)
def test_any_document_is_loaded_or_reported(document: Any) -> None:
    if not isinstance(document, str):
        check(document)


@settings(max_examples=40)
@given(mutated())
def test_a_mutated_file_is_loaded_or_reported_as_the_document_is(
    tmp_path_factory: pytest.TempPathFactory, document: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(document))
    check(path)
    check(document)
    from_file, from_document = outcome(path), outcome(document)
    if isinstance(from_file, ConfigError) and isinstance(from_document, ConfigError):
        assert from_file.problems == from_document.problems
    else:
        assert from_file == from_document, "what a file holds means the same as a mapping"


@given(st.integers(0, 1 << 16), st.binary(max_size=6), st.integers(0, 6))
def test_a_file_with_changed_bytes_is_loaded_or_reported(
    tmp_path_factory: pytest.TempPathFactory, start: int, inserted: bytes, removed: int
) -> None:
    content = json.dumps(REFERENCE).encode()
    start %= len(content)
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content[:start] + inserted + content[start + removed :])
    check(path)


@st.composite
def mutated_structs(draw: st.DrawFn) -> ParameterServerConfig:
    """A valid ParameterServerConfig of two models with one to four fields replaced anywhere in it."""
    models = [
        InferenceParams(name, 64, 0.9, "", ["a", "b"], 0, True, 0.5, True, deployed_devices=[0, 1]) for name in ("dcn", "wdl")
    ]
    config = ParameterServerConfig(
        {"dcn": ["u", "i"], "wdl": ["u", "i"]},
        {"dcn": [16, 32], "wdl": [1, 2]},
        {"dcn": [1, 50], "wdl": [3, 4]},
        models,
        VolatileDatabaseParams(),
        PersistentDatabaseParams(),
        UpdateSourceParams(),
    )
    structs = [*models, config, config.volatile_db, config.persistent_db, config.update_source]
    for _ in range(draw(st.integers(1, 4))):
        struct = draw(st.sampled_from(structs))
        name = draw(st.sampled_from(sorted(vars(struct))))
        setattr(struct, name, draw(json_values | st.dictionaries(st.sampled_from(["dcn", "wdl"]) | scalars, json_values)))
    return config


@settings(max_examples=40)
@given(mutated_structs())
def test_mutated_structs_are_loaded_or_reported(config: ParameterServerConfig) -> None:
    check(config)


@given(st.text(st.characters()))
def test_any_path_is_loaded_or_reported(path: str) -> None:
    check(f"/nonexistent/{path}")
