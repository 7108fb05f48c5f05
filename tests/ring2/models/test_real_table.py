"""A real table end to end: the token embeddings of a sentence-transformer, as the example exports and serves them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import hps
from examples.export_token_embeddings import token_embeddings
from tests import ROOT


def test_every_vector_comes_back_from_the_files_that_the_example_exports(tmp_path: Path) -> None:
    keys, vectors = token_embeddings()
    assert vectors.shape == (30522, 384)
    assert np.isfinite(vectors).all()
    assert len(np.unique(vectors, axis=0)) > 30_000
    directory = tmp_path / "token.model"
    command = [sys.executable, str(ROOT / "examples/export_token_embeddings.py"), str(directory)]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (directory / "key").read_bytes() == keys.tobytes()
    assert (directory / "emb_vector").read_bytes() == vectors.tobytes()
    config = json.loads((ROOT / "configs/minilm.json").read_text()) | {"device": "cpu"}
    config["models"][0] |= {"sparse_files": [str(directory)], "gpucacheper": 0.5}
    config["persistent_db"]["path"] = str(tmp_path / "rocksdb")
    with hps.HPS(config) as server:
        for asked in np.array_split(np.random.default_rng(1).permutation(keys), 8) * 2:  # later ones meet a cache in use
            out, found = server.lookup(asked, "minilm", "token", return_found=True)
            assert found.all()
            assert out.tobytes() == vectors[asked].tobytes()
