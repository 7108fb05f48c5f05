"""What the command line shows: errors, progress, vectors, tables."""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from hps import errors
from hps.progress import LogProgress, TableProgress, count_text, size_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from hps.configuration.load import Configuration
    from hps.models.table_load import DatabaseLoad, LoadReport
    from hps.progress import Progress
    from hps.types import FloatArray

SERVICE_LOG = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""The form of a service's log lines."""

_WRONG_INPUT = (
    errors.ConfigError,
    errors.MissingDependencyError,
    errors.ModelFileError,
    errors.InvalidInputError,
    errors.UnknownModelError,
    errors.UnknownTableError,
    errors.UnknownDeviceError,
)


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error into its message and exit code."""
    try:
        yield
    except errors.HPSError as error:
        console = Console(stderr=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, _WRONG_INPUT) else 1) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


_FIGURES_WIDTH = 68  # of the figures, the shortest bar and the spaces between


class _Figures:
    """What stands beside a bar; written anew whenever the bar is drawn, so that a source that stops is seen."""

    def __init__(self, table: TableProgress) -> None:
        self.table = table

    def __str__(self) -> str:
        table = self.table
        size = f"{size_text(table.bytes_done):>7} of {size_text(table.size_bytes):<7}"
        rates = f"{size_text(table.bytes_per_s):>7}/s {count_text(table.rows_per_s):>6} rows/s"
        return f"{table.percent:3d} % {size} {rates}  {table.time_text:<12}"


class _Bars:
    """Shows the progress of tables as bars on a terminal: one a table, left there when it has ended.

    The display is live only while a table is being loaded, so that what is logged in between stays where it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._table = TableProgress(0, 0)

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """Add a bar."""
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
        """Move a bar."""
        self._table.advance(rows)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._table.rows_done)

    def finish(self, tag: str) -> None:
        """Leave the full bar on the screen."""
        self.stop()

    def fail(self, tag: str) -> None:
        """Leave the bar on the screen as far as it got."""
        self.stop()

    def stop(self) -> None:
        """Let the bar that moves, if one does, stay as it is."""
        bars, self._bars = self._bars, None
        self._table.end()
        if bars is not None:
            bars.stop()


class _ConsoleHandler(logging.Handler):
    """Writes log lines above the bar that moves."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def _bars(console: Console, level: str, line: str) -> "Iterator[Progress]":
    logging.basicConfig(level=level, format=line, handlers=[_ConsoleHandler(console)])
    bars = _Bars(console)
    try:
        yield bars
    finally:
        bars.stop()


@contextmanager
def progress() -> "Iterator[Progress]":
    """Bars on a terminal; elsewhere log lines, and the log that the work itself writes."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bars(console, "WARNING", "%(levelname)s %(message)s") as bars:
            yield bars
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    yield LogProgress()


@contextmanager
def serving(log_level: str) -> "Iterator[Progress | None]":
    """Bars among the log lines of a service on a terminal; elsewhere None: the service logs how far it is."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bars(console, log_level.upper(), SERVICE_LOG) as bars:
            yield bars
        return
    yield None


def leave(code: int) -> NoReturn:
    """End the process at once, whatever its threads wait for. RocksDB recovers as after any other end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def loaded_lines(report: "LoadReport") -> list[str]:
    """Say what a load gave each database."""
    return [_loaded_line(report, load) for load in report.loads]


def _loaded_line(report: "LoadReport", load: "DatabaseLoad") -> str:
    if load.rows == 0:
        return f"{report.tag}: {load.kind}: complete, nothing to do ({report.model.rows:,} rows)"
    rate = load.rows / max(report.seconds, 1e-9)
    return f"{report.tag}: {load.kind}: loaded {load.rows:,} rows in {report.seconds:.1f} s ({rate:,.0f} rows/s)"


def print_vectors(
    model: str, table: str, keys: Sequence[int], vectors: "FloatArray", found: Sequence[bool], as_json: bool
) -> None:
    if as_json:
        rows = [[float(str(element)) for element in row] for row in vectors]  # the shortest digits that name the float32
        typer.echo(json.dumps({"model": model, "table": table, "keys": keys, "vectors": rows, "found": found}))
        return
    for key, row, has in zip(keys, vectors, found, strict=True):
        elements = ", ".join(str(element) for element in row)
        typer.echo(f"{key}: [{elements}]" + ("" if has else "  (default vector: no database has this key)"))


def print_summary(path: Path, configuration: "Configuration", rows: dict[tuple[str, str], int]) -> None:
    from rich.table import Table

    summary = Table("model", "table", "id", box=None, pad_edge=False)
    for column in ("rows", "dim", "MB", "cached rows"):
        summary.add_column(column, justify="right")
    for model in configuration.models:
        for i, table in enumerate(model.tables):
            count = rows.get((model.model, table.table_name))
            share = model.gpucacheper if model.gpucache else 0.0
            figures = (f"{count:,}", f"{count * table.dim * 4 / 1e6:,.1f}", f"{share * count:,.0f}") if count else ("?",) * 3
            summary.add_row(model.model, table.table_name, str(i), figures[0], str(table.dim), *figures[1:])
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a terminal wraps what a pipe must not cut
    console.print(summary)
    persistent, service = configuration.persistent_db, configuration.service
    where = f" at {persistent.path}" if persistent.type != "disabled" else ""
    typer.echo(
        f"device {configuration.device}, volatile_db {configuration.volatile_db.type}, persistent_db {persistent.type}{where}"
    )
    typer.echo(f"serves on http://{service.host}:{service.port}")
    typer.echo(f"{path}: good")
