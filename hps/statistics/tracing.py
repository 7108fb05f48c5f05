"""Traces of lookups: stages with their times, and the number of keys each tier answered.

    with traced() as trace:
        server.lookup(keys, "ranker", "item")
    trace.spans, trace.tables

A trace covers calls on its own thread, and excludes work left to other threads (deferred insertion). Without a trace, a stage
costs one read of a thread-local variable.

Stage times are always summed (`hps_lookup_stage_seconds`): a lookup that misses keys puts a dict into `current.stages`, to
which the tiers add their times with `ended`.
"""

import threading
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

STAGES: Final = ("adopt", "wait", "query", "unique", "volatile_db", "persistent_db", "coalesced", "scatter", "insert", "finish")
"""The stages of a lookup, in the order in which they start: `wait` for a workspace, the fetches by tier, and `coalesced`, the
wait for keys that another lookup fetches."""


TierNumbers: TypeAlias = npt.NDArray[np.uint8]
"""The tier that answered each key, as an index into `metrics.TIERS`; 0 for none, since fetches skip the embedding cache."""


class Span(NamedTuple):
    """One stage of a lookup. Times are nanoseconds of `time.perf_counter_ns`. `table` is empty if the stage covers all tables.

    `keys` counts the keys of the stage: with duplicates before `unique`, distinct ones after it.
    """

    stage: str
    table: str
    began_ns: int
    ended_ns: int
    keys: int


@dataclass(slots=True)
class TableAnswers:
    """Counts of one table's keys in one lookup, as in `metrics.TableCounters`."""

    keys: int = 0
    embedding_cache: int = 0
    volatile_db: int = 0
    persistent_db: int = 0
    linked: int = 0
    defaults: int = 0
    deferred: int = 0

    def add(self, tier: str, hits: int) -> None:
        setattr(self, tier, getattr(self, tier) + hits)


@dataclass(slots=True)
class LookupTrace:
    """The traced lookups of one thread. *One per thread.*

    Attributes:
        spans: in the order in which they ended.
        tables: by table name.
    """

    spans: list[Span] = field(default_factory=list)
    tables: dict[str, TableAnswers] = field(default_factory=dict)

    def of(self, table: str) -> TableAnswers:
        found = self.tables.get(table)
        if found is None:
            found = self.tables[table] = TableAnswers()
        return found


class _Current(threading.local):
    trace: LookupTrace | None = None
    stages: dict[str, int] | None = None
    tiers: TierNumbers | None = None
    deferred: int = 0


current: Final = _Current()
"""State of this thread: `trace`, if requested; `stages`, nanoseconds by stage of the current lookup; `tiers`, where the
database chain writes which tier answered each distinct key of a fetch; `deferred`, a running count of the keys, including
duplicates, that lookups left to the background."""


def ended(stage: str, table: str, began_ns: int, keys: int) -> int:
    """Record the end of a stage in this thread's current lookup, if any; return the time."""
    now = perf_counter_ns()
    stages = current.stages
    if stages is not None:
        stages[stage] = stages.get(stage, 0) + now - began_ns
        if (trace := current.trace) is not None:
            trace.spans.append(Span(stage, table, began_ns, now, keys))
    return now


class traced:
    """Trace this thread's lookups within the block: `with traced() as trace:`. *One per thread.* Traces do not nest."""

    __slots__ = ("_before",)

    def __enter__(self) -> LookupTrace:
        self._before = current.trace
        current.trace = trace = LookupTrace()
        return trace

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        current.trace = self._before
