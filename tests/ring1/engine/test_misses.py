"""What happens to a miss: a device reads the hash map in place, with or without a wait, or leaves it to the host.

A cache on the CPU stands for the device; `tests/gpu/` has the same on a GPU.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.engine import miss_path, stream_ordered
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.linked_cache import LinkedCache
from tests.fakes.populating_pinner import PopulatingPinner
from tests.servers.running_service import document_of, model_of

ROWS, DIM, DEFAULT = 500, 4, -2.0


def vectors_of(keys, version=0):
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(DIM) + 10_000 * version).astype(np.float32)


@pytest.fixture(autouse=True)
def linked(monkeypatch):
    """Let the device be a `LinkedCache`, and the hash map one that fails on command. Nothing is timed."""
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn("tests.fakes.linked_cache:LinkedCache"))
    for kind in ("hash_map", "parallel_hash_map"):
        monkeypatch.setitem(
            IMPLEMENTATIONS["database"], kind, BuiltIn("tests.fakes.linked_cache:FailingHashMap", section="volatile_db")
        )
    monkeypatch.setattr(miss_path, "_keys_per_s", lambda *_: 1.0)
    monkeypatch.setattr(stream_ordered, "_POLL_INTERVAL_S", 0.0)


@pytest.fixture
def start(tmp_path):
    """Start a parameter server of two tables of ROWS rows each."""
    hps.write_sparse_model(tmp_path / "a", (np.arange(ROWS), vectors_of(range(ROWS))))
    with ExitStack() as opened:

        def start(persistent=False, tiers=None, **changes):
            settings = {"gpucacheper": 0.1, "hit_rate_threshold": 1.1, "num_of_worker_buffer_in_pool": 2}
            settings |= {"default_value_for_each_table": [DEFAULT] * 2} | changes
            model = model_of("m", [tmp_path / "a"] * 2, {"a": DIM, "b": DIM}, **{"checks": False, **settings})
            document = document_of(model, persistent=tmp_path / "rocks" if persistent else None)
            return opened.enter_context(hps.HPS({**document, "device": "cuda", **(tiers or {})}))

        yield start
    assert not LinkedCache.pinner.faults


def cache_of(server, device=0) -> LinkedCache:
    return server.model("m").sessions[device].cache


def redeploy(server, **changes):
    server.deploy(server.model("m").config.model_copy(update=changes))


def path_of(server, path):
    return server.metrics.registry.get_sample_value("hps_miss_path", {"model": "m", "table": "a", "path": path})


def check(keys, vectors, version=0):
    keys = np.asarray(keys)
    there = (keys >= 0) & (keys < ROWS)
    np.testing.assert_array_equal(vectors[there], vectors_of(keys[there], version))
    np.testing.assert_array_equal(vectors[~there], np.float32(DEFAULT))


def count(server, name, *labels):
    return server.metrics.registry.get_sample_value(name, dict(zip(("model", "table", "tier"), ("m", *labels), strict=False)))


def lookup(server, keys, table="a", **how):
    keys = np.asarray(keys, np.int64)
    out = np.full((keys.size, DIM), np.nan, np.float32)
    server.lookup_fromdlpack(keys, out, "m", table, **how)
    return out


@pytest.mark.parametrize("persistent", [False, True])
def test_misses_are_answered_in_place_and_counted(start, persistent):
    server = start(persistent)
    keys = [3, 3, 9, ROWS, 4]
    for hits in (0, 4):
        before = [count(server, "hps_hits_total", "a", tier) for tier in ("embedding_cache", "volatile_db")]
        vectors, found = server.lookup(keys, "m", "a", return_found=True)
        check(keys, vectors)
        assert found.tolist() == [True, True, True, False, True]
        after = [count(server, "hps_hits_total", "a", tier) for tier in ("embedding_cache", "volatile_db")]
        assert (after[0] - before[0], after[1] - before[1]) == (hits, 4 - hits)
    assert [count(server, f"hps_{what}_keys_total", "a") for what in ("linked", "default")] == [4, 2]
    assert count(server, "hps_misses_total", "a", "embedding_cache") == 6
    assert path_of(server, "link") == 1
    assert server.row(100, "m", "a").tier == "volatile_db"


def test_what_is_left_of_a_linked_table_is_fetched_and_alone_counts_for_the_hit_rate_threshold(start):
    server = start(hit_rate_threshold=0.5)
    check(range(100), lookup(server, range(100)))
    assert [count(server, f"hps_{what}_keys_total", "a") for what in ("linked", "deferred")] == [100, 0]
    cache_of(server).unreadable = {101, 105}
    check([101, 102, 105], lookup(server, [101, 102, 105]))
    assert count(server, "hps_linked_keys_total", "a") == 101


@pytest.mark.parametrize(
    ("fails", "gone", "from_heir"), [(False, False, False), (True, False, True), (False, True, True), (True, True, False)]
)
def test_a_row_that_was_read_before_a_modification_does_not_become_resident_after_it(start, fails, gone, from_heir):
    server, keys = start(persistent=fails), np.array([7, 8])  # so that the write as a whole succeeds
    if from_heir:
        redeploy(server, gpucacheper=0.2)
    server.model("m").chain.databases[0].fails = fails

    def modify():
        cache_of(server).before_admission = lambda: None
        if gone:
            server.delete(keys, "m", "a")
        else:
            server.insert(keys, vectors_of(keys, 1), "m", "a")

    cache_of(server).before_admission = modify
    lookup(server, keys)
    expected = np.full((2, DIM), DEFAULT, np.float32) if gone else vectors_of(keys, 1)
    for _ in range(2):
        np.testing.assert_array_equal(lookup(server, keys), expected)


def test_a_modification_under_way_when_other_settings_are_deployed_reaches_their_caches(start):
    server = start(persistent=True)
    persistent = server.model("m").chain.databases[-1]
    writing, go_on, write = threading.Event(), threading.Event(), persistent.insert

    def slow(*arguments):
        writing.set()
        assert go_on.wait(PATIENCE_S)
        write(*arguments)

    persistent.insert = slow
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(server.insert, [7], vectors_of([7], 1), "m", "a")
        assert writing.wait(PATIENCE_S)
        deployed = pool.submit(redeploy, server, gpucacheper=0.2)
        wait_until(lambda: server.model("m").successors or deployed.done(), "the new caches are heard of")
        assert not deployed.done()
        go_on.set()
        written.result()
        deployed.result()
    np.testing.assert_array_equal(lookup(server, [7]), vectors_of([7], 1))


@pytest.mark.parametrize("kind", ["dynamic", "uvm"])
def test_a_quarantined_table_is_not_read_in_place_again(start, kind):
    server = start(persistent=True, embedding_cache_type=kind)
    volatile = server.model("m").chain.databases[0]
    volatile.fails = True
    server.insert([7], vectors_of([7], 1), "m", "a")
    volatile.fails = False
    np.testing.assert_array_equal(lookup(server, [7]), vectors_of([7], 1))
    check([8], lookup(server, [8]))
    assert count(server, "hps_linked_keys_total", "a") == 0
    check([9], lookup(server, [9], "b"))
    assert count(server, "hps_linked_keys_total", "b") == 1


@pytest.mark.parametrize("volatile", ["disabled", "hash_map"])
def test_row_files_are_read_in_place_unless_a_hash_map_is_above_them(start, tmp_path, volatile):
    tiers = {"volatile_db": {"type": volatile}, "persistent_db": {"type": "row_files", "path": str(tmp_path / "files")}}
    server = start(tiers=tiers)
    tier = "persistent_db" if volatile == "disabled" else "volatile_db"
    keys = [3, 3, 9, ROWS, 4]
    check(keys, lookup(server, keys))
    assert count(server, "hps_linked_keys_total", "a") == 4
    assert count(server, "hps_hits_total", "a", tier) == 4
    server.insert([9, 50], vectors_of([9, 50], 1), "m", "a")
    server.delete([4], "m", "a")
    database = server.model("m").chain.databases[-1]
    for _before_and_after_the_seal in range(2):
        np.testing.assert_array_equal(lookup(server, [9, 50]), vectors_of([9, 50], 1))
        np.testing.assert_array_equal(lookup(server, [4]), np.full((1, DIM), np.float32(DEFAULT)))
        database.seal(server.model("m").tables[0].tag)
    assert path_of(server, "link") == 1
    if volatile == "disabled":  # the device answers alone
        out = np.full((2, DIM), np.nan, np.float32)
        server.lookup_fromdlpack(np.array([9, 7]), out, "m", "a", wait=False)
        np.testing.assert_array_equal(out, np.concatenate([vectors_of([9], 1), vectors_of([7])]))


@pytest.mark.parametrize(
    ("changes", "tiers", "reason"),
    [
        ({"miss_path": "copy"}, {}, None),
        (
            {},
            {"volatile_db": {"type": "disabled"}},
            "the first database is neither a hash map in this process nor of row files",
        ),
        ({}, {}, "the limit on locked memory"),
    ],
)
def test_the_host_answers_where_the_device_cannot(start, changes, tiers, reason, caplog, monkeypatch):
    if not changes and not tiers:
        monkeypatch.setattr(LinkedCache, "pinner", PopulatingPinner(refuse_at=1))
    with caplog.at_level("INFO", "hps.engine.miss_path"):
        server = start(persistent=True, tiers=tiers, **changes)
    check([1, 2, ROWS], lookup(server, [1, 2, ROWS]))
    assert count(server, "hps_linked_keys_total", "a") == 0
    assert path_of(server, "copy") == 1
    server.close()
    if reason:
        assert len([message for message in caplog.messages if reason in message]) == 1
        with pytest.raises(hps.DeviceError, match=f"miss_path is link, but table 'a' cannot be read in place.*{reason}"):
            start(persistent=True, tiers=tiers, miss_path="link")


@pytest.mark.parametrize(("link", "copy"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_quicker_path_is_chosen_by_width(start, monkeypatch, link, copy, caplog):
    timed = []

    def keys_per_s(cache, chain, index, keys):
        assert np.isin(keys, range(ROWS)).all()
        timed.append((index, index in cache.hosts))
        return 1e6 * (link if index in cache.hosts else copy)

    monkeypatch.setattr(miss_path, "_keys_per_s", keys_per_s)
    with caplog.at_level("INFO", "hps.engine.miss_path"):
        server = start()
    assert timed == [(0, True), (0, False)]  # both tables have the same width
    assert set(cache_of(server).hosts) == ({0, 1} if link > copy else set())
    assert f"a test answered {link} M keys/s in place and {copy} M/s through the host" in caplog.text
    timed.clear()
    start(miss_path="link")
    start(miss_path="copy")
    start(embedding_cache_type="uvm")
    assert not timed


def test_a_lookup_need_not_wait(start):
    server = start()
    keys, out = np.array([1, 2, ROWS, 1]), np.empty((8, DIM), np.float32)
    server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
    check(keys, out[:4])
    server.lookup_tables({"a": keys, "b": keys + 1}, "m", 0, out={"a": out[:4], "b": out[4:]}, wait=False)
    check(keys, out[:4])
    check(keys + 1, out[4:])
    server.lookup_concatenated(np.concatenate([keys, keys]), [4, 4], out, "m", 0, wait=False)
    check(np.concatenate([keys, keys]), out)
    assert [count(server, "hps_lookup_keys_total", table) for table in "ab"] == [12, 8]
    assert [count(server, "hps_misses_total", table, "embedding_cache") for table in "ab"] == [6, 7]
    assert [count(server, "hps_hits_total", table, "embedding_cache") for table in "ab"] == [6, 1]
    assert [count(server, "hps_linked_keys_total", table) for table in "ab"] == [3, 5]


@pytest.mark.parametrize(
    ("changes", "persistent", "reason"),
    [
        ({"miss_path": "copy"}, False, "without waiting.*miss_path is copy.*wait=True"),
        ({"gpucache": False}, False, "without waiting.*gpucache is false.*wait=True"),
        ({}, True, "without waiting.*may be in the rocks_db below.*wait=True"),
        ({"max_batch_size": 2}, False, "got 3 keys"),
    ],
)
def test_what_needs_the_host_or_is_too_much_is_not_looked_up_without_waiting(start, changes, persistent, reason):
    server, keys, out = start(persistent, **changes), np.arange(3), np.empty((3, DIM), np.float32)
    with pytest.raises(hps.InvalidInputError, match=f"table 'a' of model 'm'.*{reason}"):
        lookup(server, keys, wait=False)
    with pytest.raises(hps.InvalidInputError, match=reason.split(".*")[-2 if "wait" in reason else -1]):
        server.capture(keys, out, "m", "a")
    with pytest.raises(hps.InvalidInputError, match="return_found"):
        lookup(server, [1], wait=False, return_found=True)
    with pytest.raises(hps.InvalidInputError, match="got no table_id"):
        server.capture(keys, out, "m")


def test_keys_that_nobody_could_read_are_reported_by_the_next_call(start):
    server = start()
    cache_of(server).unreadable = {5}
    check([1, ROWS], lookup(server, [1, 5], wait=False)[:1].repeat(2, 0) * [[1], [0]] + [[0], [DEFAULT]])
    with pytest.raises(hps.DatabaseError, match="earlier lookups could not read 1 keys"):
        lookup(server, [1], wait=False)
    check([1], lookup(server, [1], wait=False))
    cache_of(server).unreadable = set()
    check([5], lookup(server, [5], wait=False))


def test_a_table_that_cannot_be_read_in_place_any_more_is_read_by_the_host(start):
    server = start()
    keys, out = np.array([1, 2, ROWS]), np.empty((3, DIM), np.float32)
    with server.capture(keys, out, "m", "a") as graph:
        deployment = server.model("m")
        deployment.chain.host_table(deployment.tables[0]).close()
        keys += 2
        check(keys, lookup(server, keys))
        with pytest.raises(hps.NotReadyError):
            lookup(server, keys + 10, wait=False)
        keys += 20
        graph.replay()
        np.testing.assert_array_equal(out, np.full_like(out, DEFAULT))
        with pytest.raises(hps.DatabaseError, match="could not read 3 keys"):
            graph.replay()


def test_a_captured_lookup_sees_what_was_written(start):
    server, keys, out = start(), np.array([1, 2]), np.empty((2, DIM), np.float32)
    with server.capture(keys, out, "m", "a") as graph:
        for version in range(1, 4):
            server.insert([1, 2, 3], vectors_of([1, 2, 3], version), "m", "a")
            graph.replay()
            np.testing.assert_array_equal(out, vectors_of(keys, version))
            keys[1] = 3
    assert count(server, "hps_lookup_keys_total", "a") == 8
    with pytest.raises(hps.NotReadyError, match="it is closed"):
        graph.replay()
    outputs = {"a": out, "b": np.empty_like(out)}
    with server.capture({"a": keys, "b": keys}, outputs, "m") as graph:
        graph.replay()
        np.testing.assert_array_equal(outputs["b"], vectors_of(keys))
        server.close()
        with pytest.raises(hps.NotReadyError):
            graph.replay()


def test_a_captured_lookup_follows_its_model(start, tmp_path):
    server, keys, out = start(keep_versions=0), np.array([1, 2]), np.empty((2, DIM), np.float32)
    graph, first = server.capture(keys, out, "m", "a"), server.model("m")
    hps.write_sparse_model(tmp_path / "a", (np.arange(ROWS), vectors_of(range(ROWS), 1)), overwrite=True)
    server.deploy("m")
    assert [state.state for state in server.versions("m")] == ["serving", "retiring"]  # the graph reads it
    graph.replay()
    np.testing.assert_array_equal(out, vectors_of(keys, 1))
    wait_until(lambda: len(server.versions("m")) == 1, "nothing reads the first version")
    assert first.caches
    server.undeploy("m")
    with pytest.raises(hps.UnknownModelError):
        graph.replay()
    graph.close()


def test_lookups_are_captured_by_others(start):
    server, keys, (out, other) = start(), np.array([1, 2]), np.empty((2, 2, DIM), np.float32)
    cache = cache_of(server)

    def run(keys):
        for table in "ab":
            lookup(server, keys, table, wait=False)

    def capture(keys):
        with cache.captured() as graph:
            server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
            server.lookup_fromdlpack(keys, other, "m", "b", wait=False)
        return graph

    def refused(message):
        with pytest.raises(hps.InvalidInputError, match=message):
            capture(keys)

    refused("run once, outside")
    run([1])
    refused("got 2 keys")
    graphs = []
    for _ in range(2):
        run(keys)
        graphs.append(capture(keys))
        out[:] = other[:] = np.nan
        graphs[-1].launch()
        check(keys, out)
        check(keys, other)
    refused("run once, outside")
    graphs[0].close()
    run(np.arange(3))  # takes the workspace back
    capture(np.arange(2)).close()
    keys[:] = [7, 8]
    graphs[1].launch()
    check([7, 8], out)
    graphs[1].close()


@pytest.mark.parametrize("persistent", [False, True])
def test_prefetched_keys_are_resident(start, persistent):
    server = start(persistent, deployed_device_list=[0, 1])
    keys = [3, 4, 4, ROWS]
    for device, resident in ((1, [[], [3, 4]]), (None, [[3, 4], [3, 4]])):
        assert server.prefetch(keys, "m", "a", *([device] if device else [])) == 2
        assert [sorted(cache_of(server, one).dump(0)) for one in (0, 1)] == resident
    assert server.prefetch([], "m", 0) == 0
    with pytest.raises(hps.UnknownDeviceError):
        server.prefetch(keys, "m", "a", 7)


def test_prefetch_into_no_cache_promotes(start):
    tiers = {"device": "cpu", "volatile_db": {"type": "hash_map", "initial_cache_rate": 0.0, "cache_missed_embeddings": True}}
    server = start(True, gpucache=False, tiers=tiers)
    assert server.prefetch(range(5), "m", "a") == 5
    assert server.drain()
    assert server.row(3, "m", "a").tier == "volatile_db"


def test_an_undeployment_frees_the_tables_when_the_device_is_lost(start, monkeypatch):
    def lost(*_):
        raise hps.DeviceError("reading counters: an illegal memory access was encountered")

    server = start()
    database, tag = server.model("m").chain.databases[0], server.model("m").tables[0].tag
    lookup(server, [1], wait=False)
    monkeypatch.setattr(LinkedCache, "stream_ordered_counts", lost)
    assert database.size(tag) == ROWS
    server.undeploy("m")
    with pytest.raises(hps.UnknownTableError):
        database.size(tag)


@pytest.mark.parametrize(
    ("kind", "persistent", "miss_path", "volatile"),
    [
        *[("static", False, "auto", "hash_map"), ("static", True, "copy", "disabled"), ("static", False, "auto", "disabled")],
        *[("uvm", False, "auto", "hash_map"), ("uvm", True, "auto", "disabled"), ("uvm", True, "copy", "hash_map")],
        ("uvm", False, "copy", "disabled"),
    ],
)
def test_static_and_uvm_answer_every_row_without_the_databases(start, kind, persistent, miss_path, volatile):
    server = start(persistent, embedding_cache_type=kind, miss_path=miss_path, tiers={"volatile_db": {"type": volatile}})
    keys = np.arange(ROWS + 1)
    check(keys, lookup(server, keys))
    check(keys, lookup(server, keys[::-1].copy())[::-1])
    below = sum(count(server, f"hps_{what}_total", "a", "persistent_db") for what in ("hits", "misses"))
    assert below == (2 if persistent and kind == "uvm" else 0)  # for the key that nobody has
    assert cache_of(server).complete == (kind == "static")
    if kind == "static":
        assert [count(server, f"hps_{what}_keys_total", "a") for what in ("linked", "default")] == [0, 2]
    if miss_path == "auto" and not persistent:
        check(keys, lookup(server, keys, wait=False))


def test_static_takes_online_writes_and_answers_alone_also_after_a_reconfiguration(start):
    server, written = start(True, embedding_cache_type="static"), [1, ROWS + 5]
    server.insert(written, vectors_of(written, 1), "m", "a")
    server.delete([2], "m", "a")
    server.model("m").chain.databases[-1].fetch = None  # no lookup asks it
    for threshold in (1.2, 1.3):
        np.testing.assert_array_equal(lookup(server, written), vectors_of(written, 1))
        check([-1, 3, -1], lookup(server, [2, 3, ROWS + 6]))
        cache = cache_of(server)
        assert cache.complete
        assert cache.stats(0).resident_rows == ROWS
        redeploy(server, hit_rate_threshold=threshold)
        assert cache_of(server) is not cache


def test_a_static_cache_that_is_full_leaves_new_rows_to_the_map(start):
    server = start(True, embedding_cache_type="static")
    cache = cache_of(server)
    new = np.arange(cache.stats(0).capacity_rows - ROWS + 1) + ROWS
    for some in (new[:-1], new[-1:]):
        assert cache.complete
        server.insert(some, vectors_of(some), "m", "a")
    assert not cache.complete
    every = np.append(np.arange(ROWS), new)
    np.testing.assert_array_equal(lookup(server, every), vectors_of(every))
    check([-1], lookup(server, [new[-1] + 1]))
    redeploy(server, hit_rate_threshold=1.2)
    assert not cache_of(server).complete  # as many rows as before: the new caches have no place for the last one, either
    np.testing.assert_array_equal(lookup(server, every), vectors_of(every))


def test_a_static_cache_that_is_not_complete_answers_without_a_wait(start):
    server, keys = start(embedding_cache_type="static", miss_path="link"), np.arange(ROWS + 1)
    for gone in (0, 7):
        cache_of(server).drop(0, keys[:gone])
        check(keys, lookup(server, keys, wait=False))
    assert [count(server, f"hps_{what}_keys_total", "a") for what in ("default", "linked")] == [2, 7]


def test_uvm_takes_online_writes(start):
    server, keys = start(embedding_cache_type="uvm"), [1, 499, ROWS + 5]
    lookup(server, keys)
    server.insert(keys, vectors_of(keys, 1), "m", "a")
    server.delete([2], "m", "a")
    np.testing.assert_array_equal(lookup(server, keys), vectors_of(keys, 1))
    check([-1], lookup(server, [2]))


@pytest.mark.parametrize("fails", ["the map", "the persistent database"])
def test_a_failed_write_leaves_no_row_of_a_static_table_to_its_default(start, fails, monkeypatch):
    server = start(True, embedding_cache_type="static")
    volatile, persistent = server.model("m").chain.databases
    if fails == "the map":
        volatile.fails = True
        server.insert([7, ROWS + 5], vectors_of([7, ROWS + 5], 1), "m", "a")
        volatile.fails = False
        np.testing.assert_array_equal(lookup(server, [7, ROWS + 5]), vectors_of([7, ROWS + 5], 1))
        every = np.append(np.arange(ROWS), ROWS + 5)
        for threshold in (1.2, 1.3):  # the map is emptied, then filled by the writes
            redeploy(server, hit_rate_threshold=threshold)
            assert not cache_of(server).complete  # the map no longer tells how many rows there are
            assert cache_of(server).stats(0).resident_rows == ROWS + 1
            server.insert(every, vectors_of(every, 1), "m", "a")
        np.testing.assert_array_equal(lookup(server, every), vectors_of(every, 1))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(persistent, "insert", lambda *_: (_ for _ in ()).throw(hps.DatabaseError("told to fail")))
            with pytest.raises(hps.DatabaseError):
                server.insert([7], vectors_of([7], 1), "m", "a")
        assert not cache_of(server).complete
        check([7, 8, ROWS], lookup(server, [7, 8, ROWS]))
