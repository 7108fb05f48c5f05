"""Routes the keys of a lookup over servers, so that each caches its own share. Without I/O, for both clients.

Every server has all rows, so any of them may answer any key; routing only raises the caches' hit rates. The keys of a server
that fails go to others, and keys whose answers have another version than the rest are requested again from a server with the
version of most keys.
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
"""Errors after which another server may answer."""


def server_indices(
    keys: KeyArray,  # (n,)
    names: Sequence[str],
    excluded: Collection[int] = (),
) -> IndexArray:  # (n,)
    """Return the server of each key, as an index of `names`.

    Rendezvous hashing (Thaler and Ravishankar, *Using Name-Based Mappings to Increase Hit Rates*, IEEE/ACM Transactions on
    Networking 6(1), 1998): a key belongs to the server with the highest hash of both, here splitmix64's output function
    (Steele, Lea and Flood, OOPSLA 2014) of the key and the first 8 bytes of the name's BLAKE2b. A server that is added takes an
    equal share of the keys of each other one, and moves no other key; one that is left out gives its keys to all others.

    Args:
        excluded: servers that get no key; not all of them.
    """
    low = np.uint64((1 << len(names).bit_length()) - 1)  # these bits of a hash hold the index instead
    best = np.zeros(keys.shape, np.uint64)
    with np.errstate(over="ignore"):
        mixed = keys.view(np.uint64) * _GOLDEN
        hashes, shifted = np.empty_like(mixed), np.empty_like(mixed)
        for index, name in enumerate(names):
            if index in excluded:
                continue
            np.bitwise_xor(mixed, _seed(name), out=hashes)
            for shift, factor in _MIXES:
                np.right_shift(hashes, shift, out=shifted)
                hashes ^= shifted
                hashes *= factor
            np.right_shift(hashes, _LAST_SHIFT, out=shifted)
            hashes ^= shifted
            hashes |= low
            hashes ^= low ^ np.uint64(index)
            np.maximum(best, hashes, out=best)
    best &= low
    return best.astype(np.intp)


@lru_cache(maxsize=1024)
def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


class PartAnswer(NamedTuple):
    """The answer to a part of a lookup, by table."""

    version: str
    vectors: Mapping[str, FloatArray]
    found: Mapping[str, BoolArray]


class _Share(NamedTuple):
    """The keys of a lookup for one server."""

    server: int
    flat: IndexArray | None  # their positions among the keys of all tables, in order; None: all keys
    rows: Mapping[str, IndexArray] | None  # the same by table, among its keys


Call = TypeVar("Call")
PartRequests: TypeAlias = list[tuple[int, Call]]
"""Calls to make at the same time, each with the index of its server."""
Parts: TypeAlias = Sequence[tuple[Mapping[str, IndexArray] | None, PartAnswer]]
"""Answers, each with the positions of its keys by table; None for all keys."""
Routed: TypeAlias = Generator[list[tuple[int, Call]], list[PartAnswer | HPSError], Parts | None]


class Router:
    """Decides which server answers which keys. *Thread-safe.*

    Args:
        names: of the servers; the server of a key depends on them, but not on their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rests: dict[int, tuple[float, float]] = {}  # by server: end and duration of its rest

    def route(self, keys: Mapping[str, KeyArray], call: Callable[[Mapping[str, KeyArray], bool], Call]) -> Routed[Call]:
        """Request the keys of a lookup in parts.

        Yields calls, and is sent the answers or errors. A lost connection is retried once; after that, or if a server does not
        answer in time, is not ready or lacks the version, its keys go to others.

        Args:
            keys: (n,) of each table.
            call: makes the request for keys by table; the flag is True for all keys.

        Returns:
            Parts of one version with all keys; None if one server must answer all of them.

        Raises:
            HPSError: a server refused its keys for another reason.
        """
        excluded, probed = self._unavailable(), set[int]()
        lost: set[int] = set()
        lookup = _Lookup(keys)
        missing: IndexArray | None = None
        done: list[tuple[_Share, PartAnswer]] = []
        for _ in range(_MOST_ROUNDS):
            shares = lookup.split(missing, self._names, excluded, done)
            probed |= self._probe(part.server for part in shares)
            outcomes = yield [(part.server, call(lookup.keys(part), part.rows is None)) for part in shares]
            failed: list[_Share] = []
            for part, outcome in zip(shares, outcomes, strict=True):
                if isinstance(outcome, PartAnswer):
                    done.append((part, outcome))
                    self._rests.pop(part.server, None)
                    continue
                if not isinstance(outcome, _ELSEWHERE):
                    raise outcome
                failed.append(part)
                if isinstance(outcome, RemoteConnectionError) and part.server not in lost:
                    lost.add(part.server)
                    continue
                excluded.add(part.server)
                if isinstance(outcome, _SILENT):
                    self._rest(part.server, part.server in probed)
            if not failed:
                failed, done, server = _split_by_version(done)
                if not failed:
                    return [(part.rows, answer) for part, answer in done]
                excluded = set(range(len(self._names))) - {server}
            elif len(excluded) == len(self._names):
                return None
            missing = np.sort(np.concatenate([part.flat for part in failed if part.flat is not None])) if done else None
        return None

    def _unavailable(self) -> set[int]:
        """Return the servers that rest; none if all do."""
        now = time.monotonic()
        resting = {server for server, (until, _) in list(self._rests.items()) if until > now}
        return resting if len(resting) < len(self._names) else set()

    def _probe(self, servers: Iterable[int]) -> set[int]:
        """Return the servers whose rest has ended, and extend it for other lookups while this one tries them."""
        if not self._rests:
            return set()
        now, probed = time.monotonic(), set()
        for server in servers:
            until, rest_s = self._rests.get(server, (now + 1, 0.0))
            if until <= now:
                self._rests[server] = now + rest_s, rest_s
                probed.add(server)
        return probed

    def _rest(self, server: int, probed: bool) -> None:
        # Only servers that did not answer rest. One that is not ready does not: the others would get its load.
        rest_s = self._rests.get(server, (0.0, _FIRST_REST_S / 2))[1]
        if probed or server not in self._rests:
            rest_s = min(2 * rest_s, _LONGEST_REST_S)
            self._rests[server] = time.monotonic() + rest_s * random.uniform(0.75, 1.0), rest_s


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
        excluded: Collection[int],
        done: Iterable[tuple[_Share, PartAnswer]],
    ) -> list[_Share]:
        """Split keys over the servers that are not excluded.

        Args:
            missing: positions of the keys, in order; None: all.
            done: earlier answers; tables without keys are requested until one has them.
        """
        owners = server_indices(self._flat if missing is None else self._flat[missing], names, excluded)
        counts = np.bincount(owners, minlength=len(names))
        used_servers = np.flatnonzero(counts).tolist()
        if missing is None and len(used_servers) <= 1:
            return [_Share(used_servers[0] if used_servers else min(set(range(len(names))) - set(excluded)), None, None)]
        order = np.argsort(owners.astype(np.min_scalar_type(len(names))), kind="stable")
        order = order if missing is None else missing[order]
        answered = {table for _, answer in done for table in answer.vectors}
        bare = [table for table, keys in self._tables.items() if not keys.size and table not in answered]
        ends = np.cumsum(counts).tolist()
        parts: list[_Share] = []
        for server in used_servers:
            flat = order[ends[server] - counts[server] : ends[server]]
            parts.append(_Share(server, flat, self._by_table(flat, () if parts else bare)))
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


def merge_parts(
    tables: Mapping[str, KeyArray],
    parts: Parts,
    out: Callable[[str, tuple[int, ...]], FloatArray],
) -> tuple[dict[str, FloatArray], dict[str, BoolArray]]:
    """Merge vectors and masks of parts, in the order of the keys.

    Args:
        out: returns the array for the vectors of a table, from its name and shape.
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


def _split_by_version(
    done: list[tuple[_Share, PartAnswer]],
) -> tuple[list[_Share], list[tuple[_Share, PartAnswer]], int]:
    """Return the parts of other versions than that of most keys, the parts of that version, and a server with it."""
    if len({answer.version for _, answer in done}) == 1:
        return [], done, done[0][0].server
    counts: Counter[str] = Counter()
    for part, answer in done:
        counts[answer.version] += 0 if part.flat is None else part.flat.size
    version = max(counts, key=counts.__getitem__)
    right = [(part, answer) for part, answer in done if answer.version == version]
    return [part for part, answer in done if answer.version != version], right, right[0][0].server
