"""An inference between its request and its answer: how the answer is laid out, and the memory that it is sent from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from hps.tensors.segments import Segment
from hps.types import BoolArray, FloatArray, KeyArray

_ALIGNMENT = 16  # bytes, of the vectors of an answer


@dataclass(frozen=True, slots=True)
class Part:
    """The keys of one table within a request. Immutable.

    Attributes:
        table: its index.
        dim: its width.
        source: which input has the keys.
        start, stop: where they are in it.
        masked: whether their found-mask is wanted.
    """

    table: int
    dim: int
    source: int
    start: int
    stop: int
    masked: bool


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an answer: elements [start, start + size) of the vectors (FP32) or of the masks (BOOL). Immutable.

    `shape` multiplies to `size`.
    """

    name: str
    datatype: str
    shape: list[int]
    start: int
    size: int
    binary: bool

    @property
    def size_bytes(self) -> int:
        """How long it is as binary data."""
        return 4 * self.size if self.datatype == "FP32" else self.size


class Layout:
    """Where in memory an answer is: its JSON part, the vectors of all parts, the masks of those that want one. *Immutable.*

    Only an answer of binary outputs alone has its JSON part there, padded by spaces: it is sent from that one piece of memory,
    with one write and without a copy. Others write theirs when the vectors are known.

    Args:
        answer: the members of the JSON part beside the outputs.
        parts: what is looked up, in the order of its vectors and masks.
        outputs: what is answered, vectors before masks.
    """

    def __init__(self, answer: dict[str, Any], parts: Sequence[Part], outputs: Sequence[Output]) -> None:
        self.answer = answer
        self.parts = tuple(parts)
        self.outputs = tuple(outputs)
        self.vectors_size = sum(4 * part.dim * (part.stop - part.start) for part in parts)
        self.masks_size = sum(part.stop - part.start for part in parts if part.masked)
        self.text = b""
        sent = sum(output.size_bytes for output in outputs)
        if all(output.binary for output in outputs) and sent == self.vectors_size + self.masks_size:
            text = self.describe([None] * len(self.outputs))
            self.text = text + b" " * (-len(text) % _ALIGNMENT)
        self.size = len(self.text) + self.vectors_size + self.masks_size

    def describe(self, values: Sequence[FloatArray | BoolArray | None]) -> bytes:
        """Write the JSON part; `values` are those of each output, used where it is not binary."""
        outputs: list[dict[str, Any]] = []
        for output, data in zip(self.outputs, values, strict=True):
            tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            if output.binary:
                tensor["parameters"] = {"binary_data_size": output.size_bytes}
            else:
                tensor["data"] = data
            outputs.append(tensor)
        return orjson.dumps({**self.answer, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)


class Inference:
    """A request that was understood, with room for its answer.

    Args:
        layout: of the answer.
        inputs: what the parts of the layout have their keys from.

    Attributes:
        segments: what to look up; it writes into the memory of the answer.
    """

    def __init__(self, layout: Layout, inputs: Sequence[KeyArray]) -> None:
        self._layout = layout
        self._memory = np.empty(layout.size, np.uint8)
        if layout.text:
            self._memory.data[: len(layout.text)] = layout.text
        self.segments: list[Segment] = []
        place, mask_place = len(layout.text), len(layout.text) + layout.vectors_size
        for part in layout.parts:
            count = part.stop - part.start
            out = np.ndarray((count, part.dim), np.float32, self._memory, place)
            segment = Segment(part.table, inputs[part.source][part.start : part.stop], out)
            place += 4 * count * part.dim
            if part.masked:
                segment.found = np.ndarray((count,), np.bool_, self._memory, mask_place)
                mask_place += count
            self.segments.append(segment)

    def encode(self) -> tuple[Sequence[bytes | memoryview], int | None]:
        """Make the body of the answer, once the lookup has written vectors and masks.

        A value that JSON cannot write (NaN, infinities) is null; binary outputs carry it.

        Returns:
            The body in pieces, views of what the lookup wrote; and the length of its JSON part, None where it is all JSON.
        """
        layout = self._layout
        if layout.text:
            return (self._memory.data,), len(layout.text)
        vectors = self._memory[: layout.vectors_size].view(np.float32)
        masks = self._memory[layout.vectors_size :].view(np.bool_)
        values: list[FloatArray | BoolArray] = [
            (vectors if output.datatype == "FP32" else masks)[output.start : output.start + output.size]
            for output in layout.outputs
        ]
        text = layout.describe(values)
        binary = [data.view(np.uint8).data for data, output in zip(values, layout.outputs, strict=True) if output.binary]
        return (text, *binary), len(text) if binary else None
