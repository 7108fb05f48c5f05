"""Shared arguments, error messages, exit codes, log lines and progress bars of the commands."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from hps import errors
from hps.ground.progress import LogProgress, TableProgress, count_text, size_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.table import Table

    from hps.ground.progress import Progress

ConfigPath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A ps.json, as HugeCTR takes it.", show_default=False)
]
Force: TypeAlias = Annotated[
    bool,
    typer.Option("--force", help="Load all files again, whatever the databases hold. Online updates of the tables are lost."),
]
_WRONG_INPUT = (
    errors.ConfigError,
    errors.MissingDependencyError,
    errors.ModelFileError,
    errors.InvalidInputError,
    errors.UnknownModelError,
    errors.UnknownTableError,
    errors.UnknownDeviceError,
    errors.UnauthorizedError,
)


@contextmanager
def reported() -> Iterator[None]:
    """Print an error as one message on standard error, and exit with its code."""
    try:
        yield
    except errors.HPSError as error:
        console = Console(stderr=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, _WRONG_INPUT) else 1) from error
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except (OSError, UnicodeError) as error:  # of files that the command writes
        typer.echo(f"error: {error}".encode("utf-8", "backslashreplace"), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


def rows_text(rows: int) -> str:
    """`1 row`, `50,000 rows`."""
    return f"{rows:,} row" if rows == 1 else f"{rows:,} rows"


def screen(least_width: int = 0) -> Console:
    """Make a console for tables, which is wide enough for them in a pipe.

    Args:
        least_width: on a narrower terminal, lines are wrapped, not cut.
    """
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, least_width) if console.is_terminal else _PIPE_WIDTH
    return console


def table(words: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[str]] = (), *, title: str = "") -> "Table":
    """Make a table of text columns, then columns of figures, which are never folded. A table with a title has borders."""
    from rich.table import Table

    made = Table(title=title) if title else Table(box=None, pad_edge=False)
    for column in words:
        made.add_column(column, overflow="fold")
    for column in figures:
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


_PIPE_WIDTH = 10_000
_FIGURES_WIDTH = 68  # figures, the shortest bar and the spaces between them


class _Figures:
    """The text next to a bar, computed at each redraw, so that it shows a stalled source."""

    def __init__(self, table: TableProgress) -> None:
        self.table = table

    def __str__(self) -> str:
        table = self.table
        size = f"{size_text(table.bytes_done):>7} of {size_text(table.size_bytes):<7}"
        rates = f"{size_text(table.bytes_per_s):>7}/s {count_text(table.rows_per_s):>6} rows/s"
        return f"{table.percent:3d} % {size} {rates}  {table.time_text:<12}"


class _Bars:
    """Shows the progress of tables on a terminal, one bar per table. Full bars stay on the screen.

    The display is live only while a table is loaded, so that log lines in between stay in place.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._table = TableProgress(0, 0)

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self.stop()
        self._table = TableProgress(rows, size_bytes)
        name, figures = TextColumn("{task.description:<12}", markup=False), TextColumn("{task.fields[figures]}", markup=False)
        self._bars = RichProgress(name, BarColumn(bar_width=None), figures, console=self._console, expand=True)
        label, longest = tag.removeprefix("hps_et."), max(12, self._console.width - _FIGURES_WIDTH)
        label = label if len(label) <= longest else f"…{label[1 - longest :]}"  # names and paths differ at their ends
        self._bars.add_task(label, total=max(rows, 1), figures=_Figures(self._table))
        self._bars.start()

    def advance(self, tag: str, rows: int) -> None:
        self._table.advance(rows)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._table.rows_done)

    def finish(self, tag: str) -> None:
        self.stop()

    fail = finish

    def stop(self) -> None:
        bars, self._bars = self._bars, None
        self._table.end()
        if bars is not None:
            bars.stop()


class _ConsoleHandler(logging.Handler):
    """Writes log lines above the moving bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def progress(level: str | None = None, lines: logging.Formatter | None = None) -> "Iterator[Progress]":
    """Set up logging and show progress, as bars on a terminal and as log lines elsewhere.

    Args:
        level: minimum level to log; by default warning on a terminal, and info elsewhere.
        lines: formats the log lines of a service, also on a terminal.
    """
    console = Console(stderr=True)
    handler = _ConsoleHandler(console) if console.is_terminal else logging.StreamHandler()
    text = "%(levelname)s %(message)s" if console.is_terminal else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(lines or logging.Formatter(text))
    logging.basicConfig(level=(level or ("warning" if console.is_terminal else "info")).upper(), handlers=[handler])
    if not console.is_terminal:
        yield LogProgress()
        return
    bars = _Bars(console)
    try:
        yield bars
    finally:
        bars.stop()


def end_process(code: int) -> NoReturn:
    """End the process without waiting for its threads. RocksDB recovers, as after a kill."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
