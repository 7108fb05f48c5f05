"""Parquet files: a column of keys and a column of lists."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hps.errors import ModelFileError
from hps.formats.base import FILES, AnyArray, ArrayInfo, ArraySource, damaged

_BUFFER_BYTES = 1 << 20  # of each column; without one, pyarrow reads whole row groups
_BATCHES_A_CHUNK = 4  # pyarrow and its allocator take up to nine times a batch; smaller ones are no slower
_ERRORS = (pa.ArrowException, OSError, ValueError, IndexError)


class ParquetFiles(ArraySource):
    """A Parquet file, or a directory of part files, which are taken in the order of their names.

    Names in a directory that begin with `_` or `.` are passed over, as Spark's readers do.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._parts = [path]
        if os.path.isdir(path):
            names = sorted(name for name in FILES.list(path) if is_part(name))
            if not names:
                raise ModelFileError(f"importing {path}: it holds no .parquet file")
            self._parts = [os.path.join(path, name) for name in names]
        self._rows = 0
        for i, part in enumerate(self._parts):
            self._look_at(part)  # refuses what is no file
            with _open(part) as file:
                if i == 0:
                    self._schema = file.schema_arrow
                self._rows += file.metadata.num_rows

    def arrays(self) -> list[ArrayInfo]:
        return [self._info(column) for column in self._schema]

    def _info(self, column: Any) -> ArrayInfo:
        kind = _storage(column.type)
        if not _is_list(kind):
            return ArrayInfo(column.name, (self._rows,), _dtype(kind))
        width = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        return ArrayInfo(column.name, (self._rows, width), _dtype(kind.value_type))

    def array(self, name: str) -> ArrayInfo:
        """The column of a name; of lists without a fixed size the width is that of the first row."""
        if self._schema.names.count(name) > 1:
            raise ModelFileError(f"importing {self.path}: it has several columns {name!r}; rename them")
        info = super().array(name)
        if info.shape[-1] >= 0 or self._rows == 0:
            return info
        for part, row, column in self._columns([name], 1):
            return ArrayInfo(name, (self._rows, _Lists(part, name, -1).width_of(row, column[0])), info.dtype)
        return info

    def chunks(self, keys: str | None, vectors: str, step: int) -> Iterator[tuple[AnyArray | None, AnyArray]]:
        """Read both columns in one pass, by record batches."""
        width = self.array(vectors).shape[-1]
        names = [vectors] if keys is None else [vectors, keys]
        for part, row, columns in self._columns(names, step):
            block = _Lists(part, vectors, width).rows(row, columns[0])
            yield None if keys is None else _scalars(part, keys, row, columns[1]), block

    def _columns(self, names: list[str], step: int) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield (file, row in it, columns) of every batch."""
        wanted = [self._schema.field(name).type for name in names]
        for part in self._parts:
            row = 0
            with _open(part) as file:
                _check_columns(part, file.schema_arrow, names, wanted, self._parts[0])
                batches = file.iter_batches(batch_size=max(1, step // _BATCHES_A_CHUNK), columns=names)
                while (batch := _next(part, batches)) is not None:
                    if batch.num_rows:
                        yield part, row, [batch.column(name) for name in names]
                    row += batch.num_rows
                if row != file.metadata.num_rows:
                    raise damaged(part, f"got {row} rows, wanted the {file.metadata.num_rows} that it tells of")


def is_part(name: str) -> bool:
    """Whether this file of a directory belongs to a table."""
    return name.endswith((".parquet", ".pq")) and not name.startswith(("_", "."))


class _Lists:
    """Turns lists into (n, dim) arrays."""

    def __init__(self, part: str, name: str, width: int) -> None:
        self._part, self._name, self._width = part, name, width

    def width_of(self, row: int, lists: Any) -> int:
        """Elements of the first list."""
        lists = _plain(lists)
        self._refuse_null(lists, row)
        return len(lists[0])

    def rows(self, row: int, lists: Any) -> AnyArray:
        """All lists; `row` is the first one's in the file."""
        lists = _plain(lists)
        self._refuse_null(lists, row)
        if not pa.types.is_fixed_size_list(lists.type):
            widths = np.diff(lists.offsets.to_numpy())
            if (other := widths != self._width).any():
                at = int(np.argmax(other))
                raise ModelFileError(
                    f"importing {self._part}: row {row + at} of column {self._name!r} has {widths[at]} elements, wanted the "
                    f"{self._width} of the first row"
                )
        values = _plain(lists.flatten())
        if values.null_count:
            at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
            raise ModelFileError(
                f"importing {self._part}: row {row + at // self._width} of column {self._name!r} has a null as element "
                f"{at % self._width}, wanted numbers"
            )
        elements: AnyArray = values.to_numpy()
        return elements.reshape(len(lists), self._width)

    def _refuse_null(self, lists: Any, row: int) -> None:
        _refuse_null(self._part, self._name, row, lists)


def _scalars(part: str, name: str, row: int, column: Any) -> AnyArray:
    plain = _plain(column)
    if _is_list(plain.type):
        return _Lists(part, name, 1).rows(row, plain)
    _refuse_null(part, name, row, plain)
    numbers: AnyArray = plain.to_numpy()
    return numbers


def _refuse_null(part: str, name: str, row: int, column: Any) -> None:
    if column.null_count:
        at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ModelFileError(f"importing {part}: row {row + at} of column {name!r} is null, wanted a value in every row")


def _open(part: str) -> Any:
    try:
        return pq.ParquetFile(part, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    except _ERRORS as error:
        raise damaged(part, f"pyarrow cannot read it ({error})") from error


def _next(part: str, batches: Iterator[Any]) -> Any:
    try:
        return next(batches, None)
    except _ERRORS as error:
        raise damaged(part, f"pyarrow cannot read it ({error})") from error


def _check_columns(part: str, schema: Any, names: list[str], wanted: list[Any], first: str) -> None:
    for name, kind in zip(names, wanted, strict=True):
        if schema.names.count(name) != 1 or schema.field(name).type != kind:
            got = ", ".join(f"{column.name}: {column.type}" for column in schema)
            raise ModelFileError(f"importing {part}: got columns {got}; wanted one {name!r}: {kind}, as in {first}")


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _storage(kind: Any) -> Any:
    """What an extension type (`arrow.fixed_shape_tensor`, for one) is stored as."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _plain(column: Any) -> Any:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _dtype(kind: Any) -> str:
    named = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return named.get(str(kind), str(kind))
