"""Batches of any requests, in new memory: merges inputs, computes keys, looks vectors up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hps.networks.base import Tensor
from hps.scoring.forms import aligned
from hps.scoring.merging import Keys, Merged
from hps.scoring.runner import Runner, index_of
from hps.scoring.signature import NetworkLookup, Source
from hps.tensors.bags import Bags
from hps.tensors.batch import named_batch, pooled_batch
from hps.types import KeyArray


@dataclass(slots=True)
class _ScoredBatch:
    """The values of a batch, by name of a feature, an output of a keys program, or a lookup.

    Attributes:
        values: in the memory of lookups: on a CUDA device tensors, else arrays; of a feature with a table, `Keys`.
        times, sizes: see `Merged`.
    """

    values: dict[str, Any]
    times: dict[str, KeyArray]
    sizes: Mapping[str, int]


class _LookupRequest(NamedTuple):
    """The keys of one lookup of a batch.

    Attributes:
        keys: int64, of any shape.
        shape: of the vectors, without their width.
        bags: None if a vector is found for each key.
    """

    keys: Any
    shape: tuple[int, ...]
    bags: Bags | None


_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class NewBatches:
    """Prepares batches in new memory. *Thread-safe.*"""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._names = [table.table_name for table in runner.tables]
        self._indices: dict[Any, Any] = {name: place for place, name in enumerate(self._names)}
        self._dtypes = {feature.name: feature.dtype for feature in runner.signature.features if not feature.is_lookup}
        self._expands = not any(feature.index for feature in runner.signature.features)  # else the network does

    def prepared(self, merged: Merged, *, dry: bool = False) -> Callable[[], Mapping[str, Tensor]]:
        """Look up the vectors of a batch, and return the run of the network on it.

        Args:
            dry: nothing is looked up; all vectors are zero.
        """
        batch = _ScoredBatch(self._placed(merged.values), dict(merged.times), merged.sizes)
        self._compute_keys(batch)
        self._find_vectors(batch, dry)
        network, inputs, indices = self._runner.network, {}, {}
        repeats: dict[bytes, Tensor] = {}  # what is given once is mostly repeated alike
        vectors = {lookup.name for lookup in self._signature.lookups}
        for name in self._signature.network_inputs:
            values = batch.values[_vectors_of(name) if name in vectors else name]
            inputs[name] = values if self._runner.on_device else network.put(values)
            if name in batch.times and self._expands:
                times = batch.times[name]
                if (alike := times.tobytes()) not in repeats:
                    repeats[alike] = network.put(index_of(times))
                indices[name] = repeats[alike]
        return self._runner.run_of(network, inputs, indices)

    def _placed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put the values of features where lookups and programs read them: on a device, by one copy."""
        if not self._runner.on_device:
            return dict(values)
        network = self._runner.network
        arrays = [array for given in values.values() for array in (given if isinstance(given, Keys) else (given,))]
        ends = [0, *accumulate([0 if array is None else aligned(array.nbytes) for array in arrays])]
        staged, source = network.staging(ends[-1])
        memory = network.empty((ends[-1],), "uint8")
        parts: list[Tensor] = []
        for array, start in zip(arrays, ends[:-1], strict=True):
            if array is None:
                parts.append(None)
                continue
            np.ndarray(array.shape, array.dtype, staged, start)[...] = array
            parts.append(network.part(memory, start, array.dtype.name, array.shape))
        network.write(memory, source)
        placed = iter(parts)
        return {
            name: Keys(*[next(placed) for _ in given]) if isinstance(given, Keys) else next(placed)
            for name, given in values.items()
        }

    def _compute_keys(self, batch: _ScoredBatch) -> None:
        """Run the keys programs: those whose inputs were all given once, on a row a request."""
        for program, network in zip(self._signature.programs, self._runner.calls.programs, strict=True):
            times = self._shared_times(batch, program.inputs)
            if times is not None and self._signature.refused_by(len(times), batch.sizes) is not None:
                times = None
            given = {name: batch.values[name] if times is not None else self._each(batch, name) for name in program.inputs}
            if not self._runner.on_device:
                given = {name: network.put(values) for name, values in given.items()}
            outputs = self._runner.running(partial(network.run, given), "a keys program")
            if not self._runner.on_device:
                outputs = network.fetch(outputs)
            for name in program.outputs:
                batch.values[name] = outputs[name]
                if times is not None:
                    batch.times[name] = times

    def _shared_times(self, batch: _ScoredBatch, names: Sequence[str]) -> KeyArray | None:
        """Return the repetitions of each row that several values share; None if they differ, or rows count once."""
        times = [batch.times.get(name) for name in names]
        first = times[0]
        if first is None or any(time is None or not np.array_equal(time, first) for time in times):
            return None
        return first

    def _each(self, batch: _ScoredBatch, name: str) -> Any:
        """Return values with a row for each sample."""
        values, times = batch.values[name], batch.times.get(name)
        if times is None:
            return values
        index = index_of(times)
        return self._runner.network.take(values, self._runner.network.put(index)) if self._runner.on_device else values[index]

    def _find_vectors(self, batch: _ScoredBatch, dry: bool) -> None:
        requests = {place: self._lookup_request(batch, request) for place, request in enumerate(self._signature.lookups)}
        for pooled, places in self._runner.groups({place: request.bags is not None for place, request in requests.items()}):
            tables: dict[str, Any] = {}
            outs: dict[str, Any] = {}
            for place in places:
                lookup, request = self._signature.lookups[place], requests[place]
                flat = (int(np.prod(request.shape)), lookup.dim)
                out = (
                    self._runner.network.empty(flat, "float32")
                    if self._runner.on_device and not dry
                    else np.empty(flat, np.float32)
                )
                if dry:
                    out.fill(0)
                    out = self._runner.network.put(out) if self._runner.on_device else out
                name = self._names[lookup.table]
                tables[name] = request.keys.reshape(-1) if request.bags is None else request.bags
                outs[name], batch.values[_vectors_of(lookup.name)] = out, out.reshape((*request.shape, lookup.dim))
            if not dry:
                self._run_lookup(tables, outs, pooled)

    def _run_lookup(self, tables: Mapping[str, Any], outs: Mapping[str, Any], pooled: bool) -> None:
        """Look up each table once."""
        index, on_device = self._indices.__getitem__, self._runner.on_device
        tables_of = self._runner.tables
        if pooled:
            batch = pooled_batch(tables, outs, index, tables_of, on_cuda=on_device)
        else:
            batch = named_batch(tables, outs, index, self._indices, tables_of, on_cuda=on_device, with_found=False)
        self._runner.lookup(batch)

    def _lookup_request(self, batch: _ScoredBatch, lookup: NetworkLookup) -> _LookupRequest:
        """Find the keys of a lookup, and its bags if it pools."""
        if lookup.feature >= 0:
            given: Keys = batch.values[lookup.name]
            keys, offsets, weights = given
            if not lookup.combiner:
                rows = keys if self._signature.features[lookup.feature].hotness is not None else keys.reshape(-1)
                return _LookupRequest(rows, rows.shape, None)
        else:
            times = None
            if batch.times:
                sources = (lookup.keys, lookup.offsets, lookup.weights)
                times = self._shared_times(batch, [source.name for source in sources if source is not None])
            if times is not None:
                batch.times[lookup.name] = times
            keys = self._source(batch, lookup.keys, _INT64, times is None)
            offsets = None if lookup.offsets is None else self._source(batch, lookup.offsets, _INT64, times is None).reshape(-1)
            weights = None if lookup.weights is None else self._source(batch, lookup.weights, _FLOAT32, times is None)
            weights = weights if weights is None else weights.reshape(-1)
            if not lookup.combiner and not lookup.clips:
                return _LookupRequest(keys, keys.shape, None)
            if lookup.clips:
                return _LookupRequest(keys, keys.shape, lookup.bags_of(keys.reshape(-1, 1)))
        if offsets is not None:
            bags = lookup.bags_of(keys.reshape(-1), offsets, weights)
            return _LookupRequest(bags.keys, (len(offsets) - lookup.include_last_offset,), bags)
        rows = keys.reshape(len(keys), -1)
        if weights is None and not lookup.pools(rows.shape[1]):
            return _LookupRequest(keys, (len(keys),), None)
        return _LookupRequest(rows, (len(keys),), lookup.bags_of(rows, None, weights))

    def _source(self, batch: _ScoredBatch, source: Source, dtype: "np.dtype[Any]", each: bool) -> Any:
        """Return the values of a source, C-contiguous and of a dtype.

        Args:
            each: with a row for each sample.
        """
        values = self._each(batch, source.name) if each else batch.values[source.name]
        if source.column is not None:
            values = values[:, source.column]
        if not self._runner.on_device:
            if values.dtype == dtype and values.flags.c_contiguous:
                return values
            converted = np.empty(values.shape, dtype)
            self._runner.copy(converted, values)
            return converted
        if source.column is None and self._dtypes.get(source.name) == dtype.name:
            return values
        converted = self._runner.network.empty(tuple(values.shape), dtype.name)
        self._runner.copy(converted, values)
        return converted

    def prepared_zeros(self, samples: int, sizes: Mapping[str, int] | None = None) -> Callable[[], Mapping[str, Tensor]]:
        """Return a run of the network on zeros, without lookups.

        Args:
            sizes: default: those of the configuration.
        """
        sizes = self._signature.sizes if sizes is None else sizes
        zeros = self._signature.zeros(samples, sizes)
        given = {
            feature.name: Keys(zeros[feature.name]) if feature.is_lookup else zeros[feature.name]
            for feature in self._signature.features
        }
        return self.prepared(Merged(given, sizes=sizes), dry=True)


def _vectors_of(lookup: str) -> str:
    """Return the name of vectors within a batch: a feature with a table has keys of the same name."""
    return f"vectors of {lookup}"
