"""The whole hierarchy against a dict, with tiers that fail at random.

Every answer must be the current vector of its key, or the default vector of an absent key, or an error while a tier fails; a
failed modification leaves each of its keys with the old or the new vector. `tests/nightly/engine` has more of them.
"""

import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hps.cache.cpu.cache import NumpyCache
from hps.configuration.models import ModelConfig
from hps.engine.chain import DatabaseChain
from hps.engine.circuit_breaker import CircuitBreaker
from hps.engine.coalescing import FetchCoalescer
from hps.engine.refresh import refresh
from hps.engine.session import CachedSession, SessionSettings
from hps.errors import DatabaseError
from hps.statistics.metrics import Metrics
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.row_files.database import RowFilesDatabase
from hps.tensors.batch import Batch
from hps.testing.waiting import PATIENCE_S
from hps.types import TableSpec
from hps.versions.deployment import Deployment
from tests.fakes.faulty_database import FaultyDatabase
from tests.fakes.memory_database import MemoryDatabase
from tests.servers.running_service import model_of

TABLES = (TableSpec("model", "narrow", 1, -1.0, 64), TableSpec("model", "wide", 5, 0.25, 64))
ALL_KEYS = [-(2**63), -1, 0, 1, 2**32, 2**63 - 1]
KEYS = st.sampled_from(ALL_KEYS)
BATCH = st.lists(KEYS, min_size=1, max_size=12)
TABLE = st.integers(0, 1)
CALLS = st.sets(st.sampled_from(["fetch", "insert", "delete", "drop_table"]))


def vector(dim: int, key: int, version: int) -> tuple[float, ...]:
    return tuple(float(np.float32(hash((key, version, j)) % 2**20)) for j in range(dim))


class Hierarchy(RuleBasedStateMachine):
    """Two sessions (complete and asynchronous) over one chain; `current` holds the vectors each key may have."""

    @initialize(promote=st.booleans(), capacity=st.sampled_from([0, 14, 1000]))
    def open(self, promote, capacity):
        self.directory = tempfile.mkdtemp(prefix="hps-hierarchy-")
        self.volatile, self.persistent = [one and FaultyDatabase(one) for one in self.make(self.directory)]
        self.metrics = Metrics()
        breaker = lambda: CircuitBreaker(failures=10**9)  # noqa: E731
        self.chain = DatabaseChain(self.volatile, self.persistent, metrics=self.metrics, promote=promote, breaker=breaker)
        for table in TABLES:
            self.chain.open_table(table)
        coalescer, self.sessions = FetchCoalescer(self.chain.fetch, self.metrics), []
        for threshold in (1.1, 0.0):
            cache = NumpyCache.create(TABLES, [capacity, capacity], 0)
            settings = SessionSettings(hit_rate_threshold=threshold, workspace_timeout_s=30)
            self.sessions.append(CachedSession(TABLES, cache, self.chain, coalescer, settings, self.metrics))
        config = ModelConfig.model_validate(model_of("model", ["/a", "/b"], {table.table_name: table.dim for table in TABLES}))
        self.deployment = Deployment(config, TABLES, dict(enumerate(self.sessions)), self.chain)
        self.current = [{}, {}]  # per table: key -> set of vectors it may have; None stands for absent
        self.version = 0

    def make(self, directory):
        return MemoryDatabase(), MemoryDatabase()

    def teardown(self):
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            session.close(10)
        self.chain.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def databases(self):
        return [database for database in (self.volatile, self.persistent) if database]

    @property
    def failing(self):
        return any(database.failing or database.failing_halfway for database in self.databases)

    @rule(calls=CALLS, halfway=st.sets(st.sampled_from(["fetch", "insert", "delete"])), which=st.integers(0, 1))
    def fail(self, calls, halfway, which):
        database = self.databases[which % len(self.databases)]
        database.failing, database.failing_halfway = set(calls), set(halfway)

    @precondition(lambda self: self.failing)
    @rule()
    def mend(self):
        for database in self.databases:
            database.failing, database.failing_halfway = set(), set()

    @rule(index=TABLE, keys=st.sets(KEYS, min_size=1))
    def insert(self, index, keys):
        self.version += 1
        new = {key: vector(TABLES[index].dim, key, self.version) for key in sorted(keys)}
        self.change(index, new, self.deployment.insert, np.array(list(new.values()), np.float32))

    @rule(index=TABLE, keys=st.sets(KEYS, min_size=1))
    def delete(self, index, keys):
        self.change(index, dict.fromkeys(sorted(keys)), self.deployment.delete)

    def change(self, index, new, call, *rows):
        try:
            call(index, np.array(list(new), np.int64), *rows)
        except DatabaseError:
            assert self.failing
            for key, row in new.items():
                self.current[index][key] = self.allowed(index, key) | {row}
            self.assert_not_cached(index, new)
        else:
            self.current[index].update({key: {row} for key, row in new.items()})

    def assert_not_cached(self, index, keys):
        """After a failure only the databases can say what a key has. (The other session may fill its cache meanwhile.)"""
        assert not set(keys) & set(self.sessions[0].cache.dump(index).tolist())

    def allowed(self, index, key):
        return self.current[index].get(key, {None})

    def ask(self, which, requests):
        batches = []
        for index, keys in requests.items():
            array = np.array(keys, np.int64)
            out = np.full((array.size, TABLES[index].dim), np.nan, np.float32)
            batches.append(Batch.of(index, array, out, np.zeros(array.size, np.bool_)))
        try:
            self.sessions[which].run(Batch.merged(batches))
        except DatabaseError:
            assert self.failing
            return None
        for batch in batches:
            assert (batch.outs[0][~batch.founds[0]] == TABLES[batch.tables[0]].default_value).all()
        return batches

    @rule(requests=st.dictionaries(TABLE, BATCH, min_size=1))
    def lookup_some(self, requests):
        self.lookup(requests)

    def lookup(self, requests):
        for batch in self.ask(0, requests) or []:
            for key, row, found in zip(batch.keys[0].tolist(), batch.outs[0].tolist(), batch.founds[0].tolist(), strict=True):
                got = tuple(row) if found else None
                assert got in self.allowed(batch.tables[0], key), (TABLES[batch.tables[0]], key, row, found)
                self.current[batch.tables[0]][key] = {got}

    @rule()
    def lookup_everything(self):
        self.lookup({0: ALL_KEYS, 1: ALL_KEYS})

    @rule(requests=st.dictionaries(TABLE, BATCH, min_size=1))
    def lookup_asynchronously(self, requests):
        for batch in self.ask(1, requests) or []:
            for key, row, found in zip(batch.keys[0].tolist(), batch.outs[0].tolist(), batch.founds[0].tolist(), strict=True):
                assert not found or tuple(row) in self.allowed(batch.tables[0], key)

    @rule()
    def drain(self):
        assert all(session.drain(PATIENCE_S) for session in self.sessions)
        assert self.chain.drain(PATIENCE_S)

    @rule(index=TABLE)
    def refresh(self, index):
        try:
            for session in self.sessions:
                refresh(session.cache, index, TABLES[index], self.chain, 0.5)
        except DatabaseError:
            assert self.failing

    @invariant()
    def caches_hold_nothing_that_was_deleted_or_replaced(self):
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            for index in range(len(TABLES)):
                for key in session.cache.dump(index).tolist():
                    assert self.allowed(index, key) != {None}


class EngineHierarchy(Hierarchy):
    """The same with the engines that are shipped."""

    def make(self, directory):
        return HashMapDatabase(), RocksDatabase(directory)


class RowFilesAlone(Hierarchy):
    """Row files without a tier above them, as `hps init` writes it."""

    def make(self, directory):
        return None, RowFilesDatabase(directory)


class PersistentOnly(Hierarchy):
    def make(self, directory):
        return None, MemoryDatabase()


class VolatileOnly(Hierarchy):
    def make(self, directory):
        return MemoryDatabase(), None


@pytest.mark.parametrize(
    ("machine", "examples"),
    [(Hierarchy, 25), (PersistentOnly, 15), (VolatileOnly, 15), (EngineHierarchy, 4), (RowFilesAlone, 4)],
)
def test_hierarchy_agrees_with_a_dict(machine, examples):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()
