"""Modules with torchrec's collections, plain and quantised ones, are saved, converted and packaged."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hps
from hps.testing.waiting import PATIENCE_S
from hps.torch import convert, package, save
from tests.ring1.torch.conftest import server as server  # a fixture
from tests.ring1.torch.test_quantised import ROWS, score, table
from tests.ring2.torch.test_packaging import DIM, answers, inputs_of, keys
from tests.ring2.torch.test_torchrec_layers import bag_collection, row_collection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import
    torchrec: Any = pytest.importorskip("torchrec")
    modules: Any = pytest.importorskip("torchrec.quant.embedding_modules")
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning"),  # those that quantising gives, and torchrec's import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def test_a_half_collection_answers_in_float32(tmp_path: Path) -> None:
    tables = [(f"t{n}", 4, [f"f{n}"], "SUM") for n in range(3)]

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bag_collection(*tables, rows=ROWS, data_type=torchrec.DataType.FP16)
            self.top = nn.Linear(12, 1)

        def forward(self, sparse: Any) -> torch.Tensor:
            return self.top(self.bags(sparse).values()).squeeze(1)

    sparse = torchrec.KeyedJaggedTensor(["f0", "f1", "f2"], keys(9), lengths=torch.tensor([1, 2, 0, 3, 2, 1]))
    done = package(Half(), tmp_path / "m" / "1", (sparse,), tolerance=1e-3)  # torchrec pools in half precision
    assert {name: one.table for name, one in done.dense.inputs.items()} == {"f0": "t0", "f1": "t1", "f2": "t2"}


def test_collections_of_torchrec(tmp_path: Path) -> None:
    class Collected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bag_collection(("t1", 4, ["f", "g"], "MEAN"), ("t2", DIM, ["h"], "SUM"), rows=ROWS)
            self.top = nn.Linear(8 + DIM + 2, 1)

        def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
            found = self.bags(sparse)
            return self.top(torch.cat([dense, found["h"], found["f"], found["g"]], 1)).squeeze(1)

    def jagged(samples: int) -> Any:
        lengths = torch.randint(0, 4, (3 * samples,))
        return torchrec.KeyedJaggedTensor(["f", "g", "h"], keys(int(lengths.sum())), lengths=lengths)

    module = Collected()
    package(module, tmp_path / "m" / "1", (torch.rand(4, 2), jagged(4)))
    assert inputs_of(tmp_path) == {
        "f": {"table": "t1", "pooling": "mean"},
        "g": {"table": "t1", "pooling": "mean"},
        "h": {"table": "t2", "pooling": "sum"},
        "dense": {"shape": [-1, 2]},
    }
    dense, sparse = torch.rand(5, 2), jagged(5)
    bags = {name: hps.Bags(sparse[name].values(), sparse[name].offsets()) for name in "fgh"}
    np.testing.assert_allclose(score(tmp_path, {"dense": dense, **bags})["score"], answers(module, dense, sparse), atol=1e-6)


def test_another_process_knows_the_operators_of_jagged_tensors(tmp_path: Path) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = row_collection(("t", 4, ["f"]), rows=ROWS)

        def forward(self, sparse: Any) -> torch.Tensor:
            return self.rows(sparse)["f"].to_padded_dense(3).sum((1, 2))

    sparse = torchrec.KeyedJaggedTensor(["f"], keys(5), lengths=torch.tensor([3, 0, 2]))
    module = Padded()
    done = package(module, tmp_path / "m" / "1", (sparse,))
    np.savez(tmp_path / "given.npz", **done.request(sparse))
    asks = (
        "import sys, hps, numpy as np\n"
        "with hps.HPS(sys.argv[1]) as server: print(*server.score('m', dict(np.load(sys.argv[1] + '/given.npz')))['score'])"
    )
    command = [sys.executable, "-c", asks, tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert said.returncode == 0, said.stderr
    found = np.array(said.stdout.split(), np.float32)
    np.testing.assert_allclose(found, answers(module, sparse), atol=1e-6)


def collection(kind: str, bits: int | torch.dtype, *, shared: bool = False, output: torch.dtype = torch.float32) -> Any:
    """A quantised collection of torchrec's, of three tables; the second is pooled in another way."""
    dtypes = {8: torch.qint8, 4: torch.quint4x2, 2: torch.quint2x4}
    observer = torch.quantization.PlaceholderObserver.with_args
    config = torchrec.modules.embedding_configs.QuantConfig(
        activation=observer(dtype=output), weight=observer(dtype=dtypes[bits] if isinstance(bits, int) else bits)
    )
    features = [["f", "g"], ["h", "f"] if shared else ["h"], ["i"]]
    if kind == "bags":
        pooling = ("SUM", "MEAN", "SUM")
        plain = bag_collection(*((f"t {n}", 8 * (n + 1), features[n], pooling[n]) for n in range(3)), rows=ROWS)
    else:
        plain = row_collection(*((f"t {n}", 8, features[n]) for n in range(3)), rows=ROWS)
    plain.qconfig = config
    home = modules.EmbeddingBagCollection if kind == "bags" else modules.EmbeddingCollection
    return home.from_float(plain)


def jagged(samples: int) -> Any:
    lengths = torch.randint(0, 4, (4 * samples,))
    return torchrec.KeyedJaggedTensor(["f", "g", "h", "i"], torch.randint(0, ROWS, (int(lengths.sum()),)), lengths=lengths)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("bags", 8), ("rows", 4), ("bags", 2), ("rows", torch.float16), ("bags", torch.float32), ("rows", 8)],
    ids=str,
)
def test_rows_of_collections(tmp_path: Path, kind: str, bits: int | torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100)
    module = collection(kind, bits)
    saved = save(nn.ModuleDict({"e": module}), tmp_path / "m")
    assert saved.tables == {"e": ("t_0", "t_1", "t_2")}  # as of the collection before it was quantised
    every = torchrec.KeyedJaggedTensor(["f", "g", "h", "i"], torch.arange(ROWS).repeat(4), lengths=torch.ones(4 * ROWS).long())
    answer = module(every)
    for number, feature in enumerate("fhi"):
        dim = 8 * (number + 1) if kind == "bags" else 8
        expected = answer[feature] if kind == "bags" else answer[feature].values()
        rows = table(tmp_path / "m" / "1", f"t_{number}", dim)
        np.testing.assert_allclose(rows, expected.numpy(), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("kind", "shared"), [("bags", False), ("rows", True), ("bags", True)])
def test_layers_answer_as_quantised_collections(tmp_path: Path, server: hps.HPS, kind: str, shared: bool) -> None:
    module = collection(kind, 8, shared=shared)
    converted = convert(module, server, "m", repository=tmp_path, hotness=4)
    given = jagged(9)
    got, expected = converted(given), module(given)
    if kind == "bags":
        assert shared or got.keys() == expected.keys()  # else they have the tables' names, which are those of directories
        torch.testing.assert_close(got.values(), expected.values(), rtol=0, atol=1e-6)
        return
    assert list(got) == list(expected)
    for name, rows in expected.items():
        torch.testing.assert_close(got[name].values(), rows.values(), rtol=0, atol=2e-7)


class Pooled(nn.Module):
    def __init__(self, bags: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.bags = bags
        self.plain = nn.Embedding(ROWS, 4, dtype=dtype)
        width = sum(config.embedding_dim * len(config.feature_names) for config in bags.embedding_bag_configs())
        self.top = nn.Linear(width + 4, 1, dtype=dtype)

    def forward(self, sparse: Any, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.bags(sparse).values(), self.plain(item)], 1)).squeeze(1).float()


@pytest.mark.parametrize(("bits", "shared", "output"), [(4, True, torch.float32), (8, False, torch.float16)], ids=str)
def test_a_module_with_a_quantised_collection_is_packaged(tmp_path: Path, bits: int, shared: bool, output: torch.dtype) -> None:
    module = Pooled(collection("bags", bits, shared=shared, output=output), output)
    tolerance = 1e-5 if output is torch.float32 else 2e-3
    item = torch.randint(0, ROWS, (4,))
    for number in ("1", "2"):
        done = package(module, tmp_path / "m", (jagged(4), item), tolerance=tolerance)
        assert (done.version, done.difference <= tolerance) == (number, True)
    sparse, item = jagged(7), torch.randint(0, ROWS, (7,))
    found = score(tmp_path, done.request(sparse, item))
    np.testing.assert_allclose(found["score"], module(sparse, item).detach(), atol=tolerance)


def test_what_cannot_be_read_as_rows_is_refused(tmp_path: Path) -> None:
    pruned = collection("bags", 8)
    pruned._emb_modules[1].index_remappings_array = torch.arange(ROWS)
    with pytest.raises(hps.InvalidInputError, match="got a pruned table, whose keys are remapped"):
        save(pruned, tmp_path / "m")
    with pytest.raises(hps.InvalidInputError, match="got no lookup of a stored table"):
        package(Unread(collection("rows", 8)), tmp_path / "m", (jagged(4),))

    processed = collection("bags", 8)
    processed.__class__ = modules.FeatureProcessedEmbeddingBagCollection
    with pytest.raises(hps.InvalidInputError, match="FeatureProcessedEmbeddingBagCollection, expected nn"):
        save(processed, tmp_path / "m")
    assert not list(tmp_path.iterdir())


class Unread(nn.Module):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, sparse: Any) -> torch.Tensor:
        self.rows(sparse)
        return torch.zeros(sparse.stride())
