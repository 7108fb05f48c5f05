"""Segments made from what callers pass."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hps.errors import InvalidInputError, UnknownTableError
from hps.tensors.segments import Segment, concatenated_segments, named_segments, tensor_segment
from hps.types import TableSpec

SPECS = [TableSpec("m", "a", 4, 0.0, 100), TableSpec("m", "b", 2, 0.0, 100)]
INDICES = {"a": 0, "b": 1, 0: 0, 1: 1}


class DeviceTensor:
    """What is asked of a torch tensor in CUDA memory before a CUDA cache reads it."""

    is_cuda = True

    def __init__(self, n: int) -> None:
        self.n = n

    def numel(self) -> int:
        return self.n


class DeviceArray:
    """What is asked of a CuPy array before a CUDA cache reads it."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.fixture(params=[DeviceTensor, DeviceArray])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=DeviceArray))
    return request.param


def table_index(name: Any) -> int:
    if name not in INDICES:
        raise UnknownTableError(f"no table {name!r}")
    return INDICES[name]


def segments(tables: Any, out: Any = None, *, on_cuda: bool = True, with_found: bool = False) -> list[Segment]:
    return named_segments(tables, out, table_index, INDICES, SPECS, on_cuda=on_cuda, with_found=with_found)


def test_device_tensors_become_segments_in_the_order_of_the_call_and_are_left_to_the_cache(on_device: Any):
    named, outs = {"b": on_device(3), "a": on_device(5)}, {"a": on_device(20), "b": on_device(12)}
    made = segments(named, outs)
    assert [(s.table, s.n, s.found) for s in made] == [(1, 3, None), (0, 5, None)]
    assert [(s.keys, s.out) for s in made] == [(named[name], outs[name]) for name in "ba"]
    keys, out = on_device(3), on_device(12)
    one = tensor_segment(0, 4, keys, out, on_cuda=True, with_found=False)
    assert (one.keys, one.out, one.n) == (keys, out, 3)
    parts, _found = concatenated_segments(keys, [1, 2], out, [spec.dim for spec in SPECS], on_cuda=True, with_found=False)
    found = [(p.keys.tensor, p.keys.start, p.out.tensor, p.out.start, p.n) for p in parts]
    assert found == [(keys, 0, out, 0, 1), (keys, 1, out, 4, 2)]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_tensors_of_every_place_and_sequences_stand_side_by_side(on_cuda: bool):
    keys, rows = torch.arange(3), torch.zeros(3, 4)
    host, named = segments({0: keys, "b": [5, 6]}, {0: rows, "b": np.zeros(7, np.float32)}, on_cuda=on_cuda, with_found=True)
    assert (host.keys.ctypes.data, host.out.ctypes.data) == (keys.data_ptr(), rows.data_ptr())
    assert (named.table, named.keys.tolist(), named.out.shape) == (1, [5, 6], (2, 2))
    assert [s.found.shape for s in (host, named)] == [(3,), (2,)]
    if on_cuda:
        mixed = segments({"a": DeviceTensor(1), "b": keys}, {"a": np.zeros(4, np.float32), "b": DeviceTensor(6)})
        assert [type(s.out) for s in mixed] == [np.ndarray, DeviceTensor]


def test_new_outputs_are_made_where_none_are_given():
    assert [s.out.shape for s in segments({"b": np.arange(3), "a": []})] == [(3, 2), (0, 4)]


@pytest.mark.parametrize(
    ("tables", "out", "error", "match"),
    [
        ({"a": [1]}, {}, InvalidInputError, "out has no entry for 'a'"),
        ({"a": [1], 0: [2]}, None, InvalidInputError, "a table is named twice"),
        ({"a": [1], 0: [2]}, {"a": DeviceTensor(4), 0: DeviceTensor(4)}, InvalidInputError, "a table is named twice"),
        ({"unknown": DeviceTensor(1)}, {"unknown": DeviceTensor(4)}, UnknownTableError, "unknown"),
        ({2: [1]}, None, UnknownTableError, "no table 2"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tables: Any, out: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        segments(tables, out)
