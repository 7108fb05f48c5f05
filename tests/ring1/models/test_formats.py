"""Each format that `hps import` reads: what it lists, the rows it gives, and what it refuses."""

import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from hps.errors import InvalidDtypeError, InvalidInputError, MissingDependencyError, ModelFileError
from hps.ground.registry import implementation
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.formats.conversion import to_keys, to_vectors, vector_dtype
from hps.models.formats.numpy_files import NpyFiles, NpzArchive
from hps.models.formats.parquet import ParquetFiles
from hps.models.formats.safetensors_files import SafetensorsFile
from hps.models.formats.selection import select
from hps.models.formats.torch_state import TorchState
from hps.testing.sources import KEYS, VECTORS, Array, ArraySourceContract, Save, collect
from tests.tables import table_files

KINDS: dict[str, type[ArraySource]] = {
    **{".npz": NpzArchive, ".npy": NpyFiles, ".safetensors": SafetensorsFile},
    **dict.fromkeys((".pt", ".pth", ".bin"), TorchState),
    **dict.fromkeys((".parquet", ".pq"), ParquetFiles),
}


def opened(path: Path) -> ArraySource:
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.suffix in (".npy", ".parquet") and file.name[0] != "_"]
    return KINDS[files[0].suffix](str(path), [str(file) for file in files])


class TestOurFormats(ArraySourceContract):
    @pytest.fixture(params=table_files.SAVERS, ids=lambda save: save.__name__)
    def save(self, request: pytest.FixtureRequest) -> Save:
        return request.param

    def open(self, path: Path) -> ArraySource:
        return opened(path)


@given(
    array=numpy_st.arrays(
        st.one_of(
            numpy_st.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
            numpy_st.integer_dtypes(endianness="?"),
            numpy_st.unsigned_integer_dtypes(endianness="?"),
        ),
        st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 5))),
    ),
    fortran=st.booleans(),
    step=st.integers(1, 10),
    version=st.sampled_from([(1, 0), (2, 0)]),
)
def test_npy_arrays_of_any_dtype_order_and_chunk_come_back(
    tmp_path_factory: pytest.TempPathFactory, array: Array, fortran: bool, step: int, version: tuple[int, int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.asfortranarray(array) if fortran else array, version=version)
    source = opened(path)
    assert source.array("any") == ArrayInfo("any", array.shape, array.dtype.name)
    [got] = collect(source, ("any",), step)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(array, got.dtype).tobytes()


@given(bits=numpy_st.arrays(np.uint16, (3, 4)))
def test_16_bit_floats_become_the_float32_that_torch_makes_of_them(bits: Array) -> None:
    for kind, blocks in (
        (torch.bfloat16, (bits, bits.astype(">u2"), bits.view("V2"), bits.view(ml_dtypes.bfloat16))),
        (torch.float16, (bits.view("<f2"), bits.astype(">u2").view(">f2"))),
    ):
        expected = torch.from_numpy(bits.view(np.int16).copy()).view(kind).to(torch.float32).numpy()
        numbers = ~np.isnan(expected)  # torch drops the sign of some NaNs
        for block in blocks:
            got = to_vectors("x", "v", block, 0)
            assert np.array_equal(got, expected, equal_nan=True)
            assert np.array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


@given(values=numpy_st.arrays(np.float64, (4, 2)))
def test_float64_is_rounded_or_refused_by_its_row(values: Array) -> None:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    lost = (np.isinf(rounded) & np.isfinite(values)).any(axis=1)
    if lost.any():
        with pytest.raises(ModelFileError, match=rf"row {100 + int(np.argmax(lost))} of 'v' .* infinite as float32"):
            to_vectors("x", "v", values, 100)
    else:
        assert np.array_equal(to_vectors("x", "v", values, 100), rounded, equal_nan=True)


@given(
    keys=numpy_st.arrays(
        st.one_of(numpy_st.integer_dtypes(endianness="?"), numpy_st.unsigned_integer_dtypes(endianness="?")),
        st.sampled_from([(5,), (5, 1)]),
    )
)
def test_integer_keys_keep_their_value_or_are_refused_by_their_row(keys: Array) -> None:
    large = [int(key) >= 2**63 for key in keys.reshape(-1)]
    if any(large):
        with pytest.raises(
            ModelFileError, match=rf"row {10 + large.index(True)} of 'k' has key \d+, expected keys below 2\^63"
        ):
            to_keys("x", "k", keys, 10)
    else:
        got = to_keys("x", "k", keys, 10)
        assert (got.dtype, got.shape) == (np.int64, (5,))
        assert got.tolist() == [int(key) for key in keys.reshape(-1)]


def test_a_claimed_dtype_names_bits_and_contradicts_no_float() -> None:
    for held in ("void16", "uint16", "bfloat16"):
        assert vector_dtype("x", ArrayInfo("v", (1, 1), held), "bfloat16") == "bfloat16"
    assert vector_dtype("x", ArrayInfo("v", (1, 1), "float16"), "float16") == "float16"
    for held, claimed in (
        *(("float32", "float16"), ("void32", "bfloat16"), ("void32", "float32"), ("int16", "bfloat16"), ("float32", "int8")),
        *((held, None) for held in ("int8", "bool", "complex64", "float8_e4m3fn", "object", "void16")),
    ):
        with pytest.raises(InvalidDtypeError, match=rf"{held}.*, expected one of: float32"):
            vector_dtype("x", ArrayInfo("v", (1, 1), held), claimed)


class _Listed(ArraySource):
    """A source that only lists."""

    def __init__(self, *arrays: ArrayInfo, optional: bool = False) -> None:
        super().__init__("some.file", [])
        self._arrays = arrays
        self.keys_are_optional = optional  # type: ignore[misc]

    def arrays(self) -> list[ArrayInfo]:
        return list(self._arrays)

    def chunks(self, names: Any, step: int) -> Any:
        raise AssertionError


def _info(name: str, *shape: int, dtype: str = "float32") -> ArrayInfo:
    return ArrayInfo(name, shape, dtype)


IDS, VECTORS_INFO = _info("ids", 4, dtype="int64"), _info("vectors", 4, 2)
KEY_SHAPE = r"expected shape \(n,\) or \(n, 1\)"


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        *(([IDS, VECTORS_INFO], "ids vectors"), ([IDS, VECTORS_INFO, _info("other", 9, 9)], "ids vectors")),
        ([_info("m.ids", 4, dtype="int64"), _info("m.EMBEDDINGS", 4, 2)], "m.ids m.EMBEDDINGS"),
        ([IDS, _info("whatever", 4, 2, dtype="bfloat16"), _info("bias", 4)], "ids whatever"),
        ([_info("key", 4, 1, dtype="uint8"), _info("emb_vector", 4, 2)], "key emb_vector"),
    ],
)
def test_keys_and_vectors_are_found_by_conventional_names(arrays: list[ArrayInfo], expected: str) -> None:
    selection = select(_Listed(*arrays), None, None, None)
    assert selection.keys is not None
    assert f"{selection.keys.name} {selection.vectors.name}" == expected
    assert (selection.rows, selection.dim) == (4, 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([VECTORS_INFO], "no array of keys, expected one; name it with --keys, or give --first-key"),
        ([IDS, _info("key", 4, dtype="int64"), VECTORS_INFO], r"several arrays that may be the keys \(ids, key\)"),
        ([IDS, _info("a", 4, 2), _info("b", 4, 2)], r"several arrays that may be the \(n, dim\) vectors \(a, b\)"),
        ([IDS], r"no array of \(n, dim\) vectors, expected one; name it with --vectors; it holds ids \(4,\) int64"),
        ([], "it holds no array"),
        ([IDS, _info("vectors", 8)], r"got vectors vectors \(8,\) float32, expected shape \(n, dim\)"),
        ([IDS, _info("vectors", 4, 2, 2)], r"expected shape \(n, dim\)"),
        ([IDS, _info("vectors", 5, 2)], r"got keys ids \(4,\) int64 and vectors vectors \(5, 2\) float32, expected as many"),
        *(([_info("ids", *shape, dtype="int64"), VECTORS_INFO], KEY_SHAPE) for shape in ((4, 2), ())),
        ([_info("ids", 0, dtype="int64"), _info("vectors", 0, 2)], "at least 1 row"),
        ([IDS, _info("vectors", 4, 0)], "at least 1 element"),
    ],
)
def test_what_cannot_be_one_table_is_refused(arrays: list[ArrayInfo], message: str) -> None:
    with pytest.raises(ModelFileError, match=f"importing some.file: .*{message}"):
        select(_Listed(*arrays), None, None, None)


def test_row_numbers_stand_for_keys_where_the_format_has_none_or_where_they_are_asked_for() -> None:
    vectors = _info("vectors", 4, 2)
    assert select(_Listed(vectors, optional=True), None, None, None).keys is None
    assert select(_Listed(IDS, vectors, optional=True), None, None, None).keys == IDS
    assert select(_Listed(IDS, vectors), None, None, 10).first_key == 10
    assert select(_Listed(vectors), None, None, 2**63 - 4).keys is None
    for first_key in (2**63 - 3, -(2**63) - 1):
        with pytest.raises(InvalidInputError, match="expected keys in int64"):
            select(_Listed(vectors), None, None, first_key)
    with pytest.raises(InvalidInputError, match="expected one of them"):
        select(_Listed(IDS, vectors), "ids", None, 1)


@pytest.mark.parametrize("save", [table_files.save_npz, table_files.save_npz_compressed])
def test_a_changed_byte_in_an_npz_member_is_noticed_by_its_checksum(save: Any, tmp_path: Path) -> None:
    vectors = np.random.default_rng(5).random((500, 8), np.float32)
    path = save(tmp_path, np.arange(500), vectors)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("vectors.npy")
    content[member.header_offset + member.compress_size // 2] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="damaged"):
        collect(opened(path), ("keys", "vectors"), 64)


def test_numpy_arrays_with_more_bytes_than_rows_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, VECTORS)
    np.save(content, VECTORS)
    (tmp_path / "vectors.npy").write_bytes(content.getvalue())
    with pytest.raises(ModelFileError, match=r"vectors\.npy: .*got 424 bytes, expected 212 for an array \(7, 3\)"):
        opened(tmp_path / "vectors.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("vectors.npy", content.getvalue())
    with pytest.raises(ModelFileError, match=r"a\.npz: .*vectors has bytes beyond its last row"):
        collect(opened(tmp_path / "a.npz"), ("vectors",), 100)
    path = table_files.save_npz(tmp_path, KEYS, np.asfortranarray(VECTORS))
    with pytest.raises(ModelFileError, match=r"vectors \(7, 3\) is in Fortran order, .*np\.ascontiguousarray"):
        collect(opened(path), ("keys", "vectors"), 2)


def test_several_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    table_files.save_npz(tmp_path, KEYS, VECTORS)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("keys.npy", archive.read("keys.npy"))
    torch.save({"keys": {"0": torch.zeros(1)}, "keys.0": torch.zeros(1)}, tmp_path / "a.pt")
    pq.write_table(pa.Table.from_arrays([pa.array(KEYS), pa.array(KEYS)], names=["keys", "keys"]), tmp_path / "a.parquet")
    for file, name in (("a.npz", "keys"), ("a.pt", "keys.0"), ("a.parquet", "keys")):
        with pytest.raises(ModelFileError, match=rf"it holds 2 arrays called '{name}', expected one"):
            opened(tmp_path / file).array(name)


def test_safetensors_of_all_its_float_dtypes_are_read(tmp_path: Path) -> None:
    values = torch.arange(6).reshape(3, 2) / 4
    tensors = {str(kind): values.to(kind) for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    tensors["small"] = values.to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, tmp_path / "all.safetensors", metadata={"by": "a test"})
    source = opened(tmp_path / "all.safetensors")
    assert {info.name for info in source.arrays()} == set(tensors)
    assert source.array("small").dtype == "F8_E4M3"
    for name in set(tensors) - {"small"}:
        assert vector_dtype("x", source.array(name), None) == name.removeprefix("torch.")
        [block] = collect(source, (name,), 2)
        assert np.array_equal(to_vectors("x", name, block, 0), values.numpy())


def test_a_tensor_alone_is_read_and_what_is_no_dense_tensor_is_refused(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(VECTORS), tmp_path / "t.pt")
    assert opened(tmp_path / "t.pt").arrays() == [ArrayInfo("tensor", (7, 3), "float32")]
    bag = torch.nn.ModuleDict({"item": torch.nn.EmbeddingBag(4, 2, dtype=torch.bfloat16)})
    torch.save({"epoch": 3, "model": bag.state_dict(), "extra": [torch.zeros(2)], "name": "x"}, tmp_path / "m.pt")
    listed = [ArrayInfo("model.item.weight", (4, 2), "bfloat16"), ArrayInfo("extra.0", (2,), "float32")]
    assert opened(tmp_path / "m.pt").arrays() == listed
    loop: list[Any] = [torch.zeros(2, 2)]
    loop.append(loop)
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(ModelFileError, match=r"loop\.pt: .*RecursionError"):
        opened(tmp_path / "loop.pt")
    torch.save({"vectors": torch.eye(3).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(InvalidDtypeError, match=r"got vectors vectors \(3, 3\) sparse_coo, expected"):
        select(opened(tmp_path / "s.pt"), None, None, None)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[1.0, 2.0], None, [3.0, 4.0]], "row 1 of column 'vectors' is null"),
        ([[1.0, 2.0], [3.0, 4.0], [3.0, None]], "row 2 of column 'vectors' has a null element"),
        (
            [[1.0, 2.0], [3.0, 4.0], [3.0]],
            "row 2 of column 'vectors' does not have 2 elements, expected as many as in the",
        ),
        ([[1.0], [], [3.0]], "row 1 of column 'vectors' does not have 1 element"),
        ([None, [1.0], [1.0]], "row 0 of column 'vectors' is null"),
        ([[1.0], [2.0], [3.0]], "row 2 of column 'keys' is null"),
    ],
)
def test_nulls_and_ragged_lists_are_refused_by_their_row(lists: list[Any], message: str, tmp_path: Path) -> None:
    kinds: list[Any] = [pa.list_(pa.float32()), pa.large_list(pa.float32())]
    if "does not have" not in message:
        kinds.append(pa.list_(pa.float32(), len(lists[2])))
    keys = pa.array([1, 2, None if "keys" in message else 3], pa.int64())
    for kind in kinds:
        pq.write_table(pa.table({"keys": keys, "vectors": pa.array(lists, kind)}), tmp_path / "r.parquet", row_group_size=2)
        for step in (1, 8, 100):
            with pytest.raises(ModelFileError, match=rf"r\.parquet: {message}"):
                collect(opened(tmp_path / "r.parquet"), ("keys", "vectors"), step)


def test_part_files_of_other_columns_or_widths_are_refused_by_name(tmp_path: Path) -> None:
    table_files.save_parquet_fixed(tmp_path, KEYS, VECTORS).rename(tmp_path / "0.parquet")
    for table, message in (
        ({"keys": KEYS}, "vectors does not exist"),
        ({"keys": KEYS, "vectors": table_files.lists(VECTORS)}, "got columns keys, vectors of .* expected .*0.parquet"),
        ({"keys": KEYS.astype(np.int32), "vectors": table_files.lists(VECTORS)}, "got columns"),
    ):
        pq.write_table(pa.table(table), tmp_path / "1.parquet")
        with pytest.raises(ModelFileError, match=rf"1\.parquet: .*{message}"):
            collect(opened(tmp_path), ("keys", "vectors"), 10)


@pytest.mark.parametrize(
    ("engine", "module", "name", "hint"),
    [
        ("torch", "hps.models.formats.torch_state", "torch", r"pip install '\.\[torch\]'"),
        ("pyarrow", "hps.models.formats.parquet", "parquet", r"pip install '\.\[import\]'"),
        ("safetensors", "hps.models.formats.safetensors_files", "safetensors", r"pip install '\.\[import\]'"),
        ("ml_dtypes", "hps.models.formats.safetensors_files", "safetensors", r"pip install '\.\[import\]'"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    engine: str, module: str, name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingDependencyError, match=hint):
        implementation("format", name)


def test_a_small_file_of_torch_does_not_name_more_than_memory_and_disk_hold(tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    for leaf in ({"w": torch.ones(2, 2)}, {}):
        for _ in range(40):
            leaf = {"a": leaf, "b": leaf}  # type: ignore[dict-item]
        torch.save(leaf, path)
        assert path.stat().st_size < 10_000
        with pytest.raises(ModelFileError, match="more than 131072 tensors and mappings"):
            TorchState(str(path), [str(path)])
    torch.save({"emb": torch.zeros(1, 1).expand(1 << 40, 8)}, path)
    with pytest.raises(ModelFileError, match=r"'emb' has 35184372088832 bytes, of which the file holds 4"):
        TorchState(str(path), [str(path)])
    whole = torch.arange(40.0).reshape(10, 4)
    torch.save({"emb": whole[2:5], "turned": whole.T}, path)
    assert [info.shape for info in TorchState(str(path), [str(path)]).arrays()] == [(3, 4), (4, 10)]
