"""The engine's snapshot as a frontend reads it: models, their versions, and settings."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hps.configuration.networks import DenseConfig
from hps.configuration.transforms import TransformConfig
from hps.errors import HPSError, NotReadyError, UnknownDeviceError, UnknownModelError, UnknownVersionError
from hps.ground.memory.bounded_cache import clear_caches
from hps.ground.threads.workers import new_thread
from hps.regions import layout
from hps.regions.layout import Memory
from hps.scoring.signature import Output, signature_of
from hps.serve.frontend.rollouts import FrontendRollout
from hps.serve.http.http_metrics import InferenceCounts, counted_as
from hps.serve.logs.requests import Served
from hps.serve.protocol.request_checks import ModelTables, PublishedNetwork
from hps.serve.protocol.schemas import INFER, INFER_VERSION, LOOKUP, SCORE
from hps.tensors.transforms import Transform
from hps.types import TableSpec
from hps.versions.canary.counts import RolloutCounts

_VERSION_WORD: Final = layout.SNAPSHOT_AT // 8


class LookupTarget(NamedTuple):
    """The lookup route of a path, and the path's parameters."""

    route: str
    model_name: str
    version: str | None = None  # None: the serving one

    @property
    def is_json(self) -> bool:
        return self.route in (LOOKUP, SCORE)


def lookup_target(path: str) -> LookupTarget | None:
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return LookupTarget(INFER, model)
        case ["", "v1", "models", model, "lookup"]:
            return LookupTarget(LOOKUP, model)
        case ["", "v1", "models", model, "score"]:
            return LookupTarget(SCORE, model)
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return LookupTarget(INFER_VERSION, model, version)
    return None


@dataclass(eq=False, slots=True)
class FrontendVersion:
    """A deployed version of a model. *Immutable*, except for the turns and counts."""

    tables: ModelTables
    deployment_ids: dict[int, int]  # in descriptors, by device
    counts: InferenceCounts  # for Triton's statistics
    turn: int = 0  # number of lookups that named no device
    rollout: FrontendRollout | None = None  # the one under way, of which it is either version
    devices: tuple[int, ...] = field(init=False)  # those that take turns

    def __post_init__(self) -> None:
        self.exclude_lost(())

    def exclude_lost(self, lost: Collection[int]) -> None:
        """Exclude lost devices from the turns, unless there are no others."""
        self.devices = tuple(device for device in self.deployment_ids if device not in lost) or tuple(self.deployment_ids)

    @property
    def ready(self) -> bool:
        """Whether this process has imported its transform, if it has one."""
        transform = self.tables.transform
        return transform is None or transform.loaded

    def uncounted(self) -> "FrontendVersion":
        """Return it for requests whose answers no client gets: they have counts of their own."""
        version = FrontendVersion(self.tables, self.deployment_ids, InferenceCounts(), rollout=self.rollout)
        self.turn += 1
        version.devices, version.turn = self.devices, self.turn
        return version

    def device(self, device: int | None) -> int:
        """Return the device for a lookup; by default the next one.

        Raises:
            UnknownDeviceError: the model is not deployed there.
            NotReadyError: the engine has no room for the deployment.
        """
        devices = self.devices
        if device is None and devices:
            self.turn += 1
            return devices[self.turn % len(devices)]
        if not devices:
            raise NotReadyError(f"model {self.tables.name!r} is not ready: too many deployments are served")
        if device not in self.deployment_ids:
            got = f"got device {device!r}, expected one of its deployed_device_list {list(self.deployment_ids)}"
            raise UnknownDeviceError(f"looking up model {self.tables.name!r}: {got}")
        return device


class Published:
    """Reads the engine's snapshot, and passes each to `apply` before its models are used. *One event loop.*"""

    def __init__(self, memory: Memory, apply: Callable[[dict[str, Any]], None]) -> None:
        self._memory = memory
        self.written = memory.longs[_VERSION_WORD : _VERSION_WORD + 1]  # (1,), the version that the engine has written last
        self._apply = apply
        self.version = -1  # of the snapshot that was read last
        self.blocked = "the service is starting"  # why no lookups are answered; empty if some are
        self.counts: dict[str, InferenceCounts] = {}  # for Triton's statistics, by `counted_as`
        self._complete = False  # once no transform was being imported
        self._models: dict[str, dict[str, FrontendVersion]] = {}
        self._serving: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._rollouts: dict[str, FrontendRollout] = {}  # by model
        self._inherited: dict[str, RolloutCounts] = {}  # by id of the rollout
        self.rollout_counts: dict[str, tuple[str, RolloutCounts]] = {}  # by model: id of the last rollout, and its counts

    def poll(self) -> None:
        if self.written[0] == self.version:
            return
        # Written under a sequence lock: None means that the engine is writing it now. The last snapshot stays in use until the
        # next poll, and `can_reuse` refuses to repeat a lookup meanwhile, since `written` has changed.
        found = layout.read_text(self._memory, 0, layout.MOST_SNAPSHOT_BYTES)
        if found is None or found[0] == self.version:
            return
        self.version, snapshot = found
        self._serving, self._reasons, self.blocked = snapshot["serving"], snapshot["reasons"], snapshot["blocked"]
        self._apply(snapshot)
        models: dict[str, dict[str, FrontendVersion]] = {}
        for name, versions in snapshot["models"].items():
            models[name] = {}
            for number, published in versions.items():
                deployment_ids = {int(device): deployment_id for device, deployment_id in published["deployment_ids"]}
                version = self._models.get(name, {}).get(number)
                if version is None or version.deployment_ids != deployment_ids:
                    tables = tuple(TableSpec(**table) for table in published["tables"])
                    counts = self.counts.setdefault(counted_as(name, number, deployment_ids), InferenceCounts())
                    network = _network(name, published["network"], tables) if published.get("network") else None
                    try:
                        transform = _transform(name, published.get("transform"))
                    except (HPSError, ValueError) as error:  # this process does not know what the engine does
                        self._reasons[name] = str(error)
                        continue
                    known = ModelTables(name, tables, number, published["keys_per_sample"], network, transform)
                    version = FrontendVersion(known, deployment_ids, counts)
                version.exclude_lost(published["lost"])
                models[name][number] = version
        self._apply_rollouts(snapshot["rollouts"], models)
        gone = {version.tables for versions in self._models.values() for version in versions.values()}
        self._models = models
        if gone - {version.tables for versions in models.values() for version in versions.values()}:
            clear_caches()  # their entries refer to the tables of versions that are gone
        if not self.blocked:  # a restarted engine has no models at first
            self.counts = {
                key: version.counts
                for name, versions in models.items()
                for number, version in versions.items()
                if (key := counted_as(name, number, version.deployment_ids)) in self.counts
            }

    def inherit_rollout(self, identity: str, values: Sequence[float]) -> None:
        """Keep the counts of a rollout that the process which this one replaces has made."""
        counts = self._inherited[identity] = RolloutCounts()
        counts.add(values)

    def _apply_rollouts(self, found: dict[str, Any], models: dict[str, dict[str, FrontendVersion]]) -> None:
        for rollout in self._rollouts.values():
            rollout.ended = True
        for name, versions in models.items():
            for number, version in versions.items():
                # The serving version still answers what the new one of an ended rollout fails.
                if version.rollout is not None and (version is version.rollout.old or number == self._serving.get(name)):
                    version.rollout = None
        self._rollouts = {}
        for name, published in found.items():
            identity, versions = published["id"], models.get(name, {})
            old, new = versions.get(published["serving"]), versions.get(published["version"])
            if old is None or new is None:  # this process does not know its transform
                continue
            known, counts = self.rollout_counts.get(name, ("", RolloutCounts()))
            if known != identity:
                counts = self._inherited.pop(identity, RolloutCounts())
            self.rollout_counts[name] = identity, counts
            old.rollout = new.rollout = self._rollouts[name] = FrontendRollout(name, published, old, new, counts)
        self.rollout_counts = {name: counted for name, counted in self.rollout_counts.items() if name in models or self.blocked}

    def importing(self) -> list[str]:
        """Return the models with a transform that is being imported."""
        return [
            name
            for name, versions in self._models.items()
            if any((of := version.tables.transform) is not None and of.importing for version in versions.values())
        ]

    def unready_reason(self) -> str:
        """Return which transforms are being imported; empty as soon as once none was: others serve while a later one is."""
        importing = [] if self._complete else self.importing()
        self._complete = not importing
        return f"the transform of model {importing[0]!r} is being imported" if importing else ""

    def version_of(self, target: LookupTarget, served: Served | None = None) -> FrontendVersion:
        """Return the version that answers a lookup.

        Args:
            served: its request, which a canary may give to its new version; None: check the names alone.

        Raises:
            NotReadyError, UnknownModelError, UnknownVersionError: there is none.
        """
        if self.blocked:
            raise NotReadyError(f"the parameter server is not ready: {self.blocked}")
        name, number = target.model_name, target.version
        versions = self._models.get(name)
        if not versions or name not in self._serving:
            if reason := self._reasons.get(name):
                raise NotReadyError(f"model {name!r} is not ready: {reason}")
            known = ", ".join(self._serving) or "none"
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed; deployed: {known}")
        if number is None:
            if self._rollouts and served is not None and (rollout := self._rollouts.get(name)) is not None:
                return rollout.version_of(served)
            number = self._serving[name]
        if (found := versions.get(number)) is None:
            if number == self._serving[name] and (reason := self._reasons.get(name)):
                raise NotReadyError(f"model {name!r} is not ready: {reason}")
            known = ", ".join(versions)
            raise UnknownVersionError(f"looking up model {name!r}: got version {number[:40]!r}, deployed: {known}")
        return found


def _transform(model: str, published: dict[str, Any] | None) -> Transform | None:
    if published is None:
        return None
    transform = Transform(TransformConfig.model_validate(published), model, trusted=True, imports=False)
    # A module may take minutes to import, which would delay all clients of this event loop.
    new_thread(f"transform-{model}", transform.load, lasting=False).start()
    return transform


def _network(model: str, published: dict[str, Any], tables: Sequence[TableSpec]) -> PublishedNetwork:
    signature = signature_of(DenseConfig.model_validate(published["dense"]), tables)
    outputs = tuple(Output(output["name"], output["dtype"], tuple(output["shape"])) for output in published["outputs"])
    return PublishedNetwork(model, signature, outputs, published["max_samples"], tuple(table.table_name for table in tables))
