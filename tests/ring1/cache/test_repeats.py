"""Repeats of lookups without the interpreter: which tensors of torch they take, and their calls of the driver."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hps.cache.cuda import repeats, structs
from hps.cache.cuda.repeats import Repeat, adopt, adopt_tables, driver_words, exchange_words, launch_and_wait, work_stream
from hps.tensors.dlpack import CPU, CUDA, exchange_table
from hps.types import IndexArray

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
                return errors.get(name, 0)

            return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

        def current(at: int) -> tuple[()]:
            ctypes.c_uint64.from_address(at).value = self.context
            return ()

        def launched(kernel: int, *values: Any) -> tuple[Any, ...]:
            self.flags[0] = self.raised
            return kernel, *values

        def written(stream: int, at: int, number: int, flags: int) -> tuple[Any, ...]:
            if self.ends:
                ctypes.c_uint64.from_address(at).value = number
            return stream, number, flags

        self.raised, self.ends = 0, True
        self._functions = [
            made("launch", launched, pointer, *[word] * 7, pointer, pointer, pointer),
            made("write", written, pointer, pointer, ctypes.c_uint64, word),
            made("wait", lambda stream: (stream,), pointer),
            made("current", current, pointer),
            made("set current", lambda context: (context,), pointer),
        ]
        addresses = [ctypes.cast(function, pointer).value or 0 for function in self._functions]
        self.words = driver_words(addresses, 9, self.flags.ctypes.data, self.ended.ctypes.data)


LAUNCHED = ("launch", 5, 2, 1, 1, 128, 1, 1, 0, 33, 77, None)


def test_a_repeat_is_launched_and_awaited_on_its_stream() -> None:
    driver, repeat = Driver(context=9), Repeat(5, 2, Packed())
    for number in (1, 2):
        assert launch_and_wait(driver.words, repeat.words, 33) == 0
        assert driver.calls[-3:] == [("current",), LAUNCHED, ("write", 33, number, 0)]
    driver.raised = 1 << 32 | 1
    assert launch_and_wait(driver.words, repeat.words, 33) == driver.raised
    assert len(driver.calls) == 9


@pytest.mark.parametrize("error", [0, 801])
def test_the_driver_waits_for_a_repeat_that_is_long_or_cannot_say_that_it_has_ended(error: int) -> None:
    driver, repeat = Driver(context=9, write=error), Repeat(5, 2, Packed())
    driver.ends = False
    assert launch_and_wait(driver.words, repeat.words, 33) == 0
    assert driver.calls == [("current",), LAUNCHED, ("write", 33, 1, 0), ("wait", 33)]


def test_a_thread_that_works_on_another_device_still_does_so_afterwards() -> None:
    driver = Driver(context=4)
    assert launch_and_wait(driver.words, Repeat(5, 2, Packed()).words, 33) == 0
    names = [name for name, *_ in driver.calls]
    assert names == ["current", "set current", "launch", "write", "set current"]
    assert [driver.calls[1], driver.calls[-1]] == [("set current", 9), ("set current", 4)]


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ("current", ["current", "set current", "set current"]),
        ("launch", ["current", "set current", "launch", "set current"]),
        ("wait", ["current", "set current", "launch", "write", "wait", "set current"]),
    ],
)
def test_an_error_of_the_driver_ends_a_repeat(fails: str, left: list[str]) -> None:
    driver = Driver(context=4, **{fails: 700})
    driver.raised, driver.ends = 1, False
    assert launch_and_wait(driver.words, Repeat(5, 2, Packed()).words, 33) == -700
    assert [name for name, *_ in driver.calls] == left


def test_repeats_of_one_table_end_below_the_lookups_whose_warps_take_more_keys() -> None:
    assert Repeat(5, 0, Packed()).of_one_table(DIM, 1 << 30).words[-1] == repeats.MOST_KEYS < 1 << 19
