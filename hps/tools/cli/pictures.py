"""Pictures of a plan and of a profile, as SVG or PNG by the suffix of their file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.errors import InvalidInputError, MissingDependencyError
from hps.ground.registry import install_hint

if TYPE_CHECKING:
    from hps.tools.planning.forecast import TableForecast
    from hps.tools.profiling.profile import Profile, Row
    from hps.versions.checks.report import CheckReport

_COLOURS = {"passed": "C0", "failed": "C3", "skipped": "C7"}


def check_picture(path: Path | None) -> None:
    """Refuse a file that cannot be drawn.

    Raises:
        InvalidInputError: it is neither .svg nor .png.
    """
    if path is not None and path.suffix not in (".svg", ".png"):
        raise InvalidInputError(f"drawing {path}: got {path.suffix or 'no suffix'}, expected .svg or .png")


def draw_plan(path: Path, tables: "Sequence[TableForecast]") -> None:
    """Draw the hit rate of each table by cache size.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidInputError: the file cannot be written.
    """
    from hps.tools.planning.forecast import SHARES

    figure = _figure(path)
    axes = figure.subplots()
    for index, table in enumerate(tables):
        colour = f"C{index % 10}"
        shares = [100 * share for share in SHARES]
        axes.plot(shares, [point.hit_rate for point in table.curve], "o-", color=colour, label=f"{table.model}.{table.table}")
        axes.plot(shares, [point.ideal for point in table.curve], ":", color=colour)
        axes.plot([100 * table.configured.capacity_rows / table.rows], [table.configured.hit_rate], "D", color=colour)
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in SHARES], [f"{100 * share:g}" for share in SHARES])
    axes.minorticks_off()
    axes.set_xlabel("cache, % of the table's rows")
    axes.set_ylabel("hit rate")
    axes.set_title("Hit rate by cache size (dotted: an ideal LRU cache; diamond: as configured)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=1 + len(tables) // 12)
    _save(figure, path)


def draw_checks(path: Path, report: "CheckReport") -> None:
    """Draw what the checks of a version measured, a dot for each table, red where a check failed; as `draw_plan`."""
    tables = list(dict.fromkeys(found.table for found in report.checks if found.table))
    figure = _figure(path)
    figure.set_size_inches(12, 1.5 + 0.25 * max(6, len(tables)))
    drawn = [
        ("keys", "new", -0.05, 1.05),
        ("keys", "gone", -0.05, 1.05),
        ("norms", "factor", 0.9, None),
        ("vectors", "cosine", -1.05, 1.05),
        ("vectors", "alignment", -0.1, 1.05),
    ]
    *panels, last = figure.subplots(1, len(drawn) + 1)
    for axes, (check, name, low, high) in zip(panels, drawn, strict=True):
        found = {one.table: one for one in report.checks if one.check == check}
        measured = [found[table].figures.get(name, 0.0) if table in found else 0.0 for table in tables]
        colours = [_COLOURS[found[table].outcome] if table in found else _COLOURS["skipped"] for table in tables]
        axes.scatter(measured, tables, color=colours)
        axes.set_xlim(low, high)
        axes.grid(alpha=0.3)
        axes.set_title(f"{check}: {name}", fontsize=9)
        axes.tick_params(labelsize=8, labelleft=axes is panels[0])
        axes.invert_yaxis()
    network = [one for one in report.checks if one.check == "scores"]
    names = ["correlation", "overlap"]
    last.bar(
        names,
        [network[0].figures.get(name, 0.0) if network else 0.0 for name in names],
        color=_COLOURS[network[0].outcome if network else "skipped"],
    )
    last.set_title("scores", fontsize=9)
    last.set_ylim(-1, 1)
    last.tick_params(labelsize=8)
    against = f" beside version {report.against}" if report.against else ""
    figure.suptitle(f"{report.model}: version {report.version}{against}: {report.verdict}", fontsize=10)
    _save(figure, path)


def draw_profile(path: Path, profile: "Profile") -> None:
    """Plot quantiles against the rate if there are several, else latency by percentile, one curve per row; as `draw_plan`."""
    figure = _figure(path)
    axes = figure.subplots()
    if len({row.rate for row in profile.rows if row.rate}) > 1:
        _by_rate(axes, profile.rows)
    else:
        _by_percentile(axes, profile.rows)
    axes.set_title(f"{profile.target}: {profile.about['model']}, {profile.about['workload']}", fontsize=10)
    axes.grid(which="both", alpha=0.3)
    axes.set_yscale("log")
    axes.set_ylabel("latency, ms")
    axes.legend()
    _save(figure, path)


def _by_rate(axes: Any, rows: "list[Row]") -> None:
    for batch in dict.fromkeys(row.batch for row in rows):
        chosen = sorted((row for row in rows if row.batch == batch and row.rate), key=lambda row: row.rate or 0.0)
        for name, style in (("p50", "-"), ("p99", "--"), ("p999", ":")):
            label = f"{'p99.9' if name == 'p999' else name}, {batch:,} keys"
            latencies = [getattr(row.latency, f"{name}_ms") for row in chosen]
            axes.plot([row.rate for row in chosen], latencies, style, marker="o", label=label)
    axes.set_xlabel("lookups/s, sent at a fixed rate")


def _by_percentile(axes: Any, rows: "list[Row]") -> None:
    for row in rows:
        curve = [(1 / (1 - share), ms) for share, ms in row.curve if share < 1]
        axes.plot(*zip(*curve, strict=True), label=f"{row.batch:,} keys" + (f", {row.rate:,.10g}/s" if row.rate else ""))
    axes.set_xscale("log")
    ticks = [1, 2, 10, 100, 1_000, 10_000, 100_000]
    axes.set_xticks(ticks, [f"{100 - 100 / tick:g} %" for tick in ticks])
    axes.set_xlabel("share of the lookups")


def _figure(path: Path) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(f"drawing {path}: {error}; {install_hint('plot')}") from error
    return Figure(figsize=(8, 5), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidInputError(f"drawing {path}: {error}") from error
