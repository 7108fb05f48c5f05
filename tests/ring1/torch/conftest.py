"""A server that layers are tested on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hps
import hps.torch
from tests.servers.running_service import document_of, model_of

DIMS, ROWS, DEFAULT = {"user": 8, "item": 5}, 500, 0.25


class Served(NamedTuple):
    """A server, the path of its configuration, and its tables as torch has them; the last row is an absent key's."""

    server: hps.HPS
    path: str
    tables: dict[str, torch.Tensor]

    def rows(self, keys: torch.Tensor, table: str) -> torch.Tensor:
        return self.tables[table][keys.long().clamp(max=ROWS)]

    def write(self, key: int, value: float, table: str = "user") -> None:
        self.server.insert(np.array([key]), np.full((1, DIMS[table]), value, np.float32), "m", table)


def configuration(directory: Path, **more: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    rng = np.random.default_rng(5)
    tables = {}
    for name, dim in DIMS.items():
        rows = rng.standard_normal((ROWS, dim)).astype(np.float32)
        hps.write_sparse_model(directory / name, (np.arange(ROWS), rows))
        tables[name] = torch.from_numpy(np.vstack([rows, np.full((1, dim), DEFAULT, np.float32)]))
    model = model_of(
        "m",
        [directory / name for name in DIMS],
        DIMS,
        default_value_for_each_table=[DEFAULT] * len(DIMS),
        hit_rate_threshold=1.1,
        **more,
    )
    return document_of(model), tables


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    document, tables = configuration(tmp_path)
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document))
    with hps.HPS(document) as server:
        yield Served(server, str(path), tables)
    hps.torch.close()
    torch.compiler.reset()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[hps.HPS]:
    with hps.HPS(document_of(model_repository=str(tmp_path))) as server:
        yield server
