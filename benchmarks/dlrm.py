"""A DLRM: embeddings, two multi-layer perceptrons, and the products of all pairs of their outputs.

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv:1906.00091.
"""

from itertools import pairwise

import torch
from torch import nn

FEATURES = 13


class DLRM(nn.Module):
    """Scores (B,) of float features (B, 13) and one key a table (B, tables).

    Args:
        rows: of each table.
    """

    def __init__(
        self, tables: int, rows: int, dim: int, bottom: tuple[int, ...] = (128, 64), top: tuple[int, ...] = (256, 128)
    ) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.bottom = _perceptron((FEATURES, *bottom, dim), last=True)
        pairs = tables * (tables + 1) // 2
        self.top = _perceptron((dim + pairs, *top, 1), last=False)
        places = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("places", places[0] * (tables + 1) + places[1])

    def forward(self, dense: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.scores(dense, [embedding(keys[:, table]) for table, embedding in enumerate(self.emb)])

    def scores(self, dense: torch.Tensor, vectors: list[torch.Tensor]) -> torch.Tensor:
        """Score from vectors that were looked up."""
        features = self.bottom(dense)
        every = torch.stack([features, *vectors], 1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1).index_select(1, self.places)
        return torch.sigmoid(self.top(torch.cat([features, products], 1))).squeeze(1)


def _perceptron(widths: tuple[int, ...], *, last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (above, below) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(above, below))
        if last or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
