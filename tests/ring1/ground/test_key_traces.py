"""Recordings of keys: what is sampled, what the file keeps, and what goes wrong without failing a lookup."""

import json
import math
import os
import struct
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import InvalidInputError, ModelFileError
from hps.statistics.key_traces import KeyRecorder, KeyTrace, distinct_share, keyed_hashes, read_traces, sample_hashes
from hps.statistics.metrics import Metrics
from hps.tensors.batch import Batch
from hps.types import TableSpec
from tests.fakes.clock import Clock

TABLES = (TableSpec("shop", "item", 4, 0.0, 1 << 20), TableSpec("shop", "user", 8, 0.0, 1 << 20))
RNG = np.random.default_rng(7)


def batch(table, keys):
    return Batch.of(table, keys, np.empty((keys.size, TABLES[table].dim), np.float32))


def recorded(path, lookups, **settings):
    with KeyRecorder(path, **settings) as recorder:
        for lookup in lookups:
            recorder.record(TABLES, Batch.merged([batch(table, keys) for table, keys in lookup.items()]))
    return {trace.table: trace for trace in read_traces(path)}


def test_a_whole_recording_is_what_was_asked(tmp_path):
    lookups = [{0: RNG.integers(-(1 << 63), 1 << 62, 100), 1: RNG.integers(0, 50, 7)}, {1: np.array([-1, 0, -1])}]
    traces = recorded(tmp_path / "keys", lookups, rate=1.0)
    np.testing.assert_array_equal(traces["item"].keys, lookups[0][0])
    np.testing.assert_array_equal(traces["user"].keys, np.concatenate([lookups[0][1], lookups[1][1]]))
    np.testing.assert_array_equal(traces["user"].lookups, [0] * 7 + [1] * 3)
    assert (traces["user"].asked, traces["item"].asked, traces["item"].model) == (10, 100, "shop")


@pytest.mark.parametrize("hash_keys", [False, True])
def test_a_key_is_recorded_always_or_never(tmp_path, hash_keys):
    keys = np.repeat(np.arange(20_000), 3)
    lookups = [{0: part} for part in np.split(RNG.permutation(keys), 60)]
    trace = recorded(tmp_path / "keys", lookups, rate=0.1, hash_keys=hash_keys)["item"]
    distinct, counts = np.unique(trace.keys, return_counts=True)
    assert set(counts) == {3}
    assert abs(distinct.size - 2000) < 5 * np.sqrt(1800)
    assert trace.asked == 60_000
    thin = trace.thinned(0.02)
    assert abs(np.unique(thin.keys).size - 400) < 5 * np.sqrt(400)
    assert set(np.unique(thin.keys)) <= set(distinct)
    assert np.isclose(trace.thinned(distinct_share(trace, 300)).keys.size, 900, atol=6)
    if hash_keys:
        assert not np.isin(distinct, keys).any()
    else:
        np.testing.assert_array_equal(distinct, np.flatnonzero(sample_hashes(np.arange(20_000)) < np.uint64(int(0.1 * 2**64))))


def test_secrets_differ_from_recording_to_recording(tmp_path):
    lookups = [{0: np.arange(100)}]
    first, second = (recorded(tmp_path / name, lookups, rate=1.0, hash_keys=True)["item"] for name in "ab")
    assert not np.isin(first.keys, second.keys).any()


def test_keyed_hashes_are_siphash():
    # Appendix A of the paper's reference code: key 00..0f, message 00..07.
    secret = bytes(range(16))
    message = np.frombuffer(bytes(range(8)), np.int64)
    assert keyed_hashes(message, secret).view(np.uint64)[0] == 0x93F5F5799A932462


def test_a_killed_recording_is_read_up_to_its_damage_and_continued(tmp_path):
    path = tmp_path / "keys"
    recorded(path, [{0: np.arange(1000)}], rate=1.0)
    whole = path.read_bytes()
    recorded(path, [{1: np.arange(5)}], rate=1.0)
    for cut in (len(whole) + 3, len(path.read_bytes()) - 1):
        damaged = tmp_path / f"cut{cut}"
        damaged.write_bytes(path.read_bytes()[:cut])
        assert [trace.keys.size for trace in read_traces(damaged)] == [1000]
        recorded(damaged, [{1: np.arange(7)}], rate=0.5, hash_keys=True)
        first, second = read_traces(damaged)
        assert (first.keys.size, first.rate, second.rate, second.asked, second.hashed) == (1000, 1.0, 0.5, 7, True)


def test_what_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "notes"
    path.write_text("something else")
    with pytest.raises(ModelFileError, match="damage at byte 0"):
        read_traces(path)
    with pytest.raises(ModelFileError, match="damage at byte 0"):
        KeyRecorder(path)
    assert path.read_text() == "something else"
    recorded(tmp_path / "keys", [{0: np.arange(1000)}], rate=1.0)
    content = bytearray((tmp_path / "keys").read_bytes())
    content[30] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="damage"):
        read_traces(path)
    with pytest.raises(ModelFileError, match="reading recorded keys from"):
        read_traces(tmp_path / "nothing")


def test_rates_out_of_range_and_places_that_cannot_be_written_are_refused(tmp_path):
    for rate in (0.0, -1.0, 1.5):
        with pytest.raises(InvalidInputError, match="rate"):
            KeyRecorder(tmp_path / "keys", rate=rate)
    with pytest.raises(ModelFileError, match="expected a writable file"):
        KeyRecorder(tmp_path / "no" / "keys")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ModelFileError, match="it is a pipe"):
            KeyRecorder(tmp_path / name)


@pytest.mark.parametrize("content", [b"PASSWORD=secret\n" * 9, b"\0" * 99], ids=["text", "zeros"])
def test_a_link_to_a_file_of_others_does_not_change_it(tmp_path, content):
    (tmp_path / "theirs").write_bytes(content)
    (tmp_path / "link").symlink_to("theirs")
    with pytest.raises(ModelFileError, match="expected a block of keys"):
        KeyRecorder(tmp_path / "link")
    assert (tmp_path / "theirs").read_bytes() == content


def test_a_full_disk_ends_the_recording_and_no_lookup(tmp_path, caplog):
    metrics = Metrics()
    recorder = KeyRecorder(tmp_path / "keys", rate=1.0, outcomes=metrics.trace_keys)
    with open("/dev/full", "ab") as full:
        os.dup2(full.fileno(), recorder._file.fileno())
    recorder.record(TABLES, Batch.merged([batch(0, np.arange(100))]))
    recorder._task.join(30)
    recorder.record(TABLES, Batch.merged([batch(0, np.arange(100))]))
    recorder.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert metrics.registry.get_sample_value("hps_trace_keys_total", {"outcome": "lost"}) == 100


def test_a_disk_that_does_not_answer_holds_no_close_up(tmp_path):
    recorder = KeyRecorder(tmp_path / "keys", rate=1.0)
    with recorder._writing:  # the writer is in a call that does not return
        closing = threading.Thread(target=recorder.close, args=(0.1,), daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    recorder.close()
    assert recorder._file.closed


def test_a_file_that_cannot_be_closed_fails_no_close(tmp_path, caplog):
    recorder = KeyRecorder(tmp_path / "keys", rate=1.0)
    os.close(recorder._file.fileno())
    recorder.close()
    assert "closing the recording" in caplog.text


def test_a_recording_ends_when_its_file_is_large_enough(tmp_path, caplog):
    recorder = KeyRecorder(tmp_path / "keys", rate=1.0, max_bytes=1000)
    recorder.record(TABLES, Batch.merged([batch(0, RNG.integers(0, 1 << 62, 10_000))]))
    recorder._task.join(30)
    recorder.close()
    assert "the file has reached" in caplog.text
    assert read_traces(tmp_path / "keys")[0].keys.size == 10_000


def test_keys_that_are_dropped_or_unread_count_once(tmp_path):
    metrics = Metrics()
    with KeyRecorder(tmp_path / "keys", rate=1.0, outcomes=metrics.trace_keys) as recorder:
        recorder._task.abandon(30)  # the rounds are ours
        for size in (1 << 20, 7, 5):  # as many as may wait, the last ones, and some too many
            recorder.record(TABLES, Batch.merged([batch(0, np.arange(size))]))
        beyond = Batch.of(1, "on a device", None, n=3)
        recorder.record(TABLES, beyond)
        for _ in range(3):
            recorder._write_waiting()
        recorder.record(TABLES, Batch.merged([beyond, batch(0, np.arange(5))]))  # room again
        recorder._write_waiting()
    counted = {"recorded": (1 << 20) + 5, "dropped": 7 + 5 + 3, "unread": 3}
    assert {one: metrics.registry.get_sample_value("hps_trace_keys_total", {"outcome": one}) for one in counted} == counted


def test_three_rounds_of_three_recordings_add_up(tmp_path, monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr("hps.statistics.key_traces.time", SimpleNamespace(monotonic=clock))
    for recording in (1, 2, 3):
        with KeyRecorder(tmp_path / "keys", rate=1.0) as recorder:
            recorder._task.abandon(30)  # the rounds are ours
            for number in (2, 0, 1):  # threads deliver their lookups in any order
                keys = np.arange(recording) + 10 * number
                recorder._waiting.append((number, TABLES[0], 100 * recording, keys))
                recorder._write_waiting()
                clock.now += 10
    traces = read_traces(tmp_path / "keys")
    assert [trace.keys.tolist() for trace in traces] == [[0, 10, 20], [0, 1, 10, 11, 20, 21], [0, 1, 2, 10, 11, 12, 20, 21, 22]]
    assert [trace.lookups.tolist() for trace in traces] == [sorted([0, 1, 2] * size) for size in (1, 2, 3)]
    assert [trace.asked for trace in traces] == [300, 600, 900]
    assert [trace.seconds for trace in traces] == [20.25] * 3  # the first keys came within a quarter of a second


def test_keys_that_are_not_aligned_are_recorded(tmp_path):
    keys = np.frombuffer(b"x" + np.arange(100).tobytes(), np.uint8)[1:].view(np.int64)
    assert not keys.flags.aligned
    np.testing.assert_array_equal(recorded(tmp_path / "keys", [{0: keys}], rate=1.0)["item"].keys, np.arange(100))


@pytest.mark.parametrize(
    "keys", [np.arange(1 << 20), np.arange(1 << 20) << 20, np.arange(1 << 20) * 1000, RNG.integers(0, 1 << 62, 1 << 20)]
)
def test_any_ids_are_sampled_evenly(keys):
    hashes = sample_hashes(keys)
    for part in np.split(hashes, 8):
        np.testing.assert_allclose(np.histogram(part / 2.0**64, 16, (0, 1))[0], part.size / 16, rtol=0.07)


def test_another_version_of_the_format_is_refused(tmp_path):
    (tmp_path / "keys").write_bytes(block({"version": 2}))
    with pytest.raises(ModelFileError, match="got version 2, expected 1"):
        read_traces(tmp_path / "keys")


def framed(body, size=None):
    return struct.pack("<4sII", b"HPSB", len(body) if size is None else size, zlib.crc32(body)) + body


def block(line, data=b""):
    return framed(zlib.compress((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" + data))


HEAD = {"version": 1, "rate": 1.0, "hashed": False}
KEYS = {"model": "shop", "table": "item", "n": 2, "asked": 5, "seconds": 0.5}
HOSTILE = {
    "not JSON": block(b"{"),
    "deep JSON": block(b"[" * 50_000),
    "a long line": block(b"9" * (1 << 17)),
    "no rate": block({"version": 1, "hashed": False}),
    "rate 0": block({**HEAD, "rate": 0}),
    "rate NaN": block({**HEAD, "rate": math.nan}),
    "hashed of text": block({**HEAD, "hashed": "no"}),
    "a head with keys": block(HEAD, bytes(32)),
    "keys without a head": block(KEYS, bytes(32)),
    "no line": block(HEAD) + framed(zlib.compress(bytes(100))),
    "no model": block(HEAD) + block({key: value for key, value in KEYS.items() if key != "model"}, bytes(32)),
    "a model of lists": block(HEAD) + block({**KEYS, "model": []}, bytes(32)),
    "fewer keys than said": block(HEAD) + block(KEYS, bytes(16)),
    "negative n": block(HEAD) + block({**KEYS, "n": -2}, bytes(32)),
    "huge n": block(HEAD) + block({**KEYS, "n": 1 << 62, "asked": 1 << 63}, bytes(32)),
    "n true": block(HEAD) + block({**KEYS, "n": True}, bytes(16)),
    "asked for less": block(HEAD) + block({**KEYS, "asked": 1}, bytes(32)),
    "asked for too much": block(HEAD) + block({**KEYS, "asked": 10**30}, bytes(32)),
    "negative time": block(HEAD) + block({**KEYS, "seconds": -1}, bytes(32)),
    "negative lookups": block(HEAD) + block(KEYS, np.array([1, 2, -3, 1], "<i8").tobytes()),
    "not compressed": block(HEAD) + framed(b"x" * 100),
    "cut short within": block(HEAD) + framed(zlib.compress(bytes(1000))[:-8]),
    "a block of gigabytes": block(HEAD) + framed(b"x", 0xFFFFFFFF) + block(KEYS, bytes(32)),
    "garbage": bytes(range(256)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_no_recorder_wrote_is_refused(tmp_path, what):
    (tmp_path / "keys").write_bytes(HOSTILE[what])
    with pytest.raises(ModelFileError, match="reading recorded keys from"):
        read_traces(tmp_path / "keys")


@pytest.mark.parametrize("what", ["directory", "fifo", "loop", "/dev/zero", "/dev/null"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, what):
    path = Path(what) if what.startswith("/") else tmp_path / what
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    with pytest.raises(ModelFileError):
        read_traces(path)


def test_traces_are_thinned_to_no_more_than_they_have():
    trace = KeyTrace("m", "t", np.arange(10), np.arange(10), 0.5, 1.0, False, 10)
    assert trace.thinned(0.7) is trace
    assert distinct_share(trace, 10) == 0.5
