"""A device that is lost while a model serves: nothing is wrong, host arrays are answered, and a restart brings it back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.testing.readers import reading
from hps.testing.waiting import wait_until
from tests.fakes.full_device import FullDevice
from tests.servers.running_service import document_of, model_of

Document = dict[str, Any]
ROWS, DIM = 500, 4
KEYS = np.arange(ROWS)
CACHED = {"gpucacheper": 0.6, "hit_rate_threshold": 1.1, "max_batch_size": 2 * ROWS}
LOST = {"cpu": "an illegal memory access was encountered"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(IMPLEMENTATIONS["cache"], device, BuiltIn("tests.fakes.full_device:FullDevice"))
    monkeypatch.setattr(FullDevice, "broken", False)
    hps.write_sparse_model(tmp_path / "item.model", (KEYS, vectors(KEYS, 0)))
    return model_of("shop", [tmp_path / "item.model"], {"item": DIM}, **CACHED)


@pytest.fixture
def document(model: Document, tmp_path: Path) -> Document:
    return document_of(model, persistent=tmp_path / "rocksdb")


def vectors(keys: np.ndarray, generation: int) -> np.ndarray:
    return (keys[:, None] + 1000 * np.arange(DIM) + 100_000 * generation).astype(np.float32)


def check(server: hps.HPS, generation: int) -> None:
    found_vectors, found = server.lookup(np.append(KEYS, 10_000), "shop", "item", return_found=True)
    np.testing.assert_array_equal(found_vectors[:-1], vectors(KEYS, generation))
    np.testing.assert_array_equal(found_vectors[-1], 0.0)
    assert found.tolist() == [True] * ROWS + [False]


def fails(call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(hps.DeviceError, match="illegal memory access"):
        call(*arguments)


@pytest.mark.parametrize("first", ["lookup", "write"])
def test_lookups_and_writes_go_on_without_the_device(document: Document, caplog: pytest.LogCaptureFixture, first: str) -> None:
    with hps.HPS(document) as server:
        check(server, 0)
        assert server.live.lost_devices() == {}
        FullDevice.broken = True
        if first == "lookup":  # which finds it lost
            check(server, 0)
        for generation in (1, 2, 3):
            server.insert(KEYS, vectors(KEYS, generation), "shop", "item")
            check(server, generation)
        server.delete(KEYS[:5], "shop", "item")
        _, found = server.lookup(KEYS[:10], "shop", "item", return_found=True)
        assert found.tolist() == [False] * 5 + [True] * 5
        assert server.row(7, "shop", "item").tier in ("persistent_db", "volatile_db")
        assert server.prefetch(KEYS[10:20], "shop", "item") == 10
        assert server.refresh("shop")["item"].updated == 0
        server.insert(KEYS, vectors(KEYS, 4), "shop", "item")
        assert server.live.lost_devices() == LOST
        server.undeploy("shop")
        assert server.live.lost_devices() == {}
    assert len([record for record in caplog.records if "is lost" in record.getMessage()]) == 1
    FullDevice.broken = False
    with hps.HPS(document) as server:  # the restart
        check(server, 4)
        assert server.live.lost_devices() == {}


class OnDevice:
    """An array that is not in host memory."""

    shape, dtype = (ROWS, DIM), np.dtype(np.float32)


def bags(offsets: Any = None, weights: Any = None) -> Pooling:
    return Pooling(ROWS, offsets, 1, weights, Combiner.SUM, 0.0, None)


OUT = np.empty((ROWS, DIM), np.float32)
BEYOND_DATABASES = {
    "keys on a device": Batch.of(0, OnDevice(), OUT, n=ROWS),
    "output on a device": Batch.of(0, KEYS, OnDevice()),
    "float16": Batch.of(0, KEYS, np.empty((ROWS, DIM), np.float16)),
    "mask on a device": Batch.of(0, KEYS, OUT, OnDevice()),
    "offsets on a device": Batch.of(0, KEYS, OUT, pooling=bags(offsets=OnDevice())),
    "weights on a device": Batch.of(0, KEYS, OUT, pooling=bags(weights=OnDevice())),
}


@pytest.mark.parametrize("batch", BEYOND_DATABASES.values(), ids=BEYOND_DATABASES)
def test_arrays_that_databases_cannot_use_fail_with_the_device(
    document: Document, monkeypatch: pytest.MonkeyPatch, batch: Batch
) -> None:
    def fall_back(*_: Any) -> None:
        pytest.fail("the lookup was answered from the databases")

    with hps.HPS(document) as server:
        FullDevice.broken = True
        session = server.model("shop").session(None)
        monkeypatch.setattr(session._without_device, "run", fall_back)
        fails(session.run, batch)


def test_no_answer_is_wrong_when_it_is_lost_under_load(document: Document) -> None:
    def ask(_: np.random.Generator) -> int:
        check(server, 0)
        return 1

    with hps.HPS(document) as server, reading(ask) as answered:
        wait_until(lambda: min(answered) > 1, "each thread has been answered")
        FullDevice.broken = True
        before = list(answered)
        wait_until(lambda: min(np.subtract(answered, before)) > 2, "each has been answered without the device")


def test_errors_of_one_lookup_lose_no_device(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullDevice, "failure", None)
    with hps.HPS(document) as server:
        FullDevice.broken = True
        fails(server.lookup, KEYS, "shop", "item")
        fails(server.insert, KEYS, vectors(KEYS, 1), "shop", "item")
        fails(server.row, 7, "shop", "item")
        assert server.live.lost_devices() == {}
        FullDevice.broken = False
        assert server.lookup(KEYS, "shop", "item", return_found=True)[1].all()


NONE = {"type": "disabled"}
ROCKS_DB = {"persistent_db": {"type": "rocks_db"}}
EVERY_ROW: dict[str, Any] = {
    "hash map": ({}, {}),
    "RocksDB": ({"volatile_db": NONE, **ROCKS_DB}, {}),
    "part above RocksDB": ({"volatile_db": {"initial_cache_rate": 0.1}, **ROCKS_DB}, {}),
    "evicts above RocksDB": ({"volatile_db": {"overflow_margin": 50}, **ROCKS_DB}, {}),
    "static": ({"volatile_db": NONE}, {"embedding_cache_type": "static"}),
    "uvm": ({"volatile_db": NONE}, {"embedding_cache_type": "uvm"}),
}
NOT_EVERY_ROW: dict[str, Any] = {
    "none": ({"volatile_db": NONE}, {}),
    "stochastic": ({}, {"embedding_cache_type": "stochastic"}),
    "stochastic above RocksDB": ({"volatile_db": NONE, **ROCKS_DB}, {"embedding_cache_type": "stochastic"}),
    "part": ({"volatile_db": {"initial_cache_rate": 0.1}}, {}),
    "evicts": ({"volatile_db": {"overflow_margin": 1000}}, {}),
    "empty": ({"volatile_db": {"initialize_after_startup": False}}, {}),
}


Serve = Callable[..., hps.HPS]


@pytest.fixture
def served(model: Document, tmp_path: Path, request: pytest.FixtureRequest) -> Serve:
    """Start a server of caches with nearly every row, above databases."""

    def start(tiers: Document, **changes: Any) -> hps.HPS:
        whole = {**model, "gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0, **changes}
        document = document_of(whole, persistent=tmp_path / "rocksdb" if "persistent_db" in tiers else None)
        for name, tier in tiers.items():
            document[name] = {**(document.get(name) or {}), **tier}
        document["device"] = FullDevice.device
        server = hps.HPS(document)
        request.addfinalizer(server.close)
        return server

    return start


@pytest.mark.parametrize(("tiers", "changes"), EVERY_ROW.values(), ids=EVERY_ROW)
def test_databases_that_hold_every_row_answer_without_the_device(
    served: Serve, monkeypatch: pytest.MonkeyPatch, tiers: Document, changes: Document
) -> None:
    if changes:
        monkeypatch.setattr(FullDevice, "device", "cuda")
    server = served(tiers, **changes)
    FullDevice.broken = True
    check(server, 0)
    assert server.row(7, "shop", "item").vector.tolist() == vectors(KEYS[7:8], 0)[0].tolist()


@pytest.mark.parametrize(("tiers", "changes"), NOT_EVERY_ROW.values(), ids=NOT_EVERY_ROW)
def test_databases_that_lack_rows_do_not_answer_for_a_lost_device(
    served: Serve, caplog: pytest.LogCaptureFixture, tiers: Document, changes: Document
) -> None:
    server = served(tiers, **changes)
    known = KEYS[server.lookup(KEYS, "shop", "item", return_found=True)[1]]
    assert known.size > ROWS / 2
    FullDevice.broken = True
    for _ in range(2):
        fails(server.lookup, known, "shop", "item")
        fails(server.row, known[0], "shop", "item")
    assert server.live.lost_devices() == LOST
    assert (
        len([record for record in caplog.records if "lookups fail, since no database holds every row" in record.getMessage()])
        == 1
    )


@pytest.mark.parametrize("first", ["few", "item"])
def test_a_table_that_the_databases_hold_does_not_answer_for_another(model: Document, tmp_path: Path, first: str) -> None:
    hps.write_sparse_model(tmp_path / "few.model", (KEYS[:1], vectors(KEYS[:1], 0)))  # 0.6 of one row is all of it
    names = sorted(["few", "item"], reverse=first == "item")
    two = model_of("shop", [tmp_path / f"{name}.model" for name in names], dict.fromkeys(names, DIM), **CACHED)
    with hps.HPS({**document_of(two), "volatile_db": {"type": "hash_map", "initial_cache_rate": 0.6}}) as server:
        FullDevice.broken = True
        fails(server.lookup, KEYS, "shop", "item")
