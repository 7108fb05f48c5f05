"""Import embedding tables of other formats as sparse model files, and write the configuration that serves them."""

import json
import os
import re
from collections.abc import Iterator

from hps.configuration.load import load_configuration
from hps.configuration.tiers import ModelSourceConfig
from hps.errors import InvalidInputError, ModelFileError
from hps.filesystems.local import LocalFileSystem, local_path
from hps.ground.progress import NoProgress, Progress
from hps.ground.rows import encode
from hps.models.formats.selection import Selection
from hps.models.importing.checkpoint import CheckpointTable, find_table, find_tables
from hps.models.importing.discovery import FoundModel, FoundTable, name_of
from hps.models.manifest import write_file
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.types import ROW_DTYPES, FloatArray, KeyArray

_FILES = LocalFileSystem()


def import_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    dim: int | None = None,
    first_key: int | None = None,
    row_dtype: str = "float32",
    overwrite: bool = False,
    model_source: ModelSourceConfig | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Write one table of a file of another format as sparse model files.

    Chunks of about 16 MB are read, converted and written. The destination appears only when complete, as for
    `write_sparse_model`. Repeated keys, NaN and infinite elements are kept; databases keep the later row of a key.

    Args:
        source: local path of a file, or of a directory of .npy or Parquet files or of a trainer's.
        destination: a path or URI, as in the `sparse_files` of a configuration.
        keys: name of the array of keys; by default `keys`, `key`, `ids` or `id`. With a .npy file also the path of another.
        vectors: name of the array of vectors; by default `vectors`, `embeddings`, `emb_vector` or similar, or the only (n, dim)
            array of floats.
        file_format: a name in `hps.ground.registry.names("format")`; by default from the names of the files.
        dtype: `bfloat16` if the file stores its bits as uint16 or void, since NumPy has no such dtype; `fused8bit`, `tbe8` or
            `rowwise8` if uint8 rows have this layout (`formats/quantised_rows.py`).
        dim: expected number of elements of a vector, for files that do not say it; another one is refused. Rows of tbe8 may
            need it.
        first_key: use row numbers, starting here, as keys. The default for torch and safetensors files without an array of keys
            is 0.
        row_dtype: the format that the table will be served in, one of `hps.types.ROW_DTYPES`. The files are float32; rows that
            the format cannot hold are refused.
        overwrite: replace an existing sparse model.
        model_source: how to reach the destination.
        progress: receives the number of written rows.

    Returns:
        The imported arrays.

    Raises:
        ModelFileError: the source cannot be read as a table or changed meanwhile, or the destination cannot be written.
        InvalidInputError: the arguments contradict each other, or a row does not fit `row_dtype`; `InvalidDtypeError`: a dtype
            cannot be converted; `ConfigError`: there is no such format.
        MissingDependencyError: the format's package is not installed.
    """
    table = find_table(source, keys=keys, vectors=vectors, file_format=file_format, dtype=dtype, dim=dim, first_key=first_key)
    _write(table, os.fspath(destination), row_dtype, overwrite, ModelSources(model_source), progress)
    return table.selection


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
    dim: int | None = None,
    first_key: int | None = None,
    row_dtype: str = "float32",
    overwrite: bool = False,
    model_source: ModelSourceConfig | None = None,
    progress: Progress | None = None,
) -> dict[str, Selection]:
    """Write every table of a checkpoint as sparse model files, then the configuration that serves them as one model.

    All tables are found and checked before the first is written, in the order of the source, which becomes that of their ids.
    Names that are sorted as text, such as those of a directory, or that differ only in numbers, are in natural order (2 before
    10). The configuration is written last. After an error there is none, and finished tables stay.

    Args:
        source: a local path. A file, or a directory of .npy files, holds one table per matching array. Any other directory
            holds one table per matching entry: a file, or a directory of Parquet files.
        destination: a path or URI; table `t` is written to `t.model` below it.
        tables: name of the arrays or entries, in which `*` matches any characters. A table is named by the match of `*`, with
            the preceding text if the match does not begin with a letter; without `*`, by its full name.
        model: name of the model; by default the last part of the destination.
        write_config: path of the configuration; by default `ps.json` below a local destination; "" for no configuration.
        keys: name of the keys of each table; each `*` is replaced by the match of the same `*`. By default row numbers, and in
            a directory with one table per entry as in `import_model`.
        vectors: name of the vectors in an entry, as in `import_model`.
        file_format, dtype, dim, first_key, progress: as in `import_model`.
        row_dtype: as in `import_model`; the configuration says it.
        overwrite: replace existing sparse models and an existing configuration, which is removed first.
        model_source: how to reach the destination; copied to the configuration.

    Returns:
        The imported arrays of each table, by path or URI, in the order of the configuration.

    Raises:
        ModelFileError: as in `import_model`, with the name of the table; or no array matches, two tables have one name, or a
            target exists.
        InvalidInputError: as in `import_model`.
        ConfigError: the configuration would be wrong, for instance by the name of the model or of a table.
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
        model = name_of(re.split("[/:]+", directory.rstrip("/"))[-1])
    found = find_tables(
        source, tables, keys=keys, vectors=vectors, file_format=file_format, dtype=dtype, dim=dim, first_key=first_key
    )
    places = {name: f"{directory}/{name}.model" for name in found}
    shapes = tuple(FoundTable(name, places[name], table.selection.dim, table.selection.rows) for name, table in found.items())
    content: dict[str, object] = {"supportlonglong": True, "volatile_db": {"type": "hash_map"}}
    entry = FoundModel(model, shapes).new_entry()
    content["models"] = [entry if row_dtype == "float32" else entry | {"row_dtype": [row_dtype]}]
    if model_source is not None and (settings := model_source.model_dump(mode="json", exclude_defaults=True)):
        content["model_source"] = settings
    load_configuration(content)
    existing = [place for place in places.values() if filesystem.exists(place)]
    if config and _FILES.exists(config):
        existing.append(config)
    if existing and not overwrite:
        raise ModelFileError(f"importing {source}: {existing[0]} exists; choose another directory or ask to overwrite it")
    if config:
        _FILES.delete(config)
    for count, (name, table) in enumerate(found.items()):
        try:
            _write(table, places[name], row_dtype, overwrite, sources, progress)
        except (ModelFileError, InvalidInputError) as error:
            raise type(error)(f"importing table {name!r} ({count} of {len(found)} are written): {error}") from error
    if config:
        write_file(_FILES, config, json.dumps(content, indent=2).encode() + b"\n")
    return {places[name]: table.selection for name, table in found.items()}


def _write(
    table: CheckpointTable, target: str, row_dtype: str, overwrite: bool, sources: ModelSources, progress: Progress | None
) -> None:
    if row_dtype not in ROW_DTYPES:
        raise InvalidInputError(f"importing to {target}: got row_dtype {row_dtype!r}, expected one of: {', '.join(ROW_DTYPES)}")
    progress = progress or NoProgress()
    progress.start(target, table.selection.rows, table.selection.size_bytes)

    def chunks() -> Iterator[tuple[KeyArray, FloatArray]]:
        for keys, vectors in table.chunks():
            encode(f"importing to {target}", vectors, row_dtype, keys)  # refuses what could not be served
            yield keys, vectors
            progress.advance(target, keys.size)

    write_sparse_model(target, chunks(), overwrite=overwrite, sources=sources)
    progress.finish(target)
