"""Saves a table in each format that `hps import` reads, and each variant of it, with keys `keys` and vectors `vectors`."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

Array = np.ndarray[Any, Any]


def save_npz(path: Path, keys: Array, vectors: Array) -> Path:
    np.savez(path / "a.npz", keys=keys, vectors=vectors)
    return path / "a.npz"


def save_npz_compressed(path: Path, keys: Array, vectors: Array) -> Path:
    np.savez_compressed(path / "c.npz", keys=keys, vectors=vectors)
    return path / "c.npz"


def save_pair(path: Path, keys: Array, vectors: Array) -> Path:
    (path / "table").mkdir()
    np.save(path / "table" / "keys.npy", keys)
    np.save(path / "table" / "vectors.npy", vectors)
    return path / "table"


def save_pair_fortran(path: Path, keys: Array, vectors: Array) -> Path:
    return save_pair(path, keys, np.asfortranarray(vectors))


def save_pair_swapped_fortran(path: Path, keys: Array, vectors: Array) -> Path:
    return save_pair(
        path, keys.astype(keys.dtype.newbyteorder()), np.asfortranarray(vectors.astype(vectors.dtype.newbyteorder()))
    )


def save_safetensors(path: Path, keys: Array, vectors: Array) -> Path:
    safetensors.torch.save_file({"keys": torch.from_numpy(keys), "vectors": torch.from_numpy(vectors)}, path / "a.safetensors")
    return path / "a.safetensors"


def save_torch(path: Path, keys: Array, vectors: Array) -> Path:
    torch.save(OrderedDict(keys=torch.from_numpy(keys), vectors=torch.from_numpy(vectors)), path / "a.pt")
    return path / "a.pt"


def save_torch_legacy(path: Path, keys: Array, vectors: Array) -> Path:
    state = {"keys": torch.from_numpy(keys), "vectors": torch.from_numpy(vectors)}
    torch.save(state, path / "l.pth", _use_new_zipfile_serialization=False)
    return path / "l.pth"


def save_torch_transposed(path: Path, keys: Array, vectors: Array) -> Path:
    return save_torch(path, keys, np.asfortranarray(vectors))


def save_torch_sliced(path: Path, keys: Array, vectors: Array) -> Path:
    wide = torch.from_numpy(np.hstack([vectors, vectors, vectors]))
    torch.save({"keys": torch.from_numpy(keys), "vectors": wide[:, vectors.shape[1] : 2 * vectors.shape[1]]}, path / "s.bin")
    return path / "s.bin"


def lists(vectors: Array) -> pa.Array:
    rows, dim = vectors.shape
    return pa.ListArray.from_arrays(np.arange(0, rows * dim + 1, dim, dtype=np.int32), pa.array(vectors.reshape(-1)))


def save_parquet(path: Path, keys: Array, vectors: Array) -> Path:
    pq.write_table(
        pa.table({"note": ["x"] * len(keys), "vectors": lists(vectors), "keys": keys}),
        path / "a.parquet",
        row_group_size=len(keys),
    )
    return path / "a.parquet"


def save_parquet_fixed(path: Path, keys: Array, vectors: Array) -> Path:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    pq.write_table(pa.table({"keys": keys, "vectors": fixed}), path / "f.pq", row_group_size=3, compression="zstd")
    return path / "f.pq"


def save_parquet_large_lists(path: Path, keys: Array, vectors: Array) -> Path:
    large = lists(vectors).cast(pa.large_list(pa.from_numpy_dtype(vectors.dtype)))
    pq.write_table(pa.table({"keys": keys, "vectors": large}), path / "b.parquet")
    return path / "b.parquet"


def save_parquet_tensors(path: Path, keys: Array, vectors: Array) -> Path:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(vectors)
    pq.write_table(pa.table({"keys": keys, "vectors": tensors}), path / "t.parquet")
    return path / "t.parquet"


def save_parquet_parts(path: Path, keys: Array, vectors: Array) -> Path:
    half, path = len(keys) // 2, path / "table"
    path.mkdir()
    for name, part in (("part-1", slice(half, None)), ("part-0", slice(0, half))):
        pq.write_table(pa.table({"keys": keys[part], "vectors": lists(vectors[part])}), path / f"{name}.parquet")
    (path / "_metadata.parquet").write_bytes(b"no table")
    (path / "_SUCCESS").touch()
    return path


SAVERS = [
    *(save_npz, save_npz_compressed, save_pair, save_pair_fortran, save_pair_swapped_fortran, save_safetensors),
    *(save_torch, save_torch_legacy, save_torch_transposed, save_torch_sliced),
    *(save_parquet, save_parquet_fixed, save_parquet_large_lists, save_parquet_tensors, save_parquet_parts),
]
"""Every one takes a directory, keys (n,) and vectors (n, dim), and returns the path that it wrote."""
