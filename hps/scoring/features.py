"""The inputs of a network as requests give them.

An input is one of three:

- a *lookup*: keys of a table, answered with a vector a key (`pooling: none`) or one a bag. A request gives keys (samples,
  hotness), or (samples,) for one key each, or, where they are pooled, keys (n,) of bags with `<input>.offsets` (samples + 1,),
  and perhaps `<input>.weights` (n,);
- a *feature*: values (samples, ...) of the configured dtype and shape, in which sizes may be free;
- the *request index*: for each sample the number of its request within the batch, which the batch adds.

An input that is given once per request (`per_request`) has one row, or one a sample. Its row counts for all samples of the
request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import SAMPLES
from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError
from hps.scoring.signature import Feature, Signature
from hps.tensors.bags import input_arrays
from hps.types import KeyArray

OFFSETS: Final = ".offsets"
WEIGHTS: Final = ".weights"


@dataclass(slots=True, eq=False)
class InputValues:
    """The values of one input of a request. *Immutable.*

    Attributes:
        values: keys, int64: (rows, hotness), (rows,), or (n,) with offsets; or a feature, (rows, ...).
        offsets: (rows + 1,) int64.
        weights: (n,) float32.
    """

    values: npt.NDArray[Any]
    rows: int
    offsets: KeyArray | None = None
    weights: npt.NDArray[np.float32] | None = None


_NOTHING: Final = InputValues(np.empty(0), 0)


@dataclass(slots=True, eq=False)
class ScoreInputs:
    """The inputs of one request. *Immutable.*

    Attributes:
        given: in the order of the features; nothing for the request index.
        samples: number of samples.
        keys: number of keys of each lookup in `Signature.counted`.
        sizes: named sizes.
        form: sizes that requests of one batch share.
    """

    given: Sequence[InputValues]
    samples: int
    keys: tuple[int, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    form: tuple[int, ...] = ()


def read_request(
    signature: Signature,
    arrays: Mapping[str, npt.NDArray[Any]],
    max_samples: int,
    model: str,
    *,
    blank: bool = False,
) -> ScoreInputs:
    """Check the inputs of a request.

    Args:
        arrays: by name, in host memory, C-contiguous.
        max_samples: `max_batch_size` of the model.
        blank: the arrays have their dtypes and shapes alone: offsets are not checked.

    Raises:
        InvalidInputError: an input is missing, unknown, or has another shape, or sizes with which the network does not run.
            `InvalidDtypeError`: or dtype.
        TooManyKeysError: there are more samples or keys than the model allows.
    """
    doing, features = f"scoring with model {model!r}", signature.features
    given: list[InputValues] = []
    used = 0
    for feature in features:
        if feature.index:
            given.append(_NOTHING)
            continue
        values = arrays.get(feature.name)
        if values is None:
            refuse_unknown(doing, arrays, features)  # which may be this one, misspelled
            names = ", ".join(known.name for known in features if not known.index)
            raise InvalidInputError(f"{doing}: input {feature.name!r} is missing; expected {names}")
        used += 1
        if not feature.is_lookup:
            given.append(_feature(doing, feature, values))
            continue
        offsets, weights = arrays.get(feature.name + OFFSETS), arrays.get(feature.name + WEIGHTS)
        used += (offsets is not None) + (weights is not None)
        given.append(_keys(doing, feature, values, offsets, weights, blank))
    if used != len(arrays):
        refuse_unknown(doing, arrays, features)
    keys = tuple([given[place].rows if column is not None else given[place].values.size for place, column in signature.counted])
    for (place, _), count, most in zip(signature.counted, keys, signature.limits, strict=True):
        if count > most:
            raise TooManyKeysError(
                f"{doing}: got {count} keys of input {features[place].name!r}, expected at most {most} "
                "(max_batch_size x maxnum_catfeature_query_per_table_per_sample); send fewer samples at once"
            )
    if not signature.is_sized:
        return ScoreInputs(given, _samples(doing, features, given, max_samples, signature, {}), keys)
    sizes: dict[str, int] = {}
    for place, axis, name in sorted(signature.named, key=lambda named: not given[named[0]].rows):
        values = given[place].values
        if sizes.setdefault(name, values.shape[axis]) != values.shape[axis] and (given[place].rows or not axis):
            raise _wrong_shape(doing, features[place], values, f" with {name} {sizes[name]}, as for another input")
    samples = _samples(doing, features, given, max_samples, signature, sizes)
    for place, axis, size in signature.derived if samples else ():  # no samples have no sizes: the answer is empty
        values = given[place].values
        if (wanted := size.value({**sizes, SAMPLES: samples})) != values.shape[axis]:
            raise _wrong_shape(doing, features[place], values, f" with {size} = {wanted}")
    for place in () if blank else signature.shifted:
        _refuse_offsets(doing, features, given, place)
    if samples and not signature.admits(samples, sizes):
        raise InvalidInputError(f"{doing}: {_unfulfilled(signature, given, samples, sizes)}")
    return ScoreInputs(given, samples, keys, sizes, tuple([sizes[name] for name in signature.inner]))


def refuse_unknown(doing: str, names: Iterable[str], features: Sequence[Feature], hint: str = "") -> None:
    """Check that a network has all inputs of these names.

    Args:
        hint: further advice, for errors.

    Raises:
        InvalidInputError: it lacks one; the message suggests the nearest known input.
    """
    expected_features = [feature for feature in features if not feature.index]
    known = {
        feature.name + end for feature in expected_features for end in (("", OFFSETS, WEIGHTS) if feature.is_lookup else ("",))
    }
    if unknown := next((name for name in names if name not in known), None):
        expected = f"expected {', '.join(feature.name for feature in expected_features)}{meant(unknown, known)}{hint}"
        raise InvalidInputError(f"{doing}: got input {unknown[:120]!r}, which the network does not have; {expected}")


def meant(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name; empty without one."""
    near = get_close_matches(name[:120], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def arrays_of(features: Sequence[Feature], inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Convert the inputs of a caller in this process to arrays; see `HPS.score`.

    Raises:
        InvalidInputError: an input cannot be read as an array in host memory.
    """
    known = {feature.name: feature for feature in features}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, given in inputs.items():
        feature = known.get(name)
        arrays |= input_arrays(name, given, np.int64 if feature is None or feature.is_lookup else np.dtype(feature.dtype))
    return arrays


def _feature(doing: str, feature: Feature, values: npt.NDArray[Any]) -> InputValues:
    if values.dtype != feature.dtype:
        raise InvalidDtypeError(f"{doing}: got input {feature.name!r} of {values.dtype}, expected {feature.dtype}")
    if not feature.shape and values.ndim == 2 and values.shape[1] == 1 and feature.first == -1:
        values = values.reshape(-1)
    if values.shape[1:] != feature.shape or not values.ndim:  # or sizes are free
        free = values.ndim == 1 + len(feature.shape) and all(
            isinstance(size, str) or size == got for size, got in zip(feature.shape, values.shape[1:], strict=True)
        )
        if not free:
            raise _wrong_shape(doing, feature, values)
    if feature.first != -1 and not isinstance(feature.first, str) and len(values) != feature.first:
        raise _wrong_shape(doing, feature, values)
    return InputValues(values, len(values))


def _wrong_shape(doing: str, feature: Feature, values: npt.NDArray[Any], which: str = "") -> InvalidInputError:
    expected = [SAMPLES if feature.first == -1 else feature.first, *feature.shape]
    return InvalidInputError(
        f"{doing}: got input {feature.name!r} of shape {list(values.shape)}, expected [{', '.join(map(str, expected))}]{which}"
    )


def _refuse_offsets(doing: str, features: Sequence[Feature], given: Sequence[InputValues], place: int) -> None:
    """Check offsets into another input: in a batch they could point at values of other requests."""
    feature, offsets = features[place], given[place].values.reshape(-1)
    n, ends = given[feature.offsets_of].rows, feature.drops_first
    last = int(offsets[-1]) if offsets.size else 0
    wrong = offsets.size and (offsets[0] != 0 or np.any(offsets[1:] < offsets[:-1]))
    if wrong or last > n or (ends and last != n):
        shown = f"begin with {offsets[0]} and end with {last}" if offsets.size else "are none"
        raise InvalidInputError(
            f"{doing}: got offsets {feature.name!r} that {shown}, expected 0 to {'' if ends else 'at most '}{n}, the number of "
            f"values of {features[feature.offsets_of].name!r}, never falling"
        )


def _unfulfilled(signature: Signature, given: Sequence[InputValues], samples: int, sizes: Mapping[str, int]) -> str:
    """Describe the guard that refuses a request, and the input whose size it limits."""
    known = {**sizes, SAMPLES: samples}
    refusing = [guard for guard in signature.guards if not guard.is_met(known)]
    guard = next((guard for guard in refusing if SAMPLES not in guard.names), refusing[0])  # samples may be added
    got = f"{known[guard.names[0]]}" if len(guard.names) == 1 else ", ".join(f"{name} = {known[name]}" for name in guard.names)
    which = "1 sample" if samples == 1 else f"{samples} samples"
    for feature, values in zip(signature.features, given, strict=True):
        if {feature.first, *feature.shape} & {*guard.names}:
            which = f"input {feature.name!r} of shape {list(values.values.shape)}"
            break
    return f"{which}: the network needs {guard}, got {got}"


def _keys(
    doing: str,
    feature: Feature,
    values: npt.NDArray[Any],
    offsets: npt.NDArray[Any] | None,
    weights: npt.NDArray[Any] | None,
    blank: bool,
) -> InputValues:
    if values.dtype != np.int64:
        raise InvalidDtypeError(f"{doing}: got keys of input {feature.name!r} of {values.dtype}, expected int64")
    if offsets is not None or weights is not None:
        if not feature.bags:
            vectors = "pooled vectors of any number of keys" if feature.combiner else "pooled vectors"
            raise InvalidInputError(f"{doing}: got offsets or weights of input {feature.name!r}, which has no {vectors}")
        if weights is not None and feature.combiner == "max":
            raise InvalidInputError(f"{doing}: got weights of input {feature.name!r}, whose pooling is max, expected none")
        if weights is not None and (weights.dtype != np.float32 or weights.size != values.size):
            got = f"{weights.size} weights of {weights.dtype}"
            raise InvalidInputError(f"{doing}: got {got} for input {feature.name!r}, expected {values.size} of float32")
    if offsets is None:
        hotness = feature.hotness or 1
        if values.ndim not in (1, 2) or (values.ndim == 1 and hotness != 1):
            raise InvalidInputError(
                f"{doing}: got keys of shape {list(values.shape)} for input {feature.name!r}, expected "
                f"[samples, {feature.hotness or 'keys'}]"
            )
        if values.ndim == 2 and values.shape[1] != hotness and not feature.bags:
            raise InvalidInputError(
                f"{doing}: got {values.shape[1]} keys a sample for input {feature.name!r}, expected {hotness}"
            )
        return InputValues(values, len(values), None, weights)
    if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or not offsets.size:
        got = f"keys of shape {list(values.shape)} and offsets {list(offsets.shape)} of {offsets.dtype}"
        raise InvalidInputError(f"{doing}: got {got} for input {feature.name!r}, expected [n] and [samples + 1] of int64")
    if blank:
        return InputValues(values, offsets.size - 1, offsets, weights)
    if offsets[0] != 0 or offsets[-1] != values.size or np.any(offsets[1:] < offsets[:-1]):
        raise InvalidInputError(
            f"{doing}: got offsets of input {feature.name!r} that begin with {offsets[0]} and end with {offsets[-1]}, expected "
            f"0 to {values.size}, the number of its keys, never falling"
        )
    rows = offsets.size - 1
    if rows and weights is None and np.array_equal(offsets, np.arange(rows + 1) * offsets[1]):  # bags of one size
        return InputValues(values.reshape(rows, int(offsets[1])), rows)
    return InputValues(values, rows, offsets, weights)


def _samples(
    doing: str,
    features: Sequence[Feature],
    given: Sequence[InputValues],
    most: int,
    signature: Signature,
    sizes: Mapping[str, int],
) -> int:
    """Find the number of samples that all inputs agree on."""
    rows = {
        feature.name: values.rows
        for feature, values in zip(features, given, strict=True)
        if not feature.index and feature.first == -1
    }
    sample_rows = [rows[feature.name] for feature in features if feature.name in rows and not feature.per_request]
    samples = sample_rows[0] if sample_rows else max(rows.values(), default=0)
    if not rows:
        samples = _solved(doing, signature, given, sizes)
    once = any(feature.index for feature in features)
    for feature in features:
        if samples and once and feature.per_request and rows[feature.name] != 1:
            got = f"got {rows[feature.name]} rows of input {feature.name!r}"
            raise InvalidInputError(f"{doing}: {got}, expected 1, since the network gets it once a request")
        if feature.name in rows and rows[feature.name] != samples and not (feature.per_request and rows[feature.name] == 1):
            expected = f"{samples}, as of {next(name for name in rows if rows[name] == samples)!r}"
            expected = f"1 or {expected}" if feature.per_request else expected
            raise InvalidInputError(f"{doing}: got {rows[feature.name]} samples of input {feature.name!r}, expected {expected}")
    if samples > most:
        raise TooManyKeysError(f"{doing}: got {samples} samples, expected at most {most} (max_batch_size); send fewer at once")
    return samples


def _solved(doing: str, signature: Signature, given: Sequence[InputValues], sizes: Mapping[str, int]) -> int:
    """Find the number of samples from an expression of it, such as `2*samples`."""
    for place, axis, size in signature.derived:
        if SAMPLES in size.names:
            values = given[place].values
            samples = size.solve(SAMPLES, values.shape[axis], sizes)
            if samples is None:
                raise _wrong_shape(doing, signature.features[place], values)
            return samples
    raise InvalidInputError(f"{doing}: the number of samples follows from no input")
