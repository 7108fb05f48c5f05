"""Which tables' online writes a version in another row format takes over, and which formats stand against each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hps
from hps.stores.base import Database
from hps.types import TableSpec
from hps.versions import format_changes
from hps.versions.format_changes import FormatChanges, find_changes
from tests.ring1.versions.test_retention import FILES, Disk, SharedMemory, config, tables

INT8, HALF = tables(row_dtype="int8"), tables(row_dtype="float16")


def found(*databases: Database, there: Any = None) -> list[tuple[str, str] | None]:
    """What is carried over to float32 tables of version 2: old and new tags."""
    carried = find_changes(config(), tables(), FILES, there, databases).tables
    return [one and (one.old.tag, one.new.tag) for one in carried]


def there(database: Database, some: list[TableSpec]) -> Any:
    """A deployment in service with these tables."""
    return SimpleNamespace(tables=tuple(some), chain=SimpleNamespace(databases=[database]), watchers=[])


def pairs(old: list[TableSpec]) -> list[tuple[str, str]]:
    return [(one.tag, new.tag) for one, new in zip(old, tables(), strict=True)]


NONE = [None, None]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], NONE),
        ([(INT8, {"modified": True})], pairs(INT8)),
        ([(INT8, {"modified": False})], NONE),
        ([(INT8, {"modified": True, "rows_done": 4})], NONE),  # half loaded
        ([(INT8, {"modified": True, "fingerprints": ("other", "files")})], NONE),
        ([(INT8, {"modified": True, "fingerprints": ("other", FILES[1])})], [None, pairs(INT8)[1]]),
        ([([replace(table, dim=table.dim + 4) for table in INT8], {"modified": True})], NONE),  # of another width
        ([(INT8, {"modified": True, "at": 5}), (HALF, {"modified": True, "at": 6})], pairs(HALF)),
        ([(INT8, {"modified": True, "at": 7}), (HALF, {"modified": True, "at": 6})], pairs(INT8)),
        ([(INT8, {"modified": True}), (tables(), {})], NONE),  # it is whole
        ([(INT8, {"modified": True}), (tables(), {"rows_done": 4})], pairs(INT8)),
    ],
)
def test_a_start_takes_over_the_writes_of_the_whole_table_of_the_same_files_that_was_loaded_last(
    held: list[tuple[list[TableSpec], dict[str, Any]]], expected: list[tuple[str, str] | None]
) -> None:
    disk = Disk()
    for some, settings in held:
        disk.hold(some, **settings)
    assert found(disk) == expected


def test_databases_that_keep_nothing_or_are_down_have_no_writes_to_take_over() -> None:
    class Down(Shared):
        def tags(self) -> list[str]:
            raise hps.DatabaseError("down")

    assert found() == found(SharedMemory()) == []
    assert found(Down(), Disk()) == NONE
    changes = FormatChanges()
    with changes.noted():
        assert changes.sources == []


def test_a_version_in_service_hands_over_what_it_has_and_what_is_written_meanwhile() -> None:
    disk = Disk()
    serving = there(disk, INT8)
    changes = find_changes(config(), tables(), FILES, serving, [disk])
    assert [(one.old.tag, one.new.tag) for one in changes.tables if one] == pairs(INT8)
    assert changes.sources == INT8
    for turn in range(1, 3):
        with changes.noted():
            (note,) = serving.watchers
            note(1, np.array([5, 6]))
        assert serving.watchers == []
        assert [one.noted for one in changes.tables if one] == [0, 2 * turn]


@pytest.mark.parametrize(("noted", "passes"), [([4096], 0), ([4097, 4096], 1), ([9000, 8000, 7000, 100], 3), ([5000] * 20, 8)])
def test_it_catches_up_until_few_writes_are_left_and_once_while_they_wait(noted: list[int], passes: int) -> None:
    steps: list[str] = []
    left = [*noted, 0]

    class Table:
        noted = property(lambda self: left[0])

        def catch_up(self, deployed: Any, index: int) -> None:
            steps.append("catch up")
            left.pop(0)

        def take_over(self, database: Any) -> None:
            steps.append("take over")

    @contextmanager
    def settled(some: object) -> Iterator[None]:
        steps.append("writes wait")
        yield
        steps.append("writes go on")

    serving = there(Disk(), INT8)
    serving.chain.settled = settled
    changes: Any = FormatChanges([Table()], serving)  # type: ignore[list-item]
    with changes.taken_over(SimpleNamespace(chain=SimpleNamespace(databases=[Disk()]))):
        steps.append("serve")
    assert steps == [*["catch up"] * passes, "writes wait", "catch up", "take over", "serve", "writes go on"]


# -- a shared database with nothing below -----------------------------------------------------------------------------------


class Shared(SharedMemory):
    """A shared database with load records.

    Attributes:
        records: by tag.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Any] = {}

    hold = Disk.hold

    def load_record(self, tag: str) -> Any:
        return self.records.get(tag)

    def used_by_others(self, tag: str) -> bool:
        return tag in self.others


@pytest.mark.parametrize(
    ("others", "settings", "complaint"),
    [
        (True, {}, "another replica serves it as int8 from the same shared_memory .table hps_et.m@2~int8.a."),
        (False, {"modified": True}, "has it as int8 with online writes .table hps_et.m@2~int8.a., and no database is below"),
        (False, {"modified": True, "fingerprints": ("other", "files")}, ""),
        (False, {}, ""),
    ],
)
def test_two_formats_with_nothing_below_are_refused(others: bool, settings: dict[str, Any], complaint: str) -> None:
    shared = Shared()
    shared.hold(INT8, **settings)
    shared.others = {INT8[0].tag} if others else set()
    if complaint:
        with pytest.raises(hps.ConflictError, match=complaint):
            find_changes(config(), tables(), FILES, None, [shared])
    else:
        assert find_changes(config(), tables(), FILES, None, [shared]).tables == ()
    assert find_changes(config(row_dtype="int8"), INT8, FILES, None, [shared]).tables == (), "its own format is no other"


def test_a_table_whose_writes_would_not_reach_the_next_one_is_not_left_in_service() -> None:
    shared = Shared()
    shared.row_dtype = "float32"
    serving = there(shared, [replace(table, slot=table.slot) for table in INT8])
    new = [replace(table, slot="2.again") for table in tables()]
    for modified in (False, True):
        shared.hold([shared.stored(table) for table in serving.tables], modified=modified)
        if not modified:
            assert find_changes(config(), new, FILES, serving, [shared]).tables == ()
    with pytest.raises(hps.ConflictError, match="shared_memory alone has its online writes, in a table that serves as int8"):
        find_changes(config(), new, FILES, serving, [shared])


@pytest.mark.parametrize(("tag", "warned"), [(INT8[0].tag, True), (tables()[0].tag, False), ("hps_et.m@3~int8.a", False)])
def test_replicas_with_other_formats_are_warned_of(tag: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    shared = Shared()
    shared.open_table(tag, 4)
    shared.others = {tag}
    format_changes.find_changes(config(), tables(), FILES, None, [shared, Disk()])
    assert ("another replica serves table 'a' as int8" in caplog.text) is warned
