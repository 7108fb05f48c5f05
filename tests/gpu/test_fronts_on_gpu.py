"""Lookups over HTTP whose keys a GPU reads from the memory of a front, and whose vectors it writes there."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import DeviceError
from hps.regions.exchange import D_TIMES
from hps.testing.caches import bits, vectors_of
from tests.gpu.cupy_if_installed import cupy
from tests.servers.binary_tensors import request_of, tensors_of
from tests.servers.running_service import RunningService, document_of, model_of, row_files_alone, running_service

pytestmark = pytest.mark.gpu

DIMS = {"user": 4, "item": 32, "word": 128, "tag": 1}
ROWS = 20_000
MOST = 30_000


def write_version(place: Path, version: int) -> list[str]:
    keys = np.arange(ROWS, dtype="<i8")
    for name, dim in DIMS.items():
        directory = place / str(version) / name
        directory.mkdir(parents=True)
        keys.tofile(directory / "key")
        vectors_of(keys, dim, version).tofile(directory / "emb_vector")
    return [str(place / str(version) / name) for name in DIMS]


def document(place: Path, *, cached: float, devices: tuple[int, ...] = (0,), versions: int = 1, **more: Any) -> dict[str, Any]:
    model = model_of(
        "m",
        write_version(place, 1),
        DIMS,
        gpucacheper=cached,
        maxnum_catfeature_query_per_table_per_sample=[MOST] * len(DIMS),
        max_batch_size=4,
        hit_rate_threshold=1.0,
        deployed_device_list=list(devices),
        **({"versions": [{"version": str(n), "sparse_files": write_version(place, n)} for n in range(2, versions + 1)]}),
    )
    return document_of(model, device="cuda", service={"access_log_per_s": 0}, **more)


CONNECTIONS: list[HTTPConnection] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the connections of a test after it."""
    yield
    for connection in CONNECTIONS:
        connection.close()
    CONNECTIONS.clear()


class Client:
    """A connection that asks for binary tensors."""

    def __init__(self, service: RunningService) -> None:
        self._connection = HTTPConnection("127.0.0.1", int(service.url.rpartition(":")[2]), timeout=60)
        CONNECTIONS.append(self._connection)

    def ask(self, keys: dict[str, np.ndarray], *, found: bool = False, **parameters: Any) -> dict[str, np.ndarray]:
        given = {"binary_data_output": True, **({"found": True} if found else {}), **parameters}
        headers, body = request_of(keys, parameters=given)
        self._connection.request("POST", "/v2/models/m/infer", body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return tensors_of(answer.headers, data)


def expected(keys: np.ndarray, dim: int, version: int = 1) -> np.ndarray:
    return np.where((keys < ROWS)[:, None], vectors_of(keys, dim, version), np.float32(0))


def some_keys(rng: np.random.Generator, most: int) -> dict[str, np.ndarray]:
    """Keys of some tables, one in ten of which is absent, and some of which come twice."""
    names = rng.permutation(list(DIMS))[: rng.integers(1, len(DIMS) + 1)]
    return {str(name): rng.integers(0, ROWS + ROWS // 9, rng.integers(1, most + 1)) for name in names}


def check(keys: dict[str, np.ndarray], answer: dict[str, np.ndarray], version: int = 1) -> None:
    for name, ids in keys.items():
        np.testing.assert_array_equal(bits(answer[name]), bits(expected(ids, DIMS[name], version)))
        if f"{name}.found" in answer:
            np.testing.assert_array_equal(answer[f"{name}.found"], ids < ROWS)


def of_loops(service: RunningService) -> int:
    """How many requests the loop has answered without Python."""
    return sum(int(loop_state.deployments[:, D_TIMES:].sum()) for loop_state in service.app.link._loop_states)


@pytest.fixture(params=[(1.0, False), (0.5, False), (0.5, True)], ids=["resident", "half resident", "of row files"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningService]:
    cached, in_files = request.param
    with running_service(
        document(tmp_path, cached=cached, **(row_files_alone(tmp_path / "rows") if in_files else {}))
    ) as service:
        yield service


@pytest.mark.parametrize("most", [1, 100, 5_000, MOST])
def test_vectors_are_those_of_their_keys(service: RunningService, most: int) -> None:
    client, rng = Client(service), np.random.default_rng(most)
    before = of_loops(service)
    for _ in range(20):
        keys = some_keys(rng, most)
        check(keys, client.ask(keys, found=bool(rng.integers(2))))
    assert of_loops(service) > before


def during(work: Callable[[], None], seconds: float) -> None:
    """Do some work on threads until time is up, and raise what any of them raised."""
    stop = threading.Event()

    def run(_: int) -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(run, n) for n in range(4)]
        stop.wait(seconds)
        stop.set()
        for call in calls:
            call.result(60)


def test_an_online_write_is_seen_whole_and_by_every_later_lookup(service: RunningService) -> None:
    server = service.app.lifecycle.opened
    written, ids = [1], np.arange(500)
    local = threading.local()

    def look() -> None:
        if not hasattr(local, "client"):
            local.client = Client(service)
        least = written[-1]
        out = local.client.ask({"item": ids})["item"]
        versions = out[:, 0].astype(np.int64)
        assert (versions >= least).all()
        np.testing.assert_array_equal(bits(out), bits(vectors_of(ids, 32, versions)))

    def write() -> None:
        for version in range(2, 60):
            server.insert(ids, vectors_of(ids, 32, version), "m", "item")
            written.append(version)

    writer = threading.Thread(target=write)
    writer.start()
    during(look, 3)
    writer.join()
    look()


def test_memory_that_cannot_be_pinned_is_answered_through_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hps.cache.cuda import batches

    def refuse(*_: Any) -> None:
        raise DeviceError("no memory can be pinned")

    monkeypatch.setattr(batches.CudaPinner, "pin", refuse)
    with running_service(document(tmp_path, cached=0.5)) as service:
        client, rng = Client(service), np.random.default_rng(5)
        for _ in range(10):
            keys = some_keys(rng, 2_000)
            check(keys, client.ask(keys))
        assert of_loops(service) == 0


def test_two_devices_take_turns(tmp_path: Path) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with running_service(document(tmp_path, cached=0.5, devices=(0, 1))) as service:

        def run(seed: int) -> None:
            client, rng = Client(service), np.random.default_rng(seed)
            for _ in range(60):
                keys = some_keys(rng, 2_000)
                check(keys, client.ask(keys))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(8)))
        loop_state = service.app.link._loop_states[0]
        assert (loop_state.deployments[:, D_TIMES:].sum(1) > 0).sum() == 2
