"""How the tests start a browser: Debian's Chromium, headless, which asks nobody for anything by itself."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

CHROMIUM: Final[dict[str, Any]] = {
    "executable_path": shutil.which("chromium"),
    "args": [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ],
}
_SHOWN_MS: Final = 15_000
_EXPECTED = ("status of 401", "status of 403", "status of 404", "status of 409", "ERR_CONN")  # errors that a test provokes
expect.set_options(timeout=_SHOWN_MS)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Page]:
    """A page that fails the test if it logs an error, or asks anybody but the server that it came from."""
    with opened(chromium) as page:
        yield page


@contextmanager
def opened(chromium: Browser, **settings: Any) -> Iterator[Page]:
    """A page as `tab`, of a context with these settings."""
    context = chromium.new_context(**settings)
    context.set_default_timeout(_SHOWN_MS)
    page = context.new_page()
    asked: set[str] = set()
    said: list[str] = []
    page.on("request", lambda request: asked.add(request.url.split("/")[2] if "//" in request.url else "data"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    yield page
    own = page.url.split("/")[2]
    context.close()
    assert asked <= {own, "data"}
    assert not [line for line in said if not any(expected in line for expected in _EXPECTED)]


def doctored(page: Page, change: Callable[[dict[str, Any], int], object]) -> None:
    """Let the page see other figures than the server's: `change` is called with each answer and its number."""
    numbers = count(1)

    def answer(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        change(body, next(numbers))
        route.fulfill(response=response, json=body)

    page.route("**/v1/stats", answer)


def picture(page: Page, name: str) -> None:
    """Take a picture of the whole page; in `HPS_PICTURES`, if set, as a PNG for the docs."""
    shot = page.screenshot(full_page=True)
    if folder := os.environ.get("HPS_PICTURES"):
        with Image.open(io.BytesIO(shot)) as image:
            image.convert("RGB").quantize(128).save(Path(folder) / f"{name}.png", optimize=True)
