"""Layers and conversions of torchrec's collections: they answer as torchrec's own do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hps
from hps.torch import BagTable, EmbeddingBagCollection, convert, save
from tests.ring1.torch import test_conversion
from tests.ring1.torch.conftest import ROWS, Served
from tests.ring1.torch.conftest import served as served  # a fixture
from tests.ring1.torch.conftest import server as server  # a fixture
from tests.ring1.torch.test_conversion import assert_within_an_ulp_a_term, of_magnitudes
from tests.ring1.torch.test_embedding_bags import FEATURES, TABLES, random_bags
from tests.ring1.torch.test_saving import rows_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import
    torchrec: Any = pytest.importorskip("torchrec")
pytestmark = pytest.mark.filterwarnings("ignore")


def bag_collection(*tables: tuple[str, int, list[str], str], rows: int = 40, weighted: bool = False, **more: Any) -> Any:
    """torchrec's collection of tables: name, width, features and pooling of each."""
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name,
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=names,
            pooling=torchrec.PoolingType[pooling],
            **more,
        )
        for name, dim, names, pooling in tables
    ]
    return torchrec.EmbeddingBagCollection(configs, is_weighted=weighted)


def row_collection(*tables: tuple[str, int, list[str]], rows: int = 40, **more: Any) -> Any:
    configs = [
        torchrec.EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=names)
        for name, dim, names in tables
    ]
    return torchrec.EmbeddingCollection(configs, **more)


def jagged(count: int, *, weighted: bool = False, known_borders: bool = False) -> Any:
    bags = [random_bags(count, seed) for seed in range(len(FEATURES))]
    kjt = torchrec.KeyedJaggedTensor(
        FEATURES,
        torch.cat([keys.clamp(max=ROWS) for keys, _, _ in bags]),
        torch.cat([weights for _, _, weights in bags]) if weighted else None,
        lengths=torch.cat([offsets.diff() for _, offsets, _ in bags]),
    )
    if known_borders:
        kjt.offset_per_key()
    return kjt


@pytest.mark.parametrize(
    ("count", "weighted", "known_borders"), [(0, False, False), (1, True, True), (7, False, True), (7, True, False)]
)
def test_answers_are_those_of_torchrecs_collection(served: Served, count: int, weighted: bool, known_borders: bool) -> None:
    pooling = "sum" if weighted else "mean"
    tables = [("user", ["u", "friend", "shared"], 8), ("item", ["i", "shared"], 5)]
    made = [(name, dim, features, pooling.upper()) for name, features, dim in tables]
    theirs = bag_collection(*made, rows=ROWS + 1, weighted=weighted)
    for name, bag in theirs.embedding_bags.items():
        bag.weight.data.copy_(served.tables[name])
    ours = EmbeddingBagCollection(served.server, "m", [BagTable(*table, pooling) for table in tables], is_weighted=weighted)
    kjt = jagged(count, weighted=weighted, known_borders=known_borders)
    answer = ours(kjt)
    if count == 0:
        assert answer.values().shape == (0, 34)
        return
    expected = theirs(kjt)
    assert answer.keys() == expected.keys()
    assert answer.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(answer.values(), expected.values().detach())


def test_a_jagged_collection_is_compiled_and_exported(served: Served) -> None:
    collection = EmbeddingBagCollection(served.server, "m", TABLES)
    kjt = jagged(6)
    expected = collection(kjt).values()
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(kjt).values(), expected)
    other = jagged(9)
    torch.testing.assert_close(compiled(other).values(), collection(other).values())
    exported = torch.export.export(collection, (kjt,), strict=False).module()
    torch.testing.assert_close(exported(kjt).values(), expected)


def test_jagged_tensors_that_do_not_fit_are_refused(served: Served) -> None:
    collection = EmbeddingBagCollection(served.server, "m", TABLES)
    variable = torchrec.KeyedJaggedTensor(
        FEATURES,
        torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(6, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1], [1], [1], [1]],
    )
    with pytest.raises(hps.InvalidInputError, match="variable stride"):
        collection(variable)
    with pytest.raises(hps.InvalidInputError, match="got no weights"):
        EmbeddingBagCollection(served.server, "m", TABLES, is_weighted=True)(jagged(2))
    with pytest.raises(hps.InvalidInputError, match="expected also 'unknown'"):
        EmbeddingBagCollection(served.server, "m", [BagTable("user", ("unknown",), 8)])(jagged(2))
    falling = torchrec.KeyedJaggedTensor(FEATURES, torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([0, 3, 1, 4, 4, 4]))
    with pytest.raises(hps.InvalidInputError, match="expected ascending ones"):
        collection(falling)
    five = torch.ones(5, dtype=torch.int64)
    with pytest.raises(hps.InvalidDtypeError, match=r"bags of model 'm' through a layer: got keys of torch.float32"):
        collection(torchrec.KeyedJaggedTensor(FEATURES, torch.zeros(5), lengths=five))
    whole = torchrec.KeyedJaggedTensor(FEATURES, five, five, lengths=five)
    with pytest.raises(hps.InvalidDtypeError, match=r"bags of model 'm' through a layer: got weights of torch.int64"):
        EmbeddingBagCollection(served.server, "m", TABLES, is_weighted=True)(whole)
    reordered = torchrec.KeyedJaggedTensor(FEATURES, five, lengths=five, inverse_indices=(FEATURES, five[:, None]))
    with pytest.raises(hps.InvalidInputError, match="inverse indices"):
        collection(reordered)


def collections() -> nn.Module:
    bags = bag_collection(("goods", 4, ["viewed", "bought"], "SUM"), ("users", 6, ["friends"], "MEAN"))
    bags.embedding_bags["users"].max_norm = 0.2
    weighted = bag_collection(("w", 4, ["bought"], "SUM"), weighted=True)
    rows = row_collection(("first", 4, ["viewed", "friends"]), ("second", 4, ["viewed"]), need_indices=True)
    return nn.ModuleDict({"bags": bags, "weighted": weighted, "rows": rows})


def test_torchrec_collections_answer_as_before(tmp_path: Path, server: hps.HPS) -> None:
    module = collections()
    converted: Any = convert(module, server, "rec", repository=tmp_path, hotness=30)
    parts = [test_conversion.random_bags(seed) for seed in range(3)]
    weights = torch.cat([weights for _, _, weights in parts])
    given, magnitudes = (
        torchrec.KeyedJaggedTensor(
            keys=["friends", "viewed", "bought"],
            values=torch.cat([keys for keys, _, _ in parts]),
            lengths=torch.cat([offsets.diff() for _, offsets, _ in parts]),
            weights=one,
        )
        for one in (weights, weights.abs())
    )
    for name in ("bags", "weighted"):
        expected, got = (one.get_submodule(name)(given) for one in (module, converted))
        most = of_magnitudes(module).get_submodule(name)(magnitudes)
        assert (got.keys(), got.length_per_key()) == (expected.keys(), expected.length_per_key())
        assert_within_an_ulp_a_term(got.values(), expected.values(), most.values())
    expected, got = module["rows"](given), converted["rows"](given)  # type: ignore[index]
    assert list(got) == list(expected) == ["viewed@first", "friends", "viewed@second"]
    for name, one in expected.items():
        assert torch.equal(got[name].values(), one.values())
        assert torch.equal(got[name].lengths(), one.lengths())
        assert torch.equal(got[name].weights(), one.weights())


class Ranking(nn.Module):
    """Makes its KeyedJaggedTensor, with weights if its collection has some, and reads what torchrec's collections say."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.bags = bag_collection(("a", 4, ["f", "g"], "SUM"), ("b", 6, ["h", "f"], "SUM"), weighted=weighted)
        self.rows = row_collection(("c", 4, ["f", "g"]), ("d", 4, ["h"]))
        self.top = nn.Linear(20, 1)

    def forward(self, f: torch.Tensor, h: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((3 * len(f),), f.shape[1], device=self.bags.device)
        values, given = torch.cat([h, f, f.flip(0)]).flatten(), weights if self.bags.is_weighted() else None
        kjt = torchrec.KeyedJaggedTensor(["h", "f", "g"], values, weights=given, lengths=lengths)
        pooled = torchrec.KeyedTensor.regroup([self.bags(kjt)], [["f@a", "g"], ["h", "f@b"]])
        rows = self.rows(kjt)["f"].to_padded_dense(3).reshape(len(f), 3, self.rows.embedding_dim())
        scale = sum(config.num_embeddings for config in self.bags.embedding_bag_configs()) + self.rows.need_indices()
        return self.top(torch.cat(pooled, 1)) * scale + rows.sum((1, 2))[:, None] * len(self.rows.embedding_configs())


@pytest.mark.parametrize("weighted", [False, True])
def test_a_module_that_makes_its_jagged_tensor_runs_as_before(tmp_path: Path, server: hps.HPS, weighted: bool) -> None:
    module = Ranking(weighted=weighted).eval()
    given = torch.randint(0, 40, (5, 2)), torch.randint(0, 40, (5, 2)), torch.rand(30)
    converted = convert(module, server, "rec", repository=tmp_path, hotness=30, example_inputs=given)
    assert not any(converted.load_state_dict(module.state_dict()))
    for one in (given, (given[0].int(), given[1].int(), given[2].double())):
        torch.testing.assert_close(converted(*one), module(*given))


def test_a_collection_with_a_forward_of_its_own_is_refused(tmp_path: Path, server: hps.HPS) -> None:
    class Doubled(torchrec.EmbeddingBagCollection):
        def forward(self, features: Any) -> Any:
            answer = super().forward(features)
            return torchrec.KeyedTensor(answer.keys(), answer.length_per_key(), 2 * answer.values())

    table = torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=40, feature_names=["viewed"])
    with pytest.raises(hps.InvalidInputError, match="a forward of Doubled's own"):
        convert(Doubled(tables=[table]), server, "shop", repository=tmp_path)


def test_torchrec_tables_keep_their_names(tmp_path: Path) -> None:
    bags, rows = bag_collection(("t 1", 4, ["f", "g"], "SUM"), rows=9), row_collection(("t2", 4, ["h"]), rows=7)
    saved = save(nn.ModuleDict({"bags": bags, "rows": rows}), tmp_path / "rec")
    assert saved.tables == {"bags": ("t_1",), "rows": ("t2",)}
    assert rows_of(tmp_path / "rec" / "1" / "t_1", 4) == dict(enumerate(bags.embedding_bags["t 1"].weight.tolist()))
