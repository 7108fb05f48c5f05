"""Draws the measured figures of `docs/measured.md` from `benchmarks/results/`: `python -m benchmarks.draw`.

Each picture carries a digest of what it shows, by which `tests/ring1/repo/test_figures.py` finds those that show other
results: the text of an SVG differs from one version of matplotlib to the next. Grey on nothing can be read in light and dark.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import ROOT, figures, rows_of, the

PICTURES = ROOT / "docs" / "pictures"
_GREY, _OURS, _OTHER, _THIRD = "#808080", "#0f9d75", "#d9822b", "#4a7fd6"
_STYLE = {
    "svg.hashsalt": "hps",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "savefig.transparent": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY),
}


def _figure(panels: int, height: float = 2.8) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _bars(axes: Axes, title: str, names: Sequence[str], series: Mapping[str, tuple[str, Sequence[float | None]]]) -> None:
    """Draw groups of horizontal bars with their numbers, the first on top; None leaves a bar out."""
    width = 0.8 / len(series)
    for i, (label, (color, values)) in enumerate(series.items()):
        places = [place + width * (i - (len(series) - 1) / 2) for place, value in enumerate(values) if value is not None]
        shown = [value for value in values if value is not None]
        bars = axes.barh(places, shown, height=0.9 * width, color=color, label=label if len(series) > 1 else None)
        axes.bar_label(bars, [f"{float(f'{value:.3g}'):,g}" for value in shown], padding=3, fontsize=8, color=_GREY)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(title, loc="left")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x")
    if len(series) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3)


def _lines(axes: Axes, title: str, batches: Sequence[int], series: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    """Draw rates by batch size, both on logarithmic scales."""
    for label, (color, rates) in series.items():
        axes.loglog(batches, rates, color=color, marker="o", markersize=3, label=label)
    ticks = batches[:: max(1, len(batches) // 4)]
    axes.set_xticks(ticks, [f"{tick >> 10}k" if tick < 1 << 20 else f"{tick >> 20}M" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title, loc="left")
    axes.set_xlabel("keys of a call")
    axes.set_ylim(min(min(rates) for _, rates in series.values()) / 4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid()


def gpu_cache() -> Figure:
    """Queries of resident keys, beside a gather of the same vectors and torch."""
    figure, panels = _figure(2)
    for axes, dim in zip(panels, (32, 128), strict=True):
        found = sorted(rows_of("gpu_cache", work="query", dim=dim, alpha=0.0), key=lambda row: row.batch)
        lines = (
            ("plain gather of known rows", _GREY, "gather_mkeys_per_s"),
            ("query of the embedding cache", _OURS, "mkeys_per_s"),
            ("torch.index_select", _OTHER, "torch_index_select_mkeys_per_s"),
        )
        series = {label: (color, [row[name] for row in found]) for label, color, name in lines}
        _lines(axes, f"million keys a second, dim {dim}", [row.batch for row in found], series)
    panels[1].legend(loc="lower right", fontsize=8)
    return figure


def gpu_lookups() -> Figure:
    """Whole lookups from Python, beside torch."""
    names = ["4,096 keys, one table", "26 x 1,024 keys, one array", "26 x 1,024 keys, by table", "2,000 keys, 14 % missing"]
    found = [the.one_table, the.concatenated, the.by_table, the.missing]
    figure, (axes,) = _figure(1)
    series = {
        "lookup, p50": (_OURS, [row["p50_us"] for row in found]),
        "lookup, p99": (_THIRD, [row["p99_us"] for row in found]),
        "torch index_select of all rows, p50": (_OTHER, [row.get("peer_p50_us") for row in found]),
    }
    _bars(axes, "microseconds of a lookup", names, series)
    return figure


def misses() -> Figure:
    """Keys that all miss the cache: read by the GPU, or fetched by the CPU."""
    figure, panels = _figure(2)
    batches = (4096, 32_768, 262_144)
    for axes, dim in zip(panels, (32, 128), strict=True):
        link, copy = (
            [figures("misses", work="misses", path=path, keys=keys, dim=dim, rows=1 << 24) for keys in batches]
            for path in ("link", "copy")
        )
        series = {
            "gather of known rows over the link": (_GREY, [row["gather_mkeys_per_s"] for row in link]),
            "the GPU reads the hash map": (_OURS, [row["mkeys_per_s"] for row in link]),
            "the CPU fetches and copies": (_OTHER, [row["mkeys_per_s"] for row in copy]),
        }
        _lines(axes, f"million missing keys a second, dim {dim}", batches, series)
    panels[1].legend(loc="lower right", fontsize=8)
    return figure


def pooled() -> Figure:
    """Sums of bags, beside a kernel that knows where the rows are, and torch."""
    dims = (32, 64, 128)
    series = {}
    for label, color, bags in (
        ("plain kernel, known rows", _GREY, "plain kernel"),
        ("lookup_pooled's kernels", _OURS, "offsets"),
        ("torch embedding_bag, known rows", _OTHER, "torch embedding_bag"),
    ):
        rates = [figures("pooled", tables=26, batch=4096, dim=dim, alpha=1.05, bags=bags)["mkeys_per_s"] for dim in dims]
        series[label] = (color, rates)
    figure, (axes,) = _figure(1)
    _bars(axes, "million keys a second, 26 tables x 4,096 bags, alpha 1.05", [f"dim {dim}" for dim in dims], series)
    return figure


def http() -> Figure:
    """Requests of 1,000 keys from four connections, beside a server that does nothing."""
    figure, panels = _figure(2, 2.2)
    for axes, form, limit in zip(panels, ("binary", "json"), (("raw", "ASGI echo"), ("orjson", "orjson echo")), strict=True):
        limit_tier, limit_name = limit
        found = [
            figures("http", form=form, connections=4, tier=limit_tier),
            *(figures("http", form=form, connections=4, tier=tier, hop="own") for tier in ("embedding_cache", "hash_map")),
        ]
        rates = [row["requests_per_s"] for row in found]
        _bars(axes, f"requests a second, {form}", [limit_name, "embedding cache", "hash map"], {"": (_OURS, rates)})
        axes.containers[0].patches[0].set_color(_GREY)
    return figure


def updates() -> Figure:
    """Online updates of one replica."""
    figure, (delays, rates) = _figure(2, 2.4)
    logs = {"kafka": "Kafka", "redis_stream": "Redis stream"}
    seen = [figures("updates", work="visible", log=log) for log in logs]
    series = {
        label: (color, [row[name] for row in seen])
        for label, color, name in (("p50", _OURS, "p50_ms"), ("p99", _THIRD, "p99_ms"), ("p99.9", _OTHER, "p999_ms"))
    }
    _bars(delays, "ms from published to visible, 100,000 rows/s", list(logs.values()), series)
    sustained = {
        label: (
            color,
            [figures("updates", work="sustained", log=log, max_batch_size=65_536, **message)["rows_per_s"] for log in logs],
        )
        for label, color, message in (
            ("HPS1, 500 rows", _OURS, {"frame": "HPS1", "message_rows": 500}),
            ("HPS1, 5,000", _THIRD, {"frame": "HPS1", "message_rows": 5000}),
            ("HugeCTR's, 500", _OTHER, {"frame": "HCTR", "message_rows": 500}),
        )
    }
    _bars(rates, "rows a second at most, by message", list(logs.values()), sustained)
    return figure


def host_tiers() -> Figure:
    """What a fetch takes from each tier of a host, beside what limits it."""
    cache = figures("numpy_cache", work="query", rows=1 << 20, batch=100_000, dim=32, alpha=0.0)
    table = figures("hash_map", work="fetch", batch=100_000, dim=32, rows=1_000_000, hit_rate=1.0, alpha=0.0, threads=1)
    redis = figures("redis", work="fetch", servers=1, dim=32, batch=100_000, hit_rate=1.0)
    rocks = figures("rocks_db", what="fetch", table_rows=1_000_000, dim=32, batch=100_000, hit_rate=1.0, threads=1, alpha=0.0)
    names = ["NumPy cache", "hash map", "Redis", "RocksDB"]
    ours = [cache["mkeys_per_s"], table["mkeys_per_s"], redis["ours_keys_per_s"] / 1e6, rocks["rows_per_s"] / 1e6]
    limits = [
        cache["mkeys_per_s"] / cache["of_gather"],
        table["gather_mkeys_per_s"],
        redis["socket_keys_per_s"] / 1e6,
        rocks["sorted_rows_per_s"] / 1e6,
    ]
    figure, (axes,) = _figure(1)
    series = {"ours": (_OURS, ours), "the limit: np.take, a raw socket, a sorted multi-get": (_GREY, limits)}
    _bars(axes, "million keys a second, 100,000 keys, dim 32, one thread", names, series)
    axes.set_xscale("log")
    axes.set_xlim(0.1, 200)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "gpu-cache": gpu_cache,
    "gpu-lookups": gpu_lookups,
    "misses": misses,
    "pooled": pooled,
    "http": http,
    "updates": updates,
    "host-tiers": host_tiers,
}


def digest(figure: Figure) -> str:
    """Return a digest of the values and words that a figure shows."""
    shown = [
        [
            axes.get_title(loc="left"),
            [tick.get_text() for tick in axes.get_yticklabels()] if axes.patches else [],
            [(line.get_label(), line.get_xydata().tolist()) for line in axes.lines],
            [(bar.get_width(), bar.get_y(), bar.get_facecolor()) for bar in axes.patches],
            axes.get_legend_handles_labels()[1],
        ]
        for axes in figure.axes
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def draw(name: str, path: object) -> None:
    """Draw one picture into a path or a file."""
    with matplotlib.rc_context(_STYLE):
        figure = DRAWINGS[name]()
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": f"shows {digest(figure)}"})


def main() -> None:
    """Write all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name in DRAWINGS:
        draw(name, PICTURES / f"{name}.svg")
        print(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
