"""Where keys belong, and how a lookup is put together from parts: any failure ends in the right vectors of one version."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.client.routing import PartAnswer, Router, joined, places_of
from hps.errors import InvalidInputError, NotReadyError, RemoteConnectionError, RemoteTimeoutError, UnknownVersionError

NAMES = ["http://a:8000", "http://b:8000", "http://c:8000"]
KEYS = np.arange(-50_000, 50_000)


def test_places_do_not_change_between_releases():
    keys = np.array([0, 1, 2, 3, -1, 2**63 - 1, -(2**63)])
    assert places_of(keys, NAMES).tolist() == [2, 0, 2, 0, 2, 1, 2]


def test_each_server_gets_its_share_and_a_new_one_takes_it_from_all():
    before, after = places_of(KEYS, NAMES[:2]), places_of(KEYS, NAMES)
    assert np.bincount(before) / KEYS.size == pytest.approx([1 / 2] * 2, abs=0.01)
    assert np.bincount(after) / KEYS.size == pytest.approx([1 / 3] * 3, abs=0.01)
    moved = before != after
    assert moved.mean() == pytest.approx(1 / 3, abs=0.01)
    assert (after[moved] == 2).all()
    assert np.bincount(before[moved]) / moved.sum() == pytest.approx([1 / 2] * 2, abs=0.02)


def test_keys_of_a_server_that_is_away_go_to_all_others():
    before, after = places_of(KEYS, NAMES), places_of(KEYS, NAMES, {1})
    assert (before == after)[before != 1].all()
    assert np.bincount(after[before == 1], minlength=3) / (before == 1).sum() == pytest.approx([1 / 2, 0, 1 / 2], abs=0.02)


def test_the_order_of_addresses_does_not_matter():
    forth, back = places_of(KEYS, NAMES), places_of(KEYS, NAMES[::-1])
    np.testing.assert_array_equal(forth, 2 - back)


class Servers:
    """Servers whose vectors are key and version, and which fail as they are told, once for each mark."""

    def __init__(self, versions, marks):
        self.versions, self.marks = list(versions), [list(one) for one in marks]
        self.asked = []

    def answer(self, place, keys):
        self.asked.append(place)
        mark = self.marks[place].pop(0) if self.marks[place] else ""
        if mark == "swap":  # a deployment reaches this server before it answers
            self.versions[place] = max(self.versions)
        errors = {
            "lost": RemoteConnectionError,
            "late": RemoteTimeoutError,
            "busy": NotReadyError,
            "old": UnknownVersionError,
            "wrong": InvalidInputError,
        }
        if mark in errors:
            return errors[mark](mark)
        version = self.versions[place]
        vectors = {table: np.stack([one, np.full(one.size, version)], 1).astype(np.float32) for table, one in keys.items()}
        return PartAnswer(str(version), vectors, {f"{table}.found": one % 2 == 0 for table, one in keys.items()})


def run(router, servers, keys):
    """Look up by a router; None if one server has to be asked for everything."""
    routed = router.route(keys, lambda part, whole: (part, whole))
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
    vectors, found = joined(keys, parts, lambda table, shape: np.full(shape, np.nan, np.float32))
    assert list(vectors) == list(keys)
    versions = set()
    for table, of_table in keys.items():
        assert vectors[table].shape == (of_table.size, 2)
        np.testing.assert_array_equal(vectors[table][:, 0], of_table)
        np.testing.assert_array_equal(found[f"{table}.found"], of_table % 2 == 0)
        versions |= set(vectors[table][:, 1].tolist())
    assert len(versions) <= 1


TABLES = st.dictionaries(st.sampled_from(["item", "user", "geo"]), st.lists(st.integers(0, 1000), max_size=30), min_size=1).map(
    lambda tables: {name: np.array(keys, np.int64) for name, keys in tables.items()}
)


@given(
    TABLES,
    st.lists(st.integers(1, 2), min_size=2, max_size=4),
    st.lists(st.lists(st.sampled_from(["", "lost", "late", "busy", "old", "swap"]), max_size=4), min_size=4, max_size=4),
)
def test_whatever_fails_the_answer_is_right_and_of_one_version(keys, versions, marks):
    router = Router([f"http://{place}" for place in range(len(versions))])
    servers = Servers(versions, marks)
    for _ in range(3):  # servers rest after the first lookup
        parts = run(router, servers, keys)
        if parts is not None:
            check(keys, parts)


def test_a_lost_connection_is_tried_once_more_and_then_rests():
    router, servers = Router(NAMES), Servers([1, 1, 1], [[], ["lost"], []])
    check({"item": KEYS[:1000]}, run(router, servers, {"item": KEYS[:1000]}))
    assert sorted(servers.asked) == [0, 1, 1, 2]
    servers = Servers([1, 1, 1], [[], ["lost"] * 9, []])
    check({"item": KEYS[:1000]}, run(router, servers, {"item": KEYS[:1000]}))
    assert sorted(servers.asked) == [0, 0, 1, 1, 2, 2]
    servers.asked.clear()
    check({"item": KEYS[:1000]}, run(router, servers, {"item": KEYS[:1000]}))
    assert sorted(servers.asked) == [0, 2]


def test_a_server_that_has_rested_is_asked_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hps.client.routing.time.monotonic", lambda: now[0])
    router, keys = Router(NAMES), {"item": KEYS[:1000]}
    for rest_s in (1, 2, 4):
        servers = Servers([1, 1, 1], [[], ["lost"] * 2, []])
        run(router, servers, keys)
        assert servers.asked.count(1) == 2
        now[0] += 0.7 * rest_s
        servers.asked.clear()
        run(router, servers, keys)
        assert servers.asked.count(1) == 0
        now[0] += 0.31 * rest_s
    servers = Servers([1, 1, 1], [[], [], []])
    run(router, servers, keys)
    assert sorted(servers.asked) == [0, 1, 2]


def test_one_lookup_tries_a_server_that_has_rested(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hps.client.routing.time.monotonic", lambda: now[0])
    router, keys = Router(NAMES), {"item": KEYS[:1000]}
    run(router, Servers([1, 1, 1], [[], ["late"], []]), keys)
    now[0] += 1
    trying = router.route(keys, lambda part, whole: part)
    assert [place for place, _ in next(trying)] == [0, 1, 2]
    servers = Servers([1, 1, 1], [[], [], []])
    run(router, servers, keys)
    assert servers.asked.count(1) == 0
    one, _, other = (PartAnswer("1", {"item": np.empty((1, 2), np.float32)}, {}) for _ in range(3))
    trying.send([one, RemoteTimeoutError("late"), other])
    now[0] += 1.4  # of 1.5 to 2
    run(router, servers, keys)
    assert servers.asked.count(1) == 0
    now[0] += 0.6
    run(router, servers, keys)
    run(router, servers, keys)
    assert servers.asked.count(1) == 2


def test_a_busy_server_does_not_rest():
    router, servers = Router(NAMES), Servers([1, 1, 1], [[], ["busy"], []])
    for _ in range(2):
        check({"item": KEYS[:1000]}, run(router, servers, {"item": KEYS[:1000]}))
    assert servers.asked.count(1) == 2


def test_tables_without_keys_are_answered_by_any_part_of_the_version():
    keys = {"bare": KEYS[:0], "item": KEYS[:1000], "none": KEYS[:0]}
    for versions, marks in (([1, 1, 1], ["lost", "lost"]), ([1, 2, 2], []), ([2, 1, 1], ["late"])):
        parts = run(Router(NAMES), Servers(versions, [marks, [], []]), keys)
        check(keys, parts)


def test_the_version_of_most_keys_answers_all_of_them():
    keys = {"item": KEYS[:3000]}
    servers = Servers([2, 1, 2], [[], [], []])
    parts = run(Router(NAMES), servers, keys)
    check(keys, parts)
    assert {answer.version for _, answer in parts} == {"2"}
    assert servers.asked.count(1) == 1


def test_servers_that_never_agree_are_asked_for_everything_one_by_one():
    class Restless(Servers):
        def answer(self, place, keys):
            self.versions[place] = len(self.asked) + 1
            return super().answer(place, keys)

    servers = Restless([1, 1, 1], [[], [], []])
    assert run(Router(NAMES), servers, {"item": KEYS[:1000]}) is None
    assert len(servers.asked) < 12


def test_a_refusal_of_the_request_is_raised():
    with pytest.raises(InvalidInputError):
        run(Router(NAMES), Servers([1, 1, 1], [["wrong"], [], []]), {"item": KEYS[:1000]})


def test_when_all_are_away_one_is_asked_for_everything():
    servers = Servers([1, 1, 1], [["busy"]] * 3)
    assert run(Router(NAMES), servers, {"item": KEYS[:1000]}) is None
    assert sorted(servers.asked) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1])
def test_keys_of_one_server_are_asked_there_alone(size):
    keys = {"item": KEYS[:size], "user": KEYS[:0]}
    servers = Servers([1, 1, 1], [[], [], []])
    parts = run(Router(NAMES), servers, keys)
    check(keys, parts)
    assert len(servers.asked) == 1
