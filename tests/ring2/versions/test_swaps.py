"""Versions are swapped under load: no lookup fails, and none mixes the rows of two versions."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.ring1.versions.test_versions import DIMS, Make, version_of
from tests.ring1.versions.test_versions import document as document  # a fixture


@pytest.mark.parametrize(
    ("kind", "host"), [("direct", "hash_map"), ("cached", "rocks_db"), ("static", "rocks_db"), ("direct", "row_files")]
)
def test_no_lookup_fails_and_none_mixes_versions_while_versions_are_swapped(document: Make, kind: str, host: str) -> None:
    """A refresh that outlives its version ends, on time and on demand, and goes on with the next."""
    refreshed = {"refresh_interval": 0.002, "refresh_device_share": 0.9} if kind == "cached" else {}
    with hps.HPS(document(kind, persistent="" if host == "hash_map" else host, **refreshed), deploy_models=False) as server:
        server.deploy("ranker", "1")
        stop, seen = threading.Event(), set()

        def until_stopped(call: Callable[[], Any]) -> int:
            count = 0
            while not stop.is_set():
                call()
                count += 1
            return count

        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(until_stopped, lambda: seen.add(version_of(server))) for _ in range(3)]
            calls += [pool.submit(until_stopped, lambda: server.refresh("ranker")) for _ in range(2) if refreshed]
            try:
                server.deploy("ranker", "2")
                server.rollback("ranker")
                for version in ("3", "1", "2"):
                    server.deploy("ranker", version)
                    wait_until(lambda version=version: int(version) in seen, "its lookups are answered")
            finally:
                stop.set()
            assert all(call.result(PATIENCE_S) for call in calls)
        assert seen == {1, 2, 3}
        assert not refreshed or set(server.refresh("ranker")) == set(DIMS)
    wait_until(lambda: "hps-refresh-ranker" not in [one.name for one in threading.enumerate()], "the timers ended")
