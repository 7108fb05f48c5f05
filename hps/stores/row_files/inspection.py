"""Inspects the directory of a database of row files for damage and readable rows, without changing it."""

from contextlib import closing
from pathlib import Path

from hps.errors import DatabaseError
from hps.ground.shares import share_in
from hps.stores.base import LOAD_ADVICE, DatabaseReport, TableCheck
from hps.stores.rocks_db import inspection as changes_inspection
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.table import RECORD_SUFFIX, ROWS_SUFFIX, TableRecord, file_name, tag_of

FILES = "tables"
CHANGES = "changes"


def is_directory_of_row_files(path: Path) -> bool:
    """Return whether a directory is that of a database of row files."""
    return (path / FILES).is_dir()


def inspect(path: Path) -> DatabaseReport:
    """Inspect a database that no process writes to: all pages of all files, and the changes.

    If the changes are damaged, rows of a file that they replace or delete are counted, too.
    """
    if not is_directory_of_row_files(path):
        raise DatabaseError(f"inspecting {path}: got no directory with `{FILES}`, expected the path of a database of row files")
    report = changes_inspection.inspect(path / CHANGES)
    changed = {table.tag: table for table in report.tables}
    tables, damages, cures = [], list(report.damages), list(report.cures)
    for record_path in sorted((path / FILES).glob(f"*{RECORD_SUFFIX}")):
        tag = tag_of(record_path)
        rows, width, damage = _inspect_table(path / FILES, tag)
        if damage:
            damages.append(damage)
            cures.append(f"table {tag}: restore a backup of the directory. {LOAD_ADVICE}")
        beside = changed.get(tag)
        if beside and rows and not report.damages:
            rows -= _changed_rows(path, tag, width)
        tables.append(TableCheck(tag, width, rows + (beside.rows if beside else 0), damage))
    return DatabaseReport(tables, damages, cures)


def _changed_rows(path: Path, tag: str, width: int) -> int:
    """Count the rows of a table's file that changes replace or delete."""
    file = RowFile(path / FILES / (file_name(tag) + ROWS_SUFFIX))
    with closing(RocksDatabase(path / CHANGES, read_only=True, beside_files=True)) as changes:
        changes.open_table(tag, width)
        return sum(int(file.contains(keys).sum()) for keys in changes.changed_keys(tag))


def _inspect_table(files: Path, tag: str) -> tuple[int, int, str]:
    """Return the readable rows of a table's file, the width of its rows, and its damage."""
    path = files / (file_name(tag) + ROWS_SUFFIX)
    width = 0
    try:
        record = TableRecord.read(files / (file_name(tag) + RECORD_SUFFIX))
        width, load = (record.width, record.load) if record else (0, None)
        if not path.exists():
            missing = load and load.promises_rows
            return 0, width, f"table {tag}: {path} is missing" if missing else ""
        file = RowFile(path, share=share_in(load.fingerprint) if load else None)
        if record is None or (file.head.tag or tag, file.head.width) != (tag, record.width):
            return 0, width, f"table {tag}: {path} holds rows of {file.head.width} words of table {file.head.tag}"
        file.verify()
        if load and load.complete and not file.has_share:
            return 0, width, f"table {tag}: {path} has share {file.head.share}, expected {file.share}"
        return file.rows, width, ""
    except DatabaseError as error:
        return 0, width, f"table {tag}: {error}"
