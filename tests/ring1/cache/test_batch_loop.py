"""How the loop of batches packs the arguments of its kernels: it changes what differs by batch, and nothing beside that.

Its functions run as Python does, with the memory of a lane on a stand-in for CUDA (`tests/fakes/host_cuda.py`).
"""

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from hps.cache.cuda import batch_loop, structs
from hps.cache.cuda.structs import KernelStruct
from hps.regions.exchange import DEPLOYMENT_COLUMNS, TABLE_COLUMNS
from tests.fakes import host_cuda


@pytest.fixture(scope="module")
def lane() -> Iterator[Any]:
    """Words of a lane, as the engine makes it."""
    with host_cuda.installed():
        from hps.cache.cuda.batches import _StreamLane

        lane = _StreamLane(0, 0)
        yield lane.words


def _store(kind: Any, at: int, value: int) -> None:
    kind.from_address(int(at)).value = int(value)


class Launched:
    """Arguments of the kernels that a function of the loop launches: 8 keys each of tables 1 and 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, at: int, size: int) -> None:
        self.arguments: list[bytes] = []
        for name, kind in (("store_relaxed", ctypes.c_uint64), ("store_relaxed_u32", ctypes.c_uint32)):
            monkeypatch.setattr(batch_loop, name, partial(_store, kind))
        monkeypatch.setattr(batch_loop, "call_launch", lambda *_: self.arguments.append(ctypes.string_at(at, size)) or 0)
        self.before = ctypes.string_at(at, size)
        self._run: Any = getattr(batch_loop, function).py_func

    def __call__(self, lane: np.ndarray) -> bytes:
        segments = np.zeros((2, batch_loop.SEGMENT_COLUMNS), np.int64)
        tables, deployments = np.zeros((2, TABLE_COLUMNS), np.int64), np.zeros((1, DEPLOYMENT_COLUMNS), np.int64)
        for nth in (0, 1):
            segments[nth, : batch_loop.S_MISSING + 1] = 1 - nth, 8, 100 + nth, 200 + nth, 300 + nth, 0, 8 * nth
            for column in range(batch_loop.T_BUCKETS, batch_loop.T_STAGED_WORDS + 1):
                tables[nth, column] = 1000 * (1 + nth) + column
        deployments[0, batch_loop.D_WARPS] = 5
        lane[batch_loop.L_SEGMENTS] = 2
        assert self._run(lane, segments, deployments, tables, np.zeros(8, np.int64)) == 0
        [arguments] = self.arguments
        return arguments


def fields(layout: KernelStruct, packed: bytes, at: int) -> dict[str, Any]:
    return dict(zip(layout.names, layout.unpack_from(packed, at), strict=True))


def test_of_the_tail_of_a_query_only_the_number_of_segments_changes(lane: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    at, tail = batch_loop.QUERY_TAIL_AT, structs.QUERY_TAIL
    launched = Launched(monkeypatch, "_launch_queries", int(lane[batch_loop.L_QUERY]), at + tail.size)
    packed = launched(lane)
    assert fields(tail, packed, at) == fields(tail, launched.before, at) | {"segment_count": 2}
    first, second = (fields(structs.SEGMENT, packed, nth * structs.SEGMENT.size) for nth in (0, 1))
    expected = {"keys": 100, "out": 200, "found": 300, "n": 8, "first_block": 0, "missing": 0, "index": 0}
    table = {name: 2000 + getattr(batch_loop, f"T_{name.upper()}") for name in ("buckets", "rows", "pairs", "units")}
    assert first == expected | table
    assert (second["keys"], second["pairs"], second["first_block"]) == (101, 1000 + batch_loop.T_PAIRS, 1)
    assert (second["missing"], second["index"]) == (8, 1)


def test_of_the_tail_of_an_answer_only_what_differs_by_batch_changes(lane: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    at, tail = batch_loop.ANSWER_TAIL_AT, structs.ANSWER_TAIL
    launched = Launched(monkeypatch, "_launch_answers", int(lane[batch_loop.L_ANSWER]), at + tail.size)
    packed, before = launched(lane), fields(tail, launched.before, at)
    assert fields(tail, packed, at) == before | {"segment_count": 2, "bin_bits": 9, "fetch_warps": 5}
    first = fields(structs.ANSWER_SEGMENT, packed, 0)
    assert (first["out"], first["found"], first["missing"], first["index"]) == (200, 300, 0, 0)
    assert (first["units"], first["staged_rows"]) == (2000 + batch_loop.T_UNITS, 8)
    assert first["authoritative"] == 2000 + batch_loop.T_AUTHORITATIVE
    assert first["buckets"] == 2000 + batch_loop.T_STRUCT


def test_a_store_fills_whole_fields_and_no_other() -> None:
    packed = KernelStruct("a:Q b:I c:H d:B _:x e:f _:4x f:I")
    assert [packed.at("a"), packed.at("b", "c", "d"), packed.at("e")] == [0, 8, 16]
    assert [packed.at("b", size_bytes=4), packed.at("c", "d", size_bytes=4), packed.at("f", size_bytes=4)] == [8, 12, 24]
    for names, size_bytes in ((("b",), 8), (("b", "c"), 8), (("c", "d"), 8), (("f",), 8), (("e", "f"), 8)):
        with pytest.raises(ValueError, match="a store of"):
            packed.at(*names, size_bytes=size_bytes)
