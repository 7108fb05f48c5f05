"""What `check_integrity` finds in memory that a kernel should not have left."""

from collections.abc import Callable

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.cache.cpu.sets import STATE_WORDS
from hps.cache.cuda import kernels, structs
from hps.cache.cuda.integrity import check_buckets
from hps.cache.integrity import hashes_of
from hps.testing.caches import AWKWARD_KEYS, spec, vectors_of

PAIRS, KEYS = 4, np.arange(1, 13)


def test_hashes_are_those_that_kernels_compute() -> None:
    homes = (hashes_of(AWKWARD_KEYS) >> np.uint64(32)) * np.uint64(2 * 1000) >> np.uint64(32)
    assert homes.tolist() == [kernels.home_of(key, 1000) for key in AWKWARD_KEYS.tolist()]


def own_a_set(lines: np.ndarray) -> None:
    lines.view(np.uint16)[0, 0] |= 1


def repeat_a_key(lines: np.ndarray) -> None:
    sets, slots = np.nonzero(lines.view(np.uint8)[:, 2:16])
    lines[sets[0], 2 + slots[1]] = lines[sets[0], 2 + slots[0]]
    assert sets[0] == sets[1]


def forget_a_key(lines: np.ndarray) -> None:
    lines.view(np.uint8)[:, 2:16][lines.view(np.uint8)[:, 2:16].nonzero()[0][0]] = 0


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (own_a_set, "1 sets are owned by a writer"),
        (repeat_a_key, "1 keys are resident twice"),
        (forget_a_key, "expected the 100 of its counters"),
        (lambda lines: lines.__setitem__(slice(None), lines[::-1].copy()), "keys are in a set that no query searches"),
    ],
)
def test_damage_of_a_set_is_found(damage: Callable[[np.ndarray], None], found: str) -> None:
    cache, keys = NumpyCache.create([spec(4)], [1000], 0), np.arange(100)
    cache.insert(0, keys, vectors_of(keys, 4))
    assert cache.check_integrity() == []
    damage(cache.open_tables()[0].lines)
    [finding] = cache.check_integrity()
    assert found in finding
    cache.close()


def test_damage_of_a_static_table_is_found() -> None:
    cache = NumpyCache.create([spec(4)], [1000], 0, static=True)
    keys = np.arange(int(0.95 * cache.stats(0).capacity_rows))
    cache.insert(0, keys, vectors_of(keys, 4))
    assert cache.check_integrity() == []
    table = cache.open_tables()[0]
    strays = table.state[STATE_WORDS:]
    assert strays.any()
    strays[5] += 1
    assert cache.check_integrity() == ["cached table hps_et.shop.item: 1 sets count a wrong number of strays"]
    strays[5] -= 1
    line = table.lines[3].copy()
    table.lines[3], table.lines[4] = table.lines[4], line
    misplaced, _strays = cache.check_integrity()
    assert "keys are in a set that no query searches" in misplaced
    cache.close()


def buckets_with(keys: np.ndarray, *, static: bool) -> np.ndarray:
    """Keys in their buckets, at home while there is room, as a kernel leaves them."""
    buckets = np.zeros((2 * PAIRS, 8), np.int64)
    buckets[2 * kernels.zero_pair(PAIRS) :, 1:][:2] = kernels.zero_filler(PAIRS)
    fillers, used = buckets[:, 1:].copy(), np.zeros(2 * PAIRS, np.int64)
    for key in keys.tolist():
        home = kernels.home_of(key, PAIRS)
        other = kernels.other_bucket(key, PAIRS) if static else home ^ 1
        bucket = home if used[home] < kernels.SLOTS else other
        assert buckets[bucket, 1 + used[bucket]] == fillers[bucket, used[bucket]]
        buckets[bucket, 1 + used[bucket]] = key
        buckets[home, 0] += (bucket != home) << 24
        used[bucket] += 1
    return buckets


@pytest.mark.parametrize("static", [False, True])
def test_damage_of_a_bucket_is_found(static: bool) -> None:
    crowded = np.array([key for key in range(1, 400) if kernels.home_of(key, PAIRS) == 2][: kernels.SLOTS + 2])
    asked = np.union1d(crowded, KEYS)
    packed = structs.TABLE.pack(0, 0, 0, kernels.zero_filler(PAIRS), kernels.zero_pair(PAIRS), PAIRS, 4, 1)
    buckets = buckets_with(asked, static=static)
    held = buckets[:, 1:] != buckets_with(asked[:0], static=static)[:, 1:]
    if static:
        buckets[:, 0] |= (held << np.arange(kernels.SLOTS)).sum(1) << 16
        buckets[:, 1:][~held] = crowded[0]  # what a key leaves where it was

    def findings(counted: int = asked.size) -> list[str]:
        return check_buckets("t", buckets, packed, static=static, counted_rows=counted)

    assert findings() == []
    assert findings(7) == [f"cached table t: {asked.size} rows are resident, expected the 7 of its counters"]
    buckets[3, 0] |= 1
    assert findings() == ["cached table t: 1 sets are owned by a writer, expected none at rest"]
    buckets[3, 0] &= ~1
    buckets[2, 0] += 1 << 24
    assert findings() == ["cached table t: 1 buckets count a wrong number of strays"]
    buckets[2, 0] |= 255 << 24  # of a static table: any number
    assert len(findings()) == (0 if static else 1)
    if static:  # the next bucket is of the other side, so neither of a key's two
        buckets[:] = np.roll(buckets, 1, 0)
        assert findings()[0] == f"cached table t: {asked.size} keys are in a set that no query searches"
