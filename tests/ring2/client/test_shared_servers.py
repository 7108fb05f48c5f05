"""Servers with shares of the tables, and the clients that route keys to them, by every protocol."""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.client import routing
from hps.errors import InvalidInputError, MisplacedKeysError, MissingShareError, PartialWriteError, UnauthorizedError
from hps.ground.shares import TableShare, share_indices
from hps.testing.waiting import wait_until
from tests.servers.load import Load
from tests.servers.running_service import document_of, model_of, running_service, samples

ROWS, DIMS, DEFAULT = 900, {"item": 4, "user": 8}, -1.0
KEYS = np.arange(ROWS)
ADMIN = "admin-token"


def vectors_of(name, keys):
    keys = np.asarray(keys)
    vectors = (keys[:, None] * 8.0 + np.arange(DIMS[name])).astype(np.float32)
    vectors[(keys < 0) | (keys >= ROWS)] = DEFAULT
    return vectors


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("shares")
    for name in DIMS:
        hps.write_sparse_model(place / name, (KEYS, vectors_of(name, KEYS)))
    return place


def entry_of(models, share):
    changes = {"hit_rate_threshold": 1.1, "default_value_for_each_table": [DEFAULT] * 2, "max_batch_size": 5000}
    return model_of("m", [models / name for name in DIMS], DIMS, shard=share or None, **changes)


@pytest.fixture
def serve(models):
    """Serve a share; returns the service."""
    with ExitStack() as opened:

        def serve(share="", **more):
            document = document_of(entry_of(models, share), service={"admin_token": ADMIN})
            return opened.enter_context(running_service(document, **more))

        yield serve


def check(tables, keys):
    for name, vectors in tables.items():
        np.testing.assert_array_equal(vectors, vectors_of(name, keys[name]))


def test_routed_clients_answer_as_one_server_does(serve):
    rng = np.random.default_rng(3)
    urls = [serve(share).url for share in ("1/3", "0/3", "2/3", "0/3")]
    with hps.connect(urls, route="keys") as client:
        for size in (0, 1, 30, 2000):
            keys = {name: rng.integers(-20, ROWS + 20, size) for name in DIMS}
            tables, found = client.lookup_tables(keys, "m", return_found=True)
            check(tables, keys)
            for name in DIMS:
                np.testing.assert_array_equal(found[name], (keys[name] >= 0) & (keys[name] < ROWS))
            out = {name: np.empty((size, dim), np.float32) for name, dim in DIMS.items()}
            client.lookup_tables(keys, "m", out=out)
            check(out, keys)

    async def look_up():
        async with hps.connect_async(urls, route="keys") as client:
            keys = rng.integers(-20, ROWS + 20, 500)
            np.testing.assert_array_equal(await client.lookup(keys, "m", "user"), vectors_of("user", keys))

    asyncio.run(look_up())


BAGS = {
    "sum": hps.Bags(np.arange(-3, 97), np.arange(0, 101, 5)),
    "weighted": hps.Bags(np.arange(100) * 9, np.arange(0, 101, 4), np.linspace(0.5, 2, 100, dtype=np.float32), combiner="mean"),
    "padded": hps.Bags(np.arange(60).reshape(20, 3) % 31, combiner="sqrtn", padding_key=5, max_norm=40.0),
    "largest": hps.Bags(np.arange(80)[::-1].copy(), np.array([0, 30, 30, 80]), combiner="max"),
    "none": hps.Bags([], [0, 0]),
}


def test_pooled_lookups_of_tables_that_are_split_are_those_of_one_server(serve):
    torch = pytest.importorskip("torch")
    urls, whole = [serve(share).url for share in ("1/3", "0/3", "2/3", "0/3")], serve().url
    with (
        hps.connect(urls, route="keys") as client,
        hps.connect(whole) as one,
        hps.connect([whole, urls[0]], route="keys") as both,
    ):
        for name, bags in BAGS.items():
            tables = {"item": bags, "user": BAGS["sum"]}
            expected = one.lookup_pooled(tables, "m")
            out = {
                table: np.empty(vectors.shape, np.float16 if name == "sum" else np.float32)
                for table, vectors in expected.items()
            }
            found, version = client.lookup_pooled(tables, "m", return_version=True)
            client.lookup_pooled(tables, "m", out=out)
            for table, vectors in expected.items():
                np.testing.assert_allclose(found[table], vectors, rtol=1e-6)
                np.testing.assert_allclose(out[table], vectors, rtol=1e-3 if name == "sum" else 1e-6)
                np.testing.assert_allclose(both.lookup_pooled(tables, "m")[table], vectors, rtol=1e-6)
            assert version == "1"
        expected = one.lookup_pooled({"user": BAGS["sum"]}, "m")["user"]
        rounded = torch.empty(20, 8, dtype=torch.bfloat16)
        client.lookup_pooled({"user": BAGS["sum"]}, "m", out={"user": rounded})
        np.testing.assert_allclose(rounded.float().numpy(), expected, rtol=1e-2)
        with pytest.raises(InvalidInputError, match="reads all vectors of its samples on one server"):
            client.score("m", {"item": [[1]]})

    async def pool():
        async with hps.connect_async(urls, route="keys") as client:
            found = await client.lookup_pooled({"user": BAGS["sum"]}, "m")
            np.testing.assert_allclose(found["user"], expected, rtol=1e-6)

    asyncio.run(pool())


def test_writes_reach_every_server_of_their_keys_and_name_those_that_were_not_acknowledged(serve, models):
    keys = np.concatenate([KEYS, ROWS + np.arange(50)])
    leaving = running_service(document_of(entry_of(models, "1/2"), service={"admin_token": ADMIN}))
    with ExitStack() as last:
        urls = [serve("0/2").url, serve("1/2").url, last.enter_context(leaving).url]

        def check_all(expected):
            for share, url in zip(("0/2", "1/2", "1/2"), urls, strict=True):
                own = TableShare.parse(share).owns(keys)
                with hps.connect(url) as client:
                    np.testing.assert_array_equal(client.lookup(keys[own], "m", "item"), expected[own])

        with hps.connect(urls, token=ADMIN, route="keys") as client:
            written = vectors_of("item", keys) + 0.5
            assert client.insert(keys, written, "m", "item") == "1"
            check_all(written)
            assert client.delete(keys[:10], "m", "item") == "1"
            written[:10] = DEFAULT
            check_all(written)
            with pytest.raises(InvalidInputError):
                client.insert(keys, written[:5], "m", "item")
            last.close()
            with pytest.raises(PartialWriteError) as caught:
                client.insert(keys, written + 1, "m", "item")
            assert caught.value.keys.tolist() == keys[TableShare(1, 2).owns(keys)].tolist()
            assert list(caught.value.errors) == [urls[2]]
            np.testing.assert_array_equal(client.lookup(keys, "m", "item"), written + 1)
        with hps.connect(urls[:2], route="keys") as client, pytest.raises(UnauthorizedError):
            client.insert(keys, written, "m", "item")

    async def write():
        async with hps.connect_async(urls[:2], token=ADMIN, route="keys") as client:
            assert await client.insert(keys, written, "m", "item") == "1"
            np.testing.assert_array_equal(await client.lookup(keys, "m", "item"), written)

    asyncio.run(write())


def test_one_server_refuses_keys_of_other_shares_by_every_protocol(serve):
    tritonclient = pytest.importorskip("tritonclient.grpc")
    service = serve("1/3", grpc=True)
    share = TableShare(1, 3)
    own, foreign = KEYS[share.owns(KEYS)], KEYS[~share.owns(KEYS)]
    with hps.connect(service.url, token=ADMIN) as client:
        np.testing.assert_array_equal(client.lookup(own, "m", "item"), vectors_of("item", own))
        for keys in (foreign[:1], [*own[:7], foreign[0]], [10**9 + int(np.argmin(share.owns(10**9 + np.arange(64))))]):
            with pytest.raises(MisplacedKeysError, match=r"status 421"):
                client.lookup(keys, "m", "item")
        with pytest.raises(MisplacedKeysError):
            client.lookup_pooled({"item": hps.Bags([own[0], foreign[0]], [0, 2])}, "m")
        with pytest.raises(MisplacedKeysError):
            client.insert([own[0], foreign[0]], np.zeros((2, 4)), "m", "item")
        with pytest.raises(MisplacedKeysError):
            client.delete(foreign[:1], "m", "item")
        with pytest.raises(MisplacedKeysError):
            client.row(int(foreign[0]), "m", "item")
        np.testing.assert_array_equal(client.lookup(own, "m", "item"), vectors_of("item", own))
        assert client.tables("m") == DIMS
    answer = service.client.post("/v1/models/m/lookup", json={"tables": {"item": [int(foreign[0])]}})
    assert (answer.status_code, answer.reason_phrase) == (421, "Misdirected Request")
    assert "belong to other shares than 1/3" in answer.json()["error"]
    with tritonclient.InferenceServerClient(service.grpc) as client:
        keys = tritonclient.InferInput("item", [1], "INT64")
        keys.set_data_from_numpy(foreign[:1])
        with pytest.raises(Exception, match="FAILED_PRECONDITION"):
            client.infer("m", [keys])
    admin = {"authorization": f"Bearer {ADMIN}"}
    assert service.client.get("/v2/models/m").json()["shard"] == {"index": 1, "of": 3}
    assert service.client.get("/v1/models", headers=admin).json()["models"][0]["shard"] == {"index": 1, "of": 3}
    assert service.client.get("/v1/stats", headers=admin).json()["server"]["models"][0]["shard"] == "1/3"
    assert (samples(service)["hps_model_shard", "m"], samples(service)["hps_model_shards", "m"]) == (1, 3)


def test_a_server_without_a_share_says_none(serve):
    assert "shard" not in serve().client.get("/v2/models/m").json()


def test_a_share_without_servers_costs_only_its_keys(serve):
    urls = [serve("0/2").url, "http://127.0.0.1:9"]  # nobody listens there
    with hps.connect(urls, route="keys") as client:
        own = KEYS[share_indices(KEYS, 2) == 0]
        np.testing.assert_array_equal(client.lookup(own, "m", "item"), vectors_of("item", own))
        with pytest.raises(MissingShareError, match="no server of share 1/2 answers"):
            client.lookup(KEYS, "m", "item")


def test_missing_shares_are_named(serve):
    urls = [serve(share).url for share in ("0/3", "2/3")]
    with hps.connect(urls, route="keys") as client, pytest.raises(MissingShareError, match="of 3 shares none has 1"):
        client.lookup(KEYS[:1], "m", "item")


def test_growing_from_2_to_3_fails_no_lookup(serve, models, monkeypatch):
    """Servers of three shares start while those of two are asked, and then these leave."""
    monkeypatch.setattr(routing, "_FIRST_REST_S", 0.05)
    monkeypatch.setattr(routing, "_LONGEST_REST_S", 0.05)

    def look_up(rng):
        keys = {name: rng.integers(-20, ROWS + 20, 200) for name in DIMS}
        found = client.lookup_tables(keys, "m")
        return [name for name in DIMS if not np.array_equal(found[name], vectors_of(name, keys[name]))]

    def layouts():
        load.more(1)
        known = client._router._shares["m"]
        return [(layout.of, layout.missing) for layout in known.layouts]

    with ExitStack() as old:
        entry = entry_of(models, "0/2"), entry_of(models, "1/2")
        before = [old.enter_context(running_service(document_of(each))) for each in entry]
        after = [serve(f"{index}/3", ready=False) for index in range(3)]  # they answer 503 until they are loaded
        with hps.connect([service.url for service in (*before, *after)], route="keys") as client, Load(look_up, 2) as load:
            load.more(5)
            wait_until(lambda: layouts() == [(3, ()), (2, ())], "the client knows all servers")
            load.more(5)
            old.close()
            load.more(20)
        assert load.problems == []


def test_servers_need_their_tokens_to_say_their_shares(models):
    document = document_of(entry_of(models, "0/2"), service={"bearer_token": "read"})
    with running_service(document) as service, hps.connect([service.url, "http://127.0.0.1:9"], route="keys") as client:  # noqa: SIM117
        with pytest.raises(UnauthorizedError):
            client.lookup([1], "m", "item")
