"""Tables whose rows have fewer bits than float32: the device answers what the CPU does, bit for bit, on every path."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.errors import InvalidDtypeError
from hps.ground.rows import decode, encode
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.testing.caches import AWKWARD_KEYS, DEFAULT, distinct_keys, small_vectors_of, spec
from hps.types import FloatArray, KeyArray
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.gpu.linked_tables import LinkedTables

pytestmark = pytest.mark.gpu

FORMATS = ["float16", "bfloat16", "int8"]
SMALL, LARGE = 700, 20_000
"""Keys of a lookup whose misses are read as they come, and of one that orders them first."""


def vectors_of(keys: KeyArray, dim: int, version: int = 0) -> FloatArray:
    """Rows of very different sizes, which encode key and version."""
    sizes = np.exp2(keys % 7 - 3).astype(np.float32)
    return np.ascontiguousarray(small_vectors_of(keys + 1000 * version, dim) * sizes[:, None])


def mixed(known: KeyArray, n: int) -> KeyArray:
    """Keys most of which are known, some twice and more, every fifth absent."""
    rng = np.random.default_rng(3)
    absent = np.setdiff1d(distinct_keys(n, seed=77), known)
    return rng.permutation(np.concatenate([rng.choice(known, n - n // 5), rng.choice(absent, n // 5)]))


def check(tables: LinkedTables, keys: KeyArray, out: FloatArray, known: KeyArray, version: int = 0, table: int = 0) -> None:
    there = np.isin(keys, known)
    stored = tables.stored(vectors_of(keys, out.shape[1], version), table)
    expected = np.where(there[:, None], stored, np.float32(DEFAULT))
    wrong = (out.view(np.uint32) != expected.view(np.uint32)).any(1)
    assert not wrong.any(), f"{wrong.sum()} of {keys.size} vectors are wrong; the first is {np.argmax(wrong)}"


@pytest.mark.parametrize("row_dtype", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 8, 13, 32, 64, 100, 127, 128, 130, 256, 300, 1001])
def test_lookups_answer_what_the_map_holds(dim, row_dtype, monkeypatch):
    monkeypatch.setattr(LinkedTables, "index", dim % 4 == 0)
    known = np.union1d(distinct_keys(30_000 if dim < 200 else 8_000), AWKWARD_KEYS)
    with LinkedTables([dim], 100_000 if dim < 200 else 20_000, row_dtypes=[row_dtype]) as tables:
        tables.write(known, vectors_of(known, dim))
        for n in (1, 33, SMALL, LARGE):
            keys = mixed(known, n) if n > 1 else known[:1]
            for _asked_again in range(3):
                out, found, _ = tables.ask(keys)
                check(tables, keys, out, known)
                assert np.array_equal(found, np.isin(keys, known))
        some = known[::3].copy()
        tables.write(some, vectors_of(some, dim, 1))
        out, _, _ = tables.ask(some)
        check(tables, some, out, some, 1)
        tables.delete(some)
        out, found, _ = tables.ask(some)
        assert not found.any()
        assert (out == DEFAULT).all()


@pytest.mark.parametrize("attached", [(), (0, 1, 2, 3, 4), (1, 3)])
@pytest.mark.parametrize("n", [50, 3_000])
def test_tables_of_all_formats_are_answered_by_one_launch(n, attached):
    dims, formats = [128, 64, 33, 6, 256], ["int8", "float32", "float16", "bfloat16", "int8"]
    known = distinct_keys(10_000)
    with LinkedTables(dims, 4_000, attached=attached, row_dtypes=formats) as tables:
        for table, dim in enumerate(dims):
            tables.write(known, vectors_of(known, dim), table)
        lookup = tables.cache.create_lookup()
        for turn in range(4):
            asked = [mixed(known, n + table + turn) for table in range(len(dims))]
            batches = [tables.batch(keys, table) for table, keys in enumerate(asked)]
            left = lookup.query(Batch.merged(batches))
            for missed in lookup.unique() if left else ():
                own = tables.specs[missed.table]
                found = np.zeros(missed.keys.size, np.bool_)
                tables.database.fetch(own.tag, missed.keys, missed.buffer(), found)
                missed.stage(0, found.size)
                missed.scatter(found)
                missed.insert(found)
            lookup.finish()
            for table, (keys, batch) in enumerate(zip(asked, batches, strict=True)):
                check(tables, keys, cupy.asnumpy(batch.outs[0]), known, table=table)


@pytest.mark.parametrize("combiner", [Combiner.SUM, Combiner.MEAN, Combiner.MAX])
@pytest.mark.parametrize("formats", [["int8"], ["float16"], ["bfloat16"], ["int8", "float32", "float16"]])
@pytest.mark.parametrize("dim", [7, 32, 128, 300])
def test_bags_are_pooled_from_what_is_stored(dim, formats, combiner):
    known = distinct_keys(5_000)
    with LinkedTables([dim] * len(formats), 2_000, row_dtypes=formats) as tables:
        for table in range(len(formats)):
            tables.write(known, vectors_of(known, dim), table)
        keys = np.random.default_rng(5).choice(known, 900)
        lookup = tables.cache.create_lookup()
        for _again in range(3):
            batches = []
            for table in range(len(formats)):
                out = cupy.full((300, dim), cupy.nan, cupy.float32)
                pooling = Pooling(300, None, 3, None, combiner, 0.0, None)
                batches.append(Batch.of(table, cupy.asarray(keys), out, None, keys.size, pooling))
            assert lookup.query(Batch.merged(batches)) == 0
            lookup.finish()
            for table, batch in enumerate(batches):
                rows = tables.stored(vectors_of(keys, dim), table).astype(np.float64).reshape(300, 3, dim)
                wanted = {Combiner.SUM: rows.sum, Combiner.MEAN: rows.mean, Combiner.MAX: rows.max}[combiner](1)
                np.testing.assert_allclose(cupy.asnumpy(batch.outs[0]), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("row_dtype", FORMATS)
@pytest.mark.parametrize("dim", [1, 5, 32, 128, 260])
def test_the_cache_and_its_twin_agree(dim, row_dtype, static):
    own = replace(spec(dim), row_dtype=row_dtype)
    rng = np.random.default_rng(dim)
    caches: list[Any] = [kind.create([own], [3_000], 0, static) for kind in (NumpyCache, CupyCache)]
    known: dict[int, int] = {}
    universe = np.concatenate([AWKWARD_KEYS[:40], np.arange(1000, 1900)])
    try:
        for version in range(12):
            keys = rng.choice(universe, rng.integers(1, 400), replace=False)
            rows = encode("inserting", vectors_of(keys, dim, version), row_dtype)
            kind = version % 3
            for cache in caches:
                (cache.insert if kind == 0 else cache.update)(0, keys, rows) if kind < 2 else cache.erase(0, keys)
            for key in keys.tolist():
                if kind == 0 or (kind == 1 and key in known):
                    known[key] = version
                elif kind == 2:
                    known.pop(key, None)
            asked = rng.choice(universe, 1_500)
            answers = []
            for cache, place in zip(caches, (np.array, cupy.asarray), strict=True):
                cache.mark_complete(static)
                lookup = cache.create_lookup()
                batch = Batch.of(
                    0, place(asked), place(np.full((asked.size, dim), np.nan, np.float32)), place(np.zeros(1500, bool))
                )
                left = lookup.query(batch)
                for missed in lookup.unique() if left else ():
                    missed.scatter(np.zeros(missed.keys.size, np.bool_))
                lookup.finish()
                answers.append((cupy.asnumpy(batch.outs[0]), cupy.asnumpy(batch.founds[0])))
            there = np.array([int(key) in known for key in asked])
            versions = np.array([known.get(int(key), 0) for key in asked])
            wanted = np.full((asked.size, dim), DEFAULT, np.float32)
            for one in np.unique(versions[there]):
                at = there & (versions == one)
                wanted[at] = decode(encode("x", vectors_of(asked[at], dim, int(one)), row_dtype), dim, row_dtype)
            for out, found in answers:
                assert np.array_equal(found, there)
                assert np.array_equal(out.view(np.uint32), wanted.view(np.uint32))
    finally:
        for cache in caches:
            cache.close()


def test_every_half_is_widened_as_on_the_cpu():
    halves = np.arange(1 << 16, dtype=np.uint16)
    for row_dtype in ("float16", "bfloat16"):
        vectors = (
            halves.view(np.float16).astype(np.float32)
            if row_dtype == "float16"
            else (halves.astype(np.uint32) << 16).view(np.float32)
        )
        own = replace(spec(64), row_dtype=row_dtype)
        rows = encode("storing", vectors.reshape(-1, 64), row_dtype)
        keys = np.arange(rows.shape[0])
        cache: Any = CupyCache.create([own], [5_000], 0)
        try:
            cache.insert(0, keys, rows)
            batch = Batch.of(0, cupy.asarray(keys), cupy.zeros((keys.size, 64), cupy.float32), cupy.zeros(keys.size, bool))
            cache.create_lookup().query(batch)
            found = cupy.asnumpy(batch.founds[0])
            wanted = decode(rows, 64, row_dtype)
            assert np.count_nonzero(found) > 900
            assert np.array_equal(cupy.asnumpy(batch.outs[0])[found].view(np.uint32), wanted[found].view(np.uint32))
        finally:
            cache.close()


OUTPUTS = ["float16", "bfloat16"]


def narrowed(vectors: FloatArray, out_dtype: str) -> np.ndarray:
    """The bits of vectors as an output has them."""
    if out_dtype == "float16":
        return vectors.astype(np.float16).view(np.uint16)
    return encode("narrowing", np.ascontiguousarray(vectors.reshape(-1, 2)), "bfloat16").view(np.uint16).reshape(vectors.shape)


def tensor(shape: tuple[int, ...], out_dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.full(shape, float("nan"), dtype=getattr(torch, out_dtype), device="cuda")


@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("row_dtype", ["float32", *FORMATS])
@pytest.mark.parametrize("dim", [1, 2, 6, 13, 32, 128, 130, 514])
def test_outputs_of_16_bits_are_the_vectors_rounded(dim, row_dtype, out_dtype):
    torch = pytest.importorskip("torch")
    known = distinct_keys(12_000)
    with LinkedTables([dim, 4], 6_000, row_dtypes=[row_dtype, "float32"]) as tables:
        for table in range(2):
            tables.write(known, vectors_of(known, tables.specs[table].dim), table)
        lookup = tables.cache.create_lookup()
        for n in (1, 33, SMALL, 9_000):
            keys = mixed(known, n) if n > 1 else known[:1]
            there = np.isin(keys, known)
            for turn in range(3):
                outs = [tensor((n, tables.specs[table].dim), out_dtype) for table in range(1 + turn % 2)]
                batches = [Batch.of(table, torch.from_numpy(keys).cuda(), out, None, n) for table, out in enumerate(outs)]
                if turn == 2:
                    lookup.enqueue(Batch.merged(batches))
                    torch.cuda.synchronize()
                else:
                    assert lookup.query(Batch.merged(batches)) == 0
                    lookup.finish()
                for table, out in enumerate(outs):
                    own = tables.specs[table].dim
                    wanted = np.where(there[:, None], tables.stored(vectors_of(keys, own), table), np.float32(DEFAULT))
                    if wanted.size % 2 == 0:
                        assert np.array_equal(out.cpu().view(torch.uint16).numpy(), narrowed(wanted, out_dtype))
                    else:
                        assert torch.equal(out.cpu(), torch.from_numpy(wanted).to(out.dtype))


def test_outputs_of_one_lookup_have_one_dtype():
    with LinkedTables([32, 32], 100) as tables:
        keys = cupy.arange(5)
        batches = [
            Batch.of(0, keys, tensor((5, 32), "float16"), None, 5),
            Batch.of(1, keys, tensor((5, 32), "float32"), None, 5),
        ]
        with pytest.raises(InvalidDtypeError, match="expected one dtype of all"):
            tables.cache.create_lookup().query(Batch.merged(batches))
        bags = Pooling(5, None, 1, None, Combiner.SUM, 0.0, None)
        with pytest.raises(InvalidDtypeError, match="got float16, expected float32"):
            tables.cache.create_lookup().query(Batch.of(0, keys, tensor((5, 32), "float16"), None, 5, bags))
