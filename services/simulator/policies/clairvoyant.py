"""A bound that knows every length: longest first list scheduling, and the analytic bound that no schedule beats.

Longest first on the queue, each to the engine where it would end first by a simple estimate, as many at a time as the
KV cache holds at their *final* lengths; in the tail, the longest move to idle engines of a higher degree.
"""

from collections.abc import Callable, Iterable, Sequence

from services.simulator.layout import ClusterSpec, Layout
from services.simulator.policies.base import Assign, Foresight, Policy, View
from services.simulator.trajectory import NOWHERE, Trajectory
from services.simulator.workload import Episode

FILL = 0.95
"""Share of the KV cache that final lengths may take."""
SLOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of sequences tried for an engine's best rate in `bound`."""


class Clairvoyant(Policy):
    """Knows what each trajectory still generates."""

    name = "clairvoyant"
    foresight: Foresight = "exact"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._remaining: Callable[[Trajectory], float] = lambda _: 0.0
        self._held: dict[int, dict[int, float]] = {}

    def reveal(self, oracle: Callable[[Trajectory], float]) -> None:
        """Kept."""
        self._remaining = oracle

    def place(self, view: View, trajectory: Trajectory) -> int:
        """All wait for `admit`."""
        del view, trajectory
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Sticky: what it will need was kept free."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def admit(self, view: View) -> Iterable[Assign]:
        """Older batches first, within one the longest first, to the engine with the least remaining tokens."""
        engines = view.admitting()
        load = {e.index: sum(self._held.get(e.index, {}).values()) for e in engines}
        count = {e.index: len(self._held.get(e.index, {})) for e in engines}
        work = dict.fromkeys(load, 0.0)
        for trajectory in view.live.values():
            if trajectory.engine in work:
                work[trajectory.engine] += self._remaining(trajectory)
        ordered = sorted(view.queued.values(), key=lambda t: (t.batch, -self._remaining(t), t.index))
        for trajectory in ordered:
            final = trajectory.context + self._remaining(trajectory)
            able = [
                e
                for e in engines
                if not count[e.index]
                or (count[e.index] < e.max_running and load[e.index] + final <= FILL * e.kv_capacity)
            ]
            if not able:
                return
            best = min(able, key=lambda e: (work[e.index] / e.tp, e.index))
            self._forget(trajectory)
            self._held.setdefault(best.index, {})[trajectory.index] = final
            load[best.index] += final
            count[best.index] += 1
            work[best.index] += self._remaining(trajectory)
            yield Assign(trajectory, best.index)

    def on_end(self, trajectory: Trajectory) -> None:
        """Its room is free."""
        self._forget(trajectory)

    def _forget(self, trajectory: Trajectory) -> None:
        for held in self._held.values():
            if held.pop(trajectory.index, None) is not None:
                return


def bound(episodes: Sequence[Episode], spec: ClusterSpec, accelerators: int, degrees: Sequence[int]) -> float:
    """Seconds that no rollout of a batch on so many accelerators beats: max(total work / capacity, longest chain).

    Capacity: for each degree the best tokens per second and accelerator of an engine over SLOTS, each sequence at its
    prompt's length alone (contexts only grow). Chain: each episode alone on the fastest engine, decoding at its
    prompt's length, with its tool calls.
    """
    shortest = min(e.prompt for e in episodes)
    rate = max(
        n / spec.times.decode_s(tp, n, n * shortest) / tp for tp in degrees for n in SLOTS if n <= spec.max_running
    )
    work = sum(e.generated for e in episodes) / (rate * accelerators)
    chain = max(
        min(spec.times.decode_s(tp, 1, e.prompt) for tp in degrees) * e.generated
        + sum(t.latency_s for t in e.turns[:-1])
        for e in episodes
    )
    return max(work, chain)
