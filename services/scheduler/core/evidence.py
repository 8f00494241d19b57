"""What the planner has learnt of a job: the rates of its engines and trainers by kind, and what its steps ask for.

`situation` makes of it, with the fleet and the clock, all that a plan rests on. The scheduler and the simulator tell it
the same things: load reports of engines while they decode, each committed step with the trajectories that it consumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.costmodel import Mean
from services.scheduler.core.demand import Demand
from services.scheduler.core.drift import StepHistory, StepSample
from services.scheduler.core.pacing import Pace
from services.scheduler.core.rates import EngineBook, EngineKind, EngineRates, TrainerBook, TrainerKind, TrainerRates
from services.scheduler.core.relayout import Situation
from services.scheduler.core.topology import Fleet


@dataclass(frozen=True, slots=True)
class Consumed:
    """One trajectory that a step trained."""

    prompt_tokens: int
    generated_tokens: int
    context_tokens: int
    """Of the whole sequence: prompt, generated tokens, tool outputs."""
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Trained:
    """One committed step: its trajectories, and the replicas that trained it."""

    trajectories: Sequence[Consumed]
    groups: int
    kind: TrainerKind
    replicas: int
    seconds: float
    """From the batch's arrival to the commit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is known of a job beforehand."""

    max_versions: int
    """K, the staleness bound."""
    max_context: float
    """Longest sequence that the run allows, tokens."""
    recompute: bool = True
    """KV caches are computed again after a weight update."""


class Evidence:
    """One job's. One writer."""

    def __init__(
        self, engines: Mapping[EngineKind, EngineRates], trainers: Mapping[TrainerKind, TrainerRates], rules: Rules
    ) -> None:
        self.engines = EngineBook(engines)
        self.trainers = TrainerBook(trainers)
        self.history = StepHistory()
        self.steps = 0
        self._rules = rules
        self._prompt = Mean()
        self._token_s = Mean()
        """Of one running sequence."""
        self._shape = (1, 1)

    def load(self, kind: EngineKind, running: float, context_tokens: float, seconds_per_token: float) -> None:
        """An engine's report: running sequences, their contexts in all, and the seconds of a decoding step."""
        if seconds_per_token > 0 and running > 0:
            seconds = self.engines.observe(kind, running, context_tokens, running / seconds_per_token)
            if seconds is not None:
                self._token_s.add(seconds)

    def step(self, done: Trained) -> None:
        """A committed step; one without trajectories says nothing."""
        given = done.trajectories
        if not given:
            return
        self.steps += 1
        contexts = np.array([float(t.context_tokens) for t in given])
        self.history.add(
            StepSample(
                np.array([float(t.generated_tokens) for t in given]),
                contexts,
                np.array([t.tool_seconds for t in given]),
            )
        )
        self._prompt.add(sum(t.prompt_tokens for t in given) / len(given))
        self._shape = (max(1, done.groups), max(1, len(given) // max(1, done.groups)))
        total, squares = float(contexts.sum()), float(np.dot(contexts, contexts))
        self.trainers.observe(done.kind, done.replicas, total, squares, done.seconds)

    def demand(self) -> Demand:
        """What a step asks for now. ValueError before the first one."""
        groups, samples = self._shape
        return self.history.demand(
            prompt_tokens=self._prompt.value or 0.0, groups=groups, samples=samples,
            max_versions=self._rules.max_versions, max_context=self._rules.max_context,
            recompute=self._rules.recompute, seconds_per_token=self._token_s.value or 0.02,
        )  # fmt: skip

    def situation(
        self, fleet: Fleet, pace: Pace, *, steps_left: float, handover_s: Mapping[str, float] | None = None
    ) -> Situation:
        """For `relayout.plan`. ValueError before the first step."""
        return Situation(
            fleet, self.demand(), self.engines.all(), self.trainers.all(), pace, drift=self.history.slope,
            steps_left=steps_left, handover_s=dict(handover_s or {}),
        )  # fmt: skip
