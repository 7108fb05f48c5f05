"""A cache of a function's results that is bounded in bytes, for arguments that clients choose.

`functools.lru_cache` counts entries, so that a client with large requests could fill a process's memory. Where it is used all
the same, `tests/ring1/repo/test_caches.py` has the reason.
"""

import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

_R = TypeVar("_R")

MOST_BYTES: Final = 8 << 20
"""Default limit of one cache."""
_LARGEST_SHARE: Final = 32  # one entry takes at most this part of its cache
_ENTRY_BYTES: Final = 200  # of the dict, and of the pair of result and size
_CODE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)
_caches: "WeakSet[BoundedCache[Any]]" = WeakSet()


class BoundedCache(Generic[_R]):
    """Caches the results of a function for the latest arguments. *Thread-safe*: threads may compute a result twice.

    Neither exceptions nor entries above 1/32 of the limit are cached.

    Args:
        function: takes hashable arguments by position. Its results are shared, and must not change.
        size: returns the bytes of an entry, given the result and the arguments; default: `size_of` both, which takes longer
            than parsing a request. Shared parts of arguments, such as a model's tables, need not be counted.
    """

    def __init__(
        self, function: Callable[..., _R], size: Callable[..., int] | None = None, most_bytes: int = MOST_BYTES
    ) -> None:
        self.function = function  # for calls that bypass the cache
        self.held_bytes = 0  # of all entries
        self._size = size or (lambda *entry: size_of(entry))
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Hashable, ...], tuple[_R, int]] = OrderedDict()
        self._lock = threading.Lock()
        _caches.add(self)

    def __call__(self, *arguments: Hashable) -> _R:
        with self._lock:
            if (found := self._entries.get(arguments)) is not None:
                self._entries.move_to_end(arguments)
                return found[0]
        # Computed without the lock, which readers of other entries need: two threads may compute one result.
        result = self.function(*arguments)
        size = self._size(result, *arguments) + _ENTRY_BYTES
        if size <= self._most_bytes // _LARGEST_SHARE:
            with self._lock:
                if arguments not in self._entries:
                    self._entries[arguments] = result, size
                    self.held_bytes += size
                while self.held_bytes > self._most_bytes:
                    self.held_bytes -= self._entries.popitem(last=False)[1][1]
        return result

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.held_bytes = 0


def cached_bytes() -> int:
    return sum(cache.held_bytes for cache in list(_caches))


def clear_caches() -> None:
    """Forget the entries of all bounded caches of this process."""
    for cache in list(_caches):
        cache.clear()


def size_of(value: object) -> int:
    """Return the bytes of an object and of everything it refers to, except classes and other code."""
    seen: set[int] = set()
    left, total = [value], 0
    while left:
        found = left.pop()
        if id(found) not in seen and not isinstance(found, _CODE):
            seen.add(id(found))
            total += sys.getsizeof(found)
            left += gc.get_referents(found)
    return total
