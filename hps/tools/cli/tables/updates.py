"""`hps updates`: follow online updates, and replay those that failed."""

import os
from collections import Counter
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hps.configuration.load import Configuration
    from hps.types import TableSpec
    from hps.updates.dead_letters import DeadLetter
    from hps.updates.framing import Changes
    from hps.versions.catalog import ModelCatalog

REPLAY_EXAMPLE = "Example: `hps updates replay ps.json --dry-run && hps updates replay ps.json`"

updates = typer.Typer(
    no_args_is_help=True, help="Show the progress of updates; replay failed ones.", rich_markup_mode="markdown"
)


@updates.command("replay", epilog=REPLAY_EXAMPLE)
def replay_command(
    config: console.ConfigPath,
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIRECTORY", help="Directory of dead letters. Default: CONFIG's.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Report what can be read now, and publish nothing.")] = False,
) -> None:
    """Read the dead letters with the present CONFIG, and publish those that can be applied, for every server.

    They keep their position in the order of changes, so rows that changed since are not overwritten. Replaying twice changes
    nothing. The exit code is 1 if a message still cannot be read.
    """
    with console.reported(), console.progress():
        from hps.configuration.load import load_configuration
        from hps.models.sources import ModelSources
        from hps.updates.base import TOPIC_PREFIX
        from hps.updates.publisher import Republisher, open_writer
        from hps.versions.catalog import ModelCatalog

        configuration = load_configuration(config)
        catalog = ModelCatalog(configuration, ModelSources(configuration.model_source))
        unreadable: Counter[str] = Counter()
        detail = ""
        messages = 0
        publishers: dict[TableSpec, Republisher] = {}
        with closing(open_writer(configuration.update_source)) as writer, ExitStack() as stack:
            for letter in _letters(configuration, catalog, directory):
                try:
                    if isinstance(letter, errors.UpdateFormatError):
                        raise letter
                    table, changes, sequence = _read(letter, catalog, configuration)
                except errors.UpdateFormatError as error:
                    unreadable[error.reason] += 1
                    detail = str(error)
                    continue
                messages += 1
                if dry_run:
                    continue
                if table not in publishers:
                    topic = f"{TOPIC_PREFIX}{table.model_name}.{table.table_name}"
                    publishers[table] = stack.enter_context(Republisher(writer, topic, dim=table.dim))
                publishers[table].republish(letter.message.partition.number, changes, sequence)
        rows = sum(publisher.rows for publisher in publishers.values())
        outcome = "can be published" if dry_run else f"published again ({console.rows_text(rows)})"
        typer.echo(f"{messages} of {messages + unreadable.total()} messages {outcome}")
        if unreadable:
            counts = ", ".join(f"{count} x {reason}" for reason, count in sorted(unreadable.items()))
            typer.echo(f"{unreadable.total()} still cannot be read ({counts}); the last: {detail}")
            raise typer.Exit(1)


def _letters(
    configuration: "Configuration", catalog: "ModelCatalog", directory: str | None
) -> "Iterator[DeadLetter | errors.UpdateFormatError]":
    from hps.ground.registry import implementation
    from hps.updates.base import DEAD_LETTER_PREFIX
    from hps.updates.dead_letters import place_of, read_directory, read_topics

    settings, persistent = configuration.update_source, configuration.persistent_db
    location = directory or place_of(settings, "" if persistent.type == "disabled" else persistent.path)
    if location == "topic":
        tables = [table for name in catalog.names for table in catalog.model(name).tables]
        topics = [f"{DEAD_LETTER_PREFIX}{table.model_name}.{table.table_name}" for table in tables]
        with closing(implementation("update_log", settings.type).from_config(settings, "hps.replay")) as log:
            yield from read_topics(log, topics, 10.0)
    elif directory and not os.path.isdir(directory):
        raise errors.InvalidInputError(f"replaying dead letters: there is no directory {directory}")
    elif location:
        yield from read_directory(location)
    else:
        raise errors.InvalidInputError("replaying dead letters: CONFIG names no place for them, expected DIRECTORY")


def _read(letter: "DeadLetter", catalog: "ModelCatalog", configuration: "Configuration") -> "tuple[TableSpec, Changes, int]":
    """Read a message for the tables as they are configured now.

    Raises:
        UpdateFormatError: it cannot be applied to them.
    """
    from hps.ground.rows import encode
    from hps.updates.framing import decode

    tables = {table.table_name: table for table in catalog.model(letter.model).tables} if letter.model in catalog.names else {}
    table = tables.get(letter.table)
    if table is None:
        raise errors.UpdateFormatError("table", f"reading a message of {letter.message.partition}: CONFIG has no such table")
    most_bytes, key_bytes = configuration.update_source.max_message_bytes, 8 if configuration.supportlonglong else 4
    message = letter.message
    changes = decode(message.value, table.dim, key_bytes, key=message.key, table=table.table_name, most_bytes=most_bytes)
    if changes is None:
        raise errors.UpdateFormatError("size", f"reading a message of {message.partition}: got a beacon, expected rows")
    if not (sequence := changes.sequence or letter.sequence or message.time_us):
        raise errors.UpdateFormatError("sequence", f"reading a message of {message.partition}: its time is unknown")
    try:
        encode(f"reading a message of {message.partition}", changes.vectors, table.row_dtype, changes.keys)
    except errors.InvalidInputError as error:
        raise errors.UpdateFormatError("row_dtype", str(error)) from error
    return table, changes._replace(time_us=changes.time_us or message.time_us), sequence
