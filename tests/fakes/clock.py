"""A clock that a test moves."""


class Clock:
    """Seconds that pass when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
