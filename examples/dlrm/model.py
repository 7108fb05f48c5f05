"""A DLRM (Naumov and others, 2019) in plain PyTorch; nothing in it knows of hps."""

import torch
from torch import nn

from examples.dlrm.criteo import DENSE


class DLRM(nn.Module):
    """Numbers pass a bottom network, bags of ids an embedding each; their products pass a top network.

    Args:
        rows: of each table.
        dim: of all embeddings.
    """

    def __init__(self, rows: list[int], dim: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.EmbeddingBag(count, dim, mode="mean", include_last_offset=True, sparse=True) for count in rows
        )
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.05)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.register_buffer("pairs", torch.triu_indices(len(rows) + 1, len(rows) + 1, 1))
        self.top = nn.Sequential(
            nn.Linear((len(rows) + 1) * (dim + len(rows) // 2), 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def pooled(self, keys: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        """The vector of each bag, (B, tables x dim)."""
        return torch.cat([embed(*bags) for embed, *bags in zip(self.embeddings, keys, offsets, strict=True)], 1)

    def score(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """The logit of a click, (B,), from vectors that are there already."""
        vectors = torch.cat([self.bottom(dense), pooled], 1)
        rows = vectors.view(len(vectors), len(self.embeddings) + 1, -1)
        first, second = self.pairs
        products = torch.bmm(rows, rows.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([vectors, products], 1)).squeeze(1)

    def forward(self, dense: torch.Tensor, keys: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        """The logit of a click, (B,)."""
        return self.score(dense, self.pooled(keys, offsets))
