"""Tells how long messages have been in a partition of a log, whatever their producers claim.

A claimed time, of a producer or of a broker, counts within what was observed: a message was appended after the last moment at
which the partition was known to end before it, and by the first moment at which it did not. A reader that looks at the ends
every second is right to a second about what is appended while it runs. Of older messages it believes all claims of the past.
"""

import time
from itertools import zip_longest
from typing import Final, NamedTuple, TypeAlias

Place: TypeAlias = tuple[int, ...]
"""A position in a partition, as numbers that ascend with it."""

_MOST_LOOKS: Final = 64
_NEVER: Final = float("-inf")


class _Look(NamedTuple):
    """Messages up to `last`, from the look before: appended after `after`, and by `by`."""

    last: Place
    after: float
    by: float


class Arrivals:
    """Estimates when the messages of a partition were appended. *One thread*, but any may call `unread_since`.

    Moments are those of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._looks: tuple[_Look, ...] = ()  # with unread messages; replaced, never changed
        self._end: Place = ()  # the last known message, read or not
        self._looked = _NEVER  # nothing after the end had been appended by then
        self._previous = _NEVER  # when the last message that was read had been appended

    def look(self, last: Place, seen: float, asked: float = _NEVER) -> None:
        """Note that the partition ends with the message `last`, or did after `asked`.

        Args:
            seen: when this became known.
            asked: when the partition was asked for its end; unknown by default.
        """
        if last > self._end:
            looks = (*self._looks, _Look(last, self._looked, seen))
            if len(looks) > _MOST_LOOKS:
                pairs = zip_longest(looks[::2], looks[1::2])
                looks = tuple(_Look(b.last, a.after, b.by) if b else a for a, b in pairs)
            self._looks, self._end = looks, last
        self._looked = max(self._looked, asked)

    def fetched(self, first: Place, claimed: float, last: Place) -> None:
        """Note that all unread messages up to `last` were fetched, and begin with `first`.

        Args:
            claimed: as for `read`, of `first`.
        """
        now = time.monotonic()
        if claimed <= now:
            if first > self._end:
                self._looked = max(self._looked, claimed)
            elif self._looks and claimed <= self._looks[0].by:
                oldest, *others = self._looks
                self._looks = (oldest._replace(after=max(oldest.after, claimed)), *others)
        self.look(last, now)

    def read(self, place: Place, claimed: float) -> float | None:
        """Return when a message was appended that is read now; None if unknown.

        Args:
            claimed: what the log says; infinite if it says nothing.
        """
        now = time.monotonic()
        self.look(place, now)
        _, after, by = next((look for look in self._looks if place <= look.last), _Look(place, self._looked, now))
        earliest = after if after > _NEVER else self._previous
        self._previous = max(claimed, after) if claimed <= by else earliest
        self.skip(place)
        return self._previous if self._previous > _NEVER else None

    def skip(self, place: Place) -> None:
        """Note that the messages up to `place` are read, or will never be."""
        if self._looks and self._looks[0].last <= place:
            self._looks = tuple(look for look in self._looks if look.last > place)

    def unread_since(self) -> float | None:
        """Return a moment before which no unread message was appended; None if unknown."""
        looks = self._looks
        since = max(looks[0].after if looks else self._looked, self._previous)  # messages are appended in their order
        return since if since > _NEVER else None


def moment_of(time_us: int) -> float:
    """Return the moment of a time in microseconds since 1970 by this machine's clock; infinite for 0, unknown."""
    return time.monotonic() - time.time() + time_us / 1e6 if time_us else float("inf")
