"""What a person on call sees at night: ten models, a Redis that is dead, and a phone."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, expect

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.browser import chromium as chromium  # a fixture
from tests.browser import opened, picture
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import RunningService, document_of, model_of, running_service

pytestmark = [pytest.mark.browser, pytest.mark.redis]
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1200, "height": 900}
NAMES = ["ads_ctr", "ads_cvr", "feed_rank", "feed_recall", "home_rank", "mail_push", "search_rank", "shop_similar"]
NAMES += ["shop_upsell", "video_next"]
DIMS = {"user": 16, "item": 16, "category": 4}
ROWS = 2000
ROUNDS = 40 if os.environ.get("HPS_PICTURES") else 1  # charts of the docs show a minute
# Every text that is shown, and its contrast (WCAG 2.1) with the nearest background behind it.
CONTRASTS = """() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (color) => {
    const [r, g, b] = color.map((part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = rgb(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const shown = [...document.querySelectorAll("body *")].filter((element) => own(element) && element.checkVisibility());
  return shown.map((element) => {
    const both = [rgb(getComputedStyle(element).color), behind(element)].map((color) => light(color.slice(0, 3)));
    return [element.textContent.slice(0, 40), (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)];
  });
}"""


@dataclass
class Site:
    """A service of ten models over Redis, and clients that never rest."""

    service: RunningService
    redis: RedisServer
    lookups: int = 0

    def more_lookups(self, number: int) -> None:
        before = self.lookups
        wait_until(lambda: self.lookups >= before + number, f"{number} lookups were answered")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    models = []
    for name in NAMES:
        for table, dim in DIMS.items():
            hps.write_sparse_model(folder / name / table, (np.arange(ROWS), np.ones((ROWS, dim), np.float32)))
        sources = [folder / name / table for table in DIMS]
        models.append(model_of(name, sources, DIMS, gpucacheper=0.2, hit_rate_threshold=1.1))
    redis = RedisServer(folder / "redis").start()
    document = document_of(*models, persistent=folder / "rocksdb")
    document["volatile_db"] = {"type": "redis_cluster", "address": redis.address}
    try:
        with running_service(document) as service:
            site, ended = Site(service, redis), threading.Event()

            def look_up() -> None:
                rng = np.random.default_rng(7)
                with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
                    while not ended.wait(float(rng.exponential(0.02))):
                        keys = {table: (rng.zipf(1.3, 40) % ROWS).tolist() for table in DIMS}
                        place = f"/v1/models/{NAMES[rng.integers(len(NAMES))]}/lookup"
                        client.post(place, json={"tables": keys}).raise_for_status()  # whatever becomes of Redis
                        site.lookups += 1

            client = threading.Thread(target=look_up)
            client.start()
            try:
                for _ in range(ROUNDS):
                    site.more_lookups(60)
                yield site
                assert client.is_alive()  # no lookup failed
            finally:
                ended.set()
                client.join()
    finally:
        redis.kill()


@pytest.mark.parametrize(("name", "viewport"), [("page", DESKTOP), ("page-phone", PHONE)])
def test_ten_models_at_work_are_an_overview(chromium: Browser, site: Site, name: str, viewport: dict[str, int]) -> None:
    with opened(chromium, viewport=viewport, color_scheme="light" if name == "page" else "dark") as tab:
        tab.goto(site.service.url)
        expect(tab.locator("#state")).to_have_text("ready")
        expect(tab.locator(".model")).to_have_count(len(NAMES))
        before = tab.locator("#tile-keys b").inner_text()
        for _ in range(1 + ROUNDS // 4):  # until the browser's start is no part of the figures
            site.more_lookups(60)
        expect(tab.locator("#tile-keys b")).not_to_have_text(before)
        if viewport is PHONE:
            picture(tab, name)
        model = tab.locator(".model").nth(1)
        model.locator("summary").press("Enter")
        expect(model.locator("tbody tr")).to_have_count(len(DIMS))
        table = model.locator(".scroll")
        wide, shown = table.evaluate("element => [element.scrollWidth, element.clientWidth]")
        assert (wide > shown) == (viewport is PHONE)
        if viewport is DESKTOP:
            expect(model.locator(".bar")).to_be_visible()  # of the stages of its lookups
            picture(tab, name)
        assert tab.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_a_dead_redis_fits_three_screens_of_a_phone_until_it_is_back(
    chromium: Browser, site: Site, children: ChildProcesses
) -> None:
    stats = lambda: site.service.client.get("/v1/stats").json()  # noqa: E731
    with opened(chromium, viewport=PHONE) as tab:
        tab.goto(site.service.url)
        expect(tab.locator("#state")).to_have_text("ready")
        site.redis.kill()
        expect(tab.locator("#state")).to_have_text("degraded")
        expect(tab.locator(".condition")).to_contain_text("Connection refused")
        most = lambda: max((kind["count"] for kind in stats()["problems"]), default=0)  # noqa: E731
        wait_until(lambda: most() >= 8, "the same warning is logged again and again")
        kinds = stats()["problems"]
        assert len([kind for kind in kinds if "Connection refused" in kind["text"]]) <= 4  # a busy machine may add others
        assert [kind["time_s"] for kind in kinds] == sorted((kind["time_s"] for kind in kinds), reverse=True)
        expect(tab.locator(".problem").first).to_contain_text("times, last")
        expect(tab.locator(".model .chip", has_text="volatile not read")).to_have_count(len(NAMES))
        assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        assert tab.evaluate("document.documentElement.scrollHeight") <= 3 * PHONE["height"]
        picture(tab, "page-redis")
        for _ in ("auto", "light", "dark"):
            faint = [(text, contrast) for text, contrast in tab.evaluate(CONTRASTS) if contrast < 4.5]
            assert not faint, tab.evaluate("document.documentElement.dataset.theme")
            tab.click("#theme")
        top = children.hps("top", site.service.url, "--once", "--interval", "0.3")
        printed = top.communicate(timeout=PATIENCE_S)[0]
        assert printed.splitlines()[1].startswith("degraded: redis_cluster")
        assert printed.count("reads of volatile_db (redis_cluster)") == 1
        tab.click(".condition a")
        expect(tab.locator("h3:target")).to_have_text("HPSDegraded")
        tab.go_back()
        site.redis.start()
        expect(tab.locator("#state")).to_have_text("ready", timeout=1000 * PATIENCE_S)
        expect(tab.locator(".condition")).to_have_count(0)
