"""What holds for a model wherever it is stored; the tests of S3, GCS and HDFS subclass it."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hps.errors import ModelFileError
from hps.filesystems.base import FileSystem
from hps.models.deltas import ResidentTable
from hps.models.files import open_sparse_model
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.repository import VersionFiles, list_versions, table_sources, version_files
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model, write_version
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.rocks_db.database import RocksDatabase
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.types import FloatArray, KeyArray, TableSpec
from tests.tables.sparse_models import chunks_of
from tests.tables.table_loads import load_table, nothing_to_do

ROWS, DIM = 8_000, 8
TABLE = TableSpec("shop", "item", DIM, 0.0, 1000)


def assert_holds(database: Any, seed: int) -> None:
    keys = np.arange(ROWS, dtype=np.int64)
    out, found = np.empty((ROWS, DIM), np.float32), np.zeros(ROWS, bool)
    assert database.fetch(TABLE.tag, keys, out, found) == ROWS
    np.testing.assert_array_equal(out, sample_vectors(keys, DIM, seed))


class ModelsInStores:
    """Subclass it, give `store` and the fixtures `server` (`put` and `get` take URIs), `root` (a URI, new) and `sources`."""

    store: ClassVar[type[FileSystem]]

    def test_a_model_is_written_read_and_loaded_bit_for_bit(
        self, server: Any, root: str, sources: ModelSources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.store, "part_bytes", 50_000)  # several parts of each chunk, read side by side
        assert write_sparse_model(f"{root}/item", sample_chunks(ROWS, DIM, seed=3), sources=sources) == ROWS
        assert server.get(f"{root}/item/key") == np.arange(ROWS, dtype=np.int64).tobytes()
        model = open_sparse_model(f"{root}/item/", DIM, sources=sources)
        assert (model.rows, model.place) == (ROWS, f"{root}/item")
        count = 0
        for keys, vectors in chunks_of(model, chunk_rows=7_001):
            np.testing.assert_array_equal(keys, np.arange(count, count + keys.size))
            np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 3))
            count += keys.size
        assert count == ROWS
        with closing(HashMapDatabase()) as volatile, closing(RocksDatabase(tmp_path / "rocksdb")) as persistent:
            report = load_table(TABLE, f"{root}/item", [volatile, persistent], sources=sources)
            assert [load.rows for load in report.loads] == [ROWS, ROWS]
            assert_holds(volatile, 3)
            assert_holds(persistent, 3)
            assert nothing_to_do(load_table(TABLE, f"{root}/item", [persistent], sources=sources))
            with pytest.raises(ModelFileError, match="it exists"):
                write_sparse_model(f"{root}/item", sample_chunks(ROWS, DIM, seed=4), sources=sources)
            write_sparse_model(f"{root}/item", sample_chunks(ROWS, DIM, seed=4), overwrite=True, sources=sources)
            load_table(TABLE, f"{root}/item", [persistent], sources=sources)
            assert_holds(persistent, 4)

    def test_versions_are_seen_once_they_are_whole_and_a_delta_is_loaded_from_its_base(
        self, root: str, sources: ModelSources, tmp_path: Path
    ) -> None:
        def rows() -> Iterator[tuple[KeyArray, FloatArray]]:
            assert list(list_versions(f"{root}/shop", sources)) == seen
            yield from sample_chunks(ROWS, DIM, seed=3)
            assert list(list_versions(f"{root}/shop", sources)) == seen
            if fails:
                raise OSError("the source broke")

        write_version(f"{root}/shop/1", {"item": sample_chunks(ROWS, DIM, seed=2)}, sources=sources)
        seen, fails = ["1"], True
        with pytest.raises(OSError, match="the source broke"):
            write_version(f"{root}/shop/2", {"other": sample_chunks(10, DIM), "item": rows()}, sources=sources)
        fails = False
        keys = np.arange(50, 70, dtype=np.int64)
        change = (keys, sample_vectors(keys, DIM, 4))
        write_version(f"{root}/shop/10", {"item": change}, delta_of="2", deleted={"item": keys - 10}, sources=sources)
        seen = ["1", "10"]
        write_version(f"{root}/shop/2", {"item": rows()}, sources=sources)
        assert list_versions(f"{root}/shop/", sources) == {number: f"{root}/shop/{number}" for number in ("1", "2", "10")}
        with pytest.raises(ModelFileError, match="shop/10: it exists"):
            write_version(f"{root}/shop/10", {"item": change}, sources=sources)

        def find(number: str) -> VersionFiles:
            return version_files(number, f"{root}/shop/{number}", ["item"], sources)

        base, delta = replace(TABLE, slot="2"), replace(TABLE, slot="10")
        with closing(RocksDatabase(tmp_path / "rocksdb")) as database:
            targets = LoadTargets((database,), sources=sources)
            TableLoad(base, *table_sources("2", find), targets).run()
            (source,) = table_sources("10", find, lambda number: [ResidentTable(base)] if number == "2" else ())
            TableLoad(delta, source, targets).run()
            assert database.size(delta.tag) == ROWS - 10
            chunks = [(held, vectors) for held, vectors in database.scan(delta.tag, ROWS)]
        held, vectors = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        order = np.argsort(held)
        kept = np.concatenate([np.arange(40), np.arange(50, ROWS)])
        np.testing.assert_array_equal(held[order], kept)
        expected = np.where(((kept >= 50) & (kept < 70))[:, None], sample_vectors(kept, DIM, 4), sample_vectors(kept, DIM, 3))
        np.testing.assert_array_equal(vectors[order], expected)
