"""The C-MLFQ as its artifact has it: a sticky router over a tree of tool returns, without queue, quantum or preemption.

Every trajectory starts in the shortest class. At each tool return the node of its path (tool and outcome of every call
so far) is looked up, in the prompt's own tree if that has any history, else in the global one; if the mean and the P90
of the remaining tokens seen there fall into one class, it goes to the least loaded engine of that class's level. One
sample is enough.
"""

import math

from services.simulator.layout import Layout
from services.simulator.policies import levels
from services.simulator.policies.base import Policy, View, least_loaded
from services.simulator.trajectory import Trajectory

Path = tuple[tuple[str, str], ...]
MAX_DEPTH = 32
"""Calls in a path; deeper ones stay at the node of this depth."""


class PublishedQueue(Policy):
    """The mean/P90 tree router."""

    name = "published-cmlfq"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._paths: dict[int, list[tuple[Path, int]]] = {}
        """Of live trajectories: nodes passed, and the tokens generated there."""
        self._trees: dict[str, dict[Path, list[int]]] = {"": {}}
        """Remaining tokens by node: of each prompt, and under '' of all."""
        self._level: dict[int, int] = {}

    def place(self, view: View, trajectory: Trajectory) -> int:
        """Least loaded in its level."""
        return least_loaded(levels.engines_of(view.admitting(), self._level.get(trajectory.index, 0)))

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Stays unless its class has changed."""
        level = self._class(trajectory)
        if level == self._level.get(trajectory.index, 0) and view.engines[trajectory.engine].admitting:
            return trajectory.engine
        self._level[trajectory.index] = level
        return self.place(view, trajectory)

    def on_turn(self, trajectory: Trajectory, tool: str, outcome: str, observation: int) -> None:
        """Goes down the tree."""
        del observation
        passed = self._paths.setdefault(trajectory.index, [])
        path = passed[-1][0] if passed else ()
        passed.append(((*path, (tool, outcome))[:MAX_DEPTH], trajectory.generated))

    def on_end(self, trajectory: Trajectory) -> None:
        """What remained at each node is learnt."""
        own = self._trees.setdefault(trajectory.group, {})
        for path, generated in self._paths.pop(trajectory.index, ()):
            for tree in (own, self._trees[""]):
                tree.setdefault(path, []).append(trajectory.generated - generated)
        self._level.pop(trajectory.index, None)

    def _class(self, trajectory: Trajectory) -> int:
        present = self._level.get(trajectory.index, 0)
        passed = self._paths.get(trajectory.index)
        if not passed:
            return present
        tree = self._trees.get(trajectory.group) or self._trees[""]
        samples = tree.get(passed[-1][0])
        if not samples:
            return present
        ordered = sorted(samples)
        mean = levels.class_of(sum(ordered) / len(ordered))
        return mean if mean == levels.class_of(ordered[math.ceil(0.9 * len(ordered)) - 1]) else present
