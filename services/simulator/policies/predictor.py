"""One prediction of the length at admission, never corrected: longest predicted first, onto the engine that is to be
free first.
"""

import heapq
from collections.abc import Callable, Iterable

from services.simulator.layout import Layout
from services.simulator.policies.base import Assign, Foresight, Policy, View
from services.simulator.trajectory import NOWHERE, Trajectory


class LengthPredictor(Policy):
    """The noise of the prediction is `cluster.NOISE`."""

    name = "length-predictor"
    foresight: Foresight = "noisy"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._predict: Callable[[Trajectory], float] = lambda _: 0.0
        self._load: dict[int, float] = {}
        self._share: dict[int, tuple[int, float]] = {}

    def reveal(self, oracle: Callable[[Trajectory], float]) -> None:
        """Kept."""
        self._predict = oracle

    def place(self, view: View, trajectory: Trajectory) -> int:
        """All wait for `admit`, which orders them."""
        del view, trajectory
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Sticky."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def admit(self, view: View) -> Iterable[Assign]:
        """Longest first, each to the engine with the least predicted tokens for each accelerator."""
        able = [(self._load.get(e.index, 0.0), e.index, e.tp) for e in view.admitting()]
        heapq.heapify(able)
        lengths = sorted(((-self._predict(t), t.index, t) for t in view.queued.values()), key=lambda x: x[:2])
        for negative, _, trajectory in lengths if able else ():
            load, index, tp = heapq.heappop(able)
            share = -negative / tp
            self._forget(trajectory)
            self._share[trajectory.index] = (index, share)
            self._load[index] = load + share
            heapq.heappush(able, (load + share, index, tp))
            yield Assign(trajectory, index)

    def on_end(self, trajectory: Trajectory) -> None:
        """Its share of the load is gone."""
        self._forget(trajectory)

    def _forget(self, trajectory: Trajectory) -> None:
        index, share = self._share.pop(trajectory.index, (NOWHERE, 0.0))
        if index != NOWHERE:
            self._load[index] -= share
