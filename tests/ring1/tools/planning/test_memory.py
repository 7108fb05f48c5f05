"""Memory that is planned, against what is then used."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hps.configuration.load import ServiceConfig, load_configuration
from hps.errors import ConfigError
from hps.ground.memory.capacity import Need
from hps.ground.registry import implementation
from hps.models.writer import write_sparse_model
from hps.parameter_server import HPS
from hps.tools.cli.tables.sample import sample_chunks
from hps.tools.planning import memory
from hps.tools.planning.memory import Machine, PlannedNeed, planned_needs, served_versions, this_machine, totals
from tests.servers.running_service import document_of, model_of

SIZES = [(1, 20_000), (16, 10_000), (128, 10_000)]
LARGE = [(1, 1_000_000), (16, 300_000), (128, 100_000)]


def configuration(directory: Path, tables, **model):
    for index, (dim, rows) in enumerate(tables):
        write_sparse_model(directory / f"t{index}", sample_chunks(rows, dim, 0))
    dims = {f"t{index}": dim for index, (dim, _) in enumerate(tables)}
    changes = {"maxnum_catfeature_query_per_table_per_sample": [10] * len(tables), "max_batch_size": 64, "gpucacheper": 0.3}
    entry = model_of("m", [directory / name for name in dims], dims, **(changes | model))
    return load_configuration(document_of(entry, persistent=directory / "db"))


def planned(config, tier, place, on_cuda=False):
    return sum(one.size_bytes for one in needs_of(config, tier, on_cuda) if (one.place, one.temporary) == (place, False))


def needs_of(config, tier=None, on_cuda=False):
    return [one.need for one in planned_needs(config, served_versions(config), on_cuda) if tier in (None, one.tier)]


def check_use(tmp_path, dim, rows):
    """The memory that is planned for a table is then used."""
    config = configuration(tmp_path, [(dim, rows)])
    tiers = ("embedding_cache", "ram"), ("volatile_db", "ram"), ("persistent_db", "disk")
    plans = [planned(config, *where) for where in tiers]
    assert not (tmp_path / "db").exists()
    with HPS(config) as server:
        deployment = server.model("m")
        cache = deployment.caches[0].stats(0).size_bytes
        volatile = deployment.chain.databases[0].stats(deployment.tables[0].tag)
    disk = sum(file.stat().st_size for file in (tmp_path / "db").rglob("*") if file.is_file())  # RocksDB removes none any more
    assert plans == pytest.approx([cache, volatile.vector_bytes + volatile.overhead_bytes, disk], rel=0.05)


@pytest.mark.parametrize(("dim", "rows"), SIZES)
def test_planned_memory_is_then_used(tmp_path, dim, rows):
    check_use(tmp_path, dim, rows)


def test_gpu_memory_is_planned_without_one(tmp_path):
    config = configuration(tmp_path, [(16, 10_000)], deployed_device_list=[0, 1], num_of_worker_buffer_in_pool=3)
    machine = this_machine(config, {"gpu": 1 << 30, "ram": 8 << 30})
    needs = planned_needs(config, served_versions(config), on_cuda=True)
    caches = [one for one in needs if one.tier == "embedding_cache"]
    pairs = -(-3000 // 14)
    assert [cache.device for cache in caches] == [0, 1]
    assert caches[0].need.size_bytes == pytest.approx(pairs * 128 + pairs * 14 * 64, abs=600)
    found = {total.place: total for total in totals(needs, machine)}
    assert found["gpu"].size_bytes < 2 * (caches[0].need.size_bytes + 3 * (1 << 21))
    assert found["pinned"].size_bytes > planned(config, "volatile_db", "pinned", on_cuda=True) > 10_000 * 64
    unpinned = sum(one.need.size_bytes for one in needs if one.need.place == "ram" and not one.need.temporary)
    assert found["ram"].size_bytes == unpinned + found["pinned"].size_bytes
    assert found["gpu"].fits
    assert found["ram"].fits


@pytest.mark.parametrize("path", ["link", "auto"])
def test_row_files_that_a_device_must_read_are_pinned(tmp_path, path):
    config = configuration(tmp_path, [(16, 10_000)], miss_path=path)
    tiers = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "row_files", "path": "x", "resident": ["t0"]}}
    config = load_configuration({**config.model_dump(exclude_unset=True), **tiers})
    index = sum(need.size_bytes for need in needs_of(config, "embedding_cache", True) if need.what.startswith("index"))
    by_place = [planned(config, "persistent_db", place, on_cuda=True) for place in ("pinned", "ram")]
    file_bytes = 10_000 * (8 + 64 + 2)
    if path == "link":
        assert by_place == [pytest.approx(file_bytes, rel=0.1), 0]
        assert index == pytest.approx(2 * 10_000, rel=0.1)
    else:  # the host answers if there is no room
        assert by_place == [0, pytest.approx(file_bytes, rel=0.1)]
        assert index == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "rows"), SIZES + LARGE)
def test_planned_gpu_memory_is_then_used(tmp_path, dim, rows):
    import cupy

    config = configuration(tmp_path, [(dim, rows)], gpucacheper=1.0)
    versions = served_versions(config)
    room = [one.need.size_bytes for one in planned_needs(config, versions, True) if one.tier == "embedding_cache"]
    cache_class = implementation("cache", "cuda")
    cupy.cuda.runtime.deviceSynchronize()
    cache = cache_class.create(versions[0].config.tables, versions[0].rows, 0)
    assert room == pytest.approx([cache.stats(0).size_bytes], rel=0.001)
    before = cupy.cuda.runtime.memGetInfo()[0]
    again = cache_class.create(versions[0].config.tables, versions[0].rows, 0)
    used = before - cupy.cuda.runtime.memGetInfo()[0]
    assert sum(room) == pytest.approx(used, rel=0.05, abs=4 << 20)  # the driver hands out 2 MB at a time
    again.close()
    cache.close()


def test_devices_that_share_rows_are_planned_with_their_parts(tmp_path):
    config = configuration(tmp_path, [(128, 10), (16, 10)], deployed_device_list=[0, 1])
    [version] = served_versions(config)

    def needs(sharing, *, on_cuda=True, share=0.3):
        own = version.config.model_copy(update={"device_sharing": sharing, "gpucacheper": share})
        found = planned_needs(config, [replace(version, config=own, rows=(100_000, 10))], on_cuda)
        found = [one for one in found if one.tier == "embedding_cache"]
        assert {one.device for one in found} == ({0, 1} if on_cuda else {None})
        return [one.need for one in found if one.device in (0, None)]

    own, shared, hot = (needs(sharing)[0] for sharing in ("replicate", "partition", "hot"))
    assert [one.what.split(" rows")[0] for one in (own, shared, hot)] == ["30,002"] * 3
    assert shared.size_bytes == pytest.approx(512 * 30_000 + 128 * 60_000 // 14, abs=3 << 21)  # the buckets of both parts
    assert hot.size_bytes == pytest.approx(shared.size_bytes, abs=3 << 21)
    [whole, _] = needs("partition", share=1.0)
    assert whole.size_bytes == pytest.approx(512 * 50_000 + 128 * 100_000 // 14, abs=3 << 21)
    assert needs("partition", on_cuda=False) == needs("replicate", on_cuda=False)


def test_what_does_not_fit_is_told_and_the_database_that_loads_the_largest_chunks_counts(tmp_path):
    config = configuration(tmp_path, [(16, 10_000)])
    needs = planned_needs(config, served_versions(config), on_cuda=False)
    found = {total.place: total for total in totals(needs, Machine({"ram": 100 << 20}, {}))}
    assert (found["ram"].fits, found["disk"].fits) == (False, None)
    assert found["disk"].peak_bytes > found["disk"].size_bytes
    [chunks] = [one.need for one in needs if one.need.what == "chunks of files"]
    assert chunks.size_bytes == 4 * implementation("database", "rocks_db").load_bytes
    assert chunks.size_bytes > 4 * implementation("database", "hash_map").load_bytes
    assert chunks.temporary


def test_of_three_gpus_the_fullest_and_the_one_with_least_memory_count(tmp_path, monkeypatch):
    def need(device, size, temporary=False):
        return PlannedNeed("m", "1", "embedding_cache", Need("gpu", "rows", size, temporary=temporary), device)

    needs = [need(0, 10), need(0, 5), need(1, 20), need(1, 10), need(1, 3, temporary=True), need(2, 29)]
    for free, fits in ((33, True), (32, False)):
        [total] = totals(needs, Machine({"gpu": free}, {}))
        assert (total.size_bytes, total.peak_bytes, total.fits) == (30, 33, fits)
    monkeypatch.setattr("hps.tools.planning.memory._gpu_memory", lambda configuration: [5, 3, 9])
    assert this_machine(configuration(tmp_path, [(4, 10)]), {}).free_bytes["gpu"] == 3


def test_everything_that_is_wrong_with_three_models_is_told(tmp_path):
    write_sparse_model(tmp_path / "good", sample_chunks(10, 4, 0))
    models = [model_of(place[-1], [tmp_path / place], {"t": 4}) for place in ("gone-a", "good", "gone-c")]
    with pytest.raises(ConfigError) as caught:
        served_versions(load_configuration(document_of(*models)))
    assert ["gone-a" in caught.value.problems[0], "gone-c" in caught.value.problems[1]] == [True, True]


def test_tables_that_are_on_disk_already_make_room_for_their_successors(tmp_path, monkeypatch):
    config = configuration(tmp_path, [(4, 10)])
    monkeypatch.setattr("hps.tools.planning.memory.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    absent = this_machine(config, {"ram": 5})
    assert (absent.free_bytes["disk"], absent.free_bytes["ram"]) == (1000, 5)
    assert f"on the file system of {tmp_path}" == absent.source["disk"]
    (tmp_path / "db").mkdir()
    for name, size in (("1.sst", 70), ("2.sst", 7), ("3.sst", 700), ("4.log", 9)):
        (tmp_path / "db" / name).write_bytes(bytes(size))
    held = this_machine(config, {})
    assert held.free_bytes["disk"] == 1777
    assert "including 777 bytes" in held.source["disk"]
    assert this_machine(config, {"disk": 3}).free_bytes["disk"] == 3


@pytest.mark.parametrize(
    ("kind", "tiers"),
    [("static", {"databases"}), ("dynamic", {"databases", "embedding_cache"}), ("stochastic", {"embedding_cache"})],
)
def test_kinds_of_caches_take_what_they_take(tmp_path, kind, tiers):
    config = configuration(tmp_path, [(4, 100_000)], embedding_cache_type=kind)
    databases = {"volatile_db", "persistent_db"} if "databases" in tiers else set()
    expected = {"process", *databases, *(tiers - {"databases"})}
    assert {one.tier for one in planned_needs(config, served_versions(config), on_cuda=False)} == expected
    if kind == "static":
        [need] = needs_of(config, "embedding_cache", on_cuda=True)
        assert "static: 86% used" in need.what
        sets = math.ceil(100_000 / 0.86 / 14)
        assert sets * (128 + 14 * 16) <= need.size_bytes <= (sets + 4) * (128 + 14 * 16) + 1000


def test_the_share_within_a_budget_is_the_largest(tmp_path):
    versions = served_versions(configuration(tmp_path, [(16, 10_000), (1, 5000)]))
    share, plan = memory.share_within(300_000, versions, on_cuda=False), implementation("cache_plan", "cpu")

    def needed(one):
        rows = [int(one * rows) for rows in versions[0].rows]
        return sum(need.size_bytes for need in plan.room_for(versions[0].config.tables, rows))

    assert needed(share) <= 300_000 < needed(share + 0.01)
    assert memory.share_within(1 << 40, versions, on_cuda=True) == 1.0
    database = implementation("database", "rocks_db")
    assert database.room_for(SimpleNamespace(read_only=True), [("t", 4, 100)]) == []


def of_fronts(service, processors=4, on_cuda=False):
    return [one.need for one in memory.frontend_needs(ServiceConfig(**service), on_cuda, processors)]


@pytest.mark.parametrize(
    ("processors", "fronts", "held_mb"), [(1, 1, 1024), (2, 1, 1024), (4, 2, 1024), (16, 14, 2688), (256, 16, 3072)]
)
def test_fronts_are_planned_with_what_the_table_of_the_docs_says(processors, fronts, held_mb):
    processes, *held = of_fronts({}, processors)
    assert (processes.what, processes.size_bytes) == (f"the parent and {fronts} frontend processes", (fronts + 1) * (65 << 20))
    overhead = fronts * (1 << 18) + (16 << 20)
    assert sum(need.size_bytes for need in held) == (held_mb << 20) + overhead


def test_configured_fronts_count_and_not_processors_and_slabs_are_pinned_for_a_gpu():
    assert of_fronts({"fronts": 3}, 64)[0].what == "the parent and 3 frontend processes"
    slab, held = of_fronts({"fronts": 0}, 64)
    assert slab.size_bytes + held.size_bytes == (1 << 30) + (1 << 18) + (16 << 20)
    for on_cuda in (False, True):
        assert [need.place for need in of_fronts({}, on_cuda=on_cuda)] == ["ram", "pinned" if on_cuda else "ram", "ram"]
