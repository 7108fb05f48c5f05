"""What tests of loading, of loading again and of warm-ups share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables.table_loads import cut_into_small_chunks, readers, write_files


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many chunks of few rows; and no reader may be left when a test ends."""
    cut_into_small_chunks(monkeypatch)
    yield
    assert readers() == []


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_files(tmp_path)
