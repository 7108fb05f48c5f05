from types import SimpleNamespace

import numpy as np

from hps.lookup.caller_tensors import cuda_segments

CUDA, CPU = SimpleNamespace(device="cuda"), SimpleNamespace(device="cpu")
INDICES = {"a": 0, "b": 1, 0: 0, 1: 1}


class DeviceTensor:
    """What the fast path asks of a torch tensor."""

    is_cuda = True

    def __init__(self, n):
        self.n = n

    def numel(self):
        return self.n


def test_named_device_tensors_become_segments_in_the_order_of_the_call():
    keys, out = {"b": DeviceTensor(3), "a": DeviceTensor(5)}, {"a": DeviceTensor(20), "b": DeviceTensor(12)}
    segments = cuda_segments(keys, out, INDICES, CUDA)
    assert [(s.table, s.n, s.found) for s in segments] == [(1, 3, None), (0, 5, None)]
    assert [s.keys for s in segments] == list(keys.values())
    assert [s.out for s in segments] == [out["b"], out["a"]]


def test_anything_else_among_them_is_left_to_the_general_way():
    keys, out = {"a": DeviceTensor(1)}, {"a": DeviceTensor(4)}
    assert cuda_segments(keys, out, INDICES, CPU) is None
    assert cuda_segments(keys, out, INDICES, None) is None
    assert cuda_segments({"a": np.zeros(1, np.int64)}, out, INDICES, CUDA) is None
    assert cuda_segments(keys, {"a": np.zeros((1, 4), np.float32)}, INDICES, CUDA) is None
    assert cuda_segments(keys, {}, INDICES, CUDA) is None
    assert cuda_segments({"unknown": DeviceTensor(1)}, {"unknown": DeviceTensor(4)}, INDICES, CUDA) is None
    assert cuda_segments({0: DeviceTensor(1)}, {0: DeviceTensor(4)}, INDICES, CUDA) is None
