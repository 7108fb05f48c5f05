"""How much memory this process may still take, what things need, and the refusal of what does not fit."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hps.errors import CapacityError

_V1_UNBOUNDED = 1 << 60  # version 1 has no word for it and names a number near 2^63

Place: TypeAlias = Literal["gpu", "pinned", "ram", "disk", "redis"]
"""Where memory is taken. What is pinned is of the machine's memory, too, and counted once: here, if a device reads it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that something takes. *Immutable.*

    Attributes:
        place: where.
        what: takes it, in words.
        size_bytes: how much.
        table: the name of the table; empty where it belongs to none.
        passing: it is taken only while tables are loaded.
    """

    place: Place
    what: str
    size_bytes: int
    table: str = ""
    passing: bool = False


def by_what(needs: Iterable[Need]) -> dict[str, int]:
    """Bytes by what needs them, as `check_fits` takes them."""
    return {need.what: need.size_bytes for need in needs}


def check_fits(doing: str, needs: Mapping[str, int], free_bytes: int, place: str, cure: str) -> None:
    """Refuse what does not fit.

    Args:
        doing: what the message begins with.
        needs: bytes by what needs them.
        free_bytes: bytes that are free.
        place: where they are free, with "in" or "on".
        cure: what would make room.

    Raises:
        CapacityError: the needs are more than what is free.
    """
    needed = sum(needs.values())
    if needed > free_bytes:
        each = ", ".join(f"{size:,} for {what}" for what, size in needs.items() if size)
        raise CapacityError(
            f"{doing}: got {needed:,} bytes to hold ({each}), expected at most the {max(0, free_bytes):,} that are free "
            f"{place}; {cure}"
        )


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still take without swapping or being killed, and which bound that is, for people.

    That is the least of what the machine has available and of what is left of the limit of each control group that it is in,
    of version 2 or 1. Page cache that the kernel can take back counts as free. Where the system says nothing there is no bound.

    Args:
        root: of the file system with `/proc` and `/sys`.
    """
    meminfo = _numbers(root / "proc/meminfo")
    bounds = [(meminfo["MemAvailable"] * 1024, "in the machine's memory")] if "MemAvailable" in meminfo else []
    for directory, limit_name, use_name, prefix in _control_groups(root):
        limit, use = _number(directory / limit_name), _number(directory / use_name)
        if limit is not None and use is not None and limit < _V1_UNBOUNDED:
            stat = _numbers(directory / "memory.stat")
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            bounds.append((limit - max(0, use - cached), f"below the limit of the control group {directory}"))
    return min(bounds, default=(sys.maxsize, ""))


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that the machine has; 0 where the system does not say."""
    return _numbers(root / "proc/meminfo").get("MemTotal", 0) * 1024


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The directories of this process' control groups of memory up to their root; and names of files and fields there.

    In a container the root is the process' own group, and the path that /proc names may not exist below it.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version_2 = ("memory.max", "memory.current", "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_") if controllers else version_2
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            yield directory, *names
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
