"""Load a configuration: a `ps.json` as HugeCTR takes it, its content as a mapping, or HugeCTR's Python structs.

Only this module reads configuration files and the environment, and none of it at import.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pydantic import ValidationError

from hps.configuration.document import Location, path_of, plain, problems_of, read_json, shown
from hps.configuration.fields import Notices
from hps.configuration.hugectr_structs import PYTHON_NAMES, ParameterServerConfig, document_of, python_path
from hps.configuration.models import Configuration, ModelConfig, ServiceConfig, ShardConfig, VersionConfig
from hps.configuration.networks import DenseConfig, KeysProgramConfig, LookupConfig, NetworkInputConfig, SourceConfig
from hps.configuration.tiers import (
    OLD_DATABASES,
    ModelSourceConfig,
    PeersConfig,
    PersistentDbConfig,
    Section,
    UpdateSourceConfig,
    VolatileDbConfig,
)
from hps.errors import ConfigError
from hps.ground.shares import TableShare

__all__ = [
    "Configuration",
    "DenseConfig",
    "KeysProgramConfig",
    "LookupConfig",
    "ModelConfig",
    "ModelSourceConfig",
    "NetworkInputConfig",
    "PersistentDbConfig",
    "ServiceConfig",
    "SourceConfig",
    "UpdateSourceConfig",
    "VolatileDbConfig",
    "load_configuration",
    "override_model",
    "read_configuration",
    "repository_of",
    "state_home",
]

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | ParameterServerConfig | Configuration

_SOURCES = "the path of a ps.json, a mapping, a ParameterServerConfig or a Configuration"
_log = logging.getLogger(__name__)

_SECTIONS: dict[str, type[Section]] = {
    "": Configuration,
    "volatile_db": VolatileDbConfig,
    "persistent_db": PersistentDbConfig,
    "model_source": ModelSourceConfig,
    "model_source.peers": PeersConfig,
    "update_source": UpdateSourceConfig,
    "service": ServiceConfig,
    "models": ModelConfig,
    "models.shard": ShardConfig,
    "models.versions": VersionConfig,
}
_OF_A_NETWORK: dict[str, type[Section]] = {
    "": DenseConfig,
    ".inputs": NetworkInputConfig,
    ".keys": KeysProgramConfig,
    ".lookups": LookupConfig,
    ".lookups.keys": SourceConfig,
    ".lookups.offsets": SourceConfig,
    ".lookups.weights": SourceConfig,
}
for _name, _section in _OF_A_NETWORK.items():
    _SECTIONS |= {f"models.dense{_name}": _section, f"models.versions.dense{_name}": _section}
_KEYS = {name: [key for key in section.model_fields if key not in OLD_DATABASES] for name, section in _SECTIONS.items()}
_SECRETS = {
    ("service", "bearer_token"): "HPS_BEARER_TOKEN",
    ("service", "admin_token"): "HPS_ADMIN_TOKEN",
    ("volatile_db", "password"): "HPS_REDIS_PASSWORD",
    ("volatile_db", "sentinel_password"): "HPS_SENTINEL_PASSWORD",
    ("update_source", "password"): "HPS_UPDATE_PASSWORD",
    ("model_source", "azure_connection_string"): "HPS_AZURE_CONNECTION_STRING",
    ("model_source", "peers", "token"): "HPS_PEERS_TOKEN",
}
_OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own variable
_SHARD = "HPS_SHARD"
_THREADS = "OMP_NUM_THREADS"  # OpenMP's, which PyTorch reads, too


def load_configuration(source: Source) -> Configuration:
    """Read and check a configuration, and log its notices.

    The environment variables `HPS_BEARER_TOKEN`, `HPS_ADMIN_TOKEN`, `HPS_REDIS_PASSWORD`, `HPS_SENTINEL_PASSWORD`,
    `HPS_UPDATE_PASSWORD`, `HPS_AZURE_CONNECTION_STRING` and `HPS_PEERS_TOKEN`, if not empty, replace `service.bearer_token`,
    `service.admin_token`, `volatile_db.password`, `volatile_db.sentinel_password`, `update_source.password`,
    `model_source.azure_connection_string` and `model_source.peers.token`.
    `HPS_SHARD`, such as `1/4`, is the `shard` of every model without one; in `<pod>-<ordinal>/4` the index is the remainder of
    the ordinal. Keys without effect and settings that are not implemented are logged by `hps.configuration.load`. If that
    logger has no handler yet, the notices of a `Configuration` are logged when it is used later and there is a handler.

    Args:
        source: path of a `ps.json`, path or URI of a repository of models, content of a `ps.json` as a mapping, a
            `ParameterServerConfig`, or a `Configuration`, which is returned unchanged.

    Raises:
        ConfigError: the file is missing, is not JSON or has wrong keys or values; one report of all problems.
    """
    handled = _log.hasHandlers()
    configuration = source if isinstance(source, Configuration) else read_configuration(source)
    if handled or configuration is not source:  # without handlers, logging writes warnings on standard error
        for level, text in configuration.unlogged:
            _log.log(level, "%s", text)
    if handled:
        configuration.unlogged.clear()
    return configuration


class Document(NamedTuple):
    """A configuration before it is checked. *One per thread.*

    Attributes:
        name: its name in reports.
        content: plain dicts, lists and scalars, with the secrets of the environment.
        problems: problems found so far.
        warnings: a sentence for each value that was read in another way than it is written.
        path: formats a location in the author's terms.
    """

    name: str
    content: dict[str, Any]
    problems: list[str]
    warnings: list[str]
    path: Callable[[Location], str]


def document_of_source(source: Source) -> Document:
    """Read a configuration without checking it.

    Raises:
        ConfigError: it is not a JSON object.
    """
    problems: list[str] = []
    warnings: list[str] = []
    path: Callable[[Location], str] = path_of
    document: Any = source
    name = "configuration"
    try:
        if isinstance(source, ParameterServerConfig):
            name, path = "ParameterServerConfig", python_path(source)
            document, problems, warnings = document_of(source)
        elif isinstance(source, str | os.PathLike):
            place = os.fsdecode(source)
            name = place.encode(errors="backslashreplace").decode()  # a file name need not be Unicode, a message must
            repository = repository_of(place)
            what = "a ps.json" if not os.path.isdir(place) else "a ps.json, or of a directory with <model>/model.json"
            document = {"model_repository": repository} if repository else read_json(place, name, what)
        content = plain(document, problems, path=path)
    except RecursionError:
        raise ConfigError(name, ["top level: objects and lists are nested too deeply, or contain themselves"]) from None
    if not isinstance(content, dict):
        expected = "an object with the key models" if isinstance(source, str | os.PathLike) else _SOURCES
        raise ConfigError(name, [f"top level: got {shown(content)}, expected {expected}"])
    origins = _apply_environment(content)
    if (shard := os.environ.get(_SHARD)) and content.get("model_repository"):  # whose models are read later
        try:
            TableShare.parse(_shard_of_pod(shard))
        except ValueError:
            problems.append(f'environment variable {_SHARD}: got {shown(shard)}, expected "1/4" for example')
    return Document(name, content, problems, warnings, lambda location: origins.get(location) or path(location))


def repository_of(place: str) -> str:
    """Return the repository that a path or URI names in place of a `ps.json`; empty if it names none."""
    if remote := re.fullmatch(r"([a-z0-9]{2,}):/{1,2}([^/].*)", place):  # a Path keeps one slash
        return f"{remote[1]}://{remote[2]}"
    return place if any(Path(place).glob("*/model.json")) else ""


def read_configuration(source: Source) -> Configuration:
    """Load a configuration without logging its notices: they are logged when the configuration is used."""
    name, content, problems, warnings, path = document_of_source(source)
    notices = Notices(warnings=warnings)
    try:
        configuration = Configuration.model_validate(content, context=notices)
    except ValidationError as error:
        problems += problems_of(error, _KEYS, PYTHON_NAMES, path)
    if problems:
        raise ConfigError(name, problems)
    configuration.unlogged.extend((level, f"{name}: {text}") for level, text in _written(notices))
    return configuration


def override_model(name: str, model: ModelConfig | None, changes: Mapping[str, Any]) -> ModelConfig:
    """Change some keys of a model's entry, and check it.

    Args:
        name: name of the model.
        model: its present entry, if any.
        changes: keys of an entry of `models`, and their values.

    Raises:
        ConfigError: the entry is wrong; one report of all problems.
    """
    known = {} if model is None else model.model_dump(exclude_unset=True)
    return load_configuration({"models": [{**known, **changes, "model": name}]}).models[0]


def load_dense(section: Mapping[str, Any] | DenseConfig) -> DenseConfig:
    """Check the entry of a network, as in `models[].dense`.

    Raises:
        ConfigError: it is wrong; one report of all problems.
    """
    if isinstance(section, DenseConfig):
        return section
    problems: list[str] = []
    content = plain(section, problems)
    keys = {
        name.removeprefix("models.dense").removeprefix("."): known for name, known in _KEYS.items() if "models.dense" in name
    }
    try:
        dense = DenseConfig.model_validate(content)
    except ValidationError as error:
        problems += problems_of(error, keys, {})
    if problems:
        raise ConfigError("dense", problems)
    return dense


def default_network_threads(count: int) -> None:
    """Let networks of this process run each operator with `count` threads, unless `OMP_NUM_THREADS` is set."""
    os.environ.setdefault(_THREADS, str(count))


def state_home() -> Path | None:
    """Return the directory for what programs of this user keep (XDG Base Directory Specification); None without a home."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:  # an unknown user, as of containers
        return None


def network_threads() -> int:
    """Return how many threads run an operator of a network; 0: the engine decides."""
    number = os.environ.get(_THREADS, "").partition(",")[0]  # a list is one number a level of nesting
    return int(number) if number.isdecimal() else 0


def _apply_environment(content: dict[str, Any]) -> dict[Location, str]:
    """Put secrets, the trace endpoint and the share of the environment into a document; return their names in reports."""
    origins: dict[Location, str] = {}
    for (*sections, key), variable in _SECRETS.items():
        secret = os.environ.get(variable)
        if secret and sections == ["service"]:
            content.setdefault("service", {})
        section: Any = content
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if secret and isinstance(section, dict):
            section[key] = secret
            origins[*sections, key] = f"environment variable {variable}"
    endpoint = os.environ.get(_OTLP)
    if endpoint and isinstance(service := content.setdefault("service", {}), dict) and "otlp_endpoint" not in service:
        service["otlp_endpoint"] = endpoint
        origins["service", "otlp_endpoint"] = f"environment variable {_OTLP}"
    if shard := os.environ.get(_SHARD):
        for index, model in enumerate(models if isinstance(models := content.get("models"), list) else []):
            if isinstance(model, dict) and "shard" not in model:
                model["shard"] = _shard_of_pod(shard)
                origins["models", index, "shard"] = f"environment variable {_SHARD}"
    return origins


def _shard_of_pod(text: str) -> str:
    """Replace the name of a StatefulSet's pod by the share of its ordinal: successive pods hold successive shares."""
    match = re.fullmatch(r".+-([0-9]{1,9})/([1-9][0-9]{0,4})", text)
    return f"{int(match[1]) % int(match[2])}/{match[2]}" if match else text


def _written(notices: Notices) -> list[tuple[int, str]]:
    keys = (
        ("these keys of HugeCTR's dense part have no effect", notices.ignored),
        ("these keys of HugeCTR 4.1 and earlier are read as described in docs/configuration.md", notices.older),
        ("these numbers or booleans are in quotes and are read without them", notices.quoted),
    )
    lines = [(logging.INFO, f"{meaning}: {', '.join(sorted(names))}") for meaning, names in keys if names]
    if notices.databases:
        effect = "have no effect; volatile_db and persistent_db say which databases there are"
        lines.append(
            (logging.WARNING, f"these keys of HugeCTR 3.2 and earlier {effect}: {', '.join(sorted(notices.databases))}")
        )
    return [*lines, *((logging.WARNING, warning) for warning in notices.warnings)]
