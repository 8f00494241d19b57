"""The memory model of micro-batches: budgets that fit, learnt from peaks, smaller after a near miss."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import packing
from services.common.tokenbudget import GROWTH, MARGIN, MAX_MARGIN, NEAR_MISS, TokenBudget

GB = 1e9


def learnt(fixed=20 * GB, per_token=1e6, limit=80 * GB, sizes=(8_000, 16_000, 24_000, 12_000), **prior):
    known = TokenBudget(limit, **prior)
    for tokens in sizes * 5:
        known.observe(tokens, fixed + per_token * tokens)
    return known


def test_fixed_and_per_token_bytes_are_told_apart():
    fixed, slope = learnt().line()
    assert fixed == pytest.approx(20 * GB, rel=1e-3)
    assert slope == pytest.approx(1e6, rel=1e-3)


@given(
    st.floats(1 * GB, 50 * GB), st.floats(1e4, 5e6), st.lists(st.integers(500, 60_000), min_size=2, max_size=12),
    st.floats(55 * GB, 90 * GB),
)  # fmt: skip
def test_a_budget_is_the_largest_that_stays_below_the_limit_by_the_margin(fixed, per_token, sizes, limit):
    sizes = [s for s in sizes if fixed + per_token * s < NEAR_MISS * limit] or [1]
    known = TokenBudget(limit)
    for tokens in sizes * 4:
        known.observe(tokens, fixed + per_token * tokens)
    budget, allowed = known.budget(), (1 - known.margin) * limit
    if budget > 1:
        assert known.predict(budget) <= allowed * (1 + 1e-9)
    assert budget <= GROWTH * max(sizes)
    if budget + 1 <= GROWTH * max(sizes):
        assert known.predict(budget + 1) > allowed * (1 - 1e-9)
    # whoever has seen two sizes knows the line, and then it is the truth that stays below
    if max(sizes) > 1.5 * min(sizes) and budget > 1:
        assert fixed + per_token * budget <= limit


def test_before_any_report_the_prior_decides_and_without_one_the_caller():
    assert TokenBudget(80 * GB).budget(first=4_096) == 4_096
    known = TokenBudget(80 * GB, fixed_bytes=20 * GB, token_bytes=1e6)
    assert known.budget() == pytest.approx((80 * (1 - MARGIN) - 20) * GB / 1e6, rel=1e-6)


def test_a_wrong_prior_is_overruled_by_what_is_reported():
    known = learnt(fixed_bytes=5 * GB, token_bytes=4e5, sizes=(10_000, 30_000, 20_000))
    assert known.predict(25_000) == pytest.approx(45 * GB, rel=0.02)


def test_one_size_alone_is_taken_to_grow_with_the_tokens():
    known = TokenBudget(80 * GB, fixed_bytes=20 * GB)
    for _ in range(5):
        known.observe(10_000, 40 * GB)
    assert known.line() == (pytest.approx(20 * GB), pytest.approx(2e6))


def test_a_near_miss_widens_the_margin_at_once_and_clean_steps_take_it_back_slowly():
    known = learnt(sizes=(20_000, 40_000, 30_000))
    before = known.budget()
    known.observe(57_900, 20 * GB + 57_900 * 1e6)
    assert known.near_misses == 1
    assert known.margin == pytest.approx(2 * MARGIN, rel=0.05)
    after = known.budget()
    assert after < before
    budgets = []
    for _ in range(150):
        known.observe(30_000, 50 * GB)
        known.observe(20_000, 40 * GB)
        budgets.append(known.budget())
    assert budgets[2] < before
    assert budgets[-1] == pytest.approx(min(before, 45_000 * 1.5), rel=0.02)
    assert budgets == sorted(budgets)


def test_just_below_the_near_miss_nothing_is_widened():
    known = learnt(sizes=(20_000, 40_000))
    known.observe(50_000, (NEAR_MISS - 0.001) * 80 * GB)
    assert (known.near_misses, known.margin <= MARGIN + 1e-12) == (0, True)


def test_after_a_failed_allocation_less_is_tried_than_what_failed():
    known = learnt(sizes=(20_000, 40_000))
    before = known.budget()
    known.failed(before)
    assert known.budget() <= 0.75 * before
    for _ in range(8):
        known.failed(before)
    assert known.margin == MAX_MARGIN


def test_the_longest_sequence_is_never_refused():
    known = TokenBudget(80 * GB, fixed_bytes=20 * GB, token_bytes=1e6, least=70_000)
    assert known.budget() == 70_000


@pytest.mark.parametrize("seed", range(5))
def test_with_noisy_peaks_nothing_fails_once_three_sizes_were_seen(seed):
    """The true peak has noise of 2 % on top; packs fill 60 to 100 % of the budget."""
    rng = random.Random(seed)
    known = TokenBudget(80 * GB)
    tokens = 4_000
    for step in range(300):
        peak = (15 * GB + 1.1e6 * tokens) * rng.uniform(1.0, 1.02)
        if step > 3:
            assert peak < 80 * GB, (seed, step)
        known.observe(tokens, peak)
        tokens = int(known.budget(first=4_000) * rng.uniform(0.6, 1.0))
    assert known.budget() > 0.75 * (80 - 15) * GB / 1.1e6, "most of the memory is used"


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.floats(allow_nan=True, allow_infinity=True)), max_size=20))
def test_whatever_is_reported_a_budget_is_a_number_of_tokens(reports):
    known = TokenBudget(80 * GB, fixed_bytes=GB, token_bytes=1e5, least=10)
    for tokens, peak in reports:
        known.observe(tokens, peak)
    assert 10 <= known.budget() <= 2**53
    assert MARGIN <= known.margin <= MAX_MARGIN


def test_a_limit_below_what_is_fixed_is_refused():
    with pytest.raises(ValueError, match="expected 0 <= fixed < limit"):
        TokenBudget(10 * GB, fixed_bytes=20 * GB)


@given(st.lists(st.integers(0, 5_000), max_size=40), st.integers(1, 8))
def test_the_report_of_shards_says_what_their_imbalance_is(lengths, count):
    found = packing.report(lengths, count)
    assert len(found.tokens) == count
    assert sum(found.tokens) == sum(lengths)
    heaviest = max(sum(lengths[i] for i in part) for part in packing.shards(lengths, count))
    assert found.imbalance == pytest.approx(heaviest * count / sum(lengths) if any(lengths) else 1.0)
    assert 1.0 - 1e-9 <= found.excess < 2.0  # list scheduling (Graham, 1966)
    assert found.excess <= found.imbalance + 1e-9


def test_one_long_sequence_is_an_imbalance_that_nobody_can_avoid():
    found = packing.report([1_000, 10, 10, 10], 2)
    assert found.imbalance == pytest.approx(1_000 * 2 / 1_030)
    assert found.excess == 1.0
