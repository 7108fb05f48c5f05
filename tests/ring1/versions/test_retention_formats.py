"""A change of row format is refused where online writes are in tables of another format."""

from dataclasses import replace
from typing import Any

import pytest

import hps
from hps.stores.base import Database
from hps.types import TableSpec
from hps.versions.retention import refuse_format_change, refuse_format_in_service
from tests.ring1.versions.test_retention import FILES, Disk, SharedMemory, config, tables

INT8, HALF = tables(row_dtype="int8"), tables(row_dtype="float16")
SECOND = tables(slot="2.0badf00d")
END = "give the files a new version$"


def refuse(*databases: Database) -> None:
    refuse_format_change(config(), tables(), FILES, databases)


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        ([], ""),
        ([(INT8, {"modified": True})], "table 'a' as float32: its online writes are stored as int8 .*table hps_et.m@2~int8.a"),
        ([(INT8, {"modified": False})], ""),
        ([(INT8, {"modified": True, "fingerprints": ("other", "files")})], ""),
        (
            [(INT8, {"modified": True, "fingerprints": ("other", FILES[1])})],
            "table 'b' as float32: its online .* as int8",
        ),
        ([([replace(table, dim=table.dim + 4) for table in INT8], {"modified": True})], ""),  # of another width
        ([(INT8, {}), (HALF, {"modified": True})], "as float32: its online writes are stored as float16"),
        ([(SECOND, {"modified": True})], "as float32 .*table hps_et.m@2.0badf00d.a"),
        ([(INT8, {"modified": True}), (tables(), {})], ""),  # this one is complete
        ([(INT8, {"modified": True}), (tables(), {"rows_done": 4})], "as int8"),
    ],
)
def test_a_load_is_refused_where_a_table_of_the_same_files_has_online_writes_in_another_format(
    held: list[tuple[list[TableSpec], dict[str, Any]]], complaint: str
) -> None:
    disk = Disk()
    for some, settings in held:
        disk.hold(some, **settings)
    before = dict(disk.records)
    if complaint:
        with pytest.raises(hps.ConflictError, match=f"deploying model 'm', version 2, .*{complaint}.*{END}"):
            refuse(disk)
    else:
        refuse(disk)
    assert disk.records == before


def test_databases_that_keep_nothing_or_are_down_have_no_writes() -> None:
    class Down(Shared):
        def tags(self) -> list[str]:
            raise hps.DatabaseError("down")

    refuse()
    refuse(SharedMemory())
    refuse(Down(), Disk())


@pytest.mark.parametrize(("old", "new", "refused"), [("int8", "float32", True), ("int8", "int8", False)])
def test_a_version_in_service_keeps_its_format(old: str, new: str, refused: bool) -> None:
    there, wanted = config(row_dtype=["float32", old]), config(row_dtype=["float32", new])
    if refused:
        with pytest.raises(hps.ConflictError, match=f"table 'b' as float32: version 2 serves it as int8.*{END}"):
            refuse_format_in_service(there, wanted)
    else:
        refuse_format_in_service(there, wanted)


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
        (True, {}, "another replica serves it as int8 .shared_memory, table hps_et.m@2~int8.a."),
        (False, {"modified": True}, "its online writes are stored as int8 .shared_memory, table hps_et.m@2~int8.a."),
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
            refuse(shared)
    else:
        refuse(shared)
    refuse_format_change(config(row_dtype="int8"), INT8, FILES, [shared])  # its own format is no other


@pytest.mark.parametrize(("tag", "warned"), [(INT8[0].tag, True), (tables()[0].tag, False), ("hps_et.m@3~int8.a", False)])
def test_replicas_with_other_formats_are_warned_of(tag: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    shared = Shared()
    shared.open_table(tag, 4)
    shared.others = {tag}
    refuse(shared, Disk())
    assert ("another replica serves table 'a' as int8" in caplog.text) is warned
