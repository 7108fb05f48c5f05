"""Triton's system shared memory extension, asked with Triton's own client and with ours."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as regions

import hps
from tests.servers.running_service import RunningService, document_of, model_of, running_service
from tests.servers.served_process import ServedProcess

DIM, ROWS, LIMIT = 4, 500, 1 << 20
SHM = Path("/dev/shm")


def vectors_of(keys: Any) -> np.ndarray:
    return (np.asarray(keys, np.float32)[:, None] + np.arange(DIM) / 8).astype(np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    directory = tmp_path_factory.mktemp("shared")
    hps.write_sparse_model(directory / "t.model", (np.arange(ROWS), vectors_of(np.arange(ROWS))))
    model = model_of("m", [directory / "t.model"] * 2, {"item": DIM, "user": DIM}, hit_rate_threshold=1.1)
    with ServedProcess(document_of(model, service={"shared_memory_bytes": LIMIT}), directory, fronts=2) as served:
        yield served


@pytest.fixture
def client(service: ServedProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as made:
        made.unregister_system_shared_memory()
        yield made
        made.unregister_system_shared_memory()


@contextmanager
def segment(name: str, size: int) -> Iterator[Any]:
    handle = regions.create_shared_memory_region(name, f"/{name}", size)
    yield handle
    with suppress(FileNotFoundError):
        regions.destroy_shared_memory_region(handle)


@pytest.fixture
def pair(client: triton.InferenceServerClient) -> Iterator[tuple[Any, Any]]:
    with segment("hps-test-keys", 4096) as keys, segment("hps-test-vectors", 65536) as vectors:
        register(client)
        yield keys, vectors


def register(client: triton.InferenceServerClient) -> None:
    for name, size in (("hps-test-keys", 4096), ("hps-test-vectors", 65536)):
        client.register_system_shared_memory(name, f"/{name}", size)


def in_region(count: int) -> triton.InferInput:
    tensor = triton.InferInput("item", [count], "INT64")
    tensor.set_shared_memory("hps-test-keys", 8 * count)
    return tensor


def to_region(size: int, offset: int = 0) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("item")
    output.set_shared_memory("hps-test-vectors", size, offset)
    return output


def test_shared_and_sent_tensors_mix(client: triton.InferenceServerClient, pair: tuple[Any, Any]) -> None:
    keys, vectors = pair
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    regions.set_shared_memory_region(keys, [np.array([7, 8])])
    user = triton.InferInput("user", [3], "INT64")
    user.set_data_from_numpy(np.array([1, 2, 3]))
    mask = triton.InferRequestedOutput("item.found", binary_data=False)
    for _ in range(2):
        found = client.infer("m", [in_region(2), user], outputs=[to_region(32), triton.InferRequestedOutput("user"), mask])
        assert (found.as_numpy("user") == vectors_of([1, 2, 3])).all()
        assert found.as_numpy("item.found").tolist() == [True, True]
        assert (regions.get_contents_as_numpy(vectors, np.float32, [2, DIM]) == vectors_of([7, 8])).all()
    for header in ("X-Forwarded-For", "Origin"):
        with pytest.raises(InferenceServerException, match="without a proxy"):
            client.infer("m", [in_region(2)], headers={header: "10.0.0.1"})


def test_an_output_in_a_segment_has_a_datatype_of_its_own(client: triton.InferenceServerClient, pair: tuple[Any, Any]) -> None:
    keys, vectors = pair
    regions.set_shared_memory_region(keys, [np.array([7, 8])])
    for parameters, size in (({}, 32), ({"datatype": "FP16", "report": True}, 16)):
        with pytest.raises(InferenceServerException, match=f"should be at least {size} bytes"):
            client.infer("m", [in_region(2)], outputs=[to_region(size - 1)], parameters=parameters)
    report = client.infer("m", [in_region(2)], outputs=[to_region(16)], parameters=parameters)
    assert report.get_response()["parameters"]["item.keys"] == 2
    own = to_region(32, 64)
    own._parameters["datatype"] = "FP32"  # as clients may that write their JSON themselves
    client.infer("m", [in_region(2)], outputs=[own], parameters=parameters)
    assert (regions.get_contents_as_numpy(vectors, np.float16, [2, DIM]) == vectors_of([7, 8])).all()
    assert (regions.get_contents_as_numpy(vectors, np.float32, [2, DIM], 64) == vectors_of([7, 8])).all()


def test_regions_are_listed_and_forgotten(client: triton.InferenceServerClient, pair: tuple[Any, Any]) -> None:
    for _ in range(2):
        listed = client.get_system_shared_memory_status()
        assert [one["name"] for one in listed] == ["hps-test-keys", "hps-test-vectors"]
        (one,) = client.get_system_shared_memory_status("hps-test-keys")
        assert one == {"name": "hps-test-keys", "key": "/hps-test-keys", "offset": 0, "byte_size": 4096}
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory("hps-test-keys", "/hps-test-keys", 4096)
        client.unregister_system_shared_memory("hps-test-keys")
        client.unregister_system_shared_memory("never-registered")
        for ask in (
            lambda: client.get_system_shared_memory_status("hps-test-keys"),
            lambda: client.infer("m", [in_region(2)]),
        ):
            with pytest.raises(InferenceServerException, match="Unable to find"):
                ask()
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
        register(client)


def infer_with(
    service: ServedProcess | RunningService, tensor: dict[str, Any], output: dict[str, Any] | None = None
) -> httpx.Response:
    given = {"name": "item", "datatype": "INT64", "shape": [2], "parameters": tensor}
    outputs = {} if output is None else {"outputs": [{"name": "item", "parameters": output}]}
    return httpx.post(f"{service.url}/v2/models/m/infer", content=json.dumps({"inputs": [given], **outputs}))


WRONG: list[tuple[dict[str, Any], str]] = [  # beside those of ring1/serve/test_shared_memory.py
    ({"shared_memory_region": 3}, "an integer"),
    ({"shared_memory_byte_size": None}, "null"),
    ({"shared_memory_byte_size": -1}, "-1"),
    ({"shared_memory_byte_size": 8}, "16 bytes"),
    ({"shared_memory_offset": 4090}, "Invalid offset"),
    ({"shared_memory_region": "other"}, "Unable to find"),
    ({"shared_memory_offset": "0"}, "a string"),
]


def test_wrong_parameters_are_refused(service: ServedProcess, pair: tuple[Any, Any]) -> None:
    good = {"shared_memory_region": "hps-test-keys", "shared_memory_byte_size": 16}
    for change, message in WRONG:
        wrong = {key: value for key, value in (good | change).items() if value is not None}
        for _ in range(2):
            answer = infer_with(service, wrong)
            assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text
        if message != "16 bytes":
            assert infer_with(service, good, wrong).status_code == 400, message
        assert infer_with(service, good).status_code == 200


def test_a_segment_that_shrinks_is_an_error_and_kills_nothing(
    client: triton.InferenceServerClient, pair: tuple[Any, Any], service: ServedProcess
) -> None:
    def ask() -> None:
        client.infer("m", [in_region(20)], outputs=[to_region(4096)])

    ask()
    for name in ("hps-test-keys", "hps-test-vectors"):
        os.truncate(SHM / name, 0)
    for keys in (0, 0, 0, 4096):  # of either front
        os.truncate(SHM / "hps-test-keys", keys)
        with pytest.raises(InferenceServerException, match="shorter"):
            ask()
    os.truncate(SHM / "hps-test-vectors", 65536)
    ask()
    assert "died" not in service.log()


@pytest.fixture
def odd_files(tmp_path: Path) -> Iterator[list[str]]:
    """Names in /dev/shm that are no segments of the service's user; the last one's file is another user's, if it can be."""
    (tmp_path / "secret").write_bytes(bytes(4096))
    (SHM / "hps-test-link").symlink_to(tmp_path / "secret")
    (SHM / "hps-test-folder").mkdir()
    os.mkfifo(SHM / "hps-test-pipe")
    (SHM / "hps-test-foreign").write_bytes(bytes(4096))
    if os.geteuid() == 0:
        os.chown(SHM / "hps-test-foreign", 12345, 12345)
    yield [f"/hps-test-{name}" for name in ("link", "folder", "pipe", "foreign")]
    for name in ("link", "pipe", "foreign"):
        (SHM / f"hps-test-{name}").unlink()
    (SHM / "hps-test-folder").rmdir()


def test_only_files_of_its_user_in_dev_shm_are_opened(client: triton.InferenceServerClient, odd_files: list[str]) -> None:
    wrong = ["/hps-test-nowhere", "", "/", "..", "/../etc/passwd", "/.hidden", "a/b", "a\0b", "x" * 300, *odd_files]
    for key in wrong if os.geteuid() == 0 else wrong[:-1]:
        with pytest.raises(InferenceServerException, match="sharing memory"):
            client.register_system_shared_memory("r", key, 16)
    if os.geteuid() == 0:
        os.chmod(SHM / "hps-test-foreign", 0o666)
        client.register_system_shared_memory("r", odd_files[-1], 16)
    for offset, size in ((0, 0), (-1, 8), (0, 2**62), (4090, 16)):  # Triton's client sends such values, too
        with pytest.raises(InferenceServerException):
            client.register_system_shared_memory("s", "/hps-test-foreign", size, offset)


def test_regions_are_bounded(client: triton.InferenceServerClient) -> None:
    def register(name: str, size: int, offset: int = 0) -> None:
        client.register_system_shared_memory(name, "/hps-test-large", size, offset)

    with segment("hps-test-large", LIMIT + 1):
        with pytest.raises(InferenceServerException, match="at most 1048576"):
            register("large", LIMIT + 1)
        for _ in range(2):
            register("half", LIMIT // 2)
            register("rest", LIMIT // 2, LIMIT // 2)
            with pytest.raises(InferenceServerException, match="at most"):
                register("more", 1)
            client.unregister_system_shared_memory()
        for nth in range(64):
            register(f"r{nth}", 8)
        with pytest.raises(InferenceServerException, match="in 64"):
            register("r64", 8)
    with segment("hps-test-large", LIMIT):  # those whose segment is gone make room
        register("r64", LIMIT)
        assert len(client.get_system_shared_memory_status()) == 1


def test_arrays_of_our_client_are_shared_until_it_releases_them(service: ServedProcess) -> None:
    def shared() -> list[Path]:
        return list(SHM.glob(f"hps-client-{os.getpid()}-*"))

    with hps.connect(service.url) as client:
        for first in (0, 300):
            memory = client.shared_memory(1 << 16)
            keys, out = memory.empty(100, np.int64), memory.empty((100, DIM), np.float32)
            keys[:] = np.arange(first, first + 100)
            assert client.lookup(keys, "m", "item", out=out) is out
            assert (out == vectors_of(keys)).all()
            assert memory.name in httpx.get(f"{service.url}/v2/systemsharedmemory/status").text
            client.release(memory)
            assert (client.lookup(keys, "m", "item", out=out) == vectors_of(keys)).all()
            assert httpx.get(f"{service.url}/v2/systemsharedmemory/status").json() == []
            assert not shared()
        for size in (LIMIT + 1, 1 << 50):
            with pytest.raises(hps.CapacityError):
                client.shared_memory(size)
        client.shared_memory(4096)  # removed with the client
    with hps.connect("http://127.0.0.1:1") as nowhere, pytest.raises(hps.RemoteConnectionError):
        nowhere.shared_memory(4096)
    gc.collect()
    assert not shared()


def test_a_restarted_server_knows_no_regions(service: ServedProcess, client: triton.InferenceServerClient) -> None:
    with hps.connect(service.url) as ours:
        for _ in range(2):
            memory = ours.shared_memory(1 << 16)
            keys = memory.empty(2, np.int64)
            assert (ours.lookup(keys, "m", "item") == vectors_of([0, 0])).all()
            service.stop()
            service.start()
            with pytest.raises(hps.InvalidInputError, match="register it"):
                ours.lookup(keys, "m", "item")
            ours.release(memory)
            assert (ours.lookup(keys, "m", "item") == vectors_of([0, 0])).all()


def test_it_is_off_by_default(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "t", (np.arange(ROWS), vectors_of(np.arange(ROWS))))
    with (
        running_service(document_of(model_of("m", [tmp_path / "t"], {"item": DIM}))) as served,
        hps.connect(served.url) as client,
    ):
        with pytest.raises(hps.InvalidInputError, match="set service"):
            client.shared_memory(4096)
        answer = infer_with(served, {"shared_memory_region": "x", "shared_memory_byte_size": 16})
        assert "not supported" in answer.json()["error"]
