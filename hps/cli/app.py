"""The command line: `hps serve | load | lookup | check-config | create-model | import`.

Exit codes: 0 done, 2 the configuration, model files or arguments are wrong, 1 something failed while running (a database, a
device), 130 stopped by Ctrl-C. Errors are one message on standard error. Imports of the work itself wait until a command
runs, so that `hps --help` is quick.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import __version__, errors
from hps.cli import console as terminal
from hps.cli import import_tables as cli_import

if TYPE_CHECKING:
    from hps.configuration.load import Configuration, ModelConfig
    from hps.databases.base import Database
    from hps.models.sources import ModelSources
    from hps.progress import Progress
    from hps.types import TableSpec

_SHARED_VOLATILE = ("redis_cluster",)  # outlive the process, so that loading them beforehand makes sense
_CHECKED_AT_ONCE = 16  # tables; each is a few questions to where its files are
_NO_TABLES = ("static", "stochastic")  # kinds of embedding cache that use no database

app = typer.Typer(
    name="hps",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Force = Annotated[
    bool, typer.Option("--force", help="Load all files again, whatever the databases hold; their online updates are lost.")
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A ps.json, as HugeCTR takes it.", show_default=False)]


def main() -> None:
    """Run the command that the arguments name, then leave the process with its exit code."""
    app(prog_name="hps")


@app.callback(
    epilog="First steps: `hps create-model models/sample/item.model --rows 50000 --dim 32`, name it in a ps.json, "
    "`hps check-config ps.json`, `hps serve ps.json`.",
    invoke_without_command=True,
)
def _hps(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serve embedding vectors of recommender models from GPU memory, RAM, Redis and RocksDB.

    Every command but create-model takes CONFIG: a ps.json, as HugeCTR's parameter server does.
    """
    if version:
        typer.echo(f"hps {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(epilog="Example: `hps serve configs/minimal.json --port 8000`")
def serve(
    config: ConfigPath,
    host: Annotated[str | None, typer.Option(help="Listen here instead of where the configuration says.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="As --host; 0 takes any free port.")] = None,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "info",
    force: Force = False,
) -> None:
    """Load the models of CONFIG and answer lookups over HTTP until Ctrl-C.

    Tables that RocksDB holds already are not loaded again. Each model answers as soon as it is loaded; one that cannot be
    loaded does not keep the others from it. /v2/health/ready answers 200 once every model can be looked up; until then it says
    how far that is.
    """
    with terminal.reported():
        if log_level.upper() not in ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"):
            raise errors.InvalidInputError(f"--log-level: got {log_level!r}, wanted critical, error, warning, info or debug")
        configuration = _configuration(config)
        from hps.service.server import serve as serve_http

        with terminal.serving(log_level) as progress:
            closed = serve_http(configuration, host, port, log_level.lower(), progress, force=force)
        if not closed:
            terminal.leave(1)


@app.command(epilog="Example: `hps load configs/minimal.json && hps serve configs/minimal.json`")
def load(config: ConfigPath, force: Force = False) -> None:
    """Fill the persistent database of CONFIG from the model files, then exit.

    What it holds already is skipped, a load that was interrupted goes on where it stopped, and another version of a model
    is replaced. Servers that start afterwards have nothing to load into it. A model that cannot be loaded does not keep the
    others from it.
    """
    with terminal.reported():
        configuration = _configuration(config)
        databases = _open_lasting_databases(config, configuration)
        from hps.models.sources import ModelSources

        lines, failures, sources = [], [], ModelSources(configuration.model_source)
        with ExitStack() as stack:
            for database in databases:
                stack.enter_context(closing(database))
            progress = stack.enter_context(terminal.progress())
            for model in configuration.models:
                try:
                    lines += _load_model(configuration, model, databases, sources, progress, force)
                except errors.ModelFileError as error:
                    failures.append((model.model, error))
        for line in lines:  # below the bars
            typer.echo(line)
        if failures:
            told = "".join(f"\n  {name}: {error}" for name, error in failures)
            raise type(failures[0][1])(f"{len(failures)} of {len(configuration.models)} models are not loaded:{told}")


@app.command(
    context_settings={"ignore_unknown_options": True},  # so that -5 is a key
    epilog="Example: `hps lookup configs/minimal.json sample item 17 42 -5`",
)
def lookup(
    config: ConfigPath,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model in CONFIG.", show_default=False)],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name or number of a table.", show_default=False)],
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Keys, also negative ones.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the vectors of KEYs, and which of them got the default vector because no database has them.

    Answers from the persistent database, which is loaded first if need be, or without one from the model files. One process at
    a time has RocksDB open: while a server runs, ask the server.
    """
    with terminal.reported():
        wanted = [_key(key) for key in keys]
        configuration = _for_lookup(_configuration(config), model)
        import numpy as np

        from hps.parameter_server import HPS

        names = configuration.models[0].embedding_table_names
        name = names[int(table)] if table not in names and table.isdecimal() and int(table) < len(names) else table
        try:
            with terminal.progress() as progress, HPS(configuration, progress=progress) as server:
                vectors, found = server.lookup(np.array(wanted, np.int64), model, name, return_found=True)
        except errors.DatabaseLockedError as error:
            body = shlex.quote(json.dumps({"tables": {name: wanted}}))
            url = f"http://{configuration.service.host}:{configuration.service.port}/v1/models/{model}/lookup"
            raise errors.DatabaseLockedError(f"{error}\nIf it is a server, ask that: curl -s {url} -d {body}") from error
        terminal.print_vectors(model, name, wanted, vectors, found.tolist(), as_json)


@app.command("check-config", epilog="Example: `hps check-config configs/minimal.json`")
def check_config(
    config: ConfigPath,
    files: Annotated[bool, typer.Option(help="Check the sizes of the model files, too.")] = True,
) -> None:
    """Check CONFIG and the model files it names, and print what would be served; all problems are reported at once."""
    with terminal.reported():
        configuration = _configuration(config)
        rows = _check_files(config, configuration) if files else {}
        terminal.print_summary(config, configuration, rows)


@app.command("create-model", epilog="Example: `hps create-model models/sample/item.model --rows 50000 --dim 32 --seed 1`")
def create_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write.", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, help="How many: the keys are 0 to ROWS - 1.", show_default=False)],
    dim: Annotated[int, typer.Option(min=1, help="float32 elements of a vector.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed, other vectors.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace a model that is there.")] = False,
) -> None:
    """Write a sparse model whose vectors can be computed from their keys (hps.models.sample.sample_vectors).

    The directory appears whole or not at all. Name it in sparse_files of a configuration, with its --dim in
    embedding_vecsize_per_table.
    """
    with terminal.reported():
        from hps.models.sample import sample_chunks
        from hps.models.writer import write_sparse_model

        tag, size_bytes = str(directory), rows * (8 + 4 * dim)
        with terminal.progress() as progress:
            progress.start(tag, rows, size_bytes)
            write_sparse_model(directory, _counted(sample_chunks(rows, dim, seed), progress, tag), overwrite=overwrite)
            progress.finish(tag)
        typer.echo(f"{directory}: {rows:,} rows of {dim} float32, {size_bytes / 1e6:,.1f} MB, keys 0 to {rows - 1}")


app.command("import", epilog=cli_import.EXAMPLE)(cli_import.import_command)


def _configuration(path: Path) -> "Configuration":
    from hps.configuration.load import load_configuration

    return load_configuration(path)


def _open_lasting_databases(path: Path, configuration: "Configuration") -> "list[Database]":
    """The databases that outlive this process."""
    from hps.registry import implementation

    persistent = configuration.persistent_db
    if persistent.type != "disabled" and persistent.read_only:
        raise errors.ConfigError(str(path), ["persistent_db.read_only: got true, wanted false: hps load writes to it"])
    settings: list[Any] = [persistent] if persistent.type != "disabled" else []
    if configuration.volatile_db.type in _SHARED_VOLATILE:
        settings.insert(0, configuration.volatile_db)
    if not settings:
        raise errors.ConfigError(
            str(path),
            [
                'persistent_db: got none, wanted {"type": "rocks_db", "path": ...}: hps load fills what outlives it; '
                "hps serve fills an in-process volatile_db by itself"
            ],
        )
    return [implementation("database", one.type).from_config(one) for one in settings]


def _load_model(
    configuration: "Configuration",
    model: "ModelConfig",
    databases: "list[Database]",
    sources: "ModelSources",
    progress: "Progress",
    force: bool,
) -> list[str]:
    """Load the tables of one model; returns what to say of it."""
    from hps.models.table_load import LoadTargets, TableLoad

    if model.embedding_cache_type in _NO_TABLES:
        return [f"{model.model}: embedding_cache_type {model.embedding_cache_type} uses no database"]
    targets = LoadTargets(
        load=tuple(databases),
        initial_cache_rate=configuration.volatile_db.initial_cache_rate,
        int32_keys=not configuration.supportlonglong,
        sources=sources,
        force=force,
    )
    lines = []
    for table, source in zip(model.tables, model.sparse_files, strict=True):
        lines += terminal.loaded_lines(TableLoad(table, source, targets, progress).run())
    return lines


def _key(text: str) -> int:
    try:
        key = int(text)
    except ValueError:
        key = 2**63
    if not -(2**63) <= key < 2**63:
        raise errors.InvalidInputError(f"looking up keys: got {text!r}, wanted 64-bit integers")
    return key


def _for_lookup(configuration: "Configuration", model: str) -> "Configuration":
    """The same tables without what only a server is quicker with: one model, no cache, the persistent database alone."""
    models = [
        one.model_copy(update={"gpucache": False, "deployed_device_list": (0,)})
        for one in configuration.models
        if one.model == model
    ]
    if not models:
        known = ", ".join(one.model for one in configuration.models)
        raise errors.UnknownModelError(f"looking up model {model!r}: it is not in the configuration, which has: {known}")
    changes: dict[str, Any] = {"models": tuple(models), "device": "cpu"}
    if configuration.persistent_db.type != "disabled":
        changes["volatile_db"] = configuration.volatile_db.model_copy(update={"type": "disabled"})
    return configuration.model_copy(update=changes)


def _check_files(path: Path, configuration: "Configuration") -> dict[tuple[str, str], int]:
    """Rows of every table by (model, table), or one report of what is wrong with the files."""
    from concurrent.futures import ThreadPoolExecutor

    from hps.models.sources import ModelSources

    rows, problems, sources = {}, [], ModelSources(configuration.model_source)
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:  # so that a dead host is waited for once, not once a table
        places = [
            (i, j, model.model, table, pool.submit(_check_table, table, source, configuration, sources))
            for i, model in enumerate(configuration.models)
            for j, (table, source) in enumerate(zip(model.tables, model.sparse_files, strict=True))
        ]
        for i, j, name, table, checking in places:
            try:
                rows[name, table.table_name] = checking.result()
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


def _counted(chunks: Iterator[Any], progress: "Progress", tag: str) -> Iterator[Any]:
    for chunk in chunks:
        yield chunk
        progress.advance(tag, chunk[0].size)
