"""Batches of requests of one form, in memory that is kept between batches.

For some forms of batches, all memory from keys to the inputs of the network is kept, and their lookups are prepared. On a CUDA
device a batch is one CUDA graph: one copy of its inputs, keys programs, queries of resident keys, the network on rows that are
repeated there, and one copy of its outputs. There is a graph for each of a few numbers of rows; the first rows of a batch fill
the rest. A batch with a key that is not resident is looked up as any other, and is then a launch of the keys programs, prepared
lookups, and a launch of the network.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import SAMPLES
from hps.engine.session import ResidentLookups
from hps.errors import HPSError, NetworkError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.networks.base import Network, Tensor
from hps.scoring.features import ScoreInputs
from hps.scoring.forms import BatchForm, BatchLayout, aligned, can_be_kept, kept_forms, lay_out, room_for
from hps.scoring.packing import PackedRequest, gather, gather_into, rows_of
from hps.scoring.runner import Outputs, Runner
from hps.scoring.signature import Source
from hps.tensors.bags import pooling_of
from hps.tensors.batch import Batch
from hps.types import IndexArray, KeyArray

_log = logging.getLogger(__name__)
_Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # by feature, rows of a batch, and elements of a row
_MOST_KEPT = 16
_UNUSED = 1000  # batches after which the memory of a form may be given to another
_MOST_BOUND = 256
_EXACT_BITS = 5  # of a number of rows that is rounded
_SAMPLE_BITS, _REQUEST_BITS = (
    2,
    1,
)  # the same, in graphs of whole batches: 1, 2, 3, 4, 6, 8, 12 samples, and 1, 2, 4, 8 requests
_MOST_CAPTURED = 32  # graphs of one form
_CAPTURED_AFTER = 4  # batches of the same numbers of rows, for which no graph was captured from the start
_MOST_SKIPPED = 64  # batches that do not use the graphs, since keys of the last ones were not resident
# Of vectors. Smaller batches of one request take new memory on the CPU, which costs 35 us less than gathering into kept memory.
_SMALL_BYTES = 1 << 18


@dataclass(slots=True)
class _Bound:
    """Lookups and runs prepared for batches with the same numbers of rows and keys.

    Attributes:
        starts: by feature, offset of its values in the memory of inputs.
        sizes: by lookup, number of keys.
        target, source: the part of this memory that is used, and the same part of `KeptMemory.source`; None on the CPU.
        keys: computes and copies keys; None if they are read as they are given.
        run: of the network.
    """

    starts: IndexArray
    sizes: Sequence[int]
    target: Tensor
    source: Tensor
    keys: Callable[[], Mapping[str, Tensor]] | None
    lookups: list[Batch]
    run: Callable[[], Mapping[str, Tensor]]


@dataclass(slots=True)
class _Captured:
    """A graph of whole batches with up to the same numbers of rows.

    Attributes:
        starts: see `_Bound`.
        filled: by feature, bytes that are filled.
        samples: rows of samples.
        run: returns the outputs, in memory of the host.
        lookups: those that it has.
        keys: by table, keys of a sample, and keys of a request.
    """

    starts: IndexArray
    filled: IndexArray
    samples: int
    run: Callable[[], Mapping[str, Tensor]]
    lookups: ResidentLookups
    keys: Mapping[int, tuple[int, int]]


@dataclass(slots=True, eq=False)
class KeptMemory:
    """Memory of batches of one form.

    Attributes:
        staged, source: where inputs are gathered, as an array, and as what the network copies to `memory`.
        memory: where lookups and network read them; `staged` itself on the CPU.
        starts, limits: as arrays, those of the layout.
        index: (samples,) int64, in `staged`: the request of each sample; empty if nothing is given once.
        read_index: the same where the network reads it.
        regions: of features that are read as they are, by name.
        buffers: keys and weights that are computed or copied, by place of the lookup and source.
        vectors: by lookup.
        keys, run: of the keys programs and of the network, on all rows; on a CUDA device, captured.
        used: number of the last batch.
        bound: by numbers of rows of each input, and of elements of a row.
        captured: graphs of whole batches, likewise; None if there cannot be one.
        asked: likewise, how many batches had no graph.
    """

    form: BatchForm
    layout: BatchLayout
    staged: npt.NDArray[np.uint8]
    source: Tensor
    memory: Tensor
    index: KeyArray
    read_index: Tensor
    regions: dict[str, Tensor]
    buffers: dict[tuple[int, Source], Tensor]
    vectors: list[Tensor]
    starts: IndexArray = field(init=False)
    limits: IndexArray = field(init=False)
    keys: Callable[[], Mapping[str, Tensor]] | None = None
    run: Callable[[], Mapping[str, Tensor]] = dict
    used: int = 0
    bound: dict[_Rows, _Bound] = field(default_factory=dict)
    captured: dict[_Rows, _Captured | None] = field(default_factory=dict)
    asked: Counter[_Rows] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.starts, self.limits = np.array(self.layout.starts), np.array(self.layout.limits)

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes + self.layout.buffer_bytes


class KeptBatches:
    """Scores batches in memory that is kept. *One call at a time*."""

    def __init__(self, runner: Runner, max_samples: int) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._max_samples = max_samples
        self._programs = dict(zip(self._signature.programs, runner.calls.programs, strict=True))
        self._memories: dict[BatchForm, KeptMemory] = {}
        # On a device the network also runs on rows that fill a batch up, which needs samples that do not depend on each other.
        keeps = can_be_kept(self._signature) and (self._signature.pads or not runner.on_device)
        self._most_kept = _MOST_KEPT if keeps else 0
        paddings = any(lookup.padding_key is not None for lookup in self._signature.lookups)  # which only a lookup counts
        self._captures = runner.on_device and not (self._signature.guards or paddings)
        self._skipped = self._skips = 0  # batches that do not use graphs: so far, and in total
        self._most_bytes = 0  # of forms with other sizes than those of `dense.sizes`
        self._batches = 0  # that were scored in it
        forms = [] if runner.on_device else kept_forms(self._signature, 1)
        self._sample_bytes = max((lay_out(self._signature, form, 1).buffer_bytes for form in forms), default=0)
        compile_kernels(gather)

    @property
    def memories(self) -> Sequence[KeptMemory]:
        return list(self._memories.values())

    def warm(self) -> None:
        """Keep memory for `kept_forms`, and run the network on it once."""
        forms = kept_forms(self._signature, self._max_samples)
        if self._signature.inner:
            layouts = [lay_out(self._signature, form, self._max_samples) for form in forms]
            self._most_bytes = 2 * sum(layout.size_bytes + layout.buffer_bytes for layout in layouts)
        for form in forms:
            kept = self._kept_for(form)
            if kept is not None and not self._runner.on_device:
                self._runner.run(kept.run)
            elif kept is not None:
                self._capture_all(kept)

    def release(self) -> None:
        """Free all memory, and keep none any more."""
        self._most_kept, self._memories = 0, {}

    def score(self, requests: Sequence[ScoreInputs | PackedRequest], counts: KeyArray) -> tuple[Outputs | None, int]:
        """Score requests of one form; no outputs if forms differ, no memory is left, or new memory costs less."""
        alone = len(requests) == 1 or type(requests[0]) is ScoreInputs
        if alone and not self._runner.on_device and int(counts.sum()) * self._sample_bytes < _SMALL_BYTES:
            return None, 0
        if not self._most_kept or (found := rows_of(requests)) is None:
            return None, 0
        layout, by_request = found
        total, rows = int(counts.sum()), by_request.sum(axis=0)
        each = (by_request == counts[:, None]).all(axis=0)
        one_form = (each | (rows == len(requests))).all()  # else some give an input once, and some for each sample
        if not one_form or total > self._max_samples or 0 in layout.sizes:
            return None, 0
        samples, once = room_for(total, self._max_samples), tuple((~each).tolist())
        form = BatchForm(samples, room_for(len(requests), samples) if any(once) else 0, once, requests[0].form)
        if (kept := self._kept_for(form)) is None or (rows * layout.widths > kept.limits).any():
            return None, 0
        if self._is_refused(kept, total, len(requests)):
            return None, 0
        network, on_device = self._runner.network, self._runner.on_device
        sizes = by_request * layout.widths
        if self._captures and (scored := self._score_captured(kept, requests, counts, layout.sizes, sizes)) is not None:
            return scored
        filled = rows
        # On a device, new numbers of rows cost more than extra rows: each is prepared once. So they are rounded up by less
        # than a sixteenth, and the first rows of the batch fill the rest.
        if on_device:
            most = np.where(once, min(_rounded(len(requests)), form.requests), min(_rounded(total), samples))
            filled = np.where(most * layout.widths > kept.limits, rows, most)
        key = tuple(filled.tolist()), layout.sizes
        if (bound := kept.bound.get(key)) is None:
            if len(kept.bound) >= _MOST_BOUND:
                del kept.bound[next(iter(kept.bound))]
            bound = kept.bound[key] = self._bound(kept, total, *key, exact=not on_device)
        if kept.index.size:
            kept.index[:total] = np.repeat(np.arange(len(requests)), counts)
        gather_into(requests, sizes, kept.staged, bound.starts, filled * layout.widths)
        if on_device:
            network.write(bound.target, bound.source)
        if bound.keys is not None:
            self._runner.running(bound.keys, "a keys program")
        for batch in bound.lookups:
            self._runner.lookup(batch)
        looked_up = perf_counter_ns()
        outputs = self._runner.run(bound.run)
        if on_device:
            return {name: values[:total] for name, values in outputs.items()}, looked_up
        return {name: values.copy() for name, values in outputs.items()}, looked_up  # a network may return its inputs

    def _score_captured(
        self,
        kept: KeptMemory,
        requests: Sequence[ScoreInputs | PackedRequest],
        counts: KeyArray,
        sizes: tuple[int, ...],
        by_request: IndexArray,  # (requests, inputs), bytes
    ) -> tuple[Outputs, int] | None:
        """Score requests by one graph; None without one, or if a key was not resident."""
        if self._skipped < self._skips:
            self._skipped += 1
            return None
        total, runner = int(counts.sum()), self._runner
        if (captured := self._captured_for(kept, total, len(requests), sizes)) is None:
            return None
        if kept.index.size:
            kept.index[:total] = np.repeat(np.arange(len(requests)), counts)
            kept.index[total : captured.samples] = 0  # those of an earlier batch may name rows that this one lacks
        gather_into(requests, by_request, kept.staged, captured.starts, captured.filled)
        captured.lookups.order()
        launched = perf_counter_ns()
        try:
            outputs = runner.run(captured.run)
        except NetworkError as error:  # if the device is lost, a lookup reports it
            _log.warning("model %r: scoring without a CUDA graph: %s", runner.model, error)
            self._captures = False
            return None
        if captured.lookups.missed():
            self._skips, self._skipped = min(2 * self._skips + 1, _MOST_SKIPPED), 0
            return None
        self._skips = 0
        keys = {table: total * each + len(requests) * once for table, (each, once) in captured.keys.items()}
        captured.lookups.count(keys)
        return {name: values[:total].copy() for name, values in outputs.items()}, launched

    def _captured_for(self, kept: KeptMemory, total: int, requests: int, sizes: tuple[int, ...]) -> _Captured | None:
        """Return the graph of batches of so many samples; None without one. It is captured for numbers that come again."""
        form = kept.form
        samples = min(_rounded(total, _SAMPLE_BITS), form.samples)
        once = min(_rounded(requests, _REQUEST_BITS), form.requests)
        key = tuple([once if given else samples for given in form.once]), sizes
        if key in kept.captured:
            return kept.captured[key]
        if len(kept.asked) >= _MOST_BOUND:
            kept.asked.clear()
        kept.asked[key] += 1
        return self._capture(kept, samples, key) if kept.asked[key] >= _CAPTURED_AFTER else None

    def _capture_all(self, kept: KeptMemory) -> None:
        """Capture the graphs of a form; of bags of any size, for those of the most keys."""
        form, most = kept.form, self._max_samples
        sizes = tuple(
            [
                max(1, feature.max_keys // most) if feature.bags else feature.hotness or prod(shape[1:])
                for feature, shape in zip(self._signature.features, kept.layout.shapes, strict=True)
            ]
        )
        for requests in _numbers(form.requests or 1, _REQUEST_BITS):
            for samples in _numbers(form.samples, _SAMPLE_BITS):
                fits = requests < 2 * samples and room_for(samples, most) == form.samples
                if fits and self._captures and len(kept.captured) < _MOST_CAPTURED:
                    self._capture(kept, samples, (tuple([requests if once else samples for once in form.once]), sizes))

    def _capture(self, kept: KeptMemory, samples: int, key: _Rows) -> _Captured | None:
        """Capture the graph of whole batches of so many rows; None if there cannot be one."""
        if len(kept.captured) >= _MOST_CAPTURED:
            del kept.captured[next(iter(kept.captured))]
        found: _Captured | None = None
        if (lookups := self._runner.resident()) is None:
            self._captures = False
            return None
        try:
            with self._runner.calls.running(self._runner):
                found = self._new_captured(kept, samples, key, lookups)
        except (HPSError, RuntimeError) as error:
            _log.info("model %r: batches of %d samples have no CUDA graph: %s", self._runner.model, samples, error)
        lookups.missed()  # the runs before the capture had no keys of a request
        kept.captured[key] = found
        return found

    def _new_captured(self, kept: KeptMemory, samples: int, key: _Rows, lookups: ResidentLookups) -> _Captured | None:
        network, (rows, sizes) = self._runner.network, key
        dtypes = ["int64" if feature.is_lookup else feature.dtype for feature in self._signature.features]
        widths = [size * np.dtype(dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        filled = np.array(rows, np.int64) * np.array(widths, np.int64)
        if (filled > kept.limits).any():
            return None
        bound = self._bound(kept, samples, *key, exact=True)
        keys: dict[int, tuple[int, int]] = {}
        for lookup, n in zip(self._signature.lookups, bound.sizes, strict=True):
            each, once = keys.get(lookup.table, (0, 0))
            if lookup.name in kept.layout.once:
                once += n // next(count for count, given in zip(rows, kept.form.once, strict=True) if given)
            else:
                each += n // samples
            keys[lookup.table] = each, once
        kept.staged[:] = 0
        network.write(kept.memory, kept.source)
        delivered = {}
        for name, values in network.fetch(bound.run()).items():
            _, memory = network.staging(values.nbytes)
            delivered[name] = network.part(memory, 0, values.dtype.name, values.shape)

        def run() -> Mapping[str, Tensor]:
            network.write(bound.target, bound.source)
            if bound.keys is not None:
                bound.keys()
            for batch in bound.lookups:
                lookups.enqueue(batch)
            for name, values in bound.run().items():
                network.write(delivered[name], values)
            return delivered

        return _Captured(bound.starts, filled, samples, network.fixed(run, delivers=True), lookups, keys)

    def _is_refused(self, kept: KeptMemory, samples: int, requests: int) -> bool:
        """Return whether the guards refuse numbers of rows that programs would run with."""
        if not self._signature.guards:
            return False
        form = kept.form
        sizes = dict(zip(self._signature.inner, form.sizes, strict=True))
        rows = {form.samples if self._runner.on_device else samples}
        if any(kept.layout.once.issuperset(program.inputs) for program in self._signature.programs):
            rows.add(form.requests if self._runner.on_device else requests)
        return any(self._signature.refused_by(count, sizes) is not None for count in rows)

    def _kept_for(self, form: BatchForm) -> KeptMemory | None:
        """Return the memory of batches of a form, allocated if necessary; None if there is no room for another form."""
        self._batches += 1
        if (kept := self._memories.get(form)) is None:
            while not self._has_room(form):
                oldest = min(self._memories.values(), key=lambda memory: memory.used, default=None)
                if oldest is None or self._batches - oldest.used < _UNUSED:
                    return None
                del self._memories[oldest.form]
            try:
                kept = self._new_memory(form)
            except (MemoryError, RuntimeError) as error:  # new memory for one batch may still be available
                self._most_kept = len(self._memories)
                _log.warning(
                    "model %r: no memory is kept for batches of %d samples: %s", self._runner.model, form.samples, error
                )
                return None
            if kept is None:
                return None
            self._memories[form] = kept
        kept.used = self._batches
        return kept

    def _has_room(self, form: BatchForm) -> bool:
        """Return True if memory may be kept for one more form. The number of forms has no bound: sizes are free."""
        if len(self._memories) >= self._most_kept:
            return False
        if not self._most_bytes:
            return True
        layout = lay_out(self._signature, form, self._max_samples)
        used_bytes = sum(memory.size_bytes for memory in self._memories.values())
        return used_bytes + layout.size_bytes + layout.buffer_bytes <= self._most_bytes

    def _new_memory(self, form: BatchForm) -> KeptMemory | None:
        """Allocate the memory of batches of a form, and on a CUDA device capture the runs of programs and network on it.

        Returns:
            None if keys are computed that have no row for each sample.
        """
        runner, network = self._runner, self._runner.network
        computed = self._computed(form)
        if computed is None:
            self._most_kept = 0
            return None
        layout = lay_out(self._signature, form, self._max_samples, computed)
        staged, source = network.staging(layout.size_bytes)
        staged[:] = 0
        memory = network.empty((layout.size_bytes,), "uint8") if runner.on_device else staged
        index = self._part(memory, 0, "int64", (layout.indices,))
        regions = {
            feature.name: self._part(memory, start, feature.dtype, shape)
            for feature, start, shape in zip(self._signature.features, layout.starts, layout.shapes, strict=True)
            if feature.name not in layout.keys_only
        }
        buffers = {(buffer.lookup, buffer.source): self._empty(buffer.shape, buffer.dtype) for buffer in layout.buffers}
        vectors = [self._empty(shape, "float32") for shape in layout.vectors]
        staged_index = np.ndarray((layout.indices,), np.int64, staged)
        kept = KeptMemory(form, layout, staged, source, memory, staged_index, index, regions, buffers, vectors)
        if runner.on_device:
            network.write(memory, source)
            keys = self._keys_run(kept, None, 0)
            with runner.calls.running(runner):
                kept.keys = None if keys is None else network.fixed(keys)
                kept.run = network.fixed(self._network_run(kept, None, 0))
        else:
            kept.run = self._network_run(kept, None, 0)
        return kept

    def _computed(self, form: BatchForm) -> dict[str, tuple[int, ...]] | None:
        """Run the keys programs on zeros, and return the shape of a row of each output; None if one has another first size."""
        found: dict[str, tuple[int, ...]] = {}
        known = {**self._signature.sizes, **dict(zip(self._signature.inner, form.sizes, strict=True)), SAMPLES: form.samples}
        features = {feature.name: feature for feature in self._signature.features}
        for program, network in self._programs.items():
            zeros = {name: np.zeros(features[name].shape_with(known), features[name].dtype) for name in program.inputs}
            given = {name: network.put(values) for name, values in zeros.items()}
            for name, values in self._runner.running(lambda: network.run(given), "a keys program").items():  # noqa: B023
                if not len(values.shape) or values.shape[0] != form.samples:
                    return None
                found[name] = tuple(values.shape[1:])
        return found

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self._runner.network.empty(shape, dtype) if self._runner.on_device else np.zeros(shape, dtype)

    def _part(self, memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor at a byte offset of the memory of inputs."""
        if self._runner.on_device:
            return self._runner.network.part(memory, start, dtype, shape)
        return np.ndarray(shape, dtype, memory, start)

    def _keys_run(
        self, kept: KeptMemory, rows: Mapping[str, int] | None, samples: int
    ) -> Callable[[], Mapping[str, Tensor]] | None:
        """Return a function that computes and copies the keys of the memory of a form, or of some rows; None without any.

        Args:
            rows: as for `_inputs`.
        """
        if not kept.buffers:
            return None
        runner, once = self._runner, kept.layout.once
        given, index = self._inputs(kept, rows, samples)
        programs = []
        for program, network in self._programs.items():
            inputs = {name: given[name] for name in program.inputs}
            repeated = () if once.issuperset(program.inputs) else once.intersection(program.inputs)
            programs.append((network, self._run_of(network, inputs, repeated, index)))
        copies: list[tuple[Tensor, Source, bool]] = []
        for (place, source), target in kept.buffers.items():
            lookup = self._signature.lookups[place]
            target = target if rows is None else target[: rows[lookup.name]]
            copies.append((target, source, source.name in once and lookup.name not in once))

        def run() -> Mapping[str, Tensor]:
            values = dict(given)
            for network, call in programs:
                outputs = call()
                values.update(outputs if runner.on_device else network.fetch(outputs))
            for target, source, repeats in copies:
                found = values[source.name] if source.column is None else values[source.name][:, source.column]
                if repeats:
                    found = runner.network.take(found, index) if runner.on_device else found[index]
                runner.copy(target, found)
            return {}

        return run

    def _network_run(
        self, kept: KeptMemory, rows: Mapping[str, int] | None, samples: int
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Return the run of the network on the memory of a form, or on some rows of it.

        Args:
            rows: as for `_inputs`.
        """
        given, index = self._inputs(kept, rows, samples)
        for lookup, vectors in zip(self._signature.lookups, kept.vectors, strict=True):
            given[lookup.name] = vectors if rows is None else vectors[: rows[lookup.name]]
        inputs = {name: given[name] for name in self._signature.network_inputs}
        return self._run_of(self._runner.network, inputs, kept.layout.once.intersection(inputs), index)

    def _inputs(self, kept: KeptMemory, rows: Mapping[str, int] | None, samples: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return the features that are read unchanged, and the index.

        Args:
            rows: by name of the feature or lookup; None: all.
        """
        if rows is None:
            return dict(kept.regions), kept.read_index
        return {name: values[: rows[name]] for name, values in kept.regions.items()}, kept.read_index[:samples]

    def _run_of(
        self, network: Network, inputs: Mapping[str, Tensor], repeated: Collection[str], index: Tensor
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Return the run of a network on inputs, of which some have a row a request."""
        if not self._runner.on_device:
            inputs, index = {name: network.put(values) for name, values in inputs.items()}, network.put(index)
        return self._runner.run_of(network, inputs, dict.fromkeys(repeated, index))

    def _bound(self, kept: KeptMemory, samples: int, rows: Sequence[int], sizes: Sequence[int], *, exact: bool) -> _Bound:
        """Prepare lookups and run of batches in the memory that is kept.

        Args:
            rows, sizes: by place of the feature, rows, and elements of a row.
            exact: keys programs and network run on these rows, rather than on all that there is room for.
        """
        runner, starts, at = self._runner, kept.starts.copy(), kept.layout.keys_at
        keys_only: dict[str, Tensor] = {}
        by_name = {feature.name: count for feature, count in zip(self._signature.features, rows, strict=True)}
        for place, feature in enumerate(self._signature.features):
            if feature.name not in kept.regions:
                n = rows[place] * sizes[place]
                keys_only[feature.name] = self._part(kept.memory, at, "int64", (n,))
                starts[place] = at
                at += aligned(8 * n)
        for program in self._signature.programs:
            count = self._rows_of(kept, by_name, program.inputs)
            by_name |= dict.fromkeys(program.outputs, count)
        parts = []
        for place, lookup in enumerate(self._signature.lookups):
            count = self._rows_of(
                kept, by_name, [source.name for source in (lookup.keys, lookup.weights) if source is not None]
            )
            keys, weights = (self._values(kept, keys_only, place, source, count) for source in (lookup.keys, lookup.weights))
            by_name[lookup.name] = count if lookup.feature < 0 else by_name[lookup.name]
            parts.append(self._batch(kept, place, count, keys, weights))
        groups = runner.groups({place: bool(part.poolings) for place, part in enumerate(parts)})
        lookups = [Batch.merged([parts[place] for place in places]) for _, places in groups]
        for batch in lookups:
            batch.kept = True
        target = source = None
        if runner.on_device:
            target, source = (runner.network.part(memory, 0, "uint8", (at,)) for memory in (kept.memory, kept.source))
        keys_run, run = kept.keys, kept.run
        if exact:
            keys_run, run = self._keys_run(kept, by_name, samples), self._network_run(kept, by_name, samples)
        return _Bound(starts, [part.sizes[0] for part in parts], target, source, keys_run, lookups, run)

    def _rows_of(self, kept: KeptMemory, rows: Mapping[str, int], names: Sequence[str]) -> int:
        """Return the number of rows computed from several values: that of values with a row a sample, if any."""
        return rows[next((name for name in names if name not in kept.layout.once), names[0])]

    def _values(
        self, kept: KeptMemory, keys_only: Mapping[str, Tensor], place: int, source: Source | None, rows: int
    ) -> Tensor | None:
        """Return the keys or weights of a lookup, flat."""
        if source is None:
            return None
        if (buffer := kept.buffers.get((place, source))) is not None:
            return buffer[:rows].reshape(-1)
        return keys_only[source.name] if source.name in keys_only else kept.regions[source.name][:rows].reshape(-1)

    def _batch(self, kept: KeptMemory, place: int, rows: int, keys: Tensor, weights: Tensor | None) -> Batch:
        lookup, n = self._signature.lookups[place], prod(keys.shape)
        out = kept.vectors[place][:rows].reshape(-1, lookup.dim)
        if lookup.clips:
            pooling = pooling_of(lookup.name, lookup.bags_of(keys), n, (n, 1), self._runner.on_device)
        elif lookup.combiner and (weights is not None or lookup.pools(n // rows)):
            bags = lookup.bags_of(keys, None, weights)
            pooling = pooling_of(lookup.name, bags, n, (rows, n // rows), self._runner.on_device)
        else:
            pooling = None
        return Batch.of(lookup.table, keys, out, None, n, pooling)


def _rounded(rows: int, bits: int = _EXACT_BITS) -> int:
    """Round a number of rows up, to one of so many bits; by default by less than a sixteenth."""
    step = 1 << max(0, (rows - 1).bit_length() - bits)
    return -(-rows // step) * step


def _numbers(most: int, bits: int) -> Iterator[int]:
    """Yield the numbers that are rounded to, up to the most, which is the last."""
    number = 0
    while number < most:
        number = min(_rounded(number + 1, bits), most)
        yield number
