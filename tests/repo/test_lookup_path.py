"""How many files a reader opens who follows a lookup in process: where every key hits, ten at most."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import hps
from tests.servers.running_service import document_of, model_of

PACKAGE = str(Path(hps.__file__).parent)
MOST_FILES = 10
ROWS, DIM = 100, 4
Call = Callable[[hps.HPS], Any]


def files_of(call: Callable[[], Any]) -> set[str]:
    """The files of the package whose functions run during a call."""
    files = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            files.add(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(device: str, tmp_path: Path) -> Iterator[hps.HPS]:
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.ones((ROWS, DIM), np.float32)))
    changes = {"cache_refresh_percentage_per_iteration": 1.0, "gpucacheper": 1.0, "hit_rate_threshold": 1.1}
    model = model_of("m", [tmp_path / "t"] * 2, {"a": DIM, "b": DIM}, **changes)
    with hps.HPS(document_of(model, device=device)) as server:
        yield server


def calls(resident: np.ndarray, place: Callable[[np.ndarray], Any]) -> dict[str, Call]:
    keys, out, more = place(resident), place(np.zeros((10, DIM), np.float32)), place(np.zeros(20 * DIM, np.float32))
    return {
        "lookup": lambda server: server.lookup(resident, "m", 0),
        "lookup_fromdlpack": lambda server: server.lookup_fromdlpack(keys, out, "m", "a", 0),
        "lookup_tables": lambda server: server.lookup_tables({"a": keys, "b": keys}, "m", out={"a": out, "b": more}),
        "lookup_concatenated": lambda server: server.lookup_concatenated(keys, (4, 6), more, "m"),
    }


@pytest.mark.parametrize("name", ["lookup", "lookup_fromdlpack", "lookup_tables", "lookup_concatenated"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "cupy"])
def test_a_lookup_whose_keys_all_hit_crosses_few_files(server: hps.HPS, device: str, name: str, kind: str) -> None:
    places: dict[str, Callable[[np.ndarray], Any]] = {
        "numpy": np.array,
        "torch": lambda array: torch.from_numpy(array).to(device),
        "cupy": lambda array: __import__("cupy").asarray(array),
    }
    if kind == "cupy" and device == "cpu":
        pytest.skip("a CPU cache takes no CUDA tensors")
    [cache] = server.model("m").caches
    call = calls(np.intersect1d(cache.dump(0), cache.dump(1))[:10], places[kind])[name]
    for _ in range(3):
        call(server)
    counters = server.metrics.table("m", "a")
    misses = counters.misses[0]
    files = files_of(lambda: call(server))
    assert counters.misses[0] == misses
    assert len(files) <= MOST_FILES, sorted(files)
    assert {"parameter_server.py", "lookup/session.py"} <= files
