"""What a profile asks: drawn keys have the popularity that was asked for, recorded ones come in their order."""

import numpy as np
import pytest

from hps.errors import InvalidInputError, ModelFileError
from hps.statistics.key_traces import KeyTrace
from hps.tools.profiling.keys import POOL_KEYS, KeyPool, Workload, recorded_keys

ROWS = 1000


def shares(keys):
    """The share of the requests that each key has, the most popular first."""
    return np.sort(np.unique(keys, return_counts=True)[1])[::-1] / keys.size


@pytest.mark.parametrize(
    ("share", "coverage", "hottest", "part"), [(0.1, 0.9, 100, 0.9), (1.0, 0.5, 1, 1 / ROWS), (0.0, 0.3, 1, 0.3)]
)
def test_hot_keys_get_their_share_of_the_requests(share, coverage, hottest, part):
    found = shares(Workload("hot-keys", hot_share=share, hot_coverage=coverage).draw(ROWS))
    assert found[:hottest].sum() == pytest.approx(part, rel=0.01 if hottest > 1 else 0.2)
    assert found.size == ROWS


def test_the_power_law_is_that_of_its_alpha():
    found = shares(Workload(alpha=1.2).draw(ROWS))
    expected = np.diff(np.arange(1, ROWS + 1) ** -0.2) / (ROWS**-0.2 - 1)
    assert found[:10] == pytest.approx(expected[:10], rel=0.05)


def test_drawn_keys_are_those_of_the_table_and_differ_between_tables():
    ids = np.arange(ROWS, dtype=np.int64) * -7
    workload = Workload("uniform")
    first, second = (workload.draw(ROWS, place, ids) for place in (0, 1))
    assert first.size == POOL_KEYS
    assert set(np.unique(first)) == set(ids)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("rows", [0, 1 << 40])
def test_rows_that_nobody_can_draw_from_are_refused(rows):
    with pytest.raises(InvalidInputError, match="--rows"):
        Workload().draw(rows)


def test_lookups_take_one_stretch_after_the_other_and_begin_again():
    pool = KeyPool({"item": np.arange(10)}, 4)
    assert [pool.take(number)["item"].tolist()[0] for number in range(4)] == [0, 4, 1, 5]
    assert KeyPool({"item": np.arange(3)}, 5).take(7)["item"].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "keys", [np.array([3, -1, 3]), np.zeros(0, np.int64), np.zeros(3, np.float32), np.zeros((2, 2), np.int64), None]
)
def test_a_file_of_keys_is_for_every_table_and_one_without_is_refused(tmp_path, keys):
    if keys is not None:
        np.save(tmp_path / "keys.npy", keys)
    if keys is not None and keys.any():
        found = recorded_keys(tmp_path / "keys.npy", "m", ["user", "item"])
        assert {table: keys.tolist() for table, keys in found.items()} == {"user": [3, -1, 3], "item": [3, -1, 3]}
        return
    with pytest.raises((InvalidInputError, ModelFileError), match=r"reading (recorded )?keys"):
        recorded_keys(tmp_path / "keys.npy", "m", ["item"])


def recording(keys, model="m", hashed=False):
    keys = np.array(keys, np.int64)
    return KeyTrace(model, "item", keys, np.arange(keys.size), 1.0, 1.0, hashed, keys.size)


@pytest.mark.parametrize(
    ("traces", "problem"),
    [
        ([recording([3] * 3), recording([5, 1, 5, 9]), recording([9] * 3), recording([7] * 20, "other")], None),
        *[
            ([recording([5], hashed=True)], "hashes"),
            ([recording([])], "no keys of item"),
            ([recording([5], "n")], "no keys of"),
        ],
    ],
)
def test_of_several_recordings_the_longest_is_replayed_in_its_order(tmp_path, monkeypatch, traces, problem):
    monkeypatch.setattr("hps.tools.profiling.keys.read_traces", lambda path: traces)
    if problem:
        with pytest.raises(InvalidInputError, match=problem):
            recorded_keys(tmp_path / "trace", "m", ["item"])
    else:
        assert recorded_keys(tmp_path / "trace", "m", ["item"])["item"].tolist() == [5, 1, 5, 9]
