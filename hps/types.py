"""Array types and the description of a table, used by every layer."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

KeyArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IndexArray: TypeAlias = npt.NDArray[np.int64]
DeviceArray: TypeAlias = Any
"""An array in the memory of the cache's device: numpy.ndarray with the NumPy cache, cupy.ndarray with the CuPy cache."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table of a model. Immutable.

    Attributes:
        model_name: name of the model; matches `[a-zA-Z0-9_-]{1,120}`, as does `table_name`.
        table_name: name of the table within the model.
        dim: float32 elements of a vector, at least 1.
        default_value: every element of the vector that an absent key gets.
        max_keys: most keys of this table in one lookup.
        slot: tells apart the tables of a model's versions; empty for the first, whose tables have HugeCTR's names.
    """

    model_name: str
    table_name: str
    dim: int
    default_value: float
    max_keys: int
    slot: str = ""

    @property
    def tag(self) -> str:
        """Name of the table in every database (HugeCTR HPS: `hps_et.<model>.<table>`); no name of a model has an `@`."""
        slot = f"@{self.slot}" if self.slot else ""
        return f"hps_et.{self.model_name}{slot}.{self.table_name}"


def split_tag(tag: str) -> tuple[str, str, str] | None:
    """The names of the model, the slot and the table that a tag is of; None if it is no tag of ours."""
    match tag.split(".", 1)[1].rpartition(".") if tag.startswith("hps_et.") else ("", "", ""):
        case (model, ".", table) if model:
            return *model.partition("@")[::2], table
    return None
