"""The memory of batches of one form, from keys to the inputs of the network, and what reads and writes it."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import SAMPLES
from hps.engine.session import GraphLookups
from hps.networks.base import Network, Tensor
from hps.scoring.forms import BatchForm, BatchLayout, aligned, lay_out
from hps.scoring.runner import Runner
from hps.scoring.signature import Source
from hps.tensors.bags import pooling_of
from hps.tensors.batch import Batch
from hps.types import IndexArray, KeyArray

Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""By feature, rows of a batch, and elements of a row."""


@dataclass(slots=True)
class Bound:
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
class CapturedBatch:
    """A graph of whole batches with up to the same numbers of rows.

    Attributes:
        starts: see `Bound`.
        filled: by feature, bytes that are filled.
        samples: rows of samples.
        run: returns the outputs, in memory of the host.
        keys: by table, keys of a sample, and keys of a request.
        launched: by table, keys of a launch.
        used: number of the last batch.
    """

    starts: IndexArray
    filled: IndexArray
    samples: int
    run: Callable[[], Mapping[str, Tensor]]
    keys: Mapping[int, tuple[int, int]]
    launched: Mapping[int, int]
    used: int = 0

    def keys_of(self, samples: int, requests: int) -> dict[int, int]:
        """Return, by table, the keys of a batch, without those that fill it up."""
        return {table: samples * each + requests * once for table, (each, once) in self.keys.items()}


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
        lookups: those of graphs of whole batches; None without any.
        captured: these graphs, by the same.
        asked: likewise, how many batches had no graph; negative if there could be none.
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
    bound: dict[Rows, Bound] = field(default_factory=dict)
    lookups: GraphLookups | None = None
    captured: dict[Rows, CapturedBatch] = field(default_factory=dict)
    asked: Counter[Rows] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.starts, self.limits = np.array(self.layout.starts), np.array(self.layout.limits)

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes + self.layout.buffer_bytes


class Memories:
    """Allocates the memory of forms, and prepares lookups and runs in it. *Thread-safe.*"""

    def __init__(self, runner: Runner, max_samples: int) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._max_samples = max_samples
        self._programs = dict(zip(self._signature.programs, runner.calls.programs, strict=True))

    def allocate(self, form: BatchForm) -> KeptMemory | None:
        """Allocate the memory of batches of a form, and on a CUDA device capture the runs of programs and network on it.

        Returns:
            None if keys are computed that have no row for each sample.
        """
        runner, network = self._runner, self._runner.network
        computed = self._computed(form)
        if computed is None:
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

    def bind(self, kept: KeptMemory, samples: int, rows: Sequence[int], sizes: Sequence[int], *, exact: bool) -> Bound:
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
        return Bound(starts, [part.sizes[0] for part in parts], target, source, keys_run, lookups, run)

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
