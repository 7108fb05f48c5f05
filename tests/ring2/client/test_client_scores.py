"""`Client.score` with a real `hps serve`: the scores of `HPS.score`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
import hps.torch
from tests.servers.served_process import ServedProcess

ROWS, DIM = 50, 4


class Ranker(torch.nn.Module):
    """Two tables that are called as the inputs with their keys, and features of three dtypes; it gives scores and a class."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = torch.nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.item = torch.nn.Embedding(ROWS, DIM)
        self.top = torch.nn.Linear(2 * DIM + 2, 2)

    def forward(self, user: Any, item: Any, age: Any, clicks: Any, known: Any) -> dict[str, Any]:
        numbers = torch.stack([age, clicks.float()], 1) * known[:, None]
        pair = torch.sigmoid(self.top(torch.cat([self.user(user), self.item(item), numbers], 1)))
        return {"pair": pair, "known": known}


def inputs(samples: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, ROWS, (samples, 3)),
        "item": rng.integers(0, ROWS, samples),
        "age": rng.random(samples, np.float32),
        "clicks": rng.integers(0, 9, samples).astype(np.int32),
        "known": rng.random(samples) < 0.5,
    }


def package(directory: Path, version: int) -> None:
    examples = {name: torch.from_numpy(one) for name, one in inputs(4).items()}
    settings = {"max_batch_size": 64, "hit_rate_threshold": 1.1}
    hps.torch.package(Ranker(version).eval(), directory / "m" / str(version), examples, per_request=["age"], settings=settings)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scores")
    package(directory / "models", 1)
    return directory


def document(place: Path) -> dict[str, Any]:
    return {"device": "cpu", "volatile_db": {"type": "hash_map"}, "model_repository": str(place / "models")}


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[hps.HPS]:
    with hps.HPS(document(place)) as server:
        yield server


@pytest.fixture(scope="module")
def service(place: Path) -> Iterator[ServedProcess]:
    with ServedProcess(document(place), place) as served:
        yield served


@pytest.fixture
def client(service: ServedProcess) -> Iterator[hps.Client]:
    with hps.connect(service.url) as made:
        yield made


def assert_equal(got: hps.Scores, expected: hps.Scores) -> None:
    assert got.version == expected.version
    assert list(got.outputs) == list(expected.outputs) == ["pair", "known"]
    for name, one in expected.outputs.items():
        assert (got[name].dtype, got[name].shape) == (one.dtype, one.shape)
        assert got[name].flags.aligned
        np.testing.assert_allclose(got[name], one, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 3, 64])
def test_scores_are_those_of_the_server_in_process(client: hps.Client, server: hps.HPS, samples: int) -> None:
    for seed in range(3):
        given = inputs(samples, seed)
        assert_equal(client.score("m", given), server.score("m", given))
    offsets = np.minimum(np.arange(samples + 1) * 2, samples)
    weights = np.arange(samples, dtype=np.float32) + 0.5
    for bags in (hps.Bags(given["item"], offsets), hps.Bags(given["item"], offsets, weights)):
        assert_equal(client.score("m", given | {"user": bags}), server.score("m", given | {"user": bags}))
    torchs = hps.Bags(given["item"], offsets[:-1], include_last_offset=False)
    once = given | {"age": given["age"][:1], "user": torchs}
    assert_equal(client.score("m", once, version="1", device_id=0), server.score("m", once))
    lists = given | {"item": given["item"].tolist(), "age": given["age"].tolist(), "known": given["known"].tolist()}
    assert_equal(client.score("m", lists), server.score("m", lists))


def test_the_asynchronous_client_scores_as_many_at_once(service: ServedProcess, server: hps.HPS) -> None:
    async def main() -> None:
        async with hps.connect_async(service.url, connections=3) as remote:
            every = [inputs(1 + seed % 5, seed) for seed in range(30)]
            for given, got in zip(every, await asyncio.gather(*(remote.score("m", one) for one in every)), strict=True):
                assert_equal(got, server.score("m", given))
            with pytest.raises(hps.InvalidInputError):
                await remote.score("m", {})

    asyncio.run(main())


def test_lookups_of_tables_that_are_called_as_inputs_stay_lookups(client: hps.Client, server: hps.HPS) -> None:
    keys = {"item": np.arange(6), "user": np.arange(6)}
    for _ in range(3):
        for name, vectors in client.lookup_tables(keys, "m").items():
            assert (vectors == server.lookup(keys[name], "m", name)).all()
        assert client.score("m", inputs(6))["known"].shape == (6,)
    masks = client.lookup_tables({"user": keys["user"] + ROWS - 3, "item": keys["item"]}, "m", return_found=True)[1]
    assert masks["user"].tolist() == [True] * 3 + [False] * 3
    pooled = client.lookup_pooled({"user": hps.Bags(keys["user"], [0, 2, 6], combiner="mean")}, "m")["user"]
    bags = hps.Bags(keys["user"], np.array([0, 2, 6]), combiner="mean")
    assert (pooled == server.lookup_pooled({"user": bags}, "m")["user"]).all()
    assert client.report({"item": keys["item"]}, "m")["item.keys"] == 6


def without(name: str) -> dict[str, Any]:
    return {key: one for key, one in inputs(3).items() if key != name}


@pytest.mark.parametrize(
    ("error", "given", "options"),
    [
        (hps.UnknownModelError, inputs(3), {"model_name": "x"}),
        (hps.UnknownVersionError, inputs(3), {"version": "9"}),
        (hps.UnknownDeviceError, inputs(3), {"device_id": 7}),
        (hps.InvalidInputError, without("age"), {}),
        (hps.InvalidInputError, inputs(3) | {"item": np.arange(2)}, {}),
        (hps.InvalidInputError, inputs(3) | {"age": np.arange(3)}, {}),
        (hps.InvalidDtypeError, inputs(3) | {"age": np.arange(3, dtype=np.uint16)}, {}),
        (hps.TooManyKeysError, inputs(65), {}),
        (hps.RemoteTimeoutError, inputs(3), {"timeout_s": 1e-7}),
    ],
)
def test_what_cannot_be_scored_is_refused_and_the_next_request_scored(
    client: hps.Client, error: type[Exception], given: dict[str, Any], options: dict[str, Any]
) -> None:
    for _ in range(2):
        with pytest.raises(error) as caught:
            client.score(**{"model_name": "m", "inputs": given, **options})
        assert type(caught.value) is error
    assert client.score("m", inputs(3))["pair"].shape == (3, 2)


def test_a_client_that_routes_keys_does_not_score(service: ServedProcess) -> None:
    addresses = [service.url, service.url.replace("127.0.0.1", "localhost")]
    with hps.connect(addresses, route="keys") as routed, pytest.raises(hps.InvalidInputError, match="without a route"):
        routed.score("m", inputs(3))
    with hps.connect(addresses) as several:
        assert several.score("m", inputs(3)).version == "1"
