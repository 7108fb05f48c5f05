"""A real table end to end: the token embeddings of a sentence-transformer, bit for bit by every way there is."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

import hps
from examples.export_token_embeddings import token_embeddings
from tests import ROOT
from tests.servers.running_service import running_service


@pytest.fixture(scope="module")
def table():
    keys, vectors = token_embeddings()
    assert vectors.shape == (30522, 384)
    assert np.isfinite(vectors).all()
    assert len(np.unique(vectors, axis=0)) > 30_000
    return keys, vectors


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, table):
    directory = tmp_path_factory.mktemp("minilm") / "token.model"
    command = [sys.executable, str(ROOT / "examples/export_token_embeddings.py"), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=120, cwd=ROOT, env=environment)
    keys, vectors = table
    assert (directory / "key").read_bytes() == keys.tobytes()
    assert (directory / "emb_vector").read_bytes() == vectors.tobytes()
    return directory


def configuration(directory, **changes):
    config = json.loads((ROOT / "configs/minilm.json").read_text())
    config["models"][0]["sparse_files"] = [str(directory)]
    config["models"][0]["gpucacheper"] = 0.5
    config["persistent_db"]["path"] = str(directory.parent / "rocksdb")
    config["device"] = "cpu"
    config.update(changes)
    return config


def shuffled(keys):
    return np.random.default_rng(1).permutation(keys)


def batches(keys, size=4096):
    return [keys[start : start + size] for start in range(0, keys.size, size)]


@pytest.mark.parametrize("without", [None, "volatile_db", "persistent_db"])
@pytest.mark.parametrize("gpucache", [True, False])
def test_every_vector_comes_back_in_process_from_either_database(model_directory, table, without, gpucache):
    config = configuration(model_directory, **({without: {"type": "disabled"}} if without else {}))
    config["models"][0]["gpucache"] = gpucache
    _, vectors = table
    with hps.HPS(config) as server:
        for keys in batches(shuffled(table[0])) * 2:  # the second round meets a cache in use
            out, found = server.lookup(keys, "minilm", "token", return_found=True)
            assert found.all()
            assert out.tobytes() == vectors[keys].tobytes()


@pytest.fixture(scope="module")
def service(model_directory):
    with running_service(configuration(model_directory)) as service:
        yield service


def test_vectors_come_back_over_json(service, table):
    _, vectors = table
    for keys in batches(shuffled(table[0]))[:2]:
        answer = service.client.post("/v1/models/minilm/lookup", json={"tables": {"token": keys.tolist()}, "found": True})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert np.array(body["tables"]["token"], np.float32).tobytes() == vectors[keys].tobytes()
        assert all(body["found"]["token"])


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize("binary", [True, False])
def test_every_vector_comes_back_through_tritonclient(service, table, by_table, binary):
    _, vectors = table
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("minilm")
        for keys in batches(shuffled(table[0]))[: None if binary else 2]:
            given = {"token": keys} if by_table else {"KEYS": keys[None], "NUMKEYS": np.array([[keys.size]], np.int32)}
            inputs = [triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in given.items()]
            for tensor, array in zip(inputs, given.values(), strict=True):
                tensor.set_data_from_numpy(array, binary_data=binary)
            output = "token" if by_table else "OUTPUT0"
            outputs = [triton.InferRequestedOutput(output, binary_data=binary)]
            answer = client.infer("minilm", inputs, outputs=outputs).as_numpy(output)
            assert answer.shape == ((keys.size, 384) if by_table else (keys.size * 384,))
            assert answer.astype(np.float32).tobytes() == vectors[keys].tobytes()
