"""The mark of a partition, and the rules by which processes share it. The rules are pure functions; tests check all cases.

A mark is one string, `<incarnation> <generation> <base> <writers>`, that is compared and replaced as one value:

- *incarnation*: changes when rows are dropped or lost. If two marks have the same one, no row was lost in between.
- *generation*: created by the one process that writes under it. Another process creates a new one before it writes, and so does
  a process after a failed write. Delayed writes under an older generation are then refused.
- *base*: which model the rows come from; `-` if unknown, `~` while they are being loaded.
- *writers*: `-`, or tokens of the processes that modified the table online, separated by commas; `*` stands for those without a
  database below, `*s` for those of them that follow a log of updates. If there is exactly one, only that process promotes. A
  process trusts rows without its token only if it never modified the table. With `*s`, every writer of a row also writes its
  place in the order of all changes.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hps.stores.base import PersistentDatabase

UNKNOWN: Final = "-"
LOADING: Final = "~"
NO_DATABASE_BELOW: Final = "*"
FOLLOWING: Final = "*s"
MOST_WRITERS: Final = 16
"""Tokens in a mark. A process whose token was dropped empties the partition at its next check, and adds itself again."""

_MARK: Final = re.compile(rb"(\w+) (\w+) (-|~|\w+) (-|[\w*]+(?:,[\w*]+)*)")
Fresh = Callable[[], str]
"""Creates a text that was never in a mark."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A parsed mark. *Immutable.*"""

    incarnation: str
    generation: str
    base: str = UNKNOWN
    writers: tuple[str, ...] = ()

    @property
    def text(self) -> bytes:
        return f"{self.incarnation} {self.generation} {self.base} {','.join(self.writers) or '-'}".encode()


def parse(text: bytes | None) -> Mark | None:
    """Parse a mark; None if there is none, or one of an older version."""
    found = _MARK.fullmatch(text or b"")
    if found is None:
        return None
    incarnation, generation, base, writers = (part.decode() for part in found.groups())
    return Mark(incarnation, generation, base, () if writers == "-" else tuple(writers.split(",")))


def base_of(content: str) -> str:
    """Hash the identity of a model, the checksum of its rows or its files, to a base."""
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Process:
    """The relation of a process to a table. *Immutable.*

    Attributes:
        base: base of the rows in the database below; None without one.
        alias: base after a load of the same files.
        token: identifies its modifications; None if it never modified the table.
        previous: its token before the last start; writes under it are present where the token is.
        passive: the database below is read only, and was modified.
    """

    base: str | None = None
    alias: str = ""
    token: str | None = NO_DATABASE_BELOW
    previous: str | None = None
    passive: bool = False


def opened(mark: Mark | None, me: Process, fresh: Fresh) -> tuple[Mark, bool] | None:
    """Decide how a process may use a partition.

    Returns:
        The mark to set, unchanged if it fits, and whether the rows must be removed first; None if the process may not use it.
    """
    if me.base is None:
        if mark is None:
            return Mark(fresh(), fresh()), False
        return None if mark.base == LOADING else (mark, False)
    if mark is None:  # rows without a mark are HugeCTR's
        return Mark(fresh(), fresh(), me.base, (me.token,) if me.token else ()), bool(me.token) or me.passive
    foreign = mark.base == UNKNOWN and not mark.writers
    if not foreign and mark.base not in (me.base, me.alias):
        return None
    if me.token is None or me.token in mark.writers:
        return (mark if mark.base == me.base else replace(mark, generation=fresh(), base=me.base)), False
    if me.previous is not None and me.previous in mark.writers:
        writers = tuple(me.token if writer == me.previous else writer for writer in mark.writers)
        return Mark(mark.incarnation, fresh(), me.base, writers), False
    return Mark(fresh(), fresh(), me.base, _with(mark.writers, me.token)), True


def rows_lost(mark: Mark | None, known: Mark | None) -> bool:
    """Return whether a process without a database below lost rows, which it last used under the mark `known`, if any."""
    if mark is None:
        return True
    # A table that another process has only opened, and that no process has loaded or modified yet, does not count as empty.
    recreated = known is None or mark.incarnation != known.incarnation
    return recreated and mark.base == UNKNOWN and not mark.writers


def writable(mark: Mark, me: Process, fresh: Fresh) -> Mark:
    """Return the mark under which a process may write to a partition that it uses; the rows stay."""
    writers = mark.writers if me.token is None or mark.base == LOADING else _with(mark.writers, me.token)
    return replace(mark, generation=fresh(), writers=writers)


def is_sole_writer(mark: Mark, me: Process) -> bool:
    """Return whether no other process has modified the table. Then the rows of the database below are the latest."""
    return mark.writers in ((), (me.token,))


def can_promote(mark: Mark, me: Process) -> bool:
    return not me.passive and mark.base != LOADING and is_sole_writer(mark, me)


def is_ordered(mark: Mark) -> bool:
    """Return whether each row's place in the order of changes is stored, which lasts as long as the incarnation."""
    return FOLLOWING in mark.writers


def is_valid(mark: Mark | None, me: Process, known: Mark) -> bool:
    """Return whether rows are valid that were read under the mark `known`, and before `mark` was read."""
    if mark is None or mark.incarnation != known.incarnation:
        return False
    if me.base is None:
        return True
    return opened(mark, me, lambda: "") == (mark, False)


def loading_mark(mark: Mark | None, fresh: Fresh) -> Mark:
    # Rows of unknown origin stay. The order of changes is dropped with the incarnation, since the log is read again.
    return Mark(mark.incarnation if mark and not is_ordered(mark) else fresh(), fresh(), LOADING)


def loaded_mark(mark: Mark, base: str, fresh: Fresh) -> Mark:
    return replace(mark, generation=fresh(), base=base)


def is_loadable(mark: Mark | None) -> bool:
    """Return whether files may be loaded over the rows: no process with a database below has modified them."""
    return mark is None or set(mark.writers) <= {NO_DATABASE_BELOW, FOLLOWING}


def _with(writers: tuple[str, ...], token: str) -> tuple[str, ...]:
    return writers if token in writers else (*writers[1 - MOST_WRITERS :], token)


class TableAuthority:
    """The persistent database below one table, if any. *Thread-safe.* `tag` is that of the table in it."""

    def __init__(self, tag: str, database: PersistentDatabase | None = None) -> None:
        self._tag = tag
        self._database = database
        self._previous: str | None = None
        self._renewed: str | None = None
        if database and not database.read_only and (token := database.writer_token(tag)) is not None:
            # The token of an earlier process. A copy of the directory has the same one, and only one of the two may replace it
            # in Redis. So it is renewed at each start: the copy that comes second no longer finds it.
            self._previous, self._renewed = token, database.renew_writer_token(tag)

    def process(self) -> Process:
        if self._database is None:
            return Process()
        record, token = self._database.load_record(self._tag), self._database.writer_token(self._tag)
        base, alias = "-", ""
        if record is not None and record.complete:
            alias = base_of(record.fingerprint)
            base = base_of(f"{record.rows_total} {record.checksum}") if record.checksum else alias
        if self._database.read_only:
            return Process(base, alias, None, passive=token is not None)
        return Process(base, alias, token, self._previous if token == self._renewed else None)
