"""What a plan says of networks, against what the scorer allocates and a run takes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import Configuration, load_configuration
from hps.scoring.scorer import Scorer
from hps.tools.planning.memory import PlannedNeed, planned_needs, run_needs, served_versions
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
    return {(need.need.place, need.device, need.need.what): need.need.size_bytes for need in needs if need.tier == "network"}


def planned(config: Configuration, *, on_cuda: bool = False) -> dict[tuple[str, int | None, str], int]:
    return of_networks(planned_needs(config, served_versions(config), on_cuda))


@pytest.mark.parametrize(
    ("inputs", "most", "sizes"),
    [
        *[(FIXED, 1, [1]), (ONCE, 16, [16]), (FIXED, 17, [16, 17]), (BAGS, 65, [16, 64, 65])],
        (ONCE, 1000, [16, 64, 256, 1000]),
    ],
)
def test_inputs_take_what_the_scorer_keeps(tmp_path: Path, inputs: Any, most: int, sizes: list[int]) -> None:
    config = configuration(tmp_path, inputs, max_batch_size=most)
    file_bytes = (tmp_path / "m" / "1" / "dense.json").stat().st_size
    found = planned(config)
    with hps.HPS(config) as server:
        scores = server.model("m").scores
        assert scores is not None
        scorer: Scorer = scores._scorers[0]
        kept = scorer._kept.memories
        assert sorted(one.form.samples for one in kept) == (sizes if inputs is not ONCE else sorted(2 * sizes))
        held = sum(one.staged.nbytes + sum(vectors.nbytes for vectors in one.vectors) for one in kept)
    assert found == {
        ("ram", None, "weights"): file_bytes,
        ("ram", None, "inputs of batches"): held,
        ("ram", None, "the network's files"): file_bytes,
    }


def test_computed_keys_count_as_the_memory_that_is_kept_for_them(tmp_path: Path) -> None:
    """A program is taken to compute as many keys as its largest input has values."""
    x = {"dtype": "int64", "shape": [-1, "n"]}
    lookups = {
        "computed": {"table": "item", "keys": {"output": "k"}},
        "given": {"table": "item", "pooling": "sum", "keys": {"input": "x"}},
        "column": {"table": "item", "keys": {"input": "age", "column": 2}},
    }
    said = {"inputs": {"x": x, "age": AGE}, "sizes": {"n": 3}, "lookups": lookups}
    programs = [{"file": "keys.json", "inputs": ["x"], "outputs": ["k"]}]
    hps.write_version(
        tmp_path / "m" / "1",
        {"item": (np.arange(ROWS), np.ones((ROWS, DIM), np.float32))},
        network=(
            {"format": "arrays", "file": "dense.json", "outputs": ["score"], "keys": programs, **said},
            {"dense.json": b"{}", "keys.json": b'{"adds": 0}'},
        ),
    )
    model = model_of("m", ["item"], {"item": DIM}, maxnum_catfeature_query_per_table_per_sample=[5], max_batch_size=64)
    (tmp_path / "m" / "model.json").write_text(json.dumps(model))
    config = load_configuration(document_of(model_repository=str(tmp_path)))
    with hps.HPS(config) as server:
        scores = server.model("m").scores
        assert scores is not None
        kept = scores._scorers[0]._kept.memories
        assert sorted(one.form.samples for one in kept) == [16, 64]
        parts = [[one.staged, *one.vectors, *one.buffers.values()] for one in kept]
        held = sum(array.nbytes for memory in parts for array in memory)
    assert planned(config)["ram", None, "inputs of batches"] == held
    assert planned(config)["ram", None, "weights"] == len(b'{}{"adds": 0}')


def test_where_nothing_is_kept_inputs_take_those_of_a_full_batch(tmp_path: Path) -> None:
    inputs = {"item": {**ITEM, "pooling": "sum"}, "age": AGE, "request": {"request_index": True}}
    found = planned(configuration(tmp_path, inputs, max_batch_size=64))
    assert found["ram", None, "inputs of batches"] == 64 * (8 * 5 + 4 * 3 + 8 + 4 * DIM)  # keys, ages, indices, vectors


@pytest.mark.parametrize(("form", "copies"), [("arrays", 1), ("onnx", 1), ("pt2", 2), ("torchscript", 2)])
def test_archives_that_are_written_anew_are_there_twice_while_they_are_opened(tmp_path: Path, form: str, copies: int) -> None:
    config = configuration(tmp_path, engine=form)
    file_bytes = (tmp_path / "m" / "1" / "dense.json").stat().st_size
    assert planned(config)["ram", None, "the network's files"] == copies * file_bytes


def test_each_device_has_the_network_if_its_engine_runs_there(tmp_path: Path) -> None:
    more = {"max_batch_size": 16, "deployed_device_list": [0, 2]}
    keys, ages, vectors = 8 * 2 * 16, 4 * 3 * 16, 4 * 2 * DIM * 16
    config = configuration(tmp_path / "gpu", engine="device_arrays", **more)
    file_bytes = (tmp_path / "gpu" / "m" / "1" / "dense.json").stat().st_size
    expected = {("ram", None, "the network's files"): 2 * file_bytes}
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
    configuration(tmp_path, engine=engine)
    shutil.copytree(tmp_path / "m", tmp_path / "n")
    place = tmp_path / "n" / "model.json"
    place.write_text(place.read_text().replace('"m"', '"n"'))
    config = load_configuration(document_of(model_repository=str(tmp_path)))
    needs = planned_needs(config, served_versions(config), False)
    assert [need.need.what for need in needs if need.tier == "process" and not need.need.temporary][1:] == [library]
    file_bytes = (tmp_path / "m" / "1" / "dense.json").stat().st_size
    assert [need.need.size_bytes for need in needs if need.need.what == "weights"] == [copies * file_bytes] * 2


def test_a_model_without_a_network_needs_nothing_for_one(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "item", (np.arange(ROWS), np.ones((ROWS, DIM), np.float32)))
    config = load_configuration(document_of(model_of("m", [tmp_path / "item"], {"item": DIM})))
    needs = planned_needs(config, served_versions(config), False)
    assert not [need for need in needs if need.tier == "network" or need.need.what == "PyTorch"]
    assert run_needs(config, served_versions(config), False) == []
