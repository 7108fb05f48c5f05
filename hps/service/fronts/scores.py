"""Requests for scores as a front posts them: arrays in a slot, and a description beside them.

The description is JSON: `{"inputs": [[name, dtype, shape, offset], ...], "outputs": [...]}`, offsets from the slot. The first 8 bytes of
the room for it are the deadline, as `time.perf_counter_ns`; 0: none.
"""

import struct
import time
from typing import Any, Final

import numpy as np
import orjson

from hps.regions.layout import HEADER_BYTES, SCORED, Memory
from hps.service.fronts.answers import HEAD_ROOM, EncodedAnswer
from hps.service.logs.lookup_report import LookupBreakdown
from hps.service.protocol.request_checks import ModelTables
from hps.service.protocol.score_requests import ScoreBody, answer_text, rows_text, text_of

_ALIGNED: Final = 64
_WORDS = struct.Struct("<5q")
_LEAST_ROOM = 4096
_JSON_SHARE = 6  # text of a number, in bytes a byte


class PlacedScores:
    """A request for scores that is laid out for a slot. *One request.*

    Attributes:
        size: of the slot that it needs.
        keys: number of keys.
        held_bytes: upper bound on the text of its answer.
    """

    wants_report = False

    def __init__(self, body: ScoreBody, model: ModelTables) -> None:
        self._body = body
        self._model = model
        header = body.header
        self.device_id = header.device_id
        self.keys = body.keys
        samples = header.samples
        outputs = [one for one, _ in header.outputs]
        sizes = [samples * int(np.prod(one.shape, dtype=np.int64)) * np.dtype(one.dtype).itemsize for one in outputs]
        names = sum(len(name) + 80 for name in (*body.arrays, *(one.name for one in outputs)))
        self._room = _up(8 + names + _LEAST_ROOM, _ALIGNED)
        at = HEADER_BYTES + self._room
        self._inputs: list[list[Any]] = []
        for name, array in body.arrays.items():
            self._inputs.append([name, array.dtype.str, list(array.shape), at])
            at = _up(at + array.nbytes, _ALIGNED)
        binary = all(binary for _, binary in header.outputs)
        self._text = b""
        if binary:
            text = text_of(answer_text(header, model.name, model.version, {}))
            self._text = text + b" " * (-len(text) % _ALIGNED)
        at = _up(at + HEAD_ROOM + len(self._text), _ALIGNED)
        self._outputs: list[list[Any]] = []
        for one, size in zip(outputs, sizes, strict=True):
            self._outputs.append([one.name, np.dtype(one.dtype).str, [samples, *one.shape], at])
            at += size if binary else _up(size, _ALIGNED)
        self.size = _up(at, _ALIGNED)
        self.held_bytes = 0 if binary else _JSON_SHARE * sum(sizes)
        self._memory: Memory | None = None
        self._slot = 0

    def write(self, memory: Memory, slot: int, serial: int) -> None:
        """Write descriptor, description and arrays to a slot."""
        self._memory, self._slot = memory, slot
        view, timeout = memory.view, self._body.header.timeout_us
        for (*_, at), array in zip(self._inputs, self._body.arrays.values(), strict=True):
            if array.nbytes:
                view[slot + at : slot + at + array.nbytes] = np.ascontiguousarray(array).data.cast("B")
        due = time.perf_counter_ns() + 1000 * timeout if timeout else 0
        text = struct.pack("<q", due) + orjson.dumps({"inputs": self._inputs, "outputs": self._outputs}) + b"\0"
        view[slot + HEADER_BYTES : slot + HEADER_BYTES + len(text)] = text
        head = bytearray(HEADER_BYTES)
        _WORDS.pack_into(head, 0, serial, SCORED, 0, HEADER_BYTES, self._room)
        view[slot : slot + HEADER_BYTES] = head

    def encode(self, report: LookupBreakdown | None, device: int) -> EncodedAnswer:
        """Encode the answer, whose outputs are in the slot."""
        memory, slot, header = self._memory, self._slot, self._body.header
        if memory is None:
            raise RuntimeError("the request was not written")
        data, binary = {}, []
        for (name, dtype, shape, at), (_, is_binary) in zip(self._outputs, header.outputs, strict=True):
            array = np.ndarray(shape, dtype, memory.view, slot + at)
            data[name] = array
            if is_binary:
                binary.append(memory.view[slot + at : slot + at + array.nbytes])
        model = self._model
        if self._body.rows:
            return EncodedAnswer([text_of(rows_text(model.name, model.version, data))], (), None)
        text = self._text or text_of(answer_text(header, model.name, model.version, data))
        return EncodedAnswer([text], binary, len(text) if binary else None)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
