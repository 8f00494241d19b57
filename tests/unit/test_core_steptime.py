"""Demand and step times: closed forms where there are some, and what must hold whatever the numbers are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.costmodel import NEVER_S
from services.scheduler.core.demand import Demand, Tail, demand_of
from services.scheduler.core.rates import EngineRates
from services.scheduler.core.steptime import FILL, Problem
from tests.support.fleets import DEMANDS, demand, engine_rates

PLAIN = EngineRates(0.02, 0.0, 0.0, 1e9)


def one_class(tokens=1_000.0, tool_s=0.0, groups=4, samples=4, max_versions=1, **changes):
    return Demand((tokens,), (1.0,), (tokens,), (tool_s,), 0.0, groups, samples, max_versions, **changes)


def seconds(rates, given, counts, train_s=0.0):
    found = Problem(rates, given).solve(np.array([counts]), np.array([train_s]))
    return float(found.seconds[0])


def test_a_lone_sequence_takes_as_long_as_its_tokens_do():
    """One trajectory a step, K = 0: decoding, its tools, then training."""
    given_ = one_class(groups=1, samples=1, tool_s=5.0, max_versions=0, recompute=False)
    assert seconds([PLAIN], given_, [1], train_s=10.0) == pytest.approx(1_000 * 0.02 + 5.0 + 10.0, rel=1e-3)


def test_the_staleness_bound_gives_the_tail_k_plus_one_steps_less_the_training():
    given_ = one_class(groups=1, samples=1, max_versions=3, recompute=False)
    # T = (T_tail + T_train) / (K + 1), at least T_train
    assert seconds([PLAIN], given_, [1], train_s=2.0) == pytest.approx((20.0 + 2.0) / 4, rel=1e-3)
    assert seconds([PLAIN], given_, [1], train_s=9.0) == pytest.approx(9.0, rel=1e-3)


def test_the_kv_cache_bounds_the_rate():
    """Contexts of 500 on average, half a million tokens each step, room for 9 sequences after FILL."""
    rate = EngineRates(0.02, 0.0, 0.0, 5_000.0)
    given_ = one_class(groups=100, samples=5, max_versions=9, recompute=False)
    assert Problem([rate], given_).cap[0, 0] == pytest.approx(FILL * 5_000 / 500)
    rate_s = 9 / 0.02
    # batches come in one after the other: the last of them waits for most of a step
    assert seconds([rate], given_, [1]) == pytest.approx(500_000 / rate_s, rel=1e-3)
    assert seconds([rate], given_, [2]) == pytest.approx(500_000 / rate_s / 2, rel=1e-3)


def test_those_in_tool_calls_take_their_share_of_the_cache():
    rate = EngineRates(0.02, 0.0, 0.0, 5_000.0)
    busy = one_class(groups=100, samples=5, max_versions=9, recompute=False)
    waiting = one_class(groups=100, samples=5, max_versions=9, recompute=False, tool_s=20.0)
    # a token takes 0.02 s on the engine and 0.02 s in calls: half of the 9 run
    assert seconds([rate], waiting, [1]) == pytest.approx(2 * seconds([rate], busy, [1]), rel=1e-3)


def test_what_does_not_fit_the_cache_takes_for_ever():
    assert seconds([EngineRates(0.02, 0.0, 0.0, 900.0)], one_class(), [3]) == NEVER_S


def test_no_engine_or_no_training_takes_for_ever():
    assert seconds([PLAIN], one_class(), [0]) == NEVER_S
    assert seconds([PLAIN], one_class(), [1], train_s=NEVER_S) == NEVER_S


def test_the_found_time_is_where_it_just_holds():
    rates, given_ = list(engine_rates().values()), demand()
    problem = Problem(rates, given_)
    counts, train_s = np.array([[3, 2, 1]]), np.array([4.0])
    found = problem.solve(counts, train_s)
    step = float(found.seconds[0])
    ways = np.arange(len(problem.division.tokens))
    zero = np.zeros(len(ways), dtype=np.intp)
    assert problem._fits(np.full(len(ways), step), zero, ways, counts, train_s)[found.way[0]]
    assert not problem._fits(np.full(len(ways), step * 0.999), zero, ways, counts, train_s).any()


def test_a_slow_layout_is_given_up_and_a_good_one_is_not():
    problem = Problem(list(engine_rates(degrees=(1,)).values()), demand())
    counts, train_s = np.array([[2], [8], [4]]), np.full(3, 0.1)
    alone = [float(problem.solve(counts[i : i + 1], train_s[:1]).seconds[0]) for i in range(3)]
    together = problem.solve(counts, train_s).seconds
    assert together[1] == pytest.approx(alone[1], rel=3e-4)
    assert np.isinf(together[0])
    assert np.isinf(problem.solve(counts, train_s, known=alone[1] / 2).seconds).all()


@settings(max_examples=40, deadline=None)
@given(DEMANDS, st.integers(1, 3), st.floats(0.1, 200.0))
def test_more_engines_faster_ones_and_less_training_never_take_longer(given_, extra, train_s):
    rates = list(engine_rates().values())
    plain = seconds(rates, given_, [2, 2, 1], train_s)
    slack = 1 + 1e-3
    for at in range(3):
        counts = [2, 2, 1]
        counts[at] += extra
        assert seconds(rates, given_, counts, train_s) <= plain * slack
    assert seconds(rates, given_, [2, 2, 1], train_s / 2) <= plain * slack
    # all alike, or the division that was best would put contexts elsewhere
    faster = [replace(r, step_s=r.step_s / 2, sequence_s=r.sequence_s / 2, context_s=r.context_s / 2) for r in rates]
    assert seconds(faster, given_, [2, 2, 1], train_s) <= plain * slack
    roomier = [replace(r, kv_tokens=r.kv_tokens * 2) for r in rates]
    assert seconds(roomier, given_, [2, 2, 1], train_s) <= plain * slack


@settings(max_examples=40, deadline=None)
@given(DEMANDS, st.integers(2, 5))
def test_every_division_adds_up_to_the_step(given_, levels):
    divisions = given_.positions.divisions(levels)
    assert len(divisions.tokens) > 1
    np.testing.assert_allclose(divisions.tokens.sum(axis=1), given_.tokens, rtol=1e-9)
    work = (divisions.tokens * divisions.context).sum(axis=1)
    np.testing.assert_allclose(work, work[0], rtol=1e-9)
    np.testing.assert_allclose(divisions.tail.sum(axis=1), given_.longest_to_pass.tokens, rtol=1e-9)
    assert (divisions.tokens >= -1e-9).all()
    # what is computed anew grows with moves only
    least = given_.trained_tokens - given_.tokens - given_.prompt_tokens * (given_.sequences - given_.groups)
    assert ((divisions.prefill * divisions.tokens).sum(axis=1) >= least * (1 - 1e-6)).all()


def test_the_longest_go_to_the_fastest_level():
    """A wide engine beside slow ones: what it takes lies above a threshold, and the threshold is where it helps."""
    rates = engine_rates(degrees=(1, 4), penalty=0.1)
    ordered = sorted(rates.values(), key=lambda r: -r.step_s)
    problem = Problem(ordered, demand(groups=32, samples=16))
    counts, train_s = [8, 1], 1.0
    found = problem.solve(np.array([counts]), np.array([train_s]))
    slow, fast = problem.uses(counts, train_s, float(found.seconds[0]), int(found.way[0]))
    assert slow.above == 0.0
    assert fast.above > 0.0
    assert fast.seconds_per_token < slow.seconds_per_token
    assert slow.share + fast.share == pytest.approx(1.0)
    assert min(slow.concurrency_cap, fast.concurrency_cap) >= 1
    assert found.seconds[0] < seconds(ordered[:1], problem.demand, [8], train_s)


def test_foresight_never_hurts_where_moves_cost():
    rates = list(engine_rates().values())
    blind, seeing = (seconds(rates, demand(foresight=f, max_versions=0), [4, 1, 1], 1.0) for f in (0.0, 1.0))
    assert seeing <= blind * 1.001


def test_a_demand_of_trajectories_has_their_means_and_their_tail():
    rng = np.random.default_rng(3)
    generated = np.exp(rng.normal(7.0, 0.8, 4_000))
    contexts, tools = 300 + 1.7 * generated, generated / 50
    found = demand_of(
        generated, contexts, tools, np.ones(4_000), prompt_tokens=300.0, groups=10, samples=10, max_versions=1
    )
    assert found.tokens == pytest.approx(100 * generated.mean())
    assert found.trained_tokens == pytest.approx(100 * contexts.mean())
    top = np.sort(generated)[-40:]
    assert found.longest_to_pass.tokens == pytest.approx(top.mean(), rel=1e-6)
    assert found.longest_to_pass.tool_seconds == pytest.approx(top.mean() / 50, rel=1e-6)


def test_of_equal_lengths_the_tail_is_what_waits_for_tools_longest():
    tools = np.array([0.0] * 99 + [500.0])
    found = demand_of(
        np.full(100, 1_000.0), np.full(100, 1_500.0), tools, np.ones(100), prompt_tokens=0.0, groups=10, samples=10,
        max_versions=1,
    )  # fmt: skip
    assert found.longest_to_pass.tool_seconds == pytest.approx(500.0)


def test_lengths_grow_up_to_the_longest_context():
    plain = demand(max_context=20_000.0)
    grown = plain.scaled(3.0)
    assert max(grown.contexts) == pytest.approx(20_000.0)
    assert sum(grown.shares) == pytest.approx(1.0)
    assert plain.tokens < grown.tokens < 3 * plain.tokens
    assert grown.longest_to_pass.context <= 20_000.0 + 1e-6
    free = demand().scaled(3.0)
    assert free.tokens == pytest.approx(3 * demand().tokens)
    assert demand(max_context=20_000.0).scaled(0.5).tokens == pytest.approx(plain.tokens / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": (0.5,)}, "sum to 0.5"),
        ({"lengths": (0.0,)}, "ascending"),
        ({"contexts": (10.0,)}, "at least prompt_tokens"),
        ({"groups": 0}, "at least one group"),
        ({"shares": (0.5, 0.5)}, "one size"),
    ],
)
def test_a_demand_that_cannot_be_is_refused(changes, message):
    base = {
        "lengths": (100.0,), "shares": (1.0,), "contexts": (150.0,), "tool_seconds": (0.0,), "prompt_tokens": 50.0,
        "groups": 1, "samples": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        Demand(**(base | changes))


def test_an_observed_tail_is_passed_on():
    given_ = one_class(groups=1, samples=1, max_versions=0, recompute=False, tail=Tail(2_000.0, 2_000.0, 100.0))
    assert seconds([PLAIN], given_, [1]) == pytest.approx(2_000 * 0.02 + 100.0, rel=1e-3)
