"""Routes the keys of a lookup over servers, each of which so caches its own share of them, without I/O: both clients use it.

Every server has all rows: any of them may answer any key, and only the caches' hit rates say which should. So keys of a server
that fails go to others, and keys that came in another version than the rest are asked again where that version is.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from hps.client.requests import RemoteCall
from hps.errors import HPSError, NotReadyError, RemoteConnectionError, UnknownVersionError
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_MOST_ROUNDS: Final = 4
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ELSEWHERE: Final = (RemoteConnectionError, NotReadyError, UnknownVersionError)
"""Errors of one server, after which another may answer."""


def places_of(
    keys: KeyArray,  # (n,)
    names: Sequence[str],
    left_out: Collection[int] = (),
) -> IndexArray:  # (n,)
    """Return for each key the server that it belongs to, as a place in `names`.

    Rendezvous hashing (Thaler and Ravishankar, *Using Name-Based Mappings to Increase Hit Rates*, IEEE/ACM Transactions on
    Networking 6(1), 1998): a key belongs to the server with the highest hash of both, here splitmix64's output function
    (Steele, Lea and Flood, OOPSLA 2014) of the key and the first 8 bytes of the name's BLAKE2b. A server that is added takes an
    equal share of the keys of each other one, and moves no other key; one that is left out gives its keys to all others.

    Args:
        left_out: places that get no key; not all of them.
    """
    best = np.zeros(keys.shape, np.uint64)
    places = np.full(keys.shape, -1, np.intp)
    with np.errstate(over="ignore"):
        mixed = keys.view(np.uint64) * _GOLDEN
        for place, name in enumerate(names):
            if place in left_out:
                continue
            seed = np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))
            hashes = mixed ^ seed
            hashes = (hashes ^ hashes >> np.uint64(30)) * _MIX_1
            hashes = (hashes ^ hashes >> np.uint64(27)) * _MIX_2
            hashes ^= hashes >> np.uint64(31)
            higher = (hashes > best) | (places < 0)
            np.copyto(best, hashes, where=higher)
            np.copyto(places, place, where=higher)
    return places


class PartAnswer(NamedTuple):
    """An answer to a part of a lookup, by table."""

    version: str
    vectors: Mapping[str, FloatArray]
    found: Mapping[str, BoolArray]


class _Part(NamedTuple):
    """Keys of one lookup for one server: by table, which of its keys; None for all of them."""

    place: int
    rows: Mapping[str, IndexArray | None]


Asked: TypeAlias = list[tuple[int, RemoteCall]]
"""Calls to make at the same time, each of one server, by its place."""
Parts: TypeAlias = Sequence[tuple[Mapping[str, IndexArray | None], PartAnswer]]
"""Answers, each with the rows of its keys by table; None for all of them."""
Routed: TypeAlias = Generator[Asked, list[PartAnswer | HPSError], Parts | None]


class Router:
    """Decides which server is asked for which keys. *Thread-safe.*

    Args:
        names: of the servers; what keys belong to depends on them, and not on their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._resting: dict[int, tuple[float, float]] = {}  # by place: until when, and for how long

    def route(self, keys: Mapping[str, KeyArray], call: Callable[[Mapping[str, KeyArray], bool], RemoteCall]) -> Routed:
        """Ask for the keys of a lookup in parts.

        Yields calls, and is sent the answers or errors. A lost connection is tried once more; after that, and where a server is
        not ready or lacks the version, its keys go to others.

        Args:
            keys: (n,) of each table.
            call: makes the request for keys by table; the flag says that they are all of them.

        Returns:
            Parts of one version that have all keys; None if that was not to be had in parts, and one server has to be asked for
            everything.

        Raises:
            HPSError: a server refused its keys for another reason.
        """
        left_out = self._unavailable()
        lost: Counter[int] = Counter()
        waiting = self._split(keys, left_out)
        done: list[tuple[_Part, PartAnswer]] = []
        for _ in range(_MOST_ROUNDS):
            whole = len(waiting) == 1 and not done
            outcomes = yield [(part.place, call(_of(keys, part.rows), whole)) for part in waiting]
            failed: list[_Part] = []
            again: list[_Part] = []
            for part, outcome in zip(waiting, outcomes, strict=True):
                if isinstance(outcome, PartAnswer):
                    done.append((part, outcome))
                    self._resting.pop(part.place, None)
                elif isinstance(outcome, RemoteConnectionError) and not lost[part.place]:
                    lost[part.place] += 1
                    again.append(part)
                elif isinstance(outcome, _ELSEWHERE):
                    if isinstance(outcome, RemoteConnectionError):
                        self._rest(part.place)
                    left_out.add(part.place)
                    failed.append(part)
                else:
                    raise outcome
            if failed and len(left_out) == len(self._names):
                return None
            waiting = again + [one for part in failed for one in self._elsewhere(keys, part, left_out)]
            if not waiting:
                waiting, done = _of_one_version(done)
            if not waiting:
                return [(part.rows, answer) for part, answer in done]
        return None

    def _split(self, keys: Mapping[str, KeyArray], left_out: Collection[int]) -> list[_Part]:
        places = {table: places_of(of_table, self._names, left_out) for table, of_table in keys.items()}
        used = np.unique(np.concatenate([*places.values(), np.empty(0, np.intp)])).tolist()
        if len(used) <= 1:
            first = next(place for place in range(len(self._names)) if place not in left_out)
            return [_Part(used[0] if used else first, dict.fromkeys(keys))]
        parts: dict[int, dict[str, IndexArray | None]] = {place: {} for place in used}
        for table, of_table in places.items():
            for place in used:
                rows = np.flatnonzero(of_table == place)
                if rows.size or (not of_table.size and place == used[0]):
                    parts[place][table] = rows
        return [_Part(place, rows) for place, rows in parts.items()]

    def _elsewhere(self, keys: Mapping[str, KeyArray], part: _Part, left_out: Collection[int]) -> list[_Part]:
        """Split the keys of a part over the servers that are left."""
        found = []
        for one in self._split(_of(keys, part.rows), left_out):
            rows = {table: _joined(part.rows[table], inner) for table, inner in one.rows.items()}
            found.append(_Part(one.place, rows))
        return found

    def _unavailable(self) -> set[int]:
        """Return the places that rest; none if all do."""
        now = time.monotonic()
        resting = {place for place, (until, _) in list(self._resting.items()) if until > now}
        return resting if len(resting) < len(self._names) else set()

    def _rest(self, place: int) -> None:
        with self._lock:
            until, rest_s = self._resting.get(place, (0.0, _FIRST_REST_S / 2))
            now = time.monotonic()
            if until <= now:
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
                self._resting[place] = now + rest_s * random.uniform(0.75, 1.0), rest_s


def joined(
    tables: Mapping[str, KeyArray],
    parts: Parts,
    out: Callable[[str, tuple[int, ...]], FloatArray],
) -> tuple[dict[str, FloatArray], dict[str, BoolArray]]:
    """Put the vectors and masks of parts in the order of the keys.

    Args:
        out: returns the array that takes the vectors of a table, from its name and shape.
    """
    if len(parts) == 1:
        return dict(parts[0][1].vectors), dict(parts[0][1].found)
    vectors: dict[str, FloatArray] = {}
    masks: dict[str, BoolArray] = {}
    for rows, answer in parts:
        for table, of_table in rows.items():
            got = answer.vectors[table]
            if table not in vectors:
                vectors[table] = out(table, (tables[table].size, got.shape[1]))
            vectors[table][slice(None) if of_table is None else of_table] = got
            if f"{table}.found" in answer.found:
                mask = masks.setdefault(f"{table}.found", np.empty(tables[table].size, np.bool_))
                mask[slice(None) if of_table is None else of_table] = answer.found[f"{table}.found"]
    return {table: vectors[table] for table in tables}, masks


def _of(keys: Mapping[str, KeyArray], rows: Mapping[str, IndexArray | None]) -> Mapping[str, KeyArray]:
    return {table: keys[table] if of_table is None else keys[table][of_table] for table, of_table in rows.items()}


def _joined(outer: IndexArray | None, inner: IndexArray | None) -> IndexArray | None:
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def _of_one_version(done: list[tuple[_Part, PartAnswer]]) -> tuple[list[_Part], list[tuple[_Part, PartAnswer]]]:
    """Return the parts to ask again where the version of most keys is, and those that have it."""
    counts: Counter[str] = Counter()
    for part, answer in done:
        counts[answer.version] += 1 + sum(0 if rows is None else rows.size for rows in part.rows.values())
    version = max(counts, key=counts.__getitem__)
    place = next(part.place for part, answer in done if answer.version == version)
    others = [_Part(place, part.rows) for part, answer in done if answer.version != version]
    return others, [(part, answer) for part, answer in done if answer.version == version]
