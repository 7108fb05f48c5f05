"""Rows that age in the embedding cache of a GPU, by a clock that the tests play."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from tests.gpu.cupy_if_installed import cupy
from tests.ring1.engine.test_row_aging_clocks import PlayedClock
from tests.ring1.engine.test_row_aging_clocks import clock as clock  # a fixture
from tests.servers.running_service import document_of
from tests.tables.row_aging import DEFAULT, DIM, FILED, GRACE_US, ONLINE, TIERS, TTL_US, apply, starting, vectors_of

pytestmark = pytest.mark.gpu

CACHES: dict[str, dict[str, Any]] = {
    "all": {"gpucacheper": 2.0},
    "part": {"gpucacheper": 0.3},
    "static": {"embedding_cache_type": "static"},
}


@pytest.fixture(params=["hash_map", "rocks_db", "rocks_db_alone"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    options = dict(TIERS[request.param])
    if kind := options.pop("persistent", None):
        options["persistent_db"] = {"type": kind, "path": str(tmp_path / kind)}
    return options


@pytest.fixture(params=[*CACHES])
def server(request: pytest.FixtureRequest, tmp_path: Path, tiers: dict[str, Any], clock: PlayedClock) -> Iterator[hps.HPS]:
    with starting(tmp_path) as starts:
        entry = starts.entry(hit_rate_threshold=1.0, **CACHES[request.param])
        yield starts.opened.enter_context(hps.HPS({**document_of(entry, device="cuda"), **tiers}))


def found(server: hps.HPS, keys: np.ndarray) -> np.ndarray:
    """Look keys of the GPU up, compare their vectors with those that were written, and return which were found."""
    out = cupy.full((keys.size, DIM), np.nan, np.float32)
    server.lookup_fromdlpack(cupy.asarray(keys), out, "m", "a")
    vectors = out.get()
    there: np.ndarray = (vectors != DEFAULT).any(axis=1)
    np.testing.assert_array_equal((vectors[there] - vectors_of(keys[there])) % 10_000, 0)
    return there


def test_rows_of_the_cache_expire_at_their_time_and_come_back_with_the_next_write(server: hps.HPS, clock: PlayedClock) -> None:
    keys = np.concatenate([FILED, ONLINE])
    first = clock.us
    for turn in range(1, 4):
        written = clock.us
        assert apply(server, ONLINE, written, turn) == ONLINE.size
        apply(server, FILED[:5], written, turn)  # rows of files that are written online age, too
        for _ in range(3):
            assert found(server, keys).all()  # and are cached
        clock.us = written + TTL_US - 1
        assert found(server, keys).all()
        clock.us = written + TTL_US + GRACE_US
        for _ in range(2):
            there = found(server, keys)
            assert there[5 : FILED.size].all()
            assert not there[:5].any()
            assert not there[FILED.size :].any()
    assert clock.us > first + 3 * TTL_US


def test_a_row_that_is_written_again_lives_on(server: hps.HPS, clock: PlayedClock) -> None:
    written = clock.us
    apply(server, ONLINE, written)
    assert found(server, ONLINE).all()
    clock.us += TTL_US // 2
    apply(server, ONLINE[::2], clock.us, 2)
    assert found(server, ONLINE).all()
    clock.us = written + TTL_US + GRACE_US
    there = found(server, ONLINE)
    assert there[::2].all()
    assert not there[1::2].any()
    clock.us += TTL_US // 2
    assert not found(server, ONLINE).any()


@pytest.mark.parametrize("server", ["all", "part"], indirect=True)
@pytest.mark.parametrize("tiers", ["hash_map"], indirect=True)
def test_a_captured_lookup_answers_no_expired_row(server: hps.HPS, clock: PlayedClock) -> None:
    keys, out = cupy.asarray(ONLINE), cupy.empty((ONLINE.size, DIM), cupy.float32)
    with server.capture(keys, out, "m", "a") as graph:
        for turn in (1, 2):
            apply(server, ONLINE, clock.us, turn)
            graph.replay()
            np.testing.assert_array_equal(out.get(), vectors_of(ONLINE, turn))
            clock.us += TTL_US + GRACE_US
            graph.replay()
            assert (out.get() == DEFAULT).all()
