"""Reads and writes the vectors of one table in Redis, partition by partition."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from hps.errors import DatabaseError, DatabaseTimeoutError, TableWidthError
from hps.stores.base import UNBOUNDED_ROWS, ExpiredRows, LogPosition, Partition, RowChanges, TableStats, exclusive
from hps.stores.redis.catalog import Catalog, fresh, lost
from hps.stores.redis.codec import Bytes, group_by_partition
from hps.stores.redis.layout import KeyPartition, RedisLayout
from hps.stores.redis.marks import (
    FOLLOWING,
    LOADING,
    Mark,
    Process,
    TableAuthority,
    can_promote,
    is_ordered,
    is_sole_writer,
    is_valid,
    parse,
    writable,
)
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.overflow import Overflow
from hps.stores.redis.requests import (
    MOST_ORDERED,
    ApplyRows,
    Call,
    ExpireRows,
    FetchRows,
    GetMark,
    Guard,
    Request,
    SendKeys,
    StoreRows,
)
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_log = logging.getLogger(__name__)
_CHUNK_FIELDS: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_FETCHES: Final = 3  # attempts of a fetch while marks change
_MARK_ATTEMPTS: Final = 16  # attempts of a write while other processes change marks
_REFRESH_S: Final = 1.0  # between two checks of an unusable table
_PAUSE_S: Final = 0.001  # between two attempts of a write that other processes overtook
Making: TypeAlias = Callable[[KeyPartition, IndexArray, Guard], list[Request]]


class RedisTable:
    """The rows of one table. *Thread-safe.*

    It is used under the last read marks of its partitions. While `marks` is None the table has the rows of another model than
    the database below, or is being loaded; it then counts as empty, accepts no rows, and is checked once a second.

    Attributes:
        marks: the last read marks of its partitions.
        loading: whether this process is loading it.

    Args:
        batch: maximum keys per timeout and between enforcements of margins (`max_batch_size`).
    """

    def __init__(
        self, layout: RedisLayout, below: TableAuthority, catalog: Catalog, nodes: RedisNodes, overflow: Overflow, batch: int
    ) -> None:
        self.layout = layout
        self.below = below
        self.marks: list[bytes] | None = None
        self.loading = False
        self._our_marks: set[bytes] = set()  # created by this process for its writes; none under which a write failed
        self._unmodified = True  # by this process, when the marks were read last
        self._refreshed_at = 0.0
        self._promotes_after = 0.0
        self._follows = False
        self._by_time = False  # whether writes take their time as sequence
        self._followed: list[bytes] = []  # the marks for which positions of the log are valid
        self._positions: dict[Partition, LogPosition] = {}
        self._highest = 0  # known applied sequence
        self._writing = threading.Lock()
        self._catalog = catalog
        self._nodes = nodes
        self._overflow = overflow
        self._batch = batch
        self._chunk = max(1, min(_CHUNK_FIELDS, batch, _CHUNK_BYTES // (4 * layout.dim)))

    def refresh_marks(self, deadline: float | None = None, *, opens: bool = False, first: bool = False) -> None:
        """Read the marks, and change them so that the table can be used, if allowed; see `Catalog.prepare_marks`.

        Args:
            deadline: time limit on the monotonic clock.
            opens: the process opens the table: it uses it as it is, and without a database below creates missing marks.
            first: the process is about to make its first modification.
        """
        if self.loading:
            return
        me = self.below.process()
        me = replace(me, token=None, previous=None) if first else me
        self._refreshed_at = time.monotonic()
        known = None if opens else self.marks or [b""] * len(self.layout.partitions)
        marks = self._catalog.prepare_marks(self.layout, me, deadline, known=known)
        self._unmodified = me.token is None and not first
        self.marks = marks

    def adopt(self, marks: list[bytes], made: Iterable[bytes]) -> None:
        """Use the table under these marks, of which this process created `made` for its writes."""
        self.marks = marks
        self._our_marks.update(made)
        self._our_marks.intersection_update(marks)

    def fetch(self, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        """As `Database.fetch`. Rows under another mark than the known one do not count.

        If a partition lost its rows, its keys are a failure, not absent. So are all keys while the table is being loaded or has
        another model's rows, unless a database below has them.
        """
        before = int(np.count_nonzero(found))
        deadline = self._deadline(keys)
        for attempt in range(_FETCHES):
            marks = self._usable(deadline)
            if marks is None:
                return 0
            if not self._fetch(marks, keys, out, found, deadline):
                break
            if attempt + 1 == _FETCHES:
                raise DatabaseError(
                    f"redis: fetching from table {self.layout.tag}: its marks changed {_FETCHES} times meanwhile"
                )
            self.refresh_marks(deadline)
        return int(np.count_nonzero(found)) - before

    def insert(self, keys: KeyArray, vectors: FloatArray, *, loading: bool = False) -> None:
        """As `Database.insert`. With `loading`, fails if the marks are no longer those of this process' load."""
        rows = vectors.view(np.uint8)
        for start in range(0, keys.size, self._batch):
            self._insert(keys[start : start + self._batch], rows[start : start + self._batch], loading)

    def promote(self, keys: KeyArray, vectors: FloatArray) -> int:
        rows = vectors.view(np.uint8)
        batches = range(0, keys.size, self._batch)
        return sum(self._promote(keys[i : i + self._batch], rows[i : i + self._batch]) for i in batches)

    def copy_rows(self, keys: KeyArray, vectors: FloatArray) -> bool:
        """As `SharedDatabase.copy_rows`. Like any write it creates a generation, so that delayed requests are refused."""
        rows, me = vectors.view(np.uint8), self.below.process()
        skipped: list[KeyPartition] = []

        def storing(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            if not can_promote(_parsed(guard.mark), me):
                skipped.append(partition)
                return []
            return self._storing(partition, share, guard, batch, rows[start : start + self._batch])

        usable = True
        for start in range(0, keys.size, self._batch):
            batch = keys[start : start + self._batch]
            self._write(batch, storing, f"filling table {self.layout.tag} with {batch.size} keys", copying=True)
            usable = usable and self.marks is not None
        return usable and not skipped

    def delete(self, keys: KeyArray) -> int:

        def removal(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            return self._removing(partition, share, guard, batch)

        removed = 0
        for start in range(0, keys.size, self._batch):
            batch = keys[start : start + self._batch]
            done = self._write(batch, removal, f"deleting {batch.size} keys from table {self.layout.tag}")
            removed += sum(request.reply for request in done)
        return removed

    def follow_log(self) -> dict[Partition, LogPosition]:
        """As `OrderedWrites.follow_log`. From now on every writer also stores each row's place in the order of changes."""
        if self.below.process().base is not None:
            raise DatabaseError(
                f"redis: following a log of updates for table {self.layout.tag}: the database below must do that"
            )
        deadline, self._follows = time.monotonic() + self._nodes.timeout_s, True
        marks = self._writable_marks(list(self.layout.partitions), deadline, loading=False) or []
        highest = [Call(partition.slot, "HGET", partition.sequences, "h") for partition in self.layout.partitions]
        self._nodes.run(highest, deadline)
        self._highest = max(int.from_bytes(call.reply or b"") for call in highest)
        self._positions = self._catalog.positions(self.layout, marks)
        self._followed = marks
        return dict(self._positions)

    def apply(self, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        # Redis compares the sequences, not this process: others may apply the same log, and each may be ahead or behind.
        if not self._followed:
            raise DatabaseError(f"redis: updating table {self.layout.tag}: it follows no log; call follow_log first")
        made = np.zeros(changes.keys.size, np.bool_)
        followed, rows = self._followed, changes.vectors.view(np.uint8)
        sequences = changes.sequences.astype(">i8").view(np.uint8).reshape(-1, 8)
        for start in range(0, changes.keys.size, self._batch):
            part = slice(start, start + self._batch)
            deleted = None if changes.deleted is None else changes.deleted[part]
            made[part] = self._apply(followed, changes.keys[part], rows[part], sequences[part], deleted)
        self._highest = max(self._highest, int(changes.sequences.max(initial=0)))
        new = {name: at for name, at in positions.items() if self._positions.get(name) != at}
        if new:
            self._catalog.write_positions(self.layout, followed, new)
            self._positions.update(new)
        return made

    def order_by_time(self) -> None:
        """As `AgingRows.order_by_time`."""
        if not self._followed:
            self.follow_log()
        self._by_time = True

    def changed_rows(self) -> Iterator[tuple[KeyArray, IndexArray]]:
        """As `AgingRows.changed_rows_of`."""
        for partition in self.layout.partitions:
            for keys, values in self._nodes.scan_hash(partition.slot, partition.sequences, self._chunk, skip=b"h"):
                yield keys, np.frombuffer(b"".join(values), ">i8").astype(np.int64)

    def last_changes(self, keys: KeyArray) -> IndexArray:
        """As `AgingRows.last_changes`."""
        last, found = np.zeros(keys.size, ">i8"), np.zeros(keys.size, np.bool_)
        bits, header = last.view(np.uint8).reshape(-1, 8), np.frombuffer(b"$8\r\n", np.uint8)
        requests: list[Request] = [
            FetchRows(partition.slot, partition.sequences, keys, piece, header, bits, found)
            for partition, share in self._shares(keys)
            for piece in self._pieces(share)
        ]
        self._run(requests, self._deadline(keys), f"reading {keys.size} changes of table {self.layout.tag}")
        return np.where(found, last, 0).astype(np.int64)

    def expire(self, keys: KeyArray, sequence: int, *, loaded: bool) -> ExpiredRows:
        """As `AgingRows.expire`. Redis compares the sequences: other processes may write."""
        kept, removed = np.zeros(keys.size, np.bool_), 0

        def expiring(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            return [
                *self._overflow.forget_uses(partition, keys, share),
                *(
                    ExpireRows(partition.slot, partition.values, guard, keys, piece, sequence, loaded=loaded)
                    for piece in self._pieces(share, guard)
                ),
            ]

        for request in self._write(keys, expiring, f"expiring {keys.size} keys of table {self.layout.tag}"):
            if isinstance(request, ExpireRows):
                found = request.found()
                kept[request.order] = found == 2
                removed += int(np.count_nonzero(found == 1))
        return ExpiredRows(kept, removed)

    def copy_changes(self, changes: RowChanges) -> None:
        """As `Database.copy_changes`. With other writers rows are only removed: a lagging process would write stale ones."""
        rows, me = changes.vectors.view(np.uint8), self.below.process()
        for start in range(0, changes.keys.size, self._batch):
            part = slice(start, start + self._batch)
            self._copy(me, changes.keys[part], rows[part], None if changes.deleted is None else changes.deleted[part])

    def touch(self, keys: KeyArray) -> None:
        requests: list[Request] = []
        for partition, share in self._shares(keys):
            requests += self._overflow.record_uses(partition, keys, share)
        self._nodes.run(requests)

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """As `Database.scan`; fails if rows were lost meanwhile."""
        width, dim, known = 4 * self.layout.dim, self.layout.dim, self._usable(None)
        if known is None:
            return
        for partition in self.layout.partitions:
            for keys, values in self._nodes.scan_hash(partition.slot, partition.values, min(chunk_rows, self._chunk)):
                for key, value in zip(keys, values, strict=True):
                    if len(value) != width:
                        raise TableWidthError(
                            f"redis: scanning table {self.layout.tag}: key {key} has a value of {len(value)} bytes, "
                            f"expected {width} ({dim} float32)"
                        )
                vectors = np.frombuffer(bytearray().join(values), np.float32).reshape(-1, dim)
                for start in range(0, keys.size, chunk_rows):
                    yield keys[start : start + chunk_rows], vectors[start : start + chunk_rows]
            mark = parse(self._nodes.execute(partition.slot, "GET", partition.mark))
            if not is_valid(mark, self.below.process(), _parsed(known[partition.index])):
                raise lost(self.layout)

    def size(self) -> int:
        sizes = [Call(partition.slot, "HLEN", partition.values) for partition in self.layout.partitions]
        self._nodes.run(sizes)
        return sum(size.reply for size in sizes)

    def stats(self) -> TableStats:
        """As `Database.stats`; the overhead is Redis' own estimate from a few rows of each partition."""
        rows = self.size()
        vector_bytes = 4 * self.layout.dim * rows
        sizes = [
            Call(partition.slot, "MEMORY", "USAGE", key)
            for partition in self.layout.partitions
            for key in (partition.values, partition.uses, partition.mark, partition.sequences)
        ]
        self._nodes.run(sizes)
        overhead = max(0, sum(size.reply or 0 for size in sizes) - vector_bytes)
        capacity = min(UNBOUNDED_ROWS, self._overflow.margin * len(self.layout.partitions))
        evictions = sum(self._overflow.evicted(partition) for partition in self.layout.partitions)
        return TableStats(rows, vector_bytes, overhead, capacity, evictions)

    def _usable(self, deadline: float | None, *, loading: bool = False) -> list[bytes] | None:
        """Return the marks; None if the table is unusable and a database below has its rows.

        `loading` is for the load of the table itself. Raises DatabaseError if there is no database below.
        """
        alone = self.below.process().base is None
        if self.loading and not loading and alone:
            marks = [parse(text) for text in self._catalog.marks(self.layout, deadline) or [b""]]
            if any(mark is None or mark.base == LOADING for mark in marks):
                raise DatabaseError(
                    f"redis: table {self.layout.tag} is being loaded by this process; retry when it is complete"
                )
            self.loading, self.marks = False, None  # another process has taken over the load and finished it
        if self.marks is None:
            if alone or time.monotonic() >= self._refreshed_at + _REFRESH_S:
                self.refresh_marks(deadline)
            if self.marks is None and alone:
                raise DatabaseError(f"redis: table {self.layout.tag} is being loaded; retry when it is complete")
        return self.marks

    def _fetch(self, marks: list[bytes], keys: KeyArray, out: FloatArray, found: BoolArray, deadline: float) -> bool:
        """Fetch once; return whether rows were invalid, which are then not `found`."""
        rows = out.view(np.uint8)
        requests: list[Request] = []
        checks: list[tuple[KeyPartition, IndexArray, list[Request]]] = []
        for partition, share in self._shares(keys, found):
            pieces: list[Request] = [
                FetchRows(partition.slot, partition.values, keys, piece, self.layout.header, rows, found)
                for piece in self._pieces(share)
            ]
            # The mark is read after the vectors, on the same connection: if it is unchanged, they were read under it, and
            # absent keys were not lost.
            pieces.append(GetMark(partition.slot, partition.mark, marks[partition.index]))
            requests += pieces
            checks.append((partition, share, pieces))
        try:
            self._run(requests, deadline, f"fetching {keys.size} keys of table {self.layout.tag}")
        except DatabaseError:
            for partition, share, pieces in checks:
                if pieces[-1].reply != marks[partition.index]:
                    found[share] = False
            raise
        if self._nodes.clustered:
            self._reread_marks([pieces for _, _, pieces in checks], deadline)
        changed = [check for check in checks if check[2][-1].reply != marks[check[0].index]]
        return bool(changed) and self._adopt_changed(marks, changed, found)

    def _reread_marks(self, fetches: list[list[Request]], deadline: float) -> None:
        """Read marks again, after the vectors, if a redirection changed the order of the two."""
        moved = [pieces[-1] for pieces in fetches if any(piece.redirected for piece in pieces)]
        while moved:
            for mark in moved:
                mark.redirected = mark.asking = False
            self._run(moved, deadline, "reading marks again")
            moved = [mark for mark in moved if mark.redirected and not mark.asking]

    def _adopt_changed(
        self, marks: list[bytes], changed: list[tuple[KeyPartition, IndexArray, list[Request]]], found: BoolArray
    ) -> bool:
        """Adopt marks under which the fetched rows are valid, too; return whether rows are invalid."""
        me, now, stale = self.below.process(), list(marks), False
        for partition, share, pieces in changed:
            text = pieces[-1].reply
            if is_valid(parse(text), me, _parsed(marks[partition.index])):
                now[partition.index] = text or b""
            else:
                found[share] = False
                stale = True
        if self.marks is marks and not stale:
            self.marks = now
        return stale

    def _insert(self, keys: KeyArray, rows: Bytes, loading: bool) -> None:
        def storing(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            return self._storing(partition, share, guard, keys, rows)

        doing = f"inserting {keys.size} keys into table {self.layout.tag}"
        self._write(keys, storing, doing, loading=loading)

    def _storing(
        self, partition: KeyPartition, share: IndexArray, guard: Guard, keys: KeyArray, rows: Bytes, *, promotion: bool = False
    ) -> list[Request]:
        slot, values, header = partition.slot, partition.values, self.layout.header
        pieces = self._pieces(share, guard)
        return [
            *self._overflow.record_uses(partition, keys, share),
            *(StoreRows(slot, values, keys, piece, header, rows, guard, promotion=promotion) for piece in pieces),
        ]

    def _removing(self, partition: KeyPartition, share: IndexArray, guard: Guard, keys: KeyArray) -> list[Request]:
        pieces, words = self._pieces(share, guard), ("HDEL", partition.values)
        return [
            *self._overflow.forget_uses(partition, keys, share),
            *(SendKeys(partition.slot, words, keys, piece, guard=guard) for piece in pieces),
        ]

    def _apply(
        self, followed: list[bytes], keys: KeyArray, rows: Bytes, sequences: Bytes, deleted: BoolArray | None
    ) -> BoolArray:
        layout = self.layout

        def applying(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            if _parsed(guard.mark).incarnation != _parsed(followed[partition.index]).incarnation:
                raise DatabaseError(
                    f"redis: updating table {layout.tag}: it was emptied or loaded since its log was followed; load it "
                    "again (deploy the model with force), so that the log is read from the position of the rows"
                )
            stored, removed = _split(share, deleted)
            return [
                *self._overflow.record_uses(partition, keys, stored),
                *self._overflow.forget_uses(partition, keys, removed),
                *(
                    ApplyRows(partition.slot, partition.values, guard, keys, piece, sequences, layout.header, values)
                    for order, values in ((stored, rows), (removed, None))
                    for piece in self._pieces(order, guard)
                ),
            ]

        made: BoolArray = np.zeros(keys.size, np.bool_)
        for request in self._write(keys, applying, f"updating {keys.size} keys of table {layout.tag}"):
            if isinstance(request, ApplyRows):
                made[request.order] = request.applied()
        return made

    def _copy(self, me: Process, keys: KeyArray, rows: Bytes, deleted: BoolArray | None) -> None:
        def copying(partition: KeyPartition, share: IndexArray, guard: Guard) -> list[Request]:
            stored, removed = _split(share, deleted) if is_sole_writer(_parsed(guard.mark), me) else (share[:0], share)
            return [
                *self._storing(partition, stored, guard, keys, rows),
                *self._removing(partition, removed, guard, keys),
            ]

        self._write(keys, copying, f"copying changes of {keys.size} keys into table {self.layout.tag}")

    def _promote(self, keys: KeyArray, rows: Bytes) -> int:
        if time.monotonic() < self._promotes_after:
            return 0
        deadline = self._deadline(keys)
        me, marks = self.below.process(), self._usable(deadline)
        shares: list[tuple[KeyPartition, list[Request]]] = []
        for partition, share in self._shares(keys) if marks else ():
            text = marks[partition.index] if marks else b""
            if can_promote(_parsed(text), me):
                guard = Guard(partition.mark, text)
                shares.append((partition, self._storing(partition, share, guard, keys, rows, promotion=True)))
        promotions = [request for _, requests in shares for request in requests if request.once]
        try:
            self._perform(shares, deadline, f"promoting {keys.size} keys into table {self.layout.tag}")
        except DatabaseError as error:
            if not all(request.refused or request.reply is not None for request in promotions):
                raise
            # All were answered, for instance by a full Redis: no request can still arrive later.
            self._promotes_after = time.monotonic() + _REFRESH_S
            _log.warning("%s; nothing is promoted into table %s for %g s", error, self.layout.tag, _REFRESH_S)
        return sum(max(0, request.reply or 0) for request in promotions)

    def _write(
        self, keys: KeyArray, make: Making, doing: str, *, loading: bool = False, copying: bool = False
    ) -> list[Request]:
        """Run guarded requests from `make` until every partition accepts them; return the accepted ones, in order."""
        deadline = self._deadline(keys)
        todo, done = self._shares(keys), list[Request]()
        attempts = 0
        while True:
            marks = self._writable_marks([partition for partition, _ in todo], deadline, loading=loading, copying=copying)
            if marks is None:
                return done
            shares = [
                (partition, make(partition, share, self._guard(partition, marks[partition.index]))) for partition, share in todo
            ]
            refused = self._perform(shares, deadline, doing)
            done += [
                request for _, requests in shares for request in requests if request.once and request.reply not in (None, -1)
            ]
            todo = [(partition, share) for partition, share in todo if partition in refused]
            if not todo:
                return done
            attempts += 1
            if time.monotonic() >= deadline:
                raise DatabaseTimeoutError(f"redis: {doing}: other processes wrote first, {attempts} times")
            time.sleep(random.uniform(0, _PAUSE_S * min(attempts - 1, 16)))  # lets one of two writers win

    def _perform(self, shares: list[tuple[KeyPartition, list[Request]]], deadline: float, doing: str) -> set[KeyPartition]:
        """Run guarded requests and enforce the margins; return the partitions that refused some."""
        marks = self.marks or []
        bounded = self._overflow.margin < UNBOUNDED_ROWS
        counted = [(partition, Call(partition.slot, "HLEN", partition.values)) for partition, _ in shares] if bounded else []
        requests = [request for _, parts in shares for request in parts]
        try:
            self._run([*requests, *(call for _, call in counted)], deadline, doing)
        except DatabaseError:
            # Requests may still arrive. A new generation for the next write makes Redis refuse them.
            self._our_marks.clear()
            raise
        refused = {
            partition for partition, parts in shares if any(request.once and request.reply in (None, -1) for request in parts)
        }
        if refused and marks:
            self._our_marks.difference_update(marks[partition.index] for partition in refused)
        for partition, call in counted:
            self._overflow.resolve(partition, call.reply)
        return refused

    def _writable_marks(
        self, partitions: list[KeyPartition], deadline: float, *, loading: bool, copying: bool = False
    ) -> list[bytes] | None:
        """Return marks under which this process may write to these partitions, created if necessary; None if it may not."""
        # The first modification adds this process to the writers of all partitions, whatever it writes: a partition without its
        # token would pass for one that lacks earlier writes. A copy of rows is no modification.
        busy = f"redis: table {self.layout.tag}: another write was still preparing; retry"
        with exclusive(self._writing, deadline - time.monotonic(), busy):
            first = not copying and (self._unmodified or self.below.process().base is None)
            self._unmodified = self._unmodified and copying
            for _ in range(_MARK_ATTEMPTS):
                marks, me = self._usable(deadline, loading=loading), self.below.process()
                if marks is None:
                    return None
                if self._follows and me.base is None:
                    me = replace(me, token=FOLLOWING)
                parsed = [_parsed(text) for text in marks]
                is_writer = loading or me.token is None or all(me.token in mark.writers for mark in parsed)
                if not is_writer and not first:
                    self.refresh_marks(deadline)  # earlier writes of this process are missing
                    continue
                targets = partitions if is_writer else list(self.layout.partitions)
                changes = [
                    (partition, marks[partition.index], writable(parsed[partition.index], me, fresh))
                    for partition in targets
                    if marks[partition.index] not in self._our_marks or not is_writer
                ]
                if not changes:
                    return marks
                current = self._catalog.change(changes, deadline)
                made = [after.text for (_, _, after), text in zip(changes, current, strict=True) if after.text == text]
                marks = list(marks)
                for (partition, _, _), text in zip(changes, current, strict=True):
                    marks[partition.index] = text
                if len(made) == len(changes):
                    self.adopt(marks, made)
                    return marks
                if loading:
                    raise lost(self.layout)
                self._our_marks.update(made)
                self.refresh_marks(deadline, first=first and not is_writer)
        raise DatabaseError(
            f"redis: table {self.layout.tag}: other processes changed its marks {_MARK_ATTEMPTS} times before a write"
        )

    def _deadline(self, keys: KeyArray) -> float:
        return time.monotonic() + max(1, -(-keys.size // self._batch)) * self._nodes.timeout_s

    def _run(self, requests: list[Request], deadline: float, doing: str) -> None:
        try:
            self._nodes.run(requests, deadline)
        except DatabaseError as error:
            raise type(error)(f"{error} ({doing})") from error

    def _guard(self, partition: KeyPartition, mark: bytes) -> Guard:
        if not is_ordered(_parsed(mark)):
            return Guard(partition.mark, mark)
        highest = max(self._highest, time.time_ns() // 1000 - 1) if self._by_time else self._highest
        return Guard(partition.mark, mark, partition.sequences, highest.to_bytes(8))

    def _pieces(self, share: IndexArray, guard: Guard | None = None) -> list[IndexArray]:
        most = min(self._chunk, MOST_ORDERED) if guard and guard.sequences else self._chunk
        return [share[start : start + most] for start in range(0, share.size, most)]

    def _shares(self, keys: KeyArray, found: BoolArray | None = None) -> list[tuple[KeyPartition, IndexArray]]:
        """Return the positions of keys that are not `found`, by partition."""
        partitions = self.layout.partitions
        order, offsets = np.empty(keys.size, np.int64), np.empty(len(partitions) + 1, np.int64)
        found = np.zeros(keys.size, np.bool_) if found is None else found
        group_by_partition(keys, found, np.uint64(len(partitions)), order, offsets)
        bounds = offsets.tolist()
        return [
            (partition, order[start:stop])
            for partition, start, stop in zip(partitions, bounds, bounds[1:], strict=False)
            if start < stop
        ]


def _split(share: IndexArray, deleted: BoolArray | None) -> tuple[IndexArray, IndexArray]:
    return (share, share[:0]) if deleted is None else (share[~deleted[share]], share[deleted[share]])


def _parsed(text: bytes) -> Mark:
    mark = parse(text)
    return Mark("", "") if mark is None else mark
