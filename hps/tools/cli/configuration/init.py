"""`hps init`: write a checked ps.json for model files, a checkpoint or HugeCTR's files, with the reason for every line."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from hps import errors
from hps.ground.progress import size_text
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.models.importing.discovery import Discovery, FoundModel

EXAMPLE = "Example: `hps init models/ --persistent row_files && hps serve ps.json`"
_ROW_BYTES = 24  # upper bound of a hash map's row without its vector
_PARTITIONS = 16
_Line: TypeAlias = tuple[str, str]  # of the ps.json, and its reason


@dataclass
class _Choices:
    """The user's choices; None for the default. *One thread.*"""

    volatile: str | None
    persistent: str | None
    device: str
    redis: str | None
    path: str | None
    gpucacheper: float | None


def init_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory, or URI, of model files; a checkpoint as `hps import` reads it; or HugeCTR's ps.json.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="The configuration to write.")] = Path(
        "ps.json"
    ),
    volatile: Annotated[
        Literal["hash_map", "redis_cluster", "disabled"] | None,
        typer.Option(help="The tier in memory. Default: hash_map above rocks_db, redis_cluster with --redis, else disabled."),
    ] = None,
    persistent: Annotated[
        Literal["row_files", "rocks_db", "disabled"] | None,
        typer.Option(
            help="The tier on disk. Default: row_files, or disabled below a tier in memory that has room for every row."
        ),
    ] = None,
    path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Its directory. Default: rows, or rocksdb, beside the configuration.")
    ] = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where embedding caches are.")] = "auto",
    redis: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The server, or nodes of the cluster.")] = None,
    gpucacheper: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the rows that the embedding cache holds. Default: 0.5.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of a single model. Default: its directory's.")] = None,
    tables: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="The tables of a checkpoint, as in `hps import --tables`."),
    ] = None,
    explain: Annotated[bool, typer.Option(help="Print every line with its reason.")] = True,
    ask: Annotated[bool, typer.Option("--ask", help="Ask on the terminal for missing options.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing configuration and imported tables.")] = False,
) -> None:
    """Write a ps.json for the models in SOURCE, and print the reason for each line.

    A directory is one model with its tables, or contains models; directories named by numbers are versions. Widths follow from
    the sizes of the files. A checkpoint is imported to a directory beside the configuration.
    """
    with console.reported():
        from hps.configuration.load import load_configuration

        if output.exists() and not force:
            raise errors.InvalidInputError(f"writing {output}: it exists; choose another --output, or replace it with --force")
        choices = _Choices(volatile, persistent, device, redis, path, gpucacheper)
        if ask:
            _prompt(choices)
        discovery = _find_models(source, output, tables, model, force)
        content, reasons = _configuration(source, discovery, choices, output)
        load_configuration(content)
        lines = _lines(content, reasons)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(line for line, _ in lines) + "\n")
        if explain:
            width = min(80, max(len(line) for line, _ in lines))
            for line, reason in lines:
                typer.echo(f"{line:{width}}  {reason}".rstrip())
        for entry in content.get("models", ()):
            ids = ", ".join(f"{index} = {name}" for index, name in enumerate(entry["embedding_table_names"]))
            typer.echo(f"{entry['model']}: ids of its tables, the order of KEYS and NUMKEYS: {ids}")
        typer.echo(f"{output}: written; next: `hps check-config {output} --connect`, `hps plan {output}`, `hps serve {output}`")


def _prompt(choices: _Choices) -> None:
    if not sys.stdin.isatty():
        raise errors.InvalidInputError("--ask needs a terminal; give the options instead")
    from rich.prompt import FloatPrompt, Prompt

    if choices.persistent is None:
        kinds = ["row_files", "rocks_db", "disabled"]
        choices.persistent = Prompt.ask("The tier on disk (persistent_db)", choices=kinds, default=kinds[0])
    if choices.volatile is None:
        kinds = ["hash_map", "redis_cluster", "disabled"]
        default = kinds[-1 if choices.persistent == "row_files" else 0]
        choices.volatile = Prompt.ask("The tier in memory (volatile_db)", choices=kinds, default=default)
    if choices.volatile == "redis_cluster" and choices.redis is None:
        choices.redis = Prompt.ask("Redis, HOST:PORT", default="127.0.0.1:6379")
    if choices.gpucacheper is None:
        choices.gpucacheper = FloatPrompt.ask("Share of the rows in the embedding cache, 0 to 1", default=0.5)


def _find_models(source: str, output: Path, tables: str | None, model: str | None, force: bool) -> "Discovery":
    """Find the models of a source; import a checkpoint first."""
    from hps.models.importing.checkpoint import is_checkpoint
    from hps.models.importing.discovery import Discovery, discover, entries_of, relocated

    config_path = source if source.endswith(".json") else os.path.join(source, "ps.json")
    is_output = config_path != source and os.path.realpath(config_path) == os.path.realpath(output)
    entries = [] if is_output else entries_of(config_path)
    if config_path == source and not os.path.exists(source):
        raise errors.InvalidInputError(f"reading {source}: there is no such file")
    if config_path == source and not entries:
        raise errors.InvalidInputError(f"reading {source}: got no models with sparse_files, expected a ps.json or a directory")
    if entries:
        directory = os.path.dirname(os.path.abspath(config_path))
        discovery = Discovery(tuple(relocated(directory, entry) for entry in entries))
    else:
        discovery = _import_checkpoint(source, output, tables, force) if is_checkpoint(source) else discover(source)
    if model is None:
        return discovery
    if len(discovery.models) != 1:
        names = ", ".join(model_.name for model_ in discovery.models) or "a repository"
        raise errors.InvalidInputError(f"naming the model {model!r}: got {names}, expected one model")
    return Discovery((replace(discovery.models[0], name=model),))


def _import_checkpoint(source: str, output: Path, tables: str | None, force: bool) -> "Discovery":
    """Import a checkpoint to a directory beside the configuration."""
    from hps.models.importing.checkpoint import tables_pattern
    from hps.models.importing.discovery import Discovery, FoundModel, FoundTable, name_of
    from hps.models.importing.importer import import_model, import_tables

    stem = name_of(os.path.splitext(os.path.basename(os.path.abspath(source)))[0])
    destination = str(output.absolute().parent / stem)
    with console.progress() as progress:
        if (pattern := tables or tables_pattern(source)) is None:
            path = f"{destination}/{stem}.model"
            written = {path: import_model(source, path, overwrite=force, progress=progress)}
        else:
            written = import_tables(source, destination, pattern, write_config="", overwrite=force, progress=progress)
    tables_found = (
        FoundTable(os.path.basename(path).removesuffix(".model"), path, table.dim, table.rows)
        for path, table in written.items()
    )
    return Discovery((FoundModel(stem, tuple(tables_found)),))


def _configuration(
    source: str, discovery: "Discovery", choices: _Choices, output: Path
) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str]]:
    """Return the content of the ps.json, and the reasons by their path in it."""
    content: dict[str, Any] = {"supportlonglong": True, "device": choices.device}
    reasons: dict[tuple[str | int, ...], str] = {
        ("supportlonglong",): "keys are 64-bit integers, as in the files",
        ("device",): {
            "auto": "the GPU if there is one, else the processor",
            "cuda": "the GPU, or the server does not start",
            "cpu": "the processor: the NumPy cache",
        }[choices.device],
    }
    _tiers(content, reasons, discovery, choices, output)
    if discovery.repository:
        content["model_repository"] = source if ":" in source else os.path.abspath(source)
        reasons["model_repository",] = "its models describe themselves (model.json)"
        return content, reasons
    content["models"] = []
    for i, model in enumerate(discovery.models):
        entry, why = _entry(model, choices)
        content["models"].append(entry)
        reasons |= {("models", i, key): text for key, text in why.items()}
    return content, reasons


def _tiers(
    content: dict[str, Any], reasons: dict[tuple[str | int, ...], str], discovery: "Discovery", choices: _Choices, output: Path
) -> None:
    from hps.ground.memory.capacity import available_memory

    shapes = [table for model in discovery.models for table in model.tables]
    needed = sum(table.rows * (4 * table.dim + _ROW_BYTES) for table in shapes)
    half = available_memory()[0] // 2
    fits = needed <= half
    size = f"{size_text(needed)} of rows, and half of the free memory is {size_text(half)}"
    below = "disabled" if choices.persistent in (None, "row_files") else "hash_map"
    volatile_type = choices.volatile or ("redis_cluster" if choices.redis else below)
    persistent_type = choices.persistent or ("disabled" if fits and volatile_type != "disabled" else "row_files")
    if volatile_type == persistent_type == "disabled":
        raise errors.InvalidInputError("choosing the tiers: both are disabled, expected a type for --volatile or --persistent")
    volatile: dict[str, Any] = {"type": volatile_type}
    kinds = {"hash_map": "in this process' memory", "redis_cluster": "shared by all servers", "disabled": "no tier in memory"}
    if persistent_type == "row_files":
        kinds["disabled"] = "the page cache has the rows that are read, for all processes"
    why = {"type": kinds[volatile_type]}
    if volatile_type == "redis_cluster":
        volatile |= {"address": choices.redis or "127.0.0.1:6379", "num_partitions": _PARTITIONS}
        why |= {
            "address": "a server, or nodes of a cluster; HPS_REDIS_PASSWORD holds the password",
            "num_partitions": "hashes per table; the same in every server, and never changed",
        }
    elif volatile_type == "hash_map" and not fits and persistent_type != "disabled":
        each = sum(4 * table.dim + _ROW_BYTES for table in shapes)
        volatile |= {"num_partitions": _PARTITIONS, "overflow_margin": max(1, half // max(each, 1) // _PARTITIONS)}
        volatile |= {"overflow_policy": "evict_oldest", "cache_missed_embeddings": True}
        why |= {
            "num_partitions": "parts of a table, for overflow_margin",
            "overflow_margin": f"most rows of a part: {size}",
            "overflow_policy": "the least recently used rows make room",
            "cache_missed_embeddings": "rows fetched from disk stay in memory",
        }
    content["volatile_db"] = volatile
    reasons |= {("volatile_db", key): text for key, text in why.items()}
    persistent: dict[str, Any] = {"type": persistent_type}
    kinds = {
        "row_files": "a sorted file of each table, read in place; restarts load nothing",
        "rocks_db": "holds every row, so that restarts load nothing",
        "disabled": f"no tier on disk: {size}" if choices.persistent is None and shapes else "no tier on disk",
    }
    reasons["persistent_db", "type"] = kinds[persistent_type]
    if persistent_type != "disabled":
        name = "rows" if persistent_type == "row_files" else "rocksdb"
        persistent["path"] = os.path.abspath(choices.path) if choices.path else str(output.absolute().parent / name)
        reasons["persistent_db", "path"] = "one process writes there; use a permanent disk"
    content["persistent_db"] = persistent


def _entry(model: "FoundModel", choices: _Choices) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an entry of `models`, and the reason for each value."""
    from hps.configuration.load import ModelConfig

    existing: Mapping[str, Any] = model.entry
    entry = model.new_entry()
    rows = ", ".join(f"{table.rows:,}" for table in model.tables)
    why = {
        "model": "the name in requests; by its directory" if not existing else "as in the ps.json that was found",
        "version_path": f"versions {', '.join(model.versions)}; the latest is served",
        "sparse_files": "directories with key and emb_vector" + (", in each version" if model.version_path else ""),
        "embedding_table_names": f"the names in requests, by id; rows: {rows}",
        "embedding_vecsize_per_table": "floats a vector: emb_vector's bytes / 4 / the number of keys",
        "max_batch_size": "samples of one lookup",
        "maxnum_catfeature_query_per_table_per_sample": (
            "keys per sample of a table; times max_batch_size, the most keys of a lookup: raise it if needed"
        ),
        "default_value_for_each_table": "the vector of a key that no table has",
        "num_of_worker_buffer_in_pool": "lookups at a time on a device; each takes memory for the most keys",
        "deployed_device_list": "GPUs that each hold a cache",
        "gpucacheper": "share of the rows in the embedding cache; `hps plan` predicts the effect of others",
        "hit_rate_threshold": "above 1: keys of a table never get the default vector",
    }
    computed = {"model", "version_path", "versions", "sparse_files", "embedding_table_names", "embedding_vecsize_per_table"}
    copied = ModelConfig.model_fields.keys() - ModelConfig.ignored_keys() - computed
    chosen = {} if choices.gpucacheper is None else {"gpucacheper": choices.gpucacheper}
    for key in (key for key in existing if key in copied - chosen.keys()):
        entry[key], why[key] = existing[key], f"{why[key]} (as before)" if key in why else "as before"
    entry |= chosen
    return entry, {key: why[key] for key in entry}


def _lines(content: dict[str, Any], reasons: Mapping[tuple[str | int, ...], str]) -> list[_Line]:
    """Write JSON, one key per line, each with its reason."""
    lines: list[_Line] = []

    def write(value: Any, key_path: tuple[str | int, ...], start: str, end: str, indent: str) -> None:
        objects = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
        if not objects:
            lines.append((f"{indent}{start}{json.dumps(value, ensure_ascii=False)}{end}", reasons.get(key_path, "")))
            return
        opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
        lines.append((f"{indent}{start}{opening}", reasons.get(key_path, "")))
        items: list[tuple[str | int, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, inner in items:
            comma = "" if key == items[-1][0] else ","
            write(inner, (*key_path, key), f"{json.dumps(key)}: " if isinstance(key, str) else "", comma, indent + "  ")
        lines.append((f"{indent}{closing}{end}", ""))

    write(content, (), "", "", "")
    return lines
