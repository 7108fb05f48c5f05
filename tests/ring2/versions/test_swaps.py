"""Versions are swapped under load: no lookup fails, and none mixes the rows of two versions."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.ring1.versions.test_versions import DIMS, Make, version_of
from tests.ring1.versions.test_versions import document as document  # fixtures
from tests.ring1.versions.test_versions import server as server


@pytest.mark.parametrize(
    "server", [("direct", "hash_map"), ("cached", "rocks_db"), ("static", "rocks_db")], ids="-".join, indirect=True
)
def test_no_lookup_fails_and_none_mixes_versions_while_versions_are_swapped(server: hps.HPS) -> None:
    server.deploy("ranker", "1")
    stop, seen = threading.Event(), set()

    def look_up() -> int:
        count = 0
        while not stop.is_set():
            seen.add(version_of(server))
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        lookups = [pool.submit(look_up) for _ in range(3)]
        try:
            server.deploy("ranker", "2")
            server.rollback("ranker")
            for version in ("3", "1", "2"):
                server.deploy("ranker", version)
                wait_until(lambda version=version: int(version) in seen, "its lookups are answered")
        finally:
            stop.set()
        assert all(lookup.result(PATIENCE_S) for lookup in lookups)
    assert seen == {1, 2, 3}


def test_refreshes_bring_rows_of_their_own_version_while_versions_are_swapped(document: Make) -> None:
    """On time and on demand, beside lookups: a refresh that outlives its version ends, and goes on with the next."""
    with hps.HPS(document(refresh_interval=0.002, refresh_device_share=0.9), deploy_models=False) as server:
        server.deploy("ranker", "1")
        stop, seen = threading.Event(), set()

        def until_stopped(call: Callable[[], Any]) -> int:
            count = 0
            while not stop.is_set():
                call()
                count += 1
            return count

        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(until_stopped, lambda: seen.add(version_of(server))) for _ in range(2)]
            calls += [pool.submit(until_stopped, lambda: server.refresh("ranker")) for _ in range(2)]
            try:
                for number in ("2", "3", "1"):
                    server.deploy("ranker", number)
                    wait_until(lambda number=number: int(number) in seen, "its lookups are answered")
            finally:
                stop.set()
            assert all(call.result(PATIENCE_S) for call in calls)
        assert seen == {1, 2, 3}
        assert set(server.refresh("ranker")) == set(DIMS)
    wait_until(lambda: "hps-refresh-ranker" not in [one.name for one in threading.enumerate()], "the timers ended")
