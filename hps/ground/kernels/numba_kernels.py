"""Compiles numba kernels: only those that are used, on all processors, and once for all later processes.

numba checks the file that defines a kernel, but not what the kernel calls or inlines. `machine_code.py` therefore names the
directory of all machine code by a hash of *all* kernel sources. Two rules make that complete (`test_kernels.py` checks both): a
module that defines a kernel or a part of one decorates it with `@kernel`, `@njit` or `@intrinsic` by that name, and a kernel
uses functions and constants of such modules only.

    @njit(inline="always")                        # a part of kernels: plain numba, not cached by itself
    def _doubled(value): ...

    @kernel(void, read_only(int64[::1]), int64[::1])    # called by Python: one signature, nogil, cached
    def double(values, out): ...

    compile_kernels(double)                       # when a tier is constructed, before the first lookup

A tier names its kernels of loads, lookups and changes in `kernels()`, a cache those of its loop in `batch_kernels()`. Any other
kernel is compiled by its first call, so rare paths need no preparation. What numba does not check:

- A kernel takes no address of an array that it has made: numba frees the array after the last use of its name, which may be
  that one. Scratch memory that is used by address comes from the caller.
- It assigns slices of arrays element by element: for a slice numba also compiles the text of the error, which takes a second.
- It reads memory that other threads change through `numba_atomics.py`: to the compiler, a plain load of it gives any value.

Machine code is for the processor at hand, or else for `machine_code.BASELINE`, any recent processor: `hps compile --baseline`
compiles that ahead.
"""

import logging
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
import numba
from numba import njit
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from hps.ground.kernels import machine_code
from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.kernels.compiler_processes import CompilerProcesses
from hps.ground.memory.capacity import available_memory
from hps.ground.threads.thread_pool import available_threads

_log = logging.getLogger(__name__)

_MOST_PROCESSES: Final = 8
_PROCESS_WORTH_S: Final = 1.5
"""Work that outweighs the start of another process."""
_PROCESS_BYTES: Final = 400 << 20
_START_S: Final = 1.0
_LOG_S: Final = 5.0
_PARSINGS_A_BYTE: Final = 4500
"""Time to compile a kernel per byte of its bytecode, in the time that Python takes to compile a byte of source text."""
_PARSINGS: Final = 16

_config: Any = numba.config
_compiling = threading.Lock()
_declared: "dict[int, _Kernel]" = {}


def kernel(returns: Any, *arguments: Any, nogil: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a kernel of one signature of numba types, which runs without the GIL; `compile_kernels` compiles it.

    An argument of any other dtype or layout raises TypeError. Division by zero behaves as in C.

    Args:
        nogil: False for a kernel that calls functions of Python's C API, and for a few microseconds of work: another thread may
            take the GIL meanwhile, and keep it for longer.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Any = njit(nogil=nogil, error_model="numpy")(function)
        _declared[id(made)] = _Kernel(made, returns(*arguments))
        return made  # type: ignore[no-any-return]

    return decorate


def read_only(array: Any) -> Any:
    """Return the type of an array that a kernel only reads; it accepts read-only and writable arrays."""
    return array.copy(readonly=True)


def compile_kernels(*kernels: Callable[..., Any], processes: int | None = None) -> None:
    """Compile kernels, or load their machine code; by default those of all imported modules. *Thread-safe*.

    Called when a tier is constructed, so that no lookup waits for a compiler. Cheap if already done.

    Args:
        processes: maximum number of processes; by default as many as processors and memory suffice for. For reproducible
            files it is 1, since machine code has numbers that depend on what its process compiled before.
    """
    wanted = [_declared[id(made)] for made in kernels] if kernels else list(_declared.values())
    if all(kernel.ready for kernel in wanted):
        return
    with _compiling:
        missing = [kernel for kernel in wanted if not kernel.load()]
        if missing:
            _compile(missing, processes or _most_processes())


def declared_kernels() -> list[Callable[..., Any]]:
    """Import all modules of this package that define kernels; return their kernels."""
    for path in machine_code.kernel_sources():
        import_module(".".join(path.relative_to(Path(__file__).parents[3]).with_suffix("").parts))
    return [kernel.made for kernel in _declared.values() if kernel.is_ours]


def compile_named(name: str) -> None:
    """Compile one kernel of this package, `module:function`, unless its machine code for the chosen processor is there."""
    machine_code.refuse_baseline()
    module, _, function = name.partition(":")
    _declared[id(getattr(import_module(module), function))].compile()


_TYPES: Final = 6
"""Index of the text of inferred types in numba's parts of a compiled kernel. It has addresses, and nothing reads it."""


class _Kernel:
    """A kernel and its machine code, with the methods of numba's caches."""

    def __init__(self, made: Any, signature: Any) -> None:
        self.made = made
        self.ready = False
        function = made.py_func
        self.name = f"{function.__module__}:{function.__qualname__}"
        self.is_ours = self.name.startswith("hps.") and "<" not in self.name
        self.weight = len(function.__code__.co_code)
        self._signature = signature
        if self.is_ours:
            made._cache = self
        made._compile_for_args = self._compile_when_called

    def load(self) -> bool:
        """Load the machine code; return False if there is none."""
        if not self.ready and self.is_ours and self._read() is not None:
            self.compile()
        return self.ready

    def compile(self) -> None:
        """Load the machine code or, if there is none, compile it."""
        if not self.ready:
            self.made.compile(self._signature)
            self.made.disable_compile()
            self.ready = True

    def _compile_when_called(self, *_: Any, **__: Any) -> Any:
        compile_kernels(self.made)
        return self.made  # which numba calls next

    def _read(self) -> bytes | None:
        context = self.made.targetctx
        rtsys.initialize(context)  # all that machine code needs; the imports for compiling take a third of a second
        for processor in _processors(context.codegen()):
            if code := machine_code.read(*self._place(processor)):
                return code
        return None

    def _place(self, processor: tuple[str, ...]) -> tuple[str, str]:
        """Return the name of the file for a processor, and the key of its content."""
        python, place = sys.implementation.cache_tag, self.name.removeprefix("hps.").replace(":", ".")
        return f"{place}-{python}-{processor[1]}.code", f"{self.name} {self._signature} {python} {processor}"

    # Called by numba.

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        if signature != self._signature or (code := self._read()) is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(code))  # type: ignore[no-untyped-call]

    def save_overload(self, signature: Any, result: Any) -> None:
        if signature == self._signature:
            processor = result.target_context.codegen().magic_tuple()
            parts = list(result._reduce())
            parts[_TYPES] = ""
            machine_code.write(*self._place(processor), dumps(tuple(parts)))  # type: ignore[no-untyped-call]


def _processors(codegen: Any) -> list[tuple[str, ...]]:
    """List the processors whose machine code runs here, best first, by triple, name and features."""
    own: tuple[str, ...] = codegen.magic_tuple()
    if machine_code.BASELINE is None or not _has(machine_code.BASELINE[1]):
        return [own]
    return [own, (own[0], *machine_code.BASELINE)]


def _has(features: str) -> bool:
    host = llvm.get_host_cpu_features()
    always = ("+64bit", "+cx8", "+fxsr", "+mmx", "+sse", "+sse2")
    return all(host.get(feature[1:], feature in always) for feature in features.split(","))


def _compile(missing: "Sequence[_Kernel]", most_processes: int) -> None:
    """Compile kernels here and in other processes, the largest first."""
    began = time.monotonic()
    place = machine_code.directory()
    work = _Work(missing)
    seconds = work.weight * _PARSINGS_A_BYTE * _seconds_to_parse_a_byte()
    most = min(_MOST_PROCESSES, len(work.shared), 1 + int(seconds / _PROCESS_WORTH_S)) if place else 1
    processes = max(1, min(most, most_processes))
    _log.info(
        "compiling %d kernel%s for this machine in %d process%s, which takes about %d s; later starts load them from %s",
        len(missing),
        "s" if len(missing) > 1 else "",
        processes,
        "es" if processes > 1 else "",
        math.ceil(seconds / processes + (_START_S if processes > 1 else 0)),
        place or "nowhere: each start compiles",
    )
    with COMPILATIONS.running(work.weight) as work.advance, CompilerProcesses(processes - 1, _settings(place)) as others:
        others.start(work.take_shared, work.finish)
        while next_kernel := work.take():
            next_kernel.compile()
            work.finish(next_kernel.name)
        others.wait()
        for missing_kernel in missing:
            missing_kernel.compile()  # or load what others have compiled
    seconds = time.monotonic() - began
    COMPILATIONS.add("numba", len(missing), seconds)
    _log.info("compiled the kernels in %.1f s", seconds)


def _most_processes() -> int:
    """Return how many processes the processors and the memory suffice for."""
    return min(available_threads(), available_memory()[0] // _PROCESS_BYTES)


class _Work:
    """Kernels to compile, the largest first, and the progress. *Thread-safe.*"""

    def __init__(self, missing: "Sequence[_Kernel]") -> None:
        largest_last = sorted(missing, key=lambda kernel: kernel.weight)
        self.shared = [kernel for kernel in largest_last if kernel.is_ours]  # those that other processes can import
        self._unshared = [kernel for kernel in largest_last if not kernel.is_ours]
        self._weights = {kernel.name: kernel.weight for kernel in missing}
        self.weight = sum(kernel.weight for kernel in missing)
        self.advance: Callable[[float], None] = lambda weight: None  # receives the weight of each compiled kernel
        self._done = 0
        self._began = self._logged_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> "_Kernel | None":
        with self._lock:
            left = self.shared or self._unshared
            return left.pop() if left else None

    def take_shared(self) -> str | None:
        with self._lock:
            return self.shared.pop().name if self.shared else None

    def finish(self, name: str) -> None:
        """Count a compiled kernel, and log the progress every few seconds."""
        with self._lock:
            self._done += self._weights[name]
            self.advance(self._weights[name])
            now = time.monotonic()
            if now - self._logged_at < _LOG_S or self._done == self.weight:
                return
            self._logged_at = now
            rest_s = (now - self._began) * (self.weight - self._done) / self._done
        _log.info("compiled %.0f %% of the kernels, about %d s left", 100 * self._done / self.weight, math.ceil(rest_s))


def _settings(place: Path | None) -> dict[str, str | None]:
    """Return numba's settings by which another process compiles for the same processor into the same directory."""
    return {
        "CPU_NAME": _config.CPU_NAME,
        "CPU_FEATURES": _config.CPU_FEATURES,
        "CACHE_DIR": str(place.parent) if place else "",
    }


def _seconds_to_parse_a_byte() -> float:
    """Measure how fast this machine compiles Python now: it may be slow, or busy."""
    text = Path(__file__).read_bytes()
    began = time.perf_counter()
    for _ in range(_PARSINGS):
        compile(text, __file__, "exec")
    return (time.perf_counter() - began) / (_PARSINGS * len(text))
