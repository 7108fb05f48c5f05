"""What a trace says of a lookup, and the times of its stages that are always kept."""

import threading

import numpy as np
import pytest

import hps
from hps.statistics.metrics import LookupTimes
from hps.statistics.times import Times
from hps.statistics.tracing import STAGES, traced
from hps.testing.waiting import PATIENCE_S
from tests.servers.running_service import document_of, model_of

ROWS, DIM, ABSENT = 100, 4, -7
LOOKUPS = 600  # more than times that are kept as they came
KINDS = {
    "cached": {"gpucacheper": 1.0, "hit_rate_threshold": 1.1},
    "direct": {"gpucache": False},
    "deferred": {"gpucacheper": 1.0, "hit_rate_threshold": 0.0},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def server(kind, tmp_path):
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    model = model_of("m", [tmp_path / "t"] * 2, {"a": DIM, "b": DIM}, **KINDS[kind])
    with hps.HPS(document_of(model)) as server:
        yield server


def test_a_trace_names_the_stages_and_who_answered(server, kind):
    with traced() as trace:
        server.lookup_tables({"a": [1, 2, 2, ABSENT], "b": [3]}, "m")
    stages, ends = [span.stage for span in trace.spans], [span.ended_ns for span in trace.spans]
    assert {"adopt", "volatile_db" if kind != "deferred" else "scatter"} <= set(stages) <= set(STAGES)
    assert stages.count("unique") == (0 if kind == "direct" else 1)
    assert {span.table for span in trace.spans} == {"", "a", "b"}
    assert all(span.began_ns <= span.ended_ns for span in trace.spans)
    assert ends == sorted(ends)
    a = trace.tables["a"]
    assert (a.keys, a.embedding_cache, a.persistent_db) == (4, 0, 0)
    assert (a.deferred, a.volatile_db, a.defaults) == ((4, 0, 0) if kind == "deferred" else (0, 3, 1))
    assert trace.tables["b"].keys == 1
    if kind == "cached":
        with traced() as trace:
            server.lookup([1, 2, 1], "m", "a")
        assert [(span.stage, span.keys) for span in trace.spans] == [(one, 3) for one in ("adopt", "wait", "query", "finish")]
        assert trace.tables["a"].embedding_cache == 3


def test_a_trace_is_of_its_thread_and_its_block_and_a_lookup_that_fails_leaves_nothing_behind(server):
    with traced(), pytest.raises(hps.UnknownTableError):
        server.lookup([1], "m", "c")
    with traced() as trace:
        other = threading.Thread(target=server.lookup, args=([1, 2], "m", "a"))
        other.start()
        other.join()
        server.prefetch([5, 6], "m", "b")
    server.lookup([3], "m", "a")
    assert not trace.spans
    assert not trace.tables


def test_kept_times_are_counted_where_times_are_that_are_counted_at_once():
    one, kept = Times(), LookupTimes()
    for ns in (0, 1, 1000, 1001, 24_999, 25_000, 25_001, 5_000_000_000, 5_000_000_001, 2**40):
        one.add(ns)
        kept.recent.extend((0, 0, 0, 0, ns))
    kept.fold()
    kept.fold()  # of nothing
    assert kept.stages["finish"].latency() == one.latency()
    assert kept.total.buckets[0] == 10


def test_stages_are_timed_without_a_trace(server, kind):
    def value(name, **labels):
        return server.metrics.registry.get_sample_value(f"hps_lookup_{name}", {"model": "m", **labels})

    for _ in range(LOOKUPS):
        server.lookup([1, 2, ABSENT], "m", "a")
    assert server.drain(PATIENCE_S)
    assert value("seconds_count") == value("seconds_bucket", le="+Inf") == LOOKUPS
    for stage in ("adopt", "volatile_db")[: 1 + (kind != "deferred")]:
        assert value("stage_seconds_count", stage=stage) == LOOKUPS
    assert 0 < sum(value("stage_seconds_sum", stage=one) or 0 for one in STAGES) <= value("seconds_sum")
