"""Reads checkpoints: files of other formats with named arrays, some of which are embedding tables."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import LocalFileSystem, local_path
from hps.ground.registry import implementation, names
from hps.models.deltas import key_set
from hps.models.files import open_file, rows_of_a_chunk
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.formats.conversion import VECTOR_DTYPES, to_keys, to_vectors
from hps.models.formats.quantised_rows import LAYOUTS, dequantised
from hps.models.formats.selection import Selection, select
from hps.models.importing.discovery import in_order, name_of
from hps.types import FloatArray, KeyArray

_FORMATS = {
    **{".npy": "npy", ".npz": "npz", ".safetensors": "safetensors"},
    **{".pt": "torch", ".pth": "torch", ".bin": "torch"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
"""Formats by the end of a file's name."""

_LAYOUTS = {
    "dcp": re.compile(r"\.metadata|__\d+_\d+\.distcp"),
    "hugectr": re.compile(r"meta_data|(key|weight)\d+"),
    "dynamicemb": re.compile(r".+_emb_(keys|values)\.rank_\d+\.world_size_\d+|.+_opt_args\.json"),
    "torcheasyrec": re.compile(r"sparse_(embeddings|dynamic_embedding)-\d+-of-\d+\.(npz|json)"),
    "torcheasyrec_delta": re.compile(r".+_step_\d+(_rank_\d+_of_\d+)?\.parquet"),
    "sok": re.compile(r".+-(key|weight)"),
}
"""Formats of trainers by the names of their files, which lie in one directory."""

_COLLECTION = re.compile(r"embedding_collection_\d+")  # a directory of HugeCTR's, in that of its dump
_FILES = LocalFileSystem()


class Checkpoint:
    """Open files of one format, which must not change until they are read. *One thread.*

    Args:
        place: a local path, of a file or of a directory of .npy or Parquet files or of a trainer's.
        file_format: a name in `hps.ground.registry.names("format")`; by default from the names of the files.
        keys: path of a second .npy file to read.

    Raises:
        ModelFileError: the files cannot be read.
        ConfigError: there is no such format.
        MissingDependencyError: the format's package is not installed.
    """

    def __init__(self, place: str | os.PathLike[str], file_format: str | None = None, keys: str | None = None) -> None:
        path = _collection_in(local_path(os.fspath(place)))
        paths = [os.path.join(path, name) for name in _entries(path)] if os.path.isdir(path) else [path]
        if not (os.path.exists(path) and (paths or _layout_of(path, file_format))):
            raise ModelFileNotFoundError(
                f"importing {os.fspath(place)}: there is no such file on this machine, or it is an empty directory; copy a "
                "remote source first"
            )
        layout = _layout_of(path, file_format)
        kind = layout or file_format or _format_of(path, paths)
        files = _files_of(path, layout) if layout else [file for file in paths if _format(file) == kind] or paths
        if kind == "npy" and keys is not None and keys.endswith(".npy") and path in files:
            files.append(keys)
        self._files = [open_file(_FILES, file, {}) for file in files]
        self.arrays = implementation("format", kind)(path, files)

    def verify(self) -> None:
        """Refuse files that changed since they were opened."""
        for file in self._files:
            file.verify()


@dataclass(frozen=True, slots=True)
class CheckpointTable:
    """One table of a checkpoint. *One thread.*"""

    checkpoint: Checkpoint
    selection: Selection

    def chunks(self) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield the rows, converted to (n,) int64 keys and (n, dim) float32 vectors.

        Raises:
            ModelFileError: a row cannot be converted, a key is in two shards, or the files changed since they were opened.
        CapacityError: there is no memory for the keys of a table in shards, which are compared.
        """
        source, selection, vectors = self.checkpoint.arrays, self.selection, self.selection.vectors.name
        compared = selection.keys is not None and source.repeats_are_errors
        seen = key_set(selection.rows, f"importing {source.path}", "import it where there is more") if compared else None
        columns = [vectors] if selection.keys is None else [vectors, selection.keys.name]
        row, step = 0, rows_of_a_chunk(selection.dim)
        self.checkpoint.verify()
        for blocks in source.chunks(columns, step):
            if selection.dtype in LAYOUTS:
                out = dequantised(source.path, vectors, blocks[0], row, selection.dtype, selection.dim)
            else:
                out = to_vectors(source.path, vectors, blocks[0], row)
            if selection.keys is None:
                first = selection.first_key + row
                keys = np.arange(first, first + len(out), dtype=np.int64)
            else:
                keys = to_keys(source.path, selection.keys.name, blocks[1], row)
            if seen is not None and not (new := seen.add(keys)).all():
                at = int(np.argmin(new))
                raise ModelFileError(
                    f"importing {source.path}: row {row + at} of {vectors!r} has key {keys[at]}, which an earlier row has, "
                    "too, expected each key in one row of one shard; they may be of different dumps"
                )
            yield keys, out
            row += keys.size
            self.checkpoint.verify()  # before the next read: reading a mapped file beyond a new end would kill the process
        if row != selection.rows:
            raise ModelFileError(f"importing {source.path}: got {row} rows, expected {selection.rows}; it changed meanwhile")

    def deleted(self) -> Iterator[KeyArray]:
        """Yield the keys that a delta deletes: (n,) int64."""
        source, name, row = self.checkpoint.arrays, self.selection.vectors.name, 0
        for block in source.deleted(name, rows_of_a_chunk(1)):
            yield to_keys(source.path, f"deleted keys of {name}", block, row)
            row += len(block)


def find_table(
    source: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    dim: int | None = None,
    first_key: int | None = None,
) -> CheckpointTable:
    """Find one table in a file of another format; arguments and errors as for `import_model`."""
    checkpoint = Checkpoint(source, file_format, keys)
    return CheckpointTable(checkpoint, select(checkpoint.arrays, keys, vectors, first_key, dtype, dim=dim))


def find_tables(
    source: str | os.PathLike[str],
    tables: str,
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    dim: int | None = None,
    first_key: int | None = None,
    delta: bool = False,
) -> dict[str, CheckpointTable]:
    """Find the tables of a checkpoint by name, in its order; arguments and errors as for `import_tables`.

    Args:
        delta: accept tables without rows, and a checkpoint that has none of the tables.
    """
    path = _collection_in(local_path(os.fspath(source)))
    if keys is not None and keys.count("*") not in (0, tables.count("*")):
        raise InvalidInputError(f"importing {path}: got tables {tables!r} and keys {keys!r}, expected as many * in both")
    shared = None
    one_each = os.path.isdir(path) and file_format != "npy" and _layout_of(path, file_format) is None
    if one_each and not any(_format(name) == "npy" for name in _entries(path)):
        candidates = _entries(path)  # one table each
    else:
        if vectors is not None:
            raise InvalidInputError(f"importing {path}: got tables {tables!r} and vectors {vectors!r}, expected one of them")
        shared = Checkpoint(path, file_format)
        candidates = [name for name in _tables(shared.arrays) if keys is None or not _match(keys, name)]
    chosen: dict[str, CheckpointTable] = {}
    matches = {
        name: match
        for name in candidates
        if (match := (shared is None and _match(tables, os.path.splitext(name)[0])) or _match(tables, name))
    }
    for name in in_order(list(matches)):
        match = matches[name]
        table = _table_name(tables, match)
        if table in chosen:
            raise ModelFileError(
                f"importing {path}: got {name!r} as a second table {table!r}; choose --tables so that the matches of * differ"
            )
        table_keys = keys and reduce(lambda pattern, text: pattern.replace("*", text, 1), match.groups(), keys)
        checkpoint = shared or Checkpoint(os.path.join(path, name), file_format)
        if delta and shared and shared.arrays.array(name).shape == (0, 0):  # of an unknown width
            continue
        first = first_key
        if shared and keys is None and shared.arrays.keys_of(name) is None:
            first = first_key or 0
        chosen[table] = CheckpointTable(
            checkpoint, select(checkpoint.arrays, table_keys, name if shared else vectors, first, dtype, dim=dim, empty=delta)
        )
    if not chosen and not delta:
        raise ModelFileError(f"importing {path}: got tables {tables!r}, which matches none of: {', '.join(candidates[:30])}")
    return chosen


def list_arrays(source: str | os.PathLike[str], *, file_format: str | None = None) -> list[ArrayInfo]:
    """List name, shape and dtype of every array in a file; no array is read.

    Raises:
        ModelFileError: the file cannot be read.
        MissingDependencyError: the format's package is not installed.
    """
    infos: list[ArrayInfo] = Checkpoint(source, file_format).arrays.arrays()
    return infos


def is_checkpoint(path: str) -> bool:
    """Return True for a file, or a directory with files of a known format."""
    if os.path.isfile(path):
        return True
    path = _collection_in(path)
    return os.path.isdir(path) and (_layout_of(path) is not None or any(_format(name) for name in os.listdir(path)))


def tables_pattern(source: str) -> str | None:
    """Find the pattern of a checkpoint's embedding tables for `find_tables`; None for a single table.

    Raises:
        InvalidInputError: every such pattern matches other arrays, too.
    """
    arrays = Checkpoint(source).arrays
    infos = {info.name: info for info in arrays.arrays()}
    candidates = {name: infos[name] for name in _tables(arrays)}
    wide = [
        name
        for name, info in candidates.items()
        if len(info.shape) == 2 and ("float" in info.dtype or info.dtype in VECTOR_DTYPES)
    ]
    named = [name for name in wide if "emb" in name.lower()] or wide
    single = "vectors" in candidates or (os.path.isdir(source) and _layout_of(_collection_in(source)) is None)
    if len(named) < 2 or single:  # one table, perhaps with keys
        return None
    prefix = _common(named)
    suffix = _common([name[len(prefix) :][::-1] for name in named])[::-1]
    if sum(name.startswith(prefix) and name.endswith(suffix) for name in candidates) > len(named):
        listed = ", ".join(list(candidates)[:12])
        raise InvalidInputError(f"importing {source}: got the arrays {listed}, expected --tables 'PATTERN' of those to serve")
    return f"{prefix}*{suffix}"


def _common(texts: list[str]) -> str:
    """Find the common prefix of texts, up to a separator, or else up to a number."""
    prefix = os.path.commonprefix(texts)  # noqa: RUF071 - of characters
    return re.sub(r"(?<=[^a-zA-Z0-9])[a-zA-Z0-9]+$" if re.search("[^a-zA-Z0-9]", prefix) else "[0-9]+$", "", prefix)


def _tables(arrays: ArraySource) -> list[str]:
    """List the arrays that may be tables: all but the keys that belong to others."""
    names = [info.name for info in arrays.arrays()]
    paired = {keys for name in names if (keys := arrays.keys_of(name)) is not None}
    return [name for name in names if name not in paired]


def _collection_in(path: str) -> str:
    """Return the directory of the embedding collection in a dump of HugeCTR; any other path unchanged."""
    found = [name for name in _FILES.list(path) if _COLLECTION.fullmatch(name)] if os.path.isdir(path) else []
    if len(found) > 1:
        raise ModelFileError(f"importing {path}: got {', '.join(sorted(found)[:8])}, expected one; import each by itself")
    return os.path.join(path, found[0]) if found else path


def _layout_of(path: str, file_format: str | None = None) -> str | None:
    """Find the format of a trainer's files in a directory, or of one of them; None for other files."""
    if file_format is not None:
        return file_format if file_format in _LAYOUTS else None
    names = _FILES.list(path) if os.path.isdir(path) else [os.path.basename(path)]
    kinds = [kind for kind, pattern in _LAYOUTS.items() if any(map(pattern.fullmatch, names))]
    if "sok" in kinds and any(map(_format, names)):  # its names are those of any file
        kinds.remove("sok")
    if len(kinds) > 1:
        raise ModelFileError(
            f"importing {path}: got files of {' and of '.join(kinds)}, expected one format; say it with --format"
        )
    return kinds[0] if kinds else None


def _files_of(path: str, layout: str) -> list[str]:
    """List the files of a trainer's format in a directory."""
    if not os.path.isdir(path):
        return [path]
    files = [os.path.join(path, name) for name in sorted(_FILES.list(path)) if _LAYOUTS[layout].fullmatch(name)]
    if not (files := [file for file in files if os.path.isfile(file)]):
        raise ModelFileError(
            f"importing {path}: got no file of the format {layout}, expected names like {_LAYOUTS[layout].pattern}"
        )
    return files


def _entries(directory: str) -> list[str]:
    """List the entries of a directory that Spark's readers accept."""
    return [name for name in _FILES.list(directory) if not name.startswith(("_", "."))]


def _format(file: str) -> str | None:
    return _FORMATS.get(os.path.splitext(file)[1].lower())


def _format_of(path: str, files: list[str]) -> str:
    found = {kind for file in files if (kind := _format(file)) and (file == path or kind in ("npy", "parquet"))}
    if len(found) != 1:
        raise ModelFileError(
            f"importing {path}: got {', '.join(map(os.path.basename, files[:8]))}, expected a name that ends in one of: "
            f"{', '.join(_FORMATS)}, or a directory of .npy or of Parquet files alone; say the format with --format: "
            f"{', '.join(names('format'))}"
        )
    return found.pop()


def _match(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(re.escape(part) for part in pattern.split("*")), name, re.DOTALL)


def _table_name(tables: str, match: re.Match[str]) -> str:
    matched = "_".join(match.groups()) or match[0]
    if not matched[0].isalpha():  # a number: prepend the last part of the text before it
        matched = re.split(r"(?<=[./])(?=.)", tables.partition("*")[0])[-1] + matched
    return name_of(matched)
