"""What the command line shows: errors, progress, vectors, tables."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from hps import errors

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.loading import DatabaseLoad, LoadReport
    from hps.progress import Progress
    from hps.types import FloatArray

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


class _Bars:
    """Shows the progress of tables as bars on a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        rows = TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows  {task.fields[rate]:,.0f} rows/s")
        self.bars = RichProgress(TextColumn("{task.description}"), BarColumn(), rows, TimeRemainingColumn(), console=console)
        self._tasks: dict[str, Any] = {}
        self._started: dict[str, float] = {}

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """Add a bar."""
        self._started[tag] = time.monotonic()
        self._tasks[tag] = self.bars.add_task(tag, total=rows, rate=0.0)

    def advance(self, tag: str, rows: int) -> None:
        """Move a bar."""
        self.bars.advance(self._tasks[tag], rows)
        seconds = time.monotonic() - self._started[tag]
        done = next(task.completed for task in self.bars.tasks if task.id == self._tasks[tag])
        self.bars.update(self._tasks[tag], rate=done / max(seconds, 1e-9))

    def finish(self, tag: str) -> None:
        """Leave the full bar on the screen."""
        self.bars.refresh()


@contextmanager
def progress() -> "Iterator[Progress]":
    """Bars on a terminal; elsewhere log lines, and the log that the work itself writes."""
    console = Console(stderr=True)
    if console.is_terminal:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        bars = _Bars(console)
        with bars.bars:
            yield bars
        return
    from hps.progress import LogProgress

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    yield LogProgress()


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
