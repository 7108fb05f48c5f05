"""A model whose devices share the rows of one cache: it is filled, changed and refreshed once, and is closed on all of them."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.cache.base import NEAR_SHARE, DeviceSharing
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.stores.base import RowChanges
from tests.fakes.shared_cache import SharedCache
from tests.servers.running_service import document_of, model_of

ROWS, DIM = 2000, 4
KEYS = np.arange(ROWS)
DEVICES = [0, 1]
NEAR = int(NEAR_SHARE * 600)
Start = Callable[..., hps.HPS]


def vectors(keys: np.ndarray, generation: int = 0) -> np.ndarray:
    return (keys[:, None] + 10_000 * np.arange(DIM) + 100_000 * generation).astype(np.float32)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Start:
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn("tests.fakes.shared_cache:SharedCache"))
    SharedCache.forget()
    hps.write_sparse_model(tmp_path / "a", (KEYS, vectors(KEYS)))

    def started(sharing: str = "partition", **changes: Any) -> hps.HPS:
        settings = {
            "gpucacheper": 0.3,
            "cache_refresh_percentage_per_iteration": 0.1,
            "hit_rate_threshold": 1.1,
            "max_batch_size": ROWS,
            "miss_path": "link",
            "deployed_device_list": DEVICES,
            "device_sharing": sharing,
            **changes,
        }
        server = hps.HPS(document_of(model_of("m", [tmp_path / "a"], {"a": DIM}, **settings), device="cuda"))
        request.addfinalizer(server.close)
        return server

    return started


def check(server: hps.HPS, generation: int = 0) -> None:
    for device in DEVICES:
        out = np.full((ROWS, DIM), np.nan, np.float32)
        server.lookup_fromdlpack(KEYS, out, "m", "a", device)
        np.testing.assert_array_equal(out, vectors(KEYS, generation))


def told(*verbs: str) -> list[tuple[str, int, int]]:
    return [call for call in SharedCache.calls if call[0] in verbs]


def devices_told(verb: str) -> set[int]:
    return {device for _, device, _ in told(verb)}


CLOSED = [(device, True) for device in DEVICES]


def closed() -> list[tuple[int, bool]]:
    return [(cache.device_id, cache.closed) for cache in SharedCache.made]


def lost_access(*_: Any) -> None:
    raise hps.DeviceError("an illegal memory access was encountered")


@pytest.mark.parametrize(("sharing", "rows"), [("partition", 0.6 * ROWS), ("hot", 2 * (600 - NEAR))])
def test_one_cache_of_all_devices_is_filled_once(start: Start, sharing: str, rows: float) -> None:
    server = start(sharing)
    assert [call[:2] for call in SharedCache.calls[:3]] == [
        ("attach", 0),
        ("attach", 1),
        ("insert", 0),
    ]  # paths are chosen first
    assert len(told("attach")) == 2
    assert server.model("m").caches == [SharedCache.made[0]]
    assert [session.cache for session in server.model("m").sessions.values()] == SharedCache.made
    [cache] = server.model("m").caches
    assert rows <= cache.stats(0).capacity_rows <= rows + 14
    assert sum(count for _, _, count in told("insert")) == cache.stats(0).inserts == cache.stats(0).capacity_rows
    assert devices_told("insert") == {0}
    check(server)
    server.close()
    assert closed() == CLOSED


def test_room_is_checked_for_what_is_then_made(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(SharedCache, "check_room", lambda _tables, *room: asked.append(room))
    start("hot")
    assert asked == [([2 * (600 - NEAR)], device, False, [], DeviceSharing((0, 1), (NEAR,))) for device in DEVICES]


@pytest.mark.parametrize(
    ("settings", "indexes"),
    [({}, 0), ({"index_on_device": True}, 1), ({"index_on_device": True, "embedding_cache_type": "static"}, 0)],
)
def test_a_device_keeps_the_indexes_that_room_was_asked_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], indexes: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(SharedCache, "check_room", lambda _tables, *room: asked.append(len(room[3])))
    start(**settings)
    assert told("attach") == [("attach", device, indexes) for device in DEVICES]
    assert asked == [indexes] * 2


def test_writes_and_refreshes_reach_it_once_and_are_seen_on_all_devices(start: Start) -> None:
    server = start()
    check(server)
    resident = server.model("m").caches[0].stats(0).resident_rows
    SharedCache.calls.clear()
    server.refresh("m")
    assert sum(count for _, _, count in told("update")) == resident
    assert devices_told("update") == {0}
    SharedCache.calls.clear()
    server.insert(KEYS, vectors(KEYS, 1), "m", "a")
    assert told("insert", "update", "erase") == [("update", 0, ROWS)]
    check(server, 1)
    SharedCache.calls.clear()
    server.delete(KEYS[:5], "m", "a")
    assert told("insert", "update", "erase") == [("erase", 0, 5)]
    for device in DEVICES:
        out = np.full((8, DIM), np.nan, np.float32)
        server.lookup_fromdlpack(KEYS[:8], out, "m", "a", device)
        np.testing.assert_array_equal(out, np.where(KEYS[:8, None] < 5, np.float32(0), vectors(KEYS[:8], 1)))


def test_devices_that_cannot_share_have_a_cache_each(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    SharedCache.reason = "there is no NVLink"
    server = start("hot")
    assert server.model("m").caches == SharedCache.made
    assert [cache.device_id for cache in SharedCache.made] == DEVICES
    assert all(cache.stats(0).capacity_rows < 0.3 * ROWS + 14 for cache in SharedCache.made)
    assert devices_told("insert") == {0, 1}
    assert "device_sharing hot is impossible here: there is no NVLink" in caplog.text
    check(server)


@pytest.mark.parametrize("fails", ["session", "filling"])
def test_a_start_that_fails_closes_the_caches_of_all_devices(start: Start, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    if fails == "session":
        SharedCache.refused = 1
    else:
        monkeypatch.setattr(SharedCache, "insert", lost_access)
    with pytest.raises(hps.DeviceError, match="CUDA device 1 makes no lookups" if fails == "session" else "illegal"):
        start()
    assert closed() == CLOSED


@pytest.mark.parametrize("shared", [True, False])
def test_figures_of_devices_are_their_own_and_those_of_a_tier_all_of_its_devices(start: Start, shared: bool) -> None:
    server = start("partition" if shared else "replicate")
    server.statistics.measure()
    stats, sizes = server.stats(), [cache.stats(0).size_bytes for cache in SharedCache.made]
    assert [
        (device.device, device.name, device.memory_bytes, device.free_bytes, device.cache_bytes) for device in stats.devices
    ] == [(str(n), f"device {n}", 10**9 + n, 10**8 + n, sizes[n]) for n in DEVICES]
    *tiers, _hash_map = stats.models[0].tables[0].tiers
    assert [tier.vector_bytes + tier.overhead_bytes for tier in tiers] == ([sum(sizes)] if shared else sizes)
    assert tiers[0].capacity_rows == SharedCache.made[0].stats(0).capacity_rows
    if shared:
        assert 0 < sizes[0] < sizes[1]
    else:
        assert [tier.device for tier in tiers] == ["0", "1"]
    [version] = server.versions("m")
    assert version.size_bytes["embedding_cache"] == sum(sizes)


@pytest.mark.parametrize(("sharing", "lost"), [("partition", [0, 1]), ("replicate", [0]), ("replicate", [1])])
def test_every_lost_device_is_told_and_the_others_keep_their_figures(start: Start, sharing: str, lost: list[int]) -> None:
    server = start(sharing)
    left = sum(cache.stats(0).size_bytes for cache in SharedCache.made if cache.device_id not in lost)
    SharedCache.lost = lost
    assert server.live.lost_devices() == {str(device): "an illegal memory access was encountered" for device in lost}
    [version] = server.versions("m")
    assert version.size_bytes.get("embedding_cache", 0) == left


@pytest.mark.parametrize("lost", DEVICES)
def test_a_model_refuses_if_any_of_its_devices_does(start: Start, lost: int) -> None:
    server = start("replicate", embedding_cache_type="stochastic")
    assert server.model("m").refuses == ""
    SharedCache.lost = (lost,)
    assert server.model("m").refuses.startswith(f"device {lost} is lost")


def test_updates_leave_lost_devices_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = start().model("m")
    database = deployment.chain.databases[-1]
    monkeypatch.setattr(database, "shared", True)
    monkeypatch.setattr(database, "apply", lambda _tag, own, _positions: own.sequences > 1)  # another process wrote the first
    changes = RowChanges(KEYS[:3], vectors(KEYS[:3], 1), np.array([1, 2, 2]), np.array([False, False, True]))
    for lost, verbs in (((), ["update", "erase", "erase"]), (DEVICES, [])):
        SharedCache.lost = lost
        SharedCache.calls.clear()
        assert deployment.apply(0, changes, {}) == 2
        assert SharedCache.calls == [(verb, 0, 1) for verb in verbs]


@pytest.mark.parametrize("sharing", ["replicate", "partition"])
def test_other_devices_are_changed_and_refreshed_after_one_is_lost(start: Start, sharing: str) -> None:
    server = start(sharing)
    steps: list[tuple[tuple[int, ...], set[int]]] = [((), {0, 1}), ((1,), {0}), ((0, 1), set())]  # one after the other
    for lost, left in steps if sharing == "replicate" else [((), {0}), ((0, 1), set())]:
        SharedCache.lost = lost
        for change in (lambda: server.insert(KEYS, vectors(KEYS, 1), "m", "a"), lambda: server.refresh("m")):
            SharedCache.calls.clear()
            change()
            assert devices_told("update") == left
    server.delete(KEYS[:5], "m", "a")
    assert told("insert", "erase") == []
    assert server.model("m").chain.databases[0].size(server.model("m").tables[0].tag) == ROWS - 5


@pytest.mark.parametrize("verb", ["update", "erase"])
@pytest.mark.parametrize("lost", [(), DEVICES])
def test_a_change_that_fails_is_kept_if_the_device_is_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch, verb: str, lost: Any
) -> None:
    server = start()
    keys, deployment = server.model("m").caches[0].dump(0)[:5], server.model("m")

    def fail(*_: Any) -> None:
        SharedCache.lost = lost
        lost_access()

    monkeypatch.setattr(SharedCache, verb, fail)
    with nullcontext() if lost else pytest.raises(hps.DeviceError, match="illegal memory access"):
        if verb == "update":
            server.insert(keys, vectors(keys, 1), "m", "a")
        else:
            server.delete(keys, "m", "a")
    out = np.zeros((keys.size, DIM), np.float32)
    deployment.chain.fetch(deployment.tables[0], keys, out, np.zeros(keys.size, np.bool_))
    np.testing.assert_array_equal(out, vectors(keys, 1) if verb == "update" else 0.0)


def test_lookups_that_name_no_device_avoid_a_lost_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("replicate")
    deployment = server.model("m")
    choices = lambda: {deployment.choose_device() for _ in range(4)}  # noqa: E731 - asked again
    assert choices() == set(DEVICES)
    for lost, left in (((1,), {0}), ((0, 1), {0, 1})):  # one after the other
        SharedCache.lost = lost
        for device in lost:
            monkeypatch.setattr(deployment.sessions[device]._lookups, "take", lost_access)
        for _ in range(4):
            np.testing.assert_array_equal(server.lookup_tables({"a": KEYS}, "m")["a"], vectors(KEYS))
        assert choices() == left
        check(server)
