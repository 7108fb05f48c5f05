"""Reads answers as their bytes arrive, without I/O, for both clients.

The vectors of a lookup are received in place: in the caller's `out`, or in one new array per answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from hps.errors import (
    CapacityError,
    ConflictError,
    HPSError,
    InvalidInputError,
    MisplacedKeysError,
    NotReadyError,
    RemoteConnectionError,
    RemoteError,
    RemoteTimeoutError,
    TooManyKeysError,
    UnauthorizedError,
    UnknownDeviceError,
    UnknownModelError,
    UnknownTableError,
    UnknownVersionError,
)
from hps.ground.http1 import final_head
from hps.types import BoolArray, FloatArray

_FIRST_BYTES: Final = 2048
_MOST_TEXT_BYTES: Final = 64 << 20
_MOST_LAYOUTS: Final = 16
_ERRORS: Final[dict[int, type[HPSError]]] = {
    400: InvalidInputError,
    401: UnauthorizedError,
    403: UnauthorizedError,
    404: UnknownModelError,
    409: ConflictError,
    413: TooManyKeysError,
    421: MisplacedKeysError,
    429: NotReadyError,
    502: RemoteConnectionError,  # a proxy cannot reach the server
    503: NotReadyError,
    504: RemoteTimeoutError,
    507: CapacityError,
}
DTYPES: Final[dict[str, "np.dtype[Any]"]] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "FP64": np.dtype("<f8"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "INT16": np.dtype("<i2"),
    "INT8": np.dtype("i1"),
    "UINT8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""Of tensors, by the names of the Open Inference Protocol."""

_BFLOAT16: Final = np.dtype("<u2")  # its bits
_UNKNOWN: Final = (("got table", UnknownTableError), ("got version", UnknownVersionError), ("got device", UnknownDeviceError))


def error_of(status: int, message: str) -> HPSError:
    """Make the error for a server's status and message."""
    error_class = _ERRORS.get(status, RemoteError)
    if error_class is UnknownModelError:
        error_class = next((error_class for words, error_class in _UNKNOWN if words in message), error_class)
    return error_class(f"{message} (status {status})")


class Tensor(NamedTuple):
    """An output in an answer."""

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    start: int  # in the binary part; -1: in shared memory
    size: int  # in bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The JSON part of a correct answer. *Immutable.*"""

    tensors: tuple[Tensor, ...]
    size: int  # of the binary part in bytes
    parameters: Mapping[str, Any]
    version: str  # of the model
    aligned: bool  # whether arrays may be views of the binary part


@dataclass(slots=True)
class ExpectedAnswer:
    """The outputs that answers to requests of one form must have. *Thread-safe*; cached layouts may be lost."""

    vectors: Mapping[str, tuple[int, ...]]  # by output, the shape of its keys or bags
    masks: Mapping[str, tuple[int, ...]]  # likewise, for found-masks
    version: str | None  # the requested one; None for any
    shared: frozenset[str] = frozenset()  # outputs in shared memory
    scores: bool = False  # in place of vectors: outputs of any names, with the same number of samples
    datatypes: Mapping[str, str] = field(default_factory=dict)  # of outputs other than FP32
    first_bytes: int = _FIRST_BYTES  # length of head and JSON part of the last answer
    _layouts: dict[bytes, Layout] = field(default_factory=dict)

    def layout(self, text: bytes, body_bytes: int) -> Layout:
        """Read the JSON part of an answer.

        Raises:
            RemoteError: it does not answer this request.
        """
        layout = self._layouts.get(text)
        if layout is None:
            layout = self._read(text)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[text] = layout
        if layout.size != body_bytes:
            raise RemoteError(f"reading an answer: got {body_bytes} bytes of tensors, expected {layout.size}")
        return layout

    def _read(self, text: bytes) -> Layout:
        tensors: list[Tensor] = []
        start = 0
        try:
            answer = orjson.loads(text)
            if self.version is not None and answer["model_version"] != self.version:
                raise RemoteError(f"reading an answer: got version {answer['model_version']!r:.40}, expected {self.version!r}")
            for output in answer["outputs"]:
                name, shape, parameters = output["name"], tuple(output["shape"]), output["parameters"]
                datatype, is_bfloat16 = output["datatype"], False
                if self.scores:  # the network defines what a sample is, so only the outputs' counts must agree
                    keys: tuple[int, ...] = (tensors[0].shape if tensors else shape)[:1]
                    is_valid = type(name) is str and all(type(size_) is int and size_ >= 0 for size_ in shape)
                    is_valid = is_valid and shape[:1] == keys != ()
                elif name in self.vectors:
                    keys = self.vectors[name]
                    is_bfloat16 = datatype == "BF16"
                    is_valid = (
                        datatype == self.datatypes.get(name, "FP32")
                        and shape[:-1] == keys
                        and type(shape[-1]) is int
                        and shape[-1] > 0
                    )
                else:
                    keys = self.masks[name]
                    is_valid = datatype == "BOOL" and shape == keys
                dtype = _BFLOAT16 if is_bfloat16 else DTYPES[datatype]
                size = prod(shape) * dtype.itemsize
                shared = name in self.shared
                reported_bytes = parameters["shared_memory_byte_size" if shared else "binary_data_size"]
                if not is_valid or reported_bytes != size:
                    raise RemoteError(
                        f"reading an answer: got {datatype!r:.20} {shape!r:.80} of {reported_bytes!r:.20} bytes for "
                        f"{name!r:.120}, expected one for each of {keys} keys"
                    )
                tensors.append(Tensor(name, dtype, shape, -1 if shared else start, size))
                start += 0 if shared else size
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise RemoteError(f"reading an answer: got {text[:200]!r}, expected the outputs of this request") from error
        got = [tensor.name for tensor in tensors]
        expected = list(dict.fromkeys(got)) if self.scores else [*self.vectors, *self.masks]
        if sorted(got) != sorted(expected) or not got:
            raise RemoteError(f"reading an answer: got outputs {got!r:.200}, expected {expected or 'some'!r:.200}")
        aligned = all(tensor.start % tensor.dtype.itemsize == 0 for tensor in tensors)
        return Layout(tuple(tensors), start, answer.get("parameters") or {}, str(answer.get("model_version", "")), aligned)


class Answer:
    """Reads one answer. *One exchange.*

    Receive bytes into `buffer()`, and pass their number to `received`.

    Args:
        expected: for a lookup; None: the answer is JSON.
        out: returns the array for the vectors of an output, from its name and shape; None: new arrays.

    Attributes:
        started: whether a byte has arrived.
        keeps_alive: whether the connection can be reused.
        text: body of an answer without vectors.
        layout: of an answer with vectors.
    """

    def __init__(
        self, expected: ExpectedAnswer | None = None, out: Callable[[str, tuple[int, ...]], FloatArray] | None = None
    ) -> None:
        self._expected = expected
        self._out = out
        self._first = bytearray(_FIRST_BYTES if expected is None else expected.first_bytes)
        self._have = 0
        self._head_bytes = 0  # known when the head is complete
        self._body_bytes = 0
        self._text_bytes = 0
        self._targets: list[memoryview] = []  # the last one is next
        self._placed = False
        self._arrays: dict[str, Any] = {}
        self.started = False
        self.status = 0
        self.head: dict[bytes, bytes] = {}
        self.keeps_alive = False
        self.text = b""
        self.layout: Layout | None = None

    def buffer(self) -> memoryview:
        """Return memory for the next bytes; never empty before the answer is complete."""
        if self._placed:
            return self._targets[-1]
        return memoryview(self._first)[self._have :]

    def received(self, count: int) -> bool:
        """Process received bytes. Returns whether the answer is complete.

        Raises:
            RemoteError: it does not answer this request.
        """
        self.started = True
        if self._placed:
            target = self._targets[-1]
            if count < len(target):
                self._targets[-1] = target[count:]
                return False
            self._targets.pop()
            return not self._targets
        self._have += count
        if not self._head_bytes and not self._read_head():
            return False
        needed = self._head_bytes + self._text_bytes
        if self._have < needed:
            self._grow(needed)
            return False
        return self._place_tensors(needed)

    @property
    def version(self) -> str:
        """Version of the model that answered; empty if unknown."""
        return "" if self.layout is None else self.layout.version

    @property
    def outputs(self) -> dict[str, npt.NDArray[Any]]:
        """All outputs by name, once the answer is complete."""
        return self._arrays

    @property
    def vectors(self) -> dict[str, FloatArray]:
        """The vectors by output, once the answer is complete."""
        return {name: self._arrays[name] for name in self._expected.vectors} if self._expected else {}

    @property
    def found(self) -> dict[str, BoolArray]:
        """The found-masks by output, likewise."""
        return {name: self._arrays[name] for name in self._expected.masks} if self._expected else {}

    def error(self) -> HPSError | None:
        """Make the error of a complete answer; None if it is a success."""
        if self.status == 200 or (self._expected is None and 200 < self.status < 300):
            return None
        try:
            message = str(orjson.loads(self.text)["error"])
        except (ValueError, KeyError, TypeError):
            message = f"calling a server: got {self.text[:200]!r}, which is no answer of hps serve"
        return error_of(self.status, message)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which an overloaded server allows a retry; None if it gave none."""
        value = self.head.get(b"retry-after", b"") if self.status in (429, 503) else b""
        return float(value) if value.isdigit() else None

    def _grow(self, size: int) -> None:
        if size > len(self._first):  # a new array, since the caller may still have a view of this one
            larger = bytearray(size)
            larger[: self._have] = memoryview(self._first)[: self._have]
            self._first = larger

    def _read_head(self) -> bool:
        if (final := final_head(self._first, self._have)) is None:
            if self._have == len(self._first):
                self._grow(2 * self._have)
            return False
        found = final.head
        if found.length < 0:
            raise RemoteError("reading an answer: got chunks, expected a Content-Length; is it hps?")
        self.head = head = found.headers
        self.status, self._head_bytes, self._body_bytes = found.status, final.end, found.length
        self.keeps_alive = found.keeps_alive
        length = b"%d" % found.length
        text = head.get(b"inference-header-content-length", length)
        if self._expected is None or self.status != 200:
            text = length
        if not text.isdigit() or int(text) > min(self._body_bytes, _MOST_TEXT_BYTES):
            raise RemoteError(f"reading an answer: got a JSON part of {text[:40]!r} bytes in a body of {length!r}")
        self._text_bytes = int(text)
        return True

    def _place_tensors(self, needed: int) -> bool:
        """Allocate the tensors, and copy the bytes of them that have arrived."""
        text = bytes(self._first[self._head_bytes : needed])
        surplus = memoryview(self._first)[needed : self._have]
        body_bytes = self._body_bytes - self._text_bytes
        self.keeps_alive = self.keeps_alive and len(surplus) <= body_bytes
        if self._expected is None or self.status != 200:
            self.text = text
            return True
        self._expected.first_bytes = needed
        self.layout = layout = self._expected.layout(text, body_bytes)
        targets = self._allocate(layout)
        for index, target in enumerate(targets):
            count = min(len(surplus), len(target))
            target[:count] = surplus[:count]
            surplus = surplus[count:]
            if count < len(target):
                self._targets = [target[count:], *targets[index + 1 :]][::-1]
                self._placed = True
                return False
        return True

    def _allocate(self, layout: Layout) -> list[memoryview]:
        """Make the arrays of an answer; return the memory of those in its body, in order."""
        vectors = () if self._expected is None else self._expected.vectors
        if self._out is None and layout.aligned:
            body = np.empty(layout.size, np.uint8)
            for tensor in layout.tensors:
                self._arrays[tensor.name] = np.ndarray(tensor.shape, tensor.dtype, body, tensor.start)
            return [body.data] if layout.size else []
        targets = []
        for tensor in layout.tensors:
            if self._out is not None and tensor.name in vectors:
                array: npt.NDArray[Any] = self._out(tensor.name, tensor.shape)
            else:
                array = np.empty(tensor.shape, tensor.dtype)
            self._arrays[tensor.name] = array
            if tensor.start >= 0 and tensor.size:
                targets.append(array.reshape(-1).view(np.uint8).data)
        return targets
