"""Bounded searches for a static layout, by simulation on a pilot: the same workload drawn from another seed.

Homogeneous: every degree that `static.degrees` allows x at most SPLITS numbers of whole training replicas, evenly
spaced, that leave at least one node for rollout; each on PILOT steps spread evenly over the run. Then, on the same
steps, the splits between the best two and their neighbours. The FINALISTS best again on the whole run. Mixed: around
the best homogeneous one, the same split with one quarter, a half or three quarters of the rollout accelerators of
another degree, by pilot and final. The clairvoyant's layout: the finalists of both again, with that policy. The score
is trained tokens per second from step `first` on; equal scores keep the earlier candidate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.errors import ConfigError
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.policies.base import Policy
from services.simulator.policies.static import degrees
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
    finalists: tuple[Layout, ...] = ()
    """Best first."""


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
    make: Callable[[Layout], Policy]


def best(
    layouts: Sequence[Layout],
    question: Question,
    run: Run,
    *,
    make: Callable[[Layout], Policy] = Policy,
    refine: Callable[[Sequence[Layout]], Sequence[Layout]] = lambda _: (),
) -> Found:
    """The best of them by pilot and final, `refine` naming further ones around the best two of the pilot.

    Raises ConfigError if there is none.
    """
    if not layouts:
        raise ConfigError("no layout fits the cluster: expected room for one training replica and one engine")
    some, tried, steps = list(layouts), 0, 0
    if len(some) > FINALISTS and question.steps > PILOT + 2:
        short = replace(question, workload=_spread(question), steps=PILOT + 2, first=1)
        scores = dict(zip(some, run(score, [_Try(layout, short, make) for layout in some]), strict=True))
        further = [layout for layout in refine(_ranked(scores)[:2]) if layout not in scores]
        scores |= zip(further, run(score, [_Try(layout, short, make) for layout in further]), strict=True)
        tried, steps = len(scores), len(scores) * short.steps
        some = _ranked(scores)[:FINALISTS]
    final = dict(zip(some, run(score, [_Try(layout, question, make) for layout in some]), strict=True))
    ranked = _ranked(final)
    return Found(ranked[0], final[ranked[0]], tried + len(some), steps + len(some) * question.steps, tuple(ranked))


def _ranked(scores: Mapping[Layout, float]) -> list[Layout]:
    """Best first; equal ones in their order."""
    return sorted(scores, key=lambda layout: -scores[layout])


def score(attempt: _Try) -> float:
    """Trained tokens per second of a layout on the pilot's seed; 0 if it cannot be had or cannot hold an episode."""
    question = attempt.question
    policy = attempt.make(attempt.layout)
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


def every_split(spec: ClusterSpec) -> list[int]:
    """Training accelerators that may be: whole replicas, at least a node left; (0,) where nothing trains."""
    if spec.training is None:
        return [0]
    least = spec.training.min_accelerators()
    room = spec.accelerators - min(spec.node_size, spec.accelerators // 2)
    return list(range(least, room + 1, least))


def splits(spec: ClusterSpec) -> list[int]:
    """At most SPLITS of them, evenly spaced, both ends included."""
    every = every_split(spec)
    if len(every) <= SPLITS:
        return every
    return sorted({every[round(i * (len(every) - 1) / (SPLITS - 1))] for i in range(SPLITS)})


def neighbours(spec: ClusterSpec, leaders: Sequence[Layout]) -> list[Layout]:
    """Layouts of each leader's degree whose split lies between its neighbours among `splits`."""
    coarse, found = splits(spec), []
    for leader in leaders:
        at = coarse.index(leader.training)
        low, high = coarse[max(0, at - 1)], coarse[min(len(coarse) - 1, at + 1)]
        tp = leader.engines[0]
        found += [_uniform(spec, tp, training) for training in every_split(spec) if low < training < high]
    return list(dict.fromkeys(layout for layout in found if layout.engines))


def _uniform(spec: ClusterSpec, tp: int, training: int) -> Layout:
    return Layout((tp,) * ((spec.accelerators - training) // tp), training)


def homogeneous_layouts(spec: ClusterSpec) -> list[Layout]:
    """All candidates of one degree."""
    return [
        _uniform(spec, tp, training)
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
