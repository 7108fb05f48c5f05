"""Fetches a key once when several lookups miss it at the same time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from hps.engine.chain import Landed
from hps.engine.fences import TableFence
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import KeyPlaces, places_kernels
from hps.statistics.metrics import Metrics
from hps.statistics.tracing import TierNumbers, current, ended
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

Fetch = Callable[[TableSpec, KeyArray, FloatArray, BoolArray, Landed | None], int]


@dataclass(slots=True, eq=False)
class _Flight:
    """A fetch in progress. Its results are kept only if another lookup joined, which creates `landed`."""

    keys: KeyArray
    token: int
    places: KeyPlaces | None = None  # index of `keys`; made by the first lookup that overlaps
    landed: threading.Event | None = None
    vectors: FloatArray | None = None
    found: BoolArray | None = None
    tiers: TierNumbers | None = None

    def shared(self, keys: KeyArray) -> tuple[IndexArray, IndexArray]:
        """Return the positions, in `keys` and in the flight, of the keys that it fetches."""
        self.places = self.places or KeyPlaces(self.keys)
        return self.places.match(keys)


@dataclass(slots=True)
class _Join:
    """The keys that a lookup takes from a flight: their positions in the lookup and in the flight."""

    flight: _Flight
    here: IndexArray
    there: IndexArray


class FetchCoalescer:
    """Fetches distinct keys; waits for the result of another thread that is fetching the same key. *Thread-safe.*

    A lookup does not join a fetch that began before the table was modified, so a lookup that starts after an update returned
    sees the new vector. It fetches for itself when the joined fetch fails or is late.

    Args:
        timeout_s: time limit for another lookup's fetch.
    """

    def __init__(self, fetch: Fetch, metrics: Metrics, timeout_s: float = 2.0) -> None:
        compile_kernels(*places_kernels())
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
    ) -> TierNumbers:
        """Fill `out` and `found`, which starts all False, for distinct keys. Return the tier that answered each, (u,).

        Args:
            landed: as for `DatabaseChain.fetch`.

        Raises:
            DatabaseError: as for `DatabaseChain.fetch`.
        """
        own, flight, joins = self._start_flight(table.tag, fence.token(), fence, keys)
        try:
            if own is not None:  # the fetch skips rows marked as found; `_copy_joined` fills the joined ones
                for join in joins:
                    found[join.here] = True
            if own is None or own.size:
                tiers = self._fetch_tiers(table, keys, out, found, landed if own is None else None)
            else:
                tiers = np.zeros(keys.size, np.uint8)
        except BaseException:
            self._finish_flight(table.tag, flight, own)
            raise
        self._finish_flight(table.tag, flight, own, (out, found, tiers))
        for join in joins:
            self._copy_joined(table, join, keys, out, found, tiers)
        if landed and own is not None:
            landed(0, keys.size)
        return tiers

    def _fetch_tiers(
        self, table: TableSpec, keys: KeyArray, out: FloatArray, found: BoolArray, landed: Landed | None = None
    ) -> TierNumbers:
        current.tiers = tiers = np.zeros(keys.size, np.uint8)
        try:
            self._fetch(table, keys, out, found, landed)
        finally:
            current.tiers = None
        return tiers

    def _start_flight(
        self, tag: str, token: int, fence: TableFence, keys: KeyArray
    ) -> tuple[IndexArray | None, _Flight, list[_Join]]:
        """Join flights in progress and start one for the rest. Return its positions (None: all), the flight and the joins."""
        with self._lock:
            flights = self._flights.get(tag, [])
            joins: list[_Join] = []
            own: IndexArray | None = None
            for running in flights:
                # A flight that began before a modification may return the vector from before it.
                if not fence.is_current(running.token):
                    continue
                here, there = running.shared(keys if own is None else keys[own])
                if here.size:
                    running.landed = running.landed or threading.Event()
                    candidates = np.arange(keys.size) if own is None else own
                    joins.append(_Join(running, candidates[here], there))
                    own = np.delete(candidates, here)
            flight = _Flight(keys if own is None else keys[own], token)
            if flight.keys.size:
                self._flights.setdefault(tag, flights).append(flight)
        return own, flight, joins

    def _finish_flight(
        self,
        tag: str,
        flight: _Flight,
        own: IndexArray | None,
        results: tuple[FloatArray, BoolArray, TierNumbers] | None = None,
    ) -> None:
        if not flight.keys.size:
            return
        with self._lock:
            self._flights[tag].remove(flight)
            if not self._flights[tag]:  # tags change with model versions
                del self._flights[tag]
        # No lookup can join from here on, so `landed` is final and needs no lock.
        if flight.landed:
            if results is not None:
                rows: IndexArray | slice = slice(None) if own is None else own
                out, found, tiers = results
                flight.vectors, flight.found, flight.tiers = np.array(out[rows]), np.array(found[rows]), np.array(tiers[rows])
            flight.landed.set()

    def _copy_joined(
        self, table: TableSpec, join: _Join, keys: KeyArray, out: FloatArray, found: BoolArray, tiers: TierNumbers
    ) -> None:
        flight = join.flight
        began = perf_counter_ns()
        landed = flight.landed is not None and flight.landed.wait(self._timeout_s)
        ended("coalesced", table.table_name, began, join.here.size)
        if landed and flight.vectors is not None and flight.found is not None and flight.tiers is not None:
            out[join.here] = flight.vectors[join.there]
            found[join.here] = flight.found[join.there]
            tiers[join.here] = flight.tiers[join.there]
            self._joined.labels(table.model_name, table.table_name).inc(join.here.size)
        else:
            # The flight failed or is late: fetch these keys here, so that no lookup fails or waits because of another.
            rows, own_found = join.here, np.zeros(join.here.size, np.bool_)
            vectors = np.empty((rows.size, table.width), np.float32)
            tiers[rows] = self._fetch_tiers(table, keys[rows], vectors, own_found)
            out[rows], found[rows] = vectors, own_found
