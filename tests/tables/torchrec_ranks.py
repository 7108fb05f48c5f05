"""`python -m tests.tables.torchrec_ranks PATH`: three ranks save a torchrec model: by rows, by columns and whole."""

import logging
import os
import sys
import warnings
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from tests.tables.trainer_dumps import TORCHREC_DIM, TORCHREC_ROWS, torchrec_rows

WORLD = 3


def save(rank: int, store: str, place: str) -> None:
    """Save as one of the ranks."""
    warnings.simplefilter("ignore")
    logging.disable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=200))
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=TORCHREC_DIM, num_embeddings=rows, feature_names=[f"feature_{name}"]
        )
        for name, rows in TORCHREC_ROWS.items()
    ]
    bags = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    sharder = EmbeddingBagCollectionSharder()
    ways = {"rows": row_wise(), "columns": column_wise(ranks=[0, 1, 2]), "whole": table_wise(rank=1)}
    plan = construct_module_sharding_plan(bags, ways, sharder=sharder, local_size=WORLD, world_size=WORLD, device_type="cpu")
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": bags}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    state = model.state_dict()
    for name, weight in state.items():
        rows = torch.from_numpy(torchrec_rows(name.split(".")[2]))
        for shard in weight.local_shards():
            (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(rows[row : row + height, column : column + width])
    dcp.save({"model": state, "step": 7, "dense": torch.ones(4, 2)}, checkpoint_id=place)
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo outlive the groups, and an interpreter that ends with them aborts now and then


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(save, (f"{directory}/store", sys.argv[1]), nprocs=WORLD)
