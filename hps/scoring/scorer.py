"""One call of a network on the vectors of one deployment: compute keys, look up, pool, run.

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
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError, HPSError, NetworkError
from hps.ground.numba_kernels import compile_kernels
from hps.networks.base import Tensor
from hps.scoring.features import Output, ScoreInputs
from hps.scoring.forms import BatchForm, aligned, kept_forms, lay_out, room_for
from hps.scoring.merging import Keys, Merged, merge, merged_sizes, padded
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import PackedRequest, gather, gather_into, rows_of
from hps.scoring.signature import Lookup, Signature, Source
from hps.tensors.bags import Bags, pooled_segments, pooling_of
from hps.tensors.segments import Segment, named_segments
from hps.types import KeyArray, TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""
Request: TypeAlias = ScoreInputs | PackedRequest

T = TypeVar("T")
_log = logging.getLogger(__name__)
_OUTPUT_DTYPES = ("float32", "float16", "int64", "int32", "bool", "float64")
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
    """What is known of a batch, by name of a feature, an output of a keys program, or a lookup.

    Attributes:
        values: in the memory of lookups: on a CUDA device tensors, else arrays; of a feature with a table, `Keys`.
        times, sizes: as of `Merged`.
    """

    values: dict[str, Any]
    times: dict[str, KeyArray]
    sizes: Mapping[str, int]


class _Asked(NamedTuple):
    """What a lookup asks of a batch.

    Attributes:
        keys: int64, of any shape.
        shape: of the vectors, without their width.
        bags: None if a vector is found for each key.
    """

    keys: Any
    shape: tuple[int, ...]
    bags: Bags | None


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
        signature: Signature,
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
        self.signature = signature
        self._dtypes = {one.name: one.dtype for one in signature.features if not one.is_lookup}
        self._calls = network
        self._network = network.network
        self._lookup = lookup
        self._on_device = on_device
        self._refuse_nan = refuse_nan
        self._max_samples = max_samples
        self.outputs = tuple(outputs)
        self._names = [table.table_name for table in tables]
        self._indices: dict[Any, Any] = {name: place for place, name in enumerate(self._names)}
        self._split = any(one.index for one in signature.features)
        self._of_features = {one.feature: one for one in signature.lookups}
        self._keeps = not (self._split or signature.is_sized or signature.programs or -1 in self._of_features)
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
        padding = self._padding(requests, int(counts.sum())) if self.signature.guards else 0
        if self._keeps and not padding and self._own.acquire(False):
            try:
                outputs, looked_up = self._score_kept(requests, counts)
            finally:
                self._own.release()
        if outputs is None:
            outputs, looked_up = self._score_any(requests, counts, padding)
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

    def _padding(self, requests: Sequence[Request], samples: int) -> int:
        """Return how often to repeat the last sample, for a number of samples with which the network runs.

        Raises:
            NetworkError: there is none; then each request is scored alone.
        """
        sizes = merged_sizes(self.signature, requests)
        if (found := self.signature.padding(samples, sizes)) is None:
            raise NetworkError(
                f"running the network of model {self._model!r}: got {len(requests)} requests of {samples} samples and sizes "
                f"{sizes}, expected {self.signature.refused_by(samples, sizes)}"
            )
        return found

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
        network, layout = self._network, lay_out(self.signature, form, self._max_samples)
        staged, source = network.staging(layout.size_bytes)
        staged[:] = 0
        memory = network.empty((layout.size_bytes,), "uint8") if self._on_device else staged
        index = self._part(memory, 0, "int64", (layout.indices,))
        inputs: dict[str, Tensor] = {}
        for one, shape, start in zip(self.signature.features, layout.shapes, layout.starts, strict=True):
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
        return {one.name: index for one, once in zip(self.signature.features, form.once, strict=True) if once}

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
        for place, one in self._of_features.items():
            n = rows[place] * sizes[place]
            keys, out = self._part(kept.memory, at, "int64", (n,)), kept.inputs[one.name][: rows[place]].reshape(-1, one.dim)
            starts[place] = at
            at += aligned(8 * n)
            pooling = None
            if one.pools(sizes[place]):
                pooling = pooling_of(one.name, one.bags_of(keys), n, (rows[place], sizes[place]), self._on_device)
            segments[place] = Segment(one.table, keys, out, None, n, pooling)
        groups = self._groups({place: one.pooling is not None for place, one in enumerate(segments.values())})
        by_place = list(segments.values())
        lookups = [self._bind([by_place[place] for place in places]) for _, places in groups]
        if self._on_device:
            target, source = (self._network.part(memory, 0, "uint8", (at,)) for memory in (kept.memory, kept.source))
            return _Bound(starts, target, source, lookups, kept.run)
        put = self._network.put
        inputs = {one.name: put(kept.inputs[one.name][:n]) for one, n in zip(self.signature.features, rows, strict=True)}
        return _Bound(starts, None, None, lookups, self._run_of(inputs, self._once(kept.form, put(kept.index[:samples]))))

    def _groups(self, pooled: Mapping[int, bool]) -> list[tuple[bool, list[int]]]:
        """Group lookups, by their places, such that a group asks a table once, and pools all or none."""
        groups: dict[tuple[bool, int], list[int]] = {}
        turns: dict[tuple[bool, int], int] = {}
        for place, pools in pooled.items():
            asked = pools, self.signature.lookups[place].table
            turns[asked] = turn = turns.get(asked, -1) + 1
            groups.setdefault((pools, turn), []).append(place)
        return [(pools, places) for (pools, _), places in groups.items()]

    def _score_any(self, requests: Sequence[Request], counts: KeyArray, padding: int = 0) -> tuple[Outputs, int]:
        """Score any requests.

        Args:
            padding: how often the last sample is repeated; its scores are dropped.
        """
        given = [
            one if isinstance(one, ScoreInputs) else one.unpacked(self.signature, self._max_samples, self._model)
            for one in requests
        ]
        if padding:
            given[-1] = padded(given[-1], padding)
            counts = counts.copy()
            counts[-1] += padding
        run = self._prepared(merge(self.signature, given, counts))
        looked_up = perf_counter_ns()
        outputs = self._run(run)
        if not padding:
            return outputs, looked_up
        self._check(outputs, int(counts.sum()))
        return {name: values[:-padding] for name, values in outputs.items()}, looked_up

    def _prepared(self, merged: Merged, *, dry: bool = False) -> Callable[[], Mapping[str, Tensor]]:
        """Look up the vectors of a batch, and return the run of the network on it.

        Args:
            dry: nothing is looked up; all vectors are zero.
        """
        batch = _Batch(self._placed(merged.values), dict(merged.times), merged.sizes)
        self._compute_keys(batch)
        self._find_vectors(batch, dry)
        network, inputs, indices = self._network, {}, {}
        vectors = {one.name for one in self.signature.lookups}
        for name in self.signature.network_inputs:
            values = batch.values[_vectors_of(name) if name in vectors else name]
            inputs[name] = values if self._on_device else network.put(values)
            if name in batch.times and not self._split:
                indices[name] = network.put(_index_of(batch.times[name]))
        return self._run_of(inputs, indices)

    def _placed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put the values of features where lookups and programs read them."""
        if not self._on_device:
            return dict(values)
        put = self._network.put
        return {
            name: Keys(*[one if one is None else put(np.ascontiguousarray(one)) for one in given])
            if isinstance(given, Keys)
            else put(np.ascontiguousarray(given))
            for name, given in values.items()
        }

    def _compute_keys(self, batch: _Batch) -> None:
        """Run the keys programs: those whose inputs were all given once, on a row a request."""
        for program, network in zip(self.signature.programs, self._calls.programs, strict=True):
            times = self._shared_times(batch, program.inputs)
            if times is not None and self.signature.refused_by(len(times), batch.sizes) is not None:
                times = None
            given = {name: batch.values[name] if times is not None else self._each(batch, name) for name in program.inputs}
            if not self._on_device:
                given = {name: network.put(values) for name, values in given.items()}
            outputs = self._running(partial(network.run, given), "a keys program")
            if not self._on_device:
                outputs = network.fetch(outputs)
            for name in program.outputs:
                batch.values[name] = outputs[name]
                if times is not None:
                    batch.times[name] = times

    def _shared_times(self, batch: _Batch, names: Sequence[str]) -> KeyArray | None:
        """Return how often each row of several values counts, if it is the same of all; None if each counts once."""
        times = [batch.times.get(name) for name in names]
        first = times[0]
        if first is None or any(one is None or not np.array_equal(one, first) for one in times):
            return None
        return first

    def _each(self, batch: _Batch, name: str) -> Any:
        """Return values with a row for each sample."""
        values, times = batch.values[name], batch.times.get(name)
        if times is None:
            return values
        index = _index_of(times)
        return self._network.take(values, self._network.put(index)) if self._on_device else values[index]

    def _find_vectors(self, batch: _Batch, dry: bool) -> None:
        """Look up the vectors of all lookups."""
        asked = {place: self._ask(batch, one) for place, one in enumerate(self.signature.lookups)}
        for pooled, places in self._groups({place: one.bags is not None for place, one in asked.items()}):
            tables: dict[str, Any] = {}
            outs: dict[str, Any] = {}
            for place in places:
                lookup, one = self.signature.lookups[place], asked[place]
                flat = (int(np.prod(one.shape)), lookup.dim)
                out = self._network.empty(flat, "float32") if self._on_device and not dry else np.empty(flat, np.float32)
                if dry:
                    out.fill(0)
                    out = self._network.put(out) if self._on_device else out
                name = self._names[lookup.table]
                tables[name] = one.keys.reshape(-1) if one.bags is None else one.bags
                outs[name], batch.values[_vectors_of(lookup.name)] = out, out.reshape((*one.shape, lookup.dim))
            if not dry:
                self._look_up(tables, outs, pooled)

    def _look_up(self, tables: Mapping[str, Any], outs: Mapping[str, Any], pooled: bool) -> None:
        """Look up one lookup of each table."""
        index, on_device = self._indices.__getitem__, self._on_device
        if pooled:
            segments: Sequence[Segment] = pooled_segments(tables, outs, index, self._tables, on_cuda=on_device)
        else:
            segments = named_segments(tables, outs, index, self._indices, self._tables, on_cuda=on_device, with_found=False)
        self._lookup(segments)

    def _ask(self, batch: _Batch, lookup: Lookup) -> _Asked:
        """Find the keys of a lookup, and its bags if it pools."""
        if lookup.feature >= 0:
            given: Keys = batch.values[lookup.name]
            keys, offsets, weights = given
            if not lookup.combiner:
                rows = keys if self.signature.features[lookup.feature].hotness is not None else keys.reshape(-1)
                return _Asked(rows, rows.shape, None)
        else:
            sources = [one for one in (lookup.keys, lookup.offsets, lookup.weights) if one is not None]
            times = self._shared_times(batch, [one.name for one in sources])
            if times is not None:
                batch.times[lookup.name] = times
            keys = self._source(batch, lookup.keys, "int64", times is None)
            offsets = (
                None if lookup.offsets is None else self._source(batch, lookup.offsets, "int64", times is None).reshape(-1)
            )
            weights = None if lookup.weights is None else self._source(batch, lookup.weights, "float32", times is None)
            weights = weights if weights is None else weights.reshape(-1)
            if not lookup.combiner and not lookup.clips:
                return _Asked(keys, keys.shape, None)
            if lookup.clips:
                return _Asked(keys, keys.shape, lookup.bags_of(keys.reshape(-1, 1)))
        if offsets is not None:
            bags = lookup.bags_of(keys.reshape(-1), offsets, weights)
            return _Asked(bags.keys, (len(offsets) - lookup.include_last_offset,), bags)
        rows = keys.reshape(len(keys), -1)
        if weights is None and not lookup.pools(rows.shape[1]):
            return _Asked(keys, (len(keys),), None)
        return _Asked(rows, (len(keys),), lookup.bags_of(rows, None, weights))

    def _source(self, batch: _Batch, source: Source, dtype: str, each: bool) -> Any:
        """Return the values of a source, C-contiguous and of a dtype.

        Args:
            each: with a row for each sample.
        """
        values = self._each(batch, source.name) if each else batch.values[source.name]
        if source.column is not None:
            values = values[:, source.column]
        if not self._on_device:
            with np.errstate(invalid="ignore"):  # as C casts
                return np.ascontiguousarray(values, dtype)
        if source.column is None and self._dtypes.get(source.name) == dtype:
            return values
        converted = self._network.empty(tuple(values.shape), dtype)
        self._network.write(converted, values)
        return converted

    def prepared_zeros(self, samples: int) -> Callable[[], Mapping[str, Tensor]]:
        """Return a run of the network on zeros, without lookups."""
        zeros = self.signature.zeros(samples)
        given = {one.name: Keys(zeros[one.name]) if one.is_lookup else zeros[one.name] for one in self.signature.features}
        return self._prepared(Merged(given, sizes=self.signature.sizes), dry=True)

    def try_out(self) -> tuple[Output, ...]:
        """Run the network on zeros, without lookups, and return its outputs.

        Raises:
            NetworkError: it fails, or its outputs have not the samples as their first dimension.
        """
        with self._calls.of(self):
            return self._try_out()

    def _try_out(self) -> tuple[Output, ...]:
        shapes: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for samples in self.signature.trial_samples():
            outputs = self._run(self.prepared_zeros(samples))
            self._check(outputs, samples)
            shapes[samples] = {name: (values.dtype.name, values.shape[1:]) for name, values in outputs.items()}
        if not shapes:
            raise NetworkError(
                f"trying the network of model {self._model!r}: its guards refuse any number of samples with dense.sizes: "
                f"{', '.join(map(str, self.signature.guards))}"
            )
        (first, found), *others = shapes.items()
        for samples, other in others:
            if other != found:
                raise NetworkError(
                    f"trying the network of model {self._model!r}: its outputs are {found} for {_counted(first)}, {other} for "
                    f"{_counted(samples)}"
                )
        for name, (dtype, _) in found.items():
            if dtype not in _OUTPUT_DTYPES:
                raise NetworkError(
                    f"trying the network of model {self._model!r}: output {name!r} is of {dtype}, expected "
                    f"{', '.join(_OUTPUT_DTYPES)}"
                )
        self.outputs = tuple(Output(name, dtype, shape) for name, (dtype, shape) in found.items())
        return self.outputs

    def warm(self) -> None:
        """Keep memory for batches of `kept_forms`, and run the network on it once, before the first request does."""
        with self._calls.of(self):
            for form in kept_forms(self.signature, self._max_samples) if self._keeps else ():
                kept = self._kept_for(form)
                if kept is not None and not self._on_device:
                    self._run(kept.run)

    def _run(self, run: Callable[[], Mapping[str, Tensor]]) -> Outputs:
        return self._running(lambda: self._network.fetch(run()), "the network")

    def _running(self, run: Callable[[], T], what: str) -> T:
        try:
            with self._calls.running(self):
                return run()
        except DeviceError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise NetworkError(
                f"running {what} of model {self._model!r}: {type(error).__name__}: {lines[0][:300] if lines else ''}"
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


def _vectors_of(lookup: str) -> str:
    """Return the name of vectors within a batch: a feature with a table has keys of the same name."""
    return f"vectors of {lookup}"


def _index_of(times: KeyArray) -> KeyArray:
    """Return the row of each sample."""
    return np.repeat(np.arange(len(times)), times)


def _counted(samples: int) -> str:
    return {1: "one sample", 3: "three"}.get(samples, f"{samples} samples")


def _rounded(rows: int) -> int:
    """Round a number of rows up, by less than a sixteenth."""
    step = 1 << max(0, (rows - 1).bit_length() - _EXACT_BITS)
    return -(-rows // step) * step
