"""Devices that share the rows of a cache: the contract on each of them, copies, and all of it under load."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hps.cache.base import ALONE, DeviceSharing, EmbeddingCache
from hps.cache.cuda import geometry, kernels, structs
from hps.tensors.batch import Batch
from hps.testing.caches import distinct_keys, spec, vectors_of
from hps.types import TableSpec
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.gpu.test_cupy_cache import CupyContract, copy_of, write_to
from tests.gpu.test_cupy_stress import stress

pytestmark = [pytest.mark.gpu]

DEVICES = (0, 1)


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    if reason := CupyCache.reason_against_sharing(DEVICES):
        pytest.skip(reason)


def close(cache: EmbeddingCache) -> None:
    for device in DEVICES:
        cache.leader.on(device).close()


def check_copies(cache: EmbeddingCache, table: int = 0) -> None:
    """The copies of the buckets are the same but for scores, and but for what is kept in the leading one alone."""
    memory = cache.memory.open[table]
    for device in DEVICES:
        with cupy.cuda.Device(device):
            cupy.cuda.Device().synchronize()
    if not memory.pairs:
        return
    first, second = (copy_of(memory.buckets_on(device), 16 * memory.pairs, np.int64).reshape(-1, 8) for device in DEVICES)
    np.testing.assert_array_equal(first[:, 1:], second[:, 1:])
    kept = 0xFFFFFFFFFFFFFFFF if cache.static else 0xFF00FFFF
    np.testing.assert_array_equal(first[:, 0].view(np.uint64) & np.uint64(kept), second[:, 0].view(np.uint64) & np.uint64(kept))


class VersionWord:
    """The version of a bucket, whatever its device, as an array of one word."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __getitem__(self, _place: int) -> int:
        return int(copy_of(self._address, 1, np.uint16)[0])

    def _set(self, value: int) -> "VersionWord":
        write_to(self._address, np.array([value], np.uint16))
        return self

    def __ior__(self, bits: int) -> "VersionWord":
        return self._set(self[0] | bits)

    def __ixor__(self, bits: int) -> "VersionWord":
        return self._set(self[0] ^ bits)


class SharedContract(CupyContract):
    """The contract, of a cache that two devices share, as seen from one of them."""

    device: int
    stress_queries = 100

    def make_cache(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], static: bool) -> EmbeddingCache:
        return CupyCache.create(tables, capacity_rows, self.device, static, DeviceSharing(DEVICES))

    def to_device(self, array: np.ndarray) -> Any:
        with cupy.cuda.Device(self.device):
            return cupy.asarray(array)

    def to_host(self, array: Any) -> np.ndarray:
        return array.get()

    def raw_version(self, cache: EmbeddingCache) -> Any:
        return VersionWord(cache.memory.open[0].buckets_on(self.device))

    def raw_rows(self, cache: EmbeddingCache, table: int) -> dict[int, bytes]:
        if cache.memory.open is not None:
            check_copies(cache, table)
        return super().raw_rows(cache, table)


class TestFirstDevice(SharedContract):
    device = 0


class TestSecondDevice(SharedContract):
    device = 1


def query(cache: EmbeddingCache, keys: np.ndarray, lookup: Any = None) -> tuple[np.ndarray, np.ndarray]:
    with cupy.cuda.Device(cache.device_id):
        out = cupy.full((keys.size, cache.tables[0].dim), cupy.nan, cupy.float32)
        found = cupy.zeros(keys.size, cupy.bool_)
        lookup = lookup or cache.create_lookup()
        lookup.query(Batch.of(0, cupy.asarray(keys), out, found))
        lookup.finish()
        return out.get(), found.get()


@pytest.fixture
def hot() -> Iterator[EmbeddingCache]:
    cache = CupyCache.create([spec(8)], [400_000], 0, False, DeviceSharing(DEVICES, (2000,)))
    yield cache
    close(cache)


def fill_copies(cache: EmbeddingCache, keys: np.ndarray) -> None:
    """Ask on both devices until each has copies of most rows of the other."""
    lookups = [cache.on(device).create_lookup() for device in DEVICES]
    for _ in range(400):
        for device, lookup in zip(DEVICES, lookups, strict=True):
            query(cache.on(device), keys, lookup)
        if min(cache.on(device).stats(0).copied_rows for device in DEVICES) > 0.3 * keys.size:
            return
        time.sleep(0.005)
    pytest.fail("no copies were made")


def test_rows_lie_on_the_device_of_their_pair(hot: EmbeddingCache):
    table = hot.memory.open[0]
    attributes = cupy.cuda.runtime.pointerGetAttributes
    assert attributes(table.rows).device == 0
    assert attributes(table.rows + 14 * table.pairs * 32 - 4).device == 1
    assert {attributes(table.buckets_on(device)).device for device in DEVICES} == set(DEVICES)


def test_copies_of_what_is_used_make_way_as_traffic_moves(hot: EmbeddingCache):
    keys = distinct_keys(16_000)
    hot.insert(0, keys, vectors_of(keys, 8))
    before, after = keys[:1500], keys[-1500:]
    fill_copies(hot, before)

    def copied(chosen: np.ndarray) -> int:
        return int(np.isin(hot._near.dump(0), chosen).sum())

    at_first = copied(after)
    for _ in range(600):
        for device in DEVICES:
            query(hot.on(device), after)
        time.sleep(0.002)
        if copied(after) > 300:
            break
    assert copied(after) > max(300, at_first)


@pytest.mark.parametrize(
    ("dim", "capacity", "near"),
    [(4, 1000, 0), (32, 56, 0), (128, 20_000, 0), (32, 4000, 500), (32, 40_000, 500), (128, 20_000, 3000)],
)
def test_no_vector_is_torn_stale_or_anothers_on_two_devices(
    dim: int, capacity: int, near: int, capsys: pytest.CaptureFixture[str]
):
    """Readers on both devices, writers through both, and keys that lookups make resident."""
    cache = CupyCache.create([spec(dim)], [capacity], 0, False, DeviceSharing(DEVICES, (near,) if near else ()))
    caches, pairs = [cache.on(device) for device in DEVICES], cache.memory.open[0].pairs
    # Small tables lie on the first device as a whole, which then has nothing to copy.
    owned = [geometry.owned_pairs(pairs, dim, len(DEVICES), device)[1] for device in DEVICES]
    said = stress(caches, dim, capacity, copying=[caches[i] for i in DEVICES if owned[i] < pairs] if near else [])
    check_copies(cache)
    close(cache)
    with capsys.disabled():
        sys.stdout.write(f"\n{said}\n")


def test_a_cache_of_one_device_shares_nothing():
    cache = CupyCache.create([spec(4)], [100], 1, False, ALONE)
    assert cache.leader is cache
    assert not cache.memory.open[0].copies
    assert structs.TABLE.unpack(cache.memory.open[0].packed)[-1] == kernels.sharing_word()
    cache.close()
