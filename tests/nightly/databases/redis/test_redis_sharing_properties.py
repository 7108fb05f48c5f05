"""The random search of `tests/ring1/databases/redis/test_redis_sharing_properties.py`, longer and each time another."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.ring1.databases.redis.test_redis_sharing_properties import sharing

pytestmark = pytest.mark.redis


def test_both_processes_read_what_either_wrote(server):
    run_state_machine_as_test(sharing(server), settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
