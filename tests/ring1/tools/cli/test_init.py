"""`hps init`: what it finds, what it writes, and that a server of what it wrote answers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.models.writer import write_sparse_model, write_version
from hps.tools.cli.tables.sample import sample_vectors
from tests.ring1.tools.cli.test_cli import run


def table(place: Path, dim: int, rows: int = 20) -> None:
    keys = np.arange(rows)
    write_sparse_model(place, (keys, sample_vectors(keys, dim, dim)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "ps.json"


def initialised(target: Path, source: Path, *options: object) -> dict[str, Any]:
    """The configuration that was written, which check-config finds good."""
    run("init", source, "-o", target, *options, code=0)
    run("check-config", target, code=0)
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def shape(content: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {
        one["model"]: dict(zip(one["embedding_table_names"], one["embedding_vecsize_per_table"], strict=True))
        for one in content["models"]
    }


def saved_by_hugectr(place: Path) -> None:
    for number, dim in ((0, 3), (1, 5)):
        for iteration in (100, 2000):
            table(place / f"dcn{number}_sparse_{iteration}.model", dim, iteration)
    layers = [{"type": "Data"}, *({"type": "DistributedSlotSparseEmbeddingHash", "top": top} for top in ("wide", "deep"))]
    (place / "dcn.json").write_text(json.dumps({"layers": layers}))


def test_directories_are_models_tables_and_versions(tmp_path: Path, target: Path) -> None:
    for number in (1, 2, 10):
        table(tmp_path / "models" / "ranker" / f"field{number}.model", number)
    for version in (1, 2, 10):
        table(tmp_path / "models" / "news" / str(version) / "story", 4)
    content = initialised(target, tmp_path / "models")
    assert shape(content) == {"news": {"story": 4}, "ranker": {"field1": 1, "field2": 2, "field10": 10}}
    assert content["models"][0]["version_path"] == str(tmp_path / "models" / "news")
    assert re.search("^news +10 +story", run("check-config", target).stdout, re.MULTILINE)


def test_a_directory_of_tables_and_a_table_alone_are_one_model(tmp_path: Path, target: Path) -> None:
    table(tmp_path / "shop" / "item.model", 7)
    assert shape(initialised(target, tmp_path / "shop")) == {"shop": {"item": 7}}
    with hps.HPS(target) as server:
        np.testing.assert_array_equal(server.lookup([3, 19], "shop", "item"), sample_vectors(np.array([3, 19]), 7, 7))
    assert shape(initialised(target, tmp_path / "shop" / "item.model", "--force", "--model", "x")) == {"x": {"item": 7}}


def test_what_hugectr_saves_is_named_by_its_graph_and_the_last_iteration_counts(tmp_path: Path, target: Path) -> None:
    saved_by_hugectr(tmp_path / "dcn")
    [model] = initialised(target, tmp_path / "dcn")["models"]
    assert dict(zip(model["embedding_table_names"], model["embedding_vecsize_per_table"], strict=True)) == {
        "wide": 3,
        "deep": 5,
    }
    assert all(file.endswith("_sparse_2000.model") for file in model["sparse_files"])


def test_tables_keep_the_order_of_their_source_which_is_printed_with_their_ids(tmp_path: Path, target: Path) -> None:
    """A client that sends KEYS and NUMKEYS knows tables by their position alone."""
    tables = {name: (np.arange(5), np.full((5, dim), dim, np.float32)) for name, dim in (("wide", 1), ("deep", 8), ("a", 2))}
    write_version(tmp_path / "ads" / "1", tables)
    np.savez(tmp_path / "ads.npz", **{f"emb.{name}.weight": vectors for name, (_, vectors) in tables.items()})
    entry = {"model": "ads", "sparse_files": [f"1/{name}" for name in tables], "embedding_table_names": list(tables)}
    (tmp_path / "ads" / "old.json").write_text(json.dumps({"models": [entry]}))
    for source in ("ads", "ads.npz", "ads/old.json"):
        result = run("init", tmp_path / source, "-o", target, "--force", code=0)
        assert "\nads: ids of its tables, the order of KEYS and NUMKEYS: 0 = wide, 1 = deep, 2 = a\n" in result.stdout
        [model] = json.loads(target.read_text())["models"]
        assert model["embedding_table_names"] == ["wide", "deep", "a"], source
        assert model["embedding_vecsize_per_table"] == [1, 8, 2]
        assert model["num_of_worker_buffer_in_pool"] == 4, "with one, every lookup waits for the one before"


@pytest.mark.parametrize("given", ["", "ps.json"])
def test_a_ps_json_of_another_place_keeps_its_models_and_finds_their_files(tmp_path: Path, target: Path, given: str) -> None:
    saved_by_hugectr(tmp_path / "dcn")
    files = [f"/old/dcn/dcn{number}_sparse_2000.model" for number in (0, 1)]
    entry = {"model": "ads", "sparse_files": files, "embedding_cache_type": "dynamic", "dense_file": "/old/dense"}
    entry |= {"maxnum_catfeature_query_per_table_per_sample": [2, 26]}
    (tmp_path / "dcn" / "ps.json").write_text(json.dumps({"models": [entry]}))
    [model] = initialised(target, tmp_path / "dcn" / given, "--gpucacheper", 0.25)["models"]
    assert model["sparse_files"] == [str(tmp_path / "dcn" / f"dcn{number}_sparse_2000.model") for number in (0, 1)]
    assert model["embedding_vecsize_per_table"] == [3, 5]
    assert model["maxnum_catfeature_query_per_table_per_sample"] == [2, 26]
    assert (model["gpucacheper"], model["embedding_cache_type"], "dense_file" in model) == (0.25, "dynamic", False)


def test_a_repository_of_models_that_describe_themselves_is_named(tmp_path: Path, target: Path) -> None:
    table(tmp_path / "models" / "news" / "1" / "story", 4)
    described = {"sparse_files": ["story"], "embedding_vecsize_per_table": [4], "deployed_device_list": [0]}
    described |= {"maxnum_catfeature_query_per_table_per_sample": [1], "default_value_for_each_table": [0.0]}
    (tmp_path / "models" / "news" / "model.json").write_text(json.dumps(described))
    content = initialised(target, tmp_path / "models")
    assert (content["model_repository"], "models" in content) == (str(tmp_path / "models"), False)


def test_a_checkpoint_is_imported_beside_the_configuration(tmp_path: Path, target: Path) -> None:
    arrays = {f"emb.{name}.weight": np.full((6, dim), dim, np.float32) for name, dim in (("user", 4), ("item", 8))}
    np.savez(tmp_path / "ranker.npz", **arrays, top=np.ones((2, 2), np.float32), bias=np.ones(3, np.float32))
    assert shape(initialised(target, tmp_path / "ranker.npz")) == {"ranker": {"item": 8, "user": 4}}
    assert (target.parent / "ranker" / "user.model" / "key").stat().st_size == 6 * 8
    np.savez(tmp_path / "one.npz", keys=np.arange(5), vectors=np.ones((5, 7), np.float32))
    assert shape(initialised(tmp_path / "ps.json", tmp_path / "one.npz")) == {"one": {"one": 7}}
    (pair := tmp_path / "pair").mkdir()
    (dump := tmp_path / "dump").mkdir()
    for name, array in (("keys", np.arange(5)), ("values", np.ones((5, 3), np.float32))):
        np.save(pair / f"{name}.npy", array)
        array.tofile(dump / f"item_emb_{name}.rank_0.world_size_1")  # dynamicemb's
    for place in (pair, dump):
        assert shape(initialised(place / "ps.json", place)) == {place.name: {place.name: 3}}


@pytest.mark.parametrize(
    ("options", "volatile", "persistent"),
    [
        ((), {"type": "disabled"}, {"type": "row_files", "path": "rows"}),
        (("--persistent", "row_files"), {"type": "disabled"}, {"type": "row_files", "path": "rows"}),
        (("--persistent", "rocks_db"), {"type": "hash_map"}, {"type": "rocks_db", "path": "rocksdb"}),
        (("--volatile", "disabled"), {"type": "disabled"}, {"type": "row_files", "path": "rows"}),
        (("--volatile", "hash_map"), {"type": "hash_map"}, {"type": "disabled"}),
        (("--redis", "r1:7000"), {"type": "redis_cluster", "address": "r1:7000", "num_partitions": 16}, {"type": "disabled"}),
    ],
)
def test_tiers_are_chosen(
    tmp_path: Path, target: Path, options: tuple[str, ...], volatile: dict[str, Any], persistent: dict[str, Any]
) -> None:
    table(tmp_path / "item", 2)
    content = initialised(target, tmp_path / "item", *options)
    if "path" in persistent:
        persistent = {**persistent, "path": str(target.parent / persistent["path"])}
    assert (content["volatile_db"], content["persistent_db"]) == (volatile, persistent)


def test_what_does_not_fit_in_memory_gets_a_disk_and_a_bounded_map(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "item", 10, rows=16_000)
    monkeypatch.setattr(
        "hps.ground.memory.capacity.available_memory", lambda: (16_000 * 64, "here")
    )  # half of what the rows take
    content = initialised(target, tmp_path / "item", "--volatile", "hash_map")
    assert content["persistent_db"]["type"] == "row_files"
    assert content["volatile_db"]["overflow_margin"] * content["volatile_db"]["num_partitions"] == 8_000
    assert content["volatile_db"]["cache_missed_embeddings"]


def test_every_key_is_printed_with_its_reason(tmp_path: Path, target: Path) -> None:
    table(tmp_path / "item", 2)
    lines = run("init", tmp_path / "item", "-o", target).stdout.splitlines()
    for key in re.findall(r'^ *("[a-z_]+": (?![{\[]$).*?),?$', target.read_text(), re.MULTILINE):
        [line] = [line for line in lines if key in line]
        assert len(line.partition(key)[2].strip(", ")) > 10
    for command in (f"hps check-config {target} --connect", f"hps plan {target}", f"hps serve {target}"):
        assert command in lines[-1]
    assert len(run("init", tmp_path / "item", "-o", target, "--force", "--no-explain").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("prepare", "options", "text"),
    [
        ("table", ["--volatile", "disabled", "--persistent", "disabled"], "both are disabled"),
        ("table", ["--ask"], "needs a terminal"),
        ("cut", [], "one file is cut short"),
        ("empty", [], "expected directories with the files key and emb_vector"),
        ("arrays", [], "expected --tables 'PATTERN'"),
        ("table", ["--model", "a b"], "expected 1 to 120 of the characters"),
        ("nothing", [], "there is no such file"),
        ("nothing.json", [], "there is no such file"),
        ("nothing.npz", [], "there is no such file"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_nothing_is(
    tmp_path: Path, target: Path, prepare: str, options: list[str], text: str
) -> None:
    source = tmp_path / "source"
    table(source / "item", 2)
    if prepare == "cut":
        (source / "item" / "emb_vector").write_bytes(b"x" * 159)
    elif prepare == "empty":
        source = tmp_path / "empty"
        source.mkdir()
    elif prepare.startswith("nothing"):
        source = tmp_path / prepare
    elif prepare == "arrays":
        source = tmp_path / "a.npz"
        np.savez(source, emb_a=np.ones((2, 2), np.float32), b_emb=np.ones((2, 2), np.float32), x=np.ones(3, np.float32))
    result = run("init", source, "-o", target, *options, code=2)
    assert text in result.output
    assert not target.exists()


def test_nothing_is_replaced_unless_it_is_forced(tmp_path: Path, target: Path) -> None:
    table(tmp_path / "item", 2)
    target.parent.mkdir()
    target.write_text("mine")
    result = run("init", tmp_path / "item", "-o", target)
    assert (result.exit_code, target.read_text()) == (2, "mine")
    run("init", tmp_path / "item", "-o", target, "--force", code=0)
