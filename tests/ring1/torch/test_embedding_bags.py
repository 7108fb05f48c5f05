"""The layers of bags, against torch's `embedding_bag` and torchrec's collection."""

from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.torch import BagTable, EmbeddingBag, EmbeddingBagCollection
from tests.ring1.torch.conftest import ROWS, Served
from tests.ring1.torch.test_lookup_layer import WAYS, Way, some_ways

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def random_bags(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, count)
    keys = torch.from_numpy(rng.integers(0, ROWS + 20, lengths.sum()))
    keys[keys % 7 == 0] = 3  # the padding of some layers
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return keys, offsets, torch.from_numpy(rng.uniform(0.1, 2, lengths.sum()).astype(np.float32))


def expected_of(
    served: Served,
    table: str,
    keys: torch.Tensor,
    offsets: torch.Tensor,  # (B + 1,)
    weights: torch.Tensor | None,
    mode: str,
    max_norm: float | None = None,
    padding: int | None = None,
) -> torch.Tensor:
    """torch's sum of the same bags, in float64, divided as the combiner says."""
    rows = served.rows(keys, table).double()
    if max_norm is not None:
        norms = rows.norm(dim=1, keepdim=True)
        rows = torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)
    factors = torch.ones(keys.numel(), dtype=torch.float64) if weights is None else weights.double()
    if padding is not None:
        factors = torch.where(keys == padding, 0.0, factors)

    def total(values: torch.Tensor) -> torch.Tensor:
        places = torch.arange(keys.numel())
        return torch.nn.functional.embedding_bag(places, values, offsets[:-1], mode="sum")

    sums = total(rows * factors[:, None])
    divisor = {"sum": factors * 0, "mean": factors, "sqrtn": factors * factors}[mode][:, None]
    divisors = total(divisor).sqrt() if mode == "sqrtn" else total(divisor)
    answer = sums if mode == "sum" else torch.where(divisors == 0, 0.0, sums / divisors)
    return answer.float()


@pytest.mark.parametrize(
    ("mode", "max_norm", "padding"), [("sum", None, None), ("sum", 1.5, 3), ("mean", None, 3), ("mean", 1.5, None)]
)
def test_answers_are_those_of_torchs_layer(served: Served, mode: str, max_norm: float | None, padding: int | None) -> None:
    keys, offsets, weights = random_bags(40, 1)
    keys, offsets = keys.clamp(max=ROWS).int(), offsets.int()
    theirs = torch.nn.EmbeddingBag(
        ROWS + 1,
        8,
        mode=mode,
        max_norm=max_norm,
        padding_idx=padding,
        include_last_offset=True,
        _weight=served.tables["user"].clone(),
    )
    ours = EmbeddingBag(
        served.server, "m", "user", 8, mode=mode, max_norm=max_norm, padding_idx=padding, include_last_offset=True
    )
    for given_weights in (None, *([weights] if mode == "sum" else [])):
        torch.testing.assert_close(ours(keys, offsets, given_weights), theirs(keys, offsets, given_weights).detach())


@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name != "traced"])  # torch cannot trace lists of Tensor?
def test_bags_in_every_way(served: Served, way: Way) -> None:
    keys, offsets, weights = random_bags(9, 2)
    options = {"max_norm": 1.5, "padding_idx": 3, "include_last_offset": True}
    layer = EmbeddingBag(served.server, "m", "item", 5, mode="sqrtn", **options)
    answer = way(layer, (keys, offsets, weights))(keys, offsets, weights.requires_grad_())
    assert not answer.requires_grad
    torch.testing.assert_close(answer, expected_of(served, "item", keys, offsets, weights.detach(), "sqrtn", 1.5, 3))


@some_ways
def test_bags_of_one_length_need_no_offsets(served: Served, way: Way) -> None:
    keys = torch.randint(0, ROWS, (6, 4))
    layer = EmbeddingBag(served.server, "m", "item", 5)
    torch.testing.assert_close(way(layer, (keys,))(keys), served.rows(keys, "item").mean(1))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((torch.ones(3), torch.tensor([0])), hps.InvalidDtypeError, "got keys of torch.float32"),
        ((torch.arange(3),), hps.InvalidInputError, "without offsets, expected (bags, hotness)"),
        ((torch.arange(6).view(2, 3), torch.tensor([0])), hps.InvalidInputError, "expected one dimension of both"),
        ((torch.arange(3), torch.tensor([0.0])), hps.InvalidDtypeError, "got offsets of torch.float32"),
        ((torch.arange(3), torch.tensor([1, 2])), hps.InvalidInputError, "expected them to begin with 0"),
        ((torch.arange(3), torch.tensor([0, 2, 1])), hps.InvalidInputError, "never to fall"),
        ((torch.arange(3), torch.tensor([0, 9])), hps.InvalidInputError, "at most 3"),
        ((torch.arange(3), torch.tensor([0]), torch.ones(2)), hps.InvalidInputError, "got weights of shape (2,)"),
        ((torch.arange(3), torch.tensor([0]), torch.arange(3)), hps.InvalidDtypeError, "got weights of torch.int64"),
        ((torch.arange(3), torch.zeros(1, dtype=torch.int64, device="meta")), hps.InvalidInputError, "got offsets on meta"),
    ],
)
def test_bad_bags_say_what_is_wrong(served: Served, inputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        EmbeddingBag(served.server, "m", "user", 8)(*inputs)
    assert message in str(refused.value)


def test_training_mode_is_refused(served: Served) -> None:
    inputs = {"user": torch.zeros(2, 2, dtype=torch.int64)}
    with pytest.raises(hps.TrainingModeError):
        EmbeddingBag(served.server, "m", "user", 8).train()(inputs["user"])
    with pytest.raises(hps.TrainingModeError):
        EmbeddingBagCollection(served.server, "m", [BagTable("user", ("user",), 8)]).train()(inputs)


def test_unknown_modes_and_outputs_of_one_name_are_refused(served: Served) -> None:
    with pytest.raises(hps.InvalidInputError, match=r"got mode 'min', expected one of .*'sqrtn', 'max'"):
        EmbeddingBag(served.server, "m", "user", 8, mode="min")
    tables = [BagTable("user", ("u",), 8, pooling) for pooling in ("sum", "mean")]
    with pytest.raises(hps.InvalidInputError, match="got 'u@user' as the name of several outputs"):
        EmbeddingBagCollection(served.server, "m", tables)


TABLES = [
    BagTable("user", ("u", "friend", "shared"), 8),
    BagTable("item", ("i", "shared"), 5, "mean", max_norm=1.5, padding_idx=3),
]
FEATURES = ["i", "u", "unused", "shared", "friend"]  # in another order than the tables have them
OUTPUTS = [("u", 0), ("friend", 0), ("shared@user", 0), ("i", 1), ("shared@item", 1)]


@pytest.mark.parametrize(
    ("way", "weighted"), [(WAYS[name], weighted) for name, weighted in (("eager", False), ("eager", True), ("dynamic", True))]
)
def test_a_collection_takes_each_feature_from_its_table(served: Served, way: Way, weighted: bool) -> None:
    bags = {name: random_bags(6, seed) for seed, name in enumerate(FEATURES)}
    given = {name: one if weighted else one[:2] for name, one in bags.items()}
    collection = EmbeddingBagCollection(served.server, "m", TABLES, is_weighted=weighted)
    answers = way(collection, (given,))(given)
    assert list(answers) == [name for name, _ in OUTPUTS]
    for name, index in OUTPUTS:
        keys, offsets, weights = bags[name.partition("@")[0]]
        table = TABLES[index]
        expected = expected_of(
            served, table.name, keys, offsets, weights if weighted else None, table.pooling, table.max_norm, table.padding_idx
        )
        torch.testing.assert_close(answers[name], expected)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"u": torch.zeros(2, 2, dtype=torch.int64)}, "expected also 'i'"),
        ({"u": torch.zeros(2, 2, dtype=torch.int64), "i": torch.zeros(3, 2, dtype=torch.int64)}, "got 3 bags, expected 2"),
        ({"u": (torch.zeros(2, 2, dtype=torch.int64), None, torch.ones(2, 2))}, "got weights, but"),
    ],
)
def test_features_that_do_not_fit_the_collection_are_refused(served: Served, features: Any, message: str) -> None:
    collection = EmbeddingBagCollection(served.server, "m", [BagTable("user", ("u",), 8), BagTable("item", ("i",), 5)])
    with pytest.raises(hps.InvalidInputError, match=message):
        collection(features)
