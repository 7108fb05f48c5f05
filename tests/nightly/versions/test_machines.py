"""The state machines of versions, each for much longer than ring 1 lets them run.

HPS_HYPOTHESIS_EXAMPLES=2000 python -m pytest tests/nightly/versions/test_machines.py
"""

import os
from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

from tests.ring1.versions.test_fleet_machine import FleetMachine
from tests.ring1.versions.test_live_models_machine import LiveModelsMachine
from tests.ring1.versions.test_versions_machine import PersistentVersionsMachine, VersionsMachine

EXAMPLES = int(os.environ.get("HPS_HYPOTHESIS_EXAMPLES", "200"))


def long(machine: type[RuleBasedStateMachine]) -> Any:
    """The tests of a machine for longer; each class has settings of its own."""
    case = type(f"Long{machine.__name__}", (machine,), {}).TestCase
    case.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None, print_blob=True)
    return case


TestFleet, TestLiveModels = long(FleetMachine), long(LiveModelsMachine)
TestVersions, TestPersistentVersions = long(VersionsMachine), long(PersistentVersionsMachine)
