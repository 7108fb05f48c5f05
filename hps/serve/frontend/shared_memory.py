"""Tensors in shared memory: a frontend translates such a request into one with binary tensors, and moves the bytes itself."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import orjson

from hps.errors import InvalidInputError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.frontend.answers import EncodedAnswer
from hps.serve.http.shared_memory import Region, check_local, open_segment
from hps.serve.protocol.open_inference_header import CACHED_BYTES, remembered_bytes
from hps.serve.protocol.request_checks import kind_of, parse_object
from hps.serve.protocol.score_requests import DATATYPES

MARK: Final = b'"shared_memory_region"'
_SIZES: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in DATATYPES.items()}
_PLACE: Final = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


class Place(NamedTuple):
    """A part of a region, in bytes."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class Translation:
    """The translation of a request into one without shared memory. *Immutable.*"""

    text: bytes  # JSON part of the translation
    inputs: tuple[Place | int, ...]  # place of each binary input, or its size if it was sent
    outputs: Mapping[str, Place]  # by name

    def bytes_for(self, text: bytes) -> int:
        """Return an upper bound on the bytes of the translation and of the original text."""
        return 2 * len(self.text) + remembered_bytes(text, len(self.inputs) + len(self.outputs))

    @property
    def sent_bytes(self) -> int:
        return sum(input_ for input_ in self.inputs if isinstance(input_, int))


class SharedTensors(NamedTuple):
    """The tensors of one request. *Immutable.*"""

    translation: Translation
    sent: memoryview  # binary part of the request

    @property
    def text(self) -> bytes:
        return self.translation.text

    @property
    def size_bytes(self) -> int:
        return sum(input_ if isinstance(input_, int) else input_.size for input_ in self.translation.inputs)


def shared_tensors(
    body: bytes | bytearray, header_length: int | None, client: str, headers: Mapping[bytes, bytes]
) -> SharedTensors | None:
    """Find the tensors in shared memory of a request; None if there are none.

    Raises:
        RequestError: 403, the client may be on another machine.
        InvalidInputError: parameters are wrong, or the binary part has another size.
    """
    text = bytes(body[:header_length])
    if MARK not in text:
        return None
    check_local(client, headers)
    translation, sent = translate(text), memoryview(body)[len(text) :]
    if len(sent) != translation.sent_bytes:
        raise InvalidInputError(f"reading the request: got {len(sent)} bytes of binary data, expected {translation.sent_bytes}")
    return SharedTensors(translation, sent)


def translate(text: bytes) -> Translation:
    return _cached(text) if len(text) <= CACHED_BYTES else _translate(text)


def _translate(text: bytes) -> Translation:
    request = parse_object(text)
    inputs: list[Place | int] = []
    tensors: list[Any] = []
    given = request.get("inputs")
    for tensor in given if type(given) is list else []:
        if (place := _place(tensor, "inputs", len(tensors))) is None:
            size = _parameters(tensor).get("binary_data_size")
            if type(size) is int and size >= 0:
                inputs.append(size)
            tensors.append(tensor)
            continue
        shape, width = tensor.get("shape"), _SIZES.get(str(tensor.get("datatype")))
        size = prod(shape) * width if width and type(shape) is list and {int}.issuperset(map(type, shape)) else -1
        if not 0 <= size <= place.size:
            raise InvalidInputError(
                f"reading inputs[{len(tensors)}]: got shared_memory_byte_size {place.size}, expected the size of its tensor, "
                f"{size} bytes"
            )
        inputs.append(place._replace(size=size))
        tensors.append({**tensor, "parameters": {"binary_data_size": size}})
    outputs: dict[str, Place] = {}
    requested: list[Any] = []
    given = request.get("outputs")
    for tensor in given if type(given) is list else []:
        if (place := _place(tensor, "outputs", len(requested))) is None:
            requested.append(tensor)
            continue
        outputs[str(tensor.get("name"))] = place
        others = {name: value for name, value in _parameters(tensor).items() if name not in _PLACE}
        requested.append({**tensor, "parameters": {**others, "binary_data": True}})
    members = {**request, "inputs": tensors}
    if requested:
        members["outputs"] = requested
    return Translation(orjson.dumps(members), tuple(inputs), outputs)


_cached = BoundedCache(_translate, lambda found, text: found.bytes_for(text))


def _parameters(tensor: Any) -> dict[str, Any]:
    found = tensor.get("parameters") if type(tensor) is dict else None
    return found if type(found) is dict else {}


def _place(tensor: Any, kind: str, number: int) -> Place | None:
    parameters = _parameters(tensor)
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    offset, size = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size")
    if type(region) is not str or type(offset) is not int or type(size) is not int or min(offset, size) < 0:
        got = f"{kind_of(region)}, {kind_of(offset)} and {kind_of(size)}"
        raise InvalidInputError(
            f"reading {kind}[{number}]: shared_memory_region, shared_memory_offset and shared_memory_byte_size are {got}, "
            "expected a string and integers of at least 0"
        )
    return Place(region, offset, size)


class Segments:
    """The segments that a frontend has opened. *One per event loop.*"""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._open: dict[tuple[int, int], int] = {}

    def update(self, published: Sequence[Mapping[str, Any]]) -> None:
        """Use the regions that the engine has published; close the segments of others."""
        self._regions = {region["name"]: Region(**{**region, "identity": tuple(region["identity"])}) for region in published}
        used = {region.identity for region in self._regions.values()}
        for identity in self._open.keys() - used:
            os.close(self._open.pop(identity))

    def body_of(self, shared: SharedTensors) -> bytearray:
        """Return the body of a request as if all of it had been sent."""
        body = bytearray(len(shared.text) + shared.size_bytes)
        body[: len(shared.text)] = shared.text
        self.read(shared, memoryview(body)[len(shared.text) :])
        return body

    def read(self, shared: SharedTensors, keys: memoryview) -> None:
        """Read the binary part of a request: each input from its region, or from the bytes that were sent."""
        at = taken = 0
        for input_ in shared.translation.inputs:
            size = input_ if isinstance(input_, int) else input_.size
            target = keys[at : at + size]
            if isinstance(input_, int):
                target[:] = shared.sent[taken : taken + size]
                taken += size
            else:
                descriptor, offset = self._locate(input_)
                if os.preadv(descriptor, [target], offset) != size:
                    raise _shorter(input_)
            at += size

    def write(self, place: Place, tensor: memoryview) -> None:
        """Write an output; raise InvalidInputError if it does not fit, or the segment has become shorter."""
        if len(tensor) > place.size:
            raise InvalidInputError(
                f"shared memory size specified with the request ({place.size} bytes) should be at least {len(tensor)} bytes"
            )
        descriptor, offset = self._locate(place)
        if os.fstat(descriptor).st_size < offset + len(tensor):
            raise _shorter(place)
        try:
            written = os.pwritev(descriptor, [tensor], offset)
        except OSError as error:  # no room in /dev/shm for pages that the client never touched
            raise InvalidInputError(f"writing to shared memory region {place.region!r}: {error.strerror}") from error
        if written != len(tensor):
            raise _shorter(place)

    def _locate(self, place: Place) -> tuple[int, int]:
        region = self._regions.get(place.region)
        if region is None:
            raise InvalidInputError(f"Unable to find shared memory region: '{place.region[:120]}'; register it (again)")
        if place.offset + place.size > region.byte_size:
            raise InvalidInputError(f"Invalid offset + byte size for shared memory region: '{place.region[:120]}'")
        descriptor = self._open.get(region.identity)
        if descriptor is None:
            descriptor, found = open_segment(region.key)
            if (found.st_dev, found.st_ino) != region.identity:
                os.close(descriptor)
                raise InvalidInputError(
                    f"opening shared memory region {place.region!r}: its segment was replaced; register it again"
                )
            self._open[region.identity] = descriptor
        return descriptor, region.offset + place.offset

    def without_shared(self, shared: SharedTensors, answer: EncodedAnswer) -> EncodedAnswer:
        """Move the requested outputs of a binary answer to shared memory, and return the answer without them."""
        head = b"".join(answer.text)
        pieces = list(answer.binary)
        if not head:
            size = answer.text_bytes
            head, pieces[0] = bytes(pieces[0][:size]), pieces[0][size:]
        changed, moves = (_cached_moves if len(head) <= CACHED_BYTES else _moves)(shared.translation, head)
        left = []
        for place, size in moves:
            if size and not pieces[0]:
                pieces.pop(0)
            tensor, pieces[:1] = pieces[0][:size], [pieces[0][size:]]
            if place is not None:
                self.write(place, tensor)
            elif size:
                left.append(tensor)
        return EncodedAnswer((changed,), left, len(changed) if left else None)


def _moves(translation: Translation, head: bytes) -> tuple[bytes, Sequence[tuple[Place | None, int]]]:
    """Change the JSON part of an answer; also return the places (None: in the answer) and sizes of its outputs."""
    document, moves = orjson.loads(head), []
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        place = translation.outputs.get(output["name"])
        if place is not None:
            parameters = {"shared_memory_region": place.region, "shared_memory_offset": place.offset}
            output["parameters"] = {**parameters, "shared_memory_byte_size": size}
        moves.append((place, size))
    return orjson.dumps(document), moves


def _moves_bytes(moves: tuple[bytes, Sequence[object]], translation: Translation, head: bytes) -> int:
    return translation.bytes_for(head) + 400 * len(moves[1])


_cached_moves = BoundedCache(_moves, _moves_bytes)


def _shorter(place: Place) -> InvalidInputError:
    return InvalidInputError(f"using shared memory region {place.region!r}: its segment has become shorter than registered")
