"""The model for Triton's Python backend with tensors on a CUDA device: keys and vectors stay there."""

import importlib
import json
import sys

import numpy as np
import pytest

import hps
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from tests.fakes import triton_backend as triton
from tests.gpu.cupy_if_installed import cupy
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.gpu
DIMS, ROWS = {"item": 16, "user": 32}, 2000


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton.MODULE)
    monkeypatch.delitem(sys.modules, "hps.triton", raising=False)
    for index, (name, dim) in enumerate(DIMS.items()):
        hps.write_sparse_model(tmp_path / name, sample_chunks(ROWS, dim, index))
    model = model_of("m", [tmp_path / name for name in DIMS], DIMS, gpucacheper=0.5, hit_rate_threshold=1.1)
    (tmp_path / "ps.json").write_text(json.dumps(document_of(model, device="cuda")))
    models = []

    def load(**parameters):
        given = {"ps": str(tmp_path / "ps.json"), **parameters}
        config = {"name": "m", "parameters": {key: {"string_value": value} for key, value in given.items()}}
        arguments = {"model_config": json.dumps(config), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
        models.append(importlib.import_module("hps.triton").TritonPythonModel())
        models[-1].initialize(arguments)
        return models[-1]

    yield load
    for one in models:
        one.finalize()
    sys.modules.pop("hps.triton", None)


def vectors_of(name, keys):
    index = [*DIMS].index(name)
    return sample_vectors(np.asarray(keys).reshape(-1), DIMS[name], index).reshape(*np.shape(keys), -1)


def outputs(model, **inputs):
    [response] = model.execute([triton.InferenceRequest(**inputs)])
    assert response.error is None, response.error.message
    return response.outputs


def test_vectors_are_on_the_device_where_the_keys_are(load):
    model = load()
    for turn in range(3):
        keys = np.arange(12).reshape(4, 3) + turn
        got = outputs(model, user=cupy.asarray(keys), item=cupy.asarray(keys + 1))
        assert all(isinstance(one, cupy.ndarray) for one in got.values())
        np.testing.assert_array_equal(got["user"].get(), vectors_of("user", keys), strict=True)
        np.testing.assert_array_equal(got["item"].get(), vectors_of("item", keys + 1), strict=True)
        flat, counts = np.arange(10) + turn, np.array([[6, 4]], np.int32)
        [vectors] = outputs(model, KEYS=cupy.asarray(flat[None]), NUMKEYS=counts).values()
        assert isinstance(vectors, cupy.ndarray)
        expected = np.concatenate([vectors_of("item", flat[:6]).ravel(), vectors_of("user", flat[6:]).ravel()])
        np.testing.assert_array_equal(vectors.get(), expected[None], strict=True)


@pytest.mark.parametrize("memory", ["cpu", "gpu"])
def test_vectors_are_where_output_memory_says_wherever_the_keys_are(load, memory):
    model = load(output_memory=memory)
    keys = np.arange(5)
    for given in (keys, cupy.asarray(keys)):
        got = outputs(model, item=given)["item"]
        assert isinstance(got, cupy.ndarray if memory == "gpu" else np.ndarray)
        np.testing.assert_array_equal(got if memory == "cpu" else got.get(), vectors_of("item", keys), strict=True)


def test_keys_on_the_host_are_answered_there(load):
    got = outputs(load(), item=np.arange(5))["item"]
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, vectors_of("item", np.arange(5)), strict=True)


def test_numbers_of_keys_on_the_device_are_refused(load):
    counts = cupy.asarray(np.array([3, 0], np.int32))
    [response] = load().execute([triton.InferenceRequest(KEYS=cupy.asarray(np.arange(3)), NUMKEYS=counts)])
    assert "reading NUMKEYS: got int32 on CUDA device 0, expected integers in host memory" in response.error.message
