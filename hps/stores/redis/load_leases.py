"""Leases by which one process at a time loads a model into a shared Redis."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hps.errors import DatabaseError, UnknownTableError
from hps.stores.base import CopyOutcome
from hps.stores.redis.catalog import Catalog, LoadProgress, digest, fresh, lost
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.marks import LOADING, UNKNOWN, Mark, base_of, is_loadable, loaded_mark, loading_mark, parse
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import Call
from hps.stores.redis.table import RedisTable
from hps.stores.redis.users import TableUsers

_ATTEMPTS: Final = 8  # while other processes open the table
_POLL_S: Final = 0.2  # between two checks of another process' progress
_RENEW: Final = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end"
_RELEASE: Final = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('unlink',KEYS[1]) else return 0 end"


class LoadLeases:
    """The right of one process to load tables of one Redis. *Thread-safe.*

    A lease is renewed with every chunk. If its holder dies it expires, and another process continues at the stored progress.
    """

    def __init__(self, nodes: RedisNodes, catalog: Catalog, users: TableUsers, lease_s: float) -> None:
        self._nodes = nodes
        self._catalog = catalog
        self._users = users
        self._lease_ms = max(1, int(1000 * lease_s))
        self._token = secrets.token_hex(8)
        self._claimed: dict[str, LoadProgress] = {}
        self._copied: dict[str, LoadProgress] = {}
        self._not_copied: dict[str, str] = {}  # digests under which others had modified a table

    def claim(self, table: RedisTable, fingerprint: str, rows: int, wait_s: float, *, replaces: bool = True) -> int | None:
        deadline = time.monotonic() + wait_s
        layout = table.layout
        if table.loading:  # an earlier load by this process failed
            table.loading, table.marks = False, None
        while True:
            texts = self._open(layout)
            loading = any(mark and mark.base == LOADING for mark in map(parse, texts))
            if not loading and self._first_row(table, texts, self._catalog.load_progress(layout), fingerprint, rows) == rows:
                return rows
            if self._acquire(layout):
                return self._start_load(table, fingerprint, rows, replaces=replaces)
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def renew_claim(self, table: RedisTable) -> bool:
        """Renew the lease of a table; return False if it is not claimed, and raise if another process has it."""
        layout = table.layout
        if layout.tag not in self._claimed:
            return False
        self._renew(layout, "load")
        return True

    def advance(self, table: RedisTable, rows_done: int) -> None:
        """Store that the first `rows_done` rows of a claimed table are loaded."""
        claimed = self._claimed.get(table.layout.tag)
        if claimed is not None:
            self._catalog.write_load_progress(table.layout, replace(claimed, rows_done=rows_done))

    def end(self, table: RedisTable) -> None:
        """Store that a claimed table is complete, and release the lease."""
        claimed = self._claimed.pop(table.layout.tag, None)
        if claimed is not None:
            base = base_of(claimed.fingerprint)
            self._change(table, table.marks or [], lambda mark: loaded_mark(mark or Mark("", ""), base, fresh))
            table.loading = False
            self._catalog.write_load_progress(table.layout, replace(claimed, rows_done=claimed.rows))
            self._catalog.write_load_time(table.layout)
            self._release(table.layout)

    def abandon(self, table: RedisTable) -> None:
        self._not_copied.pop(table.layout.tag, None)
        if self._claimed.pop(table.layout.tag, None) or self._copied.pop(table.layout.tag, None):
            self._release(table.layout)

    def lacks_rows(self, table: RedisTable) -> bool:
        layout = table.layout
        record = self._catalog.load_record(layout.tag)
        if record is not None and record.complete:
            return False
        texts = self._catalog.marks(layout)
        return texts is None or self._not_copied.get(layout.tag) != digest(texts)

    def has_writes(self, table: RedisTable) -> bool:
        return any(mark is not None and mark.writers for mark in map(parse, self._catalog.marks(table.layout) or []))

    def claim_copy(self, table: RedisTable, fingerprint: str, rows: int) -> bool:
        layout = table.layout
        if table.marks is None or layout.tag in self._claimed or not self._acquire(layout):
            return False
        texts = self._catalog.marks(layout)
        if texts is None or not self.lacks_rows(table):  # another process has copied them meanwhile
            self._release(layout)
            return False
        self._copied[layout.tag] = LoadProgress(fingerprint, rows, rows, digest(texts))
        return True

    def renew_copy(self, table: RedisTable) -> None:
        self._renew(table.layout, "copy")

    def end_copy(self, table: RedisTable, outcome: CopyOutcome) -> None:
        """As `SharedDatabase.end_copy`. Partitions that lost rows since the claim have other incarnations than then."""
        layout = table.layout
        claimed = self._copied.pop(layout.tag, None)
        if claimed is None:
            return
        texts = self._catalog.marks(layout)
        if texts is not None and digest(texts) == claimed.marks:
            if outcome == "complete":
                self._catalog.write_load_progress(layout, claimed)
                self._catalog.write_load_time(layout)
            elif outcome == "refused":
                self._not_copied[layout.tag] = claimed.marks
        self._release(layout)

    def _open(self, layout: RedisLayout) -> list[bytes]:
        for _ in range(_ATTEMPTS):
            self._catalog.open(layout)
            texts = self._catalog.marks(layout)
            if texts is not None:  # else a process that starts to load it has just emptied it
                return texts
        raise lost(layout)

    def _start_load(self, table: RedisTable, fingerprint: str, rows: int, *, replaces: bool) -> int:
        for _ in range(_ATTEMPTS):
            if (first := self._try_to_start(table, fingerprint, rows, replaces=replaces)) is not None:
                return first
        raise lost(table.layout)

    def _try_to_start(self, table: RedisTable, fingerprint: str, rows: int, *, replaces: bool) -> int | None:
        """Start a load under the lease; return None if a process that opened the table changed its marks meanwhile."""
        layout = table.layout
        # Read again under the lease: another process may have completed the load meanwhile.
        progress, texts = self._catalog.load_progress(layout), self._open(layout)
        first = self._first_row(table, texts, progress, fingerprint, rows)
        marks = [mark for mark in map(parse, texts) if mark]
        if first == rows and not any(mark.base == LOADING for mark in marks):
            self._release(layout)
            return rows
        if not first and not self._can_keep_rows(table, marks, progress, fingerprint):
            if not replaces and not any(mark.base == LOADING for mark in marks):  # else no process can read the rows
                self._refuse_used(layout, progress, LoadProgress(fingerprint, 0, rows, ""))
            self._catalog.drop(layout.tag)
            # Before the table has marks again: otherwise missing rows would count as absent.
            self._catalog.write_load_progress(layout, LoadProgress(fingerprint, 0, rows, ""))
            texts = self._open(layout)
        table.loading = True  # before lookups of this process see the marks of a load
        try:
            texts = self._change(table, texts, lambda mark: loading_mark(mark, fresh))
        except UnknownTableError:
            table.loading = False
            return None
        except BaseException:
            table.loading = False
            raise
        self._claimed[layout.tag] = LoadProgress(fingerprint, first, rows, digest(texts))
        self._catalog.write_load_progress(layout, self._claimed[layout.tag])
        if first == rows:  # its loader died after the last row
            self.end(table)
        return first

    def _refuse_used(self, layout: RedisLayout, before: LoadProgress | None, progress: LoadProgress) -> None:
        """Refuse to load over rows that other processes use."""
        # Recorded before the check: a process that registers after it finds an incomplete load.
        self._catalog.write_load_progress(layout, progress)
        if not self._users.has_others(layout):
            return
        if before is not None:
            self._catalog.write_load_progress(layout, before)
        self._release(layout)
        raise DatabaseError(
            f"redis: loading table {layout.tag}: other processes use it with the rows of other files; deploy the model, which "
            "takes another table, or stop them"
        )

    def _change(self, table: RedisTable, texts: list[bytes], to: Callable[[Mark | None], Mark]) -> list[bytes]:
        """Change the marks of all partitions from `texts`, and use the table under the new ones."""
        changes = [(part, text, to(parse(text))) for part, text in zip(table.layout.partitions, texts, strict=True)]
        made = self._catalog.change(changes)
        if made != [mark.text for _, _, mark in changes]:
            raise lost(table.layout)
        table.adopt(made, made)
        return made

    def _first_row(
        self, table: RedisTable, texts: list[bytes], progress: LoadProgress | None, fingerprint: str, rows: int
    ) -> int:
        me, marks = table.below.process(), [parse(text) for text in texts]
        ours = {base_of(fingerprint), me.base, me.alias}
        if any(mark and not is_loadable(mark) and mark.base in ours for mark in marks):
            return rows  # rows may be newer than the files, and missing rows are in the database below
        if progress is None or progress.marks != digest(texts):
            return 0
        same = progress.fingerprint == fingerprint or all(mark and UNKNOWN != mark.base == me.base for mark in marks)
        return min(progress.rows_done, rows) if same else 0

    def _can_keep_rows(self, table: RedisTable, marks: list[Mark], progress: LoadProgress | None, fingerprint: str) -> bool:
        """Return whether existing rows may stay and be overwritten: they are of the same model, or of unknown origin."""
        if progress is not None and progress.fingerprint != fingerprint:
            return False
        me = table.below.process()
        return all(
            mark.base in {UNKNOWN, LOADING if progress else "", base_of(fingerprint), me.base, me.alias} for mark in marks
        )

    def _acquire(self, layout: RedisLayout) -> bool:
        # The GET also recognises a lease that this process has already, for instance from a SET whose reply was lost.
        claim = Call(layout.slot, "SET", layout.lease, self._token, "NX", "PX", self._lease_ms)
        current = Call(layout.slot, "GET", layout.lease)
        self._nodes.run([claim, current])
        return bool(current.reply == self._token.encode())

    def _renew(self, layout: RedisLayout, work: str) -> None:
        renewed = self._nodes.execute(layout.slot, "EVAL", _RENEW, 1, layout.lease, self._token, self._lease_ms)
        if not renewed and not self._acquire(layout):
            raise DatabaseError(
                f"redis: {work} of table {layout.tag}: this process was silent for more than {self._lease_ms / 1000:g} s, so "
                f"another one has taken over the {work}; load the table again"
            )

    def _release(self, layout: RedisLayout) -> None:
        self._nodes.execute(layout.slot, "EVAL", _RELEASE, 1, layout.lease, self._token)
