"""`hps models | deploy | undeploy | rollback | unpin | refresh | updates status`: models of a running server."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import errors
from hps.cli import console
from hps.cli.running_server import (
    LOCAL,
    Certificate,
    Model,
    NoWait,
    ServerUrl,
    Token,
    TokenFile,
    Url,
    change_model,
    running_server,
)
from hps.ground.progress import count_text, size_text

if TYPE_CHECKING:
    from hps.client.client import Client

EXAMPLES = {
    "models": "Example: `hps models http://127.0.0.1:8000`",
    "deploy": "Example: `hps deploy ranker --version 2`",
    "undeploy": "Example: `hps undeploy ranker`",
    "rollback": "Example: `hps rollback ranker`",
    "unpin": "Example: `hps unpin ranker`",
    "refresh": "Example: `hps refresh ranker`",
    "updates status": "Example: `hps updates status http://127.0.0.1:8000`",
}
_TIERS = ("embedding_cache", "volatile_db", "persistent_db")


def models_command(
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")] = False,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Print the models of a running server: their versions, states, rows, memory and hit rates.

    Sizes are of vectors, by tier. The hit rate is that of the embedding cache over all versions of a model.
    """
    with console.reported():
        answer = running_server(url, token, token_file, cert).ask("/v1/models")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    _print_table(answer["models"])
    for model in answer["models"]:
        pin = model.get("pinned", {})
        if pin and pin["version"] not in [one["version"] for one in model["versions"] if one["state"] == "serving"]:
            typer.echo(f"{model['name']}: version {pin['version']}, which does not serve, is {pin['text']}")
        if "problem" in pin:
            typer.echo(f"{model['name']}: {pin['text']}; {pin['problem']}")
    for change in answer["changes"]:
        if "status" not in change:
            typer.echo(f"under way for {change['seconds']:.0f} s: {change['what']}, by {change['by']}")
        elif change["status"] >= 400:
            typer.echo(f"failed: {change['what']}, by {change['by']}: {change['error']}")


def deploy_command(
    model: Model,
    version: Annotated[str, typer.Option("--version", help="Default: chosen by the model's version_policy.")] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", show_default=False, help="A file with an entry of `models`, or a ps.json with MODEL."),
    ] = None,
    force: console.Force = False,
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Load a version of MODEL into a running server beside the serving version, then switch to it.

    Lookups go on meanwhile. If loading fails, the previous version continues to serve. Interrupting this command does not stop
    the server. A version given by --version is pinned: neither polling nor a restart takes a newer one. Without --version, the
    pin ends.
    """
    with console.reported():
        body: dict[str, Any] = {"force": force}
        if version:
            body["version"] = version
        if config is not None:
            body["config"] = _entry(config, model)
        _change(model, "deploy", body, no_wait, running_server(url, token, token_file, cert))


def undeploy_command(
    model: Model,
    version: Annotated[str, typer.Option("--version", help="Undeploy only this version. Default: the whole model.")] = "",
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Take MODEL, or one of its versions, out of service in a running server. Redis and RocksDB keep its rows."""
    with console.reported():
        _change(
            model, "undeploy", {"version": version} if version else {}, no_wait, running_server(url, token, token_file, cert)
        )


def rollback_command(
    model: Model,
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Roll MODEL back to its previous version, and pin it there: neither polling nor a restart takes a newer one."""
    with console.reported():
        _change(model, "rollback", {}, no_wait, running_server(url, token, token_file, cert))


def unpin_command(
    model: Model,
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """End the pin of MODEL to a version, and deploy what its version_policy chooses."""
    with console.reported():
        _change(model, "unpin", {}, no_wait, running_server(url, token, token_file, cert))


def refresh_command(
    model: Model,
    no_wait: NoWait = False,
    url: Url = LOCAL,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Refresh the vectors in MODEL's embedding caches from the databases, on every device."""
    with console.reported():
        _change(model, "refresh", {}, no_wait, running_server(url, token, token_file, cert))


def updates_status_command(
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")] = False,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
) -> None:
    """Print how far the tables of a running server have followed their log of updates.

    `lag` is the age of the oldest message that is not applied yet, `behind` the number of such messages. `stale` rows were
    older than the stored ones; `dead letters` are messages that could not be applied.
    """
    with console.reported():
        answer = running_server(url, token, token_file, cert).ask("/v1/updates")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer["tables"]:
        typer.echo("no table follows a log of updates: update_source.type is null, or update_filters match none")
        return
    rows = []
    for one in answer["tables"]:
        lag = "?" if one["lag_s"] is None else f"{one['lag_s']:.1f} s"
        dead = ", ".join(f"{count} {reason}" for reason, count in sorted(one["dead_letters"].items())) or "0"
        behind = "?" if one["behind"] is None else count_text(one["behind"])
        rate, rows_done, stale = (count_text(one[key]) for key in ("rows_per_s", "rows", "stale_rows"))
        rows.append((one["model"], one["version"], one["table"], lag, behind, f"{rate}/s", rows_done, stale, dead))
    console.screen().print(
        console.table(("model", "version", "table"), ("lag", "behind", "rows/s", "rows", "stale", "dead letters"), rows)
    )
    for one in answer["tables"]:
        where = f"{one['model']} version {one['version']}, {one['table']}"
        if one["problem"]:
            typer.echo(f"{where}: {one['problem']}")
        if one["future_times"]:
            typer.echo(f"{where}: {one['future_times']} messages claimed a time in the future; check the producers' clocks")


def _change(model: str, verb: str, body: dict[str, Any], no_wait: bool, server: "Client") -> None:
    change = change_model(server, model, verb, body, wait=not no_wait)
    if "status" not in change:
        typer.echo(f"{model}: in progress; `hps models` shows its state")
        return
    state = f"version {change['version']} serves" if "version" in change else "out of service"
    pin = change.get("pinned")
    pinned = f"; {pin['text']}, until `hps unpin {model}`" if pin else ""
    loaded = f"{console.rows_text(change['rows'])} loaded, " if verb in ("deploy", "unpin") else ""
    typer.echo(f"{model}: {state} ({verb}, {loaded}{change['seconds']:.1f} s){pinned}")
    if pin and "problem" in pin:
        typer.echo(f"{model}: {pin['problem']}")


def _entry(path: Path, model: str) -> dict[str, Any]:
    """Read the entry of a model from a file of its own or from a configuration."""
    from hps.ground.small_files import read_small

    doing = f"reading --config {path}"
    try:
        content = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise errors.InvalidInputError(f"{doing}: {error}") from error
    entries = content.get("models") if isinstance(content, dict) and "models" in content else [content]
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and entry.get("model", model) == model:
                return entry
    raise errors.InvalidInputError(f"{doing}: got no entry of model {model!r}, expected one of `models` of a ps.json")


def _print_table(models: list[dict[str, Any]]) -> None:
    rows = []
    for model in models:
        rate = model["hit_rates"].get(_TIERS[0])
        for version in model["versions"] or [None]:
            if version is None:
                rows.append((model["name"], "", f"{model['state']}: {model.get('reason', '')}".rstrip(": ")))
                continue
            sizes = [size_text(version["size_bytes"][tier]) if tier in version["size_bytes"] else "" for tier in _TIERS]
            shown = f"{rate:.1%}" if rate is not None and version["state"] == "serving" else ""
            pin = model.get("pinned", {})
            pinned = f", {pin['text']}" if (version["state"], version["version"]) == ("serving", pin.get("version")) else ""
            state = version["state"] + pinned
            rows.append((model["name"], version["version"], state, count_text(version["rows"]), *sizes, shown))
    figures = ("rows", *(tier.replace("_", " ") for tier in _TIERS), "hit rate")
    console.screen().print(console.table(("model", "version", "state"), figures, rows))
