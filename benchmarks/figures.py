"""Writes the measured tables of the documentation from `benchmarks/results/`, so that no page says what no file holds.

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; `TABLES` has its function by that name.
`python -m benchmarks.figures` writes all of them anew; `tests/ring1/repo/test_figures.py` fails where a page differs.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
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


@cache
def result_rows(benchmark: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{benchmark}.json").read_text())["rows"]
    return rows


def figures(benchmark: str, **axes: Any) -> dict[str, Any]:
    """Return the figures of the one row of a result that has these axes (or figures); fail if none or several have."""
    found = [row["figures"] for row in result_rows(benchmark) if axes.items() <= {**row["figures"], **row["axes"]}.items()]
    if len(found) != 1:
        raise LookupError(f"{benchmark}.json: {len(found)} rows have the axes {axes}, expected 1")
    return found[0]


def _table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _round(value: float) -> str:
    """Three significant digits, with thousands separated."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _each(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def readme() -> list[str]:
    """The first figures that somebody sees: ours, and a peer's or a limit in the same run."""
    narrow, wide = (figures("gpu_cache", work="query", dim=dim, batch=1 << 20, alpha=0.0) for dim in (32, 128))
    tables = figures("gpu_lookup", work="lookup_concatenated, torch CUDA tensors")
    bags, torch_bags = (
        figures("pooled", tables=26, dim=128, batch=4096, alpha=1.05, bags=bags) for bags in ("offsets", "torch embedding_bag")
    )
    link, copy = (
        figures("misses", work="mixed", path=path, rows=1 << 24, dim=128, batches_before=600) for path in ("link", "copy")
    )
    one_thread = {"rows": 1_000_000, "dim": 32, "hit_rate": 1.0, "alpha": 0.0, "threads": 1}
    hash_map = figures("hash_map", work="fetch", batch=100_000, **one_thread)
    rocks = figures("rocks_db", what="fetch", table_rows=1_000_000, dim=32, batch=10_000, hit_rate=1.0, threads=1, alpha=0.0)
    redis = figures("redis", work="fetch", servers=1, dim=32, batch=10_000, hit_rate=1.0)
    binary = figures("http", form="binary", connections=4, tier="embedding_cache", hop="own")
    of_torch = _each(f"{row['mkeys_per_s'] / row['torch_index_select_mkeys_per_s']:.1f}" for row in (narrow, wide))
    return _table(
        ("", "hps", "in the same run"),
        (
            "H200: 2^20 resident keys, dim 32 / 128",
            f"{_round(narrow['mkeys_per_s'])} / {_round(wide['mkeys_per_s'])} M keys/s",
            f"{of_torch} x `torch.index_select`; {narrow['of_gather']:.2f} / {wide['of_gather']:.2f} of a plain gather",
        ),
        (
            "H200: 26 tables x 1,024 keys, from Python, p50",
            f"{tables['p50_us']:.0f} us",
            f"{tables['p50_us'] / tables['peer_p50_us']:.2f} x the time of 26 `torch.index_select`",
        ),
        (
            "H200: sums of bags, 26 tables, dim 128",
            f"{_round(bags['mkeys_per_s'])} M keys/s",
            f"{bags['of_anchor'] / torch_bags['of_anchor']:.1f} x `torch.nn.functional.embedding_bag`",
        ),
        (
            f"H200: 2^18 keys, {100 - 100 * link['hit_rate']:.0f} % read in host memory, dim 128",
            f"{_round(link['mkeys_per_s'])} M keys/s",
            f"{link['mkeys_per_s'] / copy['mkeys_per_s']:.1f} x fetching these by the CPU",
        ),
        (
            "two cores: hash map, 100,000 keys of 1 M rows, one thread",
            f"{hash_map['mkeys_per_s']:.1f} M keys/s",
            f"{hash_map['of_gather']:.2f} of `np.take`",
        ),
        (
            "two cores: RocksDB / Redis, 10,000 keys",
            f"{rocks['rows_per_s'] / 1e6:.2f} / {redis['ours_keys_per_s'] / 1e6:.1f} M keys/s",
            f"{rocks['ratio_to_sorted']:.2f} of rocksdict / {redis['ours_to_redis_py']:.1f} x redis-py with hiredis",
        ),
        (
            "two cores: HTTP, binary, 1,000 keys, server and clients",
            f"{_round(binary['requests_per_s'])} requests/s",
            f"{binary['ratio_to_limit']:.2f} of a raw ASGI echo",
        ),
    )


def measured_gpu() -> list[str]:
    """What one GPU does."""
    narrow, wide = (figures("gpu_cache", work="query", dim=dim, batch=1 << 20, alpha=0.0) for dim in (32, 128))
    one = figures("gpu_lookup", work="lookup_fromdlpack, torch CUDA tensors")
    run, many = (figures("gpu_lookup", work=f"{call}, torch CUDA tensors") for call in ("lookup_concatenated", "lookup_tables"))
    missing = figures("gpu_lookup", work="synchronous misses from the hash map")
    warm = figures("gpu_lookup", work="warm-up from local disk in page cache")
    mixed = {
        path: figures("misses", work="mixed", path=path, rows=1 << 24, dim=128, batches_before=600) for path in ("link", "copy")
    }
    return _table(
        ("on one H200, float32 (`python -m benchmarks gpu_cache gpu_lookup misses`)", "", "against, in the same run"),
        (
            "query of 2^20 resident keys, dim 32 / 128, uniform",
            f"{_round(narrow['mkeys_per_s'])} / {_round(wide['mkeys_per_s'])} M keys/s",
            f"{narrow['of_gather']:.2f} / {wide['of_gather']:.2f} of copying the vectors from known places",
        ),
        (
            "`lookup_fromdlpack`, 4,096 keys, torch tensors, p50",
            f"{one['p50_us']:.0f} us",
            f"{one['p50_us'] / one['peer_p50_us']:.1f} x the time of torch `index_select`",
        ),
        (
            "26 tables x 1,024 keys, p50: `lookup_concatenated` / `lookup_tables`",
            f"{run['p50_us']:.0f} / {many['p50_us']:.0f} us",
            f"{_each(format(call['p50_us'] / call['peer_p50_us'], '.2f') for call in (run, many))} x the time of 26 of these",
        ),
        (
            "2,000 keys, 14 % of them missing and fetched, p50 / p99",
            f"{missing['p50_us']:.0f} / {missing['p99_us']:.0f} us",
            "",
        ),
        (
            f"2^18 keys by popularity, dim 128, {100 - 100 * mixed['link']['hit_rate']:.0f} % missing, read in the hash map",
            f"{_round(mixed['link']['mkeys_per_s'])} M keys/s",
            f"{mixed['link']['mkeys_per_s'] / mixed['copy']['mkeys_per_s']:.1f} x fetching them by the CPU",
        ),
        (
            "warm-up of 10 GB from files in page cache",
            f"{warm['gb_per_s']:.0f} GB/s",
            f"{warm['of_pinned_copy']:.2f} of a pinned copy",
        ),
    )


def measured_host() -> list[str]:
    """What two shared cores do."""
    one_thread = {"rows": 1_000_000, "dim": 32, "hit_rate": 1.0, "alpha": 0.0, "threads": 1}
    hash_map = figures("hash_map", work="fetch", batch=100_000, **one_thread)
    write = figures("hash_map", work="write", dim=32, rows=1_000_000, policy="none", reserved=False)
    rocks = figures("rocks_db", what="fetch", table_rows=1_000_000, dim=32, batch=10_000, hit_rate=1.0, threads=1, alpha=0.0)
    load = figures("load", work="load", into="rocks_db", dim=32, order="random")
    redis = figures("redis", work="fetch", servers=1, dim=32, batch=10_000, hit_rate=1.0)
    binary, json_body = (
        figures("http", form=form, connections=4, tier="embedding_cache", hop="own") for form in ("binary", "json")
    )
    sources = [figures("sources", source=name, fastest_peer=True) for name in ("hdfs", "s3 (nginx)", "gcs")]
    return _table(
        (
            "on two shared cores, dim 32 (`python -m benchmarks hash_map rocks_db redis http load sources`)",
            "",
            "against, in the same run",
        ),
        (
            "hash map, 100 k keys of 1 M rows, one thread",
            f"{hash_map['mkeys_per_s']:.1f} M keys/s",
            f"{hash_map['of_gather']:.2f} of `np.take`; {write['overhead_bytes_per_row']:.1f} bytes a row beyond the vectors",
        ),
        (
            "RocksDB, 10 k keys",
            f"{rocks['rows_per_s'] / 1e6:.2f} M keys/s",
            f"{rocks['ratio_to_sorted']:.2f} of rocksdict's sorted multi-get",
        ),
        (
            "a model of 1 M rows into RocksDB, merged",
            f"{load['vectors_per_s'] / 1e6:.2f} M vectors/s",
            f"{load['of_limit']:.2f} of the same from memory",
        ),
        (
            "reading a model from HDFS / S3 (nginx) / GCS (emulator)",
            f"{_each(_round(source['mb_per_s']) for source in sources)} MB/s",
            f"{_each(format(source['of_peer'], '.2f') for source in sources)} of the fastest way of its own client",
        ),
        (
            "Redis, one server, 10 k keys",
            f"{redis['ours_keys_per_s'] / 1e6:.1f} M keys/s",
            f"{redis['ours_to_socket']:.2f} of its socket, {redis['ours_to_redis_py']:.2f} x redis-py with hiredis",
        ),
        (
            "HTTP, 1,000 keys, binary / JSON",
            f"{_round(binary['requests_per_s'])} / {_round(json_body['requests_per_s'])} requests/s",
            f"{binary['ratio_to_limit']:.2f} of raw ASGI / {json_body['ratio_to_limit']:.2f} of a bare orjson route",
        ),
    )


def model_sources() -> list[str]:
    """How long loads take."""

    def source(name: str, peer: str, what: str) -> tuple[str, str, str]:
        row = figures("sources", source=name, peer=peer)
        return what, f"{_round(row['mb_per_s'])} MB/s", f"{row['of_peer']:.2f} of `{peer}`"

    load = figures("load", work="load", into="rocks_db", dim=32, order="random")
    first = {
        (dim, tier): figures("large_load", work="start", tiers=tier, dim=dim, start="first")
        for dim in (32, 128)
        for tier in ("rocks_db", "hash_map")
    }
    again, touched = (
        figures("large_load", work="start", tiers="rocks_db", dim=128, start=start) for start in ("second", "touched files")
    )
    long = first[32, "rocks_db"]
    return _table(
        ("", "rate", "against, in the same run"),
        source("local", "readinto", "reading 136 MB from local disk in page cache"),
        source("hdfs", "read_range, 8 threads", "HDFS, one DataNode"),
        source("s3 (nginx)", "get_object().read()", "S3, nginx as the store"),
        source("gcs", "download_as_bytes", "GCS, fake-gcs-server"),
        ("into RocksDB, 1 M rows x 32 in no order, merge included", f"{load['vectors_per_s'] / 1e6:.2f} M vectors/s", ""),
        (
            "the same, 20 M x 32",
            f"{long['vectors_per_s'] / 1e6:.2f} M vectors/s: {long['start_s']:.0f} s, of which the merge {long['merge_s']:.0f}",
            "",
        ),
        (
            "10.7 GB (20.6 M x 128) into RocksDB / the hash map",
            f"{first[128, 'rocks_db']['start_s']:.0f} s / {first[128, 'hash_map']['start_s']:.0f} s",
            "",
        ),
        (
            "a start that finds them in RocksDB / that must compare touched files",
            f"{again['start_s']:.2f} s / {touched['start_s']:.0f} s",
            "",
        ),
    )


def row_bytes() -> list[str]:
    """Bytes of a row by tier and format, and rows per GB beside float32."""
    names = {"hash_map": "hash map", "redis_cluster": "Redis", "rocks_db": "RocksDB"}
    rows = []
    for tier, name in names.items():
        own = {row["axes"]["row_dtype"]: row["figures"] for row in result_rows("row_bytes") if row["axes"]["tier"] == tier}
        cells = [f"{found['bytes_per_row']:.0f} ({found['ratio_to_float32']:.2f} x)" for found in own.values()]
        rows.append((name, *cells))
    return _table(("tier", *own), *rows)


def _query(dim: int, alpha: float, batch: int = 1 << 20) -> dict[str, Any]:
    return figures("gpu_cache", work="query", dim=dim, batch=batch, alpha=alpha)


def gpu_queries() -> list[str]:
    """Queries of resident keys, beside a gather of the same vectors."""
    rows = []
    large = [(1 << 20, dim, alpha) for alpha in (0.0, 1.05) for dim in (32, 128)]
    for batch, dim, alpha in [*large, (65_536, 128, 0.0), (8_192, 32, 0.0)]:
        row = _query(dim, alpha, batch)
        name = f"{'2^20' if batch == 1 << 20 else f'{batch:,}'}, {dim}, {f'alpha {alpha}' if alpha else 'uniform'}"
        ratios = (f"{row[key]:.2f}" for key in ("of_gather", "of_tuned_gather", "one_call_of_gather"))
        rows.append((name, _round(row["mkeys_per_s"]), *ratios))
    return _table(("n, dim, keys", "M keys/s", "of gather, back to back", "of the tuned gather", "of gather, one call"), *rows)


def prepared() -> list[str]:
    """Small lookups from Python: separate tensors, tensors of all tables, prepared ones, and beside them torch."""
    found = {
        (r["axes"]["tables"], r["axes"]["keys"], r["axes"]["work"]): r["figures"]["p50_us"] for r in result_rows("prepared")
    }
    separate = ("lookup_fromdlpack", "lookup_tables")
    rows = []
    for tables, keys in dict.fromkeys((tables, keys) for tables, keys, _ in found):
        ways = [f"{separate[tables > 1]}, torch", f"{separate[tables > 1]}, CuPy", "lookup_concatenated, torch"]
        ways += ["prepared, torch", "prepared, buffers", "layer", "torch index_select"]
        times = [found.get((tables, keys, way)) for way in ways]
        rows.append((f"{tables} x {keys:,}", *("" if time is None else _round(time) for time in times)))
    head = (
        "tables x keys, p50 in us",
        "torch's tensors",
        "CuPy's",
        "concatenated",
        "prepared, torch's tensors",
        "prepared, buffers",
    )
    return _table((*head, "a layer", "`index_select`"), *rows)


def updates() -> list[str]:
    """Online updates from either log."""
    logs = ("kafka", "redis_stream")
    seen = [figures("updates", work="visible", log=log) for log in logs]
    beside = [figures("updates", work="lookups", log=log, writes="beside") for log in logs]
    rows = [
        (
            "published to visible, 100,000 rows/s, p50 / p99",
            *(f"{_round(one['p50_ms'])} / {_round(one['p99_ms'])} ms" for one in seen),
        ),
        ("lookups beside them, p99 to idle", *(f"{one['p99_to_idle']:.2f}" for one in beside)),
    ]
    for frame, message_rows in (("HPS1", 500), ("HPS1", 5000), ("HCTR", 500)):
        found = [
            figures("updates", work="sustained", log=log, frame=frame, message_rows=message_rows, max_batch_size=65_536)
            for log in logs
        ]
        rows.append(
            (f"rows/s of one replica, {frame}, {message_rows:,} a message", *(_round(one["rows_per_s"]) for one in found))
        )
    return _table(("dim 32, two cores for everything (`python -m benchmarks updates`)", "Kafka", "Redis Streams"), *rows)


def machines() -> list[str]:
    """Where, when and by which command the pictures' figures were measured."""
    rows = []
    for picture, names in PICTURED.items():
        for name in names:
            result = json.loads((RESULTS / f"{name}.json").read_text())
            machine = result["machine"]
            place = f"{machine['processor']}, {machine['cores']} cores"
            gpu = result["about"].get("gpu")
            taken = f"{result['taken_at'][:10]}, {machine['commit'][:7]}"
            rows.append((picture, f"`python -m benchmarks {name}`", f"{gpu}; {place}" if gpu else place, taken))
    return _table(("picture", "command", "machine", "taken on, commit"), *rows)


def planning() -> list[str]:
    """Predicted and measured hit rates."""
    rows, shares = [], (0.01, 0.05, 0.1, 0.2, 0.5)
    devices = dict.fromkeys(row["axes"]["device"] for row in result_rows("plan"))
    for device in devices:
        for keys in ("power law 0.99", "power law 1.2", "shifting"):
            found = [figures("plan", work="hit rate", device=device, keys=keys, cache_share=share) for share in shares]
            rows.append((f"{device}, {keys}", *(f"{one['predicted']:.3f} / {one['measured']:.3f}" for one in found)))
    return _table(("cache, of the rows", *(f"{share * 100:g} %" for share in shares)), *rows)


def cold_start() -> list[str]:
    """The first lookup after an installation, and after another start."""

    def seconds(work: str, start: str) -> str:
        found = [
            row["figures"]
            for row in result_rows("cold_start")
            if row["axes"] == {"work": f"first lookup, {work}", "code": "now", "start": start}
        ]
        wall, processor = (median(one[name] for one in found) for name in ("wall_s", "processor_s"))
        return f"{wall:.1f} s ({processor:.1f} s)"

    starts = {"nothing compiled": "cold", "compiled by an earlier start": "warm", "compiled for the baseline": "ahead"}
    rows = [(text, *(seconds(work, start) for work in ("in process", "hps serve"))) for text, start in starts.items()]
    return _table(
        ("start until the first answer (seconds of all processors)", "in process", "`hps serve` of a sample model"), *rows
    )


def clients() -> list[str]:
    """What a call takes by each client, and the caller's processor time in it."""
    rows = []
    for name in dict.fromkeys(row["axes"]["client"] for row in result_rows("client")):
        found = [figures("client", client=name, tables=tables) for tables in (1, 26)]
        took = [f"{_round(one['p50_us'])} us ({_round(one['relative'])} x)" for one in found]
        rows.append((name, *took, _each(f"{_round(one['cpu_us'])} us" for one in found)))
    return _table(("client", "1 table x 1,000 keys", "26 tables x 1,000 keys", "processor time of the caller"), *rows)


def routes() -> list[str]:
    """What three servers asked by key do, beside the same ones asked for everything and one with a larger cache."""
    rows = []
    names = {"routed": "three caches of 10 %, by key", "in turn": "three caches of 10 %, in turn", "one": "one cache of 30 %"}
    for kind, name in names.items():
        rate = figures("routes", work="hit rate", servers=kind)["hit_rate"]
        tables = () if kind == "in turn" else (1, 26)
        calls = [figures("routes", work="call", servers=kind, tables=count) for count in tables]
        times = [f"{_round(call['p50_us'])} us ({call['relative']:.2g} x)" for call in calls] or ["", ""]
        rows.append((name, f"{rate:.3f}", *times, _each(f"{_round(call['cpu_us'])} us" for call in calls)))
    head = ("", "hit rate", "1 table x 1,000 keys, p50", "26 tables x 1,000 keys, p50", "processor time of the caller")
    return _table(head, *rows)


def scores() -> list[str]:
    """Scores over HTTP: with batches, without, and of a plain application; on a GPU and on two processors."""
    rows = []
    for file, where in (("scores", "H100"), ("scores_cpu", "two processors")):
        for samples, clients in ((32, 64), (256, 16), (32, 1)):
            axes = {"work": "http", "samples": samples, "clients": clients, "turn": 0}
            found = {name: figures(file, service=name, **axes) for name in ("batched", "alone", "plain")}
            ours = found["batched"]
            cells = [f"{_round(one['requests_s'])} ({ours['requests_s'] / one['requests_s']:.2g} x)" for one in found.values()]
            cells[0] = _round(ours["requests_s"])
            rows.append((f"{where}, {clients} x {samples}", *cells, f"{_round(ours['p50_ms'])} / {_round(ours['p99_ms'])}"))
    head = ("clients x samples", "batches, requests/s", "one by one", "FastAPI", "p50 / p99 of batches, ms")
    return _table(head, *rows)


def scores_once() -> list[str]:
    """One user and 2,048 candidates, the user given once or with each."""
    rows = []
    for file, where in (("scores", "H100"), ("scores_cpu", "two processors")):
        once, each = (
            median(row["figures"]["requests_s"] for row in result_rows(file) if row["axes"].get("user") == user)
            for user in ("once", "with each candidate")
        )
        rows.append((where, _round(once), _round(each), f"{once / each:.2g} x"))
    return _table(("", "given once, requests/s", "with each candidate", "more"), *rows)


_DLRMV3_PUBLISHED = (  # `summary.json` of mlcommons/inference_results_v6.1: queries/s of the scenario Server, on eight GPUs
    ("MLPerf v6.1, closed: the whole DLRMv3", "8 x AMD Instinct MI355X", 12_198.8),
    ("MLPerf v6.1, closed: the whole DLRMv3", "8 x AMD Instinct MI350X", 9_297.78),
)


def _sparse_stage_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    about = result["about"]
    for row in result["rows"]:
        axes, found = row["axes"], row["figures"]
        work = axes["work"]
        if "error" in found or work == "dense stand-in alone" or not ("p99_ms" in found or "mrows_per_s" in found):
            continue
        if work == "served" or (work == "sustained" and (axes["threads"], axes["queries"]) != (4, 16)):
            continue
        devices = axes.get("devices", 1)
        names = [work, axes.get("sharing", ""), f"{axes['ids']} ids" if "ids" in axes else ""]
        names.append(f"{axes['threads']} threads x {axes['queries']}" if work == "sustained" else "")
        names.append(f"{axes['rate']:,.0f} queries/s offered, {about['loadgen_s']:.0f} s" if "loadgen" in work else "")
        names.append(f"hit rate {found['hit_rate']:.3f}" if "hit_rate" in found else "")
        rate = found.get("queries_per_s") or axes.get("rate") or 1e6 * found["mrows_per_s"] / about["keys_of_a_query"]
        result = found.get("result") or (f"{_round(found['mrows_per_s'])} M rows/s" if "mrows_per_s" in found else "")
        cells = (
            ", ".join(name for name in names if name),
            f"{devices} x {about['device']}",
            f"{about['rows'] / 1e6:.3g} M x {about['dim']}",
            f"{rate:,.0f}",
            f"{rate / devices:,.0f}",
            f"{found['p99_ms']:.2g}" if "p99_ms" in found else "",
            result,
        )
        rows.append(cells)
    return rows


def sparse_stage() -> list[str]:
    """Queries a second of DLRMv3's shape, ours as far as they were measured, beside what MLPerf has published."""
    rows = [
        (what, hardware, "10^9 x 512", f"{rate:,.0f}", f"{rate / 8:,.0f}", "80", "")
        for what, hardware, rate in _DLRMV3_PUBLISHED
    ]
    for result in ("dlrmv3", "dlrmv3_two_gpus"):
        path = RESULTS / f"{result}.json"
        if path.exists():
            rows += _sparse_stage_of(json.loads(path.read_text()))
    return _table(("", "hardware", "rows", "queries/s", "for each GPU", "p99 (published: its bound), ms", "result"), *rows)


def sharing_traffic() -> list[str]:
    """Keys by popularity on two devices at once, by how they share rows."""
    rows = []
    found = {
        (row["axes"]["sharing"], row["axes"]["threads"]): row["figures"]
        for row in result_rows("sharing")
        if "sharing" in row["axes"]
    }
    for (sharing, threads), one in found.items():
        alone = found["replicate", threads]
        rows.append(
            (
                f"`{sharing}`, {threads} thread{'s' if threads > 1 else ''} a GPU",
                f"{one['hit_rate']:.3f}",
                f"{(1 - one['hit_rate']) / (1 - alone['hit_rate']):.2f}",
                _round(one["mkeys_per_s"]),
                f"{one['mkeys_per_s'] / alone['mkeys_per_s']:.2f}",
            )
        )
    return _table(("sharing", "hit rate", "misses, of `replicate`'s", "M keys/s a GPU", "of `replicate`'s"), *rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "sharing-traffic": sharing_traffic,
    "clients": clients,
    "routes": routes,
    "machines": machines,
    "readme": readme,
    "measured-gpu": measured_gpu,
    "measured-host": measured_host,
    "model-sources": model_sources,
    "row-bytes": row_bytes,
    "gpu-queries": gpu_queries,
    "prepared": prepared,
    "scores": scores,
    "scores-once": scores_once,
    "sparse-stage": sparse_stage,
    "updates": updates,
    "planning": planning,
    "cold-start": cold_start,
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
