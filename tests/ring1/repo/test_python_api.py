"""The reference of the Python API has everything that is exported, and everything that is exported has a docstring."""

import pytest

import hps
import hps.torch
from docs.python_api import page

PAGE = page()


@pytest.mark.parametrize("module", [hps, hps.torch], ids=lambda module: module.__name__)
def test_the_page_has_every_exported_name(module):
    assert [name for name in module.__all__ if f"### `{name}" not in PAGE and f"- `{name}` (" not in PAGE] == []


@pytest.mark.parametrize("module", [hps, hps.torch], ids=lambda module: module.__name__)
def test_every_exported_name_has_a_docstring_of_its_own(module):
    things = {name: getattr(module, name) for name in module.__all__}
    assert [name for name, thing in things.items() if "__doc__" not in vars(thing) and not thing.__doc__] == []
