"""`hps check-config`: report all problems of a configuration and its files, or print its tables."""

import json
import logging
import math
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.configuration.load import Configuration, ModelConfig, ServiceConfig
    from hps.configuration.usable_part import UsablePart
    from hps.models.deltas import TableSource
    from hps.models.sources import ModelSources
    from hps.types import CheckResult, TableSpec

EXAMPLE = "Example: `hps check-config configs/minimal.json --connect`"
_CHECKED_AT_ONCE = 16  # tables; checking one takes a few requests to its file system
_UNBOUNDED = 2**64 - 1


def check_config_command(
    config: console.ConfigPath,
    files: Annotated[bool, typer.Option(help="Check the sizes of the model files, too.")] = True,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect",
            help="Also check that databases, the log of updates, object stores, devices and the port can be used. Nothing is "
            "written.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="With --connect: timeout of each check."),
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Check CONFIG and its model files, and print the tables that it serves. All problems are reported at once.

    Exit codes: 0 good, 2 something is wrong, 1 something is unreachable or in use.
    """
    with console.reported():
        report = _checked(config, files=files, reach_s=timeout if connect else 0.0)
        code = 2 if report.of("wrong") else 1 if report.of("unreachable") else 0
        if as_json:
            typer.echo(json.dumps(_as_json(config, report, code), indent=2))
            raise typer.Exit(code)
        for finding in report.findings:
            if finding.level in ("note", "warning"):
                typer.echo(f"{finding.level}: {finding.text}")
        severe = [finding for finding in report.findings if finding.level in ("wrong", "unreachable")]
        problems = [f"{finding.where}: {finding.text}" for finding in severe]
        if report.configuration and not problems:
            _print_summary(report.configuration, report)
        for result in report.connections:
            typer.echo(f"{result.level}: {result.where}: {result.text}")
        if problems:
            typer.echo(f"error: {errors.ConfigError(str(config), problems)}", err=True)
        if code:
            raise typer.Exit(code)
        typer.echo(f"{config}: good")


class _Row(NamedTuple):
    model: "ModelConfig"  # of the version
    table: "TableSpec"
    place: int
    rows: int | None
    size_bytes: int = 0


@dataclass
class _Report:
    configuration: "Configuration | None"  # None if keys or values are wrong
    rows: list[_Row] = field(default_factory=list)
    findings: list["CheckResult"] = field(default_factory=list)  # of the document and the files
    connections: list["CheckResult"] = field(default_factory=list)  # of --connect
    updates: str = ""  # describes the log of updates; empty without one

    def of(self, level: str) -> list["CheckResult"]:
        return [finding for finding in (*self.findings, *self.connections) if finding.level == level]


def _checked(path: Path, *, files: bool, reach_s: float) -> _Report:
    from hps.configuration.load import read_configuration
    from hps.configuration.usable_part import UsablePart, usable_part
    from hps.models.sources import ModelSources
    from hps.tools.cli.state_directories import completed
    from hps.types import CheckResult

    report = _Report(None)
    source = completed(path)
    part: UsablePart | None
    try:
        report.configuration = read_configuration(source)
        places = {model.model: f"models[{i}]" for i, model in enumerate(report.configuration.models)}
        part = UsablePart(report.configuration, places, frozenset())
        levels = (("warning" if level >= logging.WARNING else "note", text) for level, text in report.configuration.unlogged)
        report.findings += [CheckResult(level, "", text) for level, text in levels]  # type: ignore[arg-type]
        report.findings += [
            CheckResult("warning", where, f"{path}: {where}: {text}")
            for where, text in _doubtful_settings(report.configuration).items()
        ]
        report.findings += _identity_problems(report.configuration.service)
    except errors.ConfigError as error:
        split = (problem.partition(": ") for problem in error.problems)
        report.findings += [CheckResult("wrong", where, text) for where, _, text in split]
        part = None
        with suppress(errors.ConfigError):  # not a document, which is already reported
            part = usable_part(source)
    if part is None:
        return report
    sources = ModelSources(part.configuration.model_source)
    if files:
        _check_files(part, sources, report)
    elif report.configuration:
        report.rows = [
            _Row(entry, table, i, None) for entry in report.configuration.models for i, table in enumerate(entry.tables)
        ]
    if report.configuration and report.configuration.update_source.type != "null":
        try:
            report.updates = _updates(report.configuration, [row.table for row in report.rows])
        except errors.ConfigError as error:
            report.findings += [CheckResult("wrong", error.source, problem) for problem in error.problems]
        except errors.MissingDependencyError as error:
            report.findings.append(CheckResult("wrong", "update_source.type", str(error)))
    if reach_s:
        from hps.versions.preflight import preflight

        tables = {row.table: (row.rows or 0, row.size_bytes) for row in report.rows}
        report.connections = preflight(part.configuration, tables, sources, reach_s)
    return report


def _identity_problems(service: "ServiceConfig") -> list["CheckResult"]:
    """Check the configured files of tokens, certificate and client authorities."""
    from hps.configuration.tokens import load_tokens
    from hps.serve.frontend.tls import context_of
    from hps.types import CheckResult

    findings = []
    if service.tokens_path:
        try:
            load_tokens(service.tokens_path)
        except errors.ConfigError as error:
            findings += [
                CheckResult("wrong", "service.tokens_path", f"{error.source}: {problem}") for problem in error.problems
            ]
    if service.tls_certificate_path:
        try:
            context_of(service)
        except errors.ConfigError as error:
            split = (problem.partition(": ") for problem in error.problems)
            findings += [CheckResult("wrong", f"service.{where}", text) for where, _, text in split]
    return findings


def _check_files(part: "UsablePart", sources: "ModelSources", report: _Report) -> None:
    """Add every table of the configuration, and the problems of its files."""
    from concurrent.futures import ThreadPoolExecutor

    from hps.types import CheckResult
    from hps.versions.building import check_transform
    from hps.versions.catalog import ModelCatalog, absent_models
    from hps.versions.deployment import check_written_at

    configuration, places = part.configuration, part.places
    catalog, unlisted = ModelCatalog(configuration, sources), False
    file_errors = errors.ModelFileError, errors.UnknownVersionError, errors.MissingDependencyError
    try:
        catalog.scan()
    except file_errors as error:
        unlisted = True
        report.findings.append(_file_problem("model_repository", error))
        catalog = ModelCatalog(configuration.model_copy(update={"model_repository": ""}), sources)
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:  # so that an unreachable host costs one timeout, not one per table
        checks, networks = [], []
        for name in catalog.names:
            try:
                versions = [catalog.version(name, version) for version in catalog.to_serve(name)]
                for version in versions:
                    check_written_at(version.config, version.written_at_us)
                    check_transform(version.config, sources)
            except file_errors as error:
                report.findings.append(_file_problem(places.get(name, name), error))
                continue
            except errors.ConfigError as error:
                report.findings.append(CheckResult("wrong", f"{places.get(name, name)}.transform", "; ".join(error.problems)))
                continue
            wrong_width = name in part.widthless
            checks += [
                (j, version.config, table, pool.submit(_check_table, table, source, configuration, sources, wrong_width))
                for version in versions
                for j, (table, source) in enumerate(zip(version.config.tables, version.sources, strict=True))
            ]
            with_network = [version.network for version in versions if version.network is not None]
            networks += [(places.get(name, name), pool.submit(network.size_bytes, sources)) for network in with_network]
        report.findings += [_file_problem(name, error) for name, error in catalog.problems.items()]
        if report.configuration and not unlisted and (missing := absent_models(configuration.service, catalog)):
            report.findings.append(CheckResult("wrong", "model_repository", missing))
        for where, sized in networks:
            try:
                sized.result()
            except file_errors as error:
                report.findings.append(_file_problem(f"{where}.dense", error))
        for j, model, table, check in checks:
            try:
                dim, rows = check.result()
                report.rows.append(_Row(model, replace(table, dim=dim), j, rows, rows * (8 + 4 * dim)))
            except file_errors as error:
                where = f"{places.get(model.model, model.model)}.sparse_files[{j}]"
                report.findings.append(_file_problem(where, error))
        for name in (name for name in places if name in part.widthless):
            where = f"{places[name]}.embedding_vecsize_per_table"
            fitting = [row.table.dim for row in report.rows if row.model.model == name]
            report.findings = [
                replace(finding, text=f"{finding.text}; the files fit {fitting}") if finding.where == where else finding
                for finding in report.findings
            ]


def _file_problem(where: str, error: errors.HPSError) -> "CheckResult":
    from hps.types import CheckResult

    return CheckResult("unreachable" if isinstance(error, errors.ModelSourceError) else "wrong", where, str(error))


def _check_table(
    table: "TableSpec",
    source: "TableSource",
    configuration: "Configuration",
    sources: "ModelSources",
    wrong_width: bool,
) -> tuple[int, int]:
    """Return width and rows of a table's files."""
    from hps.models.deltas import DeltaModel, open_table_files
    from hps.models.sealed import stored_shape_of

    if wrong_width:
        return stored_shape_of(source.place, sources)
    int32_keys = not configuration.supportlonglong
    files = open_table_files(source, table.dim, int32_keys=int32_keys, sources=sources, share=table.share)
    files.verify()
    if not isinstance(files, DeltaModel):
        files.check_format()
    return table.dim, files.own_rows


def _doubtful_settings(configuration: "Configuration") -> dict[str, str]:
    """Warn of settings that are valid but probably unintended."""
    warnings: dict[str, str] = {}
    volatile, persistent = configuration.volatile_db, configuration.persistent_db
    for i, model in enumerate(configuration.models):
        if model.gpucache and model.gpucacheper == 0 and model.embedding_cache_type == "dynamic":
            warnings[f"models[{i}].gpucacheper"] = "0, so nothing is cached; set a share, or set gpucache to false"
        if model.gpucache and model.hit_rate_threshold <= 0:
            text = "0 or less, so keys that are not cached yet get the default vector; above 1, no key of a table does"
            warnings[f"models[{i}].hit_rate_threshold"] = text
        elif model.gpucache and model.hit_rate_threshold <= 1:
            max_keys = max(table.max_keys for table in model.tables)
            defaults = math.floor((1 - model.hit_rate_threshold) * max_keys + 1e-9)
            warnings[f"models[{i}].hit_rate_threshold"] = (
                f"{model.hit_rate_threshold:g}, so up to {defaults:,} of {max_keys:,} keys of a table in a lookup get the "
                "default vector although they exist, and are fetched later; set it above 1, or omit it, for complete answers"
            )
    if persistent.type == "disabled" and volatile.type != "disabled":
        consequence = "without a persistent_db, rows that are"
        if volatile.overflow_margin < _UNBOUNDED:
            warnings["volatile_db.overflow_margin"] = (
                f"{consequence} evicted get the default vector; configure one, or drop this"
            )
        if volatile.initial_cache_rate < 1:
            warnings["volatile_db.initial_cache_rate"] = (
                f"{consequence} not loaded get the default vector; configure one, or set this to 1"
            )
    if volatile.type == "redis_cluster" and "num_partitions" not in volatile.model_fields_set:
        text = f"{volatile.num_partitions} on this machine; set it explicitly, since all processes must use the same number"
        warnings["volatile_db.num_partitions"] = text
    if persistent.type in ("rocks_db", "row_files") and "path" not in persistent.model_fields_set:
        warnings["persistent_db.path"] = (
            f"{persistent.path}, in {tempfile.gettempdir()}, which systems clean up; set a permanent path"
        )
    return warnings


def _updates(configuration: "Configuration", tables: "list[TableSpec]") -> str:
    """Describe the log of updates and the tables that follow it, without connecting."""
    from hps.statistics.metrics import Metrics
    from hps.versions.live_updates import LiveUpdates

    source = configuration.update_source
    updates = LiveUpdates(configuration, Metrics())
    updates.close()
    followed = dict.fromkeys(f"{table.model_name}.{table.table_name}" for table in tables if updates.follows(table))
    where = {"kafka_message_queue": f" at {source.brokers}", "redis_stream": f" at {source.address}"}.get(source.type, "")
    names = ", ".join(followed) or "no table, since update_filters match none"
    return f"update_source {source.type}{where}, followed by {names}"


def _print_summary(configuration: "Configuration", report: _Report) -> None:
    rows = []
    for model, table, place, count, size_bytes in report.rows:
        vectors = size_bytes - 8 * (count or 0)
        figures = (f"{count:,}", f"{vectors / 1e6:,.1f}", f"{_cached_rows(model, count):,}") if count else ("?",) * 3
        dim = str(table.dim) if table.row_dtype == "float32" else f"{table.dim} ({table.row_dtype})"
        rows.append((model.model, model.version, table.table_name, str(place), figures[0], dim, *figures[1:]))
    names = ("model", "version", "table", "id")
    console.screen(120).print(console.table(names, ("rows", "dim", "MB", "cached rows"), rows))
    persistent, service = configuration.persistent_db, configuration.service
    where = f" at {persistent.path}" if persistent.type in ("rocks_db", "row_files") else ""
    typer.echo(
        f"device {configuration.device}, volatile_db {configuration.volatile_db.type}, persistent_db {persistent.type}{where}"
    )
    if report.updates:
        typer.echo(report.updates)
    typer.echo(f"serves on {service.scheme}://{service.host}:{service.port}")


def _cached_rows(model: "ModelConfig", rows: int) -> int:
    """Return the number of rows of a table in a full cache."""
    from hps.cache.base import resident_rows
    from hps.versions.cache_sizes import is_static

    if not model.gpucache or is_static(model):
        return rows if model.gpucache else 0
    return resident_rows(rows, math.ceil(model.gpucacheper * rows))


def _as_json(path: Path, report: _Report, code: int) -> dict[str, Any]:
    tables = [
        {
            "model": row.model.model,
            "version": row.model.version,
            "table": row.table.table_name,
            "id": row.place,
            "rows": row.rows,
            "dim": row.table.dim,
            "row_dtype": row.table.row_dtype,
            "size_bytes": row.size_bytes,
        }
        for row in report.rows
        if report.configuration
    ]
    findings = [asdict(finding) for finding in (*report.findings, *report.connections)]
    return {"config": str(path), "good": code == 0, "exit_code": code, "findings": findings, "tables": tables}
