"""What a deployment answers, closes and refuses, and how a configuration chooses caches and databases."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import hps
from hps.cache.base import ALONE, NEAR_SHARE, DeviceSharing, SharedRows
from hps.cache.cpu.cache import NumpyCache
from hps.configuration.load import ModelConfig, load_configuration
from hps.errors import CapacityError
from hps.ground.kernels.numba_kernels import declared_kernels
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn, implementation
from hps.models.sources import ModelSources
from hps.statistics.metrics import Metrics
from hps.stores.base import RowChanges
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.redis.database import RedisDatabase
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.row_files.database import RowFilesDatabase
from hps.types import CheckResult
from hps.versions.cache_sizes import cache_capacities, device_sharing, index_sizes, is_direct, is_static, usable_sharing
from hps.versions.deployment import retry_after_takeover
from hps.versions.preflight import preflight
from hps.versions.tiers import choose_cache, kernels_of, open_databases, served_kernels, why_unavailable
from tests.servers.running_service import document_of, model_of
from tests.tables.held_tables import held_tags

KEYS = np.arange(10)
DIMS = {"a": 4, "b": 8}


def config(**settings: Any) -> ModelConfig:
    return load_configuration(document_of(model_of("m", ["x", "y"], DIMS, **settings))).models[0]


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    for table, dim in DIMS.items():
        hps.write_sparse_model(tmp_path / table, (KEYS, np.full((KEYS.size, dim), 1, np.float32)))
    settings = {"default_value_for_each_table": [5.0] * len(DIMS), "cache_refresh_percentage_per_iteration": 1.0}
    return document_of(model_of("m", [tmp_path / table for table in DIMS], DIMS, gpucacheper=1.0, **settings))


@pytest.fixture
def server(document: dict[str, Any]) -> Iterator[hps.HPS]:
    with hps.HPS(document) as server:
        yield server


def test_a_row_is_shown_with_its_tier_and_an_absent_one_with_the_default(server: hps.HPS) -> None:
    deployment = server.model("m")
    for value in (2.0, 3.0):
        deployment.insert(1, np.array([50]), np.full((1, 8), value, np.float32))
        row = deployment.row(1, 50)
        assert (row.key, row.vector.tolist(), row.version) == (50, [value] * 8, "1")
        assert row.tier in ("embedding_cache", "volatile_db")
    deployment.delete(1, np.array([50]))
    row = deployment.row(1, 50)
    assert (row.tier, row.vector.tolist(), row.written_at_us) == (None, [5.0] * 8, None)
    row = deployment.row(0, 3)
    assert (row.tier, row.vector.tolist()) == ("embedding_cache", [1.0] * 4)
    deployment.insert(0, np.array([3]), np.full((1, 4), 2, np.float32))
    assert server.lookup([3], "m", "a").tolist() == [[2.0] * 4], "what is resident is replaced"
    deployment.delete(0, np.array([3]))
    assert server.lookup([3], "m", "a").tolist() == [[5.0] * 4], "and removed"
    assert deployment.modified.is_set()


def test_changes_of_a_log_are_encoded_and_those_older_than_the_row_are_not_made(document: dict[str, Any]) -> None:
    document["models"][0]["row_dtype"] = "float16"
    with hps.HPS(document) as server:
        server._chain.follow_log(server.model("m").tables[0])
        for sequence, deleted, made, row in ((1, False, 1, 1.0), (3, False, 1, 3.0), (2, False, 0, 3.0), (4, True, 1, 5.0)):
            one = np.full((1, 4), sequence, np.float32)
            changes = RowChanges(np.array([3]), one, np.array([sequence]), np.array([deleted]))
            assert server.model("m").apply(0, changes, {}) == made
            assert server.lookup([3, 4], "m", "a").tolist() == [[row] * 4, [1.0] * 4]


def test_a_table_that_is_none_and_vectors_of_another_shape_are_refused(server: hps.HPS) -> None:
    deployment = server.model("m")
    assert [deployment.table_index(one) for one in ("a", "b", 0, 1, np.int64(1))] == [0, 1, 0, 1, 1]
    for table in ("c", 2, -1, True, None, 1.0):
        with pytest.raises(hps.UnknownTableError, match=r"expected one of 0 \(a\), 1 \(b\)"):
            deployment.table_index(table)  # type: ignore[arg-type]
    for shape in ((1, 3), (2, 4), (1, 4, 1)):
        with pytest.raises(hps.InvalidInputError, match=r"expected \(1, 4\)"):
            deployment.insert(0, KEYS[:1], np.zeros(shape, np.float32))
    assert not deployment.modified.is_set()


def test_a_device_that_is_none_is_refused_and_the_only_one_is_the_default(document: dict[str, Any]) -> None:
    document["models"][0]["deployed_device_list"] = [3, 5]
    with hps.HPS(document) as server:
        deployment = server.model("m")
        assert (deployment.devices, deployment.device(None), deployment.device(5)) == ((3, 5), 3, 5)
        assert deployment.session(None) is deployment.session(5), "devices of the CPU share one session"
        with pytest.raises(hps.UnknownDeviceError, match=r"got device 0, expected one of its deployed_device_list \[3, 5\]"):
            deployment.session(0)


@pytest.mark.parametrize(("kind", "complaint"), [("static", "expected a persistent_db"), ("dynamic", "expected one")])
def test_a_write_that_no_database_would_keep_is_refused(document: dict[str, Any], kind: str, complaint: str) -> None:
    document["models"][0]["embedding_cache_type"] = kind
    if kind == "dynamic":
        document["volatile_db"] = {"type": "disabled"}
    with hps.HPS(document) as server:
        deployment = server.model("m")
        with pytest.raises(hps.InvalidInputError, match=complaint):
            deployment.insert(0, KEYS[:1], np.zeros((1, 4), np.float32))
        with pytest.raises(hps.InvalidInputError, match=complaint):
            deployment.delete(0, KEYS)
        assert not deployment.modified.is_set()


def test_a_deployment_that_is_closed_refuses_and_is_closed_again(server: hps.HPS) -> None:
    deployment, stopped, answers = server.model("m"), [], [False, True, True]
    deployment.stop_following.append(lambda timeout_s: stopped.append(timeout_s) or answers.pop(0))
    assert deployment.close("keep") is False, "its feed has not stopped"
    assert not deployment.lookups_ended.is_set()
    for _ in range(2):
        assert deployment.close("keep") is True
    assert (len(stopped), deployment.lookups_ended.is_set()) == (2, True)
    with pytest.raises(hps.NotReadyError):
        deployment.insert(0, KEYS[:1], np.zeros((1, 4), np.float32))
    assert held_tags(server._chain.databases[0]) != [], "its tables are kept"


# -- decisions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "direct", "static"),
    [
        ({}, False, False),
        ({"gpucache": False}, True, False),
        ({"embedding_cache_type": "static"}, True, True),
        ({"embedding_cache_type": "static", "gpucache": False}, True, False),
        ({"embedding_cache_type": "uvm"}, True, False),
        ({"embedding_cache_type": "stochastic"}, False, False),
    ],
)
def test_databases_answer_where_a_cache_is_no_faster(settings: dict[str, Any], direct: bool, static: bool) -> None:
    class OnGpu(NumpyCache):
        device = "cuda"

    assert (is_direct(config(**settings), NumpyCache), is_static(config(**settings))) == (direct, static)
    assert is_direct(config(**settings), OnGpu) is False


@pytest.mark.parametrize(
    ("settings", "kinds", "kept"),
    [
        ({}, [HashMapDatabase, RowFilesDatabase], None),
        ({"index_on_device": True}, [HashMapDatabase, RowFilesDatabase], HashMapDatabase),
        ({"index_on_device": True}, [RedisDatabase, RowFilesDatabase], None),
        ({"index_on_device": True}, [RowFilesDatabase], RowFilesDatabase),
        ({"index_on_device": True}, [RocksDatabase], None),
        ({}, [RowFilesDatabase], None),  # it is kept, but misses are slower without it, not impossible
        ({"miss_path": "link"}, [RowFilesDatabase], RowFilesDatabase),
        ({"index_on_device": True, "gpucache": False}, [HashMapDatabase], None),
        ({"index_on_device": True, "miss_path": "copy"}, [HashMapDatabase], None),
        ({"index_on_device": True, "embedding_cache_type": "static"}, [HashMapDatabase], None),
    ],
)
def test_a_device_has_room_for_indexes_of_tables_that_it_reads_in_host_memory(settings, kinds, kept) -> None:
    expected = [] if kept is None else [kept.index_bytes(1000), kept.index_bytes(10)]
    assert index_sizes(config(**settings), [1000, 10], kinds) == expected


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Unavailable(NumpyCache):
        @classmethod
        def unavailable_reason(cls) -> str | None:
            return "no CUDA device"

    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn(f"{__name__}:NumpyCache"))
    assert (why_unavailable("cuda"), choose_cache("auto").device, caplog.text) == (None, "cpu", "")
    monkeypatch.setattr(f"{__name__}.NumpyCache", Unavailable)
    caplog.set_level(logging.WARNING)
    assert why_unavailable("cuda") == "no CUDA device"
    assert choose_cache("auto") is not Unavailable
    assert "serving from the CPU with the NumPy cache (no CUDA device)" in caplog.text


@pytest.mark.parametrize(
    ("volatile", "persistent", "load", "keep"),
    [
        ({}, None, ["hash_map"], []),
        ({}, {}, ["hash_map", "rocks_db"], []),
        ({"initialize_after_startup": False}, {}, ["rocks_db"], ["hash_map"]),
        ({}, {"initialize_after_startup": False}, ["hash_map"], ["rocks_db"]),
        ({"type": "disabled"}, {}, ["rocks_db"], []),
        ({"type": "disabled"}, None, [], []),
    ],
)
def test_databases_are_loaded_unless_they_keep_their_rows(
    tmp_path: Path, volatile: dict[str, Any], persistent: dict[str, Any] | None, load: list[str], keep: list[str]
) -> None:
    content = document_of(model_of("m", ["x", "y"], DIMS, gpucacheper=1.0))
    content["volatile_db"] = {"type": "hash_map", **volatile}
    if persistent is not None:
        content["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "db"), **persistent}
    chain, current = open_databases(load_configuration(content), Metrics())
    targets = current()
    try:
        assert [[one.kind for one in some] for some in (targets.load, targets.keep)] == [load, keep]
        assert {database.kind for database in chain.databases} == {*load, *keep}
        assert (targets.int32_keys, targets.initial_cache_rate, targets.force) == (False, 1.0, False)
    finally:
        chain.close()


@pytest.mark.parametrize("takeovers", [0, 1, 2])
def test_a_call_that_a_retired_version_refuses_is_made_again_as_long_as_others_take_over(takeovers: int) -> None:
    server: Any = SimpleNamespace(live=SimpleNamespace(serving={}), rerouted=lambda error: None)
    calls: list[int] = []

    def look_up(server: Any, value: int) -> int:
        calls.append(value)
        if len(calls) <= takeovers:
            server.live.serving = {"m": len(calls)}
            raise hps.NotReadyError("retired")
        if value < 0:
            raise hps.NotReadyError("closed")
        return value + 1

    def call(value: int) -> Any:
        calls.clear()
        return retry_after_takeover(look_up)(server, value)

    assert (call(7), len(calls)) == (8, takeovers + 1)
    with pytest.raises(hps.NotReadyError, match="closed"):
        call(-1)
    assert len(calls) == takeovers + 1


# -- kernels ---------------------------------------------------------------------------------------------------------------

SETS = {"_add_keys", "_add_hashes", "_contains", "_mark_last", "pool_rows", "counted_positions"}
HASH_MAP = {"fetch", "insert", "delete", "rehash", "retire", "count_by_hash", "count_present"}
DENSE = {"mark_keys", "count_holes", "show_all_holes"}
EVICTION = {"_plan", "_protect", "_gather", "_evict"}
REDIS = {"group_by_partition", "write_fields", "write_rows", "read_rows"}
CACHE = {"query", "write", "scatter", "settle", "erase", "dump", "pool"}
DISTINCT = {"_find_distinct", "_count_parts", "_fill_parts", "_find_distinct_of_parts", "_close_ranks"}
PLACES = {"_index", "_match"}
LOOKUP = CACHE | DISTINCT | PLACES
ROWS = {"encode_rows", "decode_rows"}


def kernels_document(tmp_path, volatile, **settings):
    settings = {"maxnum_catfeature_query_per_table_per_sample": [100], "max_batch_size": 100, "gpucacheper": 0.5} | settings
    model = model_of("m", [tmp_path / "t.model"], {"t": 16}, hit_rate_threshold=1.1, **settings)
    return document_of(model, persistent=tmp_path / "db", volatile_db=volatile)


@pytest.mark.parametrize(
    ("volatile", "settings", "expected"),
    [
        ({"type": "hash_map"}, {}, SETS | HASH_MAP | DENSE | LOOKUP),
        ({"type": "hash_map", "overflow_margin": 1000}, {}, SETS | HASH_MAP | EVICTION | LOOKUP),
        ({"type": "hash_map"}, {"gpucache": False}, SETS | HASH_MAP | DENSE),
        ({"type": "hash_map"}, {"embedding_cache_type": "static"}, SETS | HASH_MAP | DENSE),
        ({"type": "redis_cluster"}, {}, SETS | REDIS | LOOKUP),
        ({"type": "disabled"}, {}, SETS | LOOKUP),
        ({"type": "hash_map"}, {"row_dtype": "int8"}, SETS | HASH_MAP | DENSE | LOOKUP | ROWS),
        ({"type": "hash_map"}, {"row_dtype": "float16", "gpucache": False}, SETS | HASH_MAP | DENSE | ROWS),
    ],
)
def test_a_configuration_has_the_kernels_that_it_uses(tmp_path, volatile, settings, expected):
    configuration = load_configuration(kernels_document(tmp_path, volatile, **settings))
    kernels = kernels_of(configuration, implementation("cache", "cpu"))
    assert len(kernels) == len(expected)
    assert {kernel.__name__ for kernel in kernels} == expected


NOT_ASKED_FOR = {
    "cache.cpu.miniature": "planning",
    "cache.cuda.batch_loop": "the CUDA cache's `batch_kernels`",
    "cache.cuda.repeats": "the CUDA cache's `kernels`",
    "stores.hash_map.kernels:scan": "refreshes, and what warms caches before a model is ready",
    "stores.rocks_db.change_order": "updates from a log",
    "stores.row_files.layout:split_records": "scans",
    "models.differences": "writing models",
    "models.formats.quantised_rows": "imports",
    "tools.cli.tables.sample": "samples",
    "tools.planning": "planning",
    "statistics.key_traces": "recordings, which compile theirs when they begin",
    "updates.publisher": "publishers",
}
"""Kernels that no request to a service on the CPU calls, and what does."""


def test_what_a_request_can_call_is_compiled_before_a_service_is_ready(tmp_path):
    """A new kernel is in the one list of those that are compiled ahead, or says here what calls it."""
    kinds = [("hash_map", {}), ("hash_map", {"overflow_margin": 1000}), ("redis_cluster", {})]
    documents = [kernels_document(tmp_path, {"type": kind, **more}, row_dtype="int8") for kind, more in kinds]
    documents.append(documents[0] | {"persistent_db": {"type": "row_files", "path": str(tmp_path / "rows")}})
    transform = {"function": "tests.fakes.transforms:cities", "inputs": {"city": "bytes"}}
    documents.append(kernels_document(tmp_path, {"type": "hash_map"}, transform=transform))
    cpu = implementation("cache", "cpu")
    served = {kernel for one in documents for kernel in served_kernels(load_configuration(one), cpu)}
    others = [kernel.py_func for kernel in declared_kernels() if kernel not in served]
    names = {f"{other.__module__}:{other.__name__}".removeprefix("hps.") for other in others}
    assert not [name for name in names if not name.startswith(tuple(NOT_ASKED_FOR))]
    assert not [one for one in NOT_ASKED_FOR if not any(name.startswith(one) for name in names)]


# -- devices that share their rows, and how many rows they have room for -----------------------------------------------------

FILE_ROWS = [100_000, 30]
REASON = "CUDA device 0 cannot access the memory of device 1"


class Apart(NumpyCache, SharedRows):
    """A cache of devices that reach each other or do not; it notes what room is asked for."""

    device = "cuda"
    reason: ClassVar[str | None] = None
    asked: ClassVar[list[tuple[int, list[int], DeviceSharing]]] = []

    @classmethod
    def reason_against_sharing(cls, device_ids: Any) -> str | None:
        return cls.reason

    @classmethod
    def check_room(cls, tables, capacity_rows, device_id, static=False, index_bytes=(), sharing=ALONE) -> None:
        cls.asked.append((device_id, list(capacity_rows), sharing))


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "asked", [])
    monkeypatch.setattr(Apart, "reason", None)


def sharing_config(sharing: str, devices: int = 2, **changes: Any) -> ModelConfig:
    settings = {"gpucacheper": 0.2, "deployed_device_list": list(range(devices)), "device_sharing": sharing, **changes}
    [model] = load_configuration(document_of(model_of("m", ["a", "b"], {"a": 8, "b": 4}, **settings), device="cuda")).models
    return model


def shared(model: ModelConfig) -> tuple[DeviceSharing, list[int]]:
    sharing = device_sharing(model, FILE_ROWS)
    return sharing, cache_capacities(model, FILE_ROWS, sharing)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("kind", "near"), [("partition", ()), ("hot", (int(NEAR_SHARE * 20_000), 0))])
def test_devices_have_room_for_the_own_rows_of_each(kind: str, near: tuple[int, ...], devices: int) -> None:
    sharing, capacities = shared(sharing_config(kind, devices))
    assert sharing == DeviceSharing(tuple(range(devices)), near)
    assert capacities == [devices * (20_000 - sum(near)), devices * 6]
    assert shared(sharing_config(kind, devices, gpucacheper=1.0))[1] == FILE_ROWS, "there are no more"
    assert shared(sharing_config(kind, 3, gpucacheper=0.5))[1] == FILE_ROWS


def test_a_static_table_is_cached_once() -> None:
    sharing, capacities = shared(sharing_config("partition", 3, embedding_cache_type="static"))
    assert sharing.device_ids == (0, 1, 2)
    assert capacities == cache_capacities(sharing_config("replicate", 3, embedding_cache_type="static"), FILE_ROWS)
    assert capacities == FILE_ROWS  # the cache adds what makes every row find a place


SINGLE = [("replicate", 2, True), ("hot", 1, True), ("partition", 1, True), ("hot", 2, False)]


@pytest.mark.parametrize(("kind", "devices", "cache"), SINGLE)
def test_others_share_nothing(kind: str, devices: int, cache: bool) -> None:
    assert shared(sharing_config(kind, devices, gpucache=cache)) == (ALONE, [20_000, 6] if cache else [0, 0])


def test_devices_whose_cache_shares_no_rows_cache_by_themselves() -> None:
    class OnGpu(NumpyCache):
        device = "cuda"

    expected = (ALONE, "this cache does not share rows between devices")
    assert usable_sharing(sharing_config("hot"), OnGpu, FILE_ROWS) == expected


def test_devices_that_cannot_reach_each_other_cache_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_sharing(sharing_config("hot"), Apart, FILE_ROWS) == (device_sharing(sharing_config("hot"), FILE_ROWS), None)
    monkeypatch.setattr(Apart, "reason", REASON)
    assert usable_sharing(sharing_config("hot"), Apart, FILE_ROWS) == (ALONE, REASON)
    assert usable_sharing(sharing_config("replicate"), Apart, FILE_ROWS) == (ALONE, None)
    assert usable_sharing(sharing_config("hot"), NumpyCache, FILE_ROWS) == (ALONE, None)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[CheckResult]]:
    """What a check of the machine finds about devices."""
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn(f"{__name__}:Apart"))

    def check(sharing: str) -> list[CheckResult]:
        model = sharing_config(sharing)
        configuration = load_configuration(document_of(model.model_dump(), device="cuda"))
        tables = {table: (rows, 0) for table, rows in zip(model.tables, FILE_ROWS, strict=True)}
        found = preflight(configuration, tables, ModelSources(configuration.model_source), 5)
        return [one for one in found if "dev" in one.where]

    return check


Check = Callable[[str], list[CheckResult]]


def test_a_check_of_the_machine_asks_each_device_for_its_part(checked: Check) -> None:
    [found] = checked("hot")
    assert (found.level, found.where) == ("good", "device")
    sharing, capacities = shared(sharing_config("hot"))
    assert Apart.asked == [(device, capacities, sharing) for device in (0, 1)]


def test_a_check_of_the_machine_warns_of_devices_that_share_nothing(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "reason", REASON)
    [found] = checked("partition")
    assert (found.level, found.where) == ("warning", "models[0].device_sharing")
    assert "device_sharing partition is impossible here" in found.text
    assert REASON in found.text
    assert Apart.asked == [(device, [20_000, 6], ALONE) for device in (0, 1)]


def test_a_check_of_the_machine_finds_parts_that_do_not_fit(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CapacityError("too large")

    monkeypatch.setattr(Apart, "check_room", refuse)
    expected = ("wrong", "models[0].deployed_device_list", "too large")
    assert [(one.level, one.where, one.text) for one in checked("hot")] == [expected] * 2
