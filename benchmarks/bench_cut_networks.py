"""Requests for scores of networks that were cut at their lookups, in process on the CPU: what the cut costs.

One module, a sum of vectors and features, is served in several forms: `table`, whose inputs have tables; `identity`, whose
lookups take inputs as they are; `columns`, which takes keys of a float matrix; `offsets`, whose keys program adds an offset to
each key. All answers are compared with NumPy's. Rounds of the forms alternate, and the figure is the median of each round's
fastest twentieth: other processes make single calls slower, never faster.
"""

import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hps
from benchmarks.harness import Report, add

_ROWS, _DIM, _KEYS = 1000, 16, 3
_ROUNDS = 30


class Sum(nn.Module):
    """Sums the vectors of a sample, and its age."""

    def forward(self, vectors: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return vectors.sum((1, 2)) + age


class Sums(nn.Module):
    """Sums vectors that were looked up one by one."""

    def forward(self, v0: torch.Tensor, v1: torch.Tensor, v2: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return (v0 + v1 + v2).sum(1) + age


class Offsets(nn.Module):
    """Adds an offset to the keys of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(_KEYS) * (_ROWS // _KEYS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offsets


def _program(module: nn.Module, *given: torch.Tensor) -> bytes:
    samples = torch.export.Dim("samples", min=2)
    content = io.BytesIO()
    shapes = tuple({0: samples} for _ in given)
    torch.export.save(torch.export.export(module.eval(), given, dynamic_shapes=shapes), content)
    return content.getvalue()


def _forms() -> dict[str, tuple[dict[str, Any], dict[str, bytes]]]:
    """Return what `dense` says, and its files, by form."""
    age, keys = torch.zeros(4), torch.zeros(4, _KEYS, dtype=torch.int64)
    vectors = torch.zeros(4, _KEYS, _DIM)
    whole = {"dense.pt2": _program(Sum(), vectors, age)}
    said = {"format": "pt2", "file": "dense.pt2", "outputs": ["score"]}
    x, v = {"dtype": "int64", "shape": [-1, _KEYS]}, "vectors"
    found: dict[str, Any] = {"table": ({"inputs": {v: {"table": "item", "hotness": _KEYS}, "age": {}}}, whole)}
    read = {"network_inputs": [v, "age"]}
    identity = {"lookups": {v: {"table": "item", "keys": {"input": "x"}}}, **read}
    programs = [{"file": "keys.pt2", "inputs": ["x"], "outputs": ["keys"]}]
    offsets = {"lookups": {v: {"table": "item", "keys": {"output": "keys"}}}, "keys": programs, **read}
    columns = {f"v{k}": {"table": "item", "keys": {"input": "x", "column": k}} for k in range(_KEYS)}
    ones = [torch.zeros(4, _DIM) for _ in range(_KEYS)]
    matrix = {"inputs": {"x": {"shape": [-1, _KEYS]}, "age": {}}, "lookups": columns, "network_inputs": [*columns, "age"]}
    found |= {
        "identity": ({"inputs": {"x": x, "age": {}}, **identity}, whole),
        "offsets": ({"inputs": {"x": x, "age": {}}, **offsets}, {**whole, "keys.pt2": _program(Offsets(), keys)}),
        "columns": (matrix, {"dense.pt2": _program(Sums(), *ones, age)}),
    }
    return {name: ({**said, **form}, files) for name, (form, files) in found.items()}


def run(report: Report, quick: bool) -> None:
    rng = np.random.default_rng(report.seed)
    table = rng.standard_normal((_ROWS, _DIM), np.float32)
    with tempfile.TemporaryDirectory() as directory:
        servers: dict[str, Any] = {}
        for name, (said, files) in _forms().items():
            place = Path(directory, name)
            hps.write_version(place / "m" / "1", {"item": (np.arange(_ROWS), table)}, network=(said, files))
            entry = {
                "embedding_table_names": ["item"],
                "embedding_vecsize_per_table": [_DIM],
                "maxnum_catfeature_query_per_table_per_sample": [_KEYS],
                "default_value_for_each_table": [0.0],
                "deployed_device_list": [0],
                "max_batch_size": 4096,
            }
            model = {"model": "m", "sparse_files": ["item"], "version_path": str(place / "m"), **entry}
            servers[name] = hps.HPS({"models": [model], "device": "cpu", "volatile_db": {"type": "hash_map"}})
        try:
            for samples in (1, 32, 2048):
                _compare(report, servers, table, samples, rng, 3 if quick else _ROUNDS)
        finally:
            for server in servers.values():
                server.close()


def _compare(report: Report, servers: dict[str, Any], table: np.ndarray, samples: int, rng: Any, rounds: int) -> None:
    x, age = rng.integers(0, _ROWS // _KEYS, (samples, _KEYS)), rng.random(samples, np.float32)
    keys = x + np.arange(_KEYS) * (_ROWS // _KEYS)  # all forms look the same keys up
    wanted = table[keys].sum((1, 2)) + age
    asks: dict[str, Callable[[], Any]] = {}
    for name, server in servers.items():
        given = {"offsets": x, "columns": keys.astype(np.float32)}.get(name, keys)
        inputs = {"vectors" if name == "table" else "x": given, "age": age}
        asks[name] = lambda server=server, inputs=inputs: server.score("m", inputs)
        np.testing.assert_allclose(asks[name]().outputs["score"], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
    calls = 200 if samples < 1000 else 50
    found: dict[str, list[float]] = {name: [] for name in asks}
    for _ in range(rounds):
        for name, ask in asks.items():
            seconds = np.empty(calls)
            for call in range(calls):
                start = time.perf_counter()
                ask()
                seconds[call] = time.perf_counter() - start
            found[name].append(float(np.quantile(seconds, 0.05)))
    best = {name: float(np.median(one)) * 1e6 for name, one in found.items()}
    for name, value in best.items():
        add(
            report,
            {"form": name, "samples": samples, "keys": _KEYS, "dim": _DIM},
            {"us": value, "us_more": value - best["table"]},
        )
