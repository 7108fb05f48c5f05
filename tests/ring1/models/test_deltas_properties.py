"""Any chain of deltas, loaded in any order and from any base, gives bit for bit the table that a full load gives."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hps.stores.base import Database
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.tables.deltas import Change, Rows, Versions, held_of, spec
from tests.tables.table_loads import DIM, cut_into_small_chunks

MOST = 10**6  # rows that are not finite: all may be
EDGES = [0, -1, 2**63 - 1, -(2**63), 2**32]
keys = st.integers(0, 30) | st.sampled_from(EDGES)


def rows(least: int) -> st.SearchStrategy[Rows]:
    """Rows whose vectors are unlike those of all others, NaN and signed zero among them, and whose keys may repeat."""

    def with_vectors(drawn: tuple[list[int], int]) -> Rows:
        chosen, seed = drawn
        bits = np.random.default_rng(seed).integers(0, 2**32, (len(chosen), DIM), dtype=np.uint32)
        return np.array(chosen, np.int64), bits.view(np.float32)

    return st.tuples(st.lists(keys, min_size=least, max_size=200), st.integers(0, 2**32)).map(with_vectors)


changes = st.builds(Change, rows(0), st.lists(keys, max_size=40).map(lambda chosen: np.array(chosen, np.int64)))


@settings(max_examples=int(os.environ.get("HPS_HYPOTHESIS_EXAMPLES", "40")))
@given(st.data(), rows(1), st.lists(changes, min_size=1, max_size=4))
def test_a_chain_of_deltas_equals_a_full_load(data: st.DataObject, base: Rows, chain: list[Change]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="hps-test-"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            cut_into_small_chunks(patch)
            versions = Versions(directory, base)
            numbers = ["1", *map(versions.add, chain)]
            persistent, volatile = PersistentMemoryDatabase(load_bytes=data.draw(st.sampled_from([0, 2000]))), MemoryDatabase()
            databases: list[Database] = data.draw(st.sampled_from([[persistent], [volatile, persistent], [volatile]]))
            loaded = data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True))
            event(f"{len(databases)} databases, {len(loaded)} of {len(numbers)} versions")
            for number in loaded:
                report = versions.load(number, databases, max_nonfinite_rows=MOST)
                for database in databases:
                    assert held_of(database, number) == versions.expected(number)
                if persistent in databases and data.draw(st.booleans()):
                    tag = spec(number).tag
                    persistent.insert(tag, np.arange(3), np.full((3, DIM), 5, np.float32))  # no later version may have these
                    assert persistent.records[tag].fingerprint == report.fingerprint
            fresh = MemoryDatabase()
            rate = data.draw(st.floats(0, 1))
            versions.load(numbers[-1], [fresh], initial_cache_rate=rate, max_nonfinite_rows=MOST)
            assert held_of(fresh, numbers[-1]).items() <= versions.expected(numbers[-1]).items()
    finally:
        shutil.rmtree(directory)
