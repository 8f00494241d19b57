"""Settings of the learning algorithm, from Run.algorithm. The scheduler only stores them; the trainer checks them."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from services.common import errors, wire

NAME = "grpo"


@dataclass(frozen=True, slots=True)
class Grpo:
    """Group-relative policy optimisation (arXiv 2402.03300) with a token-level loss over the whole step.

    One optimizer step per manifest: the gradients are taken at the base version, so current and proximal logprobs are
    equal, and recomputing the latter separately changes nothing but the form of the objective (see `proximal`).
    """

    learning_rate: float = 3e-4
    """Of AdamW; what a step uses is `rate_of(step)`."""
    warmup_steps: int = 0
    """Steps over which the rate rises to `learning_rate`."""
    decay_after: int = 0
    """Steps before the rate falls, warm-up included."""
    decay_steps: int = 0
    """Steps over which it then falls; 0 = never."""
    min_lr_ratio: float = 0.0
    """Where the fall ends, as a share of `learning_rate`."""
    clip_low: float = 0.2
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || frozen version 0); 0 loads no reference model."""
    max_grad_norm: float = 1.0
    """Global norm to which the reduced gradient is clipped; 0 = off."""
    advantage_std: bool = True
    """Divide (reward - group mean) by the group's standard deviation."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    checkpoint_every: int = 10
    """Steps between checkpoints; bounds the redo log."""
    micro_batch_tokens: int = 2048
    """Tokens of one forward and backward pass, padding included. The default suits a CPU's caches; a GPU wants more."""
    steps: int = 0
    """Steps in all; 0 = until the run's tasks are exhausted."""
    proximal: bool = False
    """True: the decoupled objective (arXiv 2505.24298), ratio against proximal logprobs recomputed at the base version,
    weighted by proximal / behaviour. Off by default: with one optimizer step per manifest its ratio is 1 throughout, so
    clipping never acts and only the (truncated) weight corrects for stale tokens."""

    def rate_of(self, step: int) -> float:
        """The learning rate of the update that makes version `step` (1, 2, …), a function of nothing else.

        Linear warm-up, constant, linear decay: the "warmup-stable-decay" schedule (arXiv 2404.06395). A redo after a
        crash and a replica that has just joined arrive at the same rate without any state.
        """
        rate = self.learning_rate
        if step < self.warmup_steps:
            rate *= step / self.warmup_steps
        if self.decay_steps:
            done = min(1.0, max(0, step - self.decay_after) / self.decay_steps)
            rate *= 1.0 - (1.0 - self.min_lr_ratio) * done
        return rate


_LIST_KEYS = {"betas": ("beta1", "beta2")}


def parse(algorithm: wire.Algorithm) -> Grpo:
    """The settings with defaults; INVALID_FIELD names an unknown algorithm, key or value and what was expected."""
    if algorithm.name not in ("", NAME):
        raise errors.invalid_field(f"algorithm {algorithm.name!r} is not known to this trainer; it knows {NAME!r}")
    return from_settings(wire.MessageToDict(algorithm.settings))


def from_settings(settings: Mapping[str, object]) -> Grpo:
    """As `parse`, from plain values (JSON numbers are floats)."""
    kinds = {f.name: type(f.default) for f in fields(Grpo)}
    known = sorted([*(k for k in kinds if k not in ("beta1", "beta2")), *_LIST_KEYS])
    values: dict[str, float | int | bool] = {}
    for key, value in settings.items():
        if key in _LIST_KEYS:
            if not isinstance(value, list) or len(value) != len(_LIST_KEYS[key]):
                raise errors.invalid_field(f"algorithm.settings.{key}: expected a list of 2 numbers, found {value!r}")
            for name, part in zip(_LIST_KEYS[key], value, strict=True):
                values[name] = _number(key, part, float)
        elif key in known:
            values[key] = _number(key, value, kinds[key])
        else:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise errors.invalid_field(f"algorithm.settings: unknown key {key!r}; {hint}")
    grpo = Grpo(**values)  # type: ignore[arg-type]
    _check(grpo)
    return grpo


def _number(key: str, value: object, kind: type) -> float | int | bool:
    where = f"algorithm.settings.{key}"
    if kind is bool:
        if not isinstance(value, bool):
            raise errors.invalid_field(f"{where}: expected true or false, found {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise errors.invalid_field(f"{where}: expected a finite number, found {value!r}")
    if kind is int:
        if value != int(value):
            raise errors.invalid_field(f"{where}: expected a whole number, found {value!r}")
        return int(value)
    return float(value)


def _check(grpo: Grpo) -> None:
    limits: dict[str, tuple[float, float]] = {
        "learning_rate": (0.0, 1.0),
        "warmup_steps": (0, 1 << 40),
        "decay_after": (0, 1 << 40),
        "decay_steps": (0, 1 << 40),
        "min_lr_ratio": (0.0, 1.0),
        "clip_low": (0.0, 1.0),
        "clip_high": (0.0, 100.0),
        "kl_coef": (0.0, 100.0),
        "max_grad_norm": (0.0, 1e9),
        "weight_decay": (0.0, 10.0),
        "beta1": (0.0, 0.999999),
        "beta2": (0.0, 0.9999999),
        "checkpoint_every": (1, 1_000_000),
        "micro_batch_tokens": (1, 1 << 30),
        "steps": (0, 1 << 40),
    }
    for name, (low, high) in limits.items():
        value = getattr(grpo, name)
        if not low <= value <= high:
            raise errors.invalid_field(f"algorithm.settings.{name}: expected {low} to {high}, found {value}")
