"""A model that is taken out of service, and put back, while lookups of it still run."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.tensors.segments import Segment
from hps.types import KeyArray
from tests.servers.running_service import document_of, model_of, wait_until

DIMS = {"user": 4, "item": 7}
KEYS = np.arange(20_000)
KINDS: dict[str, dict[str, Any]] = {
    "direct": {"gpucache": False},
    "cached": {"gpucacheper": 0.1},
    "static": {"embedding_cache_type": "static"},
}


class PausedSegment(Segment):
    """A segment whose keys come late: the lookup stops where it reads them, as one does whose thread gets no processor."""

    def __init__(self, table: int, keys: KeyArray, dim: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._keys = keys
        super().__init__(table, keys, np.zeros((keys.size, dim), np.float32), np.zeros(keys.size, np.bool_), keys.size)

    @property
    def keys(self) -> KeyArray:  # type: ignore[override]
        self.reached.set()
        assert self.go_on.wait(60)
        return self._keys

    @keys.setter
    def keys(self, keys: KeyArray) -> None: ...


def vectors_of(dim: int, version: int = 0) -> np.ndarray:
    return (KEYS[:, None] * 8 + np.arange(dim) + version / 2).astype(np.float32)


def write_models(directory: Path, version: int = 0) -> None:
    for table, dim in DIMS.items():
        hps.write_sparse_model(directory / f"{table}.model", (KEYS, vectors_of(dim, version)), overwrite=True)


@pytest.fixture(params=[*((kind, "hash_map") for kind in KINDS), ("direct", "rocks_db")], ids="-".join)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hps.HPS]:
    kind, host = request.param
    write_models(tmp_path)
    model = model_of(
        "ranker",
        [tmp_path / f"{table}.model" for table in DIMS],
        DIMS,
        default_value_for_each_table=[0.5, -2.0],
        max_batch_size=KEYS.size,
        hit_rate_threshold=1.1,
        **KINDS[kind],
    )
    document = document_of(model, persistent=tmp_path / "rocksdb")
    if host == "hash_map":
        del document["persistent_db"]
    with hps.HPS(document) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def paused(server: hps.HPS, pool: ThreadPoolExecutor) -> Iterator[tuple[PausedSegment, Future[None]]]:
    """A lookup of the second table that has begun and does not go on."""
    segment = PausedSegment(1, KEYS, DIMS["item"])
    running = pool.submit(server.lookup_segments, server.model("ranker"), [segment])
    assert segment.reached.wait(60)
    yield segment, running
    segment.go_on.set()


def check(segment: Segment, version: int = 0) -> None:
    assert segment.found.all(), f"{np.count_nonzero(~segment.found)} of {KEYS.size} keys that exist got the default vector"
    np.testing.assert_array_equal(segment.out, vectors_of(DIMS["item"], version))


def test_undeploy_lets_running_lookups_end(
    server: hps.HPS, pool: ThreadPoolExecutor, paused: tuple[PausedSegment, Future[None]]
) -> None:
    segment, running = paused
    deployment = server.model("ranker")
    tables = deployment.chain.databases[0]
    held = len(tables.tags())
    leaving = pool.submit(server.undeploy, "ranker")
    wait_until(lambda: server.models == (), "the model was out of service")
    with pytest.raises(hps.NotReadyError):  # of a caller that had found the model before it was undeployed
        wait_until(lambda: deployment.session(None).lookup([]), "new lookups were refused")
    segment.go_on.set()
    running.result(60)
    check(segment)
    leaving.result(60)
    assert held == len(DIMS)
    assert tables.kind != "hash_map" or tables.tags() == []


def test_a_lookup_that_does_not_end_keeps_its_table_and_the_model_its_name(
    server: hps.HPS, paused: tuple[PausedSegment, Future[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, running = paused
    monkeypatch.setattr("hps.versions.deployment.DRAIN_S", 0.05)
    model, deployment = server.config.models[0], server.model("ranker")
    server.undeploy("ranker")
    write_models(tmp_path, version=1)
    with pytest.raises(hps.NotReadyError, match="still run"):
        server.deploy(model)
    with pytest.raises((hps.NotReadyError, hps.InvalidInputError)):  # static without a persistent database takes none at all
        deployment.insert(1, KEYS[:1], np.ones((1, 7), np.float32))
    segment.go_on.set()
    running.result(60)
    check(segment)

    def deployed() -> bool:
        try:
            server.deploy(model)
        except hps.NotReadyError:
            return False
        return True

    wait_until(deployed, "the name was free")
    vectors, found = server.lookup(KEYS, "ranker", "item", return_found=True)
    assert found.all()
    np.testing.assert_array_equal(vectors, vectors_of(7, 1))
