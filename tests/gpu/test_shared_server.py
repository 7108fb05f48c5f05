"""A server whose devices share the rows of a model: lookups, captures and layers on each, writes, and a device that is lost."""

import json
import subprocess
import sys
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
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.gpu
DEVICES = [0, 1]
KINDS = [("partition", "dynamic"), ("hot", "dynamic"), ("partition", "static"), ("hot", "uvm")]


def write_models(directory: Path) -> None:
    for name, dim in DIMS.items():
        hps.write_sparse_model(directory / name, (np.arange(ROWS), vectors_of(np.arange(ROWS), dim, 0)))


def document(directory: Path, sharing: str, cache_type: str = "dynamic") -> dict[str, Any]:
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
    resident = {"persistent": directory / "rocksdb"} if cache_type != "dynamic" else {}
    return document_of(model_of("m", [directory / name for name in DIMS], DIMS, **settings), device="cuda", **resident)


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


_LOSES = """
import os, sys, threading, time, json
import cupy, numpy as np
import hps
from tests.gpu.test_capture import DIMS, ROWS, vectors_of
from tests.gpu.test_shared_server import document
from pathlib import Path
server = hps.HPS(document(Path(sys.argv[1]), sys.argv[2]))
answered, wrong, errors, done = [0, 0], [], [], threading.Event()
def ask(place):
    rng = np.random.default_rng(place)
    while not done.is_set():
        keys = rng.integers(0, ROWS, 5000)
        try:
            out = server.lookup(keys, "m", "a", device_id=place % 2)
        except hps.DeviceError as error:
            errors.append(str(error))
            continue
        answered[lost.is_set()] += 1
        if not (out == vectors_of(keys, DIMS["a"], 0)).all():
            wrong.append(place)
lost = threading.Event()
threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(4)]
[thread.start() for thread in threads]
time.sleep(1.5)
crash = 'extern "C" __global__ void crash(unsigned* at) { *(volatile unsigned*)at = 1; }'
with cupy.cuda.Device(1):
    try:
        kernel = cupy.RawKernel(crash, "crash")
        kernel((1,), (1,), (np.uint64(8),))
        cupy.cuda.Device().synchronize()
    except Exception as error:
        print("lost:", error)
lost.set()
time.sleep(2.0)
keys = np.arange(1000)
server.insert(keys, vectors_of(keys, DIMS["a"], 0), "m", "a")
done.set()
[thread.join(20) for thread in threads]
result = {"answered": answered, "wrong": len(wrong), "errors": errors[:5], "lost": server.live.lost_devices()}
print("RESULT", json.dumps(result))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("sharing", ["partition", "hot", "replicate"])
def test_a_lost_device_makes_no_answer_wrong(tmp_path: Path, sharing: str) -> None:
    write_models(tmp_path)
    command = [sys.executable, "-c", _LOSES, str(tmp_path), sharing]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-1000:] + done.stderr[-3000:]
    result = json.loads(found[0].removeprefix("RESULT "))
    assert result["wrong"] == 0
    assert not result["errors"]
    assert min(result["answered"]) > 0
    assert "1" in result["lost"]
    with hps.HPS(document(tmp_path, sharing)) as server:  # the restart
        check(np.arange(1000), torch.from_numpy(server.lookup(np.arange(1000), "m", "a")))
