"""What a training engine is to the rest of the service: arrays in, arrays out, no torch in the interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.trainer.algorithm import Grpo

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence as it is trained. All arrays have its length; values where `mask` is False are ignored."""

    trajectory: str
    index: int
    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """True for tokens in the loss. Never at position 0, which nothing predicts."""
    behaviour: npt.NDArray[np.float32]
    """Log-probability, nats, under the policy that sampled the token, as the rollout engine reported it."""
    temperature: npt.NDArray[np.float32]
    """What logits are divided by before the softmax, so that logprobs compare to `behaviour`."""
    advantage: float
    engine: str = ""
    """Build of the rollout engine, for the mismatch statistics."""

    @property
    def tokens(self) -> int:
        """Length."""
        return len(self.ids)

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return int(self.mask.sum())


@dataclass(slots=True)
class LossSums:
    """Sums over trained tokens; adding those of all shards and dividing by the step's tokens gives its means."""

    tokens: float = 0.0
    policy_loss: float = 0.0
    """Sum of the clipped surrogate, negated; already the sum that the divisor scales."""
    kl: float = 0.0
    """k3 estimate of KL to the reference; 0 without one."""
    mismatch: float = 0.0
    """k3 estimate of KL(behaviour || current): the logprob gap between rollout engine and trainer."""
    clipped: float = 0.0
    """Tokens at which the clipped branch was taken."""
    ratio: float = 0.0
    entropy: float = 0.0

    def add(self, other: "LossSums") -> None:
        """Adds the other's sums to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def pack(self) -> list[float]:
        """The sums in a fixed order."""
        return [float(getattr(self, f.name)) for f in fields(self)]

    @classmethod
    def unpack(cls, values: Sequence[float]) -> "LossSums":
        """The reverse of `pack`."""
        return cls(*(float(v) for v in values))


class Engine(Protocol):
    """One model with its optimizer. Not thread-safe; `load` makes it resident, `free` gives everything back."""

    @property
    def loaded(self) -> bool:
        """True while a model is resident."""
        ...

    def load(self, model: Path, grpo: Grpo) -> None:
        """Loads version 0 from a Hugging Face folder with a fresh optimizer."""
        ...

    def zero(self) -> None:
        """Forgets accumulated gradients."""
        ...

    def accumulate(self, batch: Sequence[TrainSequence], divisor: float) -> LossSums:
        """Forward and backward of one micro-batch; gradients are of (sum of token losses) / divisor."""
        ...

    def gradient(self) -> Array:
        """The accumulated gradient as one flat array in at least float32, zeros if nothing was accumulated.

        The caller may reduce it in place and hand it to `apply`.
        """
        ...

    def apply(self, gradient: Array, rate: float) -> float:
        """Clips by global norm and takes one optimizer step at this learning rate; returns the norm before clipping."""
        ...

    def weights(self) -> dict[str, Array]:
        """Parameters under their Hugging Face names; tied ones once."""
        ...

    def load_weights(self, weights: Mapping[str, Array]) -> None:
        """Sets the parameters alone; the optimizer's state stays."""
        ...

    def state(self) -> dict[str, Array]:
        """Copies of parameters, optimizer state and random number generators."""
        ...

    def load_state(self, state: Mapping[str, Array]) -> None:
        """The reverse of `state`; ValueError if names or shapes differ from the model's."""
        ...

    def free(self) -> None:
        """Drops model, optimizer and reference, and returns the memory to the system."""
        ...
