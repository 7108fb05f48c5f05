"""Which process loads a model into a Redis that several share: one at a time, and what it has done is remembered."""

import secrets
import time
from dataclasses import replace
from typing import Final

from hps.databases.redis.catalog import Catalog, LoadNote, digest
from hps.databases.redis.layout import RedisLayout
from hps.databases.redis.nodes import RedisNodes
from hps.databases.redis.requests import Call
from hps.databases.redis.table import RedisTable
from hps.errors import DatabaseError

_LOOK_S: Final = 0.2  # between two looks at what another process does
_RENEW: Final = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end"
_RELEASE: Final = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('unlink',KEYS[1]) else return 0 end"


class LoadLeases:
    """The right of one process to load tables of one Redis. *Thread-safe.*

    The right to load a table is a lease that is renewed with every chunk. When its holder dies the lease runs out, and another
    process continues where the table's note says.

    Args:
        nodes: run the commands.
        catalog: makes a table anew where it holds another model.
        lease_s: how long a holder may be silent.
    """

    def __init__(self, nodes: RedisNodes, catalog: Catalog, lease_s: float) -> None:
        self._nodes = nodes
        self._catalog = catalog
        self._lease_ms = max(1, int(1000 * lease_s))
        self._token = secrets.token_hex(8)
        self._claimed: dict[str, LoadNote] = {}

    def claim(self, table: RedisTable, fingerprint: str, rows: int, wait_s: float, *, afresh: bool = False) -> int | None:
        """As `Database.claim_load`."""
        deadline = time.monotonic() + wait_s
        layout = table.layout
        while True:
            _, table.marks = self._catalog.open(layout.tag, layout.dim)
            if not afresh and self._first_row(table, self._catalog.note(layout), fingerprint, rows) == rows:
                return rows
            if self._acquire(layout):
                return self._begin(table, fingerprint, rows, afresh=afresh)
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def renew(self, table: RedisTable, rows_done: int) -> None:
        """Renew the lease of a claimed table, and remember that its first `rows_done` rows are there.

        Raises:
            DatabaseError: the lease has run out and another process has it, or Redis failed.
        """
        layout = table.layout
        claimed = self._claimed.get(layout.tag)
        if claimed is None:
            return
        renewed = self._nodes.ask(layout.slot, "EVAL", _RENEW, 1, layout.lease, self._token, self._lease_ms)
        if not renewed and not self._acquire(layout):
            raise DatabaseError(
                f"redis: loading table {layout.tag}: this process was silent for more than {self._lease_ms / 1000:g} s, so "
                "another one has taken the load over; load the table again"
            )
        self._catalog.write_note(layout, replace(claimed, rows_done=rows_done))

    def end(self, table: RedisTable) -> None:
        """Remember that a claimed table is complete, and give the lease back."""
        claimed = self._claimed.pop(table.layout.tag, None)
        if claimed is not None:
            self._catalog.write_note(table.layout, replace(claimed, rows_done=claimed.rows))
            self._release(table.layout)

    def _begin(self, table: RedisTable, fingerprint: str, rows: int, *, afresh: bool) -> int:
        layout = table.layout
        note = self._catalog.note(layout)  # again: another process may have completed it before we got the lease
        if afresh or (note is not None and note.fingerprint != fingerprint):
            self._catalog.drop(layout.tag)
            # Before the table has marks again, or its emptiness would count as the truth.
            note = LoadNote(fingerprint, 0, rows, "")
            self._catalog.write_note(layout, note)
            _, table.marks = self._catalog.open(layout.tag, layout.dim)
        first = self._first_row(table, note, fingerprint, rows)
        if first == rows:
            self._release(layout)
            return rows
        self._claimed[layout.tag] = LoadNote(fingerprint, first, rows, digest(table.marks))
        self._catalog.write_note(layout, self._claimed[layout.tag])
        return first

    def _first_row(self, table: RedisTable, note: LoadNote | None, fingerprint: str, rows: int) -> int:
        if note is None or note.fingerprint != fingerprint or note.marks != digest(table.marks):
            return 0
        return min(note.rows_done, rows)

    def _acquire(self, layout: RedisLayout) -> bool:
        take = Call(layout.slot, "SET", layout.lease, self._token, "NX", "PX", self._lease_ms)
        see = Call(layout.slot, "GET", layout.lease)
        self._nodes.run([take, see])
        held: bool = see.reply == self._token.encode()
        return held

    def _release(self, layout: RedisLayout) -> None:
        self._nodes.ask(layout.slot, "EVAL", _RELEASE, 1, layout.lease, self._token)
