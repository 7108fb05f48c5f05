"""How long a process counts as a user of a table of a shared Redis: as long as it lives, and a while."""

import sys

import pytest

from hps.testing.waiting import wait_until
from tests.ring1.stores.redis.test_redis_users import TAG, SharedRedis, servers, shared  # noqa: F401 - fixtures
from tests.servers.child_processes import ChildProcesses

pytestmark = pytest.mark.redis
USER = """
import sys
from hps.stores.redis.database import RedisDatabase
database = RedisDatabase(sys.argv[1], num_partitions=4, use_lease_s=float(sys.argv[2]))
database.open_table(sys.argv[3], 8)
print("opened", flush=True)
sys.stdin.read()
database.close()
"""


def test_a_process_that_lives_keeps_its_table_and_one_that_died_for_a_while(
    shared: SharedRedis,  # noqa: F811 - the fixture
    children: ChildProcesses,
):
    child = children.start(sys.executable, "-c", USER, shared.address, 1.0, TAG, stdin=-1)
    assert child.stdout.readline() == "opened\n", child.stderr.read()
    me = shared.database(use_lease_s=1.0)
    assert len(shared.users()) == 2
    assert not me.discard_table(TAG)
    (entered,) = shared.users().values()
    wait_until(lambda: min(shared.users().values()) > entered + 2000, "it has lived for longer than an entry counts")
    assert not me.discard_table(TAG)
    child.kill()
    child.wait()
    assert not me.discard_table(TAG)
    wait_until(lambda: me.discard_table(TAG), "it counts no more")
    assert shared.all_keys() == set()
