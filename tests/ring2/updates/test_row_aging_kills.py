"""Replicas whose rows age are killed once each; many kills and other tiers are in tests/nightly/updates."""

from pathlib import Path

import pytest

from tests.tables.aging_storm import run_storm


@pytest.mark.redis
def test_replicas_killed_once_answer_no_row_too_late_and_lose_none_early(tmp_path: Path) -> None:
    run_storm(tmp_path, 1, "hash_map+rocks_db", lambda: None)
