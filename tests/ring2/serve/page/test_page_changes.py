"""Administrators change models from the page: confirmed, with a token that stays in its memory, and logged; others cannot."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

import hps
from hps.testing.waiting import wait_until
from tests.browser import chromium as chromium  # fixtures
from tests.browser import doctored, opened, picture
from tests.browser import tab as tab
from tests.ring2.versions.test_checks_in_process import SHUFFLED, Make, Write
from tests.ring2.versions.test_checks_in_process import document as document  # fixtures
from tests.ring2.versions.test_checks_in_process import engine as engine
from tests.ring2.versions.test_checks_in_process import home as home
from tests.ring2.versions.test_checks_in_process import write as write
from tests.servers.running_service import RunningService, document_of, model_of, running_service

pytestmark = pytest.mark.browser
ADMIN = "an-admin-token"
DIM, ROWS = 4, 50


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model with versions 1, which is served at the start, and 2."""
    folder = tmp_path_factory.mktemp("shop")
    for version in ("1", "2"):
        keys = np.arange(ROWS)
        hps.write_sparse_model(folder / version, (keys, np.full((ROWS, DIM), float(version), np.float32)))
    model = model_of("shop", [folder / "1"], {"item": DIM})
    model["versions"] = [{"version": 2, "sparse_files": [str(folder / "2")]}]
    model["version_policy"] = {"specific": {"versions": [1]}}
    return document_of(model)


@pytest.fixture
def service(shop: dict[str, Any]) -> Iterator[RunningService]:
    with running_service({**shop, "service": {"admin_token": ADMIN}}) as service:
        yield service


def serves(service: RunningService) -> str:
    return str(service.app.lifecycle.server.model("shop").version)


def test_a_version_is_deployed_and_rolled_back_with_the_keyboard(
    tab: Page, service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hps.serve.logs.changes")
    tab.goto(service.url)
    dialog, error, outcome = tab.locator("#act"), tab.locator("#act-error"), tab.locator("#outcome")
    tab.locator("[data-act=deploy]").press("Enter")
    expect(dialog).to_be_visible()
    expect(tab.locator("#act-fields [name=version]")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert (serves(service), service.app.lifecycle.live.requested) == ("1", {})
    tab.locator("[data-act=deploy]").press("Enter")
    tab.keyboard.type("2")
    tab.keyboard.press("Tab")
    tab.keyboard.type("a-guess")
    tab.keyboard.press("Enter")
    expect(error).to_contain_text("missing or has the wrong token")
    tab.fill("#act-token", ADMIN)
    tab.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(outcome).to_have_text(re.compile(r"^Deploy shop: done after .* s; version 2 serves$"))
    expect(tab.locator("[data-model=shop] .pinned")).to_contain_text("pinned by deploy")
    expect(tab.locator("#changes tbody tr")).to_contain_text("POST /v1/models/shop/deploy version 2")
    expect(tab.locator("#changes tbody tr")).to_contain_text("127.0.0.1 (admin token)")
    tab.locator("[data-act=rollback]").press("Enter")
    expect(tab.locator("#act-secret")).to_be_hidden()  # the page remembers it
    tab.keyboard.press("Enter")  # on Cancel
    expect(dialog).to_be_hidden()
    assert serves(service) == "2"
    tab.locator("[data-act=rollback]").press("Enter")
    tab.locator("#act-do").press("Enter")
    expect(outcome).to_have_text(re.compile(r"^Roll back shop: done after .* s; version 1 serves$"))
    done = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"[\d.]+ s$", "", line) for line in done if ": done" in line] == [
        "POST /v1/models/shop/deploy version 2, by 127.0.0.1 (admin token): done after ",
        "POST /v1/models/shop/rollback, by 127.0.0.1 (admin token): done after ",
    ]


def test_a_roll_back_says_which_version_it_returns_to(tab: Page, service: RunningService) -> None:
    """A second one returns to the version that the first one left."""
    fleet: list[bool] = []

    def change(body: dict[str, Any], number: int) -> None:
        [model] = body["server"]["models"]
        model["versions"] += [["9", "kept"], ["7", "kept"]]
        model["fleet"] = bool(fleet)

    doctored(tab, change)
    tab.goto(service.url)
    roll_back, title = tab.locator("[data-act=rollback]"), tab.locator("#act-title")
    expect(roll_back).to_have_text("Roll back to 7…")
    roll_back.click()
    expect(title).to_have_text("Roll back shop to version 7?")
    tab.click("#act-cancel")
    fleet.append(True)  # whose document says what was before
    expect(roll_back).to_have_text("Roll back…")
    roll_back.click()
    expect(title).to_have_text("Roll back shop?")


def test_the_token_is_in_no_storage_and_gone_with_the_page(tab: Page, service: RunningService) -> None:
    tab.goto(service.url)

    def ask(act: str) -> None:
        tab.click(f"[data-act={act}]")

    ask("deploy")
    tab.fill("#act-token", ADMIN)
    tab.click("#act-do")
    expect(tab.locator("#outcome")).to_contain_text("done")
    kept = tab.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, document.body.innerHTML])")
    assert ADMIN not in kept
    assert tab.locator("#act-token").input_value() == ""
    ask("rollback")
    tab.click("#act-forget")
    expect(tab.locator("#act-secret")).to_be_visible()
    tab.click("#act-cancel")
    tab.reload()
    ask("deploy")
    expect(tab.locator("#act-secret")).to_be_visible()


def test_a_change_that_is_refused_is_said_and_is_no_failed_deployment(tab: Page, service: RunningService) -> None:
    tab.goto(service.url)
    tab.click("[data-act=deploy]")
    tab.fill("#act-fields [name=version]", "7")
    tab.fill("#act-token", ADMIN)
    tab.click("#act-do")
    expect(tab.locator("#outcome")).to_have_text(re.compile("^Deploy shop: failed: .*version"))
    expect(tab.locator("#changes td.bad")).to_be_visible()
    expect(tab.locator(".condition")).to_have_count(0)
    expect(tab).to_have_title("hps")


@pytest.mark.parametrize("replaced", [True, False], ids=["by another change", "with its process"])
def test_a_change_whose_outcome_is_gone_is_not_awaited(tab: Page, service: RunningService, replaced: bool) -> None:
    changes: list[dict[str, Any]] = []
    lost: list[bool] = []

    def change(body: dict[str, Any], number: int) -> None:
        body["changes"] = [*changes]
        body["server"]["started"] += bool(lost and not replaced)

    doctored(tab, change)
    tab.route("**/v1/models/shop/**", lambda route: route.fulfill(status=202, json={"model": "shop", "number": 7}))
    tab.goto(service.url)
    tab.click("[data-act=deploy]")
    tab.fill("#act-token", ADMIN)
    tab.click("#act-do")
    outcome = tab.locator("#outcome")
    expect(outcome).to_have_text("Deploy shop: under way")
    about = {"model": "shop", "what": "POST /v1/models/shop/deploy", "by": "127.0.0.1", "since": "2026-12-01T00:00:00Z"}
    changes.append({**about, "number": 7, "seconds": 1.0, "rows": 1234})
    expect(outcome).to_have_text("Deploy shop: under way, 1,234 rows loaded")
    lost.append(True)
    changes[0] = {**about, "number": 8 if replaced else 1, "seconds": 1.0}
    expect(outcome).to_have_text("Deploy shop: it has ended; the server's log has its outcome")


@pytest.mark.parametrize("administration", ["off", "loopback", "token", "certificate or token"])
def test_changes_are_offered_where_the_server_makes_them(
    tab: Page, shop: dict[str, Any], tmp_path: Path, administration: str
) -> None:
    entries: dict[str, dict[str, Any]] = {
        "off": {"rights": ["lookup"], "token": "reader-reader"},
        "token": {"rights": ["admin"], "token": "reader-reader"},
        "certificate or token": {"rights": ["admin"], "token": "reader-reader", "certificate": "ops"},
    }
    settings = {}
    if entry := entries.get(administration):
        (tmp_path / "tokens.json").write_text(json.dumps({"tokens": [{"name": "reader", **entry}]}))
        settings = {"service": {"tokens_path": str(tmp_path / "tokens.json")}}
    with running_service({**shop, **settings}) as service:
        tab.goto(service.url)
        if settings:
            tab.fill("#token", "reader-reader")
            tab.press("#token", "Enter")
        expect(tab.locator("[data-model=shop] .badge")).to_have_text("ready")
        if administration == "off":
            assert tab.locator("[data-act]").count() == 0
            return
        tab.click("[data-act=deploy]")
        secret = tab.locator("#act-secret")
        expect(secret).to_be_visible(visible=administration != "loopback")
        assert tab.locator("#act-token").evaluate("input => input.required") == (administration == "token")
        if administration == "loopback":  # the server's own page needs no token there
            tab.fill("#act-fields [name=version]", "2")
            tab.click("#act-do")
            expect(tab.locator("#outcome")).to_contain_text("version 2 serves")


def test_a_token_without_the_right_is_asked_for_again(tab: Page, shop: dict[str, Any], tmp_path: Path) -> None:
    entries = [
        {"name": name, "rights": [right], "token": f"{name}-token"} for name, right in (("ops", "admin"), ("reader", "lookup"))
    ]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": entries}))
    with running_service({**shop, "service": {"tokens_path": str(tmp_path / "tokens.json")}}) as service:
        tab.goto(service.url)
        tab.fill("#token", "reader-token")
        tab.press("#token", "Enter")
        tab.click("[data-act=deploy]")
        tab.fill("#act-fields [name=version]", "2")
        tab.fill("#act-token", "reader-token")
        tab.click("#act-do")
        expect(tab.locator("#act-error")).to_have_text("token reader lacks the right 'admin', expected a token with it")
        assert serves(service) == "1"
        expect(tab.locator("#act-secret")).to_be_visible()
        tab.fill("#act-token", "ops-token")
        tab.click("#act-do")
        expect(tab.locator("#outcome")).to_contain_text("version 2 serves")


def test_nothing_is_offered_under_a_name_whose_changes_are_refused(tab: Page, shop: dict[str, Any]) -> None:
    with running_service(shop) as service:  # without tokens: on loopback, by its own names
        tab.goto(service.url.replace("127.0.0.1", "hps.localhost"))
        expect(tab.locator("[data-model=shop] .badge")).to_have_text("ready")
        assert tab.locator("[data-act]").count() == 0


def test_a_held_version_is_accepted_alone(tab: Page, service: RunningService) -> None:
    sent: list[tuple[str, Any]] = []
    fleet: list[bool] = []
    failed = {"check": "vectors", "table": "item", "policy": "hold", "text": "alignment 0"}
    checks = {"version": "8", "verdict": "held", "against": "1", "at": 0.0, "seconds": 1.0, "passed": 1, "skipped": 0}

    def change(body: dict[str, Any], number: int) -> None:
        [model] = body["server"]["models"]
        model["versions"] += [["8", "held"]]
        model |= {"checks": [{**checks, "failed": [failed]}], "fleet": bool(fleet)}

    def take(route: Route) -> None:
        sent.append((route.request.url.removeprefix(f"{service.url}/v1/models/shop/"), route.request.post_data_json))
        route.fulfill(json={"reason": "a fake of the test took it"})

    doctored(tab, change)
    tab.route("**/v1/models/shop/**", take)
    tab.goto(service.url)
    card, dialog = tab.locator("[data-trial=shop]"), tab.locator("#act")
    card.locator("[data-act=canary]").click()
    tab.fill("#act-token", ADMIN)
    tab.click("#act-do")
    expect(dialog).to_be_hidden()
    card.locator("[data-act=canary]").click()
    tab.fill("#act-fields [name=version]", "9")
    tab.click("#act-do")
    expect(dialog).to_be_hidden()
    for _ in range(2):
        card.locator("[data-act=accept]").click()
        tab.click("#act-do")
        expect(dialog).to_be_hidden()
        fleet.append(True)
        expect(tab.locator("[data-model=shop] .chip", has_text="fleet")).to_be_visible()
    assert sent == [
        ("deploy?wait=false", {"canary": 0.05, "version": "8", "accept": True}),
        ("deploy?wait=false", {"canary": 0.05, "version": "9"}),
        ("deploy?wait=false", {"version": "8", "accept": True}),
        ("deploy?wait=false", {"accept": True}),
    ]


def test_a_held_version_is_shown_with_its_checks_and_accepted(tab: Page, document: Make, write: Write) -> None:
    polling = {"model_control_mode": "poll", "repository_poll_s": 0.1, "admin_token": ADMIN}
    with running_service({**document(), "service": polling}) as service:
        write(2, SHUFFLED)
        wait_until(lambda: service.app.lifecycle.server.live.held("ranker"), "version 2 is held")
        tab.goto(service.url)
        expect(tab.locator("#state")).to_have_text("version held")
        expect(tab.locator(".condition")).to_contain_text("ranker: version held")
        card = tab.locator("[data-trial=ranker]")
        expect(card).to_contain_text("version 2 held")
        expect(card).to_contain_text("beside version 1")
        expect(card.locator("tbody tr").first).to_contain_text("alignment")
        expect(tab.locator("[data-model=ranker] .chip")).to_have_text(["2 held"])  # and not pinned
        write(3, np.full_like(SHUFFLED, np.nan))
        refused = tab.locator(".condition", has_text="deploy failed")
        expect(refused).to_contain_text("version 1 serves on; the last deployment failed: loading table")
        expect(tab.locator(".condition")).to_have_count(2)
        card.locator("[data-act=accept]").click()
        tab.fill("#act-token", ADMIN)
        tab.click("#act-do")
        expect(tab.locator("#outcome")).to_contain_text("version 2 serves")
        expect(tab.locator("#state")).to_have_text("ready")
        expect(card).to_have_count(0)
        expect(tab.locator("[data-model=ranker]")).to_contain_text("checks: accepted beside version 1")


ROLLOUT: dict[str, Any] = {
    "mode": "canary", "state": "running", "version": "8", "serving": "7", "share": 0.25, "header": "x-user-id",
    "seconds": 734.2, "step": 2, "step_seconds": 134.2,
    "steps": [
        {"share": 0.05, "seconds": 600, "requests": 1000}, {"share": 0.25, "seconds": 600, "requests": 0},
        {"share": 1.0, "seconds": 0, "requests": 0},
    ],
    "bounds": {"error_rate": 0.01, "p99_factor": 2.0, "difference": None, "least_requests": 50},
    "versions": [
        {"version": "7", "requests": 91230, "errors": 0, "error_rate": 0.0, "p50_ms": 0.31, "p99_ms": 1.10},
        {"version": "8", "requests": 4802, "errors": 1, "error_rate": 0.0002, "p50_ms": 0.32, "p99_ms": 1.16},
    ],
    "compared": {
        "requests": 4100, "identical": 3900, "failed": 0, "dropped": 12, "difference": 0.021, "max_difference": 0.4,
        "correlation": 0.98,
    },
    "reason": "",
}  # fmt: skip
BROKEN = "error rate of version 8 is 100.0 % (53 of 53 requests in 5 s), that of 7 is 0.0 %; allowed: 1.0 % more"


def rollout(body: dict[str, Any], others: list[list[str]], **more: Any) -> None:
    body["server"]["models"][0]["versions"] += others
    body["server"]["models"][0]["fleet"] = more.pop("fleet", False)
    began_s = body["time_s"] - ROLLOUT["seconds"] - more.pop("ended_ago_s", 0.0)
    since = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="milliseconds")
    body["server"]["models"][0]["rollout"] = {**ROLLOUT, "since": since, **more}


@pytest.mark.parametrize("width", [1200, 390])
def test_a_canary_is_drawn_and_changed(chromium: Browser, service: RunningService, width: int) -> None:
    sent: list[tuple[str, Any]] = []
    more: dict[str, Any] = {}
    held: list[list[str]] = []

    def take(route: Route) -> None:
        sent.append((route.request.url.removeprefix(f"{service.url}/v1/models/shop/"), route.request.post_data_json))
        route.fulfill(json={"reason": "a fake of the test took it"})

    def change(button: Locator) -> None:
        button.click()
        if tab.locator("#act-secret").is_visible():
            tab.fill("#act-token", ADMIN)
        tab.click("#act-do")
        expect(tab.locator("#act")).to_be_hidden()

    with opened(chromium, viewport={"width": width, "height": 844}) as tab:
        doctored(tab, lambda body, number: rollout(body, held, **more))
        tab.route("**/v1/models/shop/**", take)
        tab.goto(service.url)
        card, actions = tab.locator("[data-trial=shop]"), tab.locator("[data-trial=shop] [data-act]")
        expect(card.locator(".chip")).to_have_text("canary 25 %")
        expect(card.locator("[aria-current=step]")).to_have_text("25 %")
        expect(card).to_contain_text("step 2 of 3, 7 min 46 s left; 7 min 46 s until 100 %; sides by the header x-user-id")
        rows = card.locator("tbody tr")
        expect(rows.nth(3)).to_have_text("p991.10 ms1.16 ms≤ × 2")
        expect(card.locator("td.bad")).to_have_count(0)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        for button in actions.all():
            change(button)
        more["versions"] = [ROLLOUT["versions"][0], {**ROLLOUT["versions"][1], "p99_ms": 2.3, "error_rate": 0.5}]
        expect(card.locator("td.bad")).to_have_text(["50.0 %", "2.30 ms"])
        quick = [
            {**side, "p99_ms": p99_ms, "error_rate": 0.0} for side, p99_ms in zip(ROLLOUT["versions"], (0.2, 0.9), strict=True)
        ]
        more["versions"] = quick
        expect(rows.nth(3)).to_have_text("p99200 µs900 µs≤ × 2")
        expect(card.locator("td.bad")).to_have_count(0)
        held[:] = [["8", "held"]]
        expect(card).to_contain_text("The checks of version 8 hold it")
        change(actions.first)
        more |= {"state": "rolled back", "share": 0.0, "by": "itself", "reason": BROKEN}
        expect(card.locator(".chip")).to_have_text("canary rolled back")
        expect(card.locator(".reason")).to_have_text(BROKEN)
        expect(card).to_contain_text("version 8 beside 7, just now, by itself")
        expect(actions).to_have_count(0)
        more |= {"ended_ago_s": 7200.0, "serving": "1"}
        expect(card).to_contain_text("version 8 beside 1, 2 h ago, by itself")  # which serves
        more["serving"] = "6"
        expect(card).to_have_count(0)  # another version serves since
        more |= {"ended_ago_s": 60.0, "state": "promoted", "reason": "", "by": "127.0.0.1 (admin token)"}
        expect(card).to_contain_text("60 s ago, by 127.0.0.1 (admin token)")
        more |= {"state": "loading", "by": ""}
        expect(card).to_contain_text("version 8 beside 6, for 12 min")
        tab.locator("[data-model=shop] [data-act=canary]").click()
        tab.select_option("#act-fields [name=mode]", "shadow")
        for name, text in (("version", "9"), ("share", "2.5"), ("steps", "5%:10m, 25%:90s, 100%")):
            tab.fill(f"#act-fields [name={name}]", text)
        tab.click("#act-do")
        expect(tab.locator("#act")).to_be_hidden()
        more["fleet"] = True  # from here on for all replicas
        expect(tab.locator("[data-model=shop] .chip", has_text="fleet")).to_be_visible()
        change(tab.locator("[data-model=shop] [data-act=rollback]"))
        change(tab.locator("[data-model=shop] [data-act=canary]"))
    steps = [{"share": 0.05, "seconds": 600}, {"share": 0.25, "seconds": 90}, {"share": 1}]
    assert sent == [
        ("promote?wait=false", {}),
        ("rollback?wait=false", {}),
        ("promote?wait=false", {"accept": True}),
        ("deploy?wait=false", {"shadow": 0.025, "version": "9", "steps": steps}),
        ("fleet", {"change": "rollback"}),
        ("fleet", {"change": "canary", "canary": 0.05}),
    ]


def test_a_canary_is_run_and_ended_from_the_page(tab: Page, service: RunningService) -> None:
    asked = count()

    def look_up(number: int) -> Counter[str]:
        body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [7]}]}
        place = "/v2/models/shop/infer"
        answers = (service.client.post(place, json=body, headers={"x-user-id": str(next(asked))}) for _ in range(number))
        return Counter(answer.json()["model_version"] for answer in answers)

    def start(mode: str, share: str, steps: str = "") -> None:
        tab.locator("[data-model=shop] [data-act=canary]").click()
        tab.select_option("#act-fields [name=mode]", mode)
        for name, text in (("version", "2"), ("share", share), ("steps", steps)):
            tab.fill(f"#act-fields [name={name}]", text)
        if tab.locator("#act-secret").is_visible():
            tab.fill("#act-token", ADMIN)
        tab.click("#act-do")
        expect(tab.locator("#act")).to_be_hidden()

    tab.goto(service.url)
    start("canary", "25", "25%:20m,50%:20m,100%")
    card, outcome = tab.locator("[data-trial=shop]"), tab.locator("#outcome")
    expect(card.locator(".chip")).to_have_text("canary 25 %")
    expect(card).to_contain_text("step 1 of 3")
    versions = look_up(400)
    assert versions["2"] > 0
    assert versions["1"] > versions["2"]
    requests = card.locator("tbody tr").first
    expect(requests).to_contain_text(f"requests{versions['1']}{versions['2']}")
    picture(tab, "page-canary")
    card.locator("[data-act=stop]").click()
    tab.click("#act-do")
    expect(outcome).to_have_text(re.compile("^Stop version 2 of shop: done .* version 1 serves$"))
    expect(card.locator(".chip")).to_have_text("canary rolled back")
    expect(card).to_contain_text("admin token")
    expect(tab.locator("#state")).to_have_text("ready")  # a person did it
    assert look_up(50) == {"1": 50}
    start("shadow", "100")
    expect(card.locator(".chip")).to_have_text("shadow 100 %")
    expect(card).to_contain_text("100 % until it is promoted or stopped")
    assert look_up(50) == {"1": 50}
    expect(card).to_contain_text("requests answered by both")
    card.locator("[data-act=promote]").click()
    tab.click("#act-do")
    expect(outcome).to_have_text(re.compile("^Promote version 2 of shop: done .* version 2 serves$"))
    expect(card.locator(".chip")).to_have_text("shadow promoted")
    assert look_up(50) == {"2": 50}
