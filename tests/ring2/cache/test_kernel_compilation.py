"""The kernels are accepted by the CUDA compiler, with nvcc, or with NVRTC where CuPy brings it. No GPU is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hps.cache.cuda import kernels
from hps.cache.cuda.kernels import Kernel
from hps.tensors.bags import Arithmetic
from hps.testing.waiting import PATIENCE_S
from tests.ring1.cache.test_kernels import BFLOAT16, FLOAT16, FLOAT32, INT8, shape

SHARED, SHARED_STATIC = kernels.Kind(shared=True), kernels.Kind(static=True, shared=True)
SPECIALISATIONS = [
    kernels.query_kernel(shape(32)),
    kernels.query_kernel(shape(128, 64)),
    kernels.query_kernel(shape(300, 6)),
    kernels.query_kernel(shape(7)),
    Kernel("query", "query", (("FORMAL_ORDER", 1),)),
    kernels.answer_kernel("answer", shape(32)),
    kernels.answer_kernel("admit_answers", shape(128, 64)),
    kernels.answer_kernel("answer", shape(300, 7)),
    kernels.answer_kernel("answer", shape(128)._replace(files=True)),
    kernels.answer_kernel("answer", shape(128, dtypes=(INT8,))._replace(files=True)),
    kernels.insert_kernel(4, 32),
    kernels.insert_kernel(1, 300),
    kernels.scatter_kernel(shape(32)),
    kernels.scatter_kernel(shape(7)),
    kernels.erase_kernel(),
    kernels.dump_kernel(),
    kernels.UNIQUE,
    kernels.query_kernel(shape(32), kind=kernels.STATIC),
    kernels.query_kernel(shape(128, 64), kind=kernels.STATIC, settles=True),
    kernels.query_kernel(shape(32), kind=kernels.STATIC, settles=True, few=True),
    kernels.query_kernel(shape(301), kind=kernels.STATIC, settles=True),
    kernels.pool_kernel("pool", shape(32), Arithmetic.SUMS, kernels.STATIC),
    kernels.insert_kernel(4, 32, kind=kernels.STATIC),
    kernels.insert_kernel(1, 300, kind=kernels.STATIC),
    kernels.erase_kernel(kernels.STATIC),
    kernels.dump_kernel(kernels.STATIC),
    kernels.query_kernel(shape(128, dtypes=(INT8,))),
    kernels.query_kernel(shape(7, dtypes=(FLOAT16,)), kind=kernels.STATIC, settles=True),
    kernels.query_kernel(shape(128, 6, 300, dtypes=(FLOAT32, BFLOAT16, INT8))),
    kernels.answer_kernel("answer", shape(128, dtypes=(INT8,))),
    kernels.answer_kernel("answer", shape(1001, 6, 5, dtypes=(FLOAT32, BFLOAT16, INT8))),
    kernels.answer_kernel("admit_answers", shape(64, dtypes=(FLOAT16,))),
    kernels.pool_kernel("pool", shape(128, dtypes=(INT8,)), Arithmetic.SUMS),
    kernels.pool_kernel("pool_rest", shape(300, 6, dtypes=(FLOAT16, FLOAT32)), Arithmetic.WEIGHTED_SUMS),
    *(kernels.query_kernel(shape(32, dtypes=(dtype,)), kind=SHARED) for dtype in (FLOAT32, INT8)),
    kernels.query_kernel(shape(128), few=True),
    kernels.query_kernel(shape(128, 64), kind=SHARED, few=True),
    kernels.query_kernel(shape(128, 6, 300, dtypes=(FLOAT32, BFLOAT16, INT8)), few=True),
    kernels.query_kernel(shape(128, 64), kind=SHARED_STATIC, settles=True),
    kernels.answer_kernel("answer", shape(128), kind=SHARED),
    kernels.pool_kernel("pool", shape(128, dtypes=(INT8,)), Arithmetic.SUMS, SHARED),
    kernels.pool_kernel("pool", shape(32), Arithmetic.MAXIMA, SHARED_STATIC),
    *(kernels.insert_kernel(4, 128, kind=kind) for kind in (SHARED, SHARED_STATIC)),
    *(kernels.erase_kernel(kind) for kind in (SHARED, SHARED_STATIC)),
    kernels.promote_kernel(1, 33),
    kernels.promote_kernel(4, 128),
    kernels.scatter_kernel(shape(6, dtypes=(BFLOAT16,))),
]


def named(kernel: Kernel) -> str:
    return f"{kernel.name}-{'-'.join(map(str, dict(kernel.constants).values()))}"


def compile_for(architecture: int, kernel: Kernel, directory: Path) -> None:
    if shutil.which("nvcc"):
        source = directory / "kernel.cu"
        source.write_text(kernel.code)
        # 177: constants of the header that a kernel has no use for
        options = ["-std=c++17", "-Werror", "all-warnings", "-diag-suppress=177", "-cubin", f"-arch=sm_{architecture}"]
        command = ["nvcc", *options, "-o", str(directory / "kernel"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        assert (directory / "kernel").stat().st_size > 0
        return
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="neither nvcc nor CuPy's NVRTC is here")
    program = nvrtc.createProgram(kernel.code, f"{kernel.name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"--gpu-architecture=sm_{architecture}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 0


@pytest.mark.parametrize("kernel", {kernel.name: kernel for kernel in SPECIALISATIONS}.values(), ids=named)
def test_each_kernel_compiles_for_the_latest_architecture(kernel: Kernel, tmp_path: Path) -> None:
    compile_for(100, kernel, tmp_path)
