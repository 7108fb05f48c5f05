"""Kernels of the package have the one signature that they declare; `ring2/ground` compiles copies of the package."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from numba import int64, void

from hps.ground.kernels.compilations import COMPILATIONS, Compilations
from hps.ground.kernels.numba_kernels import _Kernel, compile_kernels, kernel, read_only


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


def test_progress_counts_compilations_that_overlap_and_ends_with_the_last():
    compilations = Compilations()
    for _ in range(2):
        assert compilations.progress == ""
        with compilations.running(30.0) as advance:
            assert compilations.progress == "compiling kernels, 0 %"
            advance(15.0)
            assert compilations.progress == "compiling kernels, 50 %"
            with suppress(ZeroDivisionError), compilations.running(20.0):
                assert compilations.progress == "compiling kernels, 30 %"
                raise ZeroDivisionError
            assert compilations.progress == "compiling kernels, 70 %"  # what failed is not waited for any more
            advance(15.0)
            assert compilations.progress == "compiling kernels, 100 %"


def test_compiling_says_how_far_it_is(monkeypatch):
    seen = []

    @kernel(int64, int64)
    def one(value):
        return value + 1

    @kernel(int64, int64)
    def two(value):
        return value + 2

    compile_one = _Kernel.compile
    monkeypatch.setattr(_Kernel, "compile", lambda self: (seen.append(COMPILATIONS.progress), compile_one(self))[1])
    compile_kernels(one, two)
    assert seen[:2] == ["compiling kernels, 0 %", "compiling kernels, 50 %"]
    assert COMPILATIONS.progress == ""


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
