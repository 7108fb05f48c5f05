"""Networks of PyTorch: what a file says of its inputs, what it may do, and what it returns."""

import functools
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.networks.base import Network, NetworkTensor
from hps.testing.networks import NetworkContract

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

from hps.networks.torch_networks import ExportedProgram, TorchScript  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:`?torch.jit:FutureWarning")
SAMPLES = torch.export.Dim("samples", min=1)
A, B = NetworkTensor("a", "float32", (-1, 4)), NetworkTensor("b", "float32", (-1, 2))
VALUES = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones((3, 2), np.float32)}
WANTED = VALUES["a"].sum(1) - 2 * VALUES["b"].sum(1)


def score(a: Any, b: Any) -> Any:
    return a.sum(1) - 2 * b.sum(1)


class Plain(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sum(1) - 2 * b.sum(1)


class OfDict(nn.Module):
    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        return {"score": score(given["a"], given["b"]), "other": given["a"]}


class OfList(nn.Module):
    def forward(self, given: list[torch.Tensor]) -> Any:
        return [score(*given), given[0]]


class Mixed(nn.Module):
    def forward(self, b: torch.Tensor, *, given: tuple[dict[str, torch.Tensor], ...]) -> Any:
        return score(given[0]["a"], b), b


def exported(module: nn.Module, *args: Any, shapes: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, args, named, dynamic_shapes=shapes, strict=False), file)
    return file.getvalue()


class Both(nn.Module):
    """What the contract asks for; it drops samples while it is trained, as it is when it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.dropout(a + b), "product": self.dropout(a * b)}


EXAMPLES = torch.ones(2, 4), torch.ones(2, 2)
ROWS = {0: SAMPLES}


def plain() -> bytes:
    return exported(Plain(), *EXAMPLES, shapes=(ROWS, ROWS))


def opened(
    content: bytes, *inputs: NetworkTensor, outputs: tuple[str, ...] = ("score",), engine: Any = ExportedProgram
) -> Network:
    found: Network = engine.open("dense.pt2", content, inputs or (A, B), outputs, None)
    return found


def answer(network: Network, values: dict[str, np.ndarray] = VALUES) -> dict[str, np.ndarray]:
    return network.fetch(network.run({name: network.put(array) for name, array in values.items()}))


# -- programs of torch.export -----------------------------------------------------------------------------------------


class TestExportedProgram(NetworkContract):
    network_class = ExportedProgram

    @functools.cache  # noqa: B019 - the class lives as long as the tests
    def content(self) -> bytes:
        return exported(Both().eval(), torch.ones(2, 4), torch.ones(2, 4), shapes=(ROWS, ROWS))


FORMS: dict[str, Callable[[], bytes]] = {
    "a dict, a dict": lambda: exported(OfDict(), dict(zip("ab", EXAMPLES, strict=True)), shapes=({"a": ROWS, "b": ROWS},)),
    "a mixture, a tuple": lambda: exported(
        Mixed(), EXAMPLES[1], given=({"a": EXAMPLES[0]},), shapes={"b": ROWS, "given": ({"a": ROWS},)}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_in_dicts_are_called_as_their_keys(form: str) -> None:
    found = answer(opened(FORMS[form](), outputs=("score", "other")))
    np.testing.assert_allclose(found["score"], WANTED)
    assert found["other"].shape[0] == 3


def test_inputs_in_lists_are_called_as_their_placeholders_and_outputs_in_their_order() -> None:
    content = exported(OfList(), [*EXAMPLES], shapes=([ROWS, ROWS],))
    names = [str(one) for one in torch.export.load(io.BytesIO(content)).graph_signature.user_inputs]
    first, second = (NetworkTensor(name, "float32", one.shape) for name, one in zip(names, (A, B), strict=True))
    found = answer(opened(content, first, second, outputs=("x", "y")), dict(zip(names, VALUES.values(), strict=True)))
    np.testing.assert_allclose(found["x"], WANTED)
    np.testing.assert_array_equal(found["y"], VALUES["a"])


@pytest.mark.parametrize(
    ("form", "outputs", "message"),
    [
        ("a mixture, a tuple", ("score",), "it returned 2 outputs, expected 1 (dense.outputs)"),
        ("a mixture, a tuple", ("a", "b", "c"), "it returned 2 outputs, expected 3 (dense.outputs)"),
    ],
)
def test_other_outputs_are_named(form: str, outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(hps.ModelFileError, match=re.escape(message)):
        answer(opened(FORMS[form](), outputs=outputs))


def test_a_closed_network_runs_no_more() -> None:
    network = opened(plain())
    network.close()
    with pytest.raises(hps.DeviceError, match="it is closed"):
        answer(network)


@pytest.mark.parametrize("engine", [ExportedProgram, TorchScript])
@pytest.mark.parametrize("content", [b"", pickle.dumps({"a": 1})])
def test_what_is_no_archive_is_refused(engine: Any, content: bytes) -> None:
    with pytest.raises(hps.ModelFileError, match="got a file that is no archive of PyTorch"):
        opened(content, engine=engine)


def test_an_archive_of_something_else_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(hps.ModelFileError, match=r"it cannot be read as a program of torch\.export: "):
        opened(file.getvalue())


def test_a_damaged_program_is_refused() -> None:
    content = bytearray(plain())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    with pytest.raises(hps.ModelFileError, match=r"opening the network dense\.pt2: "):
        opened(bytes(content))


def test_a_gpu_that_is_not_there_is_an_error_of_the_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(hps.DeviceError, match="this PyTorch has no CUDA"):
        ExportedProgram.open("f", plain(), (A, B), ("score",), 0)


# -- TorchScript ------------------------------------------------------------------------------------------------------


def scripted(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    return file.getvalue()


class Saves(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.save(a, "must-not-exist")
        return a.sum(1)


class SavesSometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.within = Saves()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if bool(a.sum() > 0):
            a = self.within(a, b)[:, None]
        return a.sum(1)


class SavesWhenLoaded(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sum(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return torch.ones(1), self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        torch.save(state[0], "must-not-exist")
        self.training = state[1]


class TestTorchScript(NetworkContract):
    network_class = TorchScript

    def content(self) -> bytes:
        return scripted(Both())


def test_torchscript_that_was_saved_in_training_scores_without_dropout() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    assert module.training
    ones = np.ones((100, 4), np.float32)
    network = opened(scripted(module), NetworkTensor("input", "float32", (-1, 4)), engine=TorchScript)
    np.testing.assert_array_equal(answer(network, {"input": ones})["score"], ones)


@pytest.mark.parametrize("module", [Saves, SavesSometimes, SavesWhenLoaded])
def test_torchscript_that_does_more_than_arithmetic_is_refused_unread(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hps.ModelFileError, match="its code has 'save', expected arithmetic alone"):
        opened(scripted(module()), engine=TorchScript)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saved", [Plain(), Plain().state_dict()], ids=["module", "weights"])
def test_pickles_are_refused_unread(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    torch.save(saved, file)
    monkeypatch.setattr(pickle, "Unpickler", lambda *_: pytest.fail("the pickle was read"))
    with pytest.raises(hps.ModelFileError, match=r"it is a pickle of torch\.save, which may run any code"):
        opened(file.getvalue(), engine=TorchScript)


def test_a_program_is_no_torchscript_and_the_other_way_round() -> None:
    with pytest.raises(hps.ModelFileError, match=r"it cannot be read as a program of torch\.export: "):
        opened(scripted(Plain()))
    with pytest.raises(hps.ModelFileError, match="expected TorchScript"):
        opened(plain(), engine=TorchScript)
