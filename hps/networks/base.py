"""The contract of an engine that runs dense networks.

A network takes named tensors and returns named tensors. Each has the samples as its first dimension, unless the configuration
says otherwise. Some of its inputs are vectors that lookups wrote to memory of the network's device, which `Network.empty`
allocates. Programs that compute keys are networks, too.

Another package adds an engine by an entry point of the group `hps.networks`, whose name is the `format` (docs/extending.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from hps.errors import ModelFileError

Tensor: TypeAlias = Any
"""A tensor of the engine, with `__dlpack__`."""


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """An input or output of a network. *Immutable.*

    Attributes:
        shape: -1 where the size is free; the first is usually the number of samples. None: even the rank is unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.dtype} {'of any shape' if self.shape is None else list(self.shape)}"

    def fits(self, other: "NetworkTensor") -> bool:
        """Return whether dtype and shape may be those of another one."""
        if self.dtype != other.dtype:
            return False
        if self.shape is None or other.shape is None:
            return True
        return len(self.shape) == len(other.shape) and all(
            a == b or -1 in (a, b) for a, b in zip(self.shape, other.shape, strict=True)
        )


class Network(ABC):
    """A network on one device. *Thread-safe.* `close` is called once, after the last call."""

    on_cuda: ClassVar[bool] = False
    """Whether it can run on CUDA devices. Others run on the CPU, even if a GPU answers the lookups."""

    @classmethod
    def runs_code(cls, name: str, content: bytes) -> bool:
        """Return whether a file is machine code, which is opened only with `model_source.trust`.

        Raises:
            ModelFileError: the file cannot be read.
        """
        return False

    @classmethod
    @abstractmethod
    def open(
        cls, name: str, content: bytes, inputs: Sequence[NetworkTensor], outputs: Sequence[str], device: int | None
    ) -> Self:
        """Load a network. Its file is untrusted: only arithmetic in it may run.

        Args:
            name: of its file, for errors.
            content: of its file.
            inputs: those that the configuration names, in its order.
            outputs: names of the outputs, in the network's order unless it names them itself.
            device: a CUDA device; None: the CPU.

        Raises:
            ModelFileError: the file is something else, holds what is not allowed, or has other inputs.
            DeviceMemoryError: it does not fit on the device. DeviceError: the engine cannot use it.
        """

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which a thread calls a network that is on a CUDA device: that of one stream for all threads.

        Graphs of `fixed` share memory, so they must run one after the other.
        """
        return nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Allocate a tensor in the memory of a CUDA device; only if `on_cuda`."""
        raise NotImplementedError

    @abstractmethod
    def put(self, array: np.ndarray) -> Tensor:
        """Return a tensor with these values in the memory of the device; on the CPU it may share the array's memory."""

    def staging(self, size: int) -> tuple[np.ndarray, Tensor]:
        """Allocate so many bytes of host memory, uint8: as an array, and as a tensor that `write` takes."""
        memory = np.empty(size, np.uint8)
        return memory, memory

    def part(self, memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor at a byte offset of a uint8 tensor of the device, or of `staging`; only if `on_cuda`."""
        raise NotImplementedError

    def write(self, tensor: Tensor, source: Tensor) -> None:
        """Copy a tensor to another one, each of the device, or of `staging` or a part of it; only if `on_cuda`.

        The host may read what is copied to `staging` after `fetch` of the tensor.
        """
        raise NotImplementedError

    @abstractmethod
    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Return the rows of a tensor that an index, (n,) int64 of the same device, names."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the network on tensors of its device. The outputs may be of the same memory as the next call's."""

    def fixed(self, run: Callable[[], Mapping[str, Tensor]], *, owner: object = None) -> Callable[[], Mapping[str, Tensor]]:
        """Return a function that repeats a run of `take`, `run` and `write` on the same tensors; only if `on_cuda`.

        Args:
            owner: of runs that write their outputs to other memory at their end and follow one another, so that they may share
                memory; None for a run that has memory of its own.
        """
        return run

    @abstractmethod
    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Wait for outputs, and return them in host memory."""

    @abstractmethod
    def close(self) -> None:
        """Free the network's memory."""


def refuse_inputs(name: str, has: Sequence[str], inputs: Sequence[NetworkTensor]) -> None:
    """Check that a network has the inputs that the configuration names.

    Raises:
        ModelFileError: it has others.
    """
    named = [input_.name for input_ in inputs]
    if sorted(has) != sorted(named):
        missing, extra = sorted(set(has) - set(named)), sorted(set(named) - set(has))
        problem = (
            f"got no input {missing[0]!r}, which it has" if missing else f"got input {(extra or named)[0]!r}, which it lacks"
        )
        raise ModelFileError(f"opening the network {name}: {problem}; expected in dense.inputs: {', '.join(has)}")
