"""A clock that a test moves."""


class Clock:
    """Seconds that pass when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Pauses:
    """Records the pauses that are asked for, and lets them pass at once; then it is time to end.

    Args:
        count: pauses before the end.
        clock: moved by the pauses.
    """

    def __init__(self, count: int, clock: Clock) -> None:
        self.pauses: list[float] = []
        self._count, self._clock = count, clock

    def wait(self, seconds: float) -> bool:
        """Pause; return whether to end."""
        self.pauses.append(seconds)
        self._clock.now += seconds
        return len(self.pauses) > self._count
