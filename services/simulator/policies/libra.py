"""Our own policy: the production estimator and live queue, told of what happens as the scheduler tells them. Nothing is
decided here.

Leases become assignments, preemptions moves. What is queued is decided at once, as by the scheduler's cycle of a
fraction of a second; engines report their loads every REPORT_S, and moves are looked for every `decide_every_s`.
Estimates are asked for when a decision needs them.
"""

import math
from collections.abc import Iterable, Sequence

from services.scheduler.core import cmlfq
from services.scheduler.core.estimator import RemainingWork
from services.scheduler.core.livequeue import LiveQueue
from services.scheduler.core.occupancy import LONG, Occupancy
from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.policies.base import Assign, Move, Policy, View
from services.simulator.policies.planned import Planned
from services.simulator.policies.static import uniform
from services.simulator.trajectory import NOWHERE, Trajectory

RUN = "run"
CYCLE_S = 2.0
REPORT_S = 1.0
SETTINGS = cmlfq.QueueSettings(
    quantum_tokens=(2_048, 8_192),
    max_wait_s=600.0,
    max_moves=8,
    handover_s=1.0,
    min_lease_s=10.0,
    min_remaining=512.0,
)
"""For engines of accelerators and tens of thousands of tokens; the defaults of the queue are those of the demo."""
PART_TOKENS = 512
"""A turn under way is reported in parts of at least so many tokens, or of an eighth of what there was."""
PAYLOAD = (64, 512, 4_096)
"""Bounds of the classes of a tool's output, tokens."""


class Libra(Policy):
    """Production code in the loop. `outcomes` False: it is told that every call went well."""

    name = "libra"
    decide_every_s = CYCLE_S

    def __init__(
        self, layout: Layout | None = None, settings: cmlfq.QueueSettings = SETTINGS, *, outcomes: bool = True,
        plans: bool = True,
    ) -> None:  # fmt: skip
        self._given = layout
        self._plans = plans
        self.planned: Planned | None = None
        self._training = 0
        self._outcomes = outcomes
        self.remaining = RemainingWork()
        self.live = LiveQueue(settings, self._estimate)
        self._known: dict[str, Trajectory] = {}
        """All that the queue was told of, by its name there."""
        self._numbers: dict[str, int] = {}
        """Admission numbers of groups."""
        self._levels: dict[str, int] = {}
        self._told: dict[str, int] = {}
        """Generated tokens that the queue knows of."""
        self._pending: dict[str, int] = {}
        """Where each one that was asked to stop is to go."""
        self._speeds: dict[str, Occupancy] = {}
        """Of the engines that the queue knows, from their reports."""
        self._states: list[tuple[bool, bool]] = []
        self._report_at = 0.0

    def start(self, spec: ClusterSpec) -> Layout:
        """Uniform unless a layout is given; that one stays, and nothing is planned."""
        layout = self._given or uniform(spec)
        if self._plans and self._given is None and spec.training is not None and self.mode is Mode.ASYNC:
            self.planned = Planned(spec)
        self._training = layout.training
        return layout

    # ---- events

    def place(self, view: View, trajectory: Trajectory) -> int:
        """It queues; `admit` follows."""
        name = str(trajectory.index)
        self._pending.pop(name, None)
        self._queue(name, trajectory, view.now)
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """It keeps its lease."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def on_call(self, trajectory: Trajectory) -> None:
        """A report."""
        self._report(str(trajectory.index), trajectory)

    def on_turn(self, trajectory: Trajectory, tool: str, outcome: str, observation: int) -> None:
        """Evidence, and a longer sequence."""
        size = sum(observation > bound for bound in PAYLOAD)
        told = outcome if self._outcomes else "ok"
        self.remaining.observe_turn(
            trajectory.group, trajectory.id, trajectory.turns - 1, trajectory.generated, tool, str(size), told
        )
        if trajectory.engine != NOWHERE:
            self._report(str(trajectory.index), trajectory)

    def on_end(self, trajectory: Trajectory) -> None:
        """Evidence, and a place."""
        self.remaining.observe_end(RUN, trajectory.group, trajectory.id, trajectory.generated)
        name = str(trajectory.index)
        self._forget(name)
        self._known.pop(name, None)
        self._levels.pop(name, None)
        self._told.pop(name, None)
        self._pending.pop(name, None)
        self.live.group_learnt(trajectory.group)

    def on_step(self, consumed: Sequence[Trajectory], seconds: float) -> None:
        """Evidence for the planner."""
        if self.planned is not None:
            self.planned.step(consumed, self._training, seconds)

    # ---- decisions

    def plan(self, view: View) -> Layout | None:
        """The production planner's."""
        self._training = view.layout.training
        if self.planned is None:
            return None
        return self.planned.plan(view.now, view.engines, view.layout)

    def admit(self, view: View) -> Iterable[Assign | Move]:
        """What is queued, as soon as there may be room."""
        self._arrivals(view)
        self._loads(view)
        return self._actions(view)

    def decide(self, view: View) -> Sequence[Assign | Move]:
        """One cycle."""
        self._arrivals(view)
        self._report_at = min(self._report_at, view.now)
        self._loads(view)
        for name, told in self._told.items():
            trajectory = self._known[name]
            if trajectory.engine != NOWHERE and trajectory.generated - told >= max(PART_TOKENS, told // 8):
                self._report(name, trajectory)
        return self._actions(view)

    def _actions(self, view: View) -> list[Assign | Move]:
        actions: list[Assign | Move] = []
        for action in self.live.decide(view.now):
            name, trajectory = action.trajectory, self._known[action.trajectory]
            self._levels[name] = action.level
            if isinstance(action, cmlfq.Assign):
                self.live.leased(name, engine=action.engine, level=action.level, since=view.now)
                actions.append(Assign(trajectory, int(action.engine)))
                continue
            target = int(action.target_engine) if action.target_engine else NOWHERE
            self._pending[name] = target
            self.live.preempting(name, level=action.level, target=action.target_engine)
            actions.append(Move(trajectory, target, at_turn_end=action.at_turn_end))
        return actions

    # ---- what the queue is told

    def _queue(self, name: str, trajectory: Trajectory, now: float) -> None:
        """It waits. Engines drop the KV cache of one that leaves, so none is preferred."""
        self._known[name] = trajectory
        self._told[name] = trajectory.generated
        self.live.queued(
            name, run=RUN, group=trajectory.group, priority=0, level=self._levels.setdefault(name, 0),
            admission_number=self._numbers.setdefault(trajectory.group, trajectory.index), waiting_since=now,
            tokens=trajectory.context, generated=trajectory.generated, moves=trajectory.moves,
        )  # fmt: skip

    def _report(self, name: str, trajectory: Trajectory) -> None:
        if name not in self.live:
            return  # between engines, in a tool call
        self._told[name] = trajectory.generated
        self.live.turned(
            name, generated=trajectory.generated, tokens=trajectory.context, in_tool_wait=trajectory.in_tool
        )

    def _forget(self, name: str) -> None:
        if name in self.live:
            self.live.ended(name)

    def _arrivals(self, view: View) -> None:
        """What became of those that were asked to stop: there, on no engine until its tool returns, or staying."""
        for name, target in list(self._pending.items()):
            trajectory = self._known[name]
            if trajectory.engine == NOWHERE:
                del self._pending[name]
                self._forget(name)
            elif trajectory.engine == target:
                del self._pending[name]
                self._queue(name, trajectory, view.now)
                self.live.leased(name, engine=str(target), level=self._levels[name], since=trajectory.since)
            elif target != NOWHERE and not view.engines[target].admitting:
                del self._pending[name]
                self.live.going_on(name)

    def _loads(self, view: View) -> None:
        """Load reports that are due; engines that came, closed or went are known at once."""
        states = [(e.alive, e.admitting) for e in view.engines]
        if view.now < self._report_at and states == self._states:
            return
        self._report_at, self._states = view.now + REPORT_S, states
        levels = {tp: level for level, tp in enumerate(sorted({e.tp for e in view.engines if e.alive}))}
        if self.planned is not None:
            self.planned.loads(view.engines)
        for engine in view.engines:
            name = str(engine.index)
            if engine.alive:
                speed = self._speeds.setdefault(name, Occupancy(LONG))
                self.live.engine(_engine(engine, levels[engine.tp], speed, view.now))
            elif self._speeds.pop(name, None) is not None:
                self.live.drop_engine(name)

    def _estimate(self, name: str) -> tuple[float, float]:
        item = self._known[name]
        guess = self.remaining.estimate(RUN, item.group, item.id, item.generated, item.turns)
        return guess.p50, guess.p90


def _engine(engine: EngineState, level: int, speed: Occupancy, now: float) -> cmlfq.EngineView:
    rate = engine.seconds_per_token or None
    if rate is not None:
        speed.add(engine.running * REPORT_S, engine.running * REPORT_S / rate, REPORT_S)
    return cmlfq.EngineView(
        name=str(engine.index), run=RUN, level=level, concurrency_cap=engine.max_running, running=engine.assigned,
        kv_capacity_tokens=engine.kv_capacity, kv_used_tokens=math.ceil(engine.context),
        seconds_per_token=rate, prefill_tokens_per_second=cmlfq.PREFILL_SPEEDUP / rate if rate else None,
        admitting=engine.admitting, measured_load=engine.running, reported_at=now,
        seconds_per_sequence=speed.slope_at(engine.running, rate) if rate is not None else None,
    )  # fmt: skip
