"""Who may look up, who may change, and how often: every combination of tokens, addresses and headers."""

from typing import Any

import pytest

from hps.configuration.load import ServiceConfig, load_configuration
from hps.configuration.tokens import TokenConfig, digest_of
from hps.errors import ConfigError
from hps.serve.http.authorization import CERTIFICATE, Authorization, exposures, is_change, is_loopback
from hps.serve.http.http_answer import RequestError
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of

BEARER, ADMIN, WRONG, BASIC, NONE = (b"Bearer t-look", b"Bearer t-change", b"Bearer other", b"Basic t-change", b"")
SOME = b"Bearer t-some"
BY_TOKEN, BY_ADDRESS = "10.0.0.7 (admin token)", "10.0.0.7 (loopback)"
ROUTES = {
    "read": ("GET", "/v1/models"),
    "row": ("GET", "/v1/models/m/tables/t/rows/5"),
    "file": ("GET", "/v1/row-files/0123"),
    "region": ("POST", "/v2/systemsharedmemory/region/x/register"),
    "write": ("POST", "/v1/models/m/tables/t/rows"),
    "delete": ("DELETE", "/v1/models/m/tables/t/rows/5"),
    "admin": ("POST", "/v1/models/m/deploy"),
    "load": ("POST", "/v2/repository/models/m/load"),
}


def settings(**service: str) -> ServiceConfig:
    return load_configuration(document_of(model_of("m", ["nowhere"], {"item": 3}), service=service)).service


def authorization(*, loopback: bool = True, **tokens: str) -> Authorization:
    checked = Authorization(settings(**tokens))
    checked.loopback = loopback
    return checked


def entry(*rights: str, name: str = "some", **more: Any) -> TokenConfig:
    return TokenConfig.model_validate({"name": name, "rights": rights, "sha256": digest_of(f"t-{name}"), **more})


def named(*entries: TokenConfig, share: float = 0.0, clock: Any = Clock(), **tokens: str) -> Authorization:  # noqa: B008
    given = settings(tokens_path="somewhere", **tokens)
    checked = Authorization(given, share, clock)
    checked.configure(given, entries)
    return checked


def outcome(checked: Authorization, what: str, sent: bytes, certificate: tuple[str, ...] = (), **more: bytes) -> Any:
    """Who did it, or 200, or the status of the refusal: of a lookup, a change by the old rules, or one of `ROUTES`."""
    headers = {name.replace("_", "-").encode(): value for name, value in more.items()}
    headers |= {b"authorization": sent} if sent else {}
    method, path = ROUTES["admin" if what in ("lookup", "change") else what]
    scope = {"method": method, "path": path, "client": ("10.0.0.7", 1234), "server": ("127.0.0.1", 8000)}
    try:
        if what == "lookup":
            checked.check_lookup(headers, certificate)
            return 200
        if what == "change":
            return checked.check_change(scope, headers)
        return checked.check({**scope, CERTIFICATE: certificate}, headers, checked.find(headers, certificate)) or 200
    except RequestError as error:
        return "a token is shown" if "t-" in str(error) else error.status


def lookups(checked: Authorization, *sent: bytes) -> list[Any]:
    return [outcome(checked, "lookup", one) for one in sent]


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
        assert outcome(checked, "change", sent) == expected, sent


@pytest.mark.parametrize(
    ("checked", "expected"),
    [
        (authorization(loopback=True), "loopback"),
        (authorization(loopback=True, bearer_token="b"), "loopback"),
        (authorization(loopback=False, bearer_token="b"), "off"),
        (authorization(loopback=False, admin_token="a"), "token"),
        (named(entry("lookup", "write", token="t-one")), "off"),
        (named(entry("admin", token="t-one")), "token"),
        (named(entry("lookup", certificate="ops"), entry("admin", name="other", token="t-one")), "token"),
        (named(entry("admin", certificate="ops")), "certificate or token"),
    ],
)
def test_what_a_change_needs_is_said(checked: Authorization, expected: str) -> None:
    assert checked.administration == expected


def test_the_admin_token_allows_lookups_too() -> None:
    for admin, of_admin in (("", 401), ("t-change", 200)):
        checked = authorization(bearer_token="t-look", admin_token=admin)
        assert lookups(checked, BEARER, ADMIN, WRONG, BASIC, NONE) == [200, of_admin, 401, 401, 401]
        assert checked.guarded
    unguarded = authorization(admin_token="t-change")
    assert (lookups(unguarded, NONE), unguarded.guarded) == ([200], False)


def test_a_row_file_needs_more_than_a_lookup_where_there_are_tokens() -> None:
    assert outcome(authorization(), "file", NONE) == 200
    for tokens in ({"bearer_token": "t-look"}, {"admin_token": "t-change"}):
        checked = authorization(**tokens)
        expected = [200 if "admin_token" in tokens else 401, 403 if "bearer_token" in tokens else 401, 401, 401]
        assert [outcome(checked, "file", sent) for sent in (ADMIN, BEARER, WRONG, NONE)] == expected


OWN_PAGES = {
    "origin": [b"http://127.0.0.1:8000", b"HTTP://localhost:8000", b"http://[::1]:8000"],
    "content_type": [b"application/x-www-form-urlencoded"],  # curl -d
}
OTHERS = {
    "origin": [b"http://localhost:3000", b"https://evil.example", b"http://evil.example:8000", b"null", b""],
    "x_forwarded_for": [b"127.0.0.1"],
    "forwarded": [b"for=127.0.0.1"],
    "via": [b"1.1 proxy"],
    "x_real_ip": [b"127.0.0.1"],
}


@pytest.mark.parametrize(("given", "expected"), [(OWN_PAGES, BY_ADDRESS), (OTHERS, 403)])
def test_loopback_trusts_neither_pages_of_others_nor_proxies(given: dict[str, list[bytes]], expected: Any) -> None:
    for name, value in [(name, value) for name, values in given.items() for value in values]:
        headers = {name: value} | ({"host": b"evil.example:8000"} if b":8000" in value and b"evil" in value else {})
        assert outcome(authorization(), "change", NONE, **headers) == expected, (name, value)
        by_token = outcome(authorization(admin_token="t-change"), "change", ADMIN, **headers)
        assert by_token == BY_TOKEN, "no browser sends that by itself"


def test_tokens_change_with_the_settings() -> None:
    checked = authorization(admin_token="t-change")
    checked.configure(settings(admin_token="new"))
    assert [outcome(checked, "change", sent) for sent in (ADMIN, b"bearer new")] == [401, BY_TOKEN]
    with pytest.raises(ConfigError, match=r"service\.admin_token: .*expected another token"):
        authorization(bearer_token="same", admin_token="same")


def test_loopback_is_of_the_bound_address() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "x")))


def test_what_is_a_change() -> None:
    for expected, method, paths in (
        (True, "POST", "/v1/models/m/deploy /v1/models/m/tables/t/rows /v2/repository/index/"),
        (True, "POST", "/v2/repository/models/m/load /v2/repository/models/m/unload /v2/repository/models/index/load"),
        (True, "DELETE", "/v1/models/m/tables/t/rows/5"),
        (True, "PATCH", "/v1/models/m/whatever"),
        (True, "GET", "/v1/debug/check"),
        (False, "POST", "/v2/repository/index /v2/repository/mine/index /v2/models/m/infer"),
        (False, "GET", "/v1/models /v1/models/m/tables/t/rows/5"),
        (False, "HEAD", "/v1/models/m/deploy"),
    ):
        assert {is_change(method, path) for path in paths.split()} == {expected}, (method, paths)


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize(
    ("rights", "allowed"),
    [
        ((), set()),
        (("lookup",), {"lookup", "row", "region"}),
        (("write",), {"write", "delete"}),
        (("files",), {"file"}),
        (("admin",), {"admin", "load"}),
        (("lookup", "write", "files", "admin"), {"lookup", *ROUTES}),
    ],
)
def test_each_right_allows_its_routes_by_token_or_by_certificate(rights: Any, allowed: set[str], loopback: bool) -> None:
    checked = named(entry(*rights, certificate=["some.example", "spiffe://x/some"]), entry(name="other"))
    checked.loopback = loopback
    for what in ("lookup", *ROUTES):
        yes: Any = "10.0.0.7 (token some)" if what in ("write", "delete", "admin", "load") else 200
        expected = yes if what in allowed | {"read"} else 403
        assert outcome(checked, what, SOME) == expected, what
        assert outcome(checked, what, b"", ("x", "spiffe://x/some")) == expected, what
        assert outcome(checked, what, b"Bearer t-none") == 401
        assert outcome(checked, what, b"Bearer t-none", ("some.example",)) == 401, "a wrong token is not forgiven"
        assert outcome(checked, what, b"") == 401
        assert outcome(checked, what, b"", ("x",)) == 403


def test_tokens_of_the_settings_work_beside_those_of_the_file() -> None:
    checked = named(entry("lookup"), bearer_token="t-look", admin_token="t-change")
    found = [[outcome(checked, what, sent) for what in ("lookup", "write", "admin")] for sent in (BEARER, ADMIN, SOME)]
    assert found == [[200, 403, 403], [200, BY_TOKEN, BY_TOKEN], [200, 403, 403]]


def test_during_a_rotation_both_tokens_are_of_one_name_and_share_its_limit() -> None:
    clock, old, new = Clock(), b"Bearer t-old", b"Bearer t-new"
    both = [digest_of("t-old"), digest_of("t-new")]
    checked = named(entry("lookup", sha256=both, requests_per_s=1, burst=2), share=1.0, clock=clock)
    assert lookups(checked, old, new, old) == [200, 200, 429]
    checked.configure(settings(tokens_path="somewhere"), [entry("lookup", sha256=both[1], requests_per_s=1, burst=2)])
    assert lookups(checked, old, new) == [401, 429], "its limit goes on"
    clock.now += 1.0
    assert lookups(checked, new) == [200]


def test_a_limit_is_shared_by_the_fronts_and_says_when_to_come_back() -> None:
    clock = Clock()
    checked = named(entry("lookup", requests_per_s=1, burst=8), share=0.5, clock=clock)
    assert lookups(checked, *[SOME] * 5) == [200] * 4 + [429]
    with pytest.raises(RequestError, match="token some: got more than its requests_per_s allows") as refused:
        checked.check_lookup({b"authorization": SOME})
    assert refused.value.headers == ((b"retry-after", b"2"),)
    for waited, expected in ((1.9, [429]), (0.1, [200, 429]), (1000, [200] * 4 + [429])):  # no more than the burst
        clock.now += waited
        assert lookups(checked, *[SOME] * len(expected)) == expected
    assert lookups(named(entry("lookup", requests_per_s=1)), SOME) == [200], "the owner has no limits"


def test_keys_are_paid_for_after_a_lookup_of_any_size() -> None:
    clock = Clock()
    checked = named(entry("lookup", keys_per_s=100), share=1.0, clock=clock)
    checked.take_keys(checked.check_lookup({b"authorization": SOME}), 1000)
    assert lookups(checked, SOME) == [429]
    clock.now += 8.9
    assert outcome(checked, "read", SOME) == 429
    clock.now += 0.2
    assert lookups(checked, SOME) == [200]


def test_a_valid_certificate_is_named_where_no_token_is_asked_for() -> None:
    checked = authorization()
    identity = checked.find({}, ("some.example",))
    assert identity is not None
    assert (identity.name, checked.counted(identity)) == ("some.example", "")
    assert [outcome(checked, what, b"", ("some.example",)) for what in ("lookup", "admin")] == [200, BY_ADDRESS]


def test_addresses_that_others_reach_are_warned_of() -> None:
    tls = "tls_certificate_path"
    for host, given, warnings in (
        ("127.0.0.1", (), 0),
        ("0.0.0.0", (), 2),
        ("0.0.0.0", ("bearer_token",), 1),
        ("10.0.0.1", ("tokens_path",), 1),
        ("::", (tls,), 1),
        ("::", (tls, "tls_client_ca_path"), 0),
        ("::", (tls, "bearer_token"), 0),
        ("0.0.0.0", ("admin_token",), 2),  # lookups need none
    ):
        assert len(exposures(settings(**dict.fromkeys(given, "x")), host)) == warnings, (host, given)
