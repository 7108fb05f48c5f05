"""The benchmark of DLRMv3's sparse stage, small and on the CPU: what it asks, what it checks, what it counts."""

import json
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import bench_dlrmv3 as bench
from benchmarks import figures
from benchmarks.harness import Report
from hps.testing.waiting import PATIENCE_S

CPU = torch.device("cpu")
SHAPE = bench.Shape(
    2000,
    history=24,
    candidates=8,
    dim=16,
    most=4,
    rate=200.0,
    library=32,
    warm_s=0.05,
    sustained_s=0.02,
    served_s=0.3,
    hidden=8,
)


@pytest.fixture
def server():
    with bench.Server(SHAPE, [CPU], 1) as one:
        one.fill()
        one.deploy("")
        yield one


def words_of(keys, width):
    """The rule of the vectors, in plain NumPy."""
    x = keys[:, None].astype(np.uint32) * np.uint32(0x9E3779B1) + np.arange(width, dtype=np.uint32) * np.uint32(0x85EBCA77)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(13)
    return x & np.uint32(0xBFFFBFFF)


def test_vectors_follow_from_their_keys_and_are_numbers():
    words = np.empty((3000, 256), np.uint32)
    bench.fill_words(7, words)
    assert np.array_equal(words, words_of(np.arange(7, 3007), 256))
    assert np.abs(words.view(np.float16)).max() < 2
    assert len(np.unique(words, axis=0)) == 3000


def test_a_wrong_bit_is_found():
    bench.check_itself(CPU, 512)


def test_every_key_has_its_vector(server):
    keys, out = torch.arange(SHAPE.rows), torch.empty(SHAPE.rows, SHAPE.dim, dtype=torch.float16)
    for some in range(0, SHAPE.rows, SHAPE.most * SHAPE.keys):
        part = slice(some, some + SHAPE.most * SHAPE.keys)
        server.look_up(keys[part], out[part], 0)
    assert np.array_equal(out.numpy().view(np.uint32), words_of(keys.numpy(), SHAPE.dim // 2))


def test_a_row_that_differs_ends_a_measurement(server):
    server.hps.insert(np.arange(SHAPE.rows), np.ones((SHAPE.rows, SHAPE.dim), np.float32), "dlrm", 0)
    with pytest.raises(RuntimeError, match="are wrong"):
        bench.sustained(server, 1, 1, 0.01)


def test_every_query_that_arrives_is_answered_once():
    arrivals = bench.Arrivals(np.sort(np.random.default_rng(1).random(400)) * 0.2)
    taken: list[range] = []

    def work(_worker):
        while some := arrivals.take(3):
            taken.append(some)
            arrivals.done(some)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sorted(one for some in taken for one in some) == list(range(400))
    assert max(map(len, taken)) <= 3
    assert (arrivals.latencies >= 0).all()


def test_what_arrived_meanwhile_is_answered_together():
    arrivals = bench.Arrivals(np.full(5, -1.0))
    assert [arrivals.take(4), arrivals.take(4), arrivals.take(4)] == [range(4), range(4, 5), range(0)]


def test_a_way_of_sharing_is_part_of_the_configuration_only_where_it_is_named(server):
    (entry,) = server._document({})["models"]
    assert "device_sharing" not in entry
    (entry,) = server._document({"device_sharing": "hot"})["models"]
    assert entry["device_sharing"] == "hot"


class Issuer:
    """Stands in for the module `mlperf_loadgen`: issues as many queries as it would, and waits until all are complete."""

    TestSettings = LogOutputSettings = LogSettings = SimpleNamespace
    TestScenario, TestMode = SimpleNamespace(Server="server"), SimpleNamespace(PerformanceOnly="performance")

    def __init__(self):
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ConstructSUT(self, issue, flush):
        return issue

    def ConstructQSL(self, count, in_memory, load, unload):
        return count

    def QuerySampleResponse(self, identity, data, size):
        return identity

    def QuerySamplesComplete(self, identities):
        for one in identities:
            self._complete.put(one)

    def DestroyQSL(self, count):
        pass

    DestroySUT = DestroyQSL

    def StartTestWithLogSettings(self, issue, count, settings, log):
        asked = range(int(settings.server_target_qps * settings.min_duration_ms / 1000))
        for identity in asked:
            issue([SimpleNamespace(id=identity, index=identity % count)])
        answered = sorted(self._complete.get(timeout=PATIENCE_S) for _ in asked)
        assert answered == list(asked)
        summary = "Result is : VALID\nCompleted samples per second : 200.0\n99.00 percentile latency (ns) : 1500000\n"
        (Path(log.log_output.outdir) / "mlperf_log_summary.txt").write_text(summary)


def test_every_query_that_loadgen_issues_is_completed_once(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", Issuer())
    found = bench.under_loadgen(server, bench.Library(server), 200.0, 0.3, 2, [bench.DenseStandIn(SHAPE, CPU)])
    assert found.pop("hit_rate") >= 0
    assert found == {"result": "VALID", "queries_per_s": 200.0, "p99_ms": 1.5}


def test_a_worker_that_fails_does_not_hold_loadgen_up(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", Issuer())
    calls = iter(range(100))

    def dense(_vectors):
        if next(calls) == 4:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        bench.under_loadgen(server, bench.Library(server), 200.0, 0.1, 2, [dense])


def test_all_of_it_runs_and_its_table_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "shape_of", lambda quick: SHAPE)
    monkeypatch.setattr(bench, "_loadgen_missing", lambda: "not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = Report("dlrmv3")
    bench.run(report, True)
    assert not [row for row in report.rows if "error" in row["figures"]]
    assert {row["axes"]["work"] for row in report.rows} == {"index_select, on the device", "sustained", "served"}
    written = json.loads(report.write(tmp_path).read_text())
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "result_rows", lambda benchmark: written["rows"])
    table = figures.sparse_stage()
    assert len(table) == 2 + 2 + len(report.rows)
    assert any("uniform ids" in line and "hit rate" in line for line in table)


def test_a_part_that_would_begin_too_late_is_left_out():
    report = Report("dlrmv3")
    assert bench._Parts(report, -1.0)({"work": "served"}, 5, dict) is None
    assert "left out" in report.rows[0]["figures"]["result"]
