"""The loss of storing a table in fewer bits, before it is served: errors, refused rows, and findings.

Findings of a table:

    refused rows    the format cannot hold them (see `ground/rows.py`); the table cannot be loaded
    merged rows     of sampled rows that differ, more than 1% become equal: rows that are few or alike
    coarse          the RMS error is above 2% of what the vectors differ by, the RMS distance of their elements from the means
    outliers        int8: in more than 1% of sampled rows, the middle half of the elements gets at most 8 of the 256 codes,
                    since a few elements are far from the rest

Errors are of rows that the format holds, without those that have infinities or NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hps.ground.rows import decode, encode_rows
from hps.types import ROW_DTYPES, FloatArray, KeyArray, RowArray, row_width

FEWER_BITS = ROW_DTYPES[1:]
_SAMPLED_ROWS = 1 << 16
_MERGED_SHARE, _COARSE_SHARE, _OUTLIER_SHARE = 0.01, 0.02, 0.01
_FEW_CODES = 8


@dataclass(frozen=True, slots=True)
class RowCost:
    """The loss of a table's vectors in a format. *Immutable.*"""

    table: str
    row_dtype: str
    dim: int
    rows: int
    row_bytes: int  # bytes of a stored row; a float32 row has 4 x dim
    refused_rows: int  # rows that the format cannot hold
    first_refused_key: int | None  # key of the first of them
    error_max: float  # of an element
    error_rms: float  # likewise
    rms_share: float  # error_rms as a share of what the vectors differ by
    cosine_mean: float  # of a vector and what is stored; 1 for a zero vector that stays one
    cosine_least: float  # likewise
    least_key: int | None  # key of the row with the least cosine
    findings: tuple[str, ...]  # for people; empty if the format suits the table


def row_costs(
    table: str, rows: int, dim: int, chunks: Iterable[tuple[KeyArray, FloatArray]], row_dtypes: Sequence[str] = FEWER_BITS
) -> list[RowCost]:
    """Measure the loss of a table in each format.

    Args:
        table: name for the result.
        rows: how many rows the chunks have.
        chunks: (n,) int64 keys and (n, dim) float32 vectors, each read once.

    Returns:
        One result a format, in their order.
    """
    spread, sums = _Spread(dim), [_Sums(row_dtype, dim) for row_dtype in row_dtypes]
    stride, row, sample = max(1, -(-rows // _SAMPLED_ROWS)), 0, []
    for keys, vectors in chunks:
        finite = np.asarray(np.isfinite(vectors).all(axis=1))
        spread.add(vectors[finite])
        for row_sum in sums:
            row_sum.add(keys, vectors, finite)
        sample.append(vectors[-row % stride :: stride].copy())
        row += len(vectors)
    sampled: FloatArray = np.concatenate(sample) if sample else np.empty((0, dim), np.float32)
    return [row_sum.result(table, row, spread.rms(), sampled) for row_sum in sums]


class _Spread:
    """The spread of elements around the means of their columns. *One thread.*"""

    def __init__(self, dim: int) -> None:
        self._origin: npt.NDArray[np.float64] | None = None  # near the means, so that squares do not cancel out
        self._sums, self._squares, self._rows = np.zeros(dim), np.zeros(dim), 0

    def add(self, vectors: FloatArray) -> None:
        if self._origin is None and len(vectors):
            self._origin = vectors.mean(axis=0, dtype=np.float64)
        if self._origin is not None:
            shifted = vectors - self._origin
            self._sums += shifted.sum(axis=0)
            self._squares += np.square(shifted).sum(axis=0)
            self._rows += len(vectors)

    def rms(self) -> float:
        if not self._rows:
            return 0.0
        variances = self._squares / self._rows - np.square(self._sums / self._rows)
        return float(np.sqrt(np.maximum(variances, 0).mean()))


@dataclass
class _Sums:
    """Errors of one format, summed over chunks. *One thread.*"""

    row_dtype: str
    dim: int
    refused_rows: int = 0
    first_refused_key: int | None = None
    error_max: float = 0.0
    squares: float = 0.0
    cosines: float = 0.0
    counted: int = 0
    cosine_least: float = 1.0
    least_key: int | None = None

    def add(self, keys: KeyArray, vectors: FloatArray, finite: npt.NDArray[np.bool_]) -> None:
        rows, representable = _stored(vectors, self.row_dtype)
        if not representable.all():
            self.refused_rows += int(np.count_nonzero(~representable))
            if self.first_refused_key is None:
                self.first_refused_key = int(keys[np.argmin(representable)])
        counted = representable & finite
        if not counted.any():
            return
        before = vectors[counted].astype(np.float64)
        after = decode(np.ascontiguousarray(rows[counted]), self.dim, self.row_dtype).astype(np.float64)
        errors = after - before
        self.error_max = max(self.error_max, float(np.abs(errors).max()))
        self.squares += float(np.square(errors).sum())
        cosines = _cosines(before, after)
        self.cosines += float(cosines.sum())
        self.counted += len(cosines)
        least = int(np.argmin(cosines))
        if self.least_key is None or cosines[least] < self.cosine_least:
            self.cosine_least, self.least_key = float(cosines[least]), int(keys[counted][least])

    def result(self, table: str, rows: int, spread: float, sampled: FloatArray) -> RowCost:
        rms = float(np.sqrt(self.squares / (self.counted * self.dim))) if self.counted else 0.0
        share = rms / spread if spread else float(rms > 0)
        findings = []
        if self.refused_rows:
            findings.append(f"refused rows: {self.refused_rows:,}, the first of key {self.first_refused_key}")
        stored, representable = _stored(sampled, self.row_dtype)
        sampled, stored = sampled[representable], stored[representable]
        distinct_sampled, distinct_stored = _distinct(sampled), _distinct(stored)
        if distinct_stored < (1 - _MERGED_SHARE) * distinct_sampled:
            findings.append(f"merged rows: of {distinct_sampled:,} sampled rows that differ, {distinct_stored:,} still do")
        if share > _COARSE_SHARE:
            findings.append(f"coarse: the error is {share:.1%} of what the vectors differ by")
        if self.row_dtype == "int8" and (outliers := _outlier_share(sampled, stored)) > _OUTLIER_SHARE:
            findings.append(
                f"outliers: in {outliers:.0%} of the rows half of the elements gets {_FEW_CODES} of 256 codes or fewer"
            )
        return RowCost(
            table=table,
            row_dtype=self.row_dtype,
            dim=self.dim,
            rows=rows,
            row_bytes=4 * row_width(self.dim, self.row_dtype),
            refused_rows=self.refused_rows,
            first_refused_key=self.first_refused_key,
            error_max=self.error_max,
            error_rms=rms,
            rms_share=share,
            cosine_mean=self.cosines / self.counted if self.counted else 1.0,
            cosine_least=self.cosine_least,
            least_key=self.least_key,
            findings=tuple(findings),
        )


def _stored(vectors: FloatArray, row_dtype: str) -> tuple[RowArray, npt.NDArray[np.bool_]]:
    """Encode vectors, (n, dim); return rows, (n, width), and which of them the format holds."""
    vectors = np.ascontiguousarray(vectors)
    rows: RowArray = np.zeros((len(vectors), row_width(vectors.shape[1], row_dtype)), np.float32)
    representable, done = np.ones(len(vectors), np.bool_), 0
    while (done := done + encode_rows(vectors[done:], rows[done:], ROW_DTYPES.index(row_dtype))) < len(vectors):
        representable[done] = False
        done += 1
    return rows, representable


def _cosines(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the cosine of each pair of rows: 1 for two zeros, 0 where one of them is zero."""
    lengths = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
    products = lengths[0] * lengths[1]
    cosines = np.einsum("ij,ij->i", before, after) / np.where(products > 0, products, 1)
    cosines_: npt.NDArray[np.float64] = np.where(products > 0, np.minimum(cosines, 1), lengths[0] == lengths[1])
    return cosines_


def _distinct(rows: FloatArray) -> int:
    """Count rows of different bytes."""
    return int(np.unique(np.ascontiguousarray(rows).view(f"V{4 * rows.shape[1]}")).size)


def _outlier_share(vectors: FloatArray, rows: RowArray) -> float:
    """Return the share of rows of int8 in which few codes stand for the middle half of elements that differ."""
    dim = vectors.shape[1]
    low, high = dim // 4, max(dim - 1 - dim // 4, 0)
    if not len(vectors) or high - low < _FEW_CODES // 2:
        return 0.0
    codes = np.sort(rows.view(np.uint8)[:, :dim], axis=1)
    elements = np.sort(vectors, axis=1)
    few = (codes[:, high] - codes[:, low] < _FEW_CODES) & (elements[:, high] > elements[:, low])
    exact = codes[:, -1] == codes[:, 0]  # elements that float16 cannot tell apart: merged or coarse, not outliers
    return float(np.count_nonzero(few & ~exact)) / len(vectors)
