"""Pooled lookups against the oracle, over random bags. `tests/ring2/torch/test_pooling_peers.py` holds the oracle to torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def open_server(files: list[Path], persistent: Path | None = None, **cache: Any) -> hps.HPS:
    defaults = [DEFAULT] * len(DIMS)
    settings = {"max_batch_size": 100_000, "default_value_for_each_table": defaults, "hit_rate_threshold": 1.1, **cache}
    tiers: dict[str, Any] = {"persistent": persistent, "volatile_db": {"type": "disabled"}} if persistent else {}
    return hps.HPS(document_of(model_of("m", files, DIMS, **settings), **tiers))


@pytest.fixture(scope="module", params=["direct", "rocks_db", "cached", "all cached", "no room"])
def server(request: pytest.FixtureRequest, files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[hps.HPS]:
    rows = {"cached": 0.3, "all cached": 1.0, "no room": 0.0}
    cache = {"gpucacheper": rows[request.param]} if request.param in rows else {"gpucache": False}
    with open_server(files, tmp_path_factory.mktemp("rocks") if request.param == "rocks_db" else None, **cache) as server:
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
    combiner = draw(st.sampled_from(["sum", "mean", "sqrtn", "max"]))
    return {
        "keys": keys,
        "bounds": bounds,
        "hotness": hotness,
        "weights": rng.choice(np.array(WEIGHTS, np.float32), n) if draw(st.booleans()) and combiner != "max" else None,
        "combiner": combiner,
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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.fixed_dictionaries({}, optional={table: bags() for table in DIMS}))
def test_bags_are_what_the_oracle_says(server: hps.HPS, cases: dict[str, dict[str, Any]]) -> None:
    got = server.lookup_pooled({table: asked(case) for table, case in cases.items()}, "m")
    assert list(got) == list(cases)
    for table, case in cases.items():
        expected(table, case).check(got[table])
