"""Compiles CUDA kernels with NVRTC, for a device or ahead without one, and keeps the code for later processes.

CuPy's own cache of kernels needs a device for its keys. This one takes the architecture, so that an image can carry the code.
"""

import hashlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final, NamedTuple

import cupy
from cupy_backends.cuda.libs import nvrtc

from hps.cache.cuda.kernels import Kernel
from hps.errors import InvalidInputError
from hps.ground.kernels import machine_code
from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.threads.thread_pool import available_threads

_log = logging.getLogger(__name__)
_OPTIONS: Final = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")  # as CuPy's RawModule


class _KeptCode(NamedTuple):
    """Where the machine code of a kernel is kept, and how it is compiled."""

    file: str
    key: str
    options: tuple[str, ...]
    ptx: bool

    @classmethod
    def of(cls, code: str, name: str, architecture: str) -> "_KeptCode":
        known = [str(supported) for supported in nvrtc.getSupportedArchs()]
        target = f"sm_{architecture}" if architecture in known else f"compute_{known[-1]}"
        options = (*_OPTIONS, f"-arch={target}")
        digest = hashlib.sha256(code.encode()).hexdigest()
        key = f"NVRTC {nvrtc.getVersion()} {options} {digest}"
        file = f"cuda.{name}-{target}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.code"
        return cls(file, key, options, target.startswith("compute"))


def machine_code_of(code: str, name: str, architecture: str) -> tuple[bytes, bool]:
    """Return the machine code of CUDA C++ for an architecture, and True if it was compiled now.

    Args:
        name: of the kernel.
        architecture: compute capability without the dot, as `90`. For one that NVRTC does not know yet, the code is PTX, which
            the driver compiles.

    Raises:
        CompileException: NVRTC refused the code.
    """
    place = _KeptCode.of(code, name, architecture)
    if kept := machine_code.read(place.file, place.key):
        return kept, False
    began = time.monotonic()
    compiled = _compile(code, name, place.options, ptx=place.ptx)
    COMPILATIONS.add("cuda", 1, time.monotonic() - began)
    machine_code.write(place.file, place.key, compiled)
    return compiled, True


def count_kept(kernels: Iterable[Kernel], architecture: str) -> tuple[int, int]:
    """Return the number of kernels, and of those whose machine code for an architecture is kept."""
    places = [_KeptCode.of(kernel.code, kernel.name, architecture) for kernel in dict.fromkeys(kernels)]
    return len(places), sum(machine_code.read(place.file, place.key) is not None for place in places)


@cache
def report_compiling(architecture: str) -> None:
    """Log once that this process compiles kernels for an architecture."""
    _log.warning(
        "compiling CUDA kernels for sm_%s, which takes a minute or more: their machine code is not kept here. "
        "`hps compile ps.json --gpu sm_%s` compiles them ahead",
        architecture,
        architecture,
    )


def compile_ahead(kernels: Iterable[Kernel], architecture: str) -> tuple[int, int]:
    """Compile kernels for an architecture; return the numbers of newly and of previously compiled ones.

    Raises:
        InvalidInputError: NVRTC does not compile for this architecture.
    """
    known = nvrtc.getSupportedArchs()
    if architecture not in map(str, known):
        expected = ", ".join(f"sm_{supported}" for supported in known)
        raise InvalidInputError(f"compiling CUDA kernels: got architecture sm_{architecture}, expected one of {expected}")
    with ThreadPoolExecutor(available_threads()) as pool:
        made = list(pool.map(lambda kernel: machine_code_of(kernel.code, kernel.name, architecture)[1], dict.fromkeys(kernels)))
    return sum(made), len(made) - sum(made)


def _compile(code: str, name: str, options: tuple[str, ...], *, ptx: bool) -> bytes:
    program: Any = nvrtc.createProgram(code, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        compiled: bytes = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
        return compiled
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise cupy.cuda.compiler.CompileException(log, code, name, options) from error
    finally:
        nvrtc.destroyProgram(program)
