"""Quantised embeddings are saved, converted and packaged with the rows that they answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.nn import quantized

import hps
import hps.torch
from hps.torch import convert, package, save
from tests.servers.running_service import document_of

ROWS = 40
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning"),  # those that quantising gives, and torchrec's import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def score(place: Path, inputs: Any, **document: Any) -> hps.Scores:
    with hps.HPS(document_of(model_repository=str(place), **document)) as server:
        return server.score("m", inputs)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def packed(kind: type[nn.Module], bits: int, dim: int = 6, **options: Any) -> Any:
    """A quantised embedding of torch's; of 4-bit rows, `Embedding.from_float` makes one that cannot answer."""
    if kind is quantized.Embedding:
        weight, dtype = torch.randn(ROWS, dim), torch.quint8 if bits == 8 else torch.quint4x2
        observer = torch.ao.quantization.PerChannelMinMaxObserver(
            ch_axis=0, dtype=dtype, qscheme=torch.per_channel_affine_float_qparams
        )
        observer(weight)
        scale, zero = observer.calculate_qparams()
        rows = torch.quantize_per_channel(weight, scale, zero, 0, dtype)
        return quantized.Embedding(ROWS, dim, _weight=rows, dtype=dtype)
    bag = nn.EmbeddingBag(ROWS, dim, **options)
    configs = torch.ao.quantization
    bag.qconfig = configs.float_qparams_weight_only_qconfig if bits == 8 else configs.float_qparams_weight_only_qconfig_4bit
    return quantized.EmbeddingBag.from_float(bag)


def table(place: Path, name: str, dim: int) -> np.ndarray:
    keys, rows = np.fromfile(place / name / "key", np.int64), np.fromfile(place / name / "emb_vector", np.float32)
    assert keys.tolist() == list(range(ROWS))
    return rows.reshape(ROWS, dim)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", [quantized.Embedding, quantized.EmbeddingBag])
def test_rows_are_those_that_the_module_answers(
    tmp_path: Path, kind: type[nn.Module], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100)  # several chunks a table
    module = packed(kind, bits)
    alone = (torch.arange(ROWS), torch.arange(ROWS)) if kind is quantized.EmbeddingBag else (torch.arange(ROWS),)
    save(nn.ModuleDict({"item": module}), tmp_path / "m")
    rows = table(tmp_path / "m" / "1", "item", 6)
    assert np.array_equal(rows, module(*alone).numpy())
    np.testing.assert_allclose(rows, module.weight().dequantize().numpy(), atol=1e-2)
    changed = torch.tensor([39, 0, 7])
    save(nn.ModuleDict({"item": module}), tmp_path / "m", delta_of="1", changed={"item": changed})
    delta = np.fromfile(tmp_path / "m" / "2" / "item" / "emb_vector", np.float32).reshape(-1, 6)
    assert np.array_equal(delta, rows[[0, 7, 39]])


def test_rows_of_4_bits_are_saved_although_the_module_cannot_answer(tmp_path: Path) -> None:
    plain: Any = nn.Embedding(ROWS, 6)
    plain.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig_4bit
    module = quantized.Embedding.from_float(plain)
    assert module.dtype is torch.quint8  # torch's mistake: the rows have 4 bits
    save(nn.ModuleDict({"item": module}), tmp_path / "m")
    rows = table(tmp_path / "m" / "1", "item", 6)
    np.testing.assert_allclose(rows, module.weight().dequantize().numpy(), atol=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_answer_as_quantised_embeddings(tmp_path: Path, server: hps.HPS, bits: int) -> None:
    kinds = {"rows": packed(quantized.Embedding, bits), "bags": packed(quantized.EmbeddingBag, bits)}
    module: Any = nn.ModuleDict(kinds | {"last": packed(quantized.EmbeddingBag, bits, include_last_offset=True)})
    converted: Any = convert(module, server, "m", repository=tmp_path, hotness=9)
    keys, offsets = torch.randint(0, ROWS, (12,)), torch.tensor([0, 3, 3, 12])
    assert torch.equal(converted["rows"](keys.view(3, 4)), module["rows"](keys.view(3, 4)))
    for name, given in (("last", (keys, offsets)), ("bags", (keys, offsets[:-1])), ("bags", (keys.view(3, 4),))):
        torch.testing.assert_close(converted[name](*given), module[name](*given), rtol=0, atol=1e-6)


class Mixed(nn.Module):
    """Two quantised embeddings and a plain one, of bags with offsets, of columns and of a whole input."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.tags = packed(quantized.EmbeddingBag, bits, mode="mean")  # and yet it sums
        self.user = packed(quantized.Embedding, bits)
        self.item = nn.EmbeddingBag(ROWS, 6, mode="mean", padding_idx=0)
        self.top = nn.Linear(18, 1)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.user(ids[:, 1].contiguous()), self.item(seen), self.tags(tags)], 1)).squeeze(1)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_module_with_quantised_and_plain_embeddings_is_packaged(tmp_path: Path, bits: int) -> None:
    module = Mixed(bits)
    examples = torch.randint(0, ROWS, (4, 2)), torch.randint(0, 3, (4, 5)), torch.randint(0, ROWS, (4, 3))
    examples[1][0] = 0  # padding alone
    for number in ("1", "2"):
        done = package(module, tmp_path / "m", examples)
        assert (done.version, done.difference < 1e-6, done.dense.inputs["tags"].pooling) == (number, True, "sum")
    ids, seen, tags = torch.randint(0, ROWS, (7, 2)), torch.randint(0, 4, (7, 2)), torch.randint(0, ROWS, (7, 9))
    seen[3] = 0
    found = score(tmp_path, {"ids": ids, "seen": seen, "tags": tags})
    assert found.version == "2"
    np.testing.assert_allclose(found["score"], module(ids, seen, tags).detach(), atol=1e-6)


def test_a_weighted_quantised_bag_is_packaged(tmp_path: Path) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = packed(quantized.EmbeddingBag, 8)

        def forward(self, ids: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
            return self.item(ids[:, None], per_sample_weights=age[:, None]).sum(1)

    module, ids, age = Weighted(), torch.arange(4), torch.rand(4)
    package(module, tmp_path / "m" / "1", (ids, age))
    np.testing.assert_allclose(score(tmp_path, {"ids": ids + 1, "age": age})["score"], module(ids + 1, age).detach(), atol=1e-6)
