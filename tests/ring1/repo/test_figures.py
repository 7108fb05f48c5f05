"""The documentation's figures are those of `benchmarks/results/`."""

import json
import re

import pytest

from benchmarks.draw import DRAWINGS, PICTURES, digest
from benchmarks.figures import PICTURED, RESULTS, ROOT, TABLES, pages, written


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_results(page):
    assert written(page.read_text()) == page.read_text(), "run python -m benchmarks.figures"


def test_every_table_stands_on_a_page():
    shown = "".join(page.read_text() for page in pages())
    assert [name for name in TABLES if f"<!-- figures: {name} -->" not in shown] == []
    assert ROOT / "README.md" in pages()


def test_a_result_has_one_row_a_line():
    for path in sorted(RESULTS.glob("*.json")):
        lines = path.read_text().splitlines()
        rows = lines[lines.index('  "rows": [') + 1 : -2]
        assert [json.loads(line.rstrip(",")) for line in rows] == json.loads(path.read_text())["rows"], path.name


def test_every_picture_is_drawn_shown_and_traced_to_its_results():
    of_pages = {"din"}  # drawn and compared by tests/docs/test_whole_models_page.py
    assert {path.stem for path in PICTURES.iterdir()} - of_pages == set(DRAWINGS) == set(PICTURED)
    page = (ROOT / "docs" / "measured.md").read_text()
    assert [name for name in DRAWINGS if f"(pictures/{name}.svg)" not in page] == []
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 500_000


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_shows_the_results(name):
    shown = re.search(r"shows (\w+)", (PICTURES / f"{name}.svg").read_text())
    assert shown
    assert shown[1] == digest(DRAWINGS[name]()), "run python -m benchmarks.draw"
