"""What a form is: a module that users have, how its inputs are drawn, and how `hps.torch.package` must take it."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

ROWS, DIM = 50, 8
SAMPLES, LENGTH = 4, 5
"""Sizes of the examples."""
_SIZES = [(SAMPLES, LENGTH), *itertools.product((1, 2, 5, 64, 300), (0, 1, 2, 7, LENGTH))]
_KINDS = ("any", "any", "edges", "same", "padding")


class Draw:
    """Draws the inputs of a form. Examples have neither paddings nor repeated keys nor empty bags.

    Attributes:
        samples, length: how many samples, and keys of a history.
        kind: of keys: `examples`, `any`, `edges` (the first and the last rows), `same`, or `padding` (the first row alone).
        edge: of the fresh inputs: whether keys are extreme.
    """

    def __init__(self, samples: int = SAMPLES, length: int = LENGTH, kind: str = "examples", seed: int = 0) -> None:
        self.samples, self.length, self.kind = samples, length, kind
        self._random = torch.Generator().manual_seed(seed)

    @property
    def examples(self) -> bool:
        return self.kind == "examples"

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._random)

    def keys(self, *shape: int, rows: int = ROWS) -> torch.Tensor:
        """Draw keys of a table; default: one a sample."""
        shape = shape or (self.samples,)
        count = math.prod(shape)
        if self.kind == "examples":
            distinct = torch.randperm(rows - 1, generator=self._random)[:count] + 1
            return distinct.reshape(shape) if len(distinct) == count else self.integers(1, rows, *shape)
        if self.kind == "edges":
            return torch.tensor([0, min(1, rows - 1), rows - 1])[self.integers(0, 3, *shape)]
        if self.kind == "same":
            return self.integers(0, rows, 1).expand(count).reshape(shape).clone()
        return torch.zeros(shape, dtype=torch.int64) if self.kind == "padding" else self.integers(0, rows, *shape)

    def history(self, rows: int = ROWS, length: int | None = None) -> torch.Tensor:
        """Draw (samples, length) keys, those behind a sample's last one 0."""
        length = self.length if length is None else length
        keys = self.keys(self.samples, length, rows=rows)
        if self.examples:
            return keys
        used = self.integers(0, length + 1, self.samples, 1)
        return torch.where(torch.arange(length) < used, keys, 0)

    def floats(self, *shape: int) -> torch.Tensor:
        """Draw numbers in [0, 1); default: one a sample."""
        return torch.rand(shape or (self.samples,), generator=self._random)

    def flags(self, *shape: int) -> torch.Tensor:
        return self.floats(*shape) < 0.5

    def lengths(self, count: int | None = None, most: int | None = None) -> torch.Tensor:
        """Draw how many keys each bag has, for `count` bags (default: one a sample)."""
        count = self.samples if count is None else count
        most = self.length if most is None else most
        return self.integers(1 if self.examples else 0, most + 1, count) if most else torch.zeros(count, dtype=torch.int64)

    def bags(self, *, include_last: bool = False, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (keys, offsets) of one bag a sample."""
        lengths = self.lengths()
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return self.keys(int(lengths.sum()), rows=rows), ends if include_last else ends[:-1]


class Size(NamedTuple):
    """Number of samples, and of keys in a history, of a request."""

    samples: int
    length: int


Inputs = tuple[Any, ...] | dict[str, Any]
"""Positional arguments of a module, or arguments by name."""


@dataclass(frozen=True)
class Form:
    """A module with its inputs. *Immutable.*

    Attributes:
        name: in the catalogue.
        make: makes the module.
        draw: draws its inputs.
        within: whether inputs of a size must be answered; others may be refused by a guard. None: the module may be refused.
        refused: words of the reason for which it must be refused; empty if it must be packaged.
        others: draws inputs of other structures, dtypes or numbers than the examples': answered equally, or refused.
        per_request: inputs that a request gives once.
        alone: whether samples depend on each other, so that requests must not be merged.
        tolerance: largest difference, relative to max(1, |value|).
        slow: left to the nightly tests.
    """

    name: str
    make: Callable[[], nn.Module] = field(repr=False)
    draw: Callable[[Draw], Inputs] = field(repr=False)
    within: Callable[[int, int], bool] | None = field(repr=False)
    refused: str
    others: Callable[[Draw], list[Inputs]] = field(repr=False)
    per_request: tuple[str, ...]
    alone: bool
    tolerance: float
    slow: bool

    def module(self) -> nn.Module:
        """Make the module, in evaluation mode, always with the same weights; also the row of a padding key is not zero."""
        seed = zlib.crc32(self.name.encode())
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.make()
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.padding_idx is not None:
                    with torch.no_grad():
                        part.weight[part.padding_idx].uniform_(-1, 1)  # a checkpoint's row may be anything
        return module.eval()

    def examples(self) -> Inputs:
        return self.draw(Draw())

    def fresh(self) -> Iterator[tuple[Size, Inputs]]:
        """Draw inputs of every size. Those of the examples' size are first."""
        for number, (samples, length) in enumerate(_SIZES):
            yield Size(samples, length), self.draw(Draw(samples, length, _KINDS[number % len(_KINDS)], number + 1))


FORMS: dict[str, Form] = {}
"""The catalogue, by name."""


def everywhere(samples: int, length: int) -> bool:
    return True


def own_length(samples: int, length: int) -> bool:
    """The module's loops or buffers fix the length of a history, or its kernel does when it is traced (GRU, LSTM)."""
    return length == LENGTH


def form(
    draw: Callable[[Draw], Inputs],
    *,
    within: Callable[[int, int], bool] | None = everywhere,
    refused: str = "",
    others: Callable[[Draw], list[Inputs]] = lambda draw: [],
    per_request: tuple[str, ...] = (),
    alone: bool = False,
    tolerance: float = 1e-6,
    slow: bool = False,
    **parts: Any,
) -> Callable[[Any], Any]:
    """Add a form to the catalogue: a class of modules, a function that makes one, or the `forward` of one with these parts.

    Args:
        parts: of a forward's module: functions that make a module or a parameter, or tensors, which become buffers.
    """

    def add(made: Any) -> Any:
        make = made
        if not isinstance(made, type) and "self" in made.__code__.co_varnames[:1]:
            make = _module_of(made, parts)
        else:
            assert not parts, f"{made.__name__} makes its parts itself"
        assert made.__name__ not in FORMS, made.__name__
        FORMS[made.__name__] = Form(made.__name__, make, draw, within, refused, others, per_request, alone, tolerance, slow)
        return made

    return add


def _module_of(forward: Callable[..., Any], parts: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module: nn.Module = type(forward.__name__, (nn.Module,), {"forward": forward})()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                module.register_buffer(name, part.clone())
            else:
                setattr(module, name, part() if callable(part) else part)
        return module

    return make


def embedding(rows: int = ROWS, dim: int = DIM, **more: Any) -> Callable[[], nn.Embedding]:
    return lambda: nn.Embedding(rows, dim, **more)


def bag(rows: int = ROWS, dim: int = DIM, **more: Any) -> Callable[[], nn.EmbeddingBag]:
    return lambda: nn.EmbeddingBag(rows, dim, **more)


def linear(width: int = DIM, outputs: int = 1) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(width, outputs)


def mlp(width: int, *widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((width, *widths)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def masked_mean(vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average vectors (samples, length, dim) where the mask (samples, length) is not 0."""
    mask = mask.to(vectors.dtype)
    return (vectors * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
