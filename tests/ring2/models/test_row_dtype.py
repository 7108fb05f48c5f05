"""A parameter server with rows of fewer bits, over all tiers; and changes of a deployed table's format."""

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.configuration.load import ModelConfig, load_configuration
from hps.errors import ConfigError, ConflictError, DatabaseError, InvalidInputError
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.ground.rows import decode, encode
from hps.stores.redis.server_check import check_server
from hps.stores.rocks_db.database import RocksDatabase
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.types import ROW_DTYPES, TableSpec, row_width
from hps.updates.base import Partition
from hps.updates.framing import encode as encode_update
from tests.fakes.memory_log import MemoryBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIM = 7
ROWS = 2000
KEYS = np.arange(ROWS) * 3
NEW = np.arange(1, 101) * 3 + 1
"""Keys that are in no file."""
FEWER_BITS = ROW_DTYPES[1:]
TOO_LARGE = {"int8": -1e6, "float16": 1e5, "bfloat16": np.finfo(np.float32).max}
TOPIC = Partition("hps_et.shop.item", 0)
NONE = np.empty(0, np.int64)
TABLE = TableSpec("shop", "item", DIM, 0.5, 1000, row_dtype="int8")


def vectors_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


def stored(vectors: np.ndarray, row_dtype: str) -> np.ndarray:
    """What lookups answer of these vectors."""
    return decode(encode("x", vectors, row_dtype), vectors.shape[1], row_dtype).copy()


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Place:
    """A model of one table, and a configuration."""

    def __init__(self, path: Path, row_dtype: str, **settings) -> None:
        self.path = path
        self.vectors = vectors_of(1, ROWS)
        self.write(1, self.vectors)
        self.settings = {"volatile_db": {"type": "hash_map"}, **settings}
        self.row_dtype = row_dtype

    def write(self, version: int, vectors: np.ndarray, keys: np.ndarray = KEYS, **settings) -> None:
        hps.write_version(self.path / "models" / "shop" / str(version), {"item.model": (keys, vectors)}, **settings)

    def entry(self, row_dtype: str, **settings) -> dict:
        limits = {"maxnum_catfeature_query_per_table_per_sample": [1000], "max_batch_size": 64, "hit_rate_threshold": 1.1}
        defaults = {"default_value_for_each_table": [0.5], "gpucacheper": 0.3, "row_dtype": row_dtype}
        place = str(self.path / "models" / "shop")
        return model_of("shop", ["item.model"], {"item": DIM}, version_path=place, **limits, **defaults) | settings

    def change(self, server: hps.HPS, row_dtype: str, **settings) -> None:
        self.row_dtype = row_dtype
        server.deploy(ModelConfig(**self.entry(row_dtype, **settings)))

    def configured(self, row_dtype: str | None = None, **entry) -> Path:
        self.row_dtype = row_dtype or self.row_dtype
        document = document_of(self.entry(self.row_dtype, **entry), **self.settings)
        path = self.path / "ps.json"
        path.write_text(json.dumps(document))
        return path

    def opened(self, row_dtype: str | None = None, **entry) -> hps.HPS:
        return hps.HPS(str(self.configured(row_dtype, **entry)))

    def answers(self, server: hps.HPS, keys: np.ndarray) -> np.ndarray:
        return server.lookup(keys, "shop", "item").copy()


def rocks_db(path: Path) -> dict:
    return {"persistent_db": {"type": "rocks_db", "path": str(path / "db")}}


def emptied(server: RedisServer) -> dict:
    """Settings of a Redis, which is empty."""
    with server.client() as client:
        client.flushall()
    return {"address": server.address, "num_partitions": 2}


def tags_in(path: Path) -> list[str]:
    with closing(RocksDatabase(path / "db", read_only=True)) as database:
        return [tag for tag in database.tags() if tag.startswith("hps_et.shop")]


def modify(server: hps.HPS, seed: int = 5) -> np.ndarray:
    """Replace rows, add some, and delete others; returns the vectors of the first 100 keys of files and of the new ones."""
    written = vectors_of(seed, 200)
    server.insert(np.concatenate([KEYS[:100], NEW]), written, "shop", "item")
    server.delete(KEYS[200:300], "shop", "item")
    return written


def check_modified(server: hps.HPS, place: Place, written: np.ndarray, row_dtype: str) -> None:
    """Check what every key answers, twice: from the databases and from the cache."""
    for _ in range(2):
        np.testing.assert_array_equal(place.answers(server, KEYS[:100]), stored(written[:100], row_dtype))
        np.testing.assert_array_equal(place.answers(server, NEW), stored(written[100:], row_dtype))
        assert (place.answers(server, KEYS[200:300]) == 0.5).all()
        np.testing.assert_array_equal(place.answers(server, KEYS[300:1300]), stored(place.vectors[300:1300], row_dtype))


@pytest.fixture
def place(tmp_path) -> Place:
    """Above RocksDB, in float32."""
    return Place(tmp_path, "float32", **rocks_db(tmp_path))


CHAIN = ("int8", "float16", "float32", "bfloat16")


class TestFormatChange:
    """A version with online writes keeps its format: another one is refused, and nothing is lost."""

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_version_in_service_keeps_its_format_and_a_new_version_has_another(self, tmp_path, persistent):
        place = Place(tmp_path, "float32", **(rocks_db(tmp_path) if persistent else {}))
        with place.opened() as server:
            written = modify(server)
            with pytest.raises(ConflictError, match=r"'item' as int8: version 1 serves it as float32\. .*a new version$"):
                place.change(server, "int8")
            check_modified(server, place, written, "float32")
            place.write(2, place.vectors + 1)
            server.deploy(ModelConfig(**place.entry("int8")))
            np.testing.assert_array_equal(place.answers(server, KEYS[:500]), stored(place.vectors[:500] + 1, "int8"))

    def test_a_start_in_another_format_is_refused_and_loses_nothing(self, tmp_path, place):
        """Also where a version below could serve: a conflict refuses no version, so that its tables stay."""
        place.write(2, place.vectors)
        with place.opened() as server:
            written = modify(server)
        before = tags_in(tmp_path)
        with pytest.raises(ConflictError, match=r"version 2, .*'item' as int8: its online writes are stored as float32"):
            place.opened("int8")
        assert tags_in(tmp_path) == before
        with place.opened("float32") as server:
            check_modified(server, place, written, "float32")

    def test_without_online_writes_or_by_force_it_is_loaded_from_the_files(self, tmp_path, place):
        for row_dtype in CHAIN[:2]:
            with place.opened(row_dtype) as server:
                np.testing.assert_array_equal(place.answers(server, KEYS[:1000]), stored(place.vectors[:1000], row_dtype))
            assert len(tags_in(tmp_path)) == 1
        with place.opened() as server:
            modify(server)
            server.deploy(ModelConfig(**place.entry("int8")), force=True)
            np.testing.assert_array_equal(place.answers(server, KEYS[:500]), stored(place.vectors[:500], "int8"))

    def test_a_database_that_loads_nothing_refuses_another_format(self, place):
        with place.opened():
            pass
        place.settings["persistent_db"]["initialize_after_startup"] = False
        with pytest.raises(ConflictError, match="has table 'item' as float32, not int8"):
            place.opened("int8")
        with place.opened("float32") as server:
            np.testing.assert_array_equal(place.answers(server, KEYS[:9]), place.vectors[:9])

    def test_a_table_of_another_program_stays(self, tmp_path):
        """One without a load record, as HugeCTR writes it."""
        with closing(RocksDatabase(tmp_path / "db")) as database:
            database.open_table("hps_et.shop.item", DIM)
            database.insert("hps_et.shop.item", KEYS[:5], vectors_of(3, 5))
        place = Place(tmp_path, "int8", **rocks_db(tmp_path))
        for _ in range(2):
            with place.opened() as server:
                np.testing.assert_array_equal(place.answers(server, KEYS[:9]), stored(place.vectors[:9], "int8"))
            assert tags_in(tmp_path) == ["hps_et.shop.item", "hps_et.shop~int8.item"]


def on_tiers(row_dtype: str, cached: bool, volatile: str, persistent: bool, *exact: str):
    """A combination of tiers, some of which store float32."""
    return pytest.param(
        (row_dtype, cached, volatile, persistent, exact),
        marks=[pytest.mark.redis] if volatile == "redis_cluster" else [],
        id="-".join([row_dtype, "cache" if cached else "direct", volatile, "rocks_db" if persistent else "none", *exact]),
    )


@pytest.fixture
def tiers(request, tmp_path):
    """A place and whether it is cached; Redis is empty."""
    row_dtype, cached, volatile, persistent, exact = request.param
    settings = {"volatile_db": {"type": volatile}} | (rocks_db(tmp_path) if persistent else {})
    if volatile == "redis_cluster":
        settings["volatile_db"] |= emptied(request.getfixturevalue("redis"))
    for tier in exact:
        settings[tier]["row_dtype"] = "float32"
    return Place(tmp_path, row_dtype, **settings), cached


TIERS = [
    on_tiers("int8", True, "hash_map", True),
    on_tiers("float16", False, "hash_map", False),
    on_tiers("bfloat16", True, "redis_cluster", True),
    on_tiers("int8", False, "redis_cluster", False),
    on_tiers("float16", True, "disabled", True),
    on_tiers("int8", True, "hash_map", True, "persistent_db"),
    on_tiers("float16", True, "hash_map", False, "volatile_db"),
    on_tiers("bfloat16", False, "redis_cluster", True, "volatile_db", "persistent_db"),
]


class TestTiers:
    """Every value of a setting meets every other one in some combination, rather than all of them in all."""

    @pytest.mark.parametrize("tiers", TIERS, indirect=True)
    def test_every_tier_answers_the_rows_of_the_format(self, tiers):
        """Lookups, pooled lookups, rows, insertions, deletions, refresh and bad rows, over a restart."""
        place, cached = tiers
        row_dtype, files, written = place.row_dtype, stored(place.vectors, place.row_dtype), vectors_of(5, 200)
        keeps = "persistent_db" in place.settings or place.settings["volatile_db"]["type"] == "redis_cluster"
        for start in range(2):
            with place.opened(gpucache=cached) as server:
                np.testing.assert_array_equal(place.answers(server, KEYS[300:1300]), files[300:1300])
                if start and keeps:
                    check_modified(server, place, written, row_dtype)
                assert modify(server).tobytes() == written.tobytes()
                server.refresh("shop")
                check_modified(server, place, written, row_dtype)
                np.testing.assert_array_equal(server.row(int(KEYS[5]), "shop", "item").vector, stored(written, row_dtype)[5])
                np.testing.assert_array_equal(server.row(int(KEYS[1900]), "shop", "item").vector, files[1900])
                bags = server.lookup_pooled({"item": hps.Bags(KEYS[300:600].reshape(100, 3), combiner="sum")}, "shop")
                sums = files[300:600].reshape(100, 3, DIM).sum(axis=1)
                np.testing.assert_allclose(next(iter(bags.values())), sums, rtol=1e-5, atol=1e-5)
                bad = vectors_of(6, 10)
                bad[7, 3] = TOO_LARGE[row_dtype]
                with pytest.raises(InvalidInputError, match=rf"element 3 of key {KEYS[7]}, which row_dtype {row_dtype}"):
                    server.insert(KEYS[:10], bad, "shop", "item")
                server.drain()
                check_modified(server, place, written, row_dtype)

    def test_files_with_a_row_that_the_format_cannot_hold_are_refused(self, tmp_path):
        place = Place(tmp_path, "int8", **rocks_db(tmp_path))
        with place.opened() as server:
            bad = place.vectors.copy()
            bad[1234, 2] = TOO_LARGE["int8"]
            place.write(3, bad)
            refusal = rf"table hps_et\.shop@3~int8\.item: .*element 2 of key {KEYS[1234]},"
            with pytest.raises(InvalidInputError, match=refusal):
                server.deploy("shop", "3")
            np.testing.assert_array_equal(place.answers(server, KEYS[:1000]), stored(place.vectors[:1000], "int8"))


def rows_in(path: Path, tag: str, keys: np.ndarray, width: int) -> np.ndarray:
    """Read rows that a closed server left, as they are stored."""
    with closing(RocksDatabase(path / "db", read_only=True)) as database:
        database.open_table(tag, width)
        rows, found = np.zeros((keys.size, width), np.float32), np.zeros(keys.size, np.bool_)
        database.fetch(tag, keys, rows, found)
    assert found.all()
    return rows


def exact_rocks_db(path: Path) -> dict:
    settings = rocks_db(path)
    settings["persistent_db"]["row_dtype"] = "float32"
    return settings


class TestExactDatabase:
    """The persistent database stores float32 under tiers of fewer bits."""

    def test_a_restart_in_another_format_goes_on_with_the_same_rows(self, tmp_path):
        """Every format is rounded from what was sent, whatever it has been in between."""
        place = Place(tmp_path, "float32", volatile_db={"type": "disabled"}, **exact_rocks_db(tmp_path))
        with place.opened() as server:
            written = modify(server)
        for row_dtype in ("int8", "float32"):
            with place.opened(row_dtype) as server:
                check_modified(server, place, written, row_dtype)
            (tag,) = tags_in(tmp_path)
        np.testing.assert_array_equal(rows_in(tmp_path, tag, KEYS[:100], DIM), written[:100])
        np.testing.assert_array_equal(rows_in(tmp_path, tag, KEYS[300:], DIM), place.vectors[300:])

    def test_a_database_with_online_writes_does_not_become_exact(self, tmp_path):
        place = Place(tmp_path, "int8", **rocks_db(tmp_path))
        with place.opened() as server:
            written = stored(modify(server), "int8")
        place.settings |= exact_rocks_db(tmp_path)
        with pytest.raises(ConflictError, match="'item' as float32: its online writes are stored as int8"):
            place.opened()
        place.settings |= rocks_db(tmp_path)
        with place.opened() as server:
            check_modified(server, place, written, "int8")

    def test_a_stored_row_that_the_format_cannot_hold_is_refused_and_others_are_answered(self, tmp_path):
        """Another program may have written it."""
        place = Place(tmp_path, "float32", volatile_db={"type": "disabled"}, **rocks_db(tmp_path))
        with place.opened() as server:
            server.insert(KEYS[7:8], np.full((1, DIM), -1e6, np.float32), "shop", "item")
        place.settings |= exact_rocks_db(tmp_path)
        place.settings["persistent_db"]["initialize_after_startup"] = False
        with place.opened("int8", init_ec=False) as server:
            for _ in range(20):  # it is no fault of the database, which goes on answering
                with pytest.raises(
                    DatabaseError, match=r"reading table hps_et\.shop\.item: .* element 0 of key 21, which row_dtype"
                ):
                    place.answers(server, KEYS[:9])
            np.testing.assert_array_equal(place.answers(server, KEYS[8:1000]), stored(place.vectors[8:1000], "int8"))
            server.insert(KEYS[7:8], np.full((1, DIM), 3, np.float32), "shop", "item")
            assert (place.answers(server, KEYS[7:8]) == 3).all()

    @pytest.mark.parametrize(
        "tiers",
        [
            on_tiers("int8", False, "hash_map", True),
            on_tiers("int8", False, "hash_map", True, "persistent_db"),
            on_tiers("int8", False, "redis_cluster", True, "volatile_db"),
        ],
        indirect=True,
    )
    def test_promoted_rows_are_what_the_tier_above_stores(self, tiers):
        place, _ = tiers
        place.settings["volatile_db"] |= {"initial_cache_rate": 0.01, "cache_missed_embeddings": True}
        with place.opened(gpucache=False) as server:
            upper, lower = server.model("shop").chain.databases
            table = upper.stored(server.model("shop").tables[0])
            for _ in range(2):
                np.testing.assert_array_equal(place.answers(server, KEYS[:1000]), stored(place.vectors[:1000], "int8"))
                assert server.drain()
            rows, found = np.zeros((1000, table.width), np.float32), np.zeros(1000, np.bool_)
            assert upper.fetch(table.tag, KEYS[:1000], rows, found) == 1000
            want = place.vectors[:1000] if lower.row_dtype else stored(place.vectors[:1000], "int8")
            want = want if upper.row_dtype else encode("x", place.vectors[:1000], "int8")
            loaded = round(0.01 * ROWS)  # from the files
            np.testing.assert_array_equal(rows[loaded:].view(np.uint32), want[loaded:].view(np.uint32))


@pytest.fixture
def broker(monkeypatch, tmp_path):
    monkeypatch.setitem(IMPLEMENTATIONS["update_log"], "memory", BuiltIn("tests.fakes.memory_log:MemoryLog"))
    broker = MemoryBroker.by_name[str(tmp_path)]
    broker.create(TOPIC.topic)
    return broker


@pytest.mark.parametrize(("row_dtype", "exact"), [("int8", False), ("float16", True)])
def test_rows_of_the_log_are_stored_in_the_format_and_bad_ones_become_dead_letters(tmp_path, broker, row_dtype, exact):
    def check() -> None:
        rows = np.r_[:60, 70:100]
        for _ in range(2):
            np.testing.assert_array_equal(place.answers(server, KEYS[rows]), stored(written[rows], row_dtype))
            assert (place.answers(server, KEYS[60:70]) == 0.5).all()
            np.testing.assert_array_equal(place.answers(server, KEYS[100:300]), stored(place.vectors[100:300], row_dtype))

    source = {"type": "memory", "brokers": str(tmp_path), "poll_timeout_ms": 5}
    place = Place(tmp_path, row_dtype, update_source=source, **(exact_rocks_db if exact else rocks_db)(tmp_path))
    written = vectors_of(8, 100)
    bad = written.copy()
    bad[3, 3] = TOO_LARGE[row_dtype]
    with place.opened() as server:
        for sequence, keys, vectors, deleted in (
            *((100, KEYS[:100], written, NONE), (101, KEYS[:100], bad, NONE)),
            (102, KEYS[50:60], written[50:60] + 1, KEYS[60:70]),
            (99, KEYS[50:60], written[50:60] + 2, NONE),  # late
        ):
            position = broker.append(TOPIC, encode_update(keys, vectors, deleted, sequence=sequence))
            wait_until(lambda at=position: server.updates()[0].positions.get(TOPIC) == at, "the feed caught up")
        (status,) = server.updates()
        assert status.dead_letters == {"row_dtype": 1}
        written[50:60] += 1
        check()
    with place.opened() as server:
        check()
    if exact:
        np.testing.assert_array_equal(rows_in(tmp_path, "hps_et.shop.item", KEYS[:60], DIM), written[:60])


@pytest.mark.redis
class TestSharedRedis:
    """Two replicas disagree on the format of a table in one Redis."""

    @pytest.fixture
    def replica(self, tmp_path, redis):
        place = Place(tmp_path, "float32", volatile_db={"type": "redis_cluster"} | emptied(redis))

        def make(name: str, row_dtype: str, below: bool) -> hps.HPS:
            place.settings.pop("persistent_db", None)
            if below:
                place.settings |= rocks_db(tmp_path / name)
            return place.opened(row_dtype)

        make.place = place
        return make

    def checked(self, place: Place) -> list:
        return check_server(load_configuration(place.path / "ps.json").volatile_db, [TABLE])

    def test_above_persistent_databases_each_has_its_table_and_a_warning_names_both(self, replica, caplog):
        place = replica.place
        with replica("a", "float32", True) as first:
            with replica("b", "int8", True) as second:
                (warning,) = [record.getMessage() for record in caplog.records if "another replica" in record.getMessage()]
                assert "serves table 'item' as float32 (hps_et.shop.item in redis_cluster)" in warning
                assert "this one as int8 (hps_et.shop~int8.item)" in warning
                second.insert(KEYS[:5], np.ones((5, DIM), np.float32), "shop", "item")
                np.testing.assert_array_equal(place.answers(first, KEYS[:500]), place.vectors[:500])
                np.testing.assert_array_equal(place.answers(second, KEYS[5:500]), stored(place.vectors, "int8")[5:500])
            np.testing.assert_array_equal(place.answers(first, KEYS[:500]), place.vectors[:500])
            (warning,) = [one for one in self.checked(place) if one.level == "warning"]
            assert "float32 (hps_et.shop.item)" in warning.text
            assert "int8 (hps_et.shop~int8.item)" in warning.text
        caplog.clear()
        with replica("b", "int8", True) as second:  # nobody uses the other table any more
            assert not [record for record in caplog.records if "another replica" in record.getMessage()]
            assert (place.answers(second, KEYS[:5]) == 1).all()
            assert all(one.level == "good" for one in self.checked(place))

    def test_replicas_of_two_formats_share_float32_rows(self, replica):
        """Each sees what the other wrote, rounded to its own format."""
        place = replica.place
        place.settings["volatile_db"]["row_dtype"] = "float32"
        with replica("a", "float32", False) as first, replica("b", "int8", False) as second:
            written = modify(first)
            check_modified(second, place, written, "int8")
            check_modified(first, place, written, "float32")
            again = vectors_of(12, 5)
            second.insert(KEYS[300:305], again, "shop", "item")
            second.model("shop").refresh(1.0)
            first.refresh("shop")
            np.testing.assert_array_equal(place.answers(first, KEYS[300:305]), again)
            np.testing.assert_array_equal(place.answers(second, KEYS[300:305]), stored(again, "int8"))
            found = check_server(load_configuration(place.path / "ps.json").volatile_db, [TABLE.stored_as("float32")])
            assert all(one.level == "good" for one in found)


class TestCommands:
    def run(self, *arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    def test_they_know_what_is_stored_exactly_and_that_no_tier_has_another_format(self, tmp_path):
        place = Place(tmp_path, "int8", **exact_rocks_db(tmp_path))
        path = place.configured()
        self.run("load", path)
        assert tags_in(tmp_path) == ["hps_et.shop.item"]
        assert "holds 1 of 1 tables" in self.run("check-config", path, "--connect")
        sizes = {
            load["tier"]: load["size_bytes"] for load in json.loads(self.run("plan", path, "--json"))["needs"] if load["table"]
        }
        assert sizes["persistent_db"] > max(4 * DIM * ROWS, sizes["volatile_db"])
        assert "complete, nothing to do" in self.run("load", path)
        for tier in ("volatile_db", "persistent_db"):
            place.settings = {"volatile_db": {"type": "hash_map"}, **rocks_db(tmp_path)}
            place.settings[tier]["row_dtype"] = "float16"
            with pytest.raises(ConfigError, match=rf"{tier}\.row_dtype: got .float16.*rounded twice"):
                place.opened()

    def test_a_load_refuses_another_format_unless_forced(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            modify(server)
        path = place.configured("int8")
        result = CliRunner().invoke(app, ["load", str(path)])
        assert result.exit_code != 0
        assert "its online writes are stored as float32" in result.output
        assert tags_in(tmp_path) == ["hps_et.shop.item"]
        self.run("load", path, "--force")
        with place.opened() as server:
            np.testing.assert_array_equal(place.answers(server, KEYS[:500]), stored(place.vectors[:500], "int8"))

    def test_a_database_with_such_tables_is_checked_and_described(self, tmp_path):
        place, width = Place(tmp_path, "int8", **rocks_db(tmp_path)), row_width(DIM, "int8")
        with place.opened() as server:
            (table,) = server.stats().models[0].tables
            cache, volatile, persistent = table.tiers
            assert (table.dim, table.row_dtype) == (DIM, "int8")
            assert cache.vector_bytes == 4 * width * cache.capacity_rows
            assert volatile.vector_bytes == 4 * width * ROWS
            assert persistent.vector_bytes in (None, 4 * width * ROWS)
            modify(server)
        said = self.run("check-database", tmp_path / "db")
        assert "hps_et.shop~int8.item: 2,000 rows (int8, 12 bytes a row) can be read" in said
        assert re.search(r"item +0 +2,000 +7 \(int8\)", self.run("check-config", tmp_path / "ps.json"))
        (table,) = json.loads(self.run("check-config", tmp_path / "ps.json", "--json"))["tables"]
        assert table["row_dtype"] == "int8"

    def test_a_dead_letter_that_still_does_not_fit_is_not_published_again(self, tmp_path, broker, monkeypatch):
        monkeypatch.setitem(IMPLEMENTATIONS["update_log_writer"], "memory", BuiltIn("tests.fakes.memory_log:MemoryLogWriter"))
        source = {"type": "memory", "brokers": str(tmp_path), "poll_timeout_ms": 5}
        place = Place(tmp_path, "int8", update_source=source, **rocks_db(tmp_path))
        with place.opened() as server:
            broker.append(TOPIC, encode_update(KEYS[:1], np.full((1, DIM), -1e6, np.float32), NONE, sequence=9))
            wait_until(lambda: server.updates()[0].dead_letters == {"row_dtype": 1}, "the dead letter was counted")
        count = len(broker.messages(TOPIC.topic))
        result = CliRunner().invoke(app, ["updates", "replay", str(tmp_path / "ps.json")])
        assert result.exit_code == 1
        assert "which row_dtype int8 cannot hold" in result.output
        assert len(broker.messages(TOPIC.topic)) == count
        place.configured("bfloat16")
        self.run("updates", "replay", tmp_path / "ps.json")
        assert len(broker.messages(TOPIC.topic)) > count
        with place.opened() as server:
            wait_until(lambda: (place.answers(server, KEYS[:1]) < -9e5).all(), "the row was applied")
