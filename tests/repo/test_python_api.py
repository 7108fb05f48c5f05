"""The page of the Python API is made from the docstrings of everything that is exported."""

import runpy
from pathlib import Path

import pytest

import hps
import hps.torch

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "python_api.py"))


def test_the_page_is_that_of_the_docstrings():
    assert GENERATOR["PAGE"].read_text() == GENERATOR["page"](), "run make docs"


@pytest.mark.parametrize("module", [hps, hps.torch], ids=lambda module: module.__name__)
def test_the_page_has_every_exported_name(module):
    page = GENERATOR["PAGE"].read_text()
    assert [name for name in module.__all__ if f"### `{name}" not in page and f"- `{name}` (" not in page] == []


@pytest.mark.parametrize("module", [hps, hps.torch], ids=lambda module: module.__name__)
def test_every_exported_name_has_a_docstring_of_its_own(module):
    things = {name: getattr(module, name) for name in module.__all__}
    assert [name for name, thing in things.items() if "__doc__" not in vars(thing) and not thing.__doc__] == []
