"""Requests for scores in a slot: what a front lays out the engine scores, and what a broken front writes harms nobody else."""

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import ServiceConfig, load_dense
from hps.regions.layout import ANSWERED, FAILED, HEADER_BYTES
from hps.scoring.batching import ScoreCall
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import describe, read_description
from hps.scoring.scorer import Scorer
from hps.scoring.signature import Output, signature_of
from hps.serve.engine.batches import FrontendLink
from hps.serve.frontend.lookups import read_cached
from hps.serve.frontend.scores import PlacedScores
from hps.serve.protocol.request_checks import ModelTables, PublishedNetwork
from hps.serve.protocol.score_requests import decode_scores
from tests.fakes.networks import ArrayNetwork, Arrays, FakeTables
from tests.fakes.region_front import GuardedMemory
from tests.servers.binary_tensors import with_tensors

INPUTS: dict[str, Any] = {
    "item": {"table": "t0"},
    "tags": {"table": "t1", "pooling": "sum", "per_request": True},
    "age": {"per_request": True},
}
SIZE, MOST = 1 << 16, 50
TENSORS = 1024
"""Where the tensors of a slot begin that a test describes."""
TABLES = FakeTables(4, 2)
SIGNATURE = signature_of(load_dense({"format": "onnx", "file": "f", "inputs": INPUTS, "outputs": ["score"]}), TABLES.specs)
NETWORK = PublishedNetwork("m", SIGNATURE, (Output("score", "float32", ()), Output("pair", "int64", (2,))), MOST)
MODEL = ModelTables("m", TABLES.specs, network=NETWORK)


def first_keys(given: Arrays) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        score = given["item"][:, 0] + given["tags"][:, 0] + given["age"]
        return {"score": score.astype(np.float32), "pair": np.repeat(score.astype(np.int64)[:, None], 2, 1)}


class Engine:
    """The engine's side of slots, with one model.

    Attributes:
        completed: status and error of each request.
    """

    def __init__(self) -> None:
        self.memory = GuardedMemory(SIZE)  # whoever reads or writes beyond it dies
        self.completed: list[tuple[int, str]] = []
        self._lifecycle = SimpleNamespace(configuration=SimpleNamespace(service=ServiceConfig()))
        network = NetworkCalls(ArrayNetwork(first_keys))
        self._scorer = Scorer("m", TABLES.specs, SIGNATURE, network, TABLES.look_up, max_samples=MOST)
        self.describe = lambda text: read_description(text, SIGNATURE, MOST, "m")
        self.unpack = lambda packed: packed.unpacked(SIGNATURE, MOST, "m")
        self._failure = lambda error, deployment_id: (FAILED, repr(error).encode())

    def submit(self, call: ScoreCall, device: int, most_s: float) -> None:
        ((answer,), times) = self._scorer.score([call.request])
        call.done(answer, times)

    def _complete(self, loop_state: Any, job: Any, status: int, began: int, scratch: bytes = b"", deferred: int = 0) -> None:
        self.completed.append((status, scratch.decode()))

    def score(self, slot: int, scratch: int, scratch_bytes: int) -> int:
        """Answer what is in a slot, as the engine does, and return its status."""
        served = SimpleNamespace(deployment=SimpleNamespace(scores=self), device=0)
        loop_state = SimpleNamespace(memories=[self.memory])
        job = SimpleNamespace(place=0, slot=slot, header=np.array([1, 0, 0, scratch, scratch_bytes, 0]))
        FrontendLink._score(self, served, loop_state, job, 0)  # type: ignore[arg-type]
        return self.completed[-1][0]

    def score_posted(self, slot: int) -> int:
        scratch, scratch_bytes = self.memory.longs[(slot >> 3) + 3], self.memory.longs[(slot >> 3) + 4]
        return self.score(slot, slot + int(scratch), int(scratch_bytes))

    def score_text(self, text: bytes, slot: int = 0) -> int:
        end = slot + HEADER_BYTES + len(text)
        self.memory.view[slot + HEADER_BYTES : end] = text
        return self.score(slot, end, slot + TENSORS - end)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def request(samples: int, *, binary: bool, outputs: Any = None) -> tuple[bytes, int | None]:
    arrays = {"item": np.arange(samples), "tags": np.array([[1, 2]]), "age": np.ones(1, np.float32)}
    asked = {"outputs": outputs} if outputs else {"parameters": {"binary_data_output": binary}}
    return with_tensors(arrays, binary=binary, **asked)


def wanted(samples: int) -> list[float]:
    return (np.arange(samples) + 7.0).tolist()


@pytest.mark.parametrize(("samples", "binary"), [(1, True), (3, False), (MOST, True), (MOST, False)])
def test_what_a_front_places_is_scored_and_encoded(engine: Engine, samples: int, binary: bool) -> None:
    body = decode_scores(*request(samples, binary=binary), NETWORK, 1000)
    assert body is not None
    placed = PlacedScores(body, MODEL)
    for slot in (0, 4096):
        assert slot + placed.size <= SIZE
        placed.write(engine.memory, slot, 1)
        assert engine.score_posted(slot) == ANSWERED, engine.completed
        answer = placed.encode(None, 0)
        if binary:
            check(*map(bytes, answer.binary), samples)
        else:
            scores, pairs = json.loads(b"".join(answer.text))["outputs"]
            assert (scores["data"], pairs["shape"]) == (wanted(samples), [samples, 2])


def check(scores: bytes, pairs: bytes, samples: int) -> None:
    assert np.frombuffer(scores, np.float32).tolist() == wanted(samples)
    assert np.frombuffer(pairs, np.int64).reshape(samples, 2).T.tolist() == [wanted(samples)] * 2


@pytest.mark.parametrize("samples", [1, 3, MOST])
def test_what_a_front_plans_is_scored_where_it_is_sent_from(engine: Engine, samples: int) -> None:
    body, length = request(samples, binary=True)
    plan = read_cached(body[:length], None, MODEL, 1000).plan
    assert plan is not None
    for slot in (0, 8192):
        engine.memory.view[slot : slot + len(plan.descriptor)] = plan.descriptor
        engine.memory.view[slot + plan.keys_at : slot + plan.keys_at + plan.keys_bytes] = body[length:]
        assert engine.score_posted(slot) == ANSWERED, engine.completed
        found = bytes(engine.memory.view[slot + plan.vectors_at : slot + plan.end])
        check(found[: 4 * samples], found[4 * samples :], samples)


def test_requests_that_are_no_scores_or_not_binary_have_no_plan() -> None:
    body, length = request(2, binary=True)
    for outputs in ([{"name": "score"}], [{"name": "score", "parameters": {"binary_data": True}}, {"name": "pair"}]):
        body, length = request(2, binary=True, outputs=outputs)
        assert read_cached(body[:length], None, MODEL, 1000).plan is None
    assert read_cached(request(2, binary=False)[0], None, MODEL, 1000).plan is None
    body, length = request(40, binary=True)
    with pytest.raises(hps.TooManyKeysError, match="got 42 keys, expected at most 41"):
        read_cached(body[:length], None, MODEL, 41)


GOOD: list[list[Any]] = [["item", "<i8", [2], 4096], ["tags", "<i8", [1, 2], 4200], ["age", "<f4", [1], 4300]]
OUT: list[list[Any]] = [["score", "<f4", [2], 4400]]


def test_tensors_may_lie_at_the_end_of_the_memory_and_not_beyond(engine: Engine) -> None:
    sizes = {"item": 16, "tags": 16, "age": 4, "score": 8}
    for slot in (0, 512):
        for moved, beyond in itertools.product(sizes, (0, 1, 8, 1 << 30)):
            end = SIZE - slot - TENSORS - sizes[moved] + beyond
            inputs, outputs = ([[*one[:3], end if one[0] == moved else one[3]] for one in some] for some in (GOOD, OUT))
            if beyond:
                with pytest.raises(hps.InvalidInputError, match="does not fit in the memory of the front"):
                    engine.score_text(describe(inputs, outputs, 0), slot)
            else:
                assert engine.score_text(describe(inputs, outputs, 0), slot) == ANSWERED


def test_other_room_or_another_output_than_the_networks_fails_its_request_alone(engine: Engine) -> None:
    for samples in (3, 1, 0):
        with pytest.raises(hps.InvalidInputError, match="got no room for 2 samples"):
            engine.score_text(describe(GOOD, [["score", "<f4", [samples], 4400]], 0))
    for name, dtype, shape, error in (
        ("other", "<f4", [2], "KeyError"),
        ("pair", "<i8", [2, 3], "NetworkError"),
        ("pair", "<i8", [2, 1], "NetworkError"),
    ):
        assert engine.score_text(describe(GOOD, [[name, dtype, shape, 4400]], 0)) == FAILED
        assert engine.completed[-1][1].startswith(error)
        assert engine.score_text(describe(GOOD, OUT, 0)) == ANSWERED


def test_a_bag_whose_offsets_are_garbage_is_refused(engine: Engine) -> None:
    inputs = [GOOD[0], ["tags", "<i8", [4], 4200], ["tags.offsets", "<i8", [2], 5000], GOOD[2]]
    at = (TENSORS + 5000) // 8
    for offsets in ([0, 1 << 40], [-1, 4], [4, 0], [0, 3], [0, 4]):
        engine.memory.longs[at : at + 2] = memoryview(np.array(offsets)).cast("B").cast("q")
        if offsets == [0, 4]:
            assert engine.score_text(describe(inputs, OUT, 0)) == ANSWERED
            return
        with pytest.raises(hps.InvalidInputError, match="got offsets of input 'tags'"):
            engine.score_text(describe(inputs, OUT, 0))


def test_a_description_with_bits_that_changed_is_refused_or_scored(engine: Engine) -> None:
    """Nothing but an error of the request, and nothing beyond the memory."""
    rng, good, outcomes = random.Random(4), describe(GOOD, OUT, 0), set()
    likely = b'0123456789-.,[]{}":<fi8 \x00\xff'
    for _ in range(3000):
        text = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.choice(likely) if rng.random() < 0.8 else rng.randrange(256)
        try:
            outcomes.add(engine.score_text(bytes(text)))
        except hps.InvalidInputError:
            outcomes.add(-1)
    assert {-1, ANSWERED} <= outcomes
    assert engine.score_text(good) == ANSWERED
