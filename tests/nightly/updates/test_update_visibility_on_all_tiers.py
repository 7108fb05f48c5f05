"""Once an update is acknowledged no lookup that begins gets an older vector, on any public path, and no lookup gets a mixture.

HPS_VISIBLE_VECTORS=100000000 python -m pytest tests/nightly/updates/test_update_visibility_on_all_tiers.py   so many in all
"""

import os
from itertools import cycle
from pathlib import Path

import pytest

from tests.tables.update_witness import look_up_while_updates_come

TIERS = (
    "rocks_db",
    "row_files",
    "cache+row_files",
    "redis_cluster+row_files",
    "cache+rocks_db",
    "hash_map+rocks_db",
    "cache+hash_map+rocks_db",
    "redis_cluster+rocks_db",
    "cache+redis_cluster+rocks_db",
    "redis_cluster",
    "cache+redis_cluster",
    "hash_map",
    "cache+hash_map",
)
VECTORS = int(os.environ.get("HPS_VISIBLE_VECTORS", "20000000")) // len(TIERS)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.parametrize(("kind", "tiers"), list(zip(cycle(("kafka", "redis_stream")), TIERS, strict=False)))
def test_no_lookup_after_the_acknowledgement_gets_an_older_vector(kind: str, tiers: str, tmp_path: Path) -> None:
    look_up_while_updates_come(kind, tiers, tmp_path, VECTORS)
