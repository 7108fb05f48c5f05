"""One rank of a job with sharded embeddings: `python -m tests.servers.sharded_rank SCENARIOS DIRECTORY RANK WORLD`.

What the scenarios, with commas between them, return, or the error that one raises, is written as `<directory>/<rank>.json`, by
scenario. Each has a directory of its own name.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hps
import hps.torch
from hps.models import files
from hps.torch import package, ranks, save, tables

ROWS, DIMS = 10, {"by_row": 6, "by_column": 7, "plain": 5}


class Net(nn.Module):
    """Three tables, whose rows and columns three ranks cannot share out equally."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.by_row = nn.Embedding(ROWS, DIMS["by_row"], padding_idx=3)
        self.by_column = nn.Embedding(ROWS, DIMS["by_column"])
        self.plain = nn.EmbeddingBag(ROWS, DIMS["plain"], mode="sum")
        self.top = nn.Linear(sum(DIMS.values()), 1)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        columns = self.by_row(ids[:, 0]), self.by_column(ids[:, 1]), self.plain(tags)
        return self.top(torch.cat(columns, 1)).squeeze(1)


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, ROWS, (5, 2), generator=generator), torch.randint(0, ROWS, (5, 3), generator=generator)


def sharded_net() -> Net:
    net, mesh = Net(), distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    return parallelize_module(
        net,
        mesh,
        {"by_row": RowwiseParallel(input_layouts=Replicate()), "by_column": ColwiseParallel(output_layouts=Replicate())},
    )


def saved(place: Path) -> Any:
    """Two whole versions and one of changes, of weights in each layout."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    net = Net()
    for name, layout in (("by_row", Shard(0)), ("by_column", Shard(1)), ("plain", Replicate())):
        weight = distribute_tensor(net.get_submodule(name).weight.detach(), mesh, [layout])
        net.get_submodule(name).weight = nn.Parameter(weight)
    first = save(net, place / "m", hotness=3)
    with torch.no_grad():
        for name in DIMS:
            net.get_submodule(name).weight.mul_(2)
    ranks._KEEP_ALIVE_S = 0.0  # ranks that hold nothing of a chunk hear so
    second = save(net, place / "m")
    third = save(net, place / "m", delta_of="2", changed={"by_row": torch.tensor([9, 0, 4]), "by_column": torch.tensor([3])})
    assert first.entry == third.entry
    return [first.version, second.version, third.version, third.place]


def packaged(place: Path) -> Any:
    net = sharded_net()
    net.train()
    done = [package(net, place / "m", examples()) for _ in range(2)]
    assert net.training
    return [(one.version, one.difference < 1e-6, list(one.dense.inputs)) for one in done]


def wrapped(place: Path) -> Any:
    """Weights that FSDP and the older ShardedTensor have sharded; the rest of the module is whole, or else refused."""
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.fsdp import fully_shard

    net, world = Net(), distributed.get_world_size()
    fully_shard(net.by_row)
    chunks = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(world)])
    shard_parameter(net.plain, "weight", chunks)
    done = save(net, place / "m")
    net = Net()
    fully_shard(net.by_row)
    tried = package(net, place / "net", examples())
    fully_shard(net.top)
    refused = failed(lambda: package(net, place / "net", examples()))
    return [done.version, tried.difference < 1e-6, refused]


def jagged(samples: int) -> Any:
    import torchrec

    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(0, 4, (4 * samples,), generator=generator)
    keys = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(["f", "g", "h", "i"], keys, lengths=lengths)


class Pooled(nn.Module):
    """Three tables of torchrec; the network reads columns by their place."""

    def __init__(self) -> None:
        import torchrec

        super().__init__()
        torch.manual_seed(5)
        sums, means = torchrec.PoolingType.SUM, torchrec.PoolingType.MEAN
        said = (("by_row", ["f", "g"], sums), ("by_column", ["h"], means), ("by_table", ["i"], sums))
        self.bags = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=features, pooling=one
                )
                for name, features, one in said
            ]
        )
        self.top = nn.Linear(32, 1)

    def forward(self, sparse: Any) -> torch.Tensor:
        found = self.bags(sparse)
        return self.top(torch.cat([found[name] for name in "fghi"], 1)).squeeze(1)


class Rows(nn.Module):
    def __init__(self) -> None:
        import torchrec

        super().__init__()
        torch.manual_seed(6)
        said = (("by_row", ["f"]), ("by_column", ["g", "h"]), ("by_table", ["i"]))
        self.rows = torchrec.EmbeddingCollection(
            tables=[
                torchrec.EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=features)
                for name, features in said
            ]
        )

    def forward(self, sparse: Any) -> Any:
        return self.rows(sparse)


def parallel(module: nn.Module, part: str, *, output_dtensor: bool = False) -> Any:
    from torchrec.distributed import embedding, embeddingbag, sharding_plan, types
    from torchrec.distributed.model_parallel import DistributedModelParallel

    world = distributed.get_world_size()
    sharder: Any = embeddingbag.EmbeddingBagCollectionSharder() if part == "bags" else embedding.EmbeddingCollectionSharder()
    made = {
        "by_row": sharding_plan.row_wise(),
        "by_column": sharding_plan.column_wise(ranks=[number % world for number in range(2)]),
        "by_table": sharding_plan.table_wise(rank=world - 1),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        module.get_submodule(part), made, local_size=world, world_size=world, device_type="cpu", sharder=sharder
    )
    env = types.ShardingEnv(world, distributed.get_rank(), distributed.group.WORLD, output_dtensor=output_dtensor)
    return DistributedModelParallel(
        module, env=env, device=torch.device("cpu"), plan=types.ShardingPlan({part: plan}), sharders=[sharder]
    )


def shards(module: nn.Module) -> Any:
    """This rank's pieces of each table: its name, first row, first column and values."""
    found = []
    for key, weight in module.state_dict().items():
        if hasattr(weight, "local_shards"):
            pieces = [(shard.metadata.shard_offsets, shard.tensor) for shard in weight.local_shards()]
        elif hasattr(weight, "to_local"):
            local = weight.to_local()
            pieces = list(zip(local.local_offsets(), local.local_shards(), strict=False))  # one offset even without shards
        else:
            continue
        found += [[key.split(".")[-2], *at, values.tolist()] for at, values in pieces]
    return found


def torchrec_bags(place: Path) -> Any:
    net = parallel(Pooled(), "bags")
    done = [package(net, place / "m", [jagged(4)]) for _ in range(2)]
    with torch.no_grad():
        expected = net(jagged(7))
        ours = save(net, place / "saved", hotness=4)
        with hps.HPS({"volatile_db": {"type": "hash_map"}, "models": [ours.entry]}) as server:  # one on each rank
            torch.testing.assert_close(hps.torch.convert(net, server, "saved")(jagged(7)), expected, rtol=0, atol=1e-6)
    return [[one.version for one in done], [one.difference < 1e-6 for one in done], expected.tolist()]


def torchrec_rows(place: Path) -> Any:
    net = parallel(Rows(), "rows")
    save(net, place / "m")
    return shards(net)


def torchrec_dtensors(place: Path) -> Any:
    net = parallel(Pooled(), "bags", output_dtensor=True)
    save(net, place / "m")
    return shards(net)


def failed(call: Callable[[], Any]) -> str:
    try:
        call()
    except hps.HPSError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing(place: Path) -> Any:
    """Failures of one rank, which all hear of; after each, the ranks can save."""
    rank, net, read = distributed.get_rank(), sharded_net(), tables.WeightTable.read

    def broken(self: Any, rows: Any) -> torch.Tensor:
        raise MemoryError("no memory for rows")

    def late(self: Any, rows: Any) -> torch.Tensor:
        while not (place / "released").exists():
            time.sleep(0.05)
        return read(self, rows)

    def with_reader(which: int, reader: Any, call: Callable[[], Any]) -> str:
        tables.WeightTable.read = reader if rank == which else read  # type: ignore[method-assign]
        try:
            return failed(call)
        finally:
            tables.WeightTable.read = read  # type: ignore[method-assign]

    def names(which: int) -> str:
        return failed(lambda: package(net, place / "m", examples(), outputs=["one", "more"] if rank == which else ["one"]))

    found = {"a rank": with_reader(2, broken, lambda: save(net, place / "m"))}
    found["after it"] = failed(lambda: save(net, place / "m"))
    found["the leader"] = failed(lambda: save(net, place / "m", version="1"))
    found["a rank in package"], found["the leader in package"] = names(1), names(0)
    ranks._TIMEOUT = timedelta(seconds=3)
    found["late"] = with_reader(1, late, lambda: save(net, place / "m"))
    (place / "released").touch()
    ranks._TIMEOUT = timedelta(seconds=60)
    found["after all"] = failed(lambda: save(net, place / "m"))
    return found


def dying(place: Path) -> Any:
    return _dies(place, 2)


def dying_leader(place: Path) -> Any:
    return _dies(place, 0)


def _dies(place: Path, which: int) -> Any:
    net = sharded_net()

    def die(self: Any, rows: Any) -> torch.Tensor:
        os._exit(9)

    if distributed.get_rank() == which:
        tables.WeightTable.read = die  # type: ignore[method-assign]
    return failed(lambda: save(net, place / "m"))


def main() -> None:
    scenario, directory, rank, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    files.CHUNK_BYTES = 100  # several chunks a table, some within a shard and some across two
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    answers = {}
    for one in scenario.split(","):
        answers[one] = globals()[one](directory / one)
        (directory / f"{rank}.json").write_text(json.dumps(answers))  # also if the next one kills this rank
    os._exit(0)  # without waiting for ranks that failed


if __name__ == "__main__":
    main()
