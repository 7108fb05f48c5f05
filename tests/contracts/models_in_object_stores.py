"""What holds for a model in an object store, whole and when things go wrong; the tests of S3 and GCS subclass it.

class TestModelsInS3(ModelsInObjectStores):
    store = S3FileSystem

    def sources(self, url, **settings):
        return ModelSources(ModelSourceConfig(s3_endpoint_url=url, **settings))
"""

from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hps.databases.hash_map.database import HashMapDatabase
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.object_store import ObjectStore
from hps.models.files import open_sparse_model
from hps.models.sample import sample_chunks, sample_vectors
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.types import TableSpec
from tests.servers.misbehaving_proxy import Answer, Before, Drop, MisbehavingProxy, Reset, Truncate, first
from tests.tables.sparse_models import chunks_of
from tests.tables.table_loads import load_table, nothing_to_do

ROWS, DIM = 20_000, 8
TABLE = TableSpec("shop", "item", DIM, 0.0, 1000)


def assert_holds(database: Any, seed: int) -> None:
    keys = np.arange(ROWS, dtype=np.int64)
    out, found = np.empty((ROWS, DIM), np.float32), np.zeros(ROWS, bool)
    assert database.fetch(TABLE.tag, keys, out, found) == ROWS
    np.testing.assert_array_equal(out, sample_vectors(keys, DIM, seed))


class ModelsInObjectStores:
    """Subclass it, give `store`, `sources` and the fixtures `server`, `proxy` (in front of it) and `root` (a URI, new)."""

    store: ClassVar[type[ObjectStore]]

    def sources(self, url: str, **settings: Any) -> ModelSources:
        """Model sources that ask an endpoint."""
        raise NotImplementedError("a subclass knows the name of the setting")

    def test_a_model_is_written_read_and_loaded_bit_for_bit(
        self, server: Any, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.store, "part_bytes", 50_000)  # several parts of each chunk, read side by side
        sources = self.sources(server.url)
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
            write_sparse_model(f"{root}/item", sample_chunks(ROWS, DIM, seed=4), overwrite=True, sources=sources)
            load_table(TABLE, f"{root}/item", [persistent], sources=sources)
            assert_holds(persistent, 4)

    def test_a_model_that_is_replaced_while_it_loads_is_an_error_and_not_taken_for_whole(
        self, proxy: MisbehavingProxy, server: Any, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100_000)
        source, direct, through = f"{root}/item", self.sources(server.url), self.sources(proxy.url, parallel_reads=1)
        write_sparse_model(source, sample_chunks(ROWS, DIM, seed=1), sources=direct)

        def replace() -> None:
            write_sparse_model(source, sample_chunks(ROWS, DIM, seed=2), overwrite=True, sources=direct)

        proxy.rule = first(1, Before(replace), lambda request: request.headers["Range"] == "bytes=20000-39999")
        with closing(HashMapDatabase()) as volatile, closing(RocksDatabase(tmp_path / "rocksdb")) as persistent:
            with pytest.raises(ModelFileChangedError, match=rf"{source}/.* changed while it was being read"):
                load_table(TABLE, source, [volatile, persistent], sources=through)
            record = persistent.load_record(TABLE.tag)
            assert record is None or not record.complete
            load_table(TABLE, source, [volatile, persistent], sources=through)
            assert_holds(volatile, 2)
            assert_holds(persistent, 2)

    def test_a_model_is_loaded_through_a_store_that_fails_now_and_then(
        self, proxy: MisbehavingProxy, server: Any, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 200_000)
        monkeypatch.setattr(self.store, "part_bytes", 60_000)
        write_sparse_model(f"{root}/item", sample_chunks(ROWS, DIM, seed=1), sources=self.sources(server.url))
        faults = [Answer(503), None, Reset(10_000), None, Truncate(5_000), None, Drop(), None, Answer(500), None, None]
        count = iter(range(10_000))
        proxy.rule = lambda request: faults[next(count) % len(faults)]
        with closing(HashMapDatabase()) as volatile:
            sources = self.sources(proxy.url, timeout_s=20, deadline_s=40, max_attempts=20)
            load_table(TABLE, f"{root}/item", [volatile], sources=sources)
            assert_holds(volatile, 1)

    @pytest.mark.parametrize(
        ("objects", "message"),
        [
            ({}, r"there is no such directory; \w+ a directory with the files key and emb_vector"),
            ({"key": 16}, "emb_vector not found; it holds key; "),
            ({"emb_vector": 64}, "key not found; it holds emb_vector; "),
            ({"other": 1}, "key and emb_vector not found; it holds other"),
            ({"key": 16, "emb_vector": 63}, r"got 63 bytes, \w+ 64"),
            ({"key": 16, "emb_vector": 128}, r"got 128 bytes, \w+ 64.*embedding_vecsize_per_table 16"),
            ({"key": 15, "emb_vector": 64}, r"got 15 bytes, \w+ 8 \(an int64\)"),
            ({"key": 0, "emb_vector": 0}, "got 0 bytes"),
            ({"key/0": 16, "emb_vector": 64}, "it is a directory"),
            ({"key": 16, "emb_vector/part": 64}, "it is a directory"),
            ({"key": 16, "emb_vector": 64, "meta": 8}, "got 8 bytes"),
        ],
    )
    def test_a_directory_that_is_no_model_is_refused(
        self, server: Any, root: str, objects: dict[str, int], message: str
    ) -> None:
        for name, size in objects.items():
            server.put(f"{root}/item/{name}", b"\0" * size)
        with pytest.raises(ModelFileError, match=rf"opening .*{root}/item.*: {message}"):
            open_sparse_model(f"{root}/item", DIM, sources=self.sources(server.url))

    def test_a_model_in_a_missing_bucket_or_in_an_object_is_refused(self, server: Any, root: str) -> None:
        server.put(f"{root}/item", b"x")
        with pytest.raises(ModelFileError, match=f"{root}/item: it is an object, expected a directory"):
            open_sparse_model(f"{root}/item", DIM, sources=self.sources(server.url))
        source = f"{root.partition('://')[0]}://no-such-bucket-here/item"
        with pytest.raises(ModelFileNotFoundError, match=f"{source}.*there is no bucket 'no-such-bucket-here'"):
            open_sparse_model(source, DIM, sources=self.sources(server.url))
        with pytest.raises(ModelFileNotFoundError, match=f"{source}.*there is no bucket 'no-such-bucket-here'"):
            write_sparse_model(source, sample_chunks(10, DIM), sources=self.sources(server.url))
