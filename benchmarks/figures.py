"""Writes the measured tables of the documentation from `benchmarks/results/`, so that no page says what no file holds.

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; `TABLES` has its rows and columns by that name.
`python -m benchmarks.figures` writes all of them anew; `tests/ring1/repo/test_figures.py` fails where a page differs.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURED = {  # the results that each picture of docs/measured.md shows
    "gpu-cache": ["gpu_cache"],
    "gpu-lookups": ["gpu_lookup"],
    "misses": ["misses"],
    "pooled": ["pooled"],
    "http": ["http"],
    "updates": ["updates"],
    "host-tiers": ["numpy_cache", "hash_map", "redis", "rocks_db"],
}
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class Row(dict[str, Any]):
    """Axes and figures of one measurement, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@cache
def result_rows(benchmark: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{benchmark}.json").read_text())["rows"]
    return rows


def rows_of(benchmark: str, **axes: Any) -> list[Row]:
    """Return the rows of a result that have these axes (or figures), without what failed."""
    rows = [Row({**row["figures"], **row["axes"]}) for row in result_rows(benchmark)]
    return [row for row in rows if axes.items() <= row.items() and "error" not in row]


def figures(benchmark: str, **axes: Any) -> Row:
    """Return the one row of a result that has these axes (or figures); fail if none or several have."""
    found = rows_of(benchmark, **axes)
    if len(found) != 1:
        raise LookupError(f"{benchmark}.json: {len(found)} rows have the axes {axes}, expected 1")
    return found[0]


def named(found: dict[str, Row]) -> list[Row]:
    """Give rows a `name`, for the first column."""
    return [Row(row, name=name) for name, row in found.items()]


def middle(benchmark: str, figure: str, **axes: Any) -> float:
    """Return the median of a figure of all rows that have these axes."""
    return float(median(row[figure] for row in rows_of(benchmark, **axes)))


# -- how a table is written -------------------------------------------------------------------------------------------


def _round(value: float) -> str:
    """Three significant digits, with thousands separated."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _each(texts: Iterable[str]) -> str:
    return " / ".join(texts)


class _Cells(Formatter):
    """str.format with a format `r`, for `_round`; a figure that a row lacks leaves the cell empty."""

    def format_field(self, value: Any, spec: str) -> str:
        return _round(value) if spec == "r" else str(super().format_field(value, spec))

    def cell(self, template: str, row: Row) -> str:
        try:
            return self.vformat(template, (), row)
        except KeyError:
            return ""


_cells = _Cells()
Column = tuple[str, str | Callable[[Row], str]]  # head, and a template or a function of a row


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _table(rows: Iterable[Row], *columns: Column) -> list[str]:
    return _lines(
        [head for head, _ in columns],
        [[_cells.cell(cell, row) if isinstance(cell, str) else cell(row) for _, cell in columns] for row in rows],
    )


# -- what several tables show -----------------------------------------------------------------------------------------

_QUERY: dict[str, Any] = {"work": "query", "batch": 1 << 20, "alpha": 0.0}
_BAGS = {"tables": 26, "dim": 128, "batch": 4096, "alpha": 1.05}
_MIXED = {"work": "mixed", "rows": 1 << 24, "dim": 128, "batches_before": 600}
_SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "narrow": ("gpu_cache", {**_QUERY, "dim": 32}),
    "wide": ("gpu_cache", {**_QUERY, "dim": 128}),
    "one_table": ("gpu_lookup", {"work": "lookup_fromdlpack, torch CUDA tensors"}),
    "concatenated": ("gpu_lookup", {"work": "lookup_concatenated, torch CUDA tensors", "keys": 1024}),
    "by_table": ("gpu_lookup", {"work": "lookup_tables, torch CUDA tensors", "keys": 1024}),
    "missing": ("gpu_lookup", {"work": "synchronous misses from the hash map"}),
    "warm_up": ("gpu_lookup", {"work": "warm-up from local disk in page cache"}),
    "bags": ("pooled", {**_BAGS, "bags": "offsets"}),
    "torch_bags": ("pooled", {**_BAGS, "bags": "torch embedding_bag"}),
    "link": ("misses", {**_MIXED, "path": "link"}),
    "copy": ("misses", {**_MIXED, "path": "copy"}),
    "hash_map": (
        "hash_map",
        {"work": "fetch", "batch": 100_000, "rows": 1_000_000, "dim": 32, "hit_rate": 1.0, "alpha": 0.0, "threads": 1},
    ),
    "hash_map_write": ("hash_map", {"work": "write", "dim": 32, "rows": 1_000_000, "policy": "none", "reserved": False}),
    "rocks": (
        "rocks_db",
        {"what": "fetch", "table_rows": 1_000_000, "dim": 32, "batch": 10_000, "hit_rate": 1.0, "threads": 1, "alpha": 0.0},
    ),
    "load": ("load", {"work": "load", "into": "rocks_db", "dim": 32, "order": "random"}),
    "redis": ("redis", {"work": "fetch", "servers": 1, "dim": 32, "batch": 10_000, "hit_rate": 1.0}),
    "binary": ("http", {"form": "binary", "connections": 4, "tier": "embedding_cache", "hop": "own"}),
    "json": ("http", {"form": "json", "connections": 4, "tier": "embedding_cache", "hop": "own"}),
}


class _Shown:
    """The rows of `_SHOWN` as attributes."""

    def __getattr__(self, name: str) -> Row:
        benchmark, axes = _SHOWN[name]
        return figures(benchmark, **axes)


the = _Shown()


def _page(text: str) -> list[str]:
    """Return the lines of a table that is written as one: the head first, `|` between cells; a backslash continues a row."""
    head, *rows = [[" ".join(cell.split()) for cell in line.split("|")] for line in text.strip().splitlines()]
    return _lines(head, rows)


def _readme() -> list[str]:
    """What a user asks for, in times and requests; beside it what he would use else, and the benchmark that measures both."""
    dlrm = {name: figures("scores", work="http", samples=32, clients=64, turn=0, service=name) for name in ("batched", "plain")}
    rows = figures("updates", work="visible", log="kafka")
    return _page(f"""| hps | in the same run | `.venv/bin/python -m benchmarks`
        look up 26 tables x 1,024 keys on an H200, from Python | {_ms(the.concatenated.p50_us)} | \
            {_ms(the.concatenated.peer_p50_us)}: torch's `index_select`, a call a table | `gpu_lookup`
        262,144 keys of 128 numbers, {100 - 100 * the.link.hit_rate:.0f} % of them not in GPU memory | \
            {_ms(the.link.p50_us)} | {_ms(the.copy.p50_us)}: the processor fetches these | `misses`
        32 candidates scored by a whole DLRM on one H200, 64 clients | {_round(dlrm["batched"].requests_s)} requests/s | \
            {_round(dlrm["plain"].requests_s)}: FastAPI around the torch module | `scores`
        1,000 keys over HTTP, server and clients on two cores | {_round(the.binary.requests_per_s)} requests/s | \
            {_round(the.binary.requests_per_s / the.binary.ratio_to_limit)}: a server that only echoes | `http`
        a changed row, from Kafka into every lookup, 100,000 rows/s | \
            {rows.p50_ms:.0f} ms | 99 %: {rows.p99_ms:.0f} ms | `updates`""")


def _ms(us: float) -> str:
    return f"{us / 1000:.2g} ms"


def _measured_gpu() -> list[str]:
    """What one GPU does."""
    calls = (the.concatenated, the.by_table)
    return _page(f"""on one H200, float32 (`python -m benchmarks gpu_cache gpu_lookup misses`) | | against, in the same run
        query of 2^20 resident keys, dim 32 / 128, uniform | \
            {_round(the.narrow.mkeys_per_s)} / {_round(the.wide.mkeys_per_s)} M keys/s | \
            {the.narrow.of_gather:.2f} / {the.wide.of_gather:.2f} of copying the vectors from known places
        `lookup_fromdlpack`, 4,096 keys, torch tensors, p50 | {the.one_table.p50_us:.0f} us | \
            {the.one_table.p50_us / the.one_table.peer_p50_us:.1f} x the time of torch `index_select`
        26 tables x 1,024 keys, p50: `lookup_concatenated` / `lookup_tables` | \
            {_each(f"{call.p50_us:.0f}" for call in calls)} us | \
            {_each(f"{call.p50_us / call.peer_p50_us:.2f}" for call in calls)} x the time of 26 of these
        2,000 keys, 14 % of them missing and fetched, p50 / p99 | {the.missing.p50_us:.0f} / {the.missing.p99_us:.0f} us |
        2^18 keys by popularity, dim 128, {100 - 100 * the.link.hit_rate:.0f} % missing, read in the hash map | \
            {_round(the.link.mkeys_per_s)} M keys/s | \
            {the.link.mkeys_per_s / the.copy.mkeys_per_s:.1f} x fetching them by the CPU
        warm-up of 10 GB from files in page cache | {the.warm_up.gb_per_s:.0f} GB/s | \
            {the.warm_up.of_pinned_copy:.2f} of a pinned copy""")


def _measured_host() -> list[str]:
    """What two shared cores do."""
    sources = [figures("sources", source=name, fastest_peer=True) for name in ("hdfs", "s3 (nginx)", "gcs")]
    return _page(f"""on two shared cores, dim 32 (`python -m benchmarks hash_map rocks_db redis http load sources`) | | \
            against, in the same run
        hash map, 100 k keys of 1 M rows, one thread | {the.hash_map.mkeys_per_s:.1f} M keys/s | \
            {the.hash_map.of_gather:.2f} of `np.take`; \
            {the.hash_map_write.overhead_bytes_per_row:.1f} bytes a row beyond the vectors
        RocksDB, 10 k keys | {the.rocks.rows_per_s / 1e6:.2f} M keys/s | \
            {the.rocks.ratio_to_sorted:.2f} of rocksdict's sorted multi-get
        a model of 1 M rows into RocksDB, merged | {the.load.vectors_per_s / 1e6:.2f} M vectors/s | \
            {the.load.of_limit:.2f} of the same from memory
        reading a model from HDFS / S3 (nginx) / GCS (emulator) | \
            {_each(_round(source.mb_per_s) for source in sources)} MB/s | \
            {_each(f"{source.of_peer:.2f}" for source in sources)} of the fastest way of its own client
        Redis, one server, 10 k keys | {the.redis.ours_keys_per_s / 1e6:.1f} M keys/s | \
            {the.redis.ours_to_socket:.2f} of its socket, {the.redis.ours_to_redis_py:.2f} x redis-py with hiredis
        HTTP, 1,000 keys, binary / JSON | \
            {_round(the.binary.requests_per_s)} / {_round(the.json.requests_per_s)} requests/s | \
            {the.binary.ratio_to_limit:.2f} of raw ASGI / {the.json.ratio_to_limit:.2f} of a bare orjson route""")


def _model_sources() -> list[str]:
    """How long loads take."""
    peers = {
        "reading 136 MB from local disk in page cache": ("local", "readinto"),
        "HDFS, one DataNode": ("hdfs", "read_range, 8 threads"),
        "S3, nginx as the store": ("s3 (nginx)", "get_object().read()"),
        "GCS, fake-gcs-server": ("gcs", "download_as_bytes"),
    }
    sources = {name: figures("sources", source=source, peer=peer) for name, (source, peer) in peers.items()}
    reads = [f"{name} | {_round(row.mb_per_s)} MB/s | {row.of_peer:.2f} of `{row.peer}`" for name, row in sources.items()]

    def start(tiers: str, dim: int, start: str = "first") -> Row:
        return figures("large_load", work="start", tiers=tiers, dim=dim, start=start)

    long, wide = start("rocks_db", 32), start("rocks_db", 128)
    in_memory = start("hash_map", 128)
    again, touched = (start("rocks_db", 128, how) for how in ("second", "touched files"))
    loads = f"""into RocksDB, 1 M rows x 32 in no order, merge included | {the.load.vectors_per_s / 1e6:.2f} M vectors/s |
        the same, 20 M x 32 | \
            {long.vectors_per_s / 1e6:.2f} M vectors/s: {long.start_s:.0f} s, of which the merge {long.merge_s:.0f} |
        10.7 GB (20.6 M x 128) into RocksDB / the hash map | {wide.start_s:.0f} s / {in_memory.start_s:.0f} s |
        a start that finds them in RocksDB / that must compare touched files | \
            {again.start_s:.2f} s / {touched.start_s:.0f} s |"""
    return _page("\n".join(("| rate | against, in the same run", *reads, loads)))


def _row_bytes() -> list[str]:
    """Bytes of a row by tier and format, and rows per GB beside float32."""
    rows = []
    for tier, name in {"hash_map": "hash map", "redis_cluster": "Redis", "rocks_db": "RocksDB"}.items():
        own = {row.row_dtype: row for row in rows_of("row_bytes", tier=tier)}
        rows.append((name, *(f"{row.bytes_per_row:.0f} ({row.ratio_to_float32:.2f} x)" for row in own.values())))
    return _lines(("tier", *own), rows)


def _gpu_queries() -> list[str]:
    """Queries of resident keys, beside a gather of the same vectors."""
    large = [(1 << 20, dim, alpha) for alpha in (0.0, 1.05) for dim in (32, 128)]
    rows = {}
    for batch, dim, alpha in [*large, (65_536, 128, 0.0), (8_192, 32, 0.0)]:
        name = f"{'2^20' if batch == 1 << 20 else f'{batch:,}'}, {dim}, {f'alpha {alpha}' if alpha else 'uniform'}"
        rows[name] = figures("gpu_cache", work="query", dim=dim, batch=batch, alpha=alpha)
    return _table(
        named(rows),
        ("n, dim, keys", "{name}"),
        ("M keys/s", "{mkeys_per_s:r}"),
        ("of gather, back to back", "{of_gather:.2f}"),
        ("of the tuned gather", "{of_tuned_gather:.2f}"),
        ("of gather, one call", "{one_call_of_gather:.2f}"),
    )


def _prepared() -> list[str]:
    """Small lookups from Python: separate tensors, tensors of all tables, prepared ones, and beside them torch."""
    found = {(row.tables, row["keys"], row.work): _round(row.p50_us) for row in rows_of("prepared")}
    rows = []
    for tables, keys in dict.fromkeys((tables, keys) for tables, keys, _ in found):
        call = ("lookup_fromdlpack", "lookup_tables")[tables > 1]
        ways = [f"{call}, torch", f"{call}, CuPy", "lookup_concatenated, torch"]
        ways += ["prepared, torch", "prepared, buffers", "layer", "torch index_select"]
        rows.append((f"{tables} x {keys:,}", *(found.get((tables, keys, way), "") for way in ways)))
    head = ("torch's tensors", "CuPy's", "concatenated", "prepared, torch's tensors", "prepared, buffers")
    return _lines(("tables x keys, p50 in us", *head, "a layer", "`index_select`"), rows)


def _updates() -> list[str]:
    """Online updates from either log."""
    logs = ("kafka", "redis_stream")
    seen = [figures("updates", work="visible", log=log) for log in logs]
    beside = [figures("updates", work="lookups", log=log, writes="beside") for log in logs]
    rows = [
        (
            "published to visible, 100,000 rows/s, p50 / p99",
            *(f"{_round(row.p50_ms)} / {_round(row.p99_ms)} ms" for row in seen),
        ),
        ("lookups beside them, p99 to idle", *(f"{row.p99_to_idle:.2f}" for row in beside)),
    ]
    for frame, size in (("HPS1", 500), ("HPS1", 5000), ("HCTR", 500)):
        axes = {"work": "sustained", "frame": frame, "message_rows": size, "max_batch_size": 65_536}
        rates = [_round(figures("updates", log=log, **axes).rows_per_s) for log in logs]
        rows.append((f"rows/s of one replica, {frame}, {size:,} a message", *rates))
    return _lines(("dim 32, two cores for everything (`python -m benchmarks updates`)", "Kafka", "Redis Streams"), rows)


def _machines() -> list[str]:
    """On which machine and when the pictures' figures were measured."""
    taken: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for names in PICTURED.values() for name in names):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        machine = result["machine"]
        place = f"{machine['processor']}, {machine['cores']} cores"
        gpu = result["about"].get("gpu")
        what = f"`{name}` ({result['taken_at'][:10]}, {machine['commit'][:7]})"
        taken.setdefault(f"{gpu}; {place}" if gpu else place, []).append(what)
    return _lines(("machine", "benchmark (date, commit)"), [(place, ", ".join(names)) for place, names in taken.items()])


def _planning() -> list[str]:
    """Predicted and measured hit rates."""
    shares = (0.01, 0.05, 0.1, 0.2, 0.5)
    rows = []
    for device in dict.fromkeys(row.device for row in rows_of("plan")):
        for law in ("power law 0.99", "power law 1.2", "shifting"):
            found = [figures("plan", work="hit rate", device=device, keys=law, cache_share=share) for share in shares]
            rows.append((f"{device}, {law}", *(f"{row.predicted:.3f} / {row.measured:.3f}" for row in found)))
    return _lines(("cache, of the rows", *(f"{share * 100:g} %" for share in shares)), rows)


def _cold_start() -> list[str]:
    """The first lookup after an installation, and after another start."""

    def seconds(work: str, start: str) -> str:
        axes = {"work": f"first lookup, {work}", "code": "now", "start": start}
        return "{:.1f} s ({:.1f} s)".format(*(middle("cold_start", name, **axes) for name in ("wall_s", "processor_s")))

    starts = {"nothing compiled": "cold", "compiled by an earlier start": "warm", "compiled for the baseline": "ahead"}
    rows = [(text, *(seconds(work, start) for work in ("in process", "hps serve"))) for text, start in starts.items()]
    return _lines(
        ("start until the first answer (seconds of all processors)", "in process", "`hps serve` of a sample model"), rows
    )


_PLACES = {"scores": "H200", "scores_cpu": "two processors"}


def _scores() -> list[str]:
    """Scores over HTTP: with batches, without, and of a plain application; on a GPU and on two processors."""
    rows = []
    for file, where in _PLACES.items():
        for samples, clients in ((32, 64), (256, 16), (32, 1)):
            axes = {"work": "http", "samples": samples, "clients": clients, "turn": 0}
            ours, *others = (figures(file, service=name, **axes) for name in ("batched", "alone", "plain"))
            cells = [f"{_round(row.requests_s)} ({ours.requests_s / row.requests_s:.2g} x)" for row in others]
            times = f"{_round(ours.p50_ms)} / {_round(ours.p99_ms)}"
            rows.append((f"{where}, {clients} x {samples}", _round(ours.requests_s), *cells, times))
    return _lines(("clients x samples", "batches, requests/s", "one by one", "FastAPI", "p50 / p99 of batches, ms"), rows)


_DLRMV3_PUBLISHED = (  # `summary.json` of mlcommons/inference_results_v6.1: queries/s of the scenario Server, on eight GPUs
    ("MLPerf v6.1, closed: the whole DLRMv3", "8 x AMD Instinct MI355X", 12_198.8),
    ("MLPerf v6.1, closed: the whole DLRMv3", "8 x AMD Instinct MI350X", 9_297.78),
)


def _sparse_stage_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    about = result["about"]
    sizes = [(row["axes"]["threads"], row["axes"]["queries"]) for row in result["rows"] if row["axes"]["work"] == "sustained"]
    for measured in result["rows"]:
        row = Row({**measured["axes"], **measured["figures"]})
        if "error" in row or row.work == "dense stand-in alone" or not ("p99_ms" in row or "mrows_per_s" in row):
            continue
        if row.work == "served" or (row.work == "sustained" and (row.threads, row.queries) != max(sizes)):
            continue
        devices = row.get("devices", 1)
        names = [row.work, row.get("sharing", ""), f"{row.ids} ids" if "ids" in row else ""]
        names.append(f"{row.threads} threads x {row.queries}" if row.work == "sustained" else "")
        names.append(f"{row.rate:,.0f} queries/s offered, {about['loadgen_s']:.0f} s" if "loadgen" in row.work else "")
        names.append(f"hit rate {row.hit_rate:.3f}" if "hit_rate" in row else "")
        rate = row.get("queries_per_s") or row.get("rate") or 1e6 * row.mrows_per_s / about["keys_of_a_query"]
        cells = (
            ", ".join(name for name in names if name),
            f"{devices} x {about['device']}",
            f"{rate:,.0f}",
            f"{rate / devices:,.0f}",
            f"{row.p99_ms:.2g}" if "p99_ms" in row else "",
            row.get("result") or (f"{_round(row.mrows_per_s)} M rows/s" if "mrows_per_s" in row else ""),
        )
        rows.append(cells)
    return rows


def sparse_stage() -> list[str]:
    """Queries a second of DLRMv3's shape, ours as far as they were measured, beside what MLPerf has published."""
    rows: list[tuple[str, ...]] = [
        (what, hardware, f"{rate:,.0f}", f"{rate / 8:,.0f}", "80", "") for what, hardware, rate in _DLRMV3_PUBLISHED
    ]
    for result in ("dlrmv3", "dlrmv3_two_gpus"):
        path = RESULTS / f"{result}.json"
        if path.exists():
            rows += _sparse_stage_of(json.loads(path.read_text()))
    return _lines(("", "hardware", "queries/s", "for each GPU", "p99 (published: its bound), ms", "result"), rows)


def _sharing_traffic() -> list[str]:
    """Keys by popularity on two devices at once, by how they share rows."""
    rows = rows_of("sharing", work="traffic")
    alone = {row.threads: row for row in rows if row.sharing == "replicate"}
    return _table(
        rows,
        ("sharing", lambda row: f"`{row.sharing}`, {row.threads} thread{'s' if row.threads > 1 else ''} a GPU"),
        ("hit rate", "{hit_rate:.3f}"),
        ("misses, of `replicate`'s", lambda row: f"{(1 - row.hit_rate) / (1 - alone[row.threads].hit_rate):.2f}"),
        ("M keys/s a GPU", "{mkeys_per_s:r}"),
        ("of `replicate`'s", lambda row: f"{row.mkeys_per_s / alone[row.threads].mkeys_per_s:.2f}"),
    )


def _aging() -> list[str]:
    """What it costs that many rows expire at one moment."""
    return _table(
        rows_of("aging", work="expiry"),
        ("1 M rows expire at once, dim 16, two shared cores (`python -m benchmarks aging`)", "`{tiers}`"),
        ("removed after", "{removed_after_s:r} s"),
        ("background CPU", "{background_cpu_s:r} s"),
        (
            "lookups of 256 keys meanwhile, p50 / worst",
            lambda row: f"{_round(row.beside_p50_ms)} / {_round(row.beside_worst_ms)} ms",
        ),
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    "sharing-traffic": _sharing_traffic,
    "machines": _machines,
    "readme": _readme,
    "measured-gpu": _measured_gpu,
    "measured-host": _measured_host,
    "model-sources": _model_sources,
    "row-bytes": _row_bytes,
    "gpu-queries": _gpu_queries,
    "prepared": _prepared,
    "scores": _scores,
    "sparse-stage": sparse_stage,
    "updates": _updates,
    "aging": _aging,
    "planning": _planning,
    "cold-start": _cold_start,
}


def pages() -> list[Path]:
    """The pages that hold figures."""
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if _BLOCK.search(path.read_text())]


def written(text: str) -> str:
    """Return a page with every table as the results have it."""
    return _BLOCK.sub(lambda block: block[1] + "\n".join(TABLES[block[2]]()) + "\n" + block[3], text)


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
