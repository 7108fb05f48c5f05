"""Requests of `hps models`, `hps deploy` and other commands to a running server."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote, urlsplit

import typer

from hps import errors
from hps.cli import console

if TYPE_CHECKING:
    from hps.ground.progress import Progress

Url: TypeAlias = Annotated[str, typer.Option("--url", envvar="HPS_URL", help="Of the server.")]
ServerUrl: TypeAlias = Annotated[str, typer.Argument(metavar="URL", envvar="HPS_URL", help="Of the server.")]
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
NoWait: TypeAlias = Annotated[bool, typer.Option("--no-wait", help="Return at once; `hps models` shows the progress.")]
Model: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", show_default=False)]
LOCAL = "http://127.0.0.1:8000"

_WRONG_INPUT = frozenset({400, 401, 403, 404, 413})
_ANSWER_S = 30.0
_PAUSE_S = 0.3


class RunningServer:
    """A running server, by HTTP. *One thread.*

    Args:
        url: address of the server or its proxy.
        token: admin token, or bearer token for requests that need no more; empty for none.
        token_file: a file with the token.

    Raises:
        InvalidInputError: the URL is invalid, or the file cannot be read.
    """

    def __init__(self, url: str, token: str, token_file: Path | None) -> None:
        import urllib3

        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise errors.InvalidInputError(f"reading --url: got {url!r}, expected for instance {LOCAL}")
        if token_file is not None:
            try:
                token = token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise errors.InvalidInputError(f"reading --token-file {token_file}: {error}") from error
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = urllib3.PoolManager(retries=False, timeout=_ANSWER_S)

    def models(self) -> dict[str, Any]:
        """Get /v1/models."""
        return self._ask("GET", "/v1/models", None)

    def stats(self) -> dict[str, Any]:
        """Get /v1/stats."""
        return self._ask("GET", "/v1/stats", None)

    def updates(self) -> dict[str, Any]:
        """Get /v1/updates."""
        return self._ask("GET", "/v1/updates", None)

    def change(self, model: str, verb: str, body: Mapping[str, Any], *, wait: bool) -> dict[str, Any]:
        """Begin a change of a model; with `wait`, show its progress until it ends.

        Returns:
            The server's description of the change.

        Raises:
            InvalidInputError, HPSError: the server refused the change, or it failed; with the server's message.
        """
        change = self._ask("POST", f"/v1/models/{quote(model, safe='')}/{verb}?wait=false", body)
        if wait:
            with console.progress() as progress:
                change = self._follow(change, progress)
        return change

    def _follow(self, change: dict[str, Any], progress: "Progress") -> dict[str, Any]:
        number, name = change["number"], change["model"]
        tag, rows_done = "", 0
        while "status" not in change:
            time.sleep(_PAUSE_S)
            latest = [one for one in self.models()["changes"] if one["model"] == name and one["number"] >= number]
            if not latest or latest[0]["number"] > number:
                raise errors.HPSError(f"changing model {name!r}: it has ended; the log of the server says how")
            change = latest[0]
            table = change.get("table")
            if tag and (table is None or f"{name}.{table['name']}" != tag):
                progress.finish(tag)
                tag = ""
            if table is not None:
                if not tag:
                    tag, rows_done = f"{name}.{table['name']}", 0
                    progress.start(tag, table["rows"], table["size_bytes"])
                progress.advance(tag, table["rows_done"] - rows_done)
                rows_done = table["rows_done"]
        if change["status"] >= 400:
            raise _refusal(change["status"], change["error"])
        return change

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        import urllib3

        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {**self._headers, "Content-Type": "application/json"}
            answer = self._http.request(method, self._url + path, body=content, headers=headers, redirect=False)
            found: Any = json.loads(answer.data)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise errors.NotReadyError(f"asking {self._url}: {error}; is the server running there?") from error
        except ValueError:
            found = None
        if not isinstance(found, dict) or 300 <= answer.status < 400:
            raise errors.HPSError(f"asking {self._url}{path}: got status {answer.status}, which is no answer of hps serve")
        if answer.status >= 400:
            raise _refusal(answer.status, str(found.get("error", found)))
        return found


def _refusal(status: int, text: str) -> errors.HPSError:
    return errors.InvalidInputError(text) if status in _WRONG_INPUT else errors.HPSError(text)
