"""Loading a table in one line, as tests want it."""

from collections.abc import Sequence
from typing import Any

from hps.databases.base import Database
from hps.models.table_load import LoadReport, LoadTargets, TableLoad
from hps.progress import Progress
from hps.types import TableSpec


def load_table(
    table: TableSpec,
    source: str,
    databases: Sequence[Database],
    *,
    keep: Sequence[Database] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> LoadReport:
    """Load databases from model files, with any other settings of `LoadTargets`."""
    return TableLoad(table, source, LoadTargets(tuple(databases), tuple(keep), **settings), progress).run()


def nothing_to_do(report: LoadReport) -> bool:
    """Whether every database had all rows already."""
    return not any(load.rows for load in report.loads)
