"""Sparse model files: what is read, what is refused with which words, and what is written."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.errors import (
    HPSError,
    InvalidDtypeError,
    InvalidInputError,
    ModelFileChangedError,
    ModelFileError,
    ModelFileNotFoundError,
)
from hps.ground.hashing import mix
from hps.models.files import CHUNK_BYTES, SparseModel, open_sparse_model, stored_shape
from hps.models.importing.importer import import_model
from hps.models.writer import write_sparse_model
from hps.tools.cli.app import app
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.types import FloatArray, KeyArray
from tests.tables.sparse_models import chunks_of

DIM = 4
INT64 = np.iinfo(np.int64)


def write_raw(directory: Path, keys: KeyArray, vectors: FloatArray) -> Path:
    """Write the two files as HugeCTR does, without the writer under test."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "key").write_bytes(keys.astype("<i8").tobytes())
    (directory / "emb_vector").write_bytes(vectors.astype("<f4").tobytes())
    return directory


def rows_of(n: int, dim: int = DIM, seed: int = 1) -> tuple[KeyArray, FloatArray]:
    rng = np.random.default_rng(seed)
    keys = rng.permutation((np.arange(n, dtype=np.int64) - n // 2) * 7_000_000_019)
    return keys, rng.integers(0, 2**32, (n, dim), dtype=np.uint32).view(np.float32)


def read_all(model: SparseModel, *args: Any, **options: Any) -> tuple[KeyArray, FloatArray]:
    chunks = list(chunks_of(model, *args, **options))
    return (
        np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in chunks)]),
        np.concatenate([np.empty((0, model.dim), np.float32), *(vectors for _, vectors in chunks)]),
    )


def assert_same(got: tuple[KeyArray, FloatArray], wanted: tuple[KeyArray, FloatArray]) -> None:
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1].view(np.uint32), wanted[1].view(np.uint32))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A good model of 100 rows."""
    return write_raw(tmp_path / "item.model", *rows_of(100))


def test_written_files_are_hugectrs_whatever_the_layout_of_the_arrays(tmp_path: Path) -> None:
    keys, vectors = rows_of(50)
    assert write_sparse_model(tmp_path / "new" / "m", (np.repeat(keys, 2)[::2], np.asfortranarray(vectors))) == 50
    assert (tmp_path / "new" / "m" / "key").read_bytes() == keys.astype("<i8").tobytes()
    assert (tmp_path / "new" / "m" / "emb_vector").read_bytes() == vectors.astype("<f4").tobytes()
    assert sorted(os.listdir(tmp_path / "new" / "m")) == ["emb_vector", "key"]
    assert os.listdir(tmp_path / "new") == ["m"]


@pytest.mark.parametrize("exchange", [True, False], ids=["", "where the file system cannot exchange"])
def test_a_model_is_overwritten_by_the_new_one_alone_when_asked(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("hps.models.writer.ctypes.CDLL", lambda *_, **__: object())
    with pytest.raises(ModelFileError, match=f"{model_dir}: it exists; choose another directory or ask to overwrite it"):
        write_sparse_model(model_dir, rows_of(5, seed=2))
    assert_same(read_all(open_sparse_model(model_dir, DIM)), rows_of(100))
    (model_dir / "meta").write_bytes(b"x" * 800)
    write_sparse_model(model_dir, rows_of(5, seed=2), overwrite=True)
    assert_same(read_all(open_sparse_model(model_dir, DIM)), rows_of(5, seed=2))
    assert os.listdir(model_dir.parent) == [model_dir.name]


def test_a_chunk_is_of_bounded_size_whatever_the_dimension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dim in (1, 1000):
        model = open_sparse_model(write_raw(tmp_path / str(dim), *rows_of(5, dim)), dim)
        assert model.chunk_rows * (8 + 4 * dim) <= CHUNK_BYTES < (model.chunk_rows + 1) * (8 + 4 * dim)
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100)
    model = open_sparse_model(tmp_path / "1000", 1000)
    assert model.chunk_rows == 1
    assert [keys.size for keys, _ in chunks_of(model)] == [1] * 5


def test_the_fingerprint_is_the_same_however_the_place_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_dir.parent)
    names = [model_dir, str(model_dir), f"{model_dir}/", "item.model", "./x/../item.model"]
    assert len({open_sparse_model(name, DIM).fingerprint for name in names}) == 1


def test_the_fingerprint_changes_with_files_place_and_dimension(model_dir: Path, tmp_path: Path) -> None:
    keys, vectors = rows_of(100)
    prints = [open_sparse_model(model_dir, DIM).fingerprint]
    prints.append(open_sparse_model(write_raw(tmp_path / "copy", keys, vectors), DIM).fingerprint)
    for name in ("key", "emb_vector"):
        status = (model_dir / name).stat()
        os.utime(model_dir / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        prints.append(open_sparse_model(model_dir, DIM).fingerprint)
    (model_dir / "key").write_bytes(keys[:50].tobytes())
    prints.append(open_sparse_model(model_dir, 2 * DIM).fingerprint)
    assert len(set(prints)) == len(prints)


Damage = dict[str, bytes | None] | str


def damaged(directory: Path, damage: Damage) -> None:
    """Write files to the directory of a model, remove those with None; or put something else in the place of a file."""
    if isinstance(damage, dict):
        for name, data in damage.items():
            (directory / name).unlink(missing_ok=True)
            if data is not None:
                (directory / name).write_bytes(data)
    elif damage == "no directory":
        shutil.rmtree(directory)
    elif damage == "a file in its place":
        shutil.rmtree(directory)
        directory.write_bytes(b"x" * 100)
    else:
        (directory / damage.split()[-1]).unlink(missing_ok=True)
        if damage.startswith("a link"):
            (directory / "key").symlink_to("nowhere")
        else:
            (directory / damage.split()[-1]).mkdir()


SIZES = "got %d bytes, expected 1600: the 100 keys of {dir}/key (800 bytes) with 4 float32 each; "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no directory", "{dir}: there is no such directory; expected a directory with the files"),
        ("a file in its place", "{dir}: it is a file, expected a directory; expected a directory with the files key and emb_"),
        ({"key": None}, "{dir}: key not found; it holds emb_vector; expected a directory with"),
        ({"emb_vector": None}, "{dir}: emb_vector not found; it holds key; expected a directory with"),
        ({"key": None, "emb_vector": None, "x.bin": b"x"}, "{dir}: key and emb_vector not found; it holds x.bin;"),
        ({"key": None, "emb_vector": None}, "{dir}: key and emb_vector not found; it holds nothing;"),
        ("a link for key", "{dir}/key: there is no such file"),
        ("a directory for key", "{dir}/key: it is a directory, "),
        ("a directory for emb_vector", "{dir}/emb_vector: it is a directory, "),
        ("a directory for meta", "{dir}/meta: it is a directory, "),
        ({"key": b""}, "{dir}/key: got 0 bytes, expected 8 (an int64) for every row"),
        ({"key": bytes(804)}, "{dir}/key: got 804 bytes, expected 8 (an int64) for every row"),
        ({"emb_vector": b""}, "{dir}/emb_vector: " + SIZES % 0),
        ({"emb_vector": bytes(1596)}, SIZES % 1596 + "the files fit no dimension: one is cut short, or they"),
        ({"emb_vector": bytes(4000)}, SIZES % 4000 + "the files fit embedding_vecsize_per_table 10"),
        ({"key": bytes(8 * 99)}, "got 1600 bytes, expected 1584: the 99 keys"),
        ({"meta": b""}, "{dir}/meta: got 0 bytes, expected the 800 of {dir}/key; remove it or write it whole"),
        ({"meta": bytes(792)}, "{dir}/meta: got 792 bytes, expected the 800 of"),
    ],
)
def test_files_that_cannot_be_the_table_are_refused(model_dir: Path, damage: Damage, message: str) -> None:
    for name in ("meta", "slot_id"):  # of the right size, and what HugeCTR leaves beside
        (model_dir / name).write_bytes(b"x" * 800)
    assert_same(read_all(open_sparse_model(model_dir, DIM)), rows_of(100))
    damaged(model_dir, {"meta": None, "slot_id": None})
    damaged(model_dir, damage)
    with pytest.raises(ModelFileError, match=re.escape(message.format(dir=model_dir))) as raised:
        open_sparse_model(model_dir, DIM)
    absent = any(words in message for words in ("not found", "there is no"))
    assert type(raised.value) is (ModelFileNotFoundError if absent else ModelFileError)


def renewed(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    new.rename(path)


@pytest.mark.parametrize("name", ["key", "emb_vector"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (renewed, ModelFileChangedError, "it changed while it was being read .*load the model again"),
        (lambda path: os.truncate(path, path.stat().st_size * 15 // 100), ModelFileError, "it (ends at byte|changed)"),
        (Path.unlink, ModelFileNotFoundError, ""),
    ],
    ids=["replaced", "cut short", "removed"],
)
def test_a_file_that_changes_while_loading_is_noticed(
    model_dir: Path, name: str, change: Callable[[Path], object], error: type[ModelFileError], message: str
) -> None:
    model = open_sparse_model(model_dir, DIM)
    chunks = chunks_of(model, 10)
    next(chunks)
    change(model_dir / name)
    with pytest.raises(error, match=rf"{model_dir}/{name}: {message}"):
        list(chunks)
    with pytest.raises(ModelFileError):
        model.verify()


@pytest.mark.parametrize(("key", "row"), [(-1, 0), (1 << 32, 57), (INT64.min, 87), (INT64.max, 99)])
def test_a_key_that_32_bit_serving_cannot_have_is_refused_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: int, row: int
) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 80)  # the row counts from the start of the file
    keys, vectors = np.arange(100, dtype=np.int64), rows_of(100)[1]
    keys[:4] = 0, 1, 2**31, 2**32 - 1
    path = write_raw(tmp_path / "m", keys, vectors)
    assert_same(read_all(open_sparse_model(path, DIM, int32_keys=True)), (keys, vectors))
    keys[row] = key
    write_raw(path, keys, vectors)
    assert_same(read_all(open_sparse_model(path, DIM)), (keys, vectors))
    message = rf"{path}/key: row {row} has key {key}, but supportlonglong=false .*set supportlonglong to true"
    with pytest.raises(ModelFileError, match=message):
        next(chunks_of(open_sparse_model(path, DIM, int32_keys=True), 1))


# -- files of other formats --------------------------------------------------------------------------------------------


def with_int32_keys(directory: Path, keys: KeyArray, dim: int = DIM) -> tuple[Path, FloatArray]:
    vectors = np.arange(keys.size * dim, dtype=np.float32).reshape(-1, dim)
    write_raw(directory, keys, vectors)
    (directory / "key").write_bytes(keys.astype("<u4").tobytes())
    return directory, vectors


@pytest.mark.parametrize("rows", [8, 9, 5000])
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_keys_of_4_bytes_are_recognised_and_the_advice_converts_them(tmp_path: Path, rows: int, order: str) -> None:
    keys = np.arange(rows, dtype=np.int64) * 3
    if order == "shuffled":
        np.random.default_rng(1).shuffle(keys)
    place, vectors = with_int32_keys(tmp_path / "narrow", keys)
    advice = f"hps import {place} DESTINATION --format int32_keys"
    with pytest.raises(ModelFileError, match=rf"as many keys of 4 bytes .*{advice}"):
        open_sparse_model(place, DIM)
    with pytest.raises(ModelFileError, match=rf"keys that are int32.*{advice}"):
        stored_shape(place)  # what `hps init` writes
    if order == "ascending" and rows % 2 == 0:  # as many bytes as half the rows of twice the width have
        with pytest.raises(ModelFileError, match=advice):
            open_sparse_model(place, 2 * DIM).check_format()
    result = CliRunner().invoke(app, advice.replace("DESTINATION", str(tmp_path / "wide")).split()[1:])
    assert result.exit_code == 0, result.output
    wide = open_sparse_model(tmp_path / "wide", DIM)
    wide.check_format()
    assert (tmp_path / "wide" / "key").read_bytes() == keys.tobytes()
    assert (tmp_path / "wide" / "emb_vector").read_bytes() == vectors.tobytes()


def test_unsigned_keys_of_4_bytes_stay_positive(tmp_path: Path) -> None:
    keys = np.array([1, 2**31, 2**32 - 1])
    place, _ = with_int32_keys(tmp_path / "narrow", keys)
    import_model(place, tmp_path / "wide", file_format="int32_keys")
    assert (tmp_path / "wide" / "key").read_bytes() == keys.tobytes()


@pytest.mark.parametrize("rows", [1, 2, 3, 999, 1000])
def test_an_error_about_a_width_names_keys_of_4_bytes_where_they_fit(tmp_path: Path, rows: int) -> None:
    keys = (np.arange(rows) + 1) * 2654435761 % 2**32  # hashed: half of them would be negative as int32
    place, vectors = with_int32_keys(tmp_path / "narrow", keys)
    advice = f"hps import {place} DESTINATION --format int32_keys"
    with pytest.raises(ModelFileError, match=rf"with {DIM} float32 each, keys of 4 bytes: `{advice}`"):
        open_sparse_model(place, DIM)
    result = CliRunner().invoke(app, advice.replace("DESTINATION", str(tmp_path / "wide")).split()[1:])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "wide" / "key").read_bytes() == keys.tobytes()
    assert (tmp_path / "wide" / "emb_vector").read_bytes() == vectors.tobytes()


def test_an_error_about_a_width_does_not_name_4_bytes_for_small_keys(tmp_path: Path) -> None:
    place = write_raw(tmp_path / "model", np.arange(1000), np.ones((1000, 2 * DIM), np.float32))
    with pytest.raises(ModelFileError, match=rf"the files fit embedding_vecsize_per_table {2 * DIM}$"):
        open_sparse_model(place, DIM)


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(1000),
        np.arange(1000) * 2**33,
        np.arange(1000) - 500,
        np.arange(1000) * np.int64(-7046029254386353131),
        np.arange(1000) << 32 | np.arange(1000)[::-1],
        np.array([7]),
        np.array([5, 2**40 + 3]),
    ],
)
def test_keys_of_8_bytes_are_not_taken_for_narrower_ones(tmp_path: Path, keys: KeyArray) -> None:
    place = write_raw(tmp_path / "model", keys, np.ones((keys.size, DIM), np.float32))
    open_sparse_model(place, DIM).check_format()
    if keys.size < 3 or (keys < 2**32).all() or (keys < 0).any():
        assert stored_shape(place) == (DIM, keys.size)


@pytest.mark.parametrize("names", [["key"], ["emb_vector"], ["key", "emb_vector"]])
def test_npy_files_under_hugectrs_names_are_recognised(tmp_path: Path, names: list[str]) -> None:
    keys, vectors = np.arange(100), np.ones((100, DIM), np.float32)
    place = write_raw(tmp_path / "model", keys, vectors)
    for name in names:
        with open(place / name, "wb") as file:
            np.save(file, keys if name == "key" else vectors)
    for refused in (lambda: open_sparse_model(place, DIM), lambda: stored_shape(place)):
        with pytest.raises(ModelFileError, match=rf"{' and '.join(names)} are .npy files.*--format npy"):
            refused()
    if len(names) == 2:
        result = CliRunner().invoke(app, ["import", str(place), str(tmp_path / "raw"), "--format", "npy"])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "raw" / "key").read_bytes() == keys.tobytes()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else_and_a_file_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "home").mkdir()
    refusal = "thesis.tex, which is not part of a sparse model" if overwrite else "exists"
    for file, target, message in (("home/thesis.tex", "home", refusal), ("m", "m", "a file is in the way")):
        (tmp_path / file).write_text("years of work")
        with pytest.raises(ModelFileError, match=message):
            write_sparse_model(tmp_path / target, rows_of(5), overwrite=overwrite)
        assert (tmp_path / file).read_text() == "years of work"


def test_an_empty_directory_and_a_link_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("empty", "link"):
        write_sparse_model(tmp_path / name, rows_of(5))
        assert_same(read_all(open_sparse_model(tmp_path / name, DIM)), rows_of(5))
    assert sorted(os.listdir(tmp_path)) == ["empty", "link", "real"]
    assert (tmp_path / "link").is_symlink()


def test_a_writer_that_fails_leaves_what_was_there(model_dir: Path) -> None:
    def chunks() -> Iterator[tuple[KeyArray, FloatArray]]:
        yield rows_of(10, seed=2)
        raise RuntimeError("the source broke")

    for target in (model_dir, model_dir.parent / "other"):
        with pytest.raises(RuntimeError, match="the source broke"):
            write_sparse_model(target, chunks(), overwrite=True)
    assert os.listdir(model_dir.parent) == [model_dir.name]
    assert_same(read_all(open_sparse_model(model_dir, DIM)), rows_of(100))


INT_3, FLOAT_3_4 = np.zeros(3, np.int64), np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        *(((INT_3.astype(np.int32), FLOAT_3_4), InvalidDtypeError), ((INT_3, FLOAT_3_4.astype(float)), InvalidDtypeError)),
        *(((INT_3.astype(">i8"), FLOAT_3_4), InvalidDtypeError), ((INT_3[:, None], FLOAT_3_4), InvalidInputError)),
        *(((INT_3, FLOAT_3_4[:2]), InvalidInputError), ((INT_3, FLOAT_3_4[:, 0]), InvalidInputError)),
        *(((INT_3, FLOAT_3_4[:, :0]), InvalidInputError), ((INT_3[:0], FLOAT_3_4[:0]), ModelFileError)),
        ([(INT_3, FLOAT_3_4), (INT_3, FLOAT_3_4[:, :3])], InvalidInputError),
    ],
)
def test_rows_of_the_wrong_kind_are_not_written(tmp_path: Path, rows: Any, error: type) -> None:
    with pytest.raises(HPSError, match="writing sparse model") as raised:
        write_sparse_model(tmp_path / "m", rows)
    assert type(raised.value) is error
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_model_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"file/m: a file is in the way"):
        write_sparse_model(tmp_path / "file" / "m", rows_of(5))
    with pytest.raises(ModelFileError, match=r"File name too long; nothing was changed"):
        write_sparse_model(tmp_path / ("x" * 300), rows_of(5))


@pytest.fixture
def _a_disk_of_100_kb() -> Iterator[None]:
    """The limit on the size of a file stands for the disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("_a_disk_of_100_kb")
def test_a_full_disk_is_a_model_file_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="/key: File too large"):
        write_sparse_model(tmp_path / "m", (np.arange(20_000), np.zeros((20_000, 4), np.float32)))
    assert os.listdir(tmp_path) == []


def test_a_reader_sees_a_whole_model_at_any_moment_of_overwriting(tmp_path: Path) -> None:
    sizes = {10: rows_of(10), 11: rows_of(11, seed=2)}
    write_sparse_model(tmp_path / "m", sizes[10])
    seen = set()

    def chunks(rows: tuple[KeyArray, FloatArray]) -> Iterator[tuple[KeyArray, FloatArray]]:
        for i in range(rows[0].size):
            model = open_sparse_model(tmp_path / "m", DIM)
            seen.add(model.rows)
            assert_same(read_all(model), sizes[model.rows])
            yield rows[0][i : i + 1], rows[1][i : i + 1]

    for size in (11, 10, 11):
        write_sparse_model(tmp_path / "m", chunks(sizes[size]), overwrite=True)
    assert seen == {10, 11}
    assert_same(read_all(open_sparse_model(tmp_path / "m", DIM)), sizes[11])


def test_sample_vectors_follow_their_formula() -> None:
    keys, mask = np.array([0, 1, -1, INT64.min, INT64.max, 12345678901], np.int64), (1 << 64) - 1

    def mixed(x: int) -> int:
        return int(mix(np.uint64(x & mask).astype(np.int64)))

    def element(key: int, j: int) -> float:
        return (mixed(mixed(key ^ mixed(7)) + j * 0x9E3779B97F4A7C15) >> 40) / 2**23 - 1

    wanted = [[element(int(key), j) for j in range(5)] for key in keys]
    np.testing.assert_array_equal(sample_vectors(keys, 5, seed=7), np.array(wanted, np.float32))


def test_the_sample_model_has_every_key_once_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1000)
    chunks = list(sample_chunks(333, 3, seed=5))
    assert all(keys.nbytes + vectors.nbytes <= 1000 for keys, vectors in chunks)
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in chunks]), np.arange(333))
    np.testing.assert_array_equal(np.concatenate([v for _, v in chunks]), sample_vectors(np.arange(333), 3, 5))
