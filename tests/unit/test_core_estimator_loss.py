"""How good the estimates are: pinball loss and coverage on seeded workloads, with signal and without."""

import random

import pytest

from services.scheduler.core import estimator
from services.scheduler.core.estimator import RemainingWork

LEARN, TEST = 150, 350


def pinball(actual, guess, probability):
    """Loss of a quantile estimate, tokens; the true quantile has the least."""
    return max(probability * (actual - guess), (probability - 1) * (actual - guess))


def losses(episodes, *, hide=False, lonely=False):
    """Mean pinball loss of p50 and p90 at every turn, and the share of ends within p90.

    `episodes` are (group, [(generated, outcome)...], total); `hide` shows no tool return, `lonely` no sibling.
    """
    work, p50, p90, within = RemainingWork(), [], [], []
    for index, (group, turns, total) in enumerate(episodes):
        family = f"{group}-{index}" if lonely else group
        for turn, (generated, outcome) in enumerate(turns):
            work.observe_turn(family, "t", turn, generated, "" if hide else "tool", "", "" if hide else outcome)
            if index >= LEARN:
                guess = work.estimate("r", family, "t", generated, turn + 1)
                p50.append(pinball(total - generated, guess.p50, 0.5))
                p90.append(pinball(total - generated, guess.p90, 0.9))
                within.append(total - generated <= guess.p90)
        work.observe_end("r", family, "t", total)
    return [sum(rows) / len(rows) for rows in (p50, p90, within)]


def noise(seed):
    """Outcomes and groups that say nothing about what follows."""
    rng, episodes = random.Random(seed), []
    for index in range(LEARN + TEST):
        turns, total = [], 0
        for _ in range(rng.randint(1, 4)):
            total += int(rng.lognormvariate(3.0, 0.7)) + 1
            turns.append((total, rng.choice(["OK", "TOOL_ERROR", "TIMEOUT"])))
        episodes.append((f"g{index // 6}", turns, total + int(rng.lognormvariate(3.0, 0.7)) + 1))
    return episodes


def families(seed):
    """The length is the prompt's: six episodes of a group are alike, groups differ by a factor of up to 30."""
    rng, episodes = random.Random(seed), []
    for index in range(LEARN + TEST):
        if index % 6 == 0:
            middle = rng.lognormvariate(5.5, 1.0)
        total = int(middle * rng.lognormvariate(0.0, 0.15)) + 5
        episodes.append((f"g{index // 6}", [(4, "OK")], total))
    return episodes


@pytest.mark.parametrize("seed", [1, 2])
def test_outcomes_without_signal_do_not_raise_the_pinball_loss(seed):
    told, blind = losses(noise(seed)), losses(noise(seed), hide=True)
    assert told[0] <= 1.03 * blind[0], (seed, told, blind)
    assert told[1] <= 1.06 * blind[1], (seed, told, blind)


def test_siblings_lower_the_loss_where_they_are_alike_and_do_no_harm_where_not():
    told, alone = losses(families(3)), losses(families(3), lonely=True)
    assert told[0] < 0.75 * alone[0], (told, alone)
    told, alone = losses(noise(4)), losses(noise(4), lonely=True)
    assert told[0] < 1.04 * alone[0], (told, alone)


@pytest.mark.parametrize("make", [noise, families])
def test_nine_in_ten_end_within_p90(make):
    within = losses(make(5))[2]
    assert 0.83 <= within <= 0.98, within


def test_below_the_floor_a_layer_says_nothing():
    prior = RemainingWork().estimate("r", "x", "t", 40, 1)
    for count in range(1, int(estimator.FLOOR) + 3):
        work = RemainingWork()
        for i in range(count):
            work.observe_turn(f"g{i}", f"a{i}", 0, 40, "tool", "", "OK")
            work.observe_end("r", f"g{i}", f"a{i}", 50)
        work.observe_turn("x", "t", 0, 40, "tool", "", "OK")
        guess = work.estimate("r", "x", "t", 40, 1)
        if count < estimator.FLOOR:
            assert guess == prior
        if count > estimator.FLOOR:
            assert guess.p50 < 0.75 * prior.p50
