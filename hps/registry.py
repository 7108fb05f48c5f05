"""Implementations by the configuration value that selects them; imported on first use.

A new tier, file system or cache is one new file and one line here.
"""

from importlib import import_module
from typing import Any

from hps.errors import ConfigError, MissingDependencyError

# kind -> name -> (module:attribute, what to install when its import fails)
IMPLEMENTATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "cache": {
        "cpu": ("hps.cache.cpu.cache:NumpyCache", "pip install hps-server"),
        "cuda": ("hps.cache.cuda.cache:CupyCache", "pip install 'hps-server[cuda13]' (or [cuda12])"),
    },
    "database": {
        "hash_map": ("hps.databases.hash_map.database:HashMapDatabase", "pip install hps-server"),
        "parallel_hash_map": ("hps.databases.hash_map.database:HashMapDatabase", "pip install hps-server"),
        "redis_cluster": ("hps.databases.redis.database:RedisDatabase", "pip install hps-server"),
        "rocks_db": ("hps.databases.rocks_db.database:RocksDatabase", "pip install hps-server"),
    },
    "filesystem": {
        "": ("hps.filesystems.local:LocalFileSystem", "pip install hps-server"),
        "file": ("hps.filesystems.local:LocalFileSystem", "pip install hps-server"),
        "hdfs": ("hps.filesystems.hdfs:HdfsFileSystem", "pip install 'hps-server[hdfs]'"),
        "s3": ("hps.filesystems.s3:S3FileSystem", "pip install hps-server"),
        "s3a": ("hps.filesystems.s3:S3FileSystem", "pip install hps-server"),
        "gs": ("hps.filesystems.gcs:GcsFileSystem", "pip install 'hps-server[gcs]'"),
    },
    "format": {
        "npy": ("hps.formats.numpy_files:NpyFiles", "pip install hps-server"),
        "npz": ("hps.formats.numpy_files:NpzArchive", "pip install hps-server"),
        "safetensors": ("hps.formats.safetensors_file:SafetensorsFile", "pip install hps-server"),
        "torch": ("hps.formats.torch_state:TorchState", "pip install torch"),
        "parquet": ("hps.formats.parquet:ParquetFiles", "pip install 'hps-server[import]'"),
    },
}


def implementation(kind: str, name: str) -> Any:
    """Import and return the class that `name` selects.

    Raises:
        ConfigError: nothing of this name is registered; the message lists what is.
        MissingDependencyError: its package is not installed; the message says how to install it.
    """
    try:
        target, hint = IMPLEMENTATIONS[kind][name]
    except KeyError:
        known = ", ".join(sorted(name for name in IMPLEMENTATIONS[kind] if name))
        raise ConfigError(kind, [f"got {name!r}, wanted one of: {known}"]) from None
    module, attribute = target.split(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise MissingDependencyError(f"{kind} {name!r} needs a package that is not installed ({error}): {hint}") from error
