"""Text ids over frontends that are processes of their own: each imports the transform, and one that fails harms no other."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import hps
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

WORDS = [f"word {number}" for number in range(200)]
VECTORS = np.random.default_rng(1).standard_normal((len(WORDS), 4)).astype(np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    home = tmp_path_factory.mktemp("served")
    hps.write_sparse_model(home / "word", (hps.Strings.of(WORDS).fnv1a(), VECTORS))
    failing = {"function": "tests.fakes.transforms:failing", "inputs": {"city": "bytes"}, "outputs": ["word"], "timeout_s": 0.5}
    models = [
        model_of("words", [home / "word"], {"word": 4}, transform={"function": "fnv1a", "inputs": {"word": "bytes"}}),
        model_of("slow", [home / "word"], {"word": 4}, transform=failing),
    ]
    (home / "process").mkdir()
    with ServedProcess(document_of(*models, model_source={"trust": True}), home / "process", fronts=2) as process:
        yield process


def ask(url: str, model: str, name: str, texts: list[str]) -> httpx.Response:
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return httpx.post(f"{url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=60)


def test_every_frontend_answers_texts_while_functions_of_others_hang(served: ServedProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        hanging = [threads.submit(ask, served.url, "slow", "city", ["wait"]) for _ in range(4)]
        for number in range(20):
            chosen = [(number * 7 + place) % len(WORDS) for place in range(3)]
            answer = ask(served.url, "words", "word", [WORDS[word] for word in chosen])
            [output] = answer.json()["outputs"]
            np.testing.assert_array_equal(np.array(output["data"], np.float32).reshape(3, 4), VECTORS[chosen])
        assert {answer.result().status_code for answer in hanging} == {504}
    assert ask(served.url, "slow", "city", ["x"]).status_code in (500, 504), "a thread may be left, or none"
