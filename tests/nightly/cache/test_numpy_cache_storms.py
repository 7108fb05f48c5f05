"""The NumPy cache for as long as a night has room: readers and writers meet often, and sequences of calls are many."""

from hypothesis import settings

from tests.ring1.cache import test_cache_properties as properties
from tests.ring1.cache.test_numpy_cache import TestNumpyCache as NumpyContract


class TestUnderStress(NumpyContract):
    stress_queries = 400


for name in dir(TestUnderStress):
    if name.startswith("test_") and "torn" not in name:
        setattr(TestUnderStress, name, None)  # ring 1 has it


def machine_of(short: type[properties.CacheMachine]) -> type:
    case = type(f"Long{short.__name__}", (short,), {}).TestCase
    case.settings = settings(max_examples=300, stateful_step_count=40)
    return case


TestFloat32 = machine_of(properties.NumpyCacheMachine)
TestRowFormats = machine_of(properties.RowFormatsMachine)
TestInt8 = machine_of(properties.Int8Machine)
TestStatic = machine_of(properties.StaticMachine)
del NumpyContract
