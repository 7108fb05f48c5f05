"""Bags become batches and the arrays of a network; `tests/ring1/engine/test_pooled_lookups.py` has what is refused."""

import re
from typing import Any

import numpy as np
import pytest

from hps.errors import InvalidInputError
from hps.tensors.bags import Bags, Combiner, input_arrays, pooling_of
from hps.tensors.batch import Batch, Part, pooled_batch
from hps.tensors.pooling import bag_arrays, first_key
from hps.types import TableSpec

SPECS = [TableSpec("m", name, dim, 0.0, 100) for name, dim in (("a", 4), ("b", 2), ("c", 3))]
KEYS = np.arange(6)


def pooled(tables: dict[Any, Bags], out: Any = None, *, on_cuda: bool = False) -> Batch:
    return pooled_batch(tables, out, "abc".index, SPECS, on_cuda=on_cuda)


@pytest.mark.parametrize(
    ("bags", "count", "hotness", "firsts"),
    [
        *[(Bags(KEYS.reshape(2, 3)), 2, 3, [0, 3, 6]), (Bags(KEYS.reshape(6, 1)), 6, 1, [0, 1, 2, 3, 4, 5, 6])],
        (Bags(KEYS, [0, 2, 2, 6]), 3, 0, [0, 2, 2, 6]),
        (Bags(KEYS, [0, 2, 2], include_last_offset=False), 3, 0, [0, 2, 2, 6]),
        *[(Bags(KEYS, [0], include_last_offset=False), 1, 0, [0, 6]), (Bags(KEYS[:0], [0]), 0, 0, [0])],
        (Bags(KEYS[:0], [], include_last_offset=False), 0, 0, [0]),
    ],
)
def test_a_bag_begins_where_its_offset_or_its_row_is(bags: Bags, count: int, hotness: int, firsts: list[int]) -> None:
    n = bags.keys.size
    pooling = pooling_of("a", bags, n, bags.keys.shape, False)
    assert (pooling.count, pooling.hotness) == (count, hotness)
    assert [first_key(bag_arrays(pooling), bag, n) for bag in range(count + 1)] == firsts


def test_options_of_bags_are_those_of_their_pooling() -> None:
    bags = Bags(KEYS, [0, 6], np.ones(6, np.float32), combiner="sqrtn", max_norm=0.5, padding_key=0)
    pooling, plain = pooling_of("a", bags, 6, (6,), False), pooling_of("a", Bags(KEYS, [0, 6]), 6, (6,), False)
    assert (pooling.combiner, pooling.max_norm, pooling.padding_key) == (Combiner.SQRTN, 0.5, 0)
    assert [bag_arrays(one)[3:] for one in (pooling, plain)] == [(2, 0.5, True, 0), (0, 0.0, False, 0)]
    assert [bag_arrays(one)[2].size for one in (pooling, plain)] == [6, 0]


@pytest.mark.parametrize(("size", "shown"), [(8, "[7, 6, 5, 4, 3, 2, 1, 0]"), (9, "[8, 7, 6, 5]...[1, 0]")])
def test_long_offsets_that_are_wrong_are_shown_in_part(size: int, shown: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"got offsets {shown} for 6 keys")):
        pooled({"a": Bags(KEYS, np.arange(size)[::-1])})


class OnDevice:
    """What is asked of a torch tensor in CUDA memory before a CUDA cache reads it."""

    is_cuda = True

    def numel(self) -> int:
        return 27


def test_three_tables_share_the_columns_of_one_output() -> None:
    tables = {name: Bags(KEYS.reshape(3, 2)) for name in "bca"}
    out = np.zeros((3, 9), np.float32)
    for nth, one in enumerate(pooled(tables, out).outs):
        one[:] = nth + 1
    assert out.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3, 3]] * 3
    shared = OnDevice()
    made = pooled(tables, shared, on_cuda=True).outs
    assert all(isinstance(one, Part) and one.tensor is shared for one in made)
    assert [(one.start, one.total, one.width) for one in made] == [(0, 27, 9), (2, 27, 9), (5, 27, 9)]


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        *[([1, 2], None, {"x": np.array([1, 2])}), ([1.5, 2], None, {"x": np.array([1.5, 2], np.float32)})],
        *[([1, 2], np.float32, {"x": np.array([1, 2], np.float32)}), ([1.5], np.float16, {"x": np.array([1.5], np.float16)})],
        ([1.5], np.int64, {"x": np.array([1.5])}),  # not truncated: the network refuses it
        (np.array([1, 2], np.int32), np.int64, {"x": np.array([1, 2])}),
        (np.array([1, 2], np.int32), None, {"x": np.array([1, 2], np.int32)}),
        *[(np.array([True]), np.float32, {"x": np.array([True])}), (Bags([1, 2]), None, {"x": np.array([1, 2])})],
        (Bags([1, 2], [0, 2]), None, {"x": np.array([1, 2]), "x.offsets": np.array([0, 2])}),
        (
            Bags([1, 2], [0, 1], [0.5, 1], include_last_offset=False),
            None,
            {"x": np.array([1, 2]), "x.offsets": np.array([0, 1, 2]), "x.weights": np.array([0.5, 1], np.float32)},
        ),
    ],
)
def test_inputs_of_a_network_are_arrays(given: Any, dtype: Any, expected: dict[str, np.ndarray]) -> None:
    arrays = input_arrays("x", given, dtype)
    assert list(arrays) == list(expected)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.dtype == expected[name].dtype
        assert array.flags.c_contiguous
