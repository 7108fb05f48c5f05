"""A cache on the CPU that reads tables of host memory in place, as the CUDA cache does, by what they show to devices.

Host arrays stand for tensors on a device, and a `FakeGraph` for a CUDA graph.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from hps.cache.base import (
    HostTableReads,
    LookupGraph,
    MissedKeys,
    StreamCapture,
    StreamOrdered,
    StreamOrderedCounts,
    StreamOrderedLookup,
)
from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.errors import DatabaseError, DeviceError, InvalidInputError, NotReadyError
from hps.ground.memory.host_tables import HostTable
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.batch import Batch
from hps.types import BoolArray, FloatArray, KeyArray
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.host_layout_reader import read_in_place, read_pair


class FailingHashMap(HashMapDatabase):
    """A hash map whose insertions fail when they are done, while `fails` is set."""

    fails = False

    def insert(self, tag, keys, vectors):
        super().insert(tag, keys, vectors)
        if self.fails:
            raise DatabaseError("an insertion was told to fail")


class FakeGraph(LookupGraph, StreamCapture):
    """What was captured, and is done again by `launch`. It is gone when it is closed."""

    def __init__(self):
        self.key, self.work, self.open, self.watched = object(), [], True, False

    def watch(self):
        self.watched = True
        return lambda: not self.open

    def launch(self):
        if not self.open:
            raise RuntimeError("a graph that is gone is launched")
        for work in self.work:
            work()

    def close(self):
        self.open = False


class LinkedCache(NumpyCache, StreamOrdered, HostTableReads):
    """Reads attached tables in place. What is not found there at the first look is taken to be absent: nothing grows in tests.

    Attributes:
        pinner: of all tables.
        before_admission: called between the reading of rows and their admission; a test's chance to modify them there.
        unreadable: keys that a writer keeps busy.
    """

    device = "cuda"
    pinner = PopulatingPinner()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.hosts: dict[int, tuple[HostTable, bool]] = {}
        self.epochs = [0] * len(self.tables)
        self.counts = [[0, 0, 0, 0] for _ in self.tables]
        self.before_admission: Callable[[], None] = lambda: None
        self.unreadable: set[int] = set()
        self.capturing: FakeGraph | None = None
        self.admitting = threading.Lock()

    def attach(self, table, host, progress=None, *, authoritative, index=False):
        try:
            host.pin(self.pinner, progress)
        except (DeviceError, InvalidInputError) as error:
            return str(error)
        self.hosts[table] = (host, authoritative)
        return None

    def detach(self, table):
        self.hosts.pop(table, None)

    @contextmanager
    def changing(self, table: int) -> Iterator[None]:
        self._next_epoch(table)
        try:
            yield
        finally:
            self._next_epoch(table)

    def stream_ordered_counts(self, table):
        return StreamOrderedCounts(*self.counts[table])

    def capture_of(self, batch):
        return self.capturing

    def record(self, batch, enqueue):
        enqueue(batch)
        with self.captured() as graph:
            enqueue(batch)
        return graph

    @contextmanager
    def captured(self) -> Iterator[FakeGraph]:
        """Capture what is enqueued."""
        self.capturing = FakeGraph()
        try:
            yield self.capturing
        finally:
            self.capturing = None

    def create_lookup(self):
        return LinkedLookup(self)

    def _next_epoch(self, table):
        with self.admitting:
            self.epochs[table] += 1

    def read(self, table: int, keys: KeyArray) -> tuple[FloatArray, BoolArray, BoolArray]:
        """What an attached table has for keys, and which of them it has, and which could be read. They are admitted."""
        vectors = np.empty((keys.size, self.tables[table].dim), np.float32)
        found, readable = np.zeros(keys.size, np.bool_), np.zeros(keys.size, np.bool_)
        epoch = self.epochs[table]
        host = self.hosts[table][0] if table in self.hosts else None
        if host is not None and (layout := host.layout()) is not None:
            readable = ~np.isin(keys, list(self.unreadable))
            vectors, found = (read_pair if layout.number else read_in_place)(layout, keys)
            found &= readable
            self.before_admission()
            with self.admitting:
                if epoch == self.epochs[table] and epoch % 2 == 0 and not self.static:
                    self.insert(table, keys[found], vectors[found])
        return vectors, found, readable


class LinkedLookup(StreamOrderedLookup):
    """A lookup on a `LinkedCache`."""

    def __init__(self, cache: LinkedCache) -> None:
        super().__init__()
        self._cache, self._inner = cache, NumpyLookup(cache)
        self._room, self._graph = {}, None
        self._left: list[LeftKeys] = []

    def query(self, batch: Batch) -> int:
        self._refuse_a_graphs()
        return self._query(batch)

    def _query(self, batch):
        self._inner.query(batch)
        missed = {one.table: np.sort(one.keys) for one in self._inner.unique()}
        settled = self._inner.absent or [0] * len(batch.tables)
        self._inner.finish()
        self.counts, self.linked, self.absent, self._left = [], [], [], []
        for place, (table, absent) in enumerate(zip(batch.tables, settled, strict=True)):
            left = linked = 0
            if (keys := missed.get(table)) is not None:
                vectors, found, readable = self._cache.read(table, keys)
                done = found | (readable & self._cache.hosts.get(table, (None, False))[1])
                asked = batch.keys[place]
                positions = np.flatnonzero(np.isin(asked, keys))
                places = np.searchsorted(keys, asked[positions])
                vectors[~found] = self._cache.tables[table].default_value
                batch.outs[place][positions[done[places]]] = vectors[places[done[places]]]
                if batch.founds:
                    batch.founds[place][positions] = found[places]
                linked, left = int(found[places].sum()), int((~done)[places].sum())
                absent += positions.size - linked - left
                if left:
                    rest = positions[~done[places]]
                    self._left.append(LeftKeys(self._cache, batch, place, keys[~done], rest))
            self.counts.append(left)
            self.linked.append(linked)
            self.absent.append(absent)
        if not any(self.linked) and (any(settled) or not any(self.absent)):
            self.linked = ()
        if not any(self.absent) and not self.linked:
            self.absent = ()
        return sum(self.counts)

    def unique(self):
        return self._left

    def finish(self):
        self._left = []

    def enqueue(self, batch, captured=False):
        for table in batch.tables:
            if not self._cache.hosts.get(table, (None, False))[1]:
                raise InvalidInputError("a table is not attached")
            if not captured and self._cache.hosts[table][0].layout() is None:
                raise NotReadyError("a table was dropped")
        if captured:
            if sum(batch.sizes) > self._room.get(tuple(batch.tables), -1):
                raise RuntimeError("memory is allocated while a stream is captured")
            graph = self._cache.capturing
            if self._graph not in (None, graph):
                self._refuse_a_graphs()
            self._graph = graph
            graph.work.append(lambda: self._enqueue(batch))
            return
        self._refuse_a_graphs()
        self._enqueue(batch)

    def prepare(self, batch):
        self.enqueue(batch)
        tables = tuple(batch.tables)
        self._room[tables] = max(self._room.get(tables, 0), sum(batch.sizes))

    def _enqueue(self, batch):
        self._query(batch)
        for table, left, linked, absent in zip(
            batch.tables,
            self.counts,
            self.linked or [0] * len(batch.tables),
            self.absent or [0] * len(batch.tables),
            strict=True,
        ):
            counts = self._cache.counts[table]
            for place, count in enumerate((left + linked + absent, linked, absent, left)):
                counts[place] += count
        for one in self._left:
            one.scatter(np.zeros(one.keys.size, np.bool_))

    def _refuse_a_graphs(self):
        if self._graph is not None and self._graph.open:
            raise RuntimeError("a lookup that belongs to a graph is used otherwise")


class LeftKeys(MissedKeys):
    """Keys that are left to the host."""

    def __init__(self, cache: LinkedCache, batch: Batch, place: int, keys: KeyArray, positions: np.ndarray) -> None:
        self.table, self.keys = batch.tables[place], keys
        self._asked, self._out = batch.keys[place], batch.outs[place]
        self._found = batch.founds[place] if batch.founds else None
        self._cache, self._positions = cache, positions
        self._vectors = np.empty((keys.size, cache.tables[self.table].dim), np.float32)

    def buffer(self):
        return self._vectors

    def stage(self, start, stop):
        pass

    def absent(self, found):
        return int(np.isin(self._asked[self._positions], self.keys[~found]).sum())

    def scatter(self, found):
        self._vectors[~found] = self._cache.tables[self.table].default_value
        places = np.searchsorted(self.keys, self._asked[self._positions])
        self._out[self._positions] = self._vectors[places]
        if self._found is not None:
            self._found[self._positions] = found[places]

    def insert(self, found):
        self._cache.insert(self.table, self.keys[found], self._vectors[found])
