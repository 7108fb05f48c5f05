"""Changes of a log in Redis: as the authority that several replicas write to, and above the RocksDB of each of them."""

import itertools
import threading
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hps.errors import DatabaseError
from hps.stores.base import LoadRecord, LogPosition, RowChanges
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import KeyPartition
from hps.stores.redis.marks import parse
from hps.stores.rocks_db.database import RocksDatabase
from tests.servers.redis_proxy import Proxy
from tests.servers.redis_server import rows_of

pytestmark = pytest.mark.redis
TAG, DIM, PARTITIONS = "hps_et.shop.item", 4, 4
KEYS = np.arange(40, dtype=np.int64)
numbers = itertools.count()
AT = {f"{TAG}/0": LogPosition("7", 20)}


def vectors(n, sequence):
    return np.full((n, DIM), sequence, np.float32)


def changes(keys, sequence, *, deleted=False):
    n = keys.size
    return RowChanges(keys, vectors(n, sequence % 1000), np.full(n, sequence), np.ones(n, np.bool_) if deleted else None)


def rows(client):
    """The number that each row consists of."""
    return {key: int(np.frombuffer(row, np.float32)[0]) for key, row in rows_of([client], TAG, PARTITIONS).items()}


class Replica:
    """A process with a RocksDB of its own above which it uses Redis, and which applies a log from its beginning."""

    def __init__(self, redis, rocks):
        self.redis, self.rocks = redis, rocks
        for database in (redis, rocks):
            database.open_table(TAG, DIM)
        rocks.load_chunk(TAG, KEYS, vectors(KEYS.size, 0), LoadRecord("files", KEYS.size, KEYS.size))
        redis.stand_above(TAG, rocks)
        rocks.follow_log(TAG)

    def apply(self, some):
        self.redis.copy_changes(TAG, some.at(self.rocks.apply(TAG, some, {})))

    def sees(self):
        out, found = np.full((1, DIM), -1, np.float32), np.zeros(1, np.bool_)
        for one in (self.redis, self.rocks):
            one.fetch(TAG, KEYS[:1], out, found)
        return int(out[0, 0])


@pytest.fixture
def replica(opened, tmp_path):
    with ExitStack() as closed:
        yield lambda: Replica(opened(), closed.enter_context(closing(RocksDatabase(tmp_path / str(next(numbers))))))


@pytest.fixture
def authority(opened):
    """Make databases, each as another process would, with nothing below; their table is open."""

    def make(*, follow=True, **options):
        database = opened(**options)
        database.open_table(TAG, DIM)
        if follow:
            database.follow_log(TAG)
        return database

    return make


def load(database):
    """Claim the load, and do what is left of it."""
    if (database.claim_load(TAG, "files", KEYS.size) or 0) < KEYS.size:
        database.load_chunk(TAG, KEYS, vectors(40, 0), LoadRecord("files", 40, 40))
        database.finish_load(TAG)


def test_the_only_writer_leaves_its_changes_in_redis(replica, client):
    one = replica()
    one.apply(changes(KEYS, 1))
    one.apply(RowChanges(KEYS, vectors(40, 2), np.full(40, 2), KEYS < 20))
    assert rows(client) == dict.fromkeys(range(20, 40), 2)


def test_where_two_write_a_change_only_removes_rows_and_nobody_sees_older_ones(replica, client):
    ahead, behind = replica(), replica()
    behind.apply(changes(KEYS, 1))
    assert rows(client) == dict.fromkeys(range(40), 1)
    ahead.apply(changes(KEYS[:30], 1))
    ahead.apply(changes(KEYS[:30], 2))
    assert rows(client) == dict.fromkeys(range(30, 40), 1)
    behind.apply(changes(KEYS[:30], 2))  # under marks that it last saw when it was alone
    behind.apply(changes(KEYS[:10], 3))
    assert rows(client) == dict.fromkeys(range(30, 40), 1)
    assert (ahead.sees(), behind.sees()) == (2, 3)
    ahead.apply(changes(KEYS[:10], 3))
    assert (ahead.sees(), behind.sees()) == (3, 3)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paces=st.lists(st.integers(0, 1), min_size=6, max_size=6), base=st.sampled_from([1, 255, 2**53, 2**62]))
def test_replicas_that_apply_one_log_at_any_pace_end_with_its_last_changes(authority, client, paces, base):
    client.flushall()
    replicas, done = [authority(), authority()], [0, 0]
    log = [(KEYS, False), (KEYS[:30], False), (KEYS[:20], True), (KEYS[10:30], False)]
    for which in [*paces, *[0] * 4, *[1] * 4]:
        if done[which] < len(log):
            keys, deleted = log[done[which]]
            sequence = base + done[which]
            made = replicas[which].apply(TAG, changes(keys, sequence, deleted=deleted), {})
            last = {key: max(i for i in range(max(done[0], done[1], done[which] + 1)) if key in log[i][0]) for key in keys}
            assert made.tolist() == [last[key] <= done[which] for key in keys]
            done[which] += 1
    ends = {key: max(i for i, (keys, _) in enumerate(log) if key in keys) for key in KEYS.tolist()}
    assert rows(client) == {key: (base + i) % 1000 for key, i in ends.items() if not log[i][1]}


@pytest.mark.parametrize("deleted", [False, True])
def test_a_write_of_a_process_that_follows_nothing_is_later_than_what_was_applied(authority, client, deleted):
    other, one = authority(follow=False), authority()
    other.insert(TAG, KEYS, vectors(40, 1))
    one.apply(TAG, changes(KEYS, 20), {})
    if deleted:
        assert other.delete(TAG, KEYS) == 40
    else:
        other.insert(TAG, KEYS, vectors(40, 500))
    assert not one.apply(TAG, changes(KEYS, 20), {}).any()
    assert rows(client) == ({} if deleted else dict.fromkeys(range(40), 500))
    assert one.apply(TAG, changes(KEYS, 21), {}).all()


def test_an_evicted_row_does_not_come_back_older(authority, client):
    one = authority(overflow_margin=4, overflow_resolution_target=0.5)
    assert one.apply(TAG, changes(KEYS, 20), {}).all()
    left = rows(client)
    assert len(left) <= 4 * PARTITIONS
    assert not one.apply(TAG, changes(KEYS, 19), {}).any()
    assert rows(client) == left


@pytest.mark.parametrize("what", ["partition", "everything", "loaded again"])
def test_what_was_lost_is_applied_again(authority, client, what):
    one = authority(follow=False)
    load(one)
    one.follow_log(TAG)
    one.apply(TAG, changes(KEYS, 20), AT)
    assert authority(follow=False).follow_log(TAG) == AT
    if what == "partition":
        lost = KeyPartition(TAG, 1)
        client.delete(lost.values, lost.mark)
    elif what == "everything":
        client.flushall()
    other = authority(follow=False)
    if what == "loaded again":
        other.drop_table(TAG)
        other.open_table(TAG, DIM)
    load(other)
    assert rows(client) == dict.fromkeys(range(40), 0)
    with pytest.raises(DatabaseError, match="deploy the model with force"):
        one.apply(TAG, changes(KEYS, 21), {})
    assert other.follow_log(TAG) == {}
    assert other.apply(TAG, changes(KEYS, 3), {}).all()
    other.close()
    assert one.follow_log(TAG) == {}
    assert one.apply(TAG, changes(KEYS, 4), {}).all()


def test_nothing_is_left_of_a_dropped_table(authority, client):
    one = authority()
    one.apply(TAG, changes(KEYS, 20), AT)
    assert {key[-1:] for key in client.keys("*")} == {b"v", b"m", b"s", b"u"}
    one.drop_table(TAG)
    assert client.keys() == []
    one.open_table(TAG, DIM)
    with pytest.raises(DatabaseError, match="call follow_log first"):
        one.apply(TAG, changes(KEYS, 20), AT)


def test_order_is_kept_only_where_redis_is_the_authority_and_follows_a_log(replica, authority, client):
    with pytest.raises(DatabaseError, match="the database below"):
        replica().redis.follow_log(TAG)
    client.flushall()
    authority(follow=False).insert(TAG, KEYS, vectors(40, 1))
    partitions = [KeyPartition(TAG, i) for i in range(PARTITIONS)]
    assert not any(client.exists(partition.sequences) for partition in partitions)
    assert all(parse(client.get(partition.mark)).writers == ("*",) for partition in partitions)


@pytest.mark.parametrize("follow", [True, False])
def test_a_full_redis_fails_the_changes(authority, client, follow):
    one = authority(follow=follow)

    def change(some):
        return one.apply(TAG, some, AT) if follow else one.copy_changes(TAG, some)

    change(changes(KEYS, 1))
    client.config_set("maxmemory", "1")
    try:
        change(changes(KEYS[:20], 2, deleted=True))  # a full one still deletes
        with pytest.raises(DatabaseError, match="OOM"):
            change(changes(KEYS, 2))
    finally:
        client.config_set("maxmemory", "0")
    assert rows(client) == dict.fromkeys(range(20, 40), 1)
    change(changes(KEYS, 2))
    assert rows(client) == dict.fromkeys(range(40), 2)


def test_a_write_that_failed_does_not_land_after_the_next_one_of_its_process(server, client):
    with Proxy(server.port) as link, closing(RedisDatabase(link.address, num_partitions=PARTITIONS)) as slow:
        slow.open_table(TAG, DIM)
        slow.insert(TAG, KEYS, vectors(40, 4))
        late = link.held = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slow._nodes, "timeout_s", 0.2)  # of what is held
            with pytest.raises(DatabaseError):
                slow.insert(TAG, KEYS, vectors(40, 5))
        link.held = None
        slow.insert(TAG, KEYS, vectors(40, 6))
        before = link.delivered
        late.set()
        link.wait_delivered(before)
        assert rows(client) == dict.fromkeys(range(40), 6)
