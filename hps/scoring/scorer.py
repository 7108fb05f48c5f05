"""One call of a network on the vectors of one deployment: look up, pool, run.

There are two ways. In general, the inputs of all requests are put together, the vectors are looked up into new memory, and the
network runs on both. Batches of requests that look alike take the other way: all memory from their keys to the inputs of the
network is kept, for some forms of batches, and so is what their lookups prepare; on a CUDA device the network is a CUDA graph.
Then a batch is one copy of its inputs, prepared lookups, one launch.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import DTYPES
from hps.errors import DeviceError, HPSError, NetworkError
from hps.ground.numba_kernels import compile_kernels
from hps.networks.base import Tensor
from hps.scoring.features import Feature, Given, Output, ScoreInputs
from hps.scoring.forms import BatchForm, aligned, kept_forms, lay_out, room_for
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import PackedRequest, gather, gather_into, rows_of
from hps.tensors.bags import Bags, pooled_segments, pooling_of
from hps.tensors.segments import Segment, named_segments
from hps.types import TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""
Request: TypeAlias = ScoreInputs | PackedRequest

_log = logging.getLogger(__name__)
_OUTPUT_DTYPES = (*DTYPES, "float64")
_MOST_KEPT = 16
_UNUSED = 1000  # batches after which the memory of a form may be given to another
_MOST_BOUND = 256
_EXACT_BITS = 5  # of a number of rows that is rounded


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
    """What batches with the same numbers of rows and keys prepare once.

    Attributes:
        starts: by input, where its values begin in the memory of inputs.
        target, source: the part of this memory that is used, and the same part of `_Kept.source`; None on the CPU.
        run: of the network.
    """

    starts: npt.NDArray[np.int64]
    target: Tensor
    source: Tensor
    lookups: list[Sequence[Segment]]
    run: Callable[[], Mapping[str, Tensor]]


@dataclass(slots=True, eq=False)
class _Kept:
    """Memory of batches of one form.

    Attributes:
        staged, source: where inputs are gathered, as an array, and as what the network copies to `memory`.
        memory: where lookups and network read them; `staged` itself on the CPU.
        starts: by input, where its values begin; keys of lookups lie behind all else, from `keys_at` on.
        limits: by input, how many bytes have room.
        index: (samples,) int64, in `staged`: the request of each sample; empty if nothing is given once.
        inputs: of the network, by name; of what is given once, a row a request.
        run: of the network, on all samples; on a CUDA device, captured.
        used: number of the last batch.
        bound: by numbers of rows of each input, and of keys of a row.
    """

    form: BatchForm
    staged: npt.NDArray[np.uint8]
    source: Tensor
    memory: Tensor
    starts: npt.NDArray[np.int64]
    keys_at: int
    limits: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    inputs: dict[str, Tensor]
    run: Callable[[], Mapping[str, Tensor]]
    used: int = 0
    bound: dict[tuple[Sequence[int], Sequence[int]], _Bound] = field(default_factory=dict)


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
        self._own = threading.Lock()  # of what is kept
        self._kept: dict[BatchForm, _Kept] = {}
        self._most_kept = _MOST_KEPT
        self._batches = 0  # that were scored in it
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
        if not self._split and self._own.acquire(False):
            try:
                outputs, looked_up = self._score_kept(requests, counts)
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

    def _score_kept(self, requests: Sequence[Request], counts: npt.NDArray[np.int64]) -> tuple[Outputs | None, int]:
        """Score requests that look alike in the memory that is kept; None if they do not, or none is left."""
        if (found := rows_of(requests)) is None:
            return None, 0
        layout, by_request = found
        total, rows = int(counts.sum()), by_request.sum(axis=0)
        each = (by_request == counts[:, None]).all(axis=0)
        one_form = (each | (rows == len(requests))).all()  # else some give an input once, and some for each sample
        if not one_form or total > self._max_samples or 0 in layout.sizes:
            return None, 0
        samples, once = room_for(total, self._max_samples), tuple((~each).tolist())
        form = BatchForm(samples, room_for(len(requests), samples) if any(once) else 0, once)
        if (kept := self._kept_for(form)) is None or (rows * layout.widths > kept.limits).any():
            return None, 0
        filled = rows
        if self._on_device:  # new numbers of rows cost it more than some rows more
            most = np.where(once, min(_rounded(len(requests)), form.requests), min(_rounded(total), samples))
            filled = np.where(most * layout.widths > kept.limits, rows, most)
        key = tuple(filled.tolist()), layout.sizes
        if (bound := kept.bound.get(key)) is None:
            if len(kept.bound) >= _MOST_BOUND:
                del kept.bound[next(iter(kept.bound))]
            bound = kept.bound[key] = self._bound(kept, total, *key)
        if kept.index.size:
            kept.index[:total] = np.repeat(np.arange(len(requests)), counts)
        gather_into(requests, by_request * layout.widths, kept.staged, bound.starts, filled * layout.widths)
        if self._on_device:
            self._network.write(bound.target, bound.source)
        for segments in bound.lookups:
            self._lookup(segments)
        looked_up = perf_counter_ns()
        outputs = self._run(bound.run)
        if self._on_device:
            return {name: values[:total] for name, values in outputs.items()}, looked_up
        return {name: values.copy() for name, values in outputs.items()}, looked_up  # a network may return its inputs

    def _kept_for(self, form: BatchForm) -> _Kept | None:
        """Return the memory of batches of a form; None if that of others is in use and there may be no more."""
        self._batches += 1
        if (kept := self._kept.get(form)) is None:
            if len(self._kept) >= self._most_kept:
                oldest = min(self._kept.values(), key=lambda one: one.used, default=None)
                if oldest is None or self._batches - oldest.used < _UNUSED:
                    return None
                del self._kept[oldest.form]
            try:
                kept = self._new_memory(form)
            except (MemoryError, RuntimeError) as error:  # the memory of one batch may be had
                self._most_kept = len(self._kept)
                _log.warning("model %r: no memory is kept for batches of %d samples: %s", self._model, form.samples, error)
                return None
            self._kept[form] = kept
        kept.used = self._batches
        return kept

    def _new_memory(self, form: BatchForm) -> _Kept:
        """Allocate the memory of batches of a form, and on a CUDA device capture the run of the network on it."""
        network, layout = self._network, lay_out(self.features, form, self._max_samples)
        staged, source = network.staging(layout.size_bytes)
        staged[:] = 0
        memory = network.empty((layout.size_bytes,), "uint8") if self._on_device else staged
        index = self._part(memory, 0, "int64", (layout.indices,))
        inputs: dict[str, Tensor] = {}
        for one, shape, start in zip(self.features, layout.shapes, layout.starts, strict=True):
            if not one.is_lookup:
                inputs[one.name] = self._part(memory, start, one.dtype, shape)
            else:
                inputs[one.name] = network.empty(shape, "float32") if self._on_device else np.zeros(shape, np.float32)
        if self._on_device:
            network.write(memory, source)
            with self._calls.running(self):
                run = network.fixed(self._run_of(inputs, self._once(form, index)))
        else:
            put = {name: network.put(values) for name, values in inputs.items()}
            run = self._run_of(put, self._once(form, network.put(index)))
        own = np.ndarray((layout.indices,), np.int64, staged)
        starts, limits = np.array(layout.starts), np.array(layout.limits)
        return _Kept(form, staged, source, memory, starts, layout.keys_at, limits, own, inputs, run)

    def _part(self, memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor that begins at a byte of the memory of inputs."""
        return self._network.part(memory, start, dtype, shape) if self._on_device else np.ndarray(shape, dtype, memory, start)

    def _once(self, form: BatchForm, index: Tensor) -> dict[str, Tensor]:
        """Return the index of what is given once, by name."""
        return {one.name: index for one, once in zip(self.features, form.once, strict=True) if once}

    def _run_of(self, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Tensor]]:
        """Return the run of the network on inputs; those that have an index are repeated by it."""
        network = self._network
        return lambda: network.run({**inputs, **{name: network.take(inputs[name], index) for name, index in indices.items()}})

    def _bound(self, kept: _Kept, samples: int, rows: Sequence[int], sizes: Sequence[int]) -> _Bound:
        """Prepare lookups and run of batches in the memory that is kept.

        Args:
            rows, sizes: by place of the feature, rows, and elements of a row.
        """
        segments: dict[int, Segment] = {}
        starts, at = kept.starts.copy(), kept.keys_at
        for place, one in enumerate(self.features):
            if not one.is_lookup:
                continue
            n = rows[place] * sizes[place]
            keys, out = self._part(kept.memory, at, "int64", (n,)), kept.inputs[one.name][: rows[place]].reshape(-1, one.dim)
            starts[place] = at
            at += aligned(8 * n)
            pooling = None
            if one.pools(sizes[place]):
                pooling = pooling_of(one.name, one.bags_of(keys), n, (rows[place], sizes[place]), self._on_device)
            segments[place] = Segment(one.table, keys, out, None, n, pooling)
        groups = self._groups({place: one.pooling is not None for place, one in segments.items()})
        lookups = [self._bind([segments[place] for place in places]) for _, places in groups]
        if self._on_device:
            target, source = (self._network.part(memory, 0, "uint8", (at,)) for memory in (kept.memory, kept.source))
            return _Bound(starts, target, source, lookups, kept.run)
        put = self._network.put
        inputs = {one.name: put(kept.inputs[one.name][:n]) for one, n in zip(self.features, rows, strict=True)}
        return _Bound(starts, None, None, lookups, self._run_of(inputs, self._once(kept.form, put(kept.index[:samples]))))

    def _groups(self, pooled: Mapping[int, bool]) -> list[tuple[bool, list[int]]]:
        """Group lookups, by place of the feature, such that a group asks a table once, and pools all or none."""
        groups: dict[tuple[bool, int], list[int]] = {}
        turns: dict[tuple[bool, int], int] = {}
        for place, pools in pooled.items():
            asked = pools, self.features[place].table
            turns[asked] = turn = turns.get(asked, -1) + 1
            groups.setdefault((pools, turn), []).append(place)
        return [(pools, places) for (pools, _), places in groups.items()]

    def _score_any(self, requests: Sequence[Request], counts: npt.NDArray[np.int64]) -> tuple[Outputs, int]:
        """Score any requests."""
        batch = self._batch(requests, counts)
        given = self._on_card(batch)
        vectors = self._vectors(batch, given)
        looked_up = perf_counter_ns()
        inputs: dict[str, Tensor] = {}
        indices: dict[str, Tensor] = {}
        for place, one in enumerate(self.features):
            if one.index:
                inputs[one.name] = self._network.put(np.repeat(np.arange(len(requests)), counts))
                continue
            inputs[one.name] = vectors[place] if one.is_lookup else given[place]
            if place in batch.repeats:
                times = batch.repeats[place]
                indices[one.name] = self._network.put(np.repeat(np.arange(len(times)), times))
        return self._run(self._run_of(inputs, indices)), looked_up

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
        """Keep memory for batches of `kept_forms`, and run the network on it once, before the first request does."""
        with self._calls.of(self):
            for form in kept_forms(self.features, self._max_samples):
                kept = self._kept_for(form)
                if kept is not None and not self._on_device:
                    self._run(kept.run)

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
            one if isinstance(one, ScoreInputs) else one.unpacked(self.features, self._max_samples, self._model)
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
        lookups = {place: isinstance(batch.columns[place], Bags) for place, one in enumerate(self.features) if one.is_lookup}
        for pooled, places in self._groups(lookups):
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
                tables[name] = one.bags_of(given[place], offsets, weights)
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
        keys = values.reshape(len(values), -1)
        if not weighted:
            return one.bags_of(keys) if one.pools(keys.shape[1]) else keys.reshape(-1)
    if not one.combiner:  # some give (rows,), some (rows, 1)
        return np.concatenate([part.values.reshape(part.rows) for part in given])
    offsets, weights, start = [np.zeros(1, np.int64)], [], 0
    for part in given:
        n = part.values.size
        own = np.arange(1, part.rows + 1) * (n // part.rows) if part.offsets is None else part.offsets[1:]
        offsets.append(own + start)
        start += n
        weights.append(np.ones(n, np.float32) if part.weights is None else part.weights.reshape(-1))
    return one.bags_of(
        np.concatenate([part.values.reshape(-1) for part in given]),
        np.concatenate(offsets),
        np.concatenate(weights) if weighted else None,
    )


def _rounded(rows: int) -> int:
    """Round a number of rows up, by less than a sixteenth."""
    step = 1 << max(0, (rows - 1).bit_length() - _EXACT_BITS)
    return -(-rows // step) * step
