"""Read a configuration: a `ps.json` as HugeCTR takes it, its content as a mapping, or HugeCTR's Python structs.

This module alone reads configuration files and the environment, and only while a configuration is loaded.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic import ValidationError

from hps.configuration.document import plain, read_json
from hps.configuration.fields import Notes
from hps.configuration.hugectr_structs import ParameterServerConfig
from hps.configuration.models import Configuration, ModelConfig, ServiceConfig
from hps.configuration.report import Location, path_of, problems_of, shown
from hps.configuration.struct_conversion import PYTHON_NAMES, document_of, python_path
from hps.configuration.tiers import ModelSourceConfig, PersistentDbConfig, Section, UpdateSourceConfig, VolatileDbConfig
from hps.errors import ConfigError

__all__ = [
    "Configuration",
    "ModelConfig",
    "ModelSourceConfig",
    "PersistentDbConfig",
    "ServiceConfig",
    "UpdateSourceConfig",
    "VolatileDbConfig",
    "load_configuration",
]

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | ParameterServerConfig | Configuration

_SOURCES = "the path of a ps.json, a mapping, a ParameterServerConfig or a Configuration"
_log = logging.getLogger(__name__)

_SECTIONS: dict[str, type[Section]] = {
    "": Configuration,
    "volatile_db": VolatileDbConfig,
    "persistent_db": PersistentDbConfig,
    "model_source": ModelSourceConfig,
    "update_source": UpdateSourceConfig,
    "service": ServiceConfig,
    "models": ModelConfig,
}
_KEYS = {name: section.model_fields.keys() for name, section in _SECTIONS.items()}
_SECRETS = {("service", "bearer_token"): "HPS_BEARER_TOKEN", ("volatile_db", "password"): "HPS_REDIS_PASSWORD"}


def load_configuration(source: Source) -> Configuration:
    """Read and check a configuration.

    `HPS_BEARER_TOKEN` and `HPS_REDIS_PASSWORD` in the environment, where set and not empty, stand in for the configured
    `service.bearer_token` and `volatile_db.password`.

    Args:
        source: path of a `ps.json`; its content as a mapping; a `ParameterServerConfig`; or a `Configuration`, which is
            returned as it is.

    Raises:
        ConfigError: there is no such file, it is not JSON, or anything in it is wrong; one report of all problems.
    """
    if isinstance(source, Configuration):
        return source
    problems: list[str] = []
    path: Callable[[Location], str] = path_of
    document: Any = source
    name = "configuration"
    try:
        if isinstance(source, ParameterServerConfig):
            name, path = "ParameterServerConfig", python_path(source)
            document, problems = document_of(source)
        elif isinstance(source, str | os.PathLike):
            place = os.fsdecode(source)
            name = place.encode(errors="backslashreplace").decode()  # a file name need not be Unicode, a message must
            document = read_json(place, name)
        content = plain(document, problems, path=path)
    except RecursionError:
        raise ConfigError(name, ["top level: objects and lists are nested too deeply, or contain themselves"]) from None
    if not isinstance(content, dict):
        wanted = "an object with the key models" if isinstance(source, str | os.PathLike) else _SOURCES
        raise ConfigError(name, [f"top level: got {shown(content)}, wanted {wanted}"])
    origins = _take_secrets(content)
    notes = Notes()
    try:
        configuration = Configuration.model_validate(content, context=notes)
    except ValidationError as error:
        problems += problems_of(error, _KEYS, PYTHON_NAMES, lambda location: origins.get(location) or path(location))
    if problems:
        raise ConfigError(name, problems)
    _log_notes(name, notes)
    return configuration


def _take_secrets(content: dict[str, Any]) -> dict[Location, str]:
    """Put secrets of the environment into a document; returns what to call their places."""
    origins: dict[Location, str] = {}
    for (section, key), variable in _SECRETS.items():
        secret = os.environ.get(variable)
        if secret and section == "service":
            content.setdefault(section, {})
        if secret and isinstance(content.get(section), dict):
            content[section][key] = secret
            origins[section, key] = f"environment variable {variable}"
    return origins


def _log_notes(name: str, notes: Notes) -> None:
    for meaning, keys in (
        ("keys of HugeCTR's dense part, ignored", notes.ignored),
        ("keys of HugeCTR up to 4.1, read as docs/configuration.md says", notes.older),
        ("numbers or booleans in quotes, read without them", notes.quoted),
    ):
        if keys:
            _log.info("%s: %s: %s", name, meaning, ", ".join(sorted(keys)))
    for warning in notes.warnings:
        _log.warning("%s: %s", name, warning)
