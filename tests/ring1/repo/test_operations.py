"""Whoever is woken by an alert finds it in docs/operations.md, and what that page names is there."""

import re
from pathlib import Path

import yaml

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


def test_every_alert_leads_to_its_heading() -> None:
    assert {name: annotations.get("runbook_url") for name, annotations in ALERTS.items()} == {
        name: f"site/operations.html#{name.lower()}" for name in ALERTS
    }


def test_metrics_that_the_page_names_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in Path(ROOT / "hps").rglob("*.py"))
    named = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in re.findall(r"\bhps_[a-z_]+[a-z]\b", PAGE)}
    assert len(named) > 10
    assert [name for name in sorted(named) if f'"{name}"' not in code] == []
