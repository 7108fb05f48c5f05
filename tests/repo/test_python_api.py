"""The page of the Python API is made from the docstrings of everything that is exported."""

import runpy
from pathlib import Path

import hps

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "python_api.py"))


def test_the_page_is_that_of_the_docstrings():
    assert GENERATOR["PAGE"].read_text() == GENERATOR["page"](), "run make docs"


def test_the_page_has_every_exported_name():
    page = GENERATOR["PAGE"].read_text()
    assert [name for name in hps.__all__ if f"### `{name}" not in page and f"- `{name}` (" not in page] == []


def test_every_exported_name_has_a_docstring_of_its_own():
    assert [name for name in hps.__all__ if "__doc__" not in vars(getattr(hps, name)) and not getattr(hps, name).__doc__] == []
