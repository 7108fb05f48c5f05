"""The behaviour that every file system shares; each file system's test subclasses `FileSystemContract`.

class TestLocalFileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self):
        return LocalFileSystem()

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path / "root")

    def put(self, path, content):
        ...
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem


def noise(n: int, seed: int = 1) -> bytes:
    """n bytes without a pattern that a shifted read could repeat."""
    return np.random.default_rng(seed).bytes(n)


class FileSystemContract:
    """Subclass it, give the fixtures `filesystem` and `root` (a directory's path or URI, not made yet) and `put`."""

    @pytest.fixture
    def filesystem(self) -> FileSystem:
        raise NotImplementedError("a subclass gives the file system")

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError("a subclass gives a place for files")

    def put(self, path: str, content: bytes) -> None:
        """Write a file, and the directories above it, without the file system under test; replaces what is there."""
        raise NotImplementedError("a subclass writes files by other means")

    @pytest.fixture
    def file(self, root: str) -> str:
        """A file of 100,000 bytes of `noise`."""
        self.put(f"{root}/model/key", noise(100_000))
        return f"{root}/model/key"

    # -- exists, list -------------------------------------------------------------------------------------------------

    def test_files_and_directories_exist(self, filesystem: FileSystem, root: str, file: str) -> None:
        assert filesystem.exists(file)
        assert filesystem.exists(f"{root}/model")
        assert filesystem.exists(root)

    def test_what_is_not_there_does_not_exist(self, filesystem: FileSystem, root: str, file: str) -> None:
        for path in (f"{root}/model/ke", f"{root}/model/keys", f"{root}/mode", f"{root}/other/key", f"{file}/key"):
            assert not filesystem.exists(path), path

    def test_list_gives_the_sorted_names_in_a_directory(self, filesystem: FileSystem, root: str, file: str) -> None:
        for name in ("emb_vector", "b/deep/file", "a/file", "Z", "with space"):
            self.put(f"{root}/model/{name}", b"x")
        self.put(f"{root}/model2/other", b"x")
        assert filesystem.list(f"{root}/model") == sorted(["emb_vector", "b", "a", "Z", "with space", "key"])

    def test_listing_an_absent_directory_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileNotFoundError, match="absent"):
            filesystem.list(f"{root}/absent")

    def test_listing_a_file_is_an_error(self, filesystem: FileSystem, file: str) -> None:
        with pytest.raises(ModelFileError, match="key"):
            filesystem.list(file)

    # -- size ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 7, 4096, 1_000_003])
    def test_size_is_the_number_of_bytes(self, filesystem: FileSystem, root: str, size: int) -> None:
        self.put(f"{root}/file", noise(size))
        assert filesystem.size(f"{root}/file") == size

    def test_the_size_of_an_absent_file_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        for path in (f"{root}/model/absent", f"{root}/absent/key", f"{file}/below"):
            with pytest.raises(ModelFileNotFoundError, match=path):
                filesystem.size(path)

    def test_a_directory_has_no_size(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileError, match=f"{root}/model"):
            filesystem.size(f"{root}/model")

    # -- version ------------------------------------------------------------------------------------------------------

    def test_the_version_of_an_untouched_file_stays(self, filesystem: FileSystem, root: str, file: str) -> None:
        before = filesystem.version(file)
        self.put(f"{root}/model/other", b"x")
        filesystem.read_into(file, 0, memoryview(bytearray(100)))
        assert filesystem.version(file) == before
        assert before

    def test_another_file_of_the_same_size_in_its_place_has_another_version(self, filesystem: FileSystem, file: str) -> None:
        before = filesystem.version(file)
        self.put(file, noise(100_000, seed=2))
        assert filesystem.version(file) != before

    def test_a_longer_file_in_its_place_has_another_version(self, filesystem: FileSystem, file: str) -> None:
        before = filesystem.version(file)
        self.put(file, noise(100_001))
        assert filesystem.version(file) != before

    def test_an_absent_file_has_no_version(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileNotFoundError, match="absent"):
            filesystem.version(f"{root}/model/absent")

    # -- read_into ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("offset", "size"), [(0, 100_000), (0, 1), (1, 99_999), (99_999, 1), (4096, 4096), (777, 70_001)])
    def test_a_range_is_read_whole(self, filesystem: FileSystem, file: str, offset: int, size: int) -> None:
        buffer = bytearray(size)
        filesystem.read_into(file, offset, memoryview(buffer))
        assert buffer == noise(100_000)[offset : offset + size]

    def test_a_read_stays_within_its_buffer(self, filesystem: FileSystem, file: str) -> None:
        buffer = bytearray(b"." * 1000)
        filesystem.read_into(file, 500, memoryview(buffer)[100:900])
        assert buffer == b"." * 100 + noise(100_000)[500:1300] + b"." * 100

    def test_reading_nothing_is_allowed(self, filesystem: FileSystem, file: str) -> None:
        filesystem.read_into(file, 0, memoryview(bytearray()))
        filesystem.read_into(file, 100_000, memoryview(bytearray()))

    def test_a_read_into_an_array(self, filesystem: FileSystem, file: str) -> None:
        array = np.empty((100, 25), np.float32)
        filesystem.read_into(file, 40, array.data.cast("B"))
        assert array.tobytes() == noise(100_000)[40:10_040]

    @pytest.mark.parametrize(("offset", "size"), [(0, 100_001), (99_999, 2), (100_000, 1), (1 << 40, 8)])
    def test_a_range_beyond_the_end_is_an_error(self, filesystem: FileSystem, file: str, offset: int, size: int) -> None:
        with pytest.raises(ModelFileError, match=file):
            filesystem.read_into(file, offset, memoryview(bytearray(size)))

    def test_reading_an_absent_file_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        for path in (f"{root}/model/absent", f"{root}/absent/key", f"{file}/below"):
            with pytest.raises(ModelFileNotFoundError, match=path):
                filesystem.read_into(path, 0, memoryview(bytearray(8)))

    def test_reading_a_directory_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileError, match=f"{root}/model"):
            filesystem.read_into(f"{root}/model", 0, memoryview(bytearray(8)))

    def test_many_threads_read_at_once(self, filesystem: FileSystem, file: str) -> None:
        content = noise(100_000)

        def read(seed: int) -> bool:
            offset, size = np.random.default_rng(seed).integers(1, 50_000, 2).tolist()
            buffer = bytearray(size)
            filesystem.read_into(file, offset, memoryview(buffer))
            return buffer == content[offset : offset + size]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(64)))
