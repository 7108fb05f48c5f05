"""Lookups over servers that hold shares of the tables: whatever fails, an answer is right, of one version and of one layout."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.client.layouts import layouts_of
from hps.client.routing import Declared, PartAnswer, Router, ShareCalls, Written, merge_parts
from hps.errors import (
    HPSError,
    InvalidInputError,
    MisplacedKeysError,
    MissingShareError,
    NotReadyError,
    PartialWriteError,
    RemoteConnectionError,
    RemoteTimeoutError,
    UnknownModelError,
    UnknownVersionError,
)
from hps.ground.shares import TableShare, share_indices
from tests.fakes.clock import Clock

ERRORS = {"lost": RemoteConnectionError, "late": RemoteTimeoutError, "busy": NotReadyError, "gone": UnknownModelError}
KEYS = {"item": np.arange(500), "user": np.arange(-40, 0)}


def shares_of(*texts: str) -> list[TableShare | None]:
    return [TableShare.parse(text) if text else None for text in texts]


@pytest.mark.parametrize(
    ("declared", "layouts"),
    [
        ([], []),
        (["0/1"], [(1, ((0,),))]),
        (["0/2", "1/2"], [(2, ((0,), (1,)))]),
        (["1/2", "0/2", "1/2"], [(2, ((1,), (0, 2)))]),
        (["0/2", "1/2", "0/3", "1/3"], [(2, ((0,), (1,))), (3, ((2,), (3,), ()))]),
        (["0/2", "1/2", "0/3", "1/3", "2/3"], [(3, ((2,), (3,), (4,))), (2, ((0,), (1,)))]),
        (["0/1", "1/2"], [(1, ((0,),)), (2, ((), (1,)))]),
        (["0/2", "0/3"], [(3, ((1,), (), ())), (2, ((0,), ()))]),
    ],
)
def test_complete_layouts_come_first_then_those_with_most_shares(declared, layouts):
    assert [tuple(layout) for layout in layouts_of(dict(enumerate(shares_of(*declared))))] == layouts


class Cluster:
    """Servers with a share each, which answer keys of it by their vectors, and fail as they are told, once for each mark."""

    def __init__(self, *shares: str, versions=(), marks=()):
        self.shares = shares_of(*shares)
        self.versions = [{version} if isinstance(version, int) else set(version) for version in versions or [1] * len(shares)]
        self.marks = [list(mark) for mark in marks] + [[] for _ in shares]
        self.down: set[int] = set()
        self.asked: list[int] = []
        self.declared: list[int] = []

    def declare(self, server):
        self.declared.append(server)
        return RemoteConnectionError("down") if server in self.down else Declared(self.shares[server])

    def answer(self, server, keys, version):
        self.asked.append(server)
        if server in self.down:
            return RemoteConnectionError("down")
        mark = self.marks[server].pop(0) if self.marks[server] else ""
        if mark in ERRORS or mark == "wrong":
            return ERRORS.get(mark, InvalidInputError)(mark)
        share = self.shares[server]
        if share is not None and not all(share.owns(of_table).all() for of_table in keys.values()):
            return MisplacedKeysError("keys of another share")
        if version and version not in self.versions[server]:
            return UnknownVersionError(str(version))
        version = version or max(self.versions[server])
        vectors = {
            table: np.stack([of_table, np.full(of_table.size, version), np.full(of_table.size, share.of if share else 1)], 1)
            for table, of_table in keys.items()
        }
        found = {f"{table}.found": of_table % 2 == 0 for table, of_table in keys.items()}
        return PartAnswer(str(version), {table: each.astype(np.float32) for table, each in vectors.items()}, found)

    def look_up(self, router, keys=KEYS):
        """Return version and number of shares of the layout that answered; check the vectors."""
        calls = ShareCalls("m", lambda: None, lambda part, _rows, version: (part, int(version)))
        routed = router.route(keys, lambda part, _rows: (part, 0), calls)
        try:
            wanted = next(routed)
            while True:
                assert len({server for server, _ in wanted}) == len(wanted)
                wanted = routed.send(
                    [self.declare(server) if call is None else self.answer(server, *call) for server, call in wanted]
                )
        except StopIteration as end:
            parts = end.value
        if parts is None:
            return None
        vectors, found = merge_parts(keys, parts, lambda table, shape: np.full(shape, np.nan, np.float32))
        kinds = set()
        for table, of_table in keys.items():
            np.testing.assert_array_equal(vectors[table][:, 0], of_table)
            np.testing.assert_array_equal(found[f"{table}.found"], of_table % 2 == 0)
            kinds |= {tuple(row) for row in vectors[table][:, 1:].tolist()}
        assert len(kinds) <= 1
        return kinds.pop() if kinds else (0, 0)


def router_of(cluster: Cluster) -> Router:
    return Router([f"http://{server}" for server in range(len(cluster.shares))])


@pytest.fixture
def now(monkeypatch):
    clock = Clock(100.0)
    monkeypatch.setattr("hps.client.routing.time.monotonic", clock)
    return clock


def keys_of(share: str, count: int = 50) -> dict[str, np.ndarray]:
    keys = np.arange(10_000)
    return {"item": keys[TableShare.parse(share).owns(keys)][:count]}


@pytest.mark.parametrize(
    ("shares", "of"),
    [
        (["", ""], 1),
        (["0/1", "0/1"], 1),
        (["0/2", "1/2"], 2),
        (["1/3", "0/3", "2/3", "0/3"], 3),
        (["0/2", "1/2", "0/3", "2/3"], 2),
        (["0/2", "1/2", "0/3", "1/3", "2/3"], 3),
        (["", "0/2"], 1),
        (["", "0/2", "1/2"], 2),
    ],
)
def test_the_complete_layout_with_most_shares_answers(shares, of):
    cluster = Cluster(*shares)
    router = router_of(cluster)
    assert cluster.look_up(router) == (1, of)
    assert cluster.look_up(router, {"item": KEYS["item"][:0]}) is not None
    assert sorted(cluster.declared) == list(range(len(shares)))  # asked once


@pytest.mark.parametrize(
    ("shares", "missing", "text"),
    [
        (["0/2", "0/2"], (1,), "of 2 shares none has 1"),
        (["1/4", "2/4"], (0, 3), "of 4 shares none has 0, 3"),
        (["0/2", "1/3", "2/3"], (0,), "of 3 shares none has 0; of 2 shares none has 1"),
    ],
)
def test_an_incomplete_layout_is_refused_with_its_missing_shares(shares, missing, text):
    cluster = Cluster(*shares)
    with pytest.raises(MissingShareError, match=text) as refused:
        cluster.look_up(router_of(cluster))
    assert refused.value.shares == missing
    assert not cluster.asked


def test_replicas_of_a_share_split_its_keys_by_their_hash():
    class Counting(Cluster):
        def answer(self, server, keys, version):
            sent[server] += keys["item"].size
            return super().answer(server, keys, version)

    cluster, keys, sent = Counting("0/2", "1/2", "0/2", "1/2"), np.arange(2000), Counter()
    router = router_of(cluster)
    assert cluster.look_up(router, {"item": keys}) == (1, 2)
    of_shares = np.bincount(share_indices(keys, 2))
    assert (sent[0] + sent[2], sent[1] + sent[3]) == tuple(of_shares)
    assert min(sent.values()) > 0.4 * of_shares.min()
    before = dict(sent)
    cluster.look_up(router, {"item": keys})
    assert {server: 2 * count for server, count in before.items()} == sent, "a key has one server"


def test_a_replica_that_is_down_costs_a_retry_and_a_share_without_replicas_only_its_keys(now):
    cluster = Cluster("0/3", "0/3", "1/3", "1/3", "2/3", "2/3")
    router = router_of(cluster)
    cluster.look_up(router)
    cluster.down = {0}
    assert cluster.look_up(router) == (1, 3)
    cluster.down = {0, 1}
    with pytest.raises(MissingShareError, match="no server of share 0/3 answers") as refused:
        cluster.look_up(router)
    assert refused.value.shares == (0,)
    for share in ("1/3", "2/3"):
        assert cluster.look_up(router, keys_of(share)) == (1, 3)
    cluster.asked.clear()
    cluster.down = {0}  # the other one is back: it is tried although it rests, since nobody else has its keys
    assert cluster.look_up(router, keys_of("0/3")) == (1, 3)
    now.now += 100
    cluster.down = set()
    assert cluster.look_up(router) == (1, 3)


@pytest.mark.parametrize("mark", ERRORS)
def test_each_failure_of_a_replica_is_answered_by_another_of_its_share(mark):
    cluster = Cluster("0/2", "1/2", "0/2", "1/2", marks=[[], [mark] * 3])
    router = router_of(cluster)
    assert cluster.look_up(router) == (1, 2)
    assert cluster.asked.count(1) == (2 if mark == "lost" else 1)


def test_an_error_that_no_other_server_would_cure_is_raised():
    cluster = Cluster("0/2", "1/2", "1/2", marks=[["wrong"]])
    with pytest.raises(InvalidInputError):
        cluster.look_up(router_of(cluster))


def test_a_server_that_was_down_at_first_is_asked_for_its_share_later(now):
    cluster = Cluster("0/2", "1/2", "1/2")
    router = router_of(cluster)
    cluster.down = {1, 2}
    assert cluster.look_up(router, keys_of("0/2")) == (1, 2), "it may hold the missing share"
    with pytest.raises(MissingShareError, match="share 1/2"):
        cluster.look_up(router)
    cluster.down = set()
    now.now += 2
    assert cluster.look_up(router) == (1, 2)


def test_growing_uses_the_new_layout_when_it_is_complete_and_outlives_the_old_one(now):
    cluster = Cluster("0/2", "1/2", "0/3", "1/3", "2/3")
    router = router_of(cluster)
    cluster.down = {2, 3, 4}
    for down, of in (({2, 3, 4}, 2), ({3, 4}, 2), ({4}, 2), (set(), 3), ({0, 1}, 3)):
        cluster.down = down
        for _ in range(3):
            assert cluster.look_up(router) == (1, of)
            now.now += 40


def test_the_new_layout_is_found_at_once_if_the_old_one_leaves_first(now):
    cluster = Cluster("0/2", "1/2", "0/3", "1/3", "2/3")
    router = router_of(cluster)
    cluster.down = {2, 3, 4}
    assert cluster.look_up(router) == (1, 2)
    now.now += 1  # they do not rest any more, and would not be asked again yet
    cluster.down = {0, 1}
    assert cluster.look_up(router) == (1, 3)


@pytest.mark.parametrize("before", [["", "", ""], ["0/2", "1/2", "1/2"]])
def test_servers_that_come_back_with_other_shares_are_found_by_their_refusal(before):
    cluster = Cluster(*before)
    router = router_of(cluster)
    cluster.look_up(router)
    for shares in (["0/3", "1/3", "2/3"], before, ["2/3", "1/3", "0/3"]):
        cluster.shares = shares_of(*shares)
        assert cluster.look_up(router) is not None


def test_one_version_is_chosen_that_all_shares_serve():
    cluster = Cluster("0/2", "1/2", versions=[{1, 2}, {1}])
    router = router_of(cluster)
    assert cluster.look_up(router) == (1, 2), "by its number, since one share serves nothing newer"
    cluster.versions = [{2}, {1, 2}]
    assert cluster.look_up(router) == (2, 2)
    cluster.versions = [{2}, {1}]
    with pytest.raises(NotReadyError, match="its shares serve different versions, got 1, 2"):
        cluster.look_up(router)


def test_a_replica_with_the_version_of_the_other_shares_answers():
    cluster = Cluster("0/2", "0/2", "1/2", versions=[2, 1, 1])
    assert cluster.look_up(router_of(cluster)) == (1, 2)


LAYOUT = st.integers(1, 4).flatmap(
    lambda of: st.lists(st.integers(0, of - 1), min_size=1, max_size=5).map(lambda found: [f"{index}/{of}" for index in found])
)


@given(
    st.data(),
    st.lists(LAYOUT, min_size=1, max_size=2).map(lambda parts: [share for part in parts for share in part]),
    st.dictionaries(st.sampled_from(["item", "user"]), st.lists(st.integers(-(2**23), 2**23), max_size=20), min_size=1).map(
        lambda tables: {name: np.array(keys, np.int64) for name, keys in tables.items()}
    ),
)
def test_an_answer_is_that_of_a_dict_or_a_typed_error(data, shares, keys):
    marks = data.draw(st.lists(st.lists(st.sampled_from(["", *ERRORS]), max_size=3), max_size=len(shares)))
    versions = data.draw(st.lists(st.sets(st.integers(1, 2), min_size=1), min_size=len(shares), max_size=len(shares)))
    cluster = Cluster(*shares, versions=versions, marks=marks)
    router = router_of(cluster)
    for _ in range(3):
        cluster.down = data.draw(st.sets(st.integers(0, len(shares) - 1)))
        with suppress(NotReadyError, UnknownModelError):  # no other error
            cluster.look_up(router, keys)  # checks the vectors
    cluster.down, cluster.marks = set(), [[] for _ in shares]
    best = layouts_of(dict(enumerate(cluster.shares)))[0]
    fresh = router_of(cluster)
    if best.missing:
        with pytest.raises(MissingShareError):
            cluster.look_up(fresh, keys)
    elif len(set(map(frozenset, versions))) == 1:
        assert cluster.look_up(fresh, keys) in ((max(versions[0]), best.of), (0, 0))


class Writing(Cluster):
    """Servers that keep the keys that they wrote."""

    def __init__(self, *shares, **more):
        super().__init__(*shares, **more)
        self.written: list[list[int]] = [[] for _ in shares]

    def store(self, server, keys):
        if server in self.down:
            return RemoteConnectionError("down")
        mark = self.marks[server].pop(0) if self.marks[server] else ""
        if mark in ERRORS:
            return ERRORS[mark](mark)
        if self.shares[server] is not None and not self.shares[server].owns(keys).all():
            return MisplacedKeysError("keys of another share")
        self.written[server] += keys.tolist()
        return Written(str(max(self.versions[server])))

    def write(self, router, keys=KEYS["item"]):
        routed = router.route_write(keys, lambda rows: rows, ShareCalls("m", lambda: None, lambda *_: None))
        outcomes = None
        try:
            while True:
                wanted = routed.send(outcomes)
                outcomes = [self.declare(server) if rows is None else self.store(server, keys[rows]) for server, rows in wanted]
        except StopIteration as end:
            return end.value


def owned(share, keys=KEYS["item"]):
    return keys[TableShare.parse(share).owns(keys)].tolist()


@pytest.mark.parametrize("shares", [["0/2", "1/2"], ["1/2", "0/2", "1/2"], ["0/2", "1/2", "0/3"], ["0/1", "0/2", "1/2"]])
def test_every_server_writes_all_keys_that_it_holds_once(shares):
    cluster = Writing(*shares)
    assert cluster.write(router_of(cluster)) == "1"
    assert cluster.written == [owned(share) for share in shares]


@pytest.mark.parametrize("shares", [["", ""], ["0/1", "0/1"]])
def test_without_shares_and_without_keys_one_server_writes(shares):
    cluster = Writing(*shares)
    assert cluster.write(router_of(cluster)) is None
    split = Writing("0/2", "1/2")
    assert split.write(router_of(split), KEYS["item"][:0]) is None
    assert cluster.written == split.written == [[], []]


def test_nothing_is_written_while_a_share_has_no_server():
    cluster = Writing("0/3", "2/3")
    with pytest.raises(MissingShareError, match=r"writing to model 'm': .*of 3 shares none has 1") as caught:
        cluster.write(router_of(cluster))
    assert caught.value.shares == (1,)
    assert cluster.written == [[], []]
    assert cluster.write(router_of(cluster), np.array(owned("0/3"))) == "1"


@pytest.mark.parametrize("error", ["lost", "late", "busy"])
def test_keys_that_a_server_does_not_acknowledge_are_named(error):
    cluster = Writing("0/2", "1/2", "1/2", marks=["", "", [error]])
    router = router_of(cluster)
    with pytest.raises(PartialWriteError, match=rf"{len(owned('1/2'))} of them were not .*http://2: {error}") as caught:
        cluster.write(router)
    assert caught.value.keys.tolist() == owned("1/2")
    assert isinstance(caught.value.errors["http://2"], ERRORS[error])
    assert cluster.written == [owned("0/2"), owned("1/2"), []]
    assert cluster.write(router, caught.value.keys) == "1"
    assert cluster.written[2] == owned("1/2")


def test_a_server_that_does_not_say_its_share_has_acknowledged_nothing(now):
    cluster = Writing("0/2", "1/2", "1/2")
    cluster.down = {2}
    router = router_of(cluster)
    for _ in range(2):
        with pytest.raises(PartialWriteError, match="http://2: down") as caught:
            cluster.write(router)
        assert caught.value.keys.tolist() == KEYS["item"].tolist()
        assert list(caught.value.errors) == ["http://2"]
    cluster.down, now.now = set(), now.now + 100
    assert cluster.write(router, caught.value.keys) == "1"
    assert cluster.written[2] == owned("1/2")


def test_an_error_of_all_servers_is_that_of_the_write_and_a_doubtful_one_comes_first():
    cluster = Writing("0/2", "1/2", marks=[["busy"], ["late"]])
    with pytest.raises(RemoteTimeoutError):
        cluster.write(router_of(cluster))


def test_keys_follow_servers_that_hold_other_shares_by_now():
    cluster = Writing("0/2", "1/2")
    router = router_of(cluster)
    assert cluster.write(router, KEYS["item"][:1]) == "1"
    cluster.shares, cluster.written = shares_of("1/2", "0/2"), [[], []]
    assert cluster.write(router) == "1"
    assert cluster.written == [owned("1/2"), owned("0/2")]
    cluster.shares, cluster.written = shares_of("0/3", "2/3"), [[], []]
    with pytest.raises((MissingShareError, MisplacedKeysError)):
        cluster.write(router)
    assert cluster.written == [[], []]


def test_keys_of_a_share_with_another_version_are_named():
    cluster = Writing("0/2", "1/2", versions=[1, 2])
    share, other = sorted(("0/2", "1/2"), key=lambda share: len(owned(share)))
    with pytest.raises(PartialWriteError, match="it modified version") as caught:
        cluster.write(router_of(cluster))
    assert caught.value.keys.tolist() in (owned(share), owned(other))


LAYOUTS = [
    ["0/2", "1/2"],
    ["0/2", "1/2", "0/2"],
    ["0/2", "1/2", "0/3", "1/3", "2/3"],
    ["0/1", "1/2"],
    ["0/3", "2/3", "1/3", "1/2"],
]


@given(data=st.data(), before=st.sampled_from(LAYOUTS), known=st.booleans())
def test_whatever_fails_a_key_that_is_not_named_is_in_every_server_that_holds_it(data, before, known):
    cluster, keys = Writing(*before), np.arange(64)
    router = router_of(cluster)
    cluster.down = data.draw(st.sets(st.integers(0, len(before) - 1), max_size=2))
    if known and not cluster.down:  # a server that does not answer has its last share
        cluster.write(router, keys[:1])
        cluster.written = [[] for _ in before]
        moves = data.draw(st.lists(st.sampled_from(["0/2", "1/2", "0/1", "2/3"]), max_size=2))
        cluster.shares[: len(moves)] = shares_of(*moves)
    marks = st.lists(st.sampled_from(["", *ERRORS]), max_size=3)
    cluster.marks = [data.draw(marks) for _ in before]
    try:
        version, missed = cluster.write(router, keys), np.empty(0, np.int64)
        assert version in ("1", None)
    except PartialWriteError as error:
        missed, version = error.keys, "1"
    except HPSError:
        missed, version = keys, "1"
    if version is None:  # no server is known to hold a share: one server writes
        assert not any(cluster.written)
        return
    for share, written in zip(cluster.shares, cluster.written, strict=True):
        assert set(owned(str(share), keys)) - set(missed.tolist()) <= set(written)
        assert len(written) == len(set(written)), "each key once"
        assert set(written) <= set(owned(str(share), keys))
