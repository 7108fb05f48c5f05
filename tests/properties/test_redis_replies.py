"""Replies arrive in pieces of any size: however they are cut, the same rows come out, and no row before it is whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hps.databases.redis.commands import Ask, request
from hps.databases.redis.row_commands import FetchRows
from hps.databases.redis.scan import KeySet
from hps.errors import DatabaseError

values = st.lists(st.one_of(st.none(), st.binary(min_size=12, max_size=12)), min_size=1, max_size=40)
cuts = st.lists(st.integers(1, 60), min_size=1, max_size=200)
keys = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), max_size=300)

leaves = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30))
replies = st.recursive(leaves, st.lists, max_leaves=20)


def reply_of(rows):
    return b"*%d\r\n" % len(rows) + b"".join(b"$-1\r\n" if row is None else b"$12\r\n%b\r\n" % row for row in rows)


def command_for(rows, order):
    out, found = np.zeros((len(rows), 12), np.uint8), np.zeros(len(rows), np.bool_)
    asked = np.arange(len(rows), dtype=np.int64)
    return FetchRows(0, b"", asked, np.array(order, np.int64), np.frombuffer(b"$12\r\n", np.uint8), out, found), out, found


def feed(command, reply, sizes):
    """Give a reply in pieces, as a connection does: what was read is not given again."""
    array, at, end = np.frombuffer(reply, np.uint8), 0, 0
    for i in range(10**6):
        at = command.read(array, at, end)
        yield at, end
        if end == array.size:
            return
        end = min(array.size, end + sizes[i % len(sizes)])


@given(values, cuts, st.randoms())
def test_rows_come_out_however_the_reply_is_cut(rows, sizes, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    command, out, found = command_for(rows, order)
    asked = [rows[i] for i in order]
    reply = reply_of(asked)
    behind = reply + b"$-1\r\n"  # the beginning of the next reply
    for at, end in feed(command, behind, sizes):
        assert at <= min(end, len(reply))
        if end < len(reply):
            assert not command.done
        for row, place in zip(asked, order, strict=True):
            assert not found[place] or out[place].tobytes() == row
    assert command.done
    assert at == len(reply)
    assert [out[i].tobytes() if found[i] else None for i in range(len(rows))] == rows
    assert command.hits == sum(row is not None for row in rows)


@given(values, cuts, st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_gives_no_row_that_was_not_sent(rows, sizes, where, byte):
    """A byte of a header that is changed ends in an error, or in a reply that goes on; never in a shifted row."""
    reply = bytearray(reply_of(rows))
    heads = [i for i in range(len(reply)) if not any(start <= i < start + 12 for start in _starts(rows))]
    reply[heads[where % len(heads)]] = byte
    command, out, found = command_for(rows, range(len(rows)))
    try:
        for _ in feed(command, bytes(reply), sizes):
            pass
    except DatabaseError:
        pass
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


@given(replies, cuts)
def test_any_reply_is_found_whole_however_it_is_cut(value, sizes):
    reply = _encode(value)
    command = Ask(0, request(b"X"))
    for at, end in feed(command, reply + b"+next\r\n"[:3], sizes):
        if command.done:
            break
        assert at == 0
        assert end < len(reply)
    assert at == len(reply)
    assert command.reply == value


def _encode(value):
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(_encode, value))


@given(st.lists(keys, max_size=8))
def test_a_set_of_keys_says_once_that_a_key_is_new(batches):
    seen, keys_seen = set(), KeySet()
    for batch in batches:
        new = keys_seen.add(np.array(batch, np.int64))
        for key, is_new in zip(batch, new, strict=True):
            assert is_new == (key not in seen)
            seen.add(key)
