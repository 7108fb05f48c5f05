"""A process that swaps versions is killed at random moments; the next one serves one whole version, and no disk fills up.

HPS_SWAP_KILLS=100 python -m pytest tests/nightly/versions/test_interrupted_swaps.py
"""

import os
import random
import time
from pathlib import Path
from typing import TextIO

from tests.ring2.versions.test_interrupted_swap import SEED, kill_in_swaps
from tests.servers.child_processes import ChildProcesses

KILLS = int(os.environ.get("HPS_SWAP_KILLS", "20"))
LONGEST_S = 0.6  # a few swaps


def test_a_process_that_is_killed_in_swaps_leaves_one_whole_version_to_the_next(
    tmp_path: Path, children: ChildProcesses
) -> None:
    chance = random.Random(SEED)

    def at_random(lines: TextIO) -> None:
        time.sleep(chance.uniform(0, LONGEST_S))

    kill_in_swaps(tmp_path, children, [at_random] * KILLS)
