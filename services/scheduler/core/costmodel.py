"""What a layout is expected to do: times of a step from rates that were observed, corrected as they come in.

Rollout and training run side by side (asynchronous within the staleness bound), so that a step takes

    T = max(T_rollout, T_train, T_tail / (K + 1))
    T_rollout = G / sum over levels (n_l * c_l)         G: generated tokens of a step
    T_train   = S + W / n * (1 + L * (n - 1))           L: share of training time that each further replica loses
    T_tail    = serial time of the longest trajectory

c_l, tokens per second of one replica of level l, is a rate over how full the replica was (core/occupancy.py says what
full slots would yield, so that a replica waiting for tools is full though its device idles). W, the
parallel seconds of a step on one trainer (log-probabilities, forward, backward), and S, the serial rest (fetch, reduce,
commit, publish), come from the trainers' phase counters; L from their seconds together before and after the number of
trainers changed: a step has the same number of sequences, so that the drift over a few steps matters little. Tokens per
step, G, W and S follow the last steps with an exponential mean, so the drift of the workload is in them; a level never
seen takes the mean rate of the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

ALPHA = 0.3
"""Weight of the newest observation: about the last five steps count."""
LOSS_PER_REPLICA = 0.05
"""L until the number of trainers has changed: reduction and imbalance."""
MAX_LOSS = 0.5
"""Largest L believed: two replicas are then as fast as 1.3."""
LOSS_READINGS = 4
"""Readings (one of each trainer in each step) before and after a change of the number of trainers that teach L."""
MIN_UTILISATION = 0.05
"""Below this an engine's rate says nothing about its capacity."""
DEFAULT_HANDOVER_S = 5.0
NEVER_S = 1e9
"""Seconds of a phase that cannot end: it has no replica or no known rate. Finite, since predictions are stored."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas by role: trainers, and rollout replicas of each level."""

    trainers: int
    rollouts: tuple[tuple[int, int], ...]
    """(level, count), by level."""

    @property
    def rollout_count(self) -> int:
        """Rollout replicas of all levels."""
        return sum(n for _, n in self.rollouts)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model expects of a layout, per step."""

    trained_tokens_per_second: float
    step_seconds: float
    rollout_seconds: float
    train_seconds: float
    tail_seconds: float


@dataclass(slots=True)
class Mean:
    """An exponential mean; None until the first observation."""

    value: float | None = None
    count: int = 0

    def add(self, value: float, alpha: float = ALPHA) -> None:
        """The first observations weigh equally, later ones by alpha. Only finite values of at least 0 count: one broken
        report would spoil the mean for good.
        """
        if not math.isfinite(value) or value < 0:
            return
        self.count += 1
        weight = max(alpha, 1.0 / self.count)
        self.value = value if self.value is None else self.value + weight * (value - self.value)


@dataclass(slots=True)
class CostModel:
    """Observed rates and times; one writer."""

    capacity: dict[int, Mean] = field(default_factory=dict)
    """Tokens per second of one rollout replica, by level."""
    tokens_per_step: Mean = field(default_factory=Mean)
    generated_per_step: Mean = field(default_factory=Mean)
    parallel_seconds: Mean = field(default_factory=Mean)
    loss: Mean = field(default_factory=Mean)
    serial_seconds: Mean = field(default_factory=Mean)
    tail_seconds: Mean = field(default_factory=Mean)
    handover_seconds: dict[str, Mean] = field(default_factory=dict)
    error: Mean = field(default_factory=Mean)
    """Relative error of predicted step times against observed ones."""
    _crew: int = 0
    _crew_seconds: Mean = field(default_factory=Mean)
    """Seconds of all `_crew` trainers together in a step, since there are so many."""
    _before: tuple[int, float] | None = None
    """The crew before that, and its seconds."""

    def observe_rollout(self, level: int, tokens_per_second: float, utilisation: float) -> None:
        """One replica's rate over the last report interval, and how full it was."""
        if utilisation >= MIN_UTILISATION and tokens_per_second > 0:
            self.capacity.setdefault(level, Mean()).add(tokens_per_second / min(1.0, utilisation), 0.05)

    def observe_step(self, trained_tokens: int, generated_tokens: int) -> None:
        """A committed step's size."""
        self.tokens_per_step.add(float(trained_tokens))
        self.generated_per_step.add(float(generated_tokens))

    def observe_training(self, parallel_seconds: float, serial_seconds: float, replicas: int) -> None:
        """One trainer's seconds in a step, with this many replicas at work (0 teaches nothing)."""
        if replicas < 1:
            return
        self._learn_loss(parallel_seconds * replicas, replicas)
        self.parallel_seconds.add(parallel_seconds * replicas / (1 + self.replica_loss * (replicas - 1)))
        self.serial_seconds.add(serial_seconds)

    @property
    def replica_loss(self) -> float:
        """L, measured or supposed."""
        return LOSS_PER_REPLICA if self.loss.value is None else self.loss.value

    def _learn_loss(self, seconds: float, replicas: int) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if replicas != self._crew:
            known = self._crew_seconds
            self._before = (self._crew, known.value) if known.value and known.count >= LOSS_READINGS else None
            self._crew, self._crew_seconds = replicas, Mean()
        self._crew_seconds.add(seconds)
        if self._before is None or self._crew_seconds.count != LOSS_READINGS:
            return
        (few, least), (many, most) = sorted([self._before, (replicas, self._crew_seconds.value or 0.0)])
        # most / least = (1 + L (many - 1)) / (1 + L (few - 1)), solved for L
        ratio = most / least
        rest = (many - 1) - ratio * (few - 1)
        measured = (ratio - 1) / rest if rest > 0 else MAX_LOSS
        self.loss.add(min(MAX_LOSS, max(0.0, measured)))
        self.parallel_seconds = Mean()  # what is in it was scaled by another L

    def observe_tail(self, seconds: float) -> None:
        """Serial time of the longest trajectory of a step, its waiting in queues left out."""
        self.tail_seconds.add(seconds)

    def observe_handover(self, to_role: str, seconds: float) -> None:
        """How long a hand-over took."""
        self.handover_seconds.setdefault(to_role, Mean()).add(seconds)

    def observe_step_seconds(self, predicted: float, observed: float) -> None:
        """Keeps the relative error of the predictions."""
        if observed > 0:
            self.error.add(abs(predicted - observed) / observed)

    def handover(self, to_role: str) -> float:
        """Expected seconds of a hand-over."""
        known = self.handover_seconds.get(to_role)
        return known.value if known is not None and known.value is not None else DEFAULT_HANDOVER_S

    @property
    def ready(self) -> bool:
        """True once both phases have been seen."""
        return self.parallel_seconds.value is not None and any(m.value for m in self.capacity.values())

    def predict(self, layout: Layout, max_versions: int) -> Prediction:
        """Times of a step under a layout, at most NEVER_S; that, and no tokens, where a role has no replica."""
        tokens = self.tokens_per_step.value or 0.0
        rollout = self._rollout_seconds(layout)
        train = self._train_seconds(layout.trainers)
        tail = min(NEVER_S, self.tail_seconds.value or 0.0)
        step = max(rollout, train, tail / (max_versions + 1), 1e-9)
        return Prediction(tokens / step if step < NEVER_S else 0.0, step, rollout, train, tail)

    def _rollout_seconds(self, layout: Layout) -> float:
        known: Mapping[int, float] = {level: m.value for level, m in self.capacity.items() if m.value}
        if not known:
            return NEVER_S
        typical = sum(known.values()) / len(known)
        rate = sum(count * known.get(level, typical) for level, count in layout.rollouts)
        return min(NEVER_S, (self.generated_per_step.value or 0.0) / rate) if rate > 0 else NEVER_S

    def _train_seconds(self, trainers: int) -> float:
        if trainers <= 0:
            return NEVER_S
        parallel, serial = self.parallel_seconds.value or 0.0, self.serial_seconds.value or 0.0
        return min(NEVER_S, serial + parallel / trainers * (1 + self.replica_loss * (trainers - 1)))
