"""A converted module answers as the trained one did, from a parameter server."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hps.torch
from hps import HPS, HPSError, InvalidInputError, UnknownTableError
from hps.torch import EmbeddingBag, LookupLayer, convert, save

DIM = 6
ROWS = 40


def random_bags(seed: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, offsets with the end, and weights of 30 bags of 0 to 12 keys."""
    rng = np.random.default_rng(seed)
    offsets = np.append(0, np.cumsum(rng.integers(0, 13, 30)))
    keys = rng.integers(0, rows, offsets[-1])
    weights = rng.normal(size=len(keys)).astype(np.float32)
    return torch.from_numpy(keys), torch.from_numpy(offsets), torch.from_numpy(weights)


def of_magnitudes(module: nn.Module) -> nn.Module:
    """The module with weights that are positive: what it answers bounds every partial sum of the other."""
    positive = copy.deepcopy(module)
    for weight in positive.parameters():
        weight.data.abs_()
    return positive


def assert_within_an_ulp_a_term(got: torch.Tensor, expected: torch.Tensor, most: torch.Tensor, terms: int = 12) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert bool((np.abs((got - expected).detach().numpy()) <= terms * np.spacing(most.detach().numpy())).all())


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "sum", "max_norm": 1.5},
        {"mode": "mean", "max_norm": 1.5, "padding_idx": 3},
        {"mode": "max", "max_norm": 1.5, "padding_idx": 3},
        {"mode": "sum", "padding_idx": -1, "include_last_offset": True, "weighted": True},
    ],
)
def test_bags_are_pooled_as_before(tmp_path: Path, server: HPS, arguments: dict[str, Any]) -> None:
    torch.manual_seed(1)
    weighted = "weighted" in arguments
    bag = nn.EmbeddingBag(ROWS, DIM, **{name: value for name, value in arguments.items() if name != "weighted"})
    converted = convert(bag, server, "shop", repository=tmp_path, hotness=30)
    assert isinstance(converted, EmbeddingBag)
    keys, offsets, weights = random_bags(1)
    offsets = offsets if bag.include_last_offset else offsets[:-1]
    positive = of_magnitudes(bag)
    bags, magnitudes = ((keys, offsets, one if weighted else None) for one in (weights, weights.abs()))
    assert_within_an_ulp_a_term(converted(*bags), bag(*bags), positive(*magnitudes))
    fixed = keys[:20].view(5, 4)
    assert_within_an_ulp_a_term(converted(fixed), bag(fixed), positive(fixed), 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_keys_have_the_dtype_that_they_had(tmp_path: Path, server: HPS, dtype: torch.dtype) -> None:
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=dtype)
    converted = convert(bag, server, "shop", repository=tmp_path, hotness=5)
    keys, weights = torch.arange(10).view(2, 5), torch.rand(2, 5).to(dtype)
    expected = torch.einsum("bh,bhd->bd", weights.float(), bag.weight.detach().float()[keys]).to(dtype)
    for answer in (converted(keys, None, weights), converted(keys, per_sample_weights=weights)):
        torch.testing.assert_close(answer, expected)


class Net(nn.Module):
    """Embeddings of each kind, in lists and dicts, one of them at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, padding_idx=0, max_norm=1.0)
        self.towers = nn.ModuleList([nn.ModuleDict({"item": nn.Embedding(ROWS, DIM)}), nn.Linear(DIM, 2)])
        self.same = self.towers[0]["item"]  # type: ignore[index]
        self.short = nn.Embedding(ROWS, 2, dtype=torch.bfloat16)

    def forward(self, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        items: Any = self.towers[0]
        return self.users(keys), self.towers[1](items["item"](keys) + self.same(keys)), self.short(keys)


@pytest.mark.parametrize("in_place", [False, True])
def test_embeddings_of_a_module_are_replaced_wherever_they_are(tmp_path: Path, server: HPS, in_place: bool) -> None:
    net, keys = Net(), torch.arange(ROWS).view(8, 5)
    expected = copy.deepcopy(net)(keys)  # of a copy: torch clips rows in place
    converted = convert(net, server, "shop", repository=tmp_path, hotness=40, in_place=in_place)
    assert (converted is net) is in_place
    assert net.training is not in_place
    assert not converted.training
    layers: Any = converted
    assert isinstance(layers.same, LookupLayer)
    assert layers.same is layers.towers[0]["item"]
    assert [isinstance(part, nn.Embedding) for part in (net.users, net.same, net.short)] == [not in_place] * 3
    assert {name.split(".")[0] for name in converted.state_dict()} == {"towers"}
    if not in_place:
        with torch.no_grad():  # so the answers come from the server
            for weight in net.parameters():
                weight.zero_()
    got = converted(keys)
    assert_within_an_ulp_a_term(got[0], expected[0], torch.ones(1), 1)
    assert torch.equal(got[1], expected[1])
    assert got[2].dtype == torch.bfloat16
    assert torch.equal(got[2], expected[2])


def test_what_is_deployed_already_is_used(tmp_path: Path, server: HPS) -> None:
    net = nn.Sequential(nn.Embedding(ROWS, DIM))
    save(net, tmp_path / "shop")
    server.poll()
    by_name = hps.torch.attach(server)
    for given in (server, by_name):
        converted = convert(net, given, "shop")
        assert torch.equal(converted(torch.arange(ROWS)), net[0].weight)
        assert converted(torch.tensor([ROWS])).tolist() == [[0.0] * DIM], "the default vector"
    with pytest.raises(InvalidInputError, match=f"vectors of 3 elements, but table '0' of model 'shop' is deployed with {DIM}"):
        convert(nn.Sequential(nn.Embedding(ROWS, 3)), server, "shop")
    with pytest.raises(UnknownTableError):
        convert(nn.ModuleDict({"other": nn.Embedding(ROWS, DIM)}), server, "shop")
    with pytest.raises(InvalidInputError, match="but no repository"):
        convert(net, server, "shop", hotness=3)


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    module = nn.Embedding(ROWS, DIM)
    module.register_forward_hook(lambda *_: None)
    return module


def patched() -> nn.Module:
    module: Any = nn.Embedding(ROWS, DIM)
    module.forward = lambda keys: 2 * nn.Embedding.forward(module, keys)
    return module


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Embedding(ROWS, DIM, max_norm=1, norm_type=1), "norm_type 1, expected 2"),
        (lambda: Scaled(ROWS, DIM), "a forward of Scaled's own"),
        (patched, "a forward of Embedding's own"),
        (hooked, "forward hooks"),
        (lambda: nn.Embedding(ROWS, DIM, device="meta"), "meta device"),
    ],
)
def test_what_no_layer_can_stand_for_is_refused_and_stays(tmp_path: Path, server: HPS, make: Any, match: str) -> None:
    module = nn.Sequential(nn.Embedding(ROWS, DIM), make())
    before = list(module)
    with pytest.raises(InvalidInputError, match=match):
        convert(module, server, "shop", repository=tmp_path, in_place=True)
    assert list(module) == before
    assert not list(tmp_path.iterdir())


def test_after_a_failed_deployment_the_module_is_as_it_was(tmp_path: Path, server: HPS) -> None:
    module = nn.Sequential(nn.Embedding(ROWS, DIM))
    server.close()
    with pytest.raises(HPSError):
        convert(module, server, "shop", repository=tmp_path, in_place=True)
    assert isinstance(module[0], nn.Embedding)
