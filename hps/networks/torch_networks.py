"""Networks of PyTorch: programs of `torch.export`, packages of AOTInductor, and TorchScript."""

import ctypes
import importlib
import inspect
import logging
import re
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from torch.export.passes import move_to_device_pass

from hps.errors import DeviceError, DeviceMemoryError, ModelFileError
from hps.networks.base import Network, NetworkTensor, Tensor, refuse_inputs
from hps.networks.torch_archives import archive_of, member_names, members, refuse_member
from hps.networks.torch_expressions import Path as InputPath
from hps.networks.torch_expressions import compiled_guards
from hps.networks.torch_programs import NATIVE, REFUSED_OPERATORS, REFUSED_SPACES, CheckedProgram, checked_program

_log = logging.getLogger(__name__)
_WARM_UPS = 3
_MOST_SIZES = 10_000
_DOT = r"[\s\\]*\.[\s\\]*"
_FORBIDDEN: Final = re.compile(
    rf"\b({'|'.join(sorted(REFUSED_OPERATORS))}|rpc_\w+|ops{_DOT}({REFUSED_SPACES.pattern})\b)".encode()
)
_FORBIDDEN_CLASSES: Final = re.compile(rf"\bclasses{_DOT}(dist\w*|c10d|profiler)\b".encode())
"""What TorchScript can do besides arithmetic. Methods may run while they are loaded, so their text is searched before."""

_GETATTR: Final = re.compile(rb'\bgetattr\([\w.]+, "(?![A-Za-z_]\w*")[^"\\\n]*"\)')
"""How torch.jit.save writes an attribute whose name is no identifier: `getattr(self.layers, "0")`."""
_INDIRECT: Final = re.compile(
    rb"\bgetattr\b|(?<![\w.\"'])(ops|__torch__|__torch__\.torch|__torch__\.torch\.classes)\b(?!\.\w| : )"
)
"""Indirect names of forbidden operators: strings with escapes or in parts, or aliases of a namespace."""

_SCRIPT: Final = re.compile(
    r"(data|constants|attributes)\.pkl|(data|constants)/[0-9]+|code/.+\.(py|debug_pkl)|version|byteorder|\.data/(version|serialization_id)|"
    r"extra/.+"
)
_EXAMPLES: Final = re.compile(r"traced_inputs(\.pkl|/[0-9]+)")  # of torch.jit.trace; nothing needs them
_LIBRARIES: Final = {"fbgemm": "fbgemm_gpu"}
"""Packages that register operators when they are imported, by the operators' namespace."""


_capturing: Final = threading.Lock()
_MOST_WAIT_S: Final = 10.0  # for another capture: one that never ends is abandoned with its thread
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


@contextmanager
def _sole_capture() -> Iterator[None]:
    if not _capturing.acquire(timeout=_MOST_WAIT_S):
        raise RuntimeError(f"another network has been captured for {_MOST_WAIT_S:g} s")
    try:
        yield
    finally:
        _capturing.release()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device that graphs are captured on, within `_sole_capture`.

    `torch.cuda.Stream` hands out 32 streams in turn: what another thread launches on the same one would be captured, too. And
    cuBLAS keeps a workspace for each stream.
    """
    pointer = ctypes.c_void_p()
    code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(pointer), _NON_BLOCKING)
    if code != 0:
        raise RuntimeError(f"making a CUDA stream: error {code}")
    return torch.cuda.ExternalStream(pointer.value, device)


class _TorchNetwork(Network):
    """Runs a network of PyTorch.

    Args:
        call: takes the inputs by name, and returns the outputs as the network does.
        outputs: names of the outputs.
    """

    on_cuda: ClassVar[bool] = True

    def __init__(
        self, name: str, call: Callable[[Mapping[str, Tensor]], Any], outputs: Sequence[str], device: torch.device
    ) -> None:
        self._name = name
        self._call: Callable[[Mapping[str, Tensor]], Any] | None = call
        self._outputs = tuple(outputs)
        self._device = device
        self._last: weakref.WeakKeyDictionary[object, weakref.ref[Any]] = weakref.WeakKeyDictionary()  # graph of each owner

    def scope(self) -> AbstractContextManager[object]:
        if self._device.type == "cpu":
            return nullcontext()
        default = torch.cuda.default_stream(self._device)
        return nullcontext() if torch.cuda.current_stream(self._device) == default else torch.cuda.stream(default)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        if not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def staging(self, size: int) -> tuple[np.ndarray, Tensor]:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        return memory.numpy(), memory

    def part(self, memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        kind = getattr(torch, dtype)
        return memory[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)

    def write(self, tensor: Tensor, source: Tensor) -> None:
        with torch.inference_mode():
            tensor.copy_(source, non_blocking=True)

    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        with torch.inference_mode():
            return tensor.index_select(0, index)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._call is None:
            raise DeviceError(f"running the network {self._name}: it is closed")
        with torch.inference_mode():
            found = self._call(inputs)
        return _named(self._name, found, self._outputs)

    def fixed(self, run: Callable[[], Mapping[str, Tensor]], *, owner: object = None) -> Callable[[], Mapping[str, Tensor]]:
        """Capture a run in a CUDA graph; where it cannot be captured, repeat it as it is."""
        with torch.cuda.device(self._device):
            try:
                # Of an owner, one runs after the other. A pool lives as long as one of its graphs.
                last = None if owner is None else self._last.get(owner)
                earlier = None if last is None else last()
                pool = None if earlier is None else earlier.pool()
                # Libraries choose kernels and take memory, on the stream of all other calls: what is left of a run that fails
                # precedes them, and what it runs on, such as a workspace of cuBLAS, no graph uses at the same time.
                for _ in range(_WARM_UPS if earlier is None else 1):
                    run()
                torch.cuda.current_stream(self._device).synchronize()
                # Only calls of this thread may break the capture: lookups on other threads synchronise and allocate meanwhile.
                graph = torch.cuda.CUDAGraph()
                with _sole_capture(), torch.cuda.stream(_capture_stream(self._device)):
                    # `torch.cuda.graph` also empties torch's cache, which takes ten times as long
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        outputs = run()
                    finally:
                        graph.capture_end()
                if owner is not None:
                    self._last[owner] = weakref.ref(graph)
            except RuntimeError as error:
                _log.info("network %s: it runs without a CUDA graph: %s", self._name, str(error).strip().splitlines()[0])
                return run

        def replay() -> Mapping[str, Tensor]:
            graph.replay()
            return outputs

        return replay

    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        if self._device.type == "cpu":
            return {name: tensor.numpy() for name, tensor in outputs.items()}
        with torch.inference_mode():
            copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in outputs.items()}
        torch.cuda.current_stream(self._device).synchronize()
        return {name: tensor.numpy() for name, tensor in copies.items()}

    def close(self) -> None:
        self._call = None


class ExportedProgram(_TorchNetwork):
    """A `.pt2` file: what `torch.export.save` writes, or a package of AOTInductor.

    An input is called as the parameter that takes it or, in a dict, by its key. A package has no names of inputs: they are in
    the order of `dense.inputs`.
    """

    @classmethod
    def runs_code(cls, name: str, content: bytes) -> bool:
        return any(map(NATIVE.fullmatch, member_names(name, content)))

    @classmethod
    def open(
        cls, name: str, content: bytes, inputs: Sequence[NetworkTensor], outputs: Sequence[str], device: int | None
    ) -> Self:
        place = _device(device)
        try:
            if cls.runs_code(name, content):
                return cls(name, _package(content, inputs, place), outputs, place)
            checked = checked_program(name, content)
            _register_operators(name, checked.operators)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")  # of PyTorch's own reader
                program = torch.export.load(checked.archive)
            names = [str(input_) for input_ in program.graph_signature.user_inputs]
            spec = program.call_spec.in_spec
            structure = spec.unflatten(range(spec.num_leaves))
            moved = program if device is None else move_to_device_pass(program, str(place))
            run = _run_of(moved, checked)
        except ModelFileError:
            raise
        except Exception as error:
            raise _failure(name, "a program of torch.export", error) from error
        if checked.has_examples:
            names = _names(structure, iter(names))
        refuse_inputs(name, names, inputs)
        return cls(name, lambda given: run([given[name] for name in names]), outputs, place)


class TorchScript(_TorchNetwork):
    """A TorchScript archive. Pickles of modules, which `torch.save` writes, are refused: loading them runs any code."""

    @classmethod
    def open(
        cls, name: str, content: bytes, inputs: Sequence[NetworkTensor], outputs: Sequence[str], device: int | None
    ) -> Self:
        place = _device(device)
        found = members(name, content)
        codes = [member for member in found if member.startswith("code/")]
        if not codes:
            raise ModelFileError(
                f"opening the network {name}: it is a pickle of torch.save, which may run any code when it is read; expected "
                "TorchScript (torch.jit.save), or better a program (torch.export.save) with format pt2"
            )
        for member in list(found):
            if _EXAMPLES.fullmatch(member):
                del found[member]
            elif not _SCRIPT.fullmatch(member):
                refuse_member(name, member)
        searched = [(code, _FORBIDDEN) for code in codes] + [(member, _FORBIDDEN_CLASSES) for member in found if "." in member]
        forbidden = next(filter(None, (pattern.search(found[member]) for member, pattern in searched)), None)
        forbidden = forbidden or next(filter(None, (_INDIRECT.search(_direct(found[code])) for code in codes)), None)
        if forbidden is not None:
            raise ModelFileError(
                f"opening the network {name}: its code has {forbidden[0].decode()!r}, expected arithmetic alone"
            )
        try:
            module = torch.jit.load(archive_of(found), map_location=place).eval()
            names = [argument.name for argument in module.forward.schema.arguments[1:]]
        except Exception as error:
            raise _failure(name, "TorchScript", error) from error
        refuse_inputs(name, names, inputs)
        return cls(name, lambda given: module(*[given[name] for name in names]), outputs, place)


def _direct(code: bytes) -> bytes:
    """Return code without the calls of `getattr` that torch.jit.save writes, also of one another."""
    count = 1
    while count:
        code, count = _GETATTR.subn(b"_", code)
    return code


def _register_operators(name: str, called: Iterable[tuple[str, str]]) -> None:
    """Import the library of the operators that a program calls, if it is known; refuse those that nothing registers."""
    operators = sorted(called)
    for space in {space for space, operator in operators if not hasattr(getattr(torch.ops, space), operator)} & {*_LIBRARIES}:
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own
            importlib.import_module(_LIBRARIES[space])
    if missing := [(space, operator) for space, operator in operators if not hasattr(getattr(torch.ops, space), operator)]:
        space, operator = missing[0]
        wanted = f"expected the package {_LIBRARIES[space]}" if space in _LIBRARIES else "expected operators of torch"
        raise ModelFileError(
            f"opening the network {name}: got operator {space}.{operator}, which nothing here registers; {wanted}"
        )


def _package(content: bytes, inputs: Sequence[NetworkTensor], device: torch.device) -> Callable[[Mapping[str, Tensor]], Any]:
    import torch._inductor  # the documented home of packages

    with tempfile.TemporaryDirectory(prefix="hps-network-") as directory:
        file = Path(directory, "network.pt2")
        file.write_bytes(content)
        package = torch._inductor.aoti_load_package(str(file), device_index=device.index if device.type == "cuda" else -1)
    names = [input_.name for input_ in inputs]
    return lambda given: package(*[given[name].contiguous() for name in names])


def _run_of(program: Any, checked: CheckedProgram) -> Callable[[list[Tensor]], Any]:
    """Return a function that runs a program on its inputs in their order."""
    # A module of `torch.export` checks the structure and sizes of its arguments for 40 us a call. That is done once for each
    # combination of sizes; later calls run the same graph without these checks. Guards are checked here: PyTorch's own function
    # for them takes minutes to compile for thousands of inputs.
    inputs, outputs = program.call_spec.in_spec, program.call_spec.out_spec
    module, bare = _module(program), _module(program)
    positional, keywords = inputs.unflatten(range(inputs.num_leaves))
    bound = inspect.signature(module.forward).bind(*positional, **keywords)
    first_failed = compiled_guards(checked.guards, _places(bound.arguments))
    order = outputs.unflatten(range(outputs.num_leaves))
    named = isinstance(order, Mapping) and all(type(place) is int for place in order.values())
    bare.graph.set_codegen(torch.fx.graph.CodeGen())
    bare.recompile()
    run, seen = bare.forward, set[tuple[torch.Size, ...]]()

    def call(given: list[Tensor]) -> Any:
        sizes = tuple([tensor.shape for tensor in given])
        if sizes not in seen:
            if guard := first_failed(given):
                raise ValueError(f"Guard failed: {guard}")
            positional, keywords = inputs.unflatten(given)
            found = module(*positional, **keywords)
            if len(seen) < _MOST_SIZES:
                seen.add(sizes)
            return found
        found = run(*given)
        return {name: found[place] for name, place in order.items()} if named else found

    return call


def _module(program: Any) -> Any:
    if "check_guards" in inspect.signature(program.module).parameters:
        return program.module(check_guards=False)
    return program.module()  # of a PyTorch that saves no guards


def _places(arguments: Mapping[str, Any]) -> dict[InputPath, int]:
    """Return the place of each input by its path in guards: by structure, or by place after a strict export."""
    found: dict[InputPath, int] = {}

    def add(structure: Any, path: InputPath) -> None:
        if isinstance(structure, int):
            found[path] = found["flat_args", structure] = structure
            return
        for key, argument in structure.items() if isinstance(structure, Mapping) else enumerate(structure):
            add(argument, (*path, key))

    for name, argument in arguments.items():
        add(argument, (name,))
        base, _, number = name.rpartition("_")
        if base and number.isdecimal():  # of *args
            add(argument, (base, int(number)))
    return found


def _names(structure: Any, placeholders: Iterator[str], key: str = "") -> list[str]:
    """Name the tensors of nested tuples, lists and dicts."""
    if isinstance(structure, Mapping):
        return [name for key, part in structure.items() for name in _names(part, placeholders, str(key))]
    if isinstance(structure, tuple | list):
        return [name for part in structure for name in _names(part, placeholders)]
    placeholder = next(placeholders)
    return [key or placeholder]


def _named(name: str, found: Any, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    if isinstance(found, torch.Tensor):
        found = (found,)
    if isinstance(found, Mapping):
        if missing := [output for output in outputs if output not in found]:
            raise ModelFileError(
                f"running the network {name}: it returned {', '.join(map(str, found))}, expected {missing[0]!r} (dense.outputs)"
            )
        return {output: found[output] for output in outputs}
    if not isinstance(found, tuple | list) or len(found) != len(outputs):
        got = f"{len(found)} outputs" if isinstance(found, tuple | list) else type(found).__name__
        raise ModelFileError(f"running the network {name}: it returned {got}, expected {len(outputs)} (dense.outputs)")
    return dict(zip(outputs, found, strict=True))


def _device(device: int | None) -> torch.device:
    if device is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("opening a network on a GPU: this PyTorch has no CUDA; install a build that has")
    return torch.device("cuda", device)


def _failure(name: str, form: str, error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceMemoryError(f"opening the network {name}: it does not fit on the device: {error}")
    reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
    return ModelFileError(f"opening the network {name}: it cannot be read as {form}: {reason}")
