"""Where keys belong, and how a lookup is put together from parts: any failure ends in the right vectors of one version."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.client.routing import PartAnswer, Router, merge_parts, server_indices
from hps.errors import InvalidInputError, NotReadyError, RemoteConnectionError, RemoteTimeoutError, UnknownVersionError
from tests.fakes.clock import Clock

NAMES = ["http://a:8000", "http://b:8000", "http://c:8000"]
KEYS = np.arange(-50_000, 50_000)
ITEMS = {"item": KEYS[:1000]}
ERRORS = {"lost": RemoteConnectionError, "late": RemoteTimeoutError, "busy": NotReadyError, "old": UnknownVersionError}


def test_places_do_not_change_between_releases():
    keys = np.array([0, 1, 2, 3, -1, 2**63 - 1, -(2**63)])
    assert server_indices(keys, NAMES).tolist() == [2, 0, 2, 0, 2, 1, 2]


def shares(places, count=3):
    return pytest.approx(np.bincount(places, minlength=count) / places.size, abs=0.02)


def test_each_server_gets_its_share_and_a_new_one_takes_it_from_all():
    before, after = server_indices(KEYS, NAMES[:2]), server_indices(KEYS, NAMES)
    assert shares(before) == [1 / 2, 1 / 2, 0]
    assert shares(after) == [1 / 3] * 3
    moved = before != after
    assert moved.mean() == pytest.approx(1 / 3, abs=0.01)
    assert (after[moved] == 2).all()
    assert shares(before[moved]) == [1 / 2, 1 / 2, 0]
    np.testing.assert_array_equal(after, 2 - server_indices(KEYS, NAMES[::-1]), "the order of addresses does not matter")
    away = server_indices(KEYS, NAMES, {1})
    assert (after == away)[after != 1].all()
    assert shares(away[after == 1]) == [1 / 2, 0, 1 / 2], "keys of one that is away go to all others"


class Servers:
    """Servers whose vectors are key and version, and which fail as they are told, once for each mark."""

    def __init__(self, *marks, versions=(1, 1, 1)):
        self.versions, self.marks = list(versions), [list(mark) for mark in marks] or [[], [], []]
        self.asked = []

    def answer(self, place, keys):
        self.asked.append(place)
        mark = self.marks[place].pop(0) if self.marks[place] else ""
        if mark == "swap":  # a deployment reaches this server before it answers
            self.versions[place] = max(self.versions)
        if mark in ERRORS or mark == "wrong":
            return ERRORS.get(mark, InvalidInputError)(mark)
        version = self.versions[place]
        vectors = {table: np.stack([one, np.full(one.size, version)], 1).astype(np.float32) for table, one in keys.items()}
        return PartAnswer(str(version), vectors, {f"{table}.found": one % 2 == 0 for table, one in keys.items()})


def run(router, servers, keys):
    """Look up by a router; None if one server has to be asked for everything."""
    routed = router.route(keys, lambda part, rows: (part, rows is None))
    asked = next(routed)
    while True:
        outcomes = []
        assert len({place for place, _ in asked}) == len(asked)
        for place, (part, whole) in asked:
            if whole:
                assert {table: one.tolist() for table, one in part.items()} == {t: k.tolist() for t, k in keys.items()}
            outcomes.append(servers.answer(place, part))
        try:
            asked = routed.send(outcomes)
        except StopIteration as end:
            return end.value


def check(keys, parts):
    vectors, found = merge_parts(keys, parts, lambda table, shape: np.full(shape, np.nan, np.float32))
    assert list(vectors) == list(keys)
    versions = set()
    for table, of_table in keys.items():
        assert vectors[table].shape == (of_table.size, 2)
        np.testing.assert_array_equal(vectors[table][:, 0], of_table)
        np.testing.assert_array_equal(found[f"{table}.found"], of_table % 2 == 0)
        versions |= set(vectors[table][:, 1].tolist())
    assert len(versions) <= 1


def asked(router, *marks, keys=ITEMS, versions=(1, 1, 1)):
    """Who is asked for a lookup, which is answered rightly although servers fail."""
    servers = Servers(*marks, versions=versions)
    check(keys, run(router, servers, keys))
    return sorted(servers.asked)


TABLES = st.dictionaries(st.sampled_from(["item", "user", "geo"]), st.lists(st.integers(0, 1000), max_size=30), min_size=1).map(
    lambda tables: {name: np.array(keys, np.int64) for name, keys in tables.items()}
)


@given(
    TABLES,
    st.lists(st.integers(1, 2), min_size=2, max_size=4),
    st.lists(st.lists(st.sampled_from(["", "swap", *ERRORS]), max_size=4), min_size=4, max_size=4),
)
def test_whatever_fails_the_answer_is_right_and_of_one_version(keys, versions, marks):
    router = Router([f"http://{place}" for place in range(len(versions))])
    servers = Servers(*marks, versions=versions)
    for _ in range(3):  # servers rest after the first lookup
        parts = run(router, servers, keys)
        if parts is not None:
            check(keys, parts)


def test_a_lost_connection_is_tried_once_more_and_then_rests_and_a_busy_one_does_not():
    router = Router(NAMES)
    assert asked(router, [], ["lost"], []) == [0, 1, 1, 2]
    assert asked(router, [], ["busy"], []).count(1) == asked(router).count(1) == 1
    assert asked(router, [], ["lost"] * 9, []) == [0, 0, 1, 1, 2, 2]
    assert asked(router) == [0, 2]


@pytest.fixture
def now(monkeypatch):
    found = Clock(100.0)
    monkeypatch.setattr("hps.client.routing.time.monotonic", found)
    return found


def test_a_server_that_has_rested_is_asked_again(now):
    router = Router(NAMES)
    for rest_s in (1, 2, 4):
        assert asked(router, [], ["lost"] * 2, []).count(1) == 2
        now.now += 0.7 * rest_s
        assert asked(router).count(1) == 0
        now.now += 0.31 * rest_s
    assert asked(router) == [0, 1, 2]


def test_one_lookup_tries_a_server_that_has_rested(now):
    router = Router(NAMES)
    asked(router, [], ["late"], [])
    now.now += 1
    trying = router.route(ITEMS, lambda part, _rows: part)
    assert [place for place, _ in next(trying)] == [0, 1, 2]
    assert asked(router).count(1) == 0
    one, other = (PartAnswer("1", {"item": np.empty((1, 2), np.float32)}, {}) for _ in range(2))
    trying.send([one, RemoteTimeoutError("late"), other])
    now.now += 1.4  # of 1.5 to 2
    assert asked(router).count(1) == 0
    now.now += 0.6
    assert [asked(router).count(1) for _ in range(2)] == [1, 1]


def test_tables_without_keys_are_answered_by_any_part_of_the_version():
    keys = {"bare": KEYS[:0], "item": KEYS[:1000], "none": KEYS[:0]}
    for versions, marks in (([1, 1, 1], ["lost", "lost"]), ([1, 2, 2], []), ([2, 1, 1], ["late"])):
        asked(Router(NAMES), marks, [], [], keys=keys, versions=versions)
    for size in (0, 1):  # keys of one server are asked there alone
        assert len(asked(Router(NAMES), keys={"item": KEYS[:size], "user": KEYS[:0]})) == 1


def test_the_version_of_most_keys_answers_all_of_them():
    keys, servers = {"item": KEYS[:3000]}, Servers(versions=[2, 1, 2])
    parts = run(Router(NAMES), servers, keys)
    check(keys, parts)
    assert {answer.version for _, answer in parts} == {"2"}
    assert servers.asked.count(1) == 1


def test_servers_that_never_agree_or_are_all_away_are_asked_for_everything_one_by_one():
    class Restless(Servers):
        def answer(self, place, keys):
            self.versions[place] = len(self.asked) + 1
            return super().answer(place, keys)

    servers = Restless()
    assert run(Router(NAMES), servers, ITEMS) is None
    assert len(servers.asked) < 12
    servers = Servers(*[["busy"]] * 3)
    assert run(Router(NAMES), servers, ITEMS) is None
    assert sorted(servers.asked) == [0, 1, 2]
    with pytest.raises(InvalidInputError):  # no other server would take this request
        run(Router(NAMES), Servers(["wrong"], [], []), ITEMS)
