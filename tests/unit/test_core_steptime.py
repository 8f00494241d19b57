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
    """Half a million tokens each step; room after FILL for what sequences have and half of what they still get."""
    rate = EngineRates(0.02, 0.0, 0.0, 5_000.0)
    given_ = one_class(groups=100, samples=5, max_versions=9, recompute=False)
    way = given_.positions
    cap = Problem([rate], given_).cap[:, 0]
    assert cap[:-1] == pytest.approx(FILL * 5_000 / (way.context + 0.5 * way.growth)[:-1])
    taken = float((way.alive * way.width) @ (0.02 / cap))
    assert seconds([rate], given_, [1]) == pytest.approx(taken, rel=1e-2)
    assert seconds([rate], given_, [2]) == pytest.approx(taken / 2, rel=1e-2)
    assert 500_000 * 0.02 / 9.0 < taken < 500_000 * 0.02 / 4.5, "between 500 and 1,000 tokens of each are kept"


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
    # who waits for room does not slow down the others, and only decoding waits: room is worth a little less than time
    roomier = [replace(r, kv_tokens=r.kv_tokens * 2) for r in rates]
    assert seconds(roomier, given_, [2, 2, 1], train_s) <= plain * 1.01


@settings(max_examples=40, deadline=None)
@given(DEMANDS)
def test_positions_add_up_to_the_step(given_):
    way = given_.positions
    assert way.edges[0] == 0.0
    assert (way.width > 0).all()
    np.testing.assert_allclose((way.alive * way.width).sum(), given_.tokens, rtol=1e-4)
    assert (np.diff(way.alive) <= 1e-9).all(), "fewer and fewer are left"
    assert way.alive[0] == pytest.approx(given_.sequences, rel=1e-6)
    # what is read at each position, over all tokens: half of each sequence on average, and its prompt
    work = sum(
        n * given_.sequences * g * (given_.prompt_tokens + (f - given_.prompt_tokens) / 2)
        for g, n, f in zip(given_.lengths, given_.shares, given_.contexts, strict=True)
    )
    assert (way.alive * way.width * way.context).sum() == pytest.approx(work, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(DEMANDS, st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any))
def test_engines_of_all_kinds_keep_one_pace_as_far_as_their_caches_allow(given_, counts):
    rates = list(engine_rates().values())
    problem, way = Problem(rates, given_), given_.positions
    pace = problem._pace(np.array([counts]), way.alive * (given_.max_versions + 1))
    for cell in np.flatnonzero(pace.able[0]).tolist():
        decoding = pace.seconds[0, cell] / (pace.seconds[0, cell] + way.tools[cell])
        even = []
        for kind, rate in enumerate(rates):
            running, cap = pace.running[0, cell, kind], problem.cap[cell, kind] * decoding
            assert running <= problem.cap[cell, kind] + 1e-9
            if counts[kind] and 1e-6 < running < cap * 0.99:
                beta = rate.sequence_s + rate.context_s * way.context[cell] + rate.prefill_s * way.prefill[cell]
                even.append(rate.step_s + beta * running)
        assert max(even, default=1.0) == pytest.approx(min(even, default=1.0), rel=1e-6)
        total = sum(n * r for n, r in zip(counts, pace.running[0, cell], strict=True))
        room = float(np.array(counts) @ problem.cap[cell])
        inside = min(way.alive[cell] * (given_.max_versions + 1), room)
        assert total == pytest.approx(inside * decoding, rel=0.05, abs=1e-3)


def test_the_last_ones_have_the_fastest_level_for_themselves():
    rates = engine_rates(degrees=(1, 4), penalty=0.1)
    ordered = sorted(rates.values(), key=lambda r: -r.step_s)
    given_ = demand(groups=32, samples=16)
    problem, counts, train_s = Problem(ordered, given_), [8, 1], 1.0
    found = problem.solve(np.array([counts]), np.array([train_s]))
    slow, fast = problem.uses(counts, float(found.seconds[0]))
    assert slow.above == 0.0
    assert 0.0 < fast.above < given_.lengths[-1]
    assert slow.share + fast.share == pytest.approx(1.0)
    assert min(slow.concurrency_cap, fast.concurrency_cap) >= 1
    assert slow.running > 0
    # four accelerators more, at the speed of one lone sequence on them
    assert found.seconds[0] < seconds(ordered[:1], given_, [8], train_s)
    last = problem._pace(np.array([counts]), np.full(len(given_.positions.alive), 1e-3))
    alone = ordered[1].decode_s(1.0, given_.positions.context[-1]) + ordered[1].prefill_s * given_.positions.prefill[-1]
    assert last.seconds[0, -1] == pytest.approx(alone)
    assert last.running[0, -1, 0] == 0


def test_batches_that_come_together_slow_one_another_down():
    """With ever more versions the tail has more steps to end in, and more company at the start."""
    slow = EngineRates(0.02, 1e-3, 0.0, 1e9)
    tails = []
    for bound in (0, 1, 3):
        given_ = one_class(groups=8, samples=8, max_versions=bound, recompute=False)
        tails.append(float(Problem([slow], given_).solve(np.array([[4]]), np.array([1.0])).tail_s[0]))
    # 64, 128 and 256 on four engines
    assert tails == pytest.approx([1_000 * (0.02 + 1e-3 * n) for n in (16, 32, 64)], rel=3e-2)


def test_weight_updates_compute_the_contexts_of_the_others_again():
    rate = EngineRates(0.02, 0.0, 0.0, 1e9, prefill_s=1e-4, pause_s=2.0)
    kept, again = (one_class(groups=4, samples=4, recompute=r) for r in (False, True))
    without, with_ = (
        float(Problem([rate], g).solve(np.array([[2]]), np.array([5.0])).tail_s[0]) for g in (kept, again)
    )
    # after 5 s 32 sequences stand at about token 250, on two engines
    assert with_ - without == pytest.approx(32 * 250 * 1e-4 / 2, rel=0.15)


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
