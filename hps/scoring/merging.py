"""Merges the inputs of several requests, for one lookup and one call of the network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.scoring.features import InputValues, ScoreInputs
from hps.scoring.packing import PackedRequest
from hps.scoring.signature import Feature, Signature
from hps.types import KeyArray


class Keys(NamedTuple):
    """The keys of a feature with a table.

    Attributes:
        values: int64: (rows, hotness) or (rows,); of bags of any size (n,).
        offsets: (rows + 1,) int64; None: every bag has `hotness` keys.
        weights: (n,) float32.
    """

    values: Any
    offsets: KeyArray | None = None
    weights: npt.NDArray[np.float32] | None = None


@dataclass(slots=True)
class Merged:
    """The inputs of a batch, in host memory.

    Attributes:
        values: by name of the feature, values; of one with a table, `Keys`.
        times: by name, how often each row counts; without those that count once.
        sizes: named sizes.
    """

    values: dict[str, Any] = field(default_factory=dict)
    times: dict[str, KeyArray] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def merge(signature: Signature, requests: Sequence[ScoreInputs], counts: KeyArray) -> Merged:
    """Merge the inputs of requests.

    Args:
        counts: by request, number of samples.
    """
    found = Merged(sizes=merged_sizes(signature, requests))
    for place, feature in enumerate(signature.features):
        if feature.index:
            found.values[feature.name] = np.repeat(np.arange(len(requests)), counts)
            continue
        parts = [request.given[place] for request in requests]
        if feature.is_lookup:
            found.values[feature.name] = _merged_keys(feature, parts)
        elif len(parts) == 1:
            found.values[feature.name] = parts[0].values
        elif feature.offsets_of >= 0:
            found.values[feature.name] = _shifted(
                feature, parts, [request.given[feature.offsets_of].rows for request in requests]
            )
        else:
            found.values[feature.name] = np.concatenate([part.values for part in parts])
        if feature.per_request:
            rows = np.array([part.rows for part in parts])
            if not np.array_equal(rows, counts):  # a row that stands for all samples of its request, or one of several
                found.times[feature.name] = np.repeat(np.where(rows == 1, counts, 1), rows)
    return found


def merged_sizes(signature: Signature, requests: Sequence[ScoreInputs | PackedRequest]) -> Mapping[str, int]:
    """Return the named sizes of merged requests."""
    first = requests[0].sizes
    if len(requests) == 1 or len(signature.inner) == len(first):
        return first
    return {
        name: size if name in signature.inner else sum(request.sizes[name] for request in requests)
        for name, size in first.items()
    }


def padded(signature: Signature, request: ScoreInputs, more: int) -> ScoreInputs:
    """Repeat the last sample of a request; of bags that other inputs delimit, add empty ones."""
    given = []
    for feature, part in zip(signature.features, request.given, strict=True):
        if feature.offsets_of >= 0:
            ends = np.full(more, request.given[feature.offsets_of].rows, part.values.dtype)
            given.append(InputValues(np.concatenate([part.values, ends]), part.rows + more))
        else:
            is_whole = isinstance(feature.first, str) or part.rows < request.samples
            given.append(part if is_whole else _padded(part, more))
    return replace(request, given=given, samples=request.samples + more)


def _padded(part: InputValues, more: int) -> InputValues:
    if part.offsets is None:
        weights = part.weights
        if weights is not None:
            rows = weights.reshape(part.rows, -1)
            weights = np.concatenate([rows, *[rows[-1:]] * more]).reshape(-1)
        return InputValues(np.concatenate([part.values, *[part.values[-1:]] * more]), part.rows + more, None, weights)
    last = slice(int(part.offsets[-2]), int(part.offsets[-1]))
    values = np.concatenate([part.values, *[part.values[last]] * more])
    ends = part.offsets[-1] + np.arange(1, more + 1) * (last.stop - last.start)
    weights = None if part.weights is None else np.concatenate([part.weights, *[part.weights[last]] * more])
    return InputValues(values, part.rows + more, np.concatenate([part.offsets, ends]), weights)


def _shifted(feature: Feature, parts: Sequence[InputValues], rows: Sequence[int]) -> npt.NDArray[Any]:
    """Concatenate offsets into concatenated values.

    Args:
        rows: number of values of each request.
    """
    starts = np.cumsum([0, *rows[:-1]])
    shifted = [
        part.values[1 if feature.drops_first and place else 0 :] + part.values.dtype.type(start)
        for place, (part, start) in enumerate(zip(parts, starts, strict=True))
    ]
    return np.concatenate(shifted)


def _merged_keys(feature: Feature, parts: Sequence[InputValues]) -> Keys:
    """Concatenate the keys of a feature with a table: rows of one width, or bags of any."""
    first = parts[0]
    fixed = all(part.offsets is None for part in parts)
    weighted = any(part.weights is not None for part in parts)
    if fixed and not weighted and len({part.values.shape[1:] for part in parts}) == 1:
        return Keys(first.values if len(parts) == 1 else np.concatenate([part.values for part in parts]))
    if not feature.combiner:  # some give (rows,), some (rows, 1)
        return Keys(np.concatenate([part.values.reshape(part.rows) for part in parts]))
    offsets, weights, start = [np.zeros(1, np.int64)], [], 0
    for part in parts:
        n = part.values.size
        ends = np.arange(1, part.rows + 1) * (n // part.rows) if part.offsets is None else part.offsets[1:]
        offsets.append(ends + start)
        start += n
        weights.append(np.ones(n, np.float32) if part.weights is None else part.weights.reshape(-1))
    return Keys(
        np.concatenate([part.values.reshape(-1) for part in parts]),
        np.concatenate(offsets),
        np.concatenate(weights) if weighted else None,
    )
