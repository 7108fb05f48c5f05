"""Modes and dtypes of lookups: bags, paddings, weights, norms, and keys of every kind."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import DIM, ROWS, Draw, bag, embedding, form, linear, masked_mean


def tags(draw: Draw) -> dict[str, torch.Tensor]:
    return {"tags": draw.history()}


def ragged(draw: Draw) -> dict[str, torch.Tensor]:
    keys, offsets = draw.bags()
    return {"tags": keys, "offsets": offsets}


def ragged_and_weights(draw: Draw) -> dict[str, torch.Tensor]:
    found = ragged(draw)
    return found | {"weights": draw.floats(len(found["tags"])) - 0.3}


def ends(draw: Draw) -> dict[str, torch.Tensor]:
    keys, offsets = draw.bags(include_last=True)
    return {"tags": keys, "ends": offsets}


def ends_before_the_end(draw: Draw) -> dict[str, torch.Tensor]:
    """Keys behind the last bag's end belong to none."""
    found = ends(draw)
    return found if draw.examples else found | {"tags": torch.cat([found["tags"], draw.keys(3)])}


def history_alone(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history()}


def not_empty(samples: int, length: int) -> bool:
    return length > 0


@form(tags, sum=bag(mode="sum"), mean=bag(mode="mean"), fc=linear(2 * DIM))
def matrix_bags(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.sum(tags), self.mean(tags)], 1)).squeeze(1)


@form(tags, sum=bag(mode="sum", padding_idx=0), mean=bag(mode="mean", padding_idx=-1), fc=linear(2 * DIM))
def matrix_bags_with_padding(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.sum(tags), self.mean(tags)], 1)).squeeze(1)


@form(tags, within=not_empty, plain=bag(mode="max"), padded=bag(mode="max", padding_idx=0), fc=linear(2 * DIM))
def matrix_bags_of_maxima(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.plain(tags), self.padded(tags)], 1)).squeeze(1)


@form(ragged, sum=bag(mode="sum"), mean=bag(mode="mean", padding_idx=0), fc=linear(2 * DIM))
def bags_by_offsets(self: Any, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.sum(tags, offsets), self.mean(tags, offsets)], 1)).squeeze(1)


@form(ragged, plain=bag(mode="max"), padded=bag(mode="max", padding_idx=0), fc=linear(2 * DIM))
def bags_of_maxima_by_offsets(self: Any, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.plain(tags, offsets), self.padded(tags, offsets)], 1)).squeeze(1)


@form(ragged_and_weights, e=bag(mode="sum", padding_idx=0), fc=linear())
def weighted_bags(self: Any, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(tags, offsets, per_sample_weights=weights)).squeeze(1)


@form(ragged_and_weights, e=bag(mode="sum"), fc=linear())
def weights_computed_from_inputs(self: Any, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(tags, offsets, per_sample_weights=torch.sigmoid(weights) * (tags != 1))).squeeze(1)


@form(lambda draw: {"tags": draw.history(), "weights": draw.floats(draw.samples, draw.length)}, e=bag(mode="sum"), fc=linear())
def weighted_matrix_bags(self: Any, tags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(tags, per_sample_weights=weights)).squeeze(1)


@form(ends, e=bag(mode="mean", include_last_offset=True), fc=linear())
def bags_by_ends(self: Any, tags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(tags, ends)).squeeze(1)


@form(ends_before_the_end, within=None, e=bag(mode="sum", include_last_offset=True), fc=linear())
def keys_behind_all_bags(self: Any, tags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """They may be refused; when requests are merged they may not shift the bags of others."""
    return self.fc(self.e(tags, ends)).squeeze(1)


@form(ends, e=bag(mode="sum", include_last_offset=True), fc=linear(DIM + 1))
def ends_read_by_the_network(self: Any, tags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Lengths of the bags are a feature."""
    return self.fc(torch.cat([self.e(tags, ends), ends.diff().unsqueeze(1).float()], 1)).squeeze(1)


def lengths_and_more(draw: Draw) -> dict[str, torch.Tensor]:
    lengths = draw.lengths()
    return {"tags": draw.keys(int(lengths.sum()) + (0 if draw.examples else 3)), "lengths": lengths}


@form(lengths_and_more, e=bag(mode="sum"), fc=linear())
def offsets_from_lengths(self: Any, tags: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The module makes offsets; keys behind the last bag belong to it."""
    return self.fc(self.e(tags, torch.cumsum(lengths, 0) - lengths)).squeeze(1)


def two_ragged(draw: Draw) -> dict[str, torch.Tensor]:
    keys, offsets = draw.bags()
    more = 0 if draw.examples else 2
    return {"tags": keys, "words": draw.keys(len(keys) + more), "offsets": offsets}


@form(two_ragged, a=bag(mode="sum"), b=bag(mode="sum"), fc=linear())
def one_offsets_for_two_inputs(self: Any, tags: torch.Tensor, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Two inputs of keys may have different sizes and the same offsets: what they shift by when requests are merged differs."""
    return self.fc(self.a(tags, offsets) * self.b(words, offsets)).squeeze(1)


@form(ragged, a=bag(mode="sum"), b=bag(mode="mean", dim=4), fc=linear(DIM + 4))
def one_bag_in_two_tables(self: Any, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.a(tags, offsets), self.b((tags * 3 + 1) % ROWS, offsets)], 1)).squeeze(1)


@form(tags, a=embedding(max_norm=0.5), b=bag(mode="sum", max_norm=1.0), fc=linear(2 * DIM))
def clipped_rows(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.a(tags).sum(1), self.b(tags)], 1)).squeeze(1)


@form(tags, refused="norm_type", a=embedding(max_norm=0.5), c=embedding(max_norm=2.0, norm_type=1.0))
def clipped_by_another_norm(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return (self.a(tags) * self.c(tags)).sum((1, 2))


@form(lambda draw: {"hist": draw.history(), "item": draw.keys()}, e=embedding(max_norm=0.5, padding_idx=0))
def clipped_rows_read_twice(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return (self.e(hist).sum(1) * self.e(item)).sum(1)


@form(tags, e=embedding(padding_idx=0), fc=linear())
def trained_row_of_a_padding(self: Any, tags: torch.Tensor) -> torch.Tensor:
    """padding_idx of nn.Embedding is of the training alone: a checkpoint's row counts."""
    return self.fc(self.e(tags).sum(1)).squeeze(1)


@form(tags, e=embedding(scale_grad_by_freq=True, sparse=False), s=embedding(sparse=True), fc=linear())
def settings_of_the_training(self: Any, tags: torch.Tensor) -> torch.Tensor:
    return self.fc((self.e(tags) + self.s(tags)).sum(1)).squeeze(1)


@form(tags, within=not_empty, one=embedding(1), narrow=embedding(dim=1), wide=embedding(dim=130), fc=linear(DIM + 131))
def widths_and_rows(self: Any, tags: torch.Tensor) -> torch.Tensor:
    """A table of one row, of one column, and of 130."""
    first = tags[:, :1].sum(1) if tags.shape[1] > 100 else tags.sum(1) % ROWS
    return self.fc(torch.cat([self.one(first * 0), self.narrow(first), self.wide(first)], 1)).squeeze(1)


@form(tags, within=not_empty)
def one_table_pooled_in_several_ways() -> nn.Module:
    """The same keys of one weight: lookups that differ in their pooling, padding or norm alone are not one."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ways = (
                {"mode": "sum"},
                {"mode": "sum", "padding_idx": 0},
                {"mode": "mean"},
                {"mode": "max"},
                {"mode": "sum", "padding_idx": 3},
            )
            self.bags = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM, **way) for way in ways])
            for one in self.bags[1:]:
                one.weight = self.bags[0].weight
            self.rows = nn.Embedding(ROWS, DIM, _weight=self.bags[0].weight)
            self.fc = nn.Linear(6 * DIM, 1)

        def forward(self, tags: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.cat([*(one(tags) for one in self.bags), self.rows(tags).amin(1)], 1)).squeeze(1)

    return Several()


@form(ragged_and_weights, within=not_empty)
def one_table_weighted_and_not() -> nn.Module:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Linear(3 * DIM, 1)

        def forward(self, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            found = [self.e(tags, offsets), self.e(tags, offsets, weights), self.e(tags, offsets, weights * 2)]
            return self.fc(torch.cat(found, 1)).squeeze(1)

    return Weighted()


@form(
    lambda draw: {"hist": draw.history(), "item": draw.keys()},
    within=lambda n, length: length > 2,
    e=bag(mode="mean", padding_idx=0),
    fc=linear(),
)
def bags_of_parts(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Bags of slices, of every second key, and of keys that are joined."""
    joined = torch.cat([hist, item.unsqueeze(1)], 1)
    return self.fc(self.e(hist[:, 1:]) + self.e(hist[:, ::2]) * 2 + self.e(joined) + self.e(hist.flip(1)[:, :1])).squeeze(1)


# -- dtypes -------------------------------------------------------------------------------------------------------------


@form(lambda draw: {"hist": draw.history(), "age": draw.floats().half()}, tolerance=2e-3)
def half() -> nn.Module:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Linear(DIM + 1, 1)

        def forward(self, hist: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.fc(torch.cat([masked_mean(self.e(hist), hist != 0), age[:, None]], 1))).squeeze(1)

    return Half().half()


@form(tags, tolerance=2e-2)
def bfloat16() -> nn.Module:
    class Brain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.bag, self.fc = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Linear(2 * DIM, 1)

        def forward(self, tags: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.fc(torch.cat([self.e(tags).sum(1), self.bag(tags)], 1))).squeeze(1)

    return Brain().bfloat16()


@form(lambda draw: {"item": draw.keys(), "price": draw.floats().double()})
def float64() -> nn.Module:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(DIM + 1, 1)

        def forward(self, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.cat([self.e(item), price[:, None]], 1)).squeeze(1)

    return Double().double()


@form(
    lambda draw: {"item": draw.keys()},
    e=lambda: nn.Embedding(ROWS, DIM).half(),
    b=lambda: nn.Embedding(ROWS, DIM).bfloat16(),
    fc=linear(),
)
def narrow_tables(self: Any, item: torch.Tensor) -> torch.Tensor:
    """Half and bfloat16 tables in front of a float32 network."""
    return self.fc(self.e(item).float() + self.b(item).float()).squeeze(1)


@form(lambda draw: {"item": draw.keys(), "hist": draw.history().int()}, e=embedding(), fc=linear())
def int32_keys(self: Any, item: torch.Tensor, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(item) + self.e(hist).sum(1)).squeeze(1)


def ragged_int32(draw: Draw) -> dict[str, torch.Tensor]:
    return {name: one.int() for name, one in ragged(draw).items()}


@form(ragged_int32, e=bag(mode="sum"), fc=linear())
def int32_bags(self: Any, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(tags, offsets)).squeeze(1)


@form(lambda draw: {"item": draw.integers(0, 256, draw.samples).to(torch.uint8)}, e=embedding(256), fc=linear())
def uint8_keys(self: Any, item: torch.Tensor) -> torch.Tensor:
    """Their sum wraps around at 256 before it is a key."""
    return self.fc(self.e((item + 200).long())).squeeze(1)


@form(
    lambda draw: {
        "a": draw.keys().to(torch.int16),
        "b": draw.integers(-20, 100, draw.samples).to(torch.int8),
        "c": draw.keys().double(),
    },
    e=embedding(200),
    fc=linear(),
)
def narrow_keys(self: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    keys = a.long() + (b + 50).long().abs()  # int8: 99 + 50 is -107
    return self.fc(self.e(keys) * self.e(c.long())).squeeze(1)


@form(
    lambda draw: {"flag": draw.flags(), "flags": draw.flags(draw.samples, 3), "item": draw.keys()},
    f=embedding(2),
    e=embedding(),
    fc=linear(),
)
def bool_features(self: Any, flag: torch.Tensor, flags: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """As a key, as a number, and as a condition."""
    chosen = torch.where(flag.unsqueeze(1), self.e(item), self.f(flag.long()))
    return self.fc(chosen * flags.sum(1, keepdim=True)).squeeze(1)


@form(
    lambda draw: {"x": torch.cat([draw.keys(draw.samples, 2).float() + 0.7, draw.floats(draw.samples, 2) - 0.5], 1)},
    e=embedding(),
    fc=linear(DIM + 2),
)
def float_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Fractions are cut off towards zero."""
    keys = x[:, 0].int() + (x[:, 2] * 1.9).long().abs()
    return self.fc(torch.cat([self.e(keys) * self.e(x[:, 1].to(torch.int64)), x[:, 2:]], 1)).squeeze(1)


@form(lambda draw: {"x": draw.keys(draw.samples, 4)}, e=embedding(), fc=linear())
def columns_by_negative_numbers(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(
        self.e(x[:, -1]) * self.e(x[..., -3]) + self.e(x.select(1, 0)) + self.e(x.narrow(1, 2, 1).squeeze(1))
    ).squeeze(1)


@form(lambda draw: {"x": draw.keys(draw.samples, 3, 4)}, e=embedding(), fc=linear())
def keys_of_three_dimensions(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(x).sum((1, 2)) + self.e(x[:, 0]).amax(1)).squeeze(1)


@form(lambda draw: {"hist": draw.history(length=6)}, e=embedding(), fc=linear())
def keys_reshaped(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Flattened, looked up, and shaped again; transposed before."""
    flat = self.e(hist.reshape(-1)).view(hist.shape[0], -1, DIM)
    return self.fc(flat.amax(1) + self.e(hist.t()).sum(0)).squeeze(1)


@form(lambda draw: {"hist": draw.history()}, within=lambda samples, length: length > 1, e=embedding(), fc=linear())
def last_key_by_negative_index(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """`weight[keys - 1]`: index -1 is the last row, which no lookup of keys knows."""
    return self.fc(self.e.weight[hist - 1].sum(1)).squeeze(1)


@form(lambda draw: {"hist": draw.history(), "item": draw.keys()}, e=embedding(), fc=linear())
def shifted_keys(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Negative numbers divided and wrapped as Python does."""
    keys = (hist - 25) // 7 % ROWS
    other = torch.remainder(item - 30, ROWS) + torch.div(item, 7, rounding_mode="trunc") * 0
    return self.fc(self.e(keys).sum(1) * self.e(other)).squeeze(1)


@form(lambda draw: {"hist": draw.history(), "item": draw.keys()}, e=embedding(padding_idx=0), fc=linear(2 * DIM + 2))
def keys_in_rules(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Keys count otherwise: masks, how many, whether the target was seen, rules of single keys."""
    seen = (hist == item.unsqueeze(1)).any(1).float()
    used = (hist != 0).sum(1)
    score = self.fc(
        torch.cat([masked_mean(self.e(hist), hist > 0), self.e(item), torch.stack([seen, used / 7], 1)], 1)
    ).squeeze(1)
    return torch.where(item >= 40, score * 0.5, score).masked_fill((hist == ROWS - 1).any(1), -1.0)


@form(
    lambda draw: {"hist": draw.history(), "item": draw.keys()},
    e=embedding(),
    position=embedding(12),
    kinds=embedding(3),
    fc=linear(),
)
def constant_keys(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Tables whose keys no request gives stay in the network."""
    places = self.position(torch.arange(hist.shape[1])) + self.kinds(torch.tensor([1]))
    return self.fc((self.e(hist) + places).sum(1) + self.kinds.weight[2]).squeeze(1)


@form(lambda draw: {"item": draw.keys()}, within=None, e=embedding(), scale=lambda: nn.Parameter(torch.rand(ROWS)), fc=linear())
def a_scale_for_each_row(self: Any, item: torch.Tensor) -> torch.Tensor:
    """A one-dimensional parameter by key is no table."""
    return self.fc(self.e(item) * self.scale[item].unsqueeze(1)).squeeze(1)


@form(
    lambda draw: {"item": draw.keys(), "day": draw.integers(0, 7, draw.samples)},
    e=embedding(),
    w=lambda: nn.Parameter(torch.rand(7, ROWS, DIM)),
)
def stacked_tables(self: Any, item: torch.Tensor, day: torch.Tensor) -> torch.Tensor:
    """A parameter of three dimensions by two keys is no table."""
    return (self.w[day, item] * self.e(item)).sum(1) + self.w[0][item].sum(1)


@form(lambda draw: {"x": draw.keys(draw.samples, 3)}, e=embedding(), fc=linear())
def kinds_of_selection(self: Any, x: torch.Tensor) -> torch.Tensor:
    """gather, take and a column by index read the table otherwise than by rows."""
    w = self.e.weight
    gathered = torch.gather(w, 0, x[:, :1].expand(-1, DIM)) + w[:, x[:, 1] % DIM][:DIM].t()
    return self.fc(self.e(x[:, 2]) * gathered).squeeze(1) + torch.take(w, x[:, 0]) + w[x[:, 0], x[:, 1] % DIM]


@form(lambda draw: {"item": draw.keys()}, e=embedding(), fc=linear())
def vectors_changed_in_place(self: Any, item: torch.Tensor) -> torch.Tensor:
    v = self.e(item)
    v[item == 3] = 0
    v[:, 0] += 1
    return self.fc(v.mul_(2)).squeeze(1)


@form(
    lambda draw: {
        "item": draw.keys(),
        "price": torch.where(draw.flags(), draw.floats(), torch.nan) if draw.kind == "edges" else draw.floats(),
    },
    e=embedding(),
    fc=linear(DIM + 1),
)
def missing_numbers(self: Any, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """NaN is a missing number, which the module replaces."""
    return self.fc(torch.cat([self.e(item), torch.nan_to_num(price, 0.5)[:, None]], 1)).squeeze(1)


@form(
    lambda draw: {
        "item": draw.keys(),
        "price": torch.where(draw.flags(), draw.floats(), torch.nan) if draw.kind == "edges" else draw.floats(),
    },
    e=embedding(),
    fc=linear(DIM + 1),
)
def not_a_number(self: Any, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """NaN of one sample stays in its score."""
    return self.fc(torch.cat([self.e(item), price[:, None]], 1)).squeeze(1)


@form(
    lambda draw: {"item": draw.keys()},
    within=None,
    e=embedding(),
    q=lambda: nn.Parameter((torch.randn(ROWS, DIM) * 30).to(torch.int8), requires_grad=False),
)
def quantised_by_hand(self: Any, item: torch.Tensor) -> torch.Tensor:
    """A table of int8 rows, scaled after the lookup."""
    return (self.e(item) * self.q[item].float() / 127).sum(1)


@form(
    lambda draw: {"item": draw.keys()},
    e=embedding(),
    low=lambda: nn.Parameter(torch.randn(ROWS, 2)),
    high=linear(2, DIM),
    big=embedding(),
    fc=linear(),
)
def low_rank_correction(self: Any, item: torch.Tensor) -> torch.Tensor:
    """LoRA by rows, and a table that is computed as a whole."""
    computed = F.embedding(item, self.big.weight * 2)
    return self.fc(self.e(item) + self.high(F.embedding(item, self.low)) + computed).squeeze(1)


@form(lambda draw: {"hist": draw.history()}, e=embedding(), fc=linear())
def one_hot_product(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """A lookup as a product with one-hot rows stays in the network, beside a real one."""
    return self.fc(self.e(hist).sum(1) + F.one_hot(hist, ROWS).float().sum(1) @ self.e.weight).squeeze(1)


@form(lambda draw: {"hist": draw.history()}, e=embedding(), fc=linear())
def unique_keys(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """The module looks distinct keys up once."""
    found, places = torch.unique(hist, return_inverse=True)
    return self.fc(self.e(found)[places].sum(1)).squeeze(1)


@form(lambda draw: {"hist": draw.history()}, e=embedding(), fc=linear())
def sorted_keys(self: Any, hist: torch.Tensor) -> torch.Tensor:
    ordered = hist.sort(1).values.flip(1)
    return self.fc(self.e(ordered).cumsum(1).sum(1)).squeeze(1)


@form(
    lambda draw: {"item": draw.keys(), "price": draw.floats().bfloat16()},
    within=None,
    tolerance=2e-2,
    e=embedding(),
    fc=linear(),
)
def bfloat16_feature(self: Any, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    return self.fc(self.e(item)).squeeze(1) * price


@form(history_alone)
def buffers_that_are_not_stored() -> nn.Module:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.position, self.fc = nn.Embedding(ROWS, DIM), nn.Embedding(12, DIM), nn.Linear(DIM, 1)
            self.register_buffer("places", torch.arange(12).expand(1, -1), persistent=False)

        def forward(self, hist: torch.Tensor) -> torch.Tensor:
            return self.fc((self.e(hist) + self.position(self.places[:, : hist.shape[1]])).sum(1)).squeeze(1)

    return Positions()
