"""The model for Triton's Python backend, with a small fake of it; `ring2/triton` has Triton itself."""

import gc
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
from tests.fakes import triton_backend as triton
from tests.fakes.triton_backend import InferenceRequest as Request
from tests.fakes.triton_backend import TritonError
from tests.servers.running_service import document_of, model_of

DIMS = {"item": 7, "user": 3}
ROWS = 100


def vectors_of(table: str, keys: np.ndarray, content: int = 1, dim: int = 0) -> np.ndarray:
    """The vectors of keys below ROWS; element c of key k is a number of both, of the table and of the content."""
    columns = np.arange(dim or DIMS[table], dtype=np.float32)
    return (np.asarray(keys)[..., None] * 100 + columns + 0.25 * [*DIMS].index(table) + 10_000 * content).astype(np.float32)


def write(place: Path, content: int, **dims: int) -> None:
    for name in DIMS:
        rows = vectors_of(name, np.arange(ROWS), content, dims.get(name, 0))
        hps.write_sparse_model(place / f"{name}.model", (np.arange(ROWS), rows), overwrite=True)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton.MODULE)
    monkeypatch.delitem(sys.modules, "hps.triton", raising=False)
    yield importlib.import_module("hps.triton")
    del sys.modules["hps.triton"]


@pytest.fixture
def config(tmp_path):
    """Makes Triton's configuration of a model whose `ps.json` has that entry."""

    def make(parameters=None, name="ranker", more=None, persistent=None, **entry):
        write(tmp_path / "1", 1)
        files = [str(tmp_path / "1" / f"{table}.model") for table in DIMS]
        model = model_of("ranker", files, DIMS, **{"maxnum_catfeature_query_per_table_per_sample": [4, 4], **entry})
        document = document_of(model, persistent=persistent, **(more or {}))
        (tmp_path / "ps.json").write_text(json.dumps(document))
        given = {"ps": str(tmp_path / "ps.json"), "FORCE_CPU_ONLY_INPUT_TENSORS": "no", **(parameters or {})}
        values = {key: {"string_value": value} for key, value in given.items() if value is not None}
        return {"name": name, "max_batch_size": 0, "input": [], "output": [], "parameters": values}

    return make


@pytest.fixture
def loaded(module):
    """Loads models, and unloads those that are left."""
    models = []

    def load(config, kind="CPU", device=0):
        model = module.TritonPythonModel()
        arguments = {"model_config": json.dumps(config), "model_instance_kind": kind, "model_instance_device_id": str(device)}
        model.initialize(arguments)
        models.append(model)
        return model

    yield load
    for model in models:
        model.finalize()


def outputs(model, **inputs):
    [response] = model.execute([Request(**inputs)])
    assert response.error is None, response.error.message
    return response.outputs


SHAPES = [((), "int64"), ((5,), "int64"), ((5, 1), "int32"), ((2, 3), "int32"), ((2, 0), "int64"), ((2, 3, 4), "int64")]


def test_each_table_is_answered_in_the_shape_of_its_keys(loaded, config, capfd):
    model = loaded(config())
    for shape, dtype in SHAPES:
        keys = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
        got = outputs(model, user=keys, item=keys)
        assert [*got] == ["user", "item"]
        for name, vectors in got.items():
            np.testing.assert_array_equal(vectors, vectors_of(name, keys), strict=True)
    del got, vectors
    gc.collect()
    assert "Error" not in capfd.readouterr().err, "NumPy says so of a capsule that Triton has renamed"


def test_concatenated_keys_are_answered_with_concatenated_vectors(loaded, config):
    model = loaded(config())
    for counts, batch in (([2, 3], ()), ([2, 3], (1,)), ([0, 5], ()), ([5, 0], (1,)), ([0, 0], ())):
        keys = np.arange(sum(counts))
        got = outputs(model, KEYS=keys.reshape(*batch, -1), NUMKEYS=np.array(counts, np.int32).reshape(*batch, -1))
        expected = [vectors_of(name, one).reshape(-1) for name, one in zip(DIMS, np.split(keys, counts[:1]), strict=True)]
        np.testing.assert_array_equal(got["OUTPUT0"], np.concatenate(expected).reshape(*batch, -1), strict=True)
    model = loaded(config(embedding_table_names=["KEYS", "user"]))  # a table may be called so, too
    np.testing.assert_array_equal(outputs(model, KEYS=np.array([4]))["KEYS"], vectors_of("item", [4]))


NUMKEYS = [  # and what is said of them beside three KEYS
    (np.array([1, 1], np.int32), "its sum is 2, expected 3"),
    (np.array([3], np.int32), "got 1 numbers, expected 2"),
    (np.array([4, -1], np.int32), "got -1, expected numbers of at least 0"),
    (np.array([1.0, 2.0]), "reading NUMKEYS: got float64"),
    (np.array([2**31 - 1, 2**31 - 1], np.int32), "expected 3, the number of KEYS"),
]
WRONG = [
    *(({"KEYS": np.arange(3), "NUMKEYS": counts}, text) for counts, text in NUMKEYS),
    ({"KEYS": np.arange(3)}, "got KEYS, expected KEYS and NUMKEYS alone"),
    ({"KEYS": np.arange(4001), "NUMKEYS": np.array([4001, 0], np.int32)}, "got 4001 keys, expected at most 4000"),
    ({"item": np.arange(4001)}, "got 4001 keys, expected at most 4000"),
    ({"item": np.arange(3.0)}, "float64"),
    ({}, "got none, expected keys of tables: item, user"),
]


def test_a_wrong_request_fails_alone(loaded, config):
    good = Request(item=np.array([1]))
    requests = [one for inputs, _ in WRONG for one in (Request(**inputs), good)]
    responses = loaded(config()).execute(requests)
    for wrong, (_, text) in zip(responses[::2], WRONG, strict=True):
        assert text in wrong.error.message
        assert wrong.error.code == TritonError.INVALID_ARG
    for response in responses[1::2]:
        np.testing.assert_array_equal(response.outputs["item"], vectors_of("item", [1]))


def test_errors_have_the_codes_of_their_kinds(loaded, config, caplog):
    class Broken(Request):
        def inputs(self):
            raise RuntimeError("secret")

    model = loaded(config())

    def code(request):
        [response] = model.execute([request])
        assert "secret" not in response.error.message
        return response.error.code

    good = Request(item=np.array([1]))
    assert code(Request(nothing=np.array([1]))) == TritonError.NOT_FOUND
    assert code(Broken()) == TritonError.INTERNAL
    assert "secret" in caplog.text
    model._server.undeploy("ranker")
    assert code(good) == TritonError.NOT_FOUND
    model._server.close()
    assert code(good) == TritonError.UNAVAILABLE


def test_a_version_of_other_widths_that_takes_over_meanwhile_answers_with_its_own(loaded, config, tmp_path, monkeypatch):
    model = loaded(config())
    write(tmp_path / "2", 2, item=2)
    files = [str(tmp_path / "2" / f"{name}.model") for name in DIMS]
    more = {"maxnum_catfeature_query_per_table_per_sample": [4, 4], "version": "2"}
    newer = hps.load_configuration(document_of(model_of("ranker", files, DIMS | {"item": 2}, **more)))
    lookup_tables = model._server.lookup_tables

    def after_a_deployment(*arguments, **options):
        monkeypatch.undo()
        model._server.deploy(newer.models[0])
        return lookup_tables(*arguments, **options)

    monkeypatch.setattr(model._server, "lookup_tables", after_a_deployment)
    got = outputs(model, item=np.array([5, 6]))["item"]
    np.testing.assert_array_equal(got, vectors_of("item", [5, 6], 2, 2), strict=True)


def test_combiners_answer_each_row_with_one_vector(loaded, config):
    model = loaded(config({"combiner": "sum", "user.combiner": "mean", "padding_key": "-1", "item.max_norm": "1000000"}))
    keys = np.array([[1, 2, -1], [3, -1, -1]])
    got = outputs(model, item=keys, user=keys)
    np.testing.assert_array_equal(got["item"], [vectors_of("item", [1, 2]).sum(0), vectors_of("item", 3)], strict=True)
    np.testing.assert_array_equal(got["user"], [vectors_of("user", [1, 2]).mean(0), vectors_of("user", 3)], strict=True)
    [response] = model.execute([Request(item=np.array([1, 2]))])
    assert "expected (bags, hotness)" in response.error.message


def test_a_model_is_unloaded_and_loaded_again(loaded, config, tmp_path):
    for content in (1, 2, 3):
        model = loaded(config(persistent=tmp_path / "rocksdb"))
        np.testing.assert_array_equal(outputs(model, item=np.array([9]))["item"], vectors_of("item", [9]))
        model._server.insert([9], vectors_of("item", [9], content), "ranker", "item")
        np.testing.assert_array_equal(outputs(model, item=np.array([9]))["item"], vectors_of("item", [9], content))
        model._server.insert([9], vectors_of("item", [9]), "ranker", "item")
        model.finalize()  # RocksDB opens again


def test_a_model_that_cannot_be_deployed_holds_no_database(loaded, config, tmp_path):
    wrong = config(persistent=tmp_path / "rocksdb")
    (tmp_path / "1" / "item.model" / "key").unlink()
    with pytest.raises(hps.ModelFileError, match=r"item\.model"):
        loaded(wrong)
    loaded(config(persistent=tmp_path / "rocksdb"))


def test_new_files_are_deployed_where_the_service_would_poll(loaded, config, tmp_path, caplog):
    settings = {"service": {"model_control_mode": "poll", "repository_poll_s": 0.02}}
    model = loaded(config(more=settings, version_path=str(tmp_path), sparse_files=[f"{name}.model" for name in DIMS]))
    for content in (2, 3):
        (tmp_path / str(content)).mkdir()
        write(tmp_path / str(content), content)
        expected = vectors_of("item", [1], content)
        wait_until(lambda e=expected: np.array_equal(outputs(model, item=np.array([1]))["item"], e), "the version serves")
    (tmp_path / "4" / "item.model").mkdir(parents=True)
    wait_until(lambda: "checking the files of model ranker" in caplog.text, "the error is logged")
    np.testing.assert_array_equal(outputs(model, item=np.array([1]))["item"], vectors_of("item", [1], 3))


def test_inputs_and_outputs_follow_from_the_tables_unless_config_pbtxt_says_others(module, config):
    def completed(given):
        return module.TritonPythonModel.auto_complete_config(triton.ModelConfig(dict(given))).as_dict()

    done = completed(config())
    assert [one["name"] for one in done["input"]] == ["KEYS", "NUMKEYS", "item", "user"]
    assert all(one["optional"] and one["dims"] == [-1] for one in done["input"])
    assert {one["name"]: one["dims"] for one in done["output"]} == {"OUTPUT0": [-1], "item": [-1, 7], "user": [-1, 3]}
    assert done["max_batch_size"] == 1000
    assert "dynamic_batching" in done
    pooled = completed(config({"combiner": "sum"}))
    assert {one["name"]: one["dims"] for one in pooled["output"]} == {"OUTPUT0": [-1], "item": [7], "user": [3]}
    given = {**config(), "input": [{"name": "KEYS"}], "max_batch_size": 8}
    assert completed(given) == given
    assert completed({**config(), "max_batch_size": 8})["max_batch_size"] == 8


PARAMETERS = [
    ({"ps": None}, "got no 'ps', expected the path of a ps.json"),
    ({"ps": "/nowhere/ps.json"}, "/nowhere/ps.json"),
    ({"model": "other"}, "model 'other': it is not configured; configured are: ranker"),
    ({"output_memory": "tape"}, "got output_memory 'tape', expected 'cpu' or 'gpu'"),
    ({"gpucacherper": "0.5"}, "gpucacheper"),
    ({"item.combiner": "sum"}, r"got no combiner for \['user'\]"),
    ({"thing.combiner": "sum"}, "got 'thing.combiner', expected the name of a table"),
    ({"combiner": "sum", "padding_key": "none"}, "none"),
]


def test_parameters_change_the_entry_and_wrong_ones_are_refused_before_the_model_is_loaded(module, config, loaded):
    for parameters, text in PARAMETERS:
        with pytest.raises(hps.HPSError, match=text):
            module.TritonPythonModel.auto_complete_config(triton.ModelConfig(config(parameters)))
        with pytest.raises(hps.HPSError, match=text):
            loaded(config(parameters))
    model = loaded(config({"gpucacheper": "0.5", "model": "ranker", "refresh_interval": "3"}, name="called_otherwise"))
    entry = model._server.model("ranker").config
    assert (entry.gpucacheper, entry.refresh_interval) == (0.5, 3.0)


def test_an_instance_on_a_gpu_deploys_to_that_gpu_alone(loaded, config):
    two = config(deployed_device_list=[0, 3])
    model = loaded(two, "GPU", 3)
    assert [*model._server.model("ranker").sessions] == [3]
    np.testing.assert_array_equal(outputs(model, item=np.array([1]))["item"], vectors_of("item", [1]))
    model.finalize()
    with pytest.raises(hps.ConfigError, match=r"got GPU 1, expected one of deployed_device_list \[0, 3\]"):
        loaded(two, "GPU", 1)
