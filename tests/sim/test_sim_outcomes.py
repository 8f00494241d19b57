"""What outcomes of tool calls say about the tokens to come, and what the estimator makes of it."""

import statistics
from collections import defaultdict
from functools import cache

from services.scheduler.core.estimator import RemainingWork
from services.simulator import contrasts
from services.simulator.parametric import REPAIR
from services.simulator.policies.libra import PAYLOAD

BATCHES, LEARNT = 10, 6


@cache
def turns(family):
    """(batch, trajectory, turn, generated, returned, failures so far, remaining) at the end of each turn with a call."""
    found = []
    for batch in range(BATCHES):
        for episode in contrasts._family(family).batch(batch, 1):
            made = failures = 0
            for at, turn in enumerate(episode.turns[:-1]):
                made += turn.generated
                failures += turn.outcome != "ok"
                found.append((batch, episode, at, made, turn, failures, episode.generated - made))
    return found


def error_of_medians(family, key):
    """Mean absolute error of the medians of what remained at turns with the same key in the batches before."""
    learnt = defaultdict(list)
    errors = []
    for batch, _, at, made, _, failures, remaining in turns(family):
        cell = key(made.bit_length(), at, failures)
        if batch < LEARNT:
            learnt[cell].append(remaining)
        elif len(learnt[cell]) >= 8:
            errors.append(abs(statistics.median(learnt[cell]) - remaining))
    return statistics.fmean(errors)


def error_of_estimates(family, *, outcomes):
    """Mean absolute error of the estimator's p50, with outcomes or told that all went well."""
    remaining_work, errors, last = RemainingWork(), [], None
    for batch, episode, at, made, turn, _, remaining in turns(family):
        if last is not None and last is not episode:
            remaining_work.observe_end("run", last.group, last.id, last.generated)
        last = episode
        size = str(sum(turn.observation > bound for bound in PAYLOAD))
        outcome = turn.outcome if outcomes else "ok"
        remaining_work.observe_turn(episode.group, episode.id, at, made, turn.tool, size, outcome)
        if batch >= LEARNT:
            errors.append(abs(remaining_work.estimate("run", episode.group, episode.id, made, at + 1).p50 - remaining))
    return statistics.fmean(errors)


def by_progress(size, turn, failures):
    return size


def by_failures(size, turn, failures):
    return size, min(failures, 8)


def test_the_number_of_failures_says_what_remains_where_they_cause_it_and_nowhere_else():
    known, unknown = error_of_medians(REPAIR, by_failures), error_of_medians(REPAIR, by_progress)
    assert known < 0.97 * unknown
    assert error_of_medians(contrasts.SILENT, by_failures) > 0.99 * error_of_medians(contrasts.SILENT, by_progress)


def test_outcomes_that_say_nothing_cost_the_estimate_little():
    known = error_of_estimates(contrasts.SILENT, outcomes=True)
    assert known < 1.02 * error_of_estimates(contrasts.SILENT, outcomes=False)


def test_the_estimate_is_better_for_outcomes_that_cause_work():
    known = error_of_estimates(REPAIR, outcomes=True)
    assert known < 0.97 * error_of_estimates(REPAIR, outcomes=False)
