"""`hps models | deploy | undeploy | rollback | refresh`: see and change the models of a running server."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hps import errors
from hps.cli import console
from hps.cli.running_server import LOCAL, Model, NoWait, RunningServer, Token, TokenFile, Url
from hps.progress import count_text, size_text

EXAMPLES = {
    "models": "Example: `hps models http://127.0.0.1:8000`",
    "deploy": "Example: `hps deploy ranker --version 2`",
    "undeploy": "Example: `hps undeploy ranker`",
    "rollback": "Example: `hps rollback ranker`",
    "refresh": "Example: `hps refresh ranker`",
}
_TIERS = ("embedding_cache", "volatile_db", "persistent_db")
_WIDTH = 160  # where the output is no terminal


def models_command(
    url: Annotated[str, typer.Argument(metavar="URL", envvar="HPS_URL", help="Of the server.")] = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")] = False,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Print the models of a running server: their versions, states, rows, memory and hit rates.

    The sizes are of vectors, by tier. The hit rate is that of the embedding cache, of all versions of a model.
    """
    with console.reported():
        answer = RunningServer(url, token, token_file).models()
    if as_json:
        typer.echo(json.dumps(answer))
        return
    _print_table(answer["models"])
    for change in answer["changes"]:
        if "status" not in change:
            typer.echo(f"under way for {change['seconds']:.0f} s: {change['what']}, by {change['by']}")
        elif change["status"] >= 400:
            typer.echo(f"failed: {change['what']}, by {change['by']}: {change['error']}")


def deploy_command(
    model: Model,
    version: Annotated[str, typer.Option("--version", help="By default what the model's version_policy chooses.")] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", show_default=False, help="A file with an entry of `models`, or a ps.json that has MODEL."),
    ] = None,
    force: console.Force = False,
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Load a version of MODEL into a running server, beside the one that serves, and let it take over.

    Lookups go on meanwhile. If the version cannot be loaded, what served goes on to serve. Interrupting this command does not
    stop the server.
    """
    with console.reported():
        body: dict[str, Any] = {"force": force}
        if version:
            body["version"] = version
        if config is not None:
            body["config"] = _entry(config, model)
        _change(model, "deploy", body, no_wait, url, token, token_file)


def undeploy_command(
    model: Model,
    version: Annotated[str, typer.Option("--version", help="Only this one; by default the whole model.")] = "",
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Take MODEL, or one of its versions, out of service in a running server. Redis and RocksDB keep its rows."""
    with console.reported():
        _change(model, "undeploy", {"version": version} if version else {}, no_wait, url, token, token_file)


def rollback_command(
    model: Model, no_wait: NoWait = False, url: Url = LOCAL, token: Token = "", token_file: TokenFile = None
) -> None:
    """Let the version of MODEL serve again that was replaced last."""
    with console.reported():
        _change(model, "rollback", {}, no_wait, url, token, token_file)


def refresh_command(
    model: Model, no_wait: NoWait = False, url: Url = LOCAL, token: Token = "", token_file: TokenFile = None
) -> None:
    """Read the vectors in MODEL's embedding caches again from the databases, on every device."""
    with console.reported():
        _change(model, "refresh", {}, no_wait, url, token, token_file)


def _change(model: str, verb: str, body: dict[str, Any], no_wait: bool, url: str, token: str, token_file: Path | None) -> None:
    change = RunningServer(url, token, token_file).change(model, verb, body, wait=not no_wait)
    if "status" not in change:
        typer.echo(f"{model}: under way; hps models tells how it goes on")
        return
    state = f"version {change['version']} serves" if "version" in change else "out of service"
    typer.echo(f"{model}: {state} ({verb}, {change['seconds']:.1f} s)")


def _entry(path: Path, model: str) -> dict[str, Any]:
    """The entry of a model: a file that holds it alone, or a whole configuration."""
    doing = f"reading --config {path}"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise errors.InvalidInputError(f"{doing}: {error}") from error
    entries = content.get("models") if isinstance(content, dict) and "models" in content else [content]
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and entry.get("model", model) == model:
                return entry
    raise errors.InvalidInputError(f"{doing}: got no entry of model {model!r}, expected one of `models` of a ps.json")


def _print_table(models: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "version", "state"):
        table.add_column(column, overflow="fold")
    for column in ("rows", *(tier.replace("_", " ") for tier in _TIERS), "hit rate"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in models:
        rate = model["hit_rates"].get(_TIERS[0])
        for version in model["versions"] or [None]:
            if version is None:
                table.add_row(model["name"], "", f"{model['state']}: {model.get('reason', '')}".rstrip(": "))
                continue
            sizes = [size_text(version["size_bytes"][tier]) if tier in version["size_bytes"] else "" for tier in _TIERS]
            shown = f"{rate:.1%}" if rate is not None and version["state"] == "serving" else ""
            row = (model["name"], version["version"], version["state"], count_text(version["rows"]), *sizes, shown)
            table.add_row(*row)
    console_ = Console(highlight=False, markup=False)
    console_.print(table, width=None if console_.is_terminal else _WIDTH)
