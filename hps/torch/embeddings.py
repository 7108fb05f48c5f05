"""Finds the embeddings of a module, and describes those of all classes in the same way."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from hps.errors import InvalidInputError
from hps.models.importing.discovery import name_of
from hps.torch.embedding_bags import BagTable, output_names
from hps.torch.tables import FusedTable, PackedTable, Piece, ShardedTable, Table, table_of

_FOREIGN = ("torchrec.distributed.", "torchrec.quant.", "torch.ao.nn.quantized.", "fbgemm_gpu.")
_PLAIN = "torchrec.modules.embedding_modules"
_EXPECTED = (
    "nn.Embedding, nn.EmbeddingBag, torchrec's EmbeddingBagCollection and EmbeddingCollection, their sharded and quantised "
    "forms, or torch.ao.nn.quantized's Embedding and EmbeddingBag"
)


class EmbeddingForm(Enum):
    """Inputs and outputs of an embedding."""

    ROWS = "keys -> a vector each"
    BAGS = "keys, offsets -> a vector for each bag"
    COLLECTION = "KeyedJaggedTensor -> a JaggedTensor of vectors for each feature"
    BAG_COLLECTION = "KeyedJaggedTensor -> KeyedTensor"


@dataclass(frozen=True, eq=False)
class Embedding:
    """An embedding of a module. *Immutable.*"""

    path: str  # path of the submodule, as in `named_modules`; the first path of a shared submodule
    module: nn.Module
    form: EmbeddingForm
    tables: Mapping[str, Table | ShardedTable]  # by the name under which each is saved
    # A table and its features each, in the order of the outputs. Pooling `none` returns a vector for each key.
    lookups: Sequence[BagTable]
    outputs: Sequence[Sequence[str]] = ()  # names of the outputs of each of `lookups`
    configs: Sequence[Any] = ()  # torchrec's, of the tables
    dtype: torch.dtype = torch.float32  # of the outputs
    include_last_offset: bool = False
    is_weighted: bool = False
    need_indices: bool = False


def embeddings_of(module: nn.Module, *, with_values: bool = True) -> list[Embedding]:
    """List the embeddings of a module, each once, in the order of `named_modules`.

    Args:
        with_values: refuse weights on the meta device.

    Raises:
        InvalidInputError: as for `save`.
    """
    for part in module.modules():
        if isinstance(part, _imported_class("torch.distributed.fsdp", "FSDPModule")):
            part.reshard()  # a forward pass leaves its weights unsharded, on every rank
    embeddings = list(_walk("", unwrapped(module), set()))
    paths: dict[str, str] = {}
    for embedding in embeddings:
        for name, table in embedding.tables.items():
            if name in paths:
                raise InvalidInputError(
                    f"saving the embeddings of a {type(module).__name__}: got {embedding.path!r} and {paths[name]!r}, which "
                    f"would both be table {name!r}; rename one of them"
                )
            paths[name] = embedding.path
            if with_values and not table.has_values:
                path = embedding.path or type(module).__name__
                raise InvalidInputError(f"saving {path}: got weights on the meta device, which have no values; load them first")
    if not embeddings:
        raise InvalidInputError(f"saving the embeddings of a {type(module).__name__}: it has none, expected {_EXPECTED}")
    return embeddings


def foreign_embeddings(module: nn.Module) -> list[Embedding]:
    """List the quantised and sharded embeddings of a module, which torch.export cannot trace."""
    return list(_walk("", module, set(), only_foreign=True))


def tables_of(embeddings: Iterable[Embedding]) -> dict[str, Table | ShardedTable]:
    """Return the tables of embeddings, by name."""
    return {name: table for embedding in embeddings for name, table in embedding.tables.items()}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile, DataParallel, DistributedDataParallel or DistributedModelParallel wraps."""
    parallel = (
        _imported_class("torchrec.distributed.model_parallel", "DistributedModelParallel"),
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
    )
    while True:
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidInputError(
                "got a ScriptModule, which has no Python to export, expected the nn.Module that was scripted"
            )
        if isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
        elif any(isinstance(module, wrapper) for wrapper in parallel):
            module = module.module  # type: ignore[assignment]
        else:
            return module


def require_convertible(embedding: Embedding) -> None:
    """Refuse an embedding whose outputs a lookup cannot reproduce.

    Raises:
        InvalidInputError: as for `convert`.
    """
    collections = [_imported_class(_PLAIN, "EmbeddingBagCollection"), _imported_class(_PLAIN, "EmbeddingCollection")]
    kinds: list[Any] = [nn.Embedding, nn.EmbeddingBag, *collections]
    if _is_foreign(embedding.module):
        kinds.insert(0, type(embedding.module))
    for part in embedding.module.modules():
        kind = next((kind for kind in kinds if isinstance(part, kind)), None)
        problem = ""
        if kind and getattr(part, "max_norm", None) is not None and part.norm_type != 2:
            problem = f"norm_type {part.norm_type}, expected 2"
        if kind and getattr(part.forward, "__func__", None) is not kind.forward:  # of its class, or the object's
            problem = f"a forward of {type(part).__name__}'s own, expected that of {kind.__name__}"
        if any(not _is_shard_hook(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())):
            problem = "forward hooks, expected none; remove them first"
        if problem:
            raise InvalidInputError(f"converting {embedding.path or type(embedding.module).__name__}: got {problem}")


def drop_shard_hooks(module: nn.Module) -> None:
    """Remove torch's hooks that send inputs to shards and outputs back; they cannot be traced."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_shard_hook(hook)]:
                del hooks[key]
                part._forward_hooks_with_kwargs.pop(key, None)
                part._forward_pre_hooks_with_kwargs.pop(key, None)


def _imported_class(home: str, name: str) -> Any:
    """Return a class of a module that may not be installed; an empty tuple if it was not imported, for `isinstance`."""
    return getattr(sys.modules.get(home), name, ())


def _is_foreign(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith(_FOREIGN) and "Embedding" in kind.__name__


def _is_shard_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _walk(path: str, module: Any, seen: set[nn.Module], *, only_foreign: bool = False) -> Iterator[Embedding]:
    if module in seen:
        return
    seen.add(module)
    if not isinstance(module, torch.jit.ScriptModule) and (inner := unwrapped(module)) is not module:
        yield from _walk(path, inner, seen)
        return
    kind = type(module)
    home = f"{kind.__module__}.{kind.__qualname__}"
    describe: Callable[[str, str, Any], Embedding] | None = None
    if _is_foreign(module):
        if (describe := _FOREIGN_KINDS.get(home)) is None:
            raise InvalidInputError(
                f"saving {path or 'a module'}: got {home}, expected {_EXPECTED}: load its state_dict into one of those first"
            )
    elif only_foreign:
        describe = None
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        describe = _describe_module
    elif isinstance(module, _imported_class(_PLAIN, "EmbeddingBagCollection")):
        describe = _describe_bag_collection
    elif isinstance(module, _imported_class(_PLAIN, "EmbeddingCollection")):
        describe = _describe_collection
    if describe is not None:
        yield describe(f"saving {path or kind.__name__}", path, module)
        return
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child, seen, only_foreign=only_foreign)


def _describe_module(doing: str, path: str, module: Any) -> Embedding:
    """Describe an embedding of torch."""
    name = name_of(path or type(module).__name__)
    is_bag = isinstance(module, (nn.EmbeddingBag, torch.ao.nn.quantized.EmbeddingBag))
    table: Table | ShardedTable
    if _is_foreign(module):
        table, dtype = PackedTable(doing, module), torch.float32
        lookup = BagTable(name, (), table.shape[1], "sum" if is_bag else "none")  # its operator sums, whatever `mode` says
    else:
        table, dtype = table_of(doing, module.weight), module.weight.dtype
        pooling, padding = (module.mode, module.padding_idx) if is_bag else ("none", None)
        lookup = BagTable(name, (), table.shape[1], pooling, module.max_norm, padding)
    form = EmbeddingForm.BAGS if is_bag else EmbeddingForm.ROWS
    last = is_bag and module.include_last_offset
    return Embedding(path, module, form, {name: table}, [lookup], dtype=dtype, include_last_offset=last)


def _describe_bag_collection(doing: str, path: str, module: Any) -> Embedding:
    parts, configs, tables = _describe_torchrec(doing, module, "embedding_bags", "embedding_bag_configs")
    lookups = []
    for config in configs:
        part = parts.get(config.name)  # its options may have been changed after the configuration was made
        options = (part.mode, part.max_norm, part.padding_idx) if part else (config.pooling.value.lower(), None, None)
        lookups.append(BagTable(name_of(config.name), tuple(config.feature_names), config.embedding_dim, *options))
    outputs = output_names([(config.name, config.feature_names) for config in configs])
    positions = {name: number for number, name in reversed([*enumerate(module._embedding_names)])}
    order = sorted(range(len(configs)), key=lambda number: min((positions[name] for name in outputs[number]), default=0))
    return Embedding(
        path,
        module,
        EmbeddingForm.BAG_COLLECTION,
        tables,
        [lookups[number] for number in order],
        [outputs[number] for number in order],
        configs,
        module.output_dtype() if hasattr(module, "output_dtype") else torch.float32,
        is_weighted=module._is_weighted,
    )


def _describe_collection(doing: str, path: str, module: Any) -> Embedding:
    parts, configs, tables = _describe_torchrec(doing, module, "embeddings", "embedding_configs")
    norms = {name: part.max_norm for name, part in parts.items()}
    lookups = [
        BagTable(name_of(config.name), tuple(config.feature_names), config.embedding_dim, "none", norms.get(config.name))
        for config in configs
    ]
    outputs = output_names([(config.name, config.feature_names) for config in configs])
    form = EmbeddingForm.COLLECTION
    return Embedding(path, module, form, tables, lookups, outputs, configs, need_indices=module._need_indices)


def _describe_torchrec(
    doing: str, module: Any, parts_name: str, configs_name: str
) -> tuple[Mapping[str, Any], Sequence[Any], Mapping[str, Table | ShardedTable]]:
    """Return a collection's embeddings of torch, if it has some, the configurations of its tables, and the tables."""
    parts: dict[str, Any] = {}
    tables: Mapping[str, Table | ShardedTable]
    home = type(module).__module__
    configs = (
        getattr(module, f"_{configs_name}") if home.startswith("torchrec.distributed.") else getattr(module, configs_name)()
    )
    if home.startswith("torchrec.distributed."):
        tables = _sharded_tables(doing, module, parts_name, configs)
    elif home.startswith("torchrec.quant."):
        tables = _fused_tables(doing, module)
    else:
        parts = dict(getattr(module, parts_name).items())
        tables = {name: table_of(doing, part.weight) for name, part in parts.items()}
    return parts, configs, {name_of(config.name): tables[config.name] for config in configs}


def _fused_tables(doing: str, module: Any) -> dict[str, Table | ShardedTable]:
    groups = zip(module._key_to_tables.values(), module._emb_modules, strict=True)
    return {config.name: FusedTable(doing, rows, number) for group, rows in groups for number, config in enumerate(group)}


def _sharded_tables(doing: str, module: Any, parts_name: str, configs: Sequence[Any]) -> dict[str, Table | ShardedTable]:
    state = module.state_dict()
    tables: dict[str, Table | ShardedTable] = {}
    for config in configs:
        weight = state.get(f"{parts_name}.{config.name}.weight")
        if weight is None:
            raise InvalidInputError(f"{doing}: got no weights of table {config.name!r}, expected its shards in the state_dict")
        table = table_of(doing, weight)
        if isinstance(table, Table):  # data-parallel: every rank has the table, and one of them writes it
            table = ShardedTable(table.shape, [Piece(0, 0, table)])
        tables[config.name] = table
    return tables


_FOREIGN_KINDS: dict[str, Callable[[str, str, Any], Embedding]] = {
    "torch.ao.nn.quantized.modules.embedding_ops.Embedding": _describe_module,
    "torch.ao.nn.quantized.modules.embedding_ops.EmbeddingBag": _describe_module,
    "torchrec.quant.embedding_modules.EmbeddingBagCollection": _describe_bag_collection,
    "torchrec.quant.embedding_modules.EmbeddingCollection": _describe_collection,
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": _describe_bag_collection,
    "torchrec.distributed.embedding.ShardedEmbeddingCollection": _describe_collection,
}
