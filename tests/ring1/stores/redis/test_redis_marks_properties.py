"""The rules of marks, searched in a model; the scripts that carry them out, compared with a mirror in Python.

`tests/nightly/stores/redis/test_redis_marks_search.py` searches exhaustively.
"""

import random
from contextlib import closing
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from hps.stores.redis.catalog import Catalog
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.marks import (
    LOADING,
    MOST_WRITERS,
    UNKNOWN,
    Mark,
    Process,
    can_promote,
    is_valid,
    loaded_mark,
    loading_mark,
    opened,
    parse,
    rows_lost,
    writable,
)
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import ApplyRows, Guard, SendKeys, StoreRows
from tests.tables.redis_order_model import Search, start


@pytest.mark.parametrize(
    ("processes", "budget"),
    [
        (2, {"writes": 1, "fetches": 2, "losses": 1}),
        (2, {"writes": 1, "fetches": 1, "losses": 1, "crashes": 1}),
        (1, {"writes": 2, "fetches": 1, "losses": 1, "failures": 1}),
        (1, {"writes": 2, "fetches": 1, "failures": 1, "crashes": 1}),
        (1, {"writes": 1, "fetches": 1, "crashes": 1, "copies": 1}),
        (2, {"applies": 1, "fetches": 1, "losses": 1}),
    ],
)
def test_no_interleaving_shows_a_process_what_is_older_than_its_own_write(processes, budget):
    search = Search()
    assert search.executions(start(processes, **budget)) > search.transitions > 1500


DIM, ROWS = 2, 400  # more keys than a script takes
LAYOUT = RedisLayout.of("hps_et.shop.item", DIM, 1)
PARTITION = LAYOUT.partitions[0]
KEYS = np.arange(ROWS, dtype=np.int64)
MARKS = [Mark(incarnation, generation, "b", ("w",)) for incarnation in "ij" for generation in "gh"]
WRITES = ("promote", "write", "promote", "apply", "write later", "apply", "remove", "promote", "delete", "delete later")
STEPS = [
    ("change", None, MARKS[0], False),
    *(  # each under another mark than the partition has, and under its own
        (what, mark, part, None if what == "delete" else 1 + turn % 9)
        for turn, what in enumerate(WRITES)
        for part in (slice(0, 3), slice(0, ROWS), slice(2, 5))
        for mark in (MARKS[1], MARKS[0])
    ),
    ("change", MARKS[1], MARKS[3], True),  # refused
    ("change", MARKS[0], MARKS[1], False),  # of the same incarnation
    ("apply", MARKS[1], slice(0, 5), 1),
    ("change", MARKS[1], MARKS[2], False),
    ("apply", MARKS[2], slice(0, 5), 1),
    ("change", MARKS[2], MARKS[0], True),
    ("write", MARKS[0], slice(0, 3), 2),
    ("lose", None, None, True),
    ("write", MARKS[0], slice(0, 3), 3),
    ("change", None, MARKS[3], False),
    ("lose", None, None, False),
    ("promote", MARKS[3], slice(0, 3), 4),
]


class Mirror:
    """What the scripts do, in Python."""

    def __init__(self):
        self.mark, self.rows, self.sequences, self.highest = b"", {}, {}, 0

    def change(self, expected, mark, empty):
        if self.mark == expected:
            self.rows = {} if empty else self.rows
            if mark.split()[0] != self.mark[: mark.index(b" ")]:
                self.sequences, self.highest = {}, 0
            self.mark = mark
        return self.mark

    def write(self, mark, rows):
        if self.mark == mark:
            self.rows.update(rows)

    def promote(self, mark, rows):
        if self.mark == mark:
            self.rows = {**rows, **self.rows}

    def apply(self, mark, keys, sequences, row):
        made = [key for key in keys if self.sequences.get(key, 0) <= sequences[key]]
        if self.mark == mark:
            self.rows = {key: held for key, held in self.rows.items() if key not in made}
            self.rows |= dict.fromkeys(made, row) if row else {}
            self.sequences |= {key: sequences[key] for key in made}
            self.highest = max([self.highest, *(sequences[key] for key in keys)])
        return [key in made for key in keys]

    def later(self, mark, keys, known):
        if self.mark == mark:
            self.highest = max(self.highest, known)
            self.sequences |= dict.fromkeys(keys, self.highest + 1)

    def delete(self, mark, keys):
        if self.mark == mark:
            self.rows = {key: row for key, row in self.rows.items() if key not in keys}


def perform(step, mirror, nodes, catalog, client):
    what, mark, part, more = step
    if what == "change":
        expected = b"" if mark is None else mark.text
        (there,) = catalog.change([(PARTITION, expected, part)], empty=[more])
        assert there == mirror.change(expected, part.text, more)
    elif what == "lose":
        mirror.mark, mirror.rows = b"", mirror.rows if more else {}
        client.delete(*([PARTITION.mark] if more else [PARTITION.mark, PARTITION.values]))
    elif what in ("apply", "remove"):
        order, guard = KEYS[part].copy(), Guard(PARTITION.mark, mark.text, PARTITION.sequences)
        sequences = (more << 30) * (KEYS % 3 + 1)
        raw = np.full((ROWS, DIM), more, np.float32).view(np.uint8) if what == "apply" else None
        big = sequences.astype(">i8").view(np.uint8).reshape(-1, 8)
        request = ApplyRows(PARTITION.slot, PARTITION.values, guard, KEYS, order, big, LAYOUT.header, raw)
        allowed = mirror.mark == mark.text
        made = mirror.apply(mark.text, order.tolist(), sequences.tolist(), b"" if raw is None else raw[0].tobytes())
        nodes.run([request])
        assert request.applied().tolist() == made if allowed else request.reply == -1
    else:
        order, guard = KEYS[part].copy(), Guard(PARTITION.mark, mark.text)
        what, *later = what.split()
        if later:
            known = more << 31
            guard = Guard(PARTITION.mark, mark.text, PARTITION.sequences, known.to_bytes(8))
            mirror.later(mark.text, order.tolist(), known)
        if what == "delete":
            request = SendKeys(PARTITION.slot, ("HDEL", PARTITION.values), KEYS, order, guard=guard)
            mirror.delete(mark.text, set(order.tolist()))
        else:
            vectors = np.full((ROWS, DIM), more, np.float32)
            header, raw, add = LAYOUT.header, vectors.view(np.uint8), what == "promote"
            request = StoreRows(PARTITION.slot, PARTITION.values, KEYS, order, header, raw, guard, promotion=add)
            getattr(mirror, what)(mark.text, dict.fromkeys(order.tolist(), vectors[0].tobytes()))
        allowed = mirror.mark == mark.text
        nodes.run([request])
        assert (request.reply not in (None, -1)) == allowed
    rows = {int.from_bytes(field, "little"): row for field, row in client.hgetall(PARTITION.values).items()}
    assert (client.get(PARTITION.mark) or b"", rows) == (mirror.mark, mirror.rows)
    noted = {field: int.from_bytes(number) for field, number in client.hgetall(PARTITION.sequences).items()}
    assert noted.pop(b"h", 0) == mirror.highest
    assert {int.from_bytes(field, "little"): number for field, number in noted.items()} == mirror.sequences


@pytest.fixture
def nodes(server):
    waits = dict.fromkeys(("connect_timeout_s", "read_timeout_s", "timeout_s"), 20.0)
    with closing(RedisNodes(server.address, num_node_connections=1, **waits)) as nodes:
        yield nodes


@pytest.mark.redis
@pytest.mark.parametrize("seed", range(3))
def test_the_scripts_do_what_their_mirror_does(nodes, client, seed):
    mirror, catalog, steps = Mirror(), Catalog(nodes, 1), STEPS.copy()
    if seed:
        random.Random(seed).shuffle(steps)
    for step in steps:
        perform(step, mirror, nodes, catalog, client)


def test_an_incarnation_ends_where_rows_go_and_only_there():
    tokens, bases = ("w", "x", "*"), ("-", "~", "b", "other")
    marks = [Mark("i", "g", base, writers) for base in bases for size in range(4) for writers in permutations(tokens, size)]
    processes = [Process()] + [
        Process("b", alias, token, previous, passive)
        for alias, token, previous, passive in product(("", "other"), (None, "w", "y"), (None, "x", "z"), (False, True))
    ]
    emptied = 0
    for mark, me in product(marks, processes):
        step = opened(mark, me, lambda: "fresh")
        if step is not None:
            emptied += step[1]
            assert (step[0].incarnation == "i") is not step[1], (mark, me)
            assert step[0] == mark or step[0].generation == "fresh"
    assert emptied


THERE, IN_LOAD, READ_ONLY = Mark("i", "g", "b"), Mark("i", "g", LOADING), Process("b", token=None, passive=True)
NEW = str  # "" for each text that is fresh


def test_rows_of_hugectr_are_older_than_what_the_database_below_was_modified_with():
    assert opened(None, READ_ONLY, NEW) == (Mark("", "", "b"), True)
    assert opened(None, replace(READ_ONLY, passive=False), NEW) == (Mark("", "", "b"), False)


def test_rows_are_taken_over_of_the_same_files_under_their_other_name_and_of_nobody():
    me = Process("b", "a", None)
    assert opened(Mark("i", "g", "a"), me, NEW) == opened(Mark("i", "g"), me, NEW) == (Mark("i", "", "b"), False)
    for mark in (Mark("i", "g", "c"), Mark("i", "g", UNKNOWN, ("*",))):
        assert opened(mark, me, NEW) is None


def test_a_table_that_was_modified_since_is_not_a_lost_one():
    assert rows_lost(Mark("i", "g"), None)
    assert not rows_lost(Mark("i", "g", UNKNOWN, ("*",)), None)


def test_who_writes_is_a_writer_except_during_a_load_and_the_one_longest_known_is_forgotten():
    me, many = Process("b", token="w"), tuple(f"w{i}" for i in range(MOST_WRITERS))
    assert writable(THERE, me, NEW) == Mark("i", "", "b", ("w",))
    assert writable(IN_LOAD, me, NEW) == Mark("i", "", LOADING)
    assert writable(replace(THERE, writers=many), me, NEW).writers == (*many[1:], "w")


def test_rows_below_are_added_where_they_are_the_latest_and_nobody_loads():
    assert can_promote(THERE, Process("b"))
    assert not can_promote(THERE, READ_ONLY)
    assert not can_promote(IN_LOAD, Process())


def test_with_nothing_below_rows_count_that_a_load_has_begun_to_replace():
    assert is_valid(IN_LOAD, Process(), THERE)
    assert not is_valid(replace(IN_LOAD, incarnation="j"), Process(), THERE)


def test_what_was_on_its_way_before_a_load_begins_or_ends_is_refused():
    assert loading_mark(THERE, NEW) == Mark("i", "", LOADING)
    assert loaded_mark(IN_LOAD, "b", NEW) == Mark("i", "", "b")


@pytest.mark.parametrize("text", [None, b"", b"0123456789abcdef", b"a b c", b"a b c d e", b"a b c ,", b"a b ? -"])
def test_what_is_no_mark_is_none(text):
    assert parse(text) is None


def test_a_mark_is_read_as_it_is_written():
    for mark in (*MARKS, Mark("i", "g"), Mark("i", "g", "~"), Mark("i", "g", "-", ("*", "w"))):
        assert parse(mark.text) == mark
