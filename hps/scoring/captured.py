"""Whole batches as CUDA graphs: a copy of the inputs, keys programs, lookups, the network, a copy of scores.

There is a graph for each of a few numbers of rows, most of them from the start, and the first rows of a batch fill the rest. A
batch with a key that the device could not answer is left to `kept.py`.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from time import perf_counter_ns
from typing import Final

import numpy as np

from hps.engine.session import GraphLookups
from hps.errors import HPSError, NetworkError
from hps.networks.base import Tensor
from hps.scoring.features import ScoreInputs
from hps.scoring.forms import room_for, rounded
from hps.scoring.memory import CapturedBatch, KeptMemory, Memories, Rows
from hps.scoring.packing import PackedRequest, gather_into
from hps.scoring.runner import Outputs, Runner
from hps.types import IndexArray, KeyArray

_log = logging.getLogger(__name__)
_SAMPLE_BITS: Final = 2  # of a number of samples that is rounded: 1, 2, 3, 4, 6, 8, 12
_REQUEST_BITS: Final = 1  # likewise, of requests: 1, 2, 4, 8
_MOST_USERS: Final = 4  # requests of a batch that give inputs once, for which graphs are captured from the start
_MOST_CAPTURED: Final = 32  # graphs of one form
_UNUSED: Final = 1000  # batches after which a graph may be given up for another
_MOST_ASKED: Final = 256
_CAPTURED_AFTER: Final = 4  # batches of the same numbers of rows, for which no graph was captured from the start
_AGAIN_AFTER: Final = 10_000  # batches, for which there could be no graph
_MOST_SKIPPED: Final = 64  # batches that do not use the graphs, since the last ones had keys that the device could not answer


class CapturedBatches:
    """Scores whole batches by CUDA graphs on the memory that is kept. *One call at a time*."""

    def __init__(self, runner: Runner, memories: Memories, max_samples: int) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._memories = memories
        self._max_samples = max_samples
        self._batches = 0
        self._skipped = self._skips = 0  # batches that do not use graphs: so far, and in total
        paddings = any(lookup.padding_key is not None for lookup in self._signature.lookups)  # which only a lookup counts
        self._enabled = runner.on_device and not (self._signature.guards or paddings)

    def score(
        self,
        kept: KeptMemory,
        requests: Sequence[ScoreInputs | PackedRequest],
        counts: KeyArray,
        sizes: tuple[int, ...],
        by_request: IndexArray,  # (requests, inputs), bytes
    ) -> tuple[Outputs, int] | None:
        """Score requests by one graph; None without one, or if the device could not answer a key."""
        if not self._enabled:
            return None
        if self._skipped < self._skips:
            self._skipped += 1
            return None
        total, runner = int(counts.sum()), self._runner
        self._batches += 1
        captured = self._captured_for(kept, total, len(requests), sizes)
        if captured is None or (lookups := kept.lookups) is None:
            return None
        captured.used = self._batches
        if kept.index.size:
            kept.index[:total] = np.repeat(np.arange(len(requests)), counts)
            kept.index[total : captured.samples] = 0  # those of an earlier batch may name rows that this one lacks
        gather_into(requests, by_request, kept.staged, captured.starts, captured.filled)
        if not self._order(kept, lookups):
            return None
        launched_ns = perf_counter_ns()
        try:
            outputs = runner.run(captured.run)
        except NetworkError as error:  # if the device is lost, a lookup reports it
            _log.warning("model %r: scoring without a CUDA graph: %s", runner.model, error)
            self._enabled = False
            return None
        keys = captured.keys_of(total, len(requests))
        if not lookups.succeeded(keys, captured.launched):
            self._skips, self._skipped = min(2 * self._skips + 1, _MOST_SKIPPED), 0
            return None
        self._skips = 0
        return {name: values[:total].copy() for name, values in outputs.items()}, launched_ns

    def _order(self, kept: KeptMemory, lookups: GraphLookups) -> bool:
        """Order the next launch after all modifications that have returned. Return False, and drop all graphs, if invalid."""
        if lookups.order():
            return True
        kept.lookups = None
        kept.captured.clear()
        return False

    def _captured_for(self, kept: KeptMemory, total: int, requests: int, sizes: tuple[int, ...]) -> CapturedBatch | None:
        """Return the graph of batches of so many samples; None without one. It is captured for numbers that come again."""
        form = kept.form
        samples = min(rounded(total, _SAMPLE_BITS), form.samples)
        once = min(rounded(requests, _REQUEST_BITS), form.requests)
        key = tuple([once if given else samples for given in form.once]), sizes
        if (captured := kept.captured.get(key)) is not None:
            return captured
        if len(kept.asked) >= _MOST_ASKED:
            kept.asked.clear()
        kept.asked[key] += 1
        return self._capture(kept, samples, key) if kept.asked[key] >= _CAPTURED_AFTER else None

    def capture_all(self, kept: KeptMemory) -> None:
        """Capture the graphs of a form; of bags of any size, for those of the most keys."""
        form, sizes = kept.form, self._most_sizes(kept)
        for requests in _numbers(min(form.requests or 1, _MOST_USERS), _REQUEST_BITS):
            for samples in _numbers(form.samples, _SAMPLE_BITS):
                fits = requests < 2 * samples and room_for(samples, self._max_samples) == form.samples
                if fits and self._enabled and len(kept.captured) < _MOST_CAPTURED:
                    self._capture(kept, samples, (tuple([requests if once else samples for once in form.once]), sizes))

    def _most_sizes(self, kept: KeptMemory) -> tuple[int, ...]:
        """Return the elements of a row of each feature; of bags of any size, the most that there is room for."""
        features = zip(self._signature.features, kept.layout.shapes, kept.layout.limits, strict=True)
        return tuple(
            [
                max(1, limit // (8 * shape[0])) if feature.bags else feature.hotness or prod(shape[1:])
                for feature, shape, limit in features
            ]
        )

    def _capture(self, kept: KeptMemory, samples: int, key: Rows) -> CapturedBatch | None:
        """Capture the graph of whole batches of so many rows; None if there cannot be one, or others are in use."""
        if len(kept.captured) >= _MOST_CAPTURED:
            oldest = min(kept.captured, key=lambda known: kept.captured[known].used)
            if self._batches - kept.captured[oldest].used < _UNUSED:
                return None
            del kept.captured[oldest]
        kept.staged[:] = 0  # values of another form could name rows that there are not
        if kept.lookups is not None:  # another graph of the same lookups would make those of replaced tables look valid
            self._order(kept, kept.lookups)
        try:
            if (lookups := self._prepared(kept)) is None:
                self._enabled = False
                return None
            with self._runner.calls.running(self._runner):
                captured = self._new_captured(kept, samples, key, lookups)
            lookups.forget()  # the runs before the capture
            if captured is not None:
                captured.used = self._batches
                kept.captured[key] = captured
                return captured
        except (HPSError, RuntimeError) as error:
            _log.info("model %r: batches of %d samples have no CUDA graph: %s", self._runner.model, samples, error)
        kept.asked[key] = -_AGAIN_AFTER
        return None

    def _prepared(self, kept: KeptMemory) -> GraphLookups | None:
        """Return lookups for the graphs of a form, with room for the largest."""
        if kept.lookups is None and (lookups := self._runner.graph_lookups()) is not None:
            self._runner.network.write(kept.memory, kept.source)
            rows, most = tuple(kept.form.rows), self._most_sizes(kept)
            for sizes in dict.fromkeys((most, self._single_keys(most))):
                for batch in self._memories.bind(kept, kept.form.samples, rows, sizes, exact=True).lookups:
                    lookups.prepare(batch)
            kept.lookups = lookups
        return kept.lookups

    def _single_keys(self, most: tuple[int, ...]) -> tuple[int, ...]:
        """Return the elements of a row of each feature if bags have one key each, which is not pooled but looked up."""
        bags = {lookup.feature for lookup in self._signature.lookups if lookup.pools(2) and not lookup.pools(1)}
        return tuple([1 if place in bags else size for place, size in enumerate(most)])

    def _new_captured(self, kept: KeptMemory, samples: int, key: Rows, lookups: GraphLookups) -> CapturedBatch | None:
        network, (rows, sizes) = self._runner.network, key
        dtypes = ["int64" if feature.is_lookup else feature.dtype for feature in self._signature.features]
        widths = [size * np.dtype(dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        filled = np.array(rows, np.int64) * np.array(widths, np.int64)
        if (filled > kept.limits).any():
            return None
        bound = self._memories.bind(kept, samples, *key, exact=True)
        keys: dict[int, tuple[int, int]] = {}
        launched: Counter[int] = Counter()
        for lookup, n in zip(self._signature.lookups, bound.sizes, strict=True):
            each, once = keys.get(lookup.table, (0, 0))
            if lookup.name in kept.layout.once:
                once += n // next(count for count, given in zip(rows, kept.form.once, strict=True) if given)
            else:
                each += n // samples
            keys[lookup.table] = each, once
            launched[lookup.table] += n
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

        return CapturedBatch(bound.starts, filled, samples, network.fixed(run, owner=self), keys, launched)


def _numbers(most: int, bits: int) -> Iterator[int]:
    """Yield the numbers that are rounded to, up to the most, which is the last."""
    number = 0
    while number < most:
        number = min(rounded(number + 1, bits), most)
        yield number
