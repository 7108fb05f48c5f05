"""Compares host tiers that a configuration could have: RocksDB below a hash map, row files, and row files held in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hps.configuration.load import Configuration
from hps.tools.planning.memory import ServedVersion, planned_needs

SET_UPS: Final = {
    "rocks_db + hash_map": ("rocks_db", "hash_map", ()),
    "row_files": ("row_files", "disabled", ()),
    "row_files, resident": ("row_files", "disabled", (".*",)),
}
"""By name: `persistent_db.type`, `volatile_db.type` and `persistent_db.resident`."""

MEASURED_ON: Final = "a host with 16 cores, 4 M rows of 128 bytes"
_LOADED_BYTES_PER_S: Final = {"rocks_db": 115e6, "row_files": 1.07e9}
_STARTED_BYTES_PER_S: Final = {"rocks_db + hash_map": 0.48e9, "row_files, resident": 4e9}
_START_S: Final = 0.02
_ROWS_PER_S: Final = {"rocks_db + hash_map": 14.4e6, "row_files": 11.3e6, "row_files, resident": 11.3e6}
"""Measured rates (`benchmarks/results/row_files.json`, which a test compares):

*   loaded: `load`.
*   started: `start to the first answer`. It fills a hash map from RocksDB; opens row files; and reads and locks resident ones
    from the page cache at 4 GB/s, which no result has.
*   rows in memory that a thread reads a second: `warm`, batches of 100,000.
"""


@dataclass(frozen=True, slots=True)
class SetUp:
    """The needs and rates of one choice of host tiers, for all versions of a configuration. *Immutable.*"""

    name: str
    memory_bytes: int  # that the tiers allocate or lock, pinned memory included
    page_cache_bytes: int  # further memory that keeps all rows from the disk; the kernel gives it up when it is needed
    disk_bytes: int
    load_s: float  # the first start, without downloading; an estimate
    start_s: float  # each later start, with the files in the page cache; an estimate
    rows_per_s: float  # that a thread reads from memory; an estimate


def compare_set_ups(configuration: Configuration, versions: Sequence[ServedVersion], on_cuda: bool) -> list[SetUp]:
    """Compute what each set-up needs; none if the configuration has no database on disk."""
    if configuration.persistent_db.type == "disabled":
        return []
    return [_set_up(name, configuration, versions, on_cuda) for name in SET_UPS]


def _set_up(name: str, configuration: Configuration, versions: Sequence[ServedVersion], on_cuda: bool) -> SetUp:
    kind, volatile, resident = SET_UPS[name]
    changes = {
        "persistent_db": configuration.persistent_db.model_copy(update={"type": kind, "resident": resident}),
        "volatile_db": configuration.volatile_db.model_copy(update={"type": volatile, "initial_cache_rate": 1.0}),
    }
    needs = planned_needs(configuration.model_copy(update=changes), versions, on_cuda)
    tiers = [
        planned.need for planned in needs if planned.tier in ("volatile_db", "persistent_db") and not planned.need.temporary
    ]
    memory = sum(need.size_bytes for need in tiers if need.place in ("ram", "pinned"))
    disk = sum(need.size_bytes for need in tiers if need.place == "disk")
    return SetUp(
        name,
        memory,
        sum(need.size_bytes for need in tiers if need.table) if name == "row_files" else 0,
        disk,
        disk / _LOADED_BYTES_PER_S[kind],
        _START_S + (memory / _STARTED_BYTES_PER_S[name] if name in _STARTED_BYTES_PER_S else 0),
        _ROWS_PER_S[name],
    )
