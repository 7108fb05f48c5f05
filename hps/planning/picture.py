"""Draws the hit rates of a plan."""

from collections.abc import Sequence
from pathlib import Path

from hps.errors import InvalidInputError, MissingDependencyError
from hps.planning.forecast import SHARES, TableForecast


def draw(path: Path, tables: Sequence[TableForecast]) -> None:
    """Draw the hit rate of each table by cache size, as SVG or PNG by the file's suffix.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidInputError: another suffix.
    """
    if path.suffix not in (".svg", ".png"):
        raise InvalidInputError(f"drawing {path}: got the ending {path.suffix!r}, expected .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(f"drawing {path}: {error}; pip install 'hps-server[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for place, table in enumerate(tables):
        colour = f"C{place % 10}"
        shares = [100 * share for share in SHARES]
        axes.plot(shares, [one.hit_rate for one in table.curve], "o-", color=colour, label=f"{table.model}.{table.table}")
        axes.plot(shares, [one.ideal for one in table.curve], ":", color=colour)
        axes.plot([100 * table.configured.capacity_rows / table.rows], [table.configured.hit_rate], "D", color=colour)
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in SHARES], [f"{100 * share:g}" for share in SHARES])
    axes.minorticks_off()
    axes.set_xlabel("cache, % of the table's rows")
    axes.set_ylabel("hit rate")
    axes.set_title("Hit rate by cache size (dotted: an ideal LRU cache; diamond: as configured)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=1 + len(tables) // 12)
    figure.savefig(path)
