"""Lookups without a wait and in CUDA graphs, replayed while vectors are written, the cache churns and the hash map grows."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.testing.waiting import wait_until
from tests.gpu.cupy_if_installed import cupy
from tests.servers.running_service import document_of, model_of, row_files_alone

pytestmark = pytest.mark.gpu
DIMS, ROWS, MOST_KEYS = {"a": 32, "b": 5}, 50_000, 40_000
ABSENT, SETTINGS = -1.0, {"hit_rate_threshold": 1.1, "miss_path": "link", "keep_versions": 0}


def vectors_of(keys: Any, dim: int, version: int) -> np.ndarray:
    """The key, then its version, in turns: a vector that is another's, torn or stale shows."""
    return np.where(np.arange(dim) % 2 == 0, np.asarray(keys)[:, None], version).astype(np.float32)


def check(keys: np.ndarray, out: Any, least: int = 0) -> None:
    """Every row is a whole vector of its key, of a version of at least `least`."""
    vectors = out.get() if hasattr(out, "get") else out.cpu().numpy()
    there = keys < ROWS
    assert (vectors[there, 1] >= least).all()
    np.testing.assert_array_equal(vectors[there, ::2], np.broadcast_to(keys[there, None], vectors[there, ::2].shape))
    np.testing.assert_array_equal(vectors[there, 1::2], np.broadcast_to(vectors[there, 1:2], vectors[there, 1::2].shape))
    np.testing.assert_array_equal(vectors[~there], np.float32(ABSENT))


@pytest.fixture(params=[False, True], ids=["hash map", "row files"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[hps.HPS]:
    for name, dim in DIMS.items():
        hps.write_sparse_model(tmp_path / name, (np.arange(ROWS), vectors_of(np.arange(ROWS), dim, 0)))
    settings = {"gpucacheper": 0.05, "max_batch_size": MOST_KEYS, "default_value_for_each_table": [ABSENT] * 2, **SETTINGS}
    model = model_of("m", [tmp_path / name for name in DIMS], DIMS, **settings)
    tiers = row_files_alone(tmp_path / "rows") if request.param else {}
    with hps.HPS(document_of(model, device="cuda", **tiers)) as server:
        yield server


class Writer:
    """Writes all rows of both tables again and again, each time with the next version, and new keys, so that the map grows."""

    def __init__(self, server: hps.HPS) -> None:
        self.acknowledged = 0
        self._stop = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        version = 0
        while not self._stop.is_set():
            version += 1
            for start in range(0, ROWS, 10_000):
                keys = np.arange(start, start + 10_000)
                for name, dim in DIMS.items():
                    self._server.insert(keys, vectors_of(keys, dim, version), "m", name)
            new = 2 * ROWS + 20_000 * version + np.arange(20_000)
            self._server.insert(new, vectors_of(new, DIMS["a"], 0), "m", "a")
            self.acknowledged = version

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(60)


def replay_while_written(server: hps.HPS, keys: Any, outs: dict[str, Any], replay: Callable[[], None]) -> None:
    rng = np.random.default_rng(3)
    asarray = cupy.asarray if isinstance(keys, cupy.ndarray) else (lambda fresh: torch.from_numpy(fresh).cuda())
    with Writer(server) as writer:
        replays = 0
        while writer.acknowledged < 6 or replays < 100:
            fresh = rng.integers(0, ROWS + 500, keys.size if isinstance(keys, cupy.ndarray) else keys.numel())
            keys[:] = asarray(fresh)
            for out in outs.values():
                out[:] = float("nan")
            least = writer.acknowledged
            replay()
            for out in outs.values():
                check(fresh, out, least)
            replays += 1


@pytest.mark.parametrize("n", [300, MOST_KEYS])
@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_a_captured_lookup_never_answers_with_an_older_vector(server: hps.HPS, framework: str, n: int) -> None:
    if framework == "torch":
        keys: Any = torch.zeros(n, dtype=torch.int64, device="cuda")
        outs: dict[str, Any] = {name: torch.empty(n, dim, device="cuda") for name, dim in DIMS.items()}
    else:
        keys, outs = cupy.zeros(n, cupy.int64), {name: cupy.empty((n, dim), cupy.float32) for name, dim in DIMS.items()}
    with server.capture(dict.fromkeys(DIMS, keys), outs, "m") as graph:
        replay_while_written(server, keys, outs, graph.replay)


@pytest.mark.parametrize("ours", [True, False])
def test_a_graph_keeps_its_version_until_it_is_gone(server: hps.HPS, ours: bool, tmp_path: Path) -> None:
    keys, out = torch.arange(100, device="cuda"), torch.empty(100, DIMS["a"], device="cuda")
    graph: Any
    if ours:
        graph = server.capture(keys, out, "m", "a")
    else:
        server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
    for name, dim in DIMS.items():
        hps.write_sparse_model(tmp_path / name, (np.arange(ROWS), vectors_of(np.arange(ROWS), dim, 7)), overwrite=True)
    server.deploy("m")
    assert [state.state for state in server.versions("m")] == ["serving", "retiring"]
    for _ in range(3):
        graph.replay()
        check(np.arange(100), out, 7 if ours else 0)  # ours follows the model
    torch.cuda.synchronize()
    if not ours:
        del graph
        gc.collect()
    wait_until(lambda: len(server.versions("m")) == 1, "nothing reads the first version")


def test_a_capture_that_was_not_run_before_is_refused(server: hps.HPS) -> None:
    keys, out = torch.arange(100, device="cuda"), torch.empty(100, DIMS["a"], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        with pytest.raises(hps.InvalidInputError, match="run once, outside"):
            server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
    server.lookup_fromdlpack(keys, out, "m", "a")
    check(np.arange(100), out)


def test_a_lookup_without_waiting_is_ordered_by_its_stream(server: hps.HPS) -> None:
    keys, out = torch.zeros(1000, dtype=torch.int64, device="cuda"), torch.empty(1000, DIMS["a"], device="cuda")
    got = []
    for start in range(0, 20_000, 1000):
        keys.copy_(torch.arange(start, start + 1000), non_blocking=True)
        server.lookup_fromdlpack(keys, out, "m", "a", wait=False)
        got.append(out.clone())
    for nth, vectors in enumerate(got):
        check(np.arange(1000 * nth, 1000 * nth + 1000), vectors)
