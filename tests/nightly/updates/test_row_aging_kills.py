"""Replicas whose rows age are killed many times, on every persistent tier.

HPS_AGING_KILLS=20 python -m pytest tests/nightly/updates/test_row_aging_kills.py
"""

import os
import random
import time
from pathlib import Path

import pytest

from tests.tables.aging_storm import TTL_S, run_storm

KILLS = int(os.environ.get("HPS_AGING_KILLS", "4"))  # of each replica
_chance = random.Random(1)


@pytest.mark.redis
@pytest.mark.parametrize("tiers", ["hash_map+rocks_db", "rocks_db", "row_files"])
def test_replicas_killed_often_answer_no_row_too_late_and_lose_none_early(tiers: str, tmp_path: Path) -> None:
    run_storm(tmp_path, KILLS, tiers, lambda: time.sleep(_chance.uniform(0, TTL_S)))
