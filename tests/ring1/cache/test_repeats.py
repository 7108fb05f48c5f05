"""Repeats of lookups without the interpreter: which tensors they take, how they call the driver, what workspaces make of them.

Workspaces run on a stand-in for CUDA (`tests/fakes/host_cuda.py`).
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hps.cache.cuda import repeats, structs
from hps.cache.cuda.repeats import (
    UNANSWERED,
    Repeat,
    RepeatedAnswer,
    adopt,
    adopt_joined,
    adopt_tables,
    driver_words,
    exchange_words,
    launch_and_wait,
    work_stream,
)
from hps.errors import NotReadyError
from hps.tensors.batch import Batch
from hps.tensors.dlpack import CPU, CUDA, exchange_table
from hps.testing.caches import DEFAULT, spec
from hps.types import IndexArray
from tests.fakes import host_cuda

DIM, MOST_KEYS, N = 4, 100, 6


class Packed:
    """Arguments of a query of one table, as `device.Arguments` has them."""

    def __init__(self, segments: int = 1) -> None:
        self.bytes = bytearray(segments * structs.SEGMENT.size + structs.QUERY_TAIL.size)
        self._memory = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        self.struct_address = ctypes.addressof(self._memory)
        self.address = 77

    def fields(self, segment: int = 0) -> tuple[int, int, int]:
        """Keys, output and number of keys."""
        keys, out, *_ = read = structs.SEGMENT.unpack_from(self.bytes, segment * structs.SEGMENT.size)
        return keys, out, read[structs.SEGMENT.names.index("n")]


@pytest.fixture
def exchange() -> IndexArray:
    table = exchange_table(torch.Tensor)
    assert table is not None
    return exchange_words(table, CPU, 0)


@pytest.fixture
def repeat() -> Repeat:
    return Repeat(5, 0, Packed()).of_one_table(DIM, MOST_KEYS)


def asked(exchange: IndexArray, repeat: Repeat, keys: Any, out: Any, n: int = N) -> int:
    stream: int = adopt(exchange, repeat.words, id(keys), id(out), n)
    return stream


@pytest.mark.parametrize("shape", [(N,), (2, 3), (1, N, 1)])
def test_addresses_and_numbers_of_keys_follow_the_tensors(exchange: IndexArray, repeat: Repeat, shape: tuple[int, ...]) -> None:
    for extra in (0, 1):
        keys, out = torch.zeros(shape, dtype=torch.int64), torch.zeros(N + extra, DIM)
        assert asked(exchange, repeat, keys, out) == 0
        assert repeat.arguments.fields() == (keys.data_ptr(), out.data_ptr(), N)
    keys, out = torch.zeros(70, dtype=torch.int64), torch.zeros(100, DIM)
    blocks = []
    for start, n in ((3, 1), (0, 32), (1, 33), (0, 70)):
        part = keys[start : start + n]
        assert asked(exchange, repeat, part, out[4:], n) == 0
        assert repeat.arguments.fields() == (part.data_ptr(), out[4:].data_ptr(), n)
        blocks.append(int(repeat.words[1]))
    assert blocks == [1, 1, 2, 3]


KEYS, OUT = torch.zeros(N, dtype=torch.int64), torch.zeros(N, DIM)


@pytest.mark.parametrize(
    ("keys", "out", "n"),
    [
        (KEYS.int(), OUT, N),
        (KEYS.double(), OUT, N),
        (KEYS.to(torch.uint64), OUT, N),
        (torch.zeros(2 * N, dtype=torch.int64)[::2], OUT, N),
        (torch.zeros(3, 2, dtype=torch.int64).T, OUT, N),
        (KEYS[:5], OUT, N),
        (KEYS, OUT, N - 1),
        (KEYS[:0], OUT, 0),
        (torch.zeros(MOST_KEYS + 1, dtype=torch.int64), torch.zeros(MOST_KEYS + 1, DIM), MOST_KEYS + 1),
        (KEYS, OUT.half(), N),
        (KEYS, OUT.double(), N),
        (KEYS, OUT.int(), N),
        (KEYS, OUT[: N - 1], N),
        (KEYS, torch.zeros(N, 2 * DIM)[:, ::2], N),
        (KEYS, torch.zeros(N * DIM + 1)[1:], N),
        (KEYS.numpy(), OUT, N),
        (KEYS, [0.0], N),
        (torch.zeros(N, dtype=torch.int64).to_sparse(), OUT, N),
    ],
)
def test_other_tensors_are_left_to_the_interpreter_and_nothing_is_written(
    exchange: IndexArray, repeat: Repeat, keys: Any, out: Any, n: int
) -> None:
    assert asked(exchange, repeat, keys, out, n) == -1
    assert repeat.arguments.fields() == (0, 0, 0)


def test_tensors_of_another_device_are_left_to_the_interpreter(repeat: Repeat) -> None:
    table = exchange_table(torch.Tensor)
    assert table is not None
    for words in (exchange_words(table, CPU, 1), exchange_words(table, CUDA, 0)):
        assert asked(words, repeat, KEYS, OUT) == -1


def test_checked_addresses_are_written_as_adopted_ones_are(exchange: IndexArray, repeat: Repeat) -> None:
    for n in (1, 33, MOST_KEYS):
        keys, out = torch.zeros(n, dtype=torch.int64), torch.zeros(n, DIM)
        assert asked(exchange, repeat, keys, out, n) == 0
        adopted, blocks = repeat.arguments.fields(), int(repeat.words[1])
        assert asked(exchange, repeat, KEYS, OUT) == 0
        assert repeat.point(keys.data_ptr(), out.data_ptr(), n)
        assert (repeat.arguments.fields(), int(repeat.words[1])) == (adopted, blocks)
    for address, n in ((64, 0), (64, MOST_KEYS + 1), (68, N)):
        assert not repeat.point(64, address, n)


def test_tensors_of_several_tables_are_adopted_together(exchange: IndexArray) -> None:
    sizes, dims = (5, 1, 70), (4, 16, 8)
    repeat = Repeat(5, 4, Packed(3)).of_tables(sizes, dims)
    keys = [torch.zeros(n, dtype=torch.int64) for n in sizes]
    outs = [torch.zeros(n, dim) for n, dim in zip(sizes, dims, strict=True)]

    def adopted(tensors: list[torch.Tensor]) -> int:
        stream: int = adopt_tables(exchange, repeat.words, repeat.tables, np.array([*map(id, tensors)]))
        return stream

    assert adopted([*keys, *outs]) == 0
    for segment, (key, out) in enumerate(zip(keys, outs, strict=True)):
        assert repeat.arguments.fields(segment) == (key.data_ptr(), out.data_ptr(), 0)
    for place in range(3):
        for wrong in (torch.zeros(sizes[place] + 1, dtype=torch.int64), keys[place].int()):
            assert adopted([*keys[:place], wrong, *keys[place + 1 :], *outs]) == -1
        for wrong in (outs[place].half(), outs[place][:, :-1].contiguous(), torch.zeros(outs[place].numel() + 1)[1:]):
            assert adopted([*keys, *outs[:place], wrong, *outs[place + 1 :]]) == -1


def test_tensors_of_all_tables_in_one_are_adopted_together(exchange: IndexArray) -> None:
    sizes, dims = (5, 1, 70), (4, 7, 8)
    repeat = Repeat(5, 4, Packed(3)).of_tables(sizes, dims)
    keys, out = torch.zeros(76, dtype=torch.int64), torch.zeros(20 + 7 + 560 + 4)

    def adopted(keys: torch.Tensor, out: torch.Tensor) -> int:
        stream: int = adopt_joined(exchange, repeat.words, repeat.tables, id(keys), id(out))
        return stream

    assert adopted(keys, out) == 0
    assert [repeat.arguments.fields(segment)[:2] for segment in range(3)] == [
        (keys.data_ptr() + 8 * key, out.data_ptr() + 4 * element) for key, element in ((0, 0), (5, 20), (6, 27))
    ]
    for wrong in (keys[:75], torch.zeros(77, dtype=torch.int64), keys.int(), keys[::2]):
        assert adopted(wrong, out) == -1
    for narrow in (out[:586], out.half(), out[1:], torch.zeros(1174)[::2]):
        assert adopted(keys, narrow) == -1
    assert adopted(keys, out[4:]) == 0


def test_the_stream_of_host_memory_is_none(exchange: IndexArray) -> None:
    assert work_stream(exchange) == 0


class Driver:
    """Functions of the driver that note their calls."""

    def __init__(self, context: int, **errors: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.context = context
        self.flags, self.ended = np.zeros(1, np.int64), np.zeros(1, np.int64)
        pointer, word = ctypes.c_void_p, ctypes.c_uint

        def made(name: str, act: Callable[..., Any], *kinds: Any) -> Any:
            def call(*values: Any) -> int:
                self.calls.append((name, *act(*values)))
                return 600 if name == "query" and self.busy >= 0 else errors.get(name, 0)

            return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

        def current(at: int) -> tuple[()]:
            ctypes.c_uint64.from_address(at).value = self.context
            return ()

        def launched(kernel: int, *values: Any) -> tuple[Any, ...]:
            self.flags[0] = self.raised
            return kernel, *values

        def queried(stream: int) -> tuple[int]:
            self.busy -= 1
            return (stream,)

        def written(stream: int, at: int, number: int, flags: int) -> tuple[Any, ...]:
            if self.ends:
                ctypes.c_uint64.from_address(at).value = number
            return stream, number, flags

        def answered(*values: int) -> tuple[int, ...]:
            if self.ends:
                self.ended[0] = ctypes.c_int64.from_address(self.number_at).value
            return values

        self.raised, self.ends, self.busy, self.number_at = 0, True, 0, 0
        self._functions = [
            made("launch", launched, pointer, *[word] * 7, pointer, pointer, pointer),
            made("write", written, pointer, pointer, ctypes.c_uint64, word),
            made("query", queried, pointer),
            made("current", current, pointer),
            made("set current", lambda context: (context,), pointer),
            made("launch early", answered, *[pointer] * 4),
            made("record", lambda *values: values, pointer, pointer),
        ]
        addresses = [ctypes.cast(function, pointer).value or 0 for function in self._functions]
        self.words = driver_words(addresses, 9, self.flags.ctypes.data, self.ended.ctypes.data)


LAUNCHED = ("launch", 5, 2, 1, 1, 128, 1, 1, 0, 33, 77, None)


def test_a_repeat_is_launched_and_awaited_on_its_stream() -> None:
    driver, repeat = Driver(context=9), Repeat(5, 2, Packed())
    for number in (1, 2):
        assert launch_and_wait(driver.words, repeat.words, UNANSWERED, 33) == 0
        assert driver.calls[-3:] == [("current",), LAUNCHED, ("write", 33, number, 0)]
    driver.raised = 1 << 32 | 1
    assert launch_and_wait(driver.words, repeat.words, UNANSWERED, 33) == driver.raised
    assert len(driver.calls) == 9


class PackedAnswer:
    """Arguments of an answer of three segments, and how it is launched."""

    def __init__(self, driver: Driver) -> None:
        self.words = np.zeros((3 * structs.ANSWER_SEGMENT.size + structs.ANSWER_TAIL.size) // 8, np.int64)
        self.bytes, self.struct_address, self.address = memoryview(self.words).cast("B"), self.words.ctypes.data, 88
        self.config = np.zeros(2, np.int64)
        self.config_at, self.stream_at = self.config.ctypes.data, self.config.ctypes.data + 8
        self.answer = RepeatedAnswer(6, self, self, 3, 21, None)
        self.launched = ("launch early", self.config_at, 6, 88, None)
        driver.number_at = self.struct_address + 3 * structs.ANSWER_SEGMENT.size + structs.ANSWER_TAIL.offsets["number"]


def test_the_answer_to_the_misses_of_a_repeat_is_launched_after_it_for_its_outputs_and_stream() -> None:
    driver, repeat = Driver(context=9), Repeat(5, 2, Packed(3)).of_tables([3, 4, 5], [DIM] * 3)
    packed, segment = PackedAnswer(driver), structs.ANSWER_SEGMENT
    for nth in range(3):
        structs.SEGMENT.pack_into(repeat.arguments.bytes, nth * structs.SEGMENT.size, 0, 160 + nth, *[0] * 9)
    for number, (driver.raised, left) in enumerate([(0, 0), (1, 0), (repeats.LEFT | 1, repeats.LEFT | 1)], 1):
        assert launch_and_wait(driver.words, repeat.words, packed.answer.words, 33) == driver.raised
        assert driver.calls[-4:] == [("current",), LAUNCHED, packed.launched, ("record", 21, 33)]
        assert (driver.ended, driver.flags) == (number, left)
    assert packed.config[1] == 33
    assert [packed.words[(nth * segment.size + segment.offsets["out"]) // 8] for nth in range(3)] == [160, 161, 162]
    assert np.count_nonzero(packed.words) == 4


def test_the_driver_tells_the_end_of_an_answer_that_is_long() -> None:
    driver = Driver(context=9)
    packed, driver.ends = PackedAnswer(driver), False
    repeat = Repeat(5, 2, Packed(3)).of_tables([3, 4, 5], [DIM] * 3)
    assert launch_and_wait(driver.words, repeat.words, packed.answer.words, 33) == 0
    assert driver.calls == [("current",), LAUNCHED, packed.launched, ("record", 21, 33), ("query", 33)]


@pytest.mark.parametrize("error", [0, 801])
def test_the_driver_tells_the_end_of_a_repeat_that_is_long_or_cannot_say_it(error: int) -> None:
    driver, repeat = Driver(context=9, write=error), Repeat(5, 2, Packed())
    driver.ends, driver.busy = False, 3
    assert launch_and_wait(driver.words, repeat.words, UNANSWERED, 33) == 0
    assert driver.calls == [("current",), LAUNCHED, ("write", 33, 1, 0), *[("query", 33)] * 4]


def test_a_thread_that_works_on_another_device_still_does_so_afterwards() -> None:
    driver = Driver(context=4)
    assert launch_and_wait(driver.words, Repeat(5, 2, Packed()).words, UNANSWERED, 33) == 0
    names = [name for name, *_ in driver.calls]
    assert names == ["current", "set current", "launch", "write", "set current"]
    assert [driver.calls[1], driver.calls[-1]] == [("set current", 9), ("set current", 4)]


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ("current", ["current", "set current", "set current"]),
        ("launch", ["current", "set current", "launch", "set current"]),
        ("query", ["current", "set current", "launch", "launch early", "record", "query", "query", "set current"]),
        ("record", ["current", "set current", "launch", "launch early", "record", "set current"]),
        ("launch early", ["current", "set current", "launch", "launch early", "set current"]),
    ],
)
def test_an_error_of_the_driver_ends_a_repeat(fails: str, left: list[str]) -> None:
    driver = Driver(context=4, **{fails: 700})
    driver.raised, driver.ends, driver.busy = 1, False, 1
    repeat = Repeat(5, 2, Packed(3)).of_tables([3, 4, 5], [DIM] * 3)
    assert launch_and_wait(driver.words, repeat.words, PackedAnswer(driver).answer.words, 33) == -700
    assert [name for name, *_ in driver.calls] == left


def test_repeats_of_one_table_end_below_the_lookups_whose_warps_take_more_keys() -> None:
    assert Repeat(5, 0, Packed()).of_one_table(DIM, 1 << 30).words[-1] == repeats.MOST_KEYS < 1 << 19


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with host_cuda.installed():
        from hps.cache.cuda import lookup, tensors
        from hps.cache.cuda.cache import CupyCache

        yield SimpleNamespace(lookup=lookup, tensors=tensors, cache=CupyCache)


ROWS = 300


@pytest.fixture
def repeated(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The flags of each repeat."""
    flags: list[int] = []
    real = modules.lookup.launch_and_wait

    def noted(*arguments: Any) -> int:
        flags.append(real(*arguments))
        return flags[-1]

    monkeypatch.setattr(modules.lookup, "launch_and_wait", noted)
    return flags


@pytest.fixture
def cache(modules: SimpleNamespace) -> Any:
    """Two tables whose vectors are the key, plus 1000 in the second."""
    cache = modules.cache.create([spec(DIM, "a"), spec(DIM, "b")], [2 * ROWS] * 2, 0)
    for table in (0, 1):
        cache.insert(table, np.arange(ROWS), vectors(np.arange(ROWS), table))
    return cache


def vectors(keys: np.ndarray, table: int = 0) -> np.ndarray:
    return np.repeat((keys + 1000 * table).astype(np.float32)[:, None], DIM, axis=1)


def batch_of(keys: np.ndarray, table: int = 0) -> Batch:
    return Batch.of(table, host_cuda.Array(keys), host_cuda.Array(np.full((keys.size, DIM), np.nan, np.float32)))


def answered(workspace: Any, batch: Batch) -> None:
    """Look up resident keys, and check their vectors."""
    for out in batch.outs:
        out.array[...] = np.nan
    assert workspace.query(batch) == 0
    for table, keys, out in zip(batch.tables, batch.keys, batch.outs, strict=True):
        np.testing.assert_array_equal(out.array, vectors(keys.array, table))


def drawn(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ROWS, n)


def test_lookups_of_other_keys_tables_and_sizes_repeat_the_first(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    for seed, (n, table) in enumerate([(5, 0), (5, 0), (70, 0), (1, 1), (33, 1), (5, 0)]):
        answered(workspace, batch_of(drawn(seed, n), table))
    assert repeated == [0] * 5


def test_a_kept_batch_is_repeated_with_what_its_tensors_contain_by_then(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    batches = [batch_of(drawn(0, 9)), Batch.merged([batch_of(drawn(1, 3)), batch_of(drawn(2, 40), 1)])]
    for batch in batches:
        batch.kept = True
    for seed in range(4):
        for batch in batches:
            for keys in batch.keys:
                keys.array[:] = drawn(seed, keys.size)
            answered(workspace, batch)
    assert repeated == [0] * 6


def test_keys_that_miss_in_a_repeat_are_listed_and_later_lookups_repeat_again(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    for turn in range(1, 4):
        answered(workspace, batch_of(drawn(turn, 20)))
        answered(workspace, batch_of(drawn(turn, 20)))
        keys = np.concatenate([drawn(turn, 5), [ROWS + 1, ROWS + 2, ROWS + 1]])
        batch = batch_of(keys)
        assert workspace.query(batch) == 3
        [missed] = workspace.unique()
        assert missed.keys.tolist() == [ROWS + 1, ROWS + 2]
        missed.buffer()[:] = vectors(missed.keys)
        missed.scatter(np.array([True, True]))
        workspace.finish()
        np.testing.assert_array_equal(batch.outs[0].array, vectors(keys))
    assert [flags != 0 for flags in repeated] == [False, True] + [False, True] * 2


def test_an_insert_between_repeats_is_seen(cache: Any, repeated: list[int]) -> None:
    workspace, batch = cache.create_lookup(), batch_of(np.arange(4))
    for value in (1.0, 2.0, 3.0):
        answered_with = np.full((4, DIM), value, np.float32)
        cache.insert(0, np.arange(4), answered_with)
        assert workspace.query(batch) == 0
        np.testing.assert_array_equal(batch.outs[0].array, answered_with)
    assert repeated == [0, 0]


def test_a_change_that_still_runs_is_waited_for_by_no_repeat(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    answered(workspace, batch_of(drawn(1, 5)))
    workspace.changes.order.pending = True
    answered(workspace, batch_of(drawn(2, 5)))
    assert not repeated
    answered(workspace, batch_of(drawn(3, 5)))
    assert repeated == [0]


def test_host_arrays_and_masks_are_no_repeats_nor_is_what_follows_them(cache: Any, repeated: list[int]) -> None:
    workspace, keys = cache.create_lookup(), drawn(1, 5)
    for _ in range(2):
        answered(workspace, batch_of(keys))
        out, mask = np.empty((5, DIM), np.float32), host_cuda.Array(np.zeros(5, np.bool_))
        assert workspace.query(Batch.of(0, keys, out)) == 0
        np.testing.assert_array_equal(out, vectors(keys))
        batch = batch_of(keys)
        assert workspace.query(Batch.of(0, batch.keys[0], batch.outs[0], mask)) == 0
        assert mask.array.all()
    assert repeated == [0]  # the first lookup of the second round


class Attached:
    """A table in host memory, with the rows of the cache's and as many more, under the next layout of all."""

    layouts = 1000

    def __init__(self, cache: Any, table: int, *, authoritative: bool = True, has_files: bool = False) -> None:
        self.authoritative, self.has_files, self.where, self._table = authoritative, has_files, 77, table
        self.show()
        cache.attached[table] = self

    def show(self, more: int = 0) -> None:
        """Show another layout, whose vectors are those of keys that much larger."""
        Attached.layouts += 8
        self.present = SimpleNamespace(where=Attached.layouts, bins_per_row=0.0)
        keys = np.arange(2 * ROWS)
        host_cuda.host_rows[Attached.layouts] = dict(enumerate(vectors(keys + more, self._table)))


def asked_for(workspace: Any, keys: np.ndarray, table: int = 0, more: int = 0) -> None:
    """Look up keys, of which those from ROWS on are in host memory, and those from 2 ROWS on are absent; check all."""
    batch = batch_of(keys, table)
    assert workspace.query(batch) == 0
    expected = np.where((keys < ROWS)[:, None], vectors(keys, table), vectors(keys + more, table))
    expected[keys >= 2 * ROWS] = DEFAULT
    np.testing.assert_array_equal(batch.outs[0].array, expected)
    assert sum(workspace.linked) == np.count_nonzero((keys >= ROWS) & (keys < 2 * ROWS))
    assert sum(workspace.absent) == np.count_nonzero(keys >= 2 * ROWS)


@pytest.fixture
def attached(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cache, whose lookups find the tables in `attached`."""
    cache.attached = [None, None]
    real = cache.create_lookup

    def create_lookup() -> Any:
        workspace = real()
        monkeypatch.setattr(workspace, "_attached", cache.attached)
        return workspace

    return SimpleNamespace(create_lookup=create_lookup, attached=cache.attached)


def test_misses_that_host_memory_has_are_answered_by_repeats(attached: Any, repeated: list[int]) -> None:
    for table in (0, 1):
        Attached(attached, table)
    workspace, rng = attached.create_lookup(), np.random.default_rng(1)
    for turn in range(12):
        asked_for(workspace, rng.integers(0, 2 * ROWS + 50, 5 + turn), turn % 2)
    assert repeated == [1] * 11
    assert host_cuda.launches[-22:] == ["query", "answer"] * 11
    for turn in range(5):  # without misses, the answer is launched for a while
        asked_for(workspace, rng.integers(0, ROWS, 9), turn % 2)
    assert repeated[11:] == [0] * 5
    assert host_cuda.launches[-9:] == [*["query", "answer"] * 4, "query"]
    asked_for(workspace, np.arange(ROWS - 4, ROWS + 4))
    asked_for(workspace, np.arange(ROWS - 4, ROWS + 4))
    assert repeated[16:] == [1, 1]
    assert host_cuda.launches[-4:] == ["query", "answer"] * 2


def test_repeats_read_the_present_layout(attached: Any, repeated: list[int]) -> None:
    table, workspace = Attached(attached, 0), attached.create_lookup()
    for more in (0, 1000, 2000):
        table.show(more)
        for _ in range(3):
            asked_for(workspace, np.arange(ROWS - 10, ROWS + 10), more=more)
    assert repeated == [1] * 8


def test_keys_that_a_repeat_leaves_are_those_of_the_host(attached: Any, repeated: list[int]) -> None:
    Attached(attached, 0, authoritative=False)
    workspace = attached.create_lookup()
    for last in (5, 5, 0, 5, 0, 0):
        if not last:
            asked_for(workspace, np.arange(ROWS - 10, ROWS + 10))
            continue
        batch = batch_of(np.arange(2 * ROWS - 10, 2 * ROWS + last))
        assert workspace.query(batch) == last
        assert (workspace.counts, workspace.linked, workspace.absent) == ([last], [10], [0])
        [missed] = workspace.unique()
        assert missed.keys.tolist() == list(range(2 * ROWS, 2 * ROWS + last))
        missed.scatter(np.zeros(last, np.bool_))
        workspace.finish()
        np.testing.assert_array_equal(batch.outs[0].array[:10], vectors(batch.keys[0].array[:10]))
        assert (batch.outs[0].array[10:] == DEFAULT).all()
    assert repeated == [repeats.LEFT | 1, 1]


def test_tables_without_keys_have_no_misses_of_an_earlier_lookup(attached: Any) -> None:
    for table in (0, 1):
        Attached(attached, table)
    workspace = attached.create_lookup()
    for first, second in ((3, 5), (0, 5), (3, 0), (0, 4)):
        batches = [batch_of(np.arange(ROWS, ROWS + n), table) for table, n in enumerate((first, second))]
        assert workspace.query(Batch.merged(batches)) == 0
        assert (workspace.linked, workspace.absent) == ([first, second], [0, 0])


def test_no_repeat_reads_row_files_or_a_detached_table(attached: Any, repeated: list[int]) -> None:
    table, workspace = Attached(attached, 0, has_files=True), attached.create_lookup()
    for _ in range(3):
        asked_for(workspace, np.arange(ROWS - 10, ROWS + 10))
    assert not repeated
    table.has_files = False
    asked_for(workspace, np.arange(ROWS - 10, ROWS + 10))
    table.present = None  # type: ignore[assignment]
    for _ in range(2):
        assert workspace.query(batch_of(np.arange(ROWS - 10, ROWS + 10))) == 10
        workspace.unique()
        workspace.finish()
    assert repeated == [1, 1]


def test_outputs_in_pinned_memory_are_delivered_by_no_repeat(
    modules: SimpleNamespace, cache: Any, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.tensors, "_pinned_address", lambda array: array.ctypes.data)
    workspace = cache.create_lookup()
    for seed in range(3):
        keys, out = drawn(seed, 5), np.empty((5, DIM), np.float32)
        assert workspace.query(Batch.of(0, host_cuda.Array(keys), out)) == 0
        workspace.finish()
        np.testing.assert_array_equal(out, vectors(keys))
    assert not repeated


def test_misses_of_a_kept_batch_whose_output_is_in_pinned_memory_are_answered_by_no_repeat(
    modules: SimpleNamespace, attached: Any, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of such an output lie in memory that the next lookup may take."""
    monkeypatch.setattr(modules.tensors, "_pinned_address", lambda array: array.ctypes.data)
    Attached(attached, 0)
    keys, workspace = np.arange(ROWS - 10, ROWS + 10), attached.create_lookup()
    batch = Batch.of(0, host_cuda.Array(keys), np.empty((20, DIM), np.float32))
    batch.kept = True
    for _ in range(3):
        asked_for(workspace, keys)
        before = len(repeated)
        assert workspace.query(batch) == 0
        workspace.finish()
        np.testing.assert_array_equal(batch.outs[0], vectors(keys))
        assert len(repeated) == before


def test_a_repeat_that_fails_is_answered_as_a_new_lookup(
    modules: SimpleNamespace, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = cache.create_lookup()
    answered(workspace, batch_of(drawn(1, 5)))
    monkeypatch.setattr(modules.lookup, "launch_and_wait", lambda *_: -700)
    answered(workspace, batch_of(drawn(2, 5)))


@pytest.mark.parametrize("at", ["its end", "what follows"])
def test_an_interrupted_repeat_leaves_no_misses_to_the_next_lookup(
    modules: SimpleNamespace, cache: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    workspace, real = cache.create_lookup(), modules.lookup.launch_and_wait

    def interrupted(*arguments: Any, **_: bool) -> int:
        if at == "its end":
            real(*arguments)
        raise KeyboardInterrupt

    answered(workspace, batch_of(drawn(1, 5)))
    with monkeypatch.context() as patch:
        patch.setattr(*((modules.lookup, "launch_and_wait") if at == "its end" else (workspace, "start")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            workspace.query(batch_of(np.arange(5) + ROWS))
    answered(workspace, batch_of(drawn(2, 5)))


def test_no_repeat_follows_the_end_of_its_cache(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    answered(workspace, batch_of(drawn(1, 5)))
    cache.close()
    with pytest.raises(NotReadyError):
        workspace.query(batch_of(drawn(2, 5)))
    assert not repeated


def test_a_workspace_keeps_no_tensor_of_a_lookup_that_may_be_repeated(cache: Any, repeated: list[int]) -> None:
    workspace = cache.create_lookup()
    for seed in range(3):
        batch = batch_of(drawn(seed, 5))
        answered(workspace, batch)
        kept = weakref.ref(batch.outs[0])
        del batch
        assert kept() is None
    assert repeated == [0, 0]
