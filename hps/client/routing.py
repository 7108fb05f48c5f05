"""Routes the keys of a lookup over servers, each of which so caches its own share of them, without I/O: both clients use it.

Every server has all rows: any of them may answer any key, and only the caches' hit rates say which should. So keys of a server
that fails go to others, and keys that came in another version than the rest are asked again where that version is.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from hps.errors import HPSError, NotReadyError, RemoteConnectionError, RemoteTimeoutError, UnknownVersionError
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_MOST_ROUNDS: Final = 4
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_GOLDEN, _LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_MIXES = tuple((np.uint64(a), np.uint64(b)) for a, b in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_SILENT: Final = (RemoteConnectionError, RemoteTimeoutError)
_ELSEWHERE: Final = (*_SILENT, NotReadyError, UnknownVersionError)
"""Errors of one server, after which another may answer. One that is not ready does not rest: others would get its load."""


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
    low = np.uint64((1 << len(names).bit_length()) - 1)  # these bits of a hash are the place instead
    best = np.zeros(keys.shape, np.uint64)
    with np.errstate(over="ignore"):
        mixed = keys.view(np.uint64) * _GOLDEN
        hashes, shifted = np.empty_like(mixed), np.empty_like(mixed)
        for place, name in enumerate(names):
            if place in left_out:
                continue
            np.bitwise_xor(mixed, _seed(name), out=hashes)
            for shift, factor in _MIXES:
                np.right_shift(hashes, shift, out=shifted)
                hashes ^= shifted
                hashes *= factor
            np.right_shift(hashes, _LAST_SHIFT, out=shifted)
            hashes ^= shifted
            hashes |= low
            hashes ^= low ^ np.uint64(place)
            np.maximum(best, hashes, out=best)
    best &= low
    return best.astype(np.intp)


@lru_cache(maxsize=1024)
def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


class PartAnswer(NamedTuple):
    """An answer to a part of a lookup, by table."""

    version: str
    vectors: Mapping[str, FloatArray]
    found: Mapping[str, BoolArray]


class _Share(NamedTuple):
    """Keys of one lookup for one server.

    Attributes:
        flat: their rows among the keys of all tables, in order; None: all keys.
        rows: the same by table, among its keys.
    """

    place: int
    flat: IndexArray | None
    rows: Mapping[str, IndexArray] | None


Call = TypeVar("Call")
Asked: TypeAlias = list[tuple[int, Call]]
"""Calls to make at the same time, each of another server, by its place."""
Parts: TypeAlias = Sequence[tuple[Mapping[str, IndexArray] | None, PartAnswer]]
"""Answers, each with the rows of its keys by table; None for all keys."""
Routed: TypeAlias = Generator[list[tuple[int, Call]], list[PartAnswer | HPSError], Parts | None]


class Router:
    """Decides which server is asked for which keys. *Thread-safe.*

    Args:
        names: of the servers; what keys belong to depends on them, and not on their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rests: dict[int, tuple[float, float]] = {}  # by place: until when, and for how long

    def route(self, keys: Mapping[str, KeyArray], call: Callable[[Mapping[str, KeyArray], bool], Call]) -> Routed[Call]:
        """Ask for the keys of a lookup in parts.

        Yields calls, and is sent the answers or errors. A lost connection is tried once more; after that, and where a server
        does not answer in time, is not ready or lacks the version, its keys go to others.

        Args:
            keys: (n,) of each table.
            call: makes the request for keys by table; the flag says that they are all of them.

        Returns:
            Parts of one version that have all keys; None if that was not to be had in parts, and one server has to be asked for
            everything.

        Raises:
            HPSError: a server refused its keys for another reason.
        """
        left_out, trying = self._unavailable(), set[int]()
        lost: set[int] = set()
        lookup = _Lookup(keys)
        missing: IndexArray | None = None
        done: list[tuple[_Share, PartAnswer]] = []
        for _ in range(_MOST_ROUNDS):
            waiting = lookup.split(missing, self._names, left_out, done)
            trying |= self._try_again(part.place for part in waiting)
            outcomes = yield [(part.place, call(lookup.keys(part), part.rows is None)) for part in waiting]
            failed: list[_Share] = []
            for part, outcome in zip(waiting, outcomes, strict=True):
                if isinstance(outcome, PartAnswer):
                    done.append((part, outcome))
                    self._rests.pop(part.place, None)
                    continue
                if not isinstance(outcome, _ELSEWHERE):
                    raise outcome
                failed.append(part)
                if isinstance(outcome, RemoteConnectionError) and part.place not in lost:
                    lost.add(part.place)
                    continue
                left_out.add(part.place)
                if isinstance(outcome, _SILENT):
                    self._rest(part.place, part.place in trying)
            if not failed:
                failed, done, place = _of_one_version(done)
                if not failed:
                    return [(part.rows, answer) for part, answer in done]
                left_out = set(range(len(self._names))) - {place}
            elif len(left_out) == len(self._names):
                return None
            missing = np.sort(np.concatenate([part.flat for part in failed if part.flat is not None])) if done else None
        return None

    def _unavailable(self) -> set[int]:
        """Return the places that rest; none if all do."""
        now = time.monotonic()
        resting = {place for place, (until, _) in list(self._rests.items()) if until > now}
        return resting if len(resting) < len(self._names) else set()

    def _try_again(self, places: Iterable[int]) -> set[int]:
        """Return those of the places that have rested; other lookups leave them out until this one had time to try them."""
        if not self._rests:
            return set()
        now, found = time.monotonic(), set()
        for place in places:
            until, rest_s = self._rests.get(place, (now + 1, 0.0))
            if until <= now:
                self._rests[place] = now + rest_s, rest_s
                found.add(place)
        return found

    def _rest(self, place: int, tried_again: bool) -> None:
        rest_s = self._rests.get(place, (0.0, _FIRST_REST_S / 2))[1]
        if tried_again or place not in self._rests:
            rest_s = min(2 * rest_s, _LONGEST_REST_S)
            self._rests[place] = time.monotonic() + rest_s * random.uniform(0.75, 1.0), rest_s


class _Lookup:
    """The keys of all tables, in one array. *One lookup.*"""

    def __init__(self, tables: Mapping[str, KeyArray]) -> None:
        self._tables = tables
        self._flat = np.concatenate([np.empty(0, np.int64), *tables.values()])
        self._ends = np.cumsum([table.size for table in tables.values()])

    def split(
        self,
        missing: IndexArray | None,
        names: Sequence[str],
        left_out: Collection[int],
        done: Iterable[tuple[_Share, PartAnswer]],
    ) -> list[_Share]:
        """Split keys over the servers that are not left out.

        Args:
            missing: flat rows of the keys, in order; None: all.
            done: answers that say which tables without keys are still to be asked for.
        """
        places = places_of(self._flat if missing is None else self._flat[missing], names, left_out)
        counts = np.bincount(places, minlength=len(names))
        used = np.flatnonzero(counts).tolist()
        if missing is None and len(used) <= 1:
            return [_Share(used[0] if used else min(set(range(len(names))) - set(left_out)), None, None)]
        order = np.argsort(places.astype(np.min_scalar_type(len(names))), kind="stable")
        order = order if missing is None else missing[order]
        answered = {table for _, answer in done for table in answer.vectors}
        bare = [table for table, keys in self._tables.items() if not keys.size and table not in answered]
        ends = np.cumsum(counts).tolist()
        parts: list[_Share] = []
        for place in used:
            flat = order[ends[place] - counts[place] : ends[place]]
            parts.append(_Share(place, flat, self._by_table(flat, () if parts else bare)))
        return parts

    def keys(self, part: _Share) -> Mapping[str, KeyArray]:
        """Return the keys of a part by table."""
        if part.rows is None:
            return self._tables
        return {table: self._tables[table][rows] for table, rows in part.rows.items()}

    def _by_table(self, flat: IndexArray, bare: Collection[str]) -> dict[str, IndexArray]:
        ends = np.searchsorted(flat, self._ends).tolist()
        rows, first = {}, 0
        for (table, keys), end, last in zip(self._tables.items(), ends, self._ends.tolist(), strict=True):
            if end > first or table in bare:
                rows[table] = flat[first:end] - (last - keys.size)
            first = end
        return rows


def joined(
    tables: Mapping[str, KeyArray],
    parts: Parts,
    out: Callable[[str, tuple[int, ...]], FloatArray],
) -> tuple[dict[str, FloatArray], dict[str, BoolArray]]:
    """Put the vectors and masks of parts in the order of the keys.

    Args:
        out: returns the array that takes the vectors of a table, from its name and shape.
    """
    vectors: dict[str, FloatArray] = {}
    masks: dict[str, BoolArray] = {}
    for by_table, answer in parts:
        if by_table is None:
            return dict(answer.vectors), dict(answer.found)
        for table, rows in by_table.items():
            got = answer.vectors[table]
            if table not in vectors:
                vectors[table] = out(table, (tables[table].size, got.shape[1]))
            vectors[table][rows] = got
            if (name := f"{table}.found") in answer.found:
                masks.setdefault(name, np.empty(tables[table].size, np.bool_))[rows] = answer.found[name]
    return {table: vectors[table] for table in tables}, masks


def _of_one_version(
    done: list[tuple[_Share, PartAnswer]],
) -> tuple[list[_Share], list[tuple[_Share, PartAnswer]], int]:
    """Return the parts that lack the version of most keys, those that have it, and a server of this version."""
    if len({answer.version for _, answer in done}) == 1:
        return [], done, done[0][0].place
    counts: Counter[str] = Counter()
    for part, answer in done:
        counts[answer.version] += 0 if part.flat is None else part.flat.size
    version = max(counts, key=counts.__getitem__)
    right = [(part, answer) for part, answer in done if answer.version == version]
    return [part for part, answer in done if answer.version != version], right, right[0][0].place
