"""One training step's arithmetic: from a manifest and a shard of it to the reduced gradient.

The same for first training and for redo.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common import wire
from services.common.blobs import BlobStore
from services.trainer import batches
from services.trainer.algorithm import Grpo
from services.trainer.batches import Batch, BrokenMembers, Place
from services.trainer.collective import Collective
from services.trainer.engine.base import Array, Engine, LossSums
from services.trainer.metrics import Phases


class Unreadable(Exception):
    """Some replica could not read part of its shard; the step is not taken. `broken` is what this replica found."""

    def __init__(self, broken: BrokenMembers | None) -> None:
        super().__init__(str(broken) if broken else "another replica could not read its shard")
        self.broken = broken


@dataclass(frozen=True, slots=True)
class Reduced:
    """What all replicas hold after the reduction; equal on each."""

    gradient: Array
    """Of the whole step's loss; one flat array."""
    sums: LossSums
    trainable_tokens: int
    """Tokens in the loss, summed over replicas."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What computing a shard needs."""

    engine: Engine
    store: BlobStore
    phases: Phases
    pay: Callable[[], None]
    """Called after each unit of compute, to keep to the accelerator's share."""
    check: Callable[[], None]
    """Called between units of compute; raises to break off."""


def reduce(
    worker: Worker,
    step: Batch,
    places: Sequence[Place],
    grpo: Grpo,
    collective: Collective,
    micro_batch_tokens: int = 0,
) -> Reduced:
    """Gradients of this replica's places, summed with the other replicas'. Unreadable, StepLost: nothing was made.

    The loss of each token is divided by the manifest's trainable tokens, whatever the shard: the plain sum over
    replicas is the whole step's gradient, and an empty shard contributes zeros. Statistics go first, so that a replica
    that could not read its shard is known before anything large is sent.
    """
    engine, phases = worker.engine, worker.phases
    divisor = float(max(1, step.manifest.divisors.trainable_tokens))
    sums, broken = LossSums(), None
    engine.zero()
    try:
        with phases.phase(wire.TRAINER_PHASE_FETCH):
            sequences = batches.read(worker.store, step, places)
    except BrokenMembers as error:
        sequences, broken = [], error
    with phases.phase(wire.TRAINER_PHASE_TRAIN):
        for micro in batches.micro_batches(sequences, micro_batch_tokens or grpo.micro_batch_tokens):
            worker.check()
            sums.add(engine.accumulate(micro, divisor))
            phases.micro_batches += 1
            worker.pay()
    with phases.phase(wire.TRAINER_PHASE_REDUCE):
        numbers = np.array([*sums.pack(), float(broken is not None)], dtype=np.float64)
        collective.sum(numbers)
        if numbers[-1]:
            raise Unreadable(broken)
        gradient = engine.gradient()
        collective.sum(gradient)
    total = LossSums.unpack(numbers[:-1].tolist())
    return Reduced(gradient, total, round(total.tokens))


def metrics(reduced: Reduced, grpo: Grpo, made: int, norm: float, statistics: batches.Statistics) -> dict[str, float]:
    """Named scalars of the step that made version `made`: means over trained tokens, and the manifest's own numbers."""
    tokens = max(1.0, reduced.sums.tokens)
    policy_loss, kl = reduced.sums.policy_loss / tokens, reduced.sums.kl / tokens
    values: Mapping[str, Any] = {
        "loss": policy_loss + grpo.kl_coef * kl,
        "policy_loss": policy_loss,
        "kl": kl,
        "mismatch_kl": reduced.sums.mismatch / tokens,
        "clip_share": reduced.sums.clipped / tokens,
        "ratio_mean": reduced.sums.ratio / tokens,
        "entropy": reduced.sums.entropy / tokens,
        "grad_norm": norm,
        "learning_rate": grpo.rate_of(made),
        "tokens": reduced.trainable_tokens,
        "reward_mean": statistics.reward_mean,
        "reward_std": statistics.reward_std,
        "response_length_mean": statistics.length_mean,
        "response_length_max": statistics.length_max,
        "truncated_share": statistics.truncated_share,
        "staleness_mean": statistics.staleness_mean,
        "staleness_max": statistics.staleness_max,
        "zero_groups_share": statistics.zero_groups_share,
    }
    return {k: float(v) for k, v in values.items()}
