"""Computes the pooled vectors of bags in float64, and the error bounds of float32 implementations."""

from typing import NamedTuple

import numpy as np

EPS = float(np.finfo(np.float32).eps)


class Expected(NamedTuple):
    """Attributes:
    vectors: (B, dim) float64.
    bounds: (B, dim) float64: how far an answer may be: one ulp a term, and two more, of the sum of |w v|, divided as the
        sum is; of a maximum, three ulps of the largest |v|. With max_norm, a term is clipped before: its own error is
        within the two.
    """

    vectors: np.ndarray
    bounds: np.ndarray

    def check(self, got: np.ndarray) -> None:
        """Raise AssertionError where an answer is too far away."""
        assert got.shape == self.vectors.shape
        wrong = ~(np.abs(got - self.vectors) <= self.bounds)
        assert not wrong.any(), (
            f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong, first in bag {np.argwhere(wrong)[0].tolist()}: got "
            f"{got[wrong][:3]}, expected {self.vectors[wrong][:3]} within {self.bounds[wrong][:3]}"
        )


def pooled(
    vectors: np.ndarray,  # (n, dim)
    keys: np.ndarray,  # (n,)
    bounds: np.ndarray,  # (B + 1,)
    weights: np.ndarray | None = None,  # (n,)
    combiner: str = "sum",
    max_norm: float | None = None,
    padding_key: int | None = None,
) -> Expected:
    """Pool the vector of every key as `hps.tensors.bags` defines it."""
    counted = np.ones(keys.size, np.bool_) if padding_key is None else keys != padding_key
    terms = np.where(counted[:, None], vectors, 0).astype(np.float64)
    if max_norm is not None:
        norms = np.sqrt((terms**2).sum(1))
        terms[norms > max_norm] *= (max_norm / (norms + 1e-7))[norms > max_norm, None]
    factors = np.where(counted, 1 if weights is None else weights, 0).astype(np.float64)
    filled = np.flatnonzero(np.diff(bounds))

    def of_bags(values: np.ndarray, reduce: np.ufunc = np.add) -> np.ndarray:
        sums = np.zeros((len(bounds) - 1, *values.shape[1:]))
        if filled.size:
            sums[filled] = reduce.reduceat(values[: bounds[-1]], bounds[filled])
        return sums

    weighted = factors[:, None] * terms
    counts = of_bags(counted.astype(np.float64))
    if combiner == "max":
        largest = of_bags(np.where(counted[:, None], terms, -np.inf), np.maximum)
        return Expected(np.where(counts[:, None] > 0, largest, 0.0), 3 * EPS * of_bags(np.abs(terms), np.maximum))
    divisors = {"sum": np.sign(counts), "mean": of_bags(factors), "sqrtn": np.sqrt(of_bags(factors**2))}[combiner][:, None]
    bounds_of_sums = (counts[:, None] + 2) * EPS * of_bags(np.abs(weighted))
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = of_bags(weighted) / divisors, bounds_of_sums / np.abs(divisors)
    return Expected(*(np.where(divisors, quotient, 0.0) for quotient in quotients))
