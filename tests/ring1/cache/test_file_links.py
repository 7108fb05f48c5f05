"""What a device keeps of row files, on a stand-in (`tests/fakes/host_cuda.py`): their index, and layouts while kernels read."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.cache.cuda import kernels, structs
from hps.stores.base import LoadRecord
from hps.stores.row_files.database import RowFilesDatabase
from tests.fakes import host_cuda
from tests.fakes.populating_pinner import PopulatingPinner

KEYS = np.arange(1000)
ROWS = np.repeat(KEYS[:, None], 3, 1).astype(np.float32)


@pytest.fixture(scope="module")
def links() -> Iterator[Any]:
    with host_cuda.installed():
        from hps.cache.cuda import links

        yield links


@pytest.fixture
def linked(links: Any, tmp_path: Path) -> Iterator[SimpleNamespace]:
    database = RowFilesDatabase(tmp_path)
    database.open_table("t", 3)
    database.load_chunk("t", KEYS, ROWS, LoadRecord("files", KEYS.size, KEYS.size))
    database.finish_load("t")
    host = database.host_table("t")
    pinner = PopulatingPinner()
    host.pin(pinner)
    readers = links.LayoutReaders()
    attached = links.AttachedTable(0, host, authoritative=True, readers=readers)
    yield SimpleNamespace(database=database, host=host, pinner=pinner, readers=readers, attached=attached)
    attached.close()
    database.close()


def word_of(linked: SimpleNamespace, name: str) -> int:
    return int(host_cuda.at(linked.attached.where + structs.LINK.offsets[name], 1, np.uint64)[0])


def test_the_device_has_the_index_of_a_file_and_finds_it_by_the_link(linked: SimpleNamespace) -> None:
    present, file = linked.attached.present, linked.host.layout().file
    assert word_of(linked, "current") == present.where
    assert word_of(linked, "readers") == linked.readers.where
    packed = structs.HOST_LAYOUT.unpack(bytes(host_cuda.at(present.where, structs.HOST_LAYOUT.size, np.uint8)))
    starts, fingerprints = present.index.where
    *_, known = packed
    assert packed[-9:-1] == (file.records, starts, fingerprints, 1000, 1000 / file.buckets, 1, file.buckets, file.record_bytes)
    assert (host_cuda.at(known, kernels.STRIPES, np.uint64) & 1).all()  # readers have found the version of no stripe
    table = linked.database._table("t").file
    assert np.array_equal(host_cuda.at(starts, file.buckets + 1, np.uint32), table.starts)
    assert np.array_equal(host_cuda.at(fingerprints, file.rows, np.uint8), table.fingerprints)


def test_changes_keep_the_index_of_their_file(linked: SimpleNamespace) -> None:
    before = linked.attached.present
    linked.database.insert("t", KEYS[:5].copy(), ROWS[:5])
    after = linked.attached.present
    assert after is not before
    assert after.index is before.index
    assert after.mirror is not None
    linked.database.seal("t")
    assert linked.attached.present.index is not before.index
    assert linked.attached.present.mirror is None


def test_a_layout_is_kept_until_each_count_of_readers_was_0(linked: SimpleNamespace) -> None:
    attached, running = linked.attached, linked.readers.where + structs.READERS.offsets["running"]
    counts = host_cuda.at(running, 2, np.uint64)
    attached.keep_layouts()
    linked.database.insert("t", KEYS[:5].copy(), ROWS[:5])
    for count in range(2):
        counts[count] = 1  # a kernel began
        records = attached.present.host.file.records
        linked.database.seal("t")
        for _ in range(3):
            attached.keep_layouts()
        assert linked.pinner.holds(records, 1)
        counts[count] = 0  # and has ended
        for _ in range(2):
            attached.keep_layouts()
        assert not linked.pinner.holds(records, 1)
        linked.database.insert("t", KEYS[:5].copy(), ROWS[:5])


def test_lookups_have_the_old_layout_until_the_new_one_is_complete(
    links: Any, linked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen, index = linked.attached.present, [], links.FileIndex

    def watched(*arguments: Any) -> Any:
        seen.append((linked.attached.present is before, word_of(linked, "current") == before.where))
        return index(*arguments)

    monkeypatch.setattr(links, "FileIndex", watched)
    linked.database.insert("t", KEYS[:5].copy(), ROWS[:5])
    before = linked.attached.present
    linked.database.seal("t")
    assert seen == [(True, True)]


def test_a_layout_that_cannot_be_copied_to_the_device_leaves_none(
    links: Any, linked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(*_arguments: Any) -> Any:
        raise links.CUDA_ERRORS[0](2)

    monkeypatch.setattr(links, "DeviceLayout", failed)
    linked.database.insert("t", KEYS[:5].copy(), ROWS[:5])
    assert linked.attached.present is None
    assert word_of(linked, "current") == 0
    assert "cannot read" in caplog.text
