"""Options of the commands that call a running server, and changes of its models."""

import time
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from hps.client.client import Client
    from hps.ground.progress import Progress

Url: TypeAlias = Annotated[str, typer.Option("--url", envvar="HPS_URL", help="URL of the server.")]
ServerUrl: TypeAlias = Annotated[str, typer.Argument(metavar="URL", envvar="HPS_URL", help="URL of the server.")]
UrlToo: TypeAlias = Annotated[str, typer.Option("--url", show_default=False, help="The same, as other commands take it.")]
Token: TypeAlias = Annotated[
    str,
    typer.Option(
        "--token",
        envvar="HPS_ADMIN_TOKEN",
        show_default=False,
        help="The server's admin_token. Safer in the environment or a file, since all users of this machine see command lines.",
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None, typer.Option("--token-file", show_default=False, help="A file with the token, instead of --token.")
]
Certificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--cert",
        envvar="HPS_CLIENT_CERTIFICATE",
        show_default=False,
        help="A PEM file with the certificate and key of this client. SSL_CERT_FILE names the authorities to trust.",
    ),
]
NoWait: TypeAlias = Annotated[bool, typer.Option("--no-wait", help="Return at once; `hps models` shows the progress.")]
Fleet: TypeAlias = Annotated[
    bool, typer.Option("--fleet", help="Change every replica: write the model's serving.json, through this server.")
]
Model: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", show_default=False)]
LOCAL = "http://127.0.0.1:8000"

_PAUSE_S = 0.3
_ANSWER_S = 30.0
_TOKEN_BYTES = 1 << 16


def server_command(url: Any = Url) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first parameter is the client of a running server.

    Args:
        url: the parameter with the URL: an option, or an argument (`ServerUrl`), beside which there is the option, too.
    """
    # Typer reads a command's parameters from its signature, so the options of the server are declared here, once.
    options: dict[str, tuple[Any, Any]] = {"url": (url, LOCAL), "token": (Token, ""), "token_file": (TokenFile, None)}
    options |= {"cert": (Certificate, None), **({"url_too": (UrlToo, "")} if url is ServerUrl else {})}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            with console.reported():
                address, *others = (arguments.pop(name) for name in options if name != "url_too")
                server = running_server(arguments.pop("url_too", "") or address, *others)
                command(server, **arguments)

        _, *parameters = signature(command).parameters.values()
        kind = Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=kind) for parameter in parameters]
        parameters += [Parameter(name, kind, default=default, annotation=of) for name, (of, default) in options.items()]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def running_server(url: str, token: str, token_file: Path | None, certificate: Path | None) -> "Client":
    """Make the client of a server.

    Raises:
        InvalidInputError: the URL is invalid, or a file cannot be read.
    """
    from hps.client.client import connect
    from hps.ground.small_files import read_small

    if token_file is not None:
        try:
            token = read_small(token_file, _TOKEN_BYTES).decode().strip()
        except (OSError, ValueError) as error:
            raise errors.InvalidInputError(f"reading --token-file {token_file}: {error}") from error
    return connect(url, token=token, certificate=certificate, timeout_s=_ANSWER_S)


def change_model(server: "Client", model: str, verb: str, body: Mapping[str, Any], *, wait: bool) -> dict[str, Any]:
    """Start a change of a model; with `wait`, show its progress until it ends.

    Returns:
        The server's description of the change.

    Raises:
        HPSError: the server refused the change, or it failed; with the server's message.
    """
    change: dict[str, Any] = server.ask(f"{_path(model)}/{verb}?wait=false", "POST", body)
    if wait:
        with console.progress() as progress:
            change = _follow(server, change, progress)
    return change


def change_fleet(server: "Client", model: str, verb: str, body: Mapping[str, Any], *, wait: bool) -> dict[str, Any]:
    """Change the version that every replica serves; with `wait`, until this server has followed or failed to.

    Returns:
        The server's description of the document, and whether it follows.

    Raises:
        HPSError: the server refused the change, or it failed; with the server's message.
    """
    answer: dict[str, Any] = server.ask(f"{_path(model)}/fleet", "POST", {"change": verb, **body})
    number = answer["number"]
    while wait and (answer["pending"] or answer["number"] < number):
        time.sleep(_PAUSE_S)
        statuses = [
            entry["fleet"] for entry in server.ask("/v1/models")["models"] if entry["name"] == model and "fleet" in entry
        ]
        if not statuses:
            raise errors.HPSError(f"changing what the fleet serves of model {model!r}: it was written, and this server left it")
        answer = statuses[0]
    return answer


def _path(model: str) -> str:
    return f"/v1/models/{quote(model, safe='', errors='surrogateescape')}"


def _follow(server: "Client", change: dict[str, Any], progress: "Progress") -> dict[str, Any]:
    from hps.client.answers import error_of

    number, name = change["number"], change["model"]
    tag, rows, rows_done = "", 0, 0
    while "status" not in change:
        time.sleep(_PAUSE_S)
        changes = server.ask("/v1/models")["changes"]
        latest = [entry for entry in changes if entry["model"] == name and entry["number"] >= number]
        if not latest or latest[0]["number"] > number:
            raise errors.HPSError(f"changing model {name!r}: the change has ended; the server's log has its outcome")
        change = latest[0]
        table = change.get("table")
        if tag and change.get("status", 0) < 400 and (table is None or f"{name}.{table['name']}" != tag):
            progress.advance(tag, rows - rows_done)  # since the last answer
            progress.finish(tag)
            tag = ""
        if table is not None:
            if not tag:
                tag, rows, rows_done = f"{name}.{table['name']}", table["rows"], 0
                progress.start(tag, table["rows"], table["size_bytes"])
            progress.advance(tag, table["rows_done"] - rows_done)
            rows_done = table["rows_done"]
    if change["status"] >= 400:
        raise error_of(change["status"], change["error"])
    return change
