"""The protocol of static tables (`cuda/static_tables.cuh`), by all interleavings of one query with changes of its buckets.

Nobody else writes to a bucket that a writer owns, so changes are a sequence of stores, and a query, which stores nothing, meets
them at any of its loads. Loads between two fences, as those of the lanes that look at one bucket, come in any order. Fences and
the turns of writers are not modelled.
"""

import itertools
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

HOME, OTHER, BEYOND = range(3)
SLOTS, HALVES, MOST_STRAYS = 2, 2, 255
PLACES = {"key": (HOME, OTHER), "a": (HOME, BEYOND), "b": (BEYOND, HOME), "c": (BEYOND, OTHER)}
"""Keys, each with its home and its other bucket. Queries are for the first."""


class Header(NamedTuple):
    version: int
    occupied: frozenset[int]
    strays: int


Address = tuple[str, int, int, int]
Memory = dict[Address, Any]
Steps = Generator[None, None, None]
Query = Generator[list[Address], list[Any], str | list[str]]


def header(bucket: int) -> Address:
    return "header", bucket, 0, 0


def key_at(bucket: int, slot: int) -> Address:
    return "key", bucket, slot, 0


def row_at(bucket: int, slot: int) -> list[Address]:
    return [("row", bucket, slot, half) for half in range(HALVES)]


# -- writers: every `yield` ends a store -----------------------------------------------------------------------------------


class Table:
    """The memory of three buckets, and the steps of those who change it."""

    def __init__(self, residents: dict[tuple[int, int], str], strays: int) -> None:
        self.memory: Memory = {}
        for bucket in (HOME, OTHER, BEYOND):
            occupied = frozenset(slot for slot in range(SLOTS) if (bucket, slot) in residents)
            away = sum(PLACES[key][0] == bucket != at for (at, _slot), key in residents.items())
            self.memory[header(bucket)] = Header(0, occupied, min(away + strays, MOST_STRAYS))
            for slot in range(SLOTS):
                self.memory[key_at(bucket, slot)] = residents.get((bucket, slot), "")
                for at in row_at(bucket, slot):
                    self.memory[at] = self.memory[key_at(bucket, slot)]

    def find(self, key: str) -> tuple[int, int] | None:
        for bucket in PLACES[key]:
            for slot in self.memory[header(bucket)].occupied:
                if self.memory[key_at(bucket, slot)] == key:
                    return bucket, slot
        return None

    def empty(self, bucket: int) -> int | None:
        return min(set(range(SLOTS)) - self.memory[header(bucket)].occupied, default=None)

    def change(self, bucket: int, **changes: Any) -> Steps:
        self.memory[header(bucket)] = self.memory[header(bucket)]._replace(**changes)
        yield

    def own(self, *buckets: int) -> Steps:
        for bucket in buckets:
            yield from self.change(bucket, version=self.memory[header(bucket)].version + 1)

    def give_back(self, bucket: int, changed: bool = True) -> Steps:
        yield from self.change(bucket, version=self.memory[header(bucket)].version + (1 if changed else -1))

    def store_row(self, bucket: int, slot: int, row: str) -> Steps:
        for at in row_at(bucket, slot):
            self.memory[at] = row
            yield

    def admit(self, bucket: int, slot: int, key: str, strays: int) -> Steps:
        self.memory[key_at(bucket, slot)] = key
        yield
        yield from self.change(bucket, occupied=self.memory[header(bucket)].occupied | {slot}, strays=strays)

    def counted(self, bucket: int, by: int) -> int:
        strays: int = self.memory[header(bucket)].strays
        return strays if strays == MOST_STRAYS else strays + by

    def move(self, key: str, follower: str = "") -> Steps:
        """Move a key to its other place; then a `follower` takes its slot, before the bucket is given back."""
        bucket, slot = self.find(key)
        home, target = PLACES[key][0], sum(PLACES[key]) - bucket
        yield from self.own(bucket, target)
        there, leaves_home = self.empty(target), bucket == home
        yield from self.store_row(target, there, self.memory[row_at(bucket, slot)[0]])
        yield from self.admit(target, there, key, self.counted(target, 0 if leaves_home else -1))
        occupied = self.memory[header(bucket)].occupied - {slot}
        yield from self.change(bucket, occupied=occupied, strays=self.counted(bucket, 1 if leaves_home else 0))
        yield from self.give_back(target)
        if follower:
            yield from self.fill(follower, bucket, slot)
        yield from self.give_back(bucket)

    def fill(self, key: str, bucket: int, slot: int) -> Steps:
        yield from self.admit(bucket, slot, key, self.memory[header(bucket)].strays)
        if bucket != PLACES[key][0]:
            yield from self.change(PLACES[key][0], strays=self.counted(PLACES[key][0], 1))
        yield from self.store_row(bucket, slot, key)

    def write(self, key: str) -> Steps:
        """Replace a resident key's row by another one, or admit the key."""
        home, other = PLACES[key]
        place = self.find(key)
        bucket, slot = place or ((home, self.empty(home)) if self.empty(home) is not None else (other, self.empty(other)))
        yield from self.own(*{home, bucket})
        yield from self.store_row(bucket, slot, f"{key}'") if place else self.fill(key, bucket, slot)
        yield from self.give_back(bucket)
        if bucket != home:
            yield from self.give_back(home, changed=False)

    def erase(self, key: str) -> Steps:
        (bucket, slot), home = self.find(key), PLACES[key][0]
        yield from self.own(*{home, bucket})
        yield from self.change(bucket, occupied=self.memory[header(bucket)].occupied - {slot})
        if bucket != home:
            yield from self.change(home, strays=self.counted(home, -1))
        yield from self.give_back(bucket)
        if bucket != home:
            yield from self.give_back(home, changed=False)


def changes_of(table: Table) -> Iterator[tuple[str, ...]]:
    """The changes that a table allows: methods of it, with their arguments."""
    for key in PLACES:
        place = table.find(key)
        if place is None:
            if any(table.empty(bucket) is not None for bucket in PLACES[key]):
                yield "write", key
            continue
        yield "write", key
        yield "erase", key
        if table.empty(sum(PLACES[key]) - place[0]) is not None:
            yield "move", key
            yield from (("move", key, by) for by in PLACES if place[0] in PLACES[by] and table.find(by) is None)


class History(NamedTuple):
    """What a query may load: of each address, the values and from which store on they are there."""

    values: dict[Address, tuple[tuple[int, Any], ...]]
    resident: bool  # the key was, all the time


def histories(rounds: int) -> list[History]:
    """Run as many changes, one after the other, of tables of all kinds."""
    made: dict[Any, History] = {}

    def grow(start: tuple[Any, ...], changes: list[tuple[str, ...]]) -> None:
        table, time = Table(*start), 0
        values = {at: [(0, value)] for at, value in table.memory.items() if at[1] != BEYOND}
        for verb, *arguments in changes:
            for _ in getattr(table, verb)(*arguments):
                changed = [at for at, known in values.items() if known[-1][1] != table.memory[at]]
                time += bool(changed)
                for at in changed:
                    values[at].append((time, table.memory[at]))
        if len(changes) == rounds:
            history = History({at: tuple(known) for at, known in values.items()}, ("erase", "key") not in changes)
            made[history.resident, *history.values.values()] = history
            return
        for change in changes_of(table):
            grow(start, [*changes, change])

    beside: tuple[dict[tuple[int, int], str], ...] = {}, {(HOME, 1): "a"}, {(HOME, 1): "b"}
    for bucket, others, strays in itertools.product((HOME, OTHER), beside, (0, MOST_STRAYS - 1)):
        grow(({(bucket, 0): "key", **others}, strays), [])
    return list(made.values())


# -- queries: every `yield` is of loads in any order -----------------------------------------------------------------------


def look(bucket: int) -> list[Address]:
    return [header(bucket), *(key_at(bucket, slot) for slot in range(SLOTS))]


def found(loads: list[Any]) -> int | None:
    """Return the slot of the key, as the lanes that looked at a bucket see it."""
    return next((slot for slot in sorted(loads[0].occupied) if loads[1 + slot] == "key"), None)


ABSENT, RETRY = "absent", "retry"


def query(*, both: bool = False, skip: str = "") -> Query:
    """Look for the key as `cuda/query.cu`, which reads `both` buckets at once for few keys; leave a step out with `skip`."""
    loads = yield look(HOME) + (look(OTHER) if both else [])
    there = loads[1 + SLOTS :]
    first = seen = loads[: 1 + SLOTS]
    bucket, slot = HOME, found(seen)
    if slot is None:
        if seen[0].strays:
            bucket, seen = OTHER, (there if both else (yield look(OTHER)))
            slot = found(seen)
            if slot is None and skip != "other":
                seen = yield look(OTHER)
                slot = found(seen)
        if slot is None:
            at_home = None if skip == "home" else found((yield look(HOME)))
            [word] = yield [header(HOME)]
            busy = first[0].version % 2 and skip != "busy"
            return RETRY if at_home is not None or busy or (word != first[0] and skip != "word") else ABSENT
    if seen[0].version % 2 and skip != "odd":
        return RETRY
    row = yield row_at(bucket, slot)
    again, key = yield [header(bucket), key_at(bucket, slot)]
    if (again.version != seen[0].version and skip != "version") or (key != "key" and skip != "key"):
        return RETRY
    return row


def pool() -> Query:
    """As `cuda/pool.cu`, and as far as it finds a key, as `may_be_resident` of `cuda/placement.cuh`."""
    return query(skip="other")


def answers(history: History, query_of: Callable[[], Query]) -> set[str | tuple[str, ...]]:
    """Run a query at all times.

    What it does depends on the values that it has loaded. Of the times when a load gives some value, the first allows whatever
    the later ones do.
    """
    ends: set[str | tuple[str, ...]] = set()
    open_: list[tuple[int, tuple[tuple[Any, ...], ...]]] = [(0, ())]
    seen = set(open_)
    while open_:
        now, loaded = open_.pop()
        steps = query_of()
        try:
            wanted = next(steps)
            for values in loaded:
                wanted = steps.send(list(values))
        except StopIteration as end:
            ends.add(end.value if isinstance(end.value, str) else tuple(end.value))
            continue
        outcomes: list[tuple[int, tuple[Any, ...]]] = [(now, ())]
        for address in wanted:
            changes = history.values[address]
            last = max(i for i, (time, _value) in enumerate(changes) if time <= now)
            first: dict[Any, int] = {}
            for time, value in changes[last:]:
                first.setdefault(value, max(time, now))
            outcomes = [(max(at, time), (*values, value)) for at, values in outcomes for value, time in first.items()]
        for at, values in outcomes:
            state = at, (*loaded, values)
            if state not in seen:
                seen.add(state)
                open_.append(state)
    return ends


def is_wrong(history: History, query_of: Callable[[], Query]) -> bool:
    given = answers(history, query_of) - {RETRY, ("key",) * HALVES, ("key'",) * HALVES}
    return bool(given - {ABSENT} or (history.resident and given))


SHARES = 4  # of the histories: a test takes one


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(
    ("query_of", "rounds"), [(query, 2), (pool, 2), (partial(query, both=True), 1)], ids=["query", "pool", "both"]
)
def test_a_query_misses_no_resident_key_and_keeps_no_wrong_vector(
    query_of: Callable[[], Query], rounds: int, share: int
) -> None:
    assert not any(is_wrong(history, query_of) for history in itertools.islice(histories(rounds), share, None, SHARES))


@pytest.mark.parametrize(
    ("skip", "both", "rounds"),
    [
        ("home", False, 1),
        ("other", True, 1),
        ("word", False, 1),
        ("busy", False, 2),
        ("odd", False, 1),
        ("version", False, 1),
        ("key", False, 2),
    ],
)
def test_no_step_of_a_query_is_in_vain(skip: str, both: bool, rounds: int) -> None:
    assert any(is_wrong(history, partial(query, both=both, skip=skip)) for history in histories(rounds))
