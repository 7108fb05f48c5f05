"""Summarizes the trace of a lookup in numbers, for answers, log lines and spans."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hps.statistics.tracing import LookupTrace

Number = int | float


@dataclass(frozen=True, slots=True)
class LookupBreakdown:
    """Summary of one lookup. *Immutable.*

    Attributes:
        hit_rate: share of all keys that embedding caches answered; None without keys.
        tables: by table, the number of keys and what answered them: the attributes of `tracing.TableAnswers`.
        us: microseconds per stage, over all tables, in order of their begin; also `queue`, the wait for a thread, and
            `lookup`, the complete lookup.
    """

    hit_rate: float | None
    tables: Mapping[str, Mapping[str, int]]
    us: Mapping[str, float]

    def nested(self) -> dict[str, Any]:
        return {"hit_rate": self.hit_rate, "tables": self.tables, "us": self.us}

    def flat(self) -> dict[str, Number]:
        """Return it as numeric parameters of the Open Inference Protocol: `hit_rate`, `<table>.keys`, `us.query`, ..."""
        rate = {} if self.hit_rate is None else {"hit_rate": self.hit_rate}
        counts = {f"{table}.{name}": count for table, answers in self.tables.items() for name, count in answers.items()}
        return {**rate, **counts, **{f"us.{stage}": spent for stage, spent in self.us.items()}}


def report_of(trace: LookupTrace, queue_ns: int, lookup_ns: int) -> LookupBreakdown:
    """Summarize a trace.

    Args:
        queue_ns: wait for a thread.
        lookup_ns: duration of the lookup.
    """
    keys = sum(table.keys for table in trace.tables.values())
    hits = sum(table.embedding_cache for table in trace.tables.values())
    spent = {"queue": queue_ns, "lookup": lookup_ns}
    for span in sorted(trace.spans, key=lambda span: span.began_ns):
        spent[span.stage] = spent.get(span.stage, 0) + span.ended_ns - span.began_ns
    return LookupBreakdown(
        round(hits / keys, 4) if keys else None,
        {name: asdict(table) for name, table in trace.tables.items()},
        {stage: ns / 1000 for stage, ns in spent.items()},
    )
