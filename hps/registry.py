"""Implementations by the configuration value that selects them, each imported when it is first used.

Ours stand in `IMPLEMENTATIONS`. Any installed package adds its own through entry points, one group a kind:

    [project.entry-points."hps.databases"]
    my_store = "my_package.store:MyDatabase"

Entry points are read only when a name is not one of ours: never by `import hps`, never by a lookup. Ours win over an entry
point of the same name. docs/extending.md shows a whole package.
"""

import inspect
import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from hps.errors import ConfigError, MissingDependencyError

_CORE = "pip install hps-server"


class Ours(NamedTuple):
    """An implementation of this package.

    Attributes:
        target: `module:attribute`.
        hint: what to install when importing it fails.
        section: of a database: the section of the configuration that may select it.
        spellings: other spellings of the configuration value, HugeCTR's among them.
    """

    target: str
    hint: str = _CORE
    section: str = ""
    spellings: tuple[str, ...] = ()


IMPLEMENTATIONS: dict[str, dict[str, Ours]] = {
    "cache": {
        "cuda": Ours("hps.cache.cuda.cache:CupyCache", "pip install 'hps-server[cuda13]' (or [cuda12])"),
        "cpu": Ours("hps.cache.cpu.cache:NumpyCache"),
    },
    "cache_plan": {
        "cuda": Ours("hps.cache.cuda.geometry:CudaPlan"),
        "cpu": Ours("hps.cache.cpu.miniature:NumpyPlan"),
    },
    "database": {
        "hash_map": Ours("hps.databases.hash_map.database:HashMapDatabase", _CORE, "volatile_db", ("hashmap", "hash", "map")),
        "parallel_hash_map": Ours(
            "hps.databases.hash_map.database:HashMapDatabase",
            _CORE,
            "volatile_db",
            ("parallel_hashmap", "parallel_hash", "parallel_map"),
        ),
        "redis_cluster": Ours("hps.databases.redis.database:RedisDatabase", _CORE, "volatile_db", ("redis",)),
        "rocks_db": Ours("hps.databases.rocks_db.database:RocksDatabase", _CORE, "persistent_db", ("rocksdb", "rocks")),
    },
    "filesystem": {
        "": Ours("hps.filesystems.local:LocalFileSystem"),
        "file": Ours("hps.filesystems.local:LocalFileSystem"),
        "hdfs": Ours("hps.filesystems.hdfs:HdfsFileSystem", "pip install 'hps-server[hdfs]'"),
        "s3": Ours("hps.filesystems.s3:S3FileSystem"),
        "s3a": Ours("hps.filesystems.s3:S3FileSystem"),
        "gs": Ours("hps.filesystems.gcs:GcsFileSystem", "pip install 'hps-server[gcs]'"),
    },
    "update_log": {
        "kafka_message_queue": Ours(
            "hps.updates.kafka:KafkaLog", "pip install 'hps-server[kafka]'", "update_source", ("kafka_mq", "kafka")
        ),
        "redis_stream": Ours("hps.updates.redis_streams:RedisStreamLog", _CORE, "update_source", ("redis_streams",)),
    },
    "update_log_writer": {
        "kafka_message_queue": Ours("hps.updates.kafka:KafkaWriter", "pip install 'hps-server[kafka]'"),
        "redis_stream": Ours("hps.updates.redis_streams:RedisStreamWriter"),
    },
    "format": {
        "npy": Ours("hps.formats.numpy_files:NpyFiles"),
        "npz": Ours("hps.formats.numpy_files:NpzArchive"),
        "safetensors": Ours("hps.formats.safetensors_files:SafetensorsFile", "pip install 'hps-server[import]'"),
        "torch": Ours("hps.formats.torch_state:TorchState", "pip install torch"),
        "parquet": Ours("hps.formats.parquet:ParquetFiles", "pip install 'hps-server[import]'"),
    },
}
_BASES = {
    "cache": "hps.cache.base:EmbeddingCache",
    "cache_plan": "hps.cache.base:CachePlan",
    "database": "hps.databases.base:Database",
    "filesystem": "hps.filesystems.base:FileSystem",
    "format": "hps.formats.base:ArraySource",
    "update_log": "hps.updates.base:UpdateLog",
    "update_log_writer": "hps.updates.base:UpdateLogWriter",
}


def implementation(kind: str, name: str) -> Any:
    """Import and return the class that `name` selects.

    Args:
        kind: a key of `IMPLEMENTATIONS`.
        name: the configuration value.

    Raises:
        ConfigError: nothing of this name is registered, and the message lists what is; or the package that registers it
            offers no usable class.
        MissingDependencyError: the class cannot be imported; the message says what to install.
    """
    ours = IMPLEMENTATIONS[kind].get(name)
    if ours is None:
        return _of_other_package(kind, name)
    target, hint, *_ = ours
    try:
        return _attribute(target)
    except ImportError as error:
        raise MissingDependencyError(f"{kind} {name!r} needs a package that is not installed ({error}): {hint}") from error


def names(kind: str) -> list[str]:
    """All names that `implementation` takes: ours, then those of other packages."""
    return [*IMPLEMENTATIONS[kind], *other_names(kind)]


def other_names(kind: str) -> list[str]:
    """The names that other packages have registered, sorted."""
    return sorted(_entry_points(kind, tuple(sys.path)).keys() - IMPLEMENTATIONS[kind].keys())


def is_registered(kind: str, name: str) -> bool:
    """Whether `implementation` takes this name. Reads no entry points when the name is one of ours."""
    return name in IMPLEMENTATIONS[kind] or name in other_names(kind)


def section_of(database: type) -> str:
    """The section of the configuration that may select a class of databases."""
    persistent = issubclass(database, _attribute("hps.databases.base:PersistentDatabase"))
    return "persistent_db" if persistent else "volatile_db"


def keeps_order(database: str) -> bool:
    """Whether databases of a type can be the ones that follow a log of updates. All of ours can; none is imported for that."""
    if database in IMPLEMENTATIONS["database"]:
        return True
    base = _attribute(_BASES["database"])
    return bool(implementation("database", database).follow_log is not base.follow_log)


@cache
def _entry_points(kind: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Entry points of a kind by name; `path` is sys.path, so that a changed one is read again."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"hps.{kind}s"):
        found.setdefault(point.name, []).append(point)
    return found


def _of_other_package(kind: str, name: str) -> Any:
    points = _entry_points(kind, tuple(sys.path)).get(name, [])
    packages = " and ".join(f"{point.dist.name} {point.dist.version}" for point in points if point.dist)
    if not points:
        known = sorted(one for one in names(kind) if one)
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(kind, [f"got {name!r}, expected one of: {', '.join(known)}{hint}"])
    if len(points) > 1:
        raise ConfigError(kind, [f"{name!r} is registered by {packages}; uninstall all but one"])
    place = f"{kind} {name!r} of the package {packages} ({points[0].value})"
    try:
        found = points[0].load()
    except ImportError as error:
        raise MissingDependencyError(f"{place} cannot be imported: {error}; install what the package needs") from error
    except Exception as error:
        raise ConfigError(place, [f"cannot be imported: {error!r}; install a version that works"]) from error
    base = _attribute(_BASES[kind])
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(place, [f"got {found!r}, expected a subclass of {_BASES[kind]}"])
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(place, [f"it lacks methods of {base.__name__}: {missing}; install a version that has them"])
    return found


def _attribute(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(import_module(module), attribute)
