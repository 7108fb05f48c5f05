"""The deployable versions of every model, and the choice of versions to serve."""

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic_core import PydanticCustomError

from hps.configuration.load import Configuration, DenseConfig, ModelConfig, ServiceConfig, load_configuration
from hps.configuration.models import check_tables
from hps.errors import ConflictError, HPSError, ModelFileError, UnknownModelError, UnknownVersionError
from hps.models.deltas import ResidentTable, TableSource, fingerprints_of
from hps.models.files import joint_fingerprint
from hps.models.manifest import within
from hps.models.network_files import NetworkFiles
from hps.models.repository import (
    VersionFiles,
    explain_no_models,
    list_models,
    list_versions,
    network_of,
    table_sources,
    version_files,
    with_log_starts,
)
from hps.models.sources import ModelSources
from hps.versions.canary.plan import RolloutPlan
from hps.versions.checks.documents import CheckDocuments
from hps.versions.desired import DesiredVersion
from hps.versions.fleet import SERVING, Fleet, FleetChange, ServingDocument, next_document
from hps.versions.pins import Pins


@dataclass(frozen=True)
class ModelVersion:
    """A deployable version of a model. *Immutable.*

    Attributes:
        config: the model's entry, with the `version`, the `sparse_files` and the `dense` of this version.
        sources: location of each table's rows.
        network: its network.
        written_at_us: time of its rows in microseconds since 1970; 0 if unknown.
    """

    config: ModelConfig
    sources: tuple[TableSource, ...]
    network: NetworkFiles | None = None
    written_at_us: int = 0


class ModelCatalog:
    """The models of a configuration and its repository, with their versions. *Thread-safe.*

    Attributes:
        pins: the versions chosen on this replica, which override the `version_policy`.
        fleet: the serving documents, which override pins on all replicas.
        checks: the reports of checks, which say what was held and accepted.
        problems: errors of the last scan, by model.
    """

    def __init__(
        self,
        configuration: Configuration,
        sources: ModelSources,
        pins: Pins | None = None,
        fleet: Fleet | None = None,
        checks: CheckDocuments | None = None,
    ) -> None:
        self.checks = checks or CheckDocuments(sources)
        self.pins = pins or Pins()
        self.fleet = fleet or Fleet(sources)
        self._sources = sources
        self._repository = configuration.model_repository
        self._followed = configuration.update_source.type != "null"
        self._lock = threading.Lock()
        self._added = {model.model: model for model in configuration.models}
        self._found: dict[str, ModelConfig] | None = None if self._repository else {}
        self._seen: dict[str, dict[str, str]] = {}
        self.problems: dict[str, HPSError] = {}

    @property
    def names(self) -> list[str]:
        """Names of all models, as of the last scan of the repository."""
        return list(self._models())

    def scan(self) -> None:
        """Reload the repository.

        Raises:
            ModelFileError: the repository cannot be listed.
        """
        if not self._repository:
            return
        found: dict[str, ModelConfig] = {}
        problems: dict[str, HPSError] = {}
        for name, entry in list_models(self._repository, self._sources).items():
            try:
                if isinstance(entry, HPSError):
                    raise entry
                place = within(self._repository, name)
                found[name] = load_configuration({"models": [{**entry, "version_path": place}]}).models[0]
            except HPSError as error:
                problems[name] = error
        # An unreachable repository, such as an empty mount point, looks as if its models were removed. A model with a serving
        # document is therefore kept until the fleet undeploys it.
        missing = {
            name: model for name, model in (self._found or {}).items() if self.fleet.known(name) and name not in problems
        }
        self._found, self.problems = {**missing, **found}, problems

    def explain_no_models(self, wanted: Sequence[str] = ()) -> str:
        """Describe where models were searched and what was found, if none of these names, or no model at all, can be served."""
        return explain_no_models(self._repository, self._sources, wanted, self.problems)

    def add(self, model: ModelConfig) -> ModelConfig | None:
        """Add or replace the entry of a model. Returns the entry it replaces, if any."""
        with self._lock:
            known = self._added.get(model.model)
            self._added = {**self._added, model.model: model}
            return known

    def restore(self, name: str, known: ModelConfig | None) -> None:
        """Undo an `add` that returned `known`."""
        with self._lock:
            others = {other: model for other, model in self._added.items() if other != name}
            self._added = {**others, name: known} if known else others

    def model(self, name: str) -> ModelConfig:
        """Return a model's entry.

        Raises:
            UnknownModelError: there is no model of this name.
            ConfigError, ModelFileError: its entry in the repository is invalid, or the repository cannot be read.
        """
        models = self._models()
        if name not in models and self._repository:
            self.scan()
            models = self._models()
        if name in models:
            return models[name]
        if name in self.problems:
            raise self.problems[name]
        known = ", ".join(models) or "none"
        raise UnknownModelError(f"deploying model {name!r}: it is not configured; configured are: {known}")

    def versions(self, name: str) -> list[str]:
        """Return all version numbers of a model, ascending.

        Raises:
            UnknownModelError: there is no model of this name.
            ModelFileError: the versions cannot be listed.
        """
        return sorted(self._files(self.model(name))[0], key=int)

    def version(
        self, name: str, version: str, resident: Callable[[str], Sequence[ResidentTable]] = lambda version: ()
    ) -> ModelVersion:
        """Return one version of a model.

        Args:
            resident: returns the tables of a version in this process, in order; empty if none.

        Raises:
            UnknownVersionError: the model has no such version.
            ModelFileError: its files cannot be determined.
        """
        model = self.model(name)
        versions, find = self._files(model)
        if version not in versions:
            known = ", ".join(sorted(versions, key=int)) or "none"
            raise UnknownVersionError(f"deploying model {name!r}: got version {version[:40]!r}, expected one of {known}")

        def tables_of(number: str) -> Sequence[ResidentTable]:
            tables = model.model_copy(update={"version": number}).tables
            return resident(number) or [ResidentTable(table) for table in tables]

        known_files: dict[str, VersionFiles] = {}

        def files(number: str) -> VersionFiles | None:
            if number in versions and number not in known_files:
                known_files[number] = find(number)
            return known_files.get(number)

        sources, network = table_sources(version, files, tables_of), network_of(version, files)
        places = tuple(source.place for source in sources)
        dense = None if network is None else network.config
        if dense is not None:
            self._check_network(model, dense)
        config = model.model_copy(update={"version": version, "sparse_files": places, "dense": dense})
        return ModelVersion(config, sources, network, known_files[version].written_at_us)

    def _check_network(self, model: ModelConfig, dense: DenseConfig) -> None:
        """Check that the lookups of a network name the model's tables; it may come from a `version.json`."""
        most = model.maxnum_catfeature_query_per_table_per_sample
        try:
            check_tables(dense, dict(zip(model.embedding_table_names, most, strict=True)))
        except PydanticCustomError as error:
            raise ModelFileError(f"deploying model {model.model!r}: dense: {error}") from error

    def fingerprints(self, version: ModelVersion) -> tuple[str, ...]:
        """Return the fingerprint of each table's current files, without reading rows.

        Raises:
            ModelFileError: files are missing or do not fit the configuration.
        """
        tables = zip(version.sources, version.config.embedding_vecsize_per_table, strict=True)
        return fingerprints_of(list(tables), self._sources, version.config.share)

    def fingerprint(self, version: ModelVersion, tables: Sequence[str] | None = None) -> str:
        """Return the fingerprint of all files of a version.

        Args:
            tables: its `fingerprints`, if known.

        Raises:
            ModelFileError: as `fingerprints`.
        """
        network = "" if version.network is None else version.network.fingerprint(self._sources)
        return joint_fingerprint((*(self.fingerprints(version) if tables is None else tables), network))

    def desired(self, name: str, *, pinned: bool = True) -> DesiredVersion:
        """Return which version of a model should serve: by the fleet's document, else a pin, else its `version_policy`.

        Args:
            pinned: respect a pin.

        Raises:
            DatabaseError: the pin cannot be read.
            ModelFileError: the serving document cannot be read, and none is known from before.
        """
        document = self.fleet.of(name, self.model(name).version_path)
        if document is not None:
            return document.desired
        return (self.pins.of(name) if pinned else None) or DesiredVersion()

    def to_serve(self, name: str, *, pinned: bool = True, without: Container[str] = ()) -> list[str]:
        """Return the versions to serve, ascending; see `DesiredVersion.chosen`.

        Args:
            pinned: as for `desired`.
            without: versions to ignore.

        Raises:
            UnknownVersionError: no version is left to choose.
            DatabaseError, ModelFileError: as `desired`.
        """
        desired, policy = self.desired(name, pinned=pinned), self.model(name).version_policy
        versions = [number for number in self.versions(name) if number not in without]
        if not (chosen := desired.chosen(versions, policy)):
            raise UnknownVersionError(desired.unmet(name, versions, policy))
        return chosen

    def read_document(self, name: str) -> None:
        """Reload the serving document of a model, if it has a directory of versions; see `Fleet.read`."""
        if place := self.model(name).version_path:
            self.fleet.read(name, place)

    def document(self, name: str) -> ServingDocument | None:
        """Return the last known serving document of a model; None also for an unknown model.

        Raises:
            ModelFileError: it cannot be read, and none is known from before.
        """
        try:
            return self.fleet.of(name, self.model(name).version_path)
        except UnknownModelError:
            return None

    def change_fleet(
        self,
        name: str,
        by: FleetChange,
        version: str | None,
        serving: str,
        rollout: RolloutPlan | None = None,
        *,
        number: int | None = None,
    ) -> ServingDocument:
        """Write what the fleet serves of a model; see `HPS.change_fleet`.

        Args:
            serving: the version that serves on this replica; empty if none.
            rollout: as for `next_document`.
            number: of the document that the change is of; by default, any.
        """
        model = self.model(name)
        if not model.version_path:
            raise ConflictError(
                f"changing what the fleet serves of model {name!r}: it has no directory of versions, where {SERVING} belongs; "
                "set model_repository or version_path"
            )
        versions = self.versions(name)

        def change(known: ServingDocument | None) -> ServingDocument:
            if number is not None and (known is None or known.number != number):
                raise ConflictError(f"changing what the fleet serves of model {name!r}: somebody else has just changed it")
            return next_document(known, by, version, serving, versions, model.version_policy, rollout)

        return self.fleet.write(name, model.version_path, change)

    def _models(self) -> dict[str, ModelConfig]:
        if self._found is None:
            self.scan()
        return {**(self._found or {}), **self._added}

    def _files(self, model: ModelConfig) -> tuple[set[str], Callable[[str], VersionFiles]]:
        """List the version numbers of a model; also return a function from a number to its files."""
        if model.version_path:
            places = list_versions(model.version_path, self._sources, known=self._seen.get(model.version_path, ()))
            self._seen[model.version_path] = places
            find = partial(version_files, sparse_files=model.sparse_files, sources=self._sources, dense=model.dense)
            return set(places), lambda version: find(version, places[version])
        files = {
            listed.version: VersionFiles(listed.version, listed.sparse_files, listed.delta_of, network=_network(listed.dense))
            for listed in model.versions
        }
        files[model.version] = VersionFiles(model.version, model.sparse_files, network=_network(model.dense))
        if not self._followed and not model.row_ttl_files:
            return set(files), files.__getitem__
        return set(files), lambda version: with_log_starts(files[version], self._sources)


def absent_models(service: ServiceConfig, catalog: ModelCatalog) -> str:
    """Describe which models a service cannot load at its start; empty if none."""
    names = catalog.names
    if absent := sorted({*service.load_models} - {"*", *names}):
        return catalog.explain_no_models(absent)
    return "" if names or can_be_empty(service) else catalog.explain_no_models()


def can_be_empty(service: ServiceConfig) -> bool:
    """Return True if a service is ready without any model: by `allow_empty`, or since clients load its models."""
    return service.allow_empty or (service.model_control_mode == "explicit" and not service.load_models)


def _network(dense: DenseConfig | None) -> NetworkFiles | None:
    return None if dense is None else NetworkFiles(dense, dense.files)
