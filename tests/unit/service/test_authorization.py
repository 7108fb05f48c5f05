"""Who may look up, and who may change: every combination of tokens, addresses and headers."""

from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.errors import ConfigError
from hps.service.authorization import Authorization, is_change, is_loopback
from hps.service.http_answer import RequestError
from tests.servers.running_service import document_of, model_of

SCOPE = {"method": "POST", "path": "/v1/models/m/deploy", "client": ("10.0.0.7", 1234), "server": ("127.0.0.1", 8000)}
BEARER, ADMIN, WRONG, BASIC, NONE = (b"Bearer t-look", b"Bearer t-change", b"Bearer other", b"Basic t-change", b"")


def authorization(*, loopback: bool = True, **tokens: str) -> Authorization:
    document = document_of(model_of("m", ["nowhere"], {"item": 3}), service=tokens)
    checked = Authorization(load_configuration(document).service)
    checked.loopback = loopback
    return checked


def outcome(checked: Authorization, authorization: bytes, **headers: bytes) -> Any:
    """Who may change something; or the status of the refusal."""
    given = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    if authorization:
        given[b"authorization"] = authorization
    try:
        return checked.check_change(SCOPE, given)
    except RequestError as error:
        return "a token is shown" if "t-" in str(error) else error.status


BY_TOKEN, BY_ADDRESS = "10.0.0.7 (admin token)", "10.0.0.7 (loopback)"


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize("bearer", ["", "t-look"])
@pytest.mark.parametrize("admin", ["", "t-change"])
@pytest.mark.parametrize("sent", [BEARER, ADMIN, WRONG, BASIC, NONE])
def test_a_change_needs_the_admin_token_or_where_there_is_none_loopback(
    loopback: bool, bearer: str, admin: str, sent: bytes
) -> None:
    checked = authorization(loopback=loopback, bearer_token=bearer, admin_token=admin)
    if admin:
        expected: Any = BY_TOKEN if sent == ADMIN else 403 if bearer and sent == BEARER else 401
    elif not loopback:
        expected = 403
    else:
        expected = BY_ADDRESS if not bearer or sent == BEARER else 401
    assert outcome(checked, sent) == expected


@pytest.mark.parametrize("admin", ["", "t-change"])
@pytest.mark.parametrize("sent", [BEARER, ADMIN, WRONG, BASIC, NONE])
def test_the_admin_token_allows_lookups_too(admin: str, sent: bytes) -> None:
    checked = authorization(bearer_token="t-look", admin_token=admin)
    allowed = sent == BEARER or (admin and sent == ADMIN)
    if allowed:
        checked.check_lookup({b"authorization": sent})
    else:
        with pytest.raises(RequestError, match="missing or has the wrong token"):
            checked.check_lookup({b"authorization": sent} if sent else {})
    assert checked.guarded
    unguarded = authorization(admin_token="t-change")
    unguarded.check_lookup({})
    assert not unguarded.guarded


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"origin": b"http://127.0.0.1:8000"}, True),
        ({"origin": b"HTTP://localhost:8000"}, True),
        ({"origin": b"http://[::1]:8000"}, True),
        ({"origin": b"http://localhost:3000"}, False),
        ({"origin": b"https://evil.example"}, False),
        ({"origin": b"http://evil.example:8000", "host": b"evil.example:8000"}, False),  # its name was made to lead here
        ({"origin": b"null"}, False),
        ({"origin": b""}, False),
        ({"x_forwarded_for": b"127.0.0.1"}, False),
        ({"forwarded": b"for=127.0.0.1"}, False),
        ({"via": b"1.1 proxy"}, False),
        ({"x_real_ip": b"127.0.0.1"}, False),
        ({"content_type": b"application/x-www-form-urlencoded"}, True),  # curl -d
    ],
)
def test_loopback_trusts_neither_pages_of_others_nor_proxies(headers: dict[str, bytes], allowed: bool) -> None:
    assert outcome(authorization(), NONE, **headers) == (BY_ADDRESS if allowed else 403)
    assert outcome(authorization(admin_token="t-change"), ADMIN, **headers) == BY_TOKEN, "no browser sends that by itself"


def test_tokens_change_with_the_settings() -> None:
    checked = authorization(admin_token="t-change")
    checked.configure(load_configuration(document_of(model_of("m", ["x"], {"t": 1}), service={"admin_token": "new"})).service)
    assert outcome(checked, ADMIN) == 401
    assert outcome(checked, b"bearer new") == BY_TOKEN


def test_one_token_cannot_be_both() -> None:
    with pytest.raises(ConfigError, match=r"service\.admin_token: .*expected another token"):
        authorization(bearer_token="same", admin_token="same")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("x", False),
    ],
)
def test_loopback_is_of_the_bound_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    ("method", "path", "changes"),
    [
        ("POST", "/v1/models/m/deploy", True),
        ("POST", "/v1/models/m/tables/t/rows", True),
        ("DELETE", "/v1/models/m/tables/t/rows/5", True),
        ("PATCH", "/v1/models/m/whatever", True),
        ("POST", "/v2/repository/models/m/load", True),
        ("POST", "/v2/repository/models/m/unload", True),
        ("POST", "/v2/repository/index", False),
        ("POST", "/v2/repository/mine/index", False),
        ("POST", "/v2/repository/index/", True),
        ("POST", "/v2/repository/models/index/load", True),
        ("GET", "/v1/models", False),
        ("GET", "/v1/models/m/tables/t/rows/5", False),
        ("HEAD", "/v1/models/m/deploy", False),
        ("POST", "/v2/models/m/infer", False),
    ],
)
def test_what_is_a_change(method: str, path: str, changes: bool) -> None:
    assert is_change(method, path) == changes
