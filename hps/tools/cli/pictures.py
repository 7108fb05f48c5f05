"""Pictures of a plan and of a profile, as SVG or PNG by the suffix of their file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.errors import InvalidInputError, MissingDependencyError
from hps.ground.registry import install_hint

if TYPE_CHECKING:
    from hps.tools.planning.forecast import TableForecast
    from hps.tools.profiling.profile import Profile, Row
    from hps.versions.checks.report import CheckOutcome, CheckReport


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
    """Draw the figures of the checks of a version, a panel for each figure and a bar for each table; as `draw_plan`."""
    found: dict[tuple[str, str], list[CheckOutcome]] = {}
    for check in report.checks:
        for name in check.figures:
            found.setdefault((check.check, name), []).append(check)
    figure = _figure(path)
    panels = figure.subplots(max(1, len(found)), 1, squeeze=False)[:, 0]
    for axes, ((check_name, name), checks) in zip(panels, found.items(), strict=False):
        tables = [check.table or check.check for check in checks]
        colours = ["C3" if check.outcome == "failed" else "C7" if check.outcome == "skipped" else "C0" for check in checks]
        axes.barh(tables, [check.figures[name] for check in checks], color=colours)
        axes.set_title(f"{check_name}: {name.replace('_', ' ')}", fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
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
