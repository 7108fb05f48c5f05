"""Routes the keys of a lookup over servers, so that each caches its own share. Without I/O, for both clients.

Where every server has all rows, any of them may answer any key; routing only raises the caches' hit rates. The keys of a server
that fails go to others, and keys whose answers have another version than the rest are requested again from a server with the
version of most keys.

Where servers hold shares of the tables (`models[].shard`), the keys of a share go to its servers alone. All answers of a lookup
are of one layout and of one version. A write goes to every server that holds its keys, of all layouts.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from hps.client.layouts import ShareLayout, layouts_of, refusal_text
from hps.errors import (
    ConflictError,
    HPSError,
    MisplacedKeysError,
    MissingShareError,
    NotReadyError,
    PartialWriteError,
    RemoteConnectionError,
    RemoteTimeoutError,
    UnknownModelError,
    UnknownVersionError,
)
from hps.ground.shares import TableShare, share_indices
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_MOST_ROUNDS: Final = 4
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_MOST_LAYOUTS_TRIED: Final = 4
_WHOLE: Final = TableShare(0, 1)
_GOLDEN, _LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_MIXES = tuple((np.uint64(a), np.uint64(b)) for a, b in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_SILENT: Final = (RemoteConnectionError, RemoteTimeoutError)
_ELSEWHERE: Final = (*_SILENT, NotReadyError, UnknownVersionError)
"""Errors after which another server may answer."""
_OF_OTHER_REPLICAS: Final = (*_ELSEWHERE, UnknownModelError)
"""Errors after which another server of the same share may answer: one that leaves may have no models any more."""


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


class Declared(NamedTuple):
    """The answer of a server that was asked for its share of a model's tables."""

    share: TableShare | None  # None: all rows


class Written(NamedTuple):
    """The answer of a server that wrote keys."""

    version: str


class _RequestedPart(NamedTuple):
    """The keys of a lookup for one server."""

    server: int
    flat: IndexArray | None  # their positions among the keys of all tables, in order; None: all keys
    rows: Mapping[str, IndexArray] | None  # the same by table, among its keys


Call = TypeVar("Call")
PartRequests: TypeAlias = list[tuple[int, Call]]
"""Calls to make at the same time, each with the index of its server."""
Parts: TypeAlias = Sequence[tuple[Mapping[str, IndexArray] | None, PartAnswer]]
"""Answers, each with the positions of its keys by table; None for all keys."""
Outcomes: TypeAlias = Sequence[PartAnswer | Declared | Written | HPSError]
Routed: TypeAlias = Generator[PartRequests[Call], Outcomes, Parts | None]
RoutedWrite: TypeAlias = Generator[PartRequests[Call], Outcomes, str | None]
Rows: TypeAlias = Mapping[str, IndexArray] | None
"""Positions of keys by table; None for all keys."""
PartCall: TypeAlias = Callable[[Mapping[str, KeyArray], Rows], Call]
"""Makes the request for keys by table, which have these positions."""


class ShareCalls(NamedTuple, Generic[Call]):
    """Further calls for a model whose servers may hold shares of its tables."""

    model: str
    declare: Callable[[], Call]  # asks a server for its share: `Declared`
    part_of: Callable[[Mapping[str, KeyArray], Rows, str], Call]  # requests keys in a version


class _KnownShares:
    """What servers have declared of their shares of one model. *Thread-safe*: a lookup reads each attribute once.

    Attributes:
        declared: by server, the share that it holds.
        layouts: of the declared shares, the best first.
        refusals: by server, the error that was its last answer to the question.
    """

    def __init__(self) -> None:
        self.declared: dict[int, TableShare] = {}
        self.layouts: list[ShareLayout] = []
        self.refusals: dict[int, HPSError] = {}
        self._doubtful: set[int] = set()  # have not answered since
        self._asks: dict[int, tuple[float, float]] = {}  # by server: earliest time of the next question, and the pause after it

    @property
    def is_split(self) -> bool:
        """Whether a server holds a share of the tables."""
        return any(share != _WHOLE for share in self.declared.values())

    def to_ask(self, servers: int, resting: Collection[int], *, now: bool = False) -> list[int]:
        """Return the servers to ask for their shares: those that are unknown or doubtful; all if no layout is complete.

        Args:
            servers: number of all servers.
            resting: servers that are not asked, unless no server has answered yet.
            now: also ask those that were asked a short time ago.
        """
        complete = bool(self.layouts) and not self.layouts[0].missing
        at, open_ = time.monotonic(), not self.declared or now
        return [
            server
            for server in range(servers)
            if not (server in resting and self.declared)
            and not (complete and server in self.declared and server not in self._doubtful)
            and (open_ or self._asks.get(server, (0.0, 0.0))[0] <= at)
        ]

    def asking(self, servers: Iterable[int]) -> None:
        """Pause before the same servers are asked again, each time for longer."""
        for server in servers:
            pause_s = min(2 * self._asks.get(server, (0.0, _FIRST_REST_S / 2))[1], _LONGEST_REST_S)
            self._asks[server] = time.monotonic() + pause_s, pause_s

    def declare(self, server: int, share: TableShare | None) -> None:
        self._doubtful.discard(server)
        self._asks.pop(server, None)
        self.refusals.pop(server, None)
        share = share or _WHOLE
        if self.declared.get(server) != share:
            self.declared = {**self.declared, server: share}
            self.layouts = layouts_of(self.declared)

    def doubt(self, server: int) -> None:
        """Ask a server again: it may come back with another share."""
        self._doubtful.add(server)

    def best(self, servers: int, without: Collection[int]) -> ShareLayout | None:
        """Return the best layout whose number of shares is not in `without`; None if there is none, or no server holds a share.

        An incomplete one is used while there are servers that have not declared their shares.
        """
        if not self.is_split:
            return None
        complete = [layout for layout in self.layouts if not layout.missing]
        usable = complete or (self.layouts if len(self.declared) < servers else [])
        return next((layout for layout in usable if layout.of not in without), None)


class Router:
    """Decides which server answers which keys. *Thread-safe.*

    Args:
        names: of the servers; the server of a key depends on them, but not on their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rests: dict[int, tuple[float, float]] = {}  # by server: end and duration of its rest
        self._shares: dict[str, _KnownShares] = {}  # by model

    def route(
        self,
        keys: Mapping[str, KeyArray],
        call: PartCall[Call],
        shares: ShareCalls[Call] | None = None,
        *,
        between_replicas: bool = True,
    ) -> Routed[Call]:
        """Request the keys of a lookup in parts.

        Yields calls, and is sent the answers or errors. A lost connection is retried once; after that, or if a server does not
        answer in time, is not ready or lacks the version, its keys go to others: to other servers of their share.

        Args:
            keys: (n,) of each table.
            shares: further calls; None if every server has all rows.
            between_replicas: whether keys are also split over servers with all rows; if not, one of these must answer.

        Returns:
            Parts of one version with all keys; None if one server must answer all of them.

        Raises:
            MissingShareError: no server answers keys of a share.
            HPSError: a server refused its keys for another reason.
        """
        if shares is None:
            return (yield from self._route_whole(keys, call, frozenset()))
        count, known = len(self._names), self._shares.setdefault(shares.model, _KnownShares())
        doing = f"looking up model {shares.model!r}"
        yield from self._learn(known, shares, known.to_ask(count, self._resting()))
        failed: set[int] = set()  # layouts, by their number of shares
        failure: HPSError | None = None
        for _ in range(_MOST_LAYOUTS_TRIED):
            layout = known.best(count, failed)
            if not between_replicas and not known.is_split:
                return None
            if layout is None and known.is_split:
                raise failure if isinstance(failure, MissingShareError) else self._refusal(doing, known)
            try:
                if layout is not None and layout.of > 1:
                    return (yield from self._route_shares(keys, call, shares, layout, known))
                others = frozenset() if layout is None else frozenset(range(count)) - {*layout.replicas[0]}
                parts = yield from self._route_whole(keys, call, others)
                if parts is not None or not others:
                    return parts
                raise MissingShareError(f"{doing}: no server with all rows answers", (0,))
            except MissingShareError as error:
                failure = error
                failed.add(1 if layout is None else layout.of)
                asked = known.to_ask(count, self._resting(), now=True) if known.best(count, failed) is None else []
            except MisplacedKeysError as error:  # a server has another share by now
                failure, asked = error, list(range(count))
            yield from self._learn(known, shares, asked)
        raise failure or self._refusal(doing, known)

    @staticmethod
    def _refusal(doing: str, known: _KnownShares) -> MissingShareError:
        return MissingShareError(f"{doing}: {refusal_text(known.layouts)}", known.layouts[0].missing)

    def _learn(
        self, known: _KnownShares, calls: ShareCalls[Call], servers: Sequence[int]
    ) -> Generator[PartRequests[Call], Outcomes, None]:
        """Ask servers for their shares of a model."""
        if not servers:
            return
        known.asking(servers)
        probed = self._probe(servers)
        outcomes = yield [(server, calls.declare()) for server in servers]
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, Declared):
                known.declare(server, outcome.share)
                self._rests.pop(server, None)
                continue
            known.refusals[server] = _error_of(outcome)
            if isinstance(outcome, _SILENT):
                known.doubt(server)
                self._rest(server, server in probed)

    def _route_whole(self, keys: Mapping[str, KeyArray], call: PartCall[Call], others: Collection[int]) -> Routed[Call]:
        """Request keys from servers with all rows; `others` are not asked."""
        excluded, probed = self._unavailable(others), set[int]()
        lost: set[int] = set()
        lookup = _Lookup(keys)
        missing: IndexArray | None = None
        done: list[tuple[_RequestedPart, PartAnswer]] = []
        for _ in range(_MOST_ROUNDS):
            parts = lookup.split(missing, self._names, excluded, done)
            probed |= self._probe(part.server for part in parts)
            outcomes = yield [(part.server, call(lookup.keys(part), part.rows)) for part in parts]
            failed: list[_RequestedPart] = []
            for part, outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, PartAnswer):
                    done.append((part, outcome))
                    self._rests.pop(part.server, None)
                    continue
                if not isinstance(outcome, _ELSEWHERE):
                    raise _error_of(outcome)
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

    def _route_shares(
        self,
        keys: Mapping[str, KeyArray],
        call: PartCall[Call],
        shares: ShareCalls[Call],
        layout: ShareLayout,
        known: _KnownShares,
    ) -> Routed[Call]:
        """Request keys from the servers of their shares.

        Answers of several versions are made one by requesting the version of most keys by its number; if a share lacks it, the
        next one.

        Raises:
            MissingShareError: no server of a share answers.
            NotReadyError: no version is served by all shares with keys.
        """
        doing = f"looking up model {shares.model!r}"
        lookup, done = _Lookup(keys), list[tuple[_RequestedPart, PartAnswer]]()
        resting, probed, lost = self._resting(), set[int](), set[int]()
        failed, without_version = set[int](), set[int]()
        version, refused = "", set[str]()  # the version requested by its number, and those that a share lacks
        seen: Counter[str] = Counter()
        last: HPSError | None = None
        while True:
            parts, lacking = lookup.split_shares(
                self._names, layout, [resting | failed | without_version, failed | without_version], done
            )
            if lacking is not None and version and not failed.issuperset(layout.replicas[lacking]):
                refused.add(version)
                version = next((other for other, _ in seen.most_common() if other not in refused), "")
                if not version:
                    raise NotReadyError(f"{doing}: its shares serve different versions, got {', '.join(sorted(seen))}; retry")
                without_version, done = set(), [(part, answer) for part, answer in done if answer.version == version]
                continue
            if lacking is not None:
                text = f"{doing}: no server of share {lacking}/{layout.of} answers"
                raise MissingShareError(f"{text}: {last}" if last else text, (lacking,)) from last
            probed |= self._probe(part.server for part in parts)
            outcomes = yield [
                (
                    part.server,
                    shares.part_of(lookup.keys(part), part.rows, version) if version else call(lookup.keys(part), part.rows),
                )
                for part in parts
            ]
            complete = True
            for part, outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, PartAnswer):
                    done.append((part, outcome))
                    self._rests.pop(part.server, None)
                    continue
                complete = False
                if not isinstance(outcome, _OF_OTHER_REPLICAS):
                    raise _error_of(outcome)
                last = outcome
                if isinstance(outcome, UnknownVersionError) and version:
                    without_version.add(part.server)
                elif isinstance(outcome, RemoteConnectionError) and part.server not in lost:
                    lost.add(part.server)
                else:
                    failed.add(part.server)
                    known.doubt(part.server)
                    if isinstance(outcome, _SILENT):
                        self._rest(part.server, part.server in probed)
            if not complete:
                continue
            counts: Counter[str] = Counter()
            for part, answer in done:
                counts[answer.version] += 0 if part.flat is None else part.flat.size
            if len(counts) == 1:
                return [(part.rows, answer) for part, answer in done]
            seen |= counts
            version = next((other for other, _ in counts.most_common() if other not in refused), "")
            without_version, done = set(), [(part, answer) for part, answer in done if answer.version == version]
            if not version or len(refused) > _MOST_ROUNDS:
                raise NotReadyError(f"{doing}: its shares serve different versions, got {', '.join(sorted(seen))}; retry")

    def route_write(
        self,
        keys: KeyArray,  # (n,)
        write: Callable[[IndexArray], Call],  # of the keys at these positions
        shares: ShareCalls[Call],
    ) -> RoutedWrite[Call]:
        """Write keys to every server that holds them, once. Yields calls as `route`.

        A server with another share by now has refused its keys whole: they are sent to the servers that hold them now. One that
        does not say its share has acknowledged no key, of its last share or, if that is unknown, of all.

        Returns:
            The modified version; None if no server holds a share, or there are no keys: one server must answer.

        Raises:
            MissingShareError: no server is known for some of the keys; nothing was written.
            PartialWriteError: some servers did not acknowledge their keys, or modified another version.
            HPSError: no server acknowledged its keys.
        """
        count, known = len(self._names), self._shares.setdefault(shares.model, _KnownShares())
        # Each time: a server that was started again with another share accepts keys of the old one that are in both, and would
        # miss the others.
        yield from self._learn(known, shares, range(count))
        if not known.is_split or not keys.size:
            return None
        versions: dict[int, str] = {}
        acknowledged = {server: np.zeros(keys.size, np.bool_) for server in range(count)}
        failures = dict(known.refusals)
        for _ in range(_MOST_LAYOUTS_TRIED):
            owned = {server: share.owns(keys) for server, share in known.declared.items()}
            if not versions and not np.logical_or.reduce(list(owned.values())).all():
                raise self._refusal(f"writing to model {shares.model!r}", known)
            rows = {server: np.flatnonzero(of_server & ~acknowledged[server]) for server, of_server in owned.items()}
            servers = [server for server in sorted(rows) if rows[server].size and server not in failures]
            outcomes = yield [(server, write(rows[server])) for server in servers]
            misplaced: dict[int, HPSError] = {}
            for server, outcome in zip(servers, outcomes, strict=True):
                if isinstance(outcome, Written):
                    versions[server] = outcome.version
                    acknowledged[server][rows[server]] = True
                elif isinstance(outcome, MisplacedKeysError):
                    misplaced[server] = outcome
                else:
                    failures[server] = _error_of(outcome)
                    known.doubt(server)
            if not misplaced:
                break
            yield from self._learn(known, shares, range(count))
            failures |= known.refusals
        else:
            failures |= misplaced
        return self._written(keys, known, versions, acknowledged, failures)

    def _written(
        self,
        keys: KeyArray,
        known: _KnownShares,
        versions: dict[int, str],
        acknowledged: Mapping[int, BoolArray],
        failures: dict[int, HPSError],
    ) -> str:
        """Return the version of most acknowledged keys, if every server acknowledged all its keys in this version."""
        if not versions:
            raise next((error for error in failures.values() if isinstance(error, _SILENT)), next(iter(failures.values())))
        counts: Counter[str] = Counter()
        for server, version in versions.items():
            counts[version] += int(acknowledged[server].sum())
        version = max(counts, key=counts.__getitem__)
        missed: BoolArray = ~np.logical_or.reduce(list(acknowledged.values()))
        for server in acknowledged:
            share = known.declared.get(server, _WHOLE)
            owned = share.owns(keys)
            if versions.get(server, version) != version:
                missed |= owned
                failures[server] = ConflictError(f"it modified version {versions[server]}, others modified version {version}")
            missed |= owned & ~acknowledged[server]
        if not missed.any():
            return version
        reasons = {self._names[server]: error for server, error in failures.items()}
        raise PartialWriteError(keys[missed], keys.size, reasons)

    def _resting(self) -> set[int]:
        now = time.monotonic()
        return {server for server, (until, _) in list(self._rests.items()) if until > now}

    def _unavailable(self, others: Collection[int]) -> set[int]:
        """Return the servers that rest, or are others; none rest if all do."""
        excluded = self._resting() | {*others}
        return excluded if len(excluded) < len(self._names) else {*others}

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


def _error_of(outcome: PartAnswer | Declared | Written | HPSError) -> HPSError:
    return outcome if isinstance(outcome, HPSError) else HPSError("routing keys: got the answer to another question")


class _Lookup:
    """The keys of all tables, in one array. *One lookup.*"""

    def __init__(self, tables: Mapping[str, KeyArray]) -> None:
        self._tables = tables
        self._flat = np.concatenate([np.empty(0, np.int64), *tables.values()])
        self._ends = np.cumsum([table.size for table in tables.values()])
        self._share_indices: IndexArray | None = None

    def split(
        self,
        missing: IndexArray | None,
        names: Sequence[str],
        excluded: Collection[int],
        done: Iterable[tuple[_RequestedPart, PartAnswer]],
    ) -> list[_RequestedPart]:
        """Split keys over the servers that are not excluded.

        Args:
            missing: positions of the keys, in order; None: all.
            done: earlier answers; tables without keys are requested until one has them.
        """
        servers = server_indices(self._flat if missing is None else self._flat[missing], names, excluded)
        return self._parts(missing, servers, len(names), min(set(range(len(names))) - set(excluded)), done)

    def split_shares(
        self,
        names: Sequence[str],
        layout: ShareLayout,
        excluded: Sequence[Collection[int]],
        done: Sequence[tuple[_RequestedPart, PartAnswer]],
    ) -> tuple[list[_RequestedPart], int | None]:
        """Split the keys without an answer over the servers of their shares.

        Args:
            excluded: servers that get no key; if a share has no other servers, the next of these sets counts for it.
            done: earlier answers; tables without keys are requested until one has them.

        Returns:
            The parts, and None; or, if all servers of a share are excluded by every set, no parts and that share.
        """
        missing: IndexArray | None = None
        if done:
            unanswered = np.ones(self._flat.size, np.bool_)
            for part, _ in done:
                unanswered[slice(None) if part.flat is None else part.flat] = False
            missing = np.flatnonzero(unanswered)
        if self._share_indices is None:
            self._share_indices = share_indices(self._flat, layout.of)
        of_keys = self._share_indices if missing is None else self._share_indices[missing]
        keys = self._flat if missing is None else self._flat[missing]
        wanted = np.flatnonzero(np.bincount(of_keys, minlength=layout.of)).tolist()
        servers = np.empty(keys.size, np.intp)
        for share in wanted:
            usable = _usable(layout.replicas[share], excluded)
            if not usable:
                return [], share
            mine = of_keys == share
            servers[mine] = usable[0]
            if len(usable) > 1:
                servers[mine] = np.array(usable)[server_indices(keys[mine], [names[server] for server in usable])]
        anywhere = 0
        if not wanted:
            found = [usable for replicas in layout.replicas if (usable := _usable(replicas, excluded))]
            if not found:
                return [], 0
            anywhere = found[0][0]
        return self._parts(missing, servers, len(names), anywhere, done), None

    def _parts(
        self,
        missing: IndexArray | None,
        servers: IndexArray,
        count: int,
        anywhere: int,
        done: Iterable[tuple[_RequestedPart, PartAnswer]],
    ) -> list[_RequestedPart]:
        """Return a part for each server.

        Args:
            servers: of each key.
            anywhere: the server of a lookup without keys.
        """
        counts = np.bincount(servers, minlength=count)
        used_servers = np.flatnonzero(counts).tolist()
        if missing is None and len(used_servers) <= 1:
            return [_RequestedPart(used_servers[0] if used_servers else anywhere, None, None)]
        order = np.argsort(servers.astype(np.min_scalar_type(count)), kind="stable")
        order = order if missing is None else missing[order]
        answered = {table for _, answer in done for table in answer.vectors}
        bare = [table for table, keys in self._tables.items() if not keys.size and table not in answered]
        ends = np.cumsum(counts).tolist()
        parts: list[_RequestedPart] = []
        for server in used_servers:
            flat = order[ends[server] - counts[server] : ends[server]]
            parts.append(_RequestedPart(server, flat, self._by_table(flat, () if parts else bare)))
        return parts

    def keys(self, part: _RequestedPart) -> Mapping[str, KeyArray]:
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


def _usable(servers: Sequence[int], excluded: Sequence[Collection[int]]) -> list[int]:
    """Return the servers that are not in the first of some sets that leaves any."""
    return next((left for without in excluded if (left := [server for server in servers if server not in without])), [])


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
    done: list[tuple[_RequestedPart, PartAnswer]],
) -> tuple[list[_RequestedPart], list[tuple[_RequestedPart, PartAnswer]], int]:
    """Return the parts of other versions than that of most keys, the parts of that version, and a server with it."""
    if len({answer.version for _, answer in done}) == 1:
        return [], done, done[0][0].server
    counts: Counter[str] = Counter()
    for part, answer in done:
        counts[answer.version] += 0 if part.flat is None else part.flat.size
    version = max(counts, key=counts.__getitem__)
    right = [(part, answer) for part, answer in done if answer.version == version]
    return [part for part, answer in done if answer.version != version], right, right[0][0].server
