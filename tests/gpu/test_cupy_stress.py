"""Queries on several streams beside inserts, updates and erases: no vector is torn, stale or another key's.

Everything runs and is checked on the device, so that millions of vectors are; the count is printed. A vector holds its
key's low bits, its key's high bits, and the generation it was written in, over and over.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hps.tensors.batch import Batch
from hps.testing.caches import spec
from hps.testing.waiting import PATIENCE_S
from tests.gpu.cupy_if_installed import CupyCache, cupy

pytestmark = pytest.mark.gpu

SECONDS = float(os.environ.get("HPS_STRESS_SECONDS", "4"))
READERS, WRITERS = 4, 2


def vectors_on_device(keys: Any, dim: int, generation: int) -> Any:
    columns = cupy.arange(dim) % 3
    low, high = (keys & 0xFFFFF)[:, None], ((keys >> 20) & 0xFFFFF)[:, None]
    return cupy.where(columns == 0, low, cupy.where(columns == 1, high, generation)).astype(cupy.float32)


def stress(caches: list[Any], dim: int, capacity: int, *, copying: Sequence[Any] = ()) -> str:
    """Read and write through the caches of one device, or of those that share its rows, and say how much was checked.

    Args:
        copying: the caches of devices that read rows of others, and copy the most used of them.
    """
    cache = caches[0]
    population = np.unique(np.random.default_rng(1).integers(-(1 << 62), 1 << 62, 2 * capacity))
    begun, complete = np.zeros(WRITERS, np.int64), np.zeros(WRITERS, np.int64)
    done = threading.Event()

    def write(writer: int) -> int:
        """Each writer has keys of its own; generation g of all of them is complete before g + 1 begins."""
        own, mine = caches[writer % len(caches)], population[writer::WRITERS]
        pick, generation = np.random.default_rng(writer), 0
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            on_device = cupy.asarray(mine)
            while not done.is_set():
                generation += 1
                begun[writer] = generation
                vectors = vectors_on_device(on_device, dim, generation)
                for part in np.array_split(pick.permutation(mine.size), 4):
                    chosen = cupy.asarray(np.concatenate([part, part[: part.size // 4]]))  # some twice
                    keys, rows = on_device[chosen], vectors[chosen]
                    if pick.random() < 0.3:
                        keys, rows = keys.get(), rows.get()
                    (own.insert if pick.random() < 0.5 else own.update)(0, keys, rows)
                complete[writer] = generation
                if pick.random() < 0.2:
                    own.erase(0, mine[pick.integers(0, mine.size, max(1, mine.size // 10))])
        return generation

    def read(reader: int) -> tuple[int, int]:
        own, checked, wrong, asked = caches[reader % len(caches)], 0, 0, 0
        skew = np.random.default_rng(100 + reader)
        keys_host = population[np.minimum(skew.zipf(1.2, 1 << 16) - 1, population.size - 1)]
        owner = np.searchsorted(population, keys_host) % WRITERS
        with cupy.cuda.Device(own.device_id), cupy.cuda.Stream(non_blocking=True):
            keys, owners = cupy.asarray(keys_host), cupy.asarray(owner)
            expected = vectors_on_device(keys, dim, 0)
            is_generation = cupy.arange(dim) % 3 == 2
            lookup = own.create_lookup()
            while not done.is_set() or asked < 20:
                asked += 1
                out, found = cupy.full((keys.size, dim), cupy.nan, cupy.float32), cupy.zeros(keys.size, cupy.bool_)
                oldest = cupy.asarray(complete.copy())[owners]
                lookup.query(Batch.of(0, keys, out, found))
                lookup.finish()
                newest = cupy.asarray(begun.copy())[owners]
                generation = out[:, 2]
                whole = cupy.where(is_generation, generation[:, None], expected) == out
                good = whole.all(1) & (generation >= oldest) & (generation <= newest)
                wrong += int((found & ~good).sum())
                checked += int(found.sum())
        return checked, wrong

    with ThreadPoolExecutor(READERS + WRITERS) as pool:
        writing = [pool.submit(write, writer) for writer in range(WRITERS)]
        reading = [pool.submit(read, reader) for reader in range(READERS)]
        begin, most = time.monotonic(), 0  # a change drops copies, and fewer may be left at the end
        try:
            while (age := time.monotonic() - begin) < SECONDS or complete.min() < 2 or (copying and not most):
                assert age < SECONDS + PATIENCE_S, f"{complete.min()} generations were written, and no copies seen"
                time.sleep(0.05)
                most = max(most, min((cache.stats(0).copied_rows for cache in copying), default=0))
        finally:
            done.set()
        generations = [writer.result(timeout=60) for writer in writing]
        results = [reader.result(timeout=60) for reader in reading]
    checked, wrong = (sum(column) for column in zip(*results, strict=True))
    stats, resident = cache.stats(0), cache.dump(0)
    assert resident.size == np.unique(resident).size
    assert resident.size == stats.resident_rows or (copying and resident.size > stats.resident_rows)
    assert wrong == 0
    assert checked > 100_000
    assert min(generations) > 1
    copies = f", up to {most} copies a device" * bool(copying)
    return f"dim {dim}, {capacity} rows: {checked / 1e6:.1f} M vectors checked, {generations} generations written{copies}"


@pytest.mark.parametrize(("dim", "capacity"), [(3, 28), (4, 1000), (32, 28), (32, 5000), (128, 280), (128, 20_000), (300, 500)])
def test_no_vector_is_torn_stale_or_anothers_on_several_streams(dim: int, capacity: int, capsys: pytest.CaptureFixture[str]):
    cache = CupyCache.create([spec(dim)], [capacity], 0)
    said = stress([cache], dim, capacity)
    cache.close()
    with capsys.disabled():
        sys.stdout.write(f"\n{said}\n")
