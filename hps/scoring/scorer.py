"""One call of a network on the vectors of one deployment: look up, pool, run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError, HPSError, NetworkError
from hps.networks.base import FixedRun, Network, Tensor
from hps.scoring.features import Feature, Given, ScoreRequest
from hps.tensors.bags import Bags, pooled_segments
from hps.tensors.segments import Segment, named_segments
from hps.types import TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""


_LEAST_FIXED = 16
_STEP = 4  # between the numbers of samples of fixed runs


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a network. *Immutable.* `shape` is that of one sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreTimes:
    """When a batch began, had its vectors, and had its scores, as `perf_counter_ns`. *Immutable.*"""

    began_ns: int
    looked_up_ns: int
    ended_ns: int


class Scorer:
    """Answers requests from one deployment on one device. *Thread-safe.*

    Args:
        model: its name, for errors.
        lookup: looks segments up.
        on_device: whether lookups write to the memory of the network's device rather than to the host's.

    Attributes:
        outputs: those of the network, found by a trial.
    """

    def __init__(
        self,
        model: str,
        tables: Sequence[TableSpec],
        features: Sequence[Feature],
        network: Network,
        lookup: Callable[[Sequence[Segment]], None],
        *,
        on_device: bool = False,
        refuse_nan: bool = True,
        outputs: Sequence[Output] = (),
    ) -> None:
        self._model = model
        self._tables = tuple(tables)
        self.features = tuple(features)
        self._network = network
        self._lookup = lookup
        self._on_device = on_device
        self._refuse_nan = refuse_nan
        self.outputs = tuple(outputs)
        self._names = [table.table_name for table in tables]
        self._fixed: list[tuple[int, FixedRun]] = []

    def score(self, requests: Sequence[ScoreRequest]) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        """Score requests in one call of the network.

        Returns:
            Outputs of each request, or why it has none; and times.

        Raises:
            HPSError: a tier failed. NetworkError: the network failed.
        """
        began = perf_counter_ns()
        counts = np.fromiter((one.samples for one in requests), np.int64, len(requests))
        split = any(one.index for one in self.features)
        fixed = None if split else self._fixed_for(int(counts.sum()))
        repeats = {
            place: found
            for place, one in enumerate(self.features)
            if one.per_request and not split and (found := _repeats(requests, place)) is not None
        }
        vectors = self._vectors(requests, fixed, repeats)
        looked_up = perf_counter_ns()
        inputs: dict[str, Tensor] = {}
        for place, one in enumerate(self.features):
            if one.index:
                inputs[one.name] = self._network.put(np.repeat(np.arange(len(requests)), counts))
                continue
            if one.is_lookup:
                tensor = vectors[place]
            else:
                values = [request.given[place].values for request in requests]
                tensor = self._network.put(values[0] if len(values) == 1 else np.concatenate(values))
            if place in repeats:
                tensor = self._network.repeat(tensor, repeats[place])
            if fixed is not None and (place in repeats or not one.is_lookup):
                self._network.write(fixed.inputs[one.name][: len(tensor)], tensor)
            inputs[one.name] = tensor
        if fixed is not None:
            run: Callable[[], Mapping[str, Tensor]] = fixed.run
        else:
            run = partial(self._network.run, inputs)
        outputs = self._run(run)
        total = int(counts.sum())
        if fixed is not None:
            outputs = {name: values[:total] for name, values in outputs.items()}
        answers: list[Outputs | HPSError] = []
        start = 0
        self._check(outputs, total)
        for samples in counts.tolist():
            own = {name: values[start : start + samples] for name, values in outputs.items()}
            answers.append(self._checked(own))
            start += samples
        return answers, ScoreTimes(began, looked_up, perf_counter_ns())

    def try_out(self) -> tuple[Output, ...]:
        """Run the network on zeros, without lookups, and return its outputs.

        Raises:
            NetworkError: it fails, or its outputs have not the samples as their first dimension.
        """
        shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        for samples in (1, 3):
            inputs = {
                one.name: self._network.put(np.zeros((samples, *one.tensor().shape[1:]), one.tensor().dtype))
                for one in self.features
            }
            outputs = self._run(partial(self._network.run, inputs))
            self._check(outputs, samples)
            shapes.append({name: (values.dtype.name, values.shape[1:]) for name, values in outputs.items()})
        if shapes[0] != shapes[1]:
            raise NetworkError(
                f"trying the network of model {self._model!r}: its outputs are {shapes[0]} for one sample, {shapes[1]} for three"
            )
        self.outputs = tuple(Output(name, dtype, shape) for name, (dtype, shape) in shapes[0].items())
        return self.outputs

    def warm(self, max_samples: int) -> None:
        """Prepare runs of several numbers of samples, if the network is on a CUDA device."""
        if not self._on_device or any(one.index for one in self.features):
            return
        samples = _LEAST_FIXED
        while samples < _STEP * max_samples:
            samples = min(samples, max_samples)
            inputs = {}
            for one in self.features:
                tensor = one.tensor()
                inputs[one.name] = self._network.empty((samples, *tensor.shape[1:]), tensor.dtype)
                self._network.write(inputs[one.name], self._network.put(np.zeros((samples, *tensor.shape[1:]), tensor.dtype)))
            self._fixed.append((samples, self._network.fixed(inputs)))
            samples *= _STEP

    def _fixed_for(self, samples: int) -> FixedRun | None:
        return next((run for most, run in self._fixed if most >= samples), None)

    def _run(self, run: Callable[[], Mapping[str, Tensor]]) -> Outputs:
        try:
            return self._network.fetch(run())
        except DeviceError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise NetworkError(
                f"running the network of model {self._model!r}: {type(error).__name__}: {lines[0][:300] if lines else ''}"
            ) from error

    def _check(self, outputs: Outputs, samples: int) -> None:
        for name, values in outputs.items():
            if not values.ndim or len(values) != samples:
                raise NetworkError(
                    f"running the network of model {self._model!r}: got output {name!r} of shape {list(values.shape)} for {samples} "
                    "samples, expected them as its first dimension"
                )

    def _checked(self, outputs: Outputs) -> Outputs | HPSError:
        if self._refuse_nan:
            for name, values in outputs.items():
                if values.dtype.kind == "f" and np.isnan(values).any():
                    place = int(np.argmax(np.isnan(values.reshape(len(values), -1)).any(axis=1)))
                    return NetworkError(
                        f"running the network of model {self._model!r}: output {name!r} of sample {place} is not a number "
                        "(dense.refuse_nan)"
                    )
        return outputs

    def _vectors(
        self, requests: Sequence[ScoreRequest], fixed: FixedRun | None, repeats: Mapping[int, Any]
    ) -> dict[int, Tensor]:
        """Look up the vectors of all lookups; by place of the feature."""
        found: dict[int, Tensor] = {}
        turns: dict[tuple[bool, int], dict[int, Any]] = {}
        seen: dict[tuple[bool, int], int] = {}
        for place, one in enumerate(self.features):
            if not one.is_lookup:
                continue
            bags = _bags(one, [request.given[place] for request in requests])
            pooled = not isinstance(bags, np.ndarray)
            turn = seen[pooled, one.table] = seen.get((pooled, one.table), -1) + 1
            turns.setdefault((pooled, turn), {})[place] = bags
        for (pooled, _), group in turns.items():
            places = (
                {place: fixed.inputs[self.features[place].name] for place in group if place not in repeats} if fixed else {}
            )
            self._look_up(pooled, group, found, places)
        return found

    def _look_up(self, pooled: bool, group: dict[int, Any], found: dict[int, Tensor], places: Mapping[int, Tensor]) -> None:
        """Look up one lookup of each table.

        Args:
            found: receives the vectors.
            places: where they go, if that is given.
        """
        tables, outs = {}, {}
        network, on_device = self._network, self._on_device
        on_card: dict[int, Tensor] = {}
        if on_device:
            all_keys = [np.reshape(one.keys if pooled else one, -1) for one in group.values()]
            copied, start = network.put(np.concatenate(all_keys)), 0
            for place, keys in zip(group, all_keys, strict=True):
                on_card[place] = copied[start : start + keys.size]
                start += keys.size
        for place, given in group.items():
            one = self.features[place]
            keys = given.keys if pooled else given
            if not pooled:
                shape = (*keys.shape, one.dim) if one.hotness is not None and not one.combiner else (len(keys), one.dim)
            elif given.offsets is None:
                shape = (len(keys), one.dim)
            else:
                shape = (len(given.offsets) - 1, one.dim)
            name = self._names[one.table]
            flat = (int(np.prod(shape[:-1])), one.dim)
            if place in places:
                out = places[place][: shape[0]].reshape(flat)
            else:
                out = network.empty(flat, "float32") if on_device else np.empty(flat, np.float32)
            if on_device:
                if pooled:
                    given.keys = on_card[place].reshape(keys.shape)
                    given.offsets = None if given.offsets is None else network.put(given.offsets)
                    given.weights = None if given.weights is None else network.put(given.weights)
                else:
                    keys = on_card[place]
            outs[name] = out
            tables[name] = given if pooled else keys if on_device else keys.reshape(-1)
            found[place] = out.reshape(shape)
        index = self._names.index
        if pooled:
            segments: Sequence[Segment] = pooled_segments(tables, outs, index, self._tables, on_cuda=on_device)
        else:
            indices = {name: index(name) for name in tables}
            segments = named_segments(tables, outs, index, indices, self._tables, on_cuda=on_device, with_found=False)
        self._lookup(segments)
        if not on_device:
            for place in group:
                found[place] = network.put(found[place])


def _repeats(requests: Sequence[ScoreRequest], place: int) -> npt.NDArray[np.int64] | None:
    """Return how often each row of an input counts; None if each does once."""
    rows = [request.given[place].rows for request in requests]
    if all(count == request.samples for count, request in zip(rows, requests, strict=True)):
        return None
    parts = [
        np.full(1, request.samples, np.int64) if count == 1 else np.ones(count, np.int64)
        for count, request in zip(rows, requests, strict=True)
    ]
    return np.concatenate(parts)


def _bags(one: Feature, given: Sequence[Given]) -> Any:
    """Concatenate the keys of several requests: an array (rows, hotness) or (rows,) of rows, or bags."""
    first = given[0]
    alone = len(given) == 1
    fixed = all(part.offsets is None for part in given)
    weighted = any(part.weights is not None for part in given)
    if fixed and len({part.values.shape[1:] for part in given}) == 1:
        values = first.values if alone else np.concatenate([part.values for part in given])
        if not one.combiner:
            return values
        if not (weighted or one.max_norm or one.padding_key is not None) and (values.ndim == 1 or values.shape[1] == 1):
            return values.reshape(-1)  # the vector of one key is its own sum and mean
        if not weighted:
            keys = values.reshape(len(values), -1)
            return Bags(keys, combiner=one.combiner, max_norm=one.max_norm, padding_key=one.padding_key)  # type: ignore[arg-type]
    if not one.combiner:  # some give (rows,), some (rows, 1)
        return np.concatenate([part.values.reshape(part.rows) for part in given])
    offsets, weights, start = [np.zeros(1, np.int64)], [], 0
    for part in given:
        n = part.values.size
        own = np.arange(1, part.rows + 1) * (n // part.rows) if part.offsets is None else part.offsets[1:]
        offsets.append(own + start)
        start += n
        weights.append(np.ones(n, np.float32) if part.weights is None else part.weights.reshape(-1))
    return Bags(
        np.concatenate([part.values.reshape(-1) for part in given]),
        np.concatenate(offsets),
        np.concatenate(weights) if weighted else None,
        combiner=one.combiner,  # type: ignore[arg-type]
        max_norm=one.max_norm,
        padding_key=one.padding_key,
    )
