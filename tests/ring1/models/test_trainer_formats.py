"""What trainers write, as sources of `hps import`: which tables and rows they give, and which files they refuse.

Distributed checkpoints of one rank are written here by torch. The other files are written by the layouts in the sources of
torch, dynamicemb, TorchEasyRec, SOK and HugeCTR, of which the latter need a GPU (see `tests/tables/trainer_dumps.py`).
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
from hps.models.formats.base import ArrayInfo, ArraySource
from hps.models.importing.checkpoint import (
    Checkpoint,
    find_table,
    find_tables,
    is_checkpoint,
    list_arrays,
    tables_pattern,
)
from hps.testing.sources import ArraySourceContract, Save
from tests.tables.trainer_dumps import (
    TORCHREC_TABLES,
    save_delta,
    save_dynamicemb,
    save_hugectr,
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


def with_no_keys(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a step without evicted keys."""
    return {name: (*rows, NONE) for name, rows in tables.items()}


EXPECTED = {name: content(*rows) for name, rows in TABLES.items()}


SAVERS: dict[str, Callable[..., Path]] = {
    "dynamicemb": save_dynamicemb,
    "sok": lambda path, tables, world=0: save_sok(path, tables),
    "torcheasyrec": lambda path, tables, world=3: save_torcheasyrec(path, {}, tables, world),
    "torcheasyrec_delta": lambda path, tables, world=3: save_delta(path, 100, with_no_keys(tables), world),
}
every_trainer = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


class TestTrainersFormats(ArraySourceContract):
    """One rank, whose rows stay in their order."""

    keys, vectors = "item.keys", "item"

    @pytest.fixture(params=SAVERS)
    def save(self, request: pytest.FixtureRequest) -> Save:
        return lambda path, keys, vectors: SAVERS[request.param](path / request.param, {"item": (keys, vectors)}, world=1)

    def open(self, path: Path) -> ArraySource:
        return Checkpoint(path).arrays


class TestHugectr(ArraySourceContract):
    keys, vectors = "table0.keys", "table0"

    @pytest.fixture
    def save(self) -> Save:
        return lambda path, keys, vectors: save_hugectr(path / "dump", [(keys, vectors)])

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
    assert list(read(source, "user").values()) == [EXPECTED["user"]]
    with pytest.raises(InvalidInputError, match=r"'item', which has the keys 'item\.keys'"):
        find_table(source, vectors="item", first_key=0)
    with pytest.raises(ModelFileError, match=r"got vectors item \(8, 3\) float32, expected 4 elements"):
        find_table(source, vectors="item", dim=4)
    alone = find_table(save(tmp_path / "alone", {"item": ITEMS}), dim=3).selection  # it needs no name
    assert (alone.keys, alone.vectors) == (ArrayInfo("item.keys", (8,), "int64"), ArrayInfo("item", (8, 3), "float32"))


def removed(pattern: str) -> Callable[[Path], object]:
    return lambda path: [file.unlink() for file in list(path.glob(pattern))]


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def with_header(at: int, value: int) -> Callable[[Path], object]:
    return changed("item-key", lambda whole: whole[:at] + bytes([value]) + whole[at + 1 :])


def with_values_of_two_ranks(path: Path) -> None:
    removed("item_emb_values*")(path)
    for file in save_dynamicemb(path / "old", TABLES, 2).glob("item_emb_values*"):
        shutil.copy(file, path)


MISSING, HEADER = "rank 1 of 3 missing, expected ranks 0 to 2", r"item-key: .*expected kind 0 and a dtype of keys"


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        *(("dynamicemb", removed("*rank_1.world*"), MISSING), ("torcheasyrec", removed("*s-01-of*"), MISSING)),
        ("torcheasyrec_delta", removed("*rank_1_of*"), MISSING),
        ("torcheasyrec", removed("*dynamic*-02-of-03.npz"), "no sparse_dynamic_embedding of rank 2, which has rows of item"),
        ("dynamicemb", lambda path: save_dynamicemb(path, TABLES, 2), "by 2 and by 3 ranks"),
        ("torcheasyrec", lambda path: save_torcheasyrec(path, {}, TABLES, 2), "by 2 and by 3 ranks"),
        ("dynamicemb", removed("item_emb_values*"), "no item_emb_values files"),
        ("dynamicemb", with_values_of_two_ranks, "keys of item by 3 ranks and values by 2"),
        (
            *("dynamicemb", changed("item_emb_values.rank_2.world_size_3", lambda whole: whole * 2)),
            "got 6 elements a vector of item, expected 3 as in item_emb_",
        ),
        *(
            (
                *("dynamicemb", changed("user_opt_args.json", lambda _, value=value: b'{"dtype": "%s"}' % value.encode())),
                f"user_opt_args.json: it says dtype '{value}', expected a dump of float32",
            )
            for value in ("torch.bfloat16", "float16")
        ),
        *(("sok", with_header(at, value), HEADER) for at, value in ((259, 1), (295, 5), (295, 9))),
        ("sok", removed("item-key"), "got item-weight alone"),
        (
            *("torcheasyrec", changed("sparse_embeddings-01-of-03.json", lambda whole: whole.replace(b"[3, 3]", b"[3, 4]"))),
            r"got item.values \(3, 3\) float32, expected shape \(3, 4\)",
        ),
    ],
)
def test_a_dump_that_does_not_fit_itself_is_refused(kind: str, damage: Any, message: str, tmp_path: Path) -> None:
    source = SAVERS[kind](tmp_path / "dump", TABLES, world=3)
    damage(source)
    with pytest.raises(ModelFileError, match=message):
        read(source)


def test_rows_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    large = np.array([1, 2**63 - 1, 2**63], np.uint64)
    for source, error, message in (
        (
            save_sok(tmp_path / "sok", {"item": (large, ITEMS[1][:3])}),
            *(ModelFileError, rf"row 2 of 'item.keys' has key {2**63}, expected keys below"),
        ),
        (
            save_torcheasyrec(tmp_path / "bytes", {}, {"item": (KEYS, np.zeros((8, 7), np.uint8))}),
            *(InvalidDtypeError, r"item \(8, 7\) uint8"),
        ),
        (
            save_torcheasyrec(tmp_path / "not sharded", {"cat": np.tile(ITEMS[1], (3, 1))}, {}),
            *(ModelFileError, "the same rows of cat from every rank"),
        ),
        (
            save_delta(tmp_path / "delta", 100, {"item": (*ITEMS, NONE)}, says=90),
            *(ModelFileError, "column 'global_step' is not 100, the step in the name"),
        ),
    ):
        with pytest.raises(error, match=message):
            read(source)


ROWS_TABLE, WHOLE_TABLE = (TORCHREC_TABLES.replace("*", name) for name in ("rows", "whole"))


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


@pytest.mark.parametrize("kind", sorted(SAVERS.keys() - {"sok"}))
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


@pytest.mark.parametrize("kind", ["int32", "uint32", "uint64"])
def test_sok_keys_of_every_dtype(kind: str, tmp_path: Path) -> None:
    keys = np.array([3, 2**31 - 1, 0], kind)
    vectors = np.arange(6).reshape(3, 2)
    save_sok(tmp_path, {"a": (keys, vectors.astype(np.float16)), "b": (keys, vectors.astype(np.float64))})
    assert read(tmp_path) == dict.fromkeys("ab", content(keys, vectors.astype(np.float32)))


@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_embedding_collections_of_hugectr(kind: Any, tmp_path: Path) -> None:
    large = np.array([3, np.iinfo(kind).max, 0, 7, 8], kind)
    tables = [(large, USERS[1]), (np.arange(8).astype(kind), ITEMS[1])]
    dump = save_hugectr(tmp_path, tables)
    for source in (dump, dump / "embedding_collection_0"):
        assert read(source) == {f"table{nth}": content(*rows) for nth, rows in enumerate(tables)}
        assert (is_checkpoint(str(source)), tables_pattern(str(source))) == (True, "table*")
    assert read(dump, file_format="hugectr").keys() == {"table0", "table1"}


def of_hugectr(name: str, at: int, value: bytes) -> Callable[[Path], object]:
    return changed(f"embedding_collection_0/{name}", lambda whole: whole[:at] + value + whole[at + len(value) :])


SEVERAL = "HugeCTR puts the weights of the second process at a wrong place"
TWO = [(KEYS[:5], USERS[1]), (KEYS, ITEMS[1])]


@pytest.mark.parametrize(
    ("options", "damage", "message"),
    [
        (
            {"split": 1},
            None,
            f"weight0: got 96 bytes behind its head, expected 40 for 5 rows of width 2 in meta_data; {SEVERAL}",
        ),
        ({"split": 4}, None, SEVERAL),
        (
            {"ids": [1, 2]},
            None,
            r"got tables 1, 2, expected 0 to 1: of chosen tables HugeCTR names these, but writes",
        ),
        ({"half": 1}, None, "it says float16, as of a training with use_mixed_precision"),
        ({"half": 2}, None, "got kinds 1 and 2"),
        ({}, of_hugectr("key1", 4, b"\0"), "key1: .*got kind 1 and table 0 in its head, expected kind 1 and table 1"),
        ({}, of_hugectr("weight1", 0, b"\1"), "weight1: .*got kind 1 and table 1 in its head, expected kind 2 and table 1"),
        ({}, of_hugectr("meta_data", 0, b"\3"), "got 52 bytes for 3 tables, expected 68"),
        ({}, of_hugectr("meta_data", 28, b"\4"), "key0: got 40 bytes behind its head, expected 32 for 4 rows of width 2"),
        ({}, of_hugectr("meta_data", 44, b"\1"), "weight0: got 40 bytes behind its head, expected 20"),
        ({}, changed("embedding_collection_0/key1", lambda whole: whole[:-8]), "key1: got 56 bytes .*; a file is cut short"),
        ({}, removed("*/weight1"), "got no weight1 for 2 tables in meta_data, expected key0 to key1 and weight0 to weight1"),
        ({}, removed("*/meta_data"), "got no meta_data beside the files of keys and weights"),
        ({}, lambda path: (path / "embedding_collection_0/key2").touch(), "got a file key2 for 2 tables in meta_data"),
        (
            {},
            lambda path: (path / "embedding_collection_1").mkdir(),
            "got embedding_collection_0, embedding_collection_1, expected one; import each by itself",
        ),
    ],
)
def test_a_dump_of_hugectr_that_holds_other_rows_than_it_says_is_refused(
    options: dict[str, Any], damage: Any, message: str, tmp_path: Path
) -> None:
    source = save_hugectr(tmp_path / "dump", TWO, **options)
    if damage is not None:
        damage(source)
    with pytest.raises(ModelFileError, match=message):
        read(source)


def test_static_tables_of_torcheasyrec_get_row_numbers_over_all_ranks(tmp_path: Path) -> None:
    vectors = np.arange(20, dtype=np.float32).reshape(10, 2)
    save_torcheasyrec(tmp_path, {"cat": vectors}, {"item": ITEMS})
    assert read(tmp_path) == {"cat": content(np.arange(10), vectors), "item": EXPECTED["item"]}


def test_evicted_keys_are_no_rows(tmp_path: Path) -> None:
    source = save_delta(tmp_path, 7, {"item": (*ITEMS, np.array([70, 71])), "gone": (NONE, np.empty((0, 2)), KEYS[:2])})
    tables = find_tables(source, "*", delta=True)
    assert read(source, "item") == {"item": EXPECTED["item"]}
    assert {key for keys in tables["item"].deleted() for key in keys.tolist()} == {70, 71}
    assert (tables["gone"].selection.rows, tables["gone"].selection.dim) == (0, 2)
    assert {key for keys in tables["gone"].deleted() for key in keys.tolist()} == set(KEYS[:2].tolist())
    assert list(find_tables(save_dynamicemb(tmp_path / "d", TABLES), "item")["item"].deleted()) == []


def test_one_rank_writes_one_file(tmp_path: Path) -> None:
    file = save_delta(tmp_path, 9, with_no_keys(TABLES), world=1)
    assert read(file) == EXPECTED
    assert read(tmp_path) == EXPECTED
    save_delta(tmp_path, 11, {"item": (*ITEMS, NONE)}, world=1)
    with pytest.raises(ModelFileError, match="got steps 9, 11, expected the files of one; import several as a version"):
        read(tmp_path)


def test_other_parquet_files_with_such_names_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"keys": KEYS, "vectors": list(ITEMS[1])}), tmp_path / "item_step_1.parquet")
    with pytest.raises(ModelFileError, match=r"got no column embedding, .*say --format parquet"):
        find_table(tmp_path / "item_step_1.parquet")
    assert find_table(tmp_path / "item_step_1.parquet", file_format="parquet").selection.rows == 8


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
        read(sharded, ROWS_TABLE)
    if rank != 1:  # only this rank has it
        assert len(read(sharded, WHOLE_TABLE)[WHOLE_TABLE.replace(".", "_")]) == 31
    (sharded / ".metadata").unlink()
    with pytest.raises(ModelFileError, match=r"got no \.metadata, which is written last"):
        list_arrays(sharded)


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
    def change_all(metadata: Any) -> None:
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == ROWS_TABLE)
        change(metadata.state_dict_metadata[ROWS_TABLE], place)

    sharded_checkpoint(tmp_path / "dump", change_all)
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
