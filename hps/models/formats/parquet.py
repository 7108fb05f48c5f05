"""Parquet files with a column of keys and columns of lists, and the deltas that TorchEasyRec writes in them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, by_rank, reading

_BUFFER_BYTES = 1 << 20  # of each column; without one, pyarrow reads whole row groups
_BATCHES_A_CHUNK = 4  # pyarrow and its allocator take up to nine times a batch; smaller ones are no slower
_LABELS = ("table_fqn", "source", "global_step")
_LABEL_ROWS, _WIDTH_ROWS = 1 << 16, 1 << 8
_EVICTED = "dynamicemb_evicted"
_STEP = re.compile(r".+_step_(?P<step>\d+)(?:_rank_(?P<rank>\d+)_of_(?P<world>\d+))?\.parquet")
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
        if info.shape[-1] < 0 and (first := next(self.batches([name], 1), None)):
            file, _, [column] = first
            _refuse(file, 0, name, column.is_null(), "is null, expected a value in every row")
            return ArrayInfo(name, (self._rows, len(column[0])), info.dtype)
        return info

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        """Read all columns in one pass, by record batches."""
        widths = [self.array(name).shape[1:] for name in names]
        for file, row, columns in self.batches(names, max(1, step // _BATCHES_A_CHUNK)):
            yield [_rows(file, row, name, column, *width) for name, column, width in zip(names, columns, widths, strict=True)]

    def element_dtype(self, name: str) -> str:
        """Return the dtype of a column or of the elements of its lists; no row is read."""
        return super().array(name).dtype

    def batches(
        self, names: Sequence[str], step: int, groups: Mapping[str, Sequence[int]] | None = None
    ) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield (file, first row in the file, columns) of every batch.

        Args:
            groups: numbers of the row groups to read, by file; by default all.
        """
        expected = [self._schema.field(name).type for name in names]
        for part in self.files if groups is None else groups:
            with (
                reading(part),
                pq.ParquetFile(part, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True) as file,
            ):
                got = [file.schema_arrow.field(name).type for name in names]
                if got != expected:
                    raise ModelFileError(
                        f"importing {part}: got columns {', '.join(names)} of {got}, expected {expected}, as in {self.files[0]}"
                    )
                for chosen in [None] if groups is None else [[group] for group in groups[part]]:
                    row = sum(file.metadata.row_group(i).num_rows for i in range(chosen[0])) if chosen else 0
                    for batch in file.iter_batches(step, columns=list(names), row_groups=chosen):
                        columns = [batch.column(name) for name in names]
                        yield (
                            part,
                            row,
                            [column.storage if isinstance(column, pa.ExtensionArray) else column for column in columns],
                        )
                        row += batch.num_rows


class DeltaParquet(ArraySource):
    """Changes that TorchEasyRec's `delta_embedding_dump_config` writes at one step (`tzrec/utils/delta_embedding_dump.py`).

    `<prefix>_step_N.parquet`, or one file a rank, `<prefix>_step_N_rank_R_of_W.parquet`. Each row is a key of a table:
    `global_step`, `table_fqn`, `key_id`, `embedding`, `source`. A row whose source is `dynamicemb_evicted` deletes its key; its
    vector is zero. With `quant_type` an embedding is a uint8 row of the layout rowwise8. Listed are the vectors `<table_fqn>`
    and the keys `<table_fqn>.keys`.
    """

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        matches = [(match, file) for file in files if (match := _STEP.fullmatch(os.path.basename(file)))]
        steps = {int(match["step"]) for match, _ in matches}
        if len(steps) != 1 or len(matches) != len(files):
            raise ModelFileError(
                f"importing {path}: got steps {', '.join(map(str, sorted(steps)))}, expected the files of one; import several "
                "as a version, with --delta-of"
            )
        [self._step] = steps
        if any(match["rank"] for match, _ in matches):
            ranked = by_rank(path, f"step {self._step}", [(match, file) for match, file in matches if match["rank"]])
            if len(ranked) != len(files):
                raise ModelFileError(
                    f"importing {path}: got files with and without a rank for step {self._step}, expected one dump"
                )
            files = list(ranked.values())
        elif len(files) > 1:
            raise ModelFileError(
                f"importing {path}: got {len(files)} files of step {self._step}, expected one, or one for each rank"
            )
        self.repeats_are_errors = len(files) > 1
        self._reader = ParquetFiles(path, files)
        lacks = {*_LABELS, "key_id", "embedding"} - {info.name for info in self._reader.arrays()}
        if lacks:
            raise ModelFileError(
                f"importing {path}: got no column {', '.join(sorted(lacks))}, expected those of TorchEasyRec's delta dump, "
                "as the name of the file says; of any other file say --format parquet"
            )
        self._rows: dict[str, int] = {}
        self._groups: dict[str, dict[str, list[int]]] = {}
        self._find_groups()

    def _find_groups(self) -> None:
        """Count the rows of each table, without their vectors, and find the row groups that have some."""
        for part in self._reader.files:
            with reading(part):
                groups = range(pq.read_metadata(part).num_row_groups)
            for group in groups:
                for _, row, columns in self._reader.batches(_LABELS, _LABEL_ROWS, {part: [group]}):
                    for name, column in zip(_LABELS, columns, strict=True):
                        _refuse(part, row, name, column.is_null(), "is null, expected a value in every row")
                    other = pc.not_equal(columns[2], self._step)
                    _refuse(part, row, "global_step", other, f"is not {self._step}, the step in the name of the file")
                    live = pc.not_equal(columns[1], _EVICTED)
                    for table in pc.unique(columns[0]).to_pylist():
                        found = self._groups.setdefault(table, {}).setdefault(part, [])
                        found.extend([group] if group not in found else [])
                        rows = pc.sum(pc.and_(live, pc.equal(columns[0], table))).as_py()
                        self._rows[table] = self._rows.get(table, 0) + rows

    def arrays(self) -> list[ArrayInfo]:
        kind = self._reader.element_dtype("embedding").replace("uint8", "rowwise8")
        infos = (
            (ArrayInfo(table, (rows, -1), kind), ArrayInfo(f"{table}.keys", (rows,), "int64"))
            for table, rows in self._rows.items()
        )
        return [info for pair in infos for info in pair]

    def array(self, name: str) -> ArrayInfo:
        """Find an array; vectors have the width of the first row."""
        info = super().array(name)
        if name not in self._rows:
            return info
        return ArrayInfo(
            name, (info.shape[0], next(self._blocks(name, ["embedding"], _WIDTH_ROWS, None))[0].shape[1]), info.dtype
        )

    def keys_of(self, vectors: str) -> str | None:
        return f"{vectors}.keys" if vectors in self._rows else None

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        table = names[0] if names[0] in self._rows else names[0].removesuffix(".keys")
        columns = ["embedding" if name == table else "key_id" for name in names]
        yield from self._blocks(table, columns, max(1, step // _BATCHES_A_CHUNK), deleted=False)

    def deleted(self, vectors: str, step: int) -> Iterator[AnyArray]:
        for [keys] in self._blocks(vectors, ["key_id"], step, deleted=True):
            yield keys

    def _blocks(self, table: str, columns: list[str], step: int, deleted: bool | None) -> Iterator[list[AnyArray]]:
        """Yield columns of the rows of a table: of changed keys, of deleted ones or, with None, of both."""
        width = 0
        for part, row, batch in self._reader.batches([*_LABELS[:2], *columns], step, self._groups[table]):
            wanted = pc.equal(batch[0], table)
            if deleted is not None:
                evicted = pc.equal(batch[1], _EVICTED)
                wanted = pc.and_(wanted, evicted if deleted else pc.invert(evicted))
            chosen = [column.filter(wanted) for column in batch[2:]]
            if len(chosen[0]) == 0:
                continue
            blocks = []
            for name, column in zip(columns, chosen, strict=True):
                if name == "embedding":
                    _refuse(part, row, name, column.is_null(), "is null, expected a value in every row")
                    width = width or len(column[0])
                blocks.append(_rows(part, row, name, column, width if name == "embedding" else None))
            yield blocks


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
