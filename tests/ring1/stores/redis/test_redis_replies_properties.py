"""Replies arrive in pieces of any size: however they are cut, the same rows come out, and no row before it is whole."""

import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import MovedError, RedisError

from hps.errors import DatabaseError
from hps.stores.redis.connections import ReplyParser, until
from hps.stores.redis.requests import FetchRows, GetMark
from tests.fakes.clock import Clock

rows_lists = st.lists(st.one_of(st.none(), st.binary(min_size=12, max_size=12)), min_size=1, max_size=40)
cuts = st.lists(st.integers(1, 60), min_size=1, max_size=200)
keys = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), max_size=300)

leaves = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30))
values = st.recursive(leaves, st.lists, max_leaves=20)


class Pieces:
    """A socket on which bytes arrive in pieces, and then nothing more."""

    def __init__(self, data, sizes):
        self.left = data
        self.sizes = sizes
        self.turn = 0

    def settimeout(self, timeout):
        assert timeout > 0

    def recv_into(self, view):
        size = min(self.sizes[self.turn % len(self.sizes)], len(view), len(self.left))
        self.turn += 1
        view[:size], self.left = self.left[:size], self.left[size:]
        return size


def parser_of(data, sizes):
    parser = ReplyParser(10.0)
    parser.on_connect(SimpleNamespace(socket=Pieces(data, sizes)))
    parser.waiting_since = time.monotonic()
    return parser


def request_for(rows, order):
    out, found = np.zeros((len(rows), 12), np.uint8), np.zeros(len(rows), np.bool_)
    asked = np.arange(len(rows), dtype=np.int64)
    return FetchRows(0, b"k", asked, np.array(order, np.int64), np.frombuffer(b"$12\r\n", np.uint8), out, found), out, found


def reply_of(value):
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(reply_of, value))


@given(rows_lists, values, values, cuts, st.randoms())
def test_rows_come_out_between_other_replies_however_they_are_cut(rows, before, after, sizes, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    request, out, found = request_for(rows, order)
    replies = [reply_of(before), b"-MOVED 7 h:1\r\n", reply_of([rows[i] for i in order]), reply_of(after)]
    parser = parser_of(b"".join(replies), sizes)
    assert parser.read(None, last=False) == before
    assert isinstance(parser.read(request, last=False), MovedError)  # Redis refuses it, and gets it again
    assert parser.read(request, last=False) == sum(row is not None for row in rows)
    assert [out[i].tobytes() if found[i] else None for i in range(len(rows))] == rows
    assert parser.read(None, last=True) == after


@given(st.one_of(st.none(), st.just(b"0123"), st.binary(max_size=6)), values, cuts)
def test_a_mark_is_read_whether_it_is_the_expected_one_or_not(mark, after, sizes):
    parser = parser_of(reply_of(mark) + reply_of(after), sizes)
    assert parser.read(GetMark(0, b"k", b"0123"), last=False) == mark
    assert parser.read(None, last=True) == after


@given(rows_lists, cuts, st.integers(0, 10**6))
def test_a_row_is_marked_when_it_is_whole(rows, sizes, stop):
    reply = reply_of(rows)
    request, out, found = request_for(rows, range(len(rows)))
    parser = parser_of(reply[: stop % len(reply)], sizes)
    with pytest.raises(RedisError, match="closed"):
        parser.read(request, last=False)
    for i, row in enumerate(rows):
        assert not found[i] or out[i].tobytes() == row


@given(rows_lists, cuts, st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_gives_no_row_that_was_not_sent(rows, sizes, where, byte):
    """A byte of a header that is changed ends in an error, or in a reply that goes on; never in a shifted row."""
    reply = bytearray(reply_of(rows))
    heads = [i for i in range(len(reply)) if not any(start <= i < start + 12 for start in _starts(rows))]
    reply[heads[where % len(heads)]] = byte
    request, out, found = request_for(rows, range(len(rows)))
    parser = parser_of(bytes(reply), sizes)
    with suppress(DatabaseError, RedisError):
        parser.read(request, last=False)
    for i, row in enumerate(rows):
        assert not found[i] or out[i].tobytes() == row


def _starts(rows):
    at = len(b"*%d\r\n" % len(rows))
    for row in rows:
        if row is None:
            at += 5
        else:
            yield at + 5
            at += 5 + 12 + 2


def test_a_new_connection_knows_nothing_of_the_last_one():
    request, _, found = request_for([bytes(12)], [0])
    parser = parser_of(b"", [1])
    with pytest.raises(RedisError, match="closed"):
        parser.read(request, last=False)
    parser.on_connect(SimpleNamespace(socket=Pieces(b"+OK\r\n", [9])))
    assert parser.read_response() == b"OK"
    assert not found.any()


@pytest.mark.parametrize(("each_s", "time_s", "reason"), [(0.9, 5.0, "when the call timed out"), (1.1, 50.0, "silent for 1 s")])
def test_a_reply_that_drips_or_stops_ends_with_the_time_of_the_call_or_of_silence(monkeypatch, each_s, time_s, reason):
    clock = Clock()
    monkeypatch.setattr("hps.stores.redis.connections.time", SimpleNamespace(monotonic=clock))

    class Slow(Pieces):
        def settimeout(self, timeout):
            self.timeout = timeout

        def recv_into(self, view):
            clock.now += min(each_s, self.timeout)
            if each_s > self.timeout:
                raise TimeoutError
            return super().recv_into(view)

    parser = ReplyParser(1.0)
    parser.on_connect(SimpleNamespace(socket=Slow(reply_of([bytes(12)] * 9), [1])))
    parser.waiting_since = clock.now
    request, _, _ = request_for([bytes(12)] * 9, range(9))
    with until(time_s), pytest.raises(RedisError, match=reason):
        parser.read(request, last=True)
    assert clock.now <= time_s
