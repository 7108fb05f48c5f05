"""`hps check-config`: report everything that is wrong with a configuration and its model files, or print what it serves."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps import errors
from hps.cli import console

if TYPE_CHECKING:
    from hps.configuration.load import Configuration
    from hps.models.sources import ModelSources
    from hps.types import TableSpec

EXAMPLE = "Example: `hps check-config configs/minimal.json`"
_CHECKED_AT_ONCE = 16  # tables; checking one takes a few requests to where its files are


def check_config_command(
    config: console.ConfigPath,
    files: Annotated[bool, typer.Option(help="Check the sizes of the model files, too.")] = True,
) -> None:
    """Check CONFIG and the model files it names, and print what would be served. All problems are reported at once."""
    with console.reported():
        from hps.configuration.load import read_configuration

        configuration, notices = read_configuration(config)
        for level, text in notices:
            typer.echo(f"{'warning' if level >= logging.WARNING else 'note'}: {text}")
        rows = _check_files(config, configuration) if files else {}
        _print_summary(config, configuration, rows)


def _check_files(path: Path, configuration: "Configuration") -> dict[tuple[str, str], int]:
    """Rows of every table by (model, table), or one report of what is wrong with the files."""
    from concurrent.futures import ThreadPoolExecutor

    from hps.models.sources import ModelSources

    rows, problems, sources = {}, [], ModelSources(configuration.model_source)
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:  # so that a dead host costs one timeout, not one a table
        checks = [
            (i, j, model.model, table, pool.submit(_check_table, table, source, configuration, sources))
            for i, model in enumerate(configuration.models)
            for j, (table, source) in enumerate(zip(model.tables, model.sparse_files, strict=True))
        ]
        for i, j, name, table, check in checks:
            try:
                rows[name, table.table_name] = check.result()
            except errors.ModelFileError as error:
                problems.append(f"models[{i}].sparse_files[{j}]: {error}")
    if problems:
        raise errors.ConfigError(str(path), problems)
    return rows


def _check_table(table: "TableSpec", source: str, configuration: "Configuration", sources: "ModelSources") -> int:
    from hps.models.files import open_sparse_model

    files = open_sparse_model(source, table.dim, int32_keys=not configuration.supportlonglong, sources=sources)
    files.verify()
    return files.rows


def _print_summary(path: Path, configuration: "Configuration", rows: dict[tuple[str, str], int]) -> None:
    from rich.console import Console
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
    screen = Console(highlight=False)
    screen.width = max(screen.width, 120)  # a terminal wraps long lines; in a pipe they must not be cut
    screen.print(summary)
    persistent, service = configuration.persistent_db, configuration.service
    where = f" at {persistent.path}" if persistent.type == "rocks_db" else ""
    typer.echo(
        f"device {configuration.device}, volatile_db {configuration.volatile_db.type}, persistent_db {persistent.type}{where}"
    )
    typer.echo(f"serves on http://{service.host}:{service.port}")
    typer.echo(f"{path}: good")
