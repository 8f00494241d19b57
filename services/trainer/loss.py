"""The GRPO token loss, in torch: clipped importance ratio, k3 KL, sums instead of means."""

from dataclasses import dataclass

import torch

from services.trainer.engine.base import LossSums

PROXIMAL_WEIGHT_CAP = 5.0
"""Truncation of the weight proximal / behaviour in the decoupled objective (truncated importance sampling)."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """The part of the settings that the loss depends on."""

    clip_low: float
    clip_high: float
    kl_coef: float
    proximal: bool


def k3(from_logprob: torch.Tensor, to_logprob: torch.Tensor) -> torch.Tensor:
    """Low-variance, non-negative estimate of KL(from || to) per token sampled from `from`.

    exp(d) - d - 1 with d = to - from (J. Schulman, "Approximating KL divergence", 2020).
    """
    d = to_logprob - from_logprob
    return torch.exp(d) - d - 1.0


def token_loss(
    logprob: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    rule: LossRule,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LossSums]:
    """Sum over tokens of -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef k3, and the statistics; all inputs [tokens].

    r = exp(logprob - behaviour): against the policy that sampled, which may be some versions old. With `proximal`, r is
    taken against the detached logprobs of the base version and weighted by min(proximal / behaviour, cap).
    """
    gap = logprob - behaviour
    if rule.proximal:
        anchor = logprob.detach()
        weight = torch.exp(anchor - behaviour).clamp(max=PROXIMAL_WEIGHT_CAP)
        ratio = torch.exp(logprob - anchor)
    else:
        weight = torch.ones_like(logprob)
        ratio = torch.exp(gap)
    free = ratio * advantage
    clipped = ratio.clamp(1.0 - rule.clip_low, 1.0 + rule.clip_high) * advantage
    policy = -(weight * torch.minimum(free, clipped))
    total = policy.sum()
    kl = torch.zeros((), dtype=logprob.dtype)
    if reference is not None:
        kl = k3(logprob, reference).sum()
        if rule.kl_coef:
            total = total + rule.kl_coef * kl
    with torch.no_grad():
        sums = LossSums(
            tokens=float(logprob.numel()),
            policy_loss=float(policy.sum()),
            kl=float(kl),
            mismatch=float(k3(behaviour, logprob).sum()),
            clipped=float((clipped < free).sum()),
            ratio=float(torch.exp(gap).sum()),
        )
    return total, sums
