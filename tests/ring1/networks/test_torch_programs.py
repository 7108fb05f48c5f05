"""Programs of torch.export that would run code when PyTorch opens them. Each is refused by name, and its code never runs."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.networks.base import NetworkTensor

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - after torch is known to be there

from hps.networks.torch_networks import ExportedProgram  # noqa: E402
from hps.networks.torch_programs import checked_program  # noqa: E402

A, B = NetworkTensor("a", "float32", (-1, 4)), NetworkTensor("b", "float32", (-1, 4))
SAMPLES = torch.export.Dim("samples", min=1)
EXAMPLES = torch.ones(2, 4), torch.ones(2, 4)
MODEL, INPUTS, CONFIG = "archive/models/model.json", "archive/data/sample_inputs/model.pt", "_config.json"


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a + b) * self.weight).sum(1)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@cache
def saved() -> dict[str, bytes]:
    file = io.BytesIO()
    shapes = ({0: SAMPLES}, {0: SAMPLES})
    torch.export.save(torch.export.export(Weighted(), EXAMPLES, dynamic_shapes=shapes, strict=False), file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(found: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, content in found.items():
            written.writestr(name, content)
    return file.getvalue()


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the archive with another model."""
    model = json.loads(saved()[MODEL])
    change(model)
    return archive({**saved(), MODEL: json.dumps(model).encode()})


def opened(content: bytes) -> Any:
    return ExportedProgram.open("dense.pt2", content, (A, B), ("score",), None)


def test_a_program_answers_as_it_did_after_it_is_written_anew() -> None:
    network = opened(archive(saved()))
    for samples in (3, 1, 3):
        found = network.fetch(network.run({name: network.put(np.ones((samples, 4), np.float32)) for name in "ab"}))
        np.testing.assert_array_equal(found["score"], np.full(samples, 12, np.float32))


def test_what_the_computation_does_not_need_is_left_out() -> None:
    checked = checked_program("f", archive({**saved(), "archive/extra/readme": b"text"}))
    with zipfile.ZipFile(checked.archive) as written:
        names, model = written.namelist(), json.loads(written.read(MODEL))
        assert written.read(INPUTS) == b""
    assert set(names) == set(saved())
    assert (model.get("guards_code"), checked.has_examples) == (None, True)
    assert not any(node["metadata"] for node in model["graph_module"]["graph"]["nodes"])
    assert checked.guards == ("L['a'].size()[0] == L['b'].size()[0]",)
    assert {("aten", "add"), ("aten", "mul"), ("aten", "sum")} == checked.operators


def weights(use: Callable[[dict[str, Any]], Any]) -> bytes:
    name = next(one for one in saved() if one.endswith("model_weights" + CONFIG))
    config = json.loads(saved()[name])
    use(config["config"]["weight"])
    return archive({**saved(), name: json.dumps(config).encode()})


def pickled(place: str, mark: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": Payload(mark)}, file)
    code = file.getvalue()
    constants = json.dumps(
        {"config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}}
    )
    weight = "archive/data/weights/weight_0"
    return {
        "sample inputs": lambda: archive({**saved(), INPUTS: code}),
        "sample inputs, no archive": lambda: archive({**saved(), INPUTS: pickle.dumps(Payload(mark))}),
        "legacy weights": lambda: archive({**saved(), "archive/data/weights/model.pt": code}),
        "legacy constants": lambda: archive({**saved(), "archive/data/constants/model.pt": code}),
        "a weight": lambda: archive(
            {**members_of(weights(lambda one: one.update(use_pickle=True, path_name="weight_0"))), weight: code}
        ),
        "a constant": lambda: archive(
            {
                **saved(),
                "archive/data/constants/model_constants_config.json": constants.encode(),
                "archive/data/constants/opaque_obj_0": pickle.dumps(Payload(mark)),
            }
        ),
        "an old archive": lambda: archive(
            {
                "version": b"8.20",
                "serialized_exported_program.json": saved()[MODEL],
                "serialized_state_dict.pt": code,
                "serialized_constants.pt": b"",
                "serialized_example_inputs.pt": b"",
            }
        ),
    }[place]()


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as read:
        return {name: read.read(name) for name in read.namelist()}


PLACES = [
    "sample inputs",
    "sample inputs, no archive",
    "legacy weights",
    "legacy constants",
    "a weight",
    "a constant",
    "an old archive",
]


@pytest.mark.parametrize("place", PLACES)
def test_pickled_code_never_runs(place: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickled(place, mark)
    for _ in range(2):
        with pytest.raises(
            hps.ModelFileError,
            match=r"opening the network dense\.pt2: got '\S+' in its archive.*, expected tensors and JSON alone",
        ):
            opened(content)
    assert not mark.exists()


def test_code_in_sample_inputs_is_alive_where_nothing_looks_into_the_archive(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(Exception):  # noqa: B017 - after it has run
        torch.export.load(io.BytesIO(pickled("sample inputs", mark)))
    assert mark.exists()


def test_pickles_of_tensors_are_read() -> None:
    """Old releases save weights so, and new ones the weights of subclasses."""
    file = io.BytesIO()
    torch.save({"weight": nn.Parameter(torch.arange(4.0))}, file)
    network = opened(archive({**saved(), "archive/data/weights/model.pt": file.getvalue()}))
    found = network.fetch(network.run({name: network.put(np.ones((2, 4), np.float32)) for name in "ab"}))
    np.testing.assert_array_equal(found["score"], [12, 12])


def test_archives_of_older_releases_are_read() -> None:
    """PyTorch 2.6 and 2.7 saved pickles of tensors beside the JSON."""
    weights, empty, examples = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"weight": nn.Parameter(torch.arange(4.0))}, weights)
    torch.save({}, empty)
    torch.save((EXAMPLES, {}), examples)
    content = archive(
        {
            "version": b"8.20",
            "serialized_exported_program.json": saved()[MODEL],
            "serialized_state_dict.pt": weights.getvalue(),
            "serialized_constants.pt": empty.getvalue(),
            "serialized_example_inputs.pt": examples.getvalue(),
            "extra_files/readme": b"text",
        }
    )
    network = opened(content)
    found = network.fetch(network.run({name: network.put(np.ones((2, 4), np.float32)) for name in "ab"}))
    np.testing.assert_array_equal(found["score"], [12, 12])


class Guarded(nn.Module):
    def forward(self, a: torch.Tensor, *, b: dict[str, torch.Tensor]) -> torch.Tensor:
        if a.shape[0] > 5 and a.shape[1] + b["c"].shape[1] == 6:
            return a.sum(1) + b["c"].sum(1)
        return a.sum(1)


class Masked(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        masked = a.masked_fill(b > 1, float("-inf")).masked_fill(b < 0, float("inf"))
        return torch.where(b == 0, float("nan"), masked).sum(1)


def test_floats_that_json_has_no_numbers_for_are_read() -> None:
    file = io.BytesIO()
    torch.export.save(torch.export.export(Masked(), EXAMPLES, dynamic_shapes=({0: SAMPLES}, {0: SAMPLES}), strict=False), file)
    network = opened(file.getvalue())
    b = np.array([[1] * 4, [2] * 4, [-1] * 4, [0] * 4], np.float32)
    found = network.fetch(network.run({"a": network.put(np.ones((4, 4), np.float32)), "b": network.put(b)}))
    np.testing.assert_array_equal(found["score"], [4, -np.inf, np.inf, np.nan])


@pytest.mark.parametrize("strict", [False, True])
def test_guards_are_checked_for_every_new_size(strict: bool) -> None:
    """PyTorch gets none of them: its own function of them takes time of guards times inputs."""
    free, file = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, io.BytesIO()
    given = (torch.ones(7, 4),), {"b": {"c": torch.ones(7, 2)}}
    shapes = {"a": free, "b": {"c": free}}
    torch.export.save(torch.export.export(Guarded(), *given, dynamic_shapes=shapes, strict=strict), file)
    tensors = NetworkTensor("a", "float32", (-1, -1)), NetworkTensor("c", "float32", (-1, -1))
    network = ExportedProgram.open("dense.pt2", file.getvalue(), tensors, ("score",), None)
    ran = []
    for samples, width, other in [(7, 4, 2), (3, 4, 2), (8, 3, 3), (8, 4, 3), (3, 4, 2), (7, 4, 2), (6, 2, 4)]:
        sizes = {"a": (samples, width), "c": (samples, other)}
        inputs = {name: network.put(np.ones(shape, np.float32)) for name, shape in sizes.items()}
        if samples > 5 and width + other == 6:
            np.testing.assert_array_equal(network.fetch(network.run(inputs))["score"], np.full(samples, 6, np.float32))
            ran.append(samples)
        else:
            with pytest.raises(ValueError, match=r"^Guard failed: .*size"):
                network.run(inputs)
    assert ran == [7, 8, 7, 6]


def graph(model: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["graph_module"]["graph"]
    return found


def spec(model: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["graph_module"]["module_call_graph"][0]["signature"]
    return found


def with_spec(change: Callable[[Any], Any], which: str = "in_spec") -> Callable[[dict[str, Any]], None]:
    def use(model: dict[str, Any]) -> None:
        said = json.loads(spec(model)[which])
        change(said[1])
        spec(model)[which] = json.dumps(said)

    return use


def node(**said: Any) -> Callable[[dict[str, Any]], None]:
    return lambda model: graph(model)["nodes"][0].update(said)


def sized(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda model: graph(model)["tensor_values"]["a"]["sizes"][0]["as_expr"].update(expr_str=text)


ENUM = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": "y"})
FACTORY = json.dumps({"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []})
CODE = "__import__('pathlib').Path('mark').touch()"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (node(target="torch.os.system"), "got 'torch.os.system' as target: it is no operator of tensors"),
        (node(target="_operator.methodcaller"), "got '_operator.methodcaller' as target"),
        (node(target="torch.ops.load_library"), "got 'torch.ops.load_library' as target"),
        (node(target="torch.ops.aten.__class__.x"), "got 'torch.ops.aten.__class__.x' as target"),
        (node(target="torch.ops.higher_order.call_torchbind"), "call_torchbind"),
        (node(target="torch.ops.aten.from_file.default"), "operator aten.from_file does something else than compute"),
        (node(target="torch.ops.aten.save.default"), "operator aten.save does something else than compute"),
        (node(target="torch.ops.hps.lookup.default"), "operator hps.lookup does something else than compute"),
        (node(target="torch.ops.prim.Print.default"), "operator prim.Print does something else than compute"),
        (node(target="torch.ops.c10d.send.default"), "operator c10d.send does something else than compute"),
        (node(name=f"x = {CODE} #"), "as name: it may run code"),
        (lambda model: graph(model)["inputs"][0]["as_tensor"].update(name=f"a={CODE}"), "as name: it may run code"),
        (lambda model: spec(model)["forward_arg_names"].__setitem__(0, f"a={CODE}"), "as forward_arg_names"),
        (
            lambda model: model["graph_module"]["signature"]["input_specs"][0]["parameter"].update(parameter_name=f"w{CODE}"),
            "as para",
        ),
        (
            lambda model: model["graph_module"]["signature"]["input_specs"][0]["parameter"].update(parameter_name="__class__"),
            "as para",
        ),
        (sized(CODE), "as expr_str: got"),
        (lambda model: model.update(guards_code=[CODE]), "it cannot be read as a program of torch.export: got"),
        (lambda model: model["range_constraints"].update({CODE: {"min_val": 1, "max_val": 2}}), "as range_constraints"),
        (with_spec(lambda top: top.update(context=ENUM)), "expected keys that are texts or numbers"),
        (with_spec(lambda top: top.update(context=f"[{ENUM}]"), "out_spec"), "expected keys that are texts or numbers"),
        (
            with_spec(lambda top: top.update(type="collections.defaultdict", context=FACTORY)),
            "expected tuples, lists and dicts",
        ),
        (with_spec(lambda top: top["children_spec"][1].update(context=json.dumps([CODE]))), "as in_spec"),
        (lambda model: graph(model)["custom_obj_values"].update(x={"name": "x", "class_fqn": "os.system"}), "as class_fqn"),
        (lambda model: graph(model)["nodes"][0]["inputs"][0]["arg"].update(as_int=CODE), "as as_int"),
        (lambda model: model.update(novelty=CODE), "as novelty"),
    ],
)
def test_text_that_pytorch_would_evaluate_is_refused(
    change: Callable[[dict[str, Any]], Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hps.ModelFileError, match=r"^opening the network dense\.pt2: ") as raised:
        opened(changed(change))
    assert named in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "member", ["archive/data/custom", "archive/models/other.json", "archive/data/constants/custom_obj_0", "archive/x.so"]
)
def test_members_that_are_neither_tensors_nor_json_are_refused_by_name(member: str) -> None:
    with pytest.raises(hps.ModelFileError, match=f"got '{member.removeprefix('archive/')}' in its archive"):
        opened(archive({**saved(), member: b"\x7fELF"}))


@pytest.mark.parametrize("place", ["../models/model.json", "/etc/passwd", "weight_9"])
def test_weights_are_members_of_the_archive(place: str) -> None:
    with pytest.raises(hps.ModelFileError, match="expected tensors and JSON alone"):
        opened(weights(lambda one: one.update(path_name=place)))


def test_an_empty_weight_of_any_size_takes_no_memory() -> None:
    content = weights(lambda one: one["tensor_meta"].update(sizes=[{"as_int": 1 << 40}]))
    with pytest.raises(hps.ModelFileError, match="weight_0 is empty, and its sizes are not"):
        opened(archive({**members_of(content), "archive/data/weights/weight_0": b""}))
