"""Reads checkpoints: files of other formats with named arrays, some of which are embedding tables."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import LocalFileSystem, local_path
from hps.models.discovery import in_order, name_of
from hps.models.files import open_file, rows_of_a_chunk
from hps.models.formats.base import ArrayInfo
from hps.models.formats.conversion import to_keys, to_vectors
from hps.models.formats.selection import Selection, select
from hps.registry import implementation, names
from hps.types import FloatArray, KeyArray

_FORMATS = {
    **{".npy": "npy", ".npz": "npz", ".safetensors": "safetensors"},
    **{".pt": "torch", ".pth": "torch", ".bin": "torch"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
"""Formats by the end of a file's name."""

_FILES = LocalFileSystem()


class Checkpoint:
    """Open files of one format, which must not change until they are read. *One thread.*

    Args:
        place: a local path, of a file or of a directory of .npy or Parquet files.
        file_format: npy, npz, safetensors, torch or parquet; by default from the suffix of the name.
        keys: path of a second .npy file to read.

    Raises:
        ModelFileError: the files cannot be read.
        ConfigError: there is no such format.
        MissingDependencyError: the format's package is not installed.
    """

    def __init__(self, place: str | os.PathLike[str], file_format: str | None = None, keys: str | None = None) -> None:
        path = local_path(os.fspath(place))
        held = [os.path.join(path, name) for name in _entries(path)] if os.path.isdir(path) else [path]
        if not (held and os.path.exists(path)):
            raise ModelFileNotFoundError(
                f"importing {os.fspath(place)}: there is no such file on this machine, or it is an empty directory; copy a "
                "remote source first"
            )
        kind = file_format or _format_of(path, held)
        files = [file for file in held if _format(file) == kind] or held
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
            ModelFileError: a row cannot be converted, or the files changed since they were opened.
        """
        source, selection, vectors = self.checkpoint.arrays, self.selection, self.selection.vectors.name
        columns = [vectors] if selection.keys is None else [vectors, selection.keys.name]
        row, step = 0, rows_of_a_chunk(selection.dim)
        self.checkpoint.verify()
        for blocks in source.chunks(columns, step):
            out = to_vectors(source.path, vectors, blocks[0], row)
            if selection.keys is None:
                first = selection.first_key + row
                keys = np.arange(first, first + len(out), dtype=np.int64)
            else:
                keys = to_keys(source.path, selection.keys.name, blocks[1], row)
            yield keys, out
            row += keys.size
            self.checkpoint.verify()  # before the next read: reading a mapped file beyond a new end would kill the process
        if row != selection.rows:
            raise ModelFileError(f"importing {source.path}: got {row} rows, expected {selection.rows}; it changed meanwhile")


def find_table(
    source: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
) -> CheckpointTable:
    """Find one table in a file of another format; arguments and errors as for `import_model`."""
    checkpoint = Checkpoint(source, file_format, keys)
    return CheckpointTable(checkpoint, select(checkpoint.arrays, keys, vectors, first_key, dtype))


def find_tables(
    source: str | os.PathLike[str],
    tables: str,
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
) -> dict[str, CheckpointTable]:
    """Find the tables of a checkpoint by name, in its order; arguments and errors as for `import_tables`."""
    path = local_path(os.fspath(source))
    if keys is not None and keys.count("*") not in (0, tables.count("*")):
        raise InvalidInputError(f"importing {path}: got tables {tables!r} and keys {keys!r}, expected as many * in both")
    whole = None
    if os.path.isdir(path) and file_format != "npy" and not any(_format(name) == "npy" for name in _entries(path)):
        held = _entries(path)  # one table each
    else:
        if vectors is not None:
            raise InvalidInputError(f"importing {path}: got tables {tables!r} and vectors {vectors!r}, expected one of them")
        whole = Checkpoint(path, file_format)
        held = [info.name for info in whole.arrays.arrays() if keys is None or not _match(keys, info.name)]
        first_key = first_key if keys else first_key or 0
    chosen: dict[str, CheckpointTable] = {}
    matches = {
        name: match
        for name in held
        if (match := (whole is None and _match(tables, os.path.splitext(name)[0])) or _match(tables, name))
    }
    for name in in_order(list(matches)):
        match = matches[name]
        table = _table_name(tables, match)
        if table in chosen:
            raise ModelFileError(
                f"importing {path}: got {name!r} as a second table {table!r}; choose --tables so that what * matches differs"
            )
        own_keys = keys and reduce(lambda pattern, text: pattern.replace("*", text, 1), match.groups(), keys)
        one = whole or Checkpoint(os.path.join(path, name), file_format)
        chosen[table] = CheckpointTable(one, select(one.arrays, own_keys, name if whole else vectors, first_key, dtype))
    if not chosen:
        raise ModelFileError(f"importing {path}: got tables {tables!r}, which matches none of: {', '.join(held[:30])}")
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
    """Whether a path is a file or a directory with files of a known format."""
    return os.path.isfile(path) or (os.path.isdir(path) and any(_format(name) for name in os.listdir(path)))


def tables_pattern(source: str) -> str | None:
    """Find the pattern of a checkpoint's embedding tables for `find_tables`; None for a single table.

    Raises:
        InvalidInputError: every such pattern matches other arrays, too.
    """
    held = {info.name: info for info in list_arrays(source)}
    wide = [name for name, info in held.items() if len(info.shape) == 2 and "float" in info.dtype]
    named = [name for name in wide if "emb" in name.lower()] or wide
    if len(named) < 2 or "vectors" in held or os.path.isdir(source):  # one table, perhaps with keys
        return None
    prefix = _common(named)
    suffix = _common([name[len(prefix) :][::-1] for name in named])[::-1]
    if sum(name.startswith(prefix) and name.endswith(suffix) for name in held) > len(named):
        listed = ", ".join(list(held)[:12])
        raise InvalidInputError(f"importing {source}: got the arrays {listed}, expected --tables 'PATTERN' of those to serve")
    return f"{prefix}*{suffix}"


def _common(texts: list[str]) -> str:
    """Find the common prefix of texts, up to a separator, or else up to a number."""
    begun = os.path.commonprefix(texts)  # noqa: RUF071 - of characters
    return re.sub(r"(?<=[^a-zA-Z0-9])[a-zA-Z0-9]+$" if re.search("[^a-zA-Z0-9]", begun) else "[0-9]+$", "", begun)


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
