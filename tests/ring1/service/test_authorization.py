"""Who may look up, who may change, and how often: every combination of tokens, addresses and headers."""

from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.configuration.tokens import TokenConfig, digest_of
from hps.errors import ConfigError
from hps.service.authorization import CERTIFICATE, Authorization, exposures, is_change, is_loopback
from hps.service.http_answer import RequestError
from tests.fakes.clock import Clock
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
def test_a_change_needs_the_admin_token_or_where_there_is_none_loopback(loopback: bool, bearer: str, admin: str) -> None:
    checked = authorization(loopback=loopback, bearer_token=bearer, admin_token=admin)
    for sent in (BEARER, ADMIN, WRONG, BASIC, NONE):
        if admin:
            expected: Any = BY_TOKEN if sent == ADMIN else 403 if bearer and sent == BEARER else 401
        elif not loopback:
            expected = 403
        else:
            expected = BY_ADDRESS if not bearer or sent == BEARER else 401
        assert outcome(checked, sent) == expected, sent


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


def entry(name: str, *rights: str, **more: Any) -> TokenConfig:
    return TokenConfig.model_validate({"name": name, "rights": rights, "sha256": digest_of(f"t-{name}"), **more})


def named(*entries: TokenConfig, share: float = 0.0, clock: Any = Clock(), **tokens: str) -> Authorization:  # noqa: B008
    document = document_of(model_of("m", ["nowhere"], {"item": 3}), service={"tokens_path": "somewhere", **tokens})
    settings = load_configuration(document).service
    checked = Authorization(settings, share, clock)
    checked.configure(settings, entries)
    return checked


def status(checked: Authorization, what: str, sent: bytes, certificate: tuple[str, ...] = ()) -> Any:
    """What becomes of a lookup, a read of rows or of metadata, a write or a change of a model."""
    method, path = {
        "read": ("GET", "/v1/models"),
        "row": ("GET", "/v1/models/m/tables/t/rows/5"),
        "region": ("POST", "/v2/systemsharedmemory/region/x/register"),
        "write": ("POST", "/v1/models/m/tables/t/rows"),
        "delete": ("DELETE", "/v1/models/m/tables/t/rows/5"),
        "admin": ("POST", "/v1/models/m/deploy"),
        "load": ("POST", "/v2/repository/models/m/load"),
        "lookup": ("", ""),
    }[what]
    headers = {b"authorization": sent} if sent else {}
    try:
        if what == "lookup":
            checked.check_lookup(headers, certificate)
            return 200
        scope = {**SCOPE, "method": method, "path": path, CERTIFICATE: certificate}
        return checked.check(scope, headers, checked.find(headers, certificate)) or 200
    except RequestError as error:
        return "a token is shown" if "t-" in str(error) else error.status


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize(
    ("rights", "allowed"),
    [
        ((), {"read"}),
        (("lookup",), {"read", "lookup", "row", "region"}),
        (("write",), {"read", "write", "delete"}),
        (("admin",), {"read", "admin", "load"}),
        (("lookup", "write", "admin"), {"read", "lookup", "row", "region", "write", "delete", "admin", "load"}),
    ],
)
def test_each_right_allows_its_routes_by_token_or_by_certificate(rights: Any, allowed: set[str], loopback: bool) -> None:
    checked = named(entry("some", *rights, certificate=["some.example", "spiffe://x/some"]), entry("other"))
    checked.loopback = loopback
    for what in ("read", "lookup", "row", "region", "write", "delete", "admin", "load"):
        changes = what in ("write", "delete", "admin", "load")
        yes: Any = "10.0.0.7 (token some)" if changes else 200
        assert status(checked, what, b"Bearer t-some") == (yes if what in allowed else 403), what
        assert status(checked, what, b"", ("x", "spiffe://x/some")) == (yes if what in allowed else 403), what
        assert status(checked, what, b"Bearer t-none") == 401
        assert status(checked, what, b"Bearer t-none", ("some.example",)) == 401, "a wrong token is not forgiven"
        assert status(checked, what, b"") == 401
        assert status(checked, what, b"", ("x",)) == 403


def test_tokens_of_the_settings_work_beside_those_of_the_file() -> None:
    checked = named(entry("some", "lookup"), bearer_token="t-look", admin_token="t-change")
    found = [
        [status(checked, what, sent) for what in ("lookup", "write", "admin")] for sent in (BEARER, ADMIN, b"Bearer t-some")
    ]
    assert found == [[200, 403, 403], [200, BY_TOKEN, BY_TOKEN], [200, 403, 403]]


def test_during_a_rotation_both_tokens_are_of_one_name_and_share_its_limit() -> None:
    clock = Clock()
    both = [digest_of("t-old"), digest_of("t-new")]
    checked = named(entry("some", "lookup", sha256=both, requests_per_s=1, burst=2), share=1.0, clock=clock)
    assert [status(checked, "lookup", sent) for sent in (b"Bearer t-old", b"Bearer t-new", b"Bearer t-old")] == [200, 200, 429]
    checked.configure(checked_settings(), [entry("some", "lookup", sha256=both[1], requests_per_s=1, burst=2)])
    assert [status(checked, "lookup", sent) for sent in (b"Bearer t-old", b"Bearer t-new")] == [401, 429], "its limit goes on"
    clock.now += 1.0
    assert status(checked, "lookup", b"Bearer t-new") == 200


def checked_settings() -> Any:
    return load_configuration(document_of(model_of("m", ["x"], {"t": 1}), service={"tokens_path": "somewhere"})).service


def test_a_limit_is_shared_by_the_fronts_and_says_when_to_come_back() -> None:
    clock = Clock()
    checked = named(entry("some", "lookup", requests_per_s=1, burst=8), share=0.5, clock=clock)
    assert [status(checked, "lookup", b"Bearer t-some") for _ in range(5)] == [200] * 4 + [429]
    with pytest.raises(RequestError, match="token some: got more than its requests_per_s allows") as refused:
        checked.check_lookup({b"authorization": b"Bearer t-some"})
    assert refused.value.headers == ((b"retry-after", b"2"),)
    clock.now += 1.9
    assert status(checked, "lookup", b"Bearer t-some") == 429
    clock.now += 0.1
    assert [status(checked, "lookup", b"Bearer t-some") for _ in range(2)] == [200, 429]
    clock.now += 1000
    assert [status(checked, "lookup", b"Bearer t-some") for _ in range(5)] == [200] * 4 + [429], "no more than the burst"
    assert status(named(entry("some", "lookup", requests_per_s=1)), "lookup", b"Bearer t-some") == 200, (
        "the owner has no limits"
    )


def test_keys_are_paid_for_after_a_lookup_of_any_size() -> None:
    clock = Clock()
    checked = named(entry("some", "lookup", keys_per_s=100), share=1.0, clock=clock)
    identity = checked.check_lookup({b"authorization": b"Bearer t-some"})
    checked.take_keys(identity, 1000)
    assert status(checked, "lookup", b"Bearer t-some") == 429
    clock.now += 8.9
    assert status(checked, "read", b"Bearer t-some") == 429
    clock.now += 0.2
    assert status(checked, "lookup", b"Bearer t-some") == 200


def test_a_valid_certificate_is_named_where_no_token_is_asked_for() -> None:
    checked = authorization()
    identity = checked.find({}, ("some.example",))
    assert identity is not None
    assert (identity.name, checked.counted(identity)) == ("some.example", "")
    assert status(checked, "lookup", b"", ("some.example",)) == 200
    assert status(checked, "admin", b"", ("some.example",)) == BY_ADDRESS


@pytest.mark.parametrize(
    ("host", "settings", "warnings"),
    [
        ("127.0.0.1", {}, 0),
        ("0.0.0.0", {}, 2),
        ("0.0.0.0", {"bearer_token": "x"}, 1),
        ("10.0.0.1", {"tokens_path": "x"}, 1),
        ("::", {"tls_certificate_path": "x"}, 1),
        ("::", {"tls_certificate_path": "x", "tls_client_ca_path": "x"}, 0),
        ("::", {"tls_certificate_path": "x", "bearer_token": "x"}, 0),
        ("0.0.0.0", {"admin_token": "x"}, 2),  # lookups need none
    ],
)
def test_addresses_that_others_reach_are_warned_of(host: str, settings: dict[str, str], warnings: int) -> None:
    document = document_of(model_of("m", ["x"], {"t": 1}), service=settings)
    assert len(exposures(load_configuration(document).service, host)) == warnings
