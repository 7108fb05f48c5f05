"""What one lookup did: its stages with their times, and how many keys each tier answered.

    with traced() as trace:
        server.lookup(keys, "ranker", "item")
    trace.spans, trace.tables

A trace follows the calls of its own thread. What a lookup leaves to other threads (deferred insertion) is not in it. Where no
trace was asked for, a stage costs one look at a thread-local variable.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

STAGES: Final = ("adopt", "wait", "query", "unique", "volatile_db", "persistent_db", "coalesced", "scatter", "insert", "finish")
"""The stages of a lookup, in the order in which they begin: `wait` for a workspace, the fetches by tier, and `coalesced`, the
wait for keys that another lookup fetches."""


class Span(NamedTuple):
    """One stage of a lookup. Times are nanoseconds of `time.perf_counter_ns`. `table` is empty where it is of all tables."""

    stage: str
    table: str
    began_ns: int
    ended_ns: int
    keys: int


@dataclass(slots=True)
class TableAnswers:
    """How the keys of one table were answered; the counts are those of `metrics.TableCounters`, of one lookup."""

    keys: int = 0
    embedding_cache: int = 0
    volatile_db: int = 0
    persistent_db: int = 0
    linked: int = 0
    defaults: int = 0
    deferred: int = 0


@dataclass(slots=True)
class LookupTrace:
    """What the lookups of one thread did while they were traced. *One per thread.*

    Attributes:
        spans: in the order in which they ended.
        tables: by name of the table.
    """

    spans: list[Span] = field(default_factory=list)
    tables: dict[str, TableAnswers] = field(default_factory=dict)

    def of(self, table: str) -> TableAnswers:
        """The answers of a table, created by the first call."""
        found = self.tables.get(table)
        if found is None:
            found = self.tables[table] = TableAnswers()
        return found


class _Current(threading.local):
    trace: LookupTrace | None = None


current: Final = _Current()
"""`current.trace` is the trace of this thread, if there is one."""


@contextmanager
def traced() -> Iterator[LookupTrace]:
    """Trace the lookups of this thread. Traces do not nest: the inner one takes what it sees from the outer one."""
    before, trace = current.trace, LookupTrace()
    current.trace = trace
    try:
        yield trace
    finally:
        current.trace = before
