"""Programs of torch with our operators, saved by one process and run by another that knows only their file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hps
from hps.testing.waiting import PATIENCE_S
from hps.torch import EmbeddingBag, LookupLayer, attach, close
from tests.ring1.torch.conftest import configuration

pytestmark = [pytest.mark.filterwarnings("ignore")]
RUN = """
import sys, torch, hps.torch
from pathlib import Path
kind, directory = sys.argv[1], Path(sys.argv[2])
inputs = torch.load(directory / "inputs.pt")
if kind == "exported":
    program = torch.export.load(directory / "program.pt2").module()
elif kind == "compiled":
    program = torch._inductor.aoti_load_package(str(directory / "program.pt2"))
else:
    program = torch.jit.load(directory / "program.pt")
torch.save(program(*inputs), directory / "answer.pt")
"""


class Model(torch.nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.rows = LookupLayer(place, "m", "user", 8)
        self.bags = EmbeddingBag(place, "m", "item", 5, mode="mean", include_last_offset=True)

    def forward(self, keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.rows(keys[: offsets.numel() - 1]), 2 * self.bags(keys, offsets)], 1)


def save(kind: str, model: Any, inputs: tuple[torch.Tensor, ...], directory: Path) -> None:
    if kind == "scripted":
        torch.jit.script(model).save(directory / "program.pt")
        return
    shapes = ({0: torch.export.Dim("keys", min=4)}, {0: torch.export.Dim("offsets", min=3)})
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    if kind == "exported":
        torch.export.save(program, directory / "program.pt2")
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "program.pt2"))


def run(kind: str, directory: Path) -> str:
    """What another process says that loads and runs the program."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, kind, str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    return ended.stderr if ended.returncode else ""


def check_saved_program(kind: str, tmp_path: Path) -> None:
    document, _ = configuration(tmp_path)
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document))
    model = Model(str(path))
    save(kind, model, (torch.arange(10), torch.tensor([0, 1, 4, 10])), tmp_path)
    inputs = torch.arange(50, 65), torch.tensor([0, 5, 5, 9, 15])
    expected = model(*inputs)
    close()
    torch.save(inputs, tmp_path / "inputs.pt")
    assert run(kind, tmp_path) == ""
    torch.testing.assert_close(torch.load(tmp_path / "answer.pt"), expected)


def test_an_exported_program_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    check_saved_program("exported", tmp_path)


def test_a_program_with_a_name_wants_the_server_attached(tmp_path: Path) -> None:
    document, _ = configuration(tmp_path)
    inputs = torch.arange(10), torch.tensor([0, 1, 4, 10])
    with hps.HPS(document) as server:
        save("scripted", Model(attach(server, "prod")), inputs, tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    assert "call hps.torch.attach(server, 'prod') first" in run("scripted", tmp_path)
