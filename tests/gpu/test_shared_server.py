"""A server whose devices share the rows of a model: lookups, captures and layers on each, writes, and a device that is lost."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.gpu.test_capture import ABSENT, DIMS, ROWS, Writer, check, vectors_of
from tests.servers.running_service import document_of, model_of, row_files_alone

pytestmark = pytest.mark.gpu
DEVICES = [0, 1]
KINDS = [
    ("partition", "dynamic"),
    ("hot", "dynamic"),
    ("partition", "static"),
    ("hot", "uvm"),
    ("partition", "dynamic", "row_files"),
    ("hot", "dynamic", "row_files"),
]


def write_models(directory: Path) -> None:
    for name, dim in DIMS.items():
        hps.write_sparse_model(directory / name, (np.arange(ROWS), vectors_of(np.arange(ROWS), dim, 0)))


def document(directory: Path, sharing: str, cache_type: str = "dynamic", database: str = "hash_map") -> dict[str, Any]:
    settings = {
        "gpucacheper": 0.2,
        "max_batch_size": 40_000,
        "default_value_for_each_table": [ABSENT] * 2,
        "hit_rate_threshold": 1.1,
        "deployed_device_list": DEVICES,
        "device_sharing": sharing,
        "embedding_cache_type": cache_type,
        "num_of_worker_buffer_in_pool": 4,
    }
    model = model_of("m", [directory / name for name in DIMS], DIMS, **settings)
    if database == "row_files":
        return document_of(model, device="cuda", **row_files_alone(directory / "rows"))
    return document_of(model, device="cuda", persistent=directory / "rocksdb" if cache_type != "dynamic" else None)


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    if reason := CupyCache.reason_against_sharing(DEVICES):
        pytest.skip(reason)


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[hps.HPS]:
    write_models(tmp_path)
    with hps.HPS(document(tmp_path, *request.param)) as server:
        yield server


def test_lookups_on_both_devices_see_every_write(server: hps.HPS) -> None:
    rng = np.random.default_rng(1)
    for version in range(6):
        keys = rng.integers(0, ROWS, 30_000)
        for device in DEVICES:
            on_device = torch.from_numpy(keys).to(f"cuda:{device}")
            for name, dim in DIMS.items():
                out = torch.full((keys.size, dim), torch.nan, device=f"cuda:{device}")
                server.lookup_fromdlpack(on_device, out, "m", name, device)
                torch.cuda.synchronize(device)
                check(keys, out, version)
            host = server.lookup_tables({"a": keys[:100], "b": keys[:50]}, "m")
            check(keys[:100], torch.from_numpy(host["a"]), version)
        every = np.arange(ROWS)
        for name, dim in DIMS.items():
            server.insert(every, vectors_of(every, dim, version + 1), "m", name)
    server.delete(np.arange(100), "m", "a")
    for device in DEVICES:
        out = torch.full((200, DIMS["a"]), torch.nan, device=f"cuda:{device}")
        server.lookup_fromdlpack(torch.arange(200, device=f"cuda:{device}"), out, "m", "a", device)
        assert (out[:100] == ABSENT).all()
        assert (out[100:] != ABSENT).all()


def test_captured_lookups_of_both_devices_never_answer_with_an_older_vector(server: hps.HPS) -> None:
    if server.model("m").config.embedding_cache_type != "dynamic":
        pytest.skip("there is a database below")
    failed: list[BaseException] = []
    replays = [0, 0]

    def replay(place: int, writer: Writer, until: float) -> None:
        try:
            device, rng = DEVICES[place], np.random.default_rng(place)
            torch.cuda.set_device(device)
            keys = torch.zeros(4096, dtype=torch.int64, device=f"cuda:{device}")
            outs = {name: torch.empty((4096, dim), device=f"cuda:{device}") for name, dim in DIMS.items()}
            with server.capture(dict.fromkeys(DIMS, keys), outs, "m", device_id=device) as graph:
                while time.monotonic() < until:
                    fresh = (rng.zipf(1.2, 4096) - 1) % (ROWS + 1000)
                    keys.copy_(torch.from_numpy(fresh))
                    least = writer.acknowledged
                    graph.replay()
                    torch.cuda.synchronize(device)
                    for out in outs.values():
                        check(fresh, out, least)
                    replays[place] += 1
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    with Writer(server) as writer:
        until = time.monotonic() + 5
        threads = [threading.Thread(target=replay, args=(place, writer, until)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    if failed:
        raise failed[0]
    assert min(replays) > 20
