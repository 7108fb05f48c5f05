"""What a plan says of networks, against what the scorer allocates and a run takes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.app import app
from hps.configuration.load import Configuration, load_configuration
from hps.planning.memory import PlannedNeed, planned_needs, run_needs, served_versions, this_machine, totals
from hps.scoring.scorer import Scorer
from tests.fakes import entry_points
from tests.servers.running_service import document_of, model_of

ROWS, DIM = 100, 4
ITEM, AGE = {"table": "item"}, {"shape": [-1, 3]}
FIXED: dict[str, Any] = {"item": {**ITEM, "hotness": 2}, "age": AGE}
ONCE: dict[str, Any] = {"item": ITEM, "user": {**ITEM, "per_request": True}, "age": {**AGE, "per_request": True}}
BAGS: dict[str, Any] = {"item": {**ITEM, "pooling": "sum"}, "pair": {**ITEM, "pooling": "mean", "hotness": 2}, "age": AGE}
MiB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engines `arrays` and `device_arrays`, of another package, here and in processes that are started."""
    directory = tmp_path_factory.mktemp("engine")
    points = {"arrays": "tests.fakes.networks:ArrayNetwork", "device_arrays": "tests.fakes.networks:DeviceNetwork"}
    entry_points.install(directory, "hps.networks", points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("PYTHONPATH", f"{directory}:{Path(hps.__file__).parents[1]}")
        yield


def configuration(place: Path, inputs: Any = None, *, engine: str = "arrays", says: Any = None, **more: Any) -> Configuration:
    rows = np.arange(ROWS), np.ones((ROWS, DIM), np.float32)
    dense = {"format": engine, "file": "dense.json", "inputs": inputs or FIXED, "outputs": ["score"]}
    content = json.dumps({"factor": 2, **(says or {})}).encode()
    hps.write_version(place / "m" / "1", {"item": rows}, network=(dense, content))
    model = model_of("m", ["item"], {"item": DIM}, maxnum_catfeature_query_per_table_per_sample=[5], **more)
    (place / "m" / "model.json").write_text(json.dumps(model))
    return load_configuration(document_of(model_repository=str(place)))


def of_networks(needs: list[PlannedNeed]) -> dict[tuple[str, int | None, str], int]:
    return {(one.need.place, one.device, one.need.what): one.need.size_bytes for one in needs if one.tier == "network"}


def planned(config: Configuration, *, on_cuda: bool = False) -> dict[tuple[str, int | None, str], int]:
    return of_networks(planned_needs(config, served_versions(config), on_cuda))


@pytest.mark.parametrize("inputs", [FIXED, ONCE, BAGS], ids=["fixed", "once", "bags"])
@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (4, [4]),
        (16, [16]),
        (17, [16, 17]),
        (64, [16, 64]),
        (65, [16, 64, 65]),
        (1000, [16, 64, 256, 1000]),
    ],
)
def test_inputs_take_what_the_scorer_keeps(tmp_path: Path, most: int, sizes: list[int], inputs: Any) -> None:
    config = configuration(tmp_path, inputs, max_batch_size=most)
    file_bytes = (tmp_path / "m" / "1" / "dense.json").stat().st_size
    found = planned(config)
    with hps.HPS(config) as server:
        scores = server.model("m").scores
        assert scores is not None
        scorer: Scorer = scores._scorers[0]
        kept = scorer._kept
        assert sorted(form.samples for form in kept) == (sizes if inputs is not ONCE else sorted(2 * sizes))
        lookups = [name for name in inputs if name != "age"]
        held = sum(one.staged.nbytes + sum(one.inputs[name].nbytes for name in lookups) for one in kept.values())
    assert found == {
        ("ram", None, "weights"): file_bytes,
        ("ram", None, "inputs of batches"): held,
        ("ram", None, "the network's file"): file_bytes,
    }


def test_where_nothing_is_kept_inputs_take_those_of_a_full_batch(tmp_path: Path) -> None:
    inputs = {"item": {**ITEM, "pooling": "sum"}, "age": AGE, "request": {"request_index": True}}
    found = planned(configuration(tmp_path, inputs, max_batch_size=64))
    keys, ages, indices, vectors = 8 * 5 * 64, 4 * 3 * 64, 8 * 64, 4 * DIM * 64
    assert found["ram", None, "inputs of batches"] == keys + ages + indices + vectors


def test_each_device_has_the_network_if_its_engine_runs_there(tmp_path: Path) -> None:
    more = {"max_batch_size": 16, "deployed_device_list": [0, 2]}
    keys, ages, vectors = 8 * 2 * 16, 4 * 3 * 16, 4 * 2 * DIM * 16
    config = configuration(tmp_path / "gpu", engine="device_arrays", **more)
    file_bytes = (tmp_path / "gpu" / "m" / "1" / "dense.json").stat().st_size
    expected = {("ram", None, "the network's file"): 2 * file_bytes}
    for device in (0, 2):
        expected["gpu", device, "weights"] = file_bytes
        expected["gpu", device, "inputs of batches"] = keys + ages + vectors
        expected["pinned", None, f"inputs of batches, for device {device}"] = keys + ages
    assert planned(config, on_cuda=True) == expected
    assert ("gpu", 0, "weights") not in planned(config)
    on_host = planned(configuration(tmp_path / "host", **more), on_cuda=True)
    assert on_host["ram", None, "inputs of batches"] == 2 * (keys + ages + vectors)
    assert not [place for place, _, _ in on_host if place != "ram"]


@pytest.mark.parametrize(("engine", "library", "copies"), [("pt2", "PyTorch", 1), ("onnx", "ONNX Runtime", 3)])
def test_libraries_count_once_and_weights_as_they_copy_them(tmp_path: Path, engine: str, library: str, copies: int) -> None:
    config = configuration(tmp_path, engine=engine)
    (tmp_path / "n").mkdir()
    for name in ("m/1", "m/model.json"):
        (tmp_path / name).rename(tmp_path / name.replace("m/", "n/", 1))
    text = (tmp_path / "n" / "model.json").read_text()
    (tmp_path / "n" / "model.json").write_text(text.replace('"m"', '"n"'))
    configuration(tmp_path, engine=engine)
    config = load_configuration(document_of(model_repository=str(tmp_path)))
    needs = planned_needs(config, served_versions(config), False)
    assert [one.need.what for one in needs if one.tier == "process" and not one.need.passing][1:] == [library]
    file_bytes = (tmp_path / "m" / "1" / "dense.json").stat().st_size
    weights = [one.need.size_bytes for one in needs if one.need.what == "weights"]
    assert weights == [copies * file_bytes] * 2


def test_a_model_without_a_network_needs_nothing_for_one(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "item", (np.arange(ROWS), np.ones((ROWS, DIM), np.float32)))
    config = load_configuration(document_of(model_of("m", [tmp_path / "item"], {"item": DIM})))
    needs = planned_needs(config, served_versions(config), False)
    assert not [one for one in needs if one.tier == "network" or one.need.what == "PyTorch"]
    assert run_needs(config, served_versions(config), False) == []


@pytest.mark.parametrize("megabytes", [20, 100])
def test_a_run_is_measured(tmp_path: Path, megabytes: int) -> None:
    most = 1000
    config = configuration(tmp_path, max_batch_size=most, says={"bytes_per_sample": megabytes * MiB // most})
    versions = served_versions(config)
    (found,) = of_networks(run_needs(config, versions, False)).values()
    assert megabytes * MiB == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("inputs", "each"), [(FIXED, 1), (ONCE, 2)], ids=["fixed", "once"])
def test_on_a_gpu_every_graph_has_memory_of_its_own(tmp_path: Path, inputs: Any, each: int) -> None:
    most = 1024
    config = configuration(
        tmp_path,
        inputs,
        engine="device_arrays",
        max_batch_size=most,
        deployed_device_list=[0, 1],
        says={"bytes_per_sample": 50 * MiB // most},
    )
    needs = run_needs(config, served_versions(config), True)
    graphs = each * (16 + 64 + 256 + 1024) / 1024
    assert of_networks(needs) == {
        ("gpu", device, "runs of batches"): pytest.approx(graphs * 50 * MiB, rel=0.1) for device in (0, 1)
    }
    assert [one.size_bytes for one in totals(needs, this_machine(config, {"gpu": 80 * each * MiB}))] == [
        needs[0].need.size_bytes
    ]


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
    for _ in range(2):
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
    needs = [one for one in json.loads(run("--json", "--run-networks"))["needs"] if one["tier"] == "network"]
    assert [one["what"] for one in needs] == ["weights", "inputs of batches", "the network's file", "runs of batches"]
    assert needs[-1]["size_bytes"] == pytest.approx(25 * MiB, rel=0.1)
