"""The operators as torch's own checks see them."""

from typing import Any

import numpy as np
import pytest
import torch

import hps
import hps_torch
from hps.torch import attach
from hps.torch.operators import PooledFeature, as_text
from tests.ring1.torch.conftest import ROWS, Served

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def calls(name: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    keys, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    both = as_text([PooledFeature("user", 8, "mean"), PooledFeature("item", 5)])
    return {
        "rows": (torch.ops.hps.lookup, (keys.view(2, 3), name, "m", -1, "user", 8)),
        "clipped rows": (torch.ops.hps.lookup, (keys.int(), name, "m", 1, "", 5, 0.5)),
        "bags": (
            torch.ops.hps.lookup_bags,
            ([keys, keys.view(2, 3)], [offsets, None], [torch.ones(6), None], name, "m", both, True),
        ),
        "jagged": (torch.ops.hps.lookup_jagged, (keys, torch.tensor([0, 1, 2, 2, 6]), None, name, "m", both, [1, 0], 2)),
        "hugectr": (torch.ops.hps_torch.hps_embedding_lookup, (keys, name, "m", 1, 5)),
    }


@pytest.mark.parametrize("which", list(calls("")))
@pytest.mark.filterwarnings("ignore")
def test_torch_accepts_the_operator(served: Served, which: str) -> None:
    operator, arguments = calls(attach(served.server))[which]
    torch.library.opcheck(operator.default, arguments, test_utils=CHECKS)


KEYS, NONE = torch.arange(6), torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operator", "tensors", "more", "message"),
    [
        ("lookup_bags", ([KEYS], [NONE], [None]), (True,), "got no offsets"),
        ("lookup_bags", ([KEYS], [None, None], [None]), (True,), "got 1 keys, 2 offsets, 1 weights, expected 1 of each"),
        ("lookup_bags", ([], [], []), (True,), "got 0 keys"),
        ("lookup_jagged", (KEYS, NONE, None), ([0], 1), "got 0 offsets for 1 features"),
        ("lookup_jagged", (KEYS, torch.tensor([0, 6]), None), ([0], 2), "got 2 offsets for 2 features"),
        ("lookup_jagged", (KEYS, torch.tensor([0, 6]), torch.ones(5)), ([0], 1), "got 5 weights for 6 keys"),
    ],
)
def test_a_bad_call_of_an_operator_says_what_is_wrong(
    served: Served, operator: str, tensors: Any, more: Any, message: str
) -> None:
    with pytest.raises(hps.InvalidInputError, match=message):
        getattr(torch.ops.hps, operator)(*tensors, attach(served.server), "m", as_text([PooledFeature("user", 8)]), *more)


def test_code_for_hugectrs_plugin_runs_with_its_import(served: Served) -> None:
    keys = torch.tensor([[1, 2], [3, 400]], dtype=torch.int32)
    layer = hps_torch.LookupLayer(served.path, "m", 1, 5)
    torch.testing.assert_close(layer(keys), served.rows(keys, "item"), rtol=0, atol=0)
    direct = torch.ops.hps_torch.hps_embedding_lookup(keys, served.path, "m", 1, 5)
    torch.testing.assert_close(direct, served.rows(keys, "item"), rtol=0, atol=0)


def test_bags_without_offsets_follow_their_model_and_their_shapes(served: Served) -> None:
    features, rng = (
        as_text([PooledFeature("user", 8, "mean"), PooledFeature("item", 5, "sum", padding_key=3)]),
        np.random.default_rng(1),
    )
    place, user, item = attach(served.server), served.tables["user"], served.tables["item"]
    for value, shape in enumerate([(2, 3), (2, 3), (4, 1), (0, 2), (2, 3)]):
        served.write(7, float(value))
        user[7] = float(value)
        keys = [torch.from_numpy(rng.integers(0, ROWS, (shape[0], hot))) for hot in (shape[1], shape[1] + 1)]
        if keys[0].numel():
            keys[0][0, 0] = 7
        found = torch.ops.hps.lookup_bags(keys, [None] * 2, [None] * 2, place, "m", features, True)
        sums = torch.where((keys[1] == 3)[..., None], 0.0, item[keys[1]]).sum(1)
        torch.testing.assert_close(found, torch.cat([user[keys[0]].mean(1), sums], 1))
        before = served.server.model("m")
        served.server.deploy(before.config.model_copy(update={"hit_rate_threshold": 1.2 + value}))
        assert served.server.model("m") is not before
