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

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem


def noise(n: int, seed: int = 1) -> bytes:
    """n bytes without a pattern that a shifted read could repeat."""
    return np.random.default_rng(seed).bytes(n)


class FileSystemContract:
    """Subclass it, give the fixtures `filesystem` and `root` (a directory's path or URI, not made yet) and `put`."""

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

    def test_directories_are_told_from_files(self, filesystem: FileSystem, root: str, file: str) -> None:
        for name in ("2", "10/deep/file", "1/file", "with space/file"):
            self.put(f"{root}/model/{name}", b"x")
        self.put(f"{root}/model2/other", b"x")
        assert filesystem.directories(f"{root}/model") == ["1", "10", "with space"]
        assert filesystem.directories(f"{root}/model2") == []
        with pytest.raises(ModelFileNotFoundError, match="absent"):
            filesystem.directories(f"{root}/absent")
        with pytest.raises(ModelFileError, match="key"):
            filesystem.directories(file)

    def test_listing_what_is_no_directory_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileNotFoundError, match="absent"):
            filesystem.list(f"{root}/absent")
        with pytest.raises(ModelFileError, match="key"):
            filesystem.list(file)

    # -- status: size ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 7, 4096, 1_000_003])
    def test_size_is_the_number_of_bytes(self, filesystem: FileSystem, root: str, size: int) -> None:
        self.put(f"{root}/file", noise(size))
        assert filesystem.status(f"{root}/file").size_bytes == size

    def test_an_absent_file_is_an_error(self, filesystem: FileSystem, root: str, file: str) -> None:
        for path in (f"{root}/model/absent", f"{root}/absent/key", f"{file}/below"):
            with pytest.raises(ModelFileNotFoundError, match=path):
                filesystem.status(path)
            with pytest.raises(ModelFileNotFoundError, match=path):
                filesystem.read_into(path, 0, memoryview(bytearray(8)))

    def test_a_directory_in_place_of_a_file_is_said_to_be_one(self, filesystem: FileSystem, root: str, file: str) -> None:
        with pytest.raises(ModelFileError, match=f"{root}/model: .*directory") as opening:
            filesystem.status(f"{root}/model")
        with pytest.raises(ModelFileError, match=f"{root}/model: .*directory") as reading:
            filesystem.read_into(f"{root}/model", 0, memoryview(bytearray(8)))
        assert not isinstance(opening.value, ModelFileNotFoundError)
        assert not isinstance(reading.value, ModelFileNotFoundError)

    # -- status: version ------------------------------------------------------------------------------------------------------

    def test_the_version_of_an_untouched_file_stays(self, filesystem: FileSystem, root: str, file: str) -> None:
        before = filesystem.status(file).version
        self.put(f"{root}/model/other", b"x")
        filesystem.read_into(file, 0, memoryview(bytearray(100)))
        assert filesystem.status(file).version == before
        assert before

    @pytest.mark.parametrize("size", [100_000, 100_001])
    def test_another_file_in_its_place_has_another_version(self, filesystem: FileSystem, file: str, size: int) -> None:
        before = filesystem.status(file).version
        self.put(file, noise(size, seed=2))
        assert filesystem.status(file).version != before

    def test_a_read_of_another_version_is_refused(self, filesystem: FileSystem, file: str) -> None:
        before = filesystem.status(file).version
        filesystem.read_into(file, 0, memoryview(bytearray(100)), before)
        self.put(file, noise(100_000, seed=2))
        with pytest.raises(ModelFileChangedError, match="changed"):
            filesystem.read_into(file, 0, memoryview(bytearray(100)), before)
        buffer = bytearray(100)
        filesystem.read_into(file, 0, memoryview(buffer), filesystem.status(file).version)
        assert buffer == noise(100_000, seed=2)[:100]

    # -- read_into ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "size"), [(0, 100_000), (0, 1), (1, 99_999), (99_999, 1), (4096, 4096), (777, 70_001), (0, 0), (100_000, 0)]
    )
    def test_a_range_is_read_whole(self, filesystem: FileSystem, file: str, offset: int, size: int) -> None:
        buffer = bytearray(size)
        filesystem.read_into(file, offset, memoryview(buffer))
        assert buffer == noise(100_000)[offset : offset + size]

    def test_a_read_stays_within_its_part_of_an_array(self, filesystem: FileSystem, file: str) -> None:
        array = np.zeros((100, 25), np.float32)
        filesystem.read_into(file, 40, array.data.cast("B")[400:9600])
        assert array.tobytes() == bytes(400) + noise(100_000)[40:9240] + bytes(400)

    @pytest.mark.parametrize(("offset", "size"), [(0, 100_001), (99_999, 2), (100_000, 1), (1 << 40, 8)])
    def test_a_range_beyond_the_end_is_an_error(self, filesystem: FileSystem, file: str, offset: int, size: int) -> None:
        with pytest.raises(ModelFileError, match=file):
            filesystem.read_into(file, offset, memoryview(bytearray(size)))

    def test_many_threads_read_at_once(self, filesystem: FileSystem, file: str) -> None:
        content = noise(100_000)

        def read(seed: int) -> bool:
            offset, size = np.random.default_rng(seed).integers(1, 50_000, 2).tolist()
            buffer = bytearray(size)
            filesystem.read_into(file, offset, memoryview(buffer))
            return buffer == content[offset : offset + size]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(64)))

    def test_no_descriptor_stays_open(self, filesystem: FileSystem, file: str) -> None:
        filesystem.read_into(file, 0, memoryview(bytearray(8)))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            filesystem.read_into(file, 1, memoryview(bytearray(99_999)))
            filesystem.status(file)
            with pytest.raises(ModelFileError):
                filesystem.read_into(file, 0, memoryview(bytearray(100_001)))
        assert len(os.listdir("/proc/self/fd")) < before + 10  # far less than one a call, of which there were 30

    # -- create, delete -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 100_000, 20_000_003])
    def test_what_is_written_in_pieces_is_read_whole(self, filesystem: FileSystem, root: str, size: int) -> None:
        content = noise(size)
        writer = filesystem.create(f"{root}/new/place/file")
        for start in range(0, size, 777_777):
            writer.write(memoryview(content)[start : start + 777_777])
        writer.commit()
        writer.abort()  # changes nothing any more
        assert filesystem.status(f"{root}/new/place/file").size_bytes == size
        buffer = bytearray(size)
        filesystem.read_into(f"{root}/new/place/file", 0, memoryview(buffer))
        assert buffer == content
        assert filesystem.list(f"{root}/new/place") == ["file"]

    def test_an_array_is_written_by_its_bytes_and_may_be_changed_afterwards(self, filesystem: FileSystem, root: str) -> None:
        array, content = np.empty((10, 25), np.float32), b""
        writer = filesystem.create(f"{root}/file")
        for i in range(5):
            array[:] = np.arange(25) + i
            content += array.tobytes()
            writer.write(array.data)
        writer.commit()
        buffer = bytearray(5000)
        filesystem.read_into(f"{root}/file", 0, memoryview(buffer))
        assert buffer == content

    def test_nothing_is_seen_before_the_commit(self, filesystem: FileSystem, root: str, file: str) -> None:
        before = filesystem.status(file)
        new, over = filesystem.create(f"{root}/model/new"), filesystem.create(file)
        for writer in (new, over):
            writer.write(memoryview(noise(200_000, seed=3)))
        assert not filesystem.exists(f"{root}/model/new")
        assert filesystem.status(file) == before
        over.commit()
        assert filesystem.status(file).size_bytes == 200_000
        assert not filesystem.exists(f"{root}/model/new")
        new.commit()
        assert filesystem.status(f"{root}/model/new").size_bytes == 200_000

    def test_what_is_aborted_leaves_nothing(self, filesystem: FileSystem, root: str, file: str) -> None:
        before = filesystem.status(file)
        for path in (file, f"{root}/model/new"):
            writer = filesystem.create(path)
            writer.write(memoryview(noise(200_000, seed=3)))
            writer.abort()
            writer.abort()
        assert filesystem.status(file) == before
        assert filesystem.list(f"{root}/model") == ["key"]

    # -- replace ------------------------------------------------------------------------------------------------------

    def content_of(self, filesystem: FileSystem, path: str) -> bytes:
        buffer = bytearray(filesystem.status(path).size_bytes)
        filesystem.read_into(path, 0, memoryview(buffer))
        return bytes(buffer)

    def test_a_file_is_replaced_only_in_the_version_that_its_writer_knows(self, filesystem: FileSystem, root: str) -> None:
        path = f"{root}/model/serving.json"
        versions = [""]
        for number in range(3):
            content = b"content %d" % number
            versions.append(filesystem.replace(path, content, versions[-1]))
            assert versions[-1] == filesystem.status(path).version
            assert self.content_of(filesystem, path) == content
            for old in versions[:-1]:
                with pytest.raises(ModelFileChangedError, match=f"writing {path}: expected .*another writer changed it"):
                    filesystem.replace(path, b"late", old)
            assert self.content_of(filesystem, path) == content
        assert len(set(versions)) == 4
        assert [name for name in filesystem.list(f"{root}/model") if not name.startswith(".")] == ["serving.json"]

    def test_a_file_that_is_gone_is_not_replaced(self, filesystem: FileSystem, root: str) -> None:
        path = f"{root}/model/serving.json"
        version = filesystem.replace(path, b"first", "")
        filesystem.delete(path)
        with pytest.raises(ModelFileChangedError, match="another writer changed it"):
            filesystem.replace(path, b"second", version)
        assert not filesystem.exists(path)
        filesystem.replace(path, b"third", "")
        assert self.content_of(filesystem, path) == b"third"

    def test_content_that_is_there_already_counts_as_written(self, filesystem: FileSystem, root: str) -> None:
        """As after an attempt whose answer was lost."""
        path = f"{root}/model/serving.json"
        first = filesystem.replace(path, b"first", "")
        assert filesystem.replace(path, b"first", "") == first
        second = filesystem.replace(path, b"second", first)
        assert filesystem.replace(path, b"second", first) == second

    @pytest.mark.parametrize("there", [False, True])
    def test_of_many_writers_at_once_one_succeeds(self, filesystem: FileSystem, root: str, there: bool) -> None:
        path = f"{root}/model/serving.json"
        for turn in range(3):
            if not there:
                filesystem.delete(path)
            version = filesystem.replace(path, b"before %d" % turn, filesystem.status(path).version if turn and there else "")
            if not there:
                filesystem.delete(path)
                version = ""

            def write(number: int, version: str = version, turn: int = turn) -> str:
                try:
                    return filesystem.replace(path, b"turn %d, writer %d" % (turn, number), version)
                except ModelFileChangedError:
                    return ""

            with ThreadPoolExecutor(8) as pool:
                outcomes = list(pool.map(write, range(8)))
            winners = [number for number, written in enumerate(outcomes) if written]
            assert len(winners) == 1, outcomes
            assert self.content_of(filesystem, path) == b"turn %d, writer %d" % (turn, winners[0])
            assert outcomes[winners[0]] == filesystem.status(path).version

    def test_a_deleted_file_is_gone(self, filesystem: FileSystem, root: str, file: str) -> None:
        self.put(f"{root}/model/other", b"x")
        for _ in range(2):
            filesystem.delete(file)
            assert not filesystem.exists(file)
        assert filesystem.list(f"{root}/model") == ["other"]
