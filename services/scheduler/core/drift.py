"""How the work changes from step to step: what the last steps ask for, where it is heading, and when it has jumped.

The logarithm of the mean generated length is followed by a level and a weighted least-squares slope over the last
steps, both shrunk so that the sampling of prompts does not look like drift. Older steps are scaled by the slope to what
their trajectories would be now. A step far outside what was predicted (lengths, or seconds in tool calls) is a *shift*:
what came before it no longer counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.demand import Demand, demand_of

Floats = NDArray[np.float64]

STEPS = 8
"""Kept."""
AGE = 0.7
"""Weight of a step against the next one."""
SLOPE_PRIOR = 4.0
"""Pulls the slope to 0, in squared steps: noise of a step's mean over drift that is likely, both squared."""
MAX_SLOPE = 0.25
"""Largest drift of the log mean in a step."""
MAX_DRIFT = 2.0
"""Furthest that lengths are extrapolated, either way."""
SHIFT_DEVIATIONS = 4.0
SHIFT_LEAST = math.log(1.5)
"""A step is a shift if its log mean is off by at least that, and by so many mean absolute deviations."""
FIRST_DEVIATION = 0.1
"""Of a step's log mean, until some were seen."""
DEVIATION_WEIGHT = 0.2
FRESH = 3
"""Steps for which a shift is new."""


@dataclass(frozen=True)
class StepSample:
    """The trajectories that a step consumed, or a sample of them. Arrays of one size."""

    generated: Floats
    contexts: Floats
    """Final."""
    tool_seconds: Floats


@dataclass(slots=True)
class StepHistory:
    """The last steps. One writer."""

    samples: list[StepSample] = field(default_factory=list)
    since_shift: int = FRESH
    """Steps since the last one; at least FRESH without one."""
    _deviations: list[float] = field(default_factory=lambda: [FIRST_DEVIATION, FIRST_DEVIATION])

    def add(self, sample: StepSample) -> bool:
        """One step; True if it is a shift. Empty samples are left out."""
        if not len(sample.generated):
            return False
        now, expected = _logs(sample), self._expected()
        self.since_shift += 1
        if expected is None:
            self.samples = [sample]
            return False
        off = [abs(a - b) for a, b in zip(now, expected, strict=True)]
        jumped = any(o > max(SHIFT_LEAST, SHIFT_DEVIATIONS * d) for o, d in zip(off, self._deviations, strict=True))
        if jumped:
            self.samples = [sample]
            self.since_shift = 0
            return True
        self._deviations = [d + DEVIATION_WEIGHT * (o - d) for o, d in zip(off, self._deviations, strict=True)]
        self.samples = [*self.samples[-(STEPS - 1) :], sample]
        return False

    @property
    def shifted(self) -> bool:
        """True while a shift is new."""
        return self.since_shift < FRESH

    @property
    def slope(self) -> float:
        """Drift of the log of the mean generated length, a step."""
        return _slope([_logs(s)[0] for s in self.samples])

    def factor(self, steps: float) -> float:
        """What lengths are multiplied by in so many steps, at most MAX_DRIFT either way."""
        most = math.log(MAX_DRIFT)
        return math.exp(min(most, max(-most, self.slope * steps)))

    def demand(
        self, *, prompt_tokens: float, groups: int, samples: int, max_versions: int, max_context: float = math.inf,
        seconds_per_token: float = 0.02, recompute: bool = True,
    ) -> Demand:  # fmt: skip
        """What a step asks for now. ValueError before the first one."""
        if not self.samples:
            raise ValueError("no step was seen yet, so nothing is known of the demand")
        ages = range(len(self.samples) - 1, -1, -1)
        grown = [min(MAX_DRIFT, max(1 / MAX_DRIFT, math.exp(self.slope * age))) for age in ages]
        parts = [_scaled(s, g, prompt_tokens, max_context) for s, g in zip(self.samples, grown, strict=True)]
        weights = [np.full(len(s.generated), AGE**age / len(s.generated)) for s, age in zip(parts, ages, strict=True)]
        return demand_of(
            np.concatenate([s.generated for s in parts]), np.concatenate([s.contexts for s in parts]),
            np.concatenate([s.tool_seconds for s in parts]), np.concatenate(weights),
            prompt_tokens=prompt_tokens, groups=groups, samples=samples, max_versions=max_versions,
            seconds_per_token=seconds_per_token, recompute=recompute, max_context=max_context,
        )  # fmt: skip

    def _expected(self) -> tuple[float, float] | None:
        """Log means of the next step."""
        if not self.samples:
            return None
        weights = np.array([AGE**age for age in range(len(self.samples) - 1, -1, -1)])
        logs = np.array([_logs(s) for s in self.samples])
        level = weights @ logs / weights.sum()
        lag = float(weights @ np.arange(len(weights) - 1, -1, -1) / weights.sum()) + 1.0
        return float(level[0]) + self.slope * lag, float(level[1])


def _logs(sample: StepSample) -> tuple[float, float]:
    """Log of the mean generated tokens and of the mean seconds in tool calls, of which one is added."""
    return math.log(max(1.0, float(np.mean(sample.generated)))), math.log(1.0 + float(np.mean(sample.tool_seconds)))


def _slope(logs: Sequence[float]) -> float:
    if len(logs) < 2:
        return 0.0
    weights = np.array([AGE**age for age in range(len(logs) - 1, -1, -1)])
    times, values = np.arange(len(logs), dtype=float), np.array(logs)
    times -= weights @ times / weights.sum()
    values -= weights @ values / weights.sum()
    slope = float(weights @ (times * values) / (weights @ times**2 + SLOPE_PRIOR))
    return min(MAX_SLOPE, max(-MAX_SLOPE, slope))


def _scaled(sample: StepSample, factor: float, prompt: float, most: float) -> StepSample:
    if factor == 1.0:
        return sample
    beyond = np.maximum(sample.contexts - prompt, 1e-9)
    factors = np.minimum(factor, np.maximum((most - prompt) / beyond, min(factor, 1.0)))
    contexts = sample.contexts + beyond * (factors - 1.0)
    return StepSample(sample.generated * factors, contexts, sample.tool_seconds * factors)
