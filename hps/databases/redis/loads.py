"""Which process loads a model into a Redis that several share: one at a time, and what it has done is remembered."""

import json
import secrets
import time
from dataclasses import asdict, replace
from typing import Final

from hps.databases.redis.catalog import Catalog
from hps.databases.redis.commands import Ask, request
from hps.databases.redis.dispatch import Dispatcher
from hps.databases.redis.layout import LOADED, Layout
from hps.databases.redis.loaded import Loaded, digest, parse_loaded
from hps.databases.redis.table import RedisTable
from hps.errors import DatabaseError

_LOOK_S: Final = 0.2  # between two looks at what another process does
_RENEW: Final = b"if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end"
_RELEASE: Final = b"if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('unlink',KEYS[1]) else return 0 end"


class Loads:
    """The loads of one process into the tables of one Redis. *Thread-safe.*

    The right to load a table is a lease that is renewed with every chunk. When its holder dies it runs out, and another
    process goes on where the table's note says.

    Args:
        dispatcher: runs the commands.
        catalog: makes a table anew where it holds another model.
        lease_s: how long a holder may be silent.
    """

    def __init__(self, dispatcher: Dispatcher, catalog: Catalog, lease_s: float) -> None:
        self._dispatcher = dispatcher
        self._catalog = catalog
        self._lease_ms = b"%d" % max(1, int(1000 * lease_s))
        self._token = secrets.token_hex(8).encode()
        self._claimed: dict[str, Loaded] = {}

    def claim(self, table: RedisTable, fingerprint: str, rows: int, wait_s: float, *, afresh: bool = False) -> int | None:
        """As `SharedDatabase.claim_load`."""
        deadline = time.monotonic() + wait_s
        layout = table.layout
        while True:
            _, table.marks = self._catalog.open(layout.tag, layout.dim)
            if not afresh and self._first_row(table, fingerprint, rows) == rows:
                return rows
            if self._acquire(layout):
                return self._begin(table, fingerprint, rows, afresh=afresh)
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def note(self, table: RedisTable, rows_done: int) -> None:
        """Renew the lease of a claimed table, and remember that its first `rows_done` rows are there.

        Raises:
            DatabaseError: the lease has run out and another process has it, or Redis failed.
        """
        claimed = self._claimed.get(table.layout.tag)
        if claimed is None:
            return
        layout = table.layout
        renew = Ask(layout.slot, request(b"EVAL", _RENEW, b"1", layout.lease, self._token, self._lease_ms))
        self._dispatcher.run([renew])
        if not renew.reply and not self._acquire(layout):
            raise DatabaseError(
                f"redis: loading table {layout.tag}: nothing was heard from this process for {int(self._lease_ms) / 1000:g} s, "
                "so another one has taken the load over; load the table again"
            )
        self._write(layout, replace(claimed, rows_done=rows_done))

    def end(self, table: RedisTable) -> None:
        """Remember that a claimed table is complete, and give the lease back."""
        layout = table.layout
        claimed = self._claimed.pop(layout.tag, None)
        if claimed is not None:
            self._write(layout, replace(claimed, rows_done=claimed.rows))
            self._release(layout)

    def _begin(self, table: RedisTable, fingerprint: str, rows: int, *, afresh: bool) -> int:
        layout = table.layout
        loaded = self._loaded(layout)  # again: it may have been completed before we got the lease
        if afresh or (loaded is not None and loaded.fingerprint != fingerprint):
            self._catalog.drop(layout.tag)
            # Before the table has marks again, or its emptiness would be taken for the truth.
            self._write(layout, Loaded(fingerprint, 0, rows, ""))
            _, table.marks = self._catalog.open(layout.tag, layout.dim)
        first = self._first_row(table, fingerprint, rows)
        if first == rows:
            self._release(layout)
            return rows
        self._claimed[layout.tag] = Loaded(fingerprint, first, rows, digest(table.marks))
        self._write(layout, self._claimed[layout.tag])
        return first

    def _first_row(self, table: RedisTable, fingerprint: str, rows: int) -> int:
        loaded = self._loaded(table.layout)
        if loaded is None or loaded.fingerprint != fingerprint or loaded.marks != digest(table.marks):
            return 0
        return min(loaded.rows_done, rows)

    def _acquire(self, layout: Layout) -> bool:
        take = Ask(layout.slot, request(b"SET", layout.lease, self._token, b"NX", b"PX", self._lease_ms))
        see = Ask(layout.slot, request(b"GET", layout.lease))
        self._dispatcher.run([take, see])
        held: bool = see.reply == self._token
        return held

    def _release(self, layout: Layout) -> None:
        self._dispatcher.run([Ask(layout.slot, request(b"EVAL", _RELEASE, b"1", layout.lease, self._token))])

    def _loaded(self, layout: Layout) -> Loaded | None:
        read = Ask(layout.slot, request(b"HGET", layout.about, LOADED))
        self._dispatcher.run([read])
        return None if read.reply is None else parse_loaded(read.reply, layout)

    def _write(self, layout: Layout, loaded: Loaded) -> None:
        self._dispatcher.run([Ask(layout.slot, request(b"HSET", layout.about, LOADED, json.dumps(asdict(loaded)).encode()))])
