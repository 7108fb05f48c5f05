"""Computes the memory that a configuration needs on each tier before it is loaded, and whether this machine has it."""

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hps.cache.base import ALONE, MOST_SHARERS, CachePlan, DeviceSharing, KeptKernels
from hps.configuration.load import Configuration, ModelConfig, ServiceConfig
from hps.configuration.tiers import PersistentDbConfig, VolatileDbConfig
from hps.errors import ConfigError, HPSError, MissingDependencyError
from hps.ground.memory.capacity import Need, Place, available_memory
from hps.ground.registry import implementation
from hps.models.deltas import DeltaModel, open_table_files
from hps.models.files import CHUNK_BYTES, SparseModel
from hps.models.network_files import NetworkFiles
from hps.models.sealed import SealedModel
from hps.models.sources import ModelSources
from hps.regions.layout import MOST_SNAPSHOT_BYTES, SLAB
from hps.regions.sharing import body_bytes, default_fronts, slab_bytes
from hps.stores.base import Database
from hps.tools.planning.networks import activation_needs, engine_needs, network_needs
from hps.versions.cache_sizes import RESIDENT, cache_capacities, device_sharing, index_sizes, is_direct, is_static, linked_kind
from hps.versions.catalog import ModelCatalog
from hps.versions.device_kernels import kept_kernels

PLACES: Final[tuple[Place, ...]] = ("gpu", "pinned", "ram", "disk", "redis")
_PROCESS_BYTES: Final = 300 << 20
"""Memory of an idle process: Python, NumPy, numba and its kernels, RocksDB's and Redis' clients."""
_FRONT_BYTES: Final = 65 << 20
"""Memory that a frontend process, or the parent, does not share with the others."""
_CHUNKS: Final = 4  # chunks of model files that a load holds at once


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version to be served, with the rows and the files of each table, and the file of its network. *Immutable.*"""

    config: ModelConfig
    rows: tuple[int, ...]
    network: NetworkFiles | None = None
    network_bytes: int = 0
    files: tuple[SparseModel | SealedModel | DeltaModel, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedNeed:
    """Memory that a version needs on one tier; `model` is empty for shared memory. *Immutable.*"""

    model: str
    version: str
    tier: str  # `embedding_cache`, `network`, `volatile_db`, `persistent_db`, `workspaces`, `process` or `fronts`
    need: Need
    device: int | None = None  # id of the GPU


@dataclass(frozen=True, slots=True)
class Machine:
    """Free memory: bytes by place, and the source of each figure. Unknown places are missing. *Immutable.*

    For several GPUs, the figure is that of each.
    """

    free_bytes: Mapping[Place, int]
    source: Mapping[Place, str]


@dataclass(frozen=True, slots=True)
class Total:
    """Total memory needed at one place. *Immutable.*"""

    place: Place
    size_bytes: int  # when everything is loaded; for several GPUs, on the fullest
    peak_bytes: int  # during the load
    free_bytes: int | None  # free memory; None if unknown

    @property
    def fits(self) -> bool | None:
        return None if self.free_bytes is None else self.peak_bytes <= self.free_bytes


def served_versions(configuration: Configuration) -> list[ServedVersion]:
    """List the versions that a server would load. Reads only file sizes.

    Raises:
        ConfigError: files are missing or do not fit; the message lists every problem.
    """
    sources = ModelSources(configuration.model_source)
    catalog = ModelCatalog(configuration, sources)
    versions, problems = [], []
    for name in catalog.names:
        try:
            for number in catalog.to_serve(name):
                version = catalog.version(name, number)
                config, int32_keys = version.config, not configuration.supportlonglong
                files = [
                    open_table_files(source, table.dim, int32_keys=int32_keys, sources=sources, share=table.share)
                    for table, source in zip(config.tables, version.sources, strict=True)
                ]
                network_bytes = 0 if version.network is None else version.network.size_bytes(sources)
                rows = tuple(table_files.own_rows for table_files in files)
                versions.append(ServedVersion(config, rows, version.network, network_bytes, tuple(files)))
        except HPSError as error:
            problems.append(f"model {name!r}: {error}")
    if problems:
        raise ConfigError("planning", problems)
    return versions


def planned_needs(configuration: Configuration, versions: Sequence[ServedVersion], on_cuda: bool) -> list[PlannedNeed]:
    """Compute the needs of each version on each tier, with the formulas that the tiers check before a load.

    Args:
        on_cuda: whether embedding caches are on GPUs.
    """
    needs = [PlannedNeed("", "", "process", Need("ram", "the process itself", _PROCESS_BYTES))]
    stored: dict[
        tuple[str, bool], tuple[type[Database], VolatileDbConfig | PersistentDbConfig, list[tuple[str, int, int]]]
    ] = {}
    tables_by_tag = {}
    load_bytes, plan = CHUNK_BYTES, cache_plan(on_cuda)
    for version in versions:
        config, tables = version.config, version.config.tables
        if on_cuda or not is_direct(config, implementation("cache", "cpu")):
            sharing, capacities = cached_rows(version, on_cuda)
            for device in config.deployed_device_list[: None if on_cuda else 1]:
                needs_of_cache = plan.room_for(tables, capacities, is_static(config), sharing)
                if on_cuda:
                    sizes = index_sizes(config, version.rows, _kinds(configuration, config))
                    needs_of_cache += [
                        Need("gpu", f"index of table {table.table_name!r} in host memory", size_bytes, table.table_name)
                        for table, size_bytes in zip(tables, sizes, strict=False)
                    ]
                workspaces = plan.workspaces_for(tables, config.num_of_worker_buffer_in_pool)
                needs += _needs_of(config, "embedding_cache", needs_of_cache, device if on_cuda else None)
                needs += _needs_of(config, "workspaces", workspaces, device if on_cuda else None)
        if version.network is not None:
            for on_gpu, need in network_needs(config, version.network_bytes, on_cuda):
                needs += _needs_of(config, "network", [need], on_gpu)
        for tier, database, section, share in _databases(configuration, config):
            stored_tables = [table.stored_as(section.row_dtype) for table in tables]
            tables_by_tag.update({table.tag: (config.model, config.version, table.table_name) for table in stored_tables})
            rows = [
                (table.tag, table.width, math.ceil(share * n)) for table, n in zip(stored_tables, version.rows, strict=True)
            ]
            has_hash_map = tier == "volatile_db" and config.embedding_cache_type in RESIDENT
            stored.setdefault((tier, has_hash_map), (database, section, []))[2].extend(rows)
            load_bytes = max(load_bytes, getattr(database, "load_bytes", 0))
    for (tier, _), (database, section, rows) in stored.items():
        for need in database.room_for(section, rows):
            model, number, table = tables_by_tag.get(need.table, ("", "", ""))
            linked = _linked(configuration, versions, model, number, database) if on_cuda and need.table else None
            needs += [
                PlannedNeed(model, number, tier, replace(held, table=table))
                for held in _held(need, linked, persistent=tier == "persistent_db")
            ]
    formats = {version.network.config.format for version in versions if version.network is not None}
    needs += [PlannedNeed("", "", "process", need) for need in engine_needs(formats)]
    if stored:
        needs.append(PlannedNeed("", "", "process", Need("ram", "chunks of files", _CHUNKS * load_bytes, temporary=True)))
    return needs


def run_needs(configuration: Configuration, versions: Sequence[ServedVersion], on_cuda: bool) -> list[PlannedNeed]:
    """Run the network of each version on the CPU, and return what its runs need.

    Raises:
        ModelFileError, NetworkError: as of `activation_needs`.
    """
    sources, needs = ModelSources(configuration.model_source), []
    for version in versions:
        if version.network is not None:
            for device, need in activation_needs(version.config, version.network.read(sources), on_cuda):
                needs += _needs_of(version.config, "network", [need], device)
    return needs


def frontend_needs(settings: ServiceConfig, on_cuda: bool, processors: int | None = None) -> list[PlannedNeed]:
    """Compute the memory of the frontend processes of a service, with the maximum for requests and answers.

    Args:
        on_cuda: whether embedding caches are on GPUs, which pins the slabs.
        processors: of the machine, for the default number of frontends; by default those that this process may use.
    """
    processes = default_fronts(processors) if settings.fronts is None else settings.fronts
    fronts = processes or 1  # without processes one frontend runs in the engine
    needs = [
        Need("pinned" if on_cuda else "ram", "keys and vectors of lookups", fronts * (SLAB + slab_bytes(settings, fronts))),
        Need("ram", "requests and answers, at most", fronts * body_bytes(settings, fronts) + MOST_SNAPSHOT_BYTES),
    ]
    if processes:
        needs.insert(0, Need("ram", f"the parent and {processes} frontend processes", (1 + processes) * _FRONT_BYTES))
    return [PlannedNeed("", "", "fronts", need) for need in needs]


def totals(needs: Iterable[PlannedNeed], machine: Machine) -> list[Total]:
    """Sum the needs by place; pinned memory counts as RAM, too."""
    needs = list(needs)
    totals_ = []
    for place in PLACES:
        places = ("ram", "pinned") if place == "ram" else (place,)
        needs_here = [planned for planned in needs if planned.need.place in places]
        if not needs_here:
            continue
        devices = {planned.device for planned in needs_here} if place == "gpu" else {None}
        fullest = (0, 0)
        for device in devices:
            needs_of_device = [planned.need for planned in needs_here if place != "gpu" or planned.device == device]
            size = sum(need.size_bytes for need in needs_of_device if not need.temporary)
            fullest = max(fullest, (size, size + sum(need.size_bytes for need in needs_of_device if need.temporary)))
        totals_.append(Total(place, *fullest, machine.free_bytes.get(place)))
    return totals_


def this_machine(configuration: Configuration, overrides: Mapping[Place, int]) -> Machine:
    """Measure the free memory of this machine; `overrides` has free bytes by place of another one."""
    free, source = dict(overrides), dict.fromkeys(overrides, "as given")
    if "ram" not in free:
        free["ram"], source["ram"] = available_memory()
    path = Path(configuration.persistent_db.path).absolute()
    if "disk" not in free and configuration.persistent_db.type != "disabled":
        existing = next(directory for directory in (path, *path.parents) if directory.exists())
        table_bytes = sum(file.stat().st_size for file in path.glob("*.sst")) if path.exists() else 0
        free["disk"], source["disk"] = shutil.disk_usage(existing).free + table_bytes, f"on the file system of {existing}"
        if table_bytes:
            source["disk"] += f", including {table_bytes:,} bytes of the tables there"
    if "gpu" not in free and (devices := _gpu_memory(configuration)):
        free["gpu"], source["gpu"] = min(devices), "on each of the configured GPUs"
    return Machine(free, source)


def caches_on_cuda(configuration: Configuration, machine: Machine) -> bool:
    return configuration.device == "cuda" or (configuration.device == "auto" and "gpu" in machine.free_bytes)


def cache_plan(on_cuda: bool) -> type[CachePlan]:
    plan: type[CachePlan] = implementation("cache_plan", "cuda" if on_cuda else "cpu")
    return plan


def cached_rows(version: ServedVersion, on_cuda: bool) -> tuple[DeviceSharing, list[int]]:
    """Return how devices share the rows of a version, and the rows that its caches have room for, as `cache_capacities`."""
    sharing = device_sharing(version.config, version.rows) if on_cuda else ALONE
    if len(sharing.device_ids) > MOST_SHARERS:
        sharing = ALONE
    return sharing, cache_capacities(version.config, version.rows, sharing)


def share_within(budget: int, versions: Sequence[ServedVersion], on_cuda: bool) -> float:
    """Find the largest `gpucacheper`, common to all models, whose caches fit a budget on a device."""
    plan, cached = cache_plan(on_cuda), [version for version in versions if version.config.gpucache]

    def needed(share: float) -> int:
        rooms = (plan.room_for(version.config.tables, [math.ceil(share * rows) for rows in version.rows]) for version in cached)
        return sum(need.size_bytes for needs in rooms for need in needs)

    if needed(1.0) <= budget:
        return 1.0
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle / 10_000) <= budget else (low, middle)
    return low / 10_000


def _gpu_memory(configuration: Configuration) -> list[int]:
    if configuration.device == "cpu":
        return []
    try:
        cuda = implementation("cache", "cuda")
    except MissingDependencyError:
        return []
    devices = sorted({device for model in configuration.models for device in model.deployed_device_list})
    free = [cuda.free_bytes(device) for device in devices] if cuda.unavailable_reason() is None else []
    return [free_bytes for free_bytes in free if free_bytes is not None]


def kernels_here(models: Sequence[ModelConfig]) -> list[KeptKernels]:
    """Count the CUDA kernels of models that are compiled here, by kind of GPU; empty without a GPU, or without CuPy."""
    with suppress(HPSError):
        cuda = implementation("cache", "cuda")
        if cuda.unavailable_reason() is None:
            return kept_kernels(models, cuda)
    return []


def _databases(
    configuration: Configuration, model: ModelConfig
) -> Iterable[tuple[str, type[Database], VolatileDbConfig | PersistentDbConfig, float]]:
    """Yield the databases that a version is loaded into: tier, class, configuration section, share of the rows."""
    volatile, persistent = configuration.volatile_db, configuration.persistent_db
    if model.embedding_cache_type in RESIDENT:
        hash_map = type(volatile)(type="hash_map")
        yield "volatile_db", implementation("database", "hash_map"), hash_map, 1.0
    elif volatile.type != "disabled" and volatile.initialize_after_startup and model.embedding_cache_type != "stochastic":
        yield "volatile_db", implementation("database", volatile.type), volatile, volatile.initial_cache_rate
    if persistent.type != "disabled" and persistent.initialize_after_startup and model.embedding_cache_type != "stochastic":
        yield "persistent_db", implementation("database", persistent.type), persistent, 1.0


def _kinds(configuration: Configuration, model: ModelConfig) -> list[type[Database]]:
    """Return the kinds of the databases that a model's lookups ask, from the first."""
    resident = ["hash_map"] if model.embedding_cache_type in RESIDENT else []
    types = [*resident, configuration.volatile_db.type, configuration.persistent_db.type]
    return [implementation("database", kind) for kind in types if kind != "disabled"]


def _linked(
    configuration: Configuration, versions: Sequence[ServedVersion], model: str, number: str, database: type[Database]
) -> ModelConfig | None:
    """Return the version's configuration if a device may read its tables in such a database in place, which pins them."""
    config = next(version.config for version in versions if (version.config.model, version.config.version) == (model, number))
    kind = linked_kind(config, _kinds(configuration, config))
    return config if kind and issubclass(database, kind) else None


def _held(need: Need, linked: ModelConfig | None, *, persistent: bool) -> list[Need]:
    """Return what a need of a database becomes if devices read its table in place, which pins it.

    Args:
        linked: the configuration of the table's version, if they may.
    """
    if linked is None or (persistent and linked.miss_path != "link"):  # the host answers where a file does not fit
        return [need]
    if not persistent:
        return [replace(need, place="pinned")] if need.place == "ram" else [need]
    if need.place == "ram":
        return []  # pinned files are resident, too
    return [need, replace(need, place="pinned", what=f"{need.what}, which devices read in place")]


def _needs_of(config: ModelConfig, tier: str, needs: Iterable[Need], device: int | None) -> list[PlannedNeed]:
    return [PlannedNeed(config.model, config.version, tier, need, device) for need in needs]
