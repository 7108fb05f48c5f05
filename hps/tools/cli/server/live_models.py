"""`hps models | deploy | undeploy | rollback | unpin | refresh | updates status`: models of a running server."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from hps import errors
from hps.ground.progress import count_text, size_text
from hps.tools.cli import console
from hps.tools.cli.running_server import (
    LOCAL,
    Certificate,
    Fleet,
    Model,
    NoWait,
    ServerUrl,
    Token,
    TokenFile,
    UrlToo,
    change_fleet,
    change_model,
    running_server,
    server_command,
)

if TYPE_CHECKING:
    from hps.client.client import Client

EXAMPLES = {
    "models": "Example: `hps models http://127.0.0.1:8000`",
    "deploy": "Example: `hps deploy ranker --version 2`, or `hps deploy ranker --canary 5%`",
    "promote": "Example: `hps promote ranker`",
    "record": "Example: `hps record ranker --output models/ranker/requests.jsonl`",
    "undeploy": "Example: `hps undeploy ranker`",
    "rollback": "Example: `hps rollback ranker`",
    "unpin": "Example: `hps unpin ranker`",
    "refresh": "Example: `hps refresh ranker`",
    "updates status": "Example: `hps updates status http://127.0.0.1:8000`",
}
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the server's answer unchanged.")]
_TIERS = ("embedding_cache", "volatile_db", "persistent_db")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def models_command(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", envvar="HPS_URL", show_default=LOCAL, help="URL of the server; several with --fleet."),
    ] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Compare what several replicas serve; exit with 1 if they do not agree.")
    ] = False,
    as_json: AsJson = False,
    token: Token = "",
    token_file: TokenFile = None,
    cert: Certificate = None,
    url_too: UrlToo = "",
) -> None:
    """Print the models of a running server: their versions, states, rows, memory and hit rates.

    Sizes are of vectors, by tier. The hit rate is that of the embedding cache over all versions of a model.

    With --fleet: what each replica serves and should serve, and whether it follows the models' serving.json.
    """
    with console.reported():
        servers = {url: running_server(url, token, token_file, cert) for url in ([url_too] if url_too else urls or [LOCAL])}
        if fleet:
            if not _compare(servers, as_json=as_json):
                raise typer.Exit(1)
            return
        if len(servers) > 1:
            raise errors.InvalidInputError(f"listing models: got {len(servers)} URLs, expected one, or --fleet")
        answer = next(iter(servers.values())).ask("/v1/models")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    _print_table(answer["models"])
    for model in answer["models"]:
        pin = model.get("pinned", {})
        if pin and pin["version"] not in [version["version"] for version in model["versions"] if version["state"] == "serving"]:
            typer.echo(f"{model['name']}: version {pin['version']}, which is not serving, is {pin['text']}")
        if status := model.get("fleet"):
            follows = "" if status["follows"] else f"; this replica does not follow: {status['reason']}"
            typer.echo(f"{model['name']}: the fleet serves version {status['wanted'] or 'by policy'}{follows}")
        if "problem" in pin:
            typer.echo(f"{model['name']}: {pin['text']}; {pin['problem']}")
        if rollout := model.get("rollout"):
            typer.echo(_rollout_text(model["name"], rollout))
        for version in model["versions"]:
            if version["state"] == "held":
                typer.echo(f"{model['name']}: version {version['version']} is held: {version['checks']['reason']}")
    for change in answer["changes"]:
        if "status" not in change:
            typer.echo(f"under way for {change['seconds']:.0f} s: {change['what']}, by {change['by']}")
        elif change["status"] >= 400:
            typer.echo(f"failed: {change['what']}, by {change['by']}: {change['error']}")


@server_command()
def deploy_command(
    server: "Client",
    model: Model,
    version: Annotated[str, typer.Option("--version", help="Default: chosen by the model's version_policy.")] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", show_default=False, help="A file with an entry of `models`, or a ps.json with MODEL."),
    ] = None,
    force: console.Force = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Let the version serve whatever its checks find, also if they hold it.")
    ] = False,
    canary: Annotated[
        str, typer.Option("--canary", metavar="SHARE", help="Let the version answer this share of the requests, such as 5%.")
    ] = "",
    shadow: Annotated[
        str, typer.Option("--shadow", metavar="SHARE", help="Let both versions answer this share, and compare the answers.")
    ] = "",
    steps: Annotated[
        str,
        typer.Option("--steps", help="Of a canary: SHARE[:TIME][:REQUESTS] each, such as 5%:10m,25%:10m:1000,100%."),
    ] = "",
    header: Annotated[str, typer.Option("--header", help="Header whose value selects the clients of a canary.")] = "",
    max_error_rate: Annotated[
        str, typer.Option("--max-error-rate", metavar="SHARE", help="Roll back if its errors are more by this share.")
    ] = "",
    max_p99_factor: Annotated[
        float | None, typer.Option("--max-p99-factor", help="Roll back if its p99 is more than this many times as long.")
    ] = None,
    max_difference: Annotated[
        float | None, typer.Option("--max-difference", help="Roll back if its answers differ by more, as a share of the mean.")
    ] = None,
    fleet: Fleet = False,
    no_wait: NoWait = False,
) -> None:
    """Load a version of MODEL into a running server beside the serving version, then switch to it.

    Lookups go on meanwhile. If loading fails, the previous version continues to serve. Interrupting this command does not stop
    the server. A version given by --version is pinned: neither polling nor a restart deploys a newer one. Without --version,
    a pin ends, and the version_policy chooses, mostly the newest version; the output says so.

    A version that fails its checks is held: the previous one serves on, and --accept lets it take over.

    With --canary or --shadow, the serving version serves on, and `hps promote` or `hps rollback` ends it. A version that fails
    or slows is rolled back by the server. Again with another share: changes the canary under way.

    With --fleet, every replica follows within its repository_poll_s, and so does one that is started later.
    """
    rollout = _rollout_options(canary, shadow, steps, header, max_error_rate, max_p99_factor, max_difference)
    if fleet and (force or accept or config is not None):
        raise errors.InvalidInputError(
            "deploying on the fleet: got --force, --accept or --config, expected none of them with --fleet"
        )
    body: dict[str, Any] = {} if fleet else {"force": force}
    if accept:
        body["accept"] = True
    if version:
        body["version"] = version
    if config is not None:
        body["config"] = _entry(config, model)
    if fleet:
        _change_fleet(server, model, "canary" if rollout else "deploy", body | rollout, wait=not no_wait)
        return
    _change(server, model, "deploy", body | rollout, wait=not no_wait)
    if rollout and not no_wait:
        [found] = [entry for entry in server.ask("/v1/models")["models"] if entry["name"] == model]
        typer.echo(_rollout_text(model, found["rollout"]))


@server_command()
def promote_command(
    server: "Client",
    model: Model,
    accept: Annotated[bool, typer.Option("--accept", help="Also a version that its checks hold.")] = False,
    fleet: Fleet = False,
    no_wait: NoWait = False,
) -> None:
    """Let the version of MODEL's canary or shadow serve all requests."""
    if fleet and accept:
        raise errors.InvalidInputError("promoting on the fleet: got --accept, expected it without --fleet")
    (_change_fleet if fleet else _change)(server, model, "promote", {"accept": True} if accept else {}, wait=not no_wait)


@server_command()
def undeploy_command(
    server: "Client",
    model: Model,
    version: Annotated[str, typer.Option("--version", help="Undeploy only this version. Default: the whole model.")] = "",
    no_wait: NoWait = False,
) -> None:
    """Take MODEL, or one of its versions, out of service in a running server. Its rows stay in Redis and RocksDB.

    A version that is kept for a roll-back is dropped with its rows, which makes room.
    """
    _change(server, model, "undeploy", {"version": version} if version else {}, wait=not no_wait)


@server_command()
def rollback_command(
    server: "Client",
    model: Model,
    fleet: Fleet = False,
    no_wait: NoWait = False,
) -> None:
    """Roll MODEL back to its previous version, and pin it to that: neither polling nor a restart deploys a newer one.

    While a canary or shadow is under way, end it: the serving version serves on.

    With --fleet, every replica rolls back, and none deploys the withdrawn version until it is deployed by its number.
    """
    (_change_fleet if fleet else _change)(server, model, "rollback", {}, wait=not no_wait)


@server_command()
def unpin_command(
    server: "Client",
    model: Model,
    fleet: Fleet = False,
    no_wait: NoWait = False,
) -> None:
    """End the pin of MODEL to a version, and deploy what its version_policy chooses.

    With --fleet, every replica deploys what the policy chooses, except withdrawn versions.
    """
    (_change_fleet if fleet else _change)(server, model, "unpin", {}, wait=not no_wait)


@server_command()
def refresh_command(
    server: "Client",
    model: Model,
    no_wait: NoWait = False,
) -> None:
    """Refresh the vectors in MODEL's embedding caches from the databases, on every device.

    First refills its tables in the volatile database, at full speed, if rows were lost there.
    """
    _change(server, model, "refresh", {}, wait=not no_wait)


@server_command()
def record_command(
    server: "Client",
    model: Model,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path("requests.jsonl"),
) -> None:
    """Write a sample of the requests for scores that MODEL answered to a file, for the checks of its versions.

    The server keeps them only if models[].checks.record is `keys` or `features`.
    """
    requests = server.ask(f"/v1/debug/requests/{quote(model, safe='')}")["requests"]
    output.write_text("".join(f"{line}\n" for line in requests))
    typer.echo(f"{output}: {len(requests)} requests of {model}")


@server_command(ServerUrl)
def updates_status_command(server: "Client", as_json: AsJson = False) -> None:
    """Print how far the tables of a running server have followed their log of updates.

    `lag` is the age of the oldest message that is not applied yet, `behind` the number of such messages. `stale` rows were
    older than the stored ones; `dead letters` are messages that could not be applied.
    """
    answer = server.ask("/v1/updates")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer["tables"]:
        typer.echo("no table follows a log of updates: update_source.type is null, or update_filters match none")
        return
    rows = []
    for table in answer["tables"]:
        lag = "?" if table["lag_s"] is None else f"{table['lag_s']:.1f} s"
        dead = ", ".join(f"{count} {reason}" for reason, count in sorted(table["dead_letters"].items())) or "0"
        behind = "?" if table["behind"] is None else count_text(table["behind"])
        rate, rows_done, stale = (count_text(table[key]) for key in ("rows_per_s", "rows", "stale_rows"))
        rows.append((table["model"], table["version"], table["table"], lag, behind, f"{rate}/s", rows_done, stale, dead))
    console.screen().print(
        console.table(("model", "version", "table"), ("lag", "behind", "rows/s", "rows", "stale", "dead letters"), rows)
    )
    for table in answer["tables"]:
        where = f"{table['model']} version {table['version']}, {table['table']}"
        if table["problem"]:
            typer.echo(f"{where}: {table['problem']}")
        if table["future_times"]:
            typer.echo(f"{where}: {table['future_times']} messages claimed a time in the future; check the producers' clocks")


def _change(server: "Client", model: str, verb: str, body: dict[str, Any], *, wait: bool) -> None:
    change = change_model(server, model, verb, body, wait=wait)
    if "status" not in change:
        typer.echo(f"{model}: in progress; `hps models` shows its state")
        return
    state = f"version {change['version']} serves" if "version" in change else "out of service"
    pin = change.get("pinned")
    pinned = f"; {pin['text']}, until `hps unpin {model}`" if pin else ""
    if ended := change.get("unpinned"):
        pinned += f"; no longer pinned to version {ended['version']} ({ended['text']}): newer versions are taken again"
    loaded = f"{console.rows_text(change['rows'])} loaded, " if verb in ("deploy", "unpin") else ""
    typer.echo(f"{model}: {state} ({verb}, {loaded}{change['seconds']:.1f} s){pinned}")
    if pin and "problem" in pin:
        typer.echo(f"{model}: {pin['problem']}")
    if "degraded" in change:
        hint = "" if verb == "refresh" else f"; `hps refresh {model}` refills lost rows immediately"
        typer.echo(f"{model}: degraded: {change['degraded']}{hint}")


def _rollout_options(
    canary: str,
    shadow: str,
    steps: str,
    header: str,
    max_error_rate: str,
    max_p99_factor: float | None,
    max_difference: float | None,
) -> dict[str, Any]:
    """Return the members of a request for a canary or shadow; none if it is not one."""
    given: dict[str, Any] = {"max_p99_factor": max_p99_factor, "max_difference": max_difference, "header": header or None}
    for key, text in (("canary", canary), ("shadow", shadow), ("max_error_rate", max_error_rate)):
        given[key] = _share(text, f"--{key.replace('_', '-')}") if text else None
    given["steps"] = [_step(part) for part in steps.split(",")] if steps else None
    if given["steps"] and not (canary or shadow):
        given["canary"] = given["steps"][0]["share"]
    found = {key: value for key, value in given.items() if value is not None}
    if found and not found.keys() & {"canary", "shadow"}:
        raise errors.InvalidInputError(f"deploying: got {', '.join(found)}, expected it with --canary or --shadow")
    return found


def _share(text: str, option: str) -> float:
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) / percent
    except ValueError:
        raise errors.InvalidInputError(f"reading {option}: got {text!r}, expected a share such as 5% or 0.05") from None


def _step(text: str) -> dict[str, float]:
    share, *limits = text.split(":")
    step = {"share": _share(share.strip(), "--steps")}
    for limit in limits:
        unit = _UNITS_S.get(limit[-1:])
        try:
            if unit is None:
                step["requests"] = int(limit)
            else:
                step["seconds"] = float(limit[:-1]) * unit
        except ValueError:
            raise errors.InvalidInputError(
                f"reading --steps: got {limit!r}, expected a time such as 10m, or a number of requests"
            ) from None
    return step


def _rollout_text(model: str, rollout: dict[str, Any]) -> str:
    old, new = rollout["versions"]
    if rollout["state"] in ("running", "loading"):
        step = f", step {rollout['step']} of {len(rollout['steps'])}" if len(rollout["steps"]) > 1 else ""
        state = f"gets {100 * rollout['share']:.3g} % of the requests{step}"
    else:
        by = f" by {rollout['by']}" if rollout["by"] else ""
        reason = f": {rollout['reason']}" if rollout["reason"] else ""
        state = f"is {rollout['state']}{by}{reason}"
    figures = [
        f"version {entry['version']} {count_text(entry['requests'])} requests, {entry['error_rate']:.2%} errors"
        + (f", p99 {entry['p99_ms']:.2f} ms" if "p99_ms" in entry else "")
        for entry in (old, new)
        if rollout["state"] in ("running", "loading") or old["requests"] or new["requests"]  # a restart forgets them
    ]
    compared = rollout["compared"]
    if "difference" in compared:
        figures.append(f"{count_text(compared['requests'])} compared, difference {compared['difference']:.3g}")
    return "; ".join([f"{model}: {rollout['mode']} of version {rollout['version']} {state}", *figures])


def _change_fleet(server: "Client", model: str, verb: str, body: dict[str, Any], *, wait: bool) -> None:
    answer = change_fleet(server, model, verb, body, wait=wait)
    wanted = f"version {answer['wanted']}" if answer["wanted"] else "what the version_policy chooses"
    typer.echo(f"{model}: the fleet serves {wanted} ({verb}); see `hps models --fleet URL...`")
    if not wait:
        return
    if not answer["follows"]:
        raise errors.HPSError(f"{model}: this server does not follow: {answer['reason']}")
    typer.echo(f"{model}: this server serves version {answer['serving']}")


def _compare(servers: "dict[str, Client]", *, as_json: bool) -> bool:
    """Print what each replica serves; return whether all agree and follow."""
    answers: dict[str, dict[str, dict[str, Any]]] = {}
    unreachable: dict[str, str] = {}
    for url, server in servers.items():
        try:
            answers[url] = {model["name"]: model for model in server.ask("/v1/models")["models"]}
        except errors.HPSError as error:
            unreachable[url] = str(error)
    rows, agree = [], not unreachable
    for name in sorted({name for models in answers.values() for name in models}):
        rows_seen = set()
        for url, models in answers.items():
            row, follows = _replica_row(models.get(name, {}))
            agree = agree and follows
            rows_seen.add(row[:2])
            rows.append((url, name, *row))
        agree = agree and len(rows_seen) == 1
    if as_json:
        typer.echo(json.dumps({"agree": agree, "replicas": answers, "unreachable": unreachable}))
        return agree
    console.screen().print(console.table(("replica", "model", "serving", "wanted", "since", "follows"), (), rows))
    for url, why in unreachable.items():
        typer.echo(f"{url}: {why}")
    typer.echo("all replicas agree" if agree else "the replicas do not agree")
    return agree


def _replica_row(model: dict[str, Any]) -> tuple[tuple[str, str, str, str], bool]:
    """Return the cells of a replica: serving and wanted version, since when, and whether it follows; and the last as a bool."""
    serving = next((version for version in model.get("versions", ()) if version["state"] == "serving"), None)
    version, since = ("none", "") if serving is None else (serving["version"], serving["since"][:19].replace("T", " "))
    fleet = model.get("fleet")
    if fleet is None:
        return (version, "", since, "no serving.json"), serving is not None
    follows = "yes" if fleet["follows"] else f"no: {fleet['reason']}"
    return (version, fleet["wanted"] or "by policy", since, follows), fleet["follows"]


def _entry(path: Path, model: str) -> dict[str, Any]:
    """Read the entry of a model from a file of its own or from a configuration."""
    from hps.ground.small_files import read_small

    reading = f"reading --config {path}"
    try:
        content = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise errors.InvalidInputError(f"{reading}: {error}") from error
    entries = content.get("models") if isinstance(content, dict) and "models" in content else [content]
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and entry.get("model", model) == model:
                return entry
    raise errors.InvalidInputError(f"{reading}: got no entry of model {model!r}, expected one of `models` of a ps.json")


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
            shard = f", share {shard['index']}/{shard['of']}" if (shard := model.get("shard")) else ""
            state = version["state"] + shard + pinned
            rows.append((model["name"], version["version"], state, count_text(version["rows"]), *sizes, shown))
    figures = ("rows", *(tier.replace("_", " ") for tier in _TIERS), "hit rate")
    console.screen().print(console.table(("model", "version", "state"), figures, rows))
