"""The bytes of requests and replies, without a server."""

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, TableWidthError
from hps.stores.redis.requests import Buffer, Call, FetchRows, SendKeys, StoreRows

KEYS = np.array([1, -1, 0x0A0D0A0D2A24, 7], np.int64)  # the third reads $*CRLFCRLF
ORDER = np.array([2, 0], np.int64)
VECTORS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)
FIELD_1 = b"$8\r\n\x01\0\0\0\0\0\0\0\r\n"
FIELD_3 = b"$8\r\n$*\r\n\r\n\0\0\r\n"
HEADER = np.frombuffer(b"$8\r\n", np.uint8)


def written(request):
    buffer = Buffer(4)
    buffer.grow(request.size, 0)
    end = request.write(buffer, 0)
    assert end <= request.size
    return buffer.array[:end].tobytes()


def fetch(order=ORDER):
    out, found = np.zeros((4, 8), np.uint8), np.zeros(4, np.bool_)
    return FetchRows(0, b"k", KEYS, order, HEADER, out, found), out, found


def read(request, reply):
    return request.read(np.frombuffer(reply, np.uint8), 0, len(reply))


EVAL = ("EVAL", "return 1", 1, b"k")
FLOATS_3, FLOATS_1 = b"$8\r\n\0\0\xa0@\0\0\xc0@\r\n", b"$8\r\n\0\0\x80?\0\0\0@\r\n"  # 5.0, 6.0; 1.0, 2.0


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Call(0, "GET", b"k", 12), b"*3\r\n$3\r\nGET\r\n$1\r\nk\r\n$2\r\n12\r\n"),
        (fetch()[0], b"*4\r\n$5\r\nHMGET\r\n$1\r\nk\r\n" + FIELD_3 + FIELD_1),
        (
            StoreRows(0, b"k", KEYS, ORDER, HEADER, VECTORS.view(np.uint8)),
            b"*6\r\n$4\r\nHSET\r\n$1\r\nk\r\n" + FIELD_3 + FLOATS_3 + FIELD_1 + FLOATS_1,
        ),
        (SendKeys(0, ("HDEL", b"k"), KEYS, ORDER), b"*4\r\n$4\r\nHDEL\r\n$1\r\nk\r\n" + FIELD_3 + FIELD_1),
        (
            SendKeys(0, ("HSET", b"k"), KEYS, ORDER, b"now"),
            b"*6\r\n$4\r\nHSET\r\n$1\r\nk\r\n" + FIELD_3 + b"$3\r\nnow\r\n" + FIELD_1 + b"$3\r\nnow\r\n",
        ),
        (SendKeys(0, EVAL, KEYS, ORDER), b"*6\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n1\r\n$1\r\nk\r\n" + FIELD_3 + FIELD_1),
    ],
)
def test_requests_have_the_bytes_that_redis_expects(request_, expected):
    assert written(request_) == expected


NO_ARRAYS = [
    b"*3\r\n",
    b"*-1\r\n",
    b"*x\r\n",
    b"+OK\r\n",
    b":2\r\n",
    b"$8\r\n",
    b"*2\r\n:1\r\n",
    b"*2\r\n*1\r\n",
    b"*" + b"2" * 30,
]
VALUES = [b":1\r\n", b"*1\r\n", b"$-2\r\n", b"$\r\n", b"$08\r\nAAAAAAAA\r\n", b"$8\r\nAAAAAAAAxx", b"$8\nAAAAAAAA\r\n"]
VALUES += [b"$999999999999999999999\r\n"]


@pytest.mark.parametrize("reply", [*NO_ARRAYS, *(b"*2\r\n" + value for value in VALUES)])
def test_other_bytes_are_no_reply(reply):
    request, _, found = fetch()
    with pytest.raises(DatabaseCorruptError, match="expected"):
        read(request, reply)
    assert not found.any()


@pytest.mark.parametrize(
    ("length", "error"), [(4, TableWidthError), (12, TableWidthError), (7, DatabaseCorruptError), (0, DatabaseCorruptError)]
)
def test_a_value_of_another_length_names_its_key(length, error):
    request, _, found = fetch()
    with pytest.raises(error, match=rf"key {KEYS[2]} .*\b{length} bytes, expected 8"):
        read(request, b"*2\r\n$%d\r\n%b\r\n" % (length, b"A" * length))
    assert not found.any()
