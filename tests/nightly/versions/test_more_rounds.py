"""What rings 1 and 2 show of versions in few rounds and orders, in many more; and of secrets, in a log of JSON."""

from pathlib import Path
from typing import Any

import pytest

from tests.ring1.versions.test_following import replica as replica  # fixtures
from tests.ring1.versions.test_following import repository as repository
from tests.ring1.versions.test_no_older_rows import COLD, NO_CACHE, WARM, Server
from tests.ring1.versions.test_no_older_rows import server as server
from tests.ring2.versions.test_fleet import Replica, rounds_of_a_fleet
from tests.ring2.versions.test_fleet import three as three
from tests.ring2.versions.test_identity import document as document
from tests.ring2.versions.test_identity import no_secret_is_told
from tests.servers.child_processes import ChildProcesses


def test_a_fleet_of_three_processes_agrees_for_fifty_rounds(three: list[Replica], repository: Path) -> None:
    rounds_of_a_fleet(three, repository, range(50))


def test_no_secret_is_in_a_log_of_json(children: ChildProcesses, tmp_path: Path, document: dict[str, Any]) -> None:
    no_secret_is_told(children, tmp_path, document, "json")


@pytest.mark.parametrize(("before", "after"), [(NO_CACHE, WARM), (COLD, WARM), (WARM, COLD), (WARM, NO_CACHE)])
def test_time_goes_forward_in_every_order_with_two_preemptions(
    server: Server, before: dict[str, bool], after: dict[str, bool]
) -> None:
    assert server.explore(before, after, preemptions=2) > 300
