"""`route="keys"` over three services: right, of one version, and alive without one of them."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import hps
from hps.testing.waiting import PATIENCE_S
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

DIMS = {"item": 4, "user": 8}
ROWS = 2000
ADMIN = "admin-token"


def vectors_of(name: str, keys: Any, version: int) -> np.ndarray:
    keys = np.asarray(keys)
    vectors = np.repeat(keys[:, None], DIMS[name], 1).astype(np.float32)
    vectors[:, -1] = version
    vectors[(keys < 0) | (keys >= ROWS)] = 0
    return vectors


def three_servers(tmp_path: Path) -> Iterator[list[ServedProcess]]:
    """Three services with disks of their own, one repository and two versions, of which the first serves."""
    models, places = tmp_path / "models", [tmp_path / f"server-{nth}" for nth in range(3)]
    entry = model_of("m", [f"{name}.model" for name in DIMS], DIMS, hit_rate_threshold=1.1, max_batch_size=5000)
    entry["version_policy"] = {"specific": {"versions": [1]}}
    for version, name in product((1, 2), DIMS):
        rows = (np.arange(ROWS), vectors_of(name, np.arange(ROWS), version))
        hps.write_sparse_model(models / "m" / str(version) / f"{name}.model", rows)
    (models / "m" / "model.json").write_text(json.dumps(entry))
    document = document_of(model_repository=str(models), service={"admin_token": ADMIN, "drain_s": 0})
    with ExitStack() as stack:
        for place in places:
            place.mkdir()
        yield [stack.enter_context(ServedProcess(document, place)) for place in places]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedProcess]]:
    yield from three_servers(tmp_path_factory.mktemp("routes"))


def addresses_of(servers: list[ServedProcess]) -> list[str]:
    return [server.url for server in servers]


def test_it_looks_up_as_one_server_does(servers: list[ServedProcess]) -> None:
    rng = np.random.default_rng(1)
    with hps.connect(addresses_of(servers), route="keys", token=ADMIN) as routed, hps.connect(servers[0].url) as one:
        for size in (0, 1, 2, 500, 3000):
            keys = {name: rng.integers(-5, ROWS + 5, size) for name in DIMS}
            got, masks = routed.lookup_tables(keys, "m", return_found=True)
            wanted, wanted_masks = one.lookup_tables(keys, "m", return_found=True)
            assert list(got) == list(wanted)
            for name in DIMS:
                np.testing.assert_array_equal(got[name], wanted[name])
                np.testing.assert_array_equal(masks[name], wanted_masks[name])
            narrow = {"item": torch.empty(size, DIMS["item"], dtype=torch.bfloat16), "user": np.empty((size, 8), np.float16)}
            routed.lookup_tables(keys, "m", out=narrow)
            assert narrow["item"].equal(torch.from_numpy(wanted["item"]).bfloat16())
            np.testing.assert_array_equal(narrow["user"], wanted["user"].astype(np.float16))
        assert routed.lookup(np.array([2**64 - 1], np.uint64), "m", "item").shape == (1, 4)
        assert routed.lookup_pooled({"item": hps.Bags([1, 2, 3], [0, 2, 3])}, "m")["item"].shape == (2, 4)
        for wrong, error in ((("m", "nobody"), hps.UnknownTableError), (("nobody", "item"), hps.UnknownModelError)):
            with pytest.raises(error):
                routed.lookup(np.arange(100), *wrong)
        with pytest.raises(hps.InvalidInputError, match="got a client that routes keys"):
            routed.shared_memory(4096)

    async def twin() -> None:
        async with hps.connect_async(addresses_of(servers), route="keys") as client:
            keys = rng.integers(0, ROWS, 1000)
            several = await asyncio.gather(*(client.lookup(keys, "m", name) for name in [*DIMS] * 3))
            for name, got in zip([*DIMS] * 3, several, strict=True):
                np.testing.assert_array_equal(got, vectors_of(name, keys, 1))

    asyncio.run(twin())


def test_one_connection_of_each_server_is_enough_for_many_threads_and_each_is_asked(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys", connections=1) as client, ThreadPoolExecutor(8) as threads:

        def ask(first: int) -> bool:
            keys = np.arange(first, first + 100)
            return bool((client.lookup(keys, "m", "item") == vectors_of("item", keys, 1)).all())

        assert all(threads.map(ask, [*range(0, 1000, 50)] * 8, timeout=PATIENCE_S))
    for server in servers:
        metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text
        [keys] = re.findall(r'^hps_lookup_keys_total{model="m",table="item".*} (\S+)$', metrics, re.MULTILINE)
        assert float(keys) >= 0.2 * 160 * 100, "its own keys"


def test_an_answer_is_of_one_version_and_needs_no_server_in_particular(servers: list[ServedProcess]) -> None:
    """The last one: it leaves two servers of three."""
    keys = np.arange(ROWS)
    with hps.connect(addresses_of(servers), route="keys") as client:

        def version() -> float:
            got = client.lookup_tables(dict.fromkeys(DIMS, keys), "m")
            found = float(got["item"][0, -1])
            for name, vectors in got.items():
                np.testing.assert_array_equal(vectors, vectors_of(name, keys, int(found)))
            return found

        assert version() == 1.0
        for server in servers:
            with hps.connect(server.url, token=ADMIN) as direct:
                direct.ask("/v1/models/m/deploy", "POST", {"version": "2"})
            assert version() in (1.0, 2.0)
        assert version() == 2.0
        servers[0].stop(signal.SIGKILL)
        for _ in range(2):
            assert version() == 2.0
