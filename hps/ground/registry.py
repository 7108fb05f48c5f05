"""Implementations by configuration value, each imported on first use.

Built-in ones are in `IMPLEMENTATIONS`. Installed packages add their own through entry points, one group per kind:

    [project.entry-points."hps.databases"]
    my_store = "my_package.store:MyDatabase"

Entry points are read only for names that are not built in: never by `import hps`, never by a lookup. A built-in name wins over
an entry point. docs/extending.md shows a complete package.
"""

import inspect
import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple

from hps.errors import ConfigError, HPSError, MissingDependencyError


def install_hint(extra: str = "") -> str:
    """Return how to install hps with an extra. The package is on no index yet, so this is from a clone or a wheel."""
    target = f"'.[{extra}]'" if extra else "."
    return f"pip install {target} in the clone of hps (with its wheel, write the wheel's file instead of the dot)"


_CORE = install_hint()


class BuiltIn(NamedTuple):
    """A built-in implementation."""

    target: str  # `module:attribute`
    hint: str = _CORE  # how to install what it needs, if the import fails
    section: str = ""  # configuration section that may select a database
    spellings: tuple[str, ...] = ()  # other configuration values, including HugeCTR's


IMPLEMENTATIONS: dict[str, dict[str, BuiltIn]] = {
    "cache": {
        "cuda": BuiltIn("hps.cache.cuda.cache:CupyCache", install_hint("cuda13") + "; cuda12 for CUDA 12"),
        "cpu": BuiltIn("hps.cache.cpu.cache:NumpyCache"),
    },
    "cache_plan": {
        "cuda": BuiltIn("hps.cache.cuda.geometry:CudaPlan"),
        "cpu": BuiltIn("hps.cache.cpu.miniature:NumpyPlan"),
    },
    "database": {
        "hash_map": BuiltIn("hps.stores.hash_map.database:HashMapDatabase", _CORE, "volatile_db", ("hashmap", "hash", "map")),
        "parallel_hash_map": BuiltIn(
            "hps.stores.hash_map.database:HashMapDatabase",
            _CORE,
            "volatile_db",
            ("parallel_hashmap", "parallel_hash", "parallel_map"),
        ),
        "redis_cluster": BuiltIn("hps.stores.redis.database:RedisDatabase", _CORE, "volatile_db", ("redis",)),
        "rocks_db": BuiltIn("hps.stores.rocks_db.database:RocksDatabase", _CORE, "persistent_db", ("rocksdb", "rocks")),
        "row_files": BuiltIn("hps.stores.row_files.database:RowFilesDatabase", _CORE, "persistent_db"),
    },
    "filesystem": {
        "": BuiltIn("hps.filesystems.local:LocalFileSystem"),
        "file": BuiltIn("hps.filesystems.local:LocalFileSystem"),
        "hdfs": BuiltIn("hps.filesystems.hdfs:HdfsFileSystem", install_hint("hdfs")),
        "s3": BuiltIn("hps.filesystems.s3:S3FileSystem"),
        "s3a": BuiltIn("hps.filesystems.s3:S3FileSystem"),
        "gs": BuiltIn("hps.filesystems.gcs:GcsFileSystem", install_hint("gcs")),
        **{
            scheme: BuiltIn("hps.filesystems.azure:AzureFileSystem", install_hint("azure"))
            for scheme in ("abfs", "abfss", "az", "wasb", "wasbs")
        },
    },
    "update_log": {
        "kafka_message_queue": BuiltIn(
            "hps.updates.kafka:KafkaLog", install_hint("kafka"), "update_source", ("kafka_mq", "kafka")
        ),
        "redis_stream": BuiltIn("hps.updates.redis_streams:RedisStreamLog", _CORE, "update_source", ("redis_streams",)),
    },
    "update_log_writer": {
        "kafka_message_queue": BuiltIn("hps.updates.kafka:KafkaWriter", install_hint("kafka")),
        "redis_stream": BuiltIn("hps.updates.redis_streams:RedisStreamWriter"),
    },
    "format": {
        "npy": BuiltIn("hps.models.formats.numpy_files:NpyFiles"),
        "npz": BuiltIn("hps.models.formats.numpy_files:NpzArchive"),
        "safetensors": BuiltIn("hps.models.formats.safetensors_files:SafetensorsFile", install_hint("import")),
        "torch": BuiltIn("hps.models.formats.torch_state:TorchState", install_hint("torch")),
        "parquet": BuiltIn("hps.models.formats.parquet:ParquetFiles", install_hint("import")),
        "dcp": BuiltIn("hps.models.formats.torch_distributed:DistributedCheckpoint", install_hint("torch")),
        "dynamicemb": BuiltIn("hps.models.formats.raw_dumps:DynamicembDump"),
        "hugectr": BuiltIn("hps.models.formats.raw_dumps:HugectrDump"),
        "sok": BuiltIn("hps.models.formats.raw_dumps:SokDump"),
        "int32_keys": BuiltIn("hps.models.formats.raw_dumps:Int32Keys"),
        "torcheasyrec": BuiltIn("hps.models.formats.numpy_files:NpzShards"),
        "torcheasyrec_delta": BuiltIn("hps.models.formats.parquet:DeltaParquet", install_hint("import")),
    },
    "transform": {
        "fnv1a": BuiltIn("hps.tensors.strings:hash_texts"),
    },
    "network": {
        "pt2": BuiltIn("hps.networks.torch_networks:ExportedProgram", install_hint("torch")),
        "torchscript": BuiltIn("hps.networks.torch_networks:TorchScript", install_hint("torch")),
        "onnx": BuiltIn("hps.networks.onnx_runtime:OnnxNetwork", install_hint("onnx")),
    },
}
_BASES = {
    "cache": "hps.cache.base:EmbeddingCache",
    "cache_plan": "hps.cache.base:CachePlan",
    "database": "hps.stores.base:Database",
    "filesystem": "hps.filesystems.base:FileSystem",
    "format": "hps.models.formats.base:ArraySource",
    "network": "hps.networks.base:Network",
    "update_log": "hps.updates.base:UpdateLog",
    "update_log_writer": "hps.updates.base:UpdateLogWriter",
}


def implementation(kind: str, name: str) -> Any:
    """Import and return the class that `name` selects.

    Args:
        kind: a key of `IMPLEMENTATIONS`.

    Raises:
        ConfigError: the name is not registered, and the message lists the known ones; or its package offers no usable class.
        MissingDependencyError: the class cannot be imported; the message names the package to install.
        HPSError: its module cannot be read, as without a free file descriptor.
    """
    ours = IMPLEMENTATIONS[kind].get(name)
    if ours is None:
        return _from_package(kind, name)
    target, hint, *_ = ours
    try:
        return _attribute(target)
    except ImportError as error:
        raise MissingDependencyError(f"{kind} {name!r} needs a package that is not installed ({error}): {hint}") from error
    except OSError as error:  # such as no free file descriptor
        raise HPSError(f"importing {kind} {name!r}: {error}") from error


def names(kind: str) -> list[str]:
    """Return all names that `implementation` accepts: built-in ones, then those of other packages."""
    return [*IMPLEMENTATIONS[kind], *external_names(kind)]


def external_names(kind: str) -> list[str]:
    return sorted(_entry_points(kind, tuple(sys.path)).keys() - IMPLEMENTATIONS[kind].keys())


def is_registered(kind: str, name: str) -> bool:
    """Return True if `implementation` accepts this name. Reads entry points only for names that are not built in."""
    return name in IMPLEMENTATIONS[kind] or name in external_names(kind)


def section_of(database: Any) -> str:
    """Return the configuration section that may select a class of databases."""
    return "persistent_db" if database.persistent else "volatile_db"


def has_capability(database: str, capability: Literal["OrderedWrites", "AgingRows"]) -> bool:
    """Return True if databases of a type have a capability of `stores/base.py`. All built-in ones do, and are not imported."""
    if database in IMPLEMENTATIONS["database"]:
        return True
    return issubclass(implementation("database", database), _attribute(f"hps.stores.base:{capability}"))


@cache
def _entry_points(kind: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind by name; `path` is sys.path, which is part of the cache's key."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"hps.{kind}s"):
        found.setdefault(point.name, []).append(point)
    return found


def _from_package(kind: str, name: str) -> Any:
    points = _entry_points(kind, tuple(sys.path)).get(name, [])
    packages = " and ".join(f"{point.dist.name} {point.dist.version}" for point in points if point.dist)
    if not points:
        known = sorted(name for name in names(kind) if name)
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(kind, [f"got {name!r}, expected one of: {', '.join(known)}{hint}"])
    # Two packages with one name: the order of `sys.path` would decide.
    if len(points) > 1:
        raise ConfigError(kind, [f"{name!r} is registered by {packages}; uninstall all but one"])
    place = f"{kind} {name!r} of the package {packages} ({points[0].value})"
    try:
        found = points[0].load()
    except ImportError as error:
        raise MissingDependencyError(f"{place} cannot be imported: {error}; install what the package needs") from error
    except Exception as error:
        raise ConfigError(place, [f"cannot be imported: {error!r}; install a version that works"]) from error
    if kind not in _BASES:  # functions
        return found
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
