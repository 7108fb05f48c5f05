"""Finds the keys and the vectors of a table among the arrays of a source."""

import re
from dataclasses import dataclass

from hps.errors import InvalidDtypeError, InvalidInputError, ModelFileError
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.formats.conversion import VECTOR_DTYPES, vector_dtype
from hps.models.formats.quantised_rows import CLAIMED_LAYOUTS, row_dim

CONVENTIONAL_KEYS = ("keys", "key", "ids", "id")
CONVENTIONAL_VECTORS = ("vectors", "vector", "embeddings", "embedding", "emb_vectors", "emb_vector")


@dataclass(frozen=True, slots=True)
class Selection:
    """The arrays of one table, which fit each other. *Immutable.*

    Attributes:
        keys: (n,) or (n, 1); None if the keys are row numbers.
        vectors: (n, dim), or (n, row bytes) of the layouts that uint8 arrays may have.
        dtype: one of `conversion.VECTOR_DTYPES` or of `quantised_rows.LAYOUTS`.
        first_key: key of the first row, if `keys` is None.
        dim: elements of a vector.
    """

    keys: ArrayInfo | None
    vectors: ArrayInfo
    dtype: str
    first_key: int
    dim: int

    @property
    def rows(self) -> int:
        return self.vectors.shape[0]

    @property
    def size_bytes(self) -> int:
        """Size of the int64 keys and float32 vectors."""
        return self.rows * (8 + 4 * self.dim)


def select(
    source: ArraySource,
    keys: str | None,
    vectors: str | None,
    first_key: int | None,
    dtype: str | None = None,
    *,
    dim: int | None = None,
    empty: bool = False,
) -> Selection:
    """Find keys and vectors by the given or conventional names, and check their shapes and dtypes.

    Args:
        first_key: use row numbers, starting here, as keys.
        dtype: dtype or layout of the vectors, if the source has only their bits.
        dim: expected number of elements of a vector, if known.
        empty: accept a table without rows.

    Raises:
        ModelFileError: an array is absent, ambiguous or of the wrong shape; the message lists all arrays.
        InvalidInputError: `keys` and `first_key` are both given, or a key does not fit int64.
        InvalidDtypeError: an array has a dtype that cannot be converted.
    """
    if keys is not None and first_key is not None:
        raise InvalidInputError(
            f"importing {source.path}: got keys {keys!r} and first key {first_key}, expected one of them: the first key is for "
            "keys that are row numbers"
        )
    arrays, key_info = source.arrays(), None
    if vectors is not None:
        vector_info = source.array(vectors)
    elif len(paired_vectors := [info for info in arrays if source.keys_of(info.name)]) == 1:
        vector_info = source.array(paired_vectors[0].name)
    else:
        kinds = ("uint8",) if dtype in CLAIMED_LAYOUTS else VECTOR_DTYPES
        floats = [info for info in arrays if len(info.shape) == 2 and info.dtype in kinds]
        vector_info = _only(
            source, "(n, dim) vectors", _named(arrays, CONVENTIONAL_VECTORS) or floats, "name it with --vectors"
        )
    if keys is not None:
        key_info = source.array(keys)
    elif (paired := source.keys_of(vector_info.name)) is not None:
        if first_key is not None:
            raise InvalidInputError(
                f"importing {source.path}: got first key {first_key} for {vector_info.name!r}, which has the keys "
                f"{paired!r}; leave it out"
            )
        key_info = source.array(paired)
    elif first_key is None and ((found := _named(arrays, CONVENTIONAL_KEYS)) or not source.keys_are_optional):
        cure = "name it with --keys, or give --first-key if the keys are row numbers"
        key_info = _only(source, "keys", found, cure)
    _check_shapes(source, key_info, vector_info, empty)
    if key_info is not None and not re.fullmatch("u?int(8|16|32|64)", key_info.dtype):
        raise InvalidDtypeError(
            f"importing {source.path}: got keys {key_info}, expected integers of at most 64 bits; convert them first"
        )
    kind = vector_dtype(source.path, vector_info, dtype)
    selection = Selection(key_info, vector_info, kind, first_key or 0, _dim(source, vector_info, kind, dim))
    if key_info is None and not -(2**63) <= selection.first_key <= 2**63 - selection.rows:
        raise InvalidInputError(
            f"importing {source.path}: got first key {selection.first_key} for {selection.rows} rows, expected keys in int64"
        )
    return selection


def _only(source: ArraySource, what: str, found: list[ArrayInfo], cure: str) -> ArrayInfo:
    if len(found) == 1:
        return source.array(found[0].name)
    names = ", ".join(info.name for info in found)
    got = f"several arrays that may be the {what} ({names})" if found else f"no array of {what}"
    raise ModelFileError(f"importing {source.path}: got {got}, expected one; {cure}; it holds {source.listed()}")


def _named(arrays: list[ArrayInfo], names: tuple[str, ...]) -> list[ArrayInfo]:
    return [info for info in arrays if info.name.rpartition(".")[2].lower() in names]


def _check_shapes(source: ArraySource, keys: ArrayInfo | None, vectors: ArrayInfo, empty: bool) -> None:
    problem = None
    if len(vectors.shape) != 2:
        problem = f"got vectors {vectors}, expected shape (n, dim); it holds {source.listed()}"
    elif keys is not None and (not keys.shape or keys.shape[1:] not in ((), (1,))):
        problem = f"got keys {keys}, expected shape (n,) or (n, 1)"
    elif keys is not None and keys.shape[0] != vectors.shape[0]:
        problem = f"got keys {keys} and vectors {vectors}, expected as many rows in both"
    elif vectors.shape[1] < 1 or (vectors.shape[0] < 1 and not empty):
        problem = f"got vectors {vectors}, expected at least 1 row and at least 1 element in each"
    if problem:
        raise ModelFileError(f"importing {source.path}: {problem}")


def _dim(source: ArraySource, vectors: ArrayInfo, dtype: str, dim: int | None) -> int:
    """Return the elements of a vector, which must be `dim` if that is known."""
    width = vectors.shape[1]
    if dtype in CLAIMED_LAYOUTS:
        scales = f"{vectors.name}_qscale"
        if any(info.name == scales for info in source.arrays()):
            raise ModelFileError(
                f"importing {source.path}: got {scales!r} beside {vectors.name!r}, expected scales and offsets in the rows; "
                "save the state of a module without quant_prep_enable_quant_state_dict_split_scale_bias"
            )
        return row_dim(source.path, vectors.name, width, dtype, dim)
    if dim is not None and width != dim:
        raise ModelFileError(
            f"importing {source.path}: got vectors {vectors}, expected {dim} elements in each; is it another table, or is a "
            "file cut short?"
        )
    return width
