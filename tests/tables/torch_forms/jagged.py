"""torchrec's collections, and KeyedJaggedTensors that are inputs or are made within a module."""

import warnings
from typing import Any

import torch
from torch import nn

from tests.tables.torch_forms.form import DIM, LENGTH, ROWS, Draw, form, linear, masked_mean, mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import
    import torchrec
    from torchrec.models.dlrm import DLRM as TorchrecDLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

JaggedTensor, KeyedJaggedTensor = torchrec.JaggedTensor, torchrec.KeyedJaggedTensor


def bags(*tables: tuple[str, list[str]], dim: int = DIM, pooling: str = "SUM", weighted: bool = False) -> Any:
    """Make a function that makes a collection: of tables, each with its features."""
    return lambda: torchrec.EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=features, pooling=PoolingType[pooling]
            )
            for name, features in tables
        ],
        is_weighted=weighted,
    )


def rows(*tables: tuple[str, list[str]]) -> Any:
    return lambda: torchrec.EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=features)
            for name, features in tables
        ]
    )


def jagged(draw: Draw, *features: str, weighted: bool = False) -> Any:
    """Draw as many keys as `length` at most, for each sample and feature."""
    lengths = draw.lengths(len(features) * draw.samples)
    count = int(lengths.sum())
    return KeyedJaggedTensor(list(features), draw.keys(count), draw.floats(count) if weighted else None, lengths=lengths)


def keyed(*features: str, weighted: bool = False) -> Any:
    return lambda draw: {"kjt": jagged(draw, *features, weighted=weighted)}


@form(lambda draw: (draw.floats(draw.samples, 4), jagged(draw, "a", "b", "c")))
def torchrec_dlrm() -> nn.Module:
    """torchrec's own DLRM."""
    return TorchrecDLRM(
        embedding_bag_collection=bags(("t1", ["a"]), ("t2", ["b"]), ("t3", ["c"]))(),
        dense_in_features=4,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
    )


def other_order(draw: Draw) -> list[Any]:
    return [{"kjt": jagged(draw, "b", "a", "c")}, {"kjt": jagged(draw, "a", "b")}]


@form(keyed("a", "b", "c"), others=other_order, e=bags(("t1", ["c", "a"]), ("t2", ["b"]), pooling="MEAN"), fc=linear(3 * DIM))
def features_in_another_order(self: Any, kjt: Any) -> torch.Tensor:
    """The collection has its features in another order than the input."""
    return self.fc(self.e(kjt).values()).squeeze(1)


@form(keyed("a", "b"), e=bags(("t", ["a", "b"])), fc=linear(2 * DIM))
def one_table_for_two_features(self: Any, kjt: Any) -> torch.Tensor:
    found = self.e(kjt)
    return self.fc(torch.cat([found["b"], found["a"]], 1)).squeeze(1)


@form(keyed("a", "b"), e=bags(("t1", ["a"]), ("t2", ["a", "b"])), fc=linear(3 * DIM))
def one_feature_in_two_tables(self: Any, kjt: Any) -> torch.Tensor:
    return self.fc(self.e(kjt).values()).squeeze(1)


def without_weights(draw: Draw) -> list[Any]:
    return [{"kjt": jagged(draw, "a", "b")}]


@form(
    keyed("a", "b", weighted=True),
    others=without_weights,
    e=bags(("t1", ["a"]), ("t2", ["b"]), weighted=True),
    fc=linear(2 * DIM),
)
def weighted_collection(self: Any, kjt: Any) -> torch.Tensor:
    return self.fc(self.e(kjt).values()).squeeze(1)


@form(keyed("a", "b"), e=bags(("t1", ["a"]), ("t2", ["b"])), fc=linear(2 * DIM + 2))
def lengths_as_a_feature(self: Any, kjt: Any) -> torch.Tensor:
    """How many keys a bag has counts."""
    lengths = kjt.lengths().view(2, -1).t().float()
    return self.fc(torch.cat([self.e(kjt).values(), lengths], 1)).squeeze(1)


@form(keyed("item", "hist"), e=rows(("t", ["item", "hist"])), fc=linear())
def sequence_collection(self: Any, kjt: Any) -> torch.Tensor:
    """Rows of a history, padded, attended to by an item."""
    found = self.e(kjt)
    hist, item = found["hist"].to_padded_dense(LENGTH), found["item"].to_padded_dense(1)
    return self.fc((torch.softmax((hist * item).sum(-1), 1).unsqueeze(-1) * hist).sum(1)).squeeze(1)


@form(keyed("hist"), e=rows(("t", ["hist"])), fc=linear())
def jagged_rows_pooled(self: Any, kjt: Any) -> torch.Tensor:
    """The module sums the rows of each sample itself."""
    found = self.e(kjt)["hist"]
    samples = found.lengths().shape[0]
    owners = torch.repeat_interleave(torch.arange(samples), found.lengths(), output_size=found.values().shape[0])
    return self.fc(torch.zeros(samples, DIM).index_add(0, owners, found.values())).squeeze(1)


@form(
    lambda draw: {"user": draw.keys(), "item": draw.keys(), "age": draw.floats()},
    e=bags(("user_rows", ["user"]), ("item_rows", ["item"])),
    fc=linear(2 * DIM + 1),
)
def collection_of_dense_columns(self: Any, user: torch.Tensor, item: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """A KeyedJaggedTensor made of columns, one key each."""
    values = torch.cat([user, item])
    kjt = KeyedJaggedTensor.from_lengths_sync(["user", "item"], values, torch.ones_like(values))
    return self.fc(torch.cat([self.e(kjt).values(), age[:, None]], 1)).squeeze(1)


@form(
    lambda draw: {"hist": draw.history(), "item": draw.keys()},
    within=None,
    e=bags(("t", ["hist", "item"]), pooling="MEAN"),
    fc=linear(2 * DIM),
)
def collection_of_a_padded_matrix(self: Any, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Paddings are taken out within the module."""
    mask = hist != 0
    values, lengths = torch.cat([hist[mask], item]), torch.cat([mask.sum(1), torch.ones_like(item)])
    return self.fc(self.e(KeyedJaggedTensor(["hist", "item"], values, lengths=lengths)).values()).squeeze(1)


@form(keyed("a", "b", "c"), within=None, e=bags(("t1", ["a"]), ("t2", ["c"])), fc=linear(2 * DIM))
def permuted_in_forward(self: Any, kjt: Any) -> torch.Tensor:
    return self.fc(self.e(kjt.permute([2, 0])).values()).squeeze(1)


@form(keyed("a", "b"), within=None, left=bags(("t1", ["a"])), right=bags(("t2", ["b"])))
def split_in_forward(self: Any, kjt: Any) -> torch.Tensor:
    left, right = kjt.split([1, 1])
    return (self.left(left).values() * self.right(right).values()).sum(1)


@form(
    lambda draw: {"kjt": jagged(draw, "hist"), "hist": draw.history()},
    within=None,
    e=bags(("t", ["hist"])),
    plain=lambda: nn.Embedding(ROWS, DIM),
    fc=linear(2 * DIM),
)
def collection_and_embedding(self: Any, kjt: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.cat([self.e(kjt).values(), masked_mean(self.plain(hist), hist != 0)], 1)).squeeze(1)


@form(lambda draw: {"k1": jagged(draw, "a"), "k2": jagged(draw, "a", "b")}, e=bags(("t1", ["a"])), f=bags(("t2", ["a", "b"])))
def two_jagged_inputs(self: Any, k1: Any, k2: Any) -> torch.Tensor:
    return self.e(k1).values().sum(1) + self.f(k2).values().sum(1)


@form(keyed("hist"), within=lambda samples, length: samples > 1, slow=True)
def jagged_history_in_a_gru() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.gru = rows(("t", ["hist"]))(), nn.GRU(DIM, DIM, batch_first=True)
            self.top = mlp(DIM, 1)

        def forward(self, kjt: Any) -> torch.Tensor:
            padded = self.e(kjt)["hist"].to_padded_dense(LENGTH)
            return self.top(self.gru(padded)[1][-1]).squeeze(1)

    return Recurrent()


def by_offsets(draw: Draw) -> list[Any]:
    kjt = jagged(draw, "a", "b")
    return [{"kjt": KeyedJaggedTensor(["a", "b"], kjt.values(), offsets=kjt.offsets())}]


def narrow(draw: Draw) -> dict[str, Any]:
    kjt = jagged(draw, "a", "b")
    return {"kjt": KeyedJaggedTensor(["a", "b"], kjt.values().int(), lengths=kjt.lengths().int())}


@form(narrow, others=by_offsets, e=bags(("t1", ["a"]), ("t2", ["b"])), fc=linear(2 * DIM))
def jagged_int32(self: Any, kjt: Any) -> torch.Tensor:
    return self.fc(self.e(kjt).values()).squeeze(1)


@form(keyed("a", "b", weighted=True), e=bags(("t1", ["a"]), ("t2", ["b"])), fc=linear(2 * DIM))
def weights_that_are_not_read(self: Any, kjt: Any) -> torch.Tensor:
    return self.fc(self.e(kjt).values()).squeeze(1)


def jagged_tensor(draw: Draw) -> dict[str, Any]:
    lengths = draw.lengths()
    return {"tags": JaggedTensor(draw.keys(int(lengths.sum())), lengths=lengths)}


@form(jagged_tensor, within=None, e=lambda: nn.EmbeddingBag(ROWS, DIM, mode="sum"), fc=linear())
def jagged_tensor_input(self: Any, tags: Any) -> torch.Tensor:
    lengths = tags.lengths()
    return self.fc(self.e(tags.values(), lengths.cumsum(0) - lengths)).squeeze(1)
