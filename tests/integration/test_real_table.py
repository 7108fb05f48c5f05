"""A real table end to end: the token embeddings of a sentence-transformer, bit for bit by every way there is."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

import hps
from examples.export_token_embeddings import token_embeddings

ROOT = Path(__file__).parents[2]
START_S = 120


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
def endpoint(model_directory, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = tmp_path_factory.mktemp("config") / "ps.json"
    path.write_text(json.dumps(configuration(model_directory)))
    command = [sys.executable, "-m", "hps", "serve", str(path), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path.parent)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, server.stdout.read()
            assert time.monotonic() < deadline, "not ready in time"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        output, _ = server.communicate(timeout=30)
    assert server.returncode == 0, output


def test_every_vector_comes_back_over_json(endpoint, table):
    _, vectors = table
    with httpx.Client(base_url=f"http://{endpoint}", timeout=60) as client:
        for keys in batches(shuffled(table[0])):
            answer = client.post("/v1/models/minilm/lookup", json={"tables": {"token": keys.tolist()}, "found": True})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            got = np.array(body["tables"]["token"], np.float32)
            assert got.tobytes() == vectors[keys].tobytes()
            assert all(body["found"]["token"])


def test_every_vector_comes_back_over_binary_v2(endpoint, table):
    _, vectors = table
    with httpx.Client(base_url=f"http://{endpoint}", timeout=60) as client:
        for keys in batches(shuffled(table[0])):
            header = {
                "inputs": [
                    {
                        "name": "token",
                        "datatype": "INT64",
                        "shape": [keys.size],
                        "parameters": {"binary_data_size": keys.nbytes},
                    }
                ],
                "parameters": {"binary_data_output": True},
            }
            head = json.dumps(header).encode()
            answer = client.post(
                "/v2/models/minilm/infer",
                content=head + keys.tobytes(),
                headers={"Inference-Header-Content-Length": str(len(head))},
            )
            assert answer.status_code == 200, answer.text
            length = int(answer.headers["Inference-Header-Content-Length"])
            described = json.loads(answer.content[:length])["outputs"][0]
            assert described["shape"] == [keys.size, 384]
            assert answer.content[length:] == vectors[keys].tobytes()


@pytest.mark.parametrize("binary", [True, False])
def test_every_vector_comes_back_through_tritonclient(endpoint, table, binary):
    _, vectors = table
    client = triton.InferenceServerClient(endpoint)
    try:
        assert client.is_server_ready()
        assert client.is_model_ready("minilm")
        for keys in batches(shuffled(table[0]))[: None if binary else 2]:
            inputs = [triton.InferInput("KEYS", [1, keys.size], "INT64"), triton.InferInput("NUMKEYS", [1, 1], "INT32")]
            inputs[0].set_data_from_numpy(keys[None], binary_data=binary)
            inputs[1].set_data_from_numpy(np.array([[keys.size]], np.int32), binary_data=binary)
            outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
            answer = client.infer("minilm", inputs, outputs=outputs).as_numpy("OUTPUT0")
            assert answer.shape == (keys.size * 384,)
            assert answer.astype(np.float32).tobytes() == vectors[keys].tobytes()
    finally:
        client.close()
