"""`hps publish`: publish rows of model files or other formats to the log of online updates."""

import json
import posixpath
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.models.deltas import TableSource
    from hps.models.differences import Difference
    from hps.models.sources import ModelSources
    from hps.types import KeyArray
    from hps.versions.catalog import ModelCatalog

EXAMPLE = "Example: `hps publish ps.json shop item new/item.model --since old/item.model --rate 100000`"


def publish_command(
    config: console.ConfigPath,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of CONFIG.", show_default=False)],
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="One table; else all of them.", show_default=False)
    ] = None,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="With TABLE: sparse model files or a checkpoint, as `hps import`. Default: the files of the version of MODEL.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="OLDDIR",
            help="Publish only differences from these sparse model files, deletions included. Without TABLE: a directory with "
            "each table's files under the names in `sparse_files`.",
        ),
    ] = None,
    delete: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="With TABLE: keys to delete, 5,7,9 or a .npy file; without SOURCE, only delete."),
    ] = None,
    version: Annotated[str | None, typer.Option(help="Version of MODEL. Default: the last that CONFIG serves.")] = None,
    rate: Annotated[float, typer.Option(metavar="ROWS", min=0, help="Maximum rows per second; 0 for no limit.")] = 0.0,
    create_partitions: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Create missing topics with N partitions.")
    ] = 0,
    message_bytes: Annotated[int, typer.Option(min=64, help="Maximum message size in bytes.")] = 256 << 10,
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="Dtype of vectors in messages.")] = "float32",
    keys: Annotated[str | None, typer.Option(help="As in `hps import`, like the following options.")] = None,
    vectors: Annotated[str | None, typer.Option()] = None,
    first_key: Annotated[int | None, typer.Option()] = None,
    file_format: Annotated[str | None, typer.Option("--format")] = None,
) -> None:
    """Publish rows to CONFIG's update_source, for every server that reads it.

    Prints the position of the last message in each partition for each table. Model files with all published rows belong to
    these positions.
    """
    with console.reported(), ExitStack() as stack:
        if table is None and (source or delete):
            raise errors.InvalidInputError("publishing: SOURCE and --delete need TABLE")
        lines: list[str] = []
        stack.callback(lambda: [*map(typer.echo, lines)])  # below the bars, also for tables before an error
        progress = stack.enter_context(console.progress())
        from hps.configuration.load import load_configuration
        from hps.models.sources import ModelSources
        from hps.updates.base import TOPIC_PREFIX
        from hps.updates.publisher import Publisher, open_writer
        from hps.versions.catalog import ModelCatalog

        configuration = load_configuration(config)
        sources = ModelSources(configuration.model_source)
        tables = _tables(ModelCatalog(configuration, sources), model, table, version, since)
        deleted = _deleted_keys(delete) if delete else None
        names = {"keys": keys, "vectors": vectors, "first_key": first_key, "file_format": file_format}
        writer = stack.enter_context(closing(open_writer(configuration.update_source)))
        for name, dim, files, old in tables:
            rows, chunks = _chunks(source or files(), dim, old, sources, names) if source or not delete else (0, ())
            topic = f"{TOPIC_PREFIX}{model}.{name}"
            total = rows + (0 if deleted is None else deleted.size)
            progress.start(topic, total, total * (8 + 4 * dim))
            publisher = Publisher(
                writer,
                topic,
                dim=dim,
                dtype=dtype,
                message_bytes=message_bytes,
                rows_per_s=rate,
                create_partitions=create_partitions,
                progress=progress,
            )
            for chunk in chunks:
                publisher.insert(chunk.keys, chunk.vectors)
                publisher.delete(chunk.deleted)
                progress.advance(topic, chunk.rows - chunk.keys.size)  # the unchanged rows
            if deleted is not None:
                publisher.delete(deleted)
            positions = publisher.flush()
            progress.finish(topic)
            lines.append(f"{topic}: published {publisher.rows:,} changes; positions {json.dumps(positions)}")


def _tables(
    catalog: "ModelCatalog", model: str, table: str | None, version: str | None, since: str | None
) -> "list[tuple[str, int, Callable[[], TableSource], str | None]]":
    """List name, width, files and older files of each table."""
    entry = catalog.model(model)
    names = [spec.table_name for spec in entry.tables]
    if table is not None and table not in names:
        raise errors.UnknownTableError(f"publishing to {model}.{table}: got table {table!r}, expected {', '.join(names)}")

    def files(i: int) -> "TableSource":
        return catalog.version(model, version or catalog.to_serve(model)[-1]).sources[i]

    tables: list[tuple[str, int, Callable[[], TableSource], str | None]] = []
    for i, spec in enumerate(entry.tables):
        path = entry.sparse_files[i].rstrip("/")
        relative_path = posixpath.normpath(path) if entry.version_path else posixpath.basename(path)
        old = since if since is None or table is not None else f"{since.rstrip('/')}/{relative_path}"
        if table in (None, spec.table_name):
            tables.append((spec.table_name, spec.dim, partial(files, i), old))
    return tables


def _chunks(
    source: "str | TableSource", dim: int, old: str | None, sources: "ModelSources", names: dict[str, Any]
) -> "tuple[int, Iterable[Difference]]":
    """Return the number of rows to read, and the changes to publish."""
    import numpy as np

    from hps.models.deltas import open_table_files
    from hps.models.differences import Difference, differences, rows_of
    from hps.models.files import open_sparse_model
    from hps.models.importing.checkpoint import find_table

    none = np.empty(0, np.int64)
    if isinstance(source, str):
        filesystem, place = sources.locate(source)
        if filesystem.is_local and not filesystem.exists(f"{place.rstrip('/')}/key"):
            if old is not None:
                raise errors.InvalidInputError(f"publishing {source}: --since needs sparse model files; `hps import` it first")
            table = find_table(source, **names)
            empty = np.empty((0, dim), np.float32)
            deletions = (Difference(none, empty, keys, 0) for keys in table.deleted())
            return table.selection.rows, chain((Difference(*rows, none, rows[0].size) for rows in table.chunks()), deletions)
    model = open_table_files(source, dim, sources=sources)
    if old is not None:
        return model.rows, differences(open_sparse_model(old, dim, sources=sources), model)
    return model.rows, (Difference(keys, vectors, none, keys.size) for keys, vectors in rows_of(model))


def _deleted_keys(text: str) -> "KeyArray":
    import numpy as np

    from hps.models.formats.numpy_files import read_keys

    if text.endswith(".npy"):
        return read_keys(text)
    try:
        return np.array([int(key) for key in text.split(",")], np.int64)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidInputError(f"publishing: got --delete {text!r} ({error}), expected 5,7,9 or a .npy file") from error
