"""An inference between its request and its answer: what to look up, and the memory that the answer is sent from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from hps.cache.base import Segment
from hps.service.served_model import ServedModel
from hps.types import BoolArray, FloatArray, KeyArray

_ALIGNMENT = 16  # bytes, of the vectors of an answer


@dataclass(slots=True)
class Output:
    """One output of an answer: elements [start, start + size) of the vectors (FP32) or of the masks (BOOL).

    `shape` multiplies to `size`.
    """

    name: str
    datatype: str
    shape: list[int]
    start: int
    size: int
    binary: bool

    def size_bytes(self) -> int:
        """How long it is as binary data."""
        return 4 * self.size if self.datatype == "FP32" else self.size


class Inference:
    """A request that was understood, with room for its answer.

    An answer of binary outputs alone has its JSON part, padded by spaces, its vectors and its masks in one piece of memory,
    so that it is sent with one write and without a copy.

    Attributes:
        model_name: of the model.
        segments: what to look up.
    """

    def __init__(
        self,
        model: ServedModel,
        request_id: str | None,
        parts: list[tuple[int, KeyArray]],  # index of a table, and its keys
        masked: list[bool],  # whether the found-mask of a part is wanted
        outputs: list[Output],
    ) -> None:
        self.model_name = model.name
        self._outputs = outputs
        self._head: dict[str, Any] = {"model_name": model.name, "model_version": "1"}
        if request_id is not None:
            self._head["id"] = request_id
        floats = sum([keys.size * model.tables[index].dim for index, keys in parts])
        masks = sum([keys.size for (_, keys), wanted in zip(parts, masked, strict=True) if wanted])
        size = 4 * floats + masks
        text = b""
        if all(output.binary for output in outputs) and size == sum([output.size_bytes() for output in outputs]):
            text = self._describe()
            text += b" " * (-len(text) % _ALIGNMENT)
        self._text_size = len(text)
        self._memory = np.empty(len(text) + size, np.uint8)
        if text:
            self._memory.data[: len(text)] = text
        self._vectors: FloatArray = self._memory[len(text) : len(text) + 4 * floats].view(np.float32)
        self._masks: BoolArray = self._memory[len(text) + 4 * floats :].view(np.bool_)
        self.segments: list[Segment] = []
        row = key = 0
        for (index, keys), wanted in zip(parts, masked, strict=True):
            dim = model.tables[index].dim
            end = row + keys.size * dim
            segment = Segment(index, keys, self._vectors[row:end].reshape(keys.size, dim))
            row = end
            if wanted:
                segment.found = self._masks[key : key + keys.size]
                key += keys.size
            self.segments.append(segment)

    def encode(self) -> tuple[Sequence[bytes | memoryview], int | None]:
        """Make the body of the answer, once the lookup has written vectors and masks.

        A value that JSON cannot write (NaN, infinities) is null; binary outputs carry it.

        Returns:
            The body in pieces, views of what the lookup wrote; and the length of its JSON part, None where it is all JSON.
        """
        if self._text_size:
            return (self._memory.data,), self._text_size
        text = self._describe()
        binary = [self._values(output).view(np.uint8).data for output in self._outputs if output.binary]
        return (text, *binary), len(text) if binary else None

    def _describe(self) -> bytes:
        described: list[dict[str, Any]] = []
        for output in self._outputs:
            tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            if output.binary:
                tensor["parameters"] = {"binary_data_size": output.size_bytes()}
            else:
                tensor["data"] = self._values(output)
            described.append(tensor)
        return orjson.dumps({**self._head, "outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)

    def _values(self, output: Output) -> FloatArray | BoolArray:
        memory = self._vectors if output.datatype == "FP32" else self._masks
        return memory[output.start : output.start + output.size]
