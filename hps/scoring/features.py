"""The inputs of a network as requests give them.

An input of a network is one of three:

- a *lookup*: keys of a table, answered with a vector a key (`pooling: none`) or one a bag. A request gives keys (samples,
  hotness), or (samples,) for one key each, or, where they are pooled, keys (n,) of bags with `<input>.offsets` (samples + 1,),
  and perhaps `<input>.weights` (n,);
- a *feature*: values (samples, ...) of the configured dtype and shape;
- the *request index*: for each sample the number of its request within the batch, which nobody gives.

An input that is given once per request (`per_request`) has one row, or one a sample. Its row counts for all samples of the
request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import DenseConfig
from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError
from hps.networks.base import NetworkTensor
from hps.tensors.bags import Bags, input_arrays
from hps.types import KeyArray, TableSpec

OFFSETS: Final = ".offsets"
WEIGHTS: Final = ".weights"
_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Feature:
    """An input of a network. *Immutable.*

    Attributes:
        table: index of the table of a lookup; -1 for others.
        dim: width of its vectors.
        hotness: keys of a sample; None: one for vectors of keys, any number where they are pooled.
        combiner: how vectors are pooled; empty: they are not.
        max_norm, padding_key: as of `Bags`.
        dtype, shape: of a feature without its samples.
        per_request: whether a request may give it once.
        index: whether it is the request index.
        max_keys: most keys of a lookup of the table.
    """

    name: str
    table: int = _NONE
    dim: int = 0
    hotness: int | None = None
    combiner: str = ""
    max_norm: float | None = None
    padding_key: int | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    per_request: bool = False
    index: bool = False
    max_keys: int = 0

    @property
    def is_lookup(self) -> bool:
        return self.table != _NONE

    @property
    def bags(self) -> bool:
        """Whether bags of any size are allowed."""
        return bool(self.combiner) and self.hotness is None

    def pools(self, keys: int) -> bool:
        """Return whether bags of so many keys are pooled: without weights, one vector is its own sum and mean."""
        return bool(self.combiner) and (keys != 1 or self.max_norm is not None or self.padding_key is not None)

    def bags_of(self, keys: Any, offsets: Any = None, weights: Any = None) -> Bags:
        """Return bags of keys, pooled as configured."""
        return Bags(
            keys,
            offsets,
            weights,
            combiner=self.combiner,  # type: ignore[arg-type]
            max_norm=self.max_norm,
            padding_key=self.padding_key,
        )

    def tensor(self) -> NetworkTensor:
        """Return what the network gets."""
        if self.is_lookup:
            rows = () if self.combiner or self.hotness is None else (self.hotness,)
            return NetworkTensor(self.name, "float32", (-1, *rows, self.dim))
        return NetworkTensor(self.name, self.dtype, (-1, *self.shape))


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a network. *Immutable.* `shape` is that of one sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def features_of(dense: DenseConfig, tables: Sequence[TableSpec]) -> tuple[Feature, ...]:
    """Return the inputs of a network, in the order of the configuration, which was checked against the tables."""
    places = {table.table_name: place for place, table in enumerate(tables)}
    found = []
    for name, one in dense.inputs.items():
        if one.table is not None:
            place = places[one.table]
            table = tables[place]
            combiner = "" if one.pooling == "none" else one.pooling
            found.append(
                Feature(
                    name,
                    place,
                    table.dim,
                    one.hotness,
                    combiner,
                    one.max_norm,
                    one.padding_key,
                    per_request=one.per_request,
                    max_keys=table.max_keys,
                )
            )
        elif one.request_index:
            found.append(Feature(name, dtype="int64", index=True))
        else:
            found.append(Feature(name, dtype=one.dtype, shape=one.shape[1:], per_request=one.per_request))
    return tuple(found)


@dataclass(slots=True, eq=False)
class Given:
    """What a request gives for one input. *Immutable.*

    Attributes:
        values: keys, int64: (rows, hotness), (rows,), or (n,) with offsets; or a feature, (rows, ...).
        offsets: (rows + 1,) int64.
        weights: (n,) float32.
    """

    values: npt.NDArray[Any]
    rows: int
    offsets: KeyArray | None = None
    weights: npt.NDArray[np.float32] | None = None


_NOTHING: Final = Given(np.empty(0), 0)


@dataclass(slots=True, eq=False)
class ScoreInputs:
    """The inputs of one request. *Immutable.*

    Attributes:
        given: in the order of the features; nothing for the request index.
        samples: number of samples.
        keys: number of keys, by place of the feature; 0 of those that are no lookups.
    """

    given: Sequence[Given]
    samples: int
    keys: tuple[int, ...]


def read_request(
    features: Sequence[Feature], arrays: Mapping[str, npt.NDArray[Any]], max_samples: int, model: str
) -> ScoreInputs:
    """Check the inputs of a request.

    Args:
        arrays: by name, in host memory, C-contiguous.
        max_samples: `max_batch_size` of the model.

    Raises:
        InvalidInputError: an input is missing, unknown, or has another shape. `InvalidDtypeError`: or dtype.
        TooManyKeysError: there are more samples or keys than the model allows.
    """
    doing = f"scoring with model {model!r}"
    given: list[Given] = []
    used = 0
    for one in features:
        if one.index:
            given.append(_NOTHING)
            continue
        values = arrays.get(one.name)
        if values is None:
            names = ", ".join(other.name for other in features if not other.index)
            raise InvalidInputError(f"{doing}: input {one.name!r} is missing; expected {names}")
        used += 1
        if not one.is_lookup:
            given.append(_feature(doing, one, values))
            continue
        offsets, weights = arrays.get(one.name + OFFSETS), arrays.get(one.name + WEIGHTS)
        used += (offsets is not None) + (weights is not None)
        keys = _keys(doing, one, values, offsets, weights)
        if values.size > one.max_keys:
            raise TooManyKeysError(
                f"{doing}: got {values.size} keys of input {one.name!r}, expected at most {one.max_keys} "
                "(max_batch_size x maxnum_catfeature_query_per_table_per_sample); send fewer samples at once"
            )
        given.append(keys)
    if used != len(arrays):
        ends = ("", OFFSETS, WEIGHTS)
        known = {one.name + end for one in features if not one.index for end in (ends if one.is_lookup else ends[:1])}
        extra = min(set(arrays) - known)
        raise InvalidInputError(f"{doing}: got input {extra[:120]!r}, which the network does not have")
    keys_of = tuple(got.values.size if one.is_lookup else 0 for one, got in zip(features, given, strict=True))
    return ScoreInputs(given, _samples(doing, features, given, max_samples), keys_of)


def arrays_of(features: Sequence[Feature], inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Make arrays of what a caller in this process gives; see `HPS.score`.

    Raises:
        InvalidInputError: an input cannot be read as an array in host memory.
    """
    known = {one.name: one for one in features}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, given in inputs.items():
        one = known.get(name)
        arrays |= input_arrays(name, given, np.int64 if one is None or one.is_lookup else np.dtype(one.dtype))
    return arrays


def _feature(doing: str, one: Feature, values: npt.NDArray[Any]) -> Given:
    if values.dtype != one.dtype:
        raise InvalidDtypeError(f"{doing}: got input {one.name!r} of {values.dtype}, expected {one.dtype}")
    if not one.shape and values.ndim == 2 and values.shape[1] == 1:
        values = values.reshape(-1)
    if values.shape[1:] != one.shape or not values.ndim:
        expected = ["samples", *one.shape]
        raise InvalidInputError(
            f"{doing}: got input {one.name!r} of shape {list(values.shape)}, expected [{', '.join(map(str, expected))}]"
        )
    return Given(values, len(values))


def _keys(
    doing: str, one: Feature, values: npt.NDArray[Any], offsets: npt.NDArray[Any] | None, weights: npt.NDArray[Any] | None
) -> Given:
    if values.dtype != np.int64:
        raise InvalidDtypeError(f"{doing}: got keys of input {one.name!r} of {values.dtype}, expected int64")
    if offsets is not None or weights is not None:
        if not one.bags:
            what = "pooled vectors of any number of keys" if one.combiner else "pooled vectors"
            raise InvalidInputError(f"{doing}: got offsets or weights of input {one.name!r}, which has no {what}")
        if weights is not None and one.combiner == "max":
            raise InvalidInputError(f"{doing}: got weights of input {one.name!r}, whose pooling is max, expected none")
        if weights is not None and (weights.dtype != np.float32 or weights.size != values.size):
            got = f"{weights.size} weights of {weights.dtype}"
            raise InvalidInputError(f"{doing}: got {got} for input {one.name!r}, expected {values.size} of float32")
    if offsets is None:
        hotness = one.hotness or 1
        if values.ndim not in (1, 2) or (values.ndim == 1 and hotness != 1):
            raise InvalidInputError(
                f"{doing}: got keys of shape {list(values.shape)} for input {one.name!r}, expected "
                f"[samples, {one.hotness or 'keys'}]"
            )
        if values.ndim == 2 and values.shape[1] != hotness and not one.bags:
            raise InvalidInputError(f"{doing}: got {values.shape[1]} keys a sample for input {one.name!r}, expected {hotness}")
        return Given(values, len(values), None, weights)
    if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or not offsets.size:
        got = f"keys of shape {list(values.shape)} and offsets {list(offsets.shape)} of {offsets.dtype}"
        raise InvalidInputError(f"{doing}: got {got} for input {one.name!r}, expected [n] and [samples + 1] of int64")
    if offsets[0] != 0 or offsets[-1] != values.size or np.any(offsets[1:] < offsets[:-1]):
        raise InvalidInputError(
            f"{doing}: got offsets of input {one.name!r} that begin with {offsets[0]} and end with {offsets[-1]}, expected "
            f"0 to {values.size}, the number of its keys, never falling"
        )
    rows = offsets.size - 1
    if rows and weights is None and np.array_equal(offsets, np.arange(rows + 1) * offsets[1]):  # bags of one size
        return Given(values.reshape(rows, int(offsets[1])), rows)
    return Given(values, rows, offsets, weights)


def _samples(doing: str, features: Sequence[Feature], given: Sequence[Given], most: int) -> int:
    """Find the number of samples that all inputs agree on."""
    rows = {one.name: got.rows for one, got in zip(features, given, strict=True) if not one.index}
    own = [rows[one.name] for one in features if one.name in rows and not one.per_request]
    samples = own[0] if own else max(rows.values())
    once = any(one.index for one in features)
    for one in features:
        if once and one.per_request and rows[one.name] != 1:
            got = f"got {rows[one.name]} rows of input {one.name!r}"
            raise InvalidInputError(f"{doing}: {got}, expected 1, since the network gets it once a request")
        if one.name in rows and rows[one.name] != samples and not (one.per_request and rows[one.name] == 1):
            expected = f"{samples}, as of {next(name for name in rows if rows[name] == samples)!r}"
            expected = f"1 or {expected}" if one.per_request else expected
            raise InvalidInputError(f"{doing}: got {rows[one.name]} samples of input {one.name!r}, expected {expected}")
    if not 0 < samples <= most:
        raise TooManyKeysError(
            f"{doing}: got {samples} samples, expected 1 to {most} (max_batch_size)"
            + ("; send fewer at once" if samples else "")
        )
    return samples
