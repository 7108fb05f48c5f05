"""Which file system a path or URI belongs to, and what one of another machine is asked."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import MissingDependencyError, ModelFileError, ModelSourceError
from hps.filesystems import local
from hps.filesystems.local import LocalFileSystem
from hps.ground.registry import IMPLEMENTATIONS, install_hint
from hps.models.files import CHUNK_BYTES, open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors

DIM = 8


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        *(("hdfs://nn:8020/m", "hdfs"), ("HDFS://nn/m", "hdfs"), ("s3://bucket/m", "s3"), ("s3a://bucket/m", "s3a")),
        *(("gs://bucket/m", "gs"), ("https://bucket.s3.eu-west-1.amazonaws.com/m", "s3")),
        ("https://my.dotted.bucket.s3.eu-west-1.amazonaws.com/m", "s3"),
        ("https://s3.cn-north-1.amazonaws.com.cn/bucket/m", "s3"),
        ("HTTPS://storage.googleapis.com/bucket/m", "gs"),
        ("https://storage.cloud.google.com/bucket/m", "gs"),
    ],
)
def test_the_scheme_alone_selects_a_file_system_which_is_made_once(
    source: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hdfs", "s3", "s3a", "gs"):  # by a class of that name: the packages need not be there
        monkeypatch.setitem(globals(), f"Chosen_{name}", type(f"Chosen_{name}", (LocalFileSystem,), {"is_local": False}))
        monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], name, (f"{__name__}:Chosen_{name}", "nothing"))
    sources = ModelSources(ModelSourceConfig(parallel_reads=7))
    filesystem, place = sources.locate(f"{source}/")
    assert (type(filesystem).__name__, filesystem.settings.parallel_reads) == (f"Chosen_{scheme}", 7)
    assert place == source
    assert sources.locate(f"{scheme}://other")[0] is filesystem
    assert ModelSources().locate(f"{scheme}://other")[0] is not filesystem


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
        *("swift://c/m", "http://host/m", "ftp://host/m", "https://example.org/m", "https://", "x-y:z"),
        *("https://evilamazonaws.com/b/m", "https://amazonaws.com.evil.org/b/m", "https://storage.googleapis.com.evil.org/b/m"),
    ],
)
def test_an_unknown_scheme_names_those_known(source: str) -> None:
    with pytest.raises(ModelFileError, match="expected a local path or one of") as caught:
        ModelSources().locate(source)
    assert all(text in str(caught.value) for text in (source, "file://", "hdfs://", "s3://", "gs://"))


@pytest.mark.parametrize(
    ("source", "key", "endpoint", "place"),
    [
        ("s3://localhost:9000/models/m", "s3", "http://localhost:9000", "s3://models/m"),
        ("s3a://10.0.0.7:9000/models", "s3", "http://10.0.0.7:9000", "s3://models"),
        ("s3://[::1]:9000/models/m", "s3", "http://[::1]:9000", "s3://models/m"),
        ("s3://https://minio.example:9000/models/m", "s3", "https://minio.example:9000", "s3://models/m"),
        ("S3://HTTP://minio//models/m", "s3", "http://minio", "s3://models/m"),
        ("https://minio:9000/models/m", "s3", "https://minio:9000", "s3://models/m"),
        ("http://minio:9000", "s3", "http://minio:9000", "s3://bucket/key"),
        ("https://minio:9000/models/m", "gcs", "https://minio:9000", "gs://models/m"),
        ("gs://localhost:4443/models/m", "gcs", "http://localhost:4443", "gs://models/m"),
        ("gs://https://emulator/models/m", "gcs", "https://emulator", "gs://models/m"),
        ("gcs://localhost:4443/models/m", "gcs", "http://localhost:4443", "gs://models/m"),
    ],
)
def test_an_address_that_names_a_server_gets_the_setting_to_write(source: str, key: str, endpoint: str, place: str) -> None:
    """Triton writes them so. What the error says is followed here."""
    with pytest.raises(ModelFileError, match="model_source") as caught:
        ModelSources().locate(source)
    assert f'model_source.{key}_endpoint_url to "{endpoint}" and write {place}' in str(caught.value)
    settings = ModelSourceConfig(**{f"{key}_endpoint_url": endpoint})
    filesystem, found = ModelSources(settings).locate(place)
    assert (found, filesystem.settings) == (place, settings)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("s3://https://s3.eu-west-1.amazonaws.com/bucket/m", "write https://s3.eu-west-1.amazonaws.com/bucket/m"),
        ("gs://https://storage.googleapis.com/bucket/m", "write https://storage.googleapis.com/bucket/m"),
        ("gcs://bucket/m", "write gs://bucket/m"),
    ],
)
def test_an_address_within_an_address_is_taken_out(source: str, advice: str) -> None:
    with pytest.raises(ModelFileError, match=f"; {re.escape(advice)}$"):
        ModelSources().locate(source)
    ModelSources().locate(advice.removeprefix("write "))


@pytest.mark.parametrize("source", ["https://key:se/cret@minio:9000/b/m", "https://minio:9000/b/m?X-Amz-Signature=secret"])
def test_secrets_in_an_address_of_a_server_are_not_repeated(source: str) -> None:
    with pytest.raises(ModelFileError, match="got scheme 'https'") as caught:
        ModelSources().locate(source)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("source", ["s3://bucket/a:9000/m", "gs://bucket/https://x", "s3://my.dotted.bucket/m"])
def test_keys_may_look_like_anything(source: str) -> None:
    assert ModelSources().locate(source)[1] == source


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "abc", ("hps.no_such_module:Thing", install_hint("abc")))
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[abc\]' in the clone"):
        ModelSources().locate("abc://host/m")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is asked of the files of this machine, as if they were those of another."""
    asked: list[tuple[str, int, int]] = []

    def read_into(self: Any, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        real(self, path, offset, buffer, version)
        asked.append((path, offset, len(buffer)))

    real = LocalFileSystem.read_into
    for name, value in {"is_local": False, "part_bytes": 1000, "parallel_reads": 7, "read_into": read_into}.items():
        monkeypatch.setattr(LocalFileSystem, name, value)
    return asked


@pytest.fixture
def item(reads: object, tmp_path: Path) -> Path:
    """A model elsewhere."""
    assert write_sparse_model(tmp_path / "item", sample_chunks(1000, DIM, 3)) == 1000
    return tmp_path / "item"


def test_a_chunk_is_read_in_parts_that_cover_it_once(reads: list[tuple[str, int, int]], item: Path) -> None:
    model = open_sparse_model(item, DIM)
    assert (model.rows, model.is_local) == (1000, False)
    for start, keys, vectors in read_ahead(model, [(0, 600), (600, 1000)]):
        np.testing.assert_array_equal(keys, np.arange(start, start + keys.size))
        np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 3))
    assert max(size for _, _, size in reads) == 1000
    for name, row_bytes in (("key", 8), ("emb_vector", 4 * DIM)):
        covered = sorted((offset, size) for path, offset, size in reads if path.endswith(name))
        assert [offset for offset, _ in covered] == list(np.cumsum([0, *(size for _, size in covered)])[:-1])
        assert sum(size for _, size in covered) == 1000 * row_bytes


def test_memory_is_bounded_by_the_parts_that_are_being_read(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_sparse_model(item, DIM)
    for part_bytes, ahead in ((1000, 2), (CHUNK_BYTES, 7), (1 << 40, 7)):
        monkeypatch.setattr(LocalFileSystem, "part_bytes", part_bytes)
        assert (model.parallel_reads, model.chunks_ahead) == (7, ahead)


def test_a_model_elsewhere_is_replaced_when_asked_and_has_no_keys_until_it_is_whole(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        def step(*args: Any) -> None:
            call(*args)
            there = (item / "key").exists()
            steps.append([(item / name).stat().st_size for name in ("key", "emb_vector")] if there else [])

        return step

    def broken() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from sample_chunks(5, DIM)
        raise OSError("the source broke")

    before = [(item / name).read_bytes() for name in ("key", "emb_vector")]
    (item / "meta").write_bytes(bytes(8000))
    for chunks, overwrite, error, message in (
        (sample_chunks(20, DIM), False, ModelFileError, "it exists"),
        (broken(), True, OSError, "the source broke"),
        (iter(()), True, ModelFileError, "got no rows"),
    ):
        with pytest.raises(error, match=message):
            write_sparse_model(item, chunks, overwrite=overwrite)
        assert [(item / name).read_bytes() for name in ("key", "emb_vector")] == before
    (item / "notes.txt").write_text("mine")
    with pytest.raises(ModelFileError, match=r"notes\.txt"):
        write_sparse_model(item, sample_chunks(20, DIM), overwrite=True)
    (item / "notes.txt").unlink()
    monkeypatch.setattr(LocalFileSystem, "delete", noted(LocalFileSystem.delete))
    monkeypatch.setattr(local._LocalWriter, "commit", noted(local._LocalWriter.commit))
    write_sparse_model(item, sample_chunks(20, DIM), overwrite=True)
    assert [bool(step) for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1] == [8 * 20, 4 * DIM * 20]
    assert open_sparse_model(item, DIM).rows == 20  # the old meta is gone


def test_a_directory_that_may_not_be_listed_has_no_other_files(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[ModelFileError] = [ModelFileError("403"), ModelSourceError("no answer")]

    def refusing(self: LocalFileSystem, path: str) -> list[str]:
        raise refusals.pop(0)

    monkeypatch.setattr(LocalFileSystem, "list", refusing)
    assert open_sparse_model(item, DIM).rows == 1000
    with pytest.raises(ModelSourceError, match="no answer"):
        open_sparse_model(item, DIM)
