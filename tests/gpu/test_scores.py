"""Whole models on a GPU: keys to scores without a vector on the host."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from tests.gpu.cupy_if_installed import cupy  # noqa: F401 - skips without it

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
        stop, wrong, seen = threading.Event(), [], set()

        def ask(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                dense, keys, given = request(rng, int(rng.integers(1, 100)))
                answer = server.score("m", given)
                seen.add(answer.version)
                if np.abs(answer["score"] - scores_of(modules[answer.version], dense, keys)).max() > 1e-5:
                    wrong.append(answer.version)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for number in range(10):
            server.deploy("m", str(1 + number % 2))
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert seen == {"1", "2"}
