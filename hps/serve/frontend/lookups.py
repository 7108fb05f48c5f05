"""Lookups as a frontend posts them: makes descriptors from requests, and answers from vectors."""

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from hps.ground.http1 import answer_head
from hps.ground.memory.bounded_cache import BoundedCache
from hps.regions.layout import (
    HEADER_BYTES,
    POOLED,
    SEGMENT_WORDS,
    TRACED,
    Memory,
)
from hps.serve.frontend.answers import HEAD_BYTES, SCRATCH_BYTES, EncodedAnswer, Plan
from hps.serve.frontend.scores import score_plan, up
from hps.serve.http.http_answer import BINARY
from hps.serve.logs.lookup_report import LookupBreakdown
from hps.serve.protocol.json_lookup import JSONLookup
from hps.serve.protocol.open_inference import AnswerLayout, Inference, ReadRequest, read_request
from hps.serve.protocol.open_inference_header import CACHED_BYTES, InferenceHeader, remembered_bytes
from hps.serve.protocol.request_checks import ModelTables
from hps.serve.protocol.score_requests import ScoreHeader, score_header

TRACE_BYTES: Final = 65_536
_KEYS_ALIGNED, _VECTORS_ALIGNED = 64, 128
_WORDS = struct.Struct("<5q")  # id of the deployment, flags, segments, scratch, its bytes (`regions/layout.py`)


@dataclass(frozen=True, eq=False, slots=True)
class CachedRequest:
    """The parsed JSON part of a request to a version of a model. *Immutable*, and shared by requests."""

    # This is the only memo of a frontend. Its key is everything that decides the entry: the text, the keys per table if an
    # input states them, the tables, and the limit on keys. Rights depend on the head, and are checked for each request.
    # The memo is bounded in bytes and not in entries, since clients choose how long a text is and how many there are: a
    # thousand entries may be a megabyte or a gigabyte.

    lookup: ReadRequest | None
    scores: ScoreHeader | None = None  # exactly one of both is set
    plan: Plan | None = None  # None if the body has to be decoded


def read_cached(text: bytes, counts: tuple[int, ...] | None, model: ModelTables, max_keys: int) -> CachedRequest:
    """Read the JSON part of a request, or return it from the cache.

    Raises:
        HPSError: as `open_inference.read_request` and `score_header`.
    """
    return (_cached if len(text) <= CACHED_BYTES else _read)(text, counts, model, max_keys)


def read_lookup(text: bytes, counts: tuple[int, ...] | None, model: ModelTables, max_keys: int) -> ReadRequest:
    found = read_cached(text, counts, model, max_keys).lookup
    if found is None:
        raise RuntimeError("a request for scores is read as a lookup")
    return found


def _read(text: bytes, counts: tuple[int, ...] | None, model: ModelTables, max_keys: int) -> CachedRequest:
    if model.network is not None and (scores := score_header(text, model.network)) is not None:
        return CachedRequest(None, scores, score_plan(scores, model, model.network, max_keys))
    lookup = header, layout = read_request(text, counts, model, max_keys)
    if layout is None or not layout.text or layout.device_place or header.numkeys is not None or header.bags:
        return CachedRequest(lookup)
    for tensor in header.inputs.values():
        if tensor.start < 0 or tensor.dtype.itemsize != 8:
            return CachedRequest(lookup)
    return CachedRequest(lookup, None, _plan_of(header, layout))


def _plan_of(header: InferenceHeader, layout: AnswerLayout) -> Plan:
    tensors = list(header.inputs.values())
    keys_at = HEADER_BYTES + 8 * SEGMENT_WORDS * len(layout.ranges) + SCRATCH_BYTES
    keys_at += -keys_at % _KEYS_ALIGNED
    vectors_at = keys_at + header.binary_size + HEAD_BYTES + len(layout.text)
    vectors_at += -vectors_at % _VECTORS_ALIGNED
    start_at = vectors_at - len(layout.text)
    out, mask, count = start_at + layout.lookup_at, vectors_at + layout.vectors_size, len(layout.ranges)
    words = [0, 0, count, HEADER_BYTES + 8 * SEGMENT_WORDS * count, SCRATCH_BYTES]  # without the deployment's id
    words += [0] * (HEADER_BYTES // 8 - len(words))
    numbers = []
    for key_range in layout.ranges:
        count = key_range.stop - key_range.start
        words += [
            key_range.table,
            count,
            keys_at + tensors[key_range.source].start + 8 * key_range.start,
            out,
            mask if key_range.masked else 0,
        ]
        numbers.append(("<f4", out, count * key_range.dim))
        out += key_range.step
        mask += count if key_range.masked else 0
    headers = BINARY, (b"inference-header-content-length", b"%d" % len(layout.text))
    answer = answer_head(200, headers, layout.answer_size, b"").removesuffix(b"\r\n\r\n")
    return Plan(
        struct.pack(f"<{len(words)}q", *words),
        keys_at,
        header.binary_size,
        layout.text,
        vectors_at,
        start_at + layout.answer_size,
        start_at + layout.size,
        header.device_id,
        answer,
        header.binary_size // 8,
        layout if layout.converts else None,
        tuple(numbers),
    )


def _request_bytes(request: CachedRequest, text: bytes, counts: tuple[int, ...] | None, *others: object) -> int:
    size = 40 * len(counts or ())
    if (scores := request.scores) is not None:
        parts = len(scores.inputs) + len(scores.outputs) + len(scores.sizes)
        size += remembered_bytes(text, parts, scores.inputs)
    if request.lookup is not None:
        header, layout = request.lookup
        parts = len(header.inputs) + len(header.requested or ()) + len(header.bag_options)
        if layout is not None:
            parts += 2 * len(layout.ranges) + len(layout.outputs)
            size += 1000 + 6 * len(text) + len(layout.text)
        size += remembered_bytes(text, parts, header.inputs)
    if (plan := request.plan) is not None:
        size += 1000 + len(plan.descriptor) + len(plan.text) + len(plan.answer) + 200 * len(plan.numbers)
    return size


_cached = BoundedCache(_read, _request_bytes)


class Placed:
    """A request without a plan, laid out for a slot. *One request.*

    Args:
        request: a decoded lookup or inference whose answer has no memory yet.
        traced: whether the engine shall trace it.

    Attributes:
        size: bytes of the slot.
        keys: number of keys.
    """

    def __init__(self, request: "JSONLookup | Inference", traced: bool) -> None:
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
        self._scratch_at = up(at, 64)
        text = orjson.dumps(self._bags) if self._pooled else b""
        self._scratch_bytes = max(TRACE_BYTES if traced else SCRATCH_BYTES, 2 * len(text) + 4096 * self._pooled)
        self._vectors_at = up(self._scratch_at + self._scratch_bytes + HEAD_BYTES + request.text_bytes, _VECTORS_ALIGNED)
        self.size = self._vectors_at + request.memory_bytes
        self.slot = 0

    def write(self, memory: Memory, slot: int, deployment_id: int) -> None:
        """Write descriptor and keys to a slot, and place the answer there."""
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
        _WORDS.pack_into(
            head, 0, deployment_id, self._flags, len(words) // SEGMENT_WORDS, self._scratch_at, self._scratch_bytes
        )
        descriptor = bytes(head) + struct.pack(f"<{len(words)}q", *words)
        view[slot : slot + len(descriptor)] = descriptor
        if self._pooled:
            text = orjson.dumps(self._bags)
            view[slot + self._scratch_at : slot + self._scratch_at + len(text) + 1] = text + b"\0"

    def arrays(self, memory: Memory, slot: int) -> list[npt.NDArray[Any]]:
        """Return the vectors in the slot; views of its memory."""
        return list(self._request.batch.outs)

    def encode(self, report: LookupBreakdown | None, device: int) -> EncodedAnswer:
        request = self._request
        if isinstance(request, Inference):
            request.device_id = device
            request.convert()
            if (whole := request.binary_answer) is not None:
                return EncodedAnswer((), whole[:1], whole[1])
        pieces, binary = request.encode(report)
        text = [*pieces]
        return EncodedAnswer(text, binary, sum(map(len, text)) if binary else None)


def _address(array: Any) -> int:
    return int(array.ctypes.data)
