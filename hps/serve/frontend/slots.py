"""Allocates the slots of a front's slab."""

from typing import Final

from hps.regions.layout import SLAB

_LEAST: Final = 12  # 4 KB


class Slots:
    """Slots of powers of two bytes in one slab. *One per event loop.*

    Buddies are joined only when there is no room otherwise: most requests are as large as others before them. The slot that
    was given back last is taken first, since the processor's caches still hold it, where a device writes, too.

    Args:
        size: of the region.

    Attributes:
        size: of the slab.
        largest: the largest slot that there can be, in bytes.
        used: bytes of slots that are taken.
    """

    def __init__(self, size: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(64)]
        self._order: dict[int, int] = {}  # of taken slots
        self.size = size - SLAB
        start, left = 0, self.size
        while left >= 1 << _LEAST:
            order = left.bit_length() - 1
            self._free[order].append(start)
            start += 1 << order
            left -= 1 << order
        self._most = max((order for order, free in enumerate(self._free) if free), default=0)
        self.largest = 1 << self._most
        self.used = 0

    def take(self, size: int) -> int:
        """Return the offset of a slot, a multiple of 4,096; -1 if there is no room now."""
        order = max(_LEAST, (size - 1).bit_length())
        if order > self._most:
            return -1
        free = self._free[order]
        if not free and not self._split(order) and not (self._join() and (free or self._split(order))):
            return -1
        place = free.pop()
        self._order[place] = order
        self.used += 1 << order
        return SLAB + place

    @property
    def crowded(self) -> bool:
        """Whether more than half is taken: then no slow client may hold a slot."""
        return 2 * self.used > self.size

    def give_back(self, slot: int) -> None:
        place = slot - SLAB
        order = self._order.pop(place)
        self.used -= 1 << order
        self._free[order].append(place)

    def _split(self, order: int) -> bool:
        larger = next((one for one in range(order + 1, self._most + 1) if self._free[one]), 0)
        if not larger:
            return False
        place = self._free[larger].pop()
        for half in range(larger - 1, order - 1, -1):
            self._free[half].append(place + (1 << half))
        self._free[order].append(place)
        return True

    def _join(self) -> bool:
        """Join free buddies; return whether any were."""
        joined = False
        for order in range(_LEAST, self._most):
            free = set(self._free[order])
            pairs = [place for place in free if not place >> order & 1 and place | 1 << order in free]
            if pairs:
                self._free[order][:] = sorted(free.difference(pairs, [place | 1 << order for place in pairs]))  # `take` has it
                self._free[order + 1] += pairs
                joined = True
        return joined
