"""A parameter server with rows of fewer bits, over all tiers; and changes of a deployed table's format."""

import json
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.configuration.load import ModelConfig
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import ConflictError, InvalidInputError
from hps.ground.rows import decode, encode
from hps.lookup.chain import DatabaseChain
from hps.models.carried_rows import CarriedTable
from hps.types import ROW_DTYPES, TableSpec
from tests.servers.redis_server import RedisServer

DIM = 7
ROWS = 3000
KEYS = np.arange(ROWS) * 3
NEW = np.arange(1, 101) * 3 + 1
"""Keys that are in no file."""
FEWER_BITS = ROW_DTYPES[1:]


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
        return {
            "model": "shop",
            "version_path": str(self.path / "models" / "shop"),
            "sparse_files": ["item.model"],
            "embedding_table_names": ["item"],
            "embedding_vecsize_per_table": [DIM],
            "maxnum_catfeature_query_per_table_per_sample": [1000],
            "default_value_for_each_table": [0.5],
            "deployed_device_list": [0],
            "gpucacheper": 0.3,
            "hit_rate_threshold": 1.1,
            "row_dtype": row_dtype,
            **settings,
        }

    def change(self, server: hps.HPS, row_dtype: str, **settings) -> None:
        self.row_dtype = row_dtype
        server.deploy(ModelConfig(**self.entry(row_dtype, **settings)))

    def opened(self, row_dtype: str | None = None, **entry) -> hps.HPS:
        self.row_dtype = row_dtype or self.row_dtype
        document = {"device": "cpu", "models": [self.entry(self.row_dtype, **entry)], **self.settings}
        path = self.path / "ps.json"
        path.write_text(json.dumps(document))
        return hps.HPS(str(path))

    def answers(self, server: hps.HPS, keys: np.ndarray) -> np.ndarray:
        return server.lookup(keys, "shop", "item").copy()


def rocks_db(path: Path) -> dict:
    return {"persistent_db": {"type": "rocks_db", "path": str(path / "db")}}


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


CHAIN = ("int8", "float16", "float32", "bfloat16")


class TestFormatChange:
    """A version gets tables of another format, with what was written online; the rows of the files are those of the files."""

    @pytest.mark.parametrize("volatile", ["hash_map", "disabled"])
    def test_writes_go_along_while_it_serves(self, tmp_path, volatile):
        place = Place(tmp_path, "float32", volatile_db={"type": volatile}, **rocks_db(tmp_path))
        with place.opened() as server:
            written = modify(server)
            for step, row_dtype in enumerate(CHAIN):
                place.change(server, row_dtype)
                check_modified(server, place, written, row_dtype)
                written = stored(written, row_dtype)
                written[50 + step] = step
                server.insert(KEYS[50 + step : 51 + step], written[50 + step : 51 + step], "shop", "item")
        assert len(tags_in(tmp_path)) == 1
        for _ in range(2):
            with place.opened() as server:
                check_modified(server, place, written, CHAIN[-1])

    @pytest.mark.parametrize("volatile", ["hash_map", "disabled"])
    def test_writes_go_along_over_restarts(self, tmp_path, volatile):
        place = Place(tmp_path, "float32", volatile_db={"type": volatile}, **rocks_db(tmp_path))
        with place.opened() as server:
            written = modify(server)
        for row_dtype in CHAIN:
            for _ in range(2):
                with place.opened(row_dtype) as server:
                    check_modified(server, place, written, row_dtype)
                assert len(tags_in(tmp_path)) == 1
            written = stored(written, row_dtype)

    def test_without_online_writes_it_is_loaded_from_the_files(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            for row_dtype in CHAIN:
                place.change(server, row_dtype)
                np.testing.assert_array_equal(place.answers(server, KEYS[:1000]), stored(place.vectors[:1000], row_dtype))
        with closing(RocksDatabase(tmp_path / "db")) as database:
            (tag,) = [tag for tag in database.tags() if tag.startswith("hps_et.shop")]
            database.open_table(tag, TableSpec("shop", "item", DIM, 0, 1, row_dtype=CHAIN[-1]).width)
            assert not database.load_record(tag).modified

    @pytest.mark.parametrize("row_dtype", ["int8", "float16"])
    def test_what_is_written_meanwhile_is_not_lost(self, tmp_path, row_dtype):
        """One thread writes without a pause; every write that returned is answered after the change."""
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        last, stop = {}, threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                key = int(KEYS[number % 500])
                if number % 7:
                    row = np.full((1, DIM), number % 2000, np.float32)
                    server.insert([key], row, "shop", "item", version=versions[number % 2])
                    last[key] = number % 2000
                else:
                    server.delete([key], "shop", "item", version=versions[number % 2])
                    last[key] = None

        versions = (None, "1")
        with place.opened() as server:
            modify(server)
            writer = threading.Thread(target=write)
            writer.start()
            try:
                for _ in range(3):
                    place.change(server, row_dtype)
                    place.change(server, "bfloat16")
                    place.change(server, row_dtype)
            finally:
                stop.set()
                writer.join()
            keys = np.array(list(last))
            want = np.array([0.5 if last[key] is None else last[key] for key in keys.tolist()], np.float32)
            want = np.where(want == 0.5, want, stored(stored(want[:, None], "bfloat16"), row_dtype)[:, 0])
            got = place.answers(server, keys)[:, 0]
        assert len(last) > 100
        np.testing.assert_allclose(got, want, rtol=2**-7)  # some went through bfloat16

    def test_a_row_that_the_new_format_cannot_hold_ends_the_change(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            server.insert(KEYS[7:8], np.full((1, DIM), -1e6, np.float32), "shop", "item")
            with pytest.raises(InvalidInputError, match=r"carrying rows of hps_et\.shop\.item over .*element 0 of key 21"):
                place.change(server, "int8")
            assert (place.answers(server, KEYS[7:8]) == -1e6).all()
            server.insert(KEYS[7:8], np.full((1, DIM), 3, np.float32), "shop", "item")
            place.change(server, "int8")
            assert (place.answers(server, KEYS[7:8]) == 3).all()

    @pytest.mark.parametrize("step", ["copy", "catch_up"])
    def test_an_interrupted_change_starts_over(self, tmp_path, monkeypatch, step):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))

        def fail(*args):
            raise RuntimeError("interrupted")

        with place.opened() as server:
            written = modify(server)
        with monkeypatch.context() as patch:
            patch.setattr(CarriedTable, step, fail)
            with pytest.raises(RuntimeError, match="interrupted"):
                place.opened("int8")
        with place.opened("float32") as server:  # the second round: it goes on in the old format, which is written again
            check_modified(server, place, written, "float32")
            written[:100] += 1
            server.insert(KEYS[:100], written[:100], "shop", "item")
        for _ in range(2):
            with place.opened("int8") as server:
                check_modified(server, place, written, "int8")

    def test_the_old_table_counts_no_more_once_the_new_one_has_taken_over(self, tmp_path, monkeypatch):
        """Even if the process ends before it is dropped."""
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            modify(server)
        with monkeypatch.context() as patch:
            patch.setattr(DatabaseChain, "discard", lambda self, tag: None)
            with place.opened("int8") as server:
                written = modify(server, seed=9)
        with place.opened("float32") as server:
            check_modified(server, place, stored(written, "int8"), "float32")

    def test_force_gives_up_what_was_written(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            modify(server)
            server.deploy(ModelConfig(**place.entry("int8")), force=True)
            np.testing.assert_array_equal(place.answers(server, KEYS[:500]), stored(place.vectors[:500], "int8"))

    def test_a_database_that_loads_nothing_refuses_another_format(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened():
            pass
        place.settings["persistent_db"]["initialize_after_startup"] = False
        with pytest.raises(ConflictError, match="has table 'item' as float32, not int8"):
            place.opened("int8")
        with place.opened("float32") as server:
            np.testing.assert_array_equal(place.answers(server, KEYS[:9]), place.vectors[:9])

    def test_in_memory_alone_writes_go_along_while_the_process_lives(self, tmp_path):
        place = Place(tmp_path, "float32")
        with place.opened() as server:
            written = modify(server)
            for row_dtype in CHAIN:
                place.change(server, row_dtype)
                check_modified(server, place, written, row_dtype)
                written = stored(written, row_dtype)

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

    def test_after_another_version_the_older_formats_are_gone(self, tmp_path):
        place = Place(tmp_path, "float32", **rocks_db(tmp_path))
        with place.opened() as server:
            modify(server)
            place.change(server, "int8")
            place.write(2, place.vectors + 1)
            server.deploy("shop")
            np.testing.assert_array_equal(place.answers(server, KEYS[:9]), stored(place.vectors[:9] + 1, "int8"))
            server.rollback("shop")
            assert (place.answers(server, KEYS[200:300]) == 0.5).all()
