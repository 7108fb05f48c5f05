"""Which file system a path or URI belongs to, and what a remote one is asked."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import MissingDependencyError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed
from hps.filesystems.local import LocalFileSystem
from hps.models.files import CHUNK_BYTES, open_sparse_model
from hps.models.read_ahead import read_ahead
from hps.models.sample import sample_chunks, sample_vectors
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.registry import IMPLEMENTATIONS

DIM = 8


class Store(FileSystem):
    """A store in memory that remembers what it is asked."""

    files: dict[str, tuple[bytes, str]]
    part_bytes = 1000

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self.files = {}
        self.reads: list[tuple[str, int, int]] = []
        self.writes = 0
        self.lock = threading.Lock()

    def _content(self, path: str) -> tuple[bytes, str]:
        if path not in self.files:
            raise ModelFileNotFoundError(f"opening {path}: there is no such file")
        return self.files[path]

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(f"{path}/") for name in self.files)

    def status(self, path: str) -> FileStatus:
        content, version = self._content(path)
        return FileStatus(len(content), version)

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        content, now = self._content(path)
        if version and version != now:
            raise changed(path, version, now)
        with self.lock:
            self.reads.append((path, offset, len(buffer)))
        buffer[:] = content[offset : offset + len(buffer)]

    def list(self, path: str) -> list[str]:
        return sorted({name[len(path) + 1 :].split("/")[0] for name in self.files if name.startswith(f"{path}/")})

    def create(self, path: str) -> FileWriter:
        return StoreWriter(self, path)

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


class StoreWriter(FileWriter):
    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path, self.content = store, path, b""

    def write(self, data: memoryview) -> None:
        self.content += bytes(data)

    def commit(self) -> None:
        self.store.writes += 1
        self.store.files[self.path] = self.content, f"v{self.store.writes}"

    def abort(self) -> None:
        self.content = b""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModelSources:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "store", (f"{__name__}:Store", "nothing"))
    return ModelSources(ModelSourceConfig(parallel_reads=7))


@pytest.fixture
def store(sources: ModelSources) -> Iterator[Store]:
    filesystem, place = sources.locate("store://models/")
    assert place == "store://models"
    assert isinstance(filesystem, Store)
    yield filesystem
    assert filesystem.settings.parallel_reads == 7


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        ("hdfs://nn:8020/m", "hdfs"),
        ("HDFS://nn/m", "hdfs"),
        ("s3://bucket/m", "s3"),
        ("S3://bucket/m", "s3"),
        ("s3a://bucket/m", "s3a"),
        ("gs://bucket/m", "gs"),
        ("https://bucket.s3.eu-west-1.amazonaws.com/m", "s3"),
        ("https://my.dotted.bucket.s3.eu-west-1.amazonaws.com/m", "s3"),
        ("https://s3.cn-north-1.amazonaws.com.cn/bucket/m", "s3"),
        ("HTTPS://storage.googleapis.com/bucket/m", "gs"),
        ("https://storage.cloud.google.com/bucket/m", "gs"),
    ],
)
def test_the_scheme_alone_selects(source: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hdfs", "s3", "s3a", "gs"):  # by a class of that name: the packages need not be there
        monkeypatch.setitem(globals(), f"Chosen_{name}", type(f"Chosen_{name}", (Store,), {}))
        monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], name, (f"{__name__}:Chosen_{name}", "nothing"))
    filesystem, place = ModelSources().locate(source)
    assert type(filesystem).__name__ == f"Chosen_{scheme}"
    assert place == source


@pytest.mark.parametrize("name", ["C:\\models\\item", "a:b", "with space", "hdfs:relative", "20:15/m", "weird+scheme:x"])
def test_a_local_path_may_have_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_sparse_model(tmp_path / name, sample_chunks(5, DIM))
    filesystem, place = ModelSources().locate(name)
    assert isinstance(filesystem, LocalFileSystem)
    assert place == str(tmp_path / name)
    assert open_sparse_model(name, DIM).rows == 5


@pytest.mark.parametrize(
    "source",
    [
        *("abfs://c/m", "http://host/m", "ftp://host/m", "https://example.org/m", "https://", "x-y:z"),
        *("https://evilamazonaws.com/b/m", "https://amazonaws.com.evil.org/b/m", "https://storage.googleapis.com.evil.org/b/m"),
    ],
)
def test_an_unknown_scheme_names_those_known(source: str) -> None:
    with pytest.raises(ModelFileError, match="expected a local path or one of") as caught:
        ModelSources().locate(source)
    message = str(caught.value)
    assert source in message
    assert all(f"{scheme}://" in message for scheme in ("file", "hdfs", "s3", "gs"))


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "abc", ("hps.no_such_module:Thing", "pip install 'hps-server[abc]'"))
    with pytest.raises(MissingDependencyError, match=r"hps-server\[abc\]"):
        ModelSources().locate("abc://host/m")


def test_a_file_system_is_made_once(sources: ModelSources, store: Store) -> None:
    assert sources.locate("store://other")[0] is store
    assert ModelSources().locate("store://other")[0] is not store


def test_a_chunk_is_read_in_parts_that_cover_it_once(sources: ModelSources, store: Store) -> None:
    assert write_sparse_model("store://models/item", sample_chunks(1000, DIM, 3), sources=sources) == 1000
    assert store.list("store://models/item") == ["emb_vector", "key"]
    model = open_sparse_model("store://models/item", DIM, sources=sources)
    assert (model.rows, model.is_local) == (1000, False)
    for start, keys, vectors in read_ahead(model, [(0, 600), (600, 1000)]):
        np.testing.assert_array_equal(keys, np.arange(start, start + keys.size))
        np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 3))
    assert max(size for _, _, size in store.reads) == Store.part_bytes
    for name, row_bytes in (("key", 8), ("emb_vector", 4 * DIM)):
        covered = sorted((offset, size) for path, offset, size in store.reads if path.endswith(name))
        assert [offset for offset, _ in covered] == list(np.cumsum([0, *(size for _, size in covered)])[:-1])
        assert sum(size for _, size in covered) == 1000 * row_bytes


def test_memory_is_bounded_by_the_parts_that_are_being_read(sources: ModelSources, store: Store) -> None:
    write_sparse_model("store://models/item", sample_chunks(100, DIM), sources=sources)
    model = open_sparse_model("store://models/item", DIM, sources=sources)
    assert (model.parallel_reads, model.chunks_ahead) == (7, 2)
    store.part_bytes = CHUNK_BYTES  # type: ignore[misc]
    assert model.chunks_ahead == 7
    store.part_bytes = 1 << 40  # type: ignore[misc]
    assert model.chunks_ahead == 7


def test_an_existing_remote_model_is_replaced_only_when_asked(sources: ModelSources, store: Store) -> None:
    write_sparse_model("store://models/item", sample_chunks(10, DIM), sources=sources)
    before = dict(store.files)
    assert list(before) == ["store://models/item/emb_vector", "store://models/item/key"]  # in the order of their commits
    with pytest.raises(ModelFileError, match="it exists"):
        write_sparse_model("store://models/item", sample_chunks(20, DIM), sources=sources)
    assert store.files == before
    store.files["store://models/item/notes.txt"] = b"mine", "v"
    with pytest.raises(ModelFileError, match=r"notes\.txt"):
        write_sparse_model("store://models/item", sample_chunks(20, DIM), overwrite=True, sources=sources)
    del store.files["store://models/item/notes.txt"]
    store.files["store://models/item/meta"] = bytes(80), "v"
    assert write_sparse_model("store://models/item", sample_chunks(20, DIM), overwrite=True, sources=sources) == 20
    assert open_sparse_model("store://models/item", DIM, sources=sources).rows == 20  # the old meta is gone


def test_a_write_that_fails_leaves_the_old_remote_model(sources: ModelSources, store: Store) -> None:
    write_sparse_model("store://models/item", sample_chunks(10, DIM), sources=sources)
    before = dict(store.files)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from sample_chunks(5, DIM)
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        write_sparse_model("store://models/item", chunks(), overwrite=True, sources=sources)
    with pytest.raises(ModelFileError, match="got no rows"):
        write_sparse_model("store://models/item", iter(()), overwrite=True, sources=sources)
    assert store.files == before


def test_a_directory_that_may_not_be_listed_has_no_other_files(
    sources: ModelSources, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sparse_model("store://models/item", sample_chunks(10, DIM), sources=sources)
    refusal: list[ModelFileError] = [ModelFileError("403"), ModelSourceError("no answer")]

    def refusing(self: Store, path: str) -> list[str]:
        raise refusal[0]

    monkeypatch.setattr(Store, "list", refusing)
    assert open_sparse_model("store://models/item", DIM, sources=sources).rows == 10
    del refusal[0]
    with pytest.raises(ModelSourceError, match="no answer"):
        open_sparse_model("store://models/item", DIM, sources=sources)


def test_a_model_without_key_is_never_whole(sources: ModelSources, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies between the two files leaves what nobody takes for a model."""
    write_sparse_model("store://models/item", sample_chunks(10, DIM), sources=sources)
    commit = StoreWriter.commit

    def dying(self: StoreWriter) -> None:
        if self.path.endswith("key"):
            raise ModelFileError("killed")
        commit(self)

    monkeypatch.setattr(StoreWriter, "commit", dying)
    with pytest.raises(ModelFileError, match="killed"):
        write_sparse_model("store://models/item", sample_chunks(10, DIM, 9), overwrite=True, sources=sources)
    with pytest.raises(ModelFileNotFoundError, match=r"key not found; it holds emb_vector"):
        open_sparse_model("store://models/item", DIM, sources=sources)
