"""What is done about a volatile database that is away or lacks rows, decided with databases on dicts."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.engine.chain import DatabaseChain
from hps.errors import DatabaseError, ModelFileError, NotReadyError
from hps.models.loading.table_load import LoadTargets
from hps.statistics.metrics import Metrics
from hps.stores.base import Database
from hps.stores.unavailable import UnavailableDatabase
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from hps.versions import volatile_tier
from hps.versions.volatile_tier import VolatileTier
from tests.fakes.memory_database import PersistentMemoryDatabase
from tests.fakes.shared_memory_database import SharedMemoryDatabase

TABLE = TableSpec("model", "table", 4, 0.5, 1000)
OTHER = TableSpec("model", "other", 4, 0.5, 1000)
KEYS = np.arange(100)


def vectors_of(keys: np.ndarray, version: float = 0) -> np.ndarray:
    return keys[:, None].astype(np.float32) + np.arange(4, dtype=np.float32) / 8 + version * 1000


class Tier:
    """A volatile tier over a shared database, with a persistent one that holds all rows below, and a model in service."""

    def __init__(self, *, away: bool = False, below: bool = True, loads: bool = True, rate: float = 1.0) -> None:
        self.shared, self.persistent = SharedMemoryDatabase(), PersistentMemoryDatabase() if below else None
        first: Database = UnavailableDatabase("redis", None, "refused") if away else self.shared
        self.chain = DatabaseChain(first, self.persistent, metrics=Metrics(), away="refused" if away else "")
        self.chain.open_table(TABLE)
        self.opens: Callable[[], Database] = lambda: self.shared
        self.loaded: list[int] = []
        for database in (self.persistent, None if away else self.shared):
            if database is not None:
                database.insert(TABLE.tag, KEYS, vectors_of(KEYS))
        config = SimpleNamespace(model="model")
        self.deployment: Any = SimpleNamespace(
            aging=None, config=config, tables=(TABLE,), rows=(100,), fingerprints=("f",), chain=self.chain, log_starts=(None,)
        )
        self.live: Any = SimpleNamespace(all=lambda: [self.deployment], kept=lambda name: [])
        load = lambda: tuple(self.chain.databases) if loads else ()  # noqa: E731
        self.tier = VolatileTier(
            self.chain,
            self.live,
            lambda: LoadTargets(load(), initial_cache_rate=rate),
            lambda: self.opens(),
            lambda deployment, index: self.loaded.append(index),
        )

    def fetch(self) -> np.ndarray:
        out, found = np.zeros((KEYS.size, 4), np.float32), np.zeros(KEYS.size, np.bool_)
        self.chain.fetch(TABLE, KEYS, out, found)
        assert found.all()
        return out

    def hits(self) -> tuple[int, int]:
        """How many keys each database has answered."""
        return tuple(self.chain.metrics.table("model", "table").hits[1:])  # type: ignore[return-value]


@pytest.fixture
def make() -> Iterator[Callable[..., Tier]]:
    made: list[Tier] = []

    def one(**options: Any) -> Tier:
        made.append(Tier(**options))
        return made[-1]

    yield one
    for tier in made:
        tier.tier.close()
        tier.chain.close()


def refuse() -> Database:
    raise DatabaseError("refused again")


def test_a_database_that_is_away_is_taken_in_when_it_can_be_opened(make: Callable[..., Tier]) -> None:
    one = make(away=True)
    one.opens = refuse
    with pytest.raises(DatabaseError):
        one.tier.poll()
    assert one.tier.degraded == ["redis is away: refused again; it is tried again every 2 s"]
    assert one.chain.databases == [one.persistent]
    one.opens = lambda: one.shared
    one.shared.lacking.add(TABLE.tag)
    one.tier.poll()
    assert one.tier.degraded == []
    assert one.chain.databases == [one.shared, one.persistent]
    assert one.shared.above == [(TABLE.tag, one.persistent)]
    assert (one.shared.size(TABLE.tag), one.shared.ended) == (100, ["complete"])
    one.fetch()
    assert one.hits() == (100, 0)
    one.tier.poll()
    assert len(one.shared.above) == 1, "the token of the database below is renewed once"


def test_a_table_that_lacks_rows_is_left_out_and_filled_in_pieces(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_tier, "_PIECE_ROWS", 30)
    one = make()
    for _ in range(2):
        one.shared.lose(TABLE.tag)
        one.shared.claimed = True
        one.tier.poll()
        assert one.tier.degraded == [
            f"table {TABLE.tag} in the volatile database: it lost its rows, and another process refills it"
        ]
        before = one.hits()
        np.testing.assert_array_equal(one.fetch(), vectors_of(KEYS))
        assert one.hits() == (before[0], before[1] + 100)
        one.shared.claimed = False
        one.tier.poll()
        assert one.shared.copied == [30, 30, 30, 10]
        assert one.tier.degraded == []
        one.fetch()
        assert one.hits() == (before[0] + 100, before[1] + 100)
        one.shared.copied.clear()


def test_what_is_filled_is_the_share_of_the_first_load(make: Callable[..., Tier]) -> None:
    one = make(rate=0.25)
    one.shared.lose(TABLE.tag)
    one.tier.poll()
    assert one.shared.size(TABLE.tag) == 25


def test_a_table_that_others_have_modified_is_used_as_it_is(make: Callable[..., Tier]) -> None:
    one = make()
    one.shared.lose(TABLE.tag)
    one.shared.refuses = True
    one.tier.poll()
    assert (one.shared.ended, one.tier.degraded) == (["refused"], [])


def test_a_database_that_keeps_its_rows_is_not_filled(make: Callable[..., Tier]) -> None:
    one = make(loads=False)
    one.shared.lose(TABLE.tag)
    one.tier.poll()
    assert (one.shared.ended, one.tier.degraded) == ([], [])


def test_rows_that_are_modified_after_the_scan_began_are_copied_as_they_are_now(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of a memory database is of the moment in which it began; its pieces are read later."""
    monkeypatch.setattr(volatile_tier, "_PIECE_ROWS", 30)
    one = make()
    one.shared.lose(TABLE.tag)
    pause = volatile_tier.Pace.rest

    def rest(self: Any) -> None:
        pause(self)
        if len(one.shared.copied) == 1:
            one.chain.insert(TABLE, KEYS[50:51], vectors_of(KEYS[50:51], 1), lambda written: None)
            one.chain.delete(TABLE, KEYS[60:61], lambda written: None)

    monkeypatch.setattr(volatile_tier.Pace, "rest", rest)
    one.tier.poll()
    expected = {key: vectors_of(KEYS[key : key + 1], key == 50)[0].tolist() for key in KEYS.tolist() if key != 60}
    scanned = one.shared.scan(TABLE.tag, 1000)
    assert {int(key): row.tolist() for keys, rows in scanned for key, row in zip(keys, rows, strict=True)} == expected


def test_a_copy_that_fails_is_tried_again_and_the_table_stays_left_out(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    one.shared.lose(TABLE.tag)
    with monkeypatch.context() as patch:
        patch.setattr(one.shared, "copy_rows", lambda *arguments: refuse())
        with pytest.raises(DatabaseError):
            one.tier.poll()
    assert (one.shared.ended, one.chain.left_out) == (["interrupted"], [TABLE.tag])
    assert one.tier.degraded
    one.tier.poll()
    assert (one.shared.ended[1:], one.chain.left_out, one.tier.degraded) == (["complete"], [], [])


def test_the_end_of_the_process_ends_a_copy(make: Callable[..., Tier]) -> None:
    one = make()
    one.shared.lose(TABLE.tag)
    one.tier.close()
    with pytest.raises(NotReadyError):
        one.tier.poll()
    assert one.shared.ended == ["interrupted"]


def test_with_nothing_below_the_files_are_loaded_again_and_the_table_is_not_opened_before(make: Callable[..., Tier]) -> None:
    one = make(below=False)
    one.tier.poll()
    assert one.loaded == []
    one.shared.lose(TABLE.tag)
    one.tier.poll()
    assert (one.loaded, one.shared.ended) == ([0], [])
    one.deployment.log_starts = ({},)
    one.tier.poll()
    assert one.loaded == [0]
    (text,) = one.tier.degraded
    assert "deploy the model with force" in text


def test_a_database_that_stops_answering_is_said_until_it_answers(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    answers = one.shared.lacks_rows
    monkeypatch.setattr(one.shared, "lacks_rows", lambda tag: refuse())
    with pytest.raises(DatabaseError):
        one.tier.poll()
    one.tier.fill(one.deployment)  # what a refresh asks for goes on without it
    assert one.tier.degraded == ["shared_memory fails: refused again; it is tried again every 2 s"]
    monkeypatch.setattr(one.shared, "lacks_rows", answers)
    one.tier.poll()
    assert one.tier.degraded == []


def test_a_database_that_failed_a_deployment_is_taken_in_with_the_tables_that_came_meanwhile(make: Callable[..., Tier]) -> None:
    one = make()
    assert one.chain.put_away("full")
    assert not one.chain.put_away("full"), "it is away already"
    one.chain.open_table(OTHER)
    assert one.persistent is not None
    one.persistent.insert(OTHER.tag, KEYS, vectors_of(KEYS))
    assert one.shared.tags() == [TABLE.tag]
    one.deployment.tables, one.deployment.rows, one.deployment.fingerprints = (TABLE, OTHER), (100, 100), ("f", "g")
    one.shared.lacking.add(OTHER.tag)
    one.tier.poll()
    assert (one.chain.away, one.tier.degraded) == ("", [])
    assert one.shared.above == [(OTHER.tag, one.persistent)], "the other table was open all the while"
    assert one.shared.size(OTHER.tag) == 100


def test_many_tables_are_looked_at_in_turn_and_all_once_one_lacks_rows(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_tier, "_TABLES_A_POLL", 2)
    one = make()
    tables = [TABLE, *(TableSpec("model", f"t{number}", 4, 0.0, 1) for number in range(4))]
    for table in tables[1:]:
        one.chain.open_table(table)
    one.deployment.tables, one.deployment.rows, one.deployment.fingerprints = tuple(tables), (100,) * 5, ("f",) * 5
    seen: list[str] = []
    lacks = one.shared.lacks_rows
    monkeypatch.setattr(one.shared, "lacks_rows", lambda tag: (seen.append(tag), lacks(tag))[1])
    for _ in range(5):
        one.tier.poll()
    assert sorted(seen) == sorted(2 * [table.tag for table in tables])
    one.shared.lose(tables[0].tag)
    one.shared.claimed = True
    for _ in range(3):
        one.tier.poll()
    seen.clear()
    one.tier.poll()
    assert sorted(seen) == sorted(table.tag for table in tables)


def test_a_table_whose_files_cannot_be_loaded_again_does_not_keep_others_from_it(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(below=False)
    one.chain.open_table(OTHER)
    one.deployment.tables, one.deployment.rows, one.deployment.fingerprints = (TABLE, OTHER), (100, 100), ("f", "g")
    one.deployment.log_starts = (None, None)

    def load(deployment: Any, index: int) -> None:
        one.loaded.append(index)
        if index == 0:
            raise ModelFileError("it is gone")

    tier = VolatileTier(one.chain, one.live, lambda: LoadTargets((one.shared,)), refuse, load)
    for table in (TABLE, OTHER):
        one.shared.lose(table.tag)
    tier.poll()
    assert one.loaded == [0, 1]
    (text,) = tier.degraded
    assert text.endswith("it lost its rows, and filling it failed: it is gone")
    one.shared.lacking.clear()
    tier.poll()
    assert tier.degraded == []


def test_a_table_that_is_dropped_while_it_is_filled_ends_its_copy(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_tier, "_PIECE_ROWS", 30)
    one = make()
    one.shared.lose(TABLE.tag)
    pause = volatile_tier.Pace.rest

    def rest(self: Any) -> None:
        pause(self)
        if one.shared.copied:
            one.chain.release_table(TABLE, everywhere=True)
            one.live.all = list

    monkeypatch.setattr(volatile_tier.Pace, "rest", rest)
    one.tier.poll()
    assert (one.shared.copied, one.shared.ended, one.tier.degraded) == ([30], ["interrupted"], [])


def test_a_copy_rests_beside_lookups_and_goes_on_at_once_without_or_when_it_is_asked_for(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_tier, "_PIECE_ROWS", 20)
    one = make()
    one.shared.lose(TABLE.tag)
    shares: list[float] = []
    asking = threading.Thread(target=one.tier.fill, args=(one.deployment,))

    def rest(self: Any) -> None:
        shares.append(self.share)
        if len(shares) < 5:
            one.chain.metrics.table("model", "table").keys += 1  # a lookup
        if len(shares) == 3:
            asking.start()
            wait_until(lambda: one.tier._urgent, "a refresh asks for it")

    monkeypatch.setattr(volatile_tier.Pace, "rest", rest)
    one.tier.poll()
    asking.join(PATIENCE_S)
    assert shares == [1.0, volatile_tier._SHARE, volatile_tier._SHARE, 1.0, 1.0, 1.0]
    assert one.shared.size(TABLE.tag) == 100
