"""A table whose rows age, on every combination of tiers. Times of a log of updates are the tests'."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import hps
from hps.models.manifest import VersionManifest
from hps.stores.base import RowChanges
from hps.testing.waiting import wait_until
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray
from tests.servers.running_service import document_of, model_of

DIM, DEFAULT, TTL_S = 4, -2.0, 100.0
FILED, ONLINE = np.arange(100), np.arange(1000, 1100)
TTL_US, GRACE_US = round(TTL_S * 1e6), 1_000_000

TIERS: dict[str, dict[str, Any]] = {
    "hash_map": {},
    "rocks_db": {"persistent": "rocks_db"},
    "rocks_db_alone": {"persistent": "rocks_db", "volatile_db": {"type": "disabled"}},
    "row_files": {"persistent": "row_files", "volatile_db": {"type": "disabled"}},
    "hash_map_above_row_files": {"persistent": "row_files"},
}


def now_us() -> int:
    return time.time_ns() // 1000


def vectors_of(keys: KeyArray, version: int = 0) -> FloatArray:
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(DIM) + 10_000 * version).astype(np.float32)


class Starts:
    """Starts parameter servers of a table with FILED rows, whose online rows age."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self._directory = directory
        self.opened = opened
        hps.write_sparse_model(directory / "a", (FILED, vectors_of(FILED)))

    def entry(self, ttl_s: float = TTL_S, **changes: Any) -> dict[str, Any]:
        settings = {"gpucacheper": 2.0, "default_value_for_each_table": [DEFAULT], "row_ttl_s": ttl_s} | changes
        return model_of("m", [self._directory / "a"], {"a": DIM}, **settings)

    def __call__(self, tiers: str = "hash_map", ttl_s: float = TTL_S, *, read_only: bool = False, **changes: Any) -> hps.HPS:
        options = dict(TIERS[tiers])
        if kind := options.pop("persistent", None):
            options["persistent_db"] = {"type": kind, "path": str(self._directory / kind), "read_only": read_only}
        return self.opened.enter_context(hps.HPS({**document_of(self.entry(ttl_s, **changes)), **options}))

    def files_were_written(self, at_us: int) -> None:
        (self._directory / "version.json").write_bytes(VersionManifest(written_at_us=at_us).encoded())


@contextmanager
def starting(directory: Path) -> Iterator[Starts]:
    with ExitStack() as opened:
        yield Starts(directory, opened)


def apply(server: hps.HPS, keys: KeyArray, written_us: IndexArray | int, version: int = 1) -> int:
    """Apply changes of a log that were written then."""
    keys, times = keys.copy(), np.broadcast_to(np.asarray(written_us, np.int64), keys.shape).copy()
    return server.model("m").apply(0, RowChanges(keys, vectors_of(keys, version), times), {})


def found(server: hps.HPS, keys: KeyArray) -> BoolArray:
    """Look keys up, compare their vectors with those of any version, and return which were found."""
    vectors, there = server.lookup(keys, "m", "a", return_found=True)
    assert (vectors[~there] == DEFAULT).all()
    np.testing.assert_array_equal((vectors[there] - vectors_of(keys[there])) % 10_000, 0)
    return there


def follow(server: hps.HPS, keys: KeyArray, written_us: IndexArray, until: Callable[[BoolArray], bool]) -> None:
    """Look keys up until an answer satisfies `until`; each must agree with the times at which the rows were written."""
    expires = np.asarray(written_us) + TTL_US

    def judged() -> bool:
        before = now_us()
        there = found(server, keys)
        after = now_us()
        assert there[after < expires].all(), "expired early"
        assert not there[before > expires + GRACE_US].any(), "answered too late"
        return until(there)

    wait_until(judged, "rows come and go")


def sample(server: hps.HPS, name: str) -> float | None:
    return server.metrics.registry.get_sample_value(f"hps_{name}_total", {"model": "m", "table": "a"})


def stored_keys(server: hps.HPS) -> list[list[int]]:
    """The keys in each database, ascending."""
    deployment = server.model("m")
    tags = ((database, database.stored(deployment.tables[0]).tag) for database in deployment.chain.databases)
    return [sorted(key for keys, _ in database.scan(tag, 1000) for key in keys.tolist()) for database, tag in tags]
