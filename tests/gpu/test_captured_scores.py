"""Batches of a whole model as one CUDA graph: answers are the module's, whatever the graph was last launched for."""

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
from benchmarks.bench_scores import Ranker  # noqa: E402
from hps.networks.torch_networks import TorchScript  # noqa: E402
from hps.scoring.captured import CapturedBatches  # noqa: E402
from hps.scoring.scorer import Scorer  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS, KEYS, MOST = 5_000, 100, 300
BUCKETS = (1, 2, 3, 4, 6, 16, 24, 64, 96, 256, 300)
CACHES = {"static": {"embedding_cache_type": "static"}, "all": {"gpucacheper": 1.0}, "part": {"gpucacheper": 0.3}}


def ranker(place: Path, version: int, **settings: Any) -> Any:
    torch.manual_seed(version)
    module = Ranker(ROWS, 32).eval()
    examples = {"history": torch.randint(0, ROWS, (8, KEYS)), "age": torch.rand(8), "item": torch.randint(0, ROWS, (8,))}
    most = {"max_batch_size": MOST, **settings}
    hotness = {"history": KEYS, "item": 1}
    hps.torch.package(
        module, place / "m" / str(version), examples, settings=most, per_request=("history", "age"), hotness=hotness
    )
    return module


def request(rng: np.random.Generator, samples: int, keys: int = KEYS, *, once: bool = True) -> dict[str, np.ndarray]:
    rows = 1 if once else samples
    history, age = rng.integers(0, ROWS, (rows, keys)), rng.random(rows, np.float32)
    return {"history": history, "age": age, "item": rng.integers(0, ROWS, samples)}


def scores_of(module: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    samples = len(given["item"])
    each = [np.repeat(given[name], samples // len(given[name]), 0) for name in ("history", "age")]
    with torch.inference_mode():
        answer: np.ndarray = module(*map(torch.from_numpy, (*each, given["item"]))).numpy()
    return answer


def scorer_of(server: hps.HPS) -> Scorer:
    scores = server.model("m").scores
    assert scores is not None
    return scores._scorers[0]


def captured_runs(server: hps.HPS) -> list[str]:
    """Names of what runs the graphs: `replay`, not the run that could not be captured."""
    graphs = [graph for memory in scorer_of(server)._kept.memories for graph in memory.captured.values()]
    return [graph.run.__name__ for graph in graphs if graph is not None]


def keys_of(server: hps.HPS) -> dict[str, int]:
    [model] = server.stats().models
    return {table.name: table.keys for table in model.tables}


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each batch, whether one graph answered it."""
    calls: list[bool] = []
    score = CapturedBatches.score

    def counting(self: CapturedBatches, *given: Any) -> Any:
        found = score(self, *given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(CapturedBatches, "score", counting)
    return calls


@pytest.fixture(scope="module", params=[*CACHES])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Any, hps.HPS, str]]:
    place = tmp_path_factory.mktemp("served")
    module = ranker(place, 1, **CACHES[request.param])
    with hps.HPS({"model_repository": str(place), "device": "cuda"}) as server:
        yield module, server, request.param


@pytest.mark.parametrize("once", [True, False], ids=["given once", "given each"])
def test_sizes_below_at_and_above_each_number_of_rows(
    served: tuple[Any, hps.HPS, str], once: bool, in_graphs: list[bool]
) -> None:
    module, server, cache = served
    rng = np.random.default_rng(0)
    assert {*captured_runs(server)} == {"replay"}
    for bucket in BUCKETS:
        for samples in (bucket + 1, bucket, bucket - 1):
            if 0 < samples <= MOST:
                given = request(rng, samples, once=once)
                np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-5)
    assert all(in_graphs) if cache == "static" else any(in_graphs)  # also where keys are read from host memory


def test_users_of_one_batch_in_turn_with_fewer_and_others(served: tuple[Any, hps.HPS, str]) -> None:
    module, server, _ = served
    rng, scorer = np.random.default_rng(1), scorer_of(server)
    scores = server.model("m").scores
    assert scores is not None
    for sizes in ((70, 90, 80), (5,), (1, 200), (2,) * 16, (3,), (300,), (1,), (2,) * 40):
        given = [request(rng, samples) for samples in sizes]
        answers, _times = scorer.score([scores.read(one) for one in given])
        for answer, one in zip(answers, given, strict=True):
            assert isinstance(answer, dict)
            np.testing.assert_allclose(answer["score"], scores_of(module, one), atol=1e-5)


def test_histories_of_other_lengths(served: tuple[Any, hps.HPS, str]) -> None:
    module, server, _ = served
    rng = np.random.default_rng(2)
    for keys in (1, 7, 100, 7, 99) * 5:
        given = request(rng, 300, keys)
        np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-5)


def test_a_run_is_captured_after_what_was_written_before() -> None:
    """New memory that the inputs have not reached may hold any index, and one out of range ends the context."""
    network = TorchScript("m", lambda given: given, ("x",), torch.device("cuda", 0))
    size, rows = 1 << 28, 1000
    memory, source = network.staging(size)
    target, values = network.empty((size,), "uint8"), network.empty((rows,), "float32")
    index = network.part(target, size - 8 * rows, "int64", (rows,))  # the end, which is copied last
    found = network.empty((rows,), "float32")
    values.copy_(torch.arange(rows))
    memory[:] = 0
    network.write(target, source)
    network.fetch({"x": found})  # waits
    for step in (1, 3):
        expected = np.arange(rows) * step % rows
        memory[-8 * rows :].view(np.int64)[:] = expected
        network.write(target, source)
        network.fixed(lambda: network.write(found, network.take(values, index)) or {})  # type: ignore[func-returns-value]
        np.testing.assert_array_equal(network.fetch({"x": found})["x"], expected)


class Owner:
    """Of graphs that run in turn."""


def test_only_graphs_of_one_owner_share_memory() -> None:
    """Those of two deployments of a network may be wanted by two threads, each with its own outputs."""
    network = TorchScript("m", lambda given: given, ("x",), torch.device("cuda", 0))
    found = network.empty((1 << 20,), "float32")
    temporary: list[int] = []
    first, second, graphs = Owner(), Owner(), []

    def run() -> dict[str, Any]:
        twice = found * 2
        temporary[-1] = twice.data_ptr()  # of the last run, which is captured
        return {"x": twice + 1}

    for owner in (first, first, second):
        temporary.append(0)
        graphs.append(network.fixed(run, owner=owner))
    assert temporary[0] == temporary[1] != temporary[2]


def test_a_run_that_cannot_be_captured_leaves_nothing_to_later_ones() -> None:
    network = TorchScript("m", lambda given: given, ("x",), torch.device("cuda", 0))
    found, zeros, ones = (network.put(values) for values in (np.full(8, 2.0), np.zeros(8), np.ones(8)))
    large = network.empty((1 << 13, 1 << 13), "float32")

    def run() -> dict[str, Any]:
        for _ in range(10):
            large @ large
        network.write(found, zeros)
        raise hps.InvalidInputError("no capture")

    with pytest.raises(hps.InvalidInputError):
        network.fixed(run)
    network.write(found, ones)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(network.fetch({"x": found})["x"], np.ones(8))


def test_scores_do_not_depend_on_the_stream_of_their_caller(served: tuple[Any, hps.HPS, str]) -> None:
    """Graphs of all threads run on one stream, since they share memory."""
    module, server, _ = served
    rng, side = np.random.default_rng(6), torch.cuda.Stream()
    large = torch.zeros(1 << 14, 1 << 14, device="cuda")
    given = request(rng, 20)
    server.score("m", given)
    with torch.cuda.stream(side):
        for _ in range(20):
            large @ large
        np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-5)
        assert not side.query()
    side.synchronize()


def test_batches_whose_bags_have_one_key_each_are_captured(tmp_path: Path, in_graphs: list[bool]) -> None:
    module = ranker(tmp_path, 1, embedding_cache_type="static")
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        in_graphs.clear()  # those of the package's own examples, which check the version
        rng = np.random.default_rng(7)
        for keys in (1, 1, 1, 1, 2, 1, 100, 1):
            given = request(rng, 20, keys)
            np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-5)
    assert in_graphs == [False, False, False, True, False, True, True, True]


def test_a_write_that_has_returned_is_seen(tmp_path: Path, in_graphs: list[bool]) -> None:
    module = ranker(tmp_path, 1, gpucacheper=1.0)
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        in_graphs.clear()
        rng = np.random.default_rng(3)
        for value in range(40):
            key = int(rng.integers(0, ROWS))
            row = np.full((1, 32), value / 40, np.float32)
            server.insert(np.array([key]), row, "m", "item")
            module.item.weight.data[key] = torch.from_numpy(row[0])
            given = request(rng, 20)
            given["item"][3] = key
            np.testing.assert_allclose(server.score("m", given)["score"], scores_of(module, given), atol=1e-5)
        assert any(in_graphs)


def test_keys_that_no_table_has_get_the_default(served: tuple[Any, hps.HPS, str]) -> None:
    module, server, _ = served
    rng = np.random.default_rng(4)
    for samples in (30, 200, 30):
        given = request(rng, samples)
        known = given["item"].copy()
        given["item"][::7] = ROWS + 1 + np.arange(len(given["item"][::7]))
        expected = scores_of(module, {**given, "item": known})
        answer = server.score("m", given)["score"]
        left = np.ones(samples, np.bool_)
        left[::7] = False
        np.testing.assert_allclose(answer[left], expected[left], atol=1e-5)


def test_each_answer_is_of_one_version_while_two_take_turns(tmp_path: Path) -> None:
    modules = {str(version): ranker(tmp_path, version, embedding_cache_type="static") for version in (1, 2)}
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:

        def make(rng: np.random.Generator) -> Any:
            given = request(rng, int(rng.integers(1, 300)))
            return given, {version: partial(scores_of, module, given) for version, module in modules.items()}

        ask_while_versions_take_turns(server, make, askers=3, deploys=4)


@pytest.mark.parametrize("cache", ["static", "part"])
def test_keys_count_once_and_memory_is_freed_with_the_version(tmp_path: Path, cache: str) -> None:
    ranker(tmp_path, 1, **CACHES[cache])
    with hps.HPS({"model_repository": str(tmp_path), "device": "cuda"}) as server:
        before = keys_of(server)
        server.score("m", request(np.random.default_rng(5), 200))
        counted = {name: keys - before[name] for name, keys in keys_of(server).items()}
        assert counted == {"history": KEYS, "item": 200}
        scorer = scorer_of(server)
        server.undeploy("m")
        assert not scorer._kept.memories
