"""Clicks like those of Criteo's data set: 13 numbers and 26 bags of ids for each, and a label that they say something about."""

from dataclasses import dataclass

import numpy as np
import torch

DENSE = 13
# Rows and most ids of a bag, of each table: those of MLPerf's multi-hot Criteo (DLRM v2).
ROWS = (40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3_067_956, 405_282, 10)
ROWS += (2209, 11938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12973, 108, 36)
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass
class Clicks:
    """A batch of B samples.

    Attributes:
        dense: (B, 13) float32.
        keys: of each table (n,) int64; a bag of one id, or of 0 to `HOTNESS` ids.
        offsets: of each table (B + 1,) int64: where in its keys each bag begins, and where the last one ends.
        labels: (B,) float32, 0 or 1.
    """

    dense: torch.Tensor
    keys: list[torch.Tensor]
    offsets: list[torch.Tensor]
    labels: torch.Tensor


class Criteo:
    """Draws batches. Ids follow a power law, as clicks do; each id has a score, and a click is likelier the higher the scores.

    Args:
        most_rows: larger tables are cut to so many.
        alpha: how steep the power law is.
    """

    def __init__(self, most_rows: int, alpha: float = 1.05, seed: int = 0) -> None:
        self.rows = [min(rows, most_rows) for rows in ROWS]
        self._gamma = 1 - alpha
        rng = np.random.default_rng(seed)
        self._ids = [rng.permutation(rows) for rows in self.rows]  # of each rank
        self._scores = [rng.normal(0, 1, rows).astype(np.float32) for rows in self.rows]
        self._dense_scores = rng.normal(0, 0.3, DENSE).astype(np.float32)

    def draw(self, batch: int, seed: int) -> Clicks:
        """A batch; the same for the same seed."""
        rng = np.random.default_rng([seed, batch])
        dense = rng.normal(0, 1, (batch, DENSE)).astype(np.float32)
        logits = dense @ self._dense_scores - 0.5
        keys, offsets = [], []
        for table, most in enumerate(HOTNESS):
            lengths = np.ones(batch, np.int64) if most == 1 else rng.integers(0, most + 1, batch)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            ids = self._ids[table][self._ranks(rng.random(ends[-1]), self.rows[table])]
            sums = np.add.reduceat(np.append(self._scores[table][ids], 0), np.minimum(ends[:-1], ends[-1]))
            logits += 0.6 * np.where(lengths > 0, sums, 0) / np.sqrt(np.maximum(lengths, 1))
            keys.append(torch.from_numpy(ids))
            offsets.append(torch.from_numpy(ends))
        labels = (rng.random(batch) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return Clicks(torch.from_numpy(dense), keys, offsets, torch.from_numpy(labels))

    def _ranks(self, uniform: np.ndarray, rows: int) -> np.ndarray:
        ranks = (uniform * (float(rows + 1) ** self._gamma - 1) + 1) ** (1 / self._gamma)  # 1 to rows
        return np.minimum(ranks.astype(np.int64), rows) - 1
