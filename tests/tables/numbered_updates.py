"""Updates whose vectors say which key and which change of it they are: who publishes, who replays and who judges them.

Each float holds the number of the key and of its change: the bits `change << key_bits | key`, moved to where floats are normal,
positive and finite. Where rows are int8 the codes repeat its bytes, scale and offset depend on it, too, and what is published
lies beside what the codes stand for. Change 0 is what the model files have, and every eighth change of a key deletes it. So any
vector can be judged by itself, whoever wrote it, given which change was acknowledged before a lookup began and which had begun
when it ended.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hps.ground import rows as row_formats
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray
from hps.updates.base import Message, Partition, UpdateLogWriter
from hps.updates.framing import decode, encode
from tests.tables.hugectr_messages import encode_hugectr

DEFAULT = -1.0
_LEAST_NORMAL = 0x0080_0000
_DELETES_EVERY = 8


def is_deletion(changes: IndexArray) -> BoolArray:
    """Which changes delete their row."""
    return changes % _DELETES_EVERY == _DELETES_EVERY - 1


@dataclass(frozen=True)
class NumberedRows:
    """The vectors of one table. *Immutable.*"""

    key_bits: int  # keys are below 2^key_bits, changes below 2^(30 - key_bits)
    dim: int  # at least 6 for int8
    deletes: bool = True
    row_dtype: str = "float32"  # or int8

    @property
    def keys(self) -> int:
        return 1 << self.key_bits

    def gone(self, changes: IndexArray) -> BoolArray:
        """Which changes leave no row."""
        return is_deletion(changes) if self.deletes else np.zeros(changes.shape, np.bool_)

    def vectors(self, keys: KeyArray, changes: IndexArray | int) -> FloatArray:  # (n, dim)
        """The vectors of keys after their changes of these numbers."""
        numbers = np.asarray(changes, np.int64) << self.key_bits | keys
        if self.row_dtype == "float32":
            return np.repeat((numbers + _LEAST_NORMAL).astype(np.uint32).view(np.float32)[:, None], self.dim, axis=1)
        codes = np.tile([0, 255, 0, 0, 0, 0], (numbers.size, 1))
        codes[:, 2:] = numbers.astype("<u4")[:, None].view(np.uint8)
        codes = np.concatenate([codes, *[codes[:, 2:]] * self.dim], axis=1)[:, : self.dim]
        beside = 0.25 * ((numbers[:, None] + np.arange(self.dim)) % 3 - 1)  # exact in float32, as all of it
        scales, offsets = np.exp2(-(numbers % 8))[:, None], (numbers % 1000)[:, None]
        return (np.clip(codes + beside, 0, 255) * scales + offsets).astype(np.float32)

    def stored(self, vectors: FloatArray) -> FloatArray:  # (n, dim)
        """What lookups answer where these vectors are stored."""
        return row_formats.decode(row_formats.encode("judging", vectors, self.row_dtype), self.dim, self.row_dtype)

    def _numbers(self, vectors: FloatArray) -> IndexArray:
        """The numbers that vectors hold; any for those that hold none."""
        if self.row_dtype == "float32":
            return vectors[:, 0].view(np.uint32).astype(np.int64) - _LEAST_NORMAL
        offsets = vectors[:, :1]
        scales = np.maximum(vectors[:, 1:2] - offsets, np.float32(1e-6)) / np.float32(255)
        codes = np.clip(np.rint((vectors[:, 2:6] - offsets) / scales), 0, 255).astype(np.uint8)
        return codes.view("<u4")[:, 0].astype(np.int64)

    def judge(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        floor: IndexArray,  # (n,) the last change that was acknowledged before the lookup began
        ceiling: IndexArray | None = None,  # (n,) the last one that had begun when it ended; None if nobody knows
    ) -> dict[str, BoolArray]:
        """Which vectors are wrong, by what is wrong with them: nothing where nothing is."""
        numbers = self._numbers(vectors)
        key, change = numbers & self.keys - 1, numbers >> self.key_bits
        default = vectors[:, 0] == np.float32(DEFAULT)
        expected = np.where(default[:, None], np.float32(DEFAULT), self.stored(self.vectors(key, change)))
        whole = (vectors.view(np.uint32) == expected.view(np.uint32)).all(axis=1)
        row = whole & ~default
        own = row & (key == keys)
        wrong = {"mixture": ~whole, "foreign": row & ~own, "stale": own & (change < floor), "deleted": own & self.gone(change)}
        if ceiling is not None:
            wrong["invented"] = own & (change > ceiling)
            wrong["lost"] = whole & default & ~(self.deletes & ((ceiling + 1) // _DELETES_EVERY > floor // _DELETES_EVERY))
        return {what: rows for what, rows in wrong.items() if rows.any()}

    def changes_of(self, vectors: FloatArray) -> IndexArray:
        """The numbers of the changes that left these vectors, (n,); -1 for the default vector."""
        return np.where(vectors[:, 0] == DEFAULT, -1, self._numbers(vectors) >> self.key_bits)


class NumberedPublisher:
    """Publishes changes of one table, and knows which of them are applied. *One thread* publishes; any may ask.

    HugeCTR's frames (`hctr`) have no sequence.
    """

    def __init__(self, writer: UpdateLogWriter, topic: str, rows: NumberedRows, *, hctr: bool = False) -> None:
        self.writer, self.topic, self.rows, self._hctr = writer, topic, rows, hctr
        self.begun = np.zeros(rows.keys, np.int64)  # the last change of each key that was sent
        self.acknowledged = np.zeros(rows.keys, np.int64)  # the last one that `acknowledge` heard to be applied
        self.sent: dict[str, list[int]] = {}  # CRC-32 of the messages of each partition, in their order
        self.failures: list[Exception] = []  # what the log did not take
        self._sequences: dict[Partition, int] = {}
        self._newest: dict[str, _Sent] = {}
        self._waiting: dict[str, deque[_Sent]] = {}  # by partition, in the order of the log
        self._placed: dict[tuple[str, str], _Sent] = {}  # those of them whose position is known
        self._lock = threading.Lock()

    def frame(self, partition: Partition, keys: KeyArray) -> "_Sent":
        """The next change of each of some distinct keys, as a message that is yet to be sent."""
        changes = self.begun[keys] + 1
        gone = self.rows.gone(changes)
        kept, deleted = keys[~gone], keys[gone]
        vectors = self.rows.vectors(kept, changes[~gone])
        if self._hctr:
            return _Sent(partition, keys, changes, encode_hugectr(kept, vectors))
        now_us = time.time_ns() // 1000
        sequence = self._sequences[partition] = max(now_us, self._sequences.get(partition, 0) + 1)
        return _Sent(partition, keys, changes, encode(kept, vectors, deleted, sequence=sequence, time_us=now_us))

    def send(self, message: "_Sent") -> None:
        """Append a message to its partition, perhaps once more."""
        sent, name = replace(message), str(message.partition)
        self.begun[sent.keys] = np.maximum(self.begun[sent.keys], sent.changes)
        self.sent.setdefault(name, []).append(zlib.crc32(sent.value))
        with self._lock:
            self._waiting.setdefault(name, deque()).append(sent)
            self._newest[name] = sent

        def placed(position: str | Exception) -> None:
            if isinstance(position, Exception):
                self.failures.append(position)
                return
            with self._lock:  # several threads may report, in any order
                sent.position = position
                self._placed[name, position] = sent

        self.writer.send(sent.partition, sent.value, sent=placed)

    def append(self, partition: Partition, value: bytes) -> None:
        """Append what somebody has sent already."""
        none = np.empty(0, np.int64)
        self.send(_Sent(partition, none, none, value))

    def publish(self, rng: np.random.Generator, updates: int, batch: int, partitions: int, mischief: float = 0.0) -> None:
        """Send changes of random keys, each key's to one of the partitions, `batch` rows a message.

        `mischief` is the share of the messages that are sent twice, the second time late, and of those that are late alone.
        """
        late: list[_Sent] = []
        for _ in range(updates // batch):
            number = int(rng.integers(partitions))
            keys = rng.choice(self.rows.keys // partitions, batch, replace=False, shuffle=False) * partitions + number
            message = self.frame(Partition(self.topic, number), keys)
            fate = rng.random()
            if fate < mischief and not self._hctr:
                late.append(message)  # its changes count as made, so that those of the same keys to come are later ones
                self.begun[keys] = message.changes
            else:
                self.send(message)
            if mischief <= fate < 2 * mischief:
                late.append(message)
            while late and (len(late) > 8 or rng.random() < 0.3):
                self.send(late.pop(int(rng.integers(len(late)))))
        for message in late:
            self.send(message)

    @property
    def last(self) -> dict[str, str]:
        """Position of the last message of each partition; empty where it is not known yet."""
        return {name: sent.position for name, sent in list(self._newest.items())}

    @property
    def under_way(self) -> int:
        """Messages that are not acknowledged yet."""
        return sum(map(len, self._waiting.values()))

    def acknowledge(self, positions: Mapping[str, str]) -> None:
        """Hear how far a replica has applied each partition, by its name."""
        for name, position in positions.items():
            with self._lock:
                last = self._placed.get((name, position))
                while last is not None and not last.applied:  # None: the writer has not told us of that message yet
                    sent = self._waiting[name].popleft()
                    sent.applied = True
                    self.acknowledged[sent.keys] = np.maximum(self.acknowledged[sent.keys], sent.changes)


@dataclass(eq=False)
class _Sent:
    """A message, where it lies in the log, and whether a replica has applied it."""

    partition: Partition
    keys: KeyArray
    changes: IndexArray
    value: bytes
    position: str = ""
    applied: bool = False


def replay(messages: Iterable[Message], rows: NumberedRows, there: BoolArray, vectors: FloatArray) -> int:
    """Make the changes of a table's log one after the other, in the rows that the model files have: `there` and `vectors`.

    Returns how many there were.
    """
    sequences, count = np.zeros(rows.keys, np.int64), 0
    for message in messages:
        changes = decode(message.value, rows.dim)
        if changes is None:
            continue
        for keys, kept in ((changes.keys, True), (changes.deleted_keys, False)):
            newer = changes.sequence >= sequences[keys]
            there[keys[newer]] = kept
            sequences[keys] = np.maximum(sequences[keys], changes.sequence)
            if kept:
                vectors[keys[newer]] = changes.vectors[newer]
            count += keys.size
    return count
