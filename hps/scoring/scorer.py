"""One call of a network on the vectors of one deployment: look up, pool, run."""

import threading
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
from hps.scoring.packing import Gathered, Gathering, PackedRequest
from hps.tensors.bags import Bags, pooled_segments
from hps.tensors.segments import Segment, named_segments
from hps.types import TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""
Request: TypeAlias = ScoreRequest | PackedRequest

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


@dataclass(slots=True)
class _Batch:
    """The inputs of a batch.

    Attributes:
        columns: by place of the feature, values; of a lookup, keys or `Bags`.
        gathered: the memory that has all of them, if one has.
        repeats: by place of the feature, how often each row counts; without those that count once.
    """

    columns: dict[int, Any]
    gathered: Gathered | None
    repeats: dict[int, npt.NDArray[np.int64]]


class Scorer:
    """Answers requests from one deployment on one device. *Thread-safe.*

    On a CUDA device, the inputs of the network are tensors that stay where they are, so that it can be a CUDA graph; one call at a time
    uses them. Calls beside it run the network as it is.

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
        max_samples: int = 1,
        outputs: Sequence[Output] = (),
    ) -> None:
        self._model = model
        self._tables = tuple(tables)
        self.features = tuple(features)
        self._network = network
        self._lookup = lookup
        self._on_device = on_device
        self._refuse_nan = refuse_nan
        self._max_samples = max_samples
        self.outputs = tuple(outputs)
        self._names = [table.table_name for table in tables]
        self._indices: dict[Any, Any] = {name: place for place, name in enumerate(self._names)}
        self._split = any(one.index for one in self.features)
        self._own = threading.Lock()  # of what only one call can use: the fixed tensors and the memory of batches
        self._fixed: list[tuple[int, FixedRun]] = []
        self._gathering = Gathering(self.features, network.staging)

    def score(self, requests: Sequence[Request]) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        """Score requests in one call of the network.

        Returns:
            Outputs of each request, or why it has none; and times.

        Raises:
            HPSError: a tier failed. NetworkError: the network failed.
        """
        if not self._own.acquire(False):
            return self._score(requests, alone=False)
        try:
            return self._score(requests, alone=True)
        finally:
            self._own.release()

    def _score(self, requests: Sequence[Request], *, alone: bool) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        began = perf_counter_ns()
        counts = np.fromiter((one.samples for one in requests), np.int64, len(requests))
        total = int(counts.sum())
        batch = self._batch(requests, counts, alone=alone)
        fixed = next((run for most, run in self._fixed if most >= total), None) if alone else None
        given = self._on_card(batch)
        vectors = self._vectors(batch, given, fixed)
        looked_up = perf_counter_ns()
        inputs: dict[str, Tensor] = {}
        for place, one in enumerate(self.features):
            if one.index:
                inputs[one.name] = self._network.put(np.repeat(np.arange(len(requests)), counts))
                continue
            tensor = vectors[place] if one.is_lookup else given[place]
            if place in batch.repeats:
                tensor = self._network.repeat(tensor, batch.repeats[place])
            if fixed is not None and (place in batch.repeats or not one.is_lookup):
                self._network.write(fixed.inputs[one.name][:total], tensor)
            inputs[one.name] = tensor
        run: Callable[[], Mapping[str, Tensor]] = partial(self._network.run, inputs) if fixed is None else fixed.run
        outputs = self._run(run)
        if fixed is not None:
            outputs = {name: values[:total] for name, values in outputs.items()}
        self._check(outputs, total)
        answers: list[Outputs | HPSError] = []
        if len(requests) == 1:
            answers.append(self._checked(outputs))
        else:
            whole = self._checked(outputs)
            start = 0
            for samples in counts.tolist():
                own = {name: values[start : start + samples] for name, values in outputs.items()}
                answers.append(own if whole is outputs else self._checked(own))
                start += samples
        return answers, ScoreTimes(began, looked_up, perf_counter_ns())

    def try_out(self) -> tuple[Output, ...]:
        """Run the network on zeros, without lookups, and return its outputs.

        Raises:
            NetworkError: it fails, or its outputs have not the samples as their first dimension.
        """
        shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        for samples in (1, 3):
            tensors = [one.tensor() for one in self.features]
            inputs = {one.name: self._network.put(np.zeros((samples, *one.shape[1:]), one.dtype)) for one in tensors}
            outputs = self._run(partial(self._network.run, inputs))
            self._check(outputs, samples)
            shapes.append({name: (values.dtype.name, values.shape[1:]) for name, values in outputs.items()})
        if shapes[0] != shapes[1]:
            raise NetworkError(
                f"trying the network of model {self._model!r}: its outputs are {shapes[0]} for one sample, {shapes[1]} for three"
            )
        self.outputs = tuple(Output(name, dtype, shape) for name, (dtype, shape) in shapes[0].items())
        return self.outputs

    def warm(self) -> None:
        """Prepare runs of several numbers of samples, if the network is on a CUDA device."""
        if not self._on_device or self._split:
            return
        samples = _LEAST_FIXED
        while samples < _STEP * self._max_samples:
            samples = min(samples, self._max_samples)
            inputs = {}
            for one in (feature.tensor() for feature in self.features):
                shape = (samples, *one.shape[1:])
                inputs[one.name] = self._network.empty(shape, one.dtype)
                self._network.write(inputs[one.name], self._network.put(np.zeros(shape, one.dtype)))
            self._fixed.append((samples, self._network.fixed(inputs)))
            samples *= _STEP

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
                    f"running the network of model {self._model!r}: got output {name!r} of shape {list(values.shape)} for "
                    f"{samples} samples, expected them as its first dimension"
                )

    def _checked(self, outputs: Outputs) -> Outputs | HPSError:
        for name, values in outputs.items() if self._refuse_nan else ():
            if values.dtype.kind == "f" and np.isnan(values).any():
                place = int(np.argmax(np.isnan(values.reshape(len(values), -1)).any(axis=1)))
                return NetworkError(
                    f"running the network of model {self._model!r}: output {name!r} of sample {place} is not a number "
                    "(dense.refuse_nan)"
                )
        return outputs

    def _batch(self, requests: Sequence[Request], counts: npt.NDArray[np.int64], *, alone: bool) -> _Batch:
        """Put the inputs of requests together."""
        packed = [one for one in requests if isinstance(one, PackedRequest)]
        gathered = self._gathering.gather(packed) if alone and len(packed) == len(requests) else None
        columns: dict[int, Any] = {}
        if gathered is not None:
            for place, values in gathered.values.items():
                one = self.features[place]
                columns[place] = _bags(one, [Given(values, len(values))]) if one.is_lookup else values
            rows = gathered.rows
        else:
            given = [
                one if isinstance(one, ScoreRequest) else one.unpacked(self.features, self._max_samples, self._model)
                for one in requests
            ]
            for place, one in enumerate(self.features):
                parts = [request.given[place] for request in given]
                if one.is_lookup:
                    columns[place] = _bags(one, parts)
                elif not one.index:
                    columns[place] = parts[0].values if len(parts) == 1 else np.concatenate([part.values for part in parts])
            rows = {
                place: np.array([request.given[place].rows for request in given])
                for place, one in enumerate(self.features)
                if one.per_request
            }
        repeats = {}
        for place, one in enumerate(self.features):
            if one.per_request and not self._split and not np.array_equal(rows[place], counts):
                # a row that stands for all samples of its request, or one of several
                times = np.where(rows[place] == 1, counts, 1)
                repeats[place] = np.repeat(times, rows[place])
        return _Batch(columns, gathered, repeats)

    def _on_card(self, batch: _Batch) -> dict[int, Tensor]:
        """Return the values of features, and on a CUDA device the keys, in the memory of the network's device."""
        network, found = self._network, {}
        if not self._on_device:
            for place, one in enumerate(self.features):
                if not (one.is_lookup or one.index):
                    found[place] = network.put(batch.columns[place])
            return found
        if batch.gathered is not None:
            memory = network.put(batch.gathered.memory)
            for place, values in batch.gathered.values.items():
                keys = batch.columns[place]
                shape = keys.keys.shape if isinstance(keys, Bags) else keys.shape
                found[place] = network.part(memory, batch.gathered.starts[place], values.dtype.name, shape)
            return found
        for place, one in enumerate(self.features):
            if not one.index:
                column = batch.columns[place]
                found[place] = network.put(np.ascontiguousarray(column.keys if isinstance(column, Bags) else column))
        return found

    def _vectors(self, batch: _Batch, given: Mapping[int, Tensor], fixed: FixedRun | None) -> dict[int, Tensor]:
        """Look up the vectors of all lookups; by place of the feature."""
        found: dict[int, Tensor] = {}
        turns: dict[tuple[bool, int], list[int]] = {}
        seen: dict[tuple[bool, int], int] = {}
        for place, one in enumerate(self.features):
            if one.is_lookup:
                pooled = isinstance(batch.columns[place], Bags)
                turn = seen[pooled, one.table] = seen.get((pooled, one.table), -1) + 1
                turns.setdefault((pooled, turn), []).append(place)
        for (pooled, _), places in turns.items():
            self._look_up(pooled, places, batch, given, fixed, found)
        return found

    def _look_up(
        self,
        pooled: bool,
        places: Sequence[int],
        batch: _Batch,
        given: Mapping[int, Tensor],
        fixed: FixedRun | None,
        found: dict[int, Tensor],
    ) -> None:
        """Look up one lookup of each table."""
        network, on_device = self._network, self._on_device
        tables: dict[str, Any] = {}
        outs: dict[str, Any] = {}
        for place in places:
            one, column, name = self.features[place], batch.columns[place], self._names[self.features[place].table]
            keys = column.keys if pooled else column
            if pooled:
                shape: tuple[int, ...] = (len(keys) if column.offsets is None else len(column.offsets) - 1, one.dim)
            elif one.hotness is not None and not one.combiner:
                shape = (*keys.shape, one.dim)
            else:
                shape = (len(keys), one.dim)
            flat = (int(np.prod(shape[:-1])), one.dim)
            if fixed is not None and place not in batch.repeats:
                out = fixed.inputs[one.name][: shape[0]].reshape(flat)
            else:
                out = network.empty(flat, "float32") if on_device else np.empty(flat, np.float32)
            outs[name], found[place] = out, out.reshape(shape)
            if not pooled:
                tables[name] = (given[place] if on_device else keys).reshape(-1)
            elif on_device:
                offsets = None if column.offsets is None else network.put(column.offsets)
                weights = None if column.weights is None else network.put(column.weights)
                tables[name] = Bags(
                    given[place],
                    offsets,
                    weights,
                    combiner=column.combiner,
                    max_norm=column.max_norm,
                    padding_key=column.padding_key,
                )
            else:
                tables[name] = column
        index = self._indices.__getitem__
        if pooled:
            segments: Sequence[Segment] = pooled_segments(tables, outs, index, self._tables, on_cuda=on_device)
        else:
            segments = named_segments(tables, outs, index, self._indices, self._tables, on_cuda=on_device, with_found=False)
        self._lookup(segments)
        if not on_device:
            for place in places:
                found[place] = network.put(found[place])


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
