"""`hps create-model`: write a sample model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.ground.progress import size_text
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.ground.progress import Progress

EXAMPLE = "Example: `hps create-model models/sample/item.model --rows 50000 --dim 32 --seed 1`"


def create_model_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write.", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows; the keys are 0 to ROWS - 1.", show_default=False)],
    dim: Annotated[int, typer.Option(min=1, help="Width of a vector: float32 elements.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the vectors.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model.")] = False,
) -> None:
    """Write a sparse model whose vectors can be computed from their keys (hps.tools.cli.tables.sample.sample_vectors).

    The directory appears only when complete. To serve it, add it to sparse_files of a configuration and its --dim to
    embedding_vecsize_per_table.
    """
    with console.reported():
        from hps.models.writer import write_sparse_model
        from hps.tools.cli.tables.sample import sample_chunks

        tag, size_bytes = str(directory), rows * (8 + 4 * dim)
        with console.progress() as progress:
            progress.start(tag, rows, size_bytes)
            write_sparse_model(directory, _counted(sample_chunks(rows, dim, seed), progress, tag), overwrite=overwrite)
            progress.finish(tag)
        written = f"{console.rows_text(rows)} of {dim} float32, {size_text(size_bytes)}"
        typer.echo(f"{directory}: {written}, keys 0 to {rows - 1}")


def _counted(chunks: Iterator[Any], progress: "Progress", tag: str) -> Iterator[Any]:
    for chunk in chunks:
        yield chunk
        progress.advance(tag, chunk[0].size)
