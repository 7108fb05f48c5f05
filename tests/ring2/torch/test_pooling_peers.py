"""Bags are pooled as torch's `embedding_bag` and FBGEMM pool them, and the oracle of the tests agrees with both."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn.functional import embedding_bag

import hps
from hps.testing.pooling_oracle import pooled
from tests.ring1.cache.test_pooling_properties import DIMS, ROWS, VECTORS, asked, bags, expected, open_server
from tests.ring1.cache.test_pooling_properties import files as files  # a fixture


@pytest.fixture(scope="module")
def server(files: list[Path]) -> Iterator[hps.HPS]:
    with open_server(files, gpucache=False) as server:
        yield server


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=bags(absent=False))
def test_bags_are_those_of_torch(server: hps.HPS, case: dict[str, Any]) -> None:
    """As far as torch has them: no sqrtn, and weights with sum alone. Each answer is within one bound of the oracle."""
    if case["combiner"] == "sqrtn" or case["combiner"] == "mean":
        case |= {"combiner": "mean", "weights": None}
    case |= {"hotness": None}
    if not case["include_last_offset"] and case["bounds"].size == 1:
        return
    count = case["bounds"].size - 1
    torchs = embedding_bag(
        torch.from_numpy(case["keys"]),
        torch.from_numpy(VECTORS["wide"].copy()),  # which torch clips in place
        torch.from_numpy(case["bounds"] if case["include_last_offset"] else case["bounds"][:-1]),
        max_norm=case["max_norm"],
        mode=case["combiner"],
        per_sample_weights=None if case["weights"] is None else torch.from_numpy(case["weights"]),
        include_last_offset=case["include_last_offset"],
        padding_idx=case["padding_key"],
    ).numpy()
    ours = server.lookup_pooled({"wide": asked(case)}, "m")["wide"]
    assert ours.shape == torchs.shape == (count, DIMS["wide"])
    oracle = expected("wide", case)
    oracle.check(torchs)
    np.testing.assert_array_less(np.abs(ours.astype(np.float64) - torchs), 2 * oracle.bounds + 1e-30)


def test_bags_are_those_of_fbgemm(server: hps.HPS) -> None:
    """All tables of equal width in one call of FBGEMM's operator for the CPU, with weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its build for the CPU lacks
        pytest.importorskip("fbgemm_gpu")
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
    rng = np.random.default_rng(1)
    lengths = rng.choice([0, 1, 2, 30], (len(DIMS), 50))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    keys, weights = rng.integers(0, ROWS, bounds[-1]), rng.standard_normal(bounds[-1], np.float32)
    flat = [VECTORS[table].reshape(-1) for table in DIMS]
    for mode, weighted in ((PoolingMode.SUM, True), (PoolingMode.SUM, False), (PoolingMode.MEAN, False)):
        operator = DenseTableBatchedEmbeddingBagsCodegen(
            [(ROWS, dim) for dim in DIMS.values()], pooling_mode=mode, use_cpu=True
        )
        with torch.no_grad():
            operator.weights.copy_(torch.from_numpy(np.concatenate(flat)))
            given = [torch.from_numpy(keys), torch.from_numpy(bounds), *([torch.from_numpy(weights)] if weighted else [])]
            theirs = np.split(operator(*given).numpy(), np.cumsum(list(DIMS.values()))[:-1], axis=1)
        for index, (table, vectors) in enumerate(zip(DIMS, theirs, strict=True)):
            own = bounds[index * 50 : (index + 1) * 50 + 1]
            part = slice(own[0], own[-1])
            bags, own_weights = own - own[0], weights[part] if weighted else None
            combiner = "sum" if mode == PoolingMode.SUM else "mean"
            ours = server.lookup_pooled({table: hps.Bags(keys[part], bags, own_weights, combiner=combiner)}, "m")[table]
            oracle = pooled(VECTORS[table][keys[part]], keys[part], bags, own_weights, combiner)
            oracle.check(ours)
            oracle.check(vectors)
