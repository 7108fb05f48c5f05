"""The benchmark of DLRMv3's sparse stage, small and on the CPU: what it asks, what it checks, what it counts."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import bench_dlrmv3 as bench
from benchmarks import figures
from benchmarks.harness import Report

CPU = torch.device("cpu")
SIZES = {"history": 24, "candidates": 8, "dim": 16, "most": 4, "rate": 200.0, "library": 32, "hidden": 8}
SHAPE = bench.Shape(2000, warm_s=0.05, sustained_s=0.02, **SIZES)


@pytest.fixture
def server():
    with bench.Server(SHAPE, [CPU], 1) as server:
        server.fill()
        server.deploy("")
        yield server


def words_of(keys, width):
    """The rule of the vectors, in plain NumPy."""
    x = keys[:, None].astype(np.uint32) * np.uint32(0x9E3779B1) + np.arange(width, dtype=np.uint32) * np.uint32(0x85EBCA77)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(13)
    return x & np.uint32(0xBFFFBFFF)


def test_every_key_has_its_vector_and_a_row_that_differs_ends_a_measurement(server):
    bench.check_itself(CPU, 512)
    keys, out = torch.arange(SHAPE.rows), torch.empty(SHAPE.rows, SHAPE.dim, dtype=torch.float16)
    for some in range(0, SHAPE.rows, SHAPE.most * SHAPE.keys):
        part = slice(some, some + SHAPE.most * SHAPE.keys)
        server.look_up(keys[part], out[part], 0)
    assert np.array_equal(out.numpy().view(np.uint32), words_of(keys.numpy(), SHAPE.dim // 2))
    server.hps.insert(np.arange(SHAPE.rows), np.ones((SHAPE.rows, SHAPE.dim), np.float32), "dlrm", 0)
    with pytest.raises(RuntimeError, match="are wrong"):
        bench.sustained(server, 1, 1, 0.01)


def loadgen_that_asks_once():
    """LoadGen's calls: issues each query of the library, waits for all answers, and writes a summary."""
    answered = threading.Semaphore(0)

    def start(issue, library, settings, log):
        issue([SimpleNamespace(id=nth, index=nth) for nth in range(library)])
        assert all(answered.acquire(timeout=60) for _ in range(library))
        summary = "Result is : VALID\nCompleted samples per second : 5\n99.00 percentile latency (ns) : 7000000\n"
        (Path(log.log_output.outdir) / "mlperf_log_summary.txt").write_text(summary)

    return SimpleNamespace(
        **dict.fromkeys(("TestSettings", "LogOutputSettings", "LogSettings"), SimpleNamespace),
        **dict.fromkeys(("DestroyQSL", "DestroySUT"), lambda _: None),
        TestScenario=SimpleNamespace(Server=0),
        TestMode=SimpleNamespace(PerformanceOnly=0),
        ConstructSUT=lambda issue, flush: issue,
        ConstructQSL=lambda library, *_: library,
        StartTestWithLogSettings=start,
        QuerySampleResponse=lambda *of: of,
        QuerySamplesComplete=lambda responses: answered.release(len(responses)),
    )


def test_all_of_it_runs_and_its_table_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "shape_of", lambda quick: SHAPE)
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", loadgen_that_asks_once())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = Report("dlrmv3")
    bench.run(report, True)
    assert not [row for row in report.rows if "error" in row["figures"]]
    assert {row["axes"]["work"] for row in report.rows} == {
        "index_select, on the device",
        "sustained",
        "loadgen, sparse stage",
        "dense stand-in alone",
        "loadgen, with the dense stand-in",
    }
    written = json.loads(report.write(tmp_path).read_text())
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "result_rows", lambda benchmark: written["rows"])
    table = figures.sparse_stage()
    assert len(table) == 2 + 2 + 1 + 3 + 2  # head, published, index_select, the most sustained, LoadGen
    assert any("uniform ids" in line and "hit rate" in line for line in table)
