"""A server with a share of its tables: which rows it loads, and that a key of another share is an error on every path."""

from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.engine import miss_path, stream_ordered
from hps.errors import ConfigError, ConflictError, DatabaseError, InvalidInputError, MisplacedKeysError
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.ground.shares import TableShare, share_indices
from hps.models.sealing import seal_version
from hps.stores.base import LogPosition, Partition, RowChanges
from hps.testing.waiting import PATIENCE_S
from tests.servers.running_service import document_of, model_of

ROWS, DIM, DEFAULT = 300, 4, -2.0
KEYS = np.arange(-20, ROWS - 20)
SHARE = TableShare(1, 3)
OWN, FOREIGN = KEYS[SHARE.owns(KEYS)], KEYS[~SHARE.owns(KEYS)]
ABSENT = np.arange(10**6, 10**6 + 60)
OWN_ABSENT, FOREIGN_ABSENT = ABSENT[SHARE.owns(ABSENT)], ABSENT[~SHARE.owns(ABSENT)]


def vectors_of(keys, version=0):
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(DIM) + 10_000 * version).astype(np.float32)


TIERS = {
    "hash_map": {},
    "rocks_db": {"persistent": "rocks_db"},
    "rocks_db_alone": {"persistent": "rocks_db", "volatile_db": {"type": "disabled"}},
    "row_files": {"persistent": "row_files", "volatile_db": {"type": "disabled"}},
    "hash_map_above_row_files": {"persistent": "row_files"},
    "bounded": {"persistent": "rocks_db", "volatile_db": {"type": "hash_map", "overflow_margin": 20, "num_partitions": 1}},
}


@pytest.fixture
def start(tmp_path):
    """Start a parameter server of a table of ROWS rows."""
    if not (tmp_path / "a").exists():
        hps.write_sparse_model(tmp_path / "a", (KEYS, vectors_of(KEYS)))
    with ExitStack() as opened:

        def start(tiers="hash_map", shard=SHARE, device="cpu", **changes):
            settings = {"gpucacheper": 0.5, "hit_rate_threshold": 1.1, "default_value_for_each_table": [DEFAULT]} | changes
            settings |= {"shard": None if shard is None else {"index": shard.index, "of": shard.of}}
            document = document_of(model_of("m", [tmp_path / "a"], {"a": DIM}, **settings), device=device)
            options = dict(TIERS[tiers])
            if kind := options.pop("persistent", None):
                options["persistent_db"] = {"type": kind, "path": str(tmp_path / kind)}
            return opened.enter_context(hps.HPS({**document, **options}))

        start.opened = opened
        yield start


def check(server):
    keys = np.concatenate([OWN, OWN_ABSENT])
    vectors, found = server.lookup(keys, "m", "a", return_found=True)
    np.testing.assert_array_equal(vectors[: OWN.size], vectors_of(OWN))
    assert (vectors[OWN.size :] == DEFAULT).all()
    assert (found.sum(), found[: OWN.size].all()) == (OWN.size, True)


def check_stored(server, own, tiers):
    """Check that the databases hold these keys alone, and all of them unless the database is bounded."""
    for database in server.model("m").chain.databases:
        table = database.stored(server.model("m").tables[0])
        stored = np.concatenate([keys for keys, _ in database.scan(table.tag, 1000)] or [KEYS[:0]])
        assert np.isin(stored, own).all()
        if tiers != "bounded" or database.persistent:
            np.testing.assert_array_equal(np.sort(stored), own)
            assert database.size(table.tag) == own.size


def refused(server, keys=None):
    """Check that a lookup of keys, by default one foreign among others, is refused, and by which key."""
    keys = np.concatenate([OWN[:5], FOREIGN[:1], OWN[5:9]]) if keys is None else keys
    with pytest.raises(MisplacedKeysError, match=r"belong to other shares than 1/3 of this server"):
        server.lookup(keys, "m", "a")


@pytest.mark.parametrize("gpucache", [True, False])
@pytest.mark.parametrize("tiers", TIERS)
def test_a_server_loads_and_answers_its_share(start, tiers, gpucache):
    server = start(tiers, gpucache=gpucache)
    check_stored(server, OWN, tiers)
    for _ in range(2):
        check(server)
        refused(server)
        refused(server, FOREIGN[:3])
        refused(server, FOREIGN_ABSENT[:1])
    assert server.stats().models[0].shard == "1/3"
    assert server.metrics.registry.get_sample_value("hps_model_shard", {"model": "m"}) == 1
    assert server.metrics.registry.get_sample_value("hps_model_shards", {"model": "m"}) == 3


@pytest.mark.parametrize("tiers", TIERS)
def test_a_sealed_version_gives_each_server_its_range(start, tmp_path, tiers):
    seal_version(tmp_path / "a", replace=True)
    for shard in (SHARE, SHARE, TableShare(0, 2), TableShare(1, 2)):
        server = start(tiers, shard)
        own, foreign = KEYS[shard.owns(KEYS)], KEYS[~shard.owns(KEYS)]
        check_stored(server, own, tiers)
        np.testing.assert_array_equal(server.lookup(own, "m", "a"), vectors_of(own))
        with pytest.raises(MisplacedKeysError):
            server.lookup(foreign[:3], "m", "a")
        start.opened.close()


@pytest.mark.parametrize("kind", ["static", "uvm", "stochastic"])
def test_every_type_of_cache_refuses_keys_of_other_shares(start, kind):
    server = start(embedding_cache_type=kind, gpucacheper=2.0, cache_refresh_percentage_per_iteration=1.0)
    check(server)
    refused(server)


def test_a_key_of_another_share_is_refused_although_defaults_are_answered_at_once(start):
    server = start(hit_rate_threshold=0.0)
    server.lookup(OWN, "m", "a")
    deployment = server.model("m")
    assert deployment.drain(PATIENCE_S)
    refused(server)
    refused(server, FOREIGN_ABSENT)
    assert (server.lookup(OWN_ABSENT, "m", "a") == DEFAULT).all()


@pytest.mark.parametrize("gpucache", [True, False])
def test_bags_with_a_key_of_another_share_are_refused(start, gpucache):
    server = start(gpucache=gpucache)

    def pooled(bags):
        return server.lookup_pooled({"a": bags}, "m")["a"]

    np.testing.assert_array_equal(pooled(hps.Bags(OWN[:2], [0, 2])), vectors_of(OWN[:2]).sum(0)[None])
    with pytest.raises(MisplacedKeysError):
        pooled(hps.Bags([OWN[0], FOREIGN[0], OWN[1]], [0, 2, 3]))
    padded = hps.Bags([OWN[0], FOREIGN[0]], [0, 2], padding_key=int(FOREIGN[0]))
    np.testing.assert_array_equal(pooled(padded), vectors_of(OWN[:1]))


def test_rows_and_prefetches_of_other_shares_are_refused(start):
    server = start("rocks_db")
    assert server.row(int(OWN[0]), "m", "a").tier is not None
    assert server.row(int(OWN_ABSENT[0]), "m", "a").tier is None
    with pytest.raises(MisplacedKeysError, match="reading a row"):
        server.row(int(FOREIGN[0]), "m", "a")
    with pytest.raises(MisplacedKeysError):
        server.prefetch(FOREIGN[:2], "m", "a")


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db", "row_files"])
def test_writes_of_other_shares_are_refused_whole(start, tiers):
    server = start(tiers)
    keys = np.array([OWN[0], FOREIGN[0], OWN_ABSENT[0]])
    with pytest.raises(MisplacedKeysError, match=rf"inserting .*: 1 of 3 keys .* {FOREIGN[0]}, to"):
        server.insert(keys, vectors_of(keys, 1), "m", "a")
    with pytest.raises(MisplacedKeysError, match="deleting"):
        server.delete(keys, "m", "a")
    check(server)
    server.insert(keys[::2], vectors_of(keys[::2], 1), "m", "a")
    np.testing.assert_array_equal(server.lookup(keys[::2], "m", "a"), vectors_of(keys[::2], 1))
    server.delete(keys[:1], "m", "a")
    assert server.lookup(keys[::2], "m", "a")[0].tolist() == [DEFAULT] * DIM


@pytest.mark.parametrize("tiers", ["rocks_db", "row_files"])
def test_a_share_is_left_and_taken_again(start, tiers):
    """The database of an earlier share is never taken for the other, and online writes of a share that goes are given up."""
    for shard in (SHARE, None, TableShare(0, 2), SHARE, SHARE):
        server = start(tiers, shard)
        own = KEYS if shard is None else KEYS[shard.owns(KEYS)]
        vectors, found = server.lookup(own, "m", "a", return_found=True)
        assert found.all()
        np.testing.assert_array_equal(vectors, vectors_of(own))
        database = server.model("m").chain.databases[-1]
        assert database.size(database.stored(server.model("m").tables[0]).tag) == own.size
        start.opened.close()


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_share_may_have_no_row(tmp_path, start, tiers, sealed):
    keys = np.arange(3)
    hps.write_sparse_model(tmp_path / "a", (keys, vectors_of(keys)), overwrite=True)
    if sealed:
        seal_version(tmp_path / "a", replace=True)
    shares = set(range(64)) - set(share_indices(keys, 64))
    share = TableShare(min(shares), 64)
    own = ABSENT[share.owns(ABSENT)] if share.owns(ABSENT).any() else np.flatnonzero(share.owns(np.arange(3000)))
    for _ in range(2):
        server = start(tiers, share)
        assert (server.lookup(own, "m", "a") == DEFAULT).all()
        with pytest.raises(MisplacedKeysError):
            server.lookup(keys, "m", "a")
        start.opened.close()


def test_a_model_takes_another_share_while_it_serves(start):
    server = start("row_files")
    config = server.model("m").config
    for shard in (TableShare(0, 3), None, SHARE):
        changed = None if shard is None else {"index": shard.index, "of": shard.of}
        server.deploy(
            hps.load_configuration({"models": [config.model_dump(exclude_unset=True) | {"shard": changed}]}).models[0]
        )
        own = KEYS if shard is None else KEYS[shard.owns(KEYS)]
        np.testing.assert_array_equal(server.lookup(own, "m", "a"), vectors_of(own))
        assert server.stats().models[0].shard == str(shard or "")
    check(server)
    refused(server)


def test_copied_files_are_not_taken_for_those_of_another_share(start, tmp_path):
    start("rocks_db", TableShare(0, 3))
    start.opened.close()
    for file in (tmp_path / "a").iterdir():  # the same content, another version of the file
        file.write_bytes(file.read_bytes())
    server = start("rocks_db")
    check(server)


def test_a_database_that_is_kept_must_have_the_share(start, tmp_path):
    start("rocks_db", TableShare(0, 3))
    start.opened.close()
    document = document_of(model_of("m", [tmp_path / "a"], {"a": DIM}, shard={"index": 1, "of": 3}))
    document["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "rocks_db"), "initialize_after_startup": False}
    with (
        pytest.raises((DatabaseError, ConflictError), match=r"holds share 0/3, expected 1/3|keeps its rows"),
        hps.HPS(document),
    ):
        pass


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db", "rocks_db_alone", "row_files"])
def test_a_delta_changes_the_rows_of_the_share(tmp_path, tiers, sealed):
    changed, deleted = KEYS[::3], KEYS[1::3]
    hps.write_version(tmp_path / "m" / "1", {"a": (KEYS, vectors_of(KEYS))})
    if sealed:
        seal_version(tmp_path / "m" / "1")
    hps.write_version(tmp_path / "m" / "2", {"a": (changed, vectors_of(changed, 1))}, delta_of="1", deleted={"a": deleted})
    entry = model_of("m", ["a"], {"a": DIM}, default_value_for_each_table=[DEFAULT], shard={"index": 1, "of": 3})
    entry["version_path"] = str(tmp_path / "m")
    options = dict(TIERS[tiers])
    if kind := options.pop("persistent", None):
        options["persistent_db"] = {"type": kind, "path": str(tmp_path / kind)}
    with hps.HPS({**document_of(entry), **options}) as server:
        for version in ("2", "1", "2"):
            server.deploy("m", version)
            expected = vectors_of(OWN)
            if version == "2":
                expected[np.isin(OWN, changed)] = vectors_of(OWN[np.isin(OWN, changed)], 1)
                expected[np.isin(OWN, deleted)] = DEFAULT
            np.testing.assert_array_equal(server.lookup(OWN, "m", "a"), expected)
            refused(server)


def test_a_database_of_all_servers_takes_no_share(start, monkeypatch):
    """Models of a repository are read without the databases, so the configuration does not notice."""
    monkeypatch.setattr("hps.stores.hash_map.database.HashMapDatabase.shared", True)
    with pytest.raises(ConfigError, match=r"shard: got 1/3, expected none with hash_map, whose tables all servers share"):
        start()


@pytest.fixture
def linked(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn("tests.fakes.linked_cache:LinkedCache"))
    monkeypatch.setattr(miss_path, "_keys_per_s", lambda *_: 1.0)
    monkeypatch.setattr(stream_ordered, "_POLL_INTERVAL_S", 0.0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.usefixtures("linked")
def test_a_device_that_reads_host_memory_leaves_absent_keys_to_the_host(start, kind):
    server = start(device="cuda", embedding_cache_type=kind, gpucacheper=0.1 if kind == "dynamic" else 0.5)
    for _ in range(2):
        check(server)
        refused(server)
        refused(server, FOREIGN_ABSENT[:1])


@pytest.mark.usefixtures("linked")
def test_a_lookup_without_waiting_is_refused_since_the_device_cannot_tell(start):
    server = start(device="cuda", miss_path="link", gpucacheper=0.1)
    with pytest.raises(InvalidInputError, match="may be of other shares than 1/3"):
        server.lookup_fromdlpack(OWN[:4], np.empty((4, DIM), np.float32), "m", "a", wait=False)


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db", "row_files"])
def test_changes_of_a_log_are_applied_to_the_share_and_skipped_for_others(start, tiers):
    server = start(tiers)
    deployment = server.model("m")
    deployment.chain.follow_log(deployment.tables[0])
    keys = np.concatenate([OWN[:3], FOREIGN[:5], OWN_ABSENT[:1]])
    changes = RowChanges(keys, vectors_of(keys, 1), np.arange(1, keys.size + 1))
    position = {Partition("topic", 0): LogPosition("7", keys.size)}
    assert deployment.apply(0, changes, position) == keys.size
    own = keys[SHARE.owns(keys)]
    np.testing.assert_array_equal(server.lookup(own, "m", "a"), vectors_of(own, 1))
    refused(server)
    foreign = RowChanges(FOREIGN[:2], vectors_of(FOREIGN[:2], 2), np.array([90, 91]))
    assert deployment.apply(0, foreign, {Partition("topic", 0): LogPosition("9", 91)}) == 2
    assert deployment.chain.follow_log(deployment.tables[0]) == {"topic/0": LogPosition("9", 91)}
    skipped = server.metrics.registry.get_sample_value("hps_update_skipped_rows_total", {"model": "m", "table": "a"})
    assert skipped == 7
