"""Requests for scores as a frontend posts them: a description of their tensors, and the tensors, in a slot.

The description (`hps.scoring.packing`) lies between the header of the slot and its scratch. Binary requests with the same JSON
part share a `Plan`, as lookups do: tensors are received where the engine reads them, and scores are sent from where it writes.
"""

import struct
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.ground.http1 import answer_head
from hps.regions.layout import HEADER_BYTES, SCORED, Memory, tensors_at
from hps.scoring.packing import describe
from hps.serve.frontend.answers import HEAD_BYTES, SCRATCH_BYTES, EncodedAnswer, Plan
from hps.serve.http.http_answer import BINARY
from hps.serve.logs.lookup_report import LookupBreakdown
from hps.serve.protocol.request_checks import ModelTables, PublishedNetwork, check_total
from hps.serve.protocol.score_requests import (
    ScoreBody,
    ScoreHeader,
    answer_text,
    needs_no_conversion,
    text_of,
)
from hps.serve.protocol.score_rows import rows_text

_ALIGNED: Final = 64
_WORDS: Final = struct.Struct("<5q")
_JSON_SHARE: Final = 6  # text of a number, in bytes a byte


def _descriptor(description: bytes) -> tuple[bytes, int]:
    """Return the head of a slot, without the deployment's id, and where its tensors start."""
    scratch = up(HEADER_BYTES + len(description), 8)
    head = bytearray(HEADER_BYTES)
    _WORDS.pack_into(head, 0, 0, SCORED, 0, scratch, SCRATCH_BYTES)
    return bytes(head) + description.ljust(scratch - HEADER_BYTES), tensors_at(scratch + SCRATCH_BYTES)


def score_plan(header: ScoreHeader, model: ModelTables, network: PublishedNetwork, max_keys: int) -> Plan | None:
    """Return the plan of requests for scores with this JSON part; None if their bodies have to be decoded.

    Raises:
        TooManyKeysError: there are more than `max_keys` keys.
    """
    if not all(binary for _, binary in header.outputs) or any(input_.start < 0 for input_ in header.inputs.values()):
        return None
    if not needs_no_conversion(header, network):
        return None
    check_total(header.keys, max_keys)
    written = text_of(answer_text(header, model.name, model.version, {}))
    written += b" " * (-len(written) % 16)
    inputs = [[input_.name, input_.dtype.str, input_.shape, input_.start] for input_ in header.inputs.values()]
    outputs, end = _outputs(header, up(header.binary_size + HEAD_BYTES + len(written), _ALIGNED))
    descriptor, start_at = _descriptor(describe(inputs, outputs, header.timeout_us))
    vectors_at, end = start_at + outputs[0][3], start_at + end
    headers = BINARY, (b"inference-header-content-length", b"%d" % len(written))
    answer = answer_head(200, headers, len(written) + end - vectors_at, b"").removesuffix(b"\r\n\r\n")
    numbers = tuple((dtype, start_at + at, prod(shape)) for _, dtype, shape, at in outputs)
    size, keys = header.binary_size, header.keys
    return Plan(descriptor, start_at, size, written, vectors_at, end, end, header.device_id, answer, keys, None, numbers)


def _outputs(header: ScoreHeader, at: int) -> tuple[list[list[Any]], int]:
    """Lay out the outputs in order; also return their end."""
    outputs: list[list[Any]] = []
    for output, _ in header.outputs:
        shape, dtype = header.shape_of(output), np.dtype(output.dtype)
        outputs.append([output.name, dtype.str, shape, at])
        at += prod(shape) * dtype.itemsize
    return outputs, at


class PlacedScores:
    """A request for scores without a plan, laid out for a slot. *One request.*"""

    wants_report = False

    def __init__(self, body: ScoreBody, model: ModelTables) -> None:
        self._body = body
        self._model = model
        header = body.header
        self.device_id = header.device_id
        self.keys = header.keys
        at = 0
        self._inputs: list[list[Any]] = []
        for name, array in body.arrays.items():
            self._inputs.append([name, array.dtype.str, list(array.shape), at])
            at = up(at + array.nbytes, _ALIGNED)
        self._outputs, end = _outputs(header, up(at + HEAD_BYTES, _ALIGNED))
        self._descriptor, self._start = _descriptor(describe(self._inputs, self._outputs, header.timeout_us))
        self.size = up(self._start + end, _ALIGNED)  # of the slot
        binary = all(binary for _, binary in header.outputs)
        self.held_bytes = 0 if binary else _JSON_SHARE * (end - self._outputs[0][3])  # upper bound on the text of its answer
        self._memory: Memory | None = None
        self._slot = 0

    def write(self, memory: Memory, slot: int, deployment_id: int) -> None:
        self._memory, self._slot = memory, slot
        view, start = memory.view, slot + self._start
        for (*_, at), array in zip(self._inputs, self._body.arrays.values(), strict=True):
            if array.nbytes:
                view[start + at : start + at + array.nbytes] = np.ascontiguousarray(array).data.cast("B")
        view[slot : slot + len(self._descriptor)] = self._descriptor
        memory.longs[slot >> 3] = deployment_id

    def arrays(self, memory: Memory, slot: int) -> list[npt.NDArray[Any]]:
        """Return the scores in the slot; views of its memory."""
        start, view = slot + self._start, memory.view
        return [np.frombuffer(view, dtype, prod(shape), start + at).reshape(shape) for _, dtype, shape, at in self._outputs]

    def encode(self, report: LookupBreakdown | None, device: int) -> EncodedAnswer:
        memory, start, header, model = self._memory, self._slot + self._start, self._body.header, self._model
        if memory is None:
            raise RuntimeError("the request was not written")
        data, binary = {}, []
        for (name, dtype, shape, at), (_, is_binary) in zip(self._outputs, header.outputs, strict=True):
            size = prod(shape) * np.dtype(dtype).itemsize
            if is_binary:
                binary.append(memory.view[start + at : start + at + size])
            else:
                data[name] = np.frombuffer(bytes(memory.view[start + at : start + at + size]), dtype).reshape(shape)
        if self._body.rows:
            return EncodedAnswer([text_of(rows_text(model.name, model.version, data))], (), None)
        text = text_of(answer_text(header, model.name, model.version, data))
        return EncodedAnswer([text], binary, len(text) if binary else None)


def up(value: int, to: int) -> int:
    return -(-value // to) * to
