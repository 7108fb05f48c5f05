"""Parquet files: a column of keys and columns of lists."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hps.errors import ModelFileError
from hps.formats.base import AnyArray, ArrayInfo, ArraySource, damaged

_BUFFER_BYTES = 1 << 20  # of each column; without one, pyarrow reads whole row groups
_BATCHES_A_CHUNK = 4  # pyarrow and its allocator take up to nine times a batch; smaller ones are no slower
_ERRORS = (pa.ArrowException, OSError, ValueError, IndexError)
_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


class ParquetFiles(ArraySource):
    """A Parquet file, or part files of one table in order."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._rows = 0
        for file in reversed(files):  # the schema is that of the first
            with _open(file) as opened:
                self._schema = opened.schema_arrow
                self._rows += opened.metadata.num_rows

    def arrays(self) -> list[ArrayInfo]:
        return [self._info(column) for column in self._schema]

    def _info(self, column: Any) -> ArrayInfo:
        # An extension type (`arrow.fixed_shape_tensor`, for one) is what it is stored as.
        kind = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
        shape: tuple[int, ...] = (self._rows,)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            shape += (kind.list_size if pa.types.is_fixed_size_list(kind) else -1,)
            kind = kind.value_type
        return ArrayInfo(column.name, shape, _NUMPY_NAMES.get(str(kind), str(kind)))

    def array(self, name: str) -> ArrayInfo:
        """The column of a name; the width of lists without a fixed size is that of the first row."""
        if self._schema.names.count(name) > 1:
            raise ModelFileError(f"importing {self.path}: it has several columns {name!r}; rename them")
        info = super().array(name)
        if info.shape[-1] >= 0 or self._rows == 0:
            return info
        part, _, [column] = next(self._batches([name], 1))
        _refuse_null(part, name, 0, column)
        return ArrayInfo(name, (self._rows, len(column[0])), info.dtype)

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        """Read all columns in one pass, by record batches."""
        widths = [self.array(name).shape[1:] for name in names]
        for part, row, columns in self._batches(names, step):
            yield [_rows(part, name, row, column, *width) for name, column, width in zip(names, columns, widths, strict=True)]

    def _batches(self, names: Sequence[str], step: int) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield (file, first row in it, columns) of every batch."""
        for part in self.files:
            row = 0
            with _open(part) as file:
                self._check_columns(part, file.schema_arrow, names)
                batches = file.iter_batches(batch_size=max(1, step // _BATCHES_A_CHUNK), columns=list(names))
                while (batch := _next(part, batches)) is not None:
                    if batch.num_rows:
                        columns = [batch.column(name) for name in names]
                        yield part, row, [one.storage if isinstance(one, pa.ExtensionArray) else one for one in columns]
                    row += batch.num_rows
                if row != file.metadata.num_rows:
                    raise damaged(part, f"got {row} rows, expected the {file.metadata.num_rows} of its metadata")

    def _check_columns(self, part: str, schema: Any, names: Sequence[str]) -> None:
        for name in names:
            kind = self._schema.field(name).type
            if schema.names.count(name) != 1 or schema.field(name).type != kind:
                got = ", ".join(f"{column.name}: {column.type}" for column in schema)
                raise ModelFileError(
                    f"importing {part}: got columns {got}; expected one {name!r}: {kind}, as in {self.files[0]}"
                )


def _rows(part: str, name: str, row: int, column: Any, width: int | None = None) -> AnyArray:
    """A batch of a column as (n,), or as (n, width) where it holds lists; `row` is the first one's in the file."""
    _refuse_null(part, name, row, column)
    if width is None:
        numbers: AnyArray = column.to_numpy()
        return numbers
    if not pa.types.is_fixed_size_list(column.type):
        widths = np.diff(column.offsets.to_numpy())
        if (other := widths != width).any():
            at = int(np.argmax(other))
            raise ModelFileError(
                f"importing {part}: row {row + at} of column {name!r} has {widths[at]} elements, expected the {width} of the "
                "first row"
            )
    values = column.flatten()
    if values.null_count:
        at, element = divmod(_first_null(values), width)
        raise ModelFileError(
            f"importing {part}: row {row + at} of column {name!r} has a null as element {element}, expected numbers"
        )
    elements: AnyArray = values.to_numpy()
    return elements.reshape(len(column), width)


def _refuse_null(part: str, name: str, row: int, column: Any) -> None:
    if column.null_count:
        at = row + _first_null(column)
        raise ModelFileError(f"importing {part}: row {at} of column {name!r} is null, expected a value in every row")


def _first_null(column: Any) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


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
