"""Splits the bags of a table by their keys, and combines the answers of the parts.

Each part is asked for the sums of its keys by bag, and the divisors of means are computed here, so that the arithmetic is that
of `hps/tensors/bags.py`. Of a maximum, each part is asked for the vectors of its keys, as bags of one key: NaN counts only in
the first vector of a bag, and a part does not know whether its first one is.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hps.client.requests import BagRequest, Input
from hps.tensors.bags import Combiner
from hps.types import FloatArray, IndexArray, KeyArray


class BagParts:
    """The bags of one table. *Immutable.*

    Attributes:
        keys: (n,) int64, without padding.
    """

    def __init__(self, request: BagRequest) -> None:
        pooling, keys = request.pooling, request.keys
        if pooling.offsets is None:
            bag_of = np.repeat(np.arange(pooling.count), pooling.hotness)
        else:
            ends = np.append(pooling.offsets[: pooling.count], keys.size)
            bag_of = np.repeat(np.arange(pooling.count), np.diff(ends))
        weights = pooling.weights
        if pooling.padding_key is not None:
            kept = keys != pooling.padding_key
            keys, bag_of = keys[kept], bag_of[kept]
            weights = None if weights is None else weights[kept]
        self.keys: KeyArray = keys
        self._name = request.name
        self._pooling = pooling
        self._bag_of: IndexArray = bag_of
        self._weights = weights

    def request(self, rows: IndexArray) -> tuple[list[Input], int, dict[str, Any]]:
        """Return the inputs of the keys at these positions, the number of vectors that answer them, and the parameters."""
        name, keys = self._name, self.keys[rows]
        is_max = self._pooling.combiner is Combiner.MAX
        parameters: dict[str, Any] = {f"{name}.combiner": "max" if is_max else "sum"}
        if self._pooling.max_norm:
            parameters[f"{name}.max_norm"] = self._pooling.max_norm
        if is_max:
            return [Input(name, keys.reshape(-1, 1))], keys.size, parameters
        starts = self._starts(rows)
        inputs = [Input(name, keys), Input(f"{name}.offsets", np.append(starts, keys.size))]
        if self._weights is not None:
            inputs.append(Input(f"{name}.weights", self._weights[rows]))
        return inputs, starts.size, parameters

    def _starts(self, rows: IndexArray) -> IndexArray:
        """Return which of these keys are the first ones of their bags, (b,)."""
        return np.flatnonzero(np.diff(self._bag_of[rows], prepend=-1))

    def combine(self, parts: Iterable[tuple[IndexArray, FloatArray]], dim: int) -> FloatArray:
        """Combine the answers of parts with all keys.

        Args:
            parts: positions of the keys, ascending, and the vectors of their bags, (b, dim).

        Returns:
            (bags, dim) float32.
        """
        if self._pooling.combiner is Combiner.MAX:
            return self._maxima(parts, dim)
        totals: FloatArray = np.zeros((self._pooling.count, dim), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for rows, sums in parts:
                totals[self._bag_of[rows[self._starts(rows)]]] += sums
        return totals if self._pooling.combiner is Combiner.SUM else self._divided(totals)

    def _divided(self, totals: FloatArray) -> FloatArray:
        is_mean, weights = self._pooling.combiner is Combiner.MEAN, self._weights
        terms = None if weights is None else weights.astype(np.float64) ** (1 if is_mean else 2)
        divisors = np.bincount(self._bag_of, terms, minlength=self._pooling.count)
        rounded = (divisors if is_mean else np.sqrt(divisors)).astype(np.float32)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.divide(totals, rounded, out=np.zeros_like(totals), where=rounded != 0)

    def _maxima(self, parts: Iterable[tuple[IndexArray, FloatArray]], dim: int) -> FloatArray:
        vectors: FloatArray = np.empty((self.keys.size, dim), np.float32)
        for rows, of_keys in parts:
            vectors[rows] = of_keys
        maxima: FloatArray = np.zeros((self._pooling.count, dim), np.float32)
        if self.keys.size:
            starts = self._starts(np.arange(self.keys.size))
            first = vectors[starts]
            maxima[self._bag_of[starts]] = np.where(np.isnan(first), first, np.fmax.reduceat(vectors, starts))
        return maxima
