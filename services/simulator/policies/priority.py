"""Policies that order a central queue by what they expect: from finished siblings, or from progress so far.

Both admit only what the KV cache holds with the growth they expect, to the engine with the most room.
"""

import bisect
from collections.abc import Iterable, Sequence

from services.simulator.engine import EngineState
from services.simulator.layout import Layout
from services.simulator.policies.base import Assign, Move, Policy, View
from services.simulator.trajectory import NOWHERE, Trajectory

FILL = 0.9
"""Share of the KV cache that expected contexts may take."""
RECENT = 512
"""Finished lengths kept."""


class Expecting(Policy):
    """A central queue, longest expected first, KV-aware; refined by what `expect` knows."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._room: dict[int, tuple[int, float]] = {}
        self._recent: list[float] = []

    def expect(self, trajectory: Trajectory) -> float:
        """Tokens still to be generated."""
        longer = [n for n in self._recent if n > trajectory.generated]
        return sum(longer) / len(longer) - trajectory.generated if longer else float(trajectory.generated) + 1_024.0

    def order(self, view: View) -> Sequence[Trajectory]:
        """Older batches first, within one the longest expected first."""
        return sorted(view.queued.values(), key=lambda t: (t.batch, -self.expect(t), t.index))

    def place(self, view: View, trajectory: Trajectory) -> int:
        """All wait for `admit`."""
        del view, trajectory
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Sticky."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def admit(self, view: View) -> Iterable[Assign]:
        """In order, each to the least filled engine with room for it, until none has; an empty one takes any."""
        engines = view.admitting()
        used = dict.fromkeys((e.index for e in engines), 0.0)
        for index, tokens in self._room.values():
            if index in used:
                used[index] += tokens
        for trajectory in self.order(view) if engines else ():
            need = trajectory.context + self.expect(trajectory)
            fits = [e for e in engines if not used[e.index] or used[e.index] + need <= FILL * e.kv_capacity]
            if not fits:
                return
            best = min(fits, key=lambda e: (used[e.index] / e.kv_capacity, e.index))
            used[best.index] += need
            self._room[trajectory.index] = (best.index, need)
            yield Assign(trajectory, best.index)

    def on_end(self, trajectory: Trajectory) -> None:
        """Learns its length."""
        self._room.pop(trajectory.index, None)
        self._recent.append(float(trajectory.generated))
        if len(self._recent) > RECENT:
            del self._recent[0]


class SiblingHistory(Expecting):
    """Group-mates as length context (after Seer): one member of each group goes first, the others are expected to be as
    long as its longest finished sibling; groups of which nothing is known are taken for the longest.
    """

    name = "sibling-history"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._longest: dict[str, float] = {}
        self._probed: set[str] = set()

    def expect(self, trajectory: Trajectory) -> float:
        """From the longest finished sibling."""
        known = self._longest.get(trajectory.group)
        if known is None or known <= trajectory.generated:
            return super().expect(trajectory)
        return known - trajectory.generated

    def order(self, view: View) -> Sequence[Trajectory]:
        """Probes first, then groups of unknown length, then the longest."""
        probes: dict[str, int] = {}
        for item in view.queued.values():
            if item.group not in self._probed:
                probes.setdefault(item.group, item.index)

        def key(item: Trajectory) -> tuple[float, ...]:
            unknown = item.group not in self._longest
            return (item.batch, probes.get(item.group) != item.index, not unknown, -self.expect(item), item.index)

        return sorted(view.queued.values(), key=key)

    def admit(self, view: View) -> Iterable[Assign]:
        """Notes the groups that have a member under way."""
        for assign in super().admit(view):
            self._probed.add(assign.trajectory.group)
            yield assign

    def on_end(self, trajectory: Trajectory) -> None:
        """Learns the group's length."""
        super().on_end(trajectory)
        self._longest[trajectory.group] = max(self._longest.get(trajectory.group, 0.0), float(trajectory.generated))


class TrajectoryPriority(Expecting):
    """Priority by the length expected from progress, and migration in tool calls (after Heddle): every few seconds the
    longest expected of those in a call on the most crowded engine go to the least crowded one.
    """

    name = "trajectory-priority"
    decide_every_s = 5.0
    MARGIN = 1.25
    """The crowded engine has at least this many times the load of the other, before and after."""

    def expect(self, trajectory: Trajectory) -> float:
        """Mean of what remained for recent ones that got at least as far."""
        at = bisect.bisect_right(self._sorted, trajectory.generated)
        count = len(self._sorted) - at
        if not count:
            return float(trajectory.generated) + 1_024.0
        return (self._tails[at]) / count - trajectory.generated

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._sorted: list[float] = []
        self._tails: list[float] = [0.0]

    def on_end(self, trajectory: Trajectory) -> None:
        """Keeps the recent lengths sorted, with the sums from each on."""
        super().on_end(trajectory)
        self._sorted = sorted(self._recent)
        self._tails = [0.0]
        for tokens in reversed(self._sorted):
            self._tails.append(self._tails[-1] + tokens)
        self._tails.reverse()

    def decide(self, view: View) -> Sequence[Assign | Move]:
        """At most one move for each pair of engines."""
        engines = sorted(view.admitting(), key=_load)
        waiting: dict[int, list[Trajectory]] = {}
        for item in view.live.values():
            if item.in_tool and item.engine != NOWHERE:
                waiting.setdefault(item.engine, []).append(item)
        moves: list[Assign | Move] = []
        for low, high in zip(engines[: len(engines) // 2], reversed(engines), strict=False):
            after = (low.assigned + 1) / low.tp
            if _load(high) < self.MARGIN * after or high.index not in waiting:
                continue
            chosen = max(waiting[high.index], key=lambda t: (self.expect(t), -t.index))
            if low.context + low.cached + chosen.context + self.expect(chosen) <= FILL * low.kv_capacity:
                moves.append(Move(chosen, low.index, at_turn_end=False))
                _, need = self._room.get(chosen.index, (0, float(chosen.context)))
                self._room[chosen.index] = (low.index, need)
        return moves


def _load(engine: EngineState) -> float:
    return engine.assigned / engine.tp
