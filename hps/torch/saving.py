"""Saves the embeddings of a PyTorch module as a version of a model.

    <uri>/model.json                  the entry of `models`: names, widths, settings
    <uri>/<version>/version.json      manifest of the version
    <uri>/<version>/<table>/key, emb_vector

Keys are row numbers unless the caller gives others. `docs/versions.md` says how servers find versions.
"""

import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hps.configuration.load import DenseConfig, load_configuration
from hps.errors import InvalidDtypeError, InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.models.files import rows_of_a_chunk
from hps.models.importing.discovery import default_settings
from hps.models.manifest import read_json, within, write_file
from hps.models.repository import MODEL_ENTRY, list_versions
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.torch.embeddings import embeddings_of, tables_of
from hps.torch.ranks import gather
from hps.torch.tables import ShardedTable, Table
from hps.types import FloatArray, KeyArray


@dataclass(frozen=True)
class SavedModel:
    """The result of `save`. *Immutable.*"""

    place: str  # path or URI of the model's directory
    version: str
    entry: Mapping[str, Any] = field(repr=False)  # of `models` in a `ps.json` that serves it
    tables: Mapping[str, tuple[str, ...]] = field(repr=False)  # names by the path of their submodule


def save(
    module: nn.Module | Mapping[str, Table | ShardedTable],
    uri: str | os.PathLike[str],
    *,
    version: str | None = None,
    keys: Mapping[str, torch.Tensor] | None = None,
    delta_of: str = "",
    changed: Mapping[str, torch.Tensor] | None = None,
    hotness: int | Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    note: str = "",
    updates: Mapping[str, Mapping[str, str]] | None = None,
    network: tuple[DenseConfig, Mapping[str, bytes]] | None = None,
    sources: ModelSources | None = None,
) -> SavedModel:
    """Write every embedding of a module as a table of one version of a model. Readers see the complete version or nothing.

    Embeddings are `nn.Embedding`, `nn.EmbeddingBag`, torchrec's `EmbeddingBagCollection` and `EmbeddingCollection`, and the
    quantised forms of torch and torchrec. A table is named by the path of its submodule, with `_` for characters other than
    letters, digits, `_` and `-`; torchrec's tables keep their names. A shared submodule is saved once. Weights are copied to
    host memory 16 MB at a time; no optimiser may change them meanwhile.

    If weights are sharded (DTensor, ShardedTensor, torchrec's sharded collections), every rank of the default process group
    makes the same call. Rank 0 writes, with its arguments, and all ranks return the same result.

    Args:
        module: the trained module, on any device; weights are float32, or converted from float16, bfloat16, float64 and
            quantised rows. Or its tables by name, as `package` finds them.
        uri: path or URI of the model's directory on any supported file system; its last part is the model's name. Parents are
            created.
        version: version number. Default: the highest existing one plus 1, or 1.
        keys: by table, (rows,) distinct int64: the key of each row. Default: row numbers.
        delta_of: the base version, if this version holds only changes.
        changed: with `delta_of`, the numbers of the changed rows by table, int64 in any order; tables that are not named are
            unchanged.
        hotness: maximum keys per sample of a table (`maxnum_catfeature_query_per_table_per_sample`), for all tables or by
            table. Default: the value in `model.json`, or 1.
        settings: keys of the entry of `models`, such as `max_batch_size` and `gpucacheper`. Others keep their values in
            `model.json`; a new model gets 4,096 samples, half of its rows cached, and default vectors only for absent keys.
        note, updates, network, sources: as for `hps.write_version`.

    Returns:
        The version with its entry of `models`, which is also written to `model.json`, where a `model_repository` reads it.

    Raises:
        InvalidInputError: the module has no embedding, or one that cannot be saved (pruned, on the meta device); two tables get
            the same name; keys or row numbers do not fit. `InvalidDtypeError`: weights of another dtype.
        ModelFileError: the version exists, `model.json` has other tables, files cannot be written, or another rank failed.
        ConfigError: settings or the name of the model are wrong.
    """
    named: Mapping[str, tuple[str, ...]] = {}
    if isinstance(module, nn.Module):
        embeddings = embeddings_of(module)
        all_tables, named = tables_of(embeddings), {embedding.path: tuple(embedding.tables) for embedding in embeddings}
    else:
        all_tables = dict(module)
    sources = sources or ModelSources()
    filesystem, place = sources.locate(os.fspath(uri))
    with gather(f"saving {place}", all_tables) as job:
        if not job.leads():
            followed: SavedModel = job.follow()
            return followed
        tables = job.tables
        if (changed is None) is bool(delta_of):
            raise InvalidInputError(
                f"saving {place}: got delta_of {delta_of!r} and changed {changed}, expected both or neither"
            )
        for argument, value in (("keys", keys), ("changed", changed), ("hotness", hotness)):
            if isinstance(value, Mapping) and (unknown := set(value) - set(tables)):
                raise InvalidInputError(f"saving {place}: got {argument} of {min(unknown)!r}, expected of {', '.join(tables)}")
        rows: dict[str, Iterator[tuple[KeyArray, FloatArray]]] = {}
        for name, table in tables.items():
            count = table.shape[0]
            own_keys = None if keys is None or name not in keys else _row_keys(f"saving table {name!r}", keys[name], count)
            numbers = None
            if changed is not None:
                numbers = changed.get(name, torch.empty(0, dtype=torch.int64))
                numbers = _row_numbers(f"saving table {name!r}", numbers, count)
            rows[name] = _chunks(table, own_keys, numbers)
        dims = {name: table.shape[1] for name, table in tables.items()}
        written = read_json(filesystem, within(place, MODEL_ENTRY))
        entry = _entry(place, dims, written or {}, hotness, settings or {})
        if version is None:
            try:
                existing = list_versions(place, sources, manifest_required=False)
            except ModelFileNotFoundError:
                existing = {}
            version = str(1 + max(map(int, existing), default=0))
        write_version(
            within(place, version), rows, delta_of=delta_of, note=note, updates=updates, network=network, sources=sources
        )
        if entry != written:
            write_file(filesystem, within(place, MODEL_ENTRY), json.dumps(entry, indent=2).encode() + b"\n")
        return job.finish(SavedModel(place, version, entry | {"version_path": place}, named))


def _row_keys(doing: str, keys: torch.Tensor, rows: int) -> torch.Tensor:
    if keys.dtype != torch.int64 or keys.shape != (rows,):
        raise InvalidInputError(f"{doing}: got keys {keys.dtype} of shape {tuple(keys.shape)}, expected int64 ({rows},)")
    if (distinct := torch.unique(keys).numel()) != rows:
        raise InvalidInputError(f"{doing}: got {distinct} distinct keys for {rows} rows, expected that they differ")
    return keys.detach().cpu().contiguous()


def _row_numbers(doing: str, numbers: torch.Tensor, rows: int) -> torch.Tensor:
    if numbers.dtype != torch.int64:
        raise InvalidDtypeError(f"{doing}: got numbers of rows {numbers.dtype}, expected int64")
    numbers = torch.unique(numbers.detach().cpu())  # ascending
    if numbers.numel() and not 0 <= int(numbers[0]) <= int(numbers[-1]) < rows:
        raise InvalidInputError(f"{doing}: got rows {int(numbers[0])} to {int(numbers[-1])}, expected 0 to {rows - 1}")
    return numbers


def _chunks(
    table: Table,
    keys: torch.Tensor | None,
    numbers: torch.Tensor | None,  # of the rows, ascending; None: all
) -> Iterator[tuple[KeyArray, FloatArray]]:
    count = table.shape[0] if numbers is None else len(numbers)
    step = rows_of_a_chunk(table.shape[1])
    for start in range(0, count, step):
        stop = min(start + step, count)
        chosen = torch.arange(start, stop) if numbers is None else numbers[start:stop]
        block = table.read(slice(start, stop) if numbers is None else chosen)
        keys_of_chunk = chosen if keys is None else keys[chosen]
        yield keys_of_chunk.numpy(), block.numpy()


def _entry(
    place: str,
    dims: Mapping[str, int],
    written: Mapping[str, Any],
    hotness: int | Mapping[str, int] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the entry of `models` from defaults, `model.json` and the caller's settings, in this order."""
    tables = {
        "sparse_files": list(dims),
        "embedding_table_names": list(dims),
        "embedding_vecsize_per_table": list(dims.values()),
    }
    for key, expected in tables.items():
        if (got := written.get(key, expected)) != expected:
            raise ModelFileError(
                f"saving {place}: its {MODEL_ENTRY} has {key} {got}, the module has {expected}; all versions of a model "
                "have the same tables: save to another directory"
            )
    entry = {"model": posixpath.basename(place.rstrip("/")), **tables, **default_settings(len(dims)), **written}
    if hotness is not None:
        maximums = entry["maxnum_catfeature_query_per_table_per_sample"]
        by_name = hotness if isinstance(hotness, Mapping) else dict.fromkeys(dims, hotness)
        entry["maxnum_catfeature_query_per_table_per_sample"] = [
            by_name.get(name, before) for name, before in zip(dims, maximums, strict=True)
        ]
    entry |= settings
    load_configuration({"models": [entry]})
    return entry
