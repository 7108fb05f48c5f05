"""Which versions of which models can be deployed, and which of them are to be served."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hps.configuration.load import Configuration, ModelConfig, load_configuration
from hps.errors import HPSError, UnknownModelError, UnknownVersionError
from hps.models.deltas import HeldTable, TableSource, fingerprint_of
from hps.models.manifest import within
from hps.models.repository import VersionFiles, list_models, list_versions, log_starts_beside, table_sources, version_files
from hps.models.sources import ModelSources


@dataclass(frozen=True)
class ModelVersion:
    """A version of a model that can be deployed. *Immutable.*

    Attributes:
        config: the model's entry, with the `version` and `sparse_files` of this version.
        sources: where the rows of each table are.
    """

    config: ModelConfig
    sources: tuple[TableSource, ...]


class ModelCatalog:
    """The models of a configuration and of its repository, and their versions. *Thread-safe.*

    Args:
        configuration: has the models, or names the repository that has them.
        sources: where model files come from.

    Attributes:
        problems: what is wrong with models of the repository, by name, as it was found last.
    """

    def __init__(self, configuration: Configuration, sources: ModelSources) -> None:
        self._sources = sources
        self._repository = configuration.model_repository
        self._followed = configuration.update_source.type != "null"
        self._lock = threading.Lock()
        self._added = {model.model: model for model in configuration.models}
        self._found: dict[str, ModelConfig] | None = None if self._repository else {}
        self._seen: dict[str, dict[str, str]] = {}  # versions, by `version_path`
        self.problems: dict[str, HPSError] = {}

    @property
    def names(self) -> list[str]:
        """Names of the models that can be deployed, those of the repository as it was read last."""
        return list(self._models())

    def scan(self) -> None:
        """Read the repository again.

        Raises:
            ModelFileError: it cannot be listed.
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
        self._found, self.problems = found, problems

    def add(self, model: ModelConfig) -> ModelConfig | None:
        """Make a model known, or replace what is known of it. Returns what was configured or added before, if anything."""
        with self._lock:
            known = self._added.get(model.model)
            self._added = {**self._added, model.model: model}
            return known

    def remove(self, name: str) -> None:
        """Forget a model that was configured or added."""
        self.restore(name, None)

    def restore(self, name: str, known: ModelConfig | None) -> None:
        """Take back an `add`, which returned `known`."""
        with self._lock:
            others = {other: model for other, model in self._added.items() if other != name}
            self._added = {**others, name: known} if known else others

    def model(self, name: str) -> ModelConfig:
        """A model's entry.

        Raises:
            UnknownModelError: there is no model of this name.
            ConfigError, ModelFileError: its entry in the repository is wrong, or the repository cannot be read.
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
        """The numbers of all versions of a model, ascending.

        Raises:
            UnknownModelError: there is no model of this name.
            ModelFileError: the versions cannot be listed.
        """
        return sorted(self._files(self.model(name))[0], key=int)

    def version(self, name: str, version: str, held: Callable[[str], Sequence[HeldTable]] = lambda version: ()) -> ModelVersion:
        """One version of a model.

        Args:
            held: where this process has the tables of a version, in their order; those that it is not asked for, or for which
                it returns none, may be in a persistent database.

        Raises:
            UnknownVersionError: the model has no such version.
            ModelFileError: it cannot be made out what it consists of.
        """
        model = self.model(name)
        versions, find = self._files(model)
        if version not in versions:
            known = ", ".join(sorted(versions, key=int)) or "none"
            raise UnknownVersionError(f"deploying model {name!r}: got version {version[:40]!r}, expected one of {known}")

        def held_or_loaded(number: str) -> Sequence[HeldTable]:
            tables = model.model_copy(update={"version": number}).tables
            return held(number) or [HeldTable(table.tag) for table in tables]

        sources = table_sources(version, lambda number: find(number) if number in versions else None, held_or_loaded)
        places = tuple(source.place for source in sources)
        return ModelVersion(model.model_copy(update={"version": version, "sparse_files": places}), sources)

    def fingerprint(self, version: ModelVersion) -> str:
        """What identifies the files of a version, as they are now. No row is read.

        Raises:
            ModelFileError: they are missing or do not fit the configuration.
        """
        tables = zip(version.sources, version.config.embedding_vecsize_per_table, strict=True)
        return fingerprint_of(list(tables), self._sources)

    def to_serve(self, name: str) -> list[str]:
        """The versions of a model that its `version_policy` chooses, ascending.

        Raises:
            UnknownVersionError: it chooses none of those that are there.
        """
        versions, policy = self.versions(name), self.model(name).version_policy
        chosen = policy.chosen(versions)
        if not chosen:
            expected = f"versions {', '.join(policy.specific)} (version_policy)" if policy.specific else "at least one"
            raise UnknownVersionError(
                f"deploying model {name!r}: got versions {', '.join(versions) or 'none'}, expected {expected}"
            )
        return chosen

    def _models(self) -> dict[str, ModelConfig]:
        if self._found is None:
            self.scan()
        return {**(self._found or {}), **self._added}

    def _files(self, model: ModelConfig) -> tuple[set[str], Callable[[str], VersionFiles]]:
        """The numbers of a model's versions, and what gives the files of one."""
        if model.version_path:
            places = list_versions(model.version_path, self._sources, known=self._seen.get(model.version_path, ()))
            self._seen[model.version_path] = places
            find = partial(version_files, sparse_files=model.sparse_files, sources=self._sources)
            return set(places), lambda version: find(version, places[version])
        files = {one.version: VersionFiles(one.version, one.sparse_files, one.delta_of) for one in model.versions}
        files[model.version] = VersionFiles(model.version, model.sparse_files)
        if not self._followed:
            return set(files), files.__getitem__
        return set(files), lambda version: replace(
            files[version], updates=log_starts_beside(files[version].sparse_files, self._sources)
        )
