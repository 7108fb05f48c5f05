"""Which missed keys deserve a place: the hit rate of admission policies, over the best that the capacity allows.

A simulation of the tables of `cuda/embedding_cache.cuh`: pairs of buckets of 7 slots, scores of 4 bits, a batch's distinct
misses inserted after its queries. It needs no GPU, and its "every miss" reproduces what the kernels reached on an H200 before
they chose (0.974 of ideal after 200 batches, 0.979 after 600). The ideal is the mass of the C most frequent of the keys, for
C slots. `traffic`:

    steady              popularity by rank^-alpha
    drift               before every batch, this share of the ids change ranks with each other
    jump                every 200 batches, 0.3 of them
    scan                every fourth batch asks each id in turn instead; the hit rate is that of the other batches
    after a warm-up     steady, and the table is full of keys inserted at random; the hit rate of batches 5 to 50
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.harness import Report
from hps.ground.hashing import mix, scale
from hps.tools.profiling.workloads import power_law_ranks

EVERY, CHANCE, IDLE, SECOND, SKETCH, CHOSEN = range(6)
POLICIES = {
    "every miss": EVERY,  # what the kernels did before
    "a quarter of the misses": CHANCE,
    "in place of idle keys": IDLE,
    "second miss": SECOND,
    "sketch of misses": SKETCH,
    "in place of idle keys, or second miss": CHOSEN,  # what cuda/insert.cu does
}
_SHIFTING = ("drift 0.001", "drift 0.003", "drift 0.01", "jump")
_SLOTS, _TOP = 7, 15
_Keys = npt.NDArray[np.int32]


def run(report: Report, quick: bool) -> None:
    """Measure all policies on all traffic, and the two that matter on a table of 2^24 rows."""
    rows, batches = (1 << 16, 400) if quick else (1 << 22, 800)
    for traffic, alpha in [("steady", 0.99), ("steady", 1.05), ("steady", 1.2), *((name, 1.05) for name in _SHIFTING)]:
        _compare(report, traffic, alpha, rows, batches, tuple(POLICIES))
    _compare(report, "scan", 1.05, rows, batches, tuple(POLICIES))
    _compare(report, "after a warm-up", 1.05, rows, 50, tuple(POLICIES))
    if not quick:
        both = ("every miss", "in place of idle keys, or second miss")
        _compare(report, "steady", 1.05, 1 << 24, 1200, both)


def _compare(report: Report, traffic: str, alpha: float, rows: int, batches: int, policies: tuple[str, ...]) -> None:
    batch, capacity = rows >> 6, rows // 10
    rng = np.random.default_rng(report.seed)
    keys = np.empty((batches, batch), np.int32)
    for nth, asked in enumerate(_batches(rng, traffic, alpha, rows, batch, batches)):
        keys[nth] = asked
    before = rng.permutation(rows)[:capacity].astype(np.int32) if traffic == "after a warm-up" else np.empty(0, np.int32)
    pairs = -(-capacity // (2 * _SLOTS))
    g = 1.0 - alpha
    ideal = ((capacity + 1.0) ** g - 1.0) / (float(rows) ** g - 1.0)
    counted = np.ones(batches, np.bool_)
    if traffic == "scan":
        counted[3::4] = False
    spans = {"steady": [(150, 200), (450, 600), (batches - 100, batches)], "after a warm-up": [(5, 50)]}
    for policy in policies:
        hits, admitted, written = simulate(keys, before, _homes(rows, pairs), pairs, POLICIES[policy])
        for start, stop in sorted({(first, last) for first, last in spans.get(traffic, [(200, batches)]) if last <= batches}):
            of_batch = hits[start:stop][counted[start:stop]] / batch
            axes = {"traffic": traffic, "alpha": alpha, "rows": rows, "policy": policy, "batches": f"{start} to {stop}"}
            figures = {
                "hit_rate": float(of_batch.mean()),
                "of_ideal": float(of_batch.mean() / ideal),
                "admitted_per_key": float(admitted[start:stop].mean() / batch),
                "scores_written_per_key": float(written[start:stop].mean() / batch),
            }
            report.add(axes | {"batch": batch, "capacity": capacity}, figures)


def _batches(rng: np.random.Generator, traffic: str, alpha: float, rows: int, batch: int, batches: int) -> Iterator[_Keys]:
    """The keys of `hps.tools.profiling.workloads.power_law_keys`, whose permutation the traffic changes."""
    ids = np.random.default_rng(31337).permutation(rows).astype(np.int32)
    share, every = (float(traffic.split()[1]), 1) if traffic.startswith("drift") else (0.3, 200)
    for nth in range(batches):
        if nth and nth % every == 0 and traffic in _SHIFTING:
            moved = np.unique(rng.integers(0, rows, int(rows * share)))
            ids[moved] = ids[rng.permutation(moved)]
        if traffic == "scan" and nth % 4 == 3:
            yield ((nth // 4 * batch + np.arange(batch)) % rows).astype(np.int32)
            continue
        yield ids[power_law_ranks(rng, batch, rows, alpha)]


@njit
def _homes(rows, pairs):  # type: ignore[no-untyped-def]
    homes = np.empty(rows, np.int32)
    for key in range(rows):
        homes[key] = scale(mix(key), 2 * pairs)
    return homes


@njit
def _free(slot_keys, home):  # type: ignore[no-untyped-def]
    """An empty slot at home or next door, or -1."""
    for place in range(2 * _SLOTS):
        slot = _SLOTS * (home ^ (place // _SLOTS)) + place % _SLOTS
        if slot_keys[slot] < 0:
            return slot
    return -1


@njit
def _used(score, policy):  # type: ignore[no-untyped-def]
    """The score of a slot that is hit."""
    if policy == EVERY:
        return _TOP
    return score | 8 if score < 8 else _TOP if score < 12 else score


@njit
def _estimate(sketch, key):  # type: ignore[no-untyped-def]
    """Count a miss in two halves of counters; returns the smaller count."""
    hashed, half = mix(key + 123_456_789), sketch.size // 2
    first, second = scale(hashed, half), half + scale(hashed << np.uint64(32), half)
    count = min(sketch[first], sketch[second])
    for place in (first, second):
        if sketch[place] == count and count < _TOP:
            sketch[place] += 1
    return min(sketch[first], sketch[second])


@njit
def simulate(keys, before, homes, pairs, policy):  # type: ignore[no-untyped-def]
    """Hits, keys admitted and scores written of each batch."""
    slots = 2 * _SLOTS * pairs
    slot_of, missed_in = np.full(homes.size, -1, np.int32), np.full(homes.size, -1, np.int32)
    slot_keys, scores = np.full(slots, -1, np.int32), np.zeros(slots, np.int8)
    refused = np.zeros(2 * pairs, np.uint8)  # of each bucket: 8 bits of the hash of the key that was refused last
    sketch, counted = np.zeros(4 * slots if policy == SKETCH else 2, np.uint8), 0
    for key in before:
        slot = _free(slot_keys, homes[key])
        if slot >= 0:
            slot_keys[slot], slot_of[key], scores[slot] = key, slot, policy == EVERY
    batches, batch = keys.shape
    hits, admitted, written = np.zeros(batches, np.int64), np.zeros(batches, np.int64), np.zeros(batches, np.int64)
    missing = np.empty(batch, np.int32)
    for nth in range(batches):
        misses = 0
        for key in keys[nth]:
            slot = slot_of[key]
            if slot >= 0:
                hits[nth] += 1
                score = _used(scores[slot], policy)
                written[nth] += score != scores[slot]
                scores[slot] = score
            elif missed_in[key] != nth:
                missed_in[key], missing[misses] = nth, key
                misses += 1
        for key in missing[:misses]:
            home, score = homes[key], int(policy == EVERY)
            slot = _free(slot_keys, home)
            if slot < 0:
                first = _SLOTS * home
                slot = first + np.argmin(scores[first : first + _SLOTS])
                least, name = scores[slot], np.uint8(mix(key))
                second = refused[home] == name
                if policy == EVERY:
                    admits, ages = True, False
                elif policy == CHANCE:
                    admits, ages = (mix(key + nth) & np.uint64(3)) == 0, False
                elif policy == IDLE:
                    admits, ages = least == 0, True
                elif policy == SECOND:
                    admits, ages = second, name % 2 == 0
                elif policy == SKETCH:
                    admits, ages = _estimate(sketch, key) >= 3, name % 4 == 0
                    counted += 1
                    if counted % (2 * slots) == 0:
                        for place in range(sketch.size):
                            sketch[place] //= 2
                else:
                    admits, ages = least == 0 or second, name % 2 == 0
                if not admits:
                    refused[home] = name
                    if ages:
                        for other in range(first, first + _SLOTS):
                            scores[other] -= scores[other] > 0
                    continue
                slot_of[slot_keys[slot]] = -1
                for other in range(first, first + _SLOTS):
                    scores[other] -= least
                score = 4 if (policy in (SECOND, CHOSEN) and second) or policy == SKETCH else 1
            slot_keys[slot], slot_of[key], scores[slot] = key, slot, score
            admitted[nth] += 1
    return hits, admitted, written
