"""The order of changes to one table: the last change of each row, and the positions in the log of updates.

**On disk.** The sequence of a row's last change follows the time in the value of its key in the times family, in the same write
as the row; that of a deleted row stays. A row whose value has no sequence was written before the table followed a log,
or by an older release: it is older than any change. RocksDB's own column family has the highest applied sequence, in the
first write of a batch of changes, so that no row ever has a higher one, the positions, in the last write, and "by time".

**Other insertions and deletions** take the highest sequence + 1. They do not store it; the next start allows for it.

In a table *by time* they take the current time instead, if that is higher: sequences of its log are times, too.

**In memory.** Reading the sequence of each changed row would be slow: a read sorts the times family's memtable, which must be
flushed before, and that also starts another write-ahead log. So the last sequences of some 500,000 rows are cached, 9 MB per
table, in sets by the hash of the key, with the highest sequence that any other row of the set may have. A change above that is
the latest without a read. After a start, only the highest sequence of the table is known.
"""

import json
import time
from collections.abc import Mapping
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseCorruptError
from hps.ground.hashing import mix, scale
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.stores.base import LOAD_ADVICE, LogPosition, Partition
from hps.stores.rocks_db.engine import DEFAULT, Engine
from hps.types import IndexArray, KeyArray

OLDER: Final = 0
LATEST: Final = 1
UNCERTAIN: Final = 2

_SETS: Final = np.int64(1 << 17)
_WAYS: Final = 4
_POSITIONS = b"hps-server/positions/"
_SEQUENCE = b"hps-server/sequence/"
_BY_TIME = b"hps-server/by-time/"

_many = numba.int64[::1]
_table = numba.int64[:, ::1]


_read_many = read_only(_many)
_read_table = read_only(_table)


@kernel(numba.void, _read_many, _read_many, _read_table, _read_table, _read_many, numba.uint8[::1])
def _judge(keys, sequences, known_keys, known_sequences, bounds, verdicts):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        at = scale(mix(keys[i]), _SETS)
        verdicts[i] = LATEST if sequences[i] > bounds[at] else UNCERTAIN
        for way in range(_WAYS):
            if known_keys[at, way] == keys[i] and known_sequences[at, way]:
                verdicts[i] = LATEST if sequences[i] >= known_sequences[at, way] else OLDER


@kernel(numba.void, _read_many, _read_many, _table, _table, _many)
def _record(keys, sequences, known_keys, known_sequences, bounds):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        at, place = scale(mix(keys[i]), _SETS), 0
        for way in range(_WAYS):
            if known_keys[at, way] == keys[i] and known_sequences[at, way]:
                known_sequences[at, way] = 0
            if known_sequences[at, way] < known_sequences[at, place]:
                place = way
        bounds[at] = max(bounds[at], min(known_sequences[at, place], sequences[i]))
        if sequences[i] > known_sequences[at, place]:
            known_keys[at, place], known_sequences[at, place] = keys[i], sequences[i]


def log_records(tag: str) -> list[bytes]:
    """Return the keys of a table's records: by time or not, positions, and the highest sequence; in RocksDB's order."""
    return [_BY_TIME + tag.encode(), _POSITIONS + tag.encode(), _SEQUENCE + tag.encode()]


class ChangeOrder:
    """The order of changes to a table. *One per thread*: only the table's writer uses it.

    Args:
        always: whether insertions and deletions have a sequence also before the table follows a log.

    Attributes:
        by_time: whether that sequence is at least the current time in microseconds since 1970, as is on record.
        highest: highest applied sequence; 0 before the first.
        positions: last stored positions, by partition.
    """

    def __init__(self, engine: Engine, tag: str, *, always: bool = False) -> None:
        self._tag = tag
        self._engine = engine
        self._always = always
        self._known: tuple[KeyArray, IndexArray, IndexArray] | None = None  # of sets: keys, sequences, bounds
        self._highest_recorded = 0
        doing = f"reading how far table {tag} followed its log"
        by_time, positions, highest = engine.get(engine.family(DEFAULT), log_records(tag), doing)
        self.by_time = by_time is not None
        try:
            self.highest = int(highest or 0)
            self.positions = {Partition(name): LogPosition(*of) for name, of in json.loads(positions or "{}").items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DatabaseCorruptError(
                f"{doing} in {engine.path}: got {positions!r} and {highest!r}, expected positions and a sequence. {LOAD_ADVICE}"
            ) from error

    @property
    def follows(self) -> bool:
        """Whether the table ever followed a log."""
        return bool(self.highest or self.positions)

    @property
    def next(self) -> int:
        """The sequence of an insertion or deletion now; 0 to store none."""
        if self.by_time:
            return max(self.highest + 1, time.time_ns() // 1000)
        return self.highest + 1 if self.highest or self._always else 0

    def judge(self, keys: KeyArray, sequences: IndexArray) -> npt.NDArray[np.uint8]:
        """Compare changes with the last ones of their rows, (n,): `OLDER`, `LATEST`, or `UNCERTAIN` without a read."""
        verdicts = np.empty(keys.size, np.uint8)
        _judge(keys, sequences, *self._sets(), verdicts)
        return verdicts

    def record(self, keys: KeyArray, sequences: IndexArray) -> None:
        if self._known and keys.size:
            self._highest_recorded = max(self._highest_recorded, int(sequences.max()))
            _record(keys, sequences, *self._known)

    def invalidate(self) -> None:
        self._known = None

    def raised(self, sequence: int) -> dict[bytes, bytes]:
        """Encode the highest sequence of a batch, to be written with its first changes."""
        return {log_records(self._tag)[2]: b"%d" % sequence} if sequence > self.highest else {}

    def ordered_by_time(self) -> dict[bytes, bytes]:
        """Encode that insertions and deletions take their time, and that the table follows a log."""
        return {log_records(self._tag)[0]: b"1"} | self.raised(1)

    def moved(self, positions: Mapping[Partition, LogPosition]) -> dict[bytes, bytes]:
        """Encode positions, to be written with the last changes of a batch."""
        merged = {**self.positions, **positions}
        return {
            log_records(self._tag)[1]: json.dumps({name: [at.position, at.sequence] for name, at in merged.items()}).encode()
        }

    def forget(self) -> None:
        """Forget all logs, durably on return."""
        doing = f"forgetting the log of table {self._tag}"
        self._engine.write({}, {DEFAULT: log_records(self._tag)}, doing)
        self._engine.sync(doing)
        self.highest, self.positions, self._known, self._highest_recorded = 0, {}, None, 0

    def _sets(self) -> tuple[KeyArray, IndexArray, IndexArray]:
        if self._known is None:
            compile_kernels(_judge, _record)
            empty = np.zeros((2, _SETS, _WAYS), np.int64)
            self._known = empty[0], empty[1], np.full(_SETS, max(self.next, self._highest_recorded), np.int64)
        return self._known
