"""A prepared lookup answers from the version that serves when it runs, from run to run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.versions.fixed_lookups import _size_of, _with_buffers
from tests.servers.running_service import document_of, model_of

KEYS = np.arange(10)
DIMS = {"a": 4, "b": 8}


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    places = {}
    for version in (1, 2, 3):
        for table, dim in DIMS.items():
            hps.write_sparse_model(tmp_path / str(version) / table, (KEYS, np.full((KEYS.size, dim), version, np.float32)))
        places[version] = [str(tmp_path / str(version) / table) for table in DIMS]
    versions = [{"version": number, "sparse_files": places[number]} for number in (2, 3)]
    return document_of(model_of("m", places[1], DIMS, versions=versions, gpucache=False))


def test_each_run_reads_the_present_keys_from_the_version_that_serves(document: dict[str, Any]) -> None:
    with hps.HPS(document) as server, server.prepare({"a": 2, "b": 3}, "m") as prepared:
        assert {name: (keys.shape, prepared.vectors[name].shape) for name, keys in prepared.keys.items()} == {
            "a": ((2,), (2, 4)),
            "b": ((3,), (3, 8)),
        }
        for expected, version in enumerate(("1", "2", "3"), start=1):
            server.deploy("m", version)
            for key in (expected, expected + 1):
                prepared.keys["a"][:] = key
                server.insert([key], np.full((1, 4), 10 * expected + key, np.float32), "m", "a")
                vectors = prepared.run()
                assert vectors is prepared.vectors
                assert (vectors["a"] == 10 * expected + key).all()
                assert (vectors["b"] == expected).all()
        assert prepared.all_keys.shape == (5,)
        assert prepared.all_vectors.size == 2 * 4 + 3 * 8
    for _ in range(2):
        prepared.close()
        with pytest.raises(hps.NotReadyError):
            prepared.run()


def test_a_run_is_refused_while_its_model_is_undeployed(document: dict[str, Any]) -> None:
    with hps.HPS(document) as server, server.prepare({"a": 1}, "m") as prepared:
        for version in ("1", "2"):
            server.undeploy("m")
            with pytest.raises(hps.UnknownModelError):
                prepared.run()
            server.deploy("m", version)
            assert (prepared.run()["a"] == float(version)).all()


def test_a_whole_number_is_a_size_and_anything_else_a_tensor(document: dict[str, Any]) -> None:
    assert [_size_of(one) for one in (0, 3, np.int64(3), True, "3", np.zeros(3))] == [0, 3, 3, None, None, None]
    with pytest.raises(hps.InvalidInputError, match="got a size of -1, expected at least 0"):
        _size_of(-1)
    with hps.HPS(document) as server, pytest.raises(hps.InvalidInputError, match="got no tables"):
        server.prepare({}, "m")


def test_sizes_get_parts_of_one_buffer_in_the_order_of_the_tables() -> None:
    buffer, own = np.arange(5), np.zeros(2)
    placed, whole = _with_buffers({"a": 2, "b": 3}, [2, 3], buffer)
    assert ({name: part.tolist() for name, part in placed.items()}, whole is buffer) == ({"a": [0, 1], "b": [2, 3, 4]}, True)
    placed, whole = _with_buffers({"a": 2, "x": own, "b": 3}, [2, None, 3], buffer)
    assert (placed["x"] is own, placed["b"].tolist(), whole) == (True, [2, 3, 4], None)
