"""`hps load`: load model files into databases that outlive the process."""

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hps.configuration.load import Configuration
    from hps.ground.progress import Progress
    from hps.models.loading.table_load import DatabaseLoad, LoadReport, LoadTargets
    from hps.stores.base import Database
    from hps.versions.catalog import ModelCatalog, ModelVersion

EXAMPLE = "Example: `hps load configs/minimal.json && hps serve configs/minimal.json`"


def load_command(config: console.ConfigPath, force: console.Force = False) -> None:
    """Load the model files of CONFIG into its persistent database, then exit.

    Tables that are already loaded are skipped, an interrupted load is continued, and another version of a model is replaced.
    Servers that start afterwards need not load it again. A model that cannot be loaded does not stop the others.
    """
    with console.reported():
        lines: list[str] = []
        failures: list[tuple[str, errors.ModelFileError]] = []
        with ExitStack() as stack:
            progress = stack.enter_context(console.progress())
            from hps.configuration.load import load_configuration
            from hps.models.loading.table_load import LoadTargets
            from hps.models.sources import ModelSources
            from hps.versions.catalog import ModelCatalog

            configuration = load_configuration(config)
            databases = _open_databases(config, configuration, stack)
            sources = ModelSources(configuration.model_source)
            targets = LoadTargets(
                load=tuple(databases),
                initial_cache_rate=configuration.volatile_db.initial_cache_rate,
                int32_keys=not configuration.supportlonglong,
                sources=sources,
                force=force,
            )
            catalog = ModelCatalog(configuration, sources)
            for name in catalog.names:
                try:
                    for version in catalog.to_serve(name):
                        lines += _load_version(catalog, catalog.version(name, version), targets, progress)
                except errors.ModelFileError as error:
                    failures.append((name, error))
        for line in lines:  # below the bars
            typer.echo(line)
        if failures:
            reasons = "".join(f"\n  {name}: {error}" for name, error in failures)
            raise type(failures[0][1])(f"models not loaded: {len(failures)} of {len(catalog.names)}{reasons}")


def _open_databases(path: Path, configuration: "Configuration", stack: ExitStack) -> "list[Database]":
    """Open the databases that outlive the process; `stack` closes them."""
    from hps.ground.registry import implementation
    from hps.stores.base import LastingDatabase
    from hps.versions.tiers import open_database

    persistent = configuration.persistent_db
    if persistent.type != "disabled" and persistent.read_only:
        raise errors.ConfigError(str(path), ["persistent_db.read_only: got true, expected false: hps load writes to it"])
    sections = [
        section
        for section in (configuration.volatile_db, persistent)
        if section.type != "disabled" and issubclass(implementation("database", section.type), LastingDatabase)
    ]
    if not sections:
        raise errors.ConfigError(
            str(path),
            [
                'persistent_db: got none, expected {"type": "row_files", "path": ...}: hps load fills databases that outlive '
                "it; hps serve fills an in-process volatile_db by itself"
            ],
        )
    return [stack.enter_context(closing(open_database(section))) for section in sections]


def _load_version(catalog: "ModelCatalog", version: "ModelVersion", targets: "LoadTargets", progress: "Progress") -> list[str]:
    """Load the tables of a version; return the lines to print.

    No server has the persistent database open meanwhile.
    """
    from hps.models.loading.table_load import TableLoad
    from hps.versions.retention import refuse_format_change

    model = version.config
    if model.embedding_cache_type == "stochastic":
        return [f"{model.model}: embedding_cache_type stochastic uses no database"]
    lines, targets = [], replace(targets, max_nonfinite_rows=model.max_nonfinite_rows)
    for database in targets.load if targets.force else ():
        _empty_shared(database, [database.stored(table).tag for table in model.tables])
    if not targets.force:
        refuse_format_change(model, model.tables, catalog.fingerprints(version), targets.load)
    for table, source in zip(model.tables, version.sources, strict=True):
        report = TableLoad(table, source, targets, progress).run()
        lines += [_line(report, load) for load in report.loads]
    return lines


def _empty_shared(database: "Database", tags: "Sequence[str]") -> None:
    from hps.stores.base import SharedDatabase

    if not isinstance(database, SharedDatabase):
        return
    for tag in tags:
        if not database.empty_table(tag):
            raise errors.ConflictError(
                f"loading table {tag} again: other processes use its rows in {database.kind}; run `hps deploy MODEL --force` "
                "on each, which loads beside them, or stop them first"
            )


def _line(report: "LoadReport", load: "DatabaseLoad") -> str:
    if load.rows == 0:
        return f"{report.tag}: {load.kind}: complete, nothing to do ({console.rows_text(report.model.rows)})"
    rate = load.rows / max(report.seconds, 1e-9)
    return f"{report.tag}: {load.kind}: loaded {console.rows_text(load.rows)} in {report.seconds:.1f} s ({rate:,.0f} rows/s)"
