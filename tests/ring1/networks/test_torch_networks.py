"""Networks of PyTorch: what a file says of its inputs, what it may do, and what it returns."""

import contextlib
import functools
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.errors import InvalidInputError
from hps.networks.base import Network, NetworkTensor
from hps.testing.networks import NetworkContract

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

from hps.networks import torch_networks  # noqa: E402
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


def opened(content: bytes, *inputs: NetworkTensor, outputs: Any = ("score",), engine: Any = ExportedProgram) -> Network:
    found: Network = engine.open("dense.pt2", content, inputs or (A, B), outputs, None)
    return found


def answer(network: Network, values: dict[str, np.ndarray] = VALUES) -> dict[str, np.ndarray]:
    return network.fetch(network.run({name: network.put(array) for name, array in values.items()}))


class TestExportedProgram(NetworkContract):
    network_class = ExportedProgram

    @functools.cache  # noqa: B019 - the class lives as long as the tests
    def content(self) -> bytes:
        return exported(Both().eval(), torch.ones(2, 4), torch.ones(2, 4), shapes=(ROWS, ROWS))


class FakeCuda:
    """What `fixed` uses of `torch.cuda`, without a device. `events` has what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._stream = "default"

    def run(self) -> dict[str, Any]:
        self.events.append(f"runs on {self._stream}")
        return {}

    def current_stream(self, device: Any) -> "FakeCuda":
        return self

    def synchronize(self) -> None:
        self.events.append(f"waits for {self._stream}")

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def CUDAGraph(self) -> "FakeGraph":
        return FakeGraph(self.events)

    device = staticmethod(contextlib.nullcontext)
    is_available = staticmethod(lambda: False)


class FakeGraph:
    """A graph that says when it is captured."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._events.append(f"begins in {'new memory' if pool is None else 'known memory'}")

    def capture_end(self) -> None:
        self._events.append("ends")

    def replay(self) -> None:
        self._events.append("replays")


@pytest.fixture
def network() -> Network:
    return opened(plain())


@pytest.fixture
def cuda(network: Network, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replaces CUDA once the network is open."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch_networks, "_capture_stream", lambda device: "a stream for captures")
    return fake


def test_a_run_is_warmed_up_where_all_runs_are_and_captured_on_a_stream_of_its_own(network: Network, cuda: FakeCuda) -> None:
    first = network.fixed(cuda.run, owner=network)
    captured = ["runs on a stream for captures", "ends"]
    assert cuda.events == [*["runs on default"] * 3, "waits for default", "begins in new memory", *captured]
    del cuda.events[:]
    network.fixed(cuda.run, owner=network)
    assert cuda.events == ["runs on default", "waits for default", "begins in known memory", *captured]
    first()
    assert cuda.events[-1] == "replays"


def test_a_run_that_fails_has_left_nothing_on_the_stream_for_captures(network: Network, cuda: FakeCuda) -> None:
    def fail() -> dict[str, Any]:
        cuda.run()
        raise InvalidInputError("it cannot be captured")

    with pytest.raises(InvalidInputError):
        network.fixed(fail)
    assert cuda.events == ["runs on default"]


def test_a_run_is_repeated_as_it_is_while_another_capture_does_not_end(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_networks, "_MOST_WAIT_S", 0.0)
    network = opened(plain())
    with torch_networks._sole_capture():
        network.fixed(cuda.run)()
    assert "ends" not in cuda.events
    network.fixed(cuda.run)
    assert cuda.events[-1] == "ends"


def of_dict() -> bytes:
    return exported(OfDict(), dict(zip("ab", EXAMPLES, strict=True)), shapes=({"a": ROWS, "b": ROWS},))


def mixed() -> bytes:
    return exported(Mixed(), EXAMPLES[1], given=({"a": EXAMPLES[0]},), shapes={"b": ROWS, "given": ({"a": ROWS},)})


@pytest.mark.parametrize("form", [of_dict, mixed])
def test_inputs_in_dicts_are_called_as_their_keys(form: Callable[[], bytes]) -> None:
    found = answer(opened(form(), outputs=("score", "other")))
    np.testing.assert_allclose(found["score"], WANTED)
    assert found["other"].shape[0] == 3


def test_inputs_in_lists_are_called_as_their_placeholders_and_outputs_in_their_order() -> None:
    content = exported(OfList(), [*EXAMPLES], shapes=([ROWS, ROWS],))
    names = [str(input_) for input_ in torch.export.load(io.BytesIO(content)).graph_signature.user_inputs]
    first, second = (NetworkTensor(name, "float32", one.shape) for name, one in zip(names, (A, B), strict=True))
    found = answer(opened(content, first, second, outputs=("x", "y")), dict(zip(names, VALUES.values(), strict=True)))
    np.testing.assert_allclose(found["x"], WANTED)
    np.testing.assert_array_equal(found["y"], VALUES["a"])


@pytest.mark.parametrize("form", [plain, of_dict, mixed])
def test_sizes_that_were_seen_run_as_when_they_were_new(form: Callable[[], bytes]) -> None:
    """Checks of sizes are made once for each of them; what runs later takes and returns the same."""
    network = opened(form(), outputs=("score",) if form is plain else ("score", "other"))
    for samples in (3, 1, 3, 3, 1):
        values = {name: array[:samples] + 1 for name, array in VALUES.items()}
        found = answer(network, values)
        np.testing.assert_allclose(found["score"], values["a"].sum(1) - 2 * values["b"].sum(1))
        assert len(found.get("other", values["a"])) == samples


def test_other_sizes_are_refused_whatever_was_seen_before() -> None:
    network = opened(plain())
    wide = {"a": np.ones((3, 5), np.float32), "b": VALUES["b"]}
    for _ in range(2):
        answer(network)
        with pytest.raises(Exception, match=r"shape\[1\]|size|Guard"):
            answer(network, wide)


@pytest.mark.parametrize("dtype", ["float64", "int16", "int8", "uint8"])
def test_keys_are_computed_of_any_dtype(dtype: str) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.long() + 1

    content = exported(Cast(), torch.ones(2, 3, dtype=getattr(torch, dtype)), shapes=(ROWS,))
    network = opened(content, NetworkTensor("x", dtype, (-1, 3)), outputs=("keys",))
    for _ in range(2):
        found = answer(network, {"x": np.arange(6).reshape(2, 3).astype(dtype)})
        np.testing.assert_array_equal(found["keys"], np.arange(1, 7).reshape(2, 3), strict=True)


def test_other_outputs_are_named() -> None:
    content = mixed()
    for outputs in (("score",), ("a", "b", "c")):
        message = f"it returned 2 outputs, expected {len(outputs)} (dense.outputs)"
        with pytest.raises(hps.ModelFileError, match=re.escape(message)):
            answer(opened(content, outputs=outputs))


def test_a_closed_network_runs_no_more_and_a_gpu_that_is_not_there_is_an_error_of_the_device() -> None:
    content = plain()
    network = opened(content)
    network.close()
    with pytest.raises(hps.DeviceError, match="it is closed"):
        answer(network)
    if not torch.cuda.is_available():
        with pytest.raises(hps.DeviceError, match="this PyTorch has no CUDA"):
            ExportedProgram.open("f", content, (A, B), ("score",), 0)


PROGRAM = r"it cannot be read as a program of torch\.export: "


def test_what_is_no_program_is_refused() -> None:
    for content in (b"", pickle.dumps({"a": 1})):
        for engine in (ExportedProgram, TorchScript):
            with pytest.raises(hps.ModelFileError, match="got a file that is no archive of PyTorch"):
                opened(content, engine=engine)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "hello")
    for content in (file.getvalue(), scripted(Plain())):
        with pytest.raises(hps.ModelFileError, match=PROGRAM):
            opened(content)
    whole = plain()
    with pytest.raises(hps.ModelFileError, match="expected TorchScript"):
        opened(whole, engine=TorchScript)
    third, half = len(whole) // 3, len(whole) // 2
    with pytest.raises(hps.ModelFileError, match=r"opening the network dense\.pt2: "):
        opened(whole[:third] + bytes(half - third) + whole[half:])


def test_operators_that_nothing_registers_are_named() -> None:
    content = changed(plain(), lambda _, held: re.sub(rb"torch\.ops\.aten\.\w+", b"torch.ops.ours.rank", held))
    with pytest.raises(hps.ModelFileError, match=r"got operator ours\.rank, which nothing here registers"):
        opened(content)


def scripted(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    return file.getvalue()


class Saves(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.save(a, "must-not-exist")
        return a.sum(1)


class Named(nn.Module):
    """Has modules with names that are no identifiers, and one with a name of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.ReLU())
        self.named = nn.ModuleDict({"a-b": nn.Linear(2, 2)})

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.ops(a).sum(1) + self.named["a-b"](b).sum(1)


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


def test_escapes_in_names_are_alive_where_nothing_looks_into_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def hidden(name: str, held: bytes) -> bytes:  # in the code, and in the source beside it
        call = rb'getattr(torch, "sa\\166e")' if name.endswith(".py") else b"torch.sale"
        return re.sub(rb"torch\.save\b", call, held)

    content = changed(scripted(Saves()), hidden)
    torch.jit.load(io.BytesIO(content))(torch.ones(1, 3), torch.ones(1, 2))
    assert [one.name for one in tmp_path.iterdir()] == ["must-not-exist"]
    with pytest.raises(hps.ModelFileError, match="its code has 'getattr', expected arithmetic alone"):
        opened(content, engine=TorchScript)


@pytest.mark.parametrize("way", ["scripted", "traced"])
def test_modules_of_any_names_are_opened_scripted_or_traced(way: str) -> None:
    module, given = Named().eval(), {"a": torch.ones(2, 3), "b": torch.ones(2, 2)}
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module) if way == "scripted" else torch.jit.trace(module, (*given.values(),)), file)
    with torch.inference_mode():
        expected = module(**given)
        assert torch.equal(opened(file.getvalue(), engine=TorchScript).run(given)["score"], expected)


@pytest.mark.parametrize("module", [Saves, SavesSometimes, SavesWhenLoaded])
def test_torchscript_that_does_more_than_arithmetic_is_refused_unread(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hps.ModelFileError, match="its code has 'save', expected arithmetic alone"):
        opened(scripted(module()), engine=TorchScript)
    assert not list(tmp_path.iterdir())


def changed(content: bytes, change: Callable[[str, bytes], bytes], **more: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(file, "w") as written:
        for one in whole.namelist():
            written.writestr(one, change(one, whole.read(one)))
        for one, held in more.items():
            written.writestr(one, held)
    return file.getvalue()


@pytest.mark.parametrize(
    "call",
    [
        "ops.hps.lookup(a)",
        "ops.c10d.send_([a])",
        "torch.from_file(a)",
        "__torch__.torch.classes.c10d.Store(a)",
        "rpc_sync(a)",
        "ops .\\\n hps . lookup(a)",
        'getattr(torch, "sa\\166e")(a, "x")',
        'getattr(torch, "sa" "ve")(a, "x")',
        'getattr(getattr(ops, "aten"), "sa\\166e")(a, "x")',
        'getattr(getattr(a, "0"), "x")',
        "b = ops",
        "b = ops.c10d",
        "b = __torch__.torch",
        "b = (__torch__.torch.classes)",
    ],
)
def test_torchscript_that_reaches_tables_files_or_machines_is_refused_unread(call: str) -> None:
    content = changed(scripted(Plain()), lambda name, held: held + f"\n# {call}\n".encode() if name.endswith(".py") else held)
    with pytest.raises(hps.ModelFileError, match=r"its code has '.*', expected arithmetic alone"):
        opened(content, engine=TorchScript)


def test_objects_of_classes_that_reach_machines_are_refused_unread() -> None:
    named = b"c__torch__.torch.classes.dist_rpc\nWorkerInfo\n"
    content = changed(scripted(Plain()), lambda name, held: named + held if name.endswith("/data.pkl") else held)
    with pytest.raises(hps.ModelFileError, match=r"its code has 'classes\.dist_rpc', expected arithmetic alone"):
        opened(content, engine=TorchScript)


@pytest.mark.parametrize("member", ["archive/model.json", "archive/Code/x.py", "archive/bytecode.pkl", "archive/x.so"])
def test_members_that_are_none_of_torchscript_are_refused_by_name(member: str) -> None:
    with pytest.raises(hps.ModelFileError, match=f"got '{member.removeprefix('archive/')}' in its archive"):
        opened(changed(scripted(Plain()), lambda _, held: held, **{member: b"{}"}), engine=TorchScript)


@pytest.mark.parametrize("saved", [Plain(), Plain().state_dict()], ids=["module", "weights"])
def test_pickles_are_refused_unread(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    torch.save(saved, file)
    monkeypatch.setattr(pickle, "Unpickler", lambda *_: pytest.fail("the pickle was read"))
    with pytest.raises(hps.ModelFileError, match=r"it is a pickle of torch\.save, which may run any code"):
        opened(file.getvalue(), engine=TorchScript)
