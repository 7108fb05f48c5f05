"""Estimates how long messages have been in a partition of a log.

Clocks of producers and brokers may be wrong. So a claimed time is limited by what was observed: a message was appended after
the last moment at which the partition was known to end before it, and by the first moment at which it did not. A reader that
requests the ends every second is right to a second about messages that arrive while it runs. For older messages it believes
every claim that is not in the future.
"""

import time
from itertools import zip_longest
from typing import Final, NamedTuple, TypeAlias

Place: TypeAlias = tuple[int, ...]
"""A position in a partition, as numbers that ascend with it."""

_MOST_OBSERVATIONS: Final = 64
_NEVER: Final = float("-inf")


class _Observation(NamedTuple):
    """Messages up to `last`, from the observation before: appended after `after`, and by `by`."""

    last: Place
    after: float
    by: float


class Arrivals:
    """Estimates when the messages of a partition were appended. *One thread*, but any may call `unread_since`.

    Moments are those of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._observations: tuple[_Observation, ...] = ()  # of unread messages; replaced, never changed
        self._end: Place = ()  # the last known message, read or not
        self._observed = _NEVER  # no message after the end had been appended by then
        self._previous = _NEVER  # when the last message that was read had been appended

    def observe(self, last: Place, known: float, requested: float = _NEVER) -> None:
        """Record that the partition ended with the message `last`.

        Args:
            known: when this became known.
            requested: when the end was requested; unknown by default.
        """
        if last > self._end:
            observations = (*self._observations, _Observation(last, self._observed, known))
            if len(observations) > _MOST_OBSERVATIONS:
                pairs = zip_longest(observations[::2], observations[1::2])
                observations = tuple(_Observation(b.last, a.after, b.by) if b else a for a, b in pairs)
            self._observations, self._end = observations, last
        self._observed = max(self._observed, requested)

    def record_fetch(self, first: Place, claimed: float, last: Place) -> None:
        """Record that all unread messages up to `last` were fetched, starting with `first`.

        Args:
            claimed: as for `read`, of `first`.
        """
        now = time.monotonic()
        if claimed <= now:
            if first > self._end:
                self._observed = max(self._observed, claimed)
            elif self._observations and claimed <= self._observations[0].by:
                oldest, *later = self._observations
                self._observations = (oldest._replace(after=max(oldest.after, claimed)), *later)
        self.observe(last, now)

    def read(self, place: Place, claimed: float) -> float | None:
        """Record that a message is read now; return when it was appended, None if unknown.

        Args:
            claimed: its time in the log; infinite if it has none.
        """
        now = time.monotonic()
        self.observe(place, now)
        first = _Observation(place, self._observed, now)
        _, after, by = next((seen for seen in self._observations if place <= seen.last), first)
        earliest = after if after > _NEVER else self._previous
        self._previous = max(claimed, after) if claimed <= by else earliest
        self.skip(place)
        return self._previous if self._previous > _NEVER else None

    def skip(self, place: Place) -> None:
        """Record that the messages up to `place` are read, or will never be."""
        if self._observations and self._observations[0].last <= place:
            self._observations = tuple(seen for seen in self._observations if seen.last > place)

    def unread_since(self) -> float | None:
        observations = self._observations
        # Messages are appended in order, so an unread one is not older than the last one read.
        since = max(observations[0].after if observations else self._observed, self._previous)
        return since if since > _NEVER else None


def moment_of(time_us: int) -> float:
    """Return the moment of a time in microseconds since 1970 by this machine's clock; infinite for 0, unknown."""
    return time.monotonic() - time.time() + time_us / 1e6 if time_us else float("inf")
