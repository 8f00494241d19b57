"""Drift and shifts of the work: followed, extrapolated within bounds, and told from noise."""

import math

import numpy as np
import pytest

from services.scheduler.core.drift import FRESH, MAX_DRIFT, MAX_SLOPE, StepHistory, StepSample
from tests.support.fleets import numbers_of_tokens


def sample(rng, mean, tool_s=20.0, count=512):
    generated = numbers_of_tokens(rng, mean, count)
    return StepSample(generated, 500 + 2 * generated, np.full(count, tool_s) * generated / mean)


def history(means, seed=0, tools=None, count=512):
    rng, known = np.random.default_rng(seed), StepHistory()
    shifts = [known.add(sample(rng, m, (tools or [20.0] * len(means))[i], count)) for i, m in enumerate(means)]
    return known, shifts


def demand(known, **changes):
    return known.demand(prompt_tokens=500.0, groups=32, samples=16, max_versions=1, **changes)


@pytest.mark.parametrize("seed", range(8))
def test_without_drift_noise_is_neither_drift_nor_shift(seed):
    known, shifts = history([3_000.0] * 20, seed)
    assert not any(shifts)
    assert not known.shifted
    assert abs(known.slope) < 0.03
    assert demand(known).tokens == pytest.approx(512 * 3_000, rel=0.08)


@pytest.mark.parametrize("seed", range(8))
def test_small_noisy_steps_are_no_shifts_either(seed):
    _, shifts = history([3_000.0] * 40, seed, count=32)
    assert sum(shifts) <= 1


def test_slow_drift_is_followed_and_seen_ahead():
    means = [2_500 * 1.08**i for i in range(20)]
    known, shifts = history(means)
    assert not any(shifts)
    assert 0.03 < known.slope < 0.1
    assert demand(known).tokens == pytest.approx(512 * means[-1], rel=0.1)
    assert 1.1 < known.factor(5) < 1.6


def test_extrapolation_is_bounded():
    known, _ = history([1_000 * 1.3**i for i in range(8)])
    assert known.slope <= MAX_SLOPE
    assert known.factor(1_000) == pytest.approx(MAX_DRIFT)
    falling, _ = history([8_000 * 0.8**i for i in range(8)])
    assert falling.factor(1_000) == pytest.approx(1 / MAX_DRIFT)


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_seen_at_once_and_what_was_before_is_forgotten(seed):
    known, shifts = history([3_000.0] * 10 + [12_000.0] * 2, seed)
    assert shifts == [False] * 10 + [True, False]
    assert known.shifted
    assert demand(known).tokens == pytest.approx(512 * 12_000, rel=0.15)
    rng = np.random.default_rng(seed + 100)
    for _ in range(FRESH):
        known.add(sample(rng, 12_000.0))
    assert not known.shifted


def test_slower_tools_are_a_shift_as_well():
    _, shifts = history([3_000.0] * 10, tools=[20.0] * 8 + [100.0] * 2)
    assert shifts == [False] * 8 + [True, False]


def test_a_step_in_three_parts_is_a_shift_by_its_second():
    """Asynchronous rollouts mix old and new trajectories, so that a jump arrives in parts."""
    _, shifts = history([3_000.0] * 8 + [5_500.0, 9_000.0, 12_000.0])
    assert any(shifts[8:10])


def test_lengths_do_not_grow_past_the_longest_context():
    known, _ = history([2_500 * 1.2**i for i in range(10)])
    assert max(demand(known, max_context=20_000.0).contexts) <= max(
        20_000.0, float(max(s.contexts.max() for s in known.samples))
    )


def test_nothing_is_known_before_the_first_step():
    known = StepHistory()
    assert not known.add(StepSample(np.array([]), np.array([]), np.array([])))
    with pytest.raises(ValueError, match="no step"):
        demand(known)
    assert known.slope == 0.0
    assert math.isclose(known.factor(10), 1.0)
