"""The documentation's figures are those of `benchmarks/results/`."""

import json

import pytest

from benchmarks.figures import RESULTS, ROOT, TABLES, pages, written


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_results(page):
    assert written(page.read_text()) == page.read_text(), "run python -m benchmarks.figures"


def test_every_table_stands_on_a_page():
    shown = "".join(page.read_text() for page in pages())
    assert [name for name in TABLES if f"<!-- figures: {name} -->" not in shown] == []
    assert ROOT / "README.md" in pages()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_has_one_row_a_line(path):
    lines = path.read_text().splitlines()
    rows = lines[lines.index('  "rows": [') + 1 : -2]
    assert [json.loads(line.rstrip(",")) for line in rows] == json.loads(path.read_text())["rows"]
