"""Published models, packaged into one repository and served by one process: every wire answers as their modules do."""

import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc

import hps
from hps.testing.waiting import PATIENCE_S
from hps.torch import PackagedModel, package
from tests.ring2.torch.test_forms import PUBLISHED
from tests.servers.binary_tensors import kind_of, request_of, tensors_of
from tests.servers.served_process import ServedProcess
from tests.tables.torch_forms import FORMS
from tests.tables.torch_forms.form import LENGTH, Draw
from tests.tables.torch_forms.judge import call, difference

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's and torchrec's

MORE = ("half", "bfloat16", "FactorizationMachine")
SIZES = [(1, LENGTH), (3, LENGTH), (64, LENGTH), (5, 2)]
Answers = list[np.ndarray]


class Packaged(NamedTuple):
    """A model of the repository, and requests with what its module answers."""

    done: PackagedModel
    requests: list[tuple[dict[str, np.ndarray], list[torch.Tensor]]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Packaged]]:
    place, models = tmp_path_factory.mktemp("repository"), {}
    for name in (*PUBLISHED, *MORE):
        form = FORMS[name]
        module = form.module()
        done = package(module, place / name, form.examples(), per_request=form.per_request, hotness=20)
        requests = []
        for number, size in enumerate(SIZES):
            if form.within is not None and form.within(*size):
                given = form.draw(Draw(*size, "any", number + 1))
                made = done.request(**given) if isinstance(given, dict) else done.request(*given)
                requests.append((made, call(module, given)))
        models[name] = Packaged(done, requests)
    return place, models


@pytest.fixture(scope="module")
def served(repository: tuple[Path, dict[str, Packaged]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with ServedProcess(repository[0], tmp_path_factory.mktemp("served"), 1, "--grpc-port", 0) as served:
        yield served


# -- the wires ----------------------------------------------------------------------------------------------------------


def rows_of(name: str, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    """Return what each sample has of an input."""
    ends = inputs.get(f"{name}.offsets")
    if ends is None:
        return inputs[name].tolist()  # type: ignore[no-any-return]
    return [inputs[name][at:to].tolist() for at, to in itertools.pairwise(ends)]


class Rows:
    """`/v1`: what all samples share, and rows of each."""

    def __init__(self, served: ServedProcess) -> None:
        self._client = httpx.Client(base_url=served.url, timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.close()

    def takes(self, done: PackagedModel) -> bool:
        return all(input_.shape[0] == -1 for input_ in done.dense.inputs.values())

    def score(self, model: str, done: PackagedModel, inputs: Mapping[str, np.ndarray]) -> Answers:
        columns = [rows_of(name, inputs) for name in done.dense.inputs]
        items = [dict(zip(done.dense.inputs, row, strict=True)) for row in zip(*columns, strict=True)]
        answer = self._client.post(f"/v1/models/{model}/score", json={"user": {}, "items": items})
        assert answer.status_code == 200, answer.text
        return [np.array(answer.json()["outputs"][name]) for name in done.dense.outputs]


class Inference(Rows):
    """`/v2` in JSON."""

    def takes(self, done: PackagedModel) -> bool:
        return True

    def score(self, model: str, done: PackagedModel, inputs: Mapping[str, np.ndarray]) -> Answers:
        tensors = [
            {"name": name, "shape": one.shape, "datatype": kind_of(one), "data": one.ravel().tolist()}
            for name, one in inputs.items()
        ]
        answer = self._client.post(f"/v2/models/{model}/infer", json={"inputs": tensors})
        assert answer.status_code == 200, answer.text
        found = {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer.json()["outputs"]}
        return [found[name] for name in done.dense.outputs]


class BinaryInference(Inference):
    """`/v2` with binary tensors."""

    def score(self, model: str, done: PackagedModel, inputs: Mapping[str, np.ndarray]) -> Answers:
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in done.dense.outputs]
        headers, body = request_of(inputs, outputs=outputs)
        answer = self._client.post(f"/v2/models/{model}/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found = dict(tensors_of(answer.headers, answer.content))
        return [found[name] for name in done.dense.outputs]


class GRPC(Inference):
    """NVIDIA's client for gRPC."""

    def __init__(self, served: ServedProcess) -> None:
        self._triton = triton_grpc.InferenceServerClient(served.grpc)

    def close(self) -> None:
        self._triton.close()

    def score(self, model: str, done: PackagedModel, inputs: Mapping[str, np.ndarray]) -> Answers:
        tensors = [triton_grpc.InferInput(name, list(one.shape), kind_of(one)) for name, one in inputs.items()]
        for tensor, one in zip(tensors, inputs.values(), strict=True):
            tensor.set_data_from_numpy(np.ascontiguousarray(one))
        answer = self._triton.infer(model, tensors)
        return [answer.as_numpy(name) for name in done.dense.outputs]


class OurClient(Inference):
    """`hps.connect`."""

    def __init__(self, served: ServedProcess) -> None:
        self._ours = hps.connect(served.url)

    def close(self) -> None:
        self._ours.close()

    def score(self, model: str, done: PackagedModel, inputs: Mapping[str, np.ndarray]) -> Answers:
        answer = self._ours.score(model, inputs)
        return [np.asarray(answer[name]) for name in done.dense.outputs]


WIRES: list[Any] = [Rows, Inference, BinaryInference, GRPC, OurClient]


@pytest.fixture(params=WIRES, ids=lambda one: one.__name__)
def wire(request: pytest.FixtureRequest, served: ServedProcess) -> Iterator[Any]:
    made = request.param(served)
    yield made
    made.close()


def check(wire: Any, name: str, packaged: Packaged, place: int) -> None:
    inputs, expected = packaged.requests[place]
    answers = wire.score(name, packaged.done, inputs)
    assert difference(answers, expected) <= FORMS[name].tolerance, (type(wire).__name__, name, place)


def test_each_wire_answers_as_the_module(wire: Any, repository: tuple[Path, dict[str, Packaged]]) -> None:
    for name, packaged in repository[1].items():
        if wire.takes(packaged.done):
            for place in range(len(packaged.requests)):
                check(wire, name, packaged, place)


def test_requests_at_the_same_time_are_answered_as_alone(
    served: ServedProcess, repository: tuple[Path, dict[str, Packaged]]
) -> None:
    """Of all wires and models at once: batches are made of requests that came by different wires."""

    def ask(kind: Any, turn: int) -> None:
        wire = kind(served)
        models = list(repository[1].items())
        for name, packaged in models[turn:] + models[:turn]:
            if wire.takes(packaged.done):
                for place in range(len(packaged.requests)):
                    check(wire, name, packaged, place)
        wire.close()

    turns = list(itertools.product(WIRES, range(2)))
    with ThreadPoolExecutor(len(turns)) as pool:
        for done in [pool.submit(ask, kind, turn) for kind, turn in turns]:
            done.result()


def test_inputs_given_once(served: ServedProcess, repository: tuple[Path, dict[str, Packaged]]) -> None:
    """`user` has the inputs that a request gives once."""
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        for name in ("TwoTower", "DIN"):
            packaged, form = repository[1][name], FORMS[name]
            given = form.draw(Draw(7, LENGTH, "any", 5))
            assert isinstance(given, dict)
            for one in form.per_request:
                given[one] = given[one][:1].expand_as(given[one]).contiguous()
            user = {one: given[one][0].tolist() for one in form.per_request}
            items = [
                {one: value[row].tolist() for one, value in given.items() if one not in form.per_request} for row in range(7)
            ]
            answer = client.post(f"/v1/models/{name}/score", content=json.dumps({"user": user, "items": items}))
            assert answer.status_code == 200, answer.text
            answers = [np.array(answer.json()["outputs"][output]) for output in packaged.done.dense.outputs]
            assert difference(answers, call(form.module(), given)) <= form.tolerance


def test_a_size_that_a_guard_refuses_is_400_on_each_wire(wire: Any, repository: tuple[Path, dict[str, Packaged]]) -> None:
    """GRU4Rec takes histories of the examples' length alone; the reason names the input."""
    inputs = {"hist": np.ones((2, LENGTH + 1), np.int64)}
    with pytest.raises((AssertionError, hps.InvalidInputError, triton_grpc.InferenceServerException), match="hist"):
        wire.score("GRU4Rec", repository[1]["GRU4Rec"].done, inputs)


def test_a_module_is_not_needed_to_ask(served: ServedProcess, repository: tuple[Path, dict[str, Packaged]]) -> None:
    """What the server says of a model's inputs suffices to make a request."""
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        for name, packaged in repository[1].items():
            said = client.get(f"/v2/models/{name}").json()["inputs"]
            assert {one["name"] for one in said} >= set(packaged.requests[0][0]), name
