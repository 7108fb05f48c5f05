"""Asks everything that a configuration names whether it is there and may be used, all at a time; nothing is changed anywhere.

Each question has a time of its own. One that is not answered in it is given up; what asked goes on, on a thread that holds no
process up.
"""

import posixpath
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from hps.cache.base import EmbeddingCache
from hps.configuration.load import Configuration
from hps.errors import HPSError, ModelFileError, ModelSourceError
from hps.findings import Finding
from hps.live_updates import LiveUpdates, topic_of
from hps.metrics import Metrics
from hps.models.sources import ModelSources
from hps.registry import implementation
from hps.types import TableSpec


def reach(
    configuration: Configuration,
    tables: Mapping[TableSpec, tuple[int, int]],
    sources: ModelSources,
    timeout_s: float,
) -> list[Finding]:
    """Ask databases, the log of updates, object stores, devices and the port.

    Args:
        tables: that are to be served, and the rows and bytes of their files.
        sources: where model files come from.
        timeout_s: for each question.

    Returns:
        The findings, in the order of the questions.
    """
    questions = _questions(configuration, tables, sources, timeout_s)
    answers = {where: _asked(question) for where, question in questions.items()}
    deadline, found = time.monotonic() + timeout_s, []
    for where, answer in answers.items():
        try:
            found += answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            found.append(Finding("unreachable", where, f"no answer within {timeout_s:g} s"))
        except HPSError as error:
            wrong = not isinstance(error, ModelSourceError)
            found.append(Finding("wrong" if wrong else "unreachable", where, str(error)))
    return found


def _asked(question: Callable[[], list[Finding]]) -> Future[list[Finding]]:
    answer: Future[list[Finding]] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # noqa: BLE001 - whoever waits for the answer gets it
            answer.set_exception(error)

    threading.Thread(target=ask, name="hps-reach", daemon=True).start()
    return answer


def _questions(
    configuration: Configuration,
    tables: Mapping[TableSpec, tuple[int, int]],
    sources: ModelSources,
    timeout_s: float,
) -> dict[str, Callable[[], list[Finding]]]:
    questions: dict[str, Callable[[], list[Finding]]] = {}
    sizes = {table: size for table, (_, size) in tables.items()}
    for section in ("volatile_db", "persistent_db"):
        tier = getattr(configuration, section)
        if tier.type != "disabled":
            questions[section] = partial(implementation("database", tier.type).probe, tier, sizes)
    source = configuration.update_source
    if source.type != "null":
        updates = LiveUpdates(configuration, Metrics())
        updates.close()
        topics = list(dict.fromkeys(topic_of(table) for table in tables if updates.follows(table)))
        questions["update_source"] = partial(implementation("update_log", source.type).probe, source, topics, timeout_s / 2)
    for place in _remote_places(configuration, sources):
        questions[place] = partial(_listed, place, sources)
    questions["device"] = partial(_device, configuration, tables)
    if configuration.service.port:
        questions["service.port"] = partial(_port, configuration.service.host, configuration.service.port)
    return questions


def _remote_places(configuration: Configuration, sources: ModelSources) -> list[str]:
    """Directories of object stores and the like that model files are in, each once."""
    places = [configuration.model_repository] if configuration.model_repository else []
    for model in configuration.models:
        files = [] if model.version_path else [*model.sparse_files, *(f for one in model.versions for f in one.sparse_files)]
        places += [model.version_path] if model.version_path else [posixpath.dirname(one.rstrip("/")) for one in files]
    return [place for place in dict.fromkeys(places) if place and not sources.locate(place)[0].is_local]


def _listed(place: str, sources: ModelSources) -> list[Finding]:
    filesystem, directory = sources.locate(place)
    try:
        count = len(filesystem.list(directory))
    except ModelSourceError as error:
        return [Finding("unreachable", place, str(error))]
    except ModelFileError as error:
        return [Finding("wrong", place, str(error))]
    return [Finding("good", place, f"may be listed; it holds {count} entries")]


def _device(configuration: Configuration, tables: Mapping[TableSpec, tuple[int, int]]) -> list[Finding]:
    device, cache = configuration.device, None
    try:
        cache = implementation("cache", "cuda" if device == "auto" else device)
        reason = cache.unavailable_reason()
    except ImportError as error:
        reason = str(error)
    if reason and device == "auto":
        return [Finding("warning", "device", f"auto is cpu here ({reason}); write cpu, or see to the GPU")]
    if reason or cache is None:
        return [Finding("wrong", "device", f"{device} cannot be used: {reason}; write auto or cpu, or see to it")]
    return _room(configuration, tables, cache) or [Finding("good", "device", f"{cache.device} can be used")]


def _room(
    configuration: Configuration, tables: Mapping[TableSpec, tuple[int, int]], cache: type[EmbeddingCache]
) -> list[Finding]:
    """Caches that do not fit on their devices."""
    found = []
    for i, model in enumerate(configuration.models):
        own = {table: rows for table, (rows, _) in tables.items() if table.model_name == model.model and rows}
        share = 1.0 if model.embedding_cache_type == "static" else model.gpucacheper
        devices = model.deployed_device_list[: 1 if cache.device == "cpu" else None] if model.gpucache and own else ()
        for device_id in devices:
            try:
                cache.check_room(list(own), [int(share * rows) for rows in own.values()], device_id)
            except HPSError as error:
                found.append(Finding("wrong", f"models[{i}].deployed_device_list", str(error)))
    return found


def _port(host: str, port: int) -> list[Finding]:
    """Whether `host:port` can be listened on; nothing listens meanwhile."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        text = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        return [Finding("unreachable", "service.port", f"{text}; stop what listens there, or choose another")]
    return [Finding("good", "service.port", f"{host}:{port} is free")]
