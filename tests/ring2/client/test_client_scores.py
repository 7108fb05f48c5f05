"""`Client.score` with a real `hps serve`: the scores of `HPS.score`."""

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


def test_scores_are_those_of_the_server_in_process(client: hps.Client, server: hps.HPS) -> None:
    for samples in (1, 2, 3, 64):
        given = inputs(samples)
        offsets = np.minimum(np.arange(samples + 1) * 2, samples)
        weights = np.arange(samples, dtype=np.float32) + 0.5
        for change in (
            {},
            {"user": hps.Bags(given["item"], offsets)},
            {"user": hps.Bags(given["item"], offsets, weights)},
            {"age": given["age"][:1], "user": hps.Bags(given["item"], offsets[:-1], include_last_offset=False)},
            {name: given[name].tolist() for name in ("item", "age", "known")},
        ):
            assert_equal(client.score("m", given | change, version="1", device_id=0), server.score("m", given | change))


REFUSED: list[tuple[type[Exception], dict[str, Any], dict[str, Any]]] = [
    (hps.UnknownModelError, {}, {"model_name": "x"}),
    (hps.UnknownVersionError, {}, {"version": "9"}),
    (hps.UnknownDeviceError, {}, {"device_id": 7}),
    (hps.InvalidInputError, {"age": None}, {}),
    (hps.InvalidInputError, {"item": np.arange(2)}, {}),
    (hps.InvalidInputError, {"age": np.arange(3)}, {}),
    (hps.InvalidDtypeError, {"age": np.arange(3, dtype=np.uint16)}, {}),
    (hps.TooManyKeysError, inputs(65), {}),
    (hps.RemoteTimeoutError, {}, {"timeout_s": 1e-7}),
]


def test_what_cannot_be_scored_is_refused_and_the_next_request_scored(client: hps.Client, service: ServedProcess) -> None:
    for error, change, options in REFUSED * 2:
        given = {name: one for name, one in (inputs(3) | change).items() if one is not None}
        with pytest.raises(error) as caught:
            client.score(**{"model_name": "m", "inputs": given, **options})
        assert type(caught.value) is error
        assert client.score("m", inputs(3))["pair"].shape == (3, 2)
    addresses = [service.url, service.url.replace("127.0.0.1", "localhost")]
    with hps.connect(addresses, route="keys") as routed, pytest.raises(hps.InvalidInputError, match="without a route"):
        routed.score("m", inputs(3))
    with hps.connect(addresses) as several:
        assert several.score("m", inputs(3)).version == "1"
