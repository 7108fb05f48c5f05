"""Plots of a profile: latency by percentile, or by rate."""

from pathlib import Path
from typing import Any

from hps.errors import InvalidInputError, MissingDependencyError
from hps.profiling.profile import Profile, Row


def draw(profile: Profile, path: Path) -> None:
    """Plot a profile: quantiles against the rate if there are several, else latency by percentile, one curve per row.

    Args:
        path: path of a .svg or .png file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidInputError: the file has another type, or cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise InvalidInputError(f"drawing {path}: got {path.suffix or 'no suffix'}, expected .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(f"drawing {path}: matplotlib is needed; pip install 'hps-server[plot]'") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rates = {row.rate for row in profile.rows if row.rate}
    if len(rates) > 1:
        _by_rate(axes, profile.rows)
    else:
        _by_percentile(axes, profile.rows)
    axes.set_title(f"{profile.target}: {profile.about['model']}, {profile.about['workload']}", fontsize=10)
    axes.grid(which="both", alpha=0.3)
    axes.set_yscale("log")
    axes.set_ylabel("latency, ms")
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidInputError(f"drawing {path}: {error}") from error


def _by_rate(axes: Any, rows: list[Row]) -> None:
    for batch in dict.fromkeys(row.batch for row in rows):
        some = sorted((row for row in rows if row.batch == batch and row.rate), key=lambda row: row.rate or 0.0)
        for name, style in (("p50", "-"), ("p99", "--"), ("p999", ":")):
            label = f"{'p99.9' if name == 'p999' else name}, {batch:,} keys"
            axes.plot(
                [row.rate for row in some], [getattr(row.latency, f"{name}_ms") for row in some], style, marker="o", label=label
            )
    axes.set_xlabel("lookups/s, sent at a fixed rate")


def _by_percentile(axes: Any, rows: list[Row]) -> None:
    for row in rows:
        curve = [(1 / (1 - share), ms) for share, ms in row.curve if share < 1]
        axes.plot(*zip(*curve, strict=True), label=f"{row.batch:,} keys" + (f", {row.rate:,.10g}/s" if row.rate else ""))
    axes.set_xscale("log")
    ticks = [1, 2, 10, 100, 1_000, 10_000, 100_000]
    axes.set_xticks(ticks, [f"{100 - 100 / tick:g} %" for tick in ticks])
    axes.set_xlabel("share of the lookups")
