"""The site of the documentation: built strictly, whole, and without anything from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests import ROOT
from tests.browser import CHROMIUM

FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("object", "data")}


LINKS_ONLY = {"canonical", "author", "next", "prev"}


def build(directory: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory), *options]
    # As with `make site`, Python leaves bytecode of what it imports beside it.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    built = build(directory)
    assert built.returncode == 0, built.stderr  # links, anchors, and pages that the navigation lacks
    return directory


class _Fetched(HTMLParser):
    """What a browser asks for when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in LINKS_ONLY:
            return
        self.addresses += [value for name, value in attrs if value and (tag, name) in FETCHED]


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = _Fetched()
        parser.feed(page.read_text())
        assert parser.addresses, page
        outside = [address for address in parser.addresses if re.match(r"(?:https?:)?//", address)]
        assert outside == [], page.name
        assert 'class="mermaid"' not in page.read_text(), "the theme would fetch mermaid from a CDN"
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import", sheet.read_text()) == [], sheet.name


def test_every_page_is_built_and_found(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"http-routes", "metrics", "python-api"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    index = (site / "search" / "search_index.json").read_text()
    assert [page for page in pages if f'"{page}.html' not in index and page != "index"] == []


def test_the_site_has_no_code_of_its_builder(site: Path) -> None:
    assert (ROOT / "docs" / "__pycache__").is_dir()
    assert [path.name for path in site.rglob("*") if path.name == "__pycache__" or path.suffix in (".py", ".pyc")] == []


@pytest.mark.browser
def test_drawings_and_code_are_whole_in_a_window_of_1400_pixels(site: Path) -> None:
    clipped = """() => [...document.querySelectorAll('pre code')].filter((one) => {
      if (/[│┌►]/.test(one.textContent)) one.style.whiteSpace = 'pre'; // a drawing must not be wrapped either
      return one.scrollWidth > one.clientWidth + 1;
    }).map((one) => one.textContent.split('\\n')[0])"""
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**CHROMIUM)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        for path in sorted(site.glob("*.html")):
            page.goto(path.as_uri())
            if texts := page.evaluate(clipped):
                found[path.name] = texts
        browser.close()
    assert found == {}
