"""The production planner in the loop: it is told of loads and of committed steps, and answers with layouts.

It begins with a table of rates, made from a profile (`priors`), and corrects it by what it is told. The simulator keeps
no numbers of accelerators, only each engine's node: they are given out here, lowest first, and training replicas lie on
what is left, node by node. A plan's moves are made at once, as one change of layout, with the times and losses that the
cluster gives that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.evidence import Consumed, Evidence, Rules, Trained
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.scheduler.core.relayout import Relayout, plan
from services.scheduler.core.topology import Accelerator, Fleet, FleetLayout, Replica
from services.simulator import priors
from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout, replicas_of
from services.simulator.parametric import CAP_TOKENS
from services.simulator.policies.static import degrees
from services.simulator.trajectory import Trajectory

TYPE = "accelerator"
"""The simulated cluster has one type."""
SETTINGS = PlannerSettings(
    horizon_s=3_600.0,
    cooldown_s=60.0,
    hysteresis=0.1,
    confirmations=1,
    max_moves_per_window=64,
    window_s=600.0,
    min_steps=2,
)
"""For steps of minutes, after each of which it is asked once: there is nothing to confirm between them."""


@dataclass(frozen=True, slots=True)
class Told:
    """A plan, as it was made after a step."""

    steps: int
    """Seen until then."""
    relayout: Relayout


class Planned:
    """One cluster's planner. `evidence` may come with a table of another profile than the cluster's own."""

    def __init__(
        self, spec: ClusterSpec, evidence: Evidence | None = None, settings: PlannerSettings = SETTINGS
    ) -> None:
        if spec.training is None:
            raise ValueError("nothing trains in this cluster: there is no split to plan")
        self._spec = spec
        self._settings = settings
        self._state = PlannerState()
        self._least = spec.training.min_accelerators()
        self.evidence = evidence or evidence_of(spec)
        self._slots: dict[int, tuple[int, ...]] = {}
        """Accelerators of each engine, by its index: numbers within the cluster."""
        self._moved_at: list[float] = []
        self._steps_at_move = 0
        self.told: list[Told] = []

    def loads(self, engines: Sequence[EngineState]) -> None:
        """Reports of all engines that decode."""
        for engine in engines:
            if engine.alive and engine.running:
                kind = EngineKind(TYPE, engine.tp)
                self.evidence.load(kind, engine.running, engine.context, engine.seconds_per_token)

    def step(self, consumed: Sequence[Trajectory], training: int, seconds: float) -> None:
        """A committed step on so many training accelerators."""
        assert self._spec.training is not None
        replicas, size = replicas_of(self._spec.training, training)
        done = [Consumed(t.prompt, t.generated, t.context, t.tool_s) for t in consumed]
        groups = len({t.group for t in consumed})
        self.evidence.step(Trained(done, groups, TrainerKind(TYPE, size), replicas, seconds))

    def plan(self, now: float, engines: Sequence[EngineState], layout: Layout) -> Layout | None:
        """The layout to change to; None = as it is."""
        if not self.evidence.history.samples:
            return None
        busy = any(e.alive and not e.admitting for e in engines)
        pace = Pace(
            now, self.evidence.steps, self.evidence.steps - self._steps_at_move, tuple(self._moved_at), busy,
            self.evidence.history.shifted,
        )  # fmt: skip
        given = self.evidence.situation(self._fleet(engines, layout), pace, steps_left=math.inf)
        found = plan(given, self._settings, self._state)
        self.told.append(Told(self.evidence.steps, found))
        if not found.moves:
            return None
        self._moved_at += [now] * len(found.moves)
        self._steps_at_move = self.evidence.steps
        return _layout(found.moves[-1].layout)

    def _fleet(self, engines: Sequence[EngineState], layout: Layout) -> Fleet:
        alive = [e for e in engines if e.alive]
        size, count = self._spec.node_size, self._spec.accelerators
        self._slots = {e.index: self._slots[e.index] for e in alive if e.index in self._slots}
        free = set(range(count)) - {n for slots in self._slots.values() for n in slots}
        for engine in alive:
            if engine.index not in self._slots:
                mine = tuple(n for n in sorted(free) if n // size == engine.node)[: engine.tp]
                self._slots[engine.index] = mine
                free.difference_update(mine)
        replicas = [
            Replica(f"engine/{e.index}", "ROLLOUT", tuple(self._name(n) for n in self._slots[e.index])) for e in alive
        ]
        left = sorted(free)
        for number in range(layout.training // self._least):
            mine = tuple(left[number * self._least : (number + 1) * self._least])
            replicas.append(Replica(f"trainer/{number}", "TRAINER", tuple(self._name(n) for n in mine)))
        accelerators = tuple(Accelerator(self._name(n), TYPE, f"{n // size:03d}") for n in range(count))
        return Fleet(accelerators, tuple(replicas))

    def _name(self, number: int) -> str:
        return f"{number:05d}"


def evidence_of(spec: ClusterSpec, table_of: ClusterSpec | None = None) -> Evidence:
    """Nothing observed yet; rates as a cluster's profile (its own by default) has them."""
    known = table_of or spec
    assert spec.training is not None
    assert known.training is not None
    least = spec.training.min_accelerators()
    engines = priors.engine_rates(known.times, TYPE, degrees(spec), spec.max_running)
    trainers = priors.trainer_rates(known.training, TYPE, (least,), CAP_TOKENS)
    return Evidence(engines, trainers, Rules(spec.staleness, CAP_TOKENS, spec.recompute))


def _layout(found: FleetLayout) -> Layout:
    engines = tuple(sorted(k.tp for k, n in found.engines for _ in range(n)))
    return Layout(engines, found.training)
