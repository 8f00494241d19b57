"""A plain multi-level feedback queue: tokens so far decide the level, nothing else is known.

A trajectory that has generated its level's quantum moves up at the end of the turn, to the least loaded engine there.
"""

from services.simulator.policies import levels
from services.simulator.policies.base import Policy, View, least_loaded
from services.simulator.trajectory import Trajectory


class FeedbackQueue(Policy):
    """MLFQ without causal signals; quanta are `levels.BOUNDS`."""

    name = "mlfq"

    def place(self, view: View, trajectory: Trajectory) -> int:
        """Least loaded in its level."""
        return least_loaded(levels.engines_of(view.admitting(), levels.class_of(trajectory.generated)))

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Where it is, unless its level has changed."""
        level = levels.engines_of(view.admitting(), levels.class_of(trajectory.generated))
        if any(engine.index == trajectory.engine for engine in level):
            return trajectory.engine
        return least_loaded(level)
