"""Lookups on Ray Serve: replicas with a parameter server each.

    serve run examples.ray_serve.simple:app configuration=configs/in_process.json
    curl localhost:8000 -d '{"model": "sample", "tables": {"user": [17, 42], "item": [1]}}'

Other deployments of the application call `lookup` through a handle, with NumPy arrays. See docs/ray.md.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request

import hps


@serve.deployment(num_replicas=2, max_ongoing_requests=16)
class Lookups:
    """Looks keys up in process. Its replicas answer alike, so Ray chooses one for each request."""

    def __init__(self, configuration: str) -> None:
        self.server = hps.HPS(configuration)

    async def lookup(self, model: str, tables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return {table: (n, dim) float32} for {table: (n,) int64}."""
        return await asyncio.to_thread(self.server.lookup_tables, tables, model)

    async def __call__(self, request: Request) -> dict[str, Any]:
        requested = await request.json()
        vectors = await self.lookup(requested["model"], requested["tables"])
        return {table: of_table.tolist() for table, of_table in vectors.items()}


def app(arguments: dict[str, str]) -> serve.Application:
    """Build the application for `serve run`."""
    return Lookups.bind(str(Path(arguments["configuration"]).absolute()))
