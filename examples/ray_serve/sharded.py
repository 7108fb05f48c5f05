"""Lookups split by key over shards on Ray Serve, each of which caches its own share of the keys.

    ray start --head --num-cpus=8
    python -m examples.ray_serve.sharded configs/in_process.json 2   # and with 3, to add a shard to those that run

Every shard can answer every key: while one is away, the others answer its keys. See docs/ray.md.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request

import hps
from hps.client.routing import PartAnswer, Router, joined

TIMEOUT_S = 2.0  # of a part; others are asked after that


@serve.deployment(max_ongoing_requests=16)
class Shard:
    """Looks up the keys that belong to it."""

    def __init__(self, configuration: str) -> None:
        self.server = hps.HPS(configuration)

    async def lookup(self, model: str, tables: dict[str, np.ndarray]) -> PartAnswer:
        while True:
            version = self.server.model(model).version
            vectors = await asyncio.to_thread(self.server.lookup_tables, tables, model)
            if self.server.model(model).version == version:  # no other one took over meanwhile
                return PartAnswer(version, vectors, {})

    def keys(self) -> int:
        """Return how many keys this shard was asked for."""
        return sum(table.keys for model in self.server.stats().models for table in model.tables)


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
class Lookups:
    """Splits lookups by rendezvous hash of their keys over the shards."""

    def reconfigure(self, user_config: dict[str, list[str]]) -> None:
        names = user_config["shards"]
        self.shards = Router(names), [serve.get_app_handle(name) for name in names]

    async def lookup(self, model: str, tables: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return {table: (n, dim) float32} for {table: (n,) int64}, all of one version."""
        keys = {table: np.asarray(of_table, np.int64) for table, of_table in tables.items()}
        router, shards = self.shards
        routed = router.route(keys, lambda part, is_whole: part)
        requested = next(routed)
        while True:
            outcomes = await asyncio.gather(*(self.ask(shards[place], model, part) for place, part in requested))
            try:
                requested = routed.send(outcomes)
            except StopIteration as end:
                if end.value is None:
                    raise hps.NotReadyError(f"looking up keys of {model!r}: no shard answers") from None
                return joined(keys, end.value, lambda table, shape: np.empty(shape, np.float32))[0]

    async def ask(self, shard: serve.handle.DeploymentHandle, model: str, part: dict[str, np.ndarray]) -> Any:
        try:
            return await asyncio.wait_for(shard.lookup.remote(model, part), TIMEOUT_S)
        except hps.HPSError as error:
            return error
        except TimeoutError:
            return hps.RemoteTimeoutError(f"asking {shard.app_name}: no answer within {TIMEOUT_S:g} s")
        except RayError as error:
            return hps.RemoteConnectionError(f"asking {shard.app_name}: {error}")

    async def __call__(self, request: Request) -> dict[str, Any]:
        requested = await request.json()
        vectors = await self.lookup(requested["model"], requested["tables"])
        return {table: of_table.tolist() for table, of_table in vectors.items()}


def start(configuration: str, count: int) -> serve.handle.DeploymentHandle:
    """Run shards and the application `lookups` before them. Shards that run go on, with what they have cached."""
    names, running = [f"shard-{nth}" for nth in range(count)], serve.status().applications
    for name in names:
        if name not in running:
            serve.run(Shard.bind(str(Path(configuration).absolute())), name=name, route_prefix=None)
    return serve.run(Lookups.options(user_config={"shards": names}).bind(), name="lookups")


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]))
