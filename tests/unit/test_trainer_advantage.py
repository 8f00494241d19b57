"""Advantages: group-relative, a pure function of the manifest."""

import numpy as np
import pytest

from services.trainer.advantage import EPSILON, advantages


def test_advantage_is_reward_minus_group_mean_over_population_std():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.25]
    groups = ["a", "a", "a", "a", "b", "b"]
    found = advantages(groups, rewards)
    for group in ("a", "b"):
        part = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        expected = (part - part.mean()) / (part.std() + EPSILON)
        assert [f for f, g in zip(found, groups, strict=True) if g == group] == pytest.approx(expected.tolist())


def test_advantage_without_std_keeps_the_reward_scale():
    assert advantages(["a", "a"], [3.0, 1.0], divide_by_std=False) == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[1.0], [0.1, 0.1, 0.1]])
def test_advantage_of_a_group_without_signal_is_exactly_zero(rewards):
    assert advantages(["a"] * len(rewards), rewards) == [0.0] * len(rewards)


def test_advantage_does_not_depend_on_the_order_of_members():
    rewards, groups = [1.0, 0.25, 0.0, 0.75], ["a", "b", "a", "b"]
    order = [3, 1, 0, 2]
    straight = advantages(groups, rewards)
    shuffled = advantages([groups[i] for i in order], [rewards[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(4)] == straight
