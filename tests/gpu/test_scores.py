"""Whole models on a GPU: keys to scores without a vector on the host."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from tests.gpu.cupy_if_installed import cupy  # noqa: F401 - skips without it
from tests.gpu.taking_turns import ask_while_versions_take_turns

torch = pytest.importorskip("torch")
import hps.torch  # noqa: E402 - after torch is known to be there
from benchmarks.dlrm import DLRM, FEATURES  # noqa: E402

pytestmark = pytest.mark.gpu

TABLES, ROWS = 5, 3_000


def dlrm(place: Path, version: int, seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    module = DLRM(TABLES, ROWS, 32).eval()
    examples = torch.rand(4, FEATURES), torch.randint(0, ROWS, (4, TABLES))
    hps.torch.package(module, place / "m" / str(version), examples, settings={"max_batch_size": 300, **settings})
    return module


def request(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    keys, dense = rng.integers(0, ROWS, (samples, TABLES)), rng.random((samples, FEATURES), np.float32)
    return dense, keys, {"dense": dense, "keys": keys}


def scores_of(module: Any, dense: np.ndarray, keys: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        answer: np.ndarray = module(torch.from_numpy(dense), torch.from_numpy(keys)).numpy()
    return answer


CACHES = {"static": {"embedding_cache_type": "static"}, "all": {"gpucacheper": 1.0}, "part": {"gpucacheper": 0.3}}


@pytest.fixture(params=[*CACHES])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, hps.HPS]]:
    module = dlrm(tmp_path, 1, 1, **CACHES[request.param])
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        yield module, server


def test_scores_are_the_modules(served: tuple[Any, hps.HPS]) -> None:
    module, server = served
    rng = np.random.default_rng(0)
    for samples in (1, 15, 16, 17, 64, 65, 255, 256, 257, 300, 3, 1):
        dense, keys, given = request(rng, samples)
        answer = server.score("m", given)
        np.testing.assert_allclose(answer["score"], scores_of(module, dense, keys), atol=1e-5)
        assert answer.version == "1"


def test_each_answer_is_of_one_version_while_others_take_over(tmp_path: Path) -> None:
    modules = {str(version): dlrm(tmp_path, version, version) for version in (1, 2)}
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:

        def make(rng: np.random.Generator) -> Any:
            dense, keys, given = request(rng, int(rng.integers(1, 100)))
            return given, {version: partial(scores_of, module, dense, keys) for version, module in modules.items()}

        ask_while_versions_take_turns(server, make, askers=4, deploys=10)
