"""The sizes of a model's caches, and how devices share its rows."""

import logging
import math
from collections.abc import Iterable, Sequence

from hps.cache.base import ALONE, NEAR_SHARE, DeviceSharing, EmbeddingCache, SharedRows
from hps.configuration.load import ModelConfig
from hps.stores.base import Database, DeviceReadable

_log = logging.getLogger(__name__)

RESIDENT = ("static", "uvm")
"""Cache types above a private hash map that holds every row."""


def is_direct(config: ModelConfig, cache_class: type[EmbeddingCache]) -> bool:
    """Return True if the databases answer without a cache: on the CPU, where they are as fast."""
    return cache_class.device == "cpu" and (config.embedding_cache_type in RESIDENT or not config.gpucache)


def is_static(config: ModelConfig) -> bool:
    """Return True if the caches of a model hold every row."""
    return config.embedding_cache_type == "static" and config.gpucache


def usable_sharing(
    config: ModelConfig, cache_class: type[EmbeddingCache], rows: Sequence[int]
) -> tuple[DeviceSharing, str | None]:
    """Return how the devices of a model share its rows, and the reason if not as configured."""
    sharing = device_sharing(config, rows) if cache_class.device != "cpu" else ALONE
    if not sharing.device_ids:
        return sharing, None
    if not issubclass(cache_class, SharedRows):
        return ALONE, "this cache does not share rows between devices"
    reason = cache_class.reason_against_sharing(sharing.device_ids)
    return (sharing if reason is None else ALONE), reason


def not_shared(config: ModelConfig, reason: str) -> str:
    """Describe why the devices of a model do not share its rows."""
    return f"device_sharing {config.device_sharing} is impossible here: {reason}; every device caches by itself (replicate)"


def device_sharing(config: ModelConfig, rows: Sequence[int]) -> DeviceSharing:
    """Return how the devices of a model share its rows according to the configuration."""
    if config.reason_against_sharing:
        return ALONE
    near = tuple(int(NEAR_SHARE * config.gpucacheper * count) for count in rows) if config.device_sharing == "hot" else ()
    return DeviceSharing(tuple(config.deployed_device_list), near)


def cache_capacities(config: ModelConfig, rows: Sequence[int], sharing: DeviceSharing = ALONE) -> list[int]:
    """Return the rows that a cache has room for, by table: of one device, or of all that share them, without near rows.

    Each device gives as many as it would cache by itself, and a shared cache needs room for every row once.
    """
    if not config.gpucache:
        return [0] * len(rows)
    if config.embedding_cache_type == "static":
        return list(rows)
    sizes = [math.ceil(config.gpucacheper * count) for count in rows]
    if not sharing.device_ids:
        return sizes
    near = sharing.near_rows or (0,) * len(rows)
    devices = len(sharing.device_ids)
    return [min(count, devices * (cached - hot)) for count, cached, hot in zip(rows, sizes, near, strict=True)]


def linked_kind(config: ModelConfig, kinds: Iterable[type[Database]]) -> type[DeviceReadable] | None:
    """Return the kind of database that devices read in place for a model's misses; None without one.

    Args:
        kinds: of the databases that the model's lookups ask, from the first.
    """
    if not config.gpucache or config.miss_path == "copy" or is_static(config):
        return None
    first = next(iter(kinds), None)
    return first if first is not None and issubclass(first, DeviceReadable) else None


def index_sizes(config: ModelConfig, rows: Sequence[int], kinds: Iterable[type[Database]]) -> list[int]:
    """Return the bytes of the indexes of tables in host memory for which a device must have room; empty without.

    Args:
        kinds: as of `linked_kind`.
    """
    kind = linked_kind(config, kinds)
    if kind is None or not (config.index_on_device or (kind.always_indexed and config.miss_path == "link")):
        return []
    return [kind.index_bytes(count) for count in rows]
