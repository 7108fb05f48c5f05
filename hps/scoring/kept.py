"""Batches of requests of one form, in memory that is kept between batches.

For some forms of batches, all memory from keys to the inputs of the network is kept (`memory.py`), and their lookups are
prepared. On a CUDA device a batch whose keys the device can answer is one CUDA graph (`captured.py`). Any other is one copy of
its inputs, a launch of the keys programs, prepared lookups, and one launch of the network.
"""

import logging
from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np

from hps.ground.kernels.numba_kernels import compile_kernels
from hps.scoring.captured import CapturedBatches
from hps.scoring.features import ScoreInputs
from hps.scoring.forms import BatchForm, can_be_kept, kept_forms, lay_out, room_for, rounded
from hps.scoring.memory import KeptMemory, Memories
from hps.scoring.packing import PackedRequest, gather, gather_into, rows_of
from hps.scoring.runner import Outputs, Runner
from hps.types import KeyArray

_log = logging.getLogger(__name__)
_MOST_KEPT = 16
_UNUSED = 1000  # batches after which the memory of a form may be given to another
_MOST_BOUND = 256
_EXACT_BITS = 5  # of a number of rows that is rounded
# Of vectors. Smaller batches of one request take new memory on the CPU, which costs 35 us less than gathering into kept memory.
_SMALL_BYTES = 1 << 18


class KeptBatches:
    """Scores batches in memory that is kept. *One call at a time*."""

    def __init__(self, runner: Runner, max_samples: int) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._max_samples = max_samples
        self._allocator = Memories(runner, max_samples)
        self._captured = CapturedBatches(runner, self._allocator, max_samples)
        self._memories: dict[BatchForm, KeptMemory] = {}
        # On a device the network also runs on rows that fill a batch up, which needs samples that do not depend on each other.
        keeps = can_be_kept(self._signature) and (self._signature.pads or not runner.on_device)
        self._most_kept = _MOST_KEPT if keeps else 0
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
                self._captured.capture_all(kept)

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
        if (scored := self._captured.score(kept, requests, counts, layout.sizes, sizes)) is not None:
            return scored
        filled = rows
        # On a device, new numbers of rows cost more than extra rows: each is prepared once. So they are rounded up by less
        # than a sixteenth, and the first rows of the batch fill the rest.
        if on_device:
            most = np.where(
                once, min(rounded(len(requests), _EXACT_BITS), form.requests), min(rounded(total, _EXACT_BITS), samples)
            )
            filled = np.where(most * layout.widths > kept.limits, rows, most)
        key = tuple(filled.tolist()), layout.sizes
        if (bound := kept.bound.get(key)) is None:
            if len(kept.bound) >= _MOST_BOUND:
                del kept.bound[next(iter(kept.bound))]
            bound = kept.bound[key] = self._allocator.bind(kept, total, *key, exact=not on_device)
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
                kept = self._allocator.allocate(form)
            except (MemoryError, RuntimeError) as error:  # new memory for one batch may still be available
                self._most_kept = len(self._memories)
                _log.warning(
                    "model %r: no memory is kept for batches of %d samples: %s", self._runner.model, form.samples, error
                )
                return None
            if kept is None:
                self._most_kept = 0
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
