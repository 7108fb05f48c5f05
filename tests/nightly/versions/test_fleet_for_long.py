"""A fleet of three processes for many rounds of deployments, roll-backs, kills and absent repositories."""

from pathlib import Path

from tests.ring1.versions.test_catalog_watch import replica as replica  # fixtures
from tests.ring1.versions.test_catalog_watch import repository as repository
from tests.ring2.versions.test_fleet import Replica, rounds_of_a_fleet
from tests.ring2.versions.test_fleet import three as three


def test_a_fleet_of_three_processes_agrees_for_fifty_rounds(three: list[Replica], repository: Path) -> None:
    rounds_of_a_fleet(three, repository, range(50))
