"""Keeps partitions within their margin: records the uses of keys, and evicts the least important."""

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import numpy as np

from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.stores.redis.layout import KeyPartition, keys_of
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import Call, Request, SendKeys
from hps.types import IndexArray, KeyArray

Policy: TypeAlias = Literal["evict_random", "evict_least_used", "evict_oldest"]

_CHUNK: Final = 4096  # fields of one request
_PICK: Final = 16384  # random fields of one request
_SCAN_COUNT: Final = 4096
_ATTEMPTS: Final = 8
# Removes fields until a hash has its target size. It counts first, so that concurrent processes do not evict too much.
_TRIM: Final = """
local surplus, removed = redis.call('hlen', KEYS[1]) - ARGV[1], 0
for i = 2, #ARGV do
    if surplus <= removed then break end
    removed = removed + redis.call('hdel', KEYS[1], ARGV[i])
    if KEYS[2] then redis.call('hdel', KEYS[2], ARGV[i]) end
end
return removed
"""
# Counts a use of each field. A value that is no count was written under another policy; it is left as it is, and its row counts
# as unused.
_COUNT: Final = """
for i = 1, #ARGV do
    local reply = redis.pcall('hincrby', KEYS[1], ARGV[i], 1)
    if type(reply) == 'table' and not string.find(reply.err, 'integer') and not string.find(reply.err, 'overflow') then
        return reply
    end
end
return #ARGV
"""


class Overflow:
    """Records uses and evicts, by one policy. *Thread-safe.*

    A partition holds at most `margin` rows after an insertion, and at most one batch more during it. Exactly the necessary
    number of rows is evicted, also by several processes at the same time, so that no batch empties a partition.

    Args:
        margin: maximum rows of a partition.
        target_rows: rows to leave in a partition beyond the margin.
        policy: rows to evict: any, the least used, or the least recently used.
    """

    def __init__(self, nodes: RedisNodes, margin: int, target_rows: int, policy: Policy) -> None:
        self.margin = margin
        self._target_rows = target_rows
        self._policy = policy
        self._nodes = nodes
        self._changed = threading.Condition()
        self._resolving: set[KeyPartition] = set()
        self._evicted: dict[KeyPartition, int] = {}

    @property
    def records_uses(self) -> bool:
        return self._policy != "evict_random"

    def record_uses(self, partition: KeyPartition, keys: KeyArray, order: IndexArray) -> list[Request]:
        """Build requests that record a use of `keys[order]`; none for evict_random."""
        if self._policy == "evict_random":
            return []
        if self._policy == "evict_least_used":
            return self._send(partition, ("EVAL", _COUNT, 1, partition.uses), keys, order)
        return self._send(partition, ("HSET", partition.uses), keys, order, struct.pack("<q", int(time.time())))

    def forget_uses(self, partition: KeyPartition, keys: KeyArray, order: IndexArray) -> list[Request]:
        return self._send(partition, ("HDEL", partition.uses), keys, order) if self.records_uses else []

    def resolve(self, partition: KeyPartition, rows: int) -> None:
        """Evict until a partition, which had `rows` rows, is within its margin.

        Raises:
            DatabaseError: Redis failed, or other processes insert faster than this one evicts.
        """
        if rows <= self.margin:
            return
        with self._alone(partition):
            for attempt in range(_ATTEMPTS):
                rows = self._nodes.execute(partition.slot, "HLEN", partition.values)
                if rows <= self.margin:
                    return
                surplus = rows - self._target_rows
                # Recorded uses may be missing, of another policy, or of rows that no longer exist, and then evicting by them
                # has no effect. So later attempts are random.
                removed = self._evict_by_use(partition, rows, surplus) if self.records_uses and attempt <= 1 else 0
                if removed == 0:
                    removed = self._evict_random(partition, surplus)
                self._evicted[partition] = self._evicted.get(partition, 0) + removed  # only by the thread in `_alone`
        raise DatabaseError(
            f"redis: {partition.values!r}: got {rows} rows after {_ATTEMPTS} evictions, expected at most {self.margin}; "
            "other processes insert faster than this one evicts, or the server is older than Redis 6.2"
        )

    def evicted(self, partition: KeyPartition) -> int:
        return self._evicted.get(partition, 0)

    @staticmethod
    def _send(
        partition: KeyPartition, words: tuple[str | bytes | int, ...], keys: KeyArray, order: IndexArray, value: bytes = b""
    ) -> list[Request]:
        pieces = (order[start : start + _CHUNK] for start in range(0, order.size, _CHUNK))
        return [SendKeys(partition.slot, words, keys, piece, value) for piece in pieces]

    def _trim(self, partition: KeyPartition, keys: KeyArray) -> int:
        """Remove keys and their uses while the partition exceeds the target; return how many were removed."""
        hashes = (partition.values, partition.uses) if self.records_uses else (partition.values,)
        words = ("EVAL", _TRIM, len(hashes), *hashes, self._target_rows)
        requests = self._send(partition, words, keys, np.arange(keys.size))
        self._nodes.run(requests)
        return sum(request.reply for request in requests)

    def _evict_random(self, partition: KeyPartition, surplus: int) -> int:
        evicted = 0
        while evicted < surplus:
            removed = self._trim(partition, self._pick(partition, surplus - evicted))
            if removed == 0:
                break
            evicted += removed
        return evicted

    def _pick(self, partition: KeyPartition, count: int) -> KeyArray:
        fields = self._nodes.execute(partition.slot, "HRANDFIELD", partition.values, min(count, _PICK))
        return keys_of(fields, partition.values)

    def _evict_unrecorded(self, partition: KeyPartition, recorded: KeyArray, surplus: int) -> int:
        """Evict rows without recorded uses, from another policy or program, while there are many."""
        removed = 0
        while removed < surplus:
            picked = self._pick(partition, _PICK)
            unrecorded = picked[~np.isin(picked, recorded)]
            if 10 * unrecorded.size < picked.size:
                break
            trimmed = self._trim(partition, unrecorded[: surplus - removed])
            if trimmed == 0:
                break
            removed += trimmed
        return removed

    def _evict_by_use(self, partition: KeyPartition, rows: int, surplus: int) -> int:
        keys, scores = self._read_uses(partition)
        unrecorded = self._evict_unrecorded(partition, keys, surplus) if keys.size < rows else 0
        surplus -= unrecorded
        if keys.size == 0 or surplus == 0:
            return unrecorded
        chosen = np.arange(keys.size)
        if surplus < keys.size:
            chosen = np.argpartition(scores, surplus)[:surplus]
        removed = unrecorded + self._trim(partition, keys[chosen])
        if self._policy == "evict_least_used":
            self._halve(partition, np.delete(keys, chosen), np.delete(scores, chosen))
        return removed

    def _halve(self, partition: KeyPartition, keys: KeyArray, counts: IndexArray) -> None:
        """Age the counts, so that formerly popular keys can be evicted; HugeCTR drops all counts at this point."""
        requests = []
        for start in range(0, keys.size, _CHUNK):
            pairs = zip(keys[start : start + _CHUNK], counts[start : start + _CHUNK].tolist(), strict=True)
            words = [word for key, count in pairs if count > 1 for word in (key.tobytes(), count // 2)]
            if words:
                requests.append(Call(partition.slot, "HSET", partition.uses, *words))
        self._nodes.run(requests)

    def _read_uses(self, partition: KeyPartition) -> tuple[KeyArray, IndexArray]:
        """Read every key with a recorded use, and its score; 0 for a use of another policy."""
        keys, scores = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for piece, values in self._nodes.scan_hash(partition.slot, partition.uses, _SCAN_COUNT):
            keys.append(piece)
            if self._policy == "evict_least_used":
                scores.append(
                    np.array([int(value) if value.isdigit() and len(value) <= 18 else 0 for value in values], np.int64)
                )
            else:
                scores.append(np.frombuffer(b"".join(value if len(value) == 8 else bytes(8) for value in values), np.int64))
        return np.concatenate(keys), np.concatenate(scores)

    @contextmanager
    def _alone(self, partition: KeyPartition) -> Iterator[None]:
        """Let one thread at a time evict from a partition: two would choose the same rows."""
        with self._changed:
            if not self._changed.wait_for(lambda: partition not in self._resolving, self._nodes.timeout_s):
                raise DatabaseTimeoutError(
                    f"redis: {partition.values!r}: another call was still evicting after {self._nodes.timeout_s:.3g} s"
                )
            self._resolving.add(partition)
        try:
            yield
        finally:
            with self._changed:
                self._resolving.discard(partition)
                self._changed.notify_all()
