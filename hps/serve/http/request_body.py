"""Decompresses and parses request bodies within limits."""

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from hps.errors import InvalidInputError
from hps.serve.http.http_answer import RequestError
from hps.serve.protocol.request_checks import parse_object

_Object = TypeVar("_Object", bound=BaseModel)
MOST_OBJECT_BYTES = 1 << 20
"""Maximum size of a body other than a lookup's or rows."""

_ENCODINGS = (b"identity", b"gzip", b"x-gzip", b"deflate")  # RFC 9110, section 8.4.1
_GZIP = b"\x1f\x8b"
_MOST_MEMBERS = 4096  # of a gzip stream (RFC 1952, section 2.2): even an empty one takes some 10 us
_COMPRESSED_BYTES, _INFLATED_BYTES = 1 << 16, 1 << 20  # per step
_MOST_INFLATION = 1032  # of deflate: https://zlib.net/zlib_tech.html


def too_large(got: str, limit: int) -> RequestError:
    cure = "" if limit == MOST_OBJECT_BYTES else " (service.max_body_bytes); send fewer keys"
    return RequestError(413, f"reading the request: {got}, expected at most {limit}{cure}")


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raise RequestError, 415, if the compression of a body is not supported."""
    if (encoding := _encoding(headers)) not in _ENCODINGS:
        got = f"got Content-Encoding {encoding.decode('latin-1')[:40]!r}"
        raise RequestError(415, f"reading the request: {got}, expected gzip, deflate or none")


def inflated_bytes(body: bytes | bytearray, max_bytes: int) -> int:
    """Return an upper bound on the memory of `inflate`."""
    return min(_MOST_INFLATION * len(body), max_bytes)


def inflate(headers: Mapping[bytes, bytes], body: bytes | bytearray, max_bytes: int) -> bytes | bytearray:
    """Decompress a body with a Content-Encoding.

    Raises:
        RequestError: 413, it decompresses to more than the limit; no more than that is allocated.
        InvalidInputError: it does not match its headers.
    """
    if _encoding(headers) == b"identity":
        return body
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
    decompressed = bytearray()  # filled in pieces, since zlib itself would allocate two copies
    taken, members = 0, 1
    try:
        while taken < len(body):
            if decompressor.eof:
                if not (body.startswith(_GZIP) and body.startswith(_GZIP, taken) and members < _MOST_MEMBERS):
                    break
                decompressor, members = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), members + 1
            piece: bytes | memoryview = memoryview(body)[taken : taken + _COMPRESSED_BYTES]
            taken += len(piece)
            full = True
            while full and not decompressor.eof:
                most = min(_INFLATED_BYTES, max_bytes + 1 - len(decompressed))
                inflated = decompressor.decompress(piece, most)
                decompressed += inflated
                if len(decompressed) > max_bytes:
                    raise too_large("it decompresses to more", max_bytes)
                piece, full = decompressor.unconsumed_tail, len(inflated) == most
            taken -= len(decompressor.unused_data)  # it belongs to the next member
    except zlib.error as error:
        raise InvalidInputError(f"decompressing the request: {error}") from error
    left = len(body) - taken
    if not decompressor.eof or left:
        found = "is cut short" if not decompressor.eof else f"ends {left} bytes before the body"
        raise InvalidInputError(f"decompressing the request: the compressed stream {found}")
    return decompressed


def _encoding(headers: Mapping[bytes, bytes]) -> bytes:
    return headers[b"content-encoding"].strip().lower()


async def read_object(request: Request, kind: type[_Object]) -> _Object:
    """Read the small JSON body of a request other than a lookup, ignoring its content type. An empty body is an empty object.

    Raises:
        InvalidInputError: the body is not of this kind.
    """
    body = await request.body()
    try:
        return kind.model_validate(parse_object(body) if body.strip() else {}, strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, found['loc']))}: {found['msg']}, got {str(found['input'])[:40]!r}" for found in error.errors()
        ]
        raise InvalidInputError(f"reading the request: {'; '.join(problems)}"[:2000]) from error


def described_object(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body `read_object` reads."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
