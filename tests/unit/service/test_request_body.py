"""Bodies that do not come, come late, or fill what is set aside for them; round after round."""

import asyncio
from contextlib import contextmanager

import pytest

from hps.service.held_memory import SMALL_BYTES, HeldMemory
from hps.service.http_answer import OverloadedError, RequestError
from hps.service.lookup_threads import LookupThreads
from hps.service.request_body import BodyReader, ClientDisconnected

MOST = 4 * SMALL_BYTES


@contextmanager
def reading(timeout_s=10, limit=16 * SMALL_BYTES):
    memory = HeldMemory(limit)
    threads = LookupThreads(1, 10, memory)
    try:
        yield BodyReader(MOST, timeout_s, threads, memory), memory
    finally:
        assert threads.close(10)


def sent(*pieces, ends=True):
    """What a client sends, in pieces; it may then be silent."""
    left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if ends:
        left.append({"type": "http.request", "body": b""})

    async def receive():
        if not left:
            await asyncio.sleep(3600)
        return left.pop(0)

    return receive


def test_bodies_that_do_not_come_are_given_up_in_every_round_and_others_are_not():
    async def main(reader, memory):
        for _ in range(3):
            silent = [reader.read({}, sent(b"half", ends=False)) for _ in range(3)]
            *refused, whole = await asyncio.gather(*silent, reader.read({}, sent(b"who", b"le")), return_exceptions=True)
            assert [error.status for error in refused] == [408] * 3
            assert whole == b"whole"
            assert memory.held == len(whole)
            memory.held -= len(whole)
            while reader._sweeping:  # until no body is read
                await asyncio.sleep(0.01)

    with reading(timeout_s=0.2) as (reader, memory):
        asyncio.run(main(reader, memory))


def test_a_new_timeout_and_a_new_size_hold_for_the_next_bodies():
    async def main(reader, memory):
        for most in (100, 10, 1000):
            reader.limit_to(most, 0.1)
            assert len(await reader.read({}, sent(b"x" * most))) == most
            with pytest.raises(RequestError, match=f"got {most + 1} bytes, expected at most {most} "):
                await reader.read({}, sent(b"x" * most, b"y"))
            with pytest.raises(RequestError, match=f"Content-Length is {most + 1}, expected at most {most} "):
                await reader.read({b"content-length": b"%d" % (most + 1)}, sent())
            with pytest.raises(RequestError, match=r"within 0\.1 s"):
                await reader.read({}, sent(ends=False))
            memory.held -= most
            assert memory.held == 0

    with reading(timeout_s=3600) as (reader, memory):
        asyncio.run(main(reader, memory))


@pytest.mark.parametrize(("most", "expected"), [(10, 10), (2 * MOST, MOST)])
def test_a_body_may_have_a_smaller_limit_of_its_own(most, expected):
    with reading() as (reader, memory):
        assert len(asyncio.run(reader.read({}, sent(b"x" * expected), most))) == expected
        with pytest.raises(RequestError, match=f"expected at most {expected}"):
            asyncio.run(reader.read({}, sent(b"x" * expected, b"y"), most))
        assert memory.held == expected


def test_pieces_fill_the_memory_to_the_limit_of_their_body_and_a_refused_one_frees_it():
    async def main(reader, memory):
        for others in (0, 2 * SMALL_BYTES, SMALL_BYTES):
            memory.held = others
            room = memory.large_limit - others
            pieces = [b"x" * SMALL_BYTES] * (room // SMALL_BYTES)
            assert len(await reader.read({}, sent(*pieces))) == room
            assert memory.held == memory.large_limit
            memory.held = others
            with pytest.raises(OverloadedError):
                await reader.read({}, sent(*pieces, b"y"))
            assert memory.held == others
            with pytest.raises(ClientDisconnected):
                await reader.read({}, disconnecting(pieces[0]))
            assert memory.held == others

    with reading(limit=4 * SMALL_BYTES) as (reader, memory):
        asyncio.run(main(reader, memory))


def disconnecting(piece):
    left = [{"type": "http.request", "body": piece, "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return left.pop(0)

    return receive
