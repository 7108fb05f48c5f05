"""The layer of rows: in eager mode, compiled, exported, scripted and traced."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.configuration.load import load_configuration
from hps.torch import EmbeddingBag, LookupLayer, attach
from tests.ring1.torch.conftest import DIMS, ROWS, Served
from tests.servers.running_service import document_of, model_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.tensor results:torch.jit.TracerWarning"),
]
Way = Callable[[torch.nn.Module, tuple[Any, ...]], Callable[..., Any]]
WAYS: dict[str, Way] = {
    "eager": lambda layer, _: layer,
    "compiled": lambda layer, _: torch.compile(layer, fullgraph=True, backend="aot_eager"),
    "dynamic": lambda layer, _: torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager"),
    "exported": lambda layer, inputs: torch.export.export(layer, inputs).module(),
    "scripted": lambda layer, _: torch.jit.script(layer),
    "frozen": lambda layer, _: torch.jit.freeze(torch.jit.script(layer.eval())),
    "traced": lambda layer, inputs: torch.jit.trace(layer, inputs, check_trace=False),
}
"""Without a C++ compiler; `tests/ring2/torch/test_compiled_layers.py` has what torch's own makes of a layer."""
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
some_ways = pytest.mark.parametrize("way", [WAYS[name] for name in ("eager", "compiled", "scripted")])


SHAPES = [*zip([(3, 4), (7,), (2, 3, 4), (), (0,), (2, 0)], [torch.int64, torch.int32] * 3, strict=True)]


@pytest.mark.parametrize(
    ("way", "shape", "dtype"),
    [(WAYS["eager"], *one) for one in SHAPES]
    + [(way, *SHAPES[nth % 6]) for nth, way in enumerate(WAYS.values())]
    + [(WAYS[name], (0,), torch.int64) for name in ("compiled", "scripted")],
)
def test_every_key_gets_its_vector(served: Served, way: Way, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    keys = torch.randint(0, ROWS + 50, shape, dtype=dtype)
    layer = LookupLayer(served.server, "m", "item", DIMS["item"])
    vectors = way(layer, (keys,))(keys)
    assert vectors.dtype == torch.float32
    assert not vectors.requires_grad
    torch.testing.assert_close(vectors, served.rows(keys, "item"), rtol=0, atol=0)


@some_ways
def test_keys_need_not_be_contiguous_and_answers_share_nothing(served: Served, way: Way) -> None:
    keys = torch.arange(24).reshape(4, 6).t()[::2]
    layer = way(LookupLayer(served.server, "m", 0, DIMS["user"]), (keys,))
    first, second = layer(keys), layer(keys)
    torch.testing.assert_close(first, served.rows(keys, "user"), rtol=0, atol=0)
    first.zero_()
    torch.testing.assert_close(second, served.rows(keys, "user"), rtol=0, atol=0)


@some_ways
def test_rows_are_clipped_to_max_norm(served: Served, way: Way) -> None:
    keys = torch.randint(0, ROWS, (3, 5))
    layer = LookupLayer(served.server, "m", "user", DIMS["user"], max_norm=1.5)
    expected = torch.nn.functional.embedding(keys, served.tables["user"].clone(), max_norm=1.5)
    torch.testing.assert_close(way(layer, (keys,))(keys), expected)


@pytest.mark.parametrize("table", [1, np.int64(1), "item"])
def test_a_table_is_named_or_numbered(served: Served, table: Any) -> None:
    keys = torch.arange(6).view(2, 3)
    expected = served.rows(keys, "item")
    torch.testing.assert_close(LookupLayer(served.server, "m", table, DIMS["item"])(keys), expected, rtol=0, atol=0)
    torch.testing.assert_close(EmbeddingBag(served.server, "m", table, DIMS["item"])(keys), expected.mean(1))


class Constant(torch.nn.Module):
    def __init__(self, server: hps.HPS) -> None:
        super().__init__()
        self.layer = LookupLayer(server, "m", "user", DIMS["user"])
        self.register_buffer("keys", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layer(self.keys) + x, self.layer(torch.arange(3, 5)), self.layer(torch.tensor([3, 4]))


@every_way
def test_an_update_is_seen_by_the_next_call_also_where_keys_are_constants(served: Served, way: Way) -> None:
    module = way(Constant(served.server).eval(), (torch.zeros(1),))
    for version in range(1, 4):
        served.write(3, version)
        with torch.no_grad():
            assert [answer[0, 0].item() for answer in module(torch.zeros(1))] == [version] * 3


def shown(layer: torch.nn.Module, way: Way, error: type[Exception], keys: Any) -> str:
    """What a call is refused with; in eager mode, of what type."""
    with pytest.raises(error if way is WAYS["eager"] else Exception) as refused:
        way(layer, (keys,))(keys)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "keys", "error", "message"),
    [
        (("m", "user", 8), torch.ones(3), hps.InvalidDtypeError, "got keys of torch.float32, expected torch.int64"),
        (("m", "user", 8), torch.ones(3, dtype=torch.bool), hps.InvalidDtypeError, "got keys of torch.bool"),
        (("m", "user", 9), torch.arange(3), hps.InvalidInputError, "got emb_vec_size 9, expected 8, the table's width"),
        (("m", "shop", 8), torch.arange(3), hps.UnknownTableError, "got table 'shop', expected one of 0 (user), 1 (item)"),
        (("m", 2, 8), torch.arange(3), hps.UnknownTableError, "got table 2"),
        (("n", "user", 8), torch.arange(3), hps.UnknownModelError, "'n'"),
        (("m", "user", 8), torch.zeros(2000, dtype=torch.int64), hps.TooManyKeysError, "2000"),
    ],
)
def test_a_bad_call_says_what_is_wrong(served: Served, arguments: Any, keys: Any, error: type[Exception], message: str) -> None:
    assert message in shown(LookupLayer(served.server, *arguments), WAYS["eager"], error, keys)


@some_ways
def test_a_closed_server_says_so(served: Served, way: Way) -> None:
    layer = LookupLayer(served.server, "m", "user", 8)
    served.server.close()
    assert "it is closed" in shown(layer, way, hps.NotReadyError, torch.arange(3))


@some_ways
def test_training_mode_is_refused_when_called(served: Served, way: Way) -> None:
    model = torch.nn.Sequential(LookupLayer(served.server, "m", "user", 8))
    assert not model[0].training
    model.train()
    assert "call .eval()" in shown(model[0], way, hps.TrainingModeError, torch.arange(3))
    model.eval()
    assert way(model[0], (torch.arange(3),))(torch.arange(3)).shape == (3, 8)


def test_a_layer_is_copied_pickled_and_has_no_state(served: Served) -> None:
    for place in (served.path, attach(served.server)):
        layer = LookupLayer(place, "m", "user", 8, max_norm=2.0)
        assert not layer.state_dict()
        assert repr(layer) == f"LookupLayer({place!r}, 'm', 'user', 8, max_norm=2.0)"
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(twin(torch.arange(9)), layer(torch.arange(9)), rtol=0, atol=0)


def test_a_version_of_another_width_is_refused_and_not_read_as_the_layers(served: Served, tmp_path: Any) -> None:
    layer = LookupLayer(served.server, "m", "user", 8)
    keys = torch.arange(3)
    torch.testing.assert_close(layer(keys), served.rows(keys, "user"), rtol=0, atol=0)
    hps.write_sparse_model(tmp_path / "wide", (np.arange(4), np.ones((4, 5), np.float32)))
    document = document_of(
        {**model_of("m", [tmp_path / "wide", tmp_path / "item"], {"user": 5, "item": 5}, checks=False), "version": "2"}
    )
    served.server.deploy(load_configuration(document).models[0])
    with pytest.raises(hps.InvalidInputError, match="got emb_vec_size 8, expected 5"):
        layer(keys)
