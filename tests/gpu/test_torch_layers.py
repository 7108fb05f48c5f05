"""Layers of torch on the GPU: captured in CUDA graphs, on streams of the caller's, compiled."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hps
import hps.torch
from hps.torch import BagTable, EmbeddingBag, EmbeddingBagCollection, LookupLayer
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

pytestmark = pytest.mark.gpu
DIMS, ROWS, ABSENT = {"a": 32, "b": 5}, 20_000, -1.0
SETTINGS = {"hit_rate_threshold": 1.1, "miss_path": "link", "gpucacheper": 0.05, "max_batch_size": 20_000}
HOTNESS = 4


@pytest.fixture
def tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        name: np.vstack([rng.standard_normal((ROWS, dim)), np.full((1, dim), ABSENT)]).astype(np.float32)
        for name, dim in DIMS.items()
    }


@pytest.fixture
def server(tmp_path: Path, tables: dict[str, np.ndarray]) -> Iterator[hps.HPS]:
    for name, rows in tables.items():
        hps.write_sparse_model(tmp_path / name, (np.arange(ROWS), rows[:-1]))
    model = model_of(
        "m", [tmp_path / name for name in DIMS], DIMS, default_value_for_each_table=[ABSENT] * len(DIMS), **SETTINGS
    )
    with hps.HPS(document_of(model, device="cuda")) as server:
        yield server


Answer = Callable[[torch.Tensor], torch.Tensor]


def layers(server: hps.HPS) -> dict[str, Answer]:
    """Each answers (n, HOTNESS) keys with the rows of table a, or with the sums or maxima of table b, or with both sums."""
    rows = LookupLayer(server, "m", "a", DIMS["a"], wait=False)
    bag, largest = (EmbeddingBag(server, "m", "b", DIMS["b"], mode=mode, wait=False) for mode in ("sum", "max"))
    tables = [BagTable(name, (name,), dim) for name, dim in DIMS.items()]
    collection = EmbeddingBagCollection(server, "m", tables, wait=False)
    return {
        "rows": rows,
        "bag": bag,
        "max": lambda keys: largest(keys.short()),
        "collection": lambda keys: torch.cat(list(collection(dict.fromkeys(DIMS, keys)).values()), 1),
    }


def expected(which: str, keys: torch.Tensor, tables: dict[str, np.ndarray]) -> torch.Tensor:
    rows = {name: torch.from_numpy(table)[keys.cpu().clamp(max=ROWS)] for name, table in tables.items()}
    if which == "rows":
        return rows["a"]
    if which == "max":
        return rows["b"].amax(1)
    return rows["b"].sum(1) if which == "bag" else torch.cat([rows["a"].sum(1), rows["b"].sum(1)], 1)


def random_keys(n: int = 500) -> torch.Tensor:
    return torch.randint(0, ROWS + 100, (n, HOTNESS), device="cuda")


every_layer = pytest.mark.parametrize("which", ["rows", "bag", "max", "collection"])


@every_layer
def test_a_captured_layer_is_replayed_with_new_keys_and_after_writes(
    server: hps.HPS, tables: dict[str, np.ndarray], which: str
) -> None:
    layer, keys = layers(server)[which], random_keys()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(keys)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = layer(keys)
    for version in range(10):
        keys.copy_(random_keys())
        written = keys[0].cpu().numpy()[keys[0].cpu().numpy() < ROWS]
        for name, table in tables.items():
            if written.size:
                table[written] = version
                server.insert(written, table[written], "m", name)
        graph.replay()
        torch.testing.assert_close(answer.cpu(), expected(which, keys, tables), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["rows", "bag"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_answers_on_the_gpu(server: hps.HPS, tables: dict[str, np.ndarray], which: str) -> None:
    layer = layers(server)[which]
    compiled = torch.compile(lambda keys: layer(keys) + 1, fullgraph=True, dynamic=True)
    for n in (1, 500, 1000):
        keys = random_keys(n)
        torch.testing.assert_close(compiled(keys).cpu(), 1 + expected(which, keys, tables), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_layers_over_http_answer_tensors_of_the_gpu_there(tmp_path: Path, tables: dict[str, np.ndarray]) -> None:
    for name, rows in tables.items():
        hps.write_sparse_model(tmp_path / name, (np.arange(ROWS), rows[:-1]))
    model = model_of("m", [tmp_path / name for name in DIMS], DIMS, default_value_for_each_table=[ABSENT] * len(DIMS))
    with ServedProcess(document_of(model, device="cpu"), tmp_path) as served:
        layer = LookupLayer(served.url, "m", "a", DIMS["a"])
        bag = EmbeddingBag(served.url, "m", "b", DIMS["b"], mode="sum", include_last_offset=True)
        for seed in range(3):
            keys = torch.randint(0, ROWS + 9, (30, HOTNESS), generator=torch.Generator().manual_seed(seed)).cuda()
            assert torch.equal(layer(keys), expected("rows", keys, tables).cuda())
            ends = torch.arange(0, keys.numel() + 1, HOTNESS).cuda()
            torch.testing.assert_close(bag(keys.flatten(), ends), expected("bag", keys, tables).cuda())
            torch.testing.assert_close(bag(keys), bag(keys.flatten(), ends, torch.ones(keys.numel()).cuda()))
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in (lambda: layer(keys), lambda: bag(keys)):
                with pytest.raises(hps.InvalidInputError, match="being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    call()
    hps.torch.close()
