"""Layers in programs that torch's inductor compiles, with a C++ compiler where there is arithmetic besides the lookup."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hps import HPS
from hps.torch import convert
from tests.ring1.torch.conftest import Served
from tests.ring1.torch.conftest import served as served  # a fixture
from tests.ring1.torch.conftest import server as server  # a fixture
from tests.ring1.torch.test_lookup_layer import WAYS, Constant, Way
from tests.ring1.torch.test_served_weight import KEYS, Net

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]


def dynamic(module: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True, dynamic=True)


def freezing(module: torch.nn.Module) -> Callable[..., Any]:
    with torch._inductor.config.patch(freezing=True):
        program = torch.compile(module, fullgraph=True)
        program(torch.zeros(1))  # compiled here
        return program


@pytest.mark.parametrize("make", [dynamic, freezing])
def test_an_update_is_seen_by_the_next_call_although_keys_are_constants(served: Served, make: Any) -> None:
    with torch.no_grad():
        module = make(Constant(served.server).eval())
        for version in range(1, 4):
            served.write(3, version)
            assert [answer[0, 0].item() for answer in module(torch.zeros(1))] == [version] * 3


@pytest.mark.parametrize("way", [WAYS["compiled"], WAYS["exported"]])
def test_code_that_reads_weights_runs_as_before(tmp_path: Path, server: HPS, way: Way) -> None:
    net = Net().eval()
    with torch.no_grad():
        program = way(convert(net, server, "m", repository=tmp_path, hotness=40), (KEYS,))
        torch.testing.assert_close(program(KEYS), net(KEYS))
