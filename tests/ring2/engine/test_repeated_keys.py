"""Model files in which keys stand twice: the later row counts on every tier, however much of the files a tier holds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.models.files import open_sparse_model
from hps.models.loading.repeats import Repeats, find_repeats
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM, ROWS = 4, 3000
Make = Callable[..., dict[str, Any]]
EXTREMES = [-(2**63), 2**63 - 1, 0, -1]


def rows_with_repeats() -> tuple[np.ndarray, np.ndarray]:
    """Rows whose vector is their number; 600 keys of the first third stand again in the last."""
    rng = np.random.default_rng(5)
    keys = rng.permutation(np.append(np.arange(1, ROWS - 3) * 1_000_003, EXTREMES))
    keys[-600:] = rng.permutation(keys[:1000])[:600]
    return keys, np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, 1)


KEYS, VECTORS = rows_with_repeats()
LAST = {int(key): row for row, key in enumerate(KEYS)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    hps.write_sparse_model(tmp_path / "item", (KEYS, VECTORS))
    return tmp_path / "item"


def check(server: hps.HPS, *, all_there: bool = True) -> None:
    for _ in range(2):  # from below, and then from what that left in the tiers above
        asked = np.fromiter(LAST, np.int64)
        vectors, found = server.lookup(asked, "shop", "item", return_found=True)
        rows = np.array([LAST[int(key)] for key in asked], np.float32)
        wrong = found & (vectors[:, 0] != rows)
        assert not wrong.any(), f"{np.count_nonzero(wrong)} of {asked.size} keys got the vector of an earlier row"
        assert found.all() or not all_there
        server.drain()


VOLATILE: dict[str, dict[str, Any]] = {
    "whole": {"type": "hash_map"},
    "share": {"type": "hash_map", "initial_cache_rate": 0.4},
    "margin": {"type": "hash_map", "num_partitions": 4, "overflow_margin": 300},
    "disabled": {"type": "disabled"},
    "redis": {"type": "redis_cluster"},
    "redis share": {"type": "redis_cluster", "initial_cache_rate": 0.4},
}
CACHES: dict[str, dict[str, Any]] = {
    "direct": {"gpucache": False},
    "in part": {"gpucacheper": 0.3, "cache_refresh_percentage_per_iteration": 0.2},
    "whole cache": {"gpucacheper": 1.0},
    "static": {"embedding_cache_type": "static"},
}


@pytest.fixture
def document(source: Path, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as servers:

        def make(volatile: str, cache: str, persistent: bool = True) -> dict[str, Any]:
            model = model_of("shop", [source], {"item": DIM}, max_batch_size=ROWS, hit_rate_threshold=1.1, **CACHES[cache])
            document = document_of(model, persistent=tmp_path / "rocksdb" if persistent else None)
            document["volatile_db"] = dict(VOLATILE[volatile])
            if volatile.startswith("redis"):
                document["volatile_db"]["address"] = servers.enter_context(RedisServer(tmp_path / "redis")).address
            return document

        yield make


@pytest.mark.parametrize(
    ("volatile", "cache"),
    [
        *[("whole", "direct"), ("whole", "in part"), ("share", "static"), ("margin", "whole cache"), ("disabled", "in part")],
        pytest.param("redis", "whole cache", marks=pytest.mark.redis),
        pytest.param("redis share", "direct", marks=pytest.mark.redis),
    ],
)
def test_the_later_row_counts_on_every_tier(document: Make, volatile: str, cache: str) -> None:
    configuration = document(volatile, cache)
    for _ in range(2):  # loaded, and then found whole
        with hps.HPS(configuration) as server:
            check(server)


@pytest.mark.parametrize(
    ("volatile", "cache", "refused"),
    [
        *[("whole", "in part", False), ("share", "static", False), ("disabled", "whole cache", False)],
        *[("share", "direct", True), ("margin", "whole cache", True), ("disabled", "in part", True)],
    ],
)
def test_without_a_database_that_has_the_later_rows_such_files_are_refused(
    document: Make, volatile: str, cache: str, refused: bool
) -> None:
    if not refused:
        with hps.HPS(document(volatile, cache, persistent=False)) as server:
            check(server, all_there=volatile == "whole" or cache == "static")
        return
    with hps.HPS(document(volatile, cache, persistent=False), deploy_models=False) as server:
        with pytest.raises(hps.ModelFileError, match=r"\d+ rows have keys of earlier rows.*key -?\d+\. The later"):
            server.deploy(server.config.models[0])
        assert server.models == ()


@pytest.mark.parametrize("rows", [1, 999, 2400, 2401, ROWS - 1])
def test_repeats_are_counted_and_the_first_is_named(source: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 8 * 70)
    again = [row for row in range(rows, ROWS) if KEYS[row] in KEYS[:rows]]
    wanted = Repeats(len(again), int(KEYS[again[0]]), again[0]) if again else None
    assert find_repeats(open_sparse_model(source, DIM), rows) == wanted
    hps.write_sparse_model(
        source, (np.append(np.arange(ROWS) * 7, EXTREMES[:2]), np.zeros((ROWS + 2, DIM), np.float32)), overwrite=True
    )
    assert find_repeats(open_sparse_model(source, DIM), rows) is None
