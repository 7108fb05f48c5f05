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


@pytest.mark.parametrize(("mode", "weighted"), [("SUM", True), ("SUM", False), ("MEAN", False)])
def test_bags_are_those_of_fbgemm(server: hps.HPS, mode: str, weighted: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its build for the CPU lacks
        pytest.importorskip("fbgemm_gpu")
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
    rng = np.random.default_rng(1)
    bounds = np.cumsum([0, *rng.choice([0, 1, 2, 30], 50)])
    keys = rng.integers(0, ROWS, bounds[-1])
    weights = rng.standard_normal(bounds[-1], np.float32) if weighted else None
    operator = DenseTableBatchedEmbeddingBagsCodegen([(ROWS, DIMS["wide"])], pooling_mode=PoolingMode[mode], use_cpu=True)
    with torch.no_grad():
        operator.weights.copy_(torch.from_numpy(VECTORS["wide"].reshape(-1)))
        given = [torch.from_numpy(one) for one in (keys, bounds, weights) if one is not None]
        theirs = operator(*given).numpy()
    ours = server.lookup_pooled({"wide": hps.Bags(keys, bounds, weights, combiner=mode.lower())}, "m")["wide"]
    oracle = pooled(VECTORS["wide"][keys], keys, bounds, weights, mode.lower())
    oracle.check(theirs)
    oracle.check(ours)
