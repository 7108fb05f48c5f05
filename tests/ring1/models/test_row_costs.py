"""What rows in fewer bits cost: figures as NumPy computes them from whole tables, and a reason for each table that suffers."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hps.ground.rows import decode, encode
from hps.tools.planning import row_costs as module
from hps.tools.planning.row_costs import FEWER_BITS, RowCost, row_costs

Array = np.ndarray[Any, Any]
ROWS, DIM = 1000, 24


def costs_of(vectors: Array, chunk: int = 300) -> dict[str, RowCost]:
    def chunks() -> Iterator[tuple[Array, Array]]:
        for start in range(0, len(vectors), chunk):
            block = vectors[start : start + chunk]
            yield np.arange(start, start + len(block)) + 7, block

    return {cost.row_dtype: cost for cost in row_costs("t", len(vectors), vectors.shape[1], chunks())}


@pytest.fixture
def normal() -> Array:
    return np.random.default_rng(3).normal(2, 0.5, (ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize("chunk", [1, 299, ROWS])
def test_errors_and_cosines_are_those_of_the_whole_table_whatever_the_chunks(normal: Array, chunk: int) -> None:
    costs = costs_of(normal, chunk)
    assert list(costs) == list(FEWER_BITS)
    exact = normal.astype(np.float64)
    spread = np.sqrt(exact.var(axis=0).mean())
    for row_dtype, stored in (
        *(("float16", normal.astype(np.float16)), ("bfloat16", normal.astype(ml_dtypes.bfloat16))),
        ("int8", decode(encode("test", normal, "int8"), DIM, "int8")),
    ):
        got, after = costs[row_dtype], stored.astype(np.float64)
        errors = after - exact
        cosines = (after * exact).sum(1) / np.linalg.norm(after, axis=1) / np.linalg.norm(exact, axis=1)
        assert got.error_max == np.abs(errors).max() > 0
        assert got.error_rms == pytest.approx(np.sqrt(np.square(errors).mean()))
        assert got.rms_share == pytest.approx(got.error_rms / spread)
        assert got.cosine_mean == pytest.approx(cosines.mean(), abs=1e-12)
        assert (got.cosine_least, got.least_key) == (pytest.approx(cosines.min(), abs=1e-12), 7 + np.argmin(cosines))
        assert (got.rows, got.refused_rows, got.first_refused_key, got.findings) == (ROWS, 0, None, ())
    assert [costs[one].row_bytes for one in FEWER_BITS] == [48, 48, 28]


def test_refused_rows_are_counted_and_the_first_is_named(normal: Array) -> None:
    normal[[5, 400, 999], 3] = 70_000, -1e30, np.nan
    costs = costs_of(normal)
    refused = {name: (one.refused_rows, one.first_refused_key) for name, one in costs.items()}
    assert refused == {"float16": (2, 12), "bfloat16": (0, None), "int8": (2, 407)}
    assert costs["float16"].findings[0] == "refused rows: 2, the first of key 12"
    assert all(np.isfinite([cost.error_max, cost.error_rms, cost.rms_share]).all() for cost in costs.values())
    all_refused = costs_of(np.full((3, 4), np.inf, np.float32))
    int8 = all_refused["int8"]
    assert (int8.refused_rows, int8.error_max, int8.least_key, all_refused["float16"].refused_rows) == (3, 0.0, None, 0)


def test_rows_that_a_format_merges_are_named(normal: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    far = normal / 50 + 1000
    costs = costs_of(far)
    for row_dtype in ("float16", "bfloat16"):
        text = next(finding for finding in costs[row_dtype].findings if finding.startswith("merged rows"))
        left = len(np.unique(encode("test", far, row_dtype), axis=0).view(np.uint32))
        assert text == f"merged rows: of 1,000 sampled rows that differ, {left:,} still do"
        assert any(finding.startswith("coarse") for finding in costs[row_dtype].findings)
    assert all(cost.findings == () for cost in costs_of(np.repeat(normal[:10], 100, axis=0)).values()), "equal before"
    monkeypatch.setattr(module, "_SAMPLED_ROWS", 100)
    for chunk in (7, 300, ROWS):  # a sample of the whole table
        assert costs_of(far, chunk)["bfloat16"].findings[0].startswith("merged rows: of 100 sampled rows that differ")


def test_outliers_are_named_where_codes_are_few(normal: Array) -> None:
    normal[:, 3] = 500
    costs = costs_of(normal)
    assert costs["int8"].findings[-1] == "outliers: in 100% of the rows half of the elements gets 8 of 256 codes or fewer"
    assert costs["float16"].findings == ()
    sparse = np.where(np.arange(DIM) < 5, normal, 0).astype(np.float32)  # equal elements lose nothing
    assert not [finding for finding in costs_of(sparse)["int8"].findings if finding.startswith("outliers")]


def test_narrow_and_zero_tables_are_measured() -> None:
    for dim in (1, 2, 7):
        for vectors in (np.zeros((5, dim), np.float32), np.ones((1, dim), np.float32)):
            for cost in costs_of(vectors).values():
                assert (cost.error_max, cost.rms_share, cost.findings) == (0, 0, ())
                assert (cost.cosine_mean, cost.cosine_least) == (pytest.approx(1), pytest.approx(1))
