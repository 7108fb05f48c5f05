"""Chooses the path of a cache's misses: the device reads the hash map or the row files in place, or the host fetches.

These are the *link* path and the *copy* path; see `docs/gpu-cache.md`. With `auto`, a deployment times both, once for each
table width, with rows of the table on an empty cache.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from hps.cache.base import EmbeddingCache, HostTableReads
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.session import CachedSession, SessionSettings
from hps.errors import DeviceError
from hps.ground.log_limits import LineLimit
from hps.ground.memory.host_tables import HostTable
from hps.ground.progress import size_text
from hps.statistics.metrics import Metrics
from hps.stores.base import Database
from hps.tensors.batch import Batch
from hps.types import KeyArray, TableSpec

_log = logging.getLogger(__name__)

_SAMPLE_KEYS, _SAMPLE_BYTES = 1 << 15, 16 << 20  # largest timed lookup: a large batch, whose rounds take 0.1 s
_ROUNDS = 3
_LOG_INTERVAL_S = 5.0
_SAMPLED_CHUNKS = 8
_SETTINGS = SessionSettings(hit_rate_threshold=math.inf)  # every lookup is complete

MissPath = Literal["auto", "link", "copy"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured rate of each path for the same misses, in keys a second. *Immutable.*"""

    link: float
    copy: float

    @property
    def link_is_faster(self) -> bool:
        return self.link >= self.copy

    def __str__(self) -> str:
        return f"a test answered {self.link / 1e6:.1f} M keys/s in place and {self.copy / 1e6:.1f} M/s through the host"


@dataclass(slots=True)
class MissPaths:
    """The miss path of each table of a cache.

    Attributes:
        stream_order_refusals: by table, why the device cannot answer its lookups alone.
        timings: by width, if the paths were timed.
    """

    paths: list[Literal["link", "copy"]] = field(default_factory=list)
    stream_order_refusals: dict[int, str] = field(default_factory=dict)
    timings: dict[int, Timing] = field(default_factory=dict)


def choose_paths(
    cache: EmbeddingCache,
    chain: DatabaseChain,
    wanted: MissPath,
    *,
    untimed: bool = False,
    index: bool = False,
) -> MissPaths:
    """Attach a cache to the tables that it reads in place. Called before the cache is warmed or serves.

    The host answers the misses of a table that cannot be read in place; one log line says why.

    Args:
        cache: an empty cache.
        untimed: with `auto`, choose link wherever possible, without timing.
        index: keep the index of linked tables on the device.

    Raises:
        DeviceError: `link` is wanted, and a table cannot be read in place.
    """
    chosen, attach = MissPaths(), partial(_attach, cache, indexed=index)
    refusals: dict[str, list[str]] = {}
    for number, table in enumerate(cache.tables):
        # With a database below, it may lack rows of that one, for instance after a failed write.
        # A key of another share is an error, which only the host finds.
        authoritative = (not chain.databases or chain.in_place is chain.databases[-1]) and table.share is None
        timed = wanted == "auto" and not untimed
        reason = _refusal(cache, chain, number, chosen.timings, wanted, attach, authoritative=authoritative, timed=timed)
        if reason and wanted == "link":
            raise DeviceError(
                f"deploying model {table.model_name!r}: miss_path is link, but table {table.table_name!r} cannot be read in "
                f"place: {reason}; change that, or set miss_path to auto or copy"
            )
        if reason:
            refusals.setdefault(reason, []).append(table.table_name)
        chosen.paths.append("copy" if reason else "link")
        if reason or not authoritative:
            chosen.stream_order_refusals[number] = reason or (
                f"keys that host memory lacks may be in the {chain.databases[-1].kind} below"
                if table.share is None
                else f"keys that host memory lacks may be of other shares than {table.share}"
            )
    _report(cache, chosen, refusals)
    return chosen


def _refusal(
    cache: EmbeddingCache,
    chain: DatabaseChain,
    index: int,
    timings: dict[int, Timing],
    wanted: MissPath,
    attach: Callable[..., str],
    *,
    authoritative: bool,
    timed: bool,
) -> str:
    """Attach a cache to one table, or return why it cannot be."""
    table = cache.tables[index]
    if wanted == "copy":
        return "miss_path is copy"
    host = chain.host_table(table)
    if host is None:
        kinds = " and ".join(database.kind for database in chain.databases) or "none"
        return f"the first database is neither a hash map in this process nor of row files: {kinds}"
    if table.width in timings and not timings[table.width].link_is_faster:
        return str(timings[table.width])
    if reason := attach(index, host, authoritative=authoritative):
        return reason
    database = chain.in_place
    if host.layout() is None:  # its file is still being downloaded
        return ""
    if not timed or database is None or table.width in timings or not (sample := _sample(database, table)).size:
        return ""
    link = _keys_per_s(cache, chain, index, sample)
    if isinstance(cache, HostTableReads):  # since it was attached
        cache.detach(index)
    timing = timings[table.width] = Timing(link, _keys_per_s(cache, chain, index, sample))
    if not timing.link_is_faster:
        return str(timing)
    return attach(index, host, authoritative=authoritative)


def _attach(cache: EmbeddingCache, index: int, host: HostTable, *, authoritative: bool, indexed: bool) -> str:
    """Attach a cache to a table, or return why it cannot be. Logs progress as often as a load."""
    if not isinstance(cache, HostTableReads):
        return "this cache does not read host memory in place"
    tag, lines = cache.tables[index].tag, LineLimit(1, _LOG_INTERVAL_S)
    lines.take()  # nothing is logged in the first interval

    def advance(done: int, total: int) -> None:
        if lines.take():
            _log.info("%s: %s of %s pinned, for the device to read.", tag, size_text(done), size_text(total))

    return cache.attach(index, host, advance, authoritative=authoritative, index=indexed) or ""


def _sample(database: Database, table: TableSpec) -> KeyArray:
    """Return keys from several places of a table, at most one timed lookup's, in no order."""
    most = max(1, min(_SAMPLE_KEYS, _SAMPLE_BYTES // (4 * table.width), table.max_keys))
    chunks = []
    for nth, (keys, _vectors) in enumerate(database.scan(table.tag, most)):
        chunks.append(keys)
        if nth + 1 == _SAMPLED_CHUNKS:
            break
    keys = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    sample: KeyArray = np.random.default_rng(keys.size).permutation(keys)[:most]
    return sample


def _keys_per_s(cache: EmbeddingCache, chain: DatabaseChain, index: int, keys: KeyArray) -> float:
    """Return the best rate of a few rounds of lookups whose keys are not resident. The cache ends up unchanged.

    Not counted in the metrics: the lookups use a session, a chain and metrics of their own.
    """
    if not keys.size:
        return 0.0
    table, metrics = cache.tables[index], Metrics()
    uncounted = DatabaseChain(chain.in_place, None, metrics=metrics)
    uncounted.open_table(table)
    session = CachedSession(cache.tables, cache, uncounted, FetchCoalescer(uncounted.fetch, metrics), _SETTINGS, metrics)
    out = cache.host_buffer((keys.size, table.dim), np.float32)  # the device writes it in place
    best = math.inf
    for _ in range(_ROUNDS + 1):  # the first round allocates and compiles
        start = time.perf_counter()
        session.run(Batch.of(index, keys, out))
        best = min(best, time.perf_counter() - start)
        cache.erase(index, keys)
    return float(keys.size / best)


def _report(cache: EmbeddingCache, chosen: MissPaths, refusals: Mapping[str, Sequence[str]]) -> None:
    where = f"model {cache.tables[0].model_name!r}, {cache.device} {cache.device_id}"
    linked = [table.table_name for table, path in zip(cache.tables, chosen.paths, strict=True) if path == "link"]
    if linked:
        _log.info("%s: misses of %s are answered from host memory by the device", where, ", ".join(linked))
    level = logging.DEBUG if cache.device == "cpu" else logging.INFO  # the host path is expected on the CPU
    for reason, names in refusals.items():
        _log.log(level, "%s: misses of %s are answered through the host: %s", where, ", ".join(names), reason)
    for width, timing in chosen.timings.items():
        _log.info("%s: misses of rows of %d bytes: %s", where, 4 * width, timing)
