"""A process loads a table of a shared Redis, and at each of its requests another one comes, or it is killed."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hps.ground.progress import NoProgress
from hps.models.files import open_sparse_model
from hps.models.writer import write_sparse_model
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.nodes import RedisNodes
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S
from hps.types import TableSpec
from tests.tables.table_loads import load_table

pytestmark = pytest.mark.redis
TABLE = TableSpec("shop", "item", 8, 0.0, 1000)
TAG, DIM = TABLE.tag, TABLE.dim
KEYS = distinct_keys(60)


class Killed(BaseException):
    """What a request of a process raises that is no more."""


class Waiting(NoProgress):
    """Tells that a load waits for another process."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def advance(self, tag: str, rows: int) -> None:
        if not rows:
            self.waits.set()


class Requests:
    """Counts the requests of one database, and does something before one of them."""

    def __init__(self, database: RedisDatabase, number: int, do: Callable[[], object]) -> None:
        self.nodes, self._left, self._do = database._nodes, number, do
        self.reached = False

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self.reached = True
            self._do()


def killed() -> None:
    raise Killed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Requests]:
    monkeypatch.setattr("hps.models.loading.table_load._CLAIM_WAIT_S", 0.02)
    monkeypatch.setattr("hps.stores.redis.load_leases._POLL_S", 0.005)
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 30 * (8 + 4 * DIM))
    watched: list[Requests] = []
    run = RedisNodes.run

    def watched_run(self: RedisNodes, *arguments: object) -> None:
        for one in watched:
            if one.nodes is self and threading.current_thread() is threading.main_thread():
                one()
        run(self, *arguments)

    monkeypatch.setattr(RedisNodes, "run", watched_run)
    return watched


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    places = [str(tmp_path / f"{content}.model") for content in range(2)]
    for content, place in enumerate(places):
        write_sparse_model(place, (KEYS, vectors_of(KEYS, DIM, content)))
    return places


def load(database: RedisDatabase, files: str, progress: NoProgress | None = None) -> None:
    """Load as a deployment does: into a table that no other process uses with other rows."""
    assert database.clear_table(TAG, open_sparse_model(files, DIM).fingerprint)
    database.open_table(TAG, DIM)
    load_table(TABLE, files, [database], progress=progress)


def holds(database: RedisDatabase, content: int) -> None:
    out, found = fetched(database, TAG, KEYS, DIM)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(KEYS, DIM, content))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def anew(opened: Callable[..., RedisDatabase], client, files) -> Callable[[int | None], None]:
    """Empty Redis, and load what a process that is gone served before, if anything."""

    def empty(before: int | None) -> None:
        client.flushall()
        if before is not None:
            with closing(opened()) as earlier:
                load(earlier, files[before])

    return empty


@pytest.mark.parametrize("before", [None, 1])
@pytest.mark.parametrize("other", ["loads", "opens and closes"])
def test_another_process_may_come_at_any_request_of_a_load(
    opened: Callable[..., RedisDatabase], anew, files, watched, threads, monkeypatch, before: int | None, other: str
) -> None:
    progress, pause = Waiting(), time.sleep

    def look_again(seconds: float) -> None:  # until a table is dropped that is about to be opened
        progress.waits.set()
        pause(seconds)

    def come(coming: RedisDatabase) -> None:
        try:
            if other == "loads":
                load(coming, files[0], progress)
                holds(coming, 0)
            else:
                coming.open_table(TAG, DIM)
                coming.close()
        finally:
            progress.waits.set()

    def let_come(coming: RedisDatabase, comes: list[Future[None]]) -> None:
        comes.append(threads.submit(come, coming))
        assert progress.waits.wait(PATIENCE_S)

    monkeypatch.setattr("hps.stores.redis.users.time", SimpleNamespace(monotonic=time.monotonic, sleep=look_again))
    for number in count(1):
        progress.waits.clear()
        anew(before)
        with closing(opened()) as loading, closing(opened()) as coming:
            comes: list[Future[None]] = []
            watched[:] = [Requests(loading, number, partial(let_come, coming, comes))]
            load(loading, files[0])
            reached = watched.pop().reached
            for one in comes:
                one.result(PATIENCE_S)
            holds(loading, 0)
        if not reached:
            break
    assert number > 20


@pytest.mark.parametrize("before", [None, 0, 1])
def test_processes_that_start_after_a_kill_at_any_request_of_a_load_serve(
    opened: Callable[..., RedisDatabase], client, anew, files, watched, threads, monkeypatch, before: int | None
) -> None:
    for number in count(1):
        anew(before)
        dead = opened(lease_s=0.05)
        watched[:] = [Requests(dead, number, killed)]
        try:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr("hps.stores.redis.users._DROP_MS", 50)
                load(dead, files[0])
            break
        except Killed:
            watched.clear()
            with dead._users._renewing:
                dead._users._used.clear()  # it renews no entry any more
            client.delete(RedisLayout.of(TAG, DIM, 4).users)  # as after the time that it counts
        starting = [opened(), opened()]
        for done in [threads.submit(load, one, files[0]) for one in starting]:
            done.result(PATIENCE_S)
        for one in starting:
            holds(one, 0)
            one.close()
        dead.close()
    assert number > 10
