"""The random searches of `tests/ring1/stores/hash_map/test_hash_map_properties.py`, longer and each time others."""

from hypothesis import given, settings

from tests.ring1.stores.hash_map import test_hash_map_properties as short


class LongMachine(short.HashMapMachine):
    pass


LongMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestHashMapMachine = LongMachine.TestCase

test_partitions_hold_exactly_as_many_rows_as_margin_target_and_batch_say = settings(max_examples=2000, deadline=None)(
    given(**short.HISTORIES)(
        short.test_partitions_hold_exactly_as_many_rows_as_margin_target_and_batch_say.hypothesis.inner_test
    )
)
