"""The behaviour that object stores share beyond that of every file system; the tests of S3 and GCS subclass it."""

from typing import Any, ClassVar

import pytest

from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.filesystems.object_store import ObjectStore
from hps.testing.filesystems import FileSystemContract, noise


class ObjectStoreContract(FileSystemContract):
    """Subclass it, give `scheme`, `forms` and the fixtures `filesystem`, `bucket` and `server` (`put` and `get` take URIs)."""

    scheme: ClassVar[str]
    forms: ClassVar[tuple[str, ...]]
    """Addresses of the object `a b/key` in the bucket {}."""

    @pytest.fixture(autouse=True)
    def _server(self, server: Any) -> None:
        self.server = server

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{self.scheme}://{bucket}/root"

    @pytest.fixture
    def top(self, bucket: str) -> str:
        """The URI of the bucket."""
        return f"{self.scheme}://{bucket}"

    def put(self, path: str, content: bytes) -> None:
        self.server.put(path, content)

    def test_every_form_of_an_address_finds_the_object(self, filesystem: ObjectStore, bucket: str, top: str) -> None:
        self.put(f"{top}/a b/key", noise(1000))
        for form in self.forms:
            buffer = bytearray(1000)
            filesystem.read_into(form.format(bucket), 0, memoryview(buffer))
            assert buffer == noise(1000), form
            assert filesystem.status(form.format(bucket)).size_bytes == 1000, form
            assert filesystem.list(form.format(bucket).removesuffix("/key")) == ["key"], form

    @pytest.mark.parametrize(
        "name", ["%41", "a%20b", "a+b", "what?x=1#y", "Grüße/日本", "ключ", "a b&c=d", "=;:@!$'()*,~", "a/../b", "x" * 900]
    )
    def test_an_odd_name_is_written_and_found_as_it_stands(self, filesystem: FileSystem, top: str, name: str) -> None:
        writer = filesystem.create(f"{top}/{name}/file")
        writer.write(memoryview(b"content"))
        writer.commit()
        assert self.server.get(f"{top}/{name}/file") == b"content"
        assert filesystem.status(f"{top}/{name}/file").size_bytes == 7
        assert filesystem.list(f"{top}/{name}") == ["file"]

    def test_a_bucket_is_a_directory_also_an_empty_one(self, filesystem: FileSystem, top: str) -> None:
        for path in (top, f"{top}/"):
            assert filesystem.exists(path)
            assert filesystem.list(path) == []
        self.put(f"{top}/model/key", b"x")
        assert filesystem.list(top) == ["model"]
        for operation in (filesystem.status, filesystem.create, filesystem.delete):
            with pytest.raises(ModelFileError, match=f"{top}: it is the bucket .* itself, expected an object"):
                operation(top)
        with pytest.raises(ModelFileError, match=f"{top}: it is the bucket .* itself, expected an object"):
            filesystem.read_into(top, 0, memoryview(bytearray(1)))

    def test_the_empty_object_that_stands_for_a_directory_is_one(self, filesystem: FileSystem, top: str) -> None:
        self.put(f"{top}/model/", b"")
        for path in (f"{top}/model", f"{top}/model/"):
            assert filesystem.exists(path)
            assert filesystem.list(path) == []
            with pytest.raises(ModelFileError, match="it is a directory"):
                filesystem.status(path)
        self.put(f"{top}/model/key", b"x")
        self.put(f"{top}/model/1/", b"")
        assert filesystem.list(f"{top}/model/") == ["1", "key"]
        assert filesystem.directories(f"{top}/model/") == ["1"]

    def test_a_long_directory_is_listed_page_by_page_and_an_endless_one_refused(
        self, filesystem: FileSystem, top: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hps.filesystems.object_store._PAGE_NAMES", 3)
        for number in range(5):
            self.put(f"{top}/root/file{number}", b"x")
            self.put(f"{top}/root/directory{number}/file", b"x")
        assert filesystem.list(f"{top}/root") == [f"{kind}{number}" for kind in ("directory", "file") for number in range(5)]
        assert filesystem.directories(f"{top}/root") == [f"directory{number}" for number in range(5)]
        monkeypatch.setattr("hps.filesystems.object_store._MOST_PAGES", 1)
        with pytest.raises(ModelFileError, match=rf"{top}/root: it holds more than \d+ names"):
            filesystem.list(f"{top}/root")

    def test_a_missing_bucket_is_named_by_every_operation(self, filesystem: FileSystem) -> None:
        path = f"{self.scheme}://no-such-bucket/model/key"
        said = f"{path}: there is no bucket 'no-such-bucket'"
        for operation in (filesystem.exists, filesystem.status, filesystem.list):
            with pytest.raises(ModelFileNotFoundError, match=said):
                operation(path)
        with pytest.raises(ModelFileNotFoundError, match=f"reading {said}"):
            filesystem.read_into(path, 0, memoryview(bytearray(8)))
        writer = filesystem.create(path)
        writer.write(memoryview(b"x"))
        with pytest.raises(ModelFileNotFoundError, match=f"writing {said}"):
            writer.commit()

    def test_a_read_of_a_file_that_was_cut_or_removed_says_so(self, filesystem: FileSystem, top: str) -> None:
        self.put(f"{top}/key", noise(1000))
        version = filesystem.status(f"{top}/key").version
        self.put(f"{top}/key", noise(10))
        with pytest.raises(ModelFileChangedError, match=f"{top}/key.* changed"):
            filesystem.read_into(f"{top}/key", 500, memoryview(bytearray(8)), version)
        with pytest.raises(ModelFileError, match="it ends at byte 10, expected bytes 500 to 508"):
            filesystem.read_into(f"{top}/key", 500, memoryview(bytearray(8)))
        filesystem.delete(f"{top}/key")
        with pytest.raises(ModelFileNotFoundError, match="there is no such object"):
            filesystem.read_into(f"{top}/key", 500, memoryview(bytearray(8)), version)
