"""The order of the changes to one table: the latest change of each row, and how far a log of updates was followed.

**On disk.** The sequence of a row's last change stands behind the time in the value of its key in the times family, put there
by the write that changed the row; that of a deleted row stays. A value without one is of a row that was written before the
table followed a log, or by a release that knows of none: it is older than any change. RocksDB's own column family has two
records: the highest sequence that was applied, which is in the first write of a batch of changes, so that no row ever has a
higher one, and the positions, which are in the last.

**An insertion or a deletion** by somebody else takes the highest sequence + 1. It stores no highest one: a start allows for it.

**In memory.** To read the sequence of each row that changes would be slow: a read of the times family's memtable sorts it, so
that it must first be flushed, which begins another write-ahead log, too. So the last sequences of some 500,000 rows are kept,
9 MB a table, in sets by the hash of the key, and of each set the highest sequence that any other of its rows may have. A
change above that is the latest without a read. After a start, all that is known is the highest sequence of the table.
"""

import json
from collections.abc import Mapping
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from hps.databases.base import LogPosition
from hps.databases.rocks_db.engine import DEFAULT, Engine
from hps.errors import DatabaseCorruptError
from hps.hashing import mix, scale
from hps.numba_kernels import compile_kernels, kernel, read_only
from hps.types import IndexArray, KeyArray

OLDER: Final = 0
LATEST: Final = 1
DOUBTFUL: Final = 2

_SETS: Final = np.int64(1 << 17)
_WAYS: Final = 4
_POSITIONS = b"hps-server/positions/"
_SEQUENCE = b"hps-server/sequence/"

_many = numba.int64[::1]
_table = numba.int64[:, ::1]


_read_many = read_only(_many)
_read_table = read_only(_table)


@kernel(numba.void, _read_many, _read_many, _read_table, _read_table, _read_many, numba.uint8[::1])
def _judge(keys, sequences, known_keys, known_sequences, bounds, verdicts):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        at = scale(mix(keys[i]), _SETS)
        verdicts[i] = LATEST if sequences[i] > bounds[at] else DOUBTFUL
        for way in range(_WAYS):
            if known_keys[at, way] == keys[i] and known_sequences[at, way]:
                verdicts[i] = LATEST if sequences[i] >= known_sequences[at, way] else OLDER


@kernel(numba.void, _read_many, _read_many, _table, _table, _many)
def _note(keys, sequences, known_keys, known_sequences, bounds):  # type: ignore[no-untyped-def]
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
    """The keys of a table's two records, of the positions and the highest sequence, in RocksDB's order."""
    return [_POSITIONS + tag.encode(), _SEQUENCE + tag.encode()]


class ChangeOrder:
    """What is known of the order of changes to a table. *One per thread*: only the table's writer uses it.

    Attributes:
        highest: sequence that was applied; 0 before the first.
        positions: what was stored last, by partition.
    """

    def __init__(self, engine: Engine, tag: str) -> None:
        self._tag = tag
        self._engine = engine
        self._known: tuple[KeyArray, IndexArray, IndexArray] | None = None  # of sets: keys, sequences, bounds
        self._noted = 0
        doing = f"reading how far table {tag} followed its log"
        positions, highest = engine.get(engine.family(DEFAULT), log_records(tag), doing)
        try:
            self.highest = int(highest or 0)
            self.positions = {name: LogPosition(*of) for name, of in json.loads(positions or "{}").items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DatabaseCorruptError(
                f"{doing} in {engine.path}: got {positions!r} and {highest!r}, expected positions and a sequence; drop the "
                "table and load it again"
            ) from error

    @property
    def follows(self) -> bool:
        """Whether the table ever followed a log."""
        return bool(self.highest or self.positions)

    @property
    def next(self) -> int:
        """The sequence of an insertion or a deletion now; 0 where none need be stored."""
        return self.highest + 1 if self.highest else 0

    def judge(self, keys: KeyArray, sequences: IndexArray) -> npt.NDArray[np.uint8]:
        """Whether each change is the latest of its row, (n,): `OLDER`, `LATEST`, or `DOUBTFUL` where that must be read."""
        verdicts = np.empty(keys.size, np.uint8)
        _judge(keys, sequences, *self._sets(), verdicts)
        return verdicts

    def note(self, keys: KeyArray, sequences: IndexArray) -> None:
        """Take in that these are the latest changes of their rows, before they are written."""
        if self._known and keys.size:
            self._noted = max(self._noted, int(sequences.max()))
            _note(keys, sequences, *self._known)

    def doubt(self) -> None:
        """Rely on nothing that was noted: a write failed."""
        self._known = None

    def raised(self, sequence: int) -> dict[bytes, bytes]:
        """The record to write with the first of these changes, the highest of which has this sequence."""
        return {log_records(self._tag)[1]: b"%d" % sequence} if sequence > self.highest else {}

    def moved(self, positions: Mapping[str, LogPosition]) -> dict[bytes, bytes]:
        """The record to write with the last changes, by which these positions become known."""
        merged = {**self.positions, **positions}
        return {
            log_records(self._tag)[0]: json.dumps({name: [at.position, at.sequence] for name, at in merged.items()}).encode()
        }

    def forget(self) -> None:
        """Know nothing of any log any more; on disk on return."""
        doing = f"forgetting the log of table {self._tag}"
        self._engine.remove(log_records(self._tag), [DEFAULT], doing)
        self._engine.sync(doing)
        self.highest, self.positions, self._known, self._noted = 0, {}, None, 0

    def _sets(self) -> tuple[KeyArray, IndexArray, IndexArray]:
        if self._known is None:
            compile_kernels()
            nothing = np.zeros((2, _SETS, _WAYS), np.int64)
            self._known = nothing[0], nothing[1], np.full(_SETS, max(self.next, self._noted), np.int64)
        return self._known
