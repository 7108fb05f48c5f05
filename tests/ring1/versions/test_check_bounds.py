"""What the checks of rows and scores measure, and where they draw the line."""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import pytest

from hps.configuration.checks import ChecksConfig
from hps.engine.refresh import Pace
from hps.types import FloatArray, KeyArray, TableSpec
from hps.versions.checks.report import CheckBounds, CheckOutcome, CheckReport
from hps.versions.checks.rows import LEAST_ROWS, RowPairs, RowSample, alignment, compare_rows, sample_rows

PACE = Pace(1.0, lambda seconds: False)
N = 1024
TABLE = TableSpec("m", "item", 4, 0.0, 1)


def rows_of(dim: int, seed: int = 1, count: int = N) -> FloatArray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, dim)) * random.gamma(1.0, 1.0, (count, 1))).astype(np.float32)


def rotated(vectors: FloatArray) -> FloatArray:
    """The same rows as another initialisation would give them: turned, and a little elsewhere."""
    dim = vectors.shape[1]
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((dim, dim)))[0]
    return (vectors @ turn + 0.5 * rows_of(dim, 3, len(vectors))).astype(np.float32)


def outcomes(sample: RowSample, **config: object) -> dict[str, CheckOutcome]:
    found = compare_rows("item", sample, ChecksConfig(**config), PACE)
    return {outcome.check: outcome for outcome in found}


def sample(old: FloatArray, new: FloatArray, found: int | None = None, gone: int = 0) -> RowSample:
    known = np.arange(len(new)) < (len(new) if found is None else found)
    return RowSample(np.arange(len(new)), new, old, known, len(old), gone)


@pytest.mark.parametrize("dim", [1, 8, 64, 200])
def test_rows_trained_again_from_other_random_numbers_are_aligned_and_shuffled_ones_are_not(dim: int) -> None:
    old = rows_of(dim)
    aligned, shuffled = (alignment(RowPairs(old, new), PACE) for new in (rotated(old), old[::-1]))
    assert aligned is not None
    assert shuffled is not None
    assert aligned > 0.3
    assert abs(shuffled) < 0.05


def test_few_rows_of_many_dimensions_are_told_apart_from_chance() -> None:
    old = rows_of(100, count=LEAST_ROWS)
    assert (alignment(RowPairs(old, rotated(old)), PACE) or 0) > 0.3
    assert abs(alignment(RowPairs(old, old[::-1]), PACE) or 0) < 0.1


def test_equal_vectors_have_nothing_to_be_aligned_with() -> None:
    flat = np.ones((N, 4), np.float32)
    assert alignment(RowPairs(flat, rows_of(4)), PACE) is None
    assert alignment(RowPairs(rows_of(4), flat), PACE) == 0.0
    assert outcomes(sample(flat, rows_of(4)))["vectors"].outcome == "skipped"
    assert outcomes(sample(rows_of(4), flat))["vectors"].outcome == "failed"


@pytest.mark.parametrize(
    ("new", "found", "gone", "failed"),
    [
        (rows_of(4), None, 0, set()),
        (rows_of(4), None, N // 2, set()),
        (rows_of(4), None, N // 2 + 1, {"keys"}),
        (3.9 * rows_of(4), None, 0, set()),
        (4.1 * rows_of(4), None, 0, {"norms"}),
        (rows_of(4) / 4.1, None, 0, {"norms"}),
        (-rows_of(4), None, 0, set()),
        (rows_of(4)[::-1], None, 0, {"vectors"}),
        (rows_of(4)[::-1], LEAST_ROWS, 0, {"vectors"}),
        (rows_of(4)[::-1], LEAST_ROWS - 1, 0, set()),
    ],
)
def test_the_default_bounds(new: FloatArray, found: int | None, gone: int, failed: set[str]) -> None:
    result = outcomes(sample(rows_of(4), np.ascontiguousarray(new), found, gone))
    assert {name for name, outcome in result.items() if outcome.outcome == "failed"} == failed


@pytest.mark.parametrize(("changed", "expected"), [(LEAST_ROWS, "failed"), (LEAST_ROWS - 2, "passed")])
def test_the_changed_rows_of_a_delta_are_judged_by_themselves(changed: int, expected: str) -> None:
    new = rows_of(4)
    new[:changed] = new[:changed][::-1].copy()
    assert outcomes(sample(rows_of(4), new))["vectors"].outcome == expected


def test_keys_are_not_compared_where_a_database_evicts_rows() -> None:
    gone = sample(rows_of(4), rows_of(4), gone=N)
    checks = {found.check: found for found in compare_rows("item", gone, ChecksConfig(), PACE, complete=False)}
    assert (checks["keys"].outcome, checks["keys"].text) == ("skipped", "the databases have not every row of both")
    assert checks["vectors"].outcome == "passed"


def test_bounds_of_cosines_and_of_changed_rows_are_a_users() -> None:
    old = rows_of(4)
    new = old.copy()
    new[: N // 4] = -old[: N // 4]
    result = outcomes(sample(old, new), vectors={"least_cosine": 0.9, "most_changed": 0.1})["vectors"]
    assert result.figures == pytest.approx({"cosine": 1.0, "changed": 0.25, "alignment": 1.0}, abs=1e-5)
    assert result.text == "changed 0.25, expected at most 0.1"


@pytest.mark.parametrize("side", ["old", "new"])
def test_rows_that_are_not_finite_are_left_to_their_own_check(side: str) -> None:
    sides = {"old": rows_of(4), "new": rows_of(4)}
    sides[side][::3, 1] = np.inf
    assert {outcome.outcome for outcome in outcomes(sample(**sides)).values()} == {"passed"}


def test_the_upper_quartile_of_norms_counts_by_itself() -> None:
    new = rows_of(4)
    large = np.argsort(np.linalg.norm(new, axis=1))[-3 * N // 10 :]
    new[large] *= 10
    assert outcomes(sample(rows_of(4), new))["norms"].outcome == "failed"


def test_a_figure_that_is_no_number_breaks_every_bound() -> None:
    bounds = CheckBounds()
    bounds.at_least("cosine", float("nan"), -1.0)
    bounds.at_most("factor", float("nan"), 4.0)
    assert bounds.wrong == ["cosine nan, expected at least -1", "factor nan, expected at most 4"]


@dataclass
class Rows:
    """The rows of a version, which yields them in an order of its own."""

    rows: dict[int, FloatArray]
    table: TableSpec = TABLE
    complete: bool = True

    def chunks(self, chunk_rows: int, row_dtype: str) -> Generator[tuple[KeyArray, FloatArray], None, None]:
        keys = np.array(list(self.rows), np.int64)
        for start in range(0, keys.size, chunk_rows):
            yield self.read(keys[start : start + chunk_rows], row_dtype)

    def read(self, keys: KeyArray, row_dtype: str) -> tuple[KeyArray, FloatArray]:
        found = np.array([key for key in keys.tolist() if key in self.rows], np.int64)
        return found, np.array([self.rows[key] for key in found.tolist()], np.float32).reshape(-1, 4)


def test_a_sample_has_the_rows_of_both_versions_by_key_and_those_that_either_lacks() -> None:
    old, new = rows_of(4, 1, 4000), rows_of(4, 2, 4000)
    before = Rows({key: old[key] for key in range(3999, -1, -1)})
    after = Rows({key: new[key - 100] for key in range(100, 4100)})
    for count, rows in ((2500, 2500), (5000, 4000)):
        found = sample_rows(after, before, count, PACE)
        keys = np.arange(100, 100 + rows)
        np.testing.assert_array_equal(found.keys, keys)
        np.testing.assert_array_equal(found.new, new[:rows])
        np.testing.assert_array_equal(found.found, keys < 4000)
        np.testing.assert_array_equal(found.old[found.found], old[keys[keys < 4000]])
        assert (found.old_rows, found.gone) == (rows, max(0, rows - 3900))


def test_vectors_of_zeros_that_did_not_change_are_alike() -> None:
    zeros = np.zeros((N, 4), np.float32)
    assert outcomes(sample(zeros, zeros), vectors={"least_cosine": 0.9})["vectors"].figures["cosine"] == 1.0


def test_a_check_that_is_off_is_not_made() -> None:
    assert set(outcomes(sample(rows_of(4), rows_of(4)), norms={"policy": "off"})) == {"keys", "vectors"}


@pytest.mark.parametrize(
    ("policies", "verdict", "accepted"),
    [
        ([], "passed", "passed"),
        (["warn"], "passed", "passed"),
        (["warn", "hold"], "held", "accepted"),
        (["warn", "refuse"], "refused", "accepted"),
        (["hold", "refuse"], "refused", "accepted"),
    ],
)
def test_the_strictest_policy_of_the_failed_checks_decides(policies: list[str], verdict: str, accepted: str) -> None:
    checks = tuple(CheckOutcome(check="norms", outcome="failed", policy=policy, text=policy) for policy in policies)  # type: ignore[arg-type]
    report = CheckReport(model="m", version="2", fingerprint="f", at=1.0, checks=checks)
    assert (report.verdict, report.accepted(2.0).verdict) == (verdict, accepted)
    assert CheckReport.model_validate_json(report.model_dump_json()) == report
    assert report.reason == "; ".join(f"norms: {policy}" for policy in sorted(policies, key=["refuse", "hold", "warn"].index))


def test_a_reason_has_ten_checks_and_the_number_of_the_others() -> None:
    checks = tuple(
        CheckOutcome(check="norms", outcome="failed", policy="hold", table=f"t{number}", text="x") for number in range(12)
    )
    reason = CheckReport(model="m", version="2", fingerprint="f", at=1.0, checks=checks).reason
    assert reason.startswith("norms of t0: x; norms of t1: x")
    assert reason.endswith("norms of t9: x; and 2 more")
