"""What a process may use: of the machine, and what control groups leave, as Linux tells it in files."""

import os
import sys
from pathlib import Path

import pytest

from hps.errors import CapacityError
from hps.ground.memory.capacity import available_memory, available_processors, check_fits

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
V1_UNBOUNDED = 9223372036854771712
MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n"}


def version_2(group: str, limit: object, use: int, cached: tuple[int, int] = (0, 0)) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cached[0]}\nactive_file {cached[1]}\nshmem 7\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{use}\n", "memory.stat": stat}
    return {f"{V2}{group}/{name}": text for name, text in files.items()}


def version_1(group: str, limit: int, use: int, cached: tuple[int, int] = (0, 0)) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {cached[0]}\ntotal_active_file {cached[1]}\n"
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{use}\n", "memory.stat": stat}
    return {f"{V1}{group}/{name}": text for name, text in files.items()}


def belongs_to(text: str) -> dict[str, str]:
    return {"proc/self/cgroup": text}


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("files", "free", "place"),
    [
        ({}, sys.maxsize, ""),
        (MACHINE, 8000 << 10, "machine"),
        (MACHINE | belongs_to("0::/\n"), 8000 << 10, "machine"),
        (MACHINE | belongs_to("0::/a\n") | version_2("/a", 1000, 900, (300, 200)), 600, f"{V2}/a"),
        (MACHINE | belongs_to("0::/a/b\n") | version_2("/a/b", "max", 5) | version_2("/a", 700, 100), 600, f"{V2}/a"),
        (MACHINE | belongs_to("0::/a\n") | version_2("/a", 1000, 1100), -100, f"{V2}/a"),
        (MACHINE | belongs_to("0::/docker/x\n") | version_2("", 500, 100), 400, V2),  # a container's own group is its root
        (MACHINE | belongs_to("4:cpu,memory:/a\n0::/\n") | version_1("/a", 1000, 900, (300, 200)), 600, f"{V1}/a"),
        (MACHINE | belongs_to("4:memory:/docker/x\n") | version_1("", 1000, 900), 100, V1),
        (MACHINE | belongs_to("4:memory:/a\n") | version_1("/a", V1_UNBOUNDED, 900), 8000 << 10, "machine"),
        (MACHINE | belongs_to("4:cpu:/a\n") | version_1("/a", 1000, 900), 8000 << 10, "machine"),
    ],
)
def test_the_least_bound_counts_and_reclaimable_pages_are_free(tmp_path: Path, files: dict[str, str], free: int, place: str):
    lay_out(tmp_path, files)
    got, where = available_memory(tmp_path)
    assert got == free
    assert where.endswith(place) or place in where


def test_this_machine_says_what_is_free():
    free, where = available_memory()
    assert 0 < free < sys.maxsize
    assert where


def test_what_does_not_fit_is_refused_with_figures():
    check_fits("doing", {"a": 600, "b": 400}, 1000, "in x", "cure")
    with pytest.raises(CapacityError) as refused:
        check_fits("doing", {"a": 600, "nothing": 0, "b": 401}, 1000, "in x", "cure")
    got = "got 1,001 bytes to hold (600 for a, 401 for b)"
    assert str(refused.value) == f"doing: {got}, expected at most the 1,000 that are free in x; cure"


def quota_1(group: str, quota: int) -> dict[str, str]:
    files = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}
    return {f"sys/fs/cgroup/cpu{group}/{name}": text for name, text in files.items()}


def quota_2(group: str, quota: object) -> dict[str, str]:
    return {f"{V2}{group}/cpu.max": f"{quota} 100000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        (belongs_to("0::/\n"), 64),
        (belongs_to("0::/\n") | quota_2("", "max"), 64),
        (belongs_to("0::/\n") | quota_2("", 400_000), 4),
        (belongs_to("0::/\n") | quota_2("", 350_000), 4),
        (belongs_to("0::/\n") | quota_2("", 50_000), 1),
        (belongs_to("0::/\n") | quota_2("", 9_000_000), 64),
        (belongs_to("0::/kubepods/pod1/c1\n") | quota_2("", 400_000), 4),  # a container without a namespace of its own
        (belongs_to("0::/pod/c\n") | quota_2("/pod/c", "max") | quota_2("/pod", 300_000), 3),
        (belongs_to("4:cpu,cpuacct:/pod/c\n0::/\n") | quota_1("", 400_000), 4),
        (belongs_to("4:cpu,cpuacct:/pod/c\n0::/\n") | quota_1("/pod/c", 250_000) | quota_1("", -1), 3),
        (belongs_to("4:cpu:/\n") | quota_1("", -1), 64),
        (belongs_to("4:cpuset:/\n") | quota_1("", 400_000), 64),
        (belongs_to("0::/\n") | {f"{V2}/cpu.max": "garbage\n"}, 64),
    ],
)
def test_processors_are_those_of_the_affinity_and_the_least_quota(
    tmp_path: Path, monkeypatch, files: dict[str, str], expected: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    lay_out(tmp_path, files)
    assert available_processors(tmp_path) == expected
