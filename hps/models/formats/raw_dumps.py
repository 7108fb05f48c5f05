"""Dumps of tables as raw rows: a file of keys beside a file of vectors, which dynamicemb, SOK and HugeCTR write.

dynamicemb (NVIDIA/recsys-examples, `dynamicemb/batched_dynamicemb_tables.py`): `<table>_emb_keys.rank_R.world_size_W` has int64
keys and `<table>_emb_values.rank_R.world_size_W` float32 vectors, without headers. Scores, optimizer states and counters lie in
files of their own. `<table>_opt_args.json` describes the table.

SOK (NVIDIA-Merlin/HugeCTR, `sparse_operation_kit/dump_load.py`): `<table>-key` and `<table>-weight` begin with 296 bytes: a
name (256 bytes, padded with spaces on the left), the kind of the file (4 bytes), the name of an optimizer's state (32), the
code of a dtype (4). Integers of the header are big-endian, those of the rows little-endian.

HugeCTR (`Model.embedding_dump`, `embedding_storage/weight_io/parameter_IO.cpp`, 22.11 and later): `key<N>` and `weight<N>` of
table N of an embedding collection begin with 128 bytes, of which the first 8 are two int32: the kind of the file (1: keys, 2:
vectors) and N. `meta_data` has five int32, the first of which are the number of tables, the kind of keys (0: uint32, 1: int64)
and of vectors (0: float32, 1: float16), and then of all tables the numbers (int32), rows (uint64) and widths (int32).
"""

import json
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, by_rank, reading

_DYNAMICEMB = re.compile(r"(?P<table>.+)_emb_(?P<kind>keys|values)\.rank_(?P<rank>\d+)\.world_size_(?P<world>\d+)")
_NARROW = re.compile(r"b?float16|bf16|fp16|half|float64|fp64|double|u?int8|fp8|float8\w*", re.IGNORECASE)
_SOK_HEAD_BYTES, _SOK_KIND_AT, _SOK_DTYPE_AT = 296, 256, 292
_SOK_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")
_MOST_JSON_BYTES = 1 << 20
_HUGECTR_HEAD_BYTES, _HUGECTR_META_BYTES, _HUGECTR_TABLE_BYTES = 128, 20, 16
_MOST_HUGECTR_TABLES = 1 << 20
_SEVERAL_PROCESSES = (
    "HugeCTR puts the weights of the second process at a wrong place, so that no dump of several processes can be read: dump "
    "from a training of one process"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file of rows. *Immutable.*"""

    file: str
    dtype: str
    head_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Size without the header."""
        return os.path.getsize(self.file) - self.head_bytes

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def mapped(self, *shape: int) -> AnyArray:
        """Map the rows into memory."""
        return np.memmap(self.file, self.dtype, "r", self.head_bytes, shape)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A file of keys and one of vectors, which fit each other. *Immutable.*"""

    keys: _Part
    vectors: _Part
    rows: int
    dim: int


class RawDump(ArraySource):
    """Tables in pairs of files, each listed as the vectors `<table>` and the keys `<table>.keys`."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._tables = {table: self._fitted(table, pairs) for table, pairs in self._find().items()}
        self.repeats_are_errors = any(len(pairs) > 1 for pairs in self._tables.values())

    @abstractmethod
    def _find(self) -> dict[str, list[tuple[_Part, _Part]]]:
        """Return the files of keys and of vectors of each table."""

    def _fitted(self, table: str, parts: list[tuple[_Part, _Part]]) -> list[_Pair]:
        """Compute rows and dimension from the sizes of the files, which must fit one dimension."""
        pairs: list[_Pair] = []
        for keys, vectors in parts:
            with reading(keys.file):
                rows, rest = divmod(keys.size_bytes, keys.itemsize)
                dim, more = divmod(vectors.size_bytes, max(rows, 1) * vectors.itemsize)
            if rest or more or bool(rows) != bool(dim):
                raise ModelFileError(
                    f"importing {vectors.file}: got {vectors.size_bytes} bytes of vectors and {keys.size_bytes} of keys in "
                    f"{os.path.basename(keys.file)}, expected {keys.itemsize} a key and {vectors.itemsize} x the dimension a "
                    "vector; one file is cut short, or they are of different dumps"
                )
            first = next((pair for pair in pairs if pair.rows), None)
            if rows and first is not None and dim != first.dim:
                raise ModelFileError(
                    f"importing {vectors.file}: got {dim} elements a vector of {table}, expected {first.dim} as in "
                    f"{os.path.basename(first.vectors.file)}; a file is cut short, or they are of different dumps"
                )
            pairs.append(_Pair(keys, vectors, rows, dim))
        return pairs

    def arrays(self) -> list[ArrayInfo]:
        infos = []
        for table, pairs in self._tables.items():
            rows, dim = sum(pair.rows for pair in pairs), max(pair.dim for pair in pairs)
            infos.append(ArrayInfo(table, (rows, dim), np.dtype(pairs[0].vectors.dtype).name))
            infos.append(ArrayInfo(f"{table}.keys", (rows,), np.dtype(pairs[0].keys.dtype).name))
        return infos

    def keys_of(self, vectors: str) -> str | None:
        return f"{vectors}.keys" if vectors in self._tables else None

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        table = names[0] if names[0] in self._tables else names[0].removesuffix(".keys")
        for pair in self._tables[table]:
            if not pair.rows:
                continue
            with reading(pair.vectors.file):
                keys, vectors = pair.keys.mapped(pair.rows), pair.vectors.mapped(pair.rows, pair.dim)
            for start in range(0, pair.rows, step):
                yield [(vectors if name == table else keys)[start : start + step] for name in names]


class DynamicembDump(RawDump):
    """Dumps of `DynamicEmbDump`: the directory of a collection with a pair of files for each table and rank."""

    def _find(self) -> dict[str, list[tuple[_Part, _Part]]]:
        matches = [(match, file) for file in self.files if (match := _DYNAMICEMB.fullmatch(os.path.basename(file)))]
        found = {}
        for table in sorted({match["table"] for match, _ in matches}):
            of_table = [(match, file) for match, file in matches if match["table"] == table]
            keys, values = ([part for part in of_table if part[0]["kind"] == kind] for kind in ("keys", "values"))
            if not (keys and values):
                kind = "values" if keys else "keys"
                raise ModelFileError(f"importing {self.path}: got no {table}_emb_{kind} files, expected one for each rank")
            key_files, value_files = (
                by_rank(self.path, f"{table}_emb_keys", keys),
                by_rank(self.path, f"{table}_emb_values", values),
            )
            if len(key_files) != len(value_files):
                raise ModelFileError(
                    f"importing {self.path}: got keys of {table} by {len(key_files)} ranks and values by {len(value_files)}, "
                    "expected one dump; remove the files of the older one"
                )
            self._refuse_other_dtype(table)
            found[table] = [(_Part(key_files[rank], "<i8"), _Part(value_files[rank], "<f4")) for rank in key_files]
        return found

    def _refuse_other_dtype(self, table: str) -> None:
        """Refuse a description with another dtype: nothing else tells vectors of 16 bits from half as many of 32."""
        for file in self.files:
            if os.path.basename(file) != f"{table}_opt_args.json":
                continue
            with reading(file), open(file, encoding="utf-8") as stream:
                content = json.loads(stream.read(_MOST_JSON_BYTES))
            for name, value in content.items() if isinstance(content, dict) else ():
                if isinstance(value, str) and _NARROW.fullmatch(value.rpartition(".")[2]):
                    raise ModelFileError(
                        f"importing {file}: it says {name} {value!r}, expected a dump of float32; the layout of other dumps "
                        "is not known here: load it into a table of float32 and dump that"
                    )


class HugectrDump(RawDump):
    """Dumps of `Model.embedding_dump`: the directory of an embedding collection; table N is called `table<N>`."""

    def _find(self) -> dict[str, list[tuple[_Part, _Part]]]:
        found_files = {os.path.basename(file): file for file in self.files}
        if (meta := found_files.pop("meta_data", None)) is None:
            raise ModelFileError(f"importing {self.path}: got no meta_data beside the files of keys and weights; copy it, too")
        dtype, sizes = self._read_meta(meta)
        expected = {f"{kind}{number}" for kind in ("key", "weight") for number in range(len(sizes))}
        if unexpected := sorted(expected ^ found_files.keys()):
            got = "no" if unexpected[0] in expected else "a file"
            raise ModelFileError(
                f"importing {self.path}: got {got} {unexpected[0]} for {len(sizes)} tables in meta_data, expected key0 to "
                f"key{len(sizes) - 1} and weight0 to weight{len(sizes) - 1}; copy all files of one dump"
            )
        found = {}
        for number, (rows, dim) in enumerate(sizes):
            keys = _Part(found_files[f"key{number}"], dtype, _HUGECTR_HEAD_BYTES)
            vectors = _Part(found_files[f"weight{number}"], "<f4", _HUGECTR_HEAD_BYTES)
            for kind, part, size in ((1, keys, rows * keys.itemsize), (2, vectors, rows * dim * vectors.itemsize)):
                _check_hugectr_head(part.file, kind, number)
                if part.size_bytes != size:
                    reason = _SEVERAL_PROCESSES if kind == 2 and part.size_bytes > size else "a file is cut short"
                    raise ModelFileError(
                        f"importing {part.file}: got {part.size_bytes} bytes behind its head, expected {size} for {rows} rows "
                        f"of width {dim} in meta_data; {reason}, or they are of different dumps"
                    )
            found[f"table{number}"] = [(keys, vectors)]
        return found

    def _read_meta(self, file: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the dtype of keys, and rows and width of each table."""
        with reading(file), open(file, "rb") as stream:
            head = np.frombuffer(stream.read(_HUGECTR_META_BYTES), "<i4")
            count, key_kind, vector_kind = head[:3].tolist()
            expected = _HUGECTR_META_BYTES + _HUGECTR_TABLE_BYTES * count
            if not 0 < count <= _MOST_HUGECTR_TABLES or os.path.getsize(file) != expected:
                raise ValueError(f"got {os.path.getsize(file)} bytes for {count} tables, expected {expected}")
            numbers, rows, widths = (
                np.frombuffer(stream.read(count * np.dtype(kind).itemsize), kind).tolist() for kind in ("<i4", "<u8", "<i4")
            )
            if key_kind not in (0, 1) or vector_kind not in (0, 1) or min(widths) < 1:
                raise ValueError(
                    f"got kinds {key_kind} and {vector_kind} and a width of {min(widths)}, expected 0 or 1, and at least 1"
                )
        if vector_kind == 1:
            raise ModelFileError(
                f"importing {file}: it says float16, as of a training with use_mixed_precision, of which HugeCTR writes what "
                "lies beyond the end of its memory; expected float32: dump from a training without it"
            )
        if numbers != list(range(count)):
            raise ModelFileError(
                f"importing {file}: got tables {', '.join(map(str, numbers[:30]))}, expected 0 to {count - 1}: of chosen tables"
                f" HugeCTR names these, but writes the rows of the first {count}; dump all tables (no table_names)"
            )
        return "<i8" if key_kind else "<u4", list(zip(rows, widths, strict=True))


def _check_hugectr_head(file: str, kind: int, number: int) -> None:
    with reading(file), open(file, "rb") as stream:
        head = stream.read(_HUGECTR_HEAD_BYTES)
        if len(head) < _HUGECTR_HEAD_BYTES:
            raise ValueError(f"got {len(head)} bytes, expected a head of {_HUGECTR_HEAD_BYTES}")
        got = np.frombuffer(head[:8], "<i4").tolist()
        if got != [kind, number]:
            raise ValueError(f"got kind {got[0]} and table {got[1]} in its head, expected kind {kind} and table {number}")


class SokDump(RawDump):
    """Dumps of `sok.dump`: `<table>-key` and `<table>-weight` of each table. Optimizer states are not read."""

    def _find(self) -> dict[str, list[tuple[_Part, _Part]]]:
        found_files = {os.path.basename(file): file for file in self.files}
        tables = sorted({name.rpartition("-")[0] for name in found_files})
        found = {}
        for table in tables:
            pair = [found_files.get(f"{table}-{kind}") for kind in ("key", "weight")]
            if pair[0] is None or pair[1] is None:
                raise ModelFileError(
                    f"importing {self.path}: got {table}-{'weight' if pair[1] else 'key'} alone, expected {table}-key and "
                    f"{table}-weight"
                )
            found[table] = [(_sok_part(pair[0], 0, "iu"), _sok_part(pair[1], 1, "f"))]
        return found


class Int32Keys(RawDump):
    """HugeCTR's two files of a table, `key` and `emb_vector`, with keys of 4 bytes: unsigned, as its int32 keys are."""

    def _find(self) -> dict[str, list[tuple[_Part, _Part]]]:
        found_files = {os.path.basename(file): file for file in self.files}
        missing = [name for name in ("key", "emb_vector") if name not in found_files]
        if missing:
            raise ModelFileError(f"importing {self.path}: {' and '.join(missing)} not found, expected key and emb_vector")
        return {"emb_vector": [(_Part(found_files["key"], "<u4"), _Part(found_files["emb_vector"], "<f4"))]}


def _sok_part(file: str, kind: int, types: str) -> _Part:
    """Read the header of a file of SOK."""
    with reading(file), open(file, "rb") as stream:
        head = stream.read(_SOK_HEAD_BYTES)
        if len(head) < _SOK_HEAD_BYTES:
            raise ValueError(f"got {len(head)} bytes, expected a header of {_SOK_HEAD_BYTES}")
        got, code = (int.from_bytes(head[at : at + 4], "big") for at in (_SOK_KIND_AT, _SOK_DTYPE_AT))
        dtype = _SOK_DTYPES[code] if code < len(_SOK_DTYPES) else ""
        if got != kind or dtype[1:2] not in tuple(types):
            raise ValueError(
                f"got kind {got} and dtype {code} in its header, expected kind {kind} and a dtype of "
                f"{'keys (0 to 3)' if kind == 0 else 'vectors (4 to 6)'}"
            )
    return _Part(file, dtype, _SOK_HEAD_BYTES)
