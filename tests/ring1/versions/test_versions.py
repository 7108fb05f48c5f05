"""Versions of a model in one process: swapped, rolled back, loaded again, dropped from every tier."""

import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import hps
from hps.ground.progress import NoProgress
from hps.models.writer import write_version as write_version_of
from hps.stores.base import RowChanges
from hps.tensors.batch import Batch
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import split_tag
from hps.versions.building import reconfigure
from hps.versions.deployment import Deployment
from tests.fakes.paused_lookup import PausedBatch, paused_lookup
from tests.servers.running_service import document_of, model_of
from tests.tables.held_tables import held_tags

DIMS = {"user": 4, "item": 7}
KEYS = np.arange(1000)
NEW = np.full((1, 4), 9.0, np.float32)
Make = Callable[..., dict[str, Any]]
KINDS: dict[str, dict[str, Any]] = {
    "direct": {"gpucache": False},
    "cached": {"gpucacheper": 0.5, "cache_refresh_percentage_per_iteration": 1.0, "hit_rate_threshold": 1.1},
    "static": {"embedding_cache_type": "static"},
}


def vectors_of(keys: Any, dim: int, version: int) -> np.ndarray:
    """Vectors that say of which key and version they are."""
    return (np.asarray(keys)[:, None] * 16 + np.arange(dim) + version * 100_000).astype(np.float32)


def write_version(directory: Path, version: int, content: int | None = None) -> list[str]:
    places = []
    for table, dim in DIMS.items():
        place = directory / str(version) / f"{table}.model"
        place.parent.mkdir(exist_ok=True)
        hps.write_sparse_model(place, (KEYS, vectors_of(KEYS, dim, content or version)), overwrite=True)
        places.append(str(place))
    return places


def version_of(server: hps.HPS, **named: Any) -> int:
    """The content that answers: that of all tables, or the test fails."""
    answer = server.lookup_tables({"user": KEYS[::7], "item": KEYS[::5]}, "ranker", **named)
    versions = {int(vectors[0, 0]) // 100_000 for vectors in answer.values()}
    assert len(versions) == 1
    (version,) = versions
    for (table, vectors), keys in zip(answer.items(), (KEYS[::7], KEYS[::5]), strict=True):
        np.testing.assert_array_equal(vectors, vectors_of(keys, DIMS[table], version))
    return version


@pytest.fixture
def document(tmp_path: Path) -> Make:
    def make(kind: str = "cached", *, persistent: str = "rocks_db", versions: int = 3, **more: Any) -> dict[str, Any]:
        model = model_of("ranker", write_version(tmp_path, 1), DIMS, max_batch_size=3000, **KINDS[kind], **more)
        model["versions"] = [
            {"version": number, "sparse_files": write_version(tmp_path, number)} for number in range(2, versions + 1)
        ]
        model |= {"num_of_worker_buffer_in_pool": 4, "checks": False}
        return document_of(model, persistent=tmp_path / "database" if persistent else None, kind=persistent)

    return make


@pytest.fixture(params=[*((kind, "hash_map") for kind in KINDS), ("direct", "rocks_db"), ("cached", "row_files")], ids="-".join)
def server(request: pytest.FixtureRequest, document: Make) -> Iterator[hps.HPS]:
    kind, host = request.param
    with hps.HPS(document(kind, persistent="" if host == "hash_map" else host), deploy_models=False) as server:
        yield server


def tags(server: hps.HPS) -> set[str]:
    """Slots of which any database has a table."""
    databases = [database for one in server.live.all() for database in one.chain.databases] + server._chain.databases
    return {names[1] for database in databases for tag in held_tags(database) if (names := split_tag(tag))}


def test_files_that_were_replaced_are_served_beside_the_old_ones_and_found_again(document: Make, tmp_path: Path) -> None:
    configuration = document(versions=1)
    with hps.HPS(configuration) as server:
        serving = server.model("ranker")
        assert server.deploy("ranker") is serving
        write_version(tmp_path, 1, content=5)
        assert server.deploy("ranker") is not serving
        assert version_of(server) == 5
        for content in (1, 5):
            server.rollback("ranker")
            assert version_of(server) == content
        server.insert([7], NEW, "ranker", "user")
        assert server.deploy("ranker").version == "1"
    with hps.HPS(configuration) as server:
        np.testing.assert_array_equal(server.lookup([7], "ranker", "user"), NEW)
        vectors = server.lookup(KEYS[100:], "ranker", "user")
        np.testing.assert_array_equal(vectors, vectors_of(KEYS[100:], 4, 5))


def test_a_database_that_keeps_its_rows_serves_no_version_that_it_has_not(document: Make) -> None:
    content = document()
    content["models"][0]["version_policy"] = {"specific": {"versions": [2]}}
    with hps.HPS(content) as server:
        server.deploy("ranker", version="1")
        server.deploy("ranker", version="2", force=True)  # whose rows are then in tables of another name
    content["persistent_db"]["initialize_after_startup"] = False
    for _ in range(2):
        with hps.HPS(content) as server:
            assert version_of(server) == 2
            for change in ({"force": True}, {"version": "3"}, {"version": "3", "force": True}):
                with pytest.raises(hps.ConflictError, match="initialize_after_startup"):
                    server.deploy("ranker", **change)
                assert version_of(server) == 2
            server.deploy("ranker", version="1", pin=False)
            assert version_of(server) == 1


@pytest.mark.parametrize("forced", [1, 4])  # three names of slots are made of the files, others of numbers
def test_a_restart_finds_the_rows_that_were_forced_last_and_what_was_written_to_them(document: Make, forced: int) -> None:
    configuration = document(versions=1)
    for round_ in range(1, 3):
        with hps.HPS(configuration) as server:
            for number in range(forced):
                server.deploy("ranker", force=True)
                server.insert([7], np.full((1, 4), 10 * round_ + number, np.float32), "ranker", "user")
        with hps.HPS(configuration) as server:
            expected = np.full((1, 4), 10 * round_ + forced - 1, np.float32)
            np.testing.assert_array_equal(server.lookup([7], "ranker", "user"), expected)


@pytest.mark.parametrize(("keep_versions", "left"), [(1, {"3", ""}), (0, {"3"})])
def test_nothing_stays_of_a_swap_that_died(document: Make, keep_versions: int, left: set[str]) -> None:
    configuration = document(keep_versions=keep_versions)
    with hps.HPS(configuration, deploy_models=False) as server:
        server.deploy("ranker", "1", pin=False)
        for database in server._chain.databases:
            database.open_table("hps_et.ranker@2.deadbeef.user", 4)  # as a load does that is killed
            database.open_table("hps_et.ranker@9.user", 4)
    with hps.HPS(configuration) as server:
        assert tags(server) == left
        assert version_of(server) == 3


@pytest.mark.parametrize(
    ("change", "when"), [("insert", "before"), ("delete", "meanwhile"), ("apply", "meanwhile"), ("evict", "before")]
)
def test_a_delta_has_the_rows_of_its_bases_files_and_no_online_writes(
    document: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, when: str
) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 12)
    configuration = document(versions=1, persistent="")
    (entry,) = configuration["models"]
    del entry["versions"]
    entry |= {"sparse_files": [f"{table}.model" for table in DIMS], "version_path": str(tmp_path / "versions")}
    (tmp_path / "versions").mkdir()
    write_version(tmp_path / "versions", 1)
    keys, vectors = KEYS[1:], np.full((KEYS.size - 1, 4), 9.0, np.float32)

    class Writing(NoProgress):
        written = False

        def advance(self, tag: str, rows: int) -> None:
            if not self.written and rows:
                self.written = True
                write()

    with hps.HPS(configuration) as server:
        changes = {
            "insert": lambda: server.insert(keys, vectors, "ranker", "user"),
            "delete": lambda: server.delete(keys, "ranker", "user"),
            "apply": lambda: server.model("ranker").apply(0, RowChanges(keys, vectors, np.ones(keys.size, np.int64)), {}),
            "evict": lambda: server._chain.databases[0].delete(server.model("ranker").tables[0].tag, keys),
        }
        write: Callable[[], object] = changes[change]
        if change == "apply":
            server._chain.follow_log(server.model("ranker").tables[0])
        if when == "before":
            write()
        tables = {f"{table}.model": (KEYS[:1], vectors_of(KEYS[:1], dim, 2)) for table, dim in DIMS.items()}
        write_version_of(tmp_path / "versions" / "2", tables, delta_of="1")
        assert server.deploy("ranker", progress=NoProgress() if when == "before" else Writing()).version == "2"
        expected = vectors_of(KEYS, 4, 1)
        expected[0] = vectors_of(KEYS[:1], 4, 2)
        np.testing.assert_array_equal(server.lookup(KEYS, "ranker", "user"), expected)


@pytest.mark.parametrize("tier", ["volatile_db", "persistent_db", "embedding_cache"])
def test_a_version_that_does_not_fit_is_refused_before_a_byte_is_loaded(document: Make, tmp_path: Path, tier: str) -> None:
    configuration = document()
    for other in {"volatile_db", "persistent_db"} - {tier}:
        configuration[other] = {"type": "disabled"}
    with hps.HPS(configuration, deploy_models=False) as server:
        server.deploy("ranker", "1")
        before = tags(server)
        for table, dim in DIMS.items():
            for name, size in (("key", 8), ("emb_vector", 4 * dim)):  # right sizes, and nothing on disk
                with open(tmp_path / "2" / f"{table}.model" / name, "wb") as file:
                    file.truncate((1 << 35) * size)
        with pytest.raises(hps.CapacityError, match=r"got [0-9,]+ bytes .* expected at most the [0-9,]+ that are free"):
            server.deploy("ranker", "2")
        assert tags(server) == before
        assert server.model("ranker").version == "1"


def test_what_is_kept_goes_first_where_there_is_no_room_beside_it(document: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(), deploy_models=False) as server:
        server.deploy("ranker", "1")
        server.deploy("ranker", "2")
        usage = shutil.disk_usage(".")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if "" in tags(server) else usage.free))
        assert server.deploy("ranker", "3").version == "3"
        wait_until(lambda: tags(server) == {"2", "3"}, "versions 2 and 3 are there")
        assert server.rollback("ranker").version == "2"


def test_a_change_shows_the_tables_of_each_version_that_it_loads_and_counts_the_rows_of_all(document: Make) -> None:
    seen: list[list[str]] = []

    class Looking(NoProgress):
        def start(self, tag: str, rows: int, size_bytes: int) -> None:
            seen.append([table.state for table in change.tables.values()])

    content = document(version_policy={"latest": {"num_versions": 2}})
    with hps.HPS(content, deploy_models=False) as server, server.live.changing("ranker", "deploying") as change:
        change.thread = threading.current_thread()  # which goes on with it
        server.deploy("ranker", progress=Looking())
    assert (seen, change.rows_loaded) == ([["waiting"] * 2, ["done", "waiting"]] * 2, 4 * KEYS.size)


# -- lookups that outlast their version -------------------------------------------------------------------------------


def check(batch: PausedBatch) -> None:
    """Whether the lookup was answered by version 1."""
    assert batch.founds[0].all(), f"{np.count_nonzero(~batch.founds[0])} of {KEYS.size} keys that exist got the default vector"
    np.testing.assert_array_equal(batch.outs[0], vectors_of(KEYS, DIMS["item"], 1))


@pytest.fixture
def batch() -> PausedBatch:
    return PausedBatch(1, KEYS, DIMS["item"])


def test_undeploy_lets_running_lookups_end_and_frees_the_tables(server: hps.HPS, batch: PausedBatch) -> None:
    deployment = server.deploy("ranker", "1")
    tables = deployment.chain.databases[0]
    assert len(held_tags(tables)) == len(DIMS)
    with ThreadPoolExecutor(1) as pool, paused_lookup(server, "ranker", batch) as running:
        leaving = pool.submit(server.undeploy, "ranker")
        wait_until(lambda: server.models == (), "the model was out of service")
        with pytest.raises(hps.NotReadyError):  # of a caller that had found the model before it was undeployed
            wait_until(lambda: deployment.session(None).run(Batch.merged([])), "new lookups were refused")
        batch.go_on.set()
        running.result(PATIENCE_S)
        leaving.result(PATIENCE_S)
    check(batch)
    assert tables.kind != "hash_map" or held_tags(tables) == []


def test_a_lookup_that_does_not_end_keeps_its_table_and_the_model_its_name(
    server: hps.HPS, batch: PausedBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.versions.deployment.DRAIN_S", 0.05)
    deployment = server.deploy("ranker", "1")
    with paused_lookup(server, "ranker", batch) as running:
        server.undeploy("ranker")
        write_version(tmp_path, 1, content=5)
        with pytest.raises(hps.NotReadyError, match="still run"):
            server.deploy("ranker", "1")
        with pytest.raises((hps.NotReadyError, hps.InvalidInputError)):  # static, without a persistent database
            deployment.insert(1, KEYS[:1], np.ones((1, 7), np.float32))
        batch.go_on.set()
        running.result(PATIENCE_S)
    check(batch)

    def deployed() -> bool:
        try:
            server.deploy("ranker", "1")
        except hps.NotReadyError:
            return False
        return True

    wait_until(deployed, "the name was free")
    assert version_of(server) == 5


def test_a_lookup_that_waits_for_a_workspace_of_a_version_that_retires_is_answered_by_the_next(
    document: Make, batch: PausedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, time_is_over = threading.Event(), threading.Event()

    class Workspaces(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            try:
                return super().get(False)
            except queue.Empty:
                waits.set()
                assert time_is_over.wait(PATIENCE_S)
                raise

    monkeypatch.setattr("hps.engine.session.queue", SimpleNamespace(SimpleQueue=Workspaces, Empty=queue.Empty))
    configuration = document()
    configuration["models"][0]["num_of_worker_buffer_in_pool"] = 1
    with hps.HPS(configuration, deploy_models=False) as server, ThreadPoolExecutor(1) as pool:
        session = server.deploy("ranker", "1").session(None)
        with paused_lookup(server, "ranker", batch):
            waiting = pool.submit(server.lookup, [5], "ranker", "user")
            assert waits.wait(PATIENCE_S)
            server.deploy("ranker", "2")
            wait_until(lambda: session.workspaces == (1, 0), "version 1 refuses lookups")
            time_is_over.set()
            np.testing.assert_array_equal(waiting.result(PATIENCE_S), vectors_of([5], 4, 2))


# -- what was kept ----------------------------------------------------------------------------------------------------


def test_a_version_that_was_kept_comes_back_with_other_settings_and_its_writes(document: Make) -> None:
    with hps.HPS(document(), deploy_models=False) as server:
        server.deploy("ranker", "1")
        server.insert([7], NEW, "ranker", "user")
        server.deploy("ranker", "2")
        wait_until(
            lambda: {version.version: version.state for version in server.versions("ranker")}["1"] == "kept",
            "version 1 is kept",
        )
        entry = server.catalog.model("ranker").model_copy(update={"gpucacheper": 0.1})
        assert server.deploy(entry, "1").config.gpucacheper == 0.1
        np.testing.assert_array_equal(server.lookup([7], "ranker", "user"), NEW)


def test_a_roll_back_without_databases_loads_the_files_again(document: Make) -> None:
    configuration = document(persistent="") | {"volatile_db": {"type": "disabled"}}
    configuration["models"][0]["gpucacheper"] = 1.0
    with hps.HPS(configuration, deploy_models=False) as server:
        server.deploy("ranker", "1")
        server.deploy("ranker", "2")
        wait_until(lambda: len(server.versions("ranker")) == 1, "version 1 has gone")
        assert server.rollback("ranker").version == "1"
        vectors, found = server.lookup(KEYS, "ranker", "user", return_found=True)
        assert found.mean() > 0.5, "what has room in its set"
        np.testing.assert_array_equal(vectors[found], vectors_of(KEYS[found], DIMS["user"], 1))


def test_no_lookup_gets_an_older_row_than_an_earlier_one_while_settings_change(
    document: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new caches hold rows that the old ones lack, and a modification that runs has written them to the database only."""
    configuration = document(versions=1) | {"volatile_db": {"type": "disabled"}}
    configuration["models"][0]["gpucacheper"] = 0.01
    newer, seen = np.full((KEYS.size, 4), 9.0, np.float32), np.zeros(KEYS.size, np.bool_)
    written, finish, inserted = threading.Event(), threading.Event(), []
    with hps.HPS(configuration) as server, ThreadPoolExecutor(1) as deploying, ThreadPoolExecutor(1) as inserting:
        before = server.model("ranker")
        (database,) = before.chain.databases
        insert = database.insert

        def insert_and_wait(*arguments: Any) -> None:
            insert(*arguments)
            written.set()
            assert finish.wait(PATIENCE_S)

        def look_up() -> None:
            found = (server.lookup(KEYS, "ranker", "user") == newer).all(axis=1)
            assert not (seen & ~found).any(), f"{np.count_nonzero(seen & ~found)} rows are older than before"
            seen[found] = True

        def reconfigure_and_write(*arguments: Any) -> Any:
            successor = reconfigure(*arguments)
            inserted.append(inserting.submit(server.insert, KEYS, newer, "ranker", "user"))
            assert written.wait(PATIENCE_S)
            look_up()
            assert np.count_nonzero(seen) > KEYS.size // 2, "most are in no cache"
            return successor

        monkeypatch.setattr(before.chain, "_modification_timeout_s", PATIENCE_S)
        monkeypatch.setattr(database, "insert", insert_and_wait)
        monkeypatch.setattr("hps.versions.reconciler.reconfigure", reconfigure_and_write)
        entry = server.config.models[0].model_copy(update={"gpucacheper": 1.0})
        try:
            deployed = deploying.submit(server.deploy, entry)
            assert written.wait(PATIENCE_S)
            with suppress(TimeoutError):
                deployed.result(0.1)  # the change waits for the modification, or has been made too early
            look_up()
        finally:
            finish.set()
        for one in (deployed, *inserted):
            one.result(PATIENCE_S)
        look_up()
        assert seen.all()


def test_writes_while_new_caches_are_warmed_are_in_them(document: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(versions=1)) as server:
        renewed, newer = Deployment.renewed, np.repeat(NEW, 500, axis=0)

        def renewed_and_write(*arguments: Any) -> Deployment:
            successor = renewed(*arguments)
            server.insert(KEYS[:500], newer, "ranker", "user")
            server.delete(KEYS[500:], "ranker", "user")
            return successor

        monkeypatch.setattr(Deployment, "renewed", renewed_and_write)
        server.deploy(server.config.models[0].model_copy(update={"gpucacheper": 1.0}))
        np.testing.assert_array_equal(server.lookup(KEYS, "ranker", "user"), np.vstack([newer, np.zeros((500, 4))]))


def test_settings_whose_caches_do_not_become_current_change_nothing(document: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(versions=1)) as server:
        before, renewed, made = server.model("ranker"), Deployment.renewed, []
        monkeypatch.setattr(Deployment, "renewed", lambda *arguments: made.append(renewed(*arguments)) or made[0])
        monkeypatch.setattr("hps.versions.building.refresh", Mock(side_effect=hps.DatabaseError("away")))
        with pytest.raises(hps.DatabaseError, match="away"):
            server.deploy(server.config.models[0].model_copy(update={"gpucacheper": 1.0}))
        assert server.model("ranker") is before
        assert not before.successors
        assert made[0].lookups_ended.is_set()
        server.insert([7], NEW, "ranker", "user")
        np.testing.assert_array_equal(server.lookup([7], "ranker", "user"), NEW)


def test_settings_that_wait_too_long_for_a_modification_change_nothing(document: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(versions=1)) as server:
        before = server.model("ranker")

        def reconfigure_and_stay(*arguments: Any) -> Any:
            successor = reconfigure(*arguments)
            modifying.enter_context(before.chain.fence(before.tables[1]).modifying(10))
            return successor

        monkeypatch.setattr(before.chain, "_modification_timeout_s", 0.1)
        monkeypatch.setattr("hps.versions.reconciler.reconfigure", reconfigure_and_stay)
        entry = server.config.models[0].model_copy(update={"gpucacheper": 1.0})
        with ExitStack() as modifying, pytest.raises(hps.DatabaseTimeoutError, match="try again"):
            server.deploy(entry)
        assert server.model("ranker") is before
        server.insert([7], NEW, "ranker", "user")
        np.testing.assert_array_equal(server.lookup([7], "ranker", "user"), NEW)
