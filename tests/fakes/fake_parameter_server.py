"""A parameter server without tiers: dicts of vectors, and hooks to be slow or to fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hps.errors import UnknownModelError
from hps.metrics import Metrics
from hps.tensors.segments import Segment
from hps.types import TableSpec


@dataclass(frozen=True)
class FakeDeployment:
    tables: tuple[TableSpec, ...]
    devices: tuple[int, ...] = (0,)


class FakeParameterServer:
    """Answers lookups of one model; what `HPS` offers to the service.

    Attributes:
        rows: by table index, the vectors by key.
        on_lookup: called at the start of every lookup; may wait or raise.
        lookups: how many lookups started.
        closed: whether it was closed.
    """

    def __init__(self, model: str, tables: Sequence[TableSpec]) -> None:
        self.models = (model,)
        self.metrics = Metrics()
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in tables]
        self.on_lookup: Callable[[], None] = lambda: None
        self.lookups = 0
        self.closed = False
        self._deployment = FakeDeployment(tuple(tables))

    def model(self, name: str) -> FakeDeployment:
        if name not in self.models:
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed")
        return self._deployment

    def lookup_segments(self, model_name: str, segments: Sequence[Segment], device_id: int | None = None) -> None:
        self.lookups += 1
        self.on_lookup()
        tables = self.model(model_name).tables
        for segment in segments:
            for place, key in enumerate(segment.keys.tolist()):
                vector = self.rows[segment.table].get(key)
                segment.out[place] = tables[segment.table].default_value if vector is None else vector
                if segment.found is not None:
                    segment.found[place] = vector is not None

    def close(self) -> None:
        self.closed = True
