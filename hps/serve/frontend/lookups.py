"""Lookups as a front posts them: from a request's bytes to a descriptor, and from vectors to an answer."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson

from hps.errors import NotReadyError, UnknownDeviceError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.regions.layout import (
    HEADER_BYTES,
    POOLED,
    SEGMENT_WORDS,
    TRACED,
    Memory,
)
from hps.serve.frontend.answers import ASIDE_ROOM, HEAD_ROOM, EncodedAnswer, Plan
from hps.serve.frontend.heads import answer_head
from hps.serve.frontend.scores import score_plan, up
from hps.serve.http.http_answer import BINARY
from hps.serve.http.http_metrics import InferenceCounts
from hps.serve.logs.lookup_report import LookupBreakdown
from hps.serve.protocol.json_lookup import JSONLookup
from hps.serve.protocol.open_inference import AnswerLayout, Inference, Laid, lay_out
from hps.serve.protocol.open_inference_header import CACHED_BYTES, read_header
from hps.serve.protocol.request_checks import ModelTables
from hps.serve.protocol.score_requests import score_header

TRACE_ROOM: Final = 65_536
_VECTORS_ALIGNED = 128
_WORDS = struct.Struct("<5q")  # serial, flags, segments, aside, its bytes: see `regions/layout.py`


@dataclass(eq=False, slots=True)
class FrontVersion:
    """A version of a model that the owner answers. *Immutable*, but for the turns and counts.

    Attributes:
        tables: its tables.
        serials: by device, what descriptors call it.
        counts: of Triton's statistics.
        turn: which device is next.
        devices: which take turns: those that are not lost; if all are, all.
    """

    tables: ModelTables
    serials: dict[int, int]
    counts: InferenceCounts
    turn: int = 0
    devices: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.leave_out(())

    def leave_out(self, lost: Collection[int]) -> None:
        """Give no turn to devices that are lost, while there are others."""
        self.devices = tuple(device for device in self.serials if device not in lost) or tuple(self.serials)

    def device(self, device: int | None) -> int:
        """Return the device that answers; None: the next one.

        Raises:
            UnknownDeviceError: the model is not deployed there.
            NotReadyError: the owner has no room for the deployment.
        """
        devices = self.devices
        if device is None and devices:
            self.turn += 1
            return devices[self.turn % len(devices)]
        if not devices:
            raise NotReadyError(f"model {self.tables.name!r} is not ready: too many deployments are served")
        if device not in self.serials:
            got = f"got device {device!r}, expected one of its deployed_device_list {list(self.serials)}"
            raise UnknownDeviceError(f"looking up model {self.tables.name!r}: {got}")
        return device


def plan_of(text: bytes, model: ModelTables, max_keys: int) -> Plan | None:
    """Return the plan of requests with this JSON part; None if what follows the JSON part has to be read as well.

    Raises:
        HPSError: as `open_inference.decode_request`.
    """
    return _cached_plan(text, model, max_keys) if len(text) <= CACHED_BYTES else None


def _plan_of(text: bytes, model: ModelTables, max_keys: int) -> Plan | None:
    if model.network is not None and (scores := score_header(text, model.network)) is not None:
        return score_plan(scores, model, model.network, max_keys)
    header = read_header(text)
    if header.numkeys is not None or header.bags or header.report:
        return None
    if any(tensor.start < 0 or tensor.dtype.itemsize != 8 for tensor in header.inputs.values()):
        return None
    layout = lay_out(header, None, model, max_keys)
    if not layout.text or layout.device_place:
        return None
    tensors = list(header.inputs.values())
    keys_at = up(HEADER_BYTES + 8 * SEGMENT_WORDS * len(layout.ranges) + ASIDE_ROOM, 64)
    vectors_at = up(keys_at + header.binary_size + HEAD_ROOM + len(layout.text), _VECTORS_ALIGNED)
    begin = vectors_at - len(layout.text)
    words, out, mask = [], begin + layout.lookup_at, vectors_at + layout.vectors_size
    for one in layout.ranges:
        count = one.stop - one.start
        words += [one.table, count, keys_at + tensors[one.source].start + 8 * one.start, out, mask if one.masked else 0]
        out += one.step
        mask += count if one.masked else 0
    headers = BINARY, (b"inference-header-content-length", b"%d" % len(layout.text))
    answer = answer_head(200, headers, layout.answer_size, b"").removesuffix(b"\r\n\r\n")
    return Plan(
        _descriptor(0, len(layout.ranges), ASIDE_ROOM, words),
        keys_at,
        header.binary_size,
        layout.text,
        vectors_at,
        begin + layout.answer_size,
        begin + layout.size,
        header.device_id,
        answer,
        header.binary_size // 8,
        layout if layout.converts else None,
    )


def _plan_bytes(plan: Plan | None, text: bytes, *others: object) -> int:
    if plan is None:
        return len(text)
    layout = 0 if plan.layout is None else plan.layout.bytes_for(text)
    return 1000 + len(text) + len(plan.descriptor) + len(plan.text) + len(plan.answer) + layout


_cached_plan = BoundedCache(_plan_of, _plan_bytes)


def _descriptor(flags: int, count: int, aside_bytes: int, words: Sequence[int]) -> bytes:
    aside = HEADER_BYTES + 8 * SEGMENT_WORDS * count
    head = bytearray(HEADER_BYTES)
    _WORDS.pack_into(head, 0, 0, flags, count, aside, aside_bytes)
    return bytes(head) + struct.pack(f"<{len(words)}q", *words)


class Placed:
    """A request that is laid out for a slot, other than by a plan. *One request.*

    Args:
        request: a decoded lookup or inference whose answer has no memory yet.
        traced: whether the owner shall trace it.

    Attributes:
        size: of the slot that it needs.
        keys: number of keys.
    """

    def __init__(self, request: "JSONLookup | LaidOut", traced: bool) -> None:
        self._request = request
        batch = request.batch
        self._pooled = bool(batch.poolings)
        self._flags = (POOLED if self._pooled else 0) | (TRACED if traced else 0)
        self._bags: list[dict[str, Any]] = []
        self.keys = sum(batch.sizes)
        at = up(HEADER_BYTES + 8 * SEGMENT_WORDS * len(batch.tables), 64)
        self._keys_at = []
        extra: list[tuple[int, np.ndarray]] = []
        for place, n in enumerate(batch.sizes):
            self._keys_at.append(at)
            at = up(at + 8 * n, 8)
            if not self._pooled:
                continue
            pooling = batch.poolings[place]
            arrays: dict[str, Any] = {}
            for name, array in (("offsets", pooling.offsets), ("weights", pooling.weights)):
                if array is not None:
                    host = np.ascontiguousarray(array)
                    extra.append((at, host))
                    arrays[name] = [at, int(host.size), host.dtype.str]
                    at = up(at + host.nbytes, 8)
            bags = {
                **arrays,
                "count": pooling.count,
                "hotness": pooling.hotness,
                "combiner": pooling.combiner.name.lower(),
                "max_norm": pooling.max_norm or None,
                "padding_key": pooling.padding_key,
                "strides": None,
            }
            self._bags.append(bags)
        self._extra = extra
        self._aside_at = up(at, 64)
        text = orjson.dumps(self._bags) if self._pooled else b""
        self._aside_room = max(TRACE_ROOM if traced else ASIDE_ROOM, 2 * len(text) + 4096 * self._pooled)
        self._vectors_at = up(self._aside_at + self._aside_room + HEAD_ROOM + request.text_bytes, _VECTORS_ALIGNED)
        self.size = self._vectors_at + request.memory_bytes
        self.slot = 0

    def write(self, memory: Memory, slot: int, serial: int) -> None:
        """Write descriptor and keys to a slot, and give the request's answer its memory there."""
        self.slot = slot
        request, view = self._request, memory.view
        start = slot + self._vectors_at - request.text_bytes
        request.place(memory.bytes[start : start + request.text_bytes + request.memory_bytes])
        words: list[int] = []
        batch = request.batch
        for place, (table, n, keys, out) in enumerate(zip(batch.tables, batch.sizes, batch.keys, batch.outs, strict=True)):
            keys_at, found = self._keys_at[place], batch.founds[place] if batch.founds else None
            if n:
                memory.bytes[slot + keys_at : slot + keys_at + 8 * n] = keys.view(np.uint8)
            out_at = _address(out) - memory.address - slot if out.size else self._vectors_at
            found_at = _address(found) - memory.address - slot if found is not None and n else 0
            if self._pooled and out.size and not out.flags.c_contiguous:
                self._bags[place]["strides"] = list(out.strides)
            words += [table, n, keys_at, out_at, found_at]
        for at, array in self._extra:
            memory.bytes[slot + at : slot + at + array.nbytes] = array.view(np.uint8).reshape(-1)
        head = bytearray(HEADER_BYTES)
        _WORDS.pack_into(head, 0, serial, self._flags, len(words) // SEGMENT_WORDS, self._aside_at, self._aside_room)
        descriptor = bytes(head) + struct.pack(f"<{len(words)}q", *words)
        view[slot : slot + len(descriptor)] = descriptor
        if self._pooled:
            text = orjson.dumps(self._bags)
            view[slot + self._aside_at : slot + self._aside_at + len(text) + 1] = text + b"\0"

    def encode(self, report: LookupBreakdown | None, device: int) -> EncodedAnswer:
        """Encode the answer, whose vectors are there."""
        if isinstance(self._request, LaidOut):
            return self._request.encoded(report, device)
        text, binary = self._request.encode(report)
        return EncodedAnswer([*text], binary, None)


class LaidOut:
    """An inference request whose answer has no memory yet. *One request.*"""

    def __init__(self, laid: Laid) -> None:
        self._laid = laid
        layout: AnswerLayout = laid.layout
        self.text_bytes = len(layout.text)
        self.memory_bytes = layout.size - self.text_bytes
        self.device_id = laid.device_id
        self.wants_report = layout.wants_report
        self.held_bytes = layout.scratch_bytes + (0 if layout.text else layout.held_bytes)
        self._inference: Inference | None = None
        # What `Placed` counts before there is memory: keys and bags.
        self.batch = layout.batch(laid.inputs, [np.empty((0, keys.dim), np.float32) for keys in layout.ranges], ())
        self.batch.poolings = laid.poolings

    def place(self, memory: np.ndarray) -> None:
        self._inference = self._laid.inference(memory)
        self.batch = self._inference.batch

    def encoded(self, report: LookupBreakdown | None, device: int) -> EncodedAnswer:
        inference = self._inference
        if inference is None:
            raise RuntimeError("the answer has no memory")
        inference.device_id = device
        inference.convert()
        if (whole := inference.binary_answer) is not None:
            return EncodedAnswer((), whole[:1], whole[1])
        pieces, binary = inference.encode(report)
        text = [*pieces]
        return EncodedAnswer(text, binary, sum(map(len, text)) if binary else None)


def _address(array: Any) -> int:
    return int(array.ctypes.data)
