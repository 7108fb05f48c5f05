"""Array types and the description of a table, used by every layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.ground.shares import TableShare

KeyArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
RowArray: TypeAlias = npt.NDArray[np.float32]
"""Stored rows, (n, width) float32: vectors where a table's `row_dtype` is float32, else memory whose floats mean nothing."""
IndexArray: TypeAlias = npt.NDArray[np.int64]
DeviceArray: TypeAlias = Any
"""An array in the memory of the cache's device: numpy.ndarray for the NumPy cache, cupy.ndarray for the CuPy cache."""


ROW_DTYPES: Final = ("float32", "float16", "bfloat16", "int8")
"""How tiers may store vectors; the places are the numbers that kernels know. `ground/rows.py` describes the rows."""


def row_width(dim: int, row_dtype: str) -> int:
    """Return the words of 4 bytes that a stored row takes: `dim` for float32."""
    match row_dtype:
        case "float16" | "bfloat16":
            return (dim + 1) // 2
        case "int8":
            return (dim + 3) // 4 + 1
    return dim


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table of a model. *Immutable.*

    Attributes:
        model_name, table_name: match `[a-zA-Z0-9_-]{1,120}`.
        dim: float32 elements of a vector, at least 1.
        default_value: every element of an absent key's vector.
        max_keys: maximum keys of this table per lookup.
        slot: distinguishes the tables of a model's versions; empty for the first, whose tables have HugeCTR's names.
        row_dtype: one of ROW_DTYPES: how tiers store the vectors. Callers see float32.
        share: the part of the table that this server holds; None for all rows.
    """

    model_name: str
    table_name: str
    dim: int
    default_value: float
    max_keys: int
    slot: str = ""
    row_dtype: str = "float32"
    share: TableShare | None = None

    @property
    def width(self) -> int:
        """Words of 4 bytes of a stored row."""
        return row_width(self.dim, self.row_dtype)

    @property
    def tag(self) -> str:
        """Name of the table in every database (HugeCTR HPS: `hps_et.<model>.<table>`); model names contain no `@` or `~`.

        Rows of another format are another table, so that nobody takes the one for the other.
        """
        slot = f"@{self.slot}" if self.slot else ""
        rows = "" if self.row_dtype == "float32" else f"~{self.row_dtype}"
        return f"hps_et.{self.model_name}{slot}{rows}.{self.table_name}"

    def stored_as(self, row_dtype: str | None) -> "TableSpec":
        """Return the table as a tier with a format of its own stores it; itself for None."""
        return self if row_dtype in (None, self.row_dtype) else replace(self, row_dtype=row_dtype)


@dataclass(frozen=True, eq=False)
class Scores:
    """The answer of a network. *Immutable.*

    Attributes:
        version: version of the model that answered.
        outputs: by name, (samples, ...) in host memory.
    """

    version: str
    outputs: Mapping[str, npt.NDArray[Any]]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.outputs[name]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result of `hps check-config`. *Immutable.*

    Attributes:
        level: `note` and `warning` are not failures; `wrong` needs a change; `unreachable` may be transient.
        where: configuration key, as in a report.
        text: message for people.
    """

    level: Literal["good", "note", "warning", "wrong", "unreachable"]
    where: str
    text: str


def rows_text(table: TableSpec) -> str:
    """Describe the rows of a table for people."""
    return f"dim {table.dim}" if table.row_dtype == "float32" else f"dim {table.dim}, {table.row_dtype}"


def row_dtype_of(tag: str) -> str:
    """Return how a table's rows are stored, by its tag."""
    return tag.rpartition(".")[0].partition("~")[2] or "float32"


def all_formats(tag: str) -> list[str]:
    """Return the tags of a table in every row format, by one of them."""
    where, _, table = tag.rpartition(".")
    model = where.partition("~")[0]
    return [f"{model}{'' if row_dtype == 'float32' else f'~{row_dtype}'}.{table}" for row_dtype in ROW_DTYPES]


def stored_text(tag: str, width: int) -> str:
    """Describe the stored rows of a table for people, by its tag and its words of 4 bytes a row."""
    row_dtype = row_dtype_of(tag)
    return f"dim {width}" if row_dtype == "float32" else f"{row_dtype}, {4 * width} bytes a row"


def split_tag(tag: str) -> tuple[str, str, str] | None:
    """Return the model, slot and table of a tag; None if it is not a tag of `hps`."""
    match tag.split(".", 1)[1].rpartition(".") if tag.startswith("hps_et.") else ("", "", ""):
        case (model, ".", table) if model:
            return *model.partition("~")[0].partition("@")[::2], table
    return None
