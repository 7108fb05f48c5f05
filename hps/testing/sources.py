"""The behaviour that every format of `hps import` shares; each format's test subclasses `ArraySourceContract`.

class TestCsv(ArraySourceContract):
    @pytest.fixture
    def save(self):
        return save_csv

    def open(self, path):
        return CsvFile(str(path), [str(path)])
"""

import gc
import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hps.errors import HPSError, InvalidDtypeError, ModelFileError
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.formats.selection import select

Array = np.ndarray[Any, Any]
Save = Callable[[Path, Array, Array], Path]

KEYS = np.array([-5, 2**62, 0, 7, -(2**63), 11, 12], np.int64)
VECTORS = np.arange(21, dtype=np.float32).reshape(7, 3) / 8


def any_bits(rows: int, dim: int, seed: int = 1) -> Array:
    """Vectors of any bits: infinite elements, NaNs of all kinds."""
    return np.random.default_rng(seed).integers(0, 2**32, (rows, dim), np.uint32).view(np.float32)


def collect(source: ArraySource, names: Sequence[str], step: int) -> list[Array]:
    """All rows of each array, copied from each chunk as it comes, since a block is valid until the next."""
    blocks = []
    for chunk in source.chunks(names, step):
        assert {len(block) for block in chunk} == {len(chunk[0])} <= set(range(1, step + 1))
        blocks.append([block.copy() for block in chunk])
    return [np.concatenate(column) for column in zip(*blocks, strict=True)]


class ArraySourceContract:
    """Subclass it, give the fixture `save` and the method `open`, and the names of the two arrays where they are others.

    `save` is a function of a directory, keys (n,) int64 and vectors (n, dim) float32, which writes the two arrays, the rows in
    this order, and returns the path that `open` takes. Several are the parameters of the fixture.
    """

    keys: ClassVar[str] = "keys"
    vectors: ClassVar[str] = "vectors"

    def open(self, path: Path) -> ArraySource:
        """Open what `save` wrote."""
        raise NotImplementedError("a subclass opens the files of its format")

    @pytest.fixture
    def table(self, save: Save, tmp_path: Path) -> Path:
        """A table of 7 rows of 3 elements."""
        return save(tmp_path, KEYS, VECTORS)

    def read(self, path: Path, step: int = 2) -> tuple[Array, Array]:
        """Keys and vectors of a file, as an import reads them."""
        source = self.open(path)
        chosen = select(source, self.keys, self.vectors, None)
        assert chosen.keys is not None
        keys, vectors = collect(source, [chosen.keys.name, chosen.vectors.name], step)
        return keys, vectors

    # -- what it lists ------------------------------------------------------------------------------------------------

    def test_it_lists_name_shape_and_dtype_of_its_arrays(self, table: Path) -> None:
        source = self.open(table)
        assert source.array(self.keys) == ArrayInfo(self.keys, (7,), "int64")
        assert source.array(self.vectors) == ArrayInfo(self.vectors, (7, 3), "float32")
        listed = {info.name: info for info in source.arrays()}
        assert len(listed) == len(source.arrays())
        for name, shape in ((self.keys, (7,)), (self.vectors, (7, 3))):
            assert len(listed[name].shape) == len(shape)
            assert all(got in (-1, length) for got, length in zip(listed[name].shape, shape, strict=True))

    def test_an_absent_array_is_an_error_that_lists_those_there_are(self, table: Path) -> None:
        with pytest.raises(ModelFileError, match=rf"holds no 'absent', expected one; it holds .*{self.keys} \(7,\) int64"):
            self.open(table).array("absent")

    def test_the_keys_of_vectors_are_an_array_and_nothing_is_deleted(self, table: Path) -> None:
        source = self.open(table)
        assert source.keys_of(self.vectors) in (None, self.keys)
        assert source.keys_of(self.keys) is None
        assert list(source.deleted(self.vectors, 3)) == []

    # -- what it reads ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("rows", [1, 7, 8])
    def test_rows_come_back_bit_for_bit_in_order_whatever_the_chunks(self, save: Save, rows: int, tmp_path: Path) -> None:
        keys, vectors = np.append(KEYS, 3)[:rows], any_bits(rows, 3)
        source = self.open(save(tmp_path, keys, vectors))
        for step in {1, 2, 3, rows - 1, rows, rows + 1, 100} - {0}:  # of one source: the second pass gives what the first gave
            got_keys, got = collect(source, (self.keys, self.vectors), step)
            assert np.array_equal(got_keys, keys)
            assert got.astype("<f4").tobytes() == vectors.tobytes()

    def test_arrays_are_read_alone_and_in_the_order_that_was_asked_for(self, table: Path) -> None:
        source = self.open(table)
        [alone] = collect(source, (self.vectors,), 3)
        [keys] = collect(source, (self.keys,), 3)
        turned = collect(source, (self.vectors, self.keys), 3)
        for vectors in (alone, turned[0]):
            assert np.array_equal(vectors, VECTORS)
        for got in (keys, turned[1]):
            assert np.array_equal(got, KEYS)

    def test_a_pass_that_was_left_is_in_the_way_of_none_after_it(self, table: Path) -> None:
        source = self.open(table)
        chunks = source.chunks((self.keys, self.vectors), 2)
        next(iter(chunks))
        del chunks
        assert np.array_equal(collect(source, (self.keys,), 2)[0], KEYS)

    def test_no_descriptor_stays_open(self, table: Path) -> None:
        self.read(table)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            self.read(table)
            list(islice(self.open(table).chunks((self.keys,), 2), 1))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before

    # -- damage -------------------------------------------------------------------------------------------------------

    def test_a_file_that_is_cut_short_is_an_error_that_names_the_table(self, table: Path) -> None:
        for file in map(Path, self.open(table).files):
            content = file.read_bytes()
            for size in {0, 1, 7, len(content) // 4, len(content) // 2, max(len(content) - 30, 0), len(content) - 1} - {
                len(content)
            }:
                file.write_bytes(content[:size])
                with pytest.raises(ModelFileError, match=re.escape(str(table))):
                    self.read(table)
            file.write_bytes(content)
        assert np.array_equal(self.read(table)[0], KEYS)

    def test_a_damaged_file_gives_rows_or_one_kind_of_error(self, table: Path) -> None:
        files, random = [Path(file) for file in self.open(table).files], np.random.default_rng(3)
        outcomes: set[type] = set()
        for _ in range(40):
            file = files[random.integers(len(files))]
            content = file.read_bytes()
            changed, at = bytearray(content), int(random.integers(len(content)))
            changed[at : at + 4] = random.bytes(len(changed[at : at + 4]))
            file.write_bytes(changed)
            try:
                outcomes.add(type(self.read(table)))
            except HPSError as error:
                outcomes.add(type(error))
            file.write_bytes(content)
        assert outcomes <= {tuple, ModelFileError, InvalidDtypeError}
