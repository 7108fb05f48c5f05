"""Rows of 8 bits of other systems become the float32 that those systems make of them; FBGEMM and PyTorch are asked."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hps.errors import InvalidDtypeError, ModelFileError
from hps.ground.rows import encode
from hps.models.formats.base import ArrayInfo
from hps.models.formats.quantised_rows import dequantised, row_dim
from hps.models.importing.checkpoint import find_table, find_tables, list_arrays, tables_pattern
from tests.tables.trainer_dumps import save_torcheasyrec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what its build for the CPU lacks
    import fbgemm_gpu  # noqa: F401 - registers operators
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

Array = np.ndarray[Any, Any]
KEYS = np.array([5, -6, 2**62, 7, 0, 9, 13, 8], np.int64)


def vectors(rng: np.random.Generator, rows: int, dim: int) -> Array:
    """Vectors of many magnitudes, around 0 and far from it."""
    spread = rng.normal(size=(rows, dim)) * 10.0 ** rng.integers(-2, 3, (rows, 1))
    return (spread + rng.normal(size=(rows, 1)) * 10.0 ** rng.integers(-6, 3, (rows, 1))).astype(np.float32)


def halves(rows: Array) -> tuple[Array, Array]:
    """Codes, and scale and offset as the bytes of float16, of rows as `hps` stores them."""
    dim = rows.shape[1]
    stored = encode("testing", rows, "int8").view(np.uint8)
    return stored[:, :dim], stored[:, -4:]


def rows_of(path: Path, **options: Any) -> Array:
    return np.concatenate([block.copy() for _, block in find_table(path, **options).chunks()])


def equal_bits(got: Array, expected: Array) -> bool:
    return got.shape == expected.shape and np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_fused_rows_of_every_dim_are_those_of_fbgemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected_of(rows: Array) -> Array:
        made: Array = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(rows)).numpy()
        return made

    rng = np.random.default_rng(1)
    for dim in range(1, 257):
        rows = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(vectors(rng, 10, dim))).numpy()
        assert row_dim("x", "v", rows.shape[1], "fused8bit", None) == dim
        assert equal_bits(dequantised("x", "v", rows, 0, "fused8bit", dim), expected_of(rows))
    monkeypatch.setattr("hps.models.importing.checkpoint.rows_of_a_chunk", lambda dim: 3)
    torch.save({"t": torch.from_numpy(rows)}, tmp_path / "m.pt")
    chunks = [block.copy() for _, block in find_table(tmp_path / "m.pt", vectors="t", dtype="fused8bit").chunks()]
    assert [len(chunk) for chunk in chunks] == [3, 3, 3, 1]
    assert equal_bits(np.concatenate(chunks), expected_of(rows))
    # A sum just above the middle between two float32; float64 rounds it to the middle, which is then rounded down.
    scale = np.float32(10475530 * 2.0**-55)  # x 205 = 2^-24 + 2^-54
    assert np.float32(205 * float(scale) + 1) == 1
    row = np.full((1, 16), 205, np.uint8)
    row[0, 8:] = np.array([scale, 1], np.float32).view(np.uint8)
    assert (expected_of(row) == 1 + 2.0**-23).all()
    assert equal_bits(dequantised("x", "v", row, 0, "fused8bit", 8), expected_of(row))


@pytest.mark.parametrize(("dim", "alignment"), [(4, 16), (12, 1), (100, 16), (128, 1), (256, 16)])
def test_rows_of_inference_tables_are_those_of_fbgemm(dim: int, alignment: int, tmp_path: Path) -> None:
    codes, parameters = halves(vectors(np.random.default_rng(dim), 30, dim))
    table = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 30, dim, SparseType.INT8, EmbeddingLocation.HOST)],
        **{"device": "cpu", "row_alignment": alignment, "output_dtype": SparseType.FP32},
    )
    table.fill_random_weights()
    table.assign_embedding_weights([(torch.from_numpy(codes.copy()), torch.from_numpy(parameters.copy()))])
    expected = table(torch.arange(30, dtype=torch.int32), torch.arange(31, dtype=torch.int32)).numpy()
    [(rows, _)] = table.split_embedding_weights(split_scale_shifts=False)
    assert rows.shape[1] == -(-(dim + 4) // alignment) * alignment
    np.savez(tmp_path / "t.npz", rows=rows.numpy(), keys=np.arange(30))
    assert equal_bits(rows_of(tmp_path / "t.npz", dtype="tbe8", dim=dim), expected)


def test_the_state_of_a_quantised_torchrec_collection_is_read_as_it_answers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.inference.modules import quantize_embeddings

        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=128, num_embeddings=9 + i, feature_names=[f"f{i}"]) for i in (0, 1)
        ]
        module = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("cpu")))
        module = quantize_embeddings(module, torch.int8, inplace=False)
        keys = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.arange(9).repeat(2), torch.ones(18, dtype=torch.int32))
        answer = module(keys).to_dict()
    torch.save(module.state_dict(), tmp_path / "m.pt")
    tables = find_tables(tmp_path / "m.pt", "0.embedding_bags.*.weight", dtype="tbe8", dim=128)
    assert list(tables) == ["t0", "t1"]
    for i, table in enumerate(tables.values()):
        [(_, got)] = table.chunks()
        assert got.shape == (9 + i, 128)
        assert equal_bits(got[:9], answer[f"f{i}"].float().numpy())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch: quantised tensors will be removed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_module_of_torch_is_read_as_it_answers(tmp_path: Path) -> None:
    for dim in (1, 12):
        module = torch.nn.Sequential(torch.nn.EmbeddingBag(50, dim, mode="sum"), torch.nn.Embedding(20, dim))
        for i, bag in enumerate(module):
            bag.weight.data.copy_(torch.from_numpy(vectors(np.random.default_rng(dim + i), bag.num_embeddings, dim)))
            bag.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
        quantised = torch.ao.quantization.convert(torch.ao.quantization.prepare(module))
        torch.save(quantised.state_dict(), tmp_path / "m.pt")
        quantised.load_state_dict(torch.load(tmp_path / "m.pt"))
        names = [f"{i}._packed_params._packed_weight" for i in (0, 1)]
        assert list_arrays(tmp_path / "m.pt")[0] == ArrayInfo(names[0], (50, dim), "quint8")
        assert tables_pattern(str(tmp_path / "m.pt")) == "*._packed_params._packed_weight"
        for name, answer in zip(
            names, (quantised[0](torch.arange(50), torch.arange(50)), quantised[1](torch.arange(20))), strict=True
        ):
            assert equal_bits(rows_of(tmp_path / "m.pt", vectors=name), answer.numpy())
        with pytest.raises(ModelFileError, match=rf"\(50, {dim}\) quint8, expected 9 elements"):
            find_table(tmp_path / "m.pt", vectors=names[0], dim=9)


def test_rows_of_torcheasyrec_are_found_by_their_description(tmp_path: Path) -> None:
    item = vectors(np.random.default_rng(3), 8, 6) / 100
    cat = vectors(np.random.default_rng(4), 10, 4) / 100
    stored = {name: np.hstack(halves(rows)) for name, rows in (("item", item), ("cat", cat))}
    save_torcheasyrec(tmp_path, {"cat": stored["cat"]}, {"item": (KEYS, stored["item"])}, quantised=True)
    tables = find_tables(tmp_path, "*")
    assert {name: (table.selection.dtype, table.selection.dim) for name, table in tables.items()} == {
        "cat": ("rowwise8", 4),
        "item": ("rowwise8", 6),
    }
    found = {name: dict(rows_by_key(table)) for name, table in tables.items()}
    for name, keys in (("item", KEYS.tolist()), ("cat", range(10))):
        expected = dequantised("x", name, stored[name], 0, "rowwise8", stored[name].shape[1] - 4)
        assert {key: bytes(expected[at]) for at, key in enumerate(keys)} == found[name]
    description = tmp_path / "sparse_embeddings-00-of-03.json"
    description.write_text(description.read_text().replace('"dimension": 6', '"dimension": 7'))
    with pytest.raises(ModelFileError, match=r"rows of 10 bytes in 'item.values', expected 11 for 7 elements of rowwise8"):
        find_tables(tmp_path, "*")


def rows_by_key(table: Any) -> Any:
    for keys, block in table.chunks():
        yield from zip(keys.tolist(), map(bytes, block), strict=True)


def test_quantised_increments_of_torcheasyrec_are_read(tmp_path: Path) -> None:
    stored = np.hstack(halves(vectors(np.random.default_rng(5), 8, 6)))
    columns = {
        "global_step": np.full(8, 7),
        "table_fqn": ["item"] * 8,
        "source": ["model_delta_tracker"] * 8,
        "key_id": KEYS,
        "embedding": pa.array(stored.tolist(), pa.list_(pa.uint8())),
    }
    pq.write_table(pa.table(columns), tmp_path / "delta_step_7.parquet")
    [table] = find_tables(tmp_path / "delta_step_7.parquet", "*").values()
    expected = dequantised("x", "item", stored, 0, "rowwise8", 6)
    assert dict(rows_by_key(table)) == {key: bytes(row) for key, row in zip(KEYS.tolist(), expected, strict=True)}


def test_an_array_of_another_size_than_its_layout_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"

    def refused(message: str, error: type = ModelFileError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            find_table(file, **{"first_key": 0, **options})

    np.save(file, np.zeros((3, 144), np.uint8))
    sizes = (("fused8bit", 128, "136"), ("rowwise8", 128, "132"), ("tbe8", 64, "68 or 80"), ("tbe8", 28, "32"))
    for dtype, dim, expected in sizes:
        refused(rf"rows of 144 bytes in 'rows', expected {expected} for {dim} elements", dtype=dtype, dim=dim)
    refused(r"which fit vectors of 125 to 140 elements, since tbe8 pads.*say --dim", dtype="tbe8")
    for dim in (125, 140):
        assert find_table(file, first_key=0, dtype="tbe8", dim=dim).selection.dim == dim
    for dim in (124, 141):
        refused("expected", dtype="tbe8", dim=dim)
    np.save(file, np.zeros((3, 8), np.uint8))
    refused("rows of 8 bytes in 'rows', expected more than the 8", dtype="fused8bit")
    refused(r"rows \(3, 8\) uint8, expected one of.*fused8bit or tbe8 or rowwise8", InvalidDtypeError, vectors="rows")
    np.save(file, np.zeros((3, 8), np.float32))
    refused(r"rows \(3, 8\) float32 and dtype 'tbe8'", InvalidDtypeError, vectors="rows", dtype="tbe8")


@pytest.mark.parametrize(("layout", "kind"), [("fused8bit", "<f4"), ("tbe8", "<f2"), ("rowwise8", "<f2")])
def test_a_row_without_a_scale_is_refused_by_its_number(layout: str, kind: str) -> None:
    size = 2 * np.dtype(kind).itemsize
    at = 0 if layout == "tbe8" else 5
    for bad in ((-1.0, 0.0), (np.nan, 0.0), (np.inf, 0.0), (1.0, np.inf), (1.0, np.nan)):
        rows = np.zeros((4, 5 + size), np.uint8)
        rows[2, at : at + size] = np.array(bad, kind).view(np.uint8)
        with pytest.raises(ModelFileError, match=rf"row 102 of 'v' has scale {re.escape(str(bad[0]))} and offset"):
            dequantised("x", "v", rows, 100, layout, 5)
        assert not dequantised("x", "v", rows[:2], 100, layout, 5).any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_quantised_tensors_and_split_scales_are_refused_by_name(tmp_path: Path) -> None:
    weights = torch.arange(8.0).reshape(4, 2)
    others = {
        "one": torch.quantize_per_tensor(weights, 0.1, 3, torch.quint8),
        "signed": torch.quantize_per_channel(weights, torch.ones(4), torch.zeros(4), 0, torch.qint8),
        "narrow": torch.quantize_per_channel(weights, torch.ones(4), torch.zeros(4), 0, torch.quint4x2),
        "columns": torch.quantize_per_channel(weights, torch.ones(2), torch.zeros(2), 1, torch.quint8),
    }
    torch.save(others | {"t": torch.zeros(3, 8, dtype=torch.uint8), "t_qscale": torch.ones(3, 1)}, tmp_path / "m.pt")
    for name in others:
        with pytest.raises(InvalidDtypeError, match=rf"got vectors {name} \(4, 2\) qu?int(8|4x2), per_"):
            find_table(tmp_path / "m.pt", vectors=name)
    with pytest.raises(ModelFileError, match=r"got 't_qscale' beside 't'"):
        find_table(tmp_path / "m.pt", vectors="t", dtype="tbe8", dim=4)
