"""TLS, client certificates and named tokens of `hps serve`: who gets in, to what, and while both rotate under load."""

import http.client
import json
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.tokens import digest_of
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.certificates import Authority, Pair
from tests.servers.child_processes import ROOT, ChildProcesses
from tests.servers.running_service import document_of, model_of

LOOKUP, ROWS, DEPLOY = "/v1/models/m/lookup", "/v1/models/m/tables/item/rows", "/v1/models/m/refresh"
BODY = json.dumps({"tables": {"item": [1, 2]}}).encode()
READ = ("/metrics", "/v1/stats", "/v2/models/m/config")
ROW_BODY = json.dumps({"keys": [1], "vectors": [[1, 1, 1]]}).encode()
SECRETS = {right: f"s3cret-{right}-{'x' * 30}" for right in ("lookup", "write", "admin", "bearer", "other", "none")}


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class Served:
    """`hps serve` in processes of its own. *For one test.*"""

    def __init__(
        self,
        children: ChildProcesses,
        directory: Path,
        document: dict[str, Any],
        *arguments: Any,
        real: bool = False,
        **more: str,
    ) -> None:
        self.log = directory / "log"
        (directory / "ps.json").write_text(json.dumps(document))
        with self.log.open("w") as log:
            command = ("serve", directory / "ps.json", "--port", 0, *arguments)
            self.process = children.hps(*command, stderr=log, env={**os.environ, **more}, real=real)
        wait_until(lambda: "ready; try" in self.text or self.process.poll() is not None, "it is ready")
        found = re.search(r"listening on (https?)://[0-9.]+:(\d+)", self.text)
        assert found is not None, self.text
        assert "ready; try" in self.text, self.text
        self.scheme, self.port = found[1], int(found[2])

    @property
    def text(self) -> str:
        return self.log.read_text()

    def connect(self, context: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
        if self.scheme == "http":
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)

    def ask(
        self,
        method: str,
        path: str,
        token: str = "",
        body: bytes | None = None,
        context: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        """Send one request on a new connection."""
        connection = self.connect(context)
        try:
            return ask_on(connection, method, path, token, body, **headers)
        finally:
            connection.close()


def ask_on(
    connection: http.client.HTTPConnection, method: str, path: str, token: str = "", body: bytes | None = None, **headers: str
) -> Answer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given | ({"Authorization": f"Bearer {token}"} if token else {}))
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.path))
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def document_in(directory: Path) -> dict[str, Any]:
    keys = np.arange(10, dtype=np.int64)
    hps.write_sparse_model(directory / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)))
    model = model_of("m", [directory / "item.model"], {"item": 3}, max_batch_size=1_000_000)
    return document_of(model, service={"drain_s": 0})


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return document_in(tmp_path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


Serve = Callable[..., Served]


@pytest.fixture
def serve(children: ChildProcesses, tmp_path: Path, document: dict[str, Any]) -> Serve:
    """Serve the document with these arguments and settings of the service."""

    def serve_with(*arguments: Any, **settings: Any) -> Served:
        document["service"] |= {name: str(one) if isinstance(one, Path) else one for name, one in settings.items()}
        return Served(children, tmp_path, document, *arguments)

    return serve_with


def write_tokens(path: Path, *entries: dict[str, Any]) -> None:
    """Replace a file of tokens as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tokens": entries}))
    new.replace(path)


def entry(name: str, *rights: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "rights": list(rights), "sha256": digest_of(SECRETS.get(name, name)), **more}


class Load:
    """Looks up without a pause on new and kept connections; whatever goes wrong is kept. *For one test.*"""

    def __init__(self, service: Served, token: Callable[[], str], context: ssl.SSLContext) -> None:
        self._service, self._token, self._context = service, token, context
        self._stop = threading.Event()
        self.answers: dict[int, int] = {}
        self.failures: list[Any] = []
        self._threads = [threading.Thread(target=self._run, args=(requests,)) for requests in (1, 7, 10**9)]
        for thread in self._threads:
            thread.start()

    def _run(self, requests: int) -> None:
        while not self._stop.is_set():
            with closing(self._service.connect(self._context)) as connection, self._kept():
                for _ in range(requests):
                    if self._stop.is_set():
                        break
                    status, _, body = ask_on(connection, "POST", LOOKUP, self._token(), BODY)
                    self.answers[requests] = self.answers.get(requests, 0) + 1
                    if status != 200 or json.loads(body) != {"tables": {"item": [[1, 1, 1], [2, 2, 2]]}}:
                        self.failures.append((status, body))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - they are compared in the end
            self.failures.append(repr(error))
            self._stop.set()

    def wait_for_next(self) -> None:
        """Wait until each thread has sent a request from now on, and got its answer."""
        before = dict(self.answers)
        wait_until(
            lambda: self.failures or all(self.answers[one] > count + 1 for one, count in before.items()), "requests go on"
        )

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def test_certificates_and_tokens_rotate_under_load_without_a_failed_request(
    serve: Serve, tmp_path: Path, authority: Authority
) -> None:
    pair, tokens = authority.sign("first", "server"), tmp_path / "tokens.json"
    write_tokens(tokens, entry("ranker", "lookup", sha256=[digest_of("token-0")]))
    service = serve("--fronts", 2, tls_certificate_path=pair.certificate, tls_key_path=pair.key, tokens_path=tokens)
    assert service.scheme == "https"
    assert "--cacert <ca.pem> -H 'Authorization: Bearer <token>' https://127.0.0.1" in service.text
    context = trusting(authority)
    current = ["token-0"]
    load = Load(service, lambda: current[0], context)

    def names() -> set[str]:
        found = set()
        for _ in range(8):  # both fronts
            connection = service.connect(context)
            connection.connect()
            found.add(dict(part[0] for part in connection.sock.getpeercert()["subject"])["commonName"])
            connection.close()
        return found

    def status(token: str) -> set[int]:
        return {service.ask("POST", LOOKUP, token, BODY, context)[0] for _ in range(8)}

    try:
        for turn, name in enumerate(("second", "third", "fourth"), start=1):
            new = f"token-{turn}"
            write_tokens(tokens, entry("ranker", "lookup", sha256=[digest_of(current[0]), digest_of(new)]))
            authority.sign(name, "server")  # the certificate first, then its key
            wait_until(lambda name=name: names() == {name}, "new connections see the new certificate")
            wait_until(lambda new=new: status(new) == {200}, "the new token is known")
            before, current[0] = current[0], new
            write_tokens(tokens, entry("ranker", "lookup", sha256=[digest_of(new)]))
            if turn == 3:
                load.wait_for_next()  # requests with the token before have been answered
            wait_until(lambda before=before: status(before) == {401}, "the former token is unknown")
    finally:
        load.end()
    assert load.failures == []
    assert sum(load.answers.values()) > 100
    found = service.ask("GET", "/metrics", current[0], None, context)[2].decode()
    assert re.search(r'^hps_http_token_requests_total\{status="200",who="ranker"\} [1-9]', found, re.MULTILINE)


MATRIX = [
    ("GET", "/v2/health/ready", None, "lookup write admin both none unknown nothing"),
    ("POST", LOOKUP, BODY, "lookup both"),
    ("GET", f"{ROWS}/1", None, "lookup both"),
    ("GET", "/metrics", None, "lookup write admin both none"),
    ("POST", ROWS, ROW_BODY, "write both"),
    ("POST", DEPLOY, b"{}", "admin"),
]


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a token for each right."""
    directory, started = tmp_path_factory.mktemp("tokens"), ChildProcesses()
    document, tokens = document_in(directory), directory / "tokens.json"
    both = entry("both", "lookup", "write", certificate="both.example")
    write_tokens(tokens, *(entry(right, right) for right in ("lookup", "write", "admin")), both, entry("none"))
    document["service"]["tokens_path"] = str(tokens)
    yield Served(started, directory, document, "--fronts", 1)
    started.end()


def test_every_right_opens_its_routes_and_no_other(with_tokens: Served) -> None:
    service = with_tokens
    senders = {name: SECRETS.get(name, name) for name in ("lookup", "write", "admin", "both", "none")}
    senders |= {"unknown": "guess", "nothing": ""}
    for method, path, body, allowed in MATRIX:
        for who, token in senders.items():
            status = service.ask(method, path, token, body)[0]
            expected = {200} if who in allowed.split() else {401} if who in ("unknown", "nothing") else {403}
            assert {status} == expected, (method, path, who)
    for token, status in (("guess", 401), (SECRETS["lookup"], 403)):  # no memory is held for the bodies of strangers
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as raw:
            lines = (f"POST {ROWS} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", "Content-Length: 10000000", "", "")
            raw.sendall("\r\n".join(lines).encode())
            assert raw.recv(100).startswith(f"HTTP/1.1 {status}".encode())
    claimed = '["both.example"]'
    assert service.ask("POST", ROWS, "", ROW_BODY, hps_client_certificate=claimed)[0] == 401, "it is only claimed"
    assert "by 127.0.0.1 (token admin): done" in service.text
    assert "by 127.0.0.1 (token write): 1 requests" in service.text


def test_a_client_needs_a_certificate_of_the_right_authority_and_gets_the_rights_of_its_entry(
    serve: Serve, children: ChildProcesses, tmp_path: Path, authority: Authority
) -> None:
    stranger, tokens, by_uri = Authority(tmp_path, "stranger"), tmp_path / "tokens.json", "spiffe://example/trainer"
    named = {"name": "ranker", "rights": ["lookup"], "certificate": "ranker.example"}
    write_tokens(tokens, named, {"name": "trainer", "rights": ["write"], "certificate": by_uri}, entry("admin", "admin"))
    paths = {"tls_certificate_path": authority.sign("server").both, "tls_client_ca_path": authority.path, "tokens_path": tokens}
    service = serve("--fronts", 1, access_log_per_s=1000, log_format="json", request_timeout_s=2, **paths)
    assert "--cert <client.pem>" in service.text
    ranker = trusting(authority, authority.sign("ranker.example"))
    trainer = trusting(authority, authority.sign("other.example", also=(by_uri,)))
    nobody = trusting(authority, authority.sign("nobody.example"))
    for context, lookup, write in ((ranker, 200, 403), (trainer, 403, 200), (nobody, 403, 403)):
        assert service.ask("POST", LOOKUP, "", BODY, context)[0] == lookup
        assert service.ask("POST", ROWS, "", ROW_BODY, context)[0] == write
    assert service.ask("POST", DEPLOY, SECRETS["admin"], b"{}", ranker)[0] == 200, "a token stands above the certificate"
    assert service.ask("POST", LOOKUP, "guess", BODY, ranker)[0] == 401
    claimed = {"hps_client_certificate": f'["{by_uri}"]', "hps_client": "1.2.3.4"}
    assert service.ask("POST", ROWS, "", ROW_BODY, nobody, **claimed)[0] == 403
    lines = [json.loads(line) for line in service.text.splitlines() if line.startswith("{")]
    access = [(line["who"], line["status"]) for line in lines if line["logger"] == "hps.access" and "who" in line]
    assert {("ranker", 200), ("ranker", 403), ("trainer", 200)} <= set(access)

    def refused(context: ssl.SSLContext) -> bool:
        try:
            service.ask("POST", LOOKUP, "", BODY, context)
        except (OSError, http.client.HTTPException):
            return True
        return False

    probe = authority.sign("probe")
    clients = {"SSL_CERT_FILE": str(authority.path), "HPS_CLIENT_CERTIFICATE": str(probe.both)}
    url = f"https://127.0.0.1:{service.port}"
    command = children.hps("models", url, "--token", SECRETS["admin"], env={**os.environ, **clients})
    assert "serving" in command.communicate(timeout=PATIENCE_S)[0]
    for given, code in (({"HPS_HEALTH_CERTIFICATE": str(probe.both)}, 0), ({}, 1)):
        health = children.start(*health_check(), env={**os.environ, "HPS_HEALTH_URL": f"{url}/v2/health/ready", **given})
        health.communicate(timeout=PATIENCE_S)
        assert health.returncode == code
    expired = authority.sign("ranker.example", "expired", days=-1)
    for pair in (None, stranger.sign("ranker.example", "strange"), expired):
        assert refused(trusting(authority, pair))
    assert refused(trusting(stranger))
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as plain:
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
    silent = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    with silent, suppress(ConnectionResetError):
        assert silent.recv(100) == b"", "a handshake takes no longer than request_timeout_s"
    assert service.ask("POST", LOOKUP, "", BODY, ranker)[0] == 200
    found = service.ask("GET", "/metrics", "", None, ranker)[2].decode()
    assert re.search(r'^hps_http_aborted_connections_total\{reason="handshake"\} [1-9]', found, re.MULTILINE)


def health_check() -> list[str]:
    """The health check of the image, by this Python."""
    line = next(splitline for splitline in (ROOT / "deploy/Dockerfile").read_text().splitlines() if "urlopen" in splitline)
    return [sys.executable, *json.loads(line.strip().removeprefix("CMD "))[1:]]


def test_large_requests_pass_whole_and_slow_or_idle_clients_hold_no_tls_connection(serve: Serve, authority: Authority) -> None:
    pair = authority.sign("server").both
    service = serve("--fronts", 0, tls_certificate_path=pair, max_connections=20, answer_timeout_s=1)
    context = trusting(authority)
    with ExitStack() as stack:
        address = ("127.0.0.1", service.port)
        silent = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(60)]
        assert service.ask("POST", LOOKUP, "", BODY, context)[0] == 200
        ended = 0
        for one in silent:
            one.setblocking(False)
            with suppress(BlockingIOError, ConnectionResetError):
                ended += one.recv(1) == b""
        assert ended >= 30, "handshakes that do not end leave room for others"
    keys = np.arange(1_000_000, dtype=np.int64) % 10
    idle = [service.connect(context) for _ in range(5)]
    for one in idle:
        assert ask_on(one, "POST", LOOKUP, "", BODY)[0] == 200
    for _ in range(2):
        idle[0].sock.sendall(binary_request(keys))
        answer = http.client.HTTPResponse(idle[0].sock, method="POST")
        answer.begin()
        assert answer.status == 200
        body = answer.read()
        vectors = np.frombuffer(body[int(answer.headers["inference-header-content-length"]) :], np.float32).reshape(-1, 3)
        assert (vectors == keys[:, None]).all()
    with socket.socket() as raw:  # reads nothing of an answer of 12 MB
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        raw.connect(address)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as slow:
            slow.sendall(binary_request(keys))
            wait_until(lambda: "which does not read its answer" in service.text, "it is given up")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(PATIENCE_S) == 0
    assert "requests have ended; connections left: 0" in service.text, "idle clients are not waited for"
    for one in idle:
        one.close()


def binary_request(keys: np.ndarray) -> bytes:
    shape = {"shape": [len(keys)], "datatype": "INT64", "parameters": {"binary_data_size": keys.nbytes}}
    text = json.dumps({"inputs": [{"name": "item", **shape}], "parameters": {"binary_data_output": True}}).encode()
    lines = (f"Inference-Header-Content-Length: {len(text)}", f"Content-Length: {len(text) + keys.nbytes}", "", "")
    return "\r\n".join(("POST /v2/models/m/infer HTTP/1.1", "Host: x", *lines)).encode() + text + keys.tobytes()


def test_a_public_address_is_warned_of_until_a_file_of_tokens_comes_by_a_signal_and_goes_again(
    serve: Serve, tmp_path: Path, document: dict[str, Any]
) -> None:
    tokens = tmp_path / "tokens.json"
    service = serve("--host", "0.0.0.0", "--fronts", 1)
    assert "everyone who reaches 0.0.0.0 may look up, and read metrics, without a token" in service.text
    assert "tokens, keys and vectors are sent to and from 0.0.0.0 unencrypted" in service.text

    def reload(says: str, **settings: str) -> None:
        (tmp_path / "ps.json").write_text(json.dumps(document | {"service": document["service"] | settings}))
        service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: says in service.text, "it has read the configuration")

    def status(token: str) -> int:
        return service.ask("POST", LOOKUP, token, BODY)[0]

    tokens.write_text("wrong")
    reload("nothing changes", tokens_path=str(tokens))
    assert status("") == 200
    write_tokens(tokens, entry("ranker", "lookup"))
    reload("service.tokens_path is", tokens_path=str(tokens))
    wait_until(lambda: status("") == 401, "the front has heard of it")
    assert status("ranker") == 200
    reload(f"service.tokens_path is , was {tokens}")
    wait_until(lambda: status("") == 200, "the front has heard of it")


def test_no_secret_is_in_logs_metrics_errors_or_process_lists(
    children: ChildProcesses, tmp_path: Path, document: dict[str, Any]
) -> None:
    no_secret_is_told(children, tmp_path, document, "text")


def no_secret_is_told(children: ChildProcesses, tmp_path: Path, document: dict[str, Any], log_format: str) -> None:
    authority, tokens = Authority(tmp_path), tmp_path / "tokens.json"
    pair = authority.sign("server")
    entries = [entry("lookup", "lookup"), {"name": "other", "rights": ["admin"], "token": SECRETS["other"]}]
    write_tokens(tokens, *entries)
    paths = {"tls_certificate_path": pair.certificate, "tls_key_path": pair.key, "tokens_path": tokens}
    logs = {"log_level": "debug", "log_format": log_format, "access_log_per_s": 1000, "slow_lookup_ms": 0.000001}
    document["service"] |= {name: str(path) for name, path in paths.items()} | logs | {"bearer_token": SECRETS["bearer"]}
    service = Served(children, tmp_path, document, "--fronts", 2, real=True, HPS_ADMIN_TOKEN=SECRETS["admin"])
    context = trusting(authority)
    seen = []
    for secret in SECRETS.values():
        for method, path, body in (
            ("POST", LOOKUP, BODY),
            ("POST", LOOKUP, b"{"),
            ("POST", "/v2/models/m/infer", b"{}"),
            ("POST", ROWS, b"{"),
            ("POST", DEPLOY, b"{}"),
            ("POST", "/v1/models/m/deploy", b'{"version": 7}'),
            *(("GET", one, None) for one in (f"{ROWS}/1", *READ, "/v1/models", "/v2/models/m/stats", "/openapi.json", "/")),
        ):
            seen.append(service.ask(method, path, secret, body, context))
    seen.append(service.ask("POST", LOOKUP, "", BODY, context, Authorization=f"Basic {SECRETS['none']}"))
    write_tokens(
        tokens, *entries, {"name": "bad", "rights": ["lookup"], "sha256": SECRETS["none"], "token": [SECRETS["write"], 5]}
    )
    wait_until(lambda: "the tokens stay as they are" in service.text, "it has read the file")
    pair.key.write_text(SECRETS["none"])
    wait_until(lambda: "new connections keep the previous certificate" in service.text, "it has read the key")
    for token in (SECRETS["lookup"], SECRETS["other"]):
        seen += [service.ask("GET", path, token, None, context) for path in READ]
    assert {status for status, _, _ in seen} >= {200, 400, 401, 403}
    titles = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(one.name)) == service.process.pid:
                titles.append((one / "cmdline").read_bytes().decode() + (one / "comm").read_text())
    assert len(titles) == 4
    material = [line for line in pair.key.read_text().splitlines() if line]
    everything = [service.text, *titles, *(repr(one) for one in seen)]
    for secret in [*SECRETS.values(), *material, digest_of(SECRETS["lookup"]), digest_of(SECRETS["other"])]:
        assert not [text[max(0, text.find(secret) - 200) :][:400] for text in everything if secret in text], secret
