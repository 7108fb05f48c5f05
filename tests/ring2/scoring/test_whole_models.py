"""A DLRM, from its module to scores over HTTP and gRPC, through PyTorch and ONNX Runtime: they are the module's."""

import json
import shlex
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

TABLES, ROWS, DIM, SAMPLES = 6, 50, 8, 300
INPUTS = {**{f"emb_{table}": {"table": f"emb_{table}"} for table in range(TABLES)}, "dense": {"shape": [-1, FEATURES]}}
MODELS = ("dlrm", "dlrm_onnx")


class Whole(NamedTuple):
    """Samples, what the module answers to them, and a repository with it as a program of torch.export and in ONNX."""

    dense: torch.Tensor
    keys: torch.Tensor
    scores: np.ndarray
    repository: Path

    def inputs(self, model: str, stop: int) -> dict[str, np.ndarray]:
        """Return the module's own inputs, or those of the network in ONNX, which has an input for each table."""
        dense, keys = self.dense[:stop].numpy(), self.keys[:stop].numpy()
        if model == "dlrm":
            return {"dense": dense, "keys": keys}
        return {"dense": dense} | {f"emb_{table}": np.ascontiguousarray(keys[:, table]) for table in range(TABLES)}


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    torch.manual_seed(1)
    module = DLRM(TABLES, ROWS, DIM, (32,), (64, 32)).eval()
    dense, keys = torch.rand(SAMPLES, FEATURES), torch.randint(0, ROWS, (SAMPLES, TABLES))
    with torch.inference_mode():
        scores = module(dense, keys).numpy()
    place = tmp_path_factory.mktemp("whole") / "repository"
    assert hps.torch.package(module, place / "dlrm" / "1", (dense[:4], keys[:4])).difference <= 1e-6
    said = {"format": "onnx", "file": "dense.onnx", "inputs": INPUTS, "outputs": ["score"]}
    tables = {name: (np.arange(ROWS), one.weight.detach().numpy()) for name, one in zip(INPUTS, module.emb, strict=False)}
    hps.write_version(place / "dlrm_onnx" / "1", tables, network=(said, onnx_of(module)))
    entry = json.loads((place / "dlrm" / "model.json").read_text())
    (place / "dlrm_onnx" / "model.json").write_text(json.dumps({**entry, "model": "dlrm_onnx"}))
    return Whole(dense, keys, scores, place)


@pytest.fixture(scope="module")
def served(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    document = document_of(model_repository=str(whole.repository))
    with ServedProcess(document, tmp_path_factory.mktemp("served"), 1, "--grpc-port", 0) as process:
        yield process


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_rows_are_the_modules(served: ServedProcess, whole: Whole, model: str) -> None:
    given = whole.inputs(model, 250)
    items = [{name: one[at].tolist() for name, one in given.items()} for at in range(250)]
    answer = httpx.post(f"{served.url}/v1/models/{model}/score", json={"items": items}, timeout=60)
    np.testing.assert_allclose(answer.json()["outputs"]["score"], whole.scores[:250], atol=1e-6)


def test_the_request_that_a_server_prints_is_answered(served: ServedProcess) -> None:
    [line] = [splitline for splitline in served.log().splitlines() if "ready; try:" in splitline]
    url, _, text = shlex.split(line.partition("curl -s ")[2])
    assert url.endswith("/v1/models/dlrm/score")
    assert len(httpx.post(url, content=text, timeout=60).json()["outputs"]["score"]) == 1


@pytest.mark.parametrize("model", MODELS)
def test_tritons_grpc_client(served: ServedProcess, whole: Whole, model: str) -> None:
    triton = pytest.importorskip("tritonclient.grpc")

    def asked(inputs: dict[str, np.ndarray], **more: Any) -> Any:
        tensors = []
        for name, array in inputs.items():
            kind = {"int64": "INT64", "float32": "FP32"}[array.dtype.name]
            tensors.append(triton.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        return client.infer(model, tensors, **more)

    with triton.InferenceServerClient(served.grpc) as client:
        for samples in (1, 17, 300):
            found = asked(whole.inputs(model, samples)).as_numpy("score")
            np.testing.assert_allclose(found, whole.scores[:samples], atol=1e-6)
        assert {input_.name for input_ in client.get_model_metadata(model).inputs} == whole.inputs(model, 1).keys()
        vectors = asked({"emb_0": np.array([5])}, parameters={"vectors": True})
        assert vectors.as_numpy("emb_0").shape == (1, DIM)


def test_a_call_in_this_process_gives_the_same_scores(whole: Whole) -> None:
    with hps.HPS(str(whole.repository)) as server:
        for model in MODELS:
            for samples in (1, SAMPLES):
                np.testing.assert_allclose(
                    server.score(model, whole.inputs(model, samples))["score"], whole.scores[:samples], atol=1e-6
                )
