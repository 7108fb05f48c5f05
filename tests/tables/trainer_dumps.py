"""Writes tables as trainers do, by the layouts in their sources; only `torchrec_checkpoint` runs the libraries, for a while.

The sources: NVIDIA/recsys-examples 43465ae (dynamicemb), alibaba/TorchEasyRec 54cac31 and, for `dynamicemb_evicted`, its pull
request 638, NVIDIA-Merlin/HugeCTR 2f2016f (SOK, embedding collections).
"""

import io
import json
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.servers.child_processes import ROOT, ChildProcesses
from tests.tables.table_files import lists

Array = np.ndarray[Any, Any]
Rows = tuple[Array, Array]
NO_KEYS = np.empty(0, np.int64)


def of_rank(rows: Rows, rank: int, world: int) -> Rows:
    mine = rows[0] % world == rank
    return rows[0][mine], rows[1][mine]


def save_dynamicemb(path: Path, tables: Mapping[str, Rows], world: int = 3) -> Path:
    """Write the directory of a collection, as `DynamicEmbDump(optim=True, counter=True)` does with Adam."""
    path.mkdir(parents=True, exist_ok=True)
    for table, rows in tables.items():
        (path / f"{table}_opt_args.json").write_text(
            json.dumps({"opt_type": "adam", "lr": 0.1, "evict_strategy": "EvictStrategy.KLru", "dist_type": "roundrobin"})
        )
        for rank in range(world):
            keys, vectors = of_rank(rows, rank, world)
            parts = {
                **{"emb_keys": keys, "emb_values": vectors, "emb_scores": keys + 1},
                **{"emb_opt_values": np.hstack([vectors, vectors]), "counter_keys": keys, "counter_frequencies": keys},
            }
            for item, array in parts.items():
                array.tofile(path / f"{table}_{item}.rank_{rank}.world_size_{world}")
    return path


def save_sok(path: Path, tables: Mapping[str, Rows]) -> Path:
    """Write what `sok.dump(path, variables, optimizer)` does; keys of SOK's dtypes."""
    path.mkdir(parents=True, exist_ok=True)
    codes = {"int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5, "float64": 6}
    for table, (keys, vectors) in tables.items():
        for name, kind, array in (("key", 0, keys), ("weight", 1, vectors), ("Adam-m", 2, vectors)):
            head = b"".rjust(256) + kind.to_bytes(4, "big") + b"m".rjust(32) + codes[array.dtype.name].to_bytes(4, "big")
            (path / f"{table}-{name}").write_bytes(head + array.tobytes())
    return path


def save_hugectr(
    path: Path, tables: Sequence[Rows], *, ids: Sequence[int] | None = None, split: int = 0, half: int = 0
) -> Path:
    """Write what `Model.embedding_dump(path)` of one embedding collection does; keys of uint32 or int64.

    Args:
        ids: of the tables in `meta_data`, where tables were chosen by their names.
        split: rows of the first of two processes; the second one's weights lie where HugeCTR puts them.
        half: what `meta_data` says of the vectors: 0 float32, 1 float16.
    """
    place = path / "embedding_collection_0"
    place.mkdir(parents=True, exist_ok=True)
    numbers = range(len(tables)) if ids is None else ids
    kinds = (int(tables[0][0].dtype == np.int64), half, 0, 0)
    meta = struct.pack(f"<5i{len(tables)}i", len(tables), *kinds, *numbers)
    meta += struct.pack(f"<{len(tables)}Q", *[keys.size for keys, _ in tables])
    (place / "meta_data").write_bytes(meta + struct.pack(f"<{len(tables)}i", *[vectors.shape[1] for _, vectors in tables]))
    for number, (keys, vectors) in enumerate(tables):
        for name, kind, array in (("key", 1, keys), ("weight", 2, vectors)):
            with (place / f"{name}{number}").open("wb") as file:
                file.write(struct.pack("<32i", kind, number, *[0] * 30))
                file.write(array[: split or None].tobytes())
                if split:
                    offset = split * keys.itemsize * (1 if kind == 1 else vectors.shape[1] * 4)
                    file.seek(128 + offset)
                    file.write(array[split:].tobytes())
    return path


def save_torcheasyrec(
    path: Path, static: Mapping[str, Array], dynamic: Mapping[str, Rows], world: int = 3, *, quantised: bool = False
) -> Path:
    """Write `sparse/` of an export with `USE_DISTRIBUTED_EMBEDDING`; a rank without dynamic rows has no archive of them.

    Args:
        quantised: describe the rows, (n, dim + 4) uint8, as `DIST_QUANT=INT8` does.
    """
    path.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        suffix = f"{rank:02d}-of-{world:02d}"
        blocks = {name: np.array_split(vectors, world)[rank] for name, vectors in static.items()}
        np.savez(path / f"sparse_embeddings-{suffix}.npz", **blocks)
        described: dict[str, Any] = {name: {"is_dynamic": False, "shape": list(one.shape)} for name, one in blocks.items()}
        members = {}
        for name, rows in dynamic.items():
            keys, vectors = of_rank(rows, rank, world)
            if keys.size:
                members |= {f"{name}.keys": keys, f"{name}.values": vectors, f"{name}.scores": keys}
                described[name] = {"is_dynamic": True, "dimension": vectors.shape[1], "shape": list(vectors.shape)}
        if members:
            np.savez(path / f"sparse_dynamic_embedding-{suffix}.npz", **members)
        for one in described.values() if quantised else ():
            rows, size = one["shape"]
            one |= {"dimension": size - 4, "shape": [rows, size - 4], "dtype": "QUint8RowwiseF16"}
            one |= {"storage_dtype": "uint8", "storage_shape": [rows, size], "row_bytes": size}
        (path / f"sparse_embeddings-{suffix}.json").write_text(json.dumps(described))
    return path


def save_delta(
    path: Path, step: int, tables: Mapping[str, tuple[Array, Array, Array]], world: int = 3, *, says: int | None = None
) -> Path:
    """Write a step of TorchEasyRec's delta dump: keys, vectors and evicted keys of each table. Returns what names the step.

    Args:
        says: another step than that of the name, in the rows.
    """
    names = ("global_step", "rank", "world_size", "feature_name", "table_fqn", "key_id", "embedding", "source")
    types = (pa.int64(), pa.int32(), pa.int32(), pa.string(), pa.string(), pa.int64(), pa.list_(pa.float32()), pa.string())
    schema = pa.schema(list(zip(names, types, strict=True)))
    place = path / f"step_{step}" if world > 1 else path
    place.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        name = f"delta_embedding_step_{step}" + (f"_rank_{rank}_of_{world}" if world > 1 else "")
        with pq.ParquetWriter(place / f"{name}.parquet", schema) as writer:
            writer.write_table(schema.empty_table())
            for table, (keys, vectors, evicted) in tables.items():
                zeros = np.zeros((evicted.size, vectors.shape[1]), np.float32)
                for source, rows in (("model_delta_tracker", (keys, vectors)), ("dynamicemb_evicted", (evicted, zeros))):
                    own, block = of_rank(rows, rank, world)
                    labels = ((step if says is None else says), rank, world, "f", table)
                    columns = [pa.repeat(pa.scalar(one, kind), own.size) for one, kind in zip(labels, types, strict=False)]
                    columns += [pa.array(own), lists(block), pa.repeat(pa.scalar(source), own.size)]
                    if own.size:
                        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return place if world > 1 else place / f"delta_embedding_step_{step}.parquet"


TORCHREC_TABLES = "model.ebc.embedding_bags.*.weight"


def sharded_checkpoint(path: Path, change: Callable[[Metadata], object] = bool) -> dict[str, Array]:
    """Write what `torchrec_checkpoint` does, by the layout of torch's FileSystemWriter; return what each table has.

    Args:
        change: what to do to the description before it is written.
    """
    path.mkdir(parents=True)
    tables = {name: torchrec_rows(name) for name in TORCHREC_ROWS}
    shards = {
        "rows": [(rank, slice(34 * rank, 34 * rank + 34), slice(0, 12)) for rank in range(3)],
        "columns": [(rank, slice(0, 20), slice(4 * rank, 4 * rank + 4)) for rank in range(3)],
        "whole": [(1, slice(0, 31), slice(0, 12))],
    }
    files = {rank: io.BytesIO() for rank in range(3)}
    state, places = {}, {}
    for name, parts in shards.items():
        fqn, whole = TORCHREC_TABLES.replace("*", name), torch.from_numpy(tables[name])
        chunks = []
        for rank, rows, columns in parts:
            shard, saved, file = whole[rows, columns].clone(), io.BytesIO(), files[rank]
            torch.save(shard, saved)
            offset = torch.Size((rows.start, columns.start))
            chunks.append(ChunkStorageMetadata(offsets=offset, sizes=shard.shape))
            place = _StorageInfo(f"__{rank}_0.distcp", file.tell(), saved.tell())
            places[MetadataIndex(fqn, offset, len(chunks) - 1)] = place
            file.write(saved.getvalue())
        state[fqn] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    for rank, file in files.items():
        (path / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    metadata = Metadata(state, storage_data=places)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tables


def torchrec_checkpoint(path: Path) -> dict[str, Array]:
    """Let three ranks shard a torchrec model and save it by torch.distributed.checkpoint; return what each table has."""
    job = ChildProcesses()  # which kills the ranks, too, where `subprocess.run` would wait for them to close their pipes
    try:
        process = job.start(sys.executable, "-m", "tests.tables.torchrec_ranks", path, cwd=ROOT)
        said = process.communicate(timeout=300)[1]
    finally:
        job.end()
    assert process.returncode == 0, said
    return {name: torchrec_rows(name) for name in TORCHREC_ROWS}


TORCHREC_ROWS = {"rows": 100, "columns": 20, "whole": 31}
TORCHREC_DIM = 12


def torchrec_rows(name: str) -> Array:
    """The vectors of a table of `torchrec_checkpoint`."""
    rows = TORCHREC_ROWS[name]
    return np.arange(rows * TORCHREC_DIM, dtype=np.float32).reshape(rows, TORCHREC_DIM) + len(name)
