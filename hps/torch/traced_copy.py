"""Copies a module so that any machine can trace it, also with weights on a GPU, quantised or sharded."""

import copy
import operator
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from hps.errors import InvalidInputError
from hps.models.importing.discovery import name_of
from hps.torch.cutting import Cut, plain_path
from hps.torch.embeddings import Embedding, EmbeddingForm, drop_shard_hooks, foreign_embeddings
from hps.torch.tables import ShardedTable, Table, is_sharded, table_of

_COPIED: Final = (nn.Module, torch.Tensor, str, int, float, type(None))
"""Classes whose instances can always be copied."""


class TracedCopy:
    """A copy of a module for tracing. It shares the weights on the CPU, and replaces others by tensors without memory.

    Attributes:
        module: the copy, in evaluation mode.
        is_sharded: whether the module needs other ranks to run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kind = type(module).__name__
        self._real: dict[int, torch.Tensor] = {}  # weights by id of their replacement
        self._named: dict[int, tuple[str, Table | ShardedTable]] = {}
        memo: dict[int, Any] = {}
        foreign: set[int] = set()
        for embedding in foreign_embeddings(module):
            foreign |= {id(weight) for weight in (*embedding.module.parameters(), *embedding.module.buffers())}
            memo[id(embedding.module)] = stand_in = _StandIn(embedding)
            self._named |= {id(weight): (name, embedding.tables[name]) for name, weight in stand_in.weights.items()}
        self.is_sharded = any(isinstance(table, ShardedTable) for _, table in self._named.values())
        for weight in (*module.parameters(), *module.buffers()):
            if id(weight) in foreign:
                continue
            if nn.parameter.is_lazy(weight):
                raise InvalidInputError(
                    f"packaging a {self._kind}: got a lazy weight without values; call the module once before"
                )
            memo[id(weight)] = alias = _alias(weight)
            self._real[id(alias)] = weight
            if type(weight) not in (torch.Tensor, nn.Parameter, nn.Buffer) or weight.device.type != "cpu":
                memo[id(weight)] = blank = _blank(weight)
                self._real[id(blank)] = weight
                self.is_sharded |= is_sharded(weight)
        self.module = copy_module(module, memo).eval()
        drop_shard_hooks(self.module)  # the copy's weights are unsharded
        named = self.module.named_parameters(remove_duplicate=False), self.module.named_buffers(remove_duplicate=False)
        self._known = {path: id(weight) for weights in named for path, weight in weights}
        self._paths = {weight: path for path, weight in reversed(self._known.items())}

    def tables(self, found: Cut) -> dict[str, tuple[str, Table | ShardedTable]]:
        """Return name and rows of each looked up table, by the path of its weight in the cut.

        Raises:
            InvalidInputError: two tables get the same name, or weights have no values.
        """
        tables: dict[str, tuple[str, Table | ShardedTable]] = {}
        by_name: dict[str, int] = {}
        for path in dict.fromkeys(lookup.weight for lookup in found.lookups):
            is_named = (
                plain_path(path) in self._known
            )  # else a constant of the graph: a tensor that is neither weight nor buffer
            weight = self._weight(path) if is_named else found.attribute(path)
            if not is_named:
                self._named[id(weight)] = name_of(path), table_of(f"packaging {path}", weight)
            if (named := self._named.get(id(weight))) is None:
                own_path = self._paths[id(weight)]
                named = self._name(own_path), table_of(f"packaging {own_path}", self._real.get(id(weight), weight))
            name, table = tables[path] = named
            if not table.has_values:
                raise InvalidInputError(
                    f"packaging {name!r}: got weights on the meta device, which have no values; load them first"
                )
            if by_name.setdefault(name, id(weight)) != id(weight):
                raise InvalidInputError(
                    f"packaging a {self._kind}: got two weights that would both be table {name!r}; rename one"
                )
        return tables

    def restore(self, found: Cut) -> None:
        """Put the real weights into the programs, in place of their replacements."""
        for path in found.attributes():
            if plain_path(path) not in self._known:
                continue  # a constant of the graph
            if (real := self._real.get(id(self._weight(path)))) is None:
                continue
            if not is_sharded(real) and real.device.type == "cpu" and type(real) in (torch.Tensor, nn.Parameter):
                continue
            if is_sharded(real) or real.is_meta:
                got = "the meta device, without values" if real.is_meta else f"several ranks ({type(real).__name__})"
                raise InvalidInputError(
                    f"packaging {path.removeprefix('module.')}: got a weight of the network on {got}; gather it"
                )
            found.put(path, real.detach().cpu())

    def _weight(self, path: str) -> Any:
        return operator.attrgetter(plain_path(path))(self.module)

    def _name(self, path: str) -> str:
        parent, _, last = path.rpartition(".")
        home, _, table = parent.rpartition(".")
        if (
            home.rpartition(".")[2] in ("embedding_bags", "embeddings")
            and "torchrec"
            in type(operator.attrgetter(home.rpartition(".")[0])(self.module) if "." in home else self.module).__module__
        ):
            return name_of(table)
        return name_of((parent or self._kind) if last == "weight" else path)


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module, also if it has tensors with gradients from its last call, or objects that cannot be copied.

    Args:
        memo: by id, replacements for parts of the module; extended.

    Raises:
        InvalidInputError: the module, or a container in it, has something that cannot be copied.
    """
    replaced = {id(below) for part in module.modules() if id(part) in memo for below in part.modules()}
    for part in module.modules():
        for name, value in () if id(part) in replaced else vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_leaf]
            memo |= {id(leaf): leaf.detach() for leaf in leaves}
            if isinstance(value, _COPIED) or callable(value):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except (TypeError, RuntimeError) as error:
                if isinstance(value, list | dict | set | tuple):
                    raise InvalidInputError(
                        f"packaging a {type(module).__name__}: its attribute {name!r} cannot be copied: {error}"
                    ) from error
                memo[id(value)] = value  # a lock, a file, a connection: shared with the module
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise InvalidInputError(
            f"packaging a {type(module).__name__}: it cannot be copied ({type(error).__name__}: {error}), which tracing needs; "
            "keep objects that cannot be copied outside of the module"
        ) from error


def _alias(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the memory, so that a forward that assigns to `data` changes no weight of the module."""
    if type(weight) is nn.Parameter:
        return nn.Parameter(weight.detach(), requires_grad=False)
    return weight.detach() if type(weight) is torch.Tensor else weight


def _blank(weight: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape of a weight on the CPU, with the memory of a single element."""
    zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(weight, nn.Parameter) else zeros


class _StandIn(nn.Module):
    """Replaces an embedding that cannot be exported; its tables take no memory."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding
        self.weights = nn.ParameterDict(
            {name: _blank(nn.Parameter(torch.empty(table.shape, device="meta"))) for name, table in embedding.tables.items()}
        )

    def forward(self, features: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        embedding = self._embedding
        if embedding.form is EmbeddingForm.ROWS:
            return functional.embedding(features, self.weights[embedding.lookups[0].name]).to(embedding.dtype)
        if embedding.form is EmbeddingForm.BAGS:
            return self._pooled(embedding.lookups[0], features, offsets, per_sample_weights, embedding.include_last_offset)
        from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

        tables = features.to_dict()
        pairs = [
            (name, lookup, tables[feature])
            for lookup, names in zip(embedding.lookups, embedding.outputs, strict=True)
            for name, feature in zip(names, lookup.features, strict=True)
        ]
        if embedding.form is EmbeddingForm.COLLECTION:
            return {
                name: JaggedTensor(
                    functional.embedding(keys.values(), self.weights[lookup.name]),
                    keys.values() if embedding.need_indices else None,
                    keys.lengths(),
                    keys.offsets(),
                )
                for name, lookup, keys in pairs
            }
        weights = [keys.weights() if embedding.is_weighted else None for _, _, keys in pairs]
        pooled = [
            self._pooled(lookup, keys.values(), keys.offsets(), key_weights, include_last_offset=True)
            for (_, lookup, keys), key_weights in zip(pairs, weights, strict=True)
        ]
        return KeyedTensor(
            [name for name, _, _ in pairs], [lookup.emb_vec_size for _, lookup, _ in pairs], torch.cat(pooled, 1)
        )

    def _pooled(self, lookup: Any, keys: torch.Tensor, offsets: Any, weights: Any, include_last_offset: bool) -> torch.Tensor:
        return functional.embedding_bag(
            keys,
            self.weights[lookup.name],
            offsets,
            mode=lookup.pooling,
            per_sample_weights=weights,
            include_last_offset=include_last_offset,
            padding_idx=lookup.padding_idx,
        ).to(self._embedding.dtype)
