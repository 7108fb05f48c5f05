"""What the service says of itself."""

import json
import logging
import re
import weakref
from functools import partial

import pytest

from hps.configuration.load import ServiceConfig
from hps.errors import DatabaseError, InvalidInputError, NotReadyError
from hps.ground.log_limits import LineLimit, OnceAMinute
from hps.serve.logs import changes
from hps.serve.logs.lines import JSONLines, TextLines, configure_logging, fields, formatter_of
from hps.serve.logs.requests import RequestLog, Served, request_id
from hps.testing.waiting import wait_until_async
from tests.fakes.clock import Clock
from tests.servers.on_loop import beside

FORGED = "a\n2026-01-01 00:00:00,000 ERROR hps: all is lost\r\x1b[2J\u2028\u202e"


def record(text, *arguments, raised=None, **more):
    made = logging.LogRecord("hps.x", logging.WARNING, __file__, 1, text, arguments, raised and (type(raised), raised, None))
    made.__dict__ |= fields(**more)
    return made


@pytest.mark.parametrize("lines", [TextLines(), JSONLines()])
@pytest.mark.parametrize("place", ["message", "field", "exception"])
def test_clients_strings_cannot_forge_a_line(lines, place):
    message, raised = FORGED if place == "message" else "", ValueError(FORGED) if place == "exception" else None
    text = lines.format(record("got %s", message, raised=raised, path=FORGED if place == "field" else None))
    assert "all is lost" in text
    first, *rest = text.split("\n")
    assert all(line.isprintable() for line in (first, *rest))
    assert all(line.startswith("    ") for line in rest)
    assert bool(rest) <= (place == "exception" and isinstance(lines, TextLines))


def test_a_json_line_has_its_own_members_and_the_fields():
    line = json.loads(JSONLines().format(record("%d rows", 3, status=200, hit_rate=0.5, level="mine", absent=None)))
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "logger": "hps.x", "message": "3 rows", "status": 200, "hit_rate": 0.5}
    failed = json.loads(JSONLines().format(record("failed", raised=ValueError("broken"))))
    assert failed["exception"] == "ValueError: broken"


def test_a_text_line_quotes_fields_that_could_be_taken_for_others():
    line = TextLines().format(record("request", route="/v2/models/{model}/infer", status=200, model="a b=1", error='say "x"'))
    assert line.endswith(r' hps.x: request route=/v2/models/{model}/infer status=200 model="a b=1" error="say \"x\""')


def test_format_and_level_change_where_the_service_writes_the_lines(monkeypatch):
    ours, theirs, root = logging.StreamHandler(), logging.StreamHandler(), logging.RootLogger(logging.INFO)
    ours.setFormatter(formatter_of("text"))
    theirs.setFormatter(logging.Formatter())
    root.handlers = [ours, theirs]
    monkeypatch.setattr(logging, "getLogger", lambda: root)
    for change in (("json", "debug"), (None, None)):
        configure_logging(*change)
        assert [type(handler.formatter) for handler in root.handlers] == [JSONLines, logging.Formatter]
        assert root.level == logging.DEBUG


def test_lines_pass_at_their_rate():
    seconds = iter([5.0, 5.1, 5.9, 6.0, 6.5, 6.9, 7.0])
    limit = LineLimit(2, 1.0, lambda: next(seconds))
    assert [limit.take() for _ in range(5)] == [True, True, False, True, True]
    assert limit.left_out == 0
    assert [limit.take(), limit.take(), limit.left_out] == [False, True, 1]


def test_each_message_passes_once_a_minute_with_the_number_left_out_and_errors_always(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hps.ground.log_limits.LineLimit", partial(LineLimit, clock=clock))
    limit, said = OnceAMinute(), []

    def log(at, message, level=logging.WARNING):
        clock.now = at
        record = logging.LogRecord("hps", level, "", 0, message, (7,), None)
        if limit.filter(record):
            said.append(record.getMessage())

    for minute in (0.0, 60.0, 120.0):
        for nth, message in enumerate(("a %d", "b %d", "c %d", "a %d", "a %d")):
            log(minute + 10 * nth, message)
        log(minute + 50, "a %d", logging.ERROR)
        log(minute + 59.9, "b %d")
    more = "({} more since the last such line)".format
    assert said == ["a 7", "b 7", "c 7", "a 7"] + 2 * [f"a 7 {more(2)}", f"b 7 {more(1)}", "c 7", "a 7"]


def test_requests_that_find_a_service_not_ready_have_one_line_a_second(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hps.access")
    clock = Clock()
    monkeypatch.setattr("hps.serve.logs.requests.LineLimit", partial(LineLimit, clock=clock))

    def request(error=None, path="/v2/models/m/infer", status=200):
        served, scope = Served(), {"path": path, "method": "POST"}
        served.id = b"x"
        log.start(served, scope, {})
        if error is not None:
            served.failed(error)
            status = 503
        log.finish(served, scope, "r", status, 0.1)

    for lines in (10, 1, 0):
        log = RequestLog(ServiceConfig(access_log_per_s=lines), None)
        for second in (0.0, 1.0):
            clock.now += 1 + second
            caplog.clear()
            request(NotReadyError("compiling kernels, 42 %"), "/v2/health/ready")  # which monitoring repeats
            for _ in range(5):
                request(NotReadyError("compiling kernels, 42 %"))
            assert len(caplog.records) == min(lines, 1)
            request(DatabaseError("Redis is away"))
            request()
        found = [one.fields for one in caplog.records]
        assert [one["status"] for one in found] == {10: [503, 503, 200], 1: [503], 0: []}[lines]
        assert lines < 10 or [one.get("left_out") for one in found] == [None, 4, None]


@pytest.fixture
def written(caplog):
    """Takes the lines of a log of writes."""
    caplog.set_level(logging.INFO, changes.__name__)

    def take():
        lines = [one.message.removeprefix("writing rows of ") for one in caplog.records]
        caplog.clear()
        return sorted(lines)

    return take


@beside()
async def test_writes_of_each_client_are_logged_at_once_and_then_by_their_number(monkeypatch, written, caplog):
    monkeypatch.setattr(changes, "_PAUSE_S", 0.05)
    log = changes.WriteLog()
    for _ in range(3):  # a client that pauses is logged at once again
        for who in ("a", "b", "c"):
            log.count(who, "t", written=1)
        assert written() == [f"t, by {who}: 1 requests, 1 rows written, 0 deleted" for who in ("a", "b", "c")]
        for counted in (*[{"written": 2}] * 3, {"deleted": 5}, {"failed": True}):
            log.count("b", "t", **counted)
        await wait_until_async(lambda: caplog.records, "the others are logged")
        assert written() == ["t, by b: 5 requests, 6 rows written, 5 deleted, 1 requests failed"]
        await wait_until_async(lambda: not log._ticking, "the log rests")
        assert written() == []
        assert not log._writes
    log.count("a", "t", written=1)
    log.count("a", "t", written=1)
    log.flush()
    assert len(written()) == 2


@beside()
async def test_more_writers_than_are_counted_lose_no_number(monkeypatch, written):
    monkeypatch.setattr(changes, "_MOST_WRITERS", 3)
    log = changes.WriteLog()
    for _ in range(3):
        for who in range(7):
            log.count(str(who), "t", written=1)
            assert len(log._writes) <= 3
    log.flush()
    assert sum(int(re.search(r"(\d+) rows written", line)[1]) for line in written()) == 21


TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = b"00-" + TRACE + b"-00f067aa0ba902b7-01"


NAMED = {
    b"abc-1.2_3": [(b"abc-1.2_3", None), (b"abc-1.2_3", PARENT)],
    b"x" * 64: [(b"x" * 64, None)],
    TRACE: [(None, PARENT), (None, b"cc" + PARENT[2:] + b"-more"), (b"x" * 65, PARENT), (b"a b", PARENT)],
    None: [(b"", None), (b"a\n", None), (None, PARENT + b"-more"), (None, b"ff" + PARENT[2:]), (None, PARENT.upper())],
    b"": [(None, b"00-" + b"0" * 32 + PARENT[35:]), (None, PARENT[:36] + b"0" * 16 + b"-01")],  # zeros are none, either
}


@pytest.mark.parametrize("expected", NAMED)
def test_a_request_is_named_as_its_client_says_if_that_is_a_name(expected):
    for given, parent in NAMED[expected]:
        headers = {b"x-request-id": given, b"traceparent": parent}
        assert request_id({name: value for name, value in headers.items() if value is not None}) == (expected or None)


def test_an_error_is_not_kept_with_its_request():
    """Its traceback refers to the body, whose memory counts as free once it is answered."""
    served, error = Served(), InvalidInputError("wrong")
    gone = weakref.ref(error)
    served.failed(error)
    del error
    assert gone() is None
    assert served.error == "wrong"
