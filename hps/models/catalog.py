"""Which versions of which models can be deployed, and which of them are to be served."""

import threading
from dataclasses import dataclass

from hps.configuration.load import Configuration, ModelConfig
from hps.errors import UnknownModelError, UnknownVersionError
from hps.models.files import joint_fingerprint, open_sparse_model
from hps.models.sources import ModelSources


@dataclass(frozen=True)
class ModelVersion:
    """A version of a model that can be deployed. *Immutable.*

    Attributes:
        config: the model's entry, with the `version` and `sparse_files` of this version.
        delta_of: the version that its files change; None where they are whole.
    """

    config: ModelConfig
    delta_of: str | None = None


class ModelCatalog:
    """The models that are configured, and their versions. *Thread-safe.*

    Args:
        configuration: has the models.
        sources: where model files come from.
    """

    def __init__(self, configuration: Configuration, sources: ModelSources) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._models = {model.model: model for model in configuration.models}

    @property
    def names(self) -> list[str]:
        """Names of the models that can be deployed."""
        return list(self._models)

    def add(self, model: ModelConfig) -> None:
        """Make a model known, or replace what is known of it."""
        with self._lock:
            self._models = {**self._models, model.model: model}

    def model(self, name: str) -> ModelConfig:
        """A model's entry.

        Raises:
            UnknownModelError: there is no model of this name.
        """
        try:
            return self._models[name]
        except KeyError:
            known = ", ".join(self._models) or "none"
            raise UnknownModelError(f"deploying model {name!r}: it is not configured; configured are: {known}") from None

    def versions(self, name: str) -> dict[str, ModelVersion]:
        """All versions of a model, by number, ascending.

        Raises:
            UnknownModelError: there is no model of this name.
            ModelFileError: the versions cannot be listed.
        """
        model = self.model(name)
        found = [ModelVersion(model)]
        found += [
            ModelVersion(model.model_copy(update={"version": one.version, "sparse_files": one.sparse_files}), one.delta_of)
            for one in model.versions
        ]
        return {one.config.version: one for one in sorted(found, key=lambda one: int(one.config.version))}

    def version(self, name: str, version: str) -> ModelVersion:
        """One version of a model.

        Raises:
            UnknownVersionError: the model has no such version.
        """
        versions = self.versions(name)
        try:
            return versions[version]
        except KeyError:
            known = ", ".join(versions) or "none"
            got = f"got version {version[:40]!r}, expected one of {known}"
            raise UnknownVersionError(f"deploying model {name!r}: {got}") from None

    def fingerprint(self, version: ModelVersion) -> str:
        """What identifies the files of a version, as they are now. No row is read.

        Raises:
            ModelFileError: they are missing or do not fit the configuration.
        """
        config = version.config
        return joint_fingerprint(
            open_sparse_model(source, table.dim, sources=self._sources).fingerprint
            for table, source in zip(config.tables, config.sparse_files, strict=True)
        )

    def to_serve(self, name: str) -> list[ModelVersion]:
        """The versions of a model that its `version_policy` chooses, ascending.

        Raises:
            UnknownVersionError: it chooses none of those that are there.
        """
        versions = self.versions(name)
        policy = self.model(name).version_policy
        chosen = policy.chosen(versions)
        if not chosen:
            expected = f"versions {', '.join(policy.specific)} (version_policy)" if policy.specific else "at least one"
            raise UnknownVersionError(
                f"deploying model {name!r}: got versions {', '.join(versions) or 'none'}, expected {expected}"
            )
        return [versions[version] for version in chosen]
