"""The figures of a profile, one row per batch size and rate, and their bounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hps.errors import HPSError
from hps.tools.profiling.counters import StageTimes, TierKeys
from hps.tools.profiling.http_load import LoadResult
from hps.tools.profiling.keys import KeyPool
from hps.tools.profiling.times import TimeHistogram
from hps.types import KeyArray

_CURVE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999)
_HIT_RATE_TIER = "embedding_cache"
_COMPARED = 20  # lookups


@dataclass(frozen=True, slots=True)
class Latencies:
    """Quantiles of latencies. *Immutable.*"""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float

    @classmethod
    def of(cls, times: TimeHistogram) -> "Latencies":
        """Summarize a histogram; zeros if it is empty."""
        mean_s = times.total_s / max(1, len(times))
        return cls(*(round(1e3 * s, 6) for s in (mean_s, *times.quantiles_s((0.5, 0.95, 0.99, 0.999)), times.largest_s)))


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. *Immutable.*"""

    batch: int  # keys of each table per lookup
    tables: int  # number of tables per lookup
    concurrency: int  # threads or connections
    rate: float | None  # lookups due per second; None: each started when the last one ended
    seconds: float
    lookups: int  # correct answers
    lookups_per_s: float  # correct answers before the end
    keys_per_s: float  # likewise
    latency: Latencies  # of correct answers, and of due lookups without an answer at the end
    failures: dict[str, int]  # number by cause. `no answer`: it was due, and had none at the end
    failed: Latencies  # latency of failures
    stages: dict[str, StageTimes]
    tiers: dict[str, TierKeys]
    default_keys: int  # keys that no tier had
    generator_busy: float  # processors that the clients used; near the number of client processes, the clients were the limit
    lateness: Latencies  # delay of lookups caused by the client itself
    curve: tuple[tuple[float, float], ...]  # pairs of a share of the lookups and the highest latency among them in milliseconds

    @property
    def failure_share(self) -> float:
        failed = sum(self.failures.values())
        answered = self.lookups
        return failed / (answered + failed) if failed else 0.0

    @classmethod
    def of(
        cls,
        result: LoadResult,
        *,
        batch: int,
        tables: int,
        concurrency: int,
        rate: float | None,
        stages: dict[str, StageTimes],
        tiers: dict[str, TierKeys],
        default_keys: int,
    ) -> "Row":
        """Combine the result of a load with the server's counters of that time."""
        per_s = result.in_time / result.seconds
        return cls(
            batch,
            tables,
            concurrency,
            rate,
            result.seconds,
            len(result.times) - result.failures["no answer"],
            per_s,
            per_s * batch * tables,
            Latencies.of(result.times),
            dict(result.failures),
            Latencies.of(result.failed),
            stages,
            tiers,
            default_keys,
            result.busy_s / result.seconds,
            Latencies.of(result.lateness),
            tuple((share, round(1e3 * s, 6)) for share, s in zip(_CURVE, result.times.quantiles_s(_CURVE), strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on every row; None and 0 set no bound. *Immutable.*"""

    p50_ms: float | None = None
    p99_ms: float | None = None
    min_keys_per_s: float | None = None
    min_hit_rate: float | None = None
    max_failure_share: float = 0.0

    def missed(self, row: Row) -> list[str]:
        """Describe the bounds that a row misses, one sentence each."""
        texts = []
        for name in ("p50_ms", "p99_ms"):
            bound, got = getattr(self, name), getattr(row.latency, name)
            if bound is not None and not 0 < got <= bound:
                texts.append(f"{name[:-3]} is {got:.3f} ms, expected at most {bound:g} ms")
        if self.min_keys_per_s is not None and row.keys_per_s < self.min_keys_per_s:
            texts.append(f"the throughput is {row.keys_per_s:,.0f} keys/s, expected at least {self.min_keys_per_s:,.0f}")
        if self.min_hit_rate is not None:
            tier = row.tiers.get(_HIT_RATE_TIER)
            if tier is None:
                texts.append("no embedding cache was asked, so there is no hit rate")
            elif tier.hit_rate < self.min_hit_rate:
                texts.append(f"the hit rate is {tier.hit_rate:.4f}, expected at least {self.min_hit_rate:g}")
        if row.failure_share > self.max_failure_share:
            listed = ", ".join(f"{count:,} x {cause}" for cause, count in row.failures.items())
            texts.append(f"{row.failure_share:.2%} failed ({listed}), expected at most {self.max_failure_share:.2%}")
        return texts


@dataclass
class Profile:
    """The rows of one run of `hps profile`. *One thread.*"""

    target: str
    about: dict[str, Any]  # model, tables, workload and others
    rows: list[Row] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # missed bounds, each with its row's number

    def add(self, row: Row, bounds: Bounds) -> None:
        """Add a row and check it against its bounds."""
        self.rows.append(row)
        where = f"batch {row.batch:,}" + (f" at {row.rate:,.10g}/s" if row.rate else "")
        self.missed += [f"{where}: {text}" for text in bounds.missed(row)]


def compare(look_up: Callable[[dict[str, KeyArray]], Mapping[str, Any]], pool: KeyPool, hotness: int) -> None:
    """Look the same keys up twice, the second time backwards, and compare vectors bit for bit, pooled ones approximately.

    Args:
        look_up: returns the vectors of keys or bags, (rows, dim) float32 by table.
        hotness: keys per bag; 0: every key gets a vector.

    Raises:
        HPSError: they differ, which is legitimate if rows are written meanwhile.
    """
    for number in range(_COMPARED):
        keys_of_lookup = pool.take(number)
        backwards = {table: keys.reshape(-1, hotness or 1)[::-1].reshape(-1) for table, keys in keys_of_lookup.items()}
        answers, repeated = look_up(keys_of_lookup), look_up(backwards)
        for table, vectors in answers.items():
            other = repeated[table][::-1]
            if hotness:  # sums depend on the order of a bag's vectors
                same = np.allclose(vectors, other, rtol=1e-4, atol=1e-5, equal_nan=True)
            else:
                same = vectors.tobytes() == other.tobytes()
            if not same:
                raise HPSError(f"checking the vectors of table {table!r}: two lookups of the same keys differ")
