"""What bags of keys must be answered with, in float64, and how far from it an answer in float32 may be."""

import itertools
from typing import NamedTuple

import numpy as np

EPS = float(np.finfo(np.float32).eps)


class Expected(NamedTuple):
    """Attributes:
    vectors: (B, dim) float64.
    bounds: (B, dim) float64: how far an answer may be: one ulp a term, and two more, of the sum of |w v|, divided as the
        sum is. With max_norm, a term is clipped before: its own error is within the two.
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
    terms = vectors.astype(np.float64)
    if max_norm is not None:
        norms = np.sqrt((terms**2).sum(1))
        terms[norms > max_norm] *= (max_norm / (norms + 1e-7))[norms > max_norm, None]
    factors = np.ones(keys.size) if weights is None else weights.astype(np.float64)
    counted = np.ones(keys.size, np.bool_) if padding_key is None else keys != padding_key
    shape = (len(bounds) - 1, vectors.shape[1])
    expected = Expected(np.zeros(shape), np.zeros(shape))
    for bag, (start, stop) in enumerate(itertools.pairwise(bounds)):
        chosen = start + np.flatnonzero(counted[start:stop])
        weighted = factors[chosen, None] * terms[chosen]
        divisor = {
            "sum": 1.0,
            "mean": factors[chosen].sum(),
            "sqrtn": np.sqrt((factors[chosen] ** 2).sum()),
        }[combiner]
        if chosen.size and divisor:
            expected.vectors[bag] = weighted.sum(0) / divisor
            expected.bounds[bag] = (chosen.size + 2) * EPS * np.abs(weighted).sum(0) / abs(divisor)
    return expected
