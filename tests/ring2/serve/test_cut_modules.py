"""Modules that were cut at their lookups, from `hps.torch.package` to scores over the wires: they are the module's."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from tests.servers.running_service import document_of
from tests.servers.served_process import ServedProcess
from tests.servers.wires import RawHTTP, Stubs, TritonGRPC, TritonJSON

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

import hps.torch  # noqa: E402

ROWS, DIM = 50, 4
HISTORY = [[3, 4, 5, 0, 0], [1, 2, 3, 4, 5], [9, 0, 0, 0, 0]]


class Lists(nn.Module):
    """A DLRM's interface: lists of keys and of offsets; ids are hashed, and one of them is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(37, DIM)
        self.bags = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(2)])
        self.top = nn.Linear(3 * DIM + 1, 1)

    def forward(self, user: Any, age: Any, lS_o: Any, lS_i: Any) -> Any:
        bags = [bag(keys, offsets) for bag, keys, offsets in zip(self.bags, lS_i, lS_o, strict=True)]
        return self.top(torch.cat([self.user(user % 37), age[:, None], *bags], 1)).squeeze(1)


class Candidates(nn.Module):
    """A dict of a history with a mask, and of candidates, each of which gets a score."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        mask = (batch["hist"] != 0).float()
        seen = (self.item(batch["hist"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return (self.item(batch["cand"]) * seen[:, None]).sum(2) * batch["scale"][:, None].float()


def lists_of(samples: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    given = {"user": rng.integers(0, 10**9, 1), "age": rng.random(samples, np.float32)}
    for place in range(2):
        counts = rng.integers(0, 4, samples)
        given[f"lS_o.{place}"] = np.concatenate([[0], np.cumsum(counts)[:-1]])
        given[f"lS_i.{place}"] = rng.integers(0, ROWS, counts.sum())
    return given


def candidates_of(samples: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "batch.hist": rng.integers(0, 3, (samples, 1 + seed % 3)) * 7,
        "batch.cand": rng.integers(0, ROWS, (samples, 1 + seed % 4)),
        "batch.scale": rng.integers(0, 9, samples, np.uint8),
    }


EXAMPLES: dict[str, Any] = {
    "lists": {
        "user": torch.tensor([5, 10**9, 38]),
        "age": torch.rand(3),
        "lS_o": [torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])],
        "lS_i": [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8, 9])],
    },
    "candidates": {
        "batch": {
            "hist": torch.tensor(HISTORY),
            "cand": torch.randint(0, ROWS, (3, 6)),
            "scale": torch.tensor([1, 2, 255], dtype=torch.uint8),
        }
    },
}
INPUTS = {"lists": lists_of, "candidates": candidates_of}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Modules and their packages, in the repository `place`."""
    place = tmp_path_factory.mktemp("cut") / "repository"
    found: dict[str, Any] = {"place": place}
    for name, kind in (("lists", Lists), ("candidates", Candidates)):
        torch.manual_seed(1)
        module = kind().eval()
        once = ["user"] if name == "lists" else []
        settings = {"hit_rate_threshold": 1.1}
        found[name] = module, hps.torch.package(module, place / name / "1", EXAMPLES[name], per_request=once, settings=settings)
    return found


@pytest.fixture(scope="module")
def served(packages: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    document = document_of(model_repository=str(packages["place"]))
    with ServedProcess(document, tmp_path_factory.mktemp("served"), 1, "--grpc-port", 0) as process:
        yield process


def wanted(packages: dict[str, Any], model: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the module answers; of the user it gets a row a sample."""
    module, package = packages[model]
    tensors = {name: torch.from_numpy(one) for name, one in given.items()}
    if model == "lists":
        tensors["user"] = tensors["user"].expand(len(given["age"]))
    with torch.inference_mode():
        scores: np.ndarray = package.inputs.call(module, tensors).numpy()
    return scores


@pytest.mark.parametrize("model", INPUTS)
def test_scores_are_the_modules_over_every_wire(served: ServedProcess, packages: dict[str, Any], model: str) -> None:
    wires: list[Any] = [kind(served) for kind in (RawHTTP, TritonJSON, TritonGRPC, Stubs)]
    with hps.HPS(document_of(model_repository=str(packages["place"]))) as server, hps.connect(served.url) as client:
        for seed, samples in enumerate((1, 2, 3, 5, 64)):
            given = INPUTS[model](samples, seed)
            expected = wanted(packages, model, given)
            answers = [np.asarray(one.score(model, given)["score"]) for one in (server, client)]
            answers += [wire.score(given, model) for wire in wires]
            for answer in answers:
                np.testing.assert_allclose(answer.reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)
    for wire in wires:
        wire.close()


def test_rows_are_nested_as_the_modules_parameters(served: ServedProcess, packages: dict[str, Any]) -> None:
    lists = lists_of(3, 7)
    keys = [np.split(lists[f"lS_i.{place}"], lists[f"lS_o.{place}"][1:]) for place in range(2)]
    items = [{"age": float(lists["age"][nth]), "lS_i": [key[nth].tolist() for key in keys]} for nth in range(3)]
    candidates = candidates_of(2, 5)
    batches = [{name.removeprefix("batch."): one[nth].tolist() for name, one in candidates.items()} for nth in range(2)]
    for model, given, rows in (
        ("lists", lists, {"user": {"user": int(lists["user"][0])}, "items": items}),
        ("candidates", candidates, {"items": [{"batch": batch} for batch in batches]}),
    ):
        answer = httpx.post(f"{served.url}/v1/models/{model}/score", json=rows, timeout=60).json()
        np.testing.assert_allclose(answer["outputs"]["score"], wanted(packages, model, given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", INPUTS)
def test_requests_at_once_have_their_own_scores(served: ServedProcess, packages: dict[str, Any], model: str) -> None:
    wires = [RawHTTP(served) for _ in range(12)]
    for turn in range(3):
        asked = [INPUTS[model](1 + nth % 4, nth // 2 + turn) for nth in range(len(wires))]
        for wire, given in zip(wires, asked, strict=True):
            wire.send_scores(given, model)
        for wire, given in zip(wires, asked, strict=True):
            np.testing.assert_allclose(wire.take()["score"], wanted(packages, model, given), rtol=1e-6, atol=1e-6)
    for wire in wires:
        wire.close()
