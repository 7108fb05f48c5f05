"""Which versions stay, which tables go, and where a version's tables are put."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import hps
from hps.configuration.load import ModelConfig, load_configuration
from hps.models.files import joint_fingerprint
from hps.stores.base import Database, LoadRecord, SharedDatabase
from hps.types import TableSpec
from hps.versions.retention import free_slot, leftovers, stored_as, surplus
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.servers.running_service import document_of, model_of

DIMS = {"a": 4, "b": 8}
FILES = ("files of a", "files of b")
JOINT = joint_fingerprint(FILES)
SECOND, THIRD, FOURTH = (f"2.{JOINT[start : start + 8]}" for start in (0, 8, 16))


def config(version: str = "2", **settings: Any) -> ModelConfig:
    model = model_of("m", ["nowhere"] * len(DIMS), DIMS, version=version, **settings)
    return load_configuration(document_of(model)).models[0]


def tables(version: str = "2", slot: str | None = None, **settings: Any) -> list[TableSpec]:
    found = config(version, **settings).tables
    return [one if slot is None else replace(one, slot=slot) for one in found]


class SharedMemory(MemoryDatabase, SharedDatabase):
    """A database that several processes share.

    Attributes:
        others: tags that another process uses.
        cleared: tags that were asked for, with the fingerprint of the files to be loaded.
    """

    kind = "shared_memory"

    def __init__(self) -> None:
        super().__init__()
        self.others: set[str] = set()
        self.cleared: list[tuple[str, str]] = []

    def claim_load(self, tag: str, fingerprint: str, rows: int, wait_s: float = 0.0, *, replaces: bool = True) -> int | None:
        raise NotImplementedError

    def load_record(self, tag: str) -> LoadRecord | None:
        return None

    def clear_table(self, tag: str, fingerprint: str) -> bool:
        self.cleared.append((tag, fingerprint))
        return tag not in self.others

    def discard_table(self, tag: str) -> bool:
        return tag not in self.others


class Disk(PersistentMemoryDatabase):
    """A persistent database that an earlier process has filled."""

    def hold(self, some: Sequence[TableSpec], fingerprints: Sequence[str] = FILES, at: int = 1, **more: Any) -> None:
        """Have the tables with load records."""
        for table, fingerprint in zip(some, fingerprints, strict=True):
            self.open_table(table.tag, table.width)
            self.records[table.tag] = LoadRecord(fingerprint, **{"rows_done": 5, "rows_total": 5, "loaded_at_us": at} | more)


def chain(*databases: Database) -> Any:
    return SimpleNamespace(databases=list(databases))


# -- versions to drop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "keep_versions", "dropped"),
    [
        ("", 1, ""),
        ("1", 0, "1"),
        ("1", 1, "1"),
        ("1", 2, ""),
        ("12", 0, "12"),
        ("12", 2, "1"),
        ("123", 2, "12"),
        ("123", 3, "1"),
        ("123", 4, ""),
    ],
)
def test_the_oldest_kept_versions_go_before_another_one_is_replaced(kept: str, keep_versions: int, dropped: str) -> None:
    held: Any = list(kept)
    assert list(surplus(held, keep_versions)) == list(dropped)


# -- tables that an earlier process left ---------------------------------------------------------------------------------


def gone(disk: Any, keep_versions: int, serving: str = "2", held: int = 0, live: Sequence[TableSpec] = ()) -> set[str]:
    """The tags of tables that go from a disk."""
    found = leftovers(config(serving, keep_versions=keep_versions), live or tables(serving), held, chain(disk))
    return {tag for tags in found for tag in tags.get(disk, ())}


def tags_of(*some: TableSpec) -> set[str]:
    return {table.tag for table in some}


@pytest.mark.parametrize(
    ("keep_versions", "held", "gone_slots"),
    [
        (0, 0, "123"),
        (1, 0, "12"),
        (1, 1, "123"),
        (2, 0, "1"),
        (2, 1, "12"),
        (2, 2, "123"),
        (3, 0, ""),
        (3, 1, "1"),
        (4, 0, ""),
        (1, 2, "123"),
    ],
)
def test_versions_below_stay_that_this_process_does_not_keep(keep_versions: int, held: int, gone_slots: str) -> None:
    """Of versions 1 to 3 below 4, those that this process keeps count, too."""
    disk = Disk()
    for version in "1234":
        disk.hold(tables(version, version))
    found = leftovers(config("4", keep_versions=keep_versions), tables("4"), held, chain(disk))
    names = [{disk: [table.tag]} for version in gone_slots for table in tables(version, version)]
    assert [one for one in found if one[disk]] == names


def test_the_slots_that_stay_are_the_highest_numbers_and_other_slots_go() -> None:
    disk = Disk()
    slots = ("9", "10", "11", "12", "20", "10.deadbeef", "x")
    for slot in slots:
        disk.hold(tables("12", slot))
    assert gone(disk, 1, "12") == tags_of(*(table for one in slots if one not in ("11", "12") for table in tables("12", one)))


def test_tables_without_a_slot_that_may_be_another_programs_stay() -> None:
    """The first version's tables have no slot."""
    disk = Disk()
    foreign = TableSpec("m", "foreign", 4, 0.0, 10)
    disk.hold([foreign, *tables("1"), replace(foreign, model_name="other")], ["x", *FILES, "y"])
    disk.hold(tables("2"))
    assert (gone(disk, 1), gone(disk, 0)) == (set(), tags_of(*tables("1")))
    live = [*tables("2"), replace(tables("1")[0], table_name="c")]  # while a version without a slot is in use
    assert gone(disk, 0, live=live) == set()


def test_tables_in_use_stay_and_a_table_goes_from_every_database() -> None:
    above, disk = MemoryDatabase(), Disk()
    disk.hold(tables("1"))
    disk.hold(tables("2"))
    in_use = [*tables("2"), tables("1")[0]]
    found = leftovers(config("2", keep_versions=0), in_use, 0, chain(above, disk))
    tag = tables("1")[1].tag
    assert [one for one in found if any(one.values())] == []
    found = leftovers(config("2", keep_versions=0), tables("2"), 0, chain(above, disk))
    assert {above: [tag], disk: [tag]} in found


def test_a_database_that_is_read_only_or_fails_is_left_alone() -> None:
    class Failing(Disk):
        def tags(self) -> list[str]:
            raise hps.DatabaseError("down")

    disk: Any = Disk()
    disk.hold(tables("1"))
    disk.read_only = True
    for one in (disk, Failing()):
        assert leftovers(config("2", keep_versions=0), tables("2"), 0, chain(one)) == []


def test_tables_of_the_serving_version_in_other_formats_go_where_they_were_loaded_by_us() -> None:
    disk = Disk()
    other, foreign = tables(row_dtype="int8"), tables(row_dtype="float16")
    disk.hold(tables())
    disk.hold(other)
    for table in foreign:
        disk.open_table(table.tag, table.width)  # without a load record
    assert tags_of(*other) <= gone(disk, 0)


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        *((f"hps_et.m@2{form}.a", True) for form in ("~int8", ".0badf00d", ".0badf00d~float16")),
        *((f"hps_et.{other}", False) for other in ("m@2.a", "m@2.b", "m@3.a", "m@20.a", "m@2~strange.a", "n@2~int8.a", "m.a")),
        ("strange", False),
    ],
)
def test_the_other_tables_with_the_rows_of_a_table_are_those_of_its_version(tag: str, found: bool) -> None:
    others = stored_as(config(), tables()[0], [tag])
    assert [other.tag for other in others] == ([tag] if found else [])


# -- a slot for a version -------------------------------------------------------------------------------------------------


def slot(*databases: Database, used: Sequence[str] = (), **more: Any) -> str:
    return free_slot(config(), FILES, set(used), chain(*databases), **more)


@pytest.mark.parametrize(
    ("used", "expected"),
    [((), "2"), (("1",), "2"), (("2",), SECOND), (("2", SECOND), THIRD), ((SECOND,), "2"), (("2", SECOND, THIRD), FOURTH)],
)
def test_a_version_gets_the_first_slot_that_no_other_uses(used: Sequence[str], expected: str) -> None:
    for databases in ((), (MemoryDatabase(),), (MemoryDatabase(), Disk())):
        assert slot(*databases, used=used) == slot(*databases, used=used, force=True) == expected
    assert free_slot(config("1"), FILES, set(), chain()) == ""
    taken: list[str] = []
    for _ in range(10):
        taken.append(slot(used=taken))
    assert len(set(taken)) == 10, "there is always another one"
    assert free_slot(config(), ("other", "files"), {"2"}, chain()) not in taken


def test_after_a_restart_the_tables_of_these_very_files_are_found_the_whole_ones_that_were_loaded_last() -> None:
    disk = Disk()
    disk.hold(tables(), ("other", "files"), at=9)
    disk.hold([replace(table, dim=table.dim + 4) for table in tables(slot="2.wide")])
    assert slot(disk) == "2", "loaded over; those of another width are no tables of the version"
    disk.hold(tables(slot=SECOND), at=3)
    assert slot(disk) == SECOND
    disk.hold(tables(slot=THIRD), at=5)
    disk.hold(tables(slot="2.half"), at=8, rows_done=4)
    disk.hold(tables(slot="2.one")[:1], FILES[:1], at=9)
    disk.hold(tables(slot="20"), at=9)
    assert slot(disk) == THIRD, "not what is half loaded, lacks a table or is another version's"
    assert slot(disk, used=[THIRD]) == SECOND
    assert slot(disk, used=[THIRD, SECOND]) == "2.half"
    assert slot(disk, force=True) == "2", "files that are loaded in any case"


def test_tables_of_a_shared_database_that_others_use_with_other_rows_are_left_to_them() -> None:
    shared = SharedMemory()
    shared.others = tags_of(*tables()[1:])
    assert slot(shared) == SECOND
    first = [*zip([table.tag for table in tables()], FILES, strict=True), (tables(slot=SECOND)[0].tag, FILES[0])]
    assert shared.cleared[:3] == first
    assert slot(shared, force=True) == SECOND
    shared.others = set()
    assert slot(shared) == slot(shared, Disk(), force=True) == "2"


KEPT = "keeps its rows .initialize_after_startup false., and "


def test_a_database_that_keeps_its_rows_gives_a_version_those_that_it_has_and_no_others() -> None:
    disk = Disk()
    assert slot(disk, keep=[disk]) == "2", "an empty one, at the start"
    for used in ("1", "2"):
        with pytest.raises(hps.ConflictError, match=f"{KEPT}has no rows of these files that no other version uses"):
            slot(disk, keep=[disk], used=[used])
    disk.hold(tables(), ("other", "files"))
    assert slot(disk, keep=[disk]) == slot(disk, keep=[disk], used=["1"]) == "2", "whatever files they are of"
    disk.hold(tables(slot=SECOND))
    assert slot(disk, keep=[disk], used=["2"]) == SECOND
    with pytest.raises(hps.ConflictError, match=f"version 2: persistent_memory {KEPT}loads no files"):
        slot(disk, keep=[disk], force=True)


def test_a_database_that_keeps_its_rows_in_another_format_serves_no_empty_table() -> None:
    disk = Disk()
    disk.hold(tables(row_dtype="int8"))
    with pytest.raises(hps.ConflictError, match=f"{KEPT}has table 'a' as int8, not float32"):
        slot(disk, keep=[disk])
    disk.hold(tables())
    assert slot(disk, keep=[disk]) == slot(disk) == "2"
