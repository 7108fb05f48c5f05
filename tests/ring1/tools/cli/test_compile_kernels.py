"""`hps compile`: what it refuses, and what it compiles for a GPU; `ring2/tools/cli` compiles."""

import json

import pytest
from typer.testing import CliRunner

from hps.configuration.load import load_configuration
from hps.ground.kernels import machine_code
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.tools.cli.app import app
from hps.tools.cli.server.compile_kernels import _compile_for_gpu
from tests.servers.running_service import document_of, model_of

MODEL = model_of("m", ["t.model"], {"t": 16}, gpucache=False)
CONFIG = document_of(MODEL, volatile_db={"type": "disabled"}, persistent_db={"type": "disabled"})
"""Neither databases nor caches."""


def test_an_unknown_architecture_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "ps.json").write_text(json.dumps(CONFIG))
    done = CliRunner().invoke(app, ["compile", str(tmp_path / "ps.json"), "--gpu", "sm_80,h100"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--gpu: got 'h100', expected architectures as sm_90" in done.stderr


def test_without_a_directory_to_write_to_it_fails(tmp_path, monkeypatch):
    (tmp_path / "ps.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(machine_code, "BASELINE", machine_code.BASELINE)  # put back
    monkeypatch.setattr(machine_code, "directory", lambda: None)
    done = CliRunner().invoke(app, ["compile", str(tmp_path / "ps.json")])
    assert done.exit_code == 1
    assert "no directory is writable; set NUMBA_CACHE_DIR to one that is" in done.stderr


class Compiler:
    """A cache that compiles nothing, and counts models that share rows and those that do not."""

    @staticmethod
    def compile_ahead(models, architecture):
        shared = sum(shared for _, _, shared in models)
        return shared, len(models) - shared


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"deployed_device_list": [0, 1], "device_sharing": "hot"}, (1, 0)),
        ({"deployed_device_list": [0], "device_sharing": "hot"}, (0, 1)),
        ({"deployed_device_list": [0, 1]}, (0, 1)),
        ({"deployed_device_list": [0, 1], "device_sharing": "hot", "gpucache": False}, (0, 0)),
    ],
)
def test_kernels_for_shared_rows_are_those_of_models_that_share_them(monkeypatch, changes, expected):
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn(f"{__name__}:Compiler"))
    model = MODEL | {"gpucache": True} | changes
    assert _compile_for_gpu(load_configuration(CONFIG | {"models": [model]}), "90") == expected
