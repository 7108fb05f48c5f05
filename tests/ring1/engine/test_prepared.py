"""Lookups that are prepared once and run many times answer as others do, whatever happens to the model between two runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.statistics.key_traces import read_traces
from hps.statistics.tracing import traced
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.running_service import document_of, model_of

ROWS, DIMS, DEFAULT = 3000, {"a": 4, "b": 5}, -2.0
KINDS = {
    "whole": {"gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0},
    "small": {"gpucacheper": 0.05, "cache_refresh_percentage_per_iteration": 0.5},
    "copied": {"gpucacheper": 0.05, "miss_path": "copy"},
    "static": {"embedding_cache_type": "static"},
    "direct": {"gpucache": False},
}
Start = Callable[..., hps.HPS]


def vectors_of(keys: Any, dim: int, version: int = 0) -> np.ndarray:
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(dim) + 100_000 * version).astype(np.float32)


def host(array: Any) -> np.ndarray:
    found: np.ndarray = array.get() if hasattr(array, "get") else np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    return found


def fill(buffer: Any, keys: np.ndarray) -> None:
    if hasattr(buffer, "copy_"):
        buffer.copy_(torch.from_numpy(keys))
    elif hasattr(buffer, "set"):
        buffer.set(keys)
    else:
        buffer[:] = keys


def check(keys: np.ndarray, vectors: Any, version: int = 0, found: Any = None) -> None:
    vectors, there = host(vectors), (keys >= 0) & (keys < ROWS)
    np.testing.assert_array_equal(vectors[there], vectors_of(keys[there], vectors.shape[1], version))
    np.testing.assert_array_equal(vectors[~there], np.float32(DEFAULT))
    if found is not None:
        np.testing.assert_array_equal(host(found), there)


def write(directory: Path, version: int = 0) -> list[Path]:
    for name, dim in DIMS.items():
        hps.write_sparse_model(directory / name, (np.arange(ROWS), vectors_of(range(ROWS), dim, version)), overwrite=True)
    return [directory / name for name in DIMS]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(device: str, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as opened:

        def start(kind: str = "small", **changes: Any) -> hps.HPS:
            settings: dict[str, Any] = {"hit_rate_threshold": 1.1, "max_batch_size": 10_000, "num_of_worker_buffer_in_pool": 2}
            settings |= {"default_value_for_each_table": [DEFAULT] * 2} | KINDS[kind] | changes
            model = model_of("m", write(tmp_path), DIMS, **{"checks": False, **settings})
            return opened.enter_context(hps.HPS(document_of(model, device=device)))

        yield start


def draw(rng: np.random.Generator, n: int) -> np.ndarray:
    """Resident, missing, absent and repeated keys."""
    keys = rng.integers(-5, ROWS + 5, n)
    keys[n // 2 :] = keys[: n - n // 2]
    return keys


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(kind, {"a": 300, "b": 7}) for kind in KINDS] + [("copied", {"b": 0, 0: 2000}), ("whole", {0: 0})],
)
def test_every_run_answers_as_a_lookup_does(start: Start, kind: str, sizes: dict[Any, int]) -> None:
    server, rng = start(kind), np.random.default_rng(1)
    with server.prepare(sizes, "m", return_found=True) as lookup:
        assert list(lookup.keys) == list(lookup.vectors) == list(lookup.found) == list(sizes)
        for _ in range(3):
            keys = {name: draw(rng, n) for name, n in sizes.items()}
            for name, asked in keys.items():
                fill(lookup.keys[name], asked)
            assert lookup.run() is lookup.vectors
            expected, mask = server.lookup_tables(keys, "m", return_found=True)
            for name, asked in keys.items():
                check(asked, lookup.vectors[name], found=lookup.found[name])
                np.testing.assert_array_equal(host(lookup.vectors[name]), expected[name])
                np.testing.assert_array_equal(host(lookup.found[name]), mask[name])


@pytest.mark.parametrize("framework", ["numpy", "torch", "torch on the host"])
def test_tensors_of_the_caller_are_bound(start: Start, device: str, framework: str) -> None:
    server, rng, n = start(), np.random.default_rng(1), 500
    keys: Any = {name: np.zeros(n, np.int64) for name in DIMS}
    out: Any = {name: np.zeros((n, dim), np.float32) for name, dim in DIMS.items()}
    if framework != "numpy":
        place = device if framework == "torch" else "cpu"
        keys, out = [{name: torch.from_numpy(one).to(place) for name, one in each.items()} for each in (keys, out)]
    with server.prepare(keys, "m", out=out) as lookup:
        assert lookup.all_keys is lookup.all_vectors is None
        assert lookup.keys == keys
        for _ in range(3):
            asked = {name: draw(rng, n) for name in DIMS}
            for name, one in asked.items():
                fill(keys[name], one)
            assert lookup.run() == out
            for name, one in asked.items():
                check(one, out[name])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_keys_that_are_widened_on_the_device_are_read_in_every_run(start: Start) -> None:
    keys, rng = torch.zeros(100, dtype=torch.int32, device="cuda"), np.random.default_rng(1)
    lookup = start("whole").prepare({"a": keys}, "m")
    for _ in range(3):
        asked = draw(rng, 100)
        keys.copy_(torch.from_numpy(asked))
        check(asked, lookup.run()["a"])


def test_buffers_of_all_tables_are_one_or_stand_beside_tensors(start: Start) -> None:
    server, keys, own = start(), np.array([1, 2, -1, 9, 9, 8, 7]), np.array([5, 6])
    with server.prepare({"b": 3, "a": 4}, "m") as lookup:
        fill(lookup.all_keys, keys)
        lookup.run()
        vectors = host(lookup.all_vectors)
        for part, found, row in ((keys[:3], "b", vectors[:15].reshape(3, 5)), (keys[3:], "a", vectors[15:].reshape(4, 4))):
            check(part, lookup.vectors[found])
            check(part, row)
    with server.prepare({"a": own, "b": np.int32(2)}, "m") as lookup:
        fill(lookup.keys["b"], np.array([7, 8]))
        assert lookup.all_keys is None
        for _ in range(2):
            lookup.run()
            check(own, lookup.vectors["a"])
            check(np.array([7, 8]), lookup.vectors["b"])
            own += 1


@pytest.mark.parametrize("kind", ["small", "copied", "whole", "direct"])
def test_writes_between_runs_are_seen(start: Start, kind: str) -> None:
    server, keys = start(kind), np.array([1, 2, 2, 3, ROWS])
    with server.prepare({"a": 5}, "m", return_found=True) as lookup:
        fill(lookup.keys["a"], keys)
        for version in range(1, 4):
            server.insert(keys[:4], vectors_of(keys[:4], 4, version), "m", "a")
            lookup.run()
            check(keys, lookup.vectors["a"], version, lookup.found["a"])
        server.delete([2], "m", "a")
        lookup.run()
        np.testing.assert_array_equal(host(lookup.vectors["a"])[1:3], np.float32(DEFAULT))
        assert host(lookup.found["a"]).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("kind", ["small", "static", "direct"])
def test_versions_and_settings_that_take_over_between_runs_answer(start: Start, kind: str, tmp_path: Path) -> None:
    server, keys = start(kind, keep_versions=0), draw(np.random.default_rng(1), 300)
    lookup = server.prepare({"a": 300, "b": 300}, "m")
    fill(lookup.all_keys, np.concatenate([keys, keys]))
    for version in range(3):
        if version:
            write(tmp_path, version)
            server.deploy("m")
        for _ in range(2):
            for vectors in lookup.run().values():
                check(keys, vectors, version)
        wait_until(lambda: len(server.versions("m")) == 1, "the prepared lookup lets go of the version")
    before = server.model("m")
    server.deploy(server.config.models[0].model_copy(update={"hit_rate_threshold": 2.0}))  # other caches of the same tables
    assert server.model("m") is not before
    lookup.run()
    check(keys, lookup.vectors["b"], version)
    server.undeploy("m")
    for _ in range(2):
        with pytest.raises(hps.UnknownModelError):
            lookup.run()


def test_a_version_that_retires_during_a_run_is_not_an_error(start: Start, tmp_path: Path) -> None:
    server, keys = start(keep_versions=0), np.arange(10)
    with server.prepare({"a": keys.copy()}, "m") as lookup:
        serving, deployed = lookup._serving, []

        def late() -> Any:
            found = serving()
            if not deployed:
                deployed.append(write(tmp_path, 1))
                server.deploy("m")
                assert found.lookups_ended.wait(PATIENCE_S)
            return found

        lookup._serving = late
        lookup.run()
        check(keys, lookup.vectors["a"], 1)


def test_a_table_of_another_width_is_refused(start: Start, tmp_path: Path) -> None:
    server = start(keep_versions=1)
    with server.prepare({"a": 2, "b": 2}, "m") as lookup:
        lookup.run()
        hps.write_sparse_model(tmp_path / "wide", (np.arange(ROWS), vectors_of(range(ROWS), 6)))
        sources = {"sparse_files": [str(tmp_path / "a"), str(tmp_path / "wide")], "embedding_vecsize_per_table": [4, 6]}
        server.deploy(server.config.models[0].model_copy(update={**sources, "version": "2"}))
        for _ in range(2):
            with pytest.raises(hps.InvalidInputError, match="table 'b' now has vectors of 6 elements, expected 5"):
                lookup.run()
        server.rollback("m")
        lookup.run()
        check(np.zeros(2, np.int64), lookup.vectors["b"])


def test_runs_are_counted_traced_and_recorded(start: Start, tmp_path: Path, device: str) -> None:
    server, keys, runs = start("copied"), np.array([1, 1, 2, ROWS]), 3
    counters = server.metrics.table("m", "a")
    with server.record_trace(tmp_path / "trace", rate=1.0), server.prepare({"a": 4}, "m") as lookup:
        fill(lookup.keys["a"], keys)
        for _ in range(runs):
            with traced() as trace:
                lookup.run()
            assert (trace.tables["a"].keys, trace.tables["a"].defaults) == (4, 1)
            assert {span.stage for span in trace.spans} >= {"adopt", "query", "finish"}
    if device == "cpu":  # keys in device memory are not recorded
        [recorded] = read_traces(tmp_path / "trace")
        np.testing.assert_array_equal(recorded.keys, np.tile(keys, runs))
    assert counters.keys == counters.hits[0] + counters.misses[0] == 4 * runs
    assert counters.defaults == runs
    assert server.metrics.lookup_times("m").latencies()[0].count == runs


@pytest.mark.parametrize(
    ("tables", "out", "message"),
    [
        *[({}, None, "got no tables"), ({"a": -1}, None, "a size of -1"), ({"a": 1, 0: 1}, None, "named twice")],
        *[({"a": True}, None, "adopting keys"), ({"a": [1, 2]}, None, "adopting keys")],
        ({"a": np.zeros(2, np.int32)}, None, "keys that are not int64"),
        ({"a": np.zeros(17, np.int8)[1:].view(np.int64)}, None, "not aligned"),
        ({"a": np.zeros((4, 2), np.int64)[:, 0]}, None, "contiguous"),
        ({"a": 2}, {}, "out has no entry for 'a'"),
        ({"a": 2}, {"a": np.zeros((2, 3), np.float32)}, "expected at least 8"),
        ({"a": 2}, {"a": np.zeros((2, 4), np.float64)}, "expected float32"),
        ({"a": 10_001}, None, "expected at most 10000"),
    ],
)
def test_what_cannot_be_prepared_is_refused(start: Start, tables: Any, out: Any, message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=message):
        start().prepare(tables, "m", out=out)


def test_what_does_not_exist_and_what_is_closed_is_refused(start: Start) -> None:
    server = start()
    for error, *arguments in [
        (hps.UnknownTableError, {"c": 1}, "m"),
        (hps.UnknownModelError, {"a": 1}, "n"),
        (hps.UnknownDeviceError, {"a": 1}, "m", 7),
    ]:
        with pytest.raises(error):
            server.prepare(*arguments)
    with server.prepare({"a": 2}, "m") as lookup:
        lookup.run()
    lookup.close()
    with pytest.raises(hps.NotReadyError, match="a prepared lookup: it is closed"):
        lookup.run()
    other = server.prepare({"a": 2}, "m")
    server.close()
    with pytest.raises(hps.NotReadyError):
        other.run()


def test_a_second_thread_is_refused_until_the_run_has_ended_or_failed(start: Start) -> None:
    lookup = start().prepare({"a": 2}, "m")
    answer, inside, goes_on = lookup._answer, threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> None:
        inside.set()
        assert goes_on.wait(PATIENCE_S)
        answer(*arguments, **named)

    def fail(*_: Any, **__: Any) -> None:
        raise hps.DatabaseError("told to fail")

    lookup._answer = slow
    thread = threading.Thread(target=lookup.run)
    thread.start()
    assert inside.wait(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(hps.ConflictError, match="another thread is running it"):
            lookup.run()
    goes_on.set()
    thread.join(PATIENCE_S)
    for _ in range(2):
        lookup._answer = answer
        check(np.zeros(2, np.int64), lookup.run()["a"])  # from another thread than before
        lookup._answer = fail
        with pytest.raises(hps.DatabaseError):
            lookup.run()


@pytest.mark.parametrize("count", [3, 70])  # fewer and more than a workspace keeps packed
def test_prepared_lookups_share_workspaces_that_grow(start: Start, count: int) -> None:
    """Larger lookups run between them, whose lists of misses move."""
    server, rng = start("copied", num_of_worker_buffer_in_pool=1, max_batch_size=40_000), np.random.default_rng(1)
    lookups = [server.prepare({"a": n, "b": 3}, "m") for n in range(70, 70 - count, -1)]
    for n in (10, 20_000, 10):  # lists have room for 16,384 keys at first
        for lookup in lookups:
            keys = {name: draw(rng, one.size) for name, one in lookup.keys.items()}
            for name, asked in keys.items():
                fill(lookup.keys[name], asked)
            lookup.run()
            for name, asked in keys.items():
                check(asked, lookup.vectors[name])
        many = draw(rng, n)
        check(many, server.lookup(many, "m", "a"))
