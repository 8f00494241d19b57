"""Our own policy: the production estimator and queue, fed from the simulator's state. Nothing is decided here.

The scheduler's cycle becomes `decide` every CYCLE_S; leases become assignments, preemptions moves. What production
reads from load reports is read from the engines' states.
"""

import math
from collections.abc import Sequence

from services.scheduler.core import cmlfq
from services.scheduler.core.estimator import RemainingWork
from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.parametric import CAP_TOKENS
from services.simulator.policies.base import Assign, Move, Policy, View
from services.simulator.policies.static import uniform
from services.simulator.trajectory import NOWHERE, Trajectory

RUN = "run"
CYCLE_S = 2.0
PREFILL_SPEEDUP = 20.0
"""As in the scheduler: prefill is taken to be so much faster than decoding, until it is reported."""
SETTINGS = cmlfq.QueueSettings(
    quantum_tokens=(2_048, 8_192),
    max_wait_s=600.0,
    max_moves=8,
    handover_s=1.0,
    min_lease_s=10.0,
    min_remaining=512.0,
)
"""For engines of accelerators and tens of thousands of tokens; the defaults of the queue are those of the demo."""
REFRESH_TOKENS = 512
PAYLOAD = (64, 512, 4_096)
"""Bounds of the classes of a tool's output, tokens."""


class Libra(Policy):
    """Production code in the loop. `outcomes` False: it is told that every call went well."""

    name = "libra"
    decide_every_s = CYCLE_S

    def __init__(
        self, layout: Layout | None = None, settings: cmlfq.QueueSettings = SETTINGS, *, outcomes: bool = True
    ) -> None:
        self._given = layout
        self._settings = settings
        self._outcomes = outcomes
        self.remaining = RemainingWork()
        self._levels: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        """Where one is to go that was moved back to the queue."""
        self._pending: set[int] = set()
        self._at_lease: dict[int, int] = {}
        self._kept: dict[int, tuple[tuple[int, int], tuple[float, float]]] = {}

    def start(self, spec: ClusterSpec) -> Layout:
        """Uniform unless a layout is given."""
        return self._given or uniform(spec)

    def place(self, view: View, trajectory: Trajectory) -> int:
        """The next cycle leases it."""
        del view
        self._pending.discard(trajectory.index)
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """It keeps its lease."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def on_turn(self, trajectory: Trajectory, tool: str, outcome: str, observation: int) -> None:
        """Evidence."""
        size = sum(observation > bound for bound in PAYLOAD)
        told = outcome if self._outcomes else "ok"
        self.remaining.observe_turn(
            RUN, trajectory.group, trajectory.id, trajectory.turns - 1, trajectory.generated, tool, str(size), told
        )

    def on_end(self, trajectory: Trajectory) -> None:
        """Evidence."""
        self.remaining.observe_end(RUN, trajectory.group, trajectory.id, trajectory.generated)
        for known in (self._levels, self._targets, self._at_lease, self._kept):
            known.pop(trajectory.index, None)  # type: ignore[attr-defined]
        self._pending.discard(trajectory.index)

    def decide(self, view: View) -> Sequence[Assign | Move]:
        """One cycle."""
        actions: list[Assign | Move] = []
        for action in cmlfq.decide(self.queue_view(view), self._settings):
            trajectory = view.live[int(action.trajectory)]
            self._levels[trajectory.index] = action.level
            if isinstance(action, cmlfq.Assign):
                self._at_lease[trajectory.index] = trajectory.generated
                self._pending.discard(trajectory.index)
                actions.append(Assign(trajectory, int(action.engine)))
            else:
                self._pending.add(trajectory.index)
                target = int(action.target_engine) if action.target_engine else NOWHERE
                self._targets[trajectory.index] = target
                actions.append(Move(trajectory, target, at_turn_end=action.at_turn_end))
        return actions

    def queue_view(self, view: View) -> cmlfq.QueueView:
        """What waits, runs and serves, as the queue sees it."""
        levels = {tp: level for level, tp in enumerate(sorted({e.tp for e in view.engines if e.alive}))}
        queued, running = [], []
        for trajectory in view.live.values():
            if trajectory.engine != NOWHERE:
                running.append(self._running(trajectory))
            elif trajectory.index in view.queued:
                queued.append(self._queued(trajectory))
        engines = [_engine(e, levels[e.tp]) for e in view.engines if e.alive]
        return cmlfq.QueueView(view.now, queued, running, engines)

    def _queued(self, item: Trajectory) -> cmlfq.QueuedTrajectory:
        p50, p90 = self._estimate(item)
        return cmlfq.QueuedTrajectory(
            name=str(item.index), run=RUN, group=item.group, admission_number=item.index, priority=0,
            level=self._levels.get(item.index, 0), waiting_since=item.queued_since, tokens=item.context,
            generated=item.generated, estimate_p50=p50, estimate_p90=p90, last_engine="",
        )  # fmt: skip

    def _running(self, item: Trajectory) -> cmlfq.RunningTrajectory:
        p50, p90 = self._estimate(item)
        pending = item.index in self._pending
        if pending and self._targets.get(item.index) == item.engine:
            self._pending.discard(item.index)  # it has arrived
            self._at_lease[item.index] = item.generated
            pending = False
        target = self._targets.get(item.index, NOWHERE) if pending else NOWHERE
        return cmlfq.RunningTrajectory(
            name=str(item.index), run=RUN, engine=str(item.engine), level=self._levels.get(item.index, 0),
            since=item.since, generated=item.generated,
            quantum_used=item.generated - self._at_lease.get(item.index, 0), in_tool_wait=item.in_tool,
            estimate_p50=p50, estimate_p90=p90, tokens=item.context, preempt_pending=pending,
            admission_number=item.index, moves=item.moves, target=str(target) if target != NOWHERE else "",
        )  # fmt: skip

    def _estimate(self, item: Trajectory) -> tuple[float, float]:
        """Kept until the turn ends or an eighth more was generated: most of a cycle asks again for the same."""
        key = (item.turns, int(6.0 * math.log2(item.generated + REFRESH_TOKENS)))
        kept = self._kept.get(item.index)
        if kept is not None and kept[0] == key:
            return kept[1]
        most = max(1.0, float(CAP_TOKENS - item.context))
        guess = self.remaining.estimate(RUN, item.group, item.id, item.generated, item.turns, at_most=most)
        self._kept[item.index] = (key, (guess.p50, guess.p90))
        return guess.p50, guess.p90


def _engine(engine: EngineState, level: int) -> cmlfq.EngineView:
    rate = engine.seconds_per_token or None
    return cmlfq.EngineView(
        name=str(engine.index), run=RUN, level=level, concurrency_cap=engine.max_running, running=engine.assigned,
        kv_capacity_tokens=engine.kv_capacity, kv_used_tokens=math.ceil(engine.context),
        seconds_per_token=rate, prefill_tokens_per_second=PREFILL_SPEEDUP / rate if rate else None,
        admitting=engine.admitting,
    )  # fmt: skip
