"""What a simulated run gave."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Usage:
    """Accelerator-seconds since the start, and token counts."""

    rollout_busy: float
    rollout_held: float
    training_busy: float
    training_held: float
    generated: int
    """Tokens, lost ones included."""
    moved: int
    """Context tokens of trajectories that changed engines."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step, or one batch where nothing is trained. Seconds since the start."""

    step: int
    took_at: float
    """When its batch was complete and training began."""
    ended_at: float
    tokens: int
    """Generated tokens that it consumed."""
    sequences: int
    staleness: int
    layout: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class RunResult:
    """All steps, and what happened on the way."""

    policy: str
    seed: int
    steps: tuple[StepResult, ...]
    wasted: int
    """Tokens generated and lost to failures, hand-overs and aborted groups."""
    moves: int
    preemptions: int
    """Engines that ran out of KV cache and stopped a sequence."""
    relayouts: int
    placed_late: int
    """Placements on an engine that had failed at least `detect_s` before."""
    refused: int
    """Plans that could not be placed."""

    def since(self, first: int) -> "Figures":
        """Figures of the steps from `first` (0 = all) to the last."""
        return figures(self.steps, first)


@dataclass(frozen=True, slots=True)
class Figures:
    """Summary of a stretch of steps. Shares are of accelerator time."""

    tokens_per_s: float
    makespan_p50_s: float
    makespan_p95_s: float
    idle_rollout: float
    idle_training: float
    migrated_ratio: float
    """Context tokens moved for each token generated."""
    max_staleness: int
    total_s: float


def figures(steps: Sequence[StepResult], first: int) -> Figures:
    """Summary of `steps[first:]`; a step's makespan is the time from the previous step's end to its own."""
    began = steps[first - 1].ended_at if first else 0.0
    before = steps[first - 1].usage if first else Usage(0.0, 0.0, 0.0, 0.0, 0, 0)
    chosen = steps[first:]
    if not chosen:
        raise ValueError(f"no step from {first} on: {len(steps)} in all")
    ends = np.array([began, *(s.ended_at for s in chosen)])
    after = chosen[-1].usage
    spans = np.diff(ends)
    total = float(ends[-1] - began)
    return Figures(
        tokens_per_s=sum(s.tokens for s in chosen) / total,
        makespan_p50_s=float(np.quantile(spans, 0.5)),
        makespan_p95_s=float(np.quantile(spans, 0.95)),
        idle_rollout=_idle(after.rollout_busy - before.rollout_busy, after.rollout_held - before.rollout_held),
        idle_training=_idle(after.training_busy - before.training_busy, after.training_held - before.training_held),
        migrated_ratio=(after.moved - before.moved) / max(1, after.generated - before.generated),
        max_staleness=max(s.staleness for s in chosen),
        total_s=total,
    )


def _idle(busy: float, held: float) -> float:
    return 1.0 - busy / held if held > 0 else 0.0
