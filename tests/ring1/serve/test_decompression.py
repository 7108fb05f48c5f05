import gzip
import tracemalloc
import zlib

import numpy as np
import pytest

from hps.errors import InvalidInputError
from hps.serve.http.http_answer import RequestError
from hps.serve.http.request_body import inflate, inflated_bytes

DEFLATE = {b"content-encoding": b"deflate"}


def test_no_more_than_the_limit_is_decompressed():
    body = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="decompresses to more"):
            inflate(DEFLATE, body, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 99_999, 100_000])
def test_a_body_up_to_the_limit_is_decompressed_into_the_memory_that_was_held(size):
    body = zlib.compress(bytes(size))
    assert inflate(DEFLATE, body, 100_000) == bytes(size)
    assert size <= inflated_bytes(body, 100_000) <= 100_000


@pytest.mark.parametrize("sizes", [(5, 7), (0, 0, 3), (70_000, 20_000, 0), (90_000, 10_000), (90_000, 10_001)])
def test_members_of_a_gzip_stream_are_one_body_within_the_limit(sizes):
    parts = [np.random.default_rng(0).bytes(size) for size in sizes]
    body = b"".join(map(gzip.compress, parts))
    for encoding in (b"gzip", b"x-gzip"):
        headers = {b"content-encoding": encoding}
        if sum(sizes) <= 100_000:
            assert inflate(headers, body, 100_000) == b"".join(parts)
            for wrong in (body + b"x", body + gzip.compress(b"x")[:-1], body + zlib.compress(b"x")):
                with pytest.raises(InvalidInputError, match="decompressing the request"):
                    inflate(headers, wrong, 100_001)
        else:
            with pytest.raises(RequestError, match="decompresses to more"):
                inflate(headers, body, 100_000)


def test_a_gzip_stream_has_a_bounded_number_of_members():
    empty = gzip.compress(b"")
    assert inflate({b"content-encoding": b"gzip"}, 4096 * empty, 10) == b""
    with pytest.raises(InvalidInputError, match=f"ends {len(empty)} bytes before the body"):
        inflate({b"content-encoding": b"gzip"}, 4097 * empty, 10)


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: body + b"x", lambda body: b"\xff" + body])
def test_what_is_no_complete_stream_is_refused(change):
    with pytest.raises(InvalidInputError, match="decompressing the request"):
        inflate(DEFLATE, change(zlib.compress(b"some body")), 100_000)


def test_identity_is_no_compression():
    assert inflate({b"content-encoding": b" Identity "}, b"body", 1) == b"body"
