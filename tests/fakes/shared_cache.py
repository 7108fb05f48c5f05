"""A cache on the CPU whose devices share its rows, as those of the CUDA cache do."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from hps.cache.base import ALONE, CacheStats, DeviceMemory, DeviceSharing, SharedRows, StreamOrderedLookup
from hps.errors import DeviceError
from hps.types import KeyArray, TableSpec
from tests.fakes.linked_cache import LinkedCache


class SharedCache(LinkedCache, SharedRows):
    """The cache of one device, over the memory that all of them have in common.

    Attributes:
        made: all caches since the test began.
        calls: what they were told, the device, and how many keys there were; of `attach`, 1 if an index is to be kept.
        reason: why devices cannot share rows.
        refused: a device that makes no lookups.
        lost: the devices that are lost: a change through one fails, and so do its figures.
    """

    made: ClassVar[list["SharedCache"]] = []
    calls: ClassVar[list[tuple[str, int, int]]] = []
    reason: ClassVar[str | None] = None
    refused: ClassVar[int | None] = None
    lost: ClassVar[Collection[int]] = ()

    @classmethod
    def forget(cls) -> None:
        """Be as before the first test."""
        cls.made, cls.calls = [], []
        cls.reason = cls.refused = None
        cls.lost = ()

    @classmethod
    def reason_against_sharing(cls, device_ids: Sequence[int]) -> str | None:
        return cls.reason

    @classmethod
    def create(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> "SharedCache":
        devices = sharing.device_ids or (device_id,)
        caches = [cls(tables, capacity_rows, static) for _ in devices]
        for one, device in zip(caches, devices, strict=True):
            one.device_id, one.sharers, one._open = device, caches, caches[0]._open
        cls.made += caches
        return next(cache for cache in caches if cache.device_id == device_id)

    @property
    def failure(self) -> str | None:
        return "an illegal memory access was encountered" if self.device_id in SharedCache.lost else None

    @property
    def leader(self) -> "SharedCache":
        return self.sharers[0]

    def on(self, device_id: int) -> "SharedCache":
        return next(sharer for sharer in self.sharers if sharer.device_id == device_id)

    @property
    def closed(self) -> bool:
        return self._open is None

    def create_lookup(self) -> StreamOrderedLookup:
        if self.device_id == SharedCache.refused:
            raise DeviceError(f"CUDA device {self.device_id} makes no lookups")
        return super().create_lookup()

    def attach(self, table: int, *arguments: Any, index: bool = False, **named: Any) -> str | None:
        self.calls.append(("attach", self.device_id, int(index)))
        return super().attach(table, *arguments, index=index, **named)

    @contextmanager
    def changing(self, table: int) -> Iterator[None]:
        with ExitStack() as stack:
            for sharer in self.sharers:
                if sharer.failure is None:
                    stack.enter_context(LinkedCache.changing(sharer, table))
            yield

    def insert(self, table: int, keys: KeyArray, rows: Any) -> None:
        self._tell("insert", keys)
        super().insert(table, keys, rows)

    def update(self, table: int, keys: KeyArray, rows: Any) -> None:
        self._tell("update", keys)
        super().update(table, keys, rows)

    def erase(self, table: int, keys: KeyArray) -> None:
        self._tell("erase", keys)
        super().erase(table, keys)

    def stats(self, table: int) -> CacheStats:
        """Return the counters of all devices, and the share of this one in the memory: the later, the larger."""
        self._check()
        every, place = super().stats(table), self.sharers.index(self)
        ends = [every.size_bytes * n * (n + 1) // (len(self.sharers) * (len(self.sharers) + 1)) for n in (place, place + 1)]
        return replace(every, size_bytes=ends[1] - ends[0])

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(f"device {self.device_id}", 10**9 + self.device_id, 10**8 + self.device_id)

    def _tell(self, verb: str, keys: KeyArray) -> None:
        self._check()
        self.calls.append((verb, self.device_id, keys.size))

    def _check(self) -> None:
        if self.failure:
            raise DeviceError(f"using the cache of CUDA device {self.device_id}: an illegal memory access")
