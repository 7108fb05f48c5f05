"""Import embedding tables of other formats as sparse model files, and write the configuration that serves them."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hps.configuration.load import load_configuration
from hps.configuration.tiers import ModelSourceConfig
from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import changed
from hps.filesystems.local import LocalFileSystem, local_path
from hps.formats.base import ArrayInfo, ArraySource
from hps.formats.conversion import to_keys, to_vectors
from hps.formats.selection import Selection, select
from hps.models.files import CHUNK_BYTES
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.progress import NoProgress, Progress
from hps.registry import implementation, names
from hps.types import FloatArray, KeyArray

FORMATS = {
    **{".npy": "npy", ".npz": "npz", ".safetensors": "safetensors"},
    **{".pt": "torch", ".pth": "torch", ".bin": "torch"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
"""Formats by the end of a file's name."""

_FILES = LocalFileSystem()


@dataclass(frozen=True, slots=True)
class _Source:
    """An open source, and the versions that its files had before they were read."""

    arrays: ArraySource
    versions: dict[str, str]

    def verify(self) -> None:
        """Refuse files that are no longer those that were opened."""
        for path, version in self.versions.items():
            if (now := _FILES.status(path).version) != version:
                raise changed(path, version, now)


def import_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
    overwrite: bool = False,
    model_source: ModelSourceConfig | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Write one table of a file of another format as sparse model files.

    Chunks of about 16 MB are read, converted and written. The destination appears whole or not at all, as
    `write_sparse_model` says. Duplicate keys are kept: the databases then keep the later row. NaN and infinite elements are
    kept.

    Args:
        source: a local path, of a file or of a directory of .npy or Parquet files.
        destination: a path or URI, as in the `sparse_files` of a configuration.
        keys: name of the array of keys; by default one that is called `keys`, `key`, `ids` or `id`. With a .npy file also
            the path of another.
        vectors: name of the array of vectors; by default one that is called `vectors`, `embeddings`, `emb_vector` or the
            like, or the only (n, dim) array of floats.
        file_format: npy, npz, safetensors, torch or parquet; by default what the end of the name says.
        dtype: `bfloat16` where the file has only its bits, as uint16 or void: NumPy has no such dtype.
        first_key: the keys are row numbers from this one on. The default, 0, is for formats that commonly have no keys
            (torch, safetensors) and holds where no array of keys is found.
        overwrite: replace a sparse model that is there.
        model_source: how to reach the destination.
        progress: receives how many rows are written.

    Returns:
        What was written.

    Raises:
        ModelFileError: the source cannot be read as a table, it changed meanwhile, or the destination refused.
        InvalidInputError: the arguments do not fit each other; `InvalidDtypeError`: an array has a dtype that cannot be
            converted; `ConfigError`: there is no such format.
        MissingDependencyError: the format's package is not installed.
    """
    opened = _open(os.fspath(source), file_format, keys)
    selection = select(opened.arrays, keys, vectors, first_key, dtype)
    _write(opened, selection, os.fspath(destination), overwrite, ModelSources(model_source), progress)
    return selection


def import_tables(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    tables: str,
    *,
    model: str | None = None,
    write_config: str | os.PathLike[str] | None = None,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
    overwrite: bool = False,
    model_source: ModelSourceConfig | None = None,
    progress: Progress | None = None,
) -> dict[str, Selection]:
    """Write every table of a checkpoint as sparse model files, then the configuration that serves them as one model.

    All tables are found and checked before the first is written, in the natural order of their names (2 before 10), which is
    the order of their ids. The configuration is written last: after an error there is none, and tables that were finished
    stay, each whole.

    Args:
        source: a local path. A file, or a directory of .npy files, holds one table per array that matches. Any other
            directory holds one table per entry that matches: a file, or a directory of Parquet files.
        destination: a path or URI; table `t` goes to `t.model` below it.
        tables: name of the arrays or entries, in which `*` matches any characters. A table is called what `*` matched, after
            what stands before it if that does not begin with a letter; without `*`, by its whole name.
        model: name of the model; by default the last part of the destination.
        write_config: where the configuration goes; by default `ps.json` below a local destination.
        keys: name of the keys of each table; each `*` in it is what the same `*` matched. By default keys are row numbers,
            and in a directory with one table per entry what `import_model` finds.
        vectors: name of the vectors within an entry, as in `import_model`.
        file_format, dtype, first_key, progress: as in `import_model`.
        overwrite: replace sparse models and a configuration that are there. The old configuration is removed first.
        model_source: how to reach the destination; the configuration repeats it.

    Returns:
        What was written of each table, by its path or URI, in the order of the configuration.

    Raises:
        ModelFileError: as in `import_model`, with the name of the table; or no array matches, two tables have one name, or
            something is in the way.
        InvalidInputError: as in `import_model`.
        ConfigError: the configuration would be wrong, which the name of the model or of a table can make it.
        MissingDependencyError: the format's package is not installed.
    """
    place = os.fspath(destination)
    sources = ModelSources(model_source)
    filesystem, directory = sources.locate(place)
    if filesystem.is_local:
        directory = os.path.abspath(local_path(directory))  # the configuration is read from anywhere
    elif write_config is None:
        raise InvalidInputError(f"importing to {place}: got a remote place, expected --write-config with a local path, too")
    config = os.path.join(directory, "ps.json") if write_config is None else os.fspath(write_config)
    if model is None:
        model = _name(re.split("[/:]+", directory.rstrip("/"))[-1])
    chosen = _chosen(local_path(os.fspath(source)), tables, keys, vectors, first_key, file_format, dtype)
    places = {name: f"{directory}/{name}.model" for name in chosen}
    dims = [selection.dim for _, selection in chosen.values()]
    content = _configuration(model, places, dims, model_source)
    load_configuration(content)
    there = [one for one in places.values() if filesystem.exists(one)]
    if _FILES.exists(config):
        there.append(config)
    if there and not overwrite:
        raise ModelFileError(f"importing {source}: {there[0]} exists; choose another directory or ask to overwrite it")
    _FILES.delete(config)
    for count, (name, (opened, selection)) in enumerate(chosen.items()):
        try:
            _write(opened, selection, places[name], overwrite, sources, progress)
        except ModelFileError as error:
            raise type(error)(f"importing table {name!r} ({count} of {len(chosen)} are written): {error}") from error
    writer = _FILES.create(config)
    try:
        writer.write(memoryview(json.dumps(content, indent=2).encode() + b"\n"))
        writer.commit()
    finally:
        writer.abort()
    return {places[name]: selection for name, (_, selection) in chosen.items()}


def read_table(
    source: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
) -> tuple[Selection, Iterator[tuple[KeyArray, FloatArray]]]:
    """Find one table in a file of another format; its rows are read chunk by chunk.

    Args:
        source, keys, vectors, file_format, dtype, first_key: as in `import_model`.

    Raises:
        As `import_model`, also while rows are read.
    """
    opened = _open(os.fspath(source), file_format, keys)
    selection = select(opened.arrays, keys, vectors, first_key, dtype)
    return selection, _rows(opened, selection, "", NoProgress())


def list_arrays(source: str | os.PathLike[str], *, file_format: str | None = None) -> list[ArrayInfo]:
    """Name, shape and dtype of every array that a file holds; no array is read.

    Raises:
        ModelFileError: it cannot be read.
        MissingDependencyError: the format's package is not installed.
    """
    return _open(os.fspath(source), file_format).arrays.arrays()


def _open(place: str, file_format: str | None, keys: str | None = None) -> _Source:
    path = local_path(place)
    held = [os.path.join(path, name) for name in _entries(path)] if os.path.isdir(path) else [path]
    if not (held and os.path.exists(path)):
        raise ModelFileNotFoundError(
            f"importing {place}: there is no such file on this machine, or it is an empty directory; copy a remote source first"
        )
    kind = file_format or _format_of(path, held)
    files = [file for file in held if _format(file) == kind] or held
    if kind == "npy" and keys is not None and keys.endswith(".npy") and path in files:
        files.append(keys)
    versions = {file: _FILES.status(file).version for file in files}
    return _Source(implementation("format", kind)(path, files), versions)


def _entries(directory: str) -> list[str]:
    """Names of what may be sources in a directory: those that Spark's readers take."""
    return [name for name in _FILES.list(directory) if not name.startswith(("_", "."))]


def _format(file: str) -> str | None:
    return FORMATS.get(os.path.splitext(file)[1].lower())


def _format_of(path: str, files: list[str]) -> str:
    found = {kind for file in files if (kind := _format(file)) and (file == path or kind in ("npy", "parquet"))}
    if len(found) != 1:
        raise ModelFileError(
            f"importing {path}: got {', '.join(map(os.path.basename, files[:8]))}, expected a name that ends in one of: "
            f"{', '.join(FORMATS)}, or a directory of .npy or of Parquet files alone; say the format with --format: "
            f"{', '.join(names('format'))}"
        )
    return found.pop()


def _chosen(
    path: str,
    tables: str,
    keys: str | None,
    vectors: str | None,
    first_key: int | None,
    file_format: str | None,
    dtype: str | None,
) -> dict[str, tuple[_Source, Selection]]:
    """Find the tables of a checkpoint, by name, in order."""
    if keys is not None and keys.count("*") not in (0, tables.count("*")):
        raise InvalidInputError(f"importing {path}: got tables {tables!r} and keys {keys!r}, expected as many * in both")
    whole = None
    if os.path.isdir(path) and file_format != "npy" and not any(_format(name) == "npy" for name in _entries(path)):
        held = _entries(path)  # one table each
    else:
        if vectors is not None:
            raise InvalidInputError(f"importing {path}: got tables {tables!r} and vectors {vectors!r}, expected one of them")
        whole = _open(path, file_format)
        held = [info.name for info in whole.arrays.arrays() if keys is None or not _match(keys, info.name)]
        first_key = first_key if keys else first_key or 0
    chosen: dict[str, tuple[_Source, Selection]] = {}
    for name in sorted(held, key=natural):
        match = (whole is None and _match(tables, os.path.splitext(name)[0])) or _match(tables, name)
        if not match:
            continue
        table = _table_name(tables, match)
        if table in chosen:
            raise ModelFileError(
                f"importing {path}: got {name!r} as a second table {table!r}; choose --tables so that what * matches differs"
            )
        own_keys = keys and reduce(lambda pattern, text: pattern.replace("*", text, 1), match.groups(), keys)
        opened = whole or _open(os.path.join(path, name), file_format)
        chosen[table] = opened, select(opened.arrays, own_keys, name if whole else vectors, first_key, dtype)
    if not chosen:
        raise ModelFileError(f"importing {path}: got tables {tables!r}, which matches none of: {', '.join(held[:30])}")
    return chosen


def _match(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(re.escape(part) for part in pattern.split("*")), name, re.DOTALL)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers within names by their value."""
    parts = re.split(r"(\d+)", name)
    return [(int(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _table_name(tables: str, match: re.Match[str]) -> str:
    matched = "_".join(match.groups()) or match[0]
    if not matched[0].isalpha():  # a number: after the last part of what stands before it
        matched = re.split(r"(?<=[./])(?=.)", tables.partition("*")[0])[-1] + matched
    return _name(matched)


def _name(text: str) -> str:
    return re.sub("[^a-zA-Z0-9_-]", "_", text)


def _configuration(
    model: str, places: dict[str, str], dims: list[int], model_source: ModelSourceConfig | None
) -> dict[str, object]:
    content: dict[str, object] = {
        "supportlonglong": True,
        "volatile_db": {"type": "hash_map"},
        "models": [
            {
                "model": model,
                "sparse_files": list(places.values()),
                "embedding_table_names": list(places),
                "embedding_vecsize_per_table": dims,
                "maxnum_catfeature_query_per_table_per_sample": [1] * len(dims),
                "default_value_for_each_table": [0.0] * len(dims),
                "deployed_device_list": [0],
                "max_batch_size": 4096,
                "gpucacheper": 0.5,
                "hit_rate_threshold": 1.1,  # never a default vector for a key that a table has
            }
        ],
    }
    if model_source is not None and (settings := model_source.model_dump(mode="json", exclude_defaults=True)):
        content["model_source"] = settings
    return content


def _write(
    opened: _Source,
    selection: Selection,
    target: str,
    overwrite: bool,
    sources: ModelSources,
    progress: Progress | None,
) -> None:
    progress = progress or NoProgress()
    progress.start(target, selection.rows, selection.size_bytes)
    write_sparse_model(target, _rows(opened, selection, target, progress), overwrite=overwrite, sources=sources)
    progress.finish(target)


def _rows(opened: _Source, selection: Selection, tag: str, progress: Progress) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the whole table, converted. Raises if the files are no longer those that were opened."""
    source, vectors = opened.arrays, selection.vectors.name
    columns = [vectors] if selection.keys is None else [vectors, selection.keys.name]
    row, step = 0, max(1, CHUNK_BYTES // (8 + 4 * selection.dim))
    opened.verify()
    for blocks in source.chunks(columns, step):
        out = to_vectors(source.path, vectors, blocks[0], row)
        if selection.keys is None:
            first = selection.first_key + row
            keys = np.arange(first, first + len(out), dtype=np.int64)
        else:
            keys = to_keys(source.path, selection.keys.name, blocks[1], row)
        yield keys, out
        row += keys.size
        progress.advance(tag, keys.size)
        opened.verify()  # before more is read: reading a mapped file beyond a new end would kill the process
    if row != selection.rows:
        raise ModelFileError(f"importing {source.path}: got {row} rows, expected {selection.rows}; it changed meanwhile")
