"""The token loss: clipping, KL, sums."""

import pytest
import torch

from services.trainer.loss import LossRule, k3, token_loss


def rule(**changes):
    return LossRule(**({"clip_low": 0.2, "clip_high": 0.3, "kl_coef": 0.0, "proximal": False} | changes))


def tensors(*columns):
    return [torch.tensor(c, dtype=torch.float64) for c in columns]


def test_loss_is_the_clipped_surrogate_token_by_token():
    ratios = [0.5, 0.9, 1.0, 1.2, 2.0, 0.5, 2.0]
    advantage = [1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    logprob, behaviour, adv = tensors([-1.0] * 7, [-1.0 - float(torch.log(torch.tensor(r))) for r in ratios], advantage)
    expected = [-0.5, -0.9, -1.0, -1.2, -1.3, 0.8, 2.0]
    total, sums = token_loss(logprob, behaviour, adv, rule())
    assert float(total) == pytest.approx(sum(expected), abs=1e-6)
    assert sums.tokens == 7
    assert sums.clipped == 2  # 2.0 with A > 0, 0.5 with A < 0
    assert sums.ratio == pytest.approx(sum(ratios), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(2.0, 1.0, False), (0.5, -1.0, False), (2.0, -1.0, True), (0.5, 1.0, True), (1.1, 1.0, True)],
)
def test_clipping_stops_the_gradient_only_where_it_would_push_further_out(ratio, advantage, moves):
    (logprob,) = tensors([-1.0])
    logprob.requires_grad_(True)
    behaviour = logprob.detach() - torch.log(torch.tensor([ratio], dtype=torch.float64))
    total, _ = token_loss(logprob, behaviour, torch.tensor([advantage], dtype=torch.float64), rule())
    total.backward()
    expected = -ratio * advantage if moves else 0.0
    assert float(logprob.grad) == pytest.approx(expected)


def test_k3_is_non_negative_and_zero_at_equality():
    a, b = tensors([-1.0, -2.0, -0.5], [-1.0, -1.0, -3.0])
    estimate = k3(a, b)
    assert float(estimate[0]) == 0.0
    assert bool((estimate[1:] > 0).all())


def test_kl_to_the_reference_is_added_with_its_weight():
    logprob, behaviour, adv, reference = tensors([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], [-1.5, -1.0])
    total, sums = token_loss(logprob, behaviour, adv, rule(kl_coef=0.1), reference)
    assert float(total) == pytest.approx(0.1 * float(k3(logprob, reference).sum()))
    assert sums.kl == pytest.approx(float(k3(logprob, reference).sum()))


def test_proximal_objective_never_clips_within_one_step_and_weights_by_staleness():
    logprob, behaviour, adv = tensors([-1.0, -1.0], [-2.0, -1.0], [1.0, 1.0])
    logprob.requires_grad_(True)
    total, sums = token_loss(logprob, behaviour, adv, rule(proximal=True))
    total.backward()
    assert sums.clipped == 0
    assert logprob.grad.tolist() == pytest.approx([-float(torch.e), -1.0], rel=1e-6)


def test_mismatch_is_zero_only_where_engine_and_trainer_agree():
    logprob, behaviour, adv = tensors([-1.0, -1.0], [-1.0, -1.5], [0.0, 0.0])
    _, sums = token_loss(logprob, behaviour, adv, rule())
    assert sums.mismatch == pytest.approx(float(torch.exp(torch.tensor(0.5)) - 0.5 - 1.0), rel=1e-6)
