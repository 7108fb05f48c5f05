"""Modules that a cut could answer wrongly in silence. One without sizes (`within=None`) may be refused; none may be wrong."""

import random
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import DIM, LENGTH, ROWS, SAMPLES, Draw, bag, embedding, form, linear, masked_mean


def history(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history()}


def history_and_item(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history(), "item": draw.keys()}


def trap(draw: Any = history, **more: Any) -> Any:
    """A form with an embedding `e` and a layer `fc`."""
    return form(draw, e=embedding(), fc=linear(), **more)


def score(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """What most traps begin with: a linear layer of the vectors' mean."""
    found: torch.Tensor = self.fc(self.e(hist).mean(1)).squeeze(1)
    return found


# -- sizes ------------------------------------------------------------------------------------------------------------


@trap(within=lambda samples, length: samples > 1)
def batch_one_branch(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y * 0 + 7 if hist.size(0) == 1 else y


@trap(within=lambda samples, length: length > 1)
def length_one_branch(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y * 9 if hist.size(1) == 1 else y


@trap(within=lambda samples, length: samples <= 8)
def branch_on_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Requests that are answered alone must not be merged to more samples than the guard takes."""
    y = score(self, hist)
    return y * 2 if hist.size(0) > 8 else y


@trap(within=lambda samples, length: samples != 5)
def branch_at_five_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Five samples may neither be filled up to six, nor be merged with others."""
    y = self.fc(self.e(hist).sum(1)).squeeze(1)
    return y * 3 if hist.size(0) == 5 else y


@trap(within=lambda samples, length: length // 2 == LENGTH // 2)
def half_of_the_length(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist)[:, : int(hist.size(1) / 2)].sum(1)).squeeze(1)


@trap(within=lambda samples, length: samples % 2 == 0)
def branch_on_odd_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = self.fc(self.e(hist).sum(1)).squeeze(1)
    return y - 4 if hist.size(0) % 2 else y


@trap(within=lambda samples, length: length > 0)
def empty_history_branch(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Torch takes sizes for positive, so no guard says that the module branches here."""
    y = self.fc(self.e(hist).sum(1)).squeeze(1)
    return y + 5 if hist.size(1) == 0 else y


@trap(within=lambda samples, length: length > 0)
def a_size_as_a_condition(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = self.fc(self.e(hist).sum(1)).squeeze(1)
    return y if hist.shape[1] else y + 5


@trap(within=lambda samples, length: length % 2 == 1)
def branch_on_odd_length(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y if hist.size(1) % 2 else y - 1


@trap(within=lambda samples, length: 0 < samples * length <= 100)
def branch_on_numel(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y if hist.numel() <= 100 else y + 1


@trap(within=None)
def branch_on_equal_sizes(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y * 3 if hist.size(0) == hist.size(1) else y


@trap(within=lambda samples, length: 0 < length <= 6)
def truncate(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist[:, -6:] if hist.size(1) > 6 else hist)


@trap(within=lambda samples, length: length in (2, 7, LENGTH))
def slice_at_three(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist[:, -3:])


@trap(within=None)
def python_len(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist) / len(hist)


@trap(within=None)
def int_of_size(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1)).squeeze(1) / int(hist.shape[1]) + float(hist.shape[0])


@trap(within=None)
def constant_of_size(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1)).squeeze(1) / torch.tensor(hist.shape[1]) + np.sqrt(hist.shape[1])


@trap(within=None)
def python_loop_over_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return torch.stack([self.fc(self.e(row).mean(0)).squeeze(0) for row in hist])


@trap(within=None)
def python_loop_over_a_history(self: Any, hist: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(hist.shape[0], DIM)
    for step in range(hist.shape[1]):
        state = torch.tanh(state + self.e(hist[:, step]))
    return self.fc(state).squeeze(1)


@trap(within=None)
def fixed_batch(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1) + torch.zeros(SAMPLES, DIM)).squeeze(1)


@form(
    lambda draw: {"hist": draw.keys(draw.samples, SAMPLES), "mask": draw.floats(draw.samples, SAMPLES)},
    e=embedding(),
    fc=linear(),
)
def sizes_equal_by_chance(self: Any, hist: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As many columns as the examples have samples."""
    return self.fc((self.e(hist) * mask.unsqueeze(2)).sum(1) + mask[:, :1]).squeeze(1)


def broadcast(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history(), "weights": draw.floats(draw.samples, 1 if draw.examples else draw.length)}


@trap(broadcast, within=None)
def one_column_that_broadcasts(self: Any, hist: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The examples' weights have one column, later ones have as many as the history."""
    return self.fc((self.e(hist) * weights.unsqueeze(2)).sum(1)).squeeze(1) + weights.sum(1)


@trap(within=lambda samples, length: samples > 1)
def expand_hidden_batch(self: Any, hist: torch.Tensor) -> torch.Tensor:
    samples = hist.shape[0]
    found = self.fc(self.e(hist).reshape(samples, -1, DIM).sum(1)).squeeze()
    return found if samples < 10**6 else found * 2


# -- values -----------------------------------------------------------------------------------------------------------


@trap(within=None)
def if_any_padding(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y + 1 if (hist == 0).any() else y


@trap(within=None)
def item_of_keys(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist) * int(hist.max())


@trap(within=None)
def cut_to_longest(self: Any, hist: torch.Tensor) -> torch.Tensor:
    longest = int((hist != 0).sum(1).max())
    return self.fc(self.e(hist[:, :longest]).sum(1)).squeeze(1)


@trap()
def unknown_to_zero_in_place(self: Any, hist: torch.Tensor) -> torch.Tensor:
    known = hist.clone()
    known[known >= 40] = 0
    return self.fc(self.e(known).sum(1)).squeeze(1)


@trap()
def input_clamped_in_place(self: Any, hist: torch.Tensor) -> torch.Tensor:
    hist.clamp_(max=30)
    return self.fc(self.e(hist).sum(1)).squeeze(1) + (hist == 30).sum(1)


@trap()
def keys_changed_after(self: Any, hist: torch.Tensor) -> torch.Tensor:
    vectors = self.e(hist)
    changed = hist.clone()
    changed += 1
    return self.fc(vectors.sum(1)).squeeze(1) + changed.sum(1)


@trap(within=None)
def by_numpy(self: Any, hist: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(np.isin(hist.numpy(), [1, 2])).float()
    return self.fc(masked_mean(self.e(hist), mask)).squeeze(1)


@trap(within=None)
def by_list(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, torch.tensor(hist.tolist()))


@trap(within=None)
def boolean_selection(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """One sum for all samples: an answer without samples."""
    return self.fc(self.e(hist[hist != 0]).sum(0))


@trap(within=None)
def scattered_valid_items(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Only items that are no padding are looked up, and scattered back."""
    mask = hist != 0
    vectors = torch.zeros(*hist.shape, DIM)
    vectors[mask] = self.e(hist[mask])
    return self.fc(vectors.sum(1)).squeeze(1)


@trap(within=None)
def condition(self: Any, hist: torch.Tensor) -> torch.Tensor:
    found = torch.cond((hist == 0).any(), lambda h: self.e(h).mean(1), lambda h: self.e(h).sum(1), (hist,))
    return self.fc(found).squeeze(1)


@trap(within=None)
def try_and_except(self: Any, hist: torch.Tensor) -> torch.Tensor:
    try:
        more = int(hist.sum())
    except Exception:  # noqa: BLE001 - the trap
        more = 3
    return score(self, hist) + more


@trap(others=lambda draw: [{"hist": draw.history().int()}])
def branch_on_dtype(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = self.fc(self.e(hist.long()).sum(1)).squeeze(1)
    return y + 1 if hist.dtype == torch.int32 else y


@form(
    lambda draw: {"item": draw.keys(), "price": draw.floats()},
    others=lambda draw: [{"item": draw.keys(), "price": draw.floats().double() + 1e-9}],
    e=embedding(),
    fc=linear(),
)
def a_cast_that_did_nothing(self: Any, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """`.float()` of float32 leaves no trace in the graph."""
    return self.fc(self.e(item)).squeeze(1) * (price.float() * 1e4).floor() / 1e4


# -- Python -------------------------------------------------------------------------------------------------------------


@trap(refused="sets 'n'")
def python_counter(self: Any, hist: torch.Tensor) -> torch.Tensor:
    self.n = getattr(self, "n", 0) + 1
    return score(self, hist) * self.n


@trap(refused="sets 'calls'|another program|differs by up to", calls=lambda: [])
def counter_in_a_list(self: Any, hist: torch.Tensor) -> torch.Tensor:
    self.calls.append(1)
    return score(self, hist) + 100 * (len(self.calls) > 3)


COUNTED: dict[str, int] = {}


@trap()
def global_that_is_read(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """A global that does not change is a constant."""
    return self.fc(self.e(hist).sum(1)).squeeze(1) * (2 + len(COUNTED))


@trap(refused="differently|different program")
def python_random(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist) * random.random()


@trap(refused="differently|different program")
def numpy_random(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist) + torch.from_numpy(np.random.rand(1).astype("f"))  # noqa: NPY002 - the trap


@trap(refused="random")
def torch_random(self: Any, hist: torch.Tensor) -> torch.Tensor:
    vectors = self.e(hist).mean(1)
    return self.fc(vectors + torch.rand_like(vectors)).squeeze(1)


@trap(refused="random")
def random_for_rare_keys(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """No example shows it: unknown keys get random vectors."""
    vectors = self.e(hist)
    return self.fc(torch.where((hist == 0).unsqueeze(2), torch.randn_like(vectors), vectors).mean(1)).squeeze(1)


@trap(refused="random")
def dropout_without_training(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(F.dropout(self.e(hist).mean(1), 0.2)).squeeze(1)


@trap(refused="random")
def gumbel_softmax(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(F.gumbel_softmax(self.e(hist).sum(1), tau=0.5)).squeeze(1)


@trap()
def rrelu_of_the_training(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(F.rrelu(self.e(hist).sum(1), training=self.training)).squeeze(1)


@form(history)
def dropout_of_the_training() -> nn.Module:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.drop, self.fc = nn.Embedding(ROWS, DIM), nn.Dropout(0.5), nn.Linear(DIM, 1)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            v = F.dropout(self.drop(self.e(hist)).sum(1), 0.5, training=self.training)
            return self.fc(v + torch.rand_like(v) if self.training else v).squeeze(1)

    return Dropped()


@trap(refused="differently|different program")
def by_date(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return score(self, hist) * (1 + time.time() % 1)


@trap(within=None)
def is_compiling(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y + 5 if torch.compiler.is_compiling() else y


@trap(within=None)
def is_tracing_or_exporting(self: Any, hist: torch.Tensor) -> torch.Tensor:
    y = score(self, hist)
    return y + 5 if torch.jit.is_tracing() or torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export() else y


@trap(within=None)
def type_of_a_tensor(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """What traces a module is a subclass of tensors."""
    y = score(self, hist)
    return y if type(hist) is torch.Tensor else y - 5


@trap(within=None)
def cached_mask(self: Any, hist: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "mask") or self.mask.shape[0] != hist.shape[1]:
        self.mask = torch.linspace(0, 1, hist.shape[1])
    return self.fc(self.e(hist).transpose(1, 2) @ self.mask).squeeze(1)


@trap(within=None)
def cached_in_a_dict(self: Any, hist: torch.Tensor) -> torch.Tensor:
    cache = self.__dict__.setdefault("cache", {})
    if "m" not in cache:
        cache["m"] = torch.linspace(0, 1, 5)
    return self.fc(self.e(hist)[:, :1].sum(1) * cache["m"].sum()).squeeze(1)


@trap()
def attention_left_for_plots(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """DeepCTR-Torch's AutoInt and AFM: forward makes an attribute, and reads only what it has made itself."""
    self.attention = F.softmax(self.e(hist).sum(2), 1)
    self.length = hist.shape[1]
    return self.fc((self.attention.unsqueeze(2) * self.e(hist)).sum(1)).squeeze(1) * (self.length > 0)


@trap(refused="forward sets 'calls'")
def rare_attribute_that_counts(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """No run of a few calls shows it."""
    self.calls = getattr(self, "calls", 0) + 1
    return score(self, hist) * (1 if self.calls < 100_000 else 2)


@trap(refused="forward sets 'total'")
def tensor_that_remembers(self: Any, hist: torch.Tensor) -> torch.Tensor:
    self.total = self.total + 1 if hasattr(self, "total") else torch.zeros(1)
    return score(self, hist) + (self.total > 100_000)


MASKS: dict[Any, torch.Tensor] = {}


@trap(within=None)
def cached_outside_of_the_module(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """A cache of the file's: tracing must leave no stand-in for a tensor in it, which would break the module for good."""
    length = hist.shape[1]
    if length not in MASKS:
        MASKS[length] = torch.linspace(0, 1, length) + 0
    return self.fc(self.e(hist).transpose(1, 2) @ MASKS[length]).squeeze(1)


@trap(refused="changes its state", n=torch.zeros(1))
def buffer_that_counts(self: Any, hist: torch.Tensor) -> torch.Tensor:
    self.n.add_(1)
    return score(self, hist) * self.n


@trap(within=None)
def normalised_in_forward(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """TransE: the table is normalised in place before it is read."""
    self.e.weight.data = F.normalize(self.e.weight.data, dim=1)
    return self.fc(self.e(hist).sum(1)).squeeze(1)


@trap(within=None)
def first_row_zeroed_in_forward(self: Any, hist: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.e.weight[0].zero_()
    return self.fc(self.e(hist).sum(1)).squeeze(1)


# -- regions ------------------------------------------------------------------------------------------------------------


@trap()
def no_grad_region(self: Any, hist: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        vectors = self.e(hist)
    return self.fc(vectors.sum(1)).squeeze(1)


@trap()
def enable_grad_region(self: Any, hist: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        vectors = self.e(hist)
    return self.fc(vectors.sum(1)).squeeze(1)


@trap(tolerance=2e-2)
def autocast_region(self: Any, hist: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.fc(self.e(hist).sum(1))
    return y.float().squeeze(1)


@trap(within=None)
def inference_mode_region(self: Any, hist: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        vectors = self.e(hist)
    return self.fc(vectors.sum(1)).squeeze(1)


@trap()
def checkpointed(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda h: self.fc(self.e(h).sum(1)).squeeze(1), hist, use_reentrant=False)


# -- tables -------------------------------------------------------------------------------------------------------------


@trap(refused="two levels")
def two_levels(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(self.e(hist).mean(1).argmax(-1))).squeeze(1)


@form(lambda draw: {"user": draw.keys()}, refused="two levels", user=embedding(), item=embedding())
def best_items_looked_up(self: Any, user: torch.Tensor) -> torch.Tensor:
    """Retrieval: the best of all items, then their vectors."""
    best = (self.user(user) @ self.item.weight.t()).topk(3, 1).indices
    return self.item(best).sum((1, 2))


@form(lambda draw: {"hist": draw.history()}, refused="two levels", e=embedding(), bag=bag(mode="sum"), fc=linear())
def weights_of_bags_by_vectors(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.bag(hist, per_sample_weights=self.e(hist).mean(-1))).squeeze(1)


@trap(refused="no lookup")
def scaled_table(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(F.embedding(hist, self.e.weight * 2).sum(1)).squeeze(1)


@form(history, refused="no lookup")
def normalised_by_parametrization() -> nn.Module:
    class Parametrized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
            torch.nn.utils.parametrizations.weight_norm(self.e)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc(self.e(hist).sum(1)).squeeze(1)

    return Parametrized()


@form(history_and_item, within=None)
def clipped_rows_and_not() -> nn.Module:
    """One weight in two modules, of which one clips its rows in place before the other reads them."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(ROWS, DIM, max_norm=0.5), nn.Embedding(ROWS, DIM)
            self.b.weight = self.a.weight

        def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            return (self.a(hist).sum(1) * self.b(item)).sum(1)

    return Shared()


@form(history, refused="scale its rows in place", e=embedding(max_norm=0.5))
def clipped_and_tied(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return (self.e(hist).sum(1) @ self.e.weight.t())[:, :3]


@form(history_and_item, within=None)
def clipped_before_and_read_after() -> nn.Module:
    """The other order: rows are read before they are clipped."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(ROWS, DIM, max_norm=0.5), nn.Embedding(ROWS, DIM)
            self.b.weight = self.a.weight

        def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            return (self.b(item) * self.a(hist).sum(1)).sum(1)

    return Shared()


@form(history, within=None)
def padding_in_a_nested_tensor() -> nn.Module:
    """Without gradients, torch's encoder leaves paddings out, and fills them with 0; traced, it does not."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True), 2)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc(self.encoder(self.e(hist), src_key_padding_mask=hist == 0).sum(1)).squeeze(1)

    return Encoder()


# -- samples that are not independent, or not first ------------------------------------------------------------------------


@trap(alone=True)
def softmax_over_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """A list is ranked as a whole."""
    return self.fc(self.e(hist).sum(1)).squeeze(1).softmax(0)


@trap(alone=True)
def rare_rule_over_samples(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Only where a sample of the request has the last key: no example need show that samples depend on each other."""
    return self.fc(self.e(hist).sum(1)).squeeze(1) + (hist == ROWS - 1).any().float()


@form(
    lambda draw: {"item": draw.keys(), "price": draw.floats() * (1 if draw.examples else 20)},
    alone=True,
    e=embedding(),
    fc=linear(),
)
def rare_rule_on_numbers_of_samples(self: Any, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """Samples depend on each other only beside numbers that are larger than the examples'."""
    return self.fc(self.e(item)).squeeze(1) + price / price.max().clamp(min=10)


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()}, within=None, alone=True, u=embedding(), i=embedding())
def in_batch_negatives(self: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Each user with each item of the request."""
    return self.u(user) @ self.i(item).t()


@form(history, within=None, alone=True)
def batch_norm_without_statistics() -> nn.Module:
    """In evaluation mode, too, it normalises by the samples of the request."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.norm = nn.Embedding(ROWS, DIM), nn.BatchNorm1d(DIM, track_running_stats=False)
            self.fc = nn.Linear(DIM, 1)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc(self.norm(self.e(hist).sum(1))).squeeze(1)

    return Normed()


@form(
    lambda draw: {"user": draw.keys(), "cand": draw.keys(3 if draw.examples else draw.length + 1)},
    within=None,
    alone=True,
    u=embedding(),
    i=embedding(),
)
def candidates_of_all_samples(self: Any, user: torch.Tensor, cand: torch.Tensor) -> torch.Tensor:
    """One list of candidates for the request: an input whose first dimension is not the samples."""
    return self.u(user) @ self.i(cand).t()


@form(
    lambda draw: {"user": draw.keys(), "cand": draw.keys(draw.samples, 3)},
    within=None,
    alone=True,
    u=embedding(),
    i=embedding(),
)
def more_answers_than_samples(self: Any, user: torch.Tensor, cand: torch.Tensor) -> torch.Tensor:
    """(samples * 3,)"""
    return (self.u(user).unsqueeze(1) * self.i(cand)).sum(2).flatten()


@form(
    lambda draw: {"hist": draw.history().t().contiguous(), "item": draw.keys()},
    within=None,
    alone=True,
    e=embedding(),
    fc=linear(),
)
def time_first(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """The samples are the second dimension of the history."""
    return self.fc(self.e(hist).sum(0) * self.e(item)).squeeze(1)


@form(history, within=None, alone=True, e=embedding(), fc=linear())
def answers_time_first(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """(length, samples)"""
    return self.fc(self.e(hist)).squeeze(2).t()


@trap(within=None, alone=True)
def one_answer_for_all(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(hist).sum(1)).mean()


@trap(within=None, alone=True)
def an_answer_without_samples(self: Any, hist: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.fc(self.e(hist).sum(1)).squeeze(1), self.fc.weight


@trap(within=None, alone=True)
def answers_sorted(self: Any, hist: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best sample first, with its place in the request."""
    found = self.fc(self.e(hist).sum(1)).squeeze(1).sort(descending=True)
    return found.values, found.indices


@form(
    lambda draw: {"item": draw.keys(), "temperature": draw.floats(1)[0] + 0.5},
    within=None,
    alone=True,
    e=embedding(),
    fc=linear(),
)
def a_number_as_a_tensor(self: Any, item: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """An input without dimensions: one for the request."""
    return self.fc(self.e(item)).squeeze(1) / temperature


@form(lambda draw: {"item": draw.keys(), "context": draw.floats(1, 2)}, within=None, e=embedding(), fc=linear(DIM + 2))
def a_row_for_all_samples(self: Any, item: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """(1, 2) whatever the samples are: one for the request."""
    return self.fc(torch.cat([self.e(item), context.expand(item.shape[0], -1)], 1)).squeeze(1)


@trap(alone=True)
def place_in_the_request(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """A sample's score depends on where it stands."""
    return self.fc(self.e(hist).sum(1)).squeeze(1) + torch.arange(hist.shape[0])


@form(
    lambda draw: {"hist": draw.history(), "group": torch.arange(draw.samples) // 2},
    within=None,
    alone=True,
    e=embedding(),
    fc=linear(),
)
def groups_of_samples(self: Any, hist: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Samples of a group share their mean; another request has a group of the same number."""
    y = self.fc(self.e(hist).sum(1)).squeeze(1)
    same = (group.unsqueeze(0) == group.unsqueeze(1)).float()
    return y - same @ y / same.sum(1)


def one_user(draw: Draw) -> dict[str, torch.Tensor]:
    return {"user": draw.keys(1), "item": draw.keys()}


@form(one_user, others=lambda draw: [{"user": draw.keys(), "item": draw.keys()}], within=None, u=embedding(), i=embedding())
def one_user_for_all_items(self: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """The examples have one user, who is broadcast; later ones may have one for each item."""
    return (self.u(user) * self.i(item)).sum(1)


def a_user_each(draw: Draw) -> dict[str, torch.Tensor]:
    return {"user": draw.keys(), "item": draw.keys()}


def users_otherwise(draw: Draw) -> list[Any]:
    return [one_user(draw), {"user": draw.keys(draw.samples, 1), "item": draw.keys(draw.samples, 1)}]


@form(a_user_each, others=users_otherwise, u=embedding(), i=embedding())
def one_user_for_each_item(self: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """The examples have a user for each item; later ones may have one, who is broadcast, or another dimension."""
    return (self.u(user) * self.i(item)).sum(1)


@form(a_user_each, per_request=("user",), u=embedding(), i=embedding())
def crossed_with_what_is_given_once(self: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """A key is computed of an input that is given once, and of one that is not."""
    return (self.u((user * 31 + item) % ROWS) * self.i(user)).sum(1) + user / 7


@form(a_user_each, within=None, alone=True, per_request=("user",), u=embedding(), i=embedding())
def places_of_what_is_given_once(self: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """A key depends on the sample's place, though its input is given once."""
    return (self.u((user + torch.arange(user.shape[0])) % ROWS) * self.i(item)).sum(1)


@form(lambda draw: {"tags": draw.keys(3 * draw.samples)}, within=None, e=bag(mode="sum"), fc=linear())
def bags_of_three_keys(self: Any, tags: torch.Tensor) -> torch.Tensor:
    """No input has the samples as a size: they are a third of the keys."""
    return self.fc(self.e(tags, torch.arange(0, tags.numel(), 3))).squeeze(1)


@form(
    lambda draw: {"x": draw.integers(0, 1000, draw.samples, 4)},
    e=embedding(256),
    t=embedding(2),
    big=embedding(1100),
    fc=linear(),
)
def columns_cast_to_less(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Casts on the way to a key that change it: a column is not one where it is cast to less."""
    found = self.e(x[:, 0].to(torch.uint8).long()) + self.t(x[:, 1].bool().long())
    return self.fc(
        found * self.big((x[:, 2] + 2048).half().long() - 2048) + self.e(x[:, 3].to(torch.int8).long() + 128)
    ).squeeze(1)


class _Lock(nn.Module):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.fc, self.lock = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1), threading.Lock()

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.fc(self.e(hist).sum(1)).squeeze(1)


@form(history, within=None)
def holds_a_lock() -> nn.Module:
    return _Lock()


@form(history, within=None)
def holds_a_computed_tensor() -> nn.Module:
    """An attribute with a history of gradients, which deepcopy does not take."""

    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
            self.mean = self.e.weight.mean(0)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc((self.e(hist) - self.mean).sum(1)).squeeze(1)

    return Computed()
