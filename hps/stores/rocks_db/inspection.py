"""Inspects the directory of a database for damage and readable rows, without changing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hps.errors import DatabaseCorruptError
from hps.stores.base import LOAD_ADVICE, DatabaseReport, TableCheck
from hps.stores.rocks_db import directory
from hps.stores.rocks_db.engine import DEFAULT, Engine, after
from hps.stores.rocks_db.table import width_of
from hps.stores.rocks_db.write_ahead_log import RESTORE, SEAL, check_logs, logs_in, record_after

_CHUNK_ROWS = 4096


def inspect(path: Path) -> DatabaseReport:
    """Inspect a database that no process writes to."""
    report = DatabaseReport([], [], [])
    try:
        directory.check_directory(path, read_only=True)
        with _opened(path, _check_logs(path, report), torn=False) as engine:
            for tag in sorted(engine.names()):
                report.tables.append(_read_table(engine, tag))
    except DatabaseCorruptError as error:
        report.damages.append(str(error))
        report.cures.append(RESTORE)
        return report
    for table in report.tables:
        if table.damage:
            report.damages.append(f"table {table.tag}: {table.damage}")
            report.cures.append(f"table {table.tag}: {RESTORE}, or only the table. {LOAD_ADVICE}")
    return report


def oldest_needed_log(path: Path) -> int:
    """Read in the MANIFEST which write-ahead log is the oldest with rows that are in no other file."""
    with _opened(path, dict.fromkeys(logs_in(path).values(), 0), torn=True) as engine:
        return engine.figure(engine.family(DEFAULT), "min-log-number-to-keep")


@contextmanager
def _opened(path: Path, ends: dict[str, int], *, torn: bool) -> Iterator[Engine]:
    engine = Engine(path, read_only=True, num_threads=1, block_cache_bytes=0, write_timeout_s=0)
    view = directory.opened_in_view(path, partial(engine.open, exists=True, torn=torn), ends)
    try:
        yield engine
    finally:
        engine.close()
        view.cleanup()


def _check_logs(path: Path, report: DatabaseReport) -> dict[str, int]:
    """Report damaged logs; return the sizes to which they can be read."""
    logs = check_logs(path, partial(oldest_needed_log, path))
    if not logs.damages:
        return logs.ends
    ends, present = dict(logs.ends), set(logs_in(path).values())
    for name, damage in logs.damages.items():
        report.damages.append(f"{path / name}: {damage}")
        if name in present:
            ends[name] = _readable_end(path, name, logs.ends)
            report.cures.append(f"truncate --size={ends[name]} {path / name}")
    report.cures.append(f"rm -f {path / SEAL}")
    return ends


def _readable_end(path: Path, name: str, ends: dict[str, int]) -> int:
    """Find the size of a damaged log before its first damaged record."""
    later = {log: 0 for number, log in logs_in(path).items() if number > int(name[:-4])}
    try:
        with _opened(path, {**ends, **later}, torn=True) as engine:
            return record_after(path / name, engine.last_sequence())
    except DatabaseCorruptError:  # complete records in the wrong order
        return 0


def _read_table(engine: Engine, tag: str) -> TableCheck:
    rows, start, dim, damage = 0, b"", None, ""
    try:
        dim = width_of(engine, tag)
        while keys := engine.read_keys(engine.family(tag), start, _CHUNK_ROWS, f"reading table {tag}"):
            rows, start = rows + len(keys), after(keys[-1])
    except DatabaseCorruptError as error:
        damage = str(error)
    return TableCheck(tag, dim or 0, rows, damage)
