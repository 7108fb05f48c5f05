"""`hps check-config`: report everything that is wrong with a configuration and its model files, or print what it serves."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hps import errors
from hps.cli import console

if TYPE_CHECKING:
    from hps.configuration.load import Configuration, ModelConfig
    from hps.models.deltas import TableSource
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
        rows = _check_files(config, configuration) if files else _configured(configuration)
        _print_summary(config, configuration, rows)


class _Row(NamedTuple):
    model: "ModelConfig"  # of the version
    table: "TableSpec"
    place: int
    rows: int | None


def _configured(configuration: "Configuration") -> list[_Row]:
    """The tables that CONFIG itself names."""
    return [_Row(model, table, i, None) for model in configuration.models for i, table in enumerate(model.tables)]


def _check_files(path: Path, configuration: "Configuration") -> list[_Row]:
    """Every table to be served, or one report of what is wrong with the files."""
    from concurrent.futures import ThreadPoolExecutor

    from hps.models.catalog import ModelCatalog
    from hps.models.sources import ModelSources

    sources = ModelSources(configuration.model_source)
    catalog = ModelCatalog(configuration, sources)
    places = {model.model: f"models[{i}]" for i, model in enumerate(configuration.models)}
    rows, problems = [], []
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:  # so that a dead host costs one timeout, not one a table
        checks = []
        for name in catalog.names:
            try:
                versions = [catalog.version(name, version) for version in catalog.to_serve(name)]
            except (errors.ModelFileError, errors.UnknownVersionError) as error:
                problems.append(f"{places.get(name, name)}: {error}")
                continue
            checks += [
                (j, version.config, table, pool.submit(_check_table, table, source, configuration, sources))
                for version in versions
                for j, (table, source) in enumerate(zip(version.config.tables, version.sources, strict=True))
            ]
        problems += [f"{name}: {error}" for name, error in catalog.problems.items()]
        for j, model, table, check in checks:
            try:
                rows.append(_Row(model, table, j, check.result()))
            except errors.ModelFileError as error:
                problems.append(f"{places.get(model.model, model.model)}.sparse_files[{j}]: {error}")
    if problems:
        raise errors.ConfigError(str(path), problems)
    return rows


def _check_table(table: "TableSpec", source: "TableSource", configuration: "Configuration", sources: "ModelSources") -> int:
    from hps.models.deltas import open_table_files

    files = open_table_files(source, table.dim, int32_keys=not configuration.supportlonglong, sources=sources)
    files.verify()
    return files.rows


def _updates(configuration: "Configuration", tables: "list[TableSpec]") -> str:
    """Where updates come from, and for which tables. Nothing is connected to."""
    from hps.live_updates import LiveUpdates
    from hps.metrics import Metrics

    source = configuration.update_source
    updates = LiveUpdates(configuration, Metrics())
    updates.close()
    followed = dict.fromkeys(f"{table.model_name}.{table.table_name}" for table in tables if updates.follows(table))
    where = {"kafka_message_queue": f" at {source.brokers}", "redis_stream": f" at {source.address}"}.get(source.type, "")
    names = ", ".join(followed) or "no table, since update_filters match none"
    return f"update_source {source.type}{where}, followed by {names}"


def _print_summary(path: Path, configuration: "Configuration", rows: list[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = Table("model", "version", "table", "id", box=None, pad_edge=False)
    for column in ("rows", "dim", "MB", "cached rows"):
        summary.add_column(column, justify="right")
    for model, table, place, count in rows:
        share = model.gpucacheper if model.gpucache else 0.0
        figures = (f"{count:,}", f"{count * table.dim * 4 / 1e6:,.1f}", f"{share * count:,.0f}") if count else ("?",) * 3
        summary.add_row(model.model, model.version, table.table_name, str(place), figures[0], str(table.dim), *figures[1:])
    screen = Console(highlight=False)
    screen.width = max(screen.width, 120)  # a terminal wraps long lines; in a pipe they must not be cut
    screen.print(summary)
    persistent, service = configuration.persistent_db, configuration.service
    where = f" at {persistent.path}" if persistent.type == "rocks_db" else ""
    typer.echo(
        f"device {configuration.device}, volatile_db {configuration.volatile_db.type}, persistent_db {persistent.type}{where}"
    )
    if configuration.update_source.type != "null":
        typer.echo(_updates(configuration, [row.table for row in rows]))
    typer.echo(f"serves on http://{service.host}:{service.port}")
    typer.echo(f"{path}: good")
