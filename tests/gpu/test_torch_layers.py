"""Layers of torch on the GPU: captured in CUDA graphs, on streams of the caller's, compiled."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    model = model_of("m", [tmp_path / name for name in DIMS], DIMS, default_value_for_each_table=[ABSENT], **SETTINGS)
    with hps.HPS(document_of(model, device="cuda")) as server:
        yield server


Answer = Callable[[torch.Tensor], torch.Tensor]


def layers(server: hps.HPS) -> dict[str, Answer]:
    """Each answers (n, HOTNESS) keys with the rows of table a, or with the sums of table b, or with both sums."""
    rows = LookupLayer(server, "m", "a", DIMS["a"], wait=False)
    bag = EmbeddingBag(server, "m", "b", DIMS["b"], mode="sum", wait=False)
    tables = [BagTable(name, (name,), dim) for name, dim in DIMS.items()]
    collection = EmbeddingBagCollection(server, "m", tables, wait=False)
    return {
        "rows": rows,
        "bag": bag,
        "collection": lambda keys: torch.cat(list(collection(dict.fromkeys(DIMS, keys)).values()), 1),
    }


def expected(which: str, keys: torch.Tensor, tables: dict[str, np.ndarray]) -> torch.Tensor:
    rows = {name: torch.from_numpy(table)[keys.cpu().clamp(max=ROWS)] for name, table in tables.items()}
    if which == "rows":
        return rows["a"]
    return rows["b"].sum(1) if which == "bag" else torch.cat([rows["a"].sum(1), rows["b"].sum(1)], 1)


def random_keys(n: int = 500) -> torch.Tensor:
    return torch.randint(0, ROWS + 100, (n, HOTNESS), device="cuda")


every_layer = pytest.mark.parametrize("which", ["rows", "bag", "collection"])


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


@every_layer
def test_a_layer_that_waits_does_not_while_it_is_captured(server: hps.HPS, tables: dict[str, np.ndarray], which: str) -> None:
    waiting: dict[str, Any] = {
        "rows": LookupLayer(server, "m", "a", DIMS["a"]),
        "bag": EmbeddingBag(server, "m", "b", DIMS["b"], mode="sum"),
    }
    if which not in waiting:
        pytest.skip("the collection is made of the same operator as the bag")
    keys = random_keys()
    layers(server)[which](keys)  # what stands by for a capture is made outside of it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = waiting[which](keys)
    graph.replay()
    torch.testing.assert_close(answer.cpu(), expected(which, keys, tables), rtol=1e-5, atol=1e-5)


@every_layer
def test_a_lookup_is_ordered_on_the_current_stream(server: hps.HPS, tables: dict[str, np.ndarray], which: str) -> None:
    layer, keys, given, got = layers(server)[which], random_keys(), [], []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            torch.cuda._sleep(1_000_000)
            given.append(random_keys())
            keys.copy_(given[-1])
            got.append(layer(keys) * 2)
    stream.synchronize()
    for fresh, answer in zip(given, got, strict=True):
        torch.testing.assert_close(answer.cpu(), 2 * expected(which, fresh, tables), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["rows", "bag"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_answers_on_the_gpu(server: hps.HPS, tables: dict[str, np.ndarray], which: str) -> None:
    layer = layers(server)[which]
    compiled = torch.compile(lambda keys: layer(keys) + 1, fullgraph=True, dynamic=True)
    for n in (1, 500, 1000):
        keys = random_keys(n)
        torch.testing.assert_close(compiled(keys).cpu(), 1 + expected(which, keys, tables), rtol=1e-5, atol=1e-5)


def test_jagged_bags_of_many_features_are_split_on_the_gpu(server: hps.HPS, tables: dict[str, np.ndarray]) -> None:
    """As of a KeyedJaggedTensor, whose package this test does without: three features, two of one table."""
    from hps.torch import attach
    from hps.torch.operators import PooledFeature, as_text

    lengths = torch.randint(0, 5, (3, 100), device="cuda")
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    keys = torch.randint(0, ROWS, (int(offsets[-1]),), device="cuda")
    features = as_text([PooledFeature("b", 5), PooledFeature("a", 32, "mean"), PooledFeature("b", 5, "mean")])
    for borders in (None, offsets[::100].tolist()):
        answer = torch.ops.hps.lookup_jagged(keys, offsets, None, attach(server), "m", features, [2, 0, 1], 3, borders)
        column = 0
        for feature, name, mode in ((2, "b", "sum"), (0, "a", "mean"), (1, "b", "mean")):
            own = offsets[100 * feature : 100 * feature + 101].cpu()
            bags = keys.cpu()[own[0] : own[-1]], torch.from_numpy(tables[name]), own - own[0]
            theirs = torch.nn.functional.embedding_bag(*bags, mode=mode, include_last_offset=True)
            torch.testing.assert_close(answer[:, column : column + DIMS[name]].cpu(), theirs, rtol=1e-5, atol=1e-5)
            column += DIMS[name]


def test_bad_calls_are_refused(server: hps.HPS) -> None:
    keys = torch.arange(3, device="cuda")
    bag = EmbeddingBag(server, "m", "b", DIMS["b"])
    with pytest.raises(hps.InvalidInputError, match="got offsets on cpu and keys on cuda:0, expected them on one device"):
        bag(keys, torch.tensor([0]))
    with pytest.raises(hps.InvalidInputError, match="offsets"):
        bag(keys, torch.tensor([0, 2, 1], device="cuda"))
    with pytest.raises(hps.InvalidDtypeError, match=r"got keys of torch\.float32"):
        LookupLayer(server, "m", "a", DIMS["a"])(keys.float())
    with pytest.raises(hps.TrainingModeError):
        bag.train()(keys.view(1, 3))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_layers_over_http_answer_tensors_of_the_gpu_there(tmp_path: Path, tables: dict[str, np.ndarray]) -> None:
    for name, rows in tables.items():
        hps.write_sparse_model(tmp_path / name, (np.arange(ROWS), rows[:-1]))
    model = model_of("m", [tmp_path / name for name in DIMS], DIMS, default_value_for_each_table=[ABSENT])
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
