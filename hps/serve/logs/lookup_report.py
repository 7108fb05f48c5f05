"""Summarizes the trace of a lookup in numbers, for answers, log lines and spans."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hps.statistics.tracing import LookupTrace

Number = int | float


@dataclass(frozen=True, slots=True)
class LookupBreakdown:
    """Summary of one lookup. *Immutable.*"""

    hit_rate: float | None  # share of all keys that embedding caches answered; None without keys
    tables: Mapping[str, Mapping[str, int]]  # attributes of `tracing.TableAnswers`, by table
    us: Mapping[str, float]  # microseconds by stage, and of `queue` and `lookup`

    def nested(self) -> dict[str, Any]:
        return {"hit_rate": self.hit_rate, "tables": self.tables, "us": self.us}

    def flat(self) -> dict[str, Number]:
        """Return it as numeric parameters of the Open Inference Protocol: `hit_rate`, `<table>.keys`, `us.query`, ..."""
        rate = {} if self.hit_rate is None else {"hit_rate": self.hit_rate}
        counts = {f"{table}.{name}": count for table, answers in self.tables.items() for name, count in answers.items()}
        return {**rate, **counts, **{f"us.{stage}": spent for stage, spent in self.us.items()}}


def report_of(trace: LookupTrace, queue_ns: int, lookup_ns: int) -> LookupBreakdown:
    """Summarize the trace of a lookup that has waited `queue_ns` for a thread and has taken `lookup_ns`."""
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
