"""The processes that use a table of a shared Redis; the last one to leave drops it.

The hash `hps_et{T}u` has a field for each process that uses the table, with the time at which the entry expires, in ms since
1970. A process renews its entry; that of a dead process expires. Only the clock of Redis counts. The script that finds no other
user writes into the table's own hash how long the caller may take to drop the table (`dropping`). A process that opens the
table meanwhile waits, registers and creates it again. If the dropping process dies, the next process that opens or discards
the table completes the drop.

HugeCTR's processes have no entries: rows of unknown origin under one of its names (no `@` in the tag) may be theirs.
"""

import logging
import secrets
import threading
import time
from contextlib import suppress
from typing import Final

from hps.errors import DatabaseError, DatabaseTimeoutError, NotReadyError
from hps.ground.threads.lifetimes import disown_in_children
from hps.ground.threads.workers import PeriodicTask
from hps.stores.redis.catalog import Catalog
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.marks import UNKNOWN, parse
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import Call

_log = logging.getLogger(__name__)
_RENEWALS: Final = 6  # in the lifetime of an entry
_DROP_MS: Final = 10_000  # limit for dropping a table; most take some ms
_WAIT_S: Final = 0.05  # between two checks of a table that is being dropped
_CLOSE_S: Final = 1.0  # limit for unregistering from all tables
_NOW: Final = "local t = redis.call('time') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
# Adds a process to the users unless the table is being dropped. A full Redis allows the HSETNX because an HDEL precedes it.
_USE: Final = (
    _NOW
    + """
redis.call('hdel', KEYS[1], ARGV[1])
if redis.call('hget', KEYS[2], 'dropping') then return 0 end
redis.call('hsetnx', KEYS[1], ARGV[1], string.format('%.0f', now + ARGV[2]))
return redis.call('pexpire', KEYS[1], 2 * ARGV[2])
"""
)
# Removes a process from the users; returns 1 if it was the last one and must drop the table.
_DISCARD: Final = (
    _NOW
    + """
redis.call('hdel', KEYS[1], ARGV[1])
local users = redis.call('hgetall', KEYS[1])
for i = 2, #users, 2 do if tonumber(users[i]) > now then return 0 end end
local dropping = redis.call('hget', KEYS[2], 'dropping')
if dropping and tonumber(dropping) > now then return 0 end
redis.call('unlink', KEYS[1])
redis.call('hset', KEYS[2], 'dropping', string.format('%.0f', now + ARGV[2]))
return 1
"""
)
_OTHERS: Final = (
    _NOW
    + """
local users = redis.call('hgetall', KEYS[1])
for i = 2, #users, 2 do if users[i - 1] ~= ARGV[1] and tonumber(users[i]) > now then return 1 end end
return 0
"""
)


def is_used(nodes: RedisNodes, layout: RedisLayout, token: str = "") -> bool:
    """Return whether other processes than the one with this token use a table. Nothing is written."""
    return bool(nodes.execute(layout.slot, "EVAL", _OTHERS, 1, layout.users, token))


class TableUsers:
    """The tables of one Redis that this process uses. *Thread-safe.* A periodic task renews their entries."""

    def __init__(self, nodes: RedisNodes, catalog: Catalog, lease_s: float) -> None:
        self._nodes = nodes
        self._catalog = catalog
        self._lease_ms = max(_RENEWALS, int(1000 * lease_s))
        self._token = secrets.token_hex(8)
        self._used: dict[str, RedisLayout] = {}
        self._starting = threading.Lock()
        self._renewing = threading.Lock()  # held during a renewal, which must not restore a removed entry
        self._task: PeriodicTask | None = None
        disown_in_children(self)

    def register(self, layout: RedisLayout) -> None:
        """Register as a user of a table; wait while it is being dropped."""
        deadline = time.monotonic() + 3 * _DROP_MS / 1000
        while not self._nodes.execute(layout.slot, *self._script(_USE, layout, self._lease_ms)):
            if not self._drop_unused(layout):
                if time.monotonic() >= deadline:
                    raise DatabaseTimeoutError(f"redis: opening table {layout.tag}: another process has not dropped it yet")
                time.sleep(_WAIT_S)
        self._used[layout.tag] = layout
        with self._starting:
            if self._task is None:
                every_s = self._lease_ms / 1000 / _RENEWALS
                self._task = PeriodicTask("redis-users", self.renew, every_s, what="renewing the use of tables in Redis")

    def unregister(self, layout: RedisLayout) -> None:
        self._forget(layout)
        self._nodes.execute(layout.slot, "HDEL", layout.users, self._token)

    def has_others(self, layout: RedisLayout) -> bool:
        return is_used(self._nodes, layout, self._token)

    def discard(self, layout: RedisLayout, *, spare_foreign: bool = True) -> bool:
        """Stop using a table, and drop it unless other processes use it; return whether it was dropped.

        Args:
            spare_foreign: keep a table that HugeCTR may use.
        """
        if spare_foreign and "@" not in layout.tag and self._has_foreign_rows(layout):
            self.unregister(layout)
            return False
        self._forget(layout)
        return self._drop_unused(layout)

    def close(self) -> None:
        if self._task is not None:
            self._task.abandon(self._nodes.timeout_s)
        calls = [Call(layout.slot, "HDEL", layout.users, self._token) for layout in self._used.values()]
        self._used = {}
        with suppress(DatabaseError, NotReadyError):  # then the entries expire
            self._nodes.run(calls, time.monotonic() + _CLOSE_S)

    def disown(self) -> None:
        """Forget the tables in a forked child, which lacks the thread: the parent uses them."""
        self._used, self._task = {}, None
        self._starting, self._renewing = threading.Lock(), threading.Lock()

    def renew(self) -> None:
        """Renew the entries of all used tables. A table that is being dropped is lost; its next call reports that."""
        # `_USE` does not add an entry of a table that is being dropped, so a late renewal cannot revive it.
        with self._renewing:
            self._nodes.run(
                [Call(layout.slot, *self._script(_USE, layout, self._lease_ms)) for layout in list(self._used.values())]
            )

    def _forget(self, layout: RedisLayout) -> None:
        with self._renewing:
            self._used.pop(layout.tag, None)

    def _drop_unused(self, layout: RedisLayout) -> bool:
        if not self._nodes.execute(layout.slot, *self._script(_DISCARD, layout, _DROP_MS)):
            return False
        self._catalog.drop(layout.tag)
        return True

    def _has_foreign_rows(self, layout: RedisLayout) -> bool:
        calls = [
            call
            for part in layout.partitions
            for call in (Call(part.slot, "HLEN", part.values), Call(part.slot, "GET", part.mark))
        ]
        self._nodes.run(calls)
        marks = [parse(mark.reply) for rows, mark in zip(calls[::2], calls[1::2], strict=True) if rows.reply]
        return any(mark is None or mark.base == UNKNOWN for mark in marks)

    def _script(self, script: str, layout: RedisLayout, lease_ms: int) -> tuple[str | bytes | int, ...]:
        return "EVAL", script, 2, layout.users, layout.about, self._token, lease_ms
