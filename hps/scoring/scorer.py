"""One call of a network on the vectors of one deployment: look up, pool, run.

There are two ways. In general, the inputs of all requests are put together, the vectors are looked up into new memory, and the
network runs on both. Batches of requests that look alike take the other way wherever every lookup is of rows: all memory from
their keys to the inputs of the network is kept, for some numbers of samples, and so is what a lookup of it prepares; on a CUDA
device the network is a CUDA graph. Then a batch is one copy of its inputs, one prepared lookup, one launch.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import DTYPES
from hps.errors import DeviceError, HPSError, NetworkError
from hps.ground.numba_kernels import compile_kernels
from hps.networks.base import Tensor
from hps.scoring.features import Feature, Given, Output, ScoreRequest
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import PackedRequest, gather, gather_into
from hps.tensors.bags import Bags, pooled_segments
from hps.tensors.segments import Segment, fixed_segments, named_segments
from hps.types import TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""
Request: TypeAlias = ScoreRequest | PackedRequest

_OUTPUT_DTYPES = (*DTYPES, "float64")
_ALIGNED = 64
_LEAST_KEPT = 16
_STEP = 4  # between the numbers of samples that memory is kept for
_MOST_BOUND = 256


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
        repeats: by place of the feature, how often each row counts; without those that count once.
    """

    columns: dict[int, Any]
    repeats: dict[int, npt.NDArray[np.int64]]


@dataclass(slots=True)
class _Bound:
    """What a batch of a number of samples prepares once: the lookup of its keys, and the run of the network."""

    segments: Sequence[Segment]
    run: Callable[[], Mapping[str, Tensor]]


@dataclass(slots=True, eq=False)
class _Kept:
    """Memory of batches of up to `samples`.

    Attributes:
        staged, source: where inputs are gathered, as an array, and as what the network copies to `memory`.
        memory: where lookups and network read them; `staged` itself on the CPU.
        starts, limits: by input, where its values begin, and how many bytes have room.
        inputs: of the network, by name.
        run: on a CUDA device, the run of the network on all samples.
        bound: by number of samples.
    """

    samples: int
    staged: npt.NDArray[np.uint8]
    source: Tensor
    memory: Tensor
    starts: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    inputs: dict[str, Tensor]
    run: Callable[[], Mapping[str, Tensor]] | None = None
    bound: dict[int, _Bound] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputPlace:
    """Where the values of an input, or the keys of a lookup, lie in memory that is kept. *Immutable.*"""

    start: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + -(-self.size_bytes // _ALIGNED) * _ALIGNED


def keeps_memory(features: Sequence[Feature]) -> bool:
    """Whether memory is kept for batches: every lookup is of rows, and of a table of its own."""
    lookups = [one for one in features if one.is_lookup]
    return not (
        any(one.index for one in features)
        or any(one.combiner or one.max_norm for one in lookups)
        or len({one.table for one in lookups}) < len(lookups)
    )


def kept_sizes(max_samples: int) -> list[int]:
    """Return the numbers of samples that memory is kept for, ascending."""
    sizes = [min(_LEAST_KEPT, max_samples)]
    while sizes[-1] < max_samples:
        sizes.append(min(_STEP * sizes[-1], max_samples))
    return sizes


def place_inputs(features: Sequence[Feature], samples: int) -> list[InputPlace]:
    """Lay out the inputs of a batch in one piece of memory, in their order."""
    places: list[InputPlace] = []
    for one in features:
        keys = (one.hotness,) if one.hotness is not None else ()
        shape, dtype = (keys, "int64") if one.is_lookup else (one.shape, one.dtype)
        size = samples * prod(shape) * np.dtype(dtype).itemsize
        places.append(InputPlace(places[-1].end if places else 0, size, dtype, (samples, *shape)))
    return places


class Scorer:
    """Answers requests from one deployment on one device. *Thread-safe.*

    One call at a time uses the memory that is kept; calls beside it take the general way.

    Args:
        model: its name, for errors.
        lookup: looks segments up.
        bind: prepares segments for lookups again and again; None: they are looked up as they are.
        on_device: whether lookups write to the memory of the network's device rather than to the host's.

    Attributes:
        outputs: those of the network, found by a trial.
    """

    def __init__(
        self,
        model: str,
        tables: Sequence[TableSpec],
        features: Sequence[Feature],
        network: NetworkCalls,
        lookup: Callable[[Sequence[Segment]], None],
        *,
        bind: Callable[[Sequence[Segment]], Sequence[Segment]] | None = None,
        on_device: bool = False,
        refuse_nan: bool = True,
        max_samples: int = 1,
        outputs: Sequence[Output] = (),
    ) -> None:
        self._model = model
        self._tables = tuple(tables)
        self.features = tuple(features)
        self._calls = network
        self._network = network.network
        self._lookup = lookup
        self._on_device = on_device
        self._refuse_nan = refuse_nan
        self._max_samples = max_samples
        self.outputs = tuple(outputs)
        self._names = [table.table_name for table in tables]
        self._indices: dict[Any, Any] = {name: place for place, name in enumerate(self._names)}
        self._split = any(one.index for one in self.features)
        self._bind = bind or (lambda segments: segments)
        self._keeps = keeps_memory(self.features)
        self._sizes = kept_sizes(max_samples)
        self._own = threading.Lock()  # of what is kept
        self._kept: dict[int, _Kept] = {}
        compile_kernels(gather)

    def score(self, requests: Sequence[Request]) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        """Score requests in one call of the network.

        Returns:
            Outputs of each request, or why it has none; and times.

        Raises:
            HPSError: a tier failed. NetworkError: the network failed. NotReadyError: it is closed.
        """
        with self._calls.of(self):
            return self._score(requests)

    def network_seconds(self) -> dict[int, float]:
        """Return how long each call under way has been in the network, by thread; 0.0 while it is elsewhere."""
        return self._calls.seconds(self)

    def _score(self, requests: Sequence[Request]) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        began = perf_counter_ns()
        counts = np.fromiter((one.samples for one in requests), np.int64, len(requests))
        outputs: Outputs | None = None
        looked_up = began
        if self._keeps and self._own.acquire(False):
            try:
                outputs, looked_up = self._score_kept(requests, int(counts.sum()))
            finally:
                self._own.release()
        if outputs is None:
            outputs, looked_up = self._score_any(requests, counts)
        self._check(outputs, int(counts.sum()))
        whole = self._checked(outputs)
        answers: list[Outputs | HPSError] = []
        if len(requests) == 1:
            answers.append(whole)
        else:
            start = 0
            for samples in counts.tolist():
                own = {name: values[start : start + samples] for name, values in outputs.items()}
                answers.append(own if whole is outputs else self._checked(own))
                start += samples
        return answers, ScoreTimes(began, looked_up, perf_counter_ns())

    def _score_kept(self, requests: Sequence[Request], total: int) -> tuple[Outputs | None, int]:
        """Score requests that look alike in the memory that is kept; None if they do not."""
        if total > self._max_samples:
            return None, 0
        kept = self._kept_for(next(size for size in self._sizes if size >= total))
        rows = gather_into(requests, kept.staged, kept.starts, kept.limits)
        if rows is None or (rows != total).any():  # or some are given once for several samples
            return None, 0
        if (bound := kept.bound.get(total)) is None:
            if len(kept.bound) >= _MOST_BOUND:
                kept.bound.clear()
            bound = kept.bound[total] = self._bound(kept, total)
        if self._on_device:
            self._network.write(kept.memory, kept.source)
        self._lookup(bound.segments)
        looked_up = perf_counter_ns()
        outputs = self._run(bound.run)
        if not self._on_device:  # a network may return its inputs
            outputs = {name: values.copy() for name, values in outputs.items()}
        return outputs, looked_up

    def _kept_for(self, samples: int) -> _Kept:
        """Return the memory of batches of up to a number of samples."""
        if (kept := self._kept.get(samples)) is not None:
            return kept
        network, places = self._network, place_inputs(self.features, samples)
        starts, limits = [one.start for one in places], [one.size_bytes for one in places]
        size_bytes = places[-1].end
        staged, source = network.staging(size_bytes)
        staged[:] = 0
        memory = network.empty((size_bytes,), "uint8") if self._on_device else staged
        inputs: dict[str, Tensor] = {}
        for one, place in zip(self.features, places, strict=True):
            if one.is_lookup:
                vectors = (samples, *one.tensor().shape[1:])
                inputs[one.name] = network.empty(vectors, "float32") if self._on_device else np.zeros(vectors, np.float32)
            elif self._on_device:
                inputs[one.name] = network.part(memory, place.start, place.dtype, place.shape)
            else:
                inputs[one.name] = np.ndarray(place.shape, place.dtype, staged, place.start)
        kept = _Kept(samples, staged, source, memory, np.array(starts), np.array(limits), inputs)
        if self._on_device:
            network.write(memory, source)
            kept.run = network.fixed(inputs)
        self._kept[samples] = kept
        return kept

    def _bound(self, kept: _Kept, samples: int) -> _Bound:
        """Prepare the lookup and the run of a number of samples in the memory that is kept."""
        network, tables, outs = self._network, {}, {}
        for place, one in enumerate(self.features):
            if not one.is_lookup:
                continue
            hotness = one.hotness or 1
            start, count = int(kept.starts[place]), samples * hotness
            if self._on_device:
                keys = network.part(kept.memory, start, "int64", (count,))
            else:
                keys = np.ndarray((count,), np.int64, kept.staged, start)
            name = self._names[one.table]
            tables[name], outs[name] = keys, kept.inputs[one.name][:samples].reshape(count, one.dim)
        index = self._indices.__getitem__
        segments = fixed_segments(tables, outs, {}, index, self._tables, on_cuda=self._on_device)
        if kept.run is not None:
            whole = kept.run
            return _Bound(self._bind(segments), lambda: {name: values[:samples] for name, values in whole().items()})
        inputs = {name: network.put(values[:samples]) for name, values in kept.inputs.items()}
        return _Bound(self._bind(segments), partial(network.run, inputs))

    def _score_any(self, requests: Sequence[Request], counts: npt.NDArray[np.int64]) -> tuple[Outputs, int]:
        """Score any requests."""
        batch = self._batch(requests, counts)
        given = self._on_card(batch)
        vectors = self._vectors(batch, given)
        looked_up = perf_counter_ns()
        inputs: dict[str, Tensor] = {}
        for place, one in enumerate(self.features):
            if one.index:
                inputs[one.name] = self._network.put(np.repeat(np.arange(len(requests)), counts))
                continue
            tensor = vectors[place] if one.is_lookup else given[place]
            if place in batch.repeats:
                tensor = self._network.repeat(tensor, batch.repeats[place])
            inputs[one.name] = tensor
        return self._run(partial(self._network.run, inputs)), looked_up

    def try_out(self) -> tuple[Output, ...]:
        """Run the network on zeros, without lookups, and return its outputs.

        Raises:
            NetworkError: it fails, or its outputs have not the samples as their first dimension.
        """
        with self._calls.of(self):
            return self._try_out()

    def _try_out(self) -> tuple[Output, ...]:
        shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        for samples in (1, 3):
            tensors = [one.tensor() for one in self.features]
            inputs = {one.name: self._network.put(np.zeros((samples, *one.shape[1:]), one.dtype)) for one in tensors}
            outputs = self._run(partial(self._network.run, inputs))
            self._check(outputs, samples)
            shapes.append({name: (values.dtype.name, values.shape[1:]) for name, values in outputs.items()})
        if shapes[0] != shapes[1]:
            raise NetworkError(
                f"trying the network of model {self._model!r}: its outputs are {shapes[0]} for one sample, {shapes[1]} for "
                "three"
            )
        for name, (dtype, _) in shapes[0].items():
            if dtype not in _OUTPUT_DTYPES:
                raise NetworkError(
                    f"trying the network of model {self._model!r}: output {name!r} is of {dtype}, expected "
                    f"{', '.join(_OUTPUT_DTYPES)}"
                )
        self.outputs = tuple(Output(name, dtype, shape) for name, (dtype, shape) in shapes[0].items())
        return self.outputs

    def warm(self) -> None:
        """Keep memory for batches of all numbers of samples, and run the network on it once, before the first request does."""
        with self._calls.of(self):
            for samples in self._sizes if self._keeps else ():
                kept = self._kept_for(samples)
                if kept.run is None:
                    self._run(self._bound(kept, kept.samples).run)

    def _run(self, run: Callable[[], Mapping[str, Tensor]]) -> Outputs:
        try:
            with self._calls.running(self):
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

    def _batch(self, requests: Sequence[Request], counts: npt.NDArray[np.int64]) -> _Batch:
        """Put the inputs of requests together."""
        given = [
            one if isinstance(one, ScoreRequest) else one.unpacked(self.features, self._max_samples, self._model)
            for one in requests
        ]
        columns: dict[int, Any] = {}
        rows = {}
        for place, one in enumerate(self.features):
            parts = [request.given[place] for request in given]
            if one.is_lookup:
                columns[place] = _bags(one, parts)
            elif not one.index:
                columns[place] = parts[0].values if len(parts) == 1 else np.concatenate([part.values for part in parts])
            if one.per_request:
                rows[place] = np.array([part.rows for part in parts])
        repeats = {}
        for place, one in enumerate(self.features):
            if one.per_request and not self._split and not np.array_equal(rows[place], counts):
                # a row that stands for all samples of its request, or one of several
                times = np.where(rows[place] == 1, counts, 1)
                repeats[place] = np.repeat(times, rows[place])
        return _Batch(columns, repeats)

    def _on_card(self, batch: _Batch) -> dict[int, Tensor]:
        """Return the values of features, and on a CUDA device the keys, in the memory of the network's device."""
        network, found = self._network, {}
        if not self._on_device:
            for place, one in enumerate(self.features):
                if not (one.is_lookup or one.index):
                    found[place] = network.put(batch.columns[place])
            return found
        for place, one in enumerate(self.features):
            if not one.index:
                column = batch.columns[place]
                found[place] = network.put(np.ascontiguousarray(column.keys if isinstance(column, Bags) else column))
        return found

    def _vectors(self, batch: _Batch, given: Mapping[int, Tensor]) -> dict[int, Tensor]:
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
            self._look_up(pooled, places, batch, given, found)
        return found

    def _look_up(
        self,
        pooled: bool,
        places: Sequence[int],
        batch: _Batch,
        given: Mapping[int, Tensor],
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
