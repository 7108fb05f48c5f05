"""What keeps a partition within its margin: the uses of its keys, and the eviction of those that matter least."""

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from hps.databases.redis.commands import Ask, Command, bulk, request
from hps.databases.redis.dispatch import Dispatcher
from hps.databases.redis.layout import Partition
from hps.databases.redis.row_commands import Increments, WriteCounts, WriteFields
from hps.databases.redis.scan import keys_of, scan_hash
from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.types import IndexArray, KeyArray

Policy: TypeAlias = Literal["evict_random", "evict_least_used", "evict_oldest"]

_CHUNK: Final = 4096  # fields of one request
_PICK: Final = 16384  # random fields of one request
_SCAN_COUNT: Final = 4096
_ATTEMPTS: Final = 8
_TRIM: Final = b"""
local surplus, removed = redis.call('hlen', KEYS[1]) - ARGV[1], 0
for i = 2, #ARGV do
    if surplus <= removed then break end
    removed = removed + redis.call('hdel', KEYS[1], ARGV[i])
    if KEYS[2] then redis.call('hdel', KEYS[2], ARGV[i]) end
end
return removed
"""
"""Removes fields until a hash is down to its target, and not one more, whoever else evicts at the same time."""
_ADVICE: Final = "others insert faster than it evicts, or the server is older than Redis 6.2"


@dataclass(frozen=True)
class OverflowRule:
    """When a partition has too many rows, and which go. *Immutable.*

    Attributes:
        margin: most rows of a partition.
        target_rows: rows to leave in one that has more.
        policy: which rows go: any, those used least, or those not used for longest.
    """

    margin: int
    target_rows: int
    policy: Policy

    @property
    def counts_uses(self) -> bool:
        """Whether anything is written beside the vectors."""
        return self.policy != "evict_random"


class Overflow:
    """Notes uses and evicts, by one rule. *Thread-safe.*

    A partition holds at most `margin` rows once an insertion has returned, and while one is on its way at most one batch more.
    Exactly as many rows go as must, so that no batch empties a partition, and neither do several processes that evict from it
    at the same time.

    Args:
        dispatcher: runs the commands.
        rule: when and which.
        clock: seconds since 1970, written by `evict_oldest`.
    """

    def __init__(self, dispatcher: Dispatcher, rule: OverflowRule, clock: Callable[[], float] = time.time) -> None:
        self.rule = rule
        self._dispatcher = dispatcher
        self._clock = clock
        self._changed = threading.Condition()
        self._resolving: set[Partition] = set()

    def note_uses(self, partition: Partition, keys: KeyArray, order: IndexArray) -> list[Command]:
        """Commands that note a use of `keys[order]`, now; none where any row may go."""
        if self.rule.policy == "evict_random":
            return []
        pieces = [order[start : start + _CHUNK] for start in range(0, order.size, _CHUNK)]
        if self.rule.policy == "evict_least_used":
            return [Increments(partition.slot, partition.count_uses, keys, piece) for piece in pieces]
        now = bulk(struct.pack("<q", int(self._clock())))
        return [WriteFields(partition.slot, partition.set_uses, keys, piece, now) for piece in pieces]

    def delete(self, partitions: Iterable[tuple[Partition, IndexArray]], keys: KeyArray) -> int:
        """Remove the keys at these positions of `keys`, and their uses; returns how many rows there were."""
        values: list[WriteFields] = []
        uses: list[WriteFields] = []
        for partition, order in partitions:
            for piece in (order[start : start + _CHUNK] for start in range(0, order.size, _CHUNK)):
                values.append(WriteFields(partition.slot, partition.delete_values, keys, piece))
                uses.append(WriteFields(partition.slot, partition.delete_uses, keys, piece))
        self._dispatcher.run([*values, *uses] if self.rule.counts_uses else values)
        return sum(command.number for command in values)

    def resolve(self, partition: Partition, rows: int) -> None:
        """Evict until a partition that was seen to have `rows` rows is within its margin.

        Raises:
            DatabaseError: Redis failed, or others insert faster than this evicts.
        """
        if rows <= self.rule.margin:
            return
        with self._alone(partition):
            for attempt in range(_ATTEMPTS):
                count = Ask(partition.slot, partition.count_values)
                self._dispatcher.run([count])
                rows = count.reply
                if rows <= self.rule.margin:
                    return
                surplus = rows - self.rule.target_rows
                # Notes of uses may be missing, of another policy, or of rows long gone, so that they settle nothing.
                if self.rule.policy == "evict_random" or attempt > 1 or self._evict_by_use(partition, rows, surplus) == 0:
                    self._evict_random(partition, surplus)
        raise DatabaseError(
            f"redis: {partition.values!r}: it still had {rows} rows after {_ATTEMPTS} evictions, wanted at most "
            f"{self.rule.margin}; {_ADVICE}"
        )

    def _trim(self, partition: Partition, keys: KeyArray, order: IndexArray) -> int:
        """Remove `keys[order]` and their uses while the partition has more rows than the target; returns how many went."""
        hashes = [partition.values, partition.uses] if self.rule.counts_uses else [partition.values]
        words = [b"EVAL", _TRIM, b"%d" % len(hashes), *hashes, b"%d" % self.rule.target_rows]
        prefix = b"".join(map(bulk, words))
        pieces = [order[start : start + _CHUNK] for start in range(0, order.size, _CHUNK)]
        commands = [WriteFields(partition.slot, prefix, keys, piece, before=len(words)) for piece in pieces]
        self._dispatcher.run(commands)
        return sum(command.number for command in commands)

    def _evict_random(self, partition: Partition, surplus: int) -> None:
        while surplus > 0:
            keys = self._pick(partition, surplus)
            removed = self._trim(partition, keys, np.arange(keys.size))
            if removed == 0:
                return
            surplus -= removed

    def _pick(self, partition: Partition, count: int) -> KeyArray:
        """Random keys of a partition, each once."""
        pick = Ask(partition.slot, request(b"HRANDFIELD", partition.values, b"%d" % min(count, _PICK)))
        self._dispatcher.run([pick])
        return keys_of(pick.raw, partition.values)

    def _evict_unnoted(self, partition: Partition, noted: KeyArray, surplus: int) -> int:
        """Evict rows of which no use was noted, as long as there are many: of another policy's time, or another program's."""
        removed = 0
        while removed < surplus:
            picked = self._pick(partition, _PICK)
            unnoted = picked[~np.isin(picked, noted)]
            going = np.arange(min(unnoted.size, surplus - removed))
            if 10 * unnoted.size < picked.size or (gone := self._trim(partition, unnoted, going)) == 0:
                break
            removed += gone
        return removed

    def _evict_by_use(self, partition: Partition, rows: int, surplus: int) -> int:
        keys, scores = self._uses(partition)
        unnoted = self._evict_unnoted(partition, keys, surplus) if keys.size < rows else 0
        surplus -= unnoted
        if keys.size == 0 or surplus == 0:
            return unnoted
        going = np.arange(keys.size)
        if surplus < keys.size:
            going = np.argpartition(scores, surplus)[:surplus]
        removed = unnoted + self._trim(partition, keys, going)
        if self.rule.policy == "evict_least_used":
            self._halve(partition, keys, scores, going)
        return removed

    def _halve(self, partition: Partition, keys: KeyArray, counts: IndexArray, gone: IndexArray) -> None:
        """Let counts age, so that what was popular once does not stay for ever; HugeCTR forgets them all at this point."""
        stays = np.ones(keys.size, np.bool_)
        stays[gone] = False
        stays &= counts > 1
        keys, counts = keys[stays], counts[stays] // 2
        self._dispatcher.run(
            [
                WriteCounts(partition.slot, partition.set_uses, keys[start : start + _CHUNK], counts[start : start + _CHUNK])
                for start in range(0, keys.size, _CHUNK)
            ]
        )

    def _uses(self, partition: Partition) -> tuple[KeyArray, IndexArray]:
        """Every key with a note of its use, and how much that use speaks for it."""
        keys, scores = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for piece in scan_hash(self._dispatcher, partition.slot, partition.uses, _SCAN_COUNT):
            keys.append(piece.keys)
            if self.rule.policy == "evict_least_used":
                scores.append(piece.counts())
                continue
            scores.append(piece.integers())
        return np.concatenate(keys), np.concatenate(scores)

    @contextmanager
    def _alone(self, partition: Partition) -> Iterator[None]:
        """Let one thread at a time evict from a partition: the others would find the same rows."""
        with self._changed:
            if not self._changed.wait_for(lambda: partition not in self._resolving, self._dispatcher.timeout_s):
                raise DatabaseTimeoutError(
                    f"redis: {partition.values!r}: another call was still evicting after {self._dispatcher.timeout_s:.3g} s"
                )
            self._resolving.add(partition)
        try:
            yield
        finally:
            with self._changed:
                self._resolving.discard(partition)
                self._changed.notify_all()
