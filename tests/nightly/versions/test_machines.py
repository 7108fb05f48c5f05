"""The state machines of versions, each for much longer than ring 1 lets them run.

HPS_HYPOTHESIS_EXAMPLES=2000 python -m pytest tests/nightly/versions/test_machines.py
"""

import os

from hypothesis import settings

from tests.ring1.versions.test_fleet_machine import FleetMachine
from tests.ring1.versions.test_live_models_machine import LiveModelsMachine
from tests.ring1.versions.test_versions_machine import PersistentVersionsMachine, VersionsMachine

EXAMPLES = int(os.environ.get("HPS_HYPOTHESIS_EXAMPLES", "200"))


for _short in (FleetMachine, LiveModelsMachine, VersionsMachine, PersistentVersionsMachine):
    _case = type(f"Long{_short.__name__}", (_short,), {}).TestCase  # each class has settings of its own
    _case.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None, print_blob=True)
    globals()[f"Test{_short.__name__}"] = _case
del _case, _short
