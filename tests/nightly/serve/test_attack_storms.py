"""The attacks of ring 2 at their full size, and such as need memory or many connections."""

import gzip
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from hps.testing.waiting import wait_until
from tests.ring2.serve import test_http_attacks as attacks
from tests.servers.attacked_server import ADMIN, KEYS, MB, attacked, bombs, head, hostile, serving

UNCOLLECTED = "import gc; from hps.tools.cli.app import main; gc.disable(); main()"


@pytest.fixture
def fresh_victim(tmp_path):
    with serving(tmp_path) as server, attacked(server) as victim:
        yield victim


@pytest.mark.parametrize(("count", "values"), [(12, 3 * KEYS), (1000, 20_000)])
def test_no_error_keeps_its_request_until_garbage_is_collected(tmp_path, count, values):
    with serving(tmp_path, "-c", UNCOLLECTED) as server, attacked(server) as victim:
        kept = {}
        for kind, (method, path, body, encoding) in hostile(values).items():
            before = server.rss
            for _ in range(count):
                answer = victim.client.request(method, path, content=body, headers=ADMIN | {"Content-Encoding": encoding})
                assert 400 <= answer.status_code < 500, (kind, answer.text)
            with suppress(AssertionError):
                wait_until(lambda before=before: server.rss < before + 64 * MB, "its memory is free")
            kept[kind] = (server.rss - before) // MB
        assert max(kept.values()) < 64, kept
        victim.check()


@pytest.mark.parametrize("kind", ["lists", "objects", "keys", "strings", "tables", "data"])
def test_a_small_body_that_becomes_large_is_refused(fresh_victim, kind):
    path, text = bombs()[kind]
    body = gzip.compress(text, 9)
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    with ThreadPoolExecutor(4) as clients:
        answers = clients.map(lambda _: fresh_victim.client.post(path, content=body, headers=headers).status_code, range(12))
        assert set(answers) <= {400, 413, 503}
    fresh_victim.check()


def test_long_requests_that_are_sent_without_reading_an_answer(fresh_victim):
    attacks.test_what_has_no_end(fresh_victim, b"", b"GET /v2/health/live HTTP/1.1\r\nX: %s\r\n\r\n" % (b"y" * 1660) * 100)


@pytest.mark.parametrize("half", [head()[:-2], head("Content-Length: 100") + b"half"], ids=["half a head", "half a body"])
def test_many_half_sent_requests(tmp_path, half):
    attacks.test_half_sent_requests_take_neither_all_descriptors_nor_the_connections_of_others(tmp_path, half, 1500)
