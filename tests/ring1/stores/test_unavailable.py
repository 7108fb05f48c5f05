import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.stores.base import Database
from hps.stores.unavailable import UnavailableDatabase
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
def unavailable() -> Database:
    return UnavailableDatabase("redis_cluster", "float32", "connection refused")


@pytest.mark.parametrize("call", CALLS)
def test_each_call_about_rows_says_that_it_is_unavailable_and_why(unavailable: Database, call: str) -> None:
    with pytest.raises(DatabaseError, match=r"^redis_cluster: .* unavailable \(connection refused\); retrying"):
        getattr(unavailable, call)(*CALLS[call])


def test_no_abstract_call_is_left_out() -> None:
    assert Database.__abstractmethods__ - {"from_config", "close"} <= CALLS.keys()


def test_it_names_tables_as_the_database_would_that_it_stands_for(unavailable: Database) -> None:
    table = TableSpec("m", "t", 4, 0.0, 100, row_dtype="int8")
    assert unavailable.stored(table).row_dtype == "float32"
    assert (unavailable.kind, UnavailableDatabase("redis", None, "").stored(table)) == ("redis_cluster", table)
    unavailable.close()
    unavailable.release_table("t")
