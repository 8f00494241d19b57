"""Clocks as parameters: services take one, tests turn the hands."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one for people, one for deadlines."""

    def wall(self) -> float:
        """Seconds since the epoch, for display and records only."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; all deadlines are counted on it."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
