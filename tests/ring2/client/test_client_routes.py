"""`route="keys"` over three services: right, of one version, and alive without one of them."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
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
    entry = model_of("m", [f"{name}.model" for name in DIMS], DIMS, hit_rate_threshold=1.1, max_batch_size=5000)
    entry["version_policy"] = {"specific": {"versions": [1]}}
    for version in (1, 2):
        for name in DIMS:
            keys = np.arange(ROWS)
            place = tmp_path / "models" / "m" / str(version) / f"{name}.model"
            hps.write_sparse_model(place, (keys, vectors_of(name, keys, version)))
    (tmp_path / "models" / "m" / "model.json").write_text(json.dumps(entry))
    with ExitStack() as stack:
        found = []
        for nth in range(3):
            directory = tmp_path / f"server-{nth}"
            directory.mkdir()
            document = document_of(model_repository=str(tmp_path / "models"), service={"admin_token": ADMIN, "drain_s": 0})
            found.append(stack.enter_context(ServedProcess(document, directory)))
        yield found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedProcess]]:
    yield from three_servers(tmp_path_factory.mktemp("routes"))


def addresses_of(servers: list[ServedProcess]) -> list[str]:
    return [one.url for one in servers]


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
            out = np.full((size, DIMS["item"]), np.nan, np.float32)
            assert routed.lookup(keys["item"], "m", "item", out=out) is out
            np.testing.assert_array_equal(out, wanted["item"])
            narrow = {"item": torch.empty(size, DIMS["item"], dtype=torch.bfloat16), "user": np.empty((size, 8), np.float16)}
            routed.lookup_tables(keys, "m", out=narrow)
            assert narrow["item"].equal(torch.from_numpy(wanted["item"]).bfloat16())
            np.testing.assert_array_equal(narrow["user"], wanted["user"].astype(np.float16))
        assert routed.lookup(np.array([2**64 - 1], np.uint64), "m", "item").shape == (1, 4)
        pooled = routed.lookup_pooled({"item": hps.Bags([1, 2, 3], [0, 2, 3])}, "m")
        assert pooled["item"].shape == (2, 4)
        for wrong, error in ((("m", "nobody"), hps.UnknownTableError), (("nobody", "item"), hps.UnknownModelError)):
            with pytest.raises(error):
                routed.lookup(np.arange(100), *wrong)
        with pytest.raises(hps.InvalidInputError, match="got a client that routes keys"):
            routed.shared_memory(4096)

    async def twin() -> None:
        async with hps.connect_async(addresses_of(servers), route="keys") as client:
            keys = rng.integers(0, ROWS, 1000)
            for _ in range(3):
                several = await asyncio.gather(*(client.lookup(keys, "m", name) for name in DIMS))
                for name, got in zip(DIMS, several, strict=True):
                    np.testing.assert_array_equal(got, vectors_of(name, keys, 1))

    asyncio.run(twin())


def test_each_server_is_asked_for_its_own_keys(servers: list[ServedProcess]) -> None:
    def keys_of(one: ServedProcess) -> float:
        metrics = httpx.get(f"{one.url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text
        (line,) = [line for line in metrics.splitlines() if line.startswith('hps_lookup_keys_total{model="m",table="item"')]
        return float(line.rpartition(" ")[2])

    before = [keys_of(one) for one in servers]
    with hps.connect(addresses_of(servers), route="keys") as client:
        for _ in range(4):
            client.lookup(np.arange(ROWS), "m", "item")
    asked = [keys_of(one) - earlier for one, earlier in zip(servers, before, strict=True)]
    assert sum(asked) == 4 * ROWS
    assert max(asked) < 0.4 * sum(asked)


def test_one_connection_of_each_server_is_enough_for_many_threads(servers: list[ServedProcess]) -> None:
    with hps.connect(addresses_of(servers), route="keys", connections=1) as client:
        wrong: list[Any] = []

        def ask() -> None:
            for first in range(0, 1000, 50):
                got = client.lookup(np.arange(first, first + 100), "m", "item")
                if (got != vectors_of("item", np.arange(first, first + 100), 1)).any():
                    wrong.append(got)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE_S)
        assert not any(one.is_alive() for one in threads)
        assert not wrong


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
        for one in servers:
            with hps.connect(one.url, token=ADMIN) as direct:
                direct.ask("/v1/models/m/deploy", "POST", {"version": "2"})
            assert version() in (1.0, 2.0)
        assert version() == 2.0
        servers[0].stop(signal.SIGKILL)
        for _ in range(2):
            assert version() == 2.0
