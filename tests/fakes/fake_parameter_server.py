"""A parameter server without tiers: dicts of vectors, and hooks to be slow or to fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from hps.cache.cpu.cache import NumpyCache
from hps.errors import UnknownModelError, UnknownVersionError
from hps.statistics.metrics import Metrics
from hps.tensors.batch import Batch
from hps.types import TableSpec
from hps.versions.canary.records import RolloutRecords
from hps.versions.canary.rollouts import Rollouts
from hps.versions.desired import DesiredVersion
from hps.versions.kept_files import KeptFiles
from hps.versions.live_models import LiveModels, VersionInfo


@dataclass(frozen=True)
class FakeDeployment:
    tables: tuple[TableSpec, ...]
    devices: tuple[int, ...] = (0,)
    version: str = "1"
    keys_per_sample: int = 1
    one_device: int | None = None
    scores: None = None
    aging: None = None
    device_caches: tuple[()] = ()
    refuses: str = ""

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(
            model=self.tables[0].model_name,
            embedding_table_names=[table.table_name for table in self.tables],
            transform=None,
        )

    @property
    def dims(self) -> list[int]:
        return [table.dim for table in self.tables]

    @property
    def sessions(self) -> dict[int, SimpleNamespace]:
        return dict.fromkeys(self.devices, SimpleNamespace(lost=False))


class FakeParameterServer:
    """Answers lookups of one model; what `HPS` offers to the service.

    Attributes:
        rows: by table index, the vectors by key.
        on_lookup: called at the start of every lookup; may wait or raise.
        lookups: how many lookups started.
        closed: whether it was closed.
        degraded: what it says that lookups do without.
    """

    def __init__(self, model: str, tables: Sequence[TableSpec]) -> None:
        self.models = (model,)
        self.cache_class = NumpyCache  # its loop leaves all to Python
        self.metrics = Metrics()
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in tables]
        self.on_lookup: Callable[[], None] = lambda: None
        self.records = False
        self.lookups = 0
        self.closed = False
        self.degraded: list[str] = []
        self.checked: dict[str, object] = {}
        self._deployment = FakeDeployment(tuple(tables))
        self.live = LiveModels({model: self._deployment})  # type: ignore[dict-item]
        records = RolloutRecords(KeptFiles(None, "rollouts"))
        self.rollouts = Rollouts(self.live, None, records, self.metrics)  # type: ignore[arg-type]  # it starts none

    def model(self, name: str, version: str | None = None) -> FakeDeployment:
        if name not in self.models:
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed")
        if version not in (None, self._deployment.version):
            raise UnknownVersionError(
                f"looking up model {name!r}: got version {version!r}, deployed: {self._deployment.version}"
            )
        return self._deployment

    def versions(self, name: str) -> list[VersionInfo]:
        return [VersionInfo(name, self.model(name).version, "serving", 0.0, 0, {})]

    def pin(self, name: str) -> DesiredVersion | None:
        return None

    def rollout(self, name: str) -> None:
        return None

    def fleet(self, name: str) -> None:
        return None

    def read_documents(self) -> None:
        """There are none."""

    def follow(self, progress: object = None) -> dict[str, Exception | None]:
        return {}

    def lookup_batch(self, deployment: FakeDeployment, batch: Batch, device_id: int | None = None) -> int:
        self.lookups += 1
        self.on_lookup()
        for number, (table, keys, out) in enumerate(zip(batch.tables, batch.keys, batch.outs, strict=True)):
            for place, key in enumerate(keys.tolist()):
                vector = self.rows[table].get(key)
                out[place] = deployment.tables[table].default_value if vector is None else vector
                if batch.founds and (found := batch.founds[number]) is not None:
                    found[place] = vector is not None
        return 0

    def close(self) -> None:
        self.closed = True
