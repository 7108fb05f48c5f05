"""Replicas are killed once each while they follow streams; many kills and Kafka are in tests/nightly/updates."""

from pathlib import Path

import pytest

from hps.testing.waiting import wait_until
from tests.servers.child_processes import ChildProcesses
from tests.tables.killed_replicas import Replica, run_on_streams


def once_it_has_begun(replica: Replica, round_s: float) -> None:
    wait_until(lambda: set(replica.ask(do="positions").values()) - {"", "0-0"}, "it has applied something")


@pytest.mark.redis
def test_replicas_killed_once_have_on_every_tier_the_int8_rows_of_a_replay(tmp_path: Path, children: ChildProcesses) -> None:
    run_on_streams(tmp_path, children, 1, 40_000, "int8", once_it_has_begun)
