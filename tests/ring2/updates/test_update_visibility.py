"""Once an update is acknowledged no lookup that begins gets an older vector; the other tiers are in tests/nightly/updates."""

from pathlib import Path

import pytest

from tests.tables.update_witness import look_up_while_updates_come


@pytest.mark.redis
@pytest.mark.parametrize(("kind", "tiers"), [("redis_stream", "cache+rocks_db")])
def test_no_lookup_after_the_acknowledgement_gets_an_older_vector(kind: str, tiers: str, tmp_path: Path) -> None:
    look_up_while_updates_come(kind, tiers, tmp_path, 200_000)
