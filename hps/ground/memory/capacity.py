"""Computes the memory and the processors that this process may use, and rejects needs that do not fit."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hps.errors import CapacityError

_V1_UNBOUNDED = 1 << 60  # version 1 writes a number near 2^63
_MEMORY_FILES = {  # limit, use, prefix of fields of memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}

Place: TypeAlias = Literal["gpu", "pinned", "ram", "disk", "redis"]
"""Kind of memory. Pinned memory is part of the machine's memory and counted once: here if a device reads it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory needed for one purpose. *Immutable.*"""

    place: Place
    what: str  # purpose, in words
    size_bytes: int
    table: str = ""  # its name, if any
    temporary: bool = False  # needed only while tables are loaded


def by_purpose(needs: Iterable[Need]) -> dict[str, int]:
    """Map purposes to bytes, as `check_fits` takes them."""
    return {need.what: need.size_bytes for need in needs}


def check_fits(doing: str, needs: Mapping[str, int], free_bytes: int, place: str, cure: str) -> None:
    """Raise CapacityError if needs, in bytes by purpose, exceed the free memory of a place. `doing` starts the message."""
    needed = sum(needs.values())
    if needed > free_bytes:
        each = ", ".join(f"{size:,} for {what}" for what, size in needs.items() if size)
        raise CapacityError(
            f"{doing}: got {needed:,} bytes to hold ({each}), expected at most the {max(0, free_bytes):,} that are free "
            f"{place}; {cure}"
        )


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that this process may allocate without swapping or being killed, and the binding limit as text.

    The minimum of the machine's available memory and the remaining limit of each control group of the process, of version 2 or
    1. Reclaimable page cache counts as free. Without information from the system there is no limit.
    """
    meminfo = _numbers(root / "proc/meminfo")
    bounds = [(meminfo["MemAvailable"] * 1024, "in the machine's memory")] if "MemAvailable" in meminfo else []
    for directory, version in _control_groups(root, "memory"):
        limit_name, use_name, prefix = _MEMORY_FILES[version]
        limit, use = _number(directory / limit_name), _number(directory / use_name)
        if limit is not None and use is not None and limit < _V1_UNBOUNDED:
            stat = _numbers(directory / "memory.stat")
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            bounds.append((limit - max(0, use - cached), f"below the limit of the control group {directory}"))
    return min(bounds, default=(sys.maxsize, ""))


def machine_memory(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes; 0 if the system does not report it."""
    return _numbers(root / "proc/meminfo").get("MemTotal", 0) * 1024


def available_processors(root: Path = Path("/")) -> int:
    """Return how many processors this process may use by its affinity and the quotas of its control groups."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory, version in _control_groups(root, "cpu"):
        if version == 2:
            quota, period = [*_text(directory / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = (_text(directory / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # not `max`, nor -1
            most = min(most, max(1, math.ceil(int(quota) / int(period))))
    return most


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process for a controller, up to the root, with their version."""
    # In a container the mounted root is the process's own group, so the path in /proc may not exist below it.
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            yield directory, 1 if controllers else 2
            if directory == top:
                break


def _numbers(file: Path) -> dict[str, int]:
    fields = [line.replace(":", " ").split() for line in _text(file).splitlines()]
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdecimal()}


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
