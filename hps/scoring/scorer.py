"""One call of a network on the vectors of one deployment: compute keys, look up, pool, run.

Requests of the same form are merged in memory that is kept between batches (`kept.py`); all others in new memory
(`general.py`).
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias

import numpy as np

from hps.engine.session import GraphLookups
from hps.errors import HPSError, NetworkError
from hps.networks.base import Tensor
from hps.scoring.features import ScoreInputs
from hps.scoring.general import NewBatches
from hps.scoring.kept import KeptBatches
from hps.scoring.merging import merge, merged_sizes, padded
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import PackedRequest
from hps.scoring.runner import Outputs, Runner
from hps.scoring.signature import Output, Signature
from hps.tensors.batch import Batch
from hps.types import KeyArray, TableSpec

__all__ = ["Outputs", "Request", "ScoreTimes", "Scorer"]

Request: TypeAlias = ScoreInputs | PackedRequest
_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
_MOST_WAIT_S = 0.002  # of a batch on a device, for the kept memory
_OUTPUT_DTYPES = ("float32", "float16", "int64", "int32", "bool", "float64")


@dataclass(frozen=True, slots=True)
class ScoreTimes:
    """When a batch started, had its vectors, and had its scores, as `perf_counter_ns`. *Immutable.*"""

    began_ns: int
    looked_up_ns: int
    ended_ns: int


class _OtherShapes(NamedTuple):
    """Sizes, and the shapes of a sample's outputs with them."""

    sizes: Mapping[str, int]
    shapes: _Shapes


class Scorer:
    """Answers requests from one deployment on one device. *Thread-safe.*

    One call at a time uses the kept memory. A concurrent one uses new memory: on the CPU at once, on a device after 2 ms.

    Args:
        model: its name, for errors.
        lookup, graph_lookups: see `Runner`.
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
        lookup: Callable[[Batch], None],
        graph_lookups: Callable[[], GraphLookups | None] = lambda: None,
        *,
        on_device: bool = False,
        refuse_nan: bool = True,
        max_samples: int = 1,
        outputs: Sequence[Output] = (),
    ) -> None:
        self._model = model
        self.signature = signature
        self._calls = network
        self._refuse_nan = refuse_nan
        self._max_samples = max_samples
        self.outputs = tuple(outputs)
        self._runner = Runner(model, tables, signature, network, lookup, graph_lookups, on_device=on_device)
        self._new = NewBatches(self._runner)
        self._kept = KeptBatches(self._runner, max_samples)
        self._in_use = threading.Lock()  # of the kept memory

    def score(self, requests: Sequence[Request], *, refuse_nan: bool = True) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        """Score requests in one call of the network.

        Args:
            refuse_nan: refuse scores that are not numbers, if so configured.

        Returns:
            Outputs of each request, or why it has none; and times.

        Raises:
            HPSError: a tier failed. NetworkError: the network failed. NotReadyError: it is closed.
        """
        with self._calls.of(self._runner):
            return self._score(requests, refuse_nan)

    @property
    def is_busy(self) -> bool:
        """Whether a call uses the kept memory."""
        return self._in_use.locked()

    def network_seconds(self) -> dict[int, float]:
        """Return how long each call under way has been in the network, by thread; 0.0 while it is elsewhere."""
        return self._calls.seconds(self._runner)

    def _score(self, requests: Sequence[Request], refuse_nan: bool) -> tuple[list[Outputs | HPSError], ScoreTimes]:
        began = perf_counter_ns()
        counts = np.fromiter((request.samples for request in requests), np.int64, len(requests))
        outputs: Outputs | None = None
        looked_up = began
        padding = self._padding(requests, int(counts.sum())) if self.signature.guards else 0
        # Kept memory serves one batch at a time. On the CPU a concurrent batch does not wait for it: new memory costs an
        # allocation, waiting costs a run of the network. A device runs both one after the other, whatever their memory. A
        # padded batch never uses it, since its last request is repeated.
        if not padding and self._in_use.acquire(timeout=_MOST_WAIT_S if self._runner.on_device else 0):
            try:
                outputs, looked_up = self._kept.score(requests, counts)
            finally:
                self._in_use.release()
        if outputs is None:
            outputs, looked_up = self._score_any(requests, counts, padding)
        self._check(outputs, int(counts.sum()))
        checked = self._checked(outputs) if refuse_nan else outputs
        answers: list[Outputs | HPSError] = []
        if len(requests) == 1:
            answers.append(checked)
        else:
            start = 0
            for samples in counts.tolist():
                part = {name: values[start : start + samples] for name, values in outputs.items()}
                answers.append(part if checked is outputs else self._checked(part))
                start += samples
        return answers, ScoreTimes(began, looked_up, perf_counter_ns())

    def _padding(self, requests: Sequence[Request], samples: int) -> int:
        """Return how often to repeat the last sample, to get a number of samples that the network accepts.

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

    def _score_any(self, requests: Sequence[Request], counts: KeyArray, padding: int = 0) -> tuple[Outputs, int]:
        """Score requests of any forms in new memory.

        Args:
            padding: how often the last sample is repeated; its scores are dropped.
        """
        given = [
            request if isinstance(request, ScoreInputs) else request.unpacked(self.signature, self._max_samples, self._model)
            for request in requests
        ]
        if padding:
            given[-1] = padded(self.signature, given[-1], padding)
            counts = counts.copy()
            counts[-1] += padding
        run = self._new.prepared(merge(self.signature, given, counts))
        looked_up = perf_counter_ns()
        outputs = self._runner.run(run)
        if not padding:
            return outputs, looked_up
        self._check(outputs, int(counts.sum()))
        return {name: values[:-padding] for name, values in outputs.items()}, looked_up

    def try_out(self) -> tuple[Output, ...]:
        """Run the network on zeros, without lookups, and return its outputs.

        Raises:
            NetworkError: it fails, or its outputs have not the samples as their first dimension.
        """
        with self._calls.of(self._runner):
            return self._try_out()

    def _try_out(self) -> tuple[Output, ...]:
        shapes: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for samples in self.signature.trial_samples():
            outputs = self._runner.run(self._new.prepared_zeros(samples))
            self._check(outputs, samples)
            shapes[samples] = {name: (values.dtype.name, values.shape[1:]) for name, values in outputs.items()}
        if not shapes:
            raise NetworkError(
                f"trying the network of model {self._model!r}: its guards refuse any number of samples with dense.sizes: "
                f"{', '.join(map(str, self.signature.guards))}"
            )
        (first, found), *repeats = shapes.items()
        for samples, outcome in repeats:
            if outcome != found:
                raise NetworkError(
                    f"trying the network of model {self._model!r}: its outputs are {found} for {_counted(first)}, {outcome} "
                    f"for {_counted(samples)}"
                )
        for name, (dtype, _) in found.items():
            if dtype not in _OUTPUT_DTYPES:
                raise NetworkError(
                    f"trying the network of model {self._model!r}: output {name!r} is of {dtype}, expected "
                    f"{', '.join(_OUTPUT_DTYPES)}"
                )
        free = self._free_shapes(first, {name: shape for name, (_, shape) in found.items()})
        self.outputs = tuple(Output(name, dtype, free[name]) for name, (dtype, _) in found.items())
        return self.outputs

    def _free_shapes(self, samples: int, shapes: _Shapes) -> Mapping[str, tuple[int | str, ...]]:
        """Find how the shapes of outputs depend on named sizes, by runs with other sizes.

        Each size of an output is assumed to be a sum of multiples of them; a service refuses to answer with any other shape.

        Args:
            shapes: with the sizes of the configuration, without the samples.
        """
        known = self.signature.sizes
        if not known or ((trial := self._shapes_with(samples, known)) is not None and trial.shapes == shapes):
            return shapes
        terms: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for name, size in known.items():
            if (trial := self._shapes_with(samples, [name])) is None:
                continue
            for output, shape in shapes.items():
                for axis, (width, moved) in enumerate(zip(shape, trial.shapes[output], strict=False)):
                    if times := (moved - width) // (trial.sizes[name] - size):
                        terms.setdefault((output, axis), []).append((times, name))

        def free(output: str, axis: int, width: int) -> int | str:
            if not (of := terms.get((output, axis))):
                return width
            rest = width - sum(times * known[name] for times, name in of)
            text = " + ".join([name if times == 1 else f"{times}*{name}" for times, name in of])
            return f"{text} + {rest}" if rest else text

        return {name: tuple(free(name, axis, width) for axis, width in enumerate(shape)) for name, shape in shapes.items()}

    def _shapes_with(self, samples: int, names: Collection[str]) -> "_OtherShapes | None":
        """Run the network on zeros with other values of the named sizes; None if it runs with none."""
        if (sizes := self.signature.other_sizes(samples, names)) is None:
            return None
        try:
            outputs = self._runner.run(self._new.prepared_zeros(samples, sizes))
        except NetworkError:  # the network has a guard that its configuration lacks
            return None
        return _OtherShapes(sizes, {name: values.shape[1:] for name, values in outputs.items()})

    def warm(self) -> None:
        """Allocate memory for the known forms of batches, and run the network on it, before the first request."""
        with self._calls.of(self._runner):
            self._kept.warm()

    def release(self) -> None:
        """Free the kept memory, once no further requests come."""
        self._kept.release()

    def prepared_zeros(self, samples: int) -> Callable[[], Mapping[str, Tensor]]:
        return self._new.prepared_zeros(samples)

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


def _counted(samples: int) -> str:
    return {1: "one sample", 3: "three"}.get(samples, f"{samples} samples")
