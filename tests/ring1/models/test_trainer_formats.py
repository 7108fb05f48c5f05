"""What trainers write, as sources of `hps import`: which tables and rows they give, and which files they refuse.

Distributed checkpoints of one rank are written here by torch. The other files are written by the layouts in the sources of
torch, dynamicemb, TorchEasyRec and SOK, of which the latter need a GPU (see `tests/tables/trainer_dumps.py`).
"""

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

from hps.errors import CapacityError, InvalidDtypeError, InvalidInputError, ModelFileError
from hps.models import deltas
from hps.models.checkpoint import Checkpoint, find_table, find_tables, list_arrays
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.testing.sources import ArraySourceContract, Save
from tests.tables.trainer_dumps import (
    TORCHREC_TABLES,
    save_delta,
    save_dynamicemb,
    save_sok,
    save_torcheasyrec,
    sharded_checkpoint,
)

Array = np.ndarray[Any, Any]
KEYS = np.array([5, -6, 2**62, 7, 0, 9, 13, 8], np.int64)
ITEMS = (KEYS, np.arange(24, dtype=np.float32).reshape(8, 3))
USERS = (KEYS[:5], np.arange(10, dtype=np.float32).reshape(5, 2) - 5)
TABLES = {"item": ITEMS, "user": USERS}
NONE = np.empty(0, np.int64)


def content(keys: Array, vectors: Array) -> dict[int, bytes]:
    return dict(zip(keys.tolist(), map(bytes, vectors), strict=True))


def read(source: Path, tables: str = "*", **options: Any) -> dict[str, dict[int, bytes]]:
    """The rows of all tables, copied from chunks."""
    found = {}
    for name, table in find_tables(source, tables, **options).items():
        rows: dict[int, bytes] = {}
        for keys, vectors in table.chunks():
            rows |= content(keys, vectors)
        assert len(rows) == table.selection.rows
        found[name] = rows
    return found


EXPECTED = {name: content(*rows) for name, rows in TABLES.items()}


def save_steps(path: Path, tables: dict[str, Any]) -> Path:
    return save_delta(path, 100, {name: (*rows, NONE) for name, rows in tables.items()})


SAVERS: dict[str, Callable[..., Path]] = {
    "dynamicemb": save_dynamicemb,
    "sok": lambda path, tables, world=0: save_sok(path, tables),
    "torcheasyrec": lambda path, tables, world=3: save_torcheasyrec(path, {}, tables, world),
    "torcheasyrec_delta": lambda path, tables, world=3: save_delta(
        path, 100, {name: (*rows, NONE) for name, rows in tables.items()}, world
    ),
}
every_trainer = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)
every_trainer_with_ranks = pytest.mark.parametrize("kind", sorted(SAVERS.keys() - {"sok"}))


class TestTrainersFormats(ArraySourceContract):
    """One rank, whose rows stay in their order."""

    keys, vectors = "item.keys", "item"

    @pytest.fixture(params=SAVERS)
    def save(self, request: pytest.FixtureRequest) -> Save:
        return lambda path, keys, vectors: SAVERS[request.param](path / request.param, {"item": (keys, vectors)}, world=1)

    def open(self, path: Path) -> ArraySource:
        return Checkpoint(path).arrays


class TestDistributedCheckpoints(ArraySourceContract):
    @pytest.fixture
    def save(self) -> Save:
        return lambda path, keys, vectors: save_dcp(
            path / "dump", {"keys": torch.from_numpy(keys), "vectors": torch.from_numpy(vectors)}
        )

    def open(self, path: Path) -> ArraySource:
        return Checkpoint(path).arrays


@every_trainer
def test_tables_come_back_with_their_keys(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 60)
    source = save(tmp_path / "dump", TABLES)
    assert read(source) == EXPECTED
    assert {info.name for info in list_arrays(source)} == {"item", "item.keys", "user", "user.keys"}
    [alone] = read(source, "user").values()
    assert alone == EXPECTED["user"]
    with pytest.raises(InvalidInputError, match=r"'item', which has the keys 'item\.keys'"):
        find_table(source, vectors="item", first_key=0)
    with pytest.raises(ModelFileError, match=r"got vectors item \(8, 3\) float32, expected 4 elements"):
        find_table(source, vectors="item", dim=4)


@every_trainer
def test_a_single_table_needs_no_name(save: Any, tmp_path: Path) -> None:
    table = find_table(save(tmp_path / "dump", {"item": ITEMS}), dim=3)
    assert table.selection.keys == ArrayInfo("item.keys", (8,), "int64")
    assert table.selection.vectors == ArrayInfo("item", (8, 3), "float32")


@every_trainer_with_ranks
def test_a_missing_rank_is_named(kind: str, tmp_path: Path) -> None:
    source = SAVERS[kind](tmp_path / "dump", TABLES)
    part = {"dynamicemb": "rank_1.world", "torcheasyrec": "s-01-of", "torcheasyrec_delta": "rank_1_of"}[kind]
    removed = [file.unlink() for file in list(source.iterdir()) if part in file.name]
    assert removed
    with pytest.raises(ModelFileError, match=r"rank 1 of 3 missing, expected ranks 0 to 2"):
        read(source)


def test_a_dynamic_archive_that_a_rank_should_have_is_named(tmp_path: Path) -> None:
    save_torcheasyrec(tmp_path, {}, TABLES)
    (tmp_path / "sparse_dynamic_embedding-02-of-03.npz").unlink()
    with pytest.raises(ModelFileError, match="no sparse_dynamic_embedding of rank 2, which has rows of item"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["dynamicemb", "torcheasyrec"])
def test_two_dumps_in_one_directory_are_refused(kind: str, tmp_path: Path) -> None:
    SAVERS[kind](tmp_path, TABLES, 3)
    SAVERS[kind](tmp_path, TABLES, 2)
    with pytest.raises(ModelFileError, match="by 2 and by 3 ranks"):
        read(tmp_path)


def test_values_of_another_dump_are_refused(tmp_path: Path) -> None:
    save_dynamicemb(tmp_path, TABLES, 3)
    (tmp_path / "old").mkdir()
    save_dynamicemb(tmp_path / "old", TABLES, 2)
    for file in tmp_path.glob("item_emb_values*"):
        file.unlink()
    with pytest.raises(ModelFileError, match="no item_emb_values files"):
        read(tmp_path)
    for file in (tmp_path / "old").glob("item_emb_values*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelFileError, match="keys of item by 3 ranks and values by 2"):
        read(tmp_path)


def test_ranks_of_other_widths_are_refused(tmp_path: Path) -> None:
    save_dynamicemb(tmp_path, TABLES)
    values = tmp_path / "item_emb_values.rank_2.world_size_3"
    values.write_bytes(values.read_bytes() * 2)
    with pytest.raises(ModelFileError, match="got 6 elements a vector of item, expected 3 as in item_emb_"):
        read(tmp_path)


@pytest.mark.parametrize("empty", [NONE, KEYS[KEYS % 3 == 1]], ids=["all ranks", "two ranks"])
def test_ranks_without_rows(empty: Array, tmp_path: Path) -> None:
    rows = (empty, np.arange(empty.size * 3, dtype=np.float32).reshape(-1, 3))
    source = save_dynamicemb(tmp_path / "dump", {"item": rows})
    if empty.size:
        assert read(source) == {"item": content(*rows)}
    else:
        with pytest.raises(ModelFileError, match="expected at least 1 row"):
            read(source)
        assert read(source, delta=True) == {}


@every_trainer_with_ranks
def test_a_key_in_two_ranks_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(rows: Any, rank: int, world: int) -> Any:
        mine = (rows[0] % world == rank) | (rows[0] == 7)
        return rows[0][mine], rows[1][mine]

    monkeypatch.setattr("tests.tables.trainer_dumps.of_rank", of_rank)
    source = SAVERS[kind](tmp_path / "dump", {"item": ITEMS})
    with pytest.raises(ModelFileError, match=r"row \d of 'item' has key 7, which an earlier row has"):
        read(source)


def test_keys_of_shards_that_do_not_fit_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dynamicemb(tmp_path / "dump", {"item": ITEMS})
    monkeypatch.setattr(deltas, "available_memory", lambda: (8 * 13 - 1, ""))
    with pytest.raises(CapacityError, match="8 keys take 104 bytes of memory"):
        read(source)
    monkeypatch.setattr(deltas, "available_memory", lambda: (8 * 13, ""))
    assert read(source) == {"item": EXPECTED["item"]}


@pytest.mark.parametrize("value", ["torch.bfloat16", "float16", "fp16"])
def test_a_dynamicemb_dump_of_another_dtype_is_refused(value: str, tmp_path: Path) -> None:
    save_dynamicemb(tmp_path, TABLES)
    (tmp_path / "user_opt_args.json").write_text(f'{{"evict_strategy": "x", "dtype": "{value}"}}')
    with pytest.raises(ModelFileError, match=f"user_opt_args.json: it says dtype '{value}', expected a dump of float32"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["int32", "uint32", "uint64"])
def test_sok_keys_of_every_dtype(kind: str, tmp_path: Path) -> None:
    keys = np.array([3, 2**31 - 1, 0], kind)
    vectors = np.arange(6).reshape(3, 2)
    save_sok(tmp_path, {"a": (keys, vectors.astype(np.float16)), "b": (keys, vectors.astype(np.float64))})
    assert read(tmp_path) == dict.fromkeys("ab", content(keys, vectors.astype(np.float32)))


def test_sok_keys_above_int64_are_named(tmp_path: Path) -> None:
    save_sok(tmp_path, {"item": (np.array([1, 2**63 - 1, 2**63], np.uint64), ITEMS[1][:3])})
    with pytest.raises(ModelFileError, match=rf"row 2 of 'item.keys' has key {2**63}, expected keys below"):
        read(tmp_path)


@pytest.mark.parametrize(("at", "value"), [(259, 1), (295, 5), (295, 9)])
def test_a_file_of_sok_with_another_header_is_refused(at: int, value: int, tmp_path: Path) -> None:
    save_sok(tmp_path, {"item": ITEMS})
    changed = bytearray((tmp_path / "item-key").read_bytes())
    changed[at] = value
    (tmp_path / "item-key").write_bytes(changed)
    with pytest.raises(ModelFileError, match=r"item-key: .*expected kind 0 and a dtype of keys"):
        read(tmp_path)
    (tmp_path / "item-key").unlink()
    with pytest.raises(ModelFileError, match="got item-weight alone"):
        read(tmp_path)


def test_static_tables_of_torcheasyrec_get_row_numbers_over_all_ranks(tmp_path: Path) -> None:
    vectors = np.arange(20, dtype=np.float32).reshape(10, 2)
    save_torcheasyrec(tmp_path, {"cat": vectors}, {"item": ITEMS})
    assert read(tmp_path) == {"cat": content(np.arange(10), vectors), "item": EXPECTED["item"]}


def test_a_table_that_torcheasyrec_did_not_shard_is_refused(tmp_path: Path) -> None:
    save_torcheasyrec(tmp_path, {"cat": np.tile(ITEMS[1], (3, 1))}, {})
    with pytest.raises(ModelFileError, match="the same rows of cat from every rank"):
        read(tmp_path)


def test_an_archive_that_its_description_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_torcheasyrec(tmp_path, {}, TABLES)
    file = tmp_path / "sparse_embeddings-01-of-03.json"
    file.write_text(file.read_text().replace('"shape": [3, 3]', '"shape": [3, 4]'))
    with pytest.raises(ModelFileError, match=r"got item.values \(3, 3\) float32, expected shape \(3, 4\)"):
        read(tmp_path)


def test_quantized_rows_are_refused(tmp_path: Path) -> None:
    save_torcheasyrec(tmp_path, {}, {"item": (KEYS, np.zeros((8, 7), np.uint8))})
    with pytest.raises(InvalidDtypeError, match=r"item \(8, 7\) uint8"):
        read(tmp_path)


# Delta dumps.


def test_evicted_keys_are_no_rows(tmp_path: Path) -> None:
    source = save_delta(tmp_path, 7, {"item": (*ITEMS, np.array([70, 71])), "gone": (NONE, np.empty((0, 2)), KEYS[:2])})
    tables = find_tables(source, "*", delta=True)
    assert read(source, "item") == {"item": EXPECTED["item"]}
    assert {key for keys in tables["item"].deleted() for key in keys.tolist()} == {70, 71}
    assert (tables["gone"].selection.rows, tables["gone"].selection.dim) == (0, 2)
    assert {key for keys in tables["gone"].deleted() for key in keys.tolist()} == set(KEYS[:2].tolist())
    assert list(find_tables(save_dynamicemb(tmp_path / "d", TABLES), "item")["item"].deleted()) == []


def test_one_rank_writes_one_file(tmp_path: Path) -> None:
    file = save_delta(tmp_path, 9, {name: (*rows, NONE) for name, rows in TABLES.items()}, world=1)
    assert read(file) == EXPECTED
    assert read(tmp_path) == EXPECTED
    save_delta(tmp_path, 11, {"item": (*ITEMS, NONE)}, world=1)
    with pytest.raises(ModelFileError, match="got steps 9, 11, expected the files of one; import several as a version"):
        read(tmp_path)


def test_rows_of_another_step_are_refused(tmp_path: Path) -> None:
    source = save_delta(tmp_path, 100, {"item": (*ITEMS, NONE)}, says=90)
    with pytest.raises(ModelFileError, match="column 'global_step' is not 100, the step in the name"):
        read(source)


def test_other_parquet_files_with_such_names_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"keys": KEYS, "vectors": list(ITEMS[1])}), tmp_path / "item_step_1.parquet")
    with pytest.raises(ModelFileError, match=r"got no column embedding, .*say --format parquet"):
        find_table(tmp_path / "item_step_1.parquet")
    assert find_table(tmp_path / "item_step_1.parquet", file_format="parquet").selection.rows == 8


# Distributed checkpoints.


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of three ranks: sharded by rows, by columns, and whole on one rank."""
    sharded_checkpoint(tmp_path / "dump")
    return tmp_path / "dump"


@pytest.mark.parametrize("chunk_bytes", [8 + 48, 7 * (8 + 48), 1 << 20])
def test_tables_of_three_ranks_come_back_whole(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ring2/models/test_torchrec_checkpoint.py lets torchrec write such a checkpoint."""
    tables = sharded_checkpoint(tmp_path / "dump")
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", chunk_bytes)
    got = read(tmp_path / "dump", TORCHREC_TABLES)
    assert got == {name: content(np.arange(len(rows)), rows) for name, rows in tables.items()}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_whose_file_is_missing_or_cut_short_is_named(sharded: Path, rank: int) -> None:
    file = sharded / f"__{rank}_0.distcp"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelFileError, match=rf"__{rank}_0.distcp: got \d+ bytes, expected at least"):
        read(sharded, TORCHREC_TABLES)
    file.unlink()
    with pytest.raises(ModelFileError, match=f"got no __{rank}_0.distcp, which .metadata names"):
        read(sharded, "model.ebc.embedding_bags.rows.weight")
    if rank != 1:  # only this rank has it
        assert len(read(sharded, "model.ebc.embedding_bags.whole.weight")["model_ebc_embedding_bags_whole_weight"]) == 31


def test_a_checkpoint_without_metadata_is_incomplete(sharded: Path) -> None:
    (sharded / ".metadata").unlink()
    with pytest.raises(ModelFileError, match=r"got no \.metadata, which is written last"):
        list_arrays(sharded)


def test_damaged_metadata_gives_rows_or_one_kind_of_error(sharded: Path) -> None:
    whole = (sharded / ".metadata").read_bytes()
    random, refused = np.random.default_rng(5), 0
    for _ in range(60):
        changed = bytearray(whole)
        changed[int(random.integers(len(whole)))] = int(random.integers(256))
        (sharded / ".metadata").write_bytes(changed)
        try:
            read(sharded, TORCHREC_TABLES)
        except (ModelFileError, InvalidDtypeError):
            refused += 1
    assert refused


ROWS_TABLE = TORCHREC_TABLES.replace("*", "rows")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table, place: setattr(table.chunks[0], "offsets", (-1, 0)), "expected offsets from 0 on"),
        (lambda table, place: setattr(place, "relative_path", "../__0_0.distcp"), "expected a file beside .metadata"),
        (lambda table, place: setattr(table.chunks[0], "sizes", (17, 24)), "not have each element of the rows 0 to 16 once"),
        (lambda table, place: setattr(table.properties, "dtype", torch.float64), "as a shard of .*expected a tensor"),
        (lambda table, place: setattr(place, "offset", place.offset + 1), "cannot be read"),
    ],
    ids=["negative", "elsewhere", "shape", "dtype", "shifted"],
)
def test_a_description_that_does_not_fit_its_shards_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    sharded_checkpoint(
        tmp_path / "dump",
        lambda all_of_it: change(
            all_of_it.state_dict_metadata[ROWS_TABLE], next(v for k, v in all_of_it.storage_data.items() if k.fqn == ROWS_TABLE)
        ),
    )
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path / "dump", ROWS_TABLE)


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("place", ["metadata", "torch", "shard"])
def test_pickled_code_in_a_checkpoint_never_runs(place: str, tmp_path: Path) -> None:
    mark, source = tmp_path / "mark", tmp_path / "dump"
    save_dcp(source, {"emb": torch.zeros(4, 2)})
    if place == "shard":
        shard = source / "__0_0.distcp"
        size = shard.stat().st_size
        torch.save({"payload": _Payload(mark)}, tmp_path / "bad.pt")
        shard.write_bytes((tmp_path / "bad.pt").read_bytes()[:size].ljust(size))
    else:
        code = pickle.dumps({"state": _Payload(mark)}) if place == "metadata" else b"ctorch\nload\n(S'x'\ntR."
        (source / ".metadata").write_bytes(code)
    with pytest.raises(ModelFileError, match={"metadata": "it names posix.mkdir"}.get(place, "cannot be read")):
        read(source)
    assert not mark.exists()


def save_dcp(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(state, checkpoint_id=path)
    return path


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_checkpoints_of_every_float(kind: torch.dtype, tmp_path: Path) -> None:
    weights = torch.randn(9, 5).to(kind)
    strided = torch.randn(5, 9).to(kind).t()
    save_dcp(tmp_path, {"model": {"a": weights, "b": strided, "ids": torch.arange(9, dtype=torch.int32) * 3}, "note": "x"})
    want = {name: content(np.arange(9), one.float().numpy().copy()) for name, one in (("a", weights), ("b", strided))}
    for name in "ab":
        assert read(tmp_path, f"model.{name}") == {f"model_{name}": want[name]}
    keyed = read(tmp_path, "model.a", keys="model.ids")
    assert keyed == {"model_a": content(np.arange(9) * 3, weights.float().numpy())}
