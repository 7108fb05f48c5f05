"""A module of torch, cut at its lookups by hand, on real engines: scores are the module's, alone and merged."""

import io
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.scoring.batching import ScoreCall
from hps.testing.waiting import PATIENCE_S
from hps.tools.cli.app import app
from tests.servers.running_service import document_of, model_of

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

ITEMS, HASHED, TAGS = 100, 37, 50
DIMS = {"item": 8, "hashed": 4, "tag": 2}
NAMES = ("x", "hist", "items", "history", "tagged")


class Network(nn.Module):
    """What is left of `Ranker` without its tables: the mask and a price are read from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(sum(DIMS.values()) + 1, 1)

    def forward(
        self, x: torch.Tensor, hist: torch.Tensor, items: torch.Tensor, history: torch.Tensor, tagged: torch.Tensor
    ) -> torch.Tensor:
        masked = (history * (hist != 7)[:, :, None]).sum(1)
        return self.top(torch.cat([items, masked, tagged, x[:, :1]], 1)).squeeze(1)


class Keys(nn.Module):
    """The keys program of `Ranker`."""

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        return hist % HASHED


class Ranker(nn.Module):
    """Keys of a float matrix, hashed keys of any number, and bags with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.hashed = nn.Embedding(ITEMS, DIMS["item"]), nn.Embedding(HASHED, DIMS["hashed"])
        self.tag = nn.EmbeddingBag(TAGS, DIMS["tag"], mode="mean")
        self.keys, self.network = Keys(), Network()

    def forward(self, x: torch.Tensor, hist: torch.Tensor, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        vectors = self.item(x[:, 2].long()), self.hashed(self.keys(hist)), self.tag(tags, offsets)
        return self.network(x, hist, *vectors)  # type: ignore[no-any-return]


SAID: dict[str, Any] = {
    "inputs": {
        "x": {"dtype": "float32", "shape": [-1, 3]},
        "hist": {"dtype": "int64", "shape": [-1, "n"]},
        "tags": {"dtype": "int64", "shape": ["m"]},
        "offsets": {"dtype": "int64", "shape": [-1], "offsets_of": "tags"},
    },
    "outputs": ["score"],
    "sizes": {"n": 4, "m": 6},
    "guards": ["n >= 2"],
    "request_guards": ["samples != 3"],
    "lookups": {
        "items": {"table": "item", "keys": {"input": "x", "column": 2}},
        "history": {"table": "hashed", "keys": {"output": "hashed_keys"}},
        "tagged": {"table": "tag", "pooling": "mean", "keys": {"input": "tags"}, "offsets": {"input": "offsets"}},
    },
    "network_inputs": NAMES,
}


def examples() -> tuple[Any, ...]:
    return torch.rand(4, 3), torch.ones(4, 5, dtype=torch.int64), torch.rand(4, 8), torch.rand(4, 5, 4), torch.rand(4, 2)


def of_torch(module: nn.Module, *given: torch.Tensor) -> bytes:
    samples, n = torch.export.Dim("samples"), torch.export.Dim("n")
    shapes = tuple({0: samples, 1: n} if one.shape[1:2] == (5,) else {0: samples} for one in given)
    file = io.BytesIO()
    torch.export.save(torch.export.export(module.eval(), given, dynamic_shapes=shapes), file)
    return file.getvalue()


def of_onnx(module: nn.Module, names: tuple[str, ...], output: str, *given: torch.Tensor) -> bytes:
    shapes = tuple({0: "samples", 1: "n"} if one.shape[1:2] == (5,) else {0: "samples"} for one in given)
    named: dict[str, Any] = {"input_names": names, "output_names": [output], "dynamic_shapes": shapes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about itself
        program = torch.onnx.export(module.eval(), given, dynamo=True, verbose=False, **named)
    content: bytes = program.model_proto.SerializeToString()
    return content


def files_of(engine: str, module: Ranker) -> dict[str, bytes]:
    given = examples()
    if engine == "pt2":
        return {"dense.pt2": of_torch(module.network, *given), "keys.pt2": of_torch(module.keys, given[1])}
    onnx = {"dense.onnx": of_onnx(module.network, NAMES, "score", *given)}
    return onnx | {"keys.onnx": of_onnx(module.keys, ("hist",), "hashed_keys", given[1])}


def write(place: Path, engine: str, module: Ranker) -> None:
    files = files_of(engine, module)
    network, program = files
    keys = [{"file": program, "inputs": ["hist"], "outputs": ["hashed_keys"]}]
    said = {"format": engine, "file": network, "keys": keys, **SAID}
    tables = {name: (np.arange(len(one.weight)), one.weight.detach().numpy()) for name, one in tables_of(module).items()}
    hps.write_version(place, tables, network=(said, files))


def tables_of(module: Ranker) -> dict[str, Any]:
    return {"item": module.item, "hashed": module.hashed, "tag": module.tag}


def inputs(rng: np.random.Generator, samples: int, n: int = 4) -> dict[str, np.ndarray]:
    counts = rng.integers(0, 3, samples)
    return {
        "x": np.column_stack([rng.random((samples, 2)), rng.integers(0, ITEMS, samples)]).astype(np.float32),
        "hist": rng.integers(0, 1000, (samples, n)),
        "tags": rng.integers(0, TAGS, counts.sum()),
        "offsets": np.concatenate([[0], np.cumsum(counts)[:-1]]),
    }


@pytest.fixture(scope="module", params=["pt2", "onnx"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Ranker, Path]]:
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    torch.manual_seed(1)
    module, place = Ranker().eval(), tmp_path_factory.mktemp("cut")
    write(place / "m" / "1", request.param, module)
    most = {"max_batch_size": 64, "maxnum_catfeature_query_per_table_per_sample": [1, 9, 9], "hit_rate_threshold": 1.1}
    (place / "m" / "model.json").write_text(json.dumps(model_of("m", [*DIMS], DIMS, **most)))
    with hps.HPS(document_of(model_repository=str(place))) as server:
        yield server, module, place


def scores_of(module: Ranker, given: dict[str, np.ndarray]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = module(*[torch.from_numpy(one) for one in given.values()]).numpy()
    return found


def test_scores_are_the_modules(served: tuple[Any, Ranker, Path]) -> None:
    server, module, _ = served
    rng = np.random.default_rng(1)
    for samples in (1, 2, 3, 64, 2, 3):
        for n in (2, 5):
            given = inputs(rng, samples, n)
            if samples == 3:
                with pytest.raises(hps.InvalidInputError, match="3 samples: the network needs samples != 3, got 3"):
                    server.score("m", given)
            else:
                np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-6)
    with pytest.raises(hps.InvalidInputError, match=r"input 'hist' of shape \[2, 1\]: the network needs n >= 2, got 1"):
        server.score("m", inputs(rng, 2, 1))


def test_requests_that_wait_together_get_the_modules_scores(served: tuple[Any, Ranker, Path]) -> None:
    """Also two of 3 samples together, which the guards refuse, and lengths that cannot be put together."""
    server, module, _ = served
    scores, rng = server.model("m").scores, np.random.default_rng(2)
    every = [inputs(rng, int(samples), 2 + number % 2) for number, samples in enumerate(rng.choice([1, 2, 4], 60))]
    told: dict[int, Any] = {}
    done = threading.Semaphore(0)

    def tell(number: int, answer: Any) -> None:
        told[number] = answer
        done.release()

    for number, given in enumerate(every):
        call = ScoreCall(scores.read(given), lambda answer, _, number=number: tell(number, answer))
        scores.submit(call, 0)
    for _ in every:
        assert done.acquire(timeout=PATIENCE_S)
    for number, given in enumerate(every):
        assert isinstance(told[number], dict), told[number]
        np.testing.assert_allclose(told[number]["score"], scores_of(module, given), atol=1e-6)


def test_a_version_without_one_of_its_files_is_refused_by_its_name(served: tuple[Any, Ranker, Path], tmp_path: Path) -> None:
    server, module, place = served
    engine = "onnx" if (place / "m" / "1" / "dense.onnx").exists() else "pt2"
    version = place / "m" / "2"
    write(version, engine, module)
    (version / f"keys.{engine}").unlink()
    with pytest.raises(hps.ModelFileNotFoundError, match=rf"keys\.{engine}"):
        server.deploy("m", "2")
    config = tmp_path / "ps.json"
    config.write_text(json.dumps(document_of(model_repository=str(place))))
    result = CliRunner().invoke(app, ["check-config", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"keys.{engine}" in result.stderr
    given = inputs(np.random.default_rng(3), 2)
    np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-6)
