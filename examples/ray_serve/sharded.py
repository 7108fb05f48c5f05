"""Tables split over shards on Ray Serve, each with several replicas, and lookups split by key over them.

    ray start --head --num-cpus=16
    python -m examples.ray_serve.sharded configs/in_process.json 2 2   # shards, and replicas of each
    python -m examples.ray_serve.sharded configs/in_process.json 3 2   # grows to 3 shards, while lookups go on

A table may be larger than the memory and disk of any machine: a replica holds one share of it. See docs/ray.md.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayError, RayTaskError
from starlette.requests import Request

import hps
from hps.client.routing import Declared, PartAnswer, Router, ShareCalls, merge_parts

TIMEOUT_S = 2.0  # of a part; other replicas are asked after that


@serve.deployment(max_ongoing_requests=16)
class Shard:
    """Holds a share of every table, and looks its keys up. Each replica has a directory of its own for its database."""

    def __init__(self, configuration: str, index: int, of: int) -> None:
        document = json.loads(Path(configuration).read_text())
        document["models"] = [{**model, "shard": {"index": index, "of": of}} for model in document["models"]]
        if "path" in document.get("persistent_db", {}):
            self.directory = tempfile.TemporaryDirectory(prefix=f"hps-share-{index}-")
            document["persistent_db"]["path"] = self.directory.name
        self.server = hps.HPS(document)

    async def lookup(self, model: str, tables: dict[str, np.ndarray], version: str | None) -> PartAnswer:
        while True:
            serving = self.server.model(model).version
            if version not in (None, serving):
                raise hps.UnknownVersionError(f"looking up {model!r}: got version {version}, serving is {serving}")
            vectors = await asyncio.to_thread(self.server.lookup_tables, tables, model)
            if self.server.model(model).version == serving:  # no other one took over meanwhile
                return PartAnswer(serving, vectors, {})

    def share(self, model: str) -> Declared:
        return Declared(self.server.model(model).config.share)

    def keys(self) -> int:
        """Return how many keys this replica was asked for."""
        return sum(table.keys for model in self.server.stats().models for table in model.tables)


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
class Lookups:
    """Sends keys to the replicas of their shares."""

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        names, self.timeout_s = user_config["replicas"], user_config["timeout_s"]
        self.replicas = Router(names), [serve.get_app_handle(name) for name in names]

    async def lookup(self, model: str, tables: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return {table: (n, dim) float32} for {table: (n,) int64}, all of one version."""
        keys = {table: np.asarray(of_table, np.int64) for table, of_table in tables.items()}
        router, replicas = self.replicas
        calls = ShareCalls(model, lambda: None, lambda part, _rows, version: (part, version))
        routed = router.route(keys, lambda part, _rows: (part, None), calls)
        requested = next(routed)
        while True:
            outcomes = await asyncio.gather(*(self.ask(replicas[place], model, call) for place, call in requested))
            try:
                requested = routed.send(outcomes)
            except StopIteration as end:
                if end.value is None:
                    raise hps.NotReadyError(f"looking up keys of {model!r}: no replica answers") from None
                return merge_parts(keys, end.value, lambda table, shape: np.empty(shape, np.float32))[0]

    async def ask(self, replica: serve.handle.DeploymentHandle, model: str, call: Any) -> Any:
        """Request a part; without one, the share of the replica. Return the answer or an error."""
        try:
            answer = replica.share.remote(model) if call is None else replica.lookup.remote(model, *call)
            return await asyncio.wait_for(answer, self.timeout_s)
        except hps.HPSError as error:
            return error
        except TimeoutError:
            return hps.RemoteTimeoutError(f"asking {replica.app_name}: no answer within {self.timeout_s:g} s")
        except RayTaskError:  # a bug
            raise
        except RayError as error:
            return hps.RemoteConnectionError(f"asking {replica.app_name}: {error}")

    async def __call__(self, request: Request) -> dict[str, Any]:
        requested = await request.json()
        vectors = await self.lookup(requested["model"], requested["tables"])
        return {table: of_table.tolist() for table, of_table in vectors.items()}


def names_of(shards: int, replicas: int) -> list[str]:
    """Return the applications of a layout: one for each replica, so that the router knows which of them answers."""
    return [f"share-{index}-of-{shards}-{nth}" for index in range(shards) for nth in range(replicas)]


def start(configuration: str, shards: int, replicas: int, timeout_s: float = TIMEOUT_S) -> serve.handle.DeploymentHandle:
    """Run shards and the application `lookups` before them; then delete the shards of other layouts.

    Both layouts run for a while. `lookups` uses the one with more shares as soon as it is complete.
    """
    names, running = names_of(shards, replicas), list(serve.status().applications)
    others = [name for name in running if name.startswith("share-") and name not in names]
    for place, name in enumerate(names):
        if name not in running:
            shard = Shard.bind(str(Path(configuration).absolute()), place // replicas, shards)
            serve.run(shard, name=name, route_prefix=None)
    lookups = serve.run(Lookups.options(user_config={"replicas": names, "timeout_s": timeout_s}).bind(), name="lookups")
    for name in others:
        serve.delete(name)
    return lookups


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
