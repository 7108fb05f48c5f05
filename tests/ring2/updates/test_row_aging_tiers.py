"""Rows that age: when they count as absent, on every combination of tiers."""

import numpy as np
import pytest

from hps.testing.waiting import wait_until
from tests.ring1.engine.test_row_aging import start as start  # a fixture
from tests.tables.row_aging import (
    FILED,
    ONLINE,
    TIERS,
    TTL_US,
    apply,
    follow,
    found,
    now_us,
    sample,
    stored_keys,
    vectors_of,
)


@pytest.mark.parametrize("tiers", TIERS)
def test_rows_expire_by_the_time_they_were_written_on_every_tier(start, tiers):
    server = start(tiers)
    assert found(server, FILED).all()
    written = now_us() - TTL_US + np.linspace(100_000, 500_000, ONLINE.size).astype(np.int64)
    keys = np.concatenate([ONLINE, FILED[:10]])  # rows of files, written again
    times = np.concatenate([written, written[:10]])
    assert apply(server, keys, times) == keys.size
    follow(server, keys, times, lambda there: not there.any())
    assert found(server, FILED[10:]).all()
    assert sample(server, "expired_rows") == keys.size
    assert all(keys == FILED[10:].tolist() for keys in stored_keys(server))


@pytest.mark.parametrize("tiers", TIERS)
def test_a_row_that_is_written_again_lives_on(start, tiers):
    server = start(tiers)
    soon = now_us() - TTL_US + 300_000
    apply(server, ONLINE, soon)
    apply(server, ONLINE[:30], now_us(), 2)
    server.insert(ONLINE[30:60], vectors_of(ONLINE[30:60], 3), "m", "a")
    lasting = np.arange(ONLINE.size) < 60
    times = np.where(lasting, now_us(), soon)
    follow(server, ONLINE, times, lambda there: (there == lasting).all())


@pytest.mark.parametrize("tiers", TIERS)
def test_records_that_have_expired_do_not_appear_and_cost_the_row_of_the_files(start, tiers):
    server = start(tiers)
    keys = np.concatenate([ONLINE[:5], FILED[:5]])
    apply(server, keys, now_us() - TTL_US - 1)
    assert not found(server, keys).any()
    assert sample(server, "expired_rows") == keys.size
    apply(server, keys, now_us(), 2)
    apply(server, keys, now_us() - TTL_US - 1)  # replayed
    assert found(server, keys).all()


@pytest.mark.parametrize("tiers", ["rocks_db_alone", "row_files"])
def test_rows_that_expire_while_the_process_is_down_are_gone_when_it_starts(start, tiers):
    server = start(tiers)
    written = now_us() - TTL_US + np.where(np.arange(ONLINE.size) < 50, 1_500_000, 60_000_000)
    apply(server, ONLINE, written)
    follow(server, ONLINE, written, lambda there: there.all())
    start.opened.close()
    wait_until(lambda: now_us() > written[0] + TTL_US, "rows expire meanwhile")
    server = start(tiers)
    assert not {*ONLINE[:50].tolist()} & {*stored_keys(server)[-1]}
    follow(server, ONLINE, written, lambda there: not there[:50].any())
    assert found(server, ONLINE[50:]).all()
    assert found(server, FILED).all()


@pytest.mark.parametrize("tiers", TIERS)
def test_rows_of_the_files_age_from_the_time_of_the_version_if_asked(start, tiers):
    written = now_us() - TTL_US + 1_500_000
    start.files_were_written(written)
    server = start(tiers, row_ttl_files=True)
    apply(server, FILED[:10], written + 60_000_000, 2)
    apply(server, ONLINE, written + 60_000_000, 2)
    follow(server, FILED, np.where(FILED < 10, written + 60_000_000, written), lambda there: there.sum() == 10)
    assert found(server, ONLINE).all()
    wait_until(lambda: sample(server, "expired_rows") == 90, "they are removed")
    assert all(keys == [*range(10), *ONLINE] for keys in stored_keys(server))
    wait_until(lambda: not server.model("m").chain._hidden, "nothing is hidden any more")
    apply(server, FILED[20:21], now_us(), 3)
    assert found(server, FILED[20:21]).all()
