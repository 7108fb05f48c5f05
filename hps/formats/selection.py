"""Finds the keys and the vectors of a table among the arrays of a source."""

from dataclasses import dataclass

from hps.errors import InvalidInputError, ModelFileError
from hps.formats.base import ArrayInfo, ArraySource
from hps.formats.conversion import VECTOR_DTYPES, check_key_dtype, vector_dtype

CONVENTIONAL_KEYS = ("keys", "key", "ids", "id")
CONVENTIONAL_VECTORS = ("vectors", "vector", "embeddings", "embedding", "emb_vectors", "emb_vector")


@dataclass(frozen=True, slots=True)
class Selection:
    """The arrays of one table, found to fit each other. *Immutable.*

    Attributes:
        keys: (n,) or (n, 1), or None where the keys are row numbers.
        vectors: (n, dim).
        dtype: of the vectors: float32, float16, bfloat16 or float64.
        first_key: key of the first row, where `keys` is None.
    """

    keys: ArrayInfo | None
    vectors: ArrayInfo
    dtype: str
    first_key: int

    @property
    def rows(self) -> int:
        return self.vectors.shape[0]

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]


def select(
    source: ArraySource, keys: str | None, vectors: str | None, first_key: int | None, dtype: str | None = None
) -> Selection:
    """Find both arrays, by the names given or by their conventional ones, and check their shapes and dtypes.

    Args:
        source: holds them.
        keys: name of the keys.
        vectors: name of the vectors.
        first_key: the keys are row numbers from this one on.
        dtype: of the vectors, where the source has only bits of them.

    Raises:
        ModelFileError: an array is absent, ambiguous or of the wrong shape; the message lists what there is.
        InvalidInputError: `keys` and `first_key` are both given, or a key does not fit int64.
        InvalidDtypeError: an array has a dtype that cannot be converted.
    """
    if keys is not None and first_key is not None:
        raise InvalidInputError(
            f"importing {source.path}: got keys {keys!r} and first key {first_key}, expected one of them: the first key is for "
            "keys that are row numbers"
        )
    vector_info = source.array(vectors) if vectors is not None else _find_vectors(source)
    key_info = source.array(keys) if keys is not None else _find_keys(source, first_key)
    _check_shapes(source, key_info, vector_info)
    if key_info is not None:
        check_key_dtype(source.path, key_info)
    selection = Selection(key_info, vector_info, vector_dtype(source.path, vector_info, dtype), first_key or 0)
    if key_info is None and not -(2**63) <= selection.first_key <= 2**63 - selection.rows:
        raise InvalidInputError(
            f"importing {source.path}: got first key {selection.first_key} for {selection.rows} rows, expected keys in int64"
        )
    return selection


def _find_vectors(source: ArraySource) -> ArrayInfo:
    arrays = source.arrays()
    found = _named(arrays, CONVENTIONAL_VECTORS)
    if not found:
        found = [info for info in arrays if len(info.shape) == 2 and info.dtype in VECTOR_DTYPES]
    if len(found) == 1:
        return source.array(found[0].name)
    names = ", ".join(info.name for info in found)
    got = f"several arrays that may be the vectors ({names})" if found else "no (n, dim) floats"
    raise ModelFileError(
        f"importing {source.path}: got {got}, expected one; name it with --vectors; it holds {source.listed()}"
    )


def _find_keys(source: ArraySource, first_key: int | None) -> ArrayInfo | None:
    if first_key is not None:
        return None
    found = _named(source.arrays(), CONVENTIONAL_KEYS)
    if len(found) == 1:
        return source.array(found[0].name)
    if not found and source.keys_are_optional:
        return None
    got = f"several arrays that may be the keys ({', '.join(info.name for info in found)})" if found else "no array of keys"
    raise ModelFileError(
        f"importing {source.path}: got {got}, expected one; name it with --keys, or give --first-key where the keys are row "
        f"numbers; it holds {source.listed()}"
    )


def _named(arrays: list[ArrayInfo], names: tuple[str, ...]) -> list[ArrayInfo]:
    return [info for info in arrays if info.name.rpartition(".")[2].lower() in names]


def _check_shapes(source: ArraySource, keys: ArrayInfo | None, vectors: ArrayInfo) -> None:
    problem = None
    if len(vectors.shape) != 2:
        problem = f"got vectors {vectors}, expected shape (n, dim); it holds {source.listed()}"
    elif keys is not None and (not keys.shape or keys.shape[1:] not in ((), (1,))):
        problem = f"got keys {keys}, expected shape (n,) or (n, 1)"
    elif keys is not None and keys.shape[0] != vectors.shape[0]:
        problem = f"got keys {keys} and vectors {vectors}, expected as many rows in both"
    elif 0 in vectors.shape:
        problem = f"got vectors {vectors}, expected at least 1 row and at least 1 element in each"
    if problem:
        raise ModelFileError(f"importing {source.path}: {problem}")
