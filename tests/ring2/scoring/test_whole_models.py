"""A trained DLRM, from its module to scores over HTTP and gRPC, through PyTorch and ONNX Runtime: they are the module's."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

import hps
from tests.servers.running_service import document_of
from tests.servers.served_process import ServedProcess

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

import hps.torch  # noqa: E402
from benchmarks.dlrm import DLRM, FEATURES  # noqa: E402
from examples.dlrm.__main__ import auc  # noqa: E402

TABLES, ROWS, DIM, HELD_OUT = 6, 50, 8, 1000
INPUTS = {**{f"emb_{table}": {"table": f"emb_{table}"} for table in range(TABLES)}, "dense": {"shape": [-1, FEATURES]}}


class Samples(NamedTuple):
    dense: torch.Tensor
    keys: torch.Tensor
    labels: torch.Tensor

    def inputs(self, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        keys = self.keys[start:stop].numpy()
        found = {f"emb_{table}": np.ascontiguousarray(keys[:, table]) for table in range(TABLES)}
        return {**found, "dense": self.dense[start:stop].numpy()}

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        given = self.inputs(start, stop)
        return [{name: one[at].tolist() for name, one in given.items()} for at in range(stop - start)]


class Trained(NamedTuple):
    module: nn.Module
    held_out: Samples
    scores: np.ndarray
    repository: Path


def samples(count: int, seed: int) -> Samples:
    """Clicks that depend on the features and on a hidden taste of each key."""
    rng = torch.Generator().manual_seed(seed)
    tastes = torch.randn(TABLES, ROWS, generator=torch.Generator().manual_seed(0))
    dense, keys = torch.rand(count, FEATURES, generator=rng), torch.randint(0, ROWS, (count, TABLES), generator=rng)
    logits = tastes.gather(1, keys.T)[:3].sum(0) + 4 * (dense[:, :3].sum(1) - 1.5)
    return Samples(dense, keys, (torch.rand(count, generator=rng) < torch.sigmoid(logits)).float())


class Dense(nn.Module):
    """What is left of the DLRM without its tables, for ONNX."""

    def __init__(self, module: DLRM) -> None:
        super().__init__()
        self.module = module

    def forward(self, dense: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        return self.module.scores(dense, list(vectors))


def onnx_of(module: DLRM) -> bytes:
    examples = torch.rand(2, FEATURES), *(torch.rand(2, DIM) for _ in range(TABLES))
    names = ["dense", *(f"emb_{table}" for table in range(TABLES))]
    batch = torch.export.Dim("samples", min=1)
    with warnings.catch_warnings():  # of onnxscript's own making
        warnings.simplefilter("ignore")
        shapes = ({0: batch}, tuple({0: batch} for _ in range(TABLES)))
        program = torch.onnx.export(
            Dense(module),
            examples,
            dynamo=True,
            input_names=names,
            output_names=["score"],
            dynamic_shapes=shapes,
            verbose=False,
        )
    content: bytes = program.model_proto.SerializeToString()
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A DLRM, and a repository with it: as a program of torch.export, and in ONNX."""
    torch.manual_seed(1)
    module = DLRM(TABLES, ROWS, DIM, (32,), (64, 32))
    for one in module.emb:
        nn.init.normal_(one.weight, std=0.05)
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    batch = samples(8000, 2)
    for start in range(0, 8000, 400):
        part = slice(start, start + 400)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(module(batch.dense[part], batch.keys[part]), batch.labels[part]).backward()
        optimizer.step()
    module.eval()
    held_out = samples(HELD_OUT, 3)
    with torch.inference_mode():
        scores = module(held_out.dense, held_out.keys).numpy()
    place = tmp_path_factory.mktemp("whole") / "repository"
    example = held_out.dense[:4], held_out.keys[:4]
    done = hps.torch.package(module, place / "dlrm" / "1", example)
    assert done.difference <= 1e-6
    said = {"format": "onnx", "file": "dense.onnx", "inputs": INPUTS, "outputs": ["score"]}
    tables = {name: (np.arange(ROWS), one.weight.detach().numpy()) for name, one in zip(INPUTS, module.emb, strict=False)}
    hps.write_version(place / "dlrm_onnx" / "1", tables, network=(said, onnx_of(module)))
    entry = json.loads((place / "dlrm" / "model.json").read_text())
    (place / "dlrm_onnx" / "model.json").write_text(json.dumps({**entry, "model": "dlrm_onnx"}))
    return Trained(module, held_out, scores, place)


@pytest.fixture(scope="module")
def served(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    document = document_of(model_repository=str(trained.repository))
    with ServedProcess(document, tmp_path_factory.mktemp("served"), 1, "--grpc-port", 0) as process:
        yield process


MODELS = ("dlrm", "dlrm_onnx")


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_rows_are_the_modules_and_so_is_the_auc(served: ServedProcess, trained: Trained, model: str) -> None:
    found = []
    for start in range(0, HELD_OUT, 250):
        said = {"items": trained.held_out.rows(start, start + 250)}
        answer = httpx.post(f"{served.url}/v1/models/{model}/score", json=said, timeout=60)
        assert answer.status_code == 200, answer.text
        found += answer.json()["outputs"]["score"]
    scores = np.array(found, np.float32)
    np.testing.assert_allclose(scores, trained.scores, atol=1e-6)
    labels = trained.held_out.labels
    ours, theirs = auc(torch.from_numpy(scores), labels), auc(torch.from_numpy(trained.scores), labels)
    assert theirs > 0.8
    assert round(ours, 4) == round(theirs, 4)


@pytest.mark.parametrize("model", MODELS)
def test_tritons_grpc_client(served: ServedProcess, trained: Trained, model: str) -> None:
    triton = pytest.importorskip("tritonclient.grpc")

    def asked(inputs: dict[str, np.ndarray], **more: Any) -> Any:
        tensors = []
        for name, array in inputs.items():
            kind = {"int64": "INT64", "float32": "FP32"}[array.dtype.name]
            tensors.append(triton.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        return client.infer(model, tensors, **more)

    with triton.InferenceServerClient(served.grpc) as client:
        for samples_ in (1, 17, 300):
            found = asked(trained.held_out.inputs(0, samples_)).as_numpy("score")
            np.testing.assert_allclose(found, trained.scores[:samples_], atol=1e-6)
        assert {one.name for one in client.get_model_metadata(model).inputs} == INPUTS.keys()
        vectors = asked({"emb_0": np.array([5])}, parameters={"vectors": True})
        assert vectors.as_numpy("emb_0").shape == (1, DIM)


def test_a_call_in_this_process_gives_the_same_scores(trained: Trained) -> None:
    with hps.HPS(str(trained.repository)) as server:
        for model in MODELS:
            for start, stop in ((0, 1), (0, HELD_OUT)):
                found = server.score(model, trained.held_out.inputs(start, stop))
                np.testing.assert_allclose(found["score"], trained.scores[start:stop], atol=1e-6)
