"""`hps lookup`: print the vectors of keys."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.configuration.load import Configuration
    from hps.types import FloatArray

EXAMPLE = "Example: `hps lookup configs/minimal.json sample item 17 42 -5`"


def lookup_command(
    config: console.ConfigPath,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model in CONFIG.", show_default=False)],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name or number of a table.", show_default=False)],
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Keys; they may be negative.", show_default=False)],
    combiner: Annotated[
        str | None, typer.Option(metavar="HOW", help="Also print the sum, mean, sqrtn or max of the keys as one bag.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the vectors of KEYs, and mark the default vectors of keys that no database has.

    Looks up in the persistent database, which is loaded first if necessary, or else in the model files. Only one process at a
    time can open a RocksDB: while a server runs, send it the request.
    """
    pooled: dict[str, FloatArray] = {}
    with console.reported():
        requested = [_key(key) for key in keys]
        with console.progress() as progress:
            import numpy as np

            from hps.configuration.load import load_configuration
            from hps.parameter_server import HPS
            from hps.tensors.bags import Bags

            configuration = _without_caches(load_configuration(config), model)
            tables = configuration.models[0].embedding_table_names
            name = tables[int(table)] if table not in tables and table.isdecimal() and int(table) < len(tables) else table
            try:
                with HPS(configuration, progress=progress) as server:
                    keys_array = np.array(requested, np.int64)
                    vectors, found = server.lookup(keys_array, model, name, return_found=True)
                    if combiner is not None:
                        bags = {name: Bags(keys_array[None], combiner=combiner)}  # type: ignore[arg-type]  # it is checked
                        pooled = {combiner: server.lookup_pooled(bags, model)[name][0]}
            except errors.DatabaseLockedError as error:
                body = shlex.quote(json.dumps({"tables": {name: requested}}))
                service = configuration.service
                url = f"{service.scheme}://{service.host}:{service.port}/v1/models/{model}/lookup"
                raise errors.DatabaseLockedError(f"{error}\nA server may have it: curl -s {url} -d {body}") from error
        _print_vectors(model, name, requested, vectors, found.tolist(), pooled, as_json)


def _key(text: str) -> int:
    try:
        key = int(text)
    except ValueError:
        key = 2**63
    if not -(2**63) <= key < 2**63:
        raise errors.InvalidInputError(f"looking up keys: got {text!r}, expected 64-bit integers")
    return key


def _without_caches(configuration: "Configuration", model: str) -> "Configuration":
    """Reduce a configuration to one lookup: one model, no cache, no updates, no volatile database beside a persistent one."""
    from hps.configuration.load import UpdateSourceConfig

    models = [
        entry.model_copy(update={"gpucache": False, "deployed_device_list": (0,)})
        for entry in configuration.models
        if entry.model == model
    ]
    if not models:
        names = ", ".join(entry.model for entry in configuration.models)
        raise errors.UnknownModelError(f"looking up model {model!r}: it is not in the configuration, which has: {names}")
    changes: dict[str, Any] = {"models": tuple(models), "device": "cpu", "update_source": UpdateSourceConfig()}
    if configuration.persistent_db.type != "disabled":
        changes["volatile_db"] = configuration.volatile_db.model_copy(update={"type": "disabled"})
    return configuration.model_copy(update=changes)


def _print_vectors(
    model: str,
    table: str,
    keys: Sequence[int],
    vectors: "FloatArray",
    found: Sequence[bool],
    pooled: "Mapping[str, FloatArray]",
    as_json: bool,
) -> None:
    if as_json:
        rows = [_floats(row) for row in vectors]
        bag = {combiner: _floats(row) for combiner, row in pooled.items()}
        typer.echo(json.dumps({"model": model, "table": table, "keys": keys, "vectors": rows, "found": found, **bag}))
        return
    for key, row, is_found in zip(keys, vectors, found, strict=True):
        typer.echo(f"{key}: {_listed(row)}" + ("" if is_found else "  (default vector: no database has this key)"))
    for combiner, row in pooled.items():
        typer.echo(f"{combiner}: {_listed(row)}")


def _floats(row: "FloatArray") -> list[float]:
    return [float(str(element)) for element in row]  # the shortest digits that identify the float32


def _listed(row: "FloatArray") -> str:
    return f"[{', '.join(str(element) for element in row)}]"
