"""Kernels of the package have the one signature that they declare; `ring2/ground` compiles copies of the package."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import int64, void

from hps.ground.numba_kernels import compile_kernels, kernel, read_only


def test_a_compiled_kernel_takes_one_signature_from_any_number_of_threads():
    @kernel(void, read_only(int64[::1]), int64[::1])
    def double(values, out):
        for i in range(values.size):
            out[i] = 2 * values[i]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(compile_kernels, double) for _ in range(8)]:
            done.result(timeout=60)
    assert len(double.signatures) == 1
    values, out = np.arange(3), np.zeros(3, np.int64)
    double(values, out)
    values.flags.writeable = False
    double(values, out)
    assert out.tolist() == [0, 2, 4]
    for wrong in (np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], np.zeros((3, 1), np.int64)):
        with pytest.raises(TypeError):
            double(values, wrong)


def test_the_first_call_compiles_the_declared_signature():
    @kernel(int64, read_only(int64[::1]))
    def total(values):
        found = 0
        for i in range(values.size):
            found += values[i]
        return found

    values = np.arange(4)  # writable: what numba would compile for by itself
    assert total(values) == 6
    values.flags.writeable = False
    assert total(values) == 6
    assert len(total.signatures) == 1
    with pytest.raises(TypeError):
        total(values.astype(np.float32))
