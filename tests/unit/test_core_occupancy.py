"""Capacity from residence times: exact on exact data, sane without variation, never negative."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.occupancy import MIN_WINDOWS, Occupancy


def feed(known: Occupancy, load: float, w0: float, w1: float, seconds: float = 3.0) -> None:
    known.add(load * seconds, load / (w0 + w1 * load) * seconds, seconds)


def test_a_line_is_found_from_different_loads():
    known = Occupancy()
    for load in (2, 5, 9, 14, 20, 28, 6, 11):
        feed(known, load, 0.05, 0.002)
    capacity = known.capacity(32)
    assert capacity == pytest.approx(32 / (0.05 + 0.002 * 32), rel=0.05)


def test_an_engine_that_is_busy_with_few_is_not_taken_for_full():
    """Three sequences keep it busy all the time; thirty would yield nearly ten times as much."""
    known = Occupancy()
    for load in (1, 2, 3, 2, 1, 3):
        feed(known, load, 0.1, 0.0001)
    assert known.capacity(30) > 4 * 3 / (0.1 + 0.0003)


def test_without_variation_half_is_contention():
    known = Occupancy()
    for _ in range(5):
        feed(known, 10.0, 0.1, 0.0)
    assert known.capacity(10) == pytest.approx(100.0, rel=0.01)
    assert known.capacity(20) == pytest.approx(20 / 0.15, rel=0.05)


def test_no_answer_before_there_is_evidence():
    known = Occupancy()
    assert known.capacity(8) is None
    for _ in range(MIN_WINDOWS):
        known.add(0.0, 10.0, 3.0)
        known.add(1.0, math.nan, 3.0)
    assert known.capacity(8) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    windows=st.lists(st.tuples(st.floats(0.1, 200), st.floats(1, 5_000), st.floats(1, 10)), min_size=3, max_size=30),
    slots=st.integers(1, 256),
)
def test_capacity_is_positive_and_finite_and_grows_with_slots(windows, slots):
    known = Occupancy()
    for leased, tokens, seconds in windows:
        known.add(leased, tokens, seconds)
    capacity, more = known.capacity(slots), known.capacity(slots + 1)
    assert 0 < capacity < math.inf
    assert more >= capacity * (1 - 1e-9)


def test_one_that_slowed_down_keeps_the_shape_of_its_curve():
    known = Occupancy()
    assert known.slope_at(10.0, 0.05) is None
    for load in (2, 5, 9, 14, 20, 28, 6, 11):
        feed(known, load, 0.05, 0.002)
    assert known.slope_at(10.0, 0.07) == pytest.approx(0.002, rel=0.1)
    assert known.slope_at(10.0, 0.28) == pytest.approx(0.008, rel=0.1)
    assert known.slope_at(0.0, 0.28) is None
