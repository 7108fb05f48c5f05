"""Finds the keys and the vectors among the arrays of a source."""

from dataclasses import dataclass

from hps.errors import InvalidInputError, ModelFileError
from hps.formats.base import CONVENTIONAL_KEYS, CONVENTIONAL_VECTORS, ArrayInfo, ArraySource
from hps.formats.conversion import VECTOR_DTYPES

_LARGEST_KEY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """The arrays of one table, found to fit each other. *Immutable.*

    Attributes:
        keys: (n,) or (n, 1), or None where the keys are row numbers.
        vectors: (n, dim).
        first_key: key of the first row, where `keys` is None.
    """

    keys: ArrayInfo | None
    vectors: ArrayInfo
    first_key: int

    @property
    def rows(self) -> int:
        return self.vectors.shape[0]

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]


def select(source: ArraySource, keys: str | None, vectors: str | None, first_key: int | None) -> Selection:
    """Find both arrays, by the names given or by their conventional ones, and check their shapes.

    Raises:
        ModelFileError: an array is not there, not to be found unambiguously, or of the wrong shape; the message lists what
            there is.
        InvalidInputError: `keys` and `first_key` are both given, or a key does not fit int64.
    """
    if keys is not None and first_key is not None:
        raise InvalidInputError(
            f"importing {source.path}: got keys {keys!r} and first key {first_key}, wanted one of them: the first key is for "
            "keys that are row numbers"
        )
    vector_info = source.array(vectors) if vectors is not None else _find_vectors(source)
    key_info = source.array(keys) if keys is not None else _find_keys(source, first_key)
    _check_shapes(source, key_info, vector_info)
    selection = Selection(key_info, vector_info, first_key or 0)
    last = selection.first_key + selection.rows - 1
    if key_info is None and not -(2**63) <= selection.first_key <= last <= _LARGEST_KEY:
        raise InvalidInputError(
            f"importing {source.path}: got first key {selection.first_key} for {selection.rows} rows, wanted keys in int64"
        )
    return selection


def _find_vectors(source: ArraySource) -> ArrayInfo:
    arrays = source.arrays()
    found = _named(arrays, CONVENTIONAL_VECTORS)
    if not found:
        found = [info for info in arrays if len(info.shape) == 2 and info.dtype in VECTOR_DTYPES]
    if len(found) == 1:
        return source.array(found[0].name)
    got = (
        f"several arrays that may be the vectors ({', '.join(info.name for info in found)})" if found else "no (n, dim) floats"
    )
    raise ModelFileError(f"importing {source.path}: got {got}, wanted one; name it with --vectors; it holds {source.listed()}")


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
        f"importing {source.path}: got {got}, wanted one; name it with --keys, or give --first-key where the keys are row "
        f"numbers; it holds {source.listed()}"
    )


def _named(arrays: list[ArrayInfo], names: tuple[str, ...]) -> list[ArrayInfo]:
    return [info for info in arrays if info.name.rpartition(".")[2].lower() in names]


def _check_shapes(source: ArraySource, keys: ArrayInfo | None, vectors: ArrayInfo) -> None:
    if len(vectors.shape) != 2:
        raise ModelFileError(
            f"importing {source.path}: got vectors {vectors}, wanted shape (n, dim); it holds {source.listed()}"
        )
    if keys is not None and (not keys.shape or keys.shape[1:] not in ((), (1,))):
        raise ModelFileError(f"importing {source.path}: got keys {keys}, wanted shape (n,) or (n, 1)")
    rows, dim = vectors.shape
    if keys is not None and keys.shape[0] != rows:
        raise ModelFileError(
            f"importing {source.path}: got {keys.shape[0]} keys in {keys} and {rows} vectors in {vectors}, wanted as many of "
            "one as of the other"
        )
    if rows == 0:
        raise ModelFileError(f"importing {source.path}: got no rows in {vectors}, wanted at least 1")
    if dim < 1:
        raise ModelFileError(f"importing {source.path}: got vectors {vectors}, wanted at least 1 element in each")
