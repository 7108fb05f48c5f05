"""Renders metrics in Prometheus' text format."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hps.ground.threads.pacing import in_turns
from hps.statistics.series import Models, Series
from hps.statistics.snapshot import Latency, ServerStatistics, UpdateStatus

_SAMPLES, _HISTOGRAMS = 100, 8  # written between two pauses: 0.1 ms of the interpreter lock
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Family(NamedTuple):
    """A metric with its samples as lines of the text format."""

    # Lines, not prometheus-client's objects, which take ten times as long: a server of 8 models with 26 tables each has 10,000
    # samples.

    kind: str
    name: str
    text: str
    lines: list[str]


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Format labels as between the braces of the text format, sorted by name."""
    return _label_text(tuple(names), tuple(values))


@lru_cache(1 << 14)
def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(zip(names, values, strict=True))])


def family(kind: str, name: str, text: str, samples: Iterable[tuple[str, float]]) -> Family:
    """Build a counter or gauge from values by `label_text`; an empty text is a sample without labels."""
    full = f"{name}_total" if kind == "counter" else name
    return Family(kind, name, text, [_sample(full, labels, value) for labels, value in in_turns(samples, _SAMPLES)])


def histogram(name: str, text: str, series: Iterable[tuple[str, Latency]]) -> Family:
    """Build a histogram from times by `label_text`, which must not be empty."""
    lines = []
    for labels, times in in_turns(series, _HISTOGRAMS):
        start, end = f'{name}_bucket{{le="', f'",{labels}}} '
        lines += [f"{start}{bound}{end}{count}" for bound, count in (*times.buckets, ("+Inf", times.count))]
        lines.append(f"{name}_count{{{labels}}} {times.count}")
        lines.append(f"{name}_sum{{{labels}}} {times.total_s}")
    return Family("histogram", name, text, lines)


def _sample(name: str, labels: str, value: float) -> str:
    number = "NaN" if value != value else +value  # True becomes 1
    return f"{name}{{{labels}}} {number}" if labels else f"{name} {number}"


class Value:
    """A counter or gauge with fixed labels. *Thread-safe.*"""

    __slots__ = ("_lock", "labels", "value")

    def __init__(self, labels: str) -> None:
        self.labels = labels
        self.value = 0.0
        self._lock = threading.Lock()

    def inc(self, more: float = 1) -> None:
        with self._lock:
            self.value += more

    def set(self, value: float) -> None:
        self.value = value


class Values:
    """A counter or gauge with a value per label set. *Thread-safe.*"""

    def __init__(self, models: Models, kind: str, name: str, text: str, names: Sequence[str]) -> None:
        self._of = kind, name, text
        self._values = Series(models, names, lambda values: Value(label_text(names, values)))

    def labels(self, *values: str) -> Value:
        """Return the value for these labels, initially 0."""
        return self._values.of(*values)

    def remove(self, *values: str) -> None:
        self._values.remove(*values)

    def family(self) -> Family:
        return family(*self._of, [(value.labels, value.value) for _, value in self._values.items()])


def expose(families: Iterable[Family], *, openmetrics: bool = False) -> bytes:
    """Render metrics as text: Prometheus' format 0.0.4, or OpenMetrics 1.0.0."""
    lines: list[str] = []
    for kind, name, text, samples in families:
        if openmetrics:
            kind = "unknown" if kind == "untyped" else kind
        elif kind == "counter":
            name += "_total"
        lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
        lines += samples
    if openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode()


_TIER_FIGURES: tuple[tuple[str, str, str, str], ...] = (
    ("rows", "gauge", "hps_tier_rows", "Rows of a table in a tier."),
    ("capacity_rows", "gauge", "hps_tier_capacity_rows", "Maximum rows of a table in a tier, if bounded."),
    ("vector_bytes", "gauge", "hps_tier_vector_bytes", "Memory or disk space of a table's vectors in a tier."),
    ("overhead_bytes", "gauge", "hps_tier_overhead_bytes", "Memory or disk space of a table in a tier beyond its vectors."),
    ("inserts", "counter", "hps_tier_inserts", "Rows inserted into a tier, except by loading."),
    ("evictions", "counter", "hps_tier_evictions", "Rows evicted from a tier."),
    ("age_s", "gauge", "hps_tier_age_seconds", "Age of a tier's sizes."),
    ("changed_rows", "gauge", "hps_tier_changed_rows", "Rows that changed since their row file was made."),
    ("seals", "counter", "hps_tier_seals", "Row files made of an older one and its changes."),
    ("sealed_rows", "counter", "hps_tier_sealed_rows", "Changed rows that came into row files."),
    ("seal_seconds", "counter", "hps_tier_seal_seconds", "Time spent on making row files of older ones."),
    ("seal_failures", "counter", "hps_tier_seal_failures", "Seals that failed, and loads that could not be made durable."),
)
_DEVICE_FIGURES: tuple[tuple[str, str, str], ...] = (
    ("memory_bytes", "hps_device_memory_bytes", "Total device memory."),
    ("free_bytes", "hps_device_free_bytes", "Free device memory."),
    ("cache_bytes", "hps_device_cache_bytes", "Device memory of embedding caches."),
    ("pinned_bytes", "hps_device_pinned_bytes", "Host memory pinned for a device."),
)


def server_families(stats: ServerStatistics) -> Iterator[Family]:
    """Render the state of a parameter server: sizes of tiers and devices, versions, workspaces."""
    tiers = [
        (label_text(("model", "table", "tier", "device"), (model.name, table.name, tier.tier, tier.device)), tier)
        for model in stats.models
        for table in in_turns(model.tables, _HISTOGRAMS)
        for tier in table.tiers
    ]
    for attribute, kind, name, text in _TIER_FIGURES:
        found = [(labels, getattr(tier, attribute)) for labels, tier in tiers]
        yield family(kind, name, text, [(labels, value) for labels, value in found if value is not None])
    yield from _file_families(stats)
    for attribute, name, text in _DEVICE_FIGURES:
        known = [device for device in stats.devices if device.memory_bytes or attribute not in ("memory_bytes", "free_bytes")]
        yield family(
            "gauge", name, text, [(label_text(["device"], [device.device]), getattr(device, attribute)) for device in known]
        )
    versions = [
        (label_text(("model", "version", "state"), (model.name, version, state)), 1)
        for model in stats.models
        for version, state in model.versions
    ]
    yield family("gauge", "hps_model_version", "1 for each version, by state.", versions)
    models = [(label_text(["model"], [model.name]), model) for model in stats.models]
    workspaces = [(labels, model.workspaces) for labels, model in models]
    busy = [(labels, model.busy_workspaces) for labels, model in models]
    yield family("gauge", "hps_workspaces", "Maximum number of concurrent lookups.", workspaces)
    yield family("gauge", "hps_busy_workspaces", "Running lookups.", busy)


def _file_families(stats: ServerStatistics) -> Iterator[Family]:
    files = [
        (label_text(("model", "table"), (model.name, table.name)), tier.file)
        for model in stats.models
        for table in in_turns(model.tables, _HISTOGRAMS)
        for tier in table.tiers
        if tier.file is not None
    ]
    shares = [(labels, file.resident_share) for labels, file in files if file.resident_share is not None]
    yield family("gauge", "hps_row_file_resident_ratio", "Share of a row file's pages in memory, sampled.", shares)
    held = [(labels, file.held_bytes) for labels, file in files]
    yield family("gauge", "hps_row_file_held_bytes", "Bytes of a row file that are locked in memory.", held)
    missing = [(labels, file.missing_bytes) for labels, file in files]
    yield family("gauge", "hps_row_file_missing_bytes", "Bytes of a row file that are still to be downloaded.", missing)
    sources = ("peers", "from_peers"), ("store", "from_source")
    fetched = [
        (label_text(("model", "table", "source"), (model.name, table.name, source)), getattr(tier.file, attribute))
        for model in stats.models
        for table in in_turns(model.tables, _HISTOGRAMS)
        for tier in table.tiers
        if tier.file is not None
        for source, attribute in sources
    ]
    yield family("counter", "hps_row_file_downloaded_bytes", "Bytes of a row file that were downloaded, by source.", fetched)
    failures = [(labels, file.peer_failures) for labels, file in files]
    yield family("counter", "hps_row_file_peer_failures", "Failed attempts to read a row file from other servers.", failures)
    cold = [(labels, file.cold_pages) for labels, file in files]
    yield family("counter", "hps_row_file_cold_reads", "Pages of a row file that lookups read from the disk.", cold)
    depths = [(labels, file.depth) for labels, file in files]
    yield histogram("hps_row_file_read_depth", "Pages of a row file that were asked for together.", depths)
    seconds = [(labels, file.seconds) for labels, file in files]
    yield histogram("hps_row_file_read_seconds", "Duration of reading missing pages of a row file.", seconds)


def update_families(statuses: Sequence[UpdateStatus]) -> Iterator[Family]:
    """Render how far tables have followed the log of their updates; for several versions, the one furthest behind."""
    for name, text, attribute in (
        ("hps_update_lag_seconds", "Age of the oldest message of updates that is not applied, by the log.", "lag_s"),
        ("hps_update_lag_messages", "Unapplied messages in the log.", "behind"),
    ):
        largest: dict[tuple[str, str], float] = {}
        for status in statuses:
            value = getattr(status, attribute)
            table = status.model, status.table
            largest[table] = max(largest.get(table, -math.inf), math.inf if value is None else value)
        yield family(
            "gauge",
            name,
            text,
            [(label_text(("model", "table"), table), math.nan if lag == math.inf else lag) for table, lag in largest.items()],
        )
    connected: dict[tuple[str, str], bool] = {}
    for status in statuses:
        connected[status.model, status.table] = status.connected and connected.get((status.model, status.table), True)
    tables = [(label_text(("model", "table"), table), value) for table, value in connected.items()]
    yield family("gauge", "hps_update_connected", "1 while the messages of a table can be read from the log.", tables)
