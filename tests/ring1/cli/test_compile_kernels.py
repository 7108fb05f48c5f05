"""`hps compile`: what it compiles and prints. That a read-only installation finds it is tested with the kernels."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hps.cli.app import app
from hps.cli.compile_kernels import _compile_for_gpu
from hps.configuration.load import load_configuration
from hps.ground import machine_code
from hps.registry import IMPLEMENTATIONS, Ours
from tests.fakes.installation import Installation

CONFIG = {
    "supportlonglong": True,
    "device": "cpu",
    "volatile_db": {"type": "disabled"},
    "persistent_db": {"type": "disabled"},
    "models": [
        {
            "model": "m",
            "sparse_files": ["t.model"],
            "embedding_table_names": ["t"],
            "embedding_vecsize_per_table": [16],
            "maxnum_catfeature_query_per_table_per_sample": [1],
            "default_value_for_each_table": [0.0],
            "deployed_device_list": [0],
            "max_batch_size": 1,
            "gpucache": False,
        }
    ],
}  # the kernels of loads alone


@pytest.fixture
def installation(tmp_path):
    (tmp_path / "ps.json").write_text(json.dumps(CONFIG))
    return Installation(tmp_path)


def run(installation, *arguments, **environment):
    command = [sys.executable, "-m", "hps", "compile", *map(str, arguments)]
    return subprocess.run(
        command,
        env=installation.environment | environment,
        cwd=installation.temporary.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_compiles_what_a_configuration_uses_and_says_so(installation):
    first = run(installation, "ps.json")
    assert first.returncode == 0, first.stderr
    counts, place = first.stdout.splitlines()
    assert counts.startswith("3 kernels for this processor: compiled 3 in ")
    assert counts.endswith(" s, 0 were there")
    (directory,) = installation.package.glob("__pycache__/hps-kernels-*")
    assert place == f"kept in {directory}"
    assert len(list(directory.glob("*.code"))) == 3
    assert "compiling 3 kernels for this machine in " in first.stderr
    second = run(installation, "ps.json")
    assert second.stdout.startswith("3 kernels for this processor: compiled 0 in ")
    assert second.stdout.splitlines()[0].endswith("3 were there")


def test_one_process_with_one_hash_seed_writes_the_same_code_anywhere(tmp_path):
    def code(name):
        installation = Installation(tmp_path / name)
        (tmp_path / name / "ps.json").write_text(json.dumps(CONFIG))
        done = run(installation, "ps.json", "--processes", "1", PYTHONHASHSEED="0")
        assert " in 1 process, " in done.stderr
        return {path.name: path.read_bytes() for path in installation.package.glob("__pycache__/hps-kernels-*/*.code")}

    first = code("one")
    assert len(first) == 3
    assert first == code("another place")
    assert not [name for name, content in first.items() if b" at 0x" in content]


def test_code_for_the_baseline_and_for_this_processor_are_kept_side_by_side(installation):
    assert "3 kernels for the baseline: compiled 3" in run(installation, "ps.json", "--baseline").stdout
    assert "3 kernels for the baseline: compiled 0" in run(installation, "ps.json", "--baseline").stdout
    assert "3 kernels for this processor: compiled 3" in run(installation, "ps.json").stdout
    assert len(list(installation.package.glob("__pycache__/hps-kernels-*/*.code"))) == 6


def test_an_unknown_architecture_is_refused_before_anything_is_compiled(installation):
    done = run(installation, "ps.json", "--gpu", "sm_80,h100")
    assert (done.returncode, done.stdout) == (2, "")
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
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", Ours(f"{__name__}:Compiler"))
    model = CONFIG["models"][0] | {"gpucache": True} | changes
    assert _compile_for_gpu(load_configuration(CONFIG | {"models": [model]}), "90") == expected
