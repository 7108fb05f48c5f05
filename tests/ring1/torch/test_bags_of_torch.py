"""Bags of all dtypes, modes and forms have the answers of `torch.nn.functional.embedding_bag`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

import hps
from hps.torch import EmbeddingBag, LookupLayer
from tests.servers.running_service import document_of

ROWS, DIM = 40, 6
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = {dtype: f"of_{dtype}".replace("torch.", "") for dtype in TOLERANCES}
KEYS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hps.HPS, torch.nn.ModuleDict]]:
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("models")
    module = torch.nn.ModuleDict({NAMES[dtype]: torch.nn.EmbeddingBag(ROWS, DIM, dtype=dtype) for dtype in TOLERANCES})
    hps.torch.save(module, directory / "m", hotness=500)
    with hps.HPS(document_of(model_repository=str(directory))) as server:
        yield server, module
    hps.torch.close()


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A table's dtype, the options of a layer, and its arguments."""
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    by_offsets, mode = draw(st.booleans()), draw(st.sampled_from(["sum", "mean", "max"]))
    few = [draw(st.integers(0, 4))] * draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 4) | st.integers(0, 40), max_size=8)) if by_offsets else [max(1, few[0])] * len(few)
    keys = torch.randint(ROWS, (sum(lengths),), generator=seeded)
    keys[torch.rand(len(keys), generator=seeded) < 0.3] = 3
    offsets, last = None, draw(st.booleans())
    if by_offsets:
        offsets = torch.tensor([0, *lengths]).cumsum(0)[: None if last else -1]
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    weighted = mode == "sum" and draw(st.booleans())
    return {
        "dtype": dtype,
        "mode": mode,
        "padding_idx": draw(st.sampled_from([None, 3, 0])),
        "max_norm": draw(st.sampled_from([None, 0.5, 2.0])),
        "include_last_offset": last and by_offsets,
        "keys": (keys if by_offsets else keys.view(len(lengths), -1)).to(draw(st.sampled_from(KEYS))),
        "offsets": None if offsets is None else offsets.to(draw(st.sampled_from(KEYS[:2]))),
        "weights": torch.rand(len(keys), generator=seeded).to(dtype).view(-1 if by_offsets else (len(lengths), -1))
        if weighted
        else None,
    }


def of_torch(weight: Tensor, call: dict[str, Any]) -> Tensor:
    offsets = call["offsets"]
    if call["keys"].numel() == 0 and call["mode"] == "max":  # torch fails to reduce no keys
        return torch.zeros(len(offsets) - call["include_last_offset"], DIM, dtype=weight.dtype)
    options = {name: call[name] for name in ("mode", "max_norm", "padding_idx", "include_last_offset")}
    return embedding_bag(
        call["keys"].long(),
        weight.detach().clone(),  # which torch clips in place
        None if offsets is None else offsets.long(),
        per_sample_weights=call["weights"],
        **options,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_bags_are_those_of_torch(tables: tuple[hps.HPS, torch.nn.ModuleDict], call: dict[str, Any]) -> None:
    server, module = tables
    name = NAMES[call["dtype"]]
    options = {name: call[name] for name in ("mode", "max_norm", "padding_idx", "include_last_offset")}
    got = EmbeddingBag(server, "m", name, DIM, **options)(call["keys"], call["offsets"], call["weights"])
    expected, tolerance = of_torch(module[name].weight, call), TOLERANCES[call["dtype"]]
    assert got.dtype == torch.float32
    magnitude = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=tolerance, atol=8 * tolerance * magnitude)


@pytest.mark.parametrize("dtype", KEYS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_rows_are_those_of_torch_for_keys_of_any_integers(
    tables: tuple[hps.HPS, torch.nn.ModuleDict], dtype: torch.dtype, max_norm: float | None
) -> None:
    server, module = tables
    keys = torch.arange(24).view(2, 3, 4).to(dtype)
    for asked in (keys, keys.transpose(0, 2)):
        got = LookupLayer(server, "m", "of_float32", DIM, max_norm=max_norm)(asked)
        expected = embedding(asked.long(), module["of_float32"].weight.detach().clone(), max_norm=max_norm)
        torch.testing.assert_close(got, expected)
