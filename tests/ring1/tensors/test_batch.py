"""Batches made from what callers pass."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hps.errors import InvalidInputError, UnknownTableError
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch, concatenated_batch, named_batch, table_batch
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


def named(tables: Any, out: Any = None, *, on_cuda: bool = True, with_found: bool = False) -> Batch:
    return named_batch(tables, out, table_index, INDICES, SPECS, on_cuda=on_cuda, with_found=with_found)


def test_device_tensors_become_a_batch_in_the_order_of_the_call_and_are_left_to_the_cache(on_device: Any):
    keys, outs = {"b": on_device(3), "a": on_device(5)}, {"a": on_device(20), "b": on_device(12)}
    made = named(keys, outs)
    assert (list(made.tables), made.sizes, made.founds) == ([1, 0], [3, 5], ())
    assert made.kind is (on_device if on_device is DeviceArray else None)  # the other one is not torch's
    assert (made.keys, made.outs) == ([keys["b"], keys["a"]], [outs["b"], outs["a"]])
    asked, out = on_device(3), on_device(12)
    one = table_batch(0, 4, asked, out, on_cuda=True, with_found=False)
    assert (one.keys, one.outs, one.sizes) == ((asked,), (out,), (3,))


def test_concatenated_tensors_on_the_device_are_one_for_all_tables_or_parts_of_it(on_device: Any):
    keys, out, dims = on_device(3), on_device(12), [spec.dim for spec in SPECS]
    whole, found = concatenated_batch(keys, [1, 2], out, dims, on_cuda=True, with_found=False)
    assert (whole.joined, whole.keys, whole.outs, whole.sizes, found) == (True, (keys,), (out,), [1, 2], None)
    parts, found = concatenated_batch(keys, [1, 2], out, dims, on_cuda=True, with_found=True)
    places = [(key.tensor, key.start, at.tensor, at.start) for key, at in zip(parts.keys, parts.outs, strict=True)]
    assert places == [(keys, 0, out, 0), (keys, 1, out, 4)]
    assert found is not None
    assert [mask.base is found for mask in parts.founds] == [True, True]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_tensors_of_every_place_and_sequences_stand_side_by_side(on_cuda: bool):
    keys, rows = torch.arange(3), torch.zeros(3, 4)
    made = named({0: keys, "b": [5, 6]}, {0: rows, "b": np.zeros(7, np.float32)}, on_cuda=on_cuda, with_found=True)
    assert (made.keys[0].ctypes.data, made.outs[0].ctypes.data) == (keys.data_ptr(), rows.data_ptr())
    assert (made.tables, made.keys[1].tolist(), made.outs[1].shape) == ([0, 1], [5, 6], (2, 2))
    assert [mask.shape for mask in made.founds] == [(3,), (2,)]
    if on_cuda:
        mixed = named({"a": DeviceTensor(1), "b": keys}, {"a": np.zeros(4, np.float32), "b": DeviceTensor(6)})
        assert [type(out) for out in mixed.outs] == [np.ndarray, DeviceTensor]


def test_new_outputs_are_made_where_none_are_given():
    assert [out.shape for out in named({"b": np.arange(3), "a": []}).outs] == [(3, 2), (0, 4)]


def test_batches_are_merged_if_all_have_bags_or_none():
    keys, out = np.arange(2), np.zeros((2, 4), np.float32)
    rows, masked = Batch.of(1, keys, out), Batch.of(0, keys, out, mask := np.zeros(2, np.bool_))
    merged = Batch.merged([rows, masked])
    assert (merged.tables, merged.sizes, merged.founds) == ([1, 0], [2, 2], [None, mask])
    pooling = Pooling(2, None, 1, None, Combiner.SUM, 0.0, None)
    with pytest.raises(InvalidInputError, match="expected bags of all"):
        Batch.merged([rows, Batch.of(0, keys, out, pooling=pooling)])


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
        named(tables, out)
