"""How many files of the package a reader opens who follows a lookup whose keys all hit."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import orjson
import pytest
import torch

import hps
from tests.servers.running_service import document_of, model_of, running_service

PACKAGE = Path(hps.__file__).parent
MOST_FILES_IN_PROCESS, MOST_FILES_OVER_HTTP, MOST_FILES_OF_THE_SERVICE = 9, 14, 7
ROWS, DIM = 100, 4
CHANGES = {"gpucacheper": 1.0, "hit_rate_threshold": 1.1}
Call = Callable[[hps.HPS], Any]


class Called(set[str]):
    """The files of the package whose functions run while it is `on`."""

    on = False

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.on and event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            self.add(path.relative_to(PACKAGE).as_posix())


@pytest.fixture
def called() -> Iterator[Called]:
    called = Called()
    sys.setprofile(called.note)  # of this thread alone
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    return tmp_path / "t"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(device: str, files: Path) -> Iterator[hps.HPS]:
    model = model_of("m", [files] * 2, {"a": DIM, "b": DIM}, cache_refresh_percentage_per_iteration=1.0, **CHANGES)
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
def test_a_lookup_in_process_crosses_few_files(server: hps.HPS, device: str, name: str, kind: str, called: Called) -> None:
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
    called.on = True
    call(server)
    called.on = False
    assert counters.misses[0] == misses
    assert len(called) <= MOST_FILES_IN_PROCESS, " ".join(sorted(called))
    assert {"parameter_server.py", "engine/session.py"} <= called


def test_a_lookup_over_http_crosses_few_files(files: Path, called: Called) -> None:
    tensor = {"name": "item", "datatype": "INT64", "shape": [10], "parameters": {"binary_data_size": 80}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    length = {"Inference-Header-Content-Length": str(len(text))}
    threading.setprofile(called.note)
    unlogged = {"access_log_per_s": 0}  # as most requests of a busy service are
    with running_service(document_of(model_of("m", [files], {"item": DIM}, **CHANGES), service=unlogged)) as service:
        runs = []
        for called.on in (False, False, *[True] * 40):
            called.clear()
            response = service.client.post("/v2/models/m/infer", content=text + np.arange(10).tobytes(), headers=length)
            runs.append(called.copy())
        called.on = False
    assert response.content.endswith(np.arange(10).repeat(DIM).astype(np.float32).tobytes())
    called = min(runs[2:], key=len)  # what runs in the background falls into some of them only
    assert "regions/exchange.py" in called  # the profile reaches the thread of the front
    assert "parameter_server.py" not in called  # resident keys need nothing of the owner's Python
    service_files = {path for path in called if path.startswith("serve/")}
    assert len(service_files) <= MOST_FILES_OF_THE_SERVICE, sorted(service_files)
    assert len(called) <= MOST_FILES_OVER_HTTP, sorted(called)
