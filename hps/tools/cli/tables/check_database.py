"""`hps check-database`: report the damage of a persistent database, its readable rows, and how to save them."""

from pathlib import Path
from typing import Annotated

import typer

from hps import errors
from hps.tools.cli import console

EXAMPLE = "Example: `hps check-database /var/lib/hps/rows`"


def check_database_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The `path` of a `persistent_db`.", show_default=False)],
) -> None:
    """Read the whole database in PATH without changing it. No process may write to it meanwhile.

    Exit codes: 0 all rows can be read, 1 something is damaged, 2 the database cannot be inspected.
    """
    with console.reported():
        from hps.ground.registry import implementation
        from hps.types import row_dtype_of, stored_text

        try:
            kind = "row_files" if (path / "tables").is_dir() else "rocks_db"
            report = implementation("database", kind).inspect(path)
        except errors.DatabaseError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
    for table in report.tables:
        width = f" of {table.dim} floats" if row_dtype_of(table.tag) == "float32" else f" ({stored_text(table.tag, table.dim)})"
        width = width if table.dim else ""
        suffix = ", then it is damaged" if table.damage else ""
        typer.echo(f"{table.tag}: {console.rows_text(table.rows)}{width} can be read{suffix}")
    if not report.damages:
        typer.echo(f"{path}: good")
        return
    for damage in report.damages:
        typer.echo(f"damaged: {damage}")
    typer.echo("To save these rows, copy the directory. Then restore a backup, or keep these rows and give up the rest:")
    for cure in report.cures:
        typer.echo(f"  {cure}")
    raise typer.Exit(1)
