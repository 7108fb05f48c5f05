"""Servers that share a Redis with nothing below: none takes another one's rows away while it deploys."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.ground.progress import NoProgress
from hps.stores.base import RowChanges
from hps.stores.redis.layout import tag_of
from hps.types import split_tag
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.redis
DIMS = {"user": 4, "item": 7}
KEYS = np.arange(2000)


def vectors_of(dim: int, content: int) -> np.ndarray:
    return (KEYS[:, None] * 16 + np.arange(dim) + content * 100_000).astype(np.float32)


def write_content(directory: Path, content: int) -> list[str]:
    places = [directory / f"{table}.model" for table in DIMS]
    for place, dim in zip(places, DIMS.values(), strict=True):
        hps.write_sparse_model(place, (KEYS, vectors_of(dim, content)), overwrite=True)
    return list(map(str, places))


def content_of(server: hps.HPS) -> int:
    """The content that answers for every key, which is one, or the test fails."""
    answer = server.lookup_tables(dict.fromkeys(DIMS, KEYS), "ranker")
    content = int(answer["user"][0, 0]) // 100_000
    for table, dim in DIMS.items():
        np.testing.assert_array_equal(answer[table], vectors_of(dim, content))
    return content


class AskingPeers(NoProgress):
    """Looks up in peers at each step of a load."""

    def __init__(self, peers: dict[hps.HPS, int]) -> None:
        self._expected = peers
        self.steps = 0
        self.start = self.advance = self.finish = self.ask

    def ask(self, *_: object) -> None:
        self.steps += 1
        for peer, content in self._expected.items():
            assert content_of(peer) == content


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture
def start(redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., hps.HPS]]:
    """Start servers over the Redis, each as another process would be; the files of their model have content 1."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 13)
    files = write_content(tmp_path, 1)
    with ExitStack() as servers:

        def start_server(changes: dict[str, Any] | None = None, **more: Any) -> hps.HPS:
            model = model_of("ranker", files, DIMS, max_batch_size=2000, checks=False, **(changes or {"gpucache": False}))
            volatile = {"type": "redis", "address": redis.address, "num_partitions": 2}
            return servers.enter_context(hps.HPS(document_of(model, volatile_db=volatile), **more))

        yield start_server


def stored_slots(redis: RedisServer) -> set[str]:
    """Slots of the tables with rows in Redis."""
    with redis.client() as client:
        tags = {tag for key in client.scan_iter("hps_et{*}v") if (tag := tag_of(key))}
    return {names[1] for tag in tags if (names := split_tag(tag))}


def test_peers_answer_all_the_while_that_each_in_turn_forces_a_deployment(
    start: Callable[..., hps.HPS], redis: RedisServer
) -> None:
    servers = [start() for _ in range(2)]
    for _ in range(2):
        for server in servers:
            peers = AskingPeers(dict.fromkeys(servers, 1))
            server.deploy("ranker", progress=peers, force=True)
            assert peers.steps > 10
            peers.ask()
    assert len(stored_slots(redis)) <= 2 * len(servers), "what each serves, and what it keeps"


def test_files_that_were_replaced_are_loaded_beside_those_that_a_peer_serves(
    start: Callable[..., hps.HPS], redis: RedisServer, tmp_path: Path
) -> None:
    """A server that is started again finds other files under the same version."""
    serving, restarted = start(), start()
    restarted.close()
    write_content(tmp_path, 5)
    peers = AskingPeers({serving: 1})
    restarted = start(progress=peers)
    assert peers.steps > 10
    assert (content_of(serving), content_of(restarted)) == (1, 5)
    serving.deploy("ranker")
    assert (content_of(serving), content_of(restarted)) == (5, 5)
    assert len({slot for slot in stored_slots(redis) if slot}) == 1, "both use the same rows"


def test_an_older_change_removes_the_row_from_the_caches_of_a_server_that_lags(start: Callable[..., hps.HPS]) -> None:
    """Another server has applied later changes, so Redis refuses this one; the caches still hold what was before both."""
    cached = {"gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0}
    ahead, behind = start(cached), start(cached)
    for server in (ahead, behind):
        server._chain.follow_log(server.model("ranker").tables[0])
    np.testing.assert_array_equal(behind.lookup([7, 8, 9], "ranker", "user"), vectors_of(4, 1)[7:10])

    def change(server: hps.HPS, keys: list[int], sequence: int) -> int:
        sequences, vectors = np.full(len(keys), sequence), np.full((len(keys), 4), sequence, np.float32)
        return server.model("ranker").apply(0, RowChanges(np.array(keys), vectors, sequences), {})

    assert change(ahead, [7], 20) == 1
    assert change(behind, [7, 8], 10) == 1
    expected = np.array([[20] * 4, [10] * 4, vectors_of(4, 1)[9]])
    np.testing.assert_array_equal(behind.lookup([7, 8, 9], "ranker", "user"), expected)
