import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.stores.away import AwayDatabase
from hps.stores.base import Database
from hps.types import TableSpec

KEYS, ROWS, FOUND = np.arange(2), np.zeros((2, 4), np.float32), np.zeros(2, np.bool_)
CALLS = {
    "open_table": ("t", 4),
    "fetch": ("t", KEYS, ROWS, FOUND),
    "insert": ("t", KEYS, ROWS),
    "promote": ("t", KEYS, ROWS),
    "delete": ("t", KEYS),
    "scan": ("t", 10),
    "size": ("t",),
    "stats": ("t",),
    "drop_table": ("t",),
}


@pytest.fixture
def away() -> Database:
    return AwayDatabase("redis_cluster", "float32", "connection refused")


@pytest.mark.parametrize("call", CALLS)
def test_each_call_about_rows_says_that_it_is_away_and_why(away: Database, call: str) -> None:
    with pytest.raises(DatabaseError, match=r"^redis_cluster: .* away \(connection refused\); it is tried again"):
        getattr(away, call)(*CALLS[call])


def test_no_abstract_call_is_left_out() -> None:
    assert Database.__abstractmethods__ - {"from_config", "close"} <= CALLS.keys()


def test_it_names_tables_as_the_database_would_that_it_stands_for(away: Database) -> None:
    table = TableSpec("m", "t", 4, 0.0, 100, row_dtype="int8")
    assert away.stored(table).row_dtype == "float32"
    assert (away.kind, AwayDatabase("redis", None, "").stored(table)) == ("redis_cluster", table)
    away.close()
    away.release_table("t")
