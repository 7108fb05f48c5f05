"""Modules that cannot be cut, each with the words of the reason; and examples that are bad or unusual."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import DIM, LENGTH, ROWS, Draw, embedding, form, linear, mlp
from tests.tables.torch_forms.sequences import GRU4Rec
from tests.tables.torch_forms.traps import history, trap


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        return self.fc(self.e(hist).mean(1)).squeeze(1)


@form(history, refused="ScriptModule")
def scripted() -> nn.Module:
    return torch.jit.script(_Scripted())


@form(lambda draw: {"hist": draw.history(), "length": draw.lengths().clamp(min=1)}, refused="packed")
def packed_sequence() -> nn.Module:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.gru, self.fc = nn.Embedding(ROWS, DIM), nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, 1)

        def forward(self, hist: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.e(hist), length, batch_first=True, enforce_sorted=False)
            return self.fc(self.gru(packed)[1][-1]).squeeze(1)

    return Packed()


@form(lambda draw: {"x": draw.floats(draw.samples, 4)}, refused="no lookup")
def no_table_at_all() -> nn.Module:
    return _Named(mlp(4, 8, 1))


class _Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).squeeze(1)


@form(lambda draw: {"x": draw.floats(draw.samples, DIM)}, refused="no lookup", position=embedding(4), fc=linear())
def constant_keys_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x + self.position(torch.arange(4)).sum(0)).squeeze(1)


@form(lambda draw: {"hist": draw.history()}, refused="no lookup", w=lambda: nn.Parameter(torch.rand(ROWS, DIM)), fc=linear())
def products_with_one_hot_rows(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(F.one_hot(hist, ROWS).float().sum(1) @ self.w).squeeze(1)


@dataclass
class Request:
    """Not registered as a pytree."""

    item: torch.Tensor


@form(lambda draw: (Request(draw.keys()),), refused="Request", e=embedding(), fc=linear())
def dataclass_input(self: Any, request: Request) -> torch.Tensor:
    return self.fc(self.e(request.item)).squeeze(1)


@form(lambda draw: (draw.keys().tolist(),), within=None, e=embedding(), fc=linear())
def lists_of_numbers(self: Any, items: list[int]) -> torch.Tensor:
    """Python's numbers are constants, so the keys of the examples would be."""
    return self.fc(self.e(torch.tensor(items))).squeeze(1)


@form(history, refused="meta")
def on_meta() -> nn.Module:
    return _Scripted().to("meta")


@form(history, within=None)
def lazy_parts() -> nn.Module:
    """Layers that have no weights before their first call."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.LazyLinear(1)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(hist).sum(1)).squeeze(1)

    return Lazy()


@trap(refused="no such feature")
def raises(self: Any, hist: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such feature")


@trap(within=None)
def prints_and_asserts(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Checks of values: where they fail the module raises."""
    assert hist.min() >= 0
    return self.fc(self.e(hist).sum(1)).squeeze(1)


@form(history, within=None)
def a_module_that_returns_a_generator() -> nn.Module:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

        def forward(self, hist: torch.Tensor) -> Any:
            return (self.fc(one).squeeze(1) for one in self.e(hist).unbind(1))

    return Generator()


# -- unusual examples ---------------------------------------------------------------------------------------------------


def as_numpy(draw: Draw) -> dict[str, Any]:
    found = {"hist": draw.history(), "age": draw.floats()}
    return {name: one.numpy() for name, one in found.items()} if draw.examples else found


@form(as_numpy, e=embedding(), fc=linear(DIM + 1))
def numpy_examples(self: Any, hist: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.e(hist).sum(1), age[:, None]], 1)).squeeze(1)


def one_sample(draw: Draw) -> dict[str, torch.Tensor]:
    return history(Draw(1, draw.length)) if draw.examples else history(draw)


@form(one_sample, within=None, e=embedding(), fc=linear())
def examples_of_one_sample(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Traced with one sample only, or refused; never wrong for more."""
    return self.fc(self.e(hist).sum(1)).squeeze(1)


def one_key(draw: Draw) -> dict[str, torch.Tensor]:
    return history(Draw(draw.samples, 1)) if draw.examples else history(draw)


@form(one_key, within=None, e=embedding(), fc=linear())
def examples_of_one_key(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1)).squeeze(1)


@form(
    lambda draw: {"hist": draw.history().t().contiguous().t() if draw.examples else draw.history()}, e=embedding(), fc=linear()
)
def examples_with_strides(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1)).squeeze(1)


@form(history, within=lambda samples, length: length == LENGTH)
def in_training_mode() -> nn.Module:
    """Its mode is the same after packaging."""
    return GRU4Rec().train()


@form(history, within=None)
def rows_that_are_not_numbers() -> nn.Module:
    """A checkpoint with NaN in a row that the examples do not read."""
    module = _Scripted()
    with torch.no_grad():
        module.e.weight[0] = float("nan")
    return module


@form(lambda draw: {"x": torch.from_numpy(np.stack([draw.keys().numpy()] * 2, 1))}, e=embedding(), fc=linear(), within=None)
def examples_with_equal_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Both columns are equal in all inputs; which is read is the graph's matter."""
    return self.fc(self.e(x[:, 0]) - self.e(x[:, 1]) * 2).squeeze(1)
