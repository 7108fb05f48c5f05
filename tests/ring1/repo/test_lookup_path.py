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
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of, running_service

PACKAGE = Path(hps.__file__).parent
MOST_FILES_IN_PROCESS = 9
MOST_FILES_AND_CALLS = {"repeated": (8, 30), "of a new shape": (12, 80)}
"""Of a frontend, for a binary request over HTTP."""
ROWS, DIM = 100, 4
CHANGES = {"gpucacheper": 1.0, "hit_rate_threshold": 1.1}
Call = Callable[[hps.HPS], Any]


class Called(list[tuple[str, str]]):
    """The functions of the package that run while it is `on`: files and names, in order."""

    on = False

    def record(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.on and event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            self.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))

    @property
    def files(self) -> set[str]:
        return {path for path, _ in self}


@pytest.fixture
def called() -> Iterator[Called]:
    called = Called()
    sys.setprofile(called.record)  # of this thread alone
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
    assert len(called.files) <= MOST_FILES_IN_PROCESS, " ".join(sorted(called.files))
    assert {"parameter_server.py", "engine/session.py"} <= called.files


@pytest.mark.parametrize("kind", MOST_FILES_AND_CALLS)
def test_a_lookup_over_http_crosses_few_files_with_few_calls(files: Path, called: Called, kind: str) -> None:
    sys.setprofile(None)  # of the client
    threading.setprofile(called.record)
    unlogged = {"access_log_per_s": 0}  # as most requests of a busy service are
    with running_service(document_of(model_of("m", [files], {"item": DIM}, **CHANGES), service=unlogged)) as service:
        keys, runs, client = np.arange(ROWS), [], service.connect()
        for number in range(20):
            asked = keys if not number else keys[: 5 if kind == "repeated" else 5 + number]  # all are resident then
            tensor = {"name": "item", "datatype": "INT64", "shape": [asked.size]}
            tensor["parameters"] = {"binary_data_size": asked.nbytes}
            text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
            lengths = b"Content-Length: %d\r\nInference-Header-Content-Length: %d" % (len(text) + asked.nbytes, len(text))
            head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: hps\r\nAccept: */*\r\n%b\r\n\r\n" % lengths
            called.on = number > 2
            called.clear()
            client.sendall(head + text + asked.tobytes())  # at once: parts that arrive apart are read apart
            expected, got = asked.repeat(DIM).astype(np.float32).tobytes(), b""
            while not got.endswith(expected):
                got += client.recv(1 << 16)
            wait_until(lambda: service.is_idle, "the answer is counted")
            if called.on:
                runs.append([*called])
        called.on = False
        client.close()
    fewest = min(runs, key=len)  # what runs in the background falls into some of them only
    paths = {path for path, _ in fewest}
    assert "regions/exchange.py" in paths  # the profile reaches the thread of the frontend
    assert "parameter_server.py" not in paths  # resident keys need nothing of the engine's Python
    most_files, most_calls = MOST_FILES_AND_CALLS[kind]
    assert len(paths) <= most_files, sorted(paths)
    assert len(fewest) <= most_calls, " ".join(function for _, function in fewest)
