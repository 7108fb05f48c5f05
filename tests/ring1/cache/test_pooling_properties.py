"""Pooled lookups against the oracle, torch's own `embedding_bag` and FBGEMM's, over random bags."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag

import hps
from hps.testing.pooling_oracle import Expected, pooled
from tests.servers.running_service import document_of, model_of

ROWS = 300
DIMS = {"narrow": 1, "odd": 7, "wide": 64}
DEFAULT = 0.625
WEIGHTS = [-1.5, -0.5, 0.0, 0.125, 1.0, 2.0]  # whose sums are exact: so a divisor is 0 for everyone, or for nobody
ABSENT = [-1, ROWS, 1 << 40, -(1 << 63)]


def rows_of(table: str) -> np.ndarray:
    return np.random.default_rng(DIMS[table]).standard_normal((ROWS, DIMS[table]), np.float32)


VECTORS = {table: rows_of(table) for table in DIMS}


def vectors_of(table: str, keys: np.ndarray) -> np.ndarray:
    known = (keys >= 0) & (keys < ROWS)
    return np.where(known[:, None], VECTORS[table][np.where(known, keys, 0)], np.float32(DEFAULT))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    places = []
    for table, vectors in VECTORS.items():
        places.append(tmp_path_factory.mktemp("models") / table)
        hps.write_sparse_model(places[-1], (np.arange(ROWS), vectors))
    return places


@pytest.fixture(scope="module", params=["direct", "rocks_db", "cached", "all cached", "no room"])
def server(request: pytest.FixtureRequest, files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[hps.HPS]:
    rows = {"cached": 0.3, "all cached": 1.0, "no room": 0.0}
    cache = {"gpucacheper": rows[request.param], "hit_rate_threshold": 1.1} if request.param in rows else {"gpucache": False}
    defaults = [DEFAULT] * len(DIMS)
    model = model_of("m", files, DIMS, **{"max_batch_size": 100_000, "default_value_for_each_table": defaults, **cache})
    more: dict[str, Any] = {}
    if request.param == "rocks_db":
        more = {"persistent": tmp_path_factory.mktemp("rocks"), "volatile_db": {"type": "disabled"}}
    with hps.HPS(document_of(model, **more)) as server:
        yield server


@st.composite
def bags(draw: st.DrawFn, *, absent: bool = True) -> dict[str, Any]:
    """Keys, bounds and the options of `Bags`, as host arrays."""
    few = st.integers(0, 5) | (st.sampled_from(ABSENT) if absent else st.integers(0, 5))
    hotness = draw(st.none() | st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, 4) | st.integers(0, 90) if hotness is None else st.just(hotness), max_size=40))
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    n = int(bounds[-1])
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    keys = rng.integers(0, ROWS, n)
    some = rng.random(n) < 0.2
    keys[some] = rng.choice(np.array(draw(st.lists(few, min_size=1, max_size=4)), np.int64), int(some.sum()))
    return {
        "keys": keys,
        "bounds": bounds,
        "hotness": hotness,
        "weights": rng.choice(np.array(WEIGHTS, np.float32), n) if draw(st.booleans()) else None,
        "combiner": draw(st.sampled_from(["sum", "mean", "sqrtn"])),
        "max_norm": draw(st.none() | st.sampled_from([0.5, 2.0, 8.0])),
        "padding_key": draw(st.none() | few),
        "include_last_offset": draw(st.booleans()),
        "offsets_dtype": draw(st.sampled_from([np.int64, np.int32])),
    }


def asked(case: dict[str, Any]) -> hps.Bags:
    options = {name: case[name] for name in ("combiner", "max_norm", "padding_key")}
    count = case["bounds"].size - 1
    if case["hotness"] is not None:
        weights = None if case["weights"] is None else case["weights"].reshape(count, -1 if count * case["hotness"] else 0)
        return hps.Bags(case["keys"].reshape(count, case["hotness"]), weights=weights, **options)
    last = case["include_last_offset"]
    offsets = case["bounds"].astype(case["offsets_dtype"])
    return hps.Bags(case["keys"], offsets if last else offsets[:-1], case["weights"], include_last_offset=last, **options)


def expected(table: str, case: dict[str, Any]) -> Expected:
    options = [case[name] for name in ("weights", "combiner", "max_norm", "padding_key")]
    return pooled(vectors_of(table, case["keys"]), case["keys"], case["bounds"], *options)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.fixed_dictionaries({}, optional={table: bags() for table in DIMS}))
def test_bags_are_what_the_oracle_says(server: hps.HPS, cases: dict[str, dict[str, Any]]) -> None:
    got = server.lookup_pooled({table: asked(case) for table, case in cases.items()}, "m")
    assert list(got) == list(cases)
    for table, case in cases.items():
        expected(table, case).check(got[table])


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
