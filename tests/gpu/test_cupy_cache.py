"""The CuPy embedding cache: the contract, on arrays in every place they may be, and what is its own."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hps.cache.base import EmbeddingCache
from hps.cache.cuda import kernels
from hps.errors import DeviceError, DeviceMemoryError, InvalidDtypeError, InvalidInputError
from hps.ground.hashing import mix
from hps.tensors.batch import Batch, table_batch
from hps.testing.caches import (
    DEFAULT,
    CacheContract,
    Create,
    StaticTablesContract,
    VersionedCacheContract,
    bits,
    distinct_keys,
    spec,
    vectors_of,
)
from hps.types import KeyArray
from tests.gpu.cupy_if_installed import CupyCache, cupy

pytestmark = pytest.mark.gpu
SLOTS = kernels.SLOTS


def keys_at_home(cache: EmbeddingCache, bucket: int, count: int, seed: int = 1) -> KeyArray:
    """Different keys whose home is one bucket of table 0."""
    pairs = cache.memory.open[0].pairs
    candidates = distinct_keys(count * 2 * pairs * 8 + 200, seed)
    home = np.fromiter((kernels.home_of(int(key), pairs) for key in candidates), np.int64, candidates.size)
    keys = candidates[home == bucket][:count]
    assert keys.size == count
    return keys


def _rows_of_static(buckets: np.ndarray, vectors: np.ndarray, pairs: int) -> dict[int, bytes]:
    """The resident rows of a static table; the counts in its headers must be those of their keys' walks."""
    rows: dict[int, bytes] = {}
    occupied = (buckets[:, :1] >> 16 >> np.arange(SLOTS)) & 1
    strays, gone = np.zeros(2 * pairs, np.int64), np.zeros(2 * pairs, np.int64)
    for bucket, slot in np.argwhere(occupied):
        key = int(buckets[bucket, 1 + slot])
        assert key not in rows
        rows[key] = vectors[bucket * SLOTS + slot].tobytes()
        at, step = kernels.home_of(key, pairs), kernels.step_of(key, pairs)
        while at // 2 != bucket // 2:
            gone[at] += 1
            at = (at + 2 * step) % (2 * pairs)
        strays[at] += at != bucket
    np.testing.assert_array_equal(buckets[:, 0] >> 24 & 0xFF, strays)
    np.testing.assert_array_equal(buckets[:, 0] >> 32 & 0xFFFFFFFF, gone)
    return rows


class CupyContract(VersionedCacheContract, StaticTablesContract):
    ways = 28  # the least capacity: two pairs of buckets

    cache_class = CupyCache

    def raw_rows(self, cache: EmbeddingCache, table: int) -> dict[int, bytes]:
        memory = cache.memory.open[table]
        cupy.cuda.Device().synchronize()
        if not memory.pairs:
            return {}
        pairs, dim = memory.pairs, memory.spec.dim
        buckets = copy_of(memory.buckets, 2 * pairs * 8, np.int64).reshape(2 * pairs, 8)
        vectors = copy_of(memory.rows, 14 * pairs * dim, np.float32).reshape(-1, dim)
        assert not (buckets[:, 0] & 1).any()
        filler = np.zeros(2 * pairs, np.int64)
        filler[2 * kernels.zero_pair(pairs) :][:2] = kernels.zero_filler(pairs)
        slots = buckets[:, 1:]
        rows: dict[int, bytes] = {}
        if cache.static:
            return _rows_of_static(buckets, vectors, pairs)
        strays = np.zeros(2 * pairs, np.int64)
        for bucket, slot in np.argwhere(slots != filler[:, None]):
            key = int(slots[bucket, slot])
            home = kernels.home_of(key, pairs)
            assert key not in rows
            assert home // 2 == bucket // 2
            strays[home] += home != bucket
            rows[key] = vectors[bucket * SLOTS + slot].tobytes()
        np.testing.assert_array_equal(buckets[:, 0] >> 24 & 0xFF, strays)
        return rows

    def raw_sets(self, cache: EmbeddingCache) -> np.ndarray:
        memory = cache.memory.open[0]
        cupy.cuda.Device().synchronize()
        return copy_of(memory.buckets, 2 * memory.pairs * 8, np.int64)

    def raw_version(self, cache: EmbeddingCache) -> Any:
        memory = cache.memory.open[0]
        return cupy.ndarray((1,), np.uint16, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.buckets, 128, memory), 0))

    def keys_of_first_set(self, cache: EmbeddingCache, count: int) -> KeyArray:
        return keys_at_home(cache, 0, count)

    def crowd(self, cache: EmbeddingCache) -> tuple[KeyArray, int]:
        return np.concatenate([keys_at_home(cache, bucket, SLOTS + 1, seed=bucket) for bucket in range(4)]), 4

    # -- the policy: scores of a bucket of 7, which fall as keys are admitted ------------------------------------------

    def test_a_full_set_evicts_what_was_used_least_recently(self, create: Create):
        """Of the keys of a bucket, those go first that were not asked for since the last ones were admitted."""
        cache = create(spec(4), 28)
        keys = keys_at_home(cache, 0, 3 * SLOTS)
        other = keys_at_home(cache, 1, SLOTS)
        cache.insert(0, other, vectors_of(other, 4))  # the neighbour has no room for strays
        old, used, new = keys[:SLOTS], keys[: SLOTS // 2], keys[SLOTS:]
        cache.insert(0, old, vectors_of(old, 4))
        assert self.resident(cache, old).all()
        self.query(cache, used)
        for count in range(SLOTS - used.size):
            cache.insert(0, new[count, None], vectors_of(new[count, None], 4))
            assert self.resident(cache, used).all()
            assert self.resident(cache, new[count, None]).all()
            self.query(cache, new[count, None])
        np.testing.assert_array_equal(self.resident(cache, old), np.isin(old, used))
        assert self.resident(cache, other).all()
        assert cache.stats(0).evictions == SLOTS - used.size

    def test_neither_update_nor_replacement_counts_as_a_use(self, create: Create):
        cache = create(spec(4), 28)
        keys, other = keys_at_home(cache, 0, SLOTS + 2), keys_at_home(cache, 1, SLOTS)
        cache.insert(0, np.concatenate([keys[:SLOTS], other]), np.zeros((2 * SLOTS, 4), np.float32))
        self.query(cache, keys[2:SLOTS])
        cache.update(0, keys[:1], vectors_of(keys[:1], 4))
        cache.insert(0, keys[1:2], vectors_of(keys[1:2], 4))
        for key in keys[SLOTS:, None]:
            cache.insert(0, key, vectors_of(key, 4))
            self.query(cache, key)
        np.testing.assert_array_equal(self.resident(cache, keys[:SLOTS]), np.arange(SLOTS) >= 2)

    def test_a_new_key_is_on_probation_until_it_is_used(self, create: Create):
        cache = create(spec(4), 28)
        keys, other = keys_at_home(cache, 0, SLOTS + 2), keys_at_home(cache, 1, SLOTS)
        cache.insert(0, np.concatenate([keys[:SLOTS], other]), np.zeros((2 * SLOTS, 4), np.float32))
        self.query(cache, keys[1:SLOTS])
        for key in keys[SLOTS:, None]:
            cache.insert(0, key, vectors_of(key, 4))
        assert self.resident(cache, keys[1:SLOTS]).all()
        np.testing.assert_array_equal(self.resident(cache, keys[SLOTS:]), [False, True])


class TestCupyCacheOnCupyArrays(CupyContract):
    def to_device(self, array: np.ndarray) -> Any:
        return cupy.asarray(array)

    def to_host(self, array: Any) -> np.ndarray:
        return array.get()


class TestCupyCacheOnHostArrays(CupyContract):
    stress_queries = 100


class TestCupyCacheOnTorchTensors(CupyContract):
    stress_queries = 100

    def to_device(self, array: np.ndarray) -> Any:
        return _torch().from_numpy(np.array(array)).cuda()

    def to_host(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()


class Caches:
    """Makes caches as the contract does, for tests of CuPy's alone."""

    create = CacheContract.create
    make_cache = CacheContract.make_cache
    cache_class = CupyCache


class TestBuckets(Caches):
    """What the layout promises beyond the contract."""

    @pytest.fixture
    def contract(self) -> CupyContract:
        return TestCupyCacheOnCupyArrays()

    def test_keys_stray_to_the_neighbour_before_any_is_evicted(self, create: Create, contract: CupyContract):
        cache = create(spec(8), 28)
        keys = keys_at_home(cache, 3, 2 * SLOTS + 1)
        cache.insert(0, keys[:-1], vectors_of(keys[:-1], 8))
        out, found = contract.query(cache, keys)
        np.testing.assert_array_equal(found, np.arange(keys.size) < 2 * SLOTS)
        np.testing.assert_array_equal(bits(out[:-1]), bits(vectors_of(keys[:-1], 8)))
        cache.insert(0, keys[-1:], vectors_of(keys[-1:], 8))
        assert cache.stats(0).evictions == 1
        assert len(contract.raw_rows(cache, 0)) == 2 * SLOTS

    def test_erased_strays_are_counted_off(self, create: Create, contract: CupyContract):
        cache = create(spec(8), 28)
        keys = keys_at_home(cache, 2, 2 * SLOTS)
        cache.insert(0, keys, vectors_of(keys, 8))
        for key in keys[:, None]:
            cache.erase(0, key)
            contract.raw_rows(cache, 0)  # checks the count
        assert not contract.raw_rows(cache, 0)
        cache.insert(0, keys, vectors_of(keys, 8))
        assert len(contract.raw_rows(cache, 0)) == 2 * SLOTS

    def test_strays_are_evicted_by_keys_that_are_at_home_there(self, create: Create, contract: CupyContract):
        cache = create(spec(8), 28)
        strangers, locals_ = keys_at_home(cache, 0, 2 * SLOTS), keys_at_home(cache, 1, SLOTS)
        cache.insert(0, strangers, vectors_of(strangers, 8))
        for key in locals_[:, None]:
            cache.insert(0, key, vectors_of(key, 8))
            contract.query(cache, key)
        rows = contract.raw_rows(cache, 0)
        assert set(locals_.tolist()) <= set(rows)
        assert len(rows) == 2 * SLOTS

    def test_the_filler_of_a_pair_is_a_key_like_any_other(self, create: Create, contract: CupyContract):
        cache = create(spec(2), 1000)
        filler = kernels.zero_filler(cache.memory.open[0].pairs)
        keys = np.array([0, filler], np.int64)
        for present in (keys[:1], keys[1:], keys):
            _out, found = contract.query(cache, keys)
            assert not found.any()
            cache.insert(0, present, vectors_of(present, 2))
            _out, found = contract.query(cache, keys)
            np.testing.assert_array_equal(found, np.isin(keys, present))
            cache.erase(0, keys)

    def test_a_key_that_misses_again_evicts_the_smallest_score(self, create: Create, contract: CupyContract):
        cache, used, others = self._full(create, contract)
        for key in others[:3, None]:
            contract.lookup(cache, contract.batch(cache, 0, key), key)
        assert contract.resident(cache, used).all()
        contract.lookup(cache, contract.batch(cache, 0, others[2:3]), others[2:3])
        np.testing.assert_array_equal(contract.resident(cache, others[:3]), [False, False, True])
        assert contract.resident(cache, used).sum() == SLOTS - 1

    def _full(self, create: Create, contract: CupyContract) -> tuple[EmbeddingCache, np.ndarray, np.ndarray]:
        """A cache whose bucket 0 is full of used keys, these, and others that belong there, no two with one name in turn."""
        cache = create(spec(4), 28)
        keys, neighbours = keys_at_home(cache, 0, 12 * SLOTS), keys_at_home(cache, 1, SLOTS)
        inserted = np.concatenate([keys[:SLOTS], neighbours])
        cache.insert(0, inserted, vectors_of(inserted, 4))
        contract.query(cache, keys[:SLOTS])
        names = [0, *(int(mix(key)) & 0xFF for key in keys[SLOTS:])]
        return cache, keys[:SLOTS], keys[SLOTS:][np.diff(names) != 0]

    def test_a_hit_raises_its_score_twice_at_most(self, create: Create, contract: CupyContract):
        cache = create(spec(4), 28)
        key = keys_at_home(cache, 0, 1)
        cache.insert(0, key, vectors_of(key, 4))
        before, scores = contract.raw_sets(cache), []
        for _ in range(4):
            sets = contract.raw_sets(cache)
            scores.append(int(sets[0] >> 32))
            np.testing.assert_array_equal(before[1:], sets[1:])
            contract.query(cache, key)
        assert scores == [0, 8, 15, 15]

    def test_a_version_that_wraps_goes_on(self, create: Create, contract: CupyContract):
        cache = create(spec(4), 28)
        key = keys_at_home(cache, 0, 1)
        word = contract.raw_version(cache)
        word[0] = 0xFFFC
        for version in range(4):
            cache.insert(0, key, vectors_of(key, 4, version))
            out, found = contract.query(cache, key)
            assert found.all()
            np.testing.assert_array_equal(bits(out), bits(vectors_of(key, 4, version)))
        assert int(word[0]) == 4


class TestLookups(Caches):
    @pytest.mark.parametrize("misses", [4096, 4097, 70_000, 300_000])
    @pytest.mark.parametrize("distinct", [False, True])
    def test_many_misses_are_made_distinct_and_ascending(self, create: Create, misses: int, distinct: bool):
        cache = create(spec(4), 100)
        keys = distinct_keys(misses)
        if not distinct:
            keys = np.random.default_rng(1).choice(keys[: misses // 3], misses)
        contract = TestCupyCacheOnCupyArrays()
        batch = contract.batch(cache, 0, keys)
        known = keys[::2]
        assert contract.lookup(cache, batch, known) == [misses]
        expected = vectors_of(keys, 4, 1)
        expected[~np.isin(keys, known)] = DEFAULT
        np.testing.assert_array_equal(bits(batch.outs[0].get()), bits(expected))
        np.testing.assert_array_equal(batch.founds[0].get(), np.isin(keys, known))

    @pytest.mark.parametrize("made_by", ["ndarray", "frombuffer", "host_buffer"])
    def test_an_output_in_pinned_memory_is_written_in_place(self, create: Create, made_by: str):
        cache, keys = create(spec(5), 2000), distinct_keys(300)
        cache.insert(0, keys[:200], vectors_of(keys[:200], 5))
        memory = cupy.cuda.alloc_pinned_memory(4 * 5 * 310)
        whole = {
            "ndarray": lambda: np.ndarray((310, 5), np.float32, memory),  # as cupyx.empty_pinned does
            "frombuffer": lambda: np.frombuffer(memory, np.float32, 5 * 310).reshape(310, 5),
            "host_buffer": lambda: cache.host_buffer((310, 5), np.float32),
        }[made_by]()
        whole[...] = np.nan
        batch = table_batch(0, 5, keys, whole[3:], on_cuda=True, with_found=False)
        lookup = cache.create_lookup()
        TestCupyCacheOnCupyArrays().lookup(cache, batch, keys, lookup)
        assert lookup.placed.outs[0] == whole[3:].ctypes.data
        np.testing.assert_array_equal(bits(whole[3:303]), bits(vectors_of(keys, 5, np.arange(300) >= 200)))
        assert np.isnan(whole[:3]).all()
        assert np.isnan(whole[303:]).all()

    def test_a_query_that_was_interrupted_leaves_nothing_to_the_next(self, create: Create, monkeypatch: pytest.MonkeyPatch):
        from cupy_backends.cuda.api import runtime

        cache, keys = create(spec(4), 4000), distinct_keys(300)
        cache.insert(0, keys[:200], vectors_of(keys[:200], 4))
        lookup, real = cache.create_lookup(), runtime.streamSynchronize

        def interrupt(stream: int) -> None:
            raise KeyboardInterrupt

        for _ in range(3):
            out = cupy.full((100, 4), cupy.nan, cupy.float32)
            monkeypatch.setattr(runtime, "streamSynchronize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                lookup.query(Batch.of(0, cupy.asarray(keys[200:]), out))
            monkeypatch.setattr(runtime, "streamSynchronize", real)
            assert lookup.query(Batch.of(0, cupy.asarray(keys[100:200]), out)) == 0
            np.testing.assert_array_equal(out.get(), vectors_of(keys[100:200], 4))

    def test_lookups_follow_the_stream_of_their_tensors(self, create: Create):
        """Keys that a long kernel is still to write, on a stream of torch's that nobody waits for."""
        torch = _torch()
        cache, keys = create(spec(16), 40_000), distinct_keys(20_000)
        cache.insert(0, keys, vectors_of(keys, 16))
        resident = torch.from_numpy(np.sort(cache.dump(0))).cuda()
        stream = torch.cuda.Stream()
        lookup = cache.create_lookup()
        for _ in range(20):
            with torch.cuda.stream(stream):
                out = torch.full((resident.numel(), 16), torch.nan, device="cuda")
                asked = torch.zeros_like(resident)
                torch.cuda._sleep(2_000_000)
                asked.copy_(resident)
                lookup.query(Batch.of(0, asked, out))
                lookup.finish()
                total = out.double().sum().item()  # on the stream, after the lookup
            assert total == vectors_of(np.sort(cache.dump(0)), 16).astype(np.float64).sum()

    def test_tensors_of_two_streams_are_both_waited_for(self, create: Create):
        torch = _torch()
        cache, keys = create(spec(16), 40_000), distinct_keys(10_000)
        cache.insert(0, keys, vectors_of(keys, 16))
        resident = np.sort(cache.dump(0))
        one, two = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(one), two:
            torch.cuda._sleep(2_000_000)
            asked = torch.from_numpy(resident).cuda(non_blocking=True)
            out = cupy.full((resident.size, 16), cupy.nan, cupy.float32)
            lookup = cache.create_lookup()
            assert lookup.query(Batch.of(0, asked, out)) == 0
            lookup.finish()
            np.testing.assert_array_equal(bits(out.get()), bits(vectors_of(resident, 16)))

    @pytest.mark.parametrize("keys_of", ["cupy", "torch"])
    def test_cupy_tensors_are_looked_up_on_their_stream(self, create: Create, keys_of: str):
        """Neither a stream of the lookup's own nor a wait is needed where one stream is all that there is."""
        torch = _torch()
        cache, keys = create(spec(16), 1000), distinct_keys(100)
        cache.insert(0, keys, vectors_of(keys, 16))
        lookup, stream = cache.create_lookup(), cupy.cuda.Stream(non_blocking=True)
        with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            asked = cupy.asarray(keys) if keys_of == "cupy" else torch.from_numpy(keys).cuda()
            out = cupy.full((120, 16), cupy.nan, cupy.float32)
            assert lookup.query(table_batch(0, 16, asked, out, on_cuda=True, with_found=False)) == 0
            lookup.finish()
            assert lookup.stream == stream.ptr
            np.testing.assert_array_equal(bits(out.get()[:100]), bits(vectors_of(keys, 16)))

    @pytest.mark.parametrize("kind", ["keys", "output"])
    def test_cupy_tensors_that_are_not_aligned_are_refused(self, create: Create, kind: str):
        """The device would never recover from reading them."""
        lookup, off = create(spec(4), 1000).create_lookup(), cupy.zeros(1 + 160, np.uint8)[1:]
        keys = off[:80].view(np.int64) if kind == "keys" else cupy.zeros(10, np.int64)
        out = off.view(np.float32) if kind == "output" else cupy.zeros((10, 4), np.float32)
        with pytest.raises(InvalidInputError, match=f"{kind}: got memory that is not aligned"):
            lookup.query(table_batch(0, 4, keys, out, on_cuda=True, with_found=False))

    def test_tensors_that_do_not_fit_are_refused_before_any_launch(self, create: Create):
        cache = create(spec(4), 1000)
        lookup = cache.create_lookup()
        keys, out = cupy.zeros(10, cupy.int64), cupy.zeros((10, 4), cupy.float32)
        for bad_keys, bad_out, error in [
            (keys.astype(cupy.uint64), out, InvalidDtypeError),
            (keys[::2], out, InvalidInputError),
            (keys, out.astype(cupy.float64), InvalidDtypeError),
            (keys, out[:, ::2], InvalidInputError),
            (keys, out[:9], InvalidInputError),
            (keys, np.zeros((9, 4), np.float32), InvalidInputError),
            (keys, np.broadcast_to(np.float32(0), (10, 4)), InvalidInputError),
            (keys, None, InvalidInputError),
            ("keys", out, InvalidInputError),
        ]:
            with pytest.raises(error, match="expected"):
                lookup.query(Batch.of(0, bad_keys, bad_out))
        assert lookup.query(Batch.of(0, keys, out)) == 10

    def test_inserts_of_many_chunks_arrive_whole(self, create: Create):
        cache, keys = create(spec(64), 400_000), distinct_keys(200_000)
        vectors = vectors_of(keys, 64)
        cache.insert(0, keys, vectors)
        assert cache.stats(0).resident_rows > 199_000
        out, found = TestCupyCacheOnCupyArrays().query(cache, keys)
        np.testing.assert_array_equal(bits(out[found]), bits(vectors[found]))


def test_kernels_are_counted_for_the_architecture_of_a_device():
    found = CupyCache.kept_kernels([([(32, "float32")], False, False)], 0)
    assert found.architecture == cupy.cuda.Device(0).compute_capability
    assert found.device == cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert 0 <= found.kept <= found.needed > 10
    with pytest.raises(DeviceError, match="asking CUDA device 99 for its architecture"):
        CupyCache.kept_kernels([], 99)


class TestMemory(Caches):
    def test_more_memory_than_the_device_has_is_a_typed_error_that_names_the_tables(self):
        with pytest.raises(
            DeviceMemoryError, match=r"model 'shop'.*for 1,.* rows of table 'big'.*gpucacheper of at most"
        ) as caught:
            self.cache_class.create([spec(4, "small"), spec(1024, "big")], [1000, 1 << 30], 0)
        assert isinstance(caught.value, MemoryError)

    def test_a_device_that_is_not_there_is_a_typed_error(self):
        with pytest.raises(DeviceError, match="got CUDA device 99"):
            self.cache_class.create([spec(4)], [1000], 99)

    def test_closing_gives_the_memory_back(self, create: Create):
        before = cupy.cuda.runtime.memGetInfo()[0]
        cache = create(spec(256), 1 << 20)
        assert before - cupy.cuda.runtime.memGetInfo()[0] > 1 << 30
        cache.close()
        del cache
        assert before - cupy.cuda.runtime.memGetInfo()[0] < 1 << 28

    def test_more_than_two_to_the_31_elements(self, create: Create):
        """The last rows of a table of 9 GB come back; offsets are 64 bits wide."""
        cache = create(spec(512), 4_500_000)
        contract, pairs = TestCupyCacheOnCupyArrays(), cache.memory.open[0].pairs
        for seed in range(4):
            keys = distinct_keys(200_000, seed=seed)
            homes = np.fromiter((kernels.home_of(int(key), pairs) for key in keys), np.int64, keys.size)
            part = keys[homes > 640_000][:4000]
            cache.insert(0, part, vectors_of(part, 512))
            out, found = contract.query(cache, part)
            assert found.mean() > 0.99
            np.testing.assert_array_equal(bits(out[found]), bits(vectors_of(part, 512)[found]))
        cupy.get_default_memory_pool().free_all_blocks()


class TestFailure:
    """In a process of its own: a CUDA error ends what the process can do with the device."""

    def test_a_cuda_error_is_raised_typed_and_remembered(self):
        script = """
import numpy as np, cupy
from hps.cache.cuda.cache import CupyCache
from hps.errors import DeviceError
from hps.tensors.batch import Batch, table_batch
from hps.types import TableSpec
cache = CupyCache.create([TableSpec("m", "t", 4, 0.0, 1000)], [1000], 0)
lookup = cache.create_lookup()
assert cache.memory.error is None
out = cupy.zeros((100, 4), np.float32)
wild = cupy.ndarray((100,), np.int64, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(8 << 40, 800, None, 0), 0))
for attempt in range(2):
    try:
        lookup.query(Batch.of(0, wild, out))
    except DeviceError as error:
        print(attempt, cache.memory.error is None, error)
try:
    cache.insert(0, np.arange(3), np.zeros((3, 4), np.float32))
except DeviceError as error:
    print("insert", error)
import os
print("done", flush=True)
os._exit(0)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
        assert "0 False" in done.stdout, done.stdout + done.stderr
        assert "insert" in done.stdout
        assert "failed before" in done.stdout
        assert "done" in done.stdout


def _torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def copy_of(pointer: int, size: int, dtype: type) -> np.ndarray:
    host = np.empty(size, dtype)
    cupy.cuda.runtime.memcpy(host.ctypes.data, pointer, host.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return host


def write_to(address: int, values: np.ndarray) -> None:
    """Write to device memory; queries that are launched after the call see it."""
    cupy.cuda.runtime.memcpy(address, values.ctypes.data, values.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
    cupy.cuda.runtime.deviceSynchronize()  # a copy of little from the host may end after its call
