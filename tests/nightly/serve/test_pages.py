"""The examples of the pages for users run from top to bottom, in an empty directory, and print what the pages say."""

from pathlib import Path

import pytest

from tests.docs.examples import run_examples


@pytest.mark.parametrize("page", ["pooling.md", "torch.md"])
def test_examples_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    if page == "torch.md":
        pytest.importorskip("torchrec")
    printed, said = run_examples(page, tmp_path)
    assert printed == said
