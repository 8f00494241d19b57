"""A plain multi-level feedback queue: tokens so far decide the level, nothing else is known.

Levels are the engines' degrees, low to high; where all are of one degree, three quarters of the engines are level 0 and
the rest level 1. A trajectory that has generated its level's quantum moves up at the end of the turn, to the least
loaded engine there.
"""

from services.simulator.engine import EngineState
from services.simulator.policies.base import Policy, View, least_loaded
from services.simulator.trajectory import Trajectory

QUANTA = (2_048, 8_192, 16_384)
"""Tokens at which a trajectory leaves level 0, 1, 2."""
LOW_SHARE = 0.75


class FeedbackQueue(Policy):
    """MLFQ without causal signals."""

    name = "mlfq"

    def place(self, view: View, trajectory: Trajectory) -> int:
        """Least loaded in its level."""
        return least_loaded(_level_engines(view, _level(trajectory)))

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Where it is, unless its level has changed."""
        level = _level_engines(view, _level(trajectory))
        if any(engine.index == trajectory.engine for engine in level):
            return trajectory.engine
        return least_loaded(level)


def _level(trajectory: Trajectory) -> int:
    return sum(trajectory.generated >= quantum for quantum in QUANTA)


def _level_engines(view: View, level: int) -> list[EngineState]:
    able = view.admitting()
    degrees = sorted({engine.tp for engine in able})
    if len(degrees) > 1:
        wanted = degrees[min(level, len(degrees) - 1)]
        return [engine for engine in able if engine.tp == wanted]
    low = max(1, int(LOW_SHARE * len(able)))
    return able[:low] if level == 0 or low == len(able) else able[low:]
