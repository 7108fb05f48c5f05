"""The bytes of requests and replies, without a server."""

import numpy as np
import pytest

from hps.databases.redis.commands import Ask, Buffer, CheckMark, bulk, request
from hps.databases.redis.replies import elements, parse
from hps.databases.redis.row_commands import FetchRows, Increments, StoreRows, WriteCounts, WriteFields
from hps.errors import DatabaseCorruptError, TableWidthError

KEYS = np.array([1, -1, 0x0A0D0A0D2A24, 7], np.int64)  # the third reads $*CRLFCRLF
ORDER = np.array([2, 0], np.int64)
VECTORS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)
FIELD_1 = b"$8\r\n\x01\0\0\0\0\0\0\0\r\n"
FIELD_3 = b"$8\r\n$*\r\n\r\n\0\0\r\n"


def written(command):
    buffer = Buffer(4)
    buffer.grow(command.size, 0)
    end = command.write(buffer, 0)
    assert end <= command.size
    return buffer.array[:end].tobytes()


def fetch(out=None, found=None, order=ORDER, width=8):
    out = np.zeros((4, width), np.uint8) if out is None else out
    found = np.zeros(4, np.bool_) if found is None else found
    header = np.frombuffer(b"$%d\r\n" % width, np.uint8)
    return FetchRows(0, bulk(b"HMGET") + bulk(b"k"), KEYS, order, header, out, found), out, found


def read(command, reply):
    array = np.frombuffer(reply, np.uint8)
    return command.read(array, 0, array.size)


def test_vectors_are_asked_for_by_the_raw_bytes_of_their_keys():
    assert written(fetch()[0]) == b"*4\r\n$5\r\nHMGET\r\n$1\r\nk\r\n" + FIELD_3 + FIELD_1


def test_vectors_are_stored_as_raw_float32():
    header = np.frombuffer(b"$8\r\n", np.uint8)
    command = StoreRows(0, bulk(b"HSET") + bulk(b"k"), KEYS, ORDER, header, VECTORS.view(np.uint8))
    assert written(command) == (
        b"*6\r\n$4\r\nHSET\r\n$1\r\nk\r\n"
        + (FIELD_3 + b"$8\r\n\0\0\xa0@\0\0\xc0@\r\n")  # 5.0, 6.0
        + (FIELD_1 + b"$8\r\n\0\0\x80?\0\0\0@\r\n")  # 1.0, 2.0
    )


def test_fields_are_written_alone_or_with_one_value_for_all():
    assert written(WriteFields(0, bulk(b"HDEL") + bulk(b"k"), KEYS, ORDER)) == (
        b"*4\r\n$4\r\nHDEL\r\n$1\r\nk\r\n" + FIELD_3 + FIELD_1
    )
    assert written(WriteFields(0, bulk(b"HSET") + bulk(b"k"), KEYS, ORDER, bulk(b"now"))) == (
        b"*6\r\n$4\r\nHSET\r\n$1\r\nk\r\n" + FIELD_3 + b"$3\r\nnow\r\n" + FIELD_1 + b"$3\r\nnow\r\n"
    )


def test_increments_are_a_request_for_each_field():
    one = b"*4\r\n$7\r\nHINCRBY\r\n$1\r\nk\r\n%b$1\r\n1\r\n"
    command = Increments(0, bulk(b"HINCRBY") + bulk(b"k"), KEYS, ORDER)
    assert written(command) == one % FIELD_3 + one % FIELD_1
    assert command.asking() == [command]
    asking = b"*1\r\n$6\r\nASKING\r\n"
    assert written(command) == asking + one % FIELD_3 + asking + one % FIELD_1


@pytest.mark.parametrize("count", [0, 1, 9, 10, 12345, 999_999_999, 1_000_000_000, 2**63 - 1])
def test_counts_are_written_in_decimal(count):
    keys = np.array([1], np.int64)
    command = WriteCounts(0, bulk(b"HSET") + bulk(b"k"), keys, np.array([count], np.int64))
    assert written(command) == b"*4\r\n$4\r\nHSET\r\n$1\r\nk\r\n" + FIELD_1 + bulk(b"%d" % count)


def test_hits_and_misses_are_read_into_their_rows():
    command, out, found = fetch(order=np.array([2, 0, 3], np.int64))
    reply = b"*3\r\n$8\r\nAAAAAAAA\r\n$-1\r\n$8\r\n\r\n$-1\r\nB\r\n"
    assert read(command, reply + b"+next") == len(reply)
    assert command.done
    assert command.hits == 2
    assert found.tolist() == [False, False, True, True]
    assert [row.tobytes() for row in out] == [bytes(8), bytes(8), b"AAAAAAAA", b"\r\n$-1\r\nB"]


def test_a_row_that_is_cut_short_is_not_marked():
    reply = b"*2\r\n$8\r\nAAAAAAAA\r\n$8\r\nBBBBBBBB\r\n"
    for size in range(len(reply)):
        command, _, found = fetch()
        read(command, reply[:size])
        assert not command.done
        assert found.tolist() == [False, False, size >= len(b"*2\r\n$8\r\nAAAAAAAA\r\n"), False]


def test_an_error_in_place_of_the_rows_is_a_refusal():
    command, _, found = fetch()
    assert read(command, b"-MOVED 1 h") == 0
    assert not command.done
    reply = b"-MOVED 1 h:2\r\n"
    assert read(command, reply) == len(reply)
    assert command.done
    assert command.refusal == "MOVED 1 h:2"
    assert not found.any()
    command.again()
    assert not command.done
    read(command, b"*2\r\n$-1\r\n$8\r\nAAAAAAAA\r\n")
    assert command.done
    assert command.hits == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"*3\r\n",
        b"*-1\r\n",
        b"*x\r\n",
        b"+OK\r\n",
        b":2\r\n",
        b"$8\r\n",
        b"*2\r\n:1\r\n",
        b"*2\r\n*1\r\n",
        b"*2\r\n$-2\r\n",
        b"*2\r\n$\r\n",
        b"*2\r\n$08\r\nAAAAAAAA\r\n",
        b"*2\r\n$8\r\nAAAAAAAAxx",
        b"*2\r\n$8\nAAAAAAAA\r\n",
        b"*2\r\n$999999999999999999999\r\n",
        b"*" + b"2" * 30,
    ],
)
def test_other_bytes_are_no_reply(reply):
    command, _, found = fetch()
    with pytest.raises(DatabaseCorruptError, match="wanted"):
        read(command, reply)
    assert not found.any()


@pytest.mark.parametrize(("length", "error"), [(4, TableWidthError), (12, TableWidthError), (7, DatabaseCorruptError)])
def test_a_value_of_another_length_names_its_key(length, error):
    command, _, found = fetch()
    with pytest.raises(error, match=rf"key {KEYS[2]} .*\b{length} bytes, wanted 8"):
        read(command, b"*2\r\n$%d\r\n%b\r\n" % (length, b"A" * length))
    assert not found.any()


def test_an_empty_value_is_no_vector():
    with pytest.raises(DatabaseCorruptError, match="0 bytes"):
        read(fetch()[0], b"*2\r\n$0\r\n\r\n")


def test_numbers_are_read():
    command = WriteFields(0, bulk(b"HDEL") + bulk(b"k"), KEYS, ORDER)
    for part in (b"", b":", b":12", b":12\r"):
        assert read(command, part) == 0
        assert not command.done
    assert read(command, b":12\r\n:3\r\n") == 5
    assert command.number == 12
    for wrong in (b"+OK\r\n", b":\r\n", b":1x\r\n", b":" + b"1" * 40):
        with pytest.raises(DatabaseCorruptError):
            read(WriteFields(0, b"", KEYS, ORDER), wrong)


def test_increments_are_done_when_each_is_answered():
    command = Increments(0, bulk(b"HINCRBY") + bulk(b"k"), KEYS, ORDER)
    assert read(command, b":1\r\n:2") == 4
    assert not command.done
    assert read(command, b"-OOM no memory\r\n") == 16
    assert command.done
    assert command.refusal == "OOM no memory"
    command.again()
    read(command, b"-ERR hash value is not an integer\r\n:1\r\n")  # it was noted under another policy
    assert command.done
    assert command.refusal == ""


def test_any_reply_is_kept_whole():
    reply = b"*2\r\n$1\r\n0\r\n*3\r\n:1\r\n$-1\r\n*1\r\n+a\r\n"
    for size in range(len(reply)):
        command = Ask(0, request(b"X"))
        assert read(command, reply[:size]) == 0
        assert not command.done
    command = Ask(0, request(b"X"))
    array = np.frombuffer(reply + b"+next\r\n", np.uint8)
    for end in range(array.size):  # piece by piece, as it arrives
        if (after := command.read(array, 0, end)) or command.done:
            break
    assert after == len(reply)
    assert command.reply == [b"0", [1, None, [b"a"]]]


@pytest.mark.parametrize("raw", [b"", b"*2\r\n:1\r\n", b"$5\r\nab\r\n", b"~1\r\n:1\r\n", b":x\r\n", b":1\r\n:2\r\n"])
def test_what_is_no_reply_is_not_parsed(raw):
    with pytest.raises(DatabaseCorruptError):
        parse(raw)


@pytest.mark.parametrize("reply", [b"%1\r\n", b"$-2\r\n", b"$3\r\nabcd\r\n", b"*99999999999\r\n", b"GET / HTTP/1.1\r\n"])
def test_another_protocol_is_noticed(reply):
    with pytest.raises(DatabaseCorruptError):
        read(Ask(0, request(b"X")), reply)


def test_a_mark_is_compared():
    for reply, same in ((b"$3\r\nabc\r\n", True), (b"$3\r\nabd\r\n", False), (b"$-1\r\n", False)):
        command = CheckMark(0, request(b"GET", b"k"), b"abc")
        assert read(command, reply) == len(reply)
        assert command.done
        assert command.same is same
    command = CheckMark(0, request(b"GET", b"k"), b"abc")
    assert read(command, b"$3\r\nab") == 0
    assert not command.done


def test_only_strings_are_elements():
    raw = np.frombuffer(b"$1\r\na\r\n$0\r\n\r\n", np.uint8)
    starts, lengths = elements(raw, 0, raw.size)
    assert starts.tolist() == [4, 11]
    assert lengths.tolist() == [1, 0]
    for wrong in (b":1\r\n", b"$-1\r\n", b"$5\r\nab\r\n"):
        with pytest.raises(DatabaseCorruptError):
            elements(np.frombuffer(wrong, np.uint8), 0, len(wrong))
