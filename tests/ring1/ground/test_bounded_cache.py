"""A cache that is bounded in bytes: what it remembers, what it forgets, and what it counts."""

import gc
import sys
import threading
import weakref

import pytest

from hps.ground.memory.bounded_cache import MOST_BYTES, BoundedCache, cached_bytes, clear_caches, size_of

ENTRY = 1000 + 200  # of `sized`, with the place in the cache


class Counted:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, *arguments: object) -> object:
        self.calls.append(arguments)
        return None if arguments == ("none",) else [*arguments]


def sized(entries: float, function: Counted) -> BoundedCache[object]:
    return BoundedCache(function, lambda *_: 1000, most_bytes=int(entries * ENTRY))


def test_a_result_is_computed_once_even_if_it_is_none() -> None:
    function = Counted()
    cache = BoundedCache(function)
    assert cache("a", 1) is cache("a", 1)
    assert cache("none") is cache("none") is None
    assert function.calls == [("a", 1), ("none",)]


@pytest.mark.parametrize(("entries", "kept"), [(40, 40), (40.9, 40), (41 - 1 / ENTRY, 40), (41, 41)])
def test_as_many_entries_are_kept_as_fit(entries: float, kept: int) -> None:
    cache = sized(entries, Counted())
    for number in range(100):
        cache(number)
        assert cache.held_bytes == len(cache) * ENTRY
    assert len(cache) == kept


def test_the_entry_that_was_not_used_for_longest_is_forgotten_first() -> None:
    function = Counted()
    cache = sized(40, function)
    for number in range(40):
        cache(number)
    cache(0)
    cache("new")
    function.calls.clear()
    cache(0)
    cache(1)
    assert function.calls == [(1,)]


@pytest.mark.parametrize(("size", "kept"), [(3200 // 32 - 200, 1), (3200 // 32 - 199, 0)])
def test_an_entry_above_its_share_is_not_kept(size: int, kept: int) -> None:
    cache = BoundedCache(Counted(), lambda *_: size, most_bytes=3200)
    cache(1)
    assert len(cache) == kept


def test_an_exception_is_not_remembered() -> None:
    calls = []

    def fail(text: str) -> None:
        calls.append(text)
        raise ValueError(text)

    cache = BoundedCache(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            cache("wrong")
    assert len(calls) == 2
    assert cache.held_bytes == 0


def test_a_result_that_another_thread_has_put_there_meanwhile_counts_once() -> None:
    def slow(number: int) -> int:
        if threading.current_thread() is not main:
            return number
        other = threading.Thread(target=cache, args=(number,))
        other.start()
        other.join()
        return number

    main = threading.current_thread()
    cache = BoundedCache(slow, lambda *_: 1000)
    cache(7)
    assert (len(cache), cache.held_bytes) == (1, ENTRY)


def test_without_a_size_arguments_and_results_count_with_all_that_they_refer_to() -> None:
    cache = BoundedCache(lambda text: {"text": text, "list": [bytes(5000)]})
    cache("x" * 5000)
    assert 10_000 < cache.held_bytes < 12_000


def test_an_object_counts_once_and_classes_do_not() -> None:
    text = bytes(1000)
    pair = [text, text]
    assert size_of(pair) == sys.getsizeof(pair) + sys.getsizeof(text)
    pair.append(pair)  # a cycle
    assert size_of(pair) == sys.getsizeof(pair) + sys.getsizeof(text)
    counted = Counted()
    assert size_of(counted) < 1000


def test_all_caches_of_a_process_are_counted_and_forgotten_together() -> None:
    clear_caches()
    one, two = (BoundedCache(lambda size: bytes(size)) for _ in range(2))
    one(50_000)
    two(60_000)
    assert 110_000 < cached_bytes() < 112_000
    del one
    gc.collect()
    assert 60_000 < cached_bytes() < 61_000
    clear_caches()
    assert cached_bytes() == len(two) == 0


def test_what_is_forgotten_is_freed() -> None:
    class Result: ...

    cache = BoundedCache(lambda number: Result(), lambda *_: MOST_BYTES // 32 - 200)
    first = weakref.ref(cache(0))
    for number in range(1, 32):
        cache(number)
    assert first() is not None
    cache(32)
    assert first() is None
