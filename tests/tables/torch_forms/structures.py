"""Structures of inputs and outputs, names, wrappers and parts of modules."""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import DIM, ROWS, Draw, bag, embedding, form, linear, masked_mean, mlp
from tests.tables.torch_forms.sequences import DIN, history_and_item


class Batch(NamedTuple):
    user: torch.Tensor
    context: dict[str, torch.Tensor]
    history: tuple[torch.Tensor, list[torch.Tensor]]


def parts_of_batch(draw: Draw) -> Batch:
    context = {"hour": draw.integers(0, 24, draw.samples), "price": draw.floats()}
    return Batch(draw.keys(), context, (draw.history(), [draw.keys(), draw.floats(draw.samples, 2)]))


@form(lambda draw: (parts_of_batch(draw),), e=embedding(), fc=linear(3 * DIM + 4))
def named_tuple(self: Any, batch: Batch) -> torch.Tensor:
    hist, (item, dense) = batch.history
    numbers = torch.stack([batch.context["hour"] / 24, batch.context["price"]], 1)
    vectors = [self.e(batch.user), masked_mean(self.e(hist), hist != 0), self.e(item)]
    return self.fc(torch.cat([*vectors, numbers, dense], 1)).squeeze(1)


@form(
    lambda draw: {"batch": {"user": {"id": draw.keys(), "age": draw.floats()}, "item": {"id": draw.keys()}}},
    user=embedding(),
    item=embedding(),
    fc=linear(2 * DIM + 1),
)
def nested_dicts(self: Any, batch: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    user, item = batch["user"], batch["item"]
    return self.fc(torch.cat([self.user(user["id"]), self.item(item["id"]), user["age"][:, None]], 1)).squeeze(1)


@form(lambda draw: ([draw.keys(), (draw.keys(), draw.history())],), e=embedding(), fc=linear())
def nested_lists(self: Any, inputs: list[Any]) -> torch.Tensor:
    first, (second, hist) = inputs
    return self.fc(self.e(first) * self.e(second) + self.e(hist).sum(1)).squeeze(1)


@form(
    lambda draw: (draw.keys(), draw.keys(), draw.keys()),
    tables=lambda: nn.ModuleList([nn.Embedding(ROWS, DIM) for _ in range(3)]),
)
def variable_arguments(self: Any, *columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([table(one) for table, one in zip(self.tables, columns, strict=True)]).prod(0).sum(1)


@form(
    lambda draw: {"item": draw.keys(), "user": draw.keys(), "age": draw.floats()},
    tables=lambda: nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in ("user", "item")}),
    fc=linear(2 * DIM + 1),
    others=lambda draw: [{"user": draw.keys(), "age": draw.floats(), "item": draw.keys()}],
)
def variable_keywords(self: Any, **features: torch.Tensor) -> torch.Tensor:
    vectors = [table(features[name]) for name, table in self.tables.items()]
    return self.fc(torch.cat([*vectors, features["age"].unsqueeze(1)], 1)).squeeze(1)


@form(
    lambda draw: (draw.keys(), draw.keys()),
    e=embedding(),
    fc=linear(),
    others=lambda draw: [(draw.keys(),), (draw.keys(), draw.keys(), draw.floats())],
)
def optional_left_out(self: Any, item: torch.Tensor, user: torch.Tensor | None = None, weight: Any = None) -> torch.Tensor:
    """Defaults of None: what the examples leave out must stay away."""
    vectors = self.e(item) if user is None else self.e(item) * self.e(user)
    score = self.fc(vectors).squeeze(1)
    return score if weight is None else score * weight


@form(
    lambda draw: {"item": draw.keys(), "mask": None, "scale": 3.0, "mode": "mean"},
    e=embedding(),
    fc=linear(),
    others=lambda draw: [
        {"item": draw.keys(), "mask": None, "scale": 2.0, "mode": "mean"},
        {"item": draw.keys(), "mask": None, "scale": 3.0, "mode": "sum"},
        {"item": draw.keys(), "mask": draw.flags(), "scale": 3.0, "mode": "mean"},
        {"item": draw.keys(), "mask": None, "scale": 3, "mode": "mean"},
    ],
)
def numbers_and_strings(self: Any, item: torch.Tensor, mask: Any, scale: float, mode: str) -> torch.Tensor:
    """Arguments that are no tensors are those of the examples."""
    score = self.fc(self.e(item)).squeeze(1) * scale + (1 if mode == "mean" else 0)
    score = score + (0.5 if isinstance(scale, int) else 0)
    return score if mask is None else score.masked_fill(mask, 0)


@form(
    lambda draw: {"item": draw.keys(), "top": 2, "verbose": False},
    e=embedding(),
    fc=linear(DIM, 5),
    others=lambda draw: [{"item": draw.keys(), "top": 3, "verbose": False}, {"item": draw.keys(), "top": 2, "verbose": True}],
)
def integer_argument(self: Any, item: torch.Tensor, top: int = 1, verbose: bool = True) -> torch.Tensor:
    found = self.fc(self.e(item)).topk(top, 1).values
    return found + 1 if verbose else found


@form(
    lambda draw: ({"a": draw.keys(), "b": draw.keys()},),
    e=embedding(),
    fc=linear(2 * DIM),
    others=lambda draw: [
        ({"b": draw.keys(), "a": draw.keys()},),
        ({"a": draw.keys()},),
        ({"a": draw.keys(), "c": draw.keys()},),
    ],
)
def dict_in_its_order(self: Any, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """The order of a dict's entries counts, so another order may not be taken for this one."""
    return self.fc(torch.cat([self.e(one) for one in x.values()], 1)).squeeze(1)


@form(lambda draw: (OrderedDict(hist=draw.history(), item=draw.keys()),), e=embedding(), fc=linear(2 * DIM))
def ordered_dict(self: Any, x: OrderedDict[str, torch.Tensor]) -> torch.Tensor:
    return self.fc(torch.cat([self.e(x["hist"]).sum(1), self.e(x["item"])], 1)).squeeze(1)


def awkward_names(draw: Draw) -> dict[str, Any]:
    return {
        "samples": draw.keys(),
        "keys_0": draw.keys(),
        "vectors_0": draw.floats(draw.samples, 2),
        "input": {"a.b": draw.keys(), "a": {"c": draw.keys()}, "price €": draw.floats(), 7: draw.floats()},
        "min": draw.history(),
    }


@form(awkward_names, e=embedding(), fc=linear(4 * DIM + 4))
def awkward_names_of_inputs(self: Any, samples: Any, keys_0: Any, vectors_0: Any, input: Any, min: Any) -> torch.Tensor:  # noqa: A002
    """Names that the format uses itself."""
    vectors = [self.e(samples), self.e(keys_0), self.e(input["a.b"]) * 2, self.e(input["a"]["c"]) + self.e(min).sum(1)]
    return self.fc(torch.cat([*vectors, vectors_0, input["price €"][:, None], input[7][:, None]], 1)).squeeze(1)


@form(
    lambda draw: ({"a.b": draw.keys(), "a": {"b": draw.keys()}},),
    refused="got two inputs that are called 'input.a.b'",
    e=embedding(),
)
def two_inputs_of_one_name(self: Any, input: Any) -> torch.Tensor:  # noqa: A002
    """Names that are equal when they are joined."""
    return self.e(input["a.b"]).sum(1) - self.e(input["a"]["b"]).sum(1)


def suffixes(draw: Draw) -> tuple[dict[str, torch.Tensor]]:
    keys, offsets = draw.bags()
    return ({"tags": keys, "tags.offsets": offsets, "tags.weights": draw.floats(len(keys)), "tags.lengths": draw.keys()},)


@form(suffixes, e=bag(mode="sum"), fc=linear())
def names_with_the_suffixes_of_bags(self: Any, x: dict[str, torch.Tensor]) -> torch.Tensor:
    found = self.e(x["tags"], x["tags.offsets"], x["tags.weights"])
    return self.fc(found).squeeze(1) + x["tags.lengths"]


@form(
    lambda draw: {"item": draw.keys(), "item_weight": draw.floats()},
    item=embedding(),
    item_weight=embedding(),
    **{"item_weight_0": embedding()},
    fc=linear(),
)
def tables_called_alike(self: Any, item: torch.Tensor, item_weight: torch.Tensor) -> torch.Tensor:
    """Inputs and tables share names; `item.weight` and `item_weight` may not become one table."""
    return self.fc(self.item(item) * self.item_weight(item) + self.item_weight_0(item) * item_weight[:, None]).squeeze(1)


def one_tensor(draw: Draw) -> tuple[Any, ...]:
    keys = draw.keys()
    return (keys, keys) if draw.examples else (keys, draw.keys())


@form(one_tensor, e=embedding(), fc=linear())
def one_tensor_for_two_inputs(self: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(first) * 2 - self.e(second)).squeeze(1)


@form(
    lambda draw: {"item": draw.keys(), "unused": draw.floats(draw.samples, 3), "hist": draw.history()},
    e=embedding(),
    fc=linear(),
)
def unused_inputs(self: Any, item: torch.Tensor, unused: torch.Tensor, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(item) + hist.shape[1]).squeeze(1)


# -- outputs --------------------------------------------------------------------------------------------------------------


def item(draw: Draw) -> dict[str, torch.Tensor]:
    return {"item": draw.keys()}


@form(item, e=embedding(), fc=linear(DIM, 3))
def outputs_of_a_tuple(self: Any, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(B, C), (B, 1), (B,), (B, 2, 2)."""
    v = self.fc(self.e(item))
    return v.softmax(1), v[:, :1], v[:, 1], torch.stack([v[:, :2], v[:, 1:]], 1)


@form(item, e=embedding(), fc=linear(DIM, 2))
def outputs_of_a_dict(self: Any, item: torch.Tensor) -> dict[str, Any]:
    v = torch.sigmoid(self.fc(self.e(item)))
    return {"zeta": v[:, 0], "alpha": {"both": v, "first": v[:, 0]}}


class Answer(NamedTuple):
    score: torch.Tensor
    embedding: torch.Tensor


@form(item, e=embedding(), fc=linear())
def outputs_of_a_named_tuple(self: Any, item: torch.Tensor) -> Answer:
    v = self.e(item)
    return Answer(self.fc(v).squeeze(1), F.normalize(v, dim=1))


@form(item, e=embedding(), fc=linear())
def float64_output(self: Any, item: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(self.fc(self.e(item)).double()).squeeze(1)


@form(item, within=None, e=embedding(), fc=linear(DIM, 4))
def integer_outputs(self: Any, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Classes, a flag, and the keys themselves."""
    v = self.fc(self.e(item))
    return v.argmax(1), v[:, 0] > 0, item


@form(item, within=None, e=embedding(), fc=linear())
def one_output_twice(self: Any, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
    score = self.fc(self.e(item)).squeeze(1)
    return score, score


@form(item, within=None, e=embedding())
def the_vectors_themselves(self: Any, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An output that is an input of the network, and a view of it."""
    v = self.e(item)
    return v, v[:, :2]


@form(item, within=None, e=embedding(), fc=linear())
def none_and_number_outputs(self: Any, item: torch.Tensor) -> tuple[Any, ...]:
    return self.fc(self.e(item)).squeeze(1), None, 3


# -- wrappers and parts of modules ------------------------------------------------------------------------------------------


@form(history_and_item, per_request=("hist",))
def compiled() -> nn.Module:
    return torch.compile(DIN())  # type: ignore[return-value]


@form(history_and_item, tolerance=2e-2)
def data_parallel_in_bfloat16() -> nn.Module:
    return nn.DataParallel(DIN().bfloat16())


@form(history_and_item)
def data_parallel_of_compiled() -> nn.Module:
    return nn.DataParallel(torch.compile(DIN()))  # type: ignore[arg-type]


@form(lambda draw: {"item": draw.keys()}, e=embedding(), top=lambda: torch.compile(mlp(DIM, 8, 1)))
def a_compiled_part(self: Any, item: torch.Tensor) -> torch.Tensor:
    return self.top(self.e(item)).squeeze(1)


@form(lambda draw: {"item": draw.keys()}, within=None, e=embedding(), top=lambda: torch.jit.script(mlp(DIM, 8, 1)))
def a_scripted_part(self: Any, item: torch.Tensor) -> torch.Tensor:
    return self.top(self.e(item)).squeeze(1)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


@form(item, e=embedding(), fc=linear())
def gradient_reversal(self: Any, item: torch.Tensor) -> torch.Tensor:
    return self.fc(_Reversed.apply(self.e(item))).squeeze(1)


@form(item)
def hooks_of_parts() -> nn.Module:
    """Hooks of the embedding and of a layer change what passes."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
            self.e.register_forward_pre_hook(lambda part, given: ((given[0] + 1) % ROWS,))
            self.e.register_forward_hook(lambda part, given, found: found * 2)

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(item)).squeeze(1)

    return Hooked()


@form(item, within=None)
def hooks_of_the_module() -> nn.Module:
    """torch.export may not see the hooks of the module that it is given."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(item)).squeeze(1)

    module = Plain()
    module.register_forward_pre_hook(
        lambda part, given, named: (
            (given, {"item": (named["item"] + 1) % ROWS}) if named else (((given[0] + 1) % ROWS,), named)
        ),
        with_kwargs=True,
    )
    module.register_forward_hook(lambda part, given, found: torch.sigmoid(found))
    return module


@form(item)
def forward_of_an_instance() -> nn.Module:
    """`forward` replaced on the instance, as wrappers do."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(item)).squeeze(1)

    module = Plain()
    old = module.forward
    module.forward = lambda item: old(item) * 2  # type: ignore[method-assign]
    return module


@form(item, within=None)
def forward_of_another_module() -> nn.Module:
    """A closure holds the parts, so a copy of the module runs the original's."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

    parts = Parts()
    parts.forward = lambda item: parts.fc(parts.e(item)).squeeze(1)  # type: ignore[method-assign]
    return parts


@form(history_and_item, rows=lambda: nn.Parameter(torch.randn(ROWS, DIM)), e=embedding(), fc=linear())
def parameters_as_tables(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """F.embedding and an index of an own parameter, of a detached one, and of an embedding's weight."""
    found = F.embedding(hist, self.rows).mean(1) * self.rows[item] + F.embedding(item, self.rows.detach())
    return self.fc(found + self.e.weight.index_select(0, item)).squeeze(1)


@form(item, within=None, fc=linear(), rows=torch.randn(ROWS, DIM))
def a_buffer_as_table(self: Any, item: torch.Tensor) -> torch.Tensor:
    return self.fc(F.embedding(item, self.rows)).squeeze(1)


@form(item, within=None)
def a_plain_tensor_as_table() -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = [torch.randn(ROWS, DIM)]  # neither a parameter nor a buffer
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(item) * F.embedding(item, self.rows[0])).squeeze(1)

    return Plain()


@form(item)
def weights_that_are_views() -> nn.Module:
    """Weights transposed, and cut out of one storage."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(2 * ROWS * DIM + 3)
            self.a = nn.Parameter(flat[3 : ROWS * DIM + 3].view(DIM, ROWS).t())
            self.b = nn.Embedding(ROWS, DIM, _weight=flat[ROWS * DIM + 3 :].view(ROWS, DIM))
            self.c = nn.Embedding.from_pretrained(torch.randn(1, DIM).expand(ROWS, DIM), freeze=True)
            self.fc = nn.Linear(DIM, 1)

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.fc(F.embedding(item, self.a) * self.b(item) + self.c(item)).squeeze(1)

    return Views()


@form(history_and_item)
def one_table_by_two_names() -> nn.Module:
    """Two modules with one weight, one of them a bag, and a list that has a module twice."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="sum")
            self.b.weight = self.a.weight
            self.list = nn.ModuleList([self.a, self.a])
            self.fc = nn.Linear(3 * DIM, 1)

        def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.cat([self.b(hist), self.list[0](item), self.list[1](hist).amax(1)], 1)).squeeze(1)

    return Shared()


@form(item, a=embedding(), b=embedding(dim=3), c=bag(mode="sum"), fc=linear(2 * DIM + 3))
def one_input_for_three_tables(self: Any, item: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.a(item), self.b(item), self.c(item[:, None])], 1)).squeeze(1)


@form(history_and_item, e=embedding(), fc=linear(2 * DIM))
def joined_keys(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """One lookup of a history and an item behind it, split again."""
    every = self.e(torch.cat([hist, item.unsqueeze(1)], 1))
    return self.fc(torch.cat([every[:, :-1].sum(1), every[:, -1]], 1)).squeeze(1)


class _Rows(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(torch.where(input < 40, input, input.new_zeros(()))) * self.embedding_dim**0.5


@form(item, e=lambda: _Rows(ROWS, DIM), fc=linear())
def an_embedding_with_a_forward(self: Any, item: torch.Tensor) -> torch.Tensor:
    """A subclass that maps unknown keys, and scales."""
    return self.fc(self.e(item)).squeeze(1)


@form(item, e=embedding(), fc=linear())
def attributes_of_a_table(self: Any, item: torch.Tensor) -> torch.Tensor:
    """Rows, width, dtype and device of a table are read."""
    keys = (item * 7) % self.e.num_embeddings
    ones = torch.ones(item.shape[0], self.e.weight.shape[1], dtype=self.e.weight.dtype, device=self.e.weight.device)
    return self.fc(self.e(keys) * ones / self.e.embedding_dim + self.e.weight.new_ones(1)).squeeze(1)


@form(lambda draw: {"hist": draw.history()})
def what_cannot_be_copied() -> nn.Module:
    """A lock, a computed tensor of the last call, and a weight that a hook makes."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.utils.weight_norm(nn.Linear(DIM, 1))
            self.lock, self.last = threading.Lock(), self.fc(torch.ones(DIM))

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(hist).sum(1)).squeeze(1)

    return Kept()


@form(lambda draw: {"item": draw.keys(), "image": draw.floats(draw.samples, 3, 4, 4)}, e=embedding(), fc=linear())
def an_image(self: Any, item: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Pooling needs several sizes at once."""
    return self.fc(self.e(item)).squeeze(1) + F.avg_pool2d(image, 2).flatten(1).sum(1)


@form(lambda draw: {"item": draw.keys()}, refused="both be 'a.b'", e=embedding(), fc=linear())
def outputs_called_alike(self: Any, item: torch.Tensor) -> dict[str, Any]:
    y = self.fc(self.e(item)).squeeze(1)
    return {"a": {"b": y}, "a.b": y * 2}


@form(
    lambda draw: {"item": draw.keys(), "name": np.array(["a"] * draw.samples)}, refused="name.*<U1", e=embedding(), fc=linear()
)
def strings_as_an_array(self: Any, item: torch.Tensor, name: Any) -> torch.Tensor:
    return self.fc(self.e(item)).squeeze(1)


@form(
    lambda draw: {"item": draw.keys(), "s": torch.eye(draw.samples).to_sparse()}, refused="sparse", e=embedding(), fc=linear()
)
def a_sparse_input(self: Any, item: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.sparse.mm(s, self.e(item))).squeeze(1)
