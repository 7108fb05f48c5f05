"""Layers in programs that torch's inductor compiles, with a C++ compiler where there is arithmetic besides the lookup."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hps.torch import EmbeddingBag
from tests.ring1.torch.conftest import Served
from tests.ring1.torch.conftest import served as served  # a fixture
from tests.ring1.torch.test_embedding_bags import expected_of, random_bags
from tests.ring1.torch.test_lookup_layer import Constant

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]


def plain(module: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True)


def dynamic(module: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True, dynamic=True)


def freezing(module: torch.nn.Module) -> Callable[..., Any]:
    with torch._inductor.config.patch(freezing=True):
        program = torch.compile(module, fullgraph=True)
        program(torch.zeros(1))  # compiled here
        return program


@pytest.mark.parametrize("make", [plain, dynamic, freezing])
def test_an_update_is_seen_by_the_next_call_although_keys_are_constants(served: Served, make: Any) -> None:
    with torch.no_grad():
        module = make(Constant(served.server).eval())
        for version in range(1, 4):
            served.write(3, version)
            assert [answer[0, 0].item() for answer in module(torch.zeros(1))] == [version] * 3


def test_bags_are_pooled_in_a_compiled_program(served: Served) -> None:
    keys, offsets, weights = random_bags(9, 2)
    layer = EmbeddingBag(served.server, "m", "item", 5, mode="sqrtn", include_last_offset=True)
    torch.testing.assert_close(
        plain(layer)(keys, offsets, weights), expected_of(served, "item", keys, offsets, weights, "sqrtn")
    )
