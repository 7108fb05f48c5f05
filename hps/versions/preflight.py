"""Opens, read-only and in parallel, all that `hps serve` would open, and reports what cannot be used.

Every place has the same timeout. A check that exceeds it is abandoned together with its thread.
"""

import posixpath
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from hps.cache.base import DeviceMemoryTables, EmbeddingCache
from hps.configuration.load import Configuration
from hps.configuration.tiers import PersistentDbConfig, VolatileDbConfig
from hps.errors import HPSError, ModelSourceError
from hps.ground.registry import implementation
from hps.ground.threads.workers import call_in_thread
from hps.models.sources import ModelSources
from hps.statistics.metrics import Metrics
from hps.stores.base import Database, LastingDatabase
from hps.types import CheckResult, TableSpec
from hps.updates.base import UpdateLog
from hps.versions.cache_sizes import cache_capacities, is_static, not_shared, usable_sharing
from hps.versions.device_kernels import kept_kernels, missing_text
from hps.versions.live_updates import LiveUpdates, topic_of
from hps.versions.tiers import why_unavailable


def preflight(
    configuration: Configuration,
    tables: Mapping[TableSpec, tuple[int, int]],
    sources: ModelSources,
    timeout_s: float,
) -> list[CheckResult]:
    """Check databases, the log of updates, object stores, devices and the port.

    Args:
        tables: tables to serve, with the rows and bytes of their files.
        timeout_s: timeout per place.

    Returns:
        The results, in the order of the checks.
    """
    checks = _checks(configuration, tables, sources, timeout_s)
    answers = {where: call_in_thread("preflight", check) for where, check in checks.items()}
    deadline, found = time.monotonic() + timeout_s, []
    for where, answer in answers.items():
        try:
            found += answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            found.append(CheckResult("unreachable", where, f"no answer within {timeout_s:g} s"))
        except HPSError as error:
            found.append(CheckResult("unreachable" if isinstance(error, ModelSourceError) else "wrong", where, str(error)))
    return found


def _checks(
    configuration: Configuration,
    tables: Mapping[TableSpec, tuple[int, int]],
    sources: ModelSources,
    timeout_s: float,
) -> dict[str, Callable[[], list[CheckResult]]]:
    checks: dict[str, Callable[[], list[CheckResult]]] = {}
    sizes = {table: rows * (8 + 4 * table.width) if rows else size for table, (rows, size) in tables.items()}
    for section in ("volatile_db", "persistent_db"):
        tier = getattr(configuration, section)
        if tier.type != "disabled":
            stored = {table.stored_as(tier.row_dtype): size for table, size in sizes.items()}
            checks[section] = partial(_database, tier, stored)
    source = configuration.update_source
    if source.type != "null":
        checks["update_source"] = partial(_log, configuration, tables, timeout_s)
    for place in _remote_places(configuration, sources):
        checks[place] = partial(_listed, place, sources)
    checks["device"] = partial(_device, configuration, tables)
    if configuration.service.port:
        checks["service.port"] = partial(_port, configuration.service.host, configuration.service.port)
    return checks


def _remote_places(configuration: Configuration, sources: ModelSources) -> list[str]:
    """List the directories of model files in object stores and HDFS, and those that cannot be located."""

    def is_local(place: str) -> bool:
        try:
            return sources.locate(place)[0].is_local
        except HPSError:
            return False

    places = [configuration.model_repository] if configuration.model_repository else []
    for model in configuration.models:
        files = (
            []
            if model.version_path
            else [*model.sparse_files, *(f for version in model.versions for f in version.sparse_files)]
        )
        places += [model.version_path] if model.version_path else [posixpath.dirname(file.rstrip("/")) for file in files]
    return [place for place in dict.fromkeys(places) if place and not is_local(place)]


def _database(tier: VolatileDbConfig | PersistentDbConfig, stored: Mapping[TableSpec, int]) -> list[CheckResult]:
    database: type[Database] = implementation("database", tier.type)
    return database.probe(tier, stored) if issubclass(database, LastingDatabase) else []


def _log(configuration: Configuration, tables: Iterable[TableSpec], timeout_s: float) -> list[CheckResult]:
    updates = LiveUpdates(configuration, Metrics())
    updates.close()
    topics = list(dict.fromkeys(topic_of(table) for table in tables if updates.follows(table)))
    source = configuration.update_source
    log: type[UpdateLog] = implementation("update_log", source.type)
    return log.probe(source, topics, timeout_s / 2)


def _listed(place: str, sources: ModelSources) -> list[CheckResult]:
    filesystem, directory = sources.locate(place)
    count = len(filesystem.list(directory))
    return [CheckResult("good", place, f"can be listed; it has {count} entries")]


def _device(configuration: Configuration, tables: Mapping[TableSpec, tuple[int, int]]) -> list[CheckResult]:
    device = configuration.device
    name = "cuda" if device == "auto" else device
    reason = why_unavailable(name)
    if reason and device == "auto":
        return [CheckResult("warning", "device", f"auto is cpu here ({reason}); write cpu, or see to the GPU")]
    if reason:
        return [CheckResult("wrong", "device", f"{device} cannot be used: {reason}; write auto or cpu, or see to it")]
    cache = implementation("cache", name)
    found = _room(configuration, tables, cache) or [CheckResult("good", "device", f"{cache.device} can be used")]
    if not any(result.level == "wrong" for result in found) and issubclass(cache, DeviceMemoryTables):
        missing = filter(None, map(missing_text, kept_kernels(configuration.models, cache)))
        found += [CheckResult("warning", "device", text) for text in missing]
    return found


def _room(
    configuration: Configuration, tables: Mapping[TableSpec, tuple[int, int]], cache: type[EmbeddingCache]
) -> list[CheckResult]:
    """Find the caches that do not fit on their devices."""
    found = []
    for i, model in enumerate(configuration.models):
        model_rows = {table: rows for table, (rows, _) in tables.items() if table.model_name == model.model and rows}
        devices = model.deployed_device_list[: 1 if cache.device == "cpu" else None] if model.gpucache and model_rows else ()
        sharing, reason = usable_sharing(model, cache, list(model_rows.values()))
        if reason is not None:
            found.append(CheckResult("warning", f"models[{i}].device_sharing", not_shared(model, reason)))
        capacities = cache_capacities(model, list(model_rows.values()), sharing)
        for device_id in devices:
            try:
                cache.check_room(list(model_rows), capacities, device_id, is_static(model), sharing=sharing)
            except HPSError as error:
                found.append(CheckResult("wrong", f"models[{i}].deployed_device_list", str(error)))
    return found


def _port(host: str, port: int) -> list[CheckResult]:
    """Check that `host:port` can be bound, without listening."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        text = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        return [CheckResult("unreachable", "service.port", f"{text}; stop what listens there, or choose another")]
    return [CheckResult("good", "service.port", f"{host}:{port} is free")]
