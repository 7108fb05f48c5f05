"""In every order of threads with at most two preemptions, no lookup gets an older row than an earlier one."""

import pytest

from tests.ring1.versions.test_no_older_rows import COLD, NO_CACHE, WARM, Server
from tests.ring1.versions.test_no_older_rows import server as server  # a fixture


@pytest.mark.parametrize(("before", "after"), [(NO_CACHE, WARM), (COLD, WARM), (WARM, COLD), (WARM, NO_CACHE)])
def test_time_goes_forward_in_every_order(server: Server, before: dict[str, bool], after: dict[str, bool]) -> None:
    assert server.explore(before, after, preemptions=2) > 300
