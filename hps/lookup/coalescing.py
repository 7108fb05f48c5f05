"""Fetches a key once when several lookups miss it at the same time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numba import int64, void

from hps.hashing import mix
from hps.lookup.chain import Landed
from hps.lookup.fences import TableFence
from hps.metrics import Metrics
from hps.numba_kernels import compile_kernels, kernel, read_only
from hps.tracing import ended
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

Fetch = Callable[[TableSpec, KeyArray, FloatArray, BoolArray, Landed | None], int]
_WORDS = int64[::1]
_KEYS = read_only(_WORDS)


@kernel(void, _KEYS, _WORDS)
def _index(
    keys: KeyArray,  # (u,) int64, distinct
    table: IndexArray,  # (size,) int64; size a power of two, at least 2 * u
) -> None:
    """Make `table` a hash table of the places of keys, -1 where it is empty."""
    table[:] = -1
    for i in range(keys.size):
        slot = np.int64(mix(keys[i])) & (table.size - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (table.size - 1)
        table[slot] = i


@kernel(int64, _KEYS, _KEYS, _WORDS, _WORDS, _WORDS)
def _match(
    keys: KeyArray,  # (n,) int64
    others: KeyArray,  # (u,) int64
    table: IndexArray,  # (size,) int64, of `others`
    here: IndexArray,  # (n,) int64
    there: IndexArray,  # (n,) int64
) -> int:
    """Write the places of the keys that are among `others`, and their places there; returns how many there are."""
    count = 0
    for i in range(keys.size):
        slot = np.int64(mix(keys[i])) & (table.size - 1)
        while table[slot] >= 0 and others[table[slot]] != keys[i]:
            slot = (slot + 1) & (table.size - 1)
        if table[slot] >= 0:
            here[count], there[count] = i, table[slot]
            count += 1
    return count


@dataclass(slots=True, eq=False)
class _Flight:
    """A fetch that is under way. The first lookup that joins it makes `landed`; only then are the results kept."""

    keys: KeyArray
    token: int
    table: IndexArray | None = None  # of its keys; made by the first lookup that meets it
    landed: threading.Event | None = None
    vectors: FloatArray | None = None
    found: BoolArray | None = None

    def shared(self, keys: KeyArray) -> tuple[IndexArray, IndexArray]:
        """The places of those keys that are under way here, among `keys` and in this flight."""
        if self.table is None:
            self.table = np.empty(1 << (2 * self.keys.size - 1).bit_length(), np.int64)
            _index(self.keys, self.table)
        here, there = np.empty((2, keys.size), np.int64)
        count = _match(keys, self.keys, self.table, here, there)
        return here[:count], there[:count]


@dataclass(slots=True)
class _Join:
    """The keys that a lookup takes from another lookup's flight: their positions in both."""

    flight: _Flight
    here: IndexArray
    there: IndexArray


class FetchCoalescer:
    """Fetches distinct keys. Where another thread is fetching a key already, waits for its result. *Thread-safe.*

    A fetch that began before the table was modified is not joined: a lookup that starts after an update has returned gets
    the new vector. A lookup fetches for itself when the fetch that it joined fails or is late.

    Args:
        fetch: the database chain's fetch.
        timeout_s: how long to wait for another lookup's fetch.
    """

    def __init__(self, fetch: Fetch, metrics: Metrics, timeout_s: float = 2.0) -> None:
        compile_kernels()
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._flights: dict[str, list[_Flight]] = {}
        self._joined = metrics.coalesced_keys

    def fetch(
        self,
        table: TableSpec,
        fence: TableFence,
        keys: KeyArray,  # (u,)
        out: FloatArray,  # (u, dim)
        found: BoolArray,  # (u,)
        landed: Landed | None = None,
    ) -> None:
        """Fill `out` and `found` for distinct keys; `found` is all False at the call.

        Args:
            landed: as for the database chain's `fetch`.

        Raises:
            DatabaseError: as the database chain's `fetch`.
        """
        own, flight, joins = self._take_off(table.tag, fence.token(), fence, keys)
        try:
            if own is None:
                self._fetch(table, keys, out, found, landed)
            elif own.size:
                self._fetch_others(table, joins, keys, out, found)
        except BaseException:
            self._land(table.tag, flight, None, None, own)
            raise
        self._land(table.tag, flight, out, found, own)
        for join in joins:
            self._follow(table, join, keys, out, found)
        if landed and own is not None:
            landed(0, keys.size)

    def _take_off(
        self, tag: str, token: int, fence: TableFence, keys: KeyArray
    ) -> tuple[IndexArray | None, _Flight, list[_Join]]:
        """Join flights under way and register one for the rest: returns its positions (None: all), it, and the joins."""
        with self._lock:
            flights = self._flights.get(tag, [])
            joins: list[_Join] = []
            own: IndexArray | None = None
            for other in flights:
                if not fence.is_current(other.token):
                    continue
                here, there = other.shared(keys if own is None else keys[own])
                if here.size:
                    other.landed = other.landed or threading.Event()
                    candidates = np.arange(keys.size) if own is None else own
                    joins.append(_Join(other, candidates[here], there))
                    own = np.delete(candidates, here)
            flight = _Flight(keys if own is None else keys[own], token)
            if flight.keys.size:
                self._flights.setdefault(tag, flights).append(flight)
        return own, flight, joins

    def _land(self, tag: str, flight: _Flight, out: FloatArray | None, found: BoolArray | None, own: IndexArray | None) -> None:
        if not flight.keys.size:
            return
        with self._lock:
            self._flights[tag].remove(flight)
            if not self._flights[tag]:  # tags come and go with the versions of models
                del self._flights[tag]
        # From here on nobody can join, so `landed` does not change any more.
        if flight.landed:
            if out is not None and found is not None:
                rows: IndexArray | slice = slice(None) if own is None else own
                flight.vectors, flight.found = np.array(out[rows]), np.array(found[rows])
            flight.landed.set()

    def _follow(self, table: TableSpec, join: _Join, keys: KeyArray, out: FloatArray, found: BoolArray) -> None:
        flight = join.flight
        began = perf_counter_ns()
        landed = flight.landed is not None and flight.landed.wait(self._timeout_s)
        ended("coalesced", table.table_name, began, join.here.size)
        if landed and flight.vectors is not None and flight.found is not None:
            out[join.here] = flight.vectors[join.there]
            found[join.here] = flight.found[join.there]
            self._joined.labels(table.model_name, table.table_name).inc(join.here.size)
        else:
            self._fetch_rows(table, join.here, keys, out, found)

    def _fetch_others(self, table: TableSpec, joins: list[_Join], keys: KeyArray, out: FloatArray, found: BoolArray) -> None:
        """Fetch all but the joined keys, in place: a fetch leaves alone what it takes for found, and `_follow` writes that."""
        for join in joins:
            found[join.here] = True
        self._fetch(table, keys, out, found, None)

    def _fetch_rows(self, table: TableSpec, rows: IndexArray, keys: KeyArray, out: FloatArray, found: BoolArray) -> None:
        vectors = np.empty((rows.size, table.dim), np.float32)
        have = np.zeros(rows.size, np.bool_)
        self._fetch(table, keys[rows], vectors, have, None)
        out[rows] = vectors
        found[rows] = have
