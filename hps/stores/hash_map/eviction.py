"""Keeps partitions of the hash map within `overflow_margin`, exactly.

A batch is planned before it is inserted. If a partition would exceed the margin, rows that are not in the batch are evicted
until the partition, with the batch, has `overflow_resolution_target` of the margin, or only the batch if that is more. If a
batch has more keys of a partition than the margin, only the last of them are inserted (of repeated keys the last), and all
other rows go. So a partition never exceeds the margin, a batch never evicts its own rows, and exactly the necessary number
of rows is evicted.

`evict_oldest` uses the last access (fetch or insert). `evict_least_used` uses the number of accesses, which is halved for the
remaining rows, so that old accesses fade. Ties, and `evict_random`, are drawn at random. Each eviction walks the table once or
twice; with a target of 0.8, this happens once per 0.2 of the margin in new keys.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, uint32, uint64, void

from hps.ground.hashing import mix
from hps.ground.kernels.numba_atomics import load_relaxed, load_relaxed_u32, lowest_bit, store_relaxed_u32
from hps.ground.kernels.numba_kernels import kernel
from hps.ground.key_sets import slot_of
from hps.stores.hash_map.layout import (
    COUNT,
    COUNTERS,
    KEEP,
    KEYS,
    LAYOUT,
    SEGMENTS,
    STAMP,
    U1,
    U6,
    U63,
    bucket_at,
    buckets_in,
    key_of,
    mask_of,
    row_of,
    search,
    stamp_of,
    unlink,
)
from hps.types import BoolArray, KeyArray

Policy = Literal["evict_random", "evict_least_used", "evict_oldest"]
ACCESS: Final[dict[Policy, int]] = {"evict_random": KEEP, "evict_least_used": COUNT, "evict_oldest": STAMP}
"""The record of an access to a row, by policy."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@kernel(void, LAYOUT, KEYS, int64, boolean[::1], COUNTERS, COUNTERS)
def _plan(layout, keys, margin, chosen, batch_rows, new_rows):  # type: ignore[no-untyped-def]
    """Choose the keys to insert: the last of each key, the last `margin` keys per partition. Count them, and new keys."""
    partitions = np.uint64(batch_rows.size)
    room = 1
    while room < 2 * keys.size:
        room *= 2
    slots, wrap = np.full(room, -1, np.int32), np.uint64(room - 1)
    for position in range(keys.size - 1, -1, -1):
        key = keys[position]
        hashed = mix(key)
        slot = slot_of(hashed, key, keys, slots, wrap)
        if slots[slot] >= 0:
            continue
        slots[slot] = position
        partition = np.int64(hashed % partitions)
        if batch_rows[partition] < margin:
            chosen[position] = True
            batch_rows[partition] += 1
            if not search(layout, hashed, key)[0]:
                new_rows[partition] += 1


@kernel(void, LAYOUT, KEYS, boolean[::1], uint64[::1])
def _protect(layout, keys, chosen, protected):  # type: ignore[no-untyped-def]
    """Set the bits of the rows that the batch will replace."""
    for position in range(keys.size):
        if chosen[position]:
            bucket, entry = search(layout, mix(keys[position]), keys[position])
            if bucket:
                row = row_of(bucket, entry)
                protected[np.int64(row >> U6)] |= U1 << (row & U63)


@kernel(void, LAYOUT, uint64[::1], COUNTERS, COUNTERS, uint32[::1])
def _gather(layout, protected, excess, ends, scores):  # type: ignore[no-untyped-def]
    """Write the stamps of unprotected rows of each partition with an excess, downwards from the partition's end."""
    partitions = np.uint64(excess.size)
    for segment in range(SEGMENTS, layout.size, 2):
        for position in range(np.int64(buckets_in(layout, segment))):
            bucket = bucket_at(layout, segment, position)
            mask = mask_of(load_relaxed(bucket))
            while mask:
                entry = lowest_bit(mask)
                mask &= mask - U1
                partition = np.int64(mix(key_of(bucket, entry)) % partitions)
                row = row_of(bucket, entry)
                if excess[partition] > 0 and not (protected[np.int64(row >> U6)] >> (row & U63)) & U1:
                    ends[partition] -= 1
                    scores[ends[partition]] = load_relaxed_u32(stamp_of(layout, row))


@kernel(void, LAYOUT, COUNTERS, COUNTERS, COUNTERS, uint64[::1], COUNTERS, COUNTERS, COUNTERS, COUNTERS, uint64[::1])
def _evict(  # type: ignore[no-untyped-def]
    layout, counters, segment_rows, partition_rows, protected, excess, limits, tied, tied_excess, random
):
    """Remove excess[p] unprotected rows of each partition p, and leave in excess[p] the number that could not be removed.

    Args:
        limits: (partitions,) rows with a smaller score are evicted; -1 if scores do not matter. The scores of remaining rows
            are halved if limits[p] >= 0 and `random[1]` is 1.
        tied: (partitions,) number of unprotected rows whose score is the limit; all of them if scores do not matter.
        tied_excess: (partitions,) number of these to evict.
        random: (2,) state of the generator, and whether to halve.
    """
    partitions = np.uint64(excess.size)
    for segment in range(SEGMENTS, layout.size, 2):
        for position in range(np.int64(buckets_in(layout, segment))):
            bucket = bucket_at(layout, segment, position)
            mask = mask_of(load_relaxed(bucket))
            while mask:
                entry = lowest_bit(mask)
                mask &= mask - U1
                hashed = mix(key_of(bucket, entry))
                partition = np.int64(hashed % partitions)
                limit = limits[partition]
                row = row_of(bucket, entry)
                score = np.int64(load_relaxed_u32(stamp_of(layout, row))) if limit >= 0 else limit
                if excess[partition] > 0 and score <= limit and not (protected[np.int64(row >> U6)] >> (row & U63)) & U1:
                    evicted = score < limit
                    if not evicted and tied[partition] > 0:  # selection sampling: each of the tied rows is equally likely
                        random[0] += _GOLDEN
                        evicted = np.int64(mix(np.int64(random[0])) % np.uint64(tied[partition])) < tied_excess[partition]
                        tied[partition] -= 1
                        tied_excess[partition] -= evicted
                    if evicted:
                        unlink(layout, counters, segment_rows, hashed, bucket, entry)
                        excess[partition] -= 1
                        partition_rows[partition] -= 1
                        continue
                if limit >= 0 and random[1]:
                    store_relaxed_u32(stamp_of(layout, row), np.uint64(score) >> U1)


EVICTION_KERNELS: Final = (_plan, _protect, _gather, _evict)


@dataclass(frozen=True, slots=True)
class HashMapOverflow:
    """The rule of `overflow_margin`, `overflow_policy` and `overflow_resolution_target`. *Immutable.*

    Attributes:
        partitions: number of partitions; a key is in partition `mix(key) % partitions`.
        margin: maximum rows of a partition.
        target_rows: rows to leave in a partition that would exceed the margin.
    """

    partitions: int
    margin: int
    target_rows: int
    policy: Policy

    def make_room(
        self,
        layout: npt.NDArray[np.uint64],
        counters: npt.NDArray[np.int64],
        segment_rows: npt.NDArray[np.int64],  # (segments,)
        partition_rows: npt.NDArray[np.int64],  # (partitions,)
        random: npt.NDArray[np.uint64],  # (2,)
        keys: KeyArray,  # (n,)
        row_numbers: int,
    ) -> BoolArray:  # (n,)
        """Evict rows before a batch is inserted, as the table's writer; return the positions to insert.

        All row numbers are below `row_numbers`.
        """
        chosen = np.zeros(keys.size, np.bool_)
        batch_rows, new_rows = np.zeros((2, self.partitions), np.int64)
        _plan(layout, keys, self.margin, chosen, batch_rows, new_rows)
        over = partition_rows + new_rows > self.margin
        if not over.any():
            return chosen
        outside = partition_rows - (batch_rows - new_rows)  # rows that are not in the batch
        excess = np.where(over, outside - np.maximum(self.target_rows - batch_rows, 0), 0)
        protected = np.zeros((row_numbers + 63) // 64, np.uint64)
        _protect(layout, keys, chosen, protected)
        if self.policy != "evict_random":
            limits, tied, tied_excess = self._limits(layout, protected, excess, outside)
            before = excess.copy()
            random[1] = self.policy == "evict_least_used"
            _evict(layout, counters, segment_rows, partition_rows, protected, excess, limits, tied, tied_excess, random)
            outside -= before - excess
        if excess.any():  # rows that were fetched after the choice have a new score and escaped it
            limits = np.full(self.partitions, -1, np.int64)
            _evict(layout, counters, segment_rows, partition_rows, protected, excess, limits, outside, excess.copy(), random)
        return chosen

    def _limits(
        self,
        layout: npt.NDArray[np.uint64],
        protected: npt.NDArray[np.uint64],
        excess: npt.NDArray[np.int64],
        outside: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Find, by partition, the score of the last row to evict, how many rows have it, and how many of those to evict."""
        limits, tied, tied_excess = np.full((3, self.partitions), -1, np.int64)
        ends = np.cumsum(np.where(excess > 0, outside, 0))
        scores = np.empty(ends[-1], np.uint32)
        starts = ends.copy()
        _gather(layout, protected, excess, starts, scores)
        for partition in np.flatnonzero(excess):
            ordered = scores[starts[partition] : ends[partition]]
            ordered.partition(excess[partition] - 1)
            limit = ordered[excess[partition] - 1]
            limits[partition] = limit
            tied[partition] = np.count_nonzero(ordered == limit)
            tied_excess[partition] = excess[partition] - np.count_nonzero(ordered < limit)
        return limits, tied, tied_excess
