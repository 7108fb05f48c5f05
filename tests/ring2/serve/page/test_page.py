"""The page at `/` and the one at `/docs` in a real browser: read, typed into, clicked; and the route behind them."""

import copy
import io
import json
import logging
import re

import numpy as np
import pytest
from playwright.sync_api import expect
from rich.console import Console

import hps
from hps.serve.engine.lifecycle import Lifecycle
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.tools.cli.server.top import shown
from tests.browser import chromium as chromium  # fixtures
from tests.browser import doctored, opened
from tests.browser import tab as tab
from tests.fakes.gated_file_system import WAIT_S, gates
from tests.servers.running_service import RunningService, document_of, model_of, running_service

pytestmark = pytest.mark.browser
PHONE = {"width": 375, "height": 740}
DIM = 62  # 256 bytes a row: a chunk of 16 MiB has 65,536 rows
ROWS = 96_000
CACHED = {"gpucacheper": 0.1, "hit_rate_threshold": 1.1}
LARGE = 2**62 + 1  # no number of JavaScript's is this one


def write(directory, keys, dim):
    keys = np.asarray(keys, np.int64)
    hps.write_sparse_model(directory, (keys, np.repeat((keys % 1000).astype(np.float32)[:, None], dim, axis=1)))
    return str(directory)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    item = write(folder / "item", [*range(1000), LARGE], 3)
    document = document_of(model_of("ranker", [item], {"item": 3}, **CACHED), persistent=folder / "rocksdb")
    document["volatile_db"]["initial_cache_rate"] = 0.5
    with running_service(document) as running:
        yield running


def test_rates_follow_the_lookups_and_a_pin_is_shown_until_it_ends(tab, service):
    server = service.app.lifecycle.server
    missing = [key for key in range(500, 600) if server.row(key, "ranker", "item").tier != "embedding_cache"][:20]

    def look_up():
        service.client.post("/v1/models/ranker/lookup", json={"tables": {"item": missing}}).raise_for_status()

    tab.goto(service.url)
    hits, pinned = tab.locator("#tile-hits b"), tab.locator("[data-model=ranker] .pinned")
    expect(tab.locator("#state")).to_have_text("ready")
    expect(hits).to_have_text("–")
    look_up()
    expect(hits).to_have_text("0 %")
    expect(tab.locator("#tile-keys b")).not_to_have_text("0")
    expect(tab.locator("#tile-latency b")).to_contain_text(re.compile("µs|ms"))
    expect(tab.locator("[data-table=item]")).to_contain_text("1,001")
    look_up()  # they are resident now
    expect(hits).to_have_text(re.compile(r"^(50\.0|100) %$"))
    expect(pinned).to_have_count(0)
    server.deploy("ranker", "1")
    expect(pinned).to_have_text(re.compile(r"^pinned by deploy, \d{4}-\d\d-\d\d$"))
    server.unpin("ranker")
    expect(pinned).to_have_count(0)


def test_charts_show_what_was_before_the_page_was_opened(tab, service):
    note = service.app._history.record
    note()
    for _ in range(3):
        service.client.post("/v1/models/ranker/lookup", json={"tables": {"item": [1, 2, 3]}}).raise_for_status()
        note()
    points = service.client.get("/v1/history").json()["points"]
    assert points[-1]["keys"] - points[0]["keys"] >= 9
    for _ in range(2):  # also when it is opened again
        tab.goto(service.url)
        chart = tab.locator("#tile-keys path")
        expect(chart).to_have_attribute("d", re.compile(r"M.*L.*L"))
        tab.click("#span")
        expect(tab.locator("#span")).to_have_text("Charts: since the start")
        expect(chart).to_have_attribute("d", re.compile(r"M.*L.*L"))


def test_bad_figures_come_with_advice_and_idle_routes_are_left_out(tab, service):
    bad = []

    def change(body, number):
        body["at_s"] = float(number)
        for route in body["service"]["requests"]:
            route["statuses"] = {"200": number, "404": number} if route["route"].endswith("/lookup") else {"200": 5}
        if bad:
            [model] = body["server"]["models"]
            waits = {**model["lookups"], "total_s": 0.28 * number, "count": number}
            model["lookups"]["count"] = number
            model["stages"] = {"wait": waits, "query": {**waits, "total_s": 0.72 * number}}
            table = model["tables"][0]
            table |= {"keys": 1000 * number, "defaults": 0, "deferred": 26 * number}
            table["tiers"][0] |= {"hits": 300 * number, "misses": 700 * number, "evictions": number}

    service.client.post("/v1/models/ranker/lookup", json={"tables": {"item": [1]}}).raise_for_status()
    service.client.get("/v1/models").raise_for_status()
    doctored(tab, change)
    tab.goto(service.url)
    expect(tab.locator("#http tbody tr")).to_have_count(1)
    expect(tab.locator("#http tbody tr")).to_contain_text("/v1/models/{model}/lookup")
    expect(tab.locator("#http tbody tr")).to_contain_text("404: 1.0/s")
    assert tab.locator(".advice").count() == 0
    bad.append(True)
    expect(tab.locator("[data-model=ranker] .advice li")).to_have_text(
        [
            "item: cache hits 30.0 %, and it is full: raise gpucacheper",
            "wait 28.0 % of the time: more workspaces (num_of_worker_buffer_in_pool)",
            "item: 2.6 % default vectors for keys that a tier may have: hit_rate_threshold above 1",
        ]
    )


def test_a_table_stays_where_a_phone_scrolled_it(chromium, service):
    with opened(chromium, viewport=PHONE) as tab:
        answers = []
        doctored(tab, lambda body, number: answers.append(body.update(at_s=float(number))))
        tab.goto(service.url)
        table = tab.locator("[data-model=ranker] .scroll")
        expect(table).to_be_visible()
        before = len(answers)
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") > 80
        table.evaluate("one => { one.scrollLeft = 77; }")
        wait_for = "one => new Promise((done) => setTimeout(() => done(one.isConnected && one.scrollLeft), 300))"
        while len(answers) < before + 3:
            assert table.evaluate(wait_for) == 77
        tab.locator("[data-model=ranker] > summary").click()  # and a card as a person left it
        before = len(answers)
        while len(answers) < before + 3:
            assert table.evaluate(wait_for) is not False
        expect(table).to_be_hidden()


def test_a_key_is_found_by_typing_it(tab, service):
    server = service.app.lifecycle.server
    tab.goto(service.url)
    expect(tab.locator("#find-table")).to_have_value("item")
    cached = next(key for key in range(1000) if server.row(key, "ranker", "item").tier == "embedding_cache")
    below = next(key for key in range(1000) if server.row(key, "ranker", "item").tier == "persistent_db")
    for key, says in (
        (cached, "answered by the embedding cache"),
        (LARGE, "answered by the"),
        (below, "answered by the persistent database"),
        (10**12, "in no tier: this is the default vector"),
    ):
        tab.fill("#find-key", str(key))
        tab.press("#find-key", "Enter")
        expect(tab.locator("#found h3")).to_have_text(f"{key} in ranker.item")
        expect(tab.locator("#found .badge")).to_contain_text(says)
        value = 0 if key == 10**12 else key % 1000
        expect(tab.locator("#found .numbers")).to_have_text(f"{value}  {value}  {value}")
    for wrong in ("1.5", "0x", str(2**63), "", " "):
        tab.fill("#find-key", wrong)
        tab.locator("#find").evaluate("form => form.dispatchEvent(new Event('submit', {cancelable: true}))")
        expect(tab.locator("#found")).to_have_text("A key is a 64-bit integer.")


def test_a_load_moves(tab, tmp_path):
    with gates("page") as (gate,):
        source = write(tmp_path / "slow.model", range(ROWS), DIM)
        gate.hold_from = 65_536 * DIM * 4
        document = document_of(model_of("slow", [f"gate://page{source}"], {"item": DIM}, gpucache=False))
        running = RunningService(Lifecycle(hps.load_configuration(document)))
        running.start()
        try:
            assert gate.entered.wait(WAIT_S)
            tab.goto(running.url)
            expect(tab.locator("#state")).to_have_text("not ready")
            expect(tab.locator("[data-model=slow] .badge")).to_have_text("loading, 68 %")
            expect(tab.locator(".load")).to_have_attribute("data-percent", "68.3")
            gate.release.set()
            expect(tab.locator("[data-model=slow] .badge")).to_have_text("ready")
            expect(tab.locator("#state")).to_have_text("ready")
        finally:
            assert running.stop()


def test_a_token_is_asked_for_and_guards_all_figures(tab, tmp_path):
    source = write(tmp_path / "item", range(10), 3)
    document = document_of(model_of("ranker", [source], {"item": 3}), service={"bearer_token": "s3cret"})
    with running_service(document) as service:
        for path in ("/", "/docs"):
            assert not re.search("ranker|s3cret", service.client.get(path).text)
        tab.goto(service.url)
        expect(tab.locator("#login")).to_be_visible()
        expect(tab.locator("#main")).to_be_hidden()
        tab.fill("#token", "wrong")
        tab.press("#token", "Enter")
        expect(tab.locator("#notice")).to_have_text("The server rejects this token.")
        tab.fill("#token", "s3cret")
        tab.press("#token", "Enter")
        expect(tab.locator("[data-model=ranker] .badge")).to_have_text("ready")
        expect(tab.locator("#notice")).to_be_hidden()
        tab.goto(f"{service.url}/docs")  # the token is kept
        expect(tab.locator("#main")).to_contain_text("/v2/models/{model}/infer")


def test_texts_are_never_markup(tab, service):
    logging.getLogger("tests").error("bad <img src=x onerror=document.title='owned'> <b>bold</b>")
    tab.goto(service.url)
    expect(tab.locator("#problems")).to_contain_text("bad <img src=x onerror=document.title='owned'> <b>bold</b>")
    assert "owned" not in tab.title()
    assert tab.locator("#problems img").count() == 0


def test_what_has_happened_to_many_models_is_one_condition(tab, service):
    names = ["ads", "<b>feed</b>", "home"]
    texts = [f"{name}: no <i>room</i>" for name in names]
    about = {"level": "error", "name": "model failed", "since_s": 0.0, "runbook": "hpsmodelnotready"}
    found = {**about, "models": names, "text": texts[0], "others": texts[1:]}
    warning = {**about, "level": "warning", "name": "degraded", "models": [], "text": "device 0 is lost", "others": []}
    conditions = [found, warning]
    doctored(tab, lambda body, number: body.update(conditions=conditions))
    tab.goto(service.url)
    condition = tab.locator(".condition.bad")
    expect(condition.locator("b")).to_have_text(["ads, <b>feed</b>, home: model failed"])
    expect(condition.locator("> p").last).to_have_text(texts[0])
    expect(condition.locator("summary")).to_have_text("2 other texts")
    condition.locator("summary").click()
    expect(condition.locator("details p")).to_have_text(texts[1:])
    expect(tab.locator("#state")).to_have_text("model failed")
    expect(tab.locator("#state")).to_have_class("badge bad")
    expect(condition.locator("a")).to_have_attribute("href", "runbooks#hpsmodelnotready")
    calm, warned = "lookups are answered", tab.locator(".condition.fair")
    expect(warned).to_contain_text("device 0 is lost")
    expect(warned).not_to_contain_text(calm)
    warning["models"] = [f"m{number}" for number in range(12)]
    expect(warned.locator("b")).to_have_text("m0, m1, m2, m3, m4, m5, m6, m7, m8, m9 and 2 more: degraded")
    del conditions[0]
    expect(warned).to_contain_text(calm)
    expect(tab.locator("#state")).to_have_class("badge fair")


def test_the_latest_kinds_of_problems_are_shown_and_others_on_request(tab, service):
    about = {"level": "warning", "logger": "hps", "first_s": 1.0, "time_s": 2.0, "count": 2, "others": []}
    kinds = [{**about, "text": f"kind {number}", "count": 1 + number} for number in range(7)]
    doctored(tab, lambda body, number: body.update(problems=kinds))
    tab.goto(service.url)
    expect(tab.locator("#problems .problem:visible > p:last-child")).to_have_text([f"kind {number}" for number in range(5)])
    expect(tab.locator("#problems .problem:visible .soft").first).to_have_text(re.compile("^once, .* ago, at "))
    expect(tab.locator("#problems .problem:visible .soft").nth(1)).to_have_text(re.compile("^2 times, last .* ago, first at "))
    tab.locator("#problems summary", has_text="2 more kinds").click()
    expect(tab.locator("#problems .problem:visible")).to_have_count(7)


def test_rates_begin_again_with_the_process_and_an_answer_that_was_shared_counts_once(tab, service):
    """By the clock of the server: a second is between two answers, but none between the first three."""
    service.client.post("/v1/models/ranker/lookup", json={"tables": {"item": [1]}}).raise_for_status()

    def change(body, number):
        restarted = number > 6
        body["at_s"] = float(max(3, number))
        body["server"]["started"] = float(restarted)
        [table] = body["server"]["models"][0]["tables"]
        table["keys"] = int((7 if restarted else 1000) * body["at_s"])

    doctored(tab, change)
    tab.goto(service.url)
    expect(tab.locator("#tile-keys b")).to_have_text("1,000")
    expect(tab.locator("#tile-keys b")).to_have_text("7")


def test_a_server_that_is_gone_is_said_to_be(chromium, tmp_path):
    document = document_of(model_of("ranker", [write(tmp_path / "item", range(10), 3)], {"item": 3}))
    with opened(chromium) as tab:
        with running_service(document) as service:
            tab.goto(service.url)
            expect(tab.locator("#state")).to_have_text("ready")
        expect(tab.locator("#state")).to_have_text("no answer")
        expect(tab.locator("#notice")).to_contain_text(re.compile("The server does not answer. The figures below are .* old."))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_it_fits_a_phone_in_the_dark(chromium, service, path):
    with opened(chromium, viewport=PHONE, color_scheme="dark") as tab:
        tab.goto(service.url + path)
        expect(tab.locator("#main")).to_contain_text(re.compile("ranker|/v1/stats"))
        long = "for (const one of document.querySelectorAll('select')) one.replaceChildren(new Option('a_name'.repeat(20)));"
        width = tab.evaluate(f"() => {{ {long} return [document.documentElement.scrollWidth, innerWidth]; }}")
        assert width[0] <= width[1]
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.click("#theme")  # auto, light
        assert tab.evaluate("document.documentElement.dataset.theme") == "light"
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_the_api_is_described_without_a_network(tab, service):
    tab.goto(f"{service.url}/docs")
    routes = tab.locator("summary code")
    expect(routes.first).to_be_visible()
    described = service.client.get("/openapi.json").json()["paths"]
    titles = {f"{method.upper()} {path}": one["summary"] for path in described for method, one in described[path].items()}
    assert sorted(routes.all_inner_texts()) == sorted(titles)
    assert len(set(titles.values())) == len(titles)
    assert not [title for title in titles.values() if title.istitle() and " " in title]  # the name of a function
    tab.locator("summary", has_text="/v1/models/{model}/lookup").click()
    expect(tab.locator("details[open] > pre")).to_contain_text("curl -s")


def test_a_route_is_tried_from_the_page_that_describes_it(tab, service):
    def form_of(route):
        card = tab.locator("details.card", has=tab.locator("summary code", has_text=route))
        card.locator("> summary").click()
        card.locator("details summary").click()
        return card.locator("details")

    tab.goto(f"{service.url}/docs")
    form = form_of("POST /v1/models/{model}/lookup")
    for model, keys, kind, status, says in (
        ("ranker", [5], "good", "200 after", "5"),
        ("ranker", [7, LARGE], "good", "200 after", "7"),
        ("nope", [9], "bad", "404 after", "is not deployed"),
    ):
        form.locator("[name=model]").fill(model)
        form.locator("textarea").fill(json.dumps({"tables": {"item": keys}}))
        form.locator("button").click()
        expect(form.locator(f"[role=status] .{kind}")).to_contain_text(status)
        expect(form.locator("pre")).to_contain_text(says)
    form = form_of("GET /v1/models/{model}/tables/{table}/rows/{key}")
    for name, value in (("model", "ranker"), ("table", "item"), ("key", str(LARGE))):
        form.locator(f"[name={name}]").fill(value)
    form.locator("button").click()
    expect(form.locator("pre")).to_contain_text(str(LARGE))
    expect(tab.locator("button", has_text="this changes the server").first).to_be_attached()


def test_rates_are_by_the_clock_of_the_server_as_an_answer_may_be_older_than_its_request(service):
    before = service.client.get("/v1/stats").json()
    wait_until(lambda: service.client.get("/v1/stats").json()["at_s"] > before["at_s"], "there is another answer")
    now = copy.deepcopy(before)
    now["at_s"] += 4
    next(one for one in now["server"]["models"] if one["name"] == "ranker")["tables"][0]["keys"] += 400_000
    screen = Console(width=200, file=io.StringIO())
    screen.print(shown(service.url, now, before))
    assert re.search(r"item +3 +1\.0 k +100\.?0? k ", screen.file.getvalue())


def test_top_prints_the_same_figures(service, children):
    service.client.post("/v1/models/ranker/lookup", json={"tables": {"item": [1, 2, 3]}}).raise_for_status()
    top = children.hps("top", service.url, "--once", "--interval", "0.3")
    text, _ = top.communicate(timeout=PATIENCE_S)
    assert (top.returncode, "ready" in text) == (0, True)
    assert re.search(r"item +3 +1\.0 k ", text)
    top = children.hps("top", "http://127.0.0.1:9")
    assert "is the server running there?" in top.communicate(timeout=PATIENCE_S)[1]
    assert top.returncode == 1
