"""A client with every right that never sends a request twice fills no front."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.servers.hostile_client import BEYOND, BUDGET, MB, HostileClient

KINDS = 31
"""Of requests, so that two rounds send each twice, with other contents."""


def test_requests_that_never_repeat_leave_a_front_as_small_as_it_was(tmp_path: Path) -> None:
    with HostileClient(tmp_path) as client:
        client.check()
        client.send(0, 10 * KINDS)
        assert not client.statuses.keys() & {500, "UNKNOWN", "INTERNAL"}, client.statuses
        cached = client.figure("hps_http_cached_bytes")
        assert 0 < cached < 64 * MB
        assert client.front_bytes < BUDGET + BEYOND
        assert client.figure("hps_http_held_bytes") < MB
        client.check()
