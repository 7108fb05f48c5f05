"""What one lookup did: its stages with their times, and how many keys each tier answered.

    with traced() as trace:
        server.lookup(keys, "ranker", "item")
    trace.spans, trace.tables

A trace follows the calls of its own thread. What a lookup leaves to other threads (deferred insertion) is not in it. Where no
trace was asked for, a stage costs one look at a thread-local variable.

The times of stages are always added up (`hps_lookup_stage_seconds`): a lookup that misses keys has a dict for them in
`current.stages`, to which the tiers that it asks add theirs with `ended`.
"""

import threading
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Final, NamedTuple

STAGES: Final = ("adopt", "wait", "query", "unique", "volatile_db", "persistent_db", "coalesced", "scatter", "insert", "finish")
"""The stages of a lookup, in the order in which they begin: `wait` for a workspace, the fetches by tier, and `coalesced`, the
wait for keys that another lookup fetches."""


class Span(NamedTuple):
    """One stage of a lookup. Times are nanoseconds of `time.perf_counter_ns`. `table` is empty where it is of all tables.

    `keys` are those that the stage was given: with duplicates in the stages before `unique`, distinct ones after it.
    """

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

    def add(self, tier: str, hits: int) -> None:
        """Count keys that a tier of `metrics.TIERS` answered."""
        setattr(self, tier, getattr(self, tier) + hits)


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
    stages: dict[str, int] | None = None


current: Final = _Current()
"""Of this thread: `trace`, if one was asked for, and `stages`, nanoseconds by stage of a lookup that asks the tiers now."""


def ended(stage: str, table: str, began_ns: int, keys: int) -> int:
    """Note that a stage of this thread's lookup ends now, if one is under way; returns the time."""
    now = perf_counter_ns()
    stages = current.stages
    if stages is not None:
        stages[stage] = stages.get(stage, 0) + now - began_ns
        if (trace := current.trace) is not None:
            trace.spans.append(Span(stage, table, began_ns, now, keys))
    return now


class traced:
    """Trace the lookups of this thread while in the block: `with traced() as trace:`. *One per thread.*

    Traces do not nest: the inner one takes what it sees from the outer one.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> LookupTrace:
        self._before = current.trace
        current.trace = trace = LookupTrace()
        return trace

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        current.trace = self._before
