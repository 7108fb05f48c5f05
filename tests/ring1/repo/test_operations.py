"""Whoever is woken by an alert finds it in docs/operations.md and on the servers' page, and what that page names is there."""

import re
from pathlib import Path

import yaml

from docs import runbook_page
from hps.serve.engine.routes.pages import OPEN_PATHS
from tests import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
ALERTS = {
    rule["alert"]: rule["annotations"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def test_every_alert_has_its_heading_and_every_heading_its_alert() -> None:
    assert sorted(re.findall(r"^### (HPS\w+)$", PAGE, re.MULTILINE)) == sorted(ALERTS)


def test_every_alert_leads_to_its_heading_on_the_page_that_servers_show() -> None:
    targets = {name: annotations["runbook_url"].partition("#") for name, annotations in ALERTS.items()}
    assert {url for url, _, _ in targets.values()} == {"http://127.0.0.1:8000/runbooks"}
    assert {name: anchor for name, (_, _, anchor) in targets.items()} == {name: name.lower() for name in ALERTS}
    assert "/runbooks" in OPEN_PATHS
    assert {anchor for _, _, anchor in targets.values()} <= anchors(runbook_page.PLACE.read_text())


def anchors(page: str) -> set[str]:
    found: list[str] = re.findall(r' id="([^"]+)"', page)
    assert len(found) == len(set(found)), "two headings have the same anchor"
    return set(found)


def test_the_page_that_servers_show_is_that_of_the_docs_and_its_links_lead_somewhere() -> None:
    page = runbook_page.page()
    assert runbook_page.PLACE.read_text() == page, "run: make docs"
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert {"hpsdeployfailed", "disk-full"} <= anchors(page)
    assert len(links) > 20
    assert links <= anchors(page)


def test_the_page_of_runbooks_is_short() -> None:
    assert len((ROOT / "docs" / "runbooks.md").read_text().split()) <= 900


def test_metrics_that_the_page_names_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in Path(ROOT / "hps").rglob("*.py"))
    named = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in re.findall(r"\bhps_[a-z_]+[a-z]\b", PAGE)}
    assert len(named) > 10
    assert [name for name in sorted(named) if f'"{name}"' not in code] == []
