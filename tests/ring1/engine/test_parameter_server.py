import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch

import hps
from hps.cache.cpu.cache import NumpyCache
from hps.ground.progress import NoProgress
from hps.ground.registry import IMPLEMENTATIONS
from hps.testing.readers import reading
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.running_service import document_of, model_of

ROWS = 500
DIMS = {"user": 4, "item": 7}


def vectors_of(keys, dim):
    keys = np.asarray(keys, np.int64)
    return (keys[:, None] * 8 + np.arange(dim)).astype(np.float32)


def write_models(directory, keys):
    for table, dim in DIMS.items():
        hps.write_sparse_model(directory / f"{table}.model", (keys, vectors_of(keys, dim)), overwrite=True)


@pytest.fixture
def configuration(tmp_path):
    write_models(tmp_path, np.arange(-10, ROWS - 10))
    sources = [tmp_path / f"{table}.model" for table in DIMS]
    changes = {"default_value_for_each_table": [0.5, -2.0], "gpucacheper": 0.3, "hit_rate_threshold": 1.1}
    changes |= {"max_batch_size": 50, "maxnum_catfeature_query_per_table_per_sample": [2, 5], "num_of_worker_buffer_in_pool": 4}
    return document_of(model_of("ranker", sources, DIMS, **changes), persistent=tmp_path / "rocksdb")


@pytest.fixture
def server(configuration):
    with hps.HPS(configuration) as server:
        yield server


@pytest.mark.parametrize("table", [1, "item", np.int64(1)])
def test_lookup_returns_vectors_and_defaults_of_a_table_by_name_or_number(server, table):
    vectors, found = server.lookup([3, -10, 3, 10_000], "ranker", table, return_found=True)
    assert vectors.dtype == np.float32
    assert found.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(vectors[:3], vectors_of([3, -10, 3], 7))
    np.testing.assert_array_equal(vectors[3], np.float32(-2))
    assert server.lookup([], "ranker", table).shape == (0, 7)
    for dtype in (np.int64, np.int32, np.uint8, np.uint64):  # bit for bit
        keys = np.array([7, 9, 11] if dtype is np.uint8 else [7, 9, -3]).astype(dtype)
        np.testing.assert_array_equal(server.lookup(keys, "ranker", table), vectors_of(keys.astype(np.int64), 7))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        *[(keys, hps.InvalidDtypeError) for keys in ([1.5], ["a"], [True, False])],
        *[(keys, hps.InvalidInputError) for keys in ([[1, 2]], 5, [2**70], [[1], [2, 3]])],
        (np.zeros(101, np.int64), hps.TooManyKeysError),
    ],
)
def test_wrong_keys_are_typed_errors(server, keys, error):
    with pytest.raises(error):
        server.lookup(keys, "ranker", "user")


def test_unknown_names_are_typed_errors_that_name_what_is_known(server):
    for error, message, *names in (
        (hps.UnknownModelError, "ranker", "rankre", 0),
        *[(hps.UnknownTableError, r"0 \(user\), 1 \(item\)", "ranker", table) for table in (2, -1, "usr", True)],
        (hps.UnknownDeviceError, r"\[0\]", "ranker", 0, 3),
    ):
        with pytest.raises(error, match=message):
            server.lookup([1], *names)


def test_lookup_tables_answers_several_tables_at_once_also_into_the_outputs_it_is_given(server):
    vectors, found = server.lookup_tables({"item": [1, 2], "user": [3, 999]}, "ranker", return_found=True)
    assert list(vectors) == ["item", "user"]
    np.testing.assert_array_equal(vectors["item"], vectors_of([1, 2], 7))
    assert found["user"].tolist() == [True, False]
    outs = {"user": torch.zeros(2, 4), "item": np.zeros((1, 7), np.float32)}
    assert server.lookup_tables({"user": torch.tensor([1, 2]), "item": [3]}, "ranker", out=outs) == outs
    np.testing.assert_array_equal(outs["user"].numpy(), vectors_of([1, 2], 4))
    np.testing.assert_array_equal(outs["item"], vectors_of([3], 7))


def test_lookup_fromdlpack_writes_tensors_in_place_and_leaves_capsules_usable(server):
    out = torch.full((2, 2, 7), torch.nan)
    assert server.lookup_fromdlpack(torch.tensor([[1, 2], [3, 4]]), out, "ranker", "item") is None
    np.testing.assert_array_equal(out.numpy().reshape(4, 7), vectors_of([1, 2, 3, 4], 7))
    keys, capsule = (torch.utils.dlpack.to_dlpack(one) for one in (torch.tensor([5, 6]), torch.zeros(2, 7)))
    for _ in range(2):
        server.lookup_fromdlpack(keys, capsule, "ranker", 1, 0)
    np.testing.assert_array_equal(torch.utils.dlpack.from_dlpack(capsule).numpy(), vectors_of([5, 6], 7))


@pytest.mark.parametrize("counts", [(3, 5), (0, 4), (4, 0), (0, 0)])
def test_lookup_concatenated_answers_all_tables_from_one_run_of_keys(server, counts):
    keys = np.random.default_rng(1).integers(-10, ROWS + 10, sum(counts))
    pieces = {name: keys[start : start + n] for name, start, n in zip(DIMS, (0, counts[0]), counts, strict=True)}
    wanted, masks = server.lookup_tables(pieces, "ranker", return_found=True)
    out = torch.full((sum(n * dim for n, dim in zip(counts, DIMS.values(), strict=True)) + 3,), -1.0)
    found = server.lookup_concatenated(torch.from_numpy(keys), counts, out, "ranker", return_found=True)
    np.testing.assert_array_equal(out[:-3], np.concatenate([wanted[name].ravel() for name in DIMS]))
    np.testing.assert_array_equal(found, np.concatenate([masks[name] for name in DIMS]))
    assert out[-3:].tolist() == [-1.0] * 3  # beyond what was asked for
    assert server.lookup_concatenated(keys, counts, out, "ranker") is None


@pytest.mark.parametrize(
    ("counts", "floats", "message"),
    [
        *[((3,), 99, "expected 2 of them"), ((3, 2, 1), 99, "expected 2 of them"), ((7, -1), 99, "none negative")],
        *[((3, 4), 99, "got 6 keys, expected 7"), ((3, 2), 99, "got 6 keys, expected 5")],
        ((3, 3), 3 * sum(DIMS.values()) - 1, "output"),
        *[(counts, 99, "expected integers") for counts in ([5.0, 1], ["1", 1], [None, 2], 6, np.array([5.0, 1.0]))],
    ],
)
def test_lookup_concatenated_refuses_what_does_not_fit(server, counts, floats, message):
    with pytest.raises(hps.InvalidInputError, match=message):
        server.lookup_concatenated(np.arange(6), counts, np.zeros(floats, np.float32), "ranker", return_found=True)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_counts_of_small_integers_do_not_wrap(server, dtype):
    keys, out = np.arange(200), np.zeros(100 * (4 + 7), np.float32)
    found = server.lookup_concatenated(keys, np.array([100, 100], dtype), out, "ranker", return_found=True)
    assert found.size == 200
    np.testing.assert_array_equal(out[:400].reshape(100, 4), vectors_of(keys[:100], 4))
    np.testing.assert_array_equal(out[400:].reshape(100, 7), vectors_of(keys[100:], 7))


@pytest.mark.parametrize(
    "vectors",
    [
        *[[[1, 2, 3, 4], [1, 2]], np.zeros((2, 3), np.float32), torch.zeros(2, 4, dtype=torch.bfloat16), None],
        *[torch.zeros(2, 4, requires_grad=True), np.zeros((2, 4), np.complex64), [["1", "2", "3", "4"]] * 2],
    ],
)
def test_vectors_of_the_wrong_kind_are_typed_errors_and_change_nothing(server, vectors):
    with pytest.raises(hps.InvalidInputError, match=r"reading vectors|\(2, 3\)"):
        server.insert([1, 2], vectors, "ranker", "user")
    np.testing.assert_array_equal(server.lookup([1, 2], "ranker", "user"), vectors_of([1, 2], 4))


def test_undeploying_ends_a_refresh_that_pauses(server):
    server.lookup([1, 2], "ranker", 0)
    deployment = server.model("ranker")
    with ThreadPoolExecutor(1) as pool:
        refreshing = pool.submit(deployment.refresh, 1e-300)  # for ever, nearly
        wait_until(lambda: deployment.changes.running, "the refresh began")
        try:
            assert deployment.close()
            assert isinstance(refreshing.exception(PATIENCE_S), hps.NotReadyError)
        finally:
            deployment.refresher.stop()


@pytest.mark.parametrize(
    ("written_as", "read_as", "loaded_again"),
    [("dynamic", "static", True), ("static", "uvm", False), ("uvm", "dynamic", False), ("static", "static", False)],
)
def test_restart_serves_online_updates_from_the_persistent_database(configuration, written_as, read_as, loaded_again):
    new, [model] = np.array([[4, 3, 2, 1], [8, 7, 6, 5]], np.float32), configuration["models"]
    model.update(cache_refresh_percentage_per_iteration=1.0, embedding_cache_type=written_as)
    with hps.HPS(configuration) as server:
        server.lookup([-10, -9], "ranker", 0)
        server.insert([-10, 7000], new, "ranker", 0)
        server.delete([-9], "ranker", "user")
        np.testing.assert_array_equal(server.lookup([-10, 7000], "ranker", 0), new)
    model["embedding_cache_type"] = read_as
    configuration["persistent_db"]["initialize_after_startup"] = loaded_again
    with hps.HPS(configuration) as server:
        vectors, found = server.lookup([-10, 7000, -9, 1], "ranker", 0, return_found=True)
    np.testing.assert_array_equal(vectors[:3], [*new, [0.5] * 4])
    assert found.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("kind", "tiers"), [("static", ["volatile_db"]), ("static", []), ("dynamic", [])])
def test_a_modification_that_no_database_would_keep_is_refused(configuration, kind, tiers):
    configuration["models"][0]["embedding_cache_type"] = kind
    for tier in {"volatile_db", "persistent_db"}.difference(tiers):
        configuration[tier] = {"type": "disabled"}
    with hps.HPS(configuration) as server:
        with pytest.raises(hps.InvalidInputError, match="no database that would keep it"):
            server.insert([1], np.ones((1, 4), np.float32), "ranker", 0)
        with pytest.raises(hps.InvalidInputError, match="no database that would keep it"):
            server.delete([1], "ranker", 0)


def test_inserts_that_a_read_only_database_refuses_do_not_stop_lookups_and_a_closed_server_says_so(configuration):
    hps.HPS(configuration).close()
    configuration["persistent_db"]["read_only"] = True
    server = hps.HPS(configuration)
    for _ in range(5):
        with pytest.raises(hps.DatabaseError):
            server.insert([1], np.zeros((1, 4), np.float32), "ranker", "user")
    np.testing.assert_array_equal(server.lookup(range(90), "ranker", "user"), vectors_of(range(90), 4))
    server.stats()
    for _ in range(2):
        server.close()
    for call in (lambda: server.lookup([1], "ranker", 0), server.stats):
        with pytest.raises(hps.NotReadyError):
            call()


def test_cuda_without_a_gpu_is_an_error_that_says_what_is_missing(configuration):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    configuration["device"] = "cuda"
    with pytest.raises((hps.DeviceError, hps.MissingDependencyError)):
        hps.HPS(configuration)


class LoadsOneTable(NoProgress):
    """A progress that ends the load of the second table."""

    def start(self, tag, rows, size_bytes):
        if tag.endswith(".item"):
            raise InterruptedError(tag)


def test_a_model_that_could_not_be_deployed_leaves_nothing_behind(configuration, tmp_path):
    vectors = tmp_path / "item.model" / "emb_vector"
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-4])
    with pytest.raises(hps.ModelFileError):
        hps.HPS(configuration)
    vectors.write_bytes(content)
    with hps.HPS(configuration) as server:
        assert server.models == ("ranker",)
    del configuration["persistent_db"]
    with hps.HPS(configuration, deploy_models=False) as server:
        model = server.config.models[0]
        with pytest.raises(InterruptedError, match="item"):
            server.deploy(model, progress=LoadsOneTable())
        assert server.models == ()
        write_models(tmp_path, np.arange(5))  # a table that was loaded before the failure has fewer rows now
        server.deploy(model)
        assert not server.lookup([5, 6], "ranker", 0, return_found=True)[1].any()


class WarmsOneTable(NumpyCache):
    """An embedding cache whose memory fails when its second table is warmed up."""

    made: ClassVar[list[NumpyCache]] = []

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made.append(self)

    def insert(self, table, keys, vectors):
        if table == 1:
            raise hps.DeviceMemoryError("warming up: told to fail")
        super().insert(table, keys, vectors)


def test_a_model_that_could_not_be_warmed_up_gives_back_its_cache_and_its_threads(configuration, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cpu", (f"{__name__}:WarmsOneTable", "nothing"))
    configuration["models"][0]["cache_refresh_percentage_per_iteration"] = 1.0
    before = set(threading.enumerate())
    with pytest.raises(hps.DeviceMemoryError):
        hps.HPS(configuration)
    [cache] = WarmsOneTable.made
    with pytest.raises(hps.NotReadyError):
        cache.dump(0)
    wait_until(lambda: not _ours(set(threading.enumerate()) - before), "its threads have ended")


@pytest.mark.parametrize(("cached", "threads"), [(True, 3), (False, 3), (True, 1)])
def test_threads_that_share_a_large_lookup_are_as_many_as_configured_and_end_with_the_server(tmp_path, cached, threads):
    keys = np.arange(20_000)
    write_models(tmp_path, keys)
    sources = [tmp_path / f"{table}.model" for table in DIMS]
    settings = {"max_batch_size": 20_000, "gpucache": cached, "hit_rate_threshold": 1.1}
    before = set(threading.enumerate())
    with hps.HPS(document_of(model_of("ranker", sources, DIMS, **settings)) | {"fetch_threads": threads}) as server:
        np.testing.assert_array_equal(server.lookup(keys[::-1], "ranker", "item"), vectors_of(keys[::-1], 7))
        wait_until(lambda: len(_ours(threading.enumerate(), "hps-piece")) == threads - 1, "those of other servers have ended")
    wait_until(lambda: not _ours(set(threading.enumerate()) - before), "its threads have ended")


def _ours(threads, prefix="hps"):
    return [thread for thread in threads if thread.name.startswith(prefix)]


def test_concurrent_lookups_and_updates_never_show_a_wrong_vector(server):
    """Row j of key k at version v is k * 64 + v in every element: torn, foreign and stale vectors show."""
    keys = np.arange(40)
    server.insert(keys, np.repeat(keys[:, None] * 64.0, 4, 1).astype(np.float32), "ranker", "user")
    written = 0

    def read(rng):
        ask = rng.choice(keys, 60)
        floor = written
        got = server.lookup(ask, "ranker", "user")
        version = got[:, 0] - ask * 64.0
        assert (got == got[:, :1]).all()
        assert (version >= floor).all()
        assert (version <= written + 1).all()
        return ask.size

    with reading(read) as checked:
        for version in range(1, 20):
            server.insert(keys, np.repeat(keys[:, None] * 64.0 + version, 4, 1).astype(np.float32), "ranker", "user")
            written = version
    assert min(checked) > 0
