"""Writes the measured tables of the documentation from `benchmarks/results/`, so that no page says what no file holds.

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; `TABLES` has its function by that name.
`python -m benchmarks.figures` writes all of them anew; `tests/repo/test_figures.py` fails where a page differs.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@cache
def _rows(benchmark: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{benchmark}.json").read_text())["rows"]
    return rows


def figures(benchmark: str, **axes: Any) -> dict[str, Any]:
    """Return the figures of the one row of a result that has these axes (or figures); fail if none or several have."""
    found = [row["figures"] for row in _rows(benchmark) if axes.items() <= {**row["figures"], **row["axes"]}.items()]
    if len(found) != 1:
        raise LookupError(f"{benchmark}.json: {len(found)} rows have the axes {axes}, expected 1")
    return found[0]


def _table(head: tuple[str, str, str], *rows: tuple[str, str, str]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---", "---", "---"), *rows)]


def _round(value: float) -> str:
    """Three significant digits, with thousands separated."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _each(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def readme_gpu() -> list[str]:
    """What one GPU does."""
    narrow, wide = (figures("gpu_cache", work="query", dim=dim, batch=1 << 20, alpha=0.0) for dim in (32, 128))
    one = figures("gpu_lookup", work="lookup_fromdlpack, torch CUDA tensors")
    run, many = (figures("gpu_lookup", work=f"{call}, torch CUDA tensors") for call in ("lookup_concatenated", "lookup_tables"))
    missing = figures("gpu_lookup", work="synchronous misses from the hash map")
    warm = figures("gpu_lookup", work="warm-up from local disk in page cache")
    return _table(
        ("on one H200, float32 (`python -m benchmarks gpu_cache gpu_lookup`)", "", "against, in the same run"),
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
            "warm-up of 10 GB from files in page cache",
            f"{warm['gb_per_s']:.0f} GB/s",
            f"{warm['of_pinned_copy']:.2f} of a pinned copy",
        ),
    )


def readme_host() -> list[str]:
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


TABLES: dict[str, Callable[[], list[str]]] = {"readme-gpu": readme_gpu, "readme-host": readme_host}


def pages() -> list[Path]:
    """The pages that hold figures."""
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if _BLOCK.search(path.read_text())]


def written(text: str) -> str:
    """Return a page with every table as the results have it."""
    return _BLOCK.sub(lambda block: block[1] + "\n".join(TABLES[block[2]]()) + "\n" + block[3], text)


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
