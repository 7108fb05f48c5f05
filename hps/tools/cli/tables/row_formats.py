"""`hps row-formats`: the loss of storing the tables of a configuration in fewer bits."""

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.ground.progress import Progress
    from hps.models.deltas import DeltaModel
    from hps.models.files import SparseModel
    from hps.models.sealed import SealedModel
    from hps.tools.planning.row_costs import RowCost

EXAMPLE = "Example: `hps import dlrm.pt models/dlrm --tables 'emb_*' && hps row-formats models/dlrm/ps.json --row-dtype int8`"


def row_formats_command(
    config: console.ConfigPath,
    row_dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT", help="float16, bfloat16 or int8; may be repeated. Default: all of them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the loss of each table of CONFIG with another row_dtype, and which tables suffer, and why.

    Reads all model files of the versions to serve, for a delta also its base; loads nothing. The exit code is 1 if a format
    cannot hold a row.
    """
    with console.reported():
        from hps.configuration.load import load_configuration
        from hps.tools.planning.memory import served_versions
        from hps.tools.planning.row_costs import FEWER_BITS, row_costs

        chosen = tuple(dict.fromkeys(row_dtype or FEWER_BITS))
        if unknown := [name for name in chosen if name not in FEWER_BITS]:
            raise errors.InvalidInputError(
                f"measuring row formats: got {unknown[0]!r}, expected one of: {', '.join(FEWER_BITS)}"
            )
        costs: list[RowCost] = []
        with console.progress() as progress:
            for version in served_versions(load_configuration(config)):
                for table, files in zip(version.config.tables, version.files, strict=True):
                    with closing(_chunks(files, progress, table.tag)) as chunks:
                        costs += row_costs(f"{version.config.model}/{table.table_name}", files.rows, files.dim, chunks, chosen)
        if as_json:
            typer.echo(json.dumps([asdict(cost) for cost in costs], indent=1))
        else:
            _print(costs)
        if any(cost.refused_rows for cost in costs):
            raise typer.Exit(1)


def _chunks(files: "SparseModel | SealedModel | DeltaModel", progress: "Progress", tag: str) -> Generator[Any, None, None]:
    """Read all rows of a table's files."""
    from hps.models.deltas import DeltaModel
    from hps.models.loading.read_ahead import read_rows

    progress.start(tag, files.rows, files.size_bytes)
    parts = [files.base, *(delta.changed for delta in files.deltas)] if isinstance(files, DeltaModel) else [files]
    for part in parts:
        for keys, vectors in read_rows(part) if part.rows else ():
            yield keys, vectors
            progress.advance(tag, keys.size)
    progress.finish(tag)


def _print(costs: "list[RowCost]") -> None:
    figures = ("rows", "row bytes", "error max", "RMS", "of spread", "cosine", "least", "refused")
    table = console.table(("table", "row_dtype"), figures)
    for cost in costs:
        table.add_row(
            *(cost.table, cost.row_dtype, f"{cost.rows:,}", f"{cost.row_bytes} of {4 * cost.dim}"),
            *(f"{cost.error_max:.2g}", f"{cost.error_rms:.2g}", f"{cost.rms_share:.2%}"),
            *(f"{cost.cosine_mean:.6f}", f"{cost.cosine_least:.6f}", f"{cost.refused_rows:,}"),
        )
    console.screen().print(table)
    for cost in costs:
        for finding in cost.findings:
            typer.echo(f"{cost.table} as {cost.row_dtype}: {finding}")
    if not any(cost.findings for cost in costs):
        typer.echo("no table suffers")
