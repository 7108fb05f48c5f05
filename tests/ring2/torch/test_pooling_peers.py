"""Bags are pooled as torch's `embedding_bag` and FBGEMM pool them, and the oracle of the tests agrees with both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn.functional import embedding_bag

import hps
from tests.ring1.cache.test_pooling_properties import DIMS, VECTORS, asked, bags, expected, open_server
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
