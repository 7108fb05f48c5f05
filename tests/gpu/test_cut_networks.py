"""Networks that were cut, on a GPU: keys are computed, looked up and scored without a copy to the host."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from tests.gpu.cupy_if_installed import cupy  # noqa: F401 - skips without it
from tests.servers.running_service import model_of

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

from tests.ring2.scoring.test_cut_networks import DIMS as RANKER_DIMS  # noqa: E402
from tests.ring2.scoring.test_cut_networks import Ranker, inputs, of_torch, scores_of, write  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS, DIM, COLUMNS = 1000, 16, 3


class Keys(nn.Module):
    """Adds an offset to each column."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(COLUMNS) * (ROWS // COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offsets


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, fields: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
        return self.top(fields.sum(1) + price).squeeze(1) * (x[:, 0] != 5)


class Fields(nn.Module):
    """pytorch-fm's offsets, a mask on a key, and a key in a column of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.fields, self.prices = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.keys, self.network = Keys(), Network()

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.network(x, self.fields(self.keys(x)), self.prices(grid[:, 1].long()))  # type: ignore[no-any-return]


SAID: dict[str, Any] = {
    "format": "pt2",
    "file": "dense.pt2",
    "inputs": {"x": {"dtype": "int64", "shape": [-1, COLUMNS]}, "grid": {"shape": [-1, 2]}},
    "outputs": ["score"],
    "keys": [{"file": "keys.pt2", "inputs": ["x"], "outputs": ["shifted"]}],
    "lookups": {
        "fields": {"table": "fields", "keys": {"output": "shifted"}},
        "price": {"table": "prices", "keys": {"input": "grid", "column": 1}},
    },
    "network_inputs": ["x", "fields", "price"],
}


def given(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    grid = np.column_stack([rng.random(samples), rng.integers(0, ROWS, samples)]).astype(np.float32)
    return {"x": rng.integers(0, ROWS // COLUMNS, (samples, COLUMNS)), "grid": grid}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Fields, hps.HPS]]:
    torch.manual_seed(1)
    module = Fields().eval()
    x = torch.ones(4, COLUMNS, dtype=torch.int64)
    programs = of_torch(module.network, x, torch.rand(4, COLUMNS, DIM), torch.rand(4, DIM)), of_torch(module.keys, x)
    tables = {name: (np.arange(ROWS), getattr(module, name).weight.detach().numpy()) for name in ("fields", "prices")}
    files = dict(zip(("dense.pt2", "keys.pt2"), programs, strict=True))
    hps.write_version(tmp_path / "m" / "1", tables, network=(SAID, files))
    most = {"max_batch_size": 300, "maxnum_catfeature_query_per_table_per_sample": [COLUMNS, 1]}
    entry = model_of("m", [*tables], dict.fromkeys(tables, DIM), embedding_cache_type="static", **most)
    (tmp_path / "m" / "model.json").write_text(json.dumps(entry))
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        yield module, server


def test_scores_are_the_modules_and_all_is_captured(served: tuple[Fields, hps.HPS]) -> None:
    module, server = served
    rng = np.random.default_rng(0)
    for samples in (1, 15, 16, 17, 64, 65, 255, 300, 3, 1):
        asked = given(rng, samples)
        np.testing.assert_allclose(server.score("m", asked)["score"], scores_of(module, asked), atol=1e-5)
    scores = server.model("m").scores
    assert scores is not None
    memories = scores._scorers[0]._kept.memories
    assert [memory.form.samples for memory in memories] == [16, 64, 256, 300]
    for memory in memories:  # what repeats a CUDA graph, not the run that could not be captured
        assert memory.keys is not None
        assert (memory.keys.__name__, memory.run.__name__) == ("replay", "replay")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_nothing_is_copied_to_the_host_but_scores(served: tuple[Fields, hps.HPS]) -> None:
    module, server = served
    asked = given(np.random.default_rng(0), 100)
    server.score("m", asked)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = server.score("m", asked)["score"]
    np.testing.assert_allclose(found, scores_of(module, asked), atol=1e-5)
    copies = [event.name for event in profile.events() if "Memcpy DtoH" in event.name]
    assert 1 <= len(copies) <= 2, copies  # a graph also delivers how many keys of each table were absent


def test_bags_with_offsets_and_free_lengths_are_looked_up_in_new_memory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Ranker().eval()
    write(tmp_path / "m" / "1", "pt2", module)
    most = {"max_batch_size": 64, "maxnum_catfeature_query_per_table_per_sample": [1, 9, 9], "gpucacheper": 1.0}
    entry = model_of("m", [*RANKER_DIMS], RANKER_DIMS, hit_rate_threshold=1.1, **most)
    (tmp_path / "m" / "model.json").write_text(json.dumps(entry))
    rng = np.random.default_rng(1)
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        for samples in (1, 2, 64, 5, 1):
            for n in (2, 5):
                asked = inputs(rng, samples, n)
                np.testing.assert_allclose(server.score("m", asked)["score"], scores_of(module, asked), atol=1e-5)
