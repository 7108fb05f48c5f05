"""A layer that replaces an embedding has what code reads of one; its weight is looked up, and nothing else."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hps
from hps import InvalidInputError, ServedWeightError
from hps.torch import convert

DIM, ROWS = 6, 40
KEYS = torch.tensor([[3, 0, 39], [7, 7, 1]])
LAYER_ATTRIBUTES = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class Net(nn.Module):
    """Uses a weight as a module may: attributes, rows by keys, rows by number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3, dtype=dtype)
        self.top = nn.Linear(DIM, 1, dtype=dtype)

    def forward(self, keys: torch.Tensor) -> Any:
        weight, tags = self.item.weight, self.tags.weight
        vectors = self.item(input=keys) + weight[keys] + functional.embedding(keys, tags)
        vectors = vectors * self.item.embedding_dim**-0.5 + weight.index_select(0, keys[:, 0])[:, None]
        first = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device) + torch.index_select(tags, 0, keys[0])
        first = first.double().to(tags) + weight.new_ones(3, 1) + keys[0][:, None].type_as(tags)
        return self.top(vectors.sum(1) + first.sum(0) + weight[2] + weight[-3:].sum(0) + self.tags(keys))


@pytest.fixture
def served(tmp_path: Path, server: hps.HPS) -> Callable[..., Any]:
    """Converts a module."""
    return lambda module, model="m", **more: convert(module, server, model, repository=tmp_path, hotness=40, **more)


def test_code_that_reads_weights_runs_as_before(served: Any) -> None:
    net = Net().eval()
    torch.testing.assert_close(served(net, example_inputs={"keys": KEYS})(KEYS), net(KEYS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_says_what_the_embedding_was_and_follows_the_module(served: Any, dtype: torch.dtype) -> None:
    net = Net(dtype)
    converted = served(net)
    for name in ("item", "tags"):
        trained, layer = net.get_submodule(name), converted.get_submodule(name)
        for attribute in (
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "sparse",
        ):
            assert getattr(layer, attribute) == getattr(trained, attribute)
        assert getattr(layer, "mode", None) == getattr(trained, "mode", None)
        weight: Any = layer.weight
        for attribute in ("shape", "dtype", "device", "ndim", "is_cuda", "is_meta", "grad"):
            assert getattr(weight, attribute) == getattr(trained.weight, attribute)
        assert (len(weight), weight.numel(), weight.dim(), weight.size(), weight.size(1)) == (
            ROWS,
            ROWS * DIM,
            2,
            (ROWS, DIM),
            DIM,
        )
        assert not weight.requires_grad
        assert torch.equal(weight[KEYS], trained.weight[KEYS])
        assert torch.equal(weight[(KEYS - ROWS).to(torch.int8)], trained.weight[KEYS - ROWS])
        for integers in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            assert torch.equal(weight.index_select(0, KEYS[0].to(integers)), trained.weight[KEYS[0]])
            assert torch.equal(layer(KEYS.to(integers)), layer(KEYS))
        assert layer.dtype == dtype
        assert layer.half()(KEYS).dtype == torch.float16
        assert f"[{ROWS}, {DIM}]" in repr(weight)


def test_a_state_dict_of_the_trained_module_is_loaded_without_its_rows(served: Any) -> None:
    net = Net()
    converted, other = served(net), Net()
    assert {*converted.state_dict()} == {"top.weight", "top.bias"}
    assert not any(converted.load_state_dict(other.state_dict()))
    assert torch.equal(converted.top.weight, other.top.weight)
    assert torch.equal(converted.item(KEYS), net.item(KEYS))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"extra"'):
        converted.load_state_dict({**other.state_dict(), "extra": torch.zeros(1)})
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(twin(KEYS), converted(KEYS))


USES: dict[str, Callable[[Any], Any]] = {
    "t": lambda weight: torch.ones(2, DIM) @ weight.t(),
    "data": lambda weight: weight.data,
    "matmul": lambda weight: torch.ones(ROWS) @ weight,
    "__matmul__": lambda weight: weight @ torch.ones(DIM),
    "__mul__": lambda weight: weight * 2,
    "mul": lambda weight: torch.ones(DIM) * weight,
    "__eq__": lambda weight: weight == 0,
    "__setitem__": lambda weight: weight.__setitem__(0, 1.0),
    "__iter__": list,
    "__array__": np.asarray,
    "cat": lambda weight: torch.cat([weight, weight]),
    "linear": lambda weight: functional.linear(torch.ones(2, DIM), weight),
    "weight[torch.bool]": lambda weight: weight[torch.ones(ROWS, dtype=torch.bool)],
    "weight[torch.uint8]": lambda weight: weight[torch.ones(ROWS, dtype=torch.uint8)],
    "weight[tuple]": lambda weight: weight[KEYS, 0],
    "index_select of dimension 1": lambda weight: weight.index_select(1, KEYS[0]),
    "norm_type 1": lambda weight: functional.embedding(KEYS, weight, max_norm=1.0, norm_type=1),
}


class Use(nn.Module):
    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, max_norm=1.0)
        self.use = use

    def forward(self, keys: torch.Tensor) -> Any:
        return self.item(keys), self.use(self.item.weight)


@pytest.mark.parametrize("use", USES)
def test_other_uses_of_a_weight_are_refused_by_name(served: Any, use: str) -> None:
    converted = served(Use(USES[use]))
    with pytest.raises(ServedWeightError) as refused:
        converted(KEYS)
    assert str(refused.value).startswith("using the weight of table 'item' of model 'm': got ")
    assert f"{use}, " in str(refused.value)
    assert not hasattr(converted.item.weight, "t")


def test_with_examples_they_are_refused_before_anything_is_written(served: Any, tmp_path: Path) -> None:
    module = Use(USES["t"])
    with torch.no_grad():
        before = module.item.weight.mul_(9.0).clone()
    with pytest.raises(ServedWeightError, match="the weight of 'item': got t, but its rows are in the server"):
        served(module, example_inputs=(KEYS,))
    with pytest.raises(InvalidInputError, match="does not run on the examples: IndexError"):
        served(module, example_inputs=(KEYS + ROWS,))
    assert torch.equal(module.item.weight, before), "torch would scale looked up rows in place"
    assert not list(tmp_path.iterdir())
    got, whole = served(Use(len), example_inputs=(KEYS,))(KEYS)
    assert (got.shape, whole) == ((2, 3, DIM), ROWS)


class Tied(nn.Module):
    """An output layer that shares the weight of an embedding, and a table that is no embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.out = nn.Linear(DIM, ROWS, bias=False)
        self.out.weight = self.item.weight
        self.own = nn.Parameter(torch.randn(ROWS, DIM))

    def forward(self, keys: torch.Tensor) -> Any:
        return self.out(self.item(keys).mean(1) + functional.embedding(keys[:, 0], self.own) + self.own[keys[:, 1]])


def test_weights_that_stay_in_the_module_are_reported(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = Tied().eval()
    converted = served(module, example_inputs=[KEYS])
    assert [record.getMessage() for record in caplog.records if record.name == "hps.torch.conversion"] == [
        "converting item: out.weight shares its weight and keeps a copy, without updates",
        "converting: parameter own is looked up, but is no nn.Embedding's weight, and stays in the module",
    ]
    torch.testing.assert_close(converted(KEYS), module(KEYS))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item,return-value]
    "data parallel": nn.DataParallel,
    "both": lambda module: torch.compile(nn.DataParallel(module), backend="eager"),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_modules_are_converted_inside(served: Any, wrap: Callable[[nn.Module], nn.Module], in_place: bool) -> None:
    net = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)).eval()
    module: Any = nn.ModuleDict({"tower": wrap(net)})
    with torch.no_grad():
        expected = net(KEYS)
        assert torch.equal(module["tower"](KEYS), expected)
        assert torch.equal(served(wrap(net), "tower")(KEYS), expected)
        converted = served(module, in_place=in_place)
        assert torch.equal(converted["tower"](KEYS), expected)
    assert {name.rpartition(".")[2] for name in converted.state_dict()} == {"weight", "bias"}
    assert len(converted.state_dict()) == 2
