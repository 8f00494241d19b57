"""Bounded searches for a static layout, by simulation on a pilot: the same workload drawn from another seed.

Homogeneous: every degree that `static.degrees` allows x every number of whole training replicas that leaves at least
one node for rollout (at most SPLITS of them, evenly spaced), each on PILOT steps spread evenly over the run; the
FINALISTS best again on the whole run. Mixed: around the best homogeneous one, the same split with one quarter, a half
or three quarters of the rollout accelerators of another degree, by the same two rounds. The score is trained tokens per
second from step `first` on; equal scores keep the earlier candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.errors import ConfigError
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.policies.base import Policy
from services.simulator.policies.static import degrees
from services.simulator.policies.synchronous import Colocated
from services.simulator.processes import Run
from services.simulator.workload import Episode, Workload

PILOT_SEED = 1_000_003
PILOT = 4
SPLITS = 5
FINALISTS = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A layout, its score in trained tokens per second, and how many layouts were tried for how many steps in all."""

    layout: Layout
    score: float
    tried: int
    steps: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Some steps of a workload in turn, so that a short pilot sees the whole drift."""

    workload: Workload
    steps: tuple[int, ...]

    def batch(self, step: int, seed: int) -> list[Episode]:
        """That of the step that is next."""
        at = self.steps[min(step, len(self.steps) - 1)]
        return [replace(e, id=f"{step}:{e.id}", group=f"{step}:{e.group}") for e in self.workload.batch(at, seed)]


@dataclass(frozen=True, slots=True)
class Question:
    """What a layout is wanted for. Scored from step `first` on."""

    spec: ClusterSpec
    workload: Workload
    steps: int
    first: int
    mode: Mode = Mode.ASYNC


@dataclass(frozen=True, slots=True)
class _Try:
    layout: Layout
    question: Question


def best(layouts: Sequence[Layout], question: Question, run: Run) -> Found:
    """The best of them, in two rounds. Raises ConfigError if there is none."""
    if not layouts:
        raise ConfigError("no layout fits the cluster: expected room for one training replica and one engine")
    some, tried, steps = list(layouts), 0, 0
    if len(some) > FINALISTS and question.steps > PILOT + 2:
        short = replace(question, workload=_spread(question), steps=PILOT + 2, first=1)
        scores = run(score, [_Try(layout, short) for layout in some])
        order = sorted(range(len(some)), key=lambda i: (-scores[i], i))
        tried, steps = len(some), len(some) * short.steps
        some = [some[i] for i in order[:FINALISTS]]
    final = run(score, [_Try(layout, question) for layout in some])
    at = max(range(len(some)), key=lambda i: (final[i], -i))
    return Found(some[at], final[at], tried + len(some), steps + len(some) * question.steps)


def score(attempt: _Try) -> float:
    """Trained tokens per second of a layout on the pilot's seed; 0 if it cannot be had or cannot hold an episode."""
    question = attempt.question
    policy: Policy = Colocated(attempt.layout) if question.mode is Mode.COLOCATED else Policy(attempt.layout)
    policy.mode = question.mode
    spec = replace(question.spec, failures=())
    try:
        result = Cluster(spec, question.workload, policy, seed=PILOT_SEED, steps=question.steps).run()
    except ConfigError:
        return 0.0
    return result.since(min(question.first, question.steps - 1)).tokens_per_s


def _spread(question: Question) -> Spread:
    span = max(1, question.steps - 1 - question.first)
    inner = [question.first + round(span * i / (PILOT - 1)) for i in range(PILOT)]
    return Spread(question.workload, (inner[0], *inner, inner[-1]))


def splits(spec: ClusterSpec) -> list[int]:
    """Training accelerators to try: whole replicas, at least a node left; (0,) where nothing trains."""
    if spec.training is None:
        return [0]
    least = spec.training.min_accelerators()
    room = spec.accelerators - min(spec.node_size, spec.accelerators // 2)
    every = list(range(least, room + 1, least))
    if len(every) <= SPLITS:
        return every
    return sorted({every[round(i * (len(every) - 1) / (SPLITS - 1))] for i in range(SPLITS)})


def homogeneous_layouts(spec: ClusterSpec) -> list[Layout]:
    """All candidates of one degree."""
    return [
        Layout((tp,) * ((spec.accelerators - training) // tp), training)
        for tp in degrees(spec)
        for training in splits(spec)
        if spec.accelerators - training >= tp
    ]


def mixed_layouts(spec: ClusterSpec, base: Layout) -> list[Layout]:
    """The base, and the same split with a part of its accelerators in engines of another degree."""
    tp = base.engines[0]
    found = [base]
    for other in degrees(spec):
        if other == tp:
            continue
        for quarters in (1, 2, 3):
            wide = max(tp, other)
            part = base.rollout * quarters // 4 // wide * wide
            rest = base.rollout - part
            if part and rest:
                engines = (*(tp,) * (rest // tp), *(other,) * (part // other))
                found.append(Layout(tuple(sorted(engines)), base.training))
    return found


def colocated_layouts(spec: ClusterSpec) -> list[Layout]:
    """All accelerators, one degree."""
    return [Layout((tp,) * (spec.accelerators // tp), 0) for tp in degrees(spec)]
