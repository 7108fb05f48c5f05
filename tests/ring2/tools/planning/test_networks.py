"""What a run of a network takes, measured in a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hps
from hps.configuration.load import load_configuration
from hps.tools.cli.app import app
from hps.tools.planning.memory import run_needs, served_versions, this_machine, totals
from tests.ring1.tools.planning.test_networks import FIXED, ONCE, MiB, configuration, engine, of_networks
from tests.servers.running_service import document_of

__all__ = ["engine"]


def test_a_run_is_measured(tmp_path: Path) -> None:
    most, megabytes = 1000, 100
    config = configuration(tmp_path, max_batch_size=most, says={"bytes_per_sample": megabytes * MiB // most})
    versions = served_versions(config)
    (found,) = of_networks(run_needs(config, versions, False)).values()
    assert megabytes * MiB == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("inputs", "each"), [(FIXED, 1), (ONCE, 2)], ids=["fixed", "once"])
def test_on_a_gpu_every_graph_has_memory_of_its_own(tmp_path: Path, inputs: Any, each: int) -> None:
    most = 1024
    more: dict[str, Any] = {"max_batch_size": most, "deployed_device_list": [0, 1]}
    config = configuration(tmp_path, inputs, engine="device_arrays", says={"bytes_per_sample": 50 * MiB // most}, **more)
    needs = run_needs(config, served_versions(config), True)
    graphs = each * (16 + 64 + 256 + 1024) / 1024
    size = pytest.approx(graphs * 50 * MiB, rel=0.1)
    assert of_networks(needs) == {("gpu", device, "runs of batches"): size for device in (0, 1)}
    assert [total.size_bytes for total in totals(needs, this_machine(config, {}))] == [needs[0].need.size_bytes]


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"does": "raise", "samples": 64}, "ValueError: the network's own"),
        ({"does": "hang", "samples": 1, "until": "/"}, r"not ended within 0.2 s \(dense.open_timeout_s\)"),
        ({"does": "exit", "samples": 64}, "its process ended unexpectedly"),
    ],
)
def test_a_network_that_cannot_be_run_is_an_error_of_the_plan(tmp_path: Path, says: Any, message: str) -> None:
    config = configuration(tmp_path, max_batch_size=64, says=says)
    text = json.loads((tmp_path / "m" / "1" / "version.json").read_text())
    text["dense"]["open_timeout_s"] = 0.2 if says["does"] == "hang" else 60
    (tmp_path / "m" / "1" / "version.json").write_text(json.dumps(text))
    config = load_configuration(document_of(model_repository=str(tmp_path)))
    with pytest.raises(hps.NetworkError, match=message):
        run_needs(config, served_versions(config), False)


def test_the_command_prints_networks_and_says_what_it_does_not_count(tmp_path: Path) -> None:
    configuration(tmp_path / "repository", max_batch_size=100, says={"bytes_per_sample": MiB // 4})
    file = tmp_path / "ps.json"
    file.write_text(json.dumps(document_of(model_repository=str(tmp_path / "repository"))))

    def run(*options: str) -> str:
        result = CliRunner().invoke(app, ["plan", str(file), *options], env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        return result.output

    plain, measured = run(), run("--run-networks")
    assert "--run-networks measures it" in plain
    assert "runs of batches" not in plain
    assert "--run-networks" not in measured
    assert "runs of batches" in measured
    needs = [load for load in json.loads(run("--json", "--run-networks"))["needs"] if load["tier"] == "network"]
    assert [need["what"] for need in needs] == ["weights", "inputs of batches", "the network's files", "runs of batches"]
    assert needs[-1]["size_bytes"] == pytest.approx(25 * MiB, rel=0.1)
