"""When the planner may move anything: evidence first, then cool-down, rate, and the same answer several times in a row.

A shift of the load is an exception to the waiting for evidence, not to cool-down and rate: confirmations and the steps
after a move that are otherwise waited for are skipped while it is new.
"""

from dataclasses import dataclass

from services.scheduler.core.reason import Reason


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Settings of the planner; seconds, counts and shares."""

    horizon_s: float = 60.0
    cooldown_s: float = 20.0
    hysteresis: float = 0.1
    confirmations: int = 2
    max_moves_per_window: int = 6
    window_s: float = 300.0
    min_trainers: int = 1
    min_rollouts: int = 1
    """Floors: accelerators."""
    min_steps: int = 3
    min_gain: float = 0.02
    """Least relative gain in tokens per second for which the layout as a whole is changed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What has happened lately."""

    now: float
    steps_seen: int
    steps_since_move: int
    last_moves: tuple[float, ...] = ()
    """Times of the moves within the window."""
    busy: bool = False
    """A hand-over is under way."""
    shifted: bool = False
    """The load has just changed abruptly."""

    def recent(self, settings: PlannerSettings) -> list[float]:
        """Times of the moves within the window."""
        return [t for t in self.last_moves if self.now - t < settings.window_s]

    def allowance(self, settings: PlannerSettings) -> int:
        """Moves that the window still allows."""
        return max(0, settings.max_moves_per_window - len(self.recent(settings)))


@dataclass(slots=True)
class PlannerState:
    """Which direction won, and how often in a row."""

    direction: str = ""
    wins: int = 0

    def reset(self) -> None:
        """Nothing won."""
        self.direction, self.wins = "", 0

    def confirmed(self, direction: str, needed: int) -> bool:
        """Counts a win; True, and from the start again, if it was the last one needed."""
        self.wins = self.wins + 1 if self.direction == direction else 1
        self.direction = direction
        if self.wins < needed:
            return False
        self.reset()
        return True


def blocked(pace: Pace, settings: PlannerSettings, *, ready: bool) -> Reason | None:
    """Why nothing may move now, if so. `ready`: both phases have been seen."""
    if pace.busy:
        return Reason("HANDOVER", "a hand-over is under way")
    if pace.steps_seen < settings.min_steps or not ready:
        return Reason("NO_EVIDENCE", f"{pace.steps_seen} of {settings.min_steps} steps seen, both phases must have run")
    if pace.last_moves and pace.steps_since_move < settings.min_steps and not pace.shifted:
        return Reason("SETTLING", f"{pace.steps_since_move} of {settings.min_steps} steps seen since the last move")
    recent = pace.recent(settings)
    if recent and pace.now - max(recent) < settings.cooldown_s:
        return Reason("COOLDOWN", f"moved {pace.now - max(recent):.0f} s ago; cool-down is {settings.cooldown_s:.0f} s")
    if len(recent) >= settings.max_moves_per_window:
        return Reason("RATE", f"{len(recent)} moves within {settings.window_s:.0f} s, as many as allowed")
    return None
