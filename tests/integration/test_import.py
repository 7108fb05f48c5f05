"""`hps import`: files of other formats become models that can be opened, or nothing at all."""

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
from typer.testing import CliRunner, Result

import hps.models.importing
from hps.cli.app import app
from hps.configuration.tiers import ModelSourceConfig
from hps.errors import InvalidDtypeError, InvalidInputError, ModelFileChangedError, ModelFileError, ModelFileNotFoundError
from hps.models.files import open_sparse_model
from hps.models.importing import import_model, list_arrays
from hps.models.sources import ModelSources
from tests.s3_server import S3Server, know_only_moto, s3_server

Array = np.ndarray[Any, Any]
Save = Callable[[Path, Array, Array], Path]


def _npz(path: Path, keys: Array, vectors: Array) -> Path:
    np.savez(path / "table.npz", keys=keys, vectors=vectors)
    return path / "table.npz"


def _npz_compressed(path: Path, keys: Array, vectors: Array) -> Path:
    np.savez_compressed(path / "table.npz", keys=keys, vectors=vectors)
    return path / "table.npz"


def _pair(path: Path, keys: Array, vectors: Array) -> Path:
    (path / "table").mkdir()
    np.save(path / "table" / "keys.npy", keys)
    np.save(path / "table" / "vectors.npy", vectors)
    return path / "table"


def _fortran_pair(path: Path, keys: Array, vectors: Array) -> Path:
    return _pair(path, keys, np.asfortranarray(vectors))


def _safetensors(path: Path, keys: Array, vectors: Array) -> Path:
    safetensors.numpy.save_file({"keys": keys, "vectors": vectors}, path / "table.safetensors")
    return path / "table.safetensors"


def _torch(path: Path, keys: Array, vectors: Array) -> Path:
    torch.save({"keys": torch.from_numpy(keys), "vectors": torch.from_numpy(vectors)}, path / "table.pt")
    return path / "table.pt"


def _torch_transposed(path: Path, keys: Array, vectors: Array) -> Path:
    return _torch(path, keys, np.asfortranarray(vectors))


def _parquet(path: Path, keys: Array, vectors: Array) -> Path:
    rows, dim = vectors.shape
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dim)
    pq.write_table(pa.table({"keys": keys, "vectors": lists}), path / "table.parquet", row_group_size=rows)
    return path / "table.parquet"


SAVERS: list[Save] = [_npz, _npz_compressed, _pair, _fortran_pair, _safetensors, _torch, _torch_transposed, _parquet]


@pytest.fixture
def table() -> tuple[Array, Array]:
    """More rows than a chunk of `small_chunks` holds; any bits, so NaNs and infinite elements, too."""
    random = np.random.default_rng(7)
    keys = random.permutation(np.arange(-500, 500, dtype=np.int64) * 2**53)
    return keys, random.integers(0, 2**32, (1000, 5), np.uint32).view(np.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hps.models.importing, "CHUNK_BYTES", 28 * 96)


def run(*arguments: object) -> Result:
    """Run a command within this process; it may only end by an exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def opened(place: object, dim: int, sources: ModelSources | None = None) -> tuple[Array, Array]:
    keys, vectors = zip(*open_sparse_model(str(place), dim, sources=sources).chunks(), strict=True)
    return np.concatenate(keys), np.concatenate(vectors)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
def test_a_table_comes_back_bit_for_bit(save: Save, table: tuple[Array, Array], tmp_path: Path) -> None:
    source = save(tmp_path, *table)
    report = import_model(source, tmp_path / "model")
    keys, vectors = opened(tmp_path / "model", 5)
    assert np.array_equal(keys, table[0])
    assert vectors.tobytes() == table[1].tobytes()
    assert (report.rows, report.dim, report.size_bytes) == (1000, 5, 28_000)
    assert (report.keys, report.vectors, report.dtype) == ("keys", "vectors", "float32")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", [np.float16, np.float64, ">f4"])
@pytest.mark.parametrize("save", [_npz, _npz_compressed, _fortran_pair], ids=lambda save: save.__name__)
def test_other_floats_become_float32(save: Save, kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vectors = np.random.default_rng(1).random((300, 4)).astype(kind)
    keys = np.arange(300, dtype=">u2")[:, None]
    with caplog.at_level("INFO", "hps.models.importing"):
        import_model(save(tmp_path, keys, vectors), tmp_path / "model")
    got_keys, got = opened(tmp_path / "model", 4)
    assert np.array_equal(got_keys, np.arange(300))
    assert np.array_equal(got, vectors.astype(np.float32))
    assert len(caplog.messages) == (0 if kind == ">f4" else 1)  # said once, not by chunk


@pytest.mark.usefixtures("small_chunks")
def test_bfloat16_weights_without_keys_get_row_numbers(tmp_path: Path) -> None:
    bag = torch.nn.EmbeddingBag(400, 3, dtype=torch.bfloat16)
    torch.save({"model": {"bag": bag.state_dict()}}, tmp_path / "model.bin")
    report = import_model(tmp_path / "model.bin", tmp_path / "out", vectors="model.bag.weight", first_key=-5)
    keys, vectors = opened(tmp_path / "out", 3)
    assert np.array_equal(keys, np.arange(-5, 395))
    assert np.array_equal(vectors, bag.weight.detach().to(torch.float32).numpy())
    assert (report.keys, report.dtype) == (None, "bfloat16")


def test_bfloat16_bits_of_numpy_are_taken_at_their_callers_word(tmp_path: Path) -> None:
    values = torch.randn(6, 2).to(torch.bfloat16)
    for bits in (values.view(torch.uint16).numpy(), values.view(torch.uint16).numpy().view("V2")):
        np.save(tmp_path / "bits.npy", bits)
        with pytest.raises(InvalidDtypeError, match="say so with dtype bfloat16"):
            import_model(tmp_path / "bits.npy", tmp_path / "out", vectors="bits", first_key=0, overwrite=True)
        import_model(tmp_path / "bits.npy", tmp_path / "out", vectors="bits", first_key=0, dtype="bfloat16", overwrite=True)
        assert np.array_equal(opened(tmp_path / "out", 2)[1], values.to(torch.float32).numpy())


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


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle", "pickle as npy", "pickle in npz"])
def test_pickled_code_never_runs(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    state = {"emb": torch.zeros(2, 2), "payload": _Payload(mark)}
    source = tmp_path / {"pickle as npy": "bad.npy", "pickle in npz": "bad.npz"}.get(kind, "bad.pt")
    if kind in ("zip", "legacy"):
        torch.save(state, source, _use_new_zipfile_serialization=kind == "zip")
        torch.load(source, weights_only=False)  # it is alive
    elif kind == "plain pickle":
        source.write_bytes(pickle.dumps(_Payload(mark)))
        pickle.loads(source.read_bytes())
    else:
        content = io.BytesIO()
        np.save(content, np.array([[_Payload(mark)]], object), allow_pickle=True)
        if source.suffix == ".npy":
            source.write_bytes(content.getvalue())
        else:
            np.savez(source, vectors=np.array([[_Payload(mark)]], object), allow_pickle=True)
        np.load(io.BytesIO(content.getvalue()), allow_pickle=True)
    mark.rmdir()
    with pytest.raises((ModelFileError, InvalidDtypeError)) as caught:
        import_model(
            source, tmp_path / "out", vectors={".npy": "bad", ".npz": "vectors"}.get(source.suffix, "emb"), first_key=0
        )
    assert str(source) in str(caught.value)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()
    if source.suffix == ".pt":
        assert "runs no code of a file" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_archive_is_refused_as_code(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Embedding(3, 2)), tmp_path / "script.pt")
    with pytest.raises(ModelFileError, match="TorchScript archive, which holds code"):
        import_model(tmp_path / "script.pt", tmp_path / "out")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
def test_a_bad_row_far_into_the_table_leaves_nothing(save: Save, tmp_path: Path) -> None:
    keys, vectors = np.arange(500, dtype=np.uint64), np.ones((500, 5), np.float64)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    vectors[321, 2] = 1e300
    with pytest.raises(ModelFileError, match=r"row 321 of 'vectors' has 1e\+300 as element 2, which is infinite as float32"):
        import_model(save(tmp_path / "in", keys, vectors), tmp_path / "out" / "model")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("save", [_npz, _pair, _parquet, _safetensors], ids=lambda save: save.__name__)
def test_a_key_of_2_to_the_63_is_refused_by_its_row_and_leaves_nothing(save: Save, tmp_path: Path) -> None:
    keys, vectors = np.arange(500, dtype=np.uint64), np.ones((500, 5), np.float32)
    keys[-2:] = 2**63 - 1, 2**63
    with pytest.raises(ModelFileError, match="row 499 of 'keys' has key 9223372036854775808, wanted keys below"):
        import_model(save(tmp_path, keys, vectors), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


class _During:
    """Does something when the first rows are written."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action
        self.rows = 0

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        pass

    def advance(self, tag: str, rows: int) -> None:
        self.rows += rows
        if self.action:
            self.action()
            self.action = None

    def finish(self, tag: str) -> None:
        pass


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
def test_a_source_that_is_written_meanwhile_is_noticed(save: Save, table: tuple[Array, Array], tmp_path: Path) -> None:
    source = save(tmp_path, *table)
    file = source / "vectors.npy" if source.is_dir() else source
    content = file.read_bytes()

    def rewrite() -> None:
        with open(file, "r+b") as again:
            again.write(content)
        os.utime(file, ns=(1, 1))

    with pytest.raises(ModelFileChangedError, match=file.name):
        import_model(source, tmp_path / "out", progress=_During(rewrite))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("save", [_npz, _pair, _safetensors, _torch], ids=lambda save: save.__name__)
def test_a_source_that_is_cut_short_meanwhile_is_an_error_not_a_crash(
    save: Save, table: tuple[Array, Array], tmp_path: Path
) -> None:
    source = save(tmp_path, *table)
    file = source / "vectors.npy" if source.is_dir() else source
    with pytest.raises(ModelFileError, match=file.name):
        import_model(source, tmp_path / "out", progress=_During(lambda: os.truncate(file, 4000)))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.usefixtures("small_chunks")
def test_progress_sees_every_row_and_no_model_is_replaced_unasked(table: tuple[Array, Array], tmp_path: Path) -> None:
    source, told = _npz(tmp_path, *table), _During(lambda: None)
    import_model(source, tmp_path / "out", progress=told)
    assert told.rows == 1000
    with pytest.raises(ModelFileError, match="it exists"):
        import_model(source, tmp_path / "out")
    import_model(source, tmp_path / "out", overwrite=True)


def test_a_source_that_is_replaced_after_its_head_was_read_is_noticed(
    table: tuple[Array, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = _safetensors(tmp_path, *table), tmp_path / "other"
    other.write_bytes(source.read_bytes())
    select = hps.models.importing.select

    def replaced(*arguments: Any) -> Any:
        other.replace(source)
        return select(*arguments)

    monkeypatch.setattr(hps.models.importing, "select", replaced)
    with pytest.raises(ModelFileChangedError, match=source.name):
        import_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_no_table_are_refused_with_the_cure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ModelFileNotFoundError, match=r"absent\.npz: there is no such file"):
        import_model(tmp_path / "absent.npz", out)
    (tmp_path / "table.csv").touch()
    with pytest.raises(ModelFileError, match=r"ends in '\.csv', wanted one of: \.npy, \.npz, \.safetensors, .*--format"):
        import_model(tmp_path / "table.csv", out)
    with pytest.raises(InvalidInputError, match="got format 'csv', wanted one of: npy, npz, safetensors, torch, parquet"):
        import_model(tmp_path / "table.csv", out, file_format="csv")
    with pytest.raises(InvalidInputError, match="got a remote source, wanted a local path"):
        import_model("s3://bucket/table.npz", out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelFileError, match=r"wanted a directory of \.npy or of \.parquet files, got a directory without them"
    ):
        import_model(tmp_path / "empty", out)
    (tmp_path / "dir.npz").mkdir()
    with pytest.raises(ModelFileError, match="got a directory without them"):
        import_model(tmp_path / "dir.npz", out)
    with pytest.raises(ModelFileError, match="it is a directory, expected a file"):
        import_model(tmp_path / "dir.npz", out, file_format="npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(ModelFileError, match="not a regular file"):
        import_model(tmp_path / "pipe.npz", out)
    np.savez(tmp_path / "t.npz", keys=np.zeros(2), vectors=np.zeros((2, 2)))
    with pytest.raises(InvalidDtypeError, match=r"got keys keys \(2,\) float64, wanted integers"):
        import_model(tmp_path / "t.npz", out)
    assert not out.exists()


def test_the_command_lists_and_imports(table: tuple[Array, Array], tmp_path: Path) -> None:
    source = _torch(tmp_path, *table)
    listed = run("import", source, "--list")
    assert listed.exit_code == 0
    assert listed.stdout.splitlines() == ["keys     (1000,) int64", "vectors  (1000, 5) float32"]
    assert [info.name for info in list_arrays(source)] == ["keys", "vectors"]
    done = run("import", source, tmp_path / "out")
    assert done.exit_code == 0
    assert f"{tmp_path}/out: 1,000 rows of 5 float32, 0.0 MB" in done.stdout
    assert "vectors from 'vectors', keys from 'keys'" in done.stdout
    assert f'"sparse_files": ["{tmp_path}/out"], "embedding_vecsize_per_table": [5]' in done.stdout
    assert np.array_equal(opened(tmp_path / "out", 5)[0], table[0])
    named = run(
        "import", source, tmp_path / "out", "--vectors", "vectors", "--first-key", 7, "--overwrite", "--format", "torch"
    )
    assert named.exit_code == 0
    assert "keys from row numbers 7 to 1006" in named.stdout


def test_the_command_ends_with_2_and_one_message_on_wrong_input(table: tuple[Array, Array], tmp_path: Path) -> None:
    source = _npz(tmp_path, *table)
    bad = tmp_path / "bad.pt"
    torch.save({"payload": _Payload(tmp_path / "mark")}, bad)
    for arguments, message in (
        ((source,), "got no DESTINATION"),
        ((source, tmp_path / "out", "--keys", "absent"), "it holds no 'absent'"),
        ((source, tmp_path / "out", "--dtype", "int8"), "got dtype 'int8'"),
        ((source, "nowhere://x/y"), "got scheme 'nowhere'"),
        ((bad, tmp_path / "out"), "runs no code of a file"),
    ):
        result = run("import", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


_MEASURE = """
import sys
from hps.models.importing import FORMATS, import_model
from hps.registry import implementation

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

implementation("format", sys.argv[3])
before = peak()
import_model(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "name"),
    [
        (_npz, "npz"),
        (_npz_compressed, "npz"),
        (_pair, "npy"),
        (_fortran_pair, "npy"),
        (_safetensors, "safetensors"),
        (_torch, "torch"),
        (_torch_transposed, "torch"),
        (_parquet, "parquet"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_memory_stays_far_below_the_size_of_the_table(save: Save, name: str, tmp_path: Path) -> None:
    rows, dim = 1_500_000, 32  # 204 MB
    vectors = np.zeros((rows, dim), np.float32)
    vectors[:, 0] = np.arange(rows)
    source = save(tmp_path, np.arange(rows), vectors)
    del vectors
    command = [sys.executable, "-c", _MEASURE, str(source), str(tmp_path / "out"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert open_sparse_model(tmp_path / "out", dim).rows == rows
    assert int(done.stdout) < 100 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()


@pytest.mark.s3
@pytest.mark.usefixtures("small_chunks")
def test_a_table_is_imported_to_s3(server: S3Server, table: tuple[Array, Array], tmp_path: Path) -> None:
    sources = ModelSources(ModelSourceConfig(s3_endpoint_url=server.url))
    place = f"s3://{server.new_bucket()}/models/item"
    import_model(_safetensors(tmp_path, *table), place, sources=sources)
    keys, vectors = opened(place, 5, sources)
    assert np.array_equal(keys, table[0])
    assert vectors.tobytes() == table[1].tobytes()


@pytest.mark.s3
@pytest.mark.usefixtures("small_chunks")
def test_the_command_takes_the_address_of_s3_from_a_configuration(
    server: S3Server, table: tuple[Array, Array], tmp_path: Path
) -> None:
    place = f"s3://{server.new_bucket()}/models/item"
    model = {
        "model": "m",
        "sparse_files": [place],
        "embedding_table_names": ["t"],
        "embedding_vecsize_per_table": [5],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
    }
    content = {"models": [model], "model_source": {"s3_endpoint_url": server.url}}
    (tmp_path / "ps.json").write_text(json.dumps(content))
    result = run("import", _npz(tmp_path, *table), place, "--config", tmp_path / "ps.json")
    assert (result.exit_code, f"{place}: 1,000 rows" in result.stdout) == (0, True), result.stderr
    assert server.get(f"{place}/key") == table[0].tobytes()


@pytest.mark.s3
@pytest.mark.usefixtures("small_chunks")
def test_a_bad_row_leaves_nothing_in_s3(server: S3Server, tmp_path: Path) -> None:
    keys, bucket = np.array([1] * 200 + [2**63], np.uint64), server.new_bucket()
    sources = ModelSources(ModelSourceConfig(s3_endpoint_url=server.url))
    with pytest.raises(ModelFileError, match="row 200"):
        import_model(_npz(tmp_path, keys, np.ones((201, 5), np.float32)), f"s3://{bucket}/m", sources=sources)
    assert "Contents" not in server.client.list_objects_v2(Bucket=bucket)
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=bucket)
