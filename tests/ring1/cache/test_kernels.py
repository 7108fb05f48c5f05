"""The kernels' sources: assembled whole, headed as the house wants it, and accepted by the CUDA compiler."""

import importlib
import itertools
import math
import re

import numpy as np
import pytest

from hps.cache.base import MOST_SHARERS
from hps.cache.cuda import geometry, kernels, structs
from hps.cache.cuda.kernels import KernelCache, Rows, Shape
from hps.ground.hashing import mix
from hps.ground.memory import host_tables
from hps.stores.hash_map import layout
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.bags import Arithmetic
from tests import ROOT
from tests.fakes.populating_pinner import PopulatingPinner

FILES = sorted(path.stem for path in (ROOT / "cuda").glob("*.cu"))
FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)


def shape(*dims: int, dtypes: tuple[int, ...] = ()) -> Shape:
    """The shape of a launch for tables of these widths."""
    return Shape.of(
        [Rows(dim, dtype) for dim, dtype in zip(dims, dtypes or (FLOAT32,) * len(dims), strict=True)], kernels.ALIGNED
    )


@pytest.mark.parametrize("file", FILES)
def test_sources_have_our_headers_in_place_of_their_includes_and_name_twins_that_exist(file: str):
    text = kernels.source(file)
    assert "#include" not in text
    assert text.count("struct Table {") == 1
    (twins,) = re.findall(r"^// TWIN +(.+)$", text, re.MULTILINE)
    for twin in twins.split(", "):
        module, _, function = twin.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_constants_stand_before_the_source():
    code = kernels.query_kernel(shape(6)).code
    assert code.startswith("#define HPS_UNIT 2\n")
    assert code.endswith(kernels.source("query"))


def test_equal_kernels_are_compiled_once():
    compiled: list[str] = []

    def compile_kernel(code: str, name: str) -> int:
        compiled.append(name)
        return len(compiled)

    cache = KernelCache(compile_kernel)
    assert cache.handle(kernels.insert_kernel(4, 32)) == cache.handle(kernels.insert_kernel(4, 32)) == 1
    assert cache.handle(kernels.insert_kernel(4, 128)) == 2
    assert compiled == ["insert", "insert"]


@pytest.mark.parametrize(
    ("dim", "alignment", "unit"), [(128, 16, 4), (128, 256, 4), (128, 8, 2), (128, 4, 1), (6, 16, 2), (7, 16, 1), (1, 256, 1)]
)
def test_threads_move_as_much_at_once_as_width_and_alignment_allow(dim: int, alignment: int, unit: int):
    assert kernels.unit_of(dim, alignment) == unit


def test_the_home_of_a_key_is_that_of_the_mixing_hash():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
    for pairs in (2, 3, 1000, 300_000_000):
        homes = [kernels.home_of(key, pairs) for key in keys]
        assert homes == [(int(np.uint64(mix(np.int64(key)))) % 2**64 >> 32) * 2 * pairs >> 32 for key in keys]
        assert all(0 <= home < 2 * pairs for home in homes)


@pytest.mark.parametrize("rows", [1, 100_000])
@pytest.mark.parametrize("dense", [False, True])
def test_a_table_of_the_hash_map_is_described_as_the_kernels_read_it(rows: int, dense: bool):
    database, pinner = HashMapDatabase(), PopulatingPinner()
    database.open_table("t", 3)
    if dense:
        database.reserve("t", rows, [np.arange(rows)])
    database.insert("t", np.arange(rows), np.zeros((rows, 3), np.float32))
    table = database.host_table("t")
    table.pin(pinner)
    words, slabs = table.layout().words.tolist(), table.layout().slabs
    packed = structs.HOST_LAYOUT.unpack(kernels.host_layout(words, 64, 576, slabs.size, 700))
    assert packed[:2] == (64, 576)
    positions = layout.VERSIONS, layout.SLAB_SHIFT, layout.VECTOR_BYTES, layout.SEGMENT_BITS
    assert packed[2:7] == (words[positions[0]], slabs.size, *(words[position] for position in positions[1:]))
    segments = words[layout.SEGMENTS :]
    rest = [0] * (2 * kernels.MOST_HOST_SEGMENTS - len(segments))
    assert packed[7:] == (*segments, *rest, rows * dense, 0, *[0] * kernels.MOST_HOST_SEGMENTS, *[0] * 8, 700)
    mirrors = list(range(1, len(segments) // 2 + 1))
    packed = structs.HOST_LAYOUT.unpack(kernels.host_layout(words, 64, 576, slabs.size, 700, 99, mirrors))
    without = [0] * (kernels.MOST_HOST_SEGMENTS - len(mirrors))
    assert packed[7:] == (*segments, *rest, rows * dense, 99, *mirrors, *without, *[0] * 8, 700)
    assert (layout.DENSE_ROWS, layout.SEGMENTS) == (host_tables.DENSE_ROWS_AT, host_tables.SEGMENTS_AT)
    assert words[layout.DENSE_ROWS] == rows * dense
    assert kernels.bins_per_row(words) == dense * kernels.MOST_BINS / rows
    database.close()


@pytest.mark.parametrize(("words", "of_map", "of_dense"), [(32, 5, 8), (33, 5, 8), (128, 2, 2), (1, 10, 16)])
def test_more_warps_read_rows_where_these_are_narrow_and_no_bucket_is_read(words: int, of_map: int, of_dense: int):
    assert [kernels.fetch_warps(words, 132, 512, dense=dense) for dense in (False, True)] == [of_map, of_dense]


def test_kernels_python_and_hash_map_agree_on_measures():
    text = kernels.source("answer")
    said = {name: int(value) for name, value in re.findall(r"^constexpr u32 (\w+) = (\d+);", text, re.MULTILINE)}
    measures = [said[name] for name in ("HOST_BUCKET", "VERSION_BYTES", "MOST_SEGMENTS")]
    assert measures == [layout.BUCKET_BYTES, layout.VERSION_BYTES, kernels.MOST_HOST_SEGMENTS]
    assert 1 << said["STRIPE_BITS"] == layout.STRIPES == kernels.STRIPES
    assert 1 << said["MOST_BIN_BITS"] == kernels.MOST_BINS
    word = kernels.sharing_word(3, MOST_SHARERS, 77)
    assert (word & 15, word >> 4 & 15, word >> 8) == (3, MOST_SHARERS, 77)
    assert kernels.sharing_word() == 1 | 1 << 4
    assert (structs.SHARING.size, structs.PROMOTE_TAIL.size) == (56, 136 - 2 * structs.TABLE.size)
    assert structs.SHARING.size <= kernels.SHARING_BYTES
    [granule] = re.findall(r"COPY_GRANULE = 1ull << (\d+);", kernels.source("promote"))
    assert 1 << int(granule) == geometry.GRANULE_BYTES


@pytest.mark.parametrize("pairs", [2, 3, 17, 599_187])
@pytest.mark.parametrize("stretch", [1, 2, 3, 15])  # more than 1 of a near table
def test_a_filler_is_no_key_of_its_pair(pairs: int, stretch: int):
    assert kernels.home_of(0, pairs, stretch) // 2 == kernels.zero_pair(pairs)
    assert kernels.home_of(kernels.zero_filler(pairs, stretch), pairs, stretch) // 2 != kernels.zero_pair(pairs)


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_keys_of_one_device_spread_over_the_whole_near_table_of_another(devices: int):
    pairs, near_pairs = 1000 * devices, 64
    homes = np.zeros(2 * near_pairs, np.int64)
    for key in range(20_000):
        if kernels.home_of(key, pairs) // 2 >= pairs - 1000:  # the rows of the last device
            homes[kernels.home_of(key, near_pairs, devices)] += 1
    mean = homes.mean()
    assert homes.min() > 0.3 * mean
    assert homes.max() < 2 * mean


OF_NO_TABLE = "unique", "mark_heads", "rank_sorted", "scatter", "number", "pool_rest"
"""Kernels of lookups that read no table of the cache."""


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_kernels_of_tables_know_whether_devices_share_them(static: bool, shared: bool):
    rows, kind = [Rows(32), Rows(7, INT8)], kernels.Kind(static, shared)
    made = kernels.lookup_kernels(rows, kind) + kernels.link_kernels(rows, kind) + kernels.modification_kernels(rows, kind)
    made += [kernels.pool_kernel("pool", Shape.of(rows, kernels.ALIGNED), arithmetic, kind) for arithmetic in Arithmetic]
    for kernel in made:
        assert ("SHARED" in dict(kernel.constants)) == (shared and kernel.name not in OF_NO_TABLE)
    for kernel in kernels.near_kernels(rows):  # of those, promotions alone read the shared table
        assert ("SHARED" in dict(kernel.constants)) == (kernel.name == "promote")


@pytest.mark.parametrize("dim", [1, 7, 64, 128, 300, 1024])
def test_a_group_that_pools_holds_a_row_and_takes_its_keys_in_whole_batches(dim: int):
    sizes = dict(kernels.pool_kernel("pool", shape(dim), Arithmetic.SUMS).constants)
    assert sizes["UNIT"] * sizes["COPY"] * sizes["CHUNKS"] >= dim
    assert sizes["COPY"] % sizes["KEYS"] == 0


@pytest.mark.parametrize(
    ("keys", "bags", "total", "expected"),
    [
        *[
            (1 << 18, 1 << 14, 1 << 18, 4),
            (1 << 18, 1 << 10, 1 << 20, 1),
            (1 << 18, 1 << 18, 1 << 18, 32),
            (0, 10, 1 << 18, 32),
        ],
        *[(1 << 16, 1 << 14, 1 << 16, 4), (1 << 16, 1 << 14, 1 << 17, 8), (1000, 1000, 1000, 8)],
    ],
)
def test_a_group_of_lanes_pools_bags_of_64_keys_and_of_fewer_in_small_lookups(keys: int, bags: int, total: int, expected: int):
    assert kernels.bags_per_group(keys, bags, total) == expected


@pytest.mark.parametrize(
    ("rows", "pairs", "static"),
    [(0, 0, 4), (1, 2, 5), (12, 2, 5), (13, 2, 6), (28, 2, 7), (29, 3, 7), (43, 4, 8), (1 << 23, 599_187, 696_733)],
)
def test_capacity_is_rounded_up_to_whole_pairs_and_two_at_least(rows: int, pairs: int, static: int):
    assert kernels.pairs_for(rows) == pairs
    assert kernels.pairs_for(rows, static=True) == static


@pytest.mark.parametrize("pairs", [2, 5, 7, 1001, 696_733])
def test_the_other_bucket_of_a_key_has_the_side_of_its_home_in_another_pair(pairs: int):
    distances = set()
    for key in range(4000):
        home, other = kernels.home_of(key, pairs), kernels.other_bucket(key, pairs)
        assert home % 2 == other % 2
        distances.add((other - home) // 2 % pairs)
    assert 0 not in distances
    assert len(distances) == pairs - 1 if pairs < 100 else len(distances) > 900


@pytest.mark.parametrize("tables", [[Rows(128)], [Rows(7, INT8)], [Rows(32), Rows(6, BFLOAT16), Rows(128, INT8)]])
def test_what_is_compiled_ahead_writes_aligned_float32(tables):
    aligned = Shape.of(tables, kernels.ALIGNED)
    assert (aligned.out, aligned.unit) == (0, kernels.unit_of(math.gcd(*(rows.dim for rows in tables)), 0))
    ahead = [*kernels.lookup_kernels(tables), *kernels.link_kernels(tables)]
    assert not [kernel for kernel in ahead if "OUT" in dict(kernel.constants)]
    assert kernels.query_kernel(aligned) in ahead


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("tables", [[Rows(128)], [Rows(7, INT8)], [Rows(32), Rows(6, BFLOAT16), Rows(128, INT8), Rows(32)]])
def test_whatever_tables_are_asked_for_their_kernels_are_compiled_ahead(tables, static: bool):
    """Rows and bags, of any of the tables, also of one table twice, with outputs as the service has them."""
    kind = kernels.Kind(static=static)
    ahead = [*kernels.lookup_kernels(tables, kind), *kernels.link_kernels(tables, kind)]
    asked = [asked for count in (1, 2, 3, 4) for asked in itertools.product(range(len(tables)), repeat=count)]
    for shape in {kernels.shape_of(tables, one, kernels.ALIGNED) for one in asked}:
        needed = [kernels.query_kernel(shape, kind, few=few) for few in (False, True)]
        needed += [kernels.answer_kernel(name, shape, kind) for name in kernels.ANSWERS]
        needed += [kernels.pool_kernel(name, shape, one, kind) for name in kernels.POOLS for one in Arithmetic]
        assert not set(needed) - set(ahead)
    fronts = Shape.of(tables, kernels.ALIGNED)._replace(segments=kernels.SEGMENTS_AT_ONCE)  # of the loop that answers fronts
    assert kernels.query_kernel(fronts, kind) in ahead
    assert {kernels.UNIQUE, kernels.MARK_HEADS, kernels.RANK_SORTED_KERNEL} <= set(ahead)


def test_the_shape_of_several_tables_can_do_what_each_of_them_needs():
    tables = [Rows(32), Rows(6, BFLOAT16), Rows(128, INT8)]
    shape = kernels.shape_of(tables, (0, 1), kernels.ALIGNED)
    for table in tables:
        assert table.dim % shape.unit == 0
        assert (shape.widest >= table.dim, shape.most_words >= table.width) == (True, True)
        assert shape.formats >> table.dtype & 1
    assert kernels.shape_of(tables, (1,), kernels.ALIGNED) == Shape.of([tables[1]], kernels.ALIGNED)


@pytest.mark.parametrize(
    ("address", "out_format", "unit"),
    [(0, 0, 4), (8, 0, 2), (4, 0, 1), (16, 0, 4), (0, 1, 4), (8, 1, 4), (4, 2, 2), (2, 1, 1), (24, 2, 4)],
)
def test_outputs_say_their_format_and_how_many_elements_are_stored_at_once(address, out_format, unit):
    made = Shape.of([Rows(128)], kernels.outputs_code(address, out_format))
    assert (made.out, made.unit) == (out_format, unit)
