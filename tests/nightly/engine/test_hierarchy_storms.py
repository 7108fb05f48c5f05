"""The whole hierarchy against a dict for as long as a night has room."""

import pytest

from tests.ring1.engine.test_hierarchy_properties import EngineHierarchy, Hierarchy, PersistentOnly, VolatileOnly
from tests.ring1.engine.test_hierarchy_properties import test_hierarchy_agrees_with_a_dict as agrees_with_a_dict


@pytest.mark.parametrize(
    ("machine", "examples"), [(Hierarchy, 1000), (PersistentOnly, 500), (VolatileOnly, 500), (EngineHierarchy, 100)]
)
def test_hierarchy_agrees_with_a_dict_in_many_more_cases(machine: type[Hierarchy], examples: int) -> None:
    agrees_with_a_dict(machine, examples)
