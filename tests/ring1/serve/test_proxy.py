"""Requests that a front passes on: its connections to the engine's application are kept, given back and given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hps.serve.frontend.proxy import EngineConnections, Upstream, forwarded
from hps.testing.waiting import wait_until_async
from tests.servers.on_loop import beside


class Application:
    """The engine's application, which answers when the test says so.

    Attributes:
        open: its connections, the oldest first.
        asked: requests that were received completely, with their connection.
    """

    def __init__(self) -> None:
        self.open: list[asyncio.StreamWriter] = []
        self.asked: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.rpartition(b"content-length: ")[2])
                self.asked.append((writer, head + await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.open.remove(writer)
            writer.close()

    async def request(self) -> tuple[asyncio.StreamWriter, bytes]:
        await wait_until_async(lambda: self.asked, "a request comes")
        return self.asked.pop(0)


class Asker:
    """Who asked, and what came of it."""

    def __init__(self, pool: EngineConnections, name: bytes, head_only: bool = False) -> None:
        self.data, self.ended, self.upstream = b"", "", None
        pool.forward(self, forwarded("GET", b"/" + name, [], b"", ""), head_only=head_only, use=self.use)

    def use(self, upstream: Upstream) -> None:
        self.upstream = upstream

    def relay(self, data: bytes) -> None:
        self.data += data

    def finish_relay(self) -> None:
        self.ended += "answered"

    def fail_relay(self, *, started: bool) -> None:
        self.ended += f"lost after {len(self.data)} bytes" if started else "lost"

    async def end(self) -> bytes:
        await wait_until_async(lambda: self.ended, "the request has ended")
        return self.data.partition(b"X-Name: ")[2].partition(b"\r\n")[0]


App, Pool = Application, EngineConnections


def answer(name: bytes, *lines: bytes) -> bytes:
    """An answer after which a connection is kept, unless its lines say otherwise."""
    return b"\r\n".join([b"HTTP/1.1 204 No Content", b"X-Name: " + name, *lines, b"", b""])


@asynccontextmanager
async def opened(place: Path) -> AsyncIterator[tuple[Application, EngineConnections]]:
    application, path = Application(), str(place / "engine.sock")
    server = await asyncio.start_unix_server(application.serve, path)
    pool = EngineConnections(path, str)
    try:
        yield application, pool
    finally:
        pool.close()
        server.close()
        for one in application.open:
            one.close()


async def answered(application: Application, asker: Asker, *lines: bytes) -> None:
    """Answer a request by its own name."""
    writer, request = await application.request()
    name = request.split()[1]
    writer.write(answer(name, *lines))
    assert await asker.end() == name


@beside(opened)
async def test_a_connection_is_used_again(application: App, pool: Pool, /) -> None:
    for name in (b"a", b"b", b"c"):
        await answered(application, Asker(pool, name))
        assert len(application.open) == len(pool._idle) == 1


class SlowAsker(Asker):
    """One who reads slowly: it pauses its answer at each piece, and resumes it while it has the connection."""

    def relay(self, data: bytes) -> None:
        super().relay(data)
        if self.upstream is not None:
            self.upstream.pause()

    def finish_relay(self) -> None:
        self.upstream = None
        super().finish_relay()


@beside(opened)
async def test_a_connection_that_was_paused_at_the_end_of_an_answer_answers_again(application: App, pool: Pool, /) -> None:
    for name in (b"a", b"b"):
        await answered(application, SlowAsker(pool, name))
        assert len(application.open) == len(pool._idle) == 1


@beside(opened)
async def test_so_many_idle_connections_are_kept_and_the_others_closed(application: App, pool: Pool, /) -> None:
    for _ in range(2):
        askers = [Asker(pool, b"%d" % nth) for nth in range(11)]
        await wait_until_async(lambda: len(application.asked) == 11, "all are asked")
        assert len(application.open) == 11
        while application.asked:
            writer, request = await application.request()
            writer.write(answer(request.split()[1]))
        assert {await asker.end() for asker in askers} == {b"/%d" % nth for nth in range(11)}
        await wait_until_async(lambda: len(application.open) == 8, "the rest is closed")
        assert len(pool._idle) == 8
    pool.close()
    await wait_until_async(lambda: not application.open, "all are closed")


@pytest.mark.parametrize("lines", [b"Content-Length: 9", b"Connection: close\r\nContent-Length: 0"])
@beside(opened)
async def test_a_connection_after_its_last_answer_or_one_without_body_is_closed(app: App, pool: Pool, /, lines: bytes) -> None:
    for _ in range(2):
        asker = Asker(pool, b"a", head_only=lines.startswith(b"Content"))
        writer, _ = await app.request()
        writer.write(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\n")
        await asker.end()
        assert asker.ended == "answered"
        await wait_until_async(lambda: not app.open, "it is closed")
        assert pool._idle == []


@beside(opened)
async def test_a_request_that_is_given_up_leaves_its_answer_to_nobody(application: App, pool: Pool, /) -> None:
    """The answer in flight must not be read by the next one who asks."""
    late = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nthe  body"
    for part in (0, 40):
        gone = Asker(pool, b"gone")
        writer, _ = await application.request()
        writer.write(late[:part])
        await wait_until_async(lambda gone=gone, part=part: len(gone.data) == part, "a part has arrived")
        assert gone.upstream is not None
        gone.upstream.abandon()
        writer.write(late[part:])
        await answered(application, Asker(pool, b"next"))
        assert (gone.ended, len(gone.data)) == ("", part)
        await wait_until_async(lambda: len(application.open) == 1, "the other is closed")


@beside(opened)
async def test_what_follows_an_answer_is_not_the_next_one(application: App, pool: Pool, /) -> None:
    await answered(application, Asker(pool, b"a"))
    application.open[0].write(answer(b"/b"))
    await wait_until_async(lambda: not application.open, "it is closed")
    assert pool._idle == []
    await answered(application, Asker(pool, b"b"))


@beside(opened)
async def test_an_interim_answer_is_skipped(application: App, pool: Pool, /) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    for sent in (interim + interim, interim[:10]):
        asker = Asker(pool, b"a")
        writer, _ = await application.request()
        writer.write(sent)
        await asyncio.sleep(0)
        writer.write(interim[len(sent) :] + answer(b"/a"))
        assert await asker.end() == b"/a"
        assert (asker.data, len(pool._idle)) == (answer(b"/a"), 1)


@pytest.mark.parametrize("sent", [0, 30, 40])
@beside(opened)
async def test_an_application_that_ends_is_told_to_those_who_wait(application: App, pool: Pool, /, sent: int) -> None:
    """One whose head has not arrived as a whole has not begun: its client can be told."""
    for _ in range(2):
        await answered(application, Asker(pool, b"before"))
        lost = Asker(pool, b"lost")
        writer, _ = await application.request()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nthe  body"[:sent])
        writer.close()
        await lost.end()
        assert lost.ended == (f"lost after {sent} bytes" if sent == 40 else "lost")
        assert pool._idle == []


def test_an_application_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        pool = EngineConnections(str(tmp_path / "nowhere"), str)
        for _ in range(2):
            lost = Asker(pool, b"a")
            await lost.end()
            assert (lost.ended, lost.upstream) == ("lost", None)

    asyncio.run(main())


def test_a_request_is_passed_on_without_what_is_of_its_connection() -> None:
    lines = [(b"accept", b"x"), (b"connection", b"close"), (b"content-length", b"9"), (b"transfer-encoding", b"chunked")]
    for body in (b"", b"body"):
        sent = forwarded("POST", b"/a?b", lines, body, "10.0.0.1", ["ranker"]).split(b"\r\n")
        assert (*sent[:2], *sent[-3:]) == (b"POST /a?b HTTP/1.1", b"accept: x", b"content-length: %d" % len(body), b"", body)
        assert not any(b"close" in one or b"chunked" in one for one in sent)
