"""Parquet files with a column of keys and columns of lists."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, reading

_BUFFER_BYTES = 1 << 20  # of each column; without one, pyarrow reads whole row groups
_BATCHES_A_CHUNK = 4  # pyarrow and its allocator take up to nine times a batch; smaller ones are no slower
_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


class ParquetFiles(ArraySource):
    """A Parquet file, or part files of one table in order."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._rows = 0
        for file in files:
            with reading(file):
                self._rows += pq.read_metadata(file).num_rows
        with reading(path):
            self._schema = pq.read_schema(files[0])

    def arrays(self) -> list[ArrayInfo]:
        return [self._info(column) for column in self._schema]

    def _info(self, column: Any) -> ArrayInfo:
        # Read an extension type (such as `arrow.fixed_shape_tensor`) as its storage type.
        kind = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
        shape: tuple[int, ...] = (self._rows,)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            shape += (kind.list_size if pa.types.is_fixed_size_list(kind) else -1,)
            kind = kind.value_type
        return ArrayInfo(column.name, shape, _NUMPY_NAMES.get(str(kind), str(kind)))

    def array(self, name: str) -> ArrayInfo:
        """Find the column of a name; lists without a fixed size have the width of the first row."""
        info = super().array(name)
        if info.shape[-1] < 0 and (first := next(self._batches([name], 1), None)):
            file, _, [column] = first
            _refuse(file, 0, name, column.is_null(), "is null, expected a value in every row")
            return ArrayInfo(name, (self._rows, len(column[0])), info.dtype)
        return info

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        """Read all columns in one pass, by record batches."""
        widths = [self.array(name).shape[1:] for name in names]
        for file, row, columns in self._batches(names, max(1, step // _BATCHES_A_CHUNK)):
            yield [_rows(file, row, name, column, *width) for name, column, width in zip(names, columns, widths, strict=True)]

    def _batches(self, names: Sequence[str], step: int) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield (file, first row in the file, columns) of every batch."""
        expected = [self._schema.field(name).type for name in names]
        for part in self.files:
            with (
                reading(part),
                pq.ParquetFile(part, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True) as file,
            ):
                got = [file.schema_arrow.field(name).type for name in names]
                if got != expected:
                    raise ModelFileError(
                        f"importing {part}: got columns {', '.join(names)} of {got}, expected {expected}, as in {self.files[0]}"
                    )
                row = 0
                for batch in file.iter_batches(step, columns=list(names)):
                    columns = [batch.column(name) for name in names]
                    yield part, row, [one.storage if isinstance(one, pa.ExtensionArray) else one for one in columns]
                    row += batch.num_rows


def _rows(part: str, row: int, name: str, column: Any, width: int | None = None) -> AnyArray:
    """Convert a batch of a column to (n,), or lists to (n, width); `row` is its first row in the file."""
    _refuse(part, row, name, column.is_null(), "is null, expected a value in every row")
    if width is None:
        return _numbers(column)
    other = pc.not_equal(pc.list_value_length(column), width)
    _refuse(part, row, name, other, f"does not have {width} elements, expected as many as in the first row")
    values = column.flatten()
    _refuse(part, row, name, values.is_null(), "has a null element, expected numbers", width)
    return _numbers(values).reshape(len(column), width)


def _refuse(part: str, row: int, name: str, bad: Any, problem: str, width: int = 1) -> None:
    """Raise if any of `bad`, `width` booleans per row from `row` on, is true."""
    if (at := pc.index(bad, True).as_py()) >= 0:
        raise ModelFileError(f"importing {part}: row {row + at // width} of column {name!r} {problem}")


def _numbers(column: Any) -> AnyArray:
    numbers: AnyArray = column.to_numpy(zero_copy_only=False)
    return numbers
