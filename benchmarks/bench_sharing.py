"""Devices that share the rows of a cache, beside copies on each, and beside a plain gather from both memories.

`resident`: half of the rows that are asked for lie in the memory of the other device. The limit is a plain kernel that copies
the same rows from their addresses on either device, in the same run. One device is queried alone, or all are at once.

`traffic`: keys by popularity, whose rows are in the hash map, which each device reads over its own link; the caches of all
devices together have room for a fifth of them. Every device answers lookups all the time, `threads` at once. What is asked is
the same for every sharing; `hit_rate` is counted after the same number of seconds.

Answers are compared on the device: the first batch of each way of `resident`, and every 50th lookup of `traffic`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np
import torch
from cupy_backends.cuda.api import runtime

from benchmarks.bench_misses import Table
from benchmarks.gpu import PLAIN, TUNED, WIDE, plain_gather, popular_keys, slots_of_resident_keys, vectors_of
from benchmarks.harness import Report, gpu_facts, microseconds, require
from hps.cache.base import NEAR_SHARE, DeviceSharing
from hps.cache.cuda.cache import CupyCache
from hps.cache.cuda.device import on_device
from hps.tensors.batch import Batch
from hps.types import TableSpec

_ROUNDS = 7
_LIMITS = {"plain": PLAIN, "tuned": TUNED, "wide": WIDE}  # the fastest of them counts


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    devices = tuple(range(min(runtime.getDeviceCount(), 2)))
    report.about |= {**gpu_facts(), "gpus": len(devices)}
    if reason := CupyCache.reason_against_sharing(devices):
        raise RuntimeError(f"these devices do not share memory: {reason}")
    for dim in (128, 32):
        report.part(f"resident, {dim}", 60, partial(_resident, report, devices, 1 << (17 if quick else 23), dim, quick))
    rows = 1 << (17 if quick else 24)
    table = report.part("filling", 90, partial(Table, rows, 128))
    if table is None:
        return
    for sharing in ("replicate", "partition", "hot"):
        report.part(f"traffic, {sharing}", 60, partial(_traffic, report, table, devices, sharing, quick))
    report.part("closing", 30, table.close)


# -- every key is resident ---------------------------------------------------------------------------------------------------


def _resident(report: Report, devices: Sequence[int], rows: int, dim: int, quick: bool) -> None:
    cache = CupyCache.create([TableSpec("bench", "items", dim, 0.0, 1 << 20)], [rows], 0, False, DeviceSharing(tuple(devices)))
    rng = np.random.default_rng(report.seed)
    ids = rng.permutation(2 * rows)[: rows * 6_400_000 >> 23].astype(np.int64)
    for piece in np.array_split(ids, 16):
        keys = cupy.asarray(piece)
        cache.insert(0, keys, vectors_of(keys, dim))
    resident, slots = slots_of_resident_keys(cache, 0)
    order = rng.permutation(resident.size)
    known = resident[order], slots[order]
    for n in (4096,) if quick else (1 << 20, 1 << 18, 1 << 16, 1 << 13):
        for requested in ([0], list(devices)):
            _resident_keys(report, cache, known, n, requested, rng)
    for device in devices:
        cache.leader.on(device).close()


def _resident_keys(report: Report, cache: CupyCache, known: tuple[Any, Any], n: int, requested: list[int], rng: Any) -> None:
    """Queries on some devices at once, and gathers of the same rows."""
    dim, table = cache.tables[0].dim, cache.memory.tables()[0]
    ways: dict[str, dict[int, list[Callable[[], None]]]] = {name: {} for name in ("query", *_LIMITS)}
    streams, share = {}, []
    for device in requested:
        with on_device(device):
            stream = streams[device] = cupy.cuda.Stream(non_blocking=True)
            out, lookup = cupy.empty((n, dim), cupy.float32), cache.leader.on(device).create_lookup()
            batches = []
            for _ in range(max(4, min(32, (1 << 22) // n))):
                pick = rng.integers(0, known[0].size, n)
                batches.append((cupy.asarray(known[0][pick]), cupy.asarray(known[1][pick])))
                share.append(float(np.mean(known[1][pick] < known[1].max() // 2)))
            with stream:
                ways["query"][device] = [partial(_query, lookup, keys, out) for keys, _ in batches]
                for name, variant in _LIMITS.items():
                    ways[name][device] = [plain_gather(variant, places, table.rows, out) for _, places in batches]
                for name in ways:
                    out.fill(cupy.nan)
                    ways[name][device][0]()
                    stream.synchronize()
                    require(bool((out == vectors_of(batches[0][0], dim)).all()))
    seconds = {name: _together(way, streams) for name, way in ways.items()}
    gathered = min(max(seconds[name].values()) for name in _LIMITS)
    figures = {
        "mkeys_per_s": n / max(seconds["query"].values()) / 1e6,
        "gather_mkeys_per_s": n / gathered / 1e6,
        "of_gather": gathered / max(seconds["query"].values()),
        "on_first_device": float(np.mean(share)),
    }
    report.add({"work": "resident", "dim": dim, "batch": n, "devices": len(requested), "resident": known[0].size}, figures)


def _query(lookup: Any, keys: Any, out: Any) -> None:
    lookup.start(Batch.of(0, keys, out))
    lookup.launch_query()


def _together(launches: dict[int, list[Callable[[], None]]], streams: dict[int, Any]) -> dict[int, float]:
    """Seconds of one of the launches of each device, all devices at once; the median of the rounds."""
    graphs, seconds = {}, {device: [] for device in launches}  # type: ignore[var-annotated]
    for device, own in launches.items():
        with on_device(device), streams[device]:
            streams[device].begin_capture()
            for launch in own:
                launch()
            graphs[device] = streams[device].end_capture()
    for nth in range(_ROUNDS + 1):
        marks = {}
        for device, graph in graphs.items():
            with on_device(device):
                marks[device] = cupy.cuda.Event(), cupy.cuda.Event()
                marks[device][0].record(streams[device])
                graph.launch(streams[device])
                marks[device][1].record(streams[device])
        for device, (start, stop) in marks.items():
            with on_device(device):
                stop.synchronize()
                if nth:
                    seconds[device].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / len(launches[device]))
    return {device: float(np.median(found)) for device, found in seconds.items()}


# -- keys by popularity --------------------------------------------------------------------------------------------------------


def _traffic(report: Report, table: Table, devices: Sequence[int], sharing: str, quick: bool) -> None:
    n, warm_s, measured_s = (4096, 0.5, 0.5) if quick else (262_144, 8.0, 3.0)
    own = table.rows // 10
    if sharing == "replicate":
        caches = [CupyCache.create([table.spec], [own], device) for device in devices]
    else:
        near = int(own * NEAR_SHARE) if sharing == "hot" else 0
        shared = DeviceSharing(tuple(devices), (near,) if near else ())
        leader = CupyCache.create([table.spec], [(own - near) * len(devices)], 0, False, shared)
        caches = [leader.on(device) for device in devices]  # type: ignore[misc]
    host = table.database.host_table(table.spec.tag)
    if host is None:
        raise RuntimeError("the hash map has no table that a device can read")
    for cache in caches:
        if refusal := cache.attach(0, host, authoritative=True):
            raise RuntimeError(f"the table cannot be read in place: {refusal}")
    for threads in (1, 2):
        found = _under_load(
            table, caches, devices, threads, n, warm_s if threads == 1 else measured_s / 3, measured_s, report.seed
        )
        figures: dict[str, Any] = {
            "mkeys_per_s": sum(thread["mkeys_per_s"] for thread in found) / len(devices),
            "hit_rate": float(np.mean([thread["hit_rate"] for thread in found])),
            "p50_us": float(np.mean([thread["p50_us"] for thread in found])),
            "p99_us": float(np.max([thread["p99_us"] for thread in found])),
            "checked_lookups": sum(thread["checked"] for thread in found),
        }
        if sharing == "hot":
            figures["near_rows"] = caches[0].stats(0).copied_rows
        axes = {"work": "traffic", "sharing": sharing, "threads": threads, "batch": n, "dim": table.dim, "rows": table.rows}
        report.add(axes, figures)
    for cache in caches:
        cache.close()


def _under_load(
    table: Table,
    caches: Sequence[CupyCache],
    devices: Sequence[int],
    threads: int,
    n: int,
    warm_s: float,
    measured_s: float,
    seed: int,
) -> list[dict[str, float]]:
    """Figures of each thread, `threads` of them on each device, after `warm_s` of the same traffic."""
    began, counting, done = time.perf_counter(), threading.Event(), threading.Event()
    found: list[dict[str, float]] = []
    failed: list[BaseException] = []

    def serve(place: int, device: int, nth: int) -> None:
        try:
            found.append(_served(table, caches[place], device, n, (seed, 2 * place + nth + 100 * threads), counting, done))
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    own = [(place, device, nth) for place, device in enumerate(devices) for nth in range(threads)]
    running = [threading.Thread(target=serve, args=arguments) for arguments in own]
    for thread in running:
        thread.start()
    while time.perf_counter() - began < warm_s and not failed:
        time.sleep(0.05)
    counting.set()
    time.sleep(measured_s)
    done.set()
    for thread in running:
        thread.join(30)
    if failed:
        raise failed[0]
    return found


def _served(
    table: Table, cache: CupyCache, device: int, n: int, seed: Any, counting: threading.Event, done: threading.Event
) -> dict[str, float]:
    """Look up on a device until it is done; figures of what was looked up since `counting`."""
    torch.cuda.set_device(device)
    place = f"cuda:{device}"
    random = torch.Generator(place).manual_seed(7919 * seed[0] + seed[1])
    by_rank = table.by_rank.to(place)
    out = torch.empty((n, table.dim), device=place)
    lookup, stream = cache.create_lookup(), torch.cuda.Stream(place)
    missed = lookups = requested = checked = 0
    seconds: list[float] = []
    began = 0.0
    torch.cuda.set_stream(stream)
    while not done.is_set():
        batches = popular_keys(by_rank, 8 * n, random).reshape(8, n)
        stream.synchronize()
        for keys in batches:
            start = time.perf_counter()
            lookup.query(Batch.of(0, keys, out))
            lookup.finish()
            stop = time.perf_counter()
            if counting.is_set():
                began = began or start
                seconds.append(stop - start)
                lookups += 1
                missed += sum(lookup.linked)
            requested += 1
            if requested % 50 == 1:
                with cupy.cuda.ExternalStream(stream.cuda_stream):
                    require(bool((cupy.asarray(out) == vectors_of(cupy.asarray(keys), table.dim)).all()))
                checked += 1
    times = np.array(seconds)
    return {
        "mkeys_per_s": n / float(times.mean()) / 1e6,
        "hit_rate": 1.0 - missed / (lookups * n),
        **microseconds(times),
        "checked": checked,
    }
