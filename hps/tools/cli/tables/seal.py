"""`hps seal`: write row files of a version's tables."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hps.ground.progress import size_text
from hps.tools.cli import console

EXAMPLE = "Example: `hps seal s3://models/shop/12 --row-dtype int8`"


def seal_command(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PLACE...",
            help="Paths or URIs of versions, <model>/<number>, of directories with tables, or of tables.",
            show_default=False,
        ),
    ],
    row_dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"] | None,
        typer.Option(
            help="How rows are stored. A server takes files of its table's `row_dtype` as they are. Default: as the model.json "
            "beside the version says, else float32.",
            show_default=False,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove the sparse files, which older releases need; a delta becomes complete.")
    ] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for sorted runs and for files to upload. Default: beside a local table, else the system's.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG", help="A ps.json with the model_source of PLACE.")] = None,
) -> None:
    """Write the rows of each table as one sorted file, which a server with row files takes without loading it.

    Deltas are merged with the versions that they change. Seal a version before servers see it, as `hps import --seal` does:
    those that serve it already take it anew.
    """
    with console.reported():
        from hps.configuration.load import load_configuration
        from hps.models.sealing import seal_version
        from hps.models.sources import ModelSources

        with console.progress() as progress:
            sources = ModelSources(load_configuration(config).model_source if config is not None else None)
            sealed = []
            for place in places:
                sealed += seal_version(
                    place, row_dtype=row_dtype, replace=replace, scratch=scratch, sources=sources, progress=progress
                )
        for table in sealed:
            size = size_text(table.size_bytes)
            typer.echo(f"{table.place}: {console.rows_text(table.rows)} of {table.dim} {table.row_dtype}, {size}")
