"""The route by which other servers read row files: ranges, limits, and what is not here."""

import asyncio
from typing import Any

import pytest

from hps.configuration.tiers import PeersConfig
from hps.errors import NotReadyError
from hps.serve.engine.routes.row_files import MOST_REQUESTS, ByteRate, RowFileRoutes, parse_range
from hps.serve.http.http_answer import RequestError
from hps.statistics.prometheus import expose
from hps.stores.base import SharedRowFile

CONTENT = bytes(range(256)) * 4096
NAME = "f" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-99", (10, 100)),
        ("bytes=900-", (900, 1000)),
        ("bytes=999-5000", (999, 1000)),
        (" bytes=0-4 ", (0, 5)),
    ],
)
def test_a_range_is_parsed(text: str, expected: tuple[int, int]) -> None:
    assert parse_range(text, 1000) == expected


@pytest.mark.parametrize(
    "text",
    ["bytes=1000-", "bytes=5-4", "bytes=-5", "bytes=0-1,5-6", "items=0-1", "", "bytes=a-b", "bytes=٣-٤", f"bytes=0-{'9' * 30}"],
)
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_range(text, 1000)
    assert (error.value.status, error.value.headers) == (416, ((b"content-range", b"bytes */1000"),))


def test_a_range_is_needed() -> None:
    with pytest.raises(RequestError) as error:
        parse_range(None, 1000)
    assert error.value.status == 400


def test_a_long_range_is_answered_in_part() -> None:
    assert parse_range("bytes=7-", 1 << 40) == (7, 7 + (16 << 20))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_bytes_are_sent_one_answer_after_another_at_their_rate() -> None:
    clock = Clock()
    rate = ByteRate(1000, clock)
    assert [rate.reserve(600), rate.reserve(600), rate.reserve(600)] == [50.0, 50.6, None]  # the third would wait 1.2 s
    clock.now += 0.3
    assert rate.reserve(100) == 51.2
    clock.now += 100
    assert rate.reserve(100) == clock.now  # quiet time is not saved up


class Held(SharedRowFile):
    """A file of which a part is here."""

    size_bytes = len(CONTENT)

    def has(self, start: int, stop: int) -> bool:
        return stop <= 600_000

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(CONTENT)[start:stop]


class Lifecycle:
    """A parameter server with that file."""

    @property
    def opened(self) -> "Lifecycle":
        return self

    def row_file(self, content: str) -> SharedRowFile | None:
        return Held() if content == NAME else None


class Threads:
    async def run(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)


def routes(settings: PeersConfig | None) -> RowFileRoutes:
    return RowFileRoutes(Lifecycle(), settings, Threads())  # type: ignore[arg-type]


def sent(answer: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send an answer; return its status, its headers and its body."""
    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    asyncio.run(answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send))
    head, *bodies = messages
    return head["status"], dict(head["headers"]), b"".join(bytes(body.get("body", b"")) for body in bodies)


def test_a_range_is_sent() -> None:
    served = routes(PeersConfig(serve_bytes_per_s=1 << 40))
    status, headers, body = sent(served.answer(NAME, "bytes=100-599999"))
    assert (status, body) == (206, CONTENT[100:600_000])
    assert headers[b"content-range"] == f"bytes 100-599999/{len(CONTENT)}".encode()
    assert headers[b"content-length"] == b"599900"
    assert b"hps_row_file_sent_bytes_total 599900" in expose(served.families())


@pytest.mark.parametrize(
    ("settings", "name", "range_", "status"),
    [
        (None, NAME, "bytes=0-1", 409),
        (PeersConfig(), "e" * 32, "bytes=0-1", 404),
        (PeersConfig(), NAME, "bytes=599999-600000", 404),  # its last byte is not here yet
        (PeersConfig(), NAME, f"bytes={len(CONTENT)}-", 416),
        (PeersConfig(), NAME, None, 400),
    ],
)
def test_what_is_not_here_is_refused(settings: PeersConfig | None, name: str, range_: str | None, status: int) -> None:
    with pytest.raises(RequestError) as error:
        routes(settings).answer(name, range_)
    assert error.value.status == status


def test_answers_at_a_time_are_bounded() -> None:
    served = routes(PeersConfig(serve_bytes_per_s=1 << 40))
    answers = [served.answer(NAME, "bytes=0-9") for _ in range(MOST_REQUESTS)]
    with pytest.raises(NotReadyError, match="8 answers are under way"):
        served.answer(NAME, "bytes=0-9")
    assert sent(answers[0])[2] == CONTENT[:10]
    assert sent(served.answer(NAME, "bytes=0-9"))[2] == CONTENT[:10]


def test_more_than_the_rate_is_refused() -> None:
    served = routes(PeersConfig(serve_bytes_per_s=100_000))
    served.answer(NAME, "bytes=0-499999")
    with pytest.raises(NotReadyError):
        served.answer(NAME, "bytes=0-9")
