"""`hps import`: files of other formats become models that can be opened, or nothing at all."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import hps
import hps.models.importing.checkpoint
from hps.configuration.load import load_configuration
from hps.configuration.tiers import ModelSourceConfig
from hps.errors import (
    ConfigError,
    InvalidDtypeError,
    InvalidInputError,
    ModelFileChangedError,
    ModelFileError,
    ModelFileNotFoundError,
)
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.models.files import open_sparse_model
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.importing.checkpoint import list_arrays
from hps.models.importing.importer import import_model, import_tables
from hps.models.sources import ModelSources
from hps.tools.cli.app import app
from tests.servers.running_service import document_of, model_of
from tests.servers.s3_server import S3Server, know_only_moto, s3_server
from tests.tables import table_files
from tests.tables.sparse_models import chunks_of
from tests.tables.table_loads import Events
from tests.tables.trainer_dumps import save_hugectr

Array = np.ndarray[Any, Any]
Save = Callable[[Path, Array, Array], Path]


a_few_formats = pytest.mark.parametrize(
    "save", [table_files.save_pair, table_files.save_torch, table_files.save_parquet_parts], ids=lambda save: save.__name__
)


@pytest.fixture
def table() -> tuple[Array, Array]:
    """More rows than a chunk of `small_chunks` holds; any bits, so NaNs and infinite elements, too."""
    random = np.random.default_rng(7)
    keys = random.permutation(np.arange(-500, 500, dtype=np.int64) * 2**53)
    return keys, random.integers(0, 2**32, (1000, 5), np.uint32).view(np.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 28 * 96)


def run(*arguments: object) -> Result:
    """Run a command within this process; it may only end by an exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def opened(place: object, dim: int, sources: ModelSources | None = None) -> tuple[Array, Array]:
    keys, vectors = zip(*chunks_of(open_sparse_model(str(place), dim, sources=sources)), strict=True)
    return np.concatenate(keys), np.concatenate(vectors)


@pytest.mark.usefixtures("small_chunks")
def test_bfloat16_weights_without_keys_get_row_numbers(tmp_path: Path) -> None:
    weights = torch.randn(400, 3).to(torch.bfloat16)
    torch.save({"model": {"bag": {"weight": weights}}}, tmp_path / "model.bin")
    np.save(tmp_path / "bits.npy", weights.view(torch.uint16).numpy())
    with pytest.raises(InvalidDtypeError, match="say dtype bfloat16"):
        import_model(tmp_path / "bits.npy", tmp_path / "out", vectors="bits", first_key=-5)
    for source, options in (
        ("model.bin", {"vectors": "model.bag.weight"}),
        ("bits.npy", {"vectors": "bits", "dtype": "bfloat16"}),
    ):
        written = import_model(tmp_path / source, tmp_path / "out", **options, first_key=-5, overwrite=True)
        keys, got = opened(tmp_path / "out", 3)
        assert np.array_equal(keys, np.arange(-5, 395))
        assert np.array_equal(got, weights.to(torch.float32).numpy())
        assert (written.keys, written.dtype) == (None, "bfloat16")


def test_keys_of_a_npy_file_may_be_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    np.save(tmp_path / "elsewhere" / "items.npy", np.array([9, 8], np.uint64))
    np.save(tmp_path / "emb.npy", np.ones((2, 3), np.float32))
    import_model(f"file://{tmp_path}/emb.npy", tmp_path / "out", keys=str(tmp_path / "elsewhere" / "items.npy"))
    assert opened(tmp_path / "out", 3)[0].tolist() == [9, 8]


class _Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "plain.pt", "bad.npy", "bad.npz", "script.pt"])
def test_pickled_code_never_runs(name: str, tmp_path: Path) -> None:
    mark, source = tmp_path / "mark", tmp_path / name
    array = np.array([[_Payload(mark)]], object)
    if name in ("zip.pt", "legacy.pt"):
        state = {"emb": torch.zeros(2, 2), "payload": _Payload(mark)}
        torch.save(state, source, _use_new_zipfile_serialization=name == "zip.pt")
        torch.load(source, weights_only=False)  # it is alive
        mark.rmdir()
    elif name == "plain.pt":
        source.write_bytes(pickle.dumps(_Payload(mark)))
    elif name == "script.pt":
        torch.jit.save(torch.jit.script(torch.nn.Embedding(3, 2)), source)
    else:
        np.save(source, array, allow_pickle=True) if name == "bad.npy" else np.savez(source, bad=array, allow_pickle=True)
    message = {".pt": "runs no code of a file", "script": r"\(TorchScript archive\); it holds code"}
    with pytest.raises((ModelFileError, InvalidDtypeError), match=message.get(source.stem, message.get(source.suffix, name))):
        import_model(source, tmp_path / "out", vectors="emb" if source.suffix == ".pt" else "bad", first_key=0)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_chunks")
def test_a_bad_row_far_into_the_table_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    vectors, large = np.ones((500, 5)), np.arange(500, dtype=np.uint64)
    vectors[321, 2], large[-1] = 1e300, 2**63
    for keys, rows, message in (
        (np.arange(500), vectors, r"row 321 of 'vectors' has 1e\+300 as element 2, which is infinite as float32"),
        (large, np.ones((500, 5)), "row 499 of 'keys' has key 9223372036854775808, expected keys below"),
    ):
        with pytest.raises(ModelFileError, match=message):
            import_model(table_files.save_npz(tmp_path, keys, rows), tmp_path / "out" / "model")
        assert os.listdir(tmp_path / "out") == []


@pytest.mark.usefixtures("small_chunks")
@a_few_formats
def test_a_source_that_changes_meanwhile_is_noticed(save: Save, table: tuple[Array, Array], tmp_path: Path) -> None:
    source = save(tmp_path, *table)
    file = max(source.iterdir()) if source.is_dir() else source
    for alter in (file.touch, lambda: os.truncate(file, 4000)):
        with pytest.raises(ModelFileChangedError, match=file.name):
            import_model(source, tmp_path / "out", progress=During(alter))
    assert not list(tmp_path.glob("*out*"))


def test_a_source_that_is_replaced_after_its_head_was_read_is_noticed(
    table: tuple[Array, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = table_files.save_safetensors(tmp_path, *table), tmp_path / "other"
    other.write_bytes(source.read_bytes())
    select = hps.models.importing.checkpoint.select

    def replaced(*arguments: Any, **named: Any) -> Any:
        other.replace(source)
        return select(*arguments, **named)

    monkeypatch.setattr(hps.models.importing.checkpoint, "select", replaced)
    with pytest.raises(ModelFileChangedError, match=source.name):
        import_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_no_table_are_refused_with_the_cure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("empty", "dir.npz", "both"):
        (tmp_path / name).mkdir()
    for name in ("table.csv", "dir.npz/a.npz", "both/a.npy", "both/b.parquet"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.npz")
    np.savez(tmp_path / "t.npz", keys=np.zeros(2), vectors=np.zeros((2, 2)))
    for place, file_format, error, message in (
        ("absent.npz", None, ModelFileNotFoundError, r"absent\.npz: there is no such file on this machine"),
        ("s3://bucket/table.npz", None, ModelFileNotFoundError, "copy a remote source first"),
        ("empty", None, ModelFileNotFoundError, "it is an empty directory"),
        ("table.csv", None, ModelFileError, r"got table\.csv, expected a name .* one of: \.npy, \.npz, \.safet.*--format"),
        (
            "table.csv",
            "csv",
            ConfigError,
            "got 'csv', expected one of: dcp, dynamicemb, hugectr, int32_keys, npy, npz, parquet, ",
        ),
        ("dir.npz", None, ModelFileError, r"got a\.npz, expected .* a directory of \.npy or of Parquet files alone"),
        ("dir.npz", "npz", ModelFileError, r"dir\.npz: .*directory"),
        ("both", None, ModelFileError, r"got a\.npy, b\.parquet, expected .* alone; say the format with --format"),
        ("pipe.npz", None, ModelFileError, "not a regular file"),
        ("t.npz", None, InvalidDtypeError, r"got keys keys \(2,\) float64, expected integers"),
    ):
        with pytest.raises(error, match=message):
            import_model(place if "://" in place else tmp_path / place, out, file_format=file_format)
    assert not out.exists()


class TextVectors(ArraySource):
    """A format of another package: one vector a line, in all files of a directory."""

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo("vectors", self._read().shape, "float64")]

    def chunks(self, names: Any, step: int) -> Any:
        yield from ([self._read()[start : start + step]] for start in range(0, len(self._read()), step))

    def _read(self) -> Array:
        return np.concatenate([np.loadtxt(file, ndmin=2) for file in self.files])


@pytest.mark.usefixtures("small_chunks")
def test_a_format_of_another_package_gets_all_files_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["format"], "text", BuiltIn(f"{__name__}:TextVectors"))
    (tmp_path / "in").mkdir()
    for i in range(2):
        np.savetxt(tmp_path / "in" / f"{i}.txt", np.full((200, 3), i))
    import_model(tmp_path / "in", tmp_path / "out", file_format="text", first_key=0)
    assert np.array_equal(opened(tmp_path / "out", 3)[1], np.repeat([[0.0] * 3, [1.0] * 3], 200, axis=0))


def test_the_command_lists_and_imports(table: tuple[Array, Array], tmp_path: Path) -> None:
    source = table_files.save_torch(tmp_path, *table)
    listed = run("import", source, "--list")
    assert listed.exit_code == 0
    assert listed.stdout.splitlines() == ["keys (1000,) int64", "vectors (1000, 5) float32"]
    assert [info.name for info in list_arrays(source)] == ["keys", "vectors"]
    done = run("import", source, tmp_path / "out")
    assert done.exit_code == 0
    assert f"{tmp_path}/out: 1,000 rows of 5 float32, 28.0 kB" in done.stdout
    assert "vectors from 'vectors', keys from 'keys'" in done.stdout
    assert f'"sparse_files": ["{tmp_path}/out"], "embedding_vecsize_per_table": [5]' in done.stdout
    assert np.array_equal(opened(tmp_path / "out", 5)[0], table[0])
    named = run(
        "import", source, tmp_path / "out", "--vectors", "vectors", "--first-key", 7, "--overwrite", "--format", "torch"
    )
    assert named.exit_code == 0
    assert "keys from row numbers from 7 on" in named.stdout


def test_the_command_ends_with_2_and_one_message_on_wrong_input(table: tuple[Array, Array], tmp_path: Path) -> None:
    source = table_files.save_npz(tmp_path, *table)
    bad = tmp_path / "bad.pt"
    torch.save({"payload": _Payload(tmp_path / "mark")}, bad)
    for arguments, message in (
        ((source,), "got no DESTINATION"),
        ((source, tmp_path / "out", "--keys", "absent"), "it holds no 'absent'"),
        ((source, tmp_path / "out", "--dtype", "int8"), "and dtype 'int8', expected one of"),
        ((source, tmp_path / "out", "--model", "m"), "--model and --write-config need --tables"),
        ((source, tmp_path / "out", "--tables", "emb*"), "matches none of: keys, vectors"),
        ((source, "nowhere://x/y"), "got scheme 'nowhere'"),
        ((bad, tmp_path / "out"), "runs no code of a file"),
    ):
        result = run("import", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


DLRM = {f"emb_l.{i}.weight": np.random.default_rng(i).random((40 + 9 * i, 4 + i % 3), np.float32) for i in reversed(range(12))}
"""The embedding weights of a DLRM, as its state_dict names them, not in their order."""


def _dlrm_torch(path: Path) -> tuple[object, ...]:
    state = {name: torch.from_numpy(weight) for name, weight in DLRM.items()}
    torch.save({"state_dict": {**state, "bot_l.0.weight": torch.zeros(3, 3)}}, path / "dlrm.pt")
    return path / "dlrm.pt", "--tables", "state_dict.emb_l.*.weight"


@pytest.mark.usefixtures("small_chunks")
@a_few_formats
def test_a_table_comes_back_bit_for_bit_and_replaces_none_unasked(
    save: Save, table: tuple[Array, Array], tmp_path: Path
) -> None:
    source, told = save(tmp_path, *table), Events()
    written = import_model(source, tmp_path / "model", progress=told)
    keys, vectors = opened(tmp_path / "model", 5)
    assert np.array_equal(keys, table[0])
    assert vectors.tobytes() == table[1].tobytes()
    assert (written.rows, written.dim, written.size_bytes, told.advanced) == (1000, 5, 28_000, 1000)
    assert (written.keys and written.keys.name, written.vectors.name, written.dtype) == ("keys", "vectors", "float32")
    with pytest.raises(ModelFileError, match="it exists"):
        import_model(source, tmp_path / "model")
    import_model(source, tmp_path / "model", overwrite=True)


class During(Events):
    """Does something when the first rows are written."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def advance(self, tag: str, rows: int) -> None:
        if not self.advanced:
            self.action()
        super().advance(tag, rows)


@pytest.mark.s3
@pytest.mark.usefixtures("small_chunks")
def test_models_are_imported_to_s3_whose_address_a_configuration_says_and_served_from_there(
    server: S3Server, table: tuple[Array, Array], tmp_path: Path
) -> None:
    bucket, model_source = f"s3://{server.new_bucket()}", ModelSourceConfig(s3_endpoint_url=server.url)
    place, settings = f"{bucket}/models/item", {"model_source": {"s3_endpoint_url": server.url}}
    (tmp_path / "ps.json").write_text(json.dumps(document_of(model_of("m", [place], {"t": 5}), **settings)))
    result = run("import", table_files.save_npz(tmp_path, *table), place, "--config", tmp_path / "ps.json")
    assert (result.exit_code, f"{place}: 1,000 rows" in result.stdout) == (0, True), result.stderr
    keys, vectors = opened(place, 5, ModelSources(model_source))
    assert (keys.tobytes(), vectors.tobytes()) == (table[0].tobytes(), table[1].tobytes())
    source, config = _stored(tmp_path, a=ONES, b=ONES * 2), tmp_path / "served.json"
    import_tables(source, f"{bucket}/m", "*", model="m", write_config=config, model_source=model_source)
    with hps.HPS(config) as served:
        assert np.array_equal(served.lookup(np.arange(3), "m", "b"), ONES * 2)
    with pytest.raises(ModelFileError, match=r"s3://.*/m/a\.model exists"):
        import_tables(source, f"{bucket}/m", "*", write_config=tmp_path / "2.json", model_source=model_source)


def _dlrm_entries(path: Path) -> tuple[object, ...]:
    """A .npz file, a Parquet file or a directory of Parquet files for each table."""
    (path / "dlrm").mkdir()
    for i, (name, weight) in enumerate(DLRM.items()):
        save = table_files.save_npz if i % 3 == 0 else table_files.save_parquet
        saved, entry = save(path, np.arange(len(weight)), weight), path / "dlrm" / name
        if i % 3 == 2:
            entry.mkdir()
            saved.rename(entry / "part-0.parquet")
        else:
            saved.rename(f"{entry}{saved.suffix}")
    (path / "dlrm" / "_SUCCESS").touch()
    return path / "dlrm", "--tables", "emb_l.*.weight", "--keys", "keys", "--vectors", "vectors"


@pytest.mark.parametrize("save", [_dlrm_torch, _dlrm_entries], ids=lambda save: save.__name__)
def test_all_tables_of_a_checkpoint_are_served_by_the_configuration_that_the_import_writes(
    save: Callable[[Path], tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, *options = save(tmp_path)
    done = run("import", source, "out/dlrm-1.0", *options)
    assert (done.exit_code, done.stdout.splitlines()[-1].split(",")[0]) == (0, "out/dlrm-1.0/ps.json: 12 tables"), done.stderr
    monkeypatch.chdir("/")
    config = tmp_path / "out" / "dlrm-1.0" / "ps.json"
    assert run("check-config", config).exit_code == 0
    with hps.HPS(config) as server:
        tables = load_configuration(config).models[0].embedding_table_names
        assert tables == tuple(f"emb_l_{i}" for i in range(12))
        for i, table in enumerate(tables):
            weight = DLRM[f"emb_l.{i}.weight"]
            vectors, found = server.lookup(np.arange(len(weight) + 1), "dlrm-1_0", table, return_found=True)
            assert np.array_equal(vectors[:-1], weight)
            assert found.tolist() == [True] * len(weight) + [False]


def test_the_command_imports_and_serves_an_embedding_collection_of_hugectr(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    tables = [(random.permutation(90)[:40], random.random((40, 4), np.float32)), (np.arange(30), np.ones((30, 8), np.float32))]
    save_hugectr(tmp_path / "dump", tables)
    listed = run("import", "--list", tmp_path / "dump").stdout.splitlines()
    assert listed[:2] == ["table0 (40, 4) float32", "table0.keys (40,) int64"]
    done = run("import", tmp_path / "dump", tmp_path / "shop", "--tables", "*")
    assert done.exit_code == 0, done.stderr
    with hps.HPS(tmp_path / "shop" / "ps.json") as server:
        for nth, (keys, vectors) in enumerate(tables):
            assert np.array_equal(server.lookup(keys, "shop", f"table{nth}"), vectors)


def _stored(tmp_path: Path, **arrays: Array) -> Path:
    np.savez(tmp_path / "tables.npz", **arrays)
    return tmp_path / "tables.npz"


ONES = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("tables", "names", "expected"),
    [
        ("emb_*.weight", ["emb_user.weight", "emb_item.weight", "emb_x.bias"], ["user", "item"]),
        ("*.weight", ["m.emb.10.weight", "m.emb.9.weight"], ["m_emb_9", "m_emb_10"]),
        ("m.emb.*.weight", ["m.emb.10.weight", "m.emb.9.weight"], ["emb_9", "emb_10"]),
        ("*", ["user", "item: new"], ["user", "item__new"]),
        ("m.*.emb.*", ["m.a.emb.1", "m.b.emb.0"], ["a_1", "b_0"]),
        ("user.weight", ["user.weight", "userxweight", "item.weight"], ["user_weight"]),
        ("emb*", ["emb", "emb_1"], ["emb", "emb_1"]),
    ],
)
def test_tables_are_named_by_what_the_wildcard_matched(
    tables: str, names: list[str], expected: list[str], tmp_path: Path
) -> None:
    source = _stored(tmp_path, **{name: ONES * i for i, name in enumerate(names)})
    written = import_tables(source, tmp_path / "out", tables, model="m")
    assert list(written) == [f"{tmp_path}/out/{name}.model" for name in expected]
    assert load_configuration(tmp_path / "out" / "ps.json").models[0].embedding_table_names == tuple(expected)
    for place, table in written.items():
        keys, vectors = opened(place, 2)
        assert keys.tolist() == [0, 1, 2]
        assert np.array_equal(vectors, ONES * names.index(table.vectors.name))


def test_keys_of_tables_are_found_by_pattern_shared_or_numbered(tmp_path: Path) -> None:
    ids = {"emb_0_ids": np.array([5, 6, 7]), "emb_1_ids": np.array([8, 9, 10]), "ids": np.array([1, 2, 3])}
    source = _stored(tmp_path, emb_0=ONES, emb_1=ONES, **ids)
    for options, expected in (
        ({"tables": "emb_*", "keys": "emb_*_ids"}, [[5, 6, 7], [8, 9, 10]]),
        ({"tables": "emb_1", "keys": "ids"}, [[1, 2, 3]]),
        ({"tables": "emb_1", "first_key": -1}, [[-1, 0, 1]]),
    ):
        written = import_tables(source, tmp_path / "out", **options, overwrite=True)
        assert [opened(place, 2)[0].tolist() for place in written] == expected
    with pytest.raises(ModelFileError, match=r"tables 'emb_\?', which matches none of: emb_0, emb_1"):
        import_tables(source, tmp_path / "out", "emb_?", keys="ids")


def test_tables_that_cannot_be_told_apart_or_are_none_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = _stored(tmp_path, **{"a.x": ONES, "a_x": ONES, "b.x": ONES, "flat": np.ones(3), "x" * 130: ONES})
    for tables, options, error, message in (
        ("*x", {}, ModelFileError, "got 'a_x' as a second table 'a_'"),
        ("*.x", {"keys": "*.*"}, InvalidInputError, r"expected as many \* in both"),
        ("*.x", {"keys": "k.*"}, ModelFileError, "it holds no 'k.a'"),
        ("*.x", {"vectors": "a.x"}, InvalidInputError, "expected one of them"),
        ("flat", {}, ModelFileError, r"got vectors flat \(3,\) float64, expected shape"),
        ("none", {}, ModelFileError, "matches none of: a.x, a_x"),
        ("xxx*", {}, ConfigError, "1 to 120 of the characters"),
        ("*.x", {"model": "m/n"}, ConfigError, "1 to 120 of the characters"),
    ):
        with pytest.raises(error, match=message):
            import_tables(source, tmp_path / "out", tables, **options)
    with pytest.raises(InvalidInputError, match="expected --write-config with a local path"):
        import_tables(source, "s3://bucket/out", "*.x")
    assert not (tmp_path / "out").exists()


def test_a_table_that_fails_is_named_and_leaves_no_configuration(tmp_path: Path) -> None:
    good, bad, out = np.ones((3, 2)), np.full((3, 2), 1e300), tmp_path / "out"
    import_tables(_stored(tmp_path, a=good, b=good, c=good), out, "*")
    for overwrite in (True, False):
        with pytest.raises(ModelFileError, match=r"table 'b' \(1 of 3 are written\): .*tables.npz: row 0 of 'b'"):
            import_tables(_stored(tmp_path, a=good * 2, b=bad, c=good * 2), out, "*", overwrite=overwrite)
        assert not (out / "ps.json").exists()  # nothing may serve tables of two checkpoints
        names = {"a.model", "b.model", "c.model"} if overwrite else {"a.model"}
        assert set(os.listdir(out)) == names
        assert np.array_equal(opened(out / "a.model", 2)[1], good * 2)
        shutil.rmtree(out)


def test_no_configuration_and_no_table_is_replaced_unasked(tmp_path: Path) -> None:
    source, out, config = _stored(tmp_path, a=ONES, b=ONES), tmp_path / "out", tmp_path / "other" / "config.json"
    import_tables(source, out, "a", write_config=config)
    content = config.read_bytes()
    assert os.listdir(out) == ["a.model"]
    for tables, place in (("*", None), ("b", config)):
        with pytest.raises(ModelFileError, match=r"(a\.model|config\.json) exists; .* ask to overwrite"):
            import_tables(source, out, tables, write_config=place)
    assert (os.listdir(out), config.read_bytes()) == (["a.model"], content)
    import_tables(source, out, "*", write_config=config, overwrite=True)
    assert load_configuration(config).models[0].embedding_table_names == ("a", "b")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()
