"""Compares a sample of the rows of two versions of a table: their keys, norms and vectors."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from hps.configuration.checks import ChecksConfig
from hps.engine.refresh import Pace
from hps.engine.session import Session
from hps.models.loading.warm_up import DatabaseRows
from hps.stores.base import UNBOUNDED_ROWS
from hps.types import BoolArray, FloatArray, KeyArray, RowArray, TableSpec
from hps.versions.checks.report import CheckBounds, CheckName, CheckOutcome, FailurePolicy

LEAST_ROWS: Final = 256
"""Of fewer rows than these, chance decides: they are not judged."""

_CHUNK_ROWS: Final = 1024
_PERMUTATIONS: Final = 4
_SMALL_PRODUCT: Final = 1 << 18  # multiplications up to which OpenBLAS uses one thread (interface/gemm.c)
_PRODUCTS_AT_ONCE: Final = 32
_MOST_DIMENSIONS: Final = 128
_TINY: Final = 1e-30
_MOST_RESIDENT: Final = 1 << 20


class RowPairs(NamedTuple):
    """Rows of keys that both versions have.

    Attributes:
        old: (n, old dim) float32.
        new: (n, dim) float32: of the same keys.
    """

    old: FloatArray
    new: FloatArray


@dataclass(frozen=True, slots=True)
class RowSample:
    """A sample of the rows of two versions of a table. *Immutable.*

    Attributes:
        keys: (n,) int64: of the new version.
        new: (n, dim) float32: its vectors.
        old: (n, old dim) float32: the serving version's of the same keys, where it has them.
        found: (n,) bool: whether the serving version has them.
        old_rows: sampled rows of the serving version.
        gone: how many of these the new version lacks.
    """

    keys: KeyArray
    new: FloatArray
    old: FloatArray
    found: BoolArray
    old_rows: int
    gone: int

    @property
    def pairs(self) -> RowPairs:
        """The rows of both versions, without those that are not finite, which are a check of their own."""
        finite = self.found & np.isfinite(self.old).all(axis=1) & np.isfinite(self.new).all(axis=1)
        return RowPairs(self.old[finite], self.new[finite])


class SampledRows(Protocol):
    """The rows of a table of a version, wherever they are."""

    @property
    def table(self) -> TableSpec: ...

    @property
    def complete(self) -> bool:
        """Whether a row that is not there is not in the version."""

    def chunks(self, chunk_rows: int, row_dtype: str) -> Generator[tuple[KeyArray, RowArray], None, None]:
        """Yield rows, each once, the same at each call, in an order that does not depend on the vectors."""

    def read(self, keys: KeyArray, row_dtype: str) -> tuple[KeyArray, RowArray]:
        """Read rows by their keys, (n,) int64; return the found ones, with their keys."""


class StoredRows(DatabaseRows):
    """The rows of a database. *Immutable, thread-safe.*

    Every database scans in an order that hardly depends on the keys: hash maps and row files by the keys' hashes, Redis by its
    own, RocksDB by the low byte of the keys.
    """

    @property
    def complete(self) -> bool:
        return self.database.persistent or self.database.stats(self.stored.tag).capacity_rows >= UNBOUNDED_ROWS


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The resident rows of a cache, of a version without a database. *Immutable, thread-safe.*

    Attributes:
        index: of the table.
        rows: of the version's files.
    """

    session: Session
    index: int
    table: TableSpec
    rows: int

    @property
    def complete(self) -> bool:
        cache = self.session.cache
        return cache is not None and cache.stats(self.index).resident_rows == self.rows

    def chunks(self, chunk_rows: int, row_dtype: str) -> Generator[tuple[KeyArray, RowArray], None, None]:
        """Yield resident rows, up to a million, from everywhere in the cache."""
        keys = np.empty(0, np.int64) if self.session.cache is None else self.session.cache.dump(self.index)
        keys = keys[:: max(1, keys.size // _MOST_RESIDENT)]
        for start in range(0, keys.size, chunk_rows):
            yield self.read(np.ascontiguousarray(keys[start : start + chunk_rows]), row_dtype)

    def read(self, keys: KeyArray, row_dtype: str) -> tuple[KeyArray, RowArray]:
        """Read resident rows as float32, whatever `row_dtype` is."""
        vectors = np.empty((keys.size, self.table.dim), np.float32)
        found = self.session.resident(self.index, keys, vectors)
        return keys[found], vectors[found]


def first_rows_of(rows: SampledRows, count: int, pace: Pace) -> tuple[KeyArray, FloatArray]:
    """Read the rows that `chunks` yields first, at most `count`: a sample, the same at each call."""
    keys: list[KeyArray] = []
    vectors: list[FloatArray] = []
    missing = count
    with closing(rows.chunks(min(count, _CHUNK_ROWS), "float32")) as chunks:
        for chunk, found in chunks:
            keys.append(chunk[:missing])
            vectors.append(found[:missing].astype(np.float32, copy=False))
            missing -= keys[-1].size
            pace.rest()
            if not missing:
                break
    if not keys:
        return np.empty(0, np.int64), np.empty((0, rows.table.dim), np.float32)
    return np.concatenate(keys), np.concatenate(vectors)


def sample_rows(new: SampledRows, old: SampledRows, count: int, pace: Pace) -> RowSample:
    """Sample the rows of two versions of a table.

    Raises:
        DatabaseError: a database failed. NotReadyError: as of `pace`.
    """
    keys, vectors = first_rows_of(new, count, pace)
    known, found = _vectors_of(old, keys, pace)
    old_keys, _ = first_rows_of(old, count, pace)
    _, kept = _vectors_of(new, old_keys, pace)
    return RowSample(keys, vectors, known, found, old_keys.size, int(np.count_nonzero(~kept)))


def _vectors_of(rows: SampledRows, keys: KeyArray, pace: Pace) -> tuple[FloatArray, BoolArray]:
    """Fetch the vectors of keys, and whether they were found."""
    vectors, found = np.zeros((keys.size, rows.table.dim), np.float32), np.zeros(keys.size, np.bool_)
    for start in range(0, keys.size, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        got, read = rows.read(np.ascontiguousarray(keys[part]), "float32")
        found[part] = np.isin(keys[part], got)
        vectors[part][found[part]] = read
        pace.rest()
    return vectors, found


def compare_rows(
    table: str, sample: RowSample, config: ChecksConfig, pace: Pace, *, complete: bool = True
) -> list[CheckOutcome]:
    """Compare the sampled rows of two versions of a table within the configured bounds.

    Args:
        complete: the databases have every row of both, so that the keys can be compared.
    """
    outcomes: list[CheckOutcome] = []
    checks: dict[CheckName, str] = {name: getattr(config, name).policy for name in ("keys", "norms", "vectors")}
    pairs = sample.pairs

    def judge(check: CheckName, rows: int, bounds: CheckBounds, skipped: str = "") -> None:
        if (policy := checks[check]) == "off":
            return
        if not skipped and rows < LEAST_ROWS:
            skipped = f"{rows} rows in common, expected at least {LEAST_ROWS} to judge by"
        found = bounds.outcome(check, cast("FailurePolicy", policy), table)
        outcomes.append(found.model_copy(update={"outcome": "skipped", "text": skipped}) if skipped else found)

    bounds = CheckBounds()
    bounds.at_most("new", 1.0 - np.count_nonzero(sample.found) / max(1, sample.keys.size), config.keys.most_new)
    bounds.at_most("gone", sample.gone / max(1, sample.old_rows), config.keys.most_gone)
    skipped = "" if complete else "the databases have not every row of both"
    if sample.old_rows < LEAST_ROWS:
        skipped = f"{sample.old_rows} rows serve, expected at least {LEAST_ROWS} to judge by"
    judge("keys", sample.old_rows, bounds, skipped)

    bounds, old_norms, new_norms = CheckBounds(), _norms(pairs.old), _norms(pairs.new)
    bounds.at_most("factor", _norm_factor(old_norms, new_norms), config.norms.most_factor)
    judge("norms", len(pairs.new), bounds)
    pace.rest()

    bounds = CheckBounds()
    changed = np.ones(len(pairs.new), np.bool_)
    if len(pairs.new) and pairs.old.shape == pairs.new.shape:
        cosines = np.einsum("ij,ij->i", pairs.old, pairs.new) / np.maximum(old_norms * new_norms, _TINY)
        changed = (pairs.old != pairs.new).any(axis=1)
        cosines[~changed] = 1.0  # also of vectors of zeros
        bounds.at_least("cosine", float(np.median(cosines)), config.vectors.least_cosine)
        bounds.at_most("changed", float(changed.mean()), config.vectors.most_changed)
    aligned: float | None = 1.0
    if np.count_nonzero(changed) >= LEAST_ROWS:  # of a delta, the rows that it has
        aligned = alignment(RowPairs(pairs.old[changed], pairs.new[changed]), pace)
        bounds.at_least("alignment", 1.0 if aligned is None else aligned, config.vectors.least_alignment)
    judge("vectors", len(pairs.new), bounds, "the vectors are all equal in the serving version" if aligned is None else "")
    pace.rest()
    return outcomes


def alignment(pairs: RowPairs, pace: Pace) -> float | None:
    """Measure whether rows belong to their keys: 1 if one version is a rotation of the other, 0 if they are unrelated.

    It is linear centred kernel alignment (Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML
    2019, section 3), which neither rotations nor scales change, so that a table trained again from other random numbers is
    like its predecessor. Of few rows of many dimensions even unrelated ones have some alignment; the mean of permuted rows,
    which are unrelated, is the zero of the scale.

    Returns:
        None if the old vectors are all equal, so that there is nothing to compare with.
    """
    old, new = (_centred(_narrowed(part, pace)) for part in pairs)
    if old is None:
        return None
    if new is None:
        return 0.0
    scale = _product_norm(old, old, pace) * _product_norm(new, new, pace)
    random = np.random.default_rng(1)
    permuted = (new[random.permutation(len(new))] for _ in range(_PERMUTATIONS))
    chance = float(np.mean([_product_norm(old, rows, pace) ** 2 / scale for rows in permuted]))
    return (_product_norm(old, new, pace) ** 2 / scale - chance) / max(1.0 - chance, _TINY)


def _narrowed(vectors: FloatArray, pace: Pace) -> FloatArray:
    """Project wide vectors at random to 128 dimensions, which keeps their angles (Johnson and Lindenstrauss, 1984)."""
    dim = vectors.shape[1]
    if dim <= _MOST_DIMENSIONS:
        return vectors
    projection = np.random.default_rng(dim).standard_normal((dim, _MOST_DIMENSIONS), np.float32)
    width = min(dim, _SMALL_PRODUCT // (2 * _MOST_DIMENSIONS))  # a product of one row would be another function of BLAS
    step = _SMALL_PRODUCT // (width * _MOST_DIMENSIONS)
    narrow = np.zeros((len(vectors), _MOST_DIMENSIONS), np.float32)
    parts = product(range(0, len(vectors), step), range(0, dim, width))
    for number, (start, first) in enumerate(parts, 1):
        columns = slice(first, first + width)
        narrow[start : start + step] += vectors[start : start + step, columns] @ projection[columns]
        if not number % _PRODUCTS_AT_ONCE:
            pace.rest()
    return narrow


def _product_norm(left: FloatArray, right: FloatArray, pace: Pace) -> float:
    """Return the norm of left.T @ right, computed with pauses by one thread.

    BLAS would take all cores for larger products, for the product of an array with itself, and for the norm of many numbers;
    and its other threads spin until long after.
    """
    dims = left.shape[1], right.shape[1]
    step = max(1, _SMALL_PRODUCT // (dims[0] * dims[1]))
    total = np.zeros(dims, np.float64)
    for number, start in enumerate(range(0, len(left), step), 1):
        total += left[start : start + step].T @ right[start : start + step].copy()
        if not number % _PRODUCTS_AT_ONCE:
            pace.rest()
    pace.rest()
    return _norm(total)


def _centred(vectors: FloatArray) -> FloatArray | None:
    """Centre vectors, and scale them to a norm of 1 in all; None if they are all equal."""
    centred = vectors - vectors.mean(axis=0, dtype=np.float64)
    norm = _norm(centred)
    if norm <= 1e-6 * _norm(vectors) + _TINY:
        return None
    scaled: FloatArray = (centred / norm).astype(np.float32)
    return scaled


def _norm(values: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt(np.einsum("ij,ij->", values, values, dtype=np.float64)))


def _norms(vectors: FloatArray) -> FloatArray:
    norms: FloatArray = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)).astype(np.float32)
    return norms


def _norm_factor(old: FloatArray, new: FloatArray) -> float:
    """Return the largest factor between the quartiles of two samples of norms, at least 1."""
    if not old.size:
        return 1.0
    quartiles = np.quantile(np.stack([old, new]).astype(np.float64), (0.25, 0.5, 0.75), axis=1)
    factors = [max(low, high) / max(min(low, high), _TINY) for low, high in quartiles if max(low, high) > 0.0]
    return float(max(factors, default=1.0))
